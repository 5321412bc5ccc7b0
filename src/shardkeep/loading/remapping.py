"""What `remap=` and `missing=` add to a load: the changed tree, and values for what the checkpoint does not have."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

import jax
import numpy as np

from shardkeep.errors import MissingLeafError, TemplateMismatchError, counted
from shardkeep.loading.adapt import apply_function, cast_array
from shardkeep.loading.matching import Wanted, as_template
from shardkeep.loading.moving import move, on_host, stays_numpy, with_layout
from shardkeep.loading.request import Filler, LoadRequest
from shardkeep.loading.select import Choice, choose_places
from shardkeep.loading.shardings import Place
from shardkeep.model.arrays import Array, ArraySpec, DType, is_prng_dtype, kind_of
from shardkeep.model.keys import ByLooseKey
from shardkeep.model.leaves import UNSHARDED, StoredArray, StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.tree import Leaf, Path, flatten
from shardkeep.remap.changes import Remapped, remap_tree
from shardkeep.remap.expressions import Changed, DerivedArray, Filled, Shape, walk

log = logging.getLogger("shardkeep")

_SHOWN = 8  # keys that a message lists


def as_missing(missing: object) -> Literal["keep"] | Filler:
    """What to do about leaves that the checkpoint does not have, with a function for all of them at once."""
    if missing == "keep":
        return "keep"
    if isinstance(missing, FromTemplate):
        return missing
    if not callable(missing):
        raise ValueError(f'missing must be "error", "keep" or a function, not {missing!r}')
    return _EachLeaf(cast("Callable[[str, object], object]", missing))


@dataclass(frozen=True)
class _EachLeaf:
    """A function of the user's, called for each leaf."""

    function: Callable[[str, object], object]

    def __call__(self, leaves: Sequence[Leaf]) -> list[object]:
        return [self.function(leaf.key, leaf.value) for leaf in leaves]

    def __repr__(self) -> str:
        return "function"


@dataclass(frozen=True)
class FromTemplate:
    """Makes the values of some leaves as the function does that makes the whole template."""

    make: Filler

    def __call__(self, leaves: Sequence[Leaf]) -> Sequence[object]:
        return self.make(leaves)

    def __repr__(self) -> str:
        return "template"


def remapped(tree: Tree, request: LoadRequest) -> Remapped:
    """The tree that the rules of a request make of a saved one. `RemapError` if they cannot."""
    if request.template is None:
        found = remap_tree(tree, request.remap)
        found.refuse_kept()
        return found
    _, leaves = flatten(request.template)
    shapes = ByLooseKey((leaf.path, tuple(leaf.value.shape)) for leaf in leaves if hasattr(leaf.value, "shape"))

    def shape_at(path: Path) -> Shape | None:
        return shapes.get(path)

    return remap_tree(tree, request.remap, shape_at)


def settle(choice: Choice, request: LoadRequest) -> None:
    """Give leaves that the checkpoint does not have, or not completely, what the template or its function has for them.

    Raises:
        MissingLeafError: The template has no values, only shapes.
        TemplateMismatchError: A function has made something else than the template has.
    """
    owns = {n: leaf for n, leaf in choice.keeping.items() if not _is_abstract(leaf)}
    asked = {n: leaf for n, leaf in choice.lacking.items() if _is_asked_for(leaf, request)}
    asked |= {n: leaf for n, leaf in choice.keeping.items() if _is_abstract(leaf)}
    if not callable(request.missing):
        if asked:
            raise _nothing_to_keep(list(asked.values()))
    elif asked:
        made = request.missing(list(asked.values()))
        places = _places(asked, request)
        for (number, leaf), value in zip(asked.items(), made, strict=True):
            settled = _settled(leaf, value, places[number])
            if number in choice.keeping:
                owns[number] = Leaf(leaf.path, settled)
            else:
                choice.kept[number] = settled
    for number, leaf in owns.items():
        wanted = choice.wanted[number]
        assert wanted is not None
        wanted.own = leaf.value
        wanted.stored = _widened(wanted.stored, leaf)
    _log_kept(choice)


def _is_asked_for(leaf: Leaf, request: LoadRequest) -> bool:
    """Whether the value of a leaf has to be made. Plain values are kept as the template has them."""
    if not _is_array(leaf.value):
        return False
    return callable(request.missing) or _is_abstract(leaf)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_abstract(leaf: Leaf) -> bool:
    return _is_array(leaf.value) and not isinstance(leaf.value, jax.Array | np.ndarray | np.generic)


def _nothing_to_keep(leaves: Sequence[Leaf]) -> MissingLeafError:
    some = _some([leaf.key for leaf in leaves])
    return MissingLeafError(
        f"the template has only shapes, no values to keep, for {counted(len(leaves), 'leaf', 'leaves')}: {some}. "
        "Pass a template with arrays, or missing=function, which is called with the key and the abstract array"
    )


def _places(asked: dict[int, Leaf], request: LoadRequest) -> dict[int, Wanted]:
    """Where the values that are made go: as the template says, or the arguments of the load."""
    places: dict[int, Wanted] = {}
    for number, leaf in asked.items():
        like = leaf.value
        is_key = is_prng_dtype(like.dtype)
        dtype = np.dtype(np.uint32) if is_key else np.dtype(like.dtype)
        stored = StoredArray(leaf.path, ArraySpec(tuple(like.shape), dtype), (), UNSHARDED)
        sharding = getattr(like, "sharding", None)
        found = (
            Wanted(stored, Place(sharding, explicit=sharding is not None))
            if is_key
            else as_template(stored, leaf, request)
        )
        assert isinstance(found, Wanted)  # it has the template's own shape
        places[number] = found
    choose_places(list(places.values()), "", request)
    return places


def _settled(leaf: Leaf, value: object, place: Wanted) -> object:
    """A value that a function has made, checked, as the template wants it and where it belongs."""
    like = leaf.value
    found: jax.Array | Array = value if isinstance(value, jax.Array | np.ndarray) else np.asarray(value)
    same = found.dtype == like.dtype
    if not is_prng_dtype(like.dtype) and not is_prng_dtype(found.dtype):
        same = same or kind_of(np.dtype(found.dtype)) == kind_of(np.dtype(like.dtype)) != "other"
    if tuple(found.shape) != tuple(like.shape) or not same:
        raise TemplateMismatchError(
            f"missing=: the function returned {found.dtype}{list(found.shape)} for {leaf.key!r}, but the template has "
            f"{like.dtype}{list(like.shape)}"
        )
    if found.dtype != like.dtype:
        found = cast_array(found, np.dtype(like.dtype), leaf.key)
    if place.as_numpy or (not is_prng_dtype(like.dtype) and stays_numpy(np.dtype(like.dtype))):
        return on_host(found)
    if place.place.function is not None:
        return apply_function(place.place.function, move(found, None))
    return with_layout(move(found, place.place.sharding), place.place.layout)


def _widened(stored: StoredLeaf, leaf: Leaf) -> StoredLeaf:
    """A derived array that keeps values of the template, in a dtype that holds those exactly."""
    assert isinstance(stored, DerivedArray)
    wanted = np.dtype(leaf.value.dtype)
    if wanted == stored.spec.dtype:
        return stored
    if _holds(stored.spec.dtype, wanted):
        return stored
    if not _holds(wanted, stored.spec.dtype):
        raise TemplateMismatchError(
            f"leaf {leaf.key!r}: it was saved as {stored.dtype} and keeps values of the template, which are "
            f"{wanted.name}; neither dtype can represent all values of the other"
        )
    made = Changed(stored.expression, partial(_as_dtype, wanted), wanted)
    return replace(stored, spec=ArraySpec(stored.spec.shape, wanted), expression=made)


def _holds(dtype: DType, other: DType) -> bool:
    """Whether a dtype has all values of another one."""
    if other.itemsize > 2:
        return dtype.itemsize >= other.itemsize and bool(np.promote_types(dtype, other) == dtype)
    # NumPy does not know it of small floats and integers, which have few values.
    wide = np.dtype(np.float64 if kind_of(other) == "float" else np.int64)
    bits = np.arange(1 << 8 * other.itemsize, dtype=f"u{other.itemsize}")
    with np.errstate(all="ignore"):
        values: Array = bits.view(other).astype(wide)
        return bool(np.array_equal(values, values.astype(dtype).astype(wide), equal_nan=True))


def _as_dtype(dtype: DType, data: Array) -> Array:
    return data.astype(dtype)


def _log_kept(choice: Choice) -> None:
    """Log which values are not from the checkpoint."""
    whole = list(choice.lacking.values())
    nbytes = sum(_nbytes(leaf.value) for leaf in whole)
    keys = [leaf.key for leaf in whole]
    for number, leaf in choice.keeping.items():
        wanted = choice.wanted[number]
        assert wanted is not None
        assert isinstance(wanted.stored, DerivedArray)
        missing = [each for each in walk(wanted.stored.expression) if isinstance(each, Filled) and each.value is None]
        nbytes += sum(math.prod(each.shape) * each.dtype.itemsize for each in missing)
        keys.append(f"{leaf.key} (a part)")
    if keys:
        log.warning(
            "%s (%s bytes) %s taken from the template or missing=, not from the checkpoint: %s",
            counted(len(keys), "leaf", "leaves"),
            f"{nbytes:,}",
            "is" if len(keys) == 1 else "are",
            _some(keys),
        )


def _nbytes(value: object) -> int:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None or is_prng_dtype(dtype):
        return 0
    return math.prod(shape) * np.dtype(dtype).itemsize


def _some(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:_SHOWN])) + (f" and {len(keys) - _SHOWN:,} more" if len(keys) > _SHOWN else "")
