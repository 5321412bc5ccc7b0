"""The Snapshot: this process's shards in host memory, unaffected by what the training loop does next.

On CPU a shard is a view: as long as the view exists, XLA does not reuse its buffer, even if the array is donated
(a canary test checks that). On an accelerator it is a copy on the host. NumPy arrays, and JAX arrays that may alias
the program's memory, can be changed by the program, so they are copied: immediately for a save in the background, block
by block while writing for one in the foreground.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeGuard, cast

import jax
import numpy as np
from jax.core import Tracer

from shardkeep.errors import UnsupportedLeafError, an, counted
from shardkeep.jaxapi import is_weakly_typed, local_parts, refuse_without_jax
from shardkeep.layouts.plan import StagedArray, StagedLeaf, StagedValue
from shardkeep.model.arrays import Array, ArraySpec, Region, dtype_name
from shardkeep.model.leaves import NATIVE, UNSHARDED, JaxArray, NumpyArray, PrngKeys, SavedSharding
from shardkeep.model.perprocess import UNSETTLED, PerProcess, PerProcessRows, encode_value, find_problem, size_of
from shardkeep.model.records import record
from shardkeep.model.tree import Leaf, mention_once, name_leaf
from shardkeep.model.values import is_plain
from shardkeep.processes.assignment import share_out
from shardkeep.processes.collectives import gather_array, gather_bytes, gather_lengths
from shardkeep.processes.operation import LEADER
from shardkeep.runtime.hostmemory import Shard
from shardkeep.saving.buffers import shards_of
from shardkeep.saving.donation import Staging

_SHOWN = 10
_REMEMBERED = 4096
_forms: "dict[tuple[Any, tuple[int, ...], Any], _Form]" = {}

Held = tuple[tuple[Region, ...], list[Array]]  # regions of an array, and the data of each


@record
class _Form:
    """What all arrays of one shape, dtype and sharding have in common."""

    spec: ArraySpec
    origin: JaxArray
    regions: tuple[Region, ...]  # the distinct regions that this process holds
    parts: tuple[int, ...] | None  # the shard of each region; None if there is one device, or all have the same
    plain: bool  # on one CPU device, with a dtype of NumPy's own
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The leaves as they will be recorded, and the shards they consist of.

    `memory` is where copied shards are, in the order in which files hold them. It belongs to a `Staging`.
    """

    leaves: tuple[StagedLeaf, ...]
    shards: tuple[Shard, ...]
    memory: Array | None = None

    @property
    def nbytes(self) -> int:
        return sum(shard.data.nbytes for shard in self.shards)


NOTHING = Snapshot((), ())


def take_snapshot(
    leaves: Sequence[Leaf],
    staging: Staging | None = None,
    *,
    index: int = LEADER,
    size: int = 1,
    gathered: bool = False,
) -> Snapshot:
    """Take all leaves to host memory.

    Args:
        leaves: The leaves of the tree.
        staging: Copies everything the program could change, for a snapshot that outlives the call.
        index: The index of this process, which takes only what it will write.
        size: The number of processes.
        gathered: The leader takes all leaves, and the others none.
    """
    refuse_unsupported(leaves, size)
    arrays = [_data_of(leaf.value) for leaf in leaves]
    forms = [_form_of(array) if isinstance(array, jax.Array) else None for array in arrays]
    weak: list[str] = []
    for leaf, array, form in zip(leaves, arrays, forms, strict=True):
        if form is not None:
            if not form.on_cpu:
                array.copy_to_host_async()  # start all transfers before waiting for the first
            if is_weakly_typed(array):
                weak.append(name_leaf(leaf.path))
    mention_once(weak, "%s: weak types are not saved; these arrays are loaded with a strong dtype")
    plans: list[StagedLeaf] = []
    shards: list[Shard] = []
    looked_at = {id(array) for array in staging.watched} if staging is not None else set[int]()
    if size > 1:
        _stage_shares(leaves, arrays, forms, plans, shards, index, size, gathered)
    for leaf, array, form in zip(leaves, arrays, forms, strict=True) if size == 1 else ():
        if isinstance(leaf.value, PerProcess):
            plan = _stage_value(leaf, shards)
            plans.append(_in_rows(plan, shards, PerProcessRows.of([shards[-1].data.size]), LEADER))
        elif array is None:
            plans.append(StagedValue(leaf.path, leaf.value))
        elif form is None:
            plans.append(_stage_numpy(leaf, shards))
        else:
            first = len(shards)
            plans.append(_stage_jax(leaf, array, form, shards))
            if id(leaf.value) in looked_at:
                shards[first:] = [Shard(shard.data, stable=False) for shard in shards[first:]]
    if staging is None:
        return Snapshot(tuple(plans), tuple(shards))
    return Snapshot(tuple(plans), *staging.settle(shards))


def refuse_unsupported(leaves: Sequence[Leaf], size: int) -> None:
    """Raise an `UnsupportedLeafError` that names every leaf that cannot be saved."""
    if any(isinstance(leaf.value, jax.Array) for leaf in leaves):
        refuse_without_jax()
    problems = [(name_leaf(leaf.path), problem) for leaf in leaves if (problem := _problem(leaf.value, size))]
    if problems:
        raise _unsupported(problems)


def _stage_shares(
    leaves: Sequence[Leaf],
    arrays: Sequence[Any],
    forms: "Sequence[_Form | None]",
    plans: list[StagedLeaf],
    shards: list[Shard],
    index: int,
    size: int,
    gathered: bool,
) -> None:
    """Stage the part of the tree that this process writes, of a save by several processes."""
    everyones = share_out(arrays, size, gathered=gathered)
    for leaf, array, form, shares in zip(leaves, arrays, forms, everyones, strict=True):
        if isinstance(leaf.value, PerProcess):
            plans.append(_gather_value(leaf, shards, index) if gathered else _stage_value(leaf, shards))
        elif array is None:
            plans.append(StagedValue(leaf.path, leaf.value))
        elif form is None:
            plans.append(replace(_stage_numpy(leaf, shards), shares=shares, common=True))
        elif array.is_fully_addressable:
            plans.append(replace(_stage_jax(leaf, array, form, shards), shares=shares, common=True))
        elif gathered:
            whole = gather_array(array, keep=index == LEADER)
            mine: Held = ((Region.whole(array.shape),), [whole]) if index == LEADER else ((), [])
            plans.append(replace(_stage_jax(leaf, array, form, shards, mine, own=True), shares=shares))
        else:
            wanted = [region for region, writer in shares if writer == index]
            plans.append(replace(_stage_jax(leaf, array, form, shards, _held(array, wanted)), shares=shares))


def _stage_value(leaf: Leaf, shards: list[Shard]) -> StagedArray:
    """A `PerProcess` leaf as plain bytes: where they go depends on how many the other processes have."""
    raw = encode_value(leaf.value.value)
    shards.append(Shard(raw, stable=True))
    whole = Region.whole(raw.shape)
    spec = ArraySpec(raw.shape, raw.dtype)
    return StagedArray(leaf.path, spec, UNSETTLED, held=(whole,), first_held=len(shards) - 1, common=True)


def _in_rows(leaf: StagedArray, shards: list[Shard], rows: PerProcessRows, index: int) -> StagedArray:
    """A staged `PerProcess` leaf among the rows of all processes."""
    shards[leaf.first_held] = Shard(rows.fill(index, shards[leaf.first_held].data), stable=True)
    shares = rows.shares if len(rows.lengths) > 1 else ()
    return replace(leaf, spec=rows.spec, origin=rows, held=(rows.region(index),), shares=shares)


def unsettled_lengths(snapshot: Snapshot) -> list[int]:
    """How many bytes this process has of each `PerProcess` leaf that still needs those of the others."""
    return [leaf.spec.nbytes for leaf in snapshot.leaves if _is_unsettled(leaf)]


def settle_rows(snapshot: Snapshot, lengths: Sequence[Sequence[int]], index: int) -> Snapshot:
    """The snapshot with every `PerProcess` leaf in its place. `lengths`: for each process, what it has of each leaf."""
    shards = list(snapshot.shards)
    by_leaf = iter(zip(*lengths, strict=True))
    leaves = [
        _in_rows(leaf, shards, PerProcessRows.of(next(by_leaf)), index) if _is_unsettled(leaf) else leaf
        for leaf in snapshot.leaves
    ]
    return Snapshot(tuple(leaves), tuple(shards), snapshot.memory)


def _is_unsettled(leaf: StagedLeaf) -> TypeGuard[StagedArray]:
    return isinstance(leaf, StagedArray) and leaf.origin is UNSETTLED


def _gather_value(leaf: Leaf, shards: list[Shard], index: int) -> StagedArray:
    """The values of a `PerProcess` leaf of all processes, in the memory of the leader; all of them call this."""
    raw = encode_value(leaf.value.value)
    rows = PerProcessRows.of(gather_lengths(raw.size))
    filled: Array = np.zeros(rows.shape if index == LEADER else (0, 0), np.uint8)
    for process, value in enumerate(gather_bytes(raw, rows.lengths, keep=index == LEADER)):
        filled[rows.region(process).slices].reshape(-1)[: value.size] = value
    whole = Region.whole(rows.shape)
    held: tuple[Region, ...] = ()
    if index == LEADER:
        shards.append(Shard(filled, stable=True))
        held = (whole,)
    first = max(len(shards) - 1, 0)
    return StagedArray(leaf.path, rows.spec, rows, held, first, shares=((whole, LEADER),), common=True)


def _data_of(value: Any) -> Any:
    """The array to store for a leaf: for PRNG keys their data, for other values None."""
    if isinstance(value, jax.Array):
        return jax.random.key_data(value) if is_prng_dtype(value.dtype) else value
    return value if isinstance(value, np.ndarray) else None


def staged_sizes(leaves: Sequence[Leaf]) -> list[tuple[int, Any]]:
    """For each leaf with data, how much memory its snapshot takes, and the leaf's value."""
    arrays = [leaf.value for leaf in leaves if isinstance(leaf.value, (jax.Array, np.ndarray))]
    values = [leaf.value for leaf in leaves if isinstance(leaf.value, PerProcess) and _problem(leaf.value, 1) is None]
    return [(_local_nbytes(array), array) for array in arrays] + [(size_of(value.value), value) for value in values]


def _local_nbytes(array: Any) -> int:
    if isinstance(array, np.ndarray | Tracer) or is_prng_dtype(array.dtype):
        return array.nbytes
    return _nbytes_here(array.sharding, array.shape, array.dtype)


@lru_cache(maxsize=_REMEMBERED)
def _nbytes_here(sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: Any) -> int:
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if sharding.is_fully_addressable:
        return nbytes
    shard = math.prod(sharding.shard_shape(shape)) * np.dtype(dtype).itemsize
    return min(nbytes, shard * len(sharding.addressable_devices))


def _stage_numpy(leaf: Leaf, shards: list[Shard]) -> StagedArray:
    array: Array = leaf.value
    native = array.dtype.newbyteorder("=")
    origin = NATIVE if array.dtype == native else NumpyArray("<" if array.dtype.str[0] == "<" else ">")
    spec = ArraySpec(array.shape, native)
    if not array.flags.c_contiguous or origin.order:
        shards.append(Shard(np.array(array, dtype=native, order="C", copy=True), stable=True))
    else:
        shards.append(Shard(array, stable=False))
    held = (Region.whole(spec.shape),)
    return StagedArray(leaf.path, spec, origin, held, len(shards) - 1)


def _stage_jax(
    leaf: Leaf, array: jax.Array, form: _Form, shards: list[Shard], mine: Held | None = None, own: bool = False
) -> StagedArray:
    """Stage an array. `mine` is the part to stage, by default all of it; `own` means that `mine` is a copy."""
    keys = array is not leaf.value
    origin = PrngKeys(str(jax.random.key_impl(leaf.value))) if keys else form.origin
    first = len(shards)
    regions, data = (form.regions, _data(array, form)) if mine is None else mine
    shards += shards_of(array, data) if form.on_cpu and not own else [Shard(each, True) for each in data]
    return StagedArray(leaf.path, form.spec, origin, regions, first)


def _form_of(array: jax.Array) -> _Form:
    """The form of an array, cached: looking at the shards of an array takes longer than writing a small one."""
    key = (array.sharding, array.shape, array.dtype)
    form = _forms.get(key)
    if form is None:
        if len(_forms) >= _REMEMBERED:
            _forms.clear()
        form = _forms[key] = _look_at(array)
    return form


def _look_at(array: jax.Array) -> _Form:
    spec = ArraySpec(array.shape, np.dtype(array.dtype))
    origin, on_cpu = _origin_of(array.sharding), _is_on_cpu(array.sharding)
    if array.is_fully_replicated:
        plain = len(array.sharding.device_set) == 1 and spec.dtype.isbuiltin == 1 and on_cpu
        return _Form(spec, origin, (Region.whole(array.shape),), None, plain, on_cpu)
    found: dict[Region, int] = {}
    for number, shard in enumerate(array.addressable_shards):
        found.setdefault(Region.from_index(shard.index, array.shape), number)
    return _Form(spec, origin, tuple(found), tuple(found.values()), plain=False, on_cpu=on_cpu)


def _held(array: jax.Array, wanted: Sequence[Region]) -> Held:
    """The distinct regions that this process holds and that overlap with `wanted`, and their data."""
    form = _form_of(array)
    if form.parts is None:
        return (form.regions, _data(array, form)) if wanted else ((), [])
    some = [i for i, r in enumerate(form.regions) if any(r == part or r.intersect(part) for part in wanted)]
    regions, parts = tuple(form.regions[i] for i in some), tuple(form.parts[i] for i in some)
    return regions, _data(array, replace(form, regions=regions, parts=parts))


def _data(array: jax.Array, form: _Form) -> list[Array]:
    """The regions of an array in host memory, without a copy where they are already there."""
    if form.plain:
        with suppress(BufferError):  # the array was deleted meanwhile; the lines below raise JAX's error
            return [_contiguous(np.asarray(memoryview(cast(Any, array))))]
    if form.parts is None:
        return [_contiguous(np.asarray(array.addressable_data(0)))]
    shards = local_parts(array, max(form.parts, default=-1) + 1)
    return [_contiguous(np.asarray(shards[number])) for number in form.parts]


def _contiguous(data: Array) -> Array:
    return data if data.flags.c_contiguous else np.array(data, order="C", copy=True)


@lru_cache(maxsize=256)
def _origin_of(sharding: jax.sharding.Sharding) -> JaxArray:
    """What is recorded of an array with this sharding: the sharding, if it is one over the named axes of a mesh."""
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.is_fully_replicated:
        return UNSHARDED
    spec: tuple[Any, ...] = tuple(cast(Any, sharding.spec))
    if not all(isinstance(axes, str | tuple | None) for axes in spec):
        return UNSHARDED
    return JaxArray(SavedSharding(spec, tuple(sharding.mesh.shape.items())))


@lru_cache(maxsize=256)
def is_prng_dtype(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


@lru_cache(maxsize=256)
def _is_on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


def _unsupported(problems: list[tuple[str, str]]) -> UnsupportedLeafError:
    """The error that names the leaves that cannot be saved."""
    shown = "\n".join(f"  {key}: {problem}" for key, problem in problems[:_SHOWN])
    more = f"\n  … and {len(problems) - _SHOWN:,} more" if len(problems) > _SHOWN else ""
    return UnsupportedLeafError(
        f"{counted(len(problems), 'leaf', 'leaves')} cannot be saved; nothing was written:\n{shown}{more}"
    )


def _problem(value: Any, size: int) -> str | None:
    if isinstance(value, PerProcess):
        return find_problem(value.value, _value_problem)
    if isinstance(value, Tracer):
        return "a traced value inside jit, grad or vmap has no data; save outside the transformed function"
    if isinstance(value, jax.Array):
        return _array_problem(value, size)
    if isinstance(value, np.ndarray | np.generic):
        if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
            return f"{an(type(value).__name__)} has more than plain data; save its parts as plain arrays"
        try:
            dtype_name(value.dtype)
        except TypeError:
            return f"NumPy dtype {value.dtype} cannot be stored; convert to numbers, or to a list of str or bytes"
        return None
    if is_plain(value):
        return None
    if isinstance(value, jax.ShapeDtypeStruct):
        return "an abstract array (ShapeDtypeStruct) has no data"
    if callable(value):
        return f"a function or class ({getattr(value, '__name__', value)!s:.60}) is not data; remove it from the tree"
    if value is ...:
        return "... marks a leaf that is not loaded; it is not data"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{an(kind)} is neither an array nor a plain value; register it as a pytree node or leave it out"


def _value_problem(value: Any) -> str | None:
    """Why something cannot be in a `PerProcess` value; None if it can."""
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        refuse_without_jax()
        if not value.is_deleted() and not value.is_fully_addressable:
            return "the array spans several processes; save it as a leaf of the tree itself"
        if is_prng_dtype(value.dtype):
            return "PRNG keys cannot be stored in a PerProcess value; use their jax.random.key_data instead"
        return _array_problem(value, size=1)
    if value is None or isinstance(value, Tracer | np.ndarray | np.generic) or is_plain(value):
        return None if value is None else _problem(value, size=1)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{an(kind)} cannot be stored; use dicts, lists and tuples of plain values, bytes and NumPy arrays"


def _array_problem(array: jax.Array, size: int) -> str | None:
    if array.is_deleted():
        return "the array has been deleted or donated; save it before you donate it"
    if size == 1 and not array.is_fully_addressable:
        return "the array spans several processes; call jax.distributed.initialize() first so that they can save it"
    if is_prng_dtype(array.dtype):
        known = isinstance(jax.random.key_impl(array), str)
        return None if known else "a PRNG key of an unregistered implementation; save its jax.random.key_data instead"
    try:
        dtype_name(np.dtype(array.dtype))
    except TypeError:
        return f"dtype {array.dtype} cannot be stored"
    return None
