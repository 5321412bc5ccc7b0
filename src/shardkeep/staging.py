"""The Snapshot: this process's shards in host memory, safe from whatever the training loop does next.

On CPU a shard is taken as a view: while the view lives, XLA leaves its buffer alone even if the array is donated
(a canary test watches that). On an accelerator it is a copy to the host. NumPy arrays, and JAX arrays that may alias
the program's memory, can be changed by anyone, so they are copied: at once for a save in the background, block by
block while writing for one in the foreground.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from shardkeep.arrays import ArraySpec, Region, common_slices, dtype_name
from shardkeep.buffers import shards_of
from shardkeep.donation import donations
from shardkeep.errors import ProcessError, UnsupportedLeafError, an, counted
from shardkeep.forks import refuse_without_jax
from shardkeep.memory import Array, Shard
from shardkeep.planning import LeafPlan
from shardkeep.processes import LEADER
from shardkeep.records import record
from shardkeep.sharing import share_out
from shardkeep.tree import Leaf, mention_once
from shardkeep.values import is_plain
from shardkeep.workers import Crew, collector

_SHOWN = 10
_SENT = 64 << 20  # how much a process sends to the others at a time
_REMEMBERED = 4096
_forms: "dict[tuple[Any, tuple[int, ...], Any], _Form]" = {}

Held = tuple[tuple[Region, ...], list[Array]]  # regions of an array, and the data of each


@record
class _Form:
    """What all arrays of one shape, type and sharding have in common."""

    spec: ArraySpec
    extra: Mapping[str, Any]
    regions: tuple[Region, ...]  # that this process holds, each once
    parts: tuple[int, ...] | None  # which of its shards they are; None: it has one device, or the same on all
    plain: bool  # on one device, of a type that NumPy knows
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The leaves as they will be recorded, and the shards they are made of. `memory`: lent to them by `donations`."""

    leaves: tuple[LeafPlan, ...]
    shards: tuple[Shard, ...]
    memory: Array | None = None

    @property
    def nbytes(self) -> int:
        return sum(shard.data.nbytes for shard in self.shards)


@collector.paused()
def take_snapshot(
    leaves: Sequence[Leaf],
    *,
    keep: Crew | None = None,
    watched: Sequence[jax.Array] = (),
    copy: bool = False,
    index: int = LEADER,
    size: int = 1,
    gathered: bool = False,
) -> Snapshot:
    """Every leaf in host memory. `keep`: the snapshot outlives the call, so this crew copies what could change.

    So it does with the arrays that are `watched` for donation, and with all of them if that is asked for (`copy`).

    Of `size` processes each (`index`) takes only what it will write; or the leader all, if they are to be `gathered`.
    """
    refuse_unsupported(leaves, size)
    arrays = [_data_of(leaf.value) for leaf in leaves]
    forms = [_form_of(array) if isinstance(array, jax.Array) else None for array in arrays]
    weak: list[str] = []
    for leaf, array, form in zip(leaves, arrays, forms, strict=True):
        if form is not None:
            if not form.on_cpu:
                array.copy_to_host_async()  # all transfers under way before the first is waited for
            if array.aval.weak_type:
                weak.append(leaf.key)
    mention_once(weak, "%s: a weak type is not saved. Such arrays come back with their dtype, and promote others by it")
    plans: list[LeafPlan] = []
    shards: list[Shard] = []
    looked_at = {id(array) for array in watched}
    if size > 1:
        _stage_shares(leaves, arrays, forms, plans, shards, index, size, gathered)
    for leaf, array, form in zip(leaves, arrays, forms, strict=True) if size == 1 else ():
        if array is None:
            plans.append(LeafPlan(leaf.path, "value", value=leaf.value))
        elif form is None:
            plans.append(_stage_numpy(leaf, shards))
        else:
            plans.append(_stage_jax(leaf, array, form, shards))
            if id(leaf.value) in looked_at:
                first = plans[-1].first_held
                shards[first:] = [Shard(shard.data, stable=False) for shard in shards[first:]]
    if keep is None:
        return Snapshot(tuple(plans), tuple(shards))
    if copy:
        shards = [Shard(shard.data, stable=False) for shard in shards]
    return Snapshot(tuple(plans), *donations.settle(shards, keep))


def refuse_unsupported(leaves: Sequence[Leaf], size: int) -> None:
    """`UnsupportedLeafError` that names every leaf that cannot be saved."""
    if any(isinstance(leaf.value, jax.Array) for leaf in leaves):
        refuse_without_jax()
    problems = [(leaf.key, problem) for leaf in leaves if (problem := _problem(leaf.value, size))]
    if problems:
        raise _unsupported(problems)


def _stage_shares(
    leaves: Sequence[Leaf],
    arrays: Sequence[Any],
    forms: "Sequence[_Form | None]",
    plans: list[LeafPlan],
    shards: list[Shard],
    index: int,
    size: int,
    gathered: bool,
) -> None:
    """One process's part of a tree that several save together."""
    everyones = share_out(arrays, size, gathered=gathered)
    for leaf, array, form, shares in zip(leaves, arrays, forms, everyones, strict=True):
        if array is None:
            plans.append(LeafPlan(leaf.path, "value", value=leaf.value, common=True))
        elif form is None:
            plans.append(replace(_stage_numpy(leaf, shards), shares=shares, common=True))
        elif array.is_fully_addressable:
            plans.append(replace(_stage_jax(leaf, array, form, shards), shares=shares, common=True))
        elif gathered:
            whole = gather_whole(array)
            mine: Held = ((Region.whole(array.shape),), [whole]) if index == LEADER else ((), [])
            plans.append(replace(_stage_jax(leaf, array, form, shards, mine, own=True), shares=shares))
        else:
            wanted = [region for region, writer in shares if writer == index]
            plans.append(replace(_stage_jax(leaf, array, form, shards, _held(array, wanted)), shares=shares))


def gather_whole(array: jax.Array) -> Array:
    """All of an array that is spread over processes, in the memory of each; all of them call this.

    Each sends its share, as plain bytes: collectives of small floats change NaNs, and those of 2-bit integers memory.
    """
    index, size = jax.process_index(), jax.process_count()
    dtype = np.dtype(array.dtype)
    (shares,) = share_out([array], size, gathered=False)
    lengths = [sum(region.size for region, writer in shares if writer == i) * dtype.itemsize for i in range(size)]
    mine = np.zeros(max(lengths), np.uint8)
    held = _held(array, [region for region, writer in shares if writer == index])
    filled = 0
    for region, writer in shares:
        if writer == index and region.size:
            part = mine[filled : filled + region.size * dtype.itemsize].view(dtype).reshape(region.shape)
            filled += part.nbytes
            for there, data in zip(*held, strict=True):
                here, lying = common_slices(region, there)
                part[here] = data[lying]
    sent = [mine[start : start + _SENT] for start in range(0, mine.size, _SENT)]
    try:
        everyones = [np.asarray(multihost_utils.process_allgather(part)) for part in sent]
    except JaxRuntimeError as error:
        raise ProcessError(
            f"another process ended while arrays were gathered; nothing was written ({error})"
        ) from error
    rows = np.concatenate(everyones, axis=1) if everyones else np.zeros((size, 0), np.uint8)
    whole: Array = np.empty(array.shape, dtype)
    filled_of = [0] * size
    for region, writer in shares:
        start, end = filled_of[writer], filled_of[writer] + region.size * dtype.itemsize
        whole[region.slices] = np.ascontiguousarray(rows[writer, start:end]).view(dtype).reshape(region.shape)
        filled_of[writer] = end
    return whole


def _data_of(value: Any) -> Any:
    """The array behind a leaf: of PRNG keys their data, of a plain value None."""
    if isinstance(value, jax.Array):
        return jax.random.key_data(value) if _is_prng_key(value) else value
    return value if isinstance(value, np.ndarray) else None


def staged_sizes(leaves: Sequence[Leaf]) -> list[tuple[int, Any]]:
    """How much memory a snapshot of each array holds on to, and the array."""
    arrays = [leaf.value for leaf in leaves if isinstance(leaf.value, (jax.Array, np.ndarray))]
    return [(_local_nbytes(array), array) for array in arrays]


def _local_nbytes(array: Any) -> int:
    if isinstance(array, np.ndarray | Tracer) or _is_prng_key(array):
        return array.nbytes
    return _nbytes_here(array.sharding, array.shape, array.dtype)


@lru_cache(maxsize=_REMEMBERED)
def _nbytes_here(sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: Any) -> int:
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if sharding.is_fully_addressable:
        return nbytes
    shard = math.prod(sharding.shard_shape(shape)) * np.dtype(dtype).itemsize
    return min(nbytes, shard * len(sharding.addressable_devices))


def _stage_numpy(leaf: Leaf, shards: list[Shard]) -> LeafPlan:
    array: Array = leaf.value
    native = array.dtype.newbyteorder("=")
    extra = {} if array.dtype == native else {"order": array.dtype.str[0]}
    spec = ArraySpec(array.shape, native)
    if not array.flags.c_contiguous or extra:
        shards.append(Shard(np.array(array, dtype=native, order="C", copy=True), stable=True))
    else:
        shards.append(Shard(array, stable=False))
    held = (Region.whole(spec.shape),)
    return LeafPlan(leaf.path, "numpy", spec, extra=extra, held=held, first_held=len(shards) - 1)


def _stage_jax(
    leaf: Leaf, array: jax.Array, form: _Form, shards: list[Shard], mine: Held | None = None, own: bool = False
) -> LeafPlan:
    """`mine`: what is staged of the array, if not all that is here; `own`: in memory that was made for it."""
    kind, extra = "jax", form.extra
    if array is not leaf.value:
        kind, extra = "prng", {"impl": str(jax.random.key_impl(leaf.value))}
    first = len(shards)
    regions, data = (form.regions, _data(array, form)) if mine is None else mine
    shards += shards_of(array, data) if form.on_cpu and not own else [Shard(each, True) for each in data]
    return LeafPlan(leaf.path, kind, form.spec, None, extra, regions, first)


def _form_of(array: jax.Array) -> _Form:
    """Looking at the shards of each array takes longer than writing small ones: those of the first tell of all."""
    key = (array.sharding, array.shape, array.dtype)
    form = _forms.get(key)
    if form is None:
        if len(_forms) >= _REMEMBERED:
            _forms.clear()
        form = _forms[key] = _look_at(array)
    return form


def _look_at(array: jax.Array) -> _Form:
    spec = ArraySpec(array.shape, np.dtype(array.dtype))
    extra, on_cpu = _sharding_record(array.sharding), _is_on_cpu(array.sharding)
    if array.is_fully_replicated:
        plain = len(array.sharding.device_set) == 1 and spec.dtype.isbuiltin == 1 and on_cpu
        return _Form(spec, extra, (Region.whole(array.shape),), None, plain, on_cpu)
    found: dict[Region, int] = {}
    for number, shard in enumerate(array.addressable_shards):
        found.setdefault(Region.from_index(shard.index, array.shape), number)
    return _Form(spec, extra, tuple(found), tuple(found.values()), plain=False, on_cpu=on_cpu)


def _held(array: jax.Array, wanted: Sequence[Region]) -> Held:
    """Each region this process holds that has to do with what is wanted, once, and its data."""
    form = _form_of(array)
    if form.parts is None:
        return (form.regions, _data(array, form)) if wanted else ((), [])
    some = [i for i, r in enumerate(form.regions) if any(r == part or r.intersect(part) for part in wanted)]
    regions, parts = tuple(form.regions[i] for i in some), tuple(form.parts[i] for i in some)
    return regions, _data(array, replace(form, regions=regions, parts=parts))


def _data(array: jax.Array, form: _Form) -> list[Array]:
    """The regions of an array in host memory: as they lie there, if they do."""
    if form.plain:
        with suppress(BufferError):  # deleted meanwhile: then what follows says so
            return [_contiguous(np.asarray(memoryview(cast(Any, array))))]
    if form.parts is None:
        return [_contiguous(np.asarray(array.addressable_data(0)))]
    shards: Any = getattr(array, "_arrays", None)  # what `addressable_data` gives one by one, in half of the time
    if shards is None:
        shards = [array.addressable_data(number) for number in range(max(form.parts, default=-1) + 1)]
    return [_contiguous(np.asarray(shards[number])) for number in form.parts]


def _contiguous(data: Array) -> Array:
    return data if data.flags.c_contiguous else np.array(data, order="C", copy=True)


@lru_cache(maxsize=256)
def _sharding_record(sharding: jax.sharding.Sharding) -> Mapping[str, Any]:
    """How a named sharding laid an array out, for people and for loading onto a mesh with the same axis names."""
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.is_fully_replicated:
        return {}
    spec = [list(e) if isinstance(e, tuple) else e for e in cast(Any, sharding.spec)]
    if not all(isinstance(e, str | list | None) for e in spec):
        return {}
    return {"sharding": {"spec": spec, "mesh": dict(sharding.mesh.shape)}}


def _is_prng_key(array: jax.Array) -> bool:
    return is_prng_dtype(array.dtype)


@lru_cache(maxsize=256)
def is_prng_dtype(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


@lru_cache(maxsize=256)
def _is_on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


def _unsupported(problems: list[tuple[str, str]]) -> UnsupportedLeafError:
    """The error that names the leaves that cannot be saved."""
    shown = "\n".join(f"  {key or '(the tree itself)'}: {problem}" for key, problem in problems[:_SHOWN])
    more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return UnsupportedLeafError(
        f"{counted(len(problems), 'leaf', 'leaves')} cannot be saved; nothing was written:\n{shown}{more}"
    )


def _problem(value: Any, size: int) -> str | None:
    if isinstance(value, Tracer):
        return "a value inside jit, grad or vmap has no data; save outside of the transformed function"
    if isinstance(value, jax.Array):
        return _array_problem(value, size)
    if isinstance(value, np.ndarray | np.generic):
        if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
            return f"{an(type(value).__name__)} holds more than its data; save its parts as plain arrays"
        try:
            dtype_name(value.dtype)
        except TypeError:
            return f"NumPy dtype {value.dtype} has no stored form; convert it to numbers, or to a list of str or bytes"
        return None
    if is_plain(value):
        return None
    if isinstance(value, jax.ShapeDtypeStruct):
        return "an abstract array (ShapeDtypeStruct) has no data"
    if callable(value):
        return f"a function or class ({getattr(value, '__name__', value)!s:.60}) is not data; filter it out first"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{an(kind)} is neither an array nor a plain value; register it as a PyTree node or leave it out"


def _array_problem(array: jax.Array, size: int) -> str | None:
    if array.is_deleted():
        return "the array has been deleted or donated; save before its buffer is given away"
    if size == 1 and not array.is_fully_addressable:
        return "the array spans several processes, which can find each other only after jax.distributed.initialize()"
    if _is_prng_key(array):
        known = isinstance(jax.random.key_impl(array), str)
        return None if known else "a PRNG key of an unregistered implementation; save jax.random.key_data of it"
    try:
        dtype_name(np.dtype(array.dtype))
    except TypeError:
        return f"dtype {array.dtype} has no stored form"
    return None
