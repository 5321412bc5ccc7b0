"""Which leaves a load reads, and what each is to become: all of them, those that match, or those of a template."""

import difflib
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from shardkeep.arrays import kind_of, kind_of_value
from shardkeep.errors import MissingLeafError, TemplateMismatchError, counted
from shardkeep.manifest import StoredLeaf, Tree
from shardkeep.sharding import Place, Rules, ShapedLeaf, check_sharding, resolve_shardings
from shardkeep.staging import is_prng_dtype
from shardkeep.tree import Leaf, Path, Skeleton, flatten
from shardkeep.values import show
from shardkeep.workers import collector

log = logging.getLogger("shardkeep")

_SHOWN = 20


@dataclass(frozen=True)
class Request:
    """What a caller asks of a load, every argument already understood."""

    template: Any = None
    prefix: str | None = None
    include: re.Pattern[str] | None = None
    mesh: Mesh | None = None
    rules: Rules | None = None
    shardings: Any = None
    dtype: np.dtype[Any] | None = None
    verify: bool = True
    mapped: bool = True
    strict_shapes: bool = True
    strict_rules: bool = False
    follow_saved: bool = True  # on a mesh without rules: the layout the array was saved with
    prefix_first: bool = False  # rules are matched with keys that begin with the prefix
    all_jax: bool = False  # NumPy leaves become JAX arrays too
    in_flight: int | None = None  # arrays read at once
    verbose: bool = False  # show a progress bar
    read_once: bool = False  # of several processes only the first reads, and sends the others what it read
    check: Callable[[StoredLeaf, Any], None] | None = None  # sees each array before anyone else
    callback: Callable[[Any, StoredLeaf], Any] | None = None  # gets each array once it is placed, in saved order


@dataclass(slots=True)
class Wanted:
    """A leaf to be loaded: what is stored, where it goes, and what the caller wants it to be."""

    stored: StoredLeaf
    place: Place = field(default_factory=Place)
    as_numpy: bool = False
    dtype: np.dtype[Any] | None = None
    like: Any = None  # a template's plain value or 0-d array, where the other was saved
    shape: tuple[int, ...] | None = None  # to be reshaped to


@dataclass(frozen=True, slots=True)
class Choice:
    """The structure to rebuild and its leaves: to be loaded, or (by number) kept from the template."""

    skeleton: Skeleton
    wanted: list[Wanted | None]
    kept: dict[int, Any]


@collector.paused()
def choose(tree: Tree, prefix: str, request: Request) -> Choice:
    """The leaves to read, each with its place."""
    by = _choose_by_name if request.template is None else _choose_by_template
    choice = by(tree, request)
    _place([w for w in choice.wanted if w is not None and w.stored.spec is not None], prefix, request)
    return choice


def _choose_by_name(tree: Tree, request: Request) -> Choice:
    def want(leaf: StoredLeaf) -> Wanted:
        return Wanted(leaf, as_numpy=leaf.kind == "numpy" and not request.all_jax, dtype=request.dtype)

    if request.include is None:
        return Choice(tree.skeleton, [want(leaf) for leaf in tree.leaves], {})
    keep = [request.include.search("/".join(leaf.path)) is not None for leaf in tree.leaves]
    if not any(keep):
        some = ", ".join("/".join(leaf.path) for leaf in tree.leaves[:5])
        raise MissingLeafError(f"include={request.include.pattern!r} matches no leaf; keys are like {some or '(none)'}")
    wanted = [want(leaf) for leaf, kept in zip(tree.leaves, keep, strict=True) if kept]
    return Choice(tree.skeleton.prune(keep), list(wanted), {})


def _choose_by_template(tree: Tree, request: Request) -> Choice:
    skeleton, leaves = flatten(request.template)
    find = _Finder(tree.leaves)
    choice = Choice(skeleton, [], {})
    missing: list[str] = []
    wrong: list[str] = []
    for leaf in leaves:
        if request.include is not None and not request.include.search("/".join(leaf.path)):
            _keep(choice, leaf)
            continue
        stored = find(leaf.path)
        try:
            if stored is None:
                raise TemplateMismatchError(f"{leaf.key}: not in the checkpoint")
            choice.wanted.append(_as_template(stored, leaf, request))
        except TemplateMismatchError as error:
            if not request.strict_shapes and not _is_abstract(leaf.value):
                log.warning("shardkeep: %s; the template's value is used", error)
                _keep(choice, leaf)
            elif stored is None:
                missing.append(leaf.key)
            else:
                wrong.append(str(error))
    if missing or wrong:
        raise _mismatch(tree, missing, wrong)
    return choice


def _keep(choice: Choice, leaf: Leaf) -> None:
    choice.kept[len(choice.wanted)] = leaf.value
    choice.wanted.append(None)


def _is_abstract(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "__array__")


class _Finder:
    """Saved leaves by path; a flat dotted template finds nested leaves too, where that is unambiguous."""

    def __init__(self, leaves: Sequence[StoredLeaf]) -> None:
        self._exact = {leaf.path: leaf for leaf in leaves}
        self._dotted: dict[str, StoredLeaf | None] = {}
        for leaf in leaves:
            name = ".".join(leaf.path)
            self._dotted[name] = None if name in self._dotted else leaf

    def __call__(self, path: Path) -> StoredLeaf | None:
        return self._exact.get(path) or self._dotted.get(".".join(path))


def _mismatch(tree: Tree, missing: list[str], wrong: list[str]) -> MissingLeafError | TemplateMismatchError:
    count = len(missing) + len(wrong)
    what = counted(count, "leaf", "leaves")
    lines = [f"{what} of the template {'does' if count == 1 else 'do'} not fit the checkpoint:"]
    known = [leaf.key for leaf in tree.leaves]
    for key in missing:
        near = difflib.get_close_matches(key, known, 1) if len(missing) <= _SHOWN and len(known) < 5000 else []
        lines.append(
            f"  {key or '(the tree itself)'}: not in the checkpoint" + (f"; it has {near[0]!r}" if near else "")
        )
    lines += [f"  {text}" for text in wrong]
    return (MissingLeafError if missing else TemplateMismatchError)("\n".join(lines))


def _as_template(stored: StoredLeaf, leaf: Leaf, request: Request) -> Wanted:
    """A saved leaf as the template wants it; `TemplateMismatchError` where it cannot be had."""
    like = leaf.value
    is_array = hasattr(like, "shape") and hasattr(like, "dtype") and not isinstance(like, np.generic)
    if not is_array or stored.spec is None:
        return _plain_as_template(stored, leaf, is_array)
    is_key = is_prng_dtype(like.dtype)
    shape, saved_shape = tuple(like.shape), logical_shape(stored)
    if is_key != (stored.kind == "prng") or (is_key and like.dtype != _key_dtype(stored.extra["impl"])):
        raise TemplateMismatchError(f"{leaf.key}: saved {_named(stored)}, the template has {like.dtype}{list(shape)}")
    if shape != saved_shape and (request.strict_shapes or is_key or math.prod(shape) != math.prod(saved_shape)):
        raise TemplateMismatchError(f"{leaf.key}: saved shape {saved_shape}, the template has {shape}")
    dtype = None if is_key else np.dtype(like.dtype)
    if dtype is not None and dtype != stored.spec.dtype and kind_of(dtype) != kind_of(stored.spec.dtype):
        raise TemplateMismatchError(f"{leaf.key}: saved as {stored.dtype}, the template has {dtype.name}")
    sharding = getattr(like, "sharding", None)
    place = Place()
    if isinstance(sharding, Sharding) and getattr(like, "committed", True):
        place = Place(check_sharding(sharding, leaf.key, shape, request.mesh), explicit=True)
    return Wanted(stored, place, isinstance(like, np.ndarray), dtype, shape=None if shape == saved_shape else shape)


def _key_dtype(impl: str) -> Any:
    """The dtype of PRNG keys; None if this program's JAX has no such implementation."""
    try:
        return jax.random.key(0, impl=impl).dtype
    except ValueError:
        return None


def _plain_as_template(stored: StoredLeaf, leaf: Leaf, is_array: bool) -> Wanted:
    """Where the template or the checkpoint has a plain value: the saved value, as the template's kind of thing."""
    if stored.spec is None:
        if is_array and (tuple(leaf.value.shape) != () or not _same_kind(stored.value, leaf.value.dtype)):
            saved, found = show(stored.value), f"{leaf.value.dtype}{list(leaf.value.shape)}"
            raise TemplateMismatchError(f"{leaf.key}: saved the value {saved:.60}, the template has {found}")
        return Wanted(stored, like=leaf.value if is_array else None)
    if stored.spec.shape != () or stored.kind == "prng" or not _same_kind(leaf.value, stored.spec.dtype):
        raise TemplateMismatchError(f"{leaf.key}: saved {_named(stored)}, the template has {show(leaf.value):.60}")
    return Wanted(stored, as_numpy=True, like=leaf.value)


def _same_kind(number: Any, dtype: Any) -> bool:
    return not is_prng_dtype(dtype) and kind_of_value(number) == kind_of(np.dtype(dtype)) != "other"


def _named(stored: StoredLeaf) -> str:
    return (
        f"PRNG keys ({stored.extra['impl']})" if stored.kind == "prng" else f"{stored.dtype}{list(stored.shape or ())}"
    )


def logical_shape(stored: StoredLeaf) -> tuple[int, ...]:
    """The shape a user sees: of PRNG keys, not of their data."""
    assert stored.spec is not None
    return stored.spec.shape[:-1] if stored.kind == "prng" else stored.spec.shape


def _place(arrays: Sequence[Wanted], prefix: str, request: Request) -> None:
    """Give each array that has no place yet the one that rules, shardings or the mesh say.

    A NumPy array becomes a JAX array only where a rule or a sharding names it.
    """
    if request.mesh is None and not request.rules and request.shardings is None:
        return
    open_ = [w for w in arrays if not w.place.explicit and w.like is None]
    shaped = [
        ShapedLeaf(w.stored.path, w.shape or logical_shape(w.stored), w.stored.extra.get("sharding"), w.as_numpy)
        for w in open_
    ]
    places = resolve_shardings(
        shaped,
        mesh=request.mesh,
        rules=request.rules,
        shardings=request.shardings,
        strict=request.strict_rules,
        follow_saved=request.follow_saved,
        prefix=prefix,
        prefix_first=request.prefix_first,
    )
    for w, place in zip(open_, places, strict=True):
        if not w.as_numpy:
            w.place = place
        elif place.explicit and request.template is None:
            w.place, w.as_numpy = place, False
