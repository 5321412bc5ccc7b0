"""What one rule does to one group of leaves, and the checks that rules share. Trees are leaves by path here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardkeep.errors import RemapError
from shardkeep.model.arrays import DType, kind_of, limits_of
from shardkeep.model.leaves import StoredArray, StoredLeaf
from shardkeep.model.tree import Path, name_leaf
from shardkeep.remap.expressions import Expression, Shape, StoredSource, Unsized
from shardkeep.remap.patterns import Match, Pattern, check_key, compiled, expand

Entry: TypeAlias = StoredLeaf | Expression  # a leaf as it is stored, or what rules have made
Entries: TypeAlias = Mapping[Path, Entry]

NO_SIZE = "its size comes from the template and is not known yet; pass size= to resize, or resize it last"


@dataclass(frozen=True)
class Replacement:
    """Leaves that a rule takes, and those that it puts in their place. With `keeps`, the taken ones stay as well."""

    takes: tuple[tuple[Path, Entry], ...]
    gives: tuple[tuple[Path, Entry], ...]
    keeps: bool = False

    def below(self, place: Path) -> "Replacement":
        """The same in a tree of which this one is the subtree at `place`."""
        takes = tuple(((*place, *path), entry) for path, entry in self.takes)
        return Replacement(takes, tuple(((*place, *path), entry) for path, entry in self.gives), self.keeps)

    @property
    def took(self) -> Path:
        """The path of the only leaf that it takes."""
        ((path, _),) = self.takes
        return path

    @property
    def gave(self) -> Path:
        """The path of the only leaf that it gives."""
        ((path, _),) = self.gives
        return path


def refuse(rule: object, key: str, problem: str) -> RemapError:
    """The error for a rule that cannot be applied to a leaf."""
    return RemapError(f"{rule}, leaf {key!r}: {problem}")


def pattern_of(rule: object, text: object, *keys: object, index: bool = False) -> Pattern:
    """The pattern of a rule, checked, with the keys that are made of its matches.

    Args:
        rule: The rule, for messages.
        text: The pattern.
        keys: What its matches are made into.
        index: Whether these may contain an index that the pattern does not have.
    """
    for each in (text, *keys):
        if not isinstance(each, str):
            raise RemapError(f"{rule}: patterns and keys are strings, not {each!r}")
    try:
        pattern = compiled(str(text))
        for key in keys:
            check_key(str(key), pattern, index=index or pattern.has_index)
    except ValueError as error:
        raise RemapError(f"{rule}: {error}") from None
    return pattern


def matches(pattern: Pattern, entries: Entries) -> list[tuple[Match, Path, Entry]]:
    """The leaves whose keys a pattern matches."""
    found = ((pattern.match(path), path, entry) for path, entry in entries.items())
    return [(match, path, entry) for match, path, entry in found if match is not None]


def new_path(rule: object, text: str, match: Match, index: int | None = None) -> Path:
    """The path of the leaf that a match is made into."""
    try:
        path = expand(text, match, index)
    except ValueError as error:
        raise refuse(rule, name_leaf(match.path), str(error)) from None
    if not all(path):
        raise refuse(rule, name_leaf(match.path), f"it would become {'/'.join(path)!r}, which has an empty name")
    return path


def array_of(rule: object, path: Path, entry: Entry) -> Expression:
    """A leaf as an array whose elements can be moved; `RemapError` for one that has none."""
    if isinstance(entry, Unsized):
        raise refuse(rule, name_leaf(path), NO_SIZE)
    if isinstance(entry, Expression):
        return entry
    if not isinstance(entry, StoredArray):
        raise refuse(rule, name_leaf(path), "it is a plain value, but this rule applies to arrays")
    if not entry.holds_numbers:
        problem = (
            f"it holds {entry.logical_dtype}, but this rule applies to arrays of numbers; it can be renamed or dropped"
        )
        raise refuse(rule, name_leaf(path), problem)
    return StoredSource(entry)


def axis_of(rule: object, path: Path, axis: int, rank: int) -> int:
    """An axis of an array of this rank, counted from the first one."""
    if not -rank <= axis < rank:
        raise refuse(rule, name_leaf(path), f"axis {axis} is out of range for an array of {rank} dimensions")
    return axis % rank


def check_fill(rule: object, path: Path, dtype: DType, fill: float) -> None:
    """`RemapError` if a dtype does not have a number. Floats may be rounded to it, but not cut to their range."""
    problem = f"{dtype.name} cannot hold {fill!r}"
    try:
        with np.errstate(all="ignore"):
            stored = np.array(fill).astype(dtype) if math.isnan(fill) else np.array(fill, dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise refuse(rule, name_leaf(path), f"{problem}: {error}") from None
    kind, value = kind_of(dtype), stored.item()
    if kind == "other":
        return
    if kind not in ("float", "complex") or math.isinf(fill):  # not all floats have an infinity
        same = value == fill
    elif math.isnan(fill):
        same = value != value
    else:
        limits = limits_of(dtype)
        same = float(limits.min) <= fill <= float(limits.max)
    if not same:
        raise refuse(rule, name_leaf(path), problem)


def form_of(entry: Entry) -> tuple[Shape, str]:
    """The shape and dtype of a leaf, those of a plain value being empty."""
    if isinstance(entry, Expression):
        return entry.shape, entry.dtype.name
    return (entry.logical_shape, entry.logical_dtype) if isinstance(entry, StoredArray) else ((), "")


def same_forms(rule: object, parts: Mapping[Path, Expression], axis: int | None = None) -> tuple[Expression, ...]:
    """Arrays of one dtype and shape, except along `axis`; `RemapError` that names one that differs."""
    (first, like), *rest = parts.items()
    for path, part in rest:
        same = len(part.shape) == len(like.shape) and all(
            a == b for i, (a, b) in enumerate(zip(part.shape, like.shape, strict=True)) if i != axis
        )
        if part.dtype != like.dtype or not same:
            raise refuse(
                rule,
                name_leaf(path),
                f"it is {part.dtype.name}{list(part.shape)}, but {name_leaf(first)!r} is "
                f"{like.dtype.name}{list(like.shape)}",
            )
    return tuple(parts.values())
