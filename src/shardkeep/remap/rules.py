"""Rules that change the tree of a checkpoint before it is loaded, as values.

Patterns are regular expressions that match the whole `/`-joined key of a leaf (`re.fullmatch`). In patterns and keys,
`{i}` stands for an index. Keys that leaves get may refer to groups of the pattern with `\\1` or `\\g<name>`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shardkeep.errors import RemapError
from shardkeep.model.arrays import DType
from shardkeep.model.tree import Path, name_leaf
from shardkeep.remap.expressions import (
    Called,
    Changed,
    Expression,
    Function,
    Joined,
    Reshaped,
    Shape,
    Sliced,
    Stacked,
    Transposed,
    Unsized,
    keeps_values,
    resized,
)
from shardkeep.remap.patterns import INDEX, has_index
from shardkeep.remap.steps import (
    NO_SIZE,
    Entries,
    Entry,
    Replacement,
    array_of,
    axis_of,
    check_fill,
    matches,
    new_path,
    pattern_of,
    refuse,
    same_forms,
)

Fill = float | str  # a number, "zeros" or "keep"


@dataclass(frozen=True, repr=False)
class Rule:
    """A change to the tree of a checkpoint, made by one of the functions of `shardkeep.remap`."""

    name: ClassVar[str] = ""

    def steps(self, entries: Entries) -> Iterator[Replacement]:
        """What the rule does to the leaves of a tree; nothing if it matches none. `RemapError` if it cannot."""
        raise NotImplementedError

    def carry(self, path: Path) -> Path | None:
        """Where the rule puts a position of the tree without a leaf; None if it drops it."""
        return path

    def __repr__(self) -> str:
        shown = [
            _shown(value) if field.default is dataclasses.MISSING else f"{field.name}={_shown(value)}"
            for field in dataclasses.fields(self)
            # The dtype float64 is equal to None.
            if (value := getattr(self, field.name)) is not field.default
            and (field.default is None or value != field.default)
        ]
        return f"remap.{self.name}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Rename(Rule):
    pattern: str
    key: str
    name: ClassVar[str] = "rename"

    def __post_init__(self) -> None:
        pattern_of(self, self.pattern, self.key)

    def steps(self, entries: Entries) -> Iterator[Replacement]:
        for match, path, entry in matches(pattern_of(self, self.pattern), entries):
            yield Replacement(((path, entry),), ((new_path(self, self.key, match), entry),))

    def carry(self, path: Path) -> Path | None:
        return _carried(self, path)


@dataclass(frozen=True, repr=False)
class Copy(Rule):
    pattern: str
    key: str
    name: ClassVar[str] = "copy"

    def __post_init__(self) -> None:
        pattern_of(self, self.pattern, self.key)

    def steps(self, entries: Entries) -> Iterator[Replacement]:
        for match, path, entry in matches(pattern_of(self, self.pattern), entries):
            if not isinstance(entry, Expression) and entry.processes is not None:
                raise refuse(self, name_leaf(path), "it is a PerProcess value, which can only be renamed or dropped")
            if isinstance(entry, Unsized):  # each copy could get another size
                raise refuse(self, name_leaf(path), NO_SIZE)
            yield Replacement(((path, entry),), ((new_path(self, self.key, match), entry),), keeps=True)


@dataclass(frozen=True, repr=False)
class Drop(Rule):
    pattern: str
    name: ClassVar[str] = "drop"

    def __post_init__(self) -> None:
        pattern_of(self, self.pattern)

    def steps(self, entries: Entries) -> Iterator[Replacement]:
        for _, path, entry in matches(pattern_of(self, self.pattern), entries):
            yield Replacement(((path, entry),), ())

    def carry(self, path: Path) -> Path | None:
        return None if pattern_of(self, self.pattern).match(path) else path


@dataclass(frozen=True, repr=False)
class Stack(Rule):
    pattern: str
    key: str
    axis: int = 0
    name: ClassVar[str] = "stack"

    def __post_init__(self) -> None:
        if not pattern_of(self, self.pattern, self.key).has_index:
            raise RemapError(f"{self}: the pattern needs {INDEX} where the index of each leaf is")
        if has_index(self.key):
            raise RemapError(f"{self}: the key cannot contain {INDEX}: all indices go into one stack")
        _check_int(self, axis=self.axis)

    def steps(self, entries: Entries) -> Iterator[Replacement]:
        groups: dict[Path, dict[int, tuple[Path, Entry]]] = {}
        for match, path, entry in matches(pattern_of(self, self.pattern), entries):
            group = groups.setdefault(new_path(self, self.key, match), {})
            index = match.index
            if index is None:
                raise refuse(self, name_leaf(path), f"the part of the pattern with {INDEX} does not match")
            if index in group:
                problem = f"{name_leaf(group[index][0])!r} has the same index and would go into the same stack"
                raise refuse(self, name_leaf(path), problem)
            group[index] = path, entry
        for path, group in groups.items():
            missing = next((i for i in range(len(group)) if i not in group), None)
            if missing is not None:
                found = ", ".join(map(str, sorted(group)[:12]))
                raise refuse(self, name_leaf(path), f"there is no leaf for index {missing}; the indices are {found}")
            takes = tuple(group[i] for i in range(len(group)))
            parts = same_forms(self, {at: array_of(self, at, entry) for at, entry in takes})
            axis = axis_of(self, path, self.axis, len(parts[0].shape) + 1)
            yield Replacement(takes, ((path, Stacked(parts, axis)),))

    def carry(self, path: Path) -> Path | None:
        return _carried(self, path)


@dataclass(frozen=True, repr=False)
class Unstack(Rule):
    pattern: str
    key: str
    axis: int = 0
    name: ClassVar[str] = "unstack"

    def __post_init__(self) -> None:
        pattern = pattern_of(self, self.pattern, self.key, index=True)
        if not has_index(self.key):
            raise RemapError(f"{self}: the key needs {INDEX} where the index of each leaf goes")
        if pattern.has_index:
            raise RemapError(
                rf"{self}: {INDEX} is the index along the axis, in the key only; write (\d+) in the pattern"
            )
        _check_int(self, axis=self.axis)

    def steps(self, entries: Entries) -> Iterator[Replacement]:
        for match, path, entry in matches(pattern_of(self, self.pattern), entries):
            array = array_of(self, path, entry)
            axis = axis_of(self, path, self.axis, len(array.shape))
            if not array.shape[axis]:
                raise refuse(self, name_leaf(path), f"axis {axis} of {list(array.shape)} is empty; drop it instead")
            gives = tuple(
                (new_path(self, self.key, match, number), Sliced(array, axis, number, 1, drop=True))
                for number in range(array.shape[axis])
            )
            yield Replacement(((path, entry),), gives)


@dataclass(frozen=True, repr=False)
class Split(Rule):
    pattern: str
    keys: tuple[str, ...]
    axis: int = -1
    sizes: tuple[int, ...] | None = None
    name: ClassVar[str] = "split"

    def __post_init__(self) -> None:
        pattern_of(self, self.pattern, *self.keys)
        _check_int(self, axis=self.axis)
        if self.sizes is not None and (len(self.sizes) != len(self.keys) or not all(map(_is_size, self.sizes))):
            raise RemapError(f"{self}: sizes needs a size for each of the {len(self.keys)} keys")
        if not self.keys:
            raise RemapError(f"{self}: there are no keys to split into")

    def steps(self, entries: Entries) -> Iterator[Replacement]:
        for match, path, entry in matches(pattern_of(self, self.pattern), entries):
            array = array_of(self, path, entry)
            axis, count = axis_of(self, path, self.axis, len(array.shape)), len(self.keys)
            extent = array.shape[axis]
            if self.sizes is None and extent % count:
                problem = f"axis {axis} of {list(array.shape)} cannot be split into {count} equal parts; pass sizes="
                raise refuse(self, name_leaf(path), problem)
            sizes = self.sizes or (extent // count,) * count
            if sum(sizes) != extent:
                problem = f"the sizes add up to {sum(sizes)}, but axis {axis} of {list(array.shape)} has {extent}"
                raise refuse(self, name_leaf(path), problem)
            starts = [sum(sizes[:i]) for i in range(count)]
            yield Replacement(
                ((path, entry),),
                tuple(
                    (new_path(self, key, match), Sliced(array, axis, start, size))
                    for key, start, size in zip(self.keys, starts, sizes, strict=True)
                ),
            )


@dataclass(frozen=True, repr=False)
class Fuse(Rule):
    patterns: tuple[str, ...]
    key: str
    axis: int = -1
    name: ClassVar[str] = "fuse"

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            pattern_of(self, pattern, self.key)
        _check_int(self, axis=self.axis)
        if not self.patterns:
            raise RemapError(f"{self}: there are no patterns of leaves to fuse")

    def steps(self, entries: Entries) -> Iterator[Replacement]:
        groups: dict[Path, dict[int, tuple[Path, Entry]]] = {}
        for number, pattern in enumerate(self.patterns):
            for match, path, entry in matches(pattern_of(self, pattern), entries):
                group = groups.setdefault(new_path(self, self.key, match), {})
                if number in group:
                    problem = f"{name_leaf(group[number][0])!r} also matches {pattern!r}, and both would form one part"
                    raise refuse(self, name_leaf(path), problem)
                group[number] = path, entry
        for path, group in groups.items():
            missing = next((p for number, p in enumerate(self.patterns) if number not in group), None)
            if missing is not None:
                raise refuse(self, name_leaf(path), f"no corresponding leaf matches {missing!r}")
            takes = tuple(group[number] for number in range(len(self.patterns)))
            parts = {at: array_of(self, at, entry) for at, entry in takes}
            if len(parts) < len(takes):
                raise refuse(self, name_leaf(takes[0][0]), "several patterns match it")
            axis = axis_of(self, takes[0][0], self.axis, len(parts[takes[0][0]].shape))
            yield Replacement(takes, ((path, Joined(same_forms(self, parts, axis), axis)),))


@dataclass(frozen=True, repr=False)
class OnEach(Rule):
    """A rule that changes each array that its pattern matches, and no key."""

    pattern: str

    def __post_init__(self) -> None:
        pattern_of(self, self.pattern)

    def steps(self, entries: Entries) -> Iterator[Replacement]:
        for _, path, entry in matches(pattern_of(self, self.pattern), entries):
            yield Replacement(((path, entry),), ((path, self.change(path, array_of(self, path, entry))),))

    def change(self, path: Path, array: Expression) -> Expression:
        """What becomes of an array."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Transpose(OnEach):
    axes: Shape
    name: ClassVar[str] = "transpose"

    def change(self, path: Path, array: Expression) -> Expression:
        rank = len(array.shape)
        axes = tuple(axis_of(self, path, axis, rank) for axis in self.axes)
        if sorted(axes) != list(range(rank)):
            raise refuse(
                self, name_leaf(path), f"{self.axes} is not a permutation of the {rank} axes of {list(array.shape)}"
            )
        return Transposed(array, axes)


@dataclass(frozen=True, repr=False)
class Reshape(OnEach):
    shape: Shape
    name: ClassVar[str] = "reshape"

    def change(self, path: Path, array: Expression) -> Expression:
        size, known = math.prod(array.shape), math.prod(n for n in self.shape if n != -1)
        free = self.shape.count(-1)
        if free > 1 or (free and (known == 0 or size % known)) or (not free and known != size):
            raise refuse(self, name_leaf(path), f"{list(array.shape)} cannot be reshaped to {list(self.shape)}")
        return Reshaped(array, tuple(size // known if n == -1 else n for n in self.shape))


@dataclass(frozen=True, repr=False)
class Resize(OnEach):
    axis: int = 0
    size: int | None = None
    fill: Fill = "zeros"
    name: ClassVar[str] = "resize"

    def __post_init__(self) -> None:
        OnEach.__post_init__(self)
        _check_int(self, axis=self.axis)
        if self.size is not None and not _is_size(self.size):
            raise RemapError(f"{self}: size must be a number of elements, not {self.size!r}")
        if not (self.fill in ("zeros", "keep") or (isinstance(self.fill, int | float) and self.fill is not True)):
            raise RemapError(f'{self}: fill must be "zeros", "keep" or a number, not {self.fill!r}')

    def change(self, path: Path, array: Expression) -> Expression:
        axis = axis_of(self, path, self.axis, len(array.shape))
        fill = {"zeros": 0, "keep": None}.get(self.fill) if isinstance(self.fill, str) else self.fill
        if fill is not None:
            check_fill(self, path, array.dtype, fill)
        if self.size is None:
            return Unsized(array, axis, fill)
        return resized(array, axis, self.size, fill)


@dataclass(frozen=True, repr=False)
class Apply(OnEach):
    function: Function
    elementwise: bool = False
    shape: Shape | None = None
    dtype: DType | None = None
    inverse: Function | None = None
    name: ClassVar[str] = "apply"

    def change(self, path: Path, array: Expression) -> Expression:
        if not self.elementwise:
            if keeps_values(array):
                problem = 'a function of whole arrays cannot follow a resize with fill="keep"; apply it before that'
                raise refuse(self, name_leaf(path), problem)
            shape = array.shape if self.shape is None else self.shape
            shown = f"{self}, leaf {name_leaf(path)!r}"
            return Called(array, self.function, shape, self.dtype or array.dtype, shown)
        dtype = self.dtype
        if dtype is None:
            probe = np.zeros((0,) * max(len(array.shape), 1), array.dtype)
            try:
                dtype = np.asarray(self.function(probe)).dtype
            except Exception as error:
                problem = f"the function fails on an empty array ({error!r}); pass dtype=, the dtype of its result"
                raise refuse(self, name_leaf(path), problem) from error
        return Changed(array, self.function, dtype)


@dataclass(frozen=True, repr=False)
class Within(Rule):
    pattern: str
    rules: tuple[Rule, ...]
    name: ClassVar[str] = "within"

    def __post_init__(self) -> None:
        pattern_of(self, self.pattern)

    def places(self, paths: Sequence[Path]) -> list[Path]:
        """The outermost places that it matches."""
        pattern = pattern_of(self, self.pattern)
        known: dict[Path, bool] = {}
        found: dict[Path, None] = {}
        for path in paths:
            for end in range(len(path)):
                place = path[:end]
                if place not in known:
                    known[place] = pattern.match(place) is not None
                if known[place]:
                    found[place] = None
                    break
        return list(found)


def _shown(value: object) -> str:
    """A value as it is written. Functions have their names, which are the same in every process, unlike addresses."""
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return repr(value.name) if isinstance(value, np.dtype) else repr(value)


def _carried(rule: "Rename | Stack", path: Path) -> Path:
    match = pattern_of(rule, rule.pattern).match(path)
    return path if match is None else new_path(rule, rule.key, match)


def _check_int(rule: Rule, **values: object) -> None:
    for name, value in values.items():
        if type(value) is not int:
            raise RemapError(f"{rule}: {name} must be an integer, not {value!r}")


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def as_rules(rules: object) -> tuple[Rule, ...]:
    """Rules as a caller passes them: one, or a sequence of them, also of sequences. `RemapError` for anything else."""
    if isinstance(rules, Rule):
        return (rules,)
    if rules is None:
        return ()
    if isinstance(rules, str | bytes | Mapping) or not isinstance(rules, Sequence):
        raise RemapError(f"remap must be a list of rules from shardkeep.remap, not {rules!r:.200}")
    found: list[Rule] = []
    for rule in rules:
        if rule is None:
            raise RemapError("remap must be a list of rules from shardkeep.remap, and one of them is None")
        found += as_rules(rule)
    return tuple(found)
