"""Loaded arrays from host memory to their devices, then functions, callbacks and casts."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, cast

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding

from shardkeep.errors import IntegrityError, ProcessError
from shardkeep.foreign.registry import open_array
from shardkeep.jaxapi import put_like
from shardkeep.loading.moving import move
from shardkeep.loading.plan import Fetch, plan_read
from shardkeep.loading.read import Source, Target, read_targets
from shardkeep.loading.select import Request, Wanted
from shardkeep.model.arrays import NUMPY_NAMES, Array, Region, kind_of
from shardkeep.model.leaves import ForeignArray, NumpyArray, Origin, PrngKeys, StoredArray
from shardkeep.model.manifest import Tree
from shardkeep.model.perprocess import PerProcessRows
from shardkeep.model.tree import name_leaf
from shardkeep.model.values import show
from shardkeep.processes.agreement import compare
from shardkeep.processes.operation import ALONE, Operation
from shardkeep.runtime.collector import collector
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.forks import refuse_without_jax
from shardkeep.runtime.memory import aligned_empty, budget
from shardkeep.runtime.progress import Bar, Progress
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.base import Store

log = logging.getLogger("shardkeep")

_SMALL = 1 << 20  # a piece up to this size is read as a whole, and its shards are cut in memory
_SENT = 64 << 20  # bytes sent to other processes at a time


def read_leaves(
    store: Store, tree: Tree, wanted: Sequence[Wanted], request: Request, operation: Operation = ALONE
) -> list[Any]:
    """The values of the leaves, in order. At most `in_flight` of them are read at once."""
    read_once = request.read_once and operation.size > 1
    step = request.in_flight or (1 if read_once else max(len(wanted), 1))
    values: list[Any] = []
    total = sum(w.stored.nbytes for w in wanted)
    if read_once:
        compare(operation, [f"leaf {w.stored.key}: wanted" for w in wanted])
    bar = Bar(f"loading {store.url}", total) if request.verbose else nullcontext(lambda _: None)
    with Scope(f"loading {store.url}") as scope, bar as progress:
        crew = scope.add(Crew(store.concurrency))
        for start in range(0, len(wanted), step):
            some = wanted[start : start + step]
            if read_once:
                whole = _read(store, tree, some, request, crew, progress, whole=True) if operation.leads else None
                targets = _send(some, whole, operation)
            else:
                targets = _read(store, tree, some, request, crew, progress)
            values += _finish(some, targets, request)
    _warn_numpy(wanted, values)
    return values


def _read(
    store: Store,
    tree: Tree,
    wanted: Sequence[Wanted],
    request: Request,
    crew: Crew,
    progress: Progress,
    whole: bool = False,
) -> list[Target | None]:
    """The checked data of each array in host memory; None for plain values. `whole` reads more than is needed here."""
    targets: list[Target] = []
    fetches: list[Fetch] = []
    slots: list[Target | None] = []
    with collector.paused():
        for w in wanted:
            leaf = w.stored
            if not isinstance(leaf, StoredArray):
                slots.append(None)
                continue
            regions = [Region.whole(leaf.spec.shape)] if whole else _regions(w, leaf)
            fetches += plan_read(len(targets), leaf, regions)
            targets.append(Target(leaf, regions, _stays_on_host(w, leaf), [None] * len(regions)))
            slots.append(targets[-1])
    crew.run(
        partial(_read_foreign, store, target) for target in targets if isinstance(target.leaf.origin, ForeignArray)
    )
    mapped = store.remote or (request.mmap and store.mappable)
    source = Source(store, tree.files, tree.compression, request.verify, mapped)
    read_targets(source, targets, fetches, budget.limit, crew, progress)
    return slots


def _read_foreign(store: Store, target: Target) -> None:
    reader = open_array(store, target.leaf)
    target.arrays[:] = [reader.read(region) for region in target.regions]


def _send(wanted: Sequence[Wanted], read: Sequence[Target | None] | None, operation: Operation) -> list[Target | None]:
    """The data that the leader has read, sent to every process. Each keeps the regions it needs."""
    operation.gather(None)
    operation.share()  # no process enters a collective before the data is read and all of them are ready
    targets: list[Target | None] = []
    for number, w in enumerate(wanted):
        leaf = w.stored
        if not isinstance(leaf, StoredArray):
            targets.append(None)
            continue
        mine = _array(read[number]) if read is not None else np.empty(leaf.spec.shape, leaf.spec.dtype)
        raw = np.ascontiguousarray(mine).reshape(-1).view(np.uint8)
        try:
            parts = [
                np.asarray(multihost_utils.broadcast_one_to_all(raw[start : start + _SENT]))
                for start in range(0, raw.size, _SENT)
            ]
        except JaxRuntimeError as error:
            raise ProcessError(
                f"another process ended while arrays were being sent to all processes ({error})"
            ) from error
        memory = aligned_empty(raw.size)
        for start, part in zip(range(0, raw.size, _SENT), parts, strict=True):
            memory[start : start + part.size] = part
        array = memory.view(leaf.spec.dtype).reshape(leaf.spec.shape)
        regions = _regions(w, leaf)
        targets.append(Target(leaf, regions, own=True, arrays=[array[region.slices] for region in regions]))
    return targets


def _stays_on_host(w: Wanted, leaf: StoredArray) -> bool:
    """Whether the caller gets a NumPy array, which is writable and therefore must not be a mapped file."""
    return w.as_numpy or stays_numpy(leaf.spec.dtype)


def _regions(w: Wanted, leaf: StoredArray) -> Sequence[Region]:
    """The regions of a leaf that this process needs, each once."""
    if isinstance(leaf.origin, PerProcessRows) and w.process is not None:
        return [leaf.origin.region(w.process)]
    shape = leaf.spec.shape
    sharding = w.place.sharding
    if sharding is None or isinstance(sharding, SingleDeviceSharding) or w.shape is not None or _stays_on_host(w, leaf):
        return [Region.whole(shape)]
    if len(leaf.pieces) == 1 and leaf.pieces[0].length <= _SMALL:  # it is read and checked as a whole anyway
        return [Region.whole(shape)]
    return _needed(sharding, shape)


@lru_cache(maxsize=1024)
def _needed(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Region, ...]:
    """The regions this process needs of an array of this shape. If they are all of its rows: one region."""
    indices = sharding.addressable_devices_indices_map(shape)
    regions = tuple(dict.fromkeys(Region.from_index(index, shape) for index in indices.values() if index is not None))
    rows = all(region.shape[1:] == shape[1:] for region in regions)
    return (Region.whole(shape),) if rows and sum(region.size for region in regions) == math.prod(shape) else regions


def _finish(wanted: Sequence[Wanted], targets: Sequence[Target | None], request: Request) -> list[Any]:
    """Put arrays on their devices, then do the remaining steps for each."""
    values = _onto_devices(wanted, targets)
    jax.block_until_ready([v for v in values if isinstance(v, jax.Array)])
    return [_adapt(w, value, request) for w, value in zip(wanted, values, strict=True)]


def _onto_devices(wanted: Sequence[Wanted], targets: Sequence[Target | None]) -> list[Any]:
    """Values of the leaves, with arrays on their devices. Arrays with the same form are placed together."""
    values: list[Any] = [None] * len(wanted)
    whole: dict[Any, list[int]] = {}
    alike: dict[Any, list[int]] = {}
    for number, (w, target) in enumerate(zip(wanted, targets, strict=True)):
        if target is None:
            values[number] = w.stored.value
        elif _stays_on_host(w, target.leaf):
            values[number] = _reshaped(_array(target), w)
        elif w.shape is not None:
            whole.setdefault(w.place.sharding, []).append(number)
        else:
            alike.setdefault((w.place.sharding, target.leaf.spec, len(target.regions)), []).append(number)
    if whole or alike:
        refuse_without_jax()
    for sharding, numbers in whole.items():
        arrays = [_reshaped(_array(targets[n]), wanted[n]) for n in numbers]
        for number, array in zip(numbers, _put_all(arrays, sharding), strict=True):
            values[number] = array
    for (sharding, _, _), numbers in alike.items():
        placed = _place_alike([cast(Target, targets[n]) for n in numbers], sharding)
        for number, array in zip(numbers, placed, strict=True):
            values[number] = array
    return values


def _place_alike(targets: Sequence[Target], sharding: Sharding | None) -> Sequence[jax.Array]:
    """Put arrays of one shape and dtype on the devices of one sharding.

    JAX's public functions place the first. The others use the internal function behind them with what is known from
    the first, which takes a quarter of the time; if this JAX does not have it, they are placed like the first.
    """
    one = sharding is None or isinstance(sharding, SingleDeviceSharding)

    def publicly(some: Sequence[Target]) -> Sequence[jax.Array]:
        if one:
            return _put_all([_array(target) for target in some], sharding)
        return [_assemble(target, cast(Any, sharding)) for target in some]

    (first,) = publicly(targets[:1])
    rest = targets[1:]
    if not rest:
        return [first]
    devices, pick = _parts(targets[0], first.sharding)
    more = put_like(first, devices, [pick(target) for target in rest])
    return [first, *(publicly(rest) if more is None else more)]


def _parts(like: Target, sharding: Sharding) -> tuple[list[Any], Callable[[Target], list[Any]]]:
    """The local devices of a sharding, and a function that gives their parts of a target with the same form."""
    shape = like.leaf.spec.shape
    indices: Any = sharding.addressable_devices_indices_map(shape)
    devices = list(indices)
    if len(like.regions) == 1 and like.regions[0].shape == shape:
        if len(devices) == 1:
            return devices, lambda target: [target.arrays[0]]
        return devices, lambda target: [_array(target)[index] for index in indices.values()]
    numbers = [list(like.regions).index(Region.from_index(index, shape)) for index in indices.values()]
    return devices, lambda target: [target.arrays[number] for number in numbers]


def _put_all(arrays: Sequence[Array], sharding: Sharding | None) -> Sequence[jax.Array]:
    """Put host arrays on their devices. Each process fills its own devices, without communication."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(list(arrays), sharding)
    return [jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i], dtype=a.dtype) for a in arrays]


def _array(target: Target | None) -> Array:
    assert target is not None
    array = target.arrays[0]
    assert array is not None
    return array


def _reshaped(array: Array, w: Wanted) -> Array:
    return array if w.shape is None else array.reshape(w.shape)


def _assemble(target: Target, sharding: Sharding) -> jax.Array:
    shape = target.leaf.spec.shape
    if len(target.regions) == 1 and target.regions[0].shape == shape:
        whole = _array(target)
        return jax.make_array_from_callback(shape, sharding, whole.__getitem__, dtype=whole.dtype)
    by_region: dict[Region, Any] = dict(zip(target.regions, target.arrays, strict=True))

    def data(index: Any) -> Any:
        return by_region[Region.from_index(index, shape)]

    return jax.make_array_from_callback(shape, sharding, data, dtype=target.leaf.spec.dtype)


def _adapt(w: Wanted, value: Any, request: Request) -> Any:
    """The last steps for one leaf: check, PRNG keys, function, callback, cast, byte order, kind of the template."""
    origin = w.stored.origin if isinstance(w.stored, StoredArray) else None
    if isinstance(origin, PerProcessRows):
        return _decode(w, origin, value)
    if origin is not None and request.check is not None:
        request.check(w.stored, value)
    if isinstance(origin, PrngKeys):
        value = _as_keys(value, origin.impl, w.stored.key)
    if w.place.function is not None:
        value = apply_function(w.place.function, value)
    if origin is not None and request.callback is not None:
        value = request.callback(value, w.stored)
    if w.dtype is not None and isinstance(value, jax.Array | np.ndarray) and not isinstance(origin, PrngKeys):
        value = cast_array(value, w.dtype, w.stored.key)
    if isinstance(value, np.ndarray):
        value = _settled(w, origin, value)
    return value if w.like is None else _like(w.like, value, w.stored.key)


def _decode(w: Wanted, rows: PerProcessRows, data: Array) -> Any:
    """What a `PerProcess` leaf holds: the value of one process, or the list of all."""
    key = name_leaf(w.stored.path)
    if w.process is not None:
        return rows.decode(w.process, data, key)
    return [rows.decode(i, data[rows.region(i).slices], key) for i in range(len(rows.lengths))]


def _as_keys(data: Any, impl: str, key: str) -> Any:
    try:
        return jax.random.wrap_key_data(data, impl=impl)
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"leaf {key!r} does not hold PRNG keys that this JAX can use: {error}") from error


def _settled(w: Wanted, origin: Origin | None, value: Array) -> Any:
    """A host array in its saved byte order, or on its devices if JAX can hold it after a cast."""
    if not w.as_numpy and not stays_numpy(value.dtype):
        return _put_all([value], w.place.sharding)[0]
    if isinstance(origin, NumpyArray) and origin.order is not None and w.dtype is None:
        return value.astype(value.dtype.newbyteorder(origin.order))
    return value


def apply_function(function: Callable[[Any], Any], array: Any) -> Any:
    """Apply a function from `shardings`. If it returns a `Sharding`, that is applied; else it returns the result."""
    result = function(array)
    if not isinstance(result, Sharding):
        return result
    stays = isinstance(array, np.ndarray) and stays_numpy(array.dtype)  # JAX would truncate it
    return array if stays else move(array, result)


def cast_array(array: Any, dtype: np.dtype[Any], key: str) -> Any:
    """Cast within one kind (float to float, integer to integer). `ValueError` if an integer does not fit."""
    if array.dtype == dtype or kind_of(np.dtype(array.dtype)) != kind_of(dtype):
        return array
    if kind_of(dtype) == "int" and array.size:
        # Each process checks its own shards, so that a failure is an error on all of them instead of a hang.
        spread = isinstance(array, jax.Array) and not array.is_fully_addressable
        for part in [shard.data for shard in array.addressable_shards] if spread else [array]:
            check_fits(int(part.min()), int(part.max()), dtype, key)
    if isinstance(array, jax.Array) and stays_numpy(dtype):
        log.warning(
            "leaf %r is a NumPy array because JAX cannot hold %s by default; set jax_enable_x64 to get a JAX array",
            key,
            dtype.name,
        )
        return np.asarray(array).astype(dtype)
    return array.astype(dtype)


def _like(like: Any, value: Any, key: str) -> Any:
    """A plain value as a 0-d array like the template's, or the reverse. `ValueError` if an integer does not fit."""
    if isinstance(like, np.generic):
        return cast_array(value, like.dtype, key)[()]
    if not hasattr(like, "dtype"):
        return type(like)(value.item())
    dtype = np.dtype(like.dtype)
    if kind_of(dtype) == "int":
        check_fits(int(value), int(value), dtype, key)
    array = np.array(value, dtype)
    return array if isinstance(like, np.ndarray) else _put_all([array], getattr(like, "sharding", None))[0]


def check_fits(low: int, high: int, dtype: np.dtype[Any], key: str) -> None:
    """`ValueError` unless an integer dtype can hold both numbers."""
    limits = jax.numpy.iinfo(dtype)
    if low < int(limits.min) or high > int(limits.max):
        raise ValueError(f"leaf {key!r} holds {show(low)} to {show(high)}, which does not fit {dtype.name}")


def stays_numpy(dtype: np.dtype[Any]) -> bool:
    """Whether JAX, as it is configured now, cannot hold arrays of this dtype without changing them."""
    if dtype in _WIDE:
        return not cast(Any, jax.config).jax_enable_x64
    return not _is_known_to_jax(dtype)


_WIDE = frozenset(np.dtype(name) for name in ("int64", "uint64", "float64", "complex128"))


@lru_cache(maxsize=64)
def _is_known_to_jax(dtype: np.dtype[Any]) -> bool:
    if dtype.kind in "mM" or dtype.name in NUMPY_NAMES:
        return dtype.kind not in "mM"
    try:
        jax.device_put(np.zeros(1, dtype)).block_until_ready()
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _warn_numpy(wanted: Sequence[Wanted], values: Sequence[Any]) -> None:
    arrays = [(w, v) for w, v in zip(wanted, values, strict=True) if isinstance(v, np.ndarray) and not w.as_numpy]
    keys = [w.stored.key for w, v in arrays if w.like is None and stays_numpy(v.dtype)]
    if keys:
        log.warning(
            "%s loaded as NumPy, unchanged, because JAX cannot hold the dtype: %s%s. Set jax_enable_x64 for 64 bits",
            "1 array is" if len(keys) == 1 else f"{len(keys):,} arrays are",
            ", ".join(map(repr, keys[:5])),
            ", …" if len(keys) > 5 else "",
        )
