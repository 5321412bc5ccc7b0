"""A leaf that is loaded: what is stored, where it goes, and whether it is what a template has in its place."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding, SingleDeviceSharding

from shardkeep.loading.mismatches import Mismatch, wrong_kind, wrong_shape
from shardkeep.loading.moving import is_on_cpu, stays_numpy
from shardkeep.loading.request import LoadRequest
from shardkeep.loading.shardings import Place, check_layout, check_sharding, needed_regions
from shardkeep.model.arrays import DType, Region, is_prng_dtype, kind_of, kind_of_value
from shardkeep.model.leaves import UNREADABLE, NumpyArray, PrngKeys, StoredArray, StoredLeaf
from shardkeep.model.perprocess import PerProcess, PerProcessRows
from shardkeep.model.tree import Leaf
from shardkeep.model.values import show
from shardkeep.remap.expressions import DerivedArray
from shardkeep.remap.regions import regions_read

_SMALL = 1 << 20  # a piece up to this size is read as a whole, and its shards are cut in memory

Needed = Sequence[tuple[StoredArray, Sequence[Region]]]
_ANYWHERE = Place()


@dataclass(slots=True)
class Wanted:
    """A leaf to load: what is stored, where it goes, and what the caller gets."""

    stored: StoredLeaf
    place: Place = _ANYWHERE
    as_numpy: bool = False
    dtype: DType | None = None
    like: Any = None  # the template's plain value or 0-d array, where the other was saved
    shape: tuple[int, ...] | None = None  # the shape to reshape to
    process: int | None = None  # of a PerProcess leaf: whose value; None: all of them
    own: object = None  # the template's array, of which a derived one keeps a part

    def stays_on_host(self, leaf: StoredArray) -> bool:
        """Whether the caller gets a NumPy array, which is writable and therefore must not be a mapped file."""
        return self.as_numpy or stays_numpy(leaf.spec.dtype)

    def regions(self, leaf: StoredArray) -> Sequence[Region]:
        """The regions of the array that this process needs, each once."""
        if isinstance(leaf.origin, PerProcessRows) and self.process is not None:
            return [leaf.origin.region(self.process)]
        sharding = self.place.sharding
        if sharding is None or self.needs_whole(leaf):
            return [Region.whole(leaf.spec.shape)]
        return needed_regions(sharding, leaf.spec.shape)

    @property
    def needed(self) -> Needed:
        """The stored arrays that the leaf is made of, with the regions of them that this process needs."""
        leaf = self.stored
        if not isinstance(leaf, StoredArray):
            return []
        regions = self.regions(leaf)
        return regions_read(leaf.expression, regions) if isinstance(leaf, DerivedArray) else [(leaf, regions)]

    def needs_whole(self, leaf: StoredArray) -> bool:
        """Whether every process needs the whole array, whatever its devices hold of it."""
        if isinstance(self.place.sharding, SingleDeviceSharding) or self.shape is not None:
            return True
        # A small piece is read and checked as a whole anyway.
        return (len(leaf.pieces) == 1 and leaf.nbytes <= _SMALL) or self.stays_on_host(leaf)


class NumpyStruct(jax.ShapeDtypeStruct):
    """An abstract array in a template that is loaded as a NumPy array. `abstract` returns it for NumPy leaves."""

    __slots__ = ()


_NUMPY = (np.ndarray, NumpyStruct)


def as_template(stored: StoredLeaf, leaf: Leaf, request: LoadRequest) -> Wanted | Mismatch:
    """A saved leaf as the template wants it, or why it cannot be loaded so."""
    like = leaf.value
    if stored.processes is not None or isinstance(like, PerProcess):
        return _per_process_as_template(stored, leaf)
    is_array = hasattr(like, "shape") and hasattr(like, "dtype") and not isinstance(like, np.generic)
    if not isinstance(stored, StoredArray):
        return _plain_as_template(stored, leaf, is_array)
    if stored.origin.kind == UNREADABLE:
        return wrong_kind(leaf.path, f"data that cannot be read ({stored.unreadable})", f"a {type(like).__name__}")
    if not is_array:
        return _plain_as_template(stored, leaf, is_array)
    is_key = is_prng_dtype(like.dtype)
    was = stored.was
    impl = was.impl if isinstance(was, PrngKeys) else None
    shape, saved_shape = tuple(like.shape), stored.spec.shape if impl is None else stored.spec.shape[:-1]
    if is_key != (impl is not None) or (impl is not None and like.dtype != key_dtype(impl)):
        return wrong_kind(leaf.path, _described(stored), f"{like.dtype}{list(shape)}")
    if shape != saved_shape and (request.policy.strict_shapes or is_key or math.prod(shape) != math.prod(saved_shape)):
        return wrong_shape(leaf.path, saved_shape, shape)
    dtype = None if is_key else np.dtype(like.dtype)
    if dtype is not None and dtype != stored.spec.dtype and kind_of(dtype) != kind_of(stored.spec.dtype):
        return wrong_kind(leaf.path, stored.dtype, dtype.name)
    sharding = getattr(like, "sharding", None)
    place = _ANYWHERE
    if isinstance(sharding, Sharding) and getattr(like, "committed", True):
        checked = check_sharding(sharding, leaf.path, shape, request.mesh)
        place = Place(checked, explicit=True, layout=None if is_key or len(shape) < 2 else _layout_of(leaf))
    as_numpy = isinstance(like, _NUMPY)
    return Wanted(stored, place, as_numpy, dtype, shape=None if shape == saved_shape else shape)


def _layout_of(leaf: Leaf) -> Layout | None:
    """The layout of a template's array of two axes or more; None if it has none, or that of the device."""
    like = leaf.value
    found = getattr(like, "format", None)
    if not isinstance(found, Format) or found.layout is None:
        return None
    layout = check_layout(found.layout, leaf.key)
    # Most templates are arrays with the layout that they have anyway, which is known for a CPU.
    usual = layout is not None and layout.major_to_minor == tuple(range(len(like.shape)))
    return None if usual and is_on_cpu(like.sharding) else layout


def _per_process_as_template(stored: StoredLeaf, leaf: Leaf) -> Wanted | Mismatch:
    """A value that differs between processes, or may: as it was saved. Anything but a JAX array marks its place."""
    like = leaf.value
    if stored.processes is not None and hasattr(like, "dtype") and not isinstance(like, np.ndarray | np.generic):
        found = f"{like.dtype}{list(like.shape)}; pass PerProcess(None) in its place"
        return wrong_kind(leaf.path, "a PerProcess value", found)
    if isinstance(stored, StoredArray) and not isinstance(stored.was, PerProcessRows | NumpyArray):
        return wrong_kind(leaf.path, _described(stored), repr(like))
    return Wanted(stored, as_numpy=True)


@lru_cache(maxsize=16)
def key_dtype(impl: str) -> object:
    """The dtype of PRNG keys; None if JAX does not have the implementation. No key is made, which would compile."""
    try:
        make = partial(jax.random.key, impl=impl)
        return jax.eval_shape(make, 0).dtype  # pyright: ignore[reportUnknownMemberType]  (its parameters)
    except ValueError:
        return None


def _plain_as_template(stored: StoredLeaf, leaf: Leaf, is_array: bool) -> Wanted | Mismatch:
    """The saved value where the template or the checkpoint has a plain value, converted to what the template has."""
    if not isinstance(stored, StoredArray):
        if is_array and (tuple(leaf.value.shape) != () or not _same_kind(stored.value, leaf.value.dtype)):
            wanted = f"{leaf.value.dtype}{list(leaf.value.shape)}"
            return wrong_kind(leaf.path, f"the value {show(stored.value):.60}", wanted)
        return Wanted(stored, like=leaf.value if is_array else None)
    if stored.spec.shape != () or isinstance(stored.was, PrngKeys) or not _same_kind(leaf.value, stored.spec.dtype):
        return wrong_kind(leaf.path, _described(stored), f"{show(leaf.value):.60}")
    return Wanted(stored, as_numpy=True, like=leaf.value)


def _same_kind(number: object, dtype: Any) -> bool:
    return not is_prng_dtype(dtype) and kind_of_value(number) == kind_of(np.dtype(dtype)) != "other"


def _described(stored: StoredArray) -> str:
    if isinstance(stored.was, PrngKeys):
        return f"PRNG keys ({stored.was.impl})"
    return f"{stored.dtype}{list(stored.shape)}"
