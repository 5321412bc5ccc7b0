"""Casts in host memory, before a transfer: to a smaller dtype, so that fewer bytes go to the devices."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from shardkeep.loading.adapt import check_fits
from shardkeep.loading.matching import Wanted
from shardkeep.loading.moving import is_on_cpu, stays_numpy
from shardkeep.loading.plan import Destination
from shardkeep.loading.request import LoadRequest
from shardkeep.model.arrays import Array, DType, kind_of
from shardkeep.model.leaves import PrngKeys, StoredArray
from shardkeep.model.perprocess import PerProcessRows
from shardkeep.runtime.crew import Crew, Task
from shardkeep.runtime.hostmemory import Slabs

_STEP = 4 << 20  # elements that one task casts

_FLOAT8 = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
# Casts of floats that give the same bits with NumPy as with JAX on a CPU, for every value. Those from float64 do not
# (XLA rounds twice, and flushes small numbers to zero), nor do those that treat the payload of NaNs in another way.
_EXACT = frozenset(
    (
        ("float32", "bfloat16"),
        ("float32", "float16"),  # with NaNs as `_cast` makes them
        ("float32", "float8_e5m2"),
        *((source, target) for source in ("float32", "float16", "bfloat16") for target in _FLOAT8),
    )
)


def cast_before(w: Wanted, request: LoadRequest) -> DType | None:
    """The dtype that a leaf is cast to in host memory, before it goes to devices that copy it; None if it is not.

    A function or callback of the caller's sees the array as it was saved, and a larger dtype would only take longer to
    transfer. Both are cast on the devices.
    """
    leaf, target = w.stored, w.dtype
    if target is None or not isinstance(leaf, StoredArray) or isinstance(leaf.was, PrngKeys):
        return None
    source = leaf.spec.dtype
    if source == target or kind_of(source) != kind_of(target) or w.place.function or request.policy.treat:
        return None
    if stays_numpy(source):  # it can only be cast in host memory
        return None if stays_numpy(target) else target
    if kind_of(source) == "int":
        return target if target.itemsize <= source.itemsize and not stays_numpy(target) else None
    return target if (source.name, target.name) in _EXACT else None


def sent_to_devices(wanted: Sequence[Wanted], request: LoadRequest) -> dict[int, Wanted]:
    """The leaves, by number, that become arrays on devices that copy them, and not in the memory they are read into."""
    places = {w.place.sharding for w in wanted if isinstance(w.stored, StoredArray) and not w.as_numpy}
    if all(map(is_on_cpu, places)):  # thousands of leaves share a few
        return {}
    return {number: w for number, w in enumerate(wanted) if _is_sent(w, request)}


def _is_sent(w: Wanted, request: LoadRequest) -> bool:
    leaf = w.stored
    if not isinstance(leaf, StoredArray) or w.as_numpy or isinstance(leaf.origin, PerProcessRows):
        return False
    if stays_numpy(leaf.spec.dtype) and cast_before(w, request) is None:
        return False
    return not is_on_cpu(w.place.sharding)


def cast_destinations(destinations: Sequence[Destination], crew: Crew) -> None:
    """Cast the arrays of destinations that have a dtype to be cast to. `ValueError` if an integer does not fit."""
    casts = [(destination, dtype) for destination in destinations if (dtype := destination.cast) is not None]
    crew.run([partial(_check, destination, dtype) for destination, dtype in casts if kind_of(dtype) == "int"])
    slabs = Slabs(region.size * dtype.itemsize for destination, dtype in casts for region in destination.regions)
    tasks: list[Task] = []
    for destination, dtype in casts:
        for number, source in enumerate(destination.arrays):
            assert source is not None
            result = slabs.take(source.size * dtype.itemsize).view(dtype).reshape(source.shape)
            destination.arrays[number] = result
            flat, filled = source.reshape(-1), result.reshape(-1)
            for start in range(0, flat.size, _STEP):
                tasks.append(partial(_cast, flat[start : start + _STEP], filled[start : start + _STEP]))
    crew.run(tasks)


def _check(destination: Destination, dtype: DType) -> None:
    for array in destination.arrays:
        if array is not None and array.size:
            check_fits(int(array.min()), int(array.max()), dtype, destination.leaf.key)


def _cast(source: Array, result: Array) -> None:
    with np.errstate(all="ignore"):
        result[...] = source.astype(result.dtype)
    if (source.dtype.name, result.dtype.name) == ("float32", "float16"):
        nan = np.isnan(source)
        if nan.any():  # NumPy keeps them signaling, and changes a payload that would become 0
            raw = source[nan].view(np.uint32)
            result.view(np.uint16)[nan] = raw >> 16 & 0x8000 | 0x7E00 | raw >> 13 & 0x03FF
