"""The Snapshot: this process's shards in host memory, unaffected by what the training loop does next.

On CPU a shard is a view: as long as the view exists, XLA does not reuse its buffer, even if the array is donated
(a canary test checks that). On an accelerator it is a transfer (`transfer.py`), whose result is memory of our own.
NumPy arrays, JAX arrays that may alias the program's memory, and arrays in the host memory of an accelerator, which a
donating step may use again, can change. So they are copied: immediately for a save in the background, block by block
while writing for one in the foreground.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, cast

import jax
import numpy as np

from shardkeep.jaxapi import is_weakly_typed, local_parts, private_part, refuse_without_jax, transfers_allowed
from shardkeep.layouts.plan import StagedArray, StagedLeaf, StagedValue
from shardkeep.model.arrays import Array, ArraySpec, Region, is_prng_dtype
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.leaves import NATIVE, UNSHARDED, JaxArray, NumpyArray, PrngKeys, SavedSharding
from shardkeep.model.perprocess import PerProcess, PerProcessRows, size_of
from shardkeep.model.shares import Shares
from shardkeep.model.tree import Leaf, mention_once, name_leaf
from shardkeep.processes.assignment import share_out
from shardkeep.processes.collectives import gather_array
from shardkeep.processes.operation import LEADER
from shardkeep.runtime.hostmemory import Shard
from shardkeep.saving.buffers import shard_of
from shardkeep.saving.cutting import can_cut
from shardkeep.saving.donation import Staging
from shardkeep.saving.rows import gather_value, in_rows, stage_value
from shardkeep.saving.transfer import AnyShard, Arriving, Copies, Transfers
from shardkeep.saving.unsupported import find_array_problem, find_problem, is_jax_array, unsupported

_REMEMBERED = 4096  # shardings and shapes: more than a model has, and a bound for programs that make new ones
_forms: "dict[tuple[Any, tuple[int, ...], Any], _Form]" = {}

Where = Literal["cpu", "host", "device"]  # memory of CPU devices, host memory of accelerators, their own memory
Assignment = Sequence[Shares | None]  # of each leaf
RegionData = tuple[tuple[Region, ...], list[Array]]  # regions of an array, and the data of each


@fast_dataclass
class _Form:
    """What all arrays of one shape, dtype and sharding have in common."""

    spec: ArraySpec
    origin: JaxArray
    nbytes: int  # that this process holds
    regions: tuple[Region, ...]  # the distinct regions that this process holds
    parts: tuple[int, ...] | None  # the shard of each region; None if there is one device, or all have the same
    plain: bool  # on one CPU device, with a dtype of NumPy's own
    where: "Where"
    spans: bool  # several processes
    copies: tuple[Copies, ...] = ()  # on accelerators: all shards of each region


@dataclass(eq=False, slots=True)
class Examined:
    """The leaves of a save. Each was looked at once, and can be saved.

    `arrays` are what will be stored: for PRNG keys their data, for plain values None. `forms` are those of JAX arrays.
    """

    leaves: Sequence[Leaf]
    arrays: Sequence[Any]
    forms: "Sequence[_Form | None]"

    def release(self) -> None:
        """Refer to the program's arrays no longer."""
        self.leaves = self.arrays = self.forms = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The leaves as they will be recorded, and the shards they consist of.

    `memory` is where copied shards are, in the order in which files hold them. It belongs to a `Staging`. `transfers`
    are those of the shards that come from accelerators; they belong to the save.
    """

    leaves: tuple[StagedLeaf, ...]
    shards: tuple[AnyShard, ...]
    memory: Array | None = None
    transfers: Transfers | None = None

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


NOTHING = Snapshot((), ())


def examine(leaves: Sequence[Leaf], size: int = 1) -> Examined:
    """Look at all leaves; an `UnsupportedLeafError` names every one that `size` processes cannot save."""
    if any(is_jax_array(leaf.value.__class__) for leaf in leaves):
        refuse_without_jax()
    arrays: list[Any] = []
    forms: list[_Form | None] = []
    problems: list[tuple[str, str]] = []
    weak: list[str] = []
    for leaf in leaves:
        value = leaf.value
        array, form, problem = value, None, None
        if not is_jax_array(value.__class__):
            problem = find_problem(value)
            array = value if isinstance(value, np.ndarray) else None
        else:
            if not value.is_deleted():
                form = _forms.get((value.sharding, value.shape, value.dtype))
            if form is None or (form.spans and size == 1):
                problem = find_array_problem(value, size)
            if form is None and problem is None:
                array = _key_data(value) if is_prng_dtype(value.dtype) else value
                form = _form_of(array)
            if problem is None and is_weakly_typed(array):
                weak.append(name_leaf(leaf.path, leaf.prefix))
        if problem is not None:
            problems.append((name_leaf(leaf.path, leaf.prefix), problem))
        arrays.append(array)
        forms.append(form)
    if problems:
        raise unsupported(problems)
    if weak:
        mention_once(weak, "%s: weak types are not saved; these arrays are loaded with a strong dtype")
    return Examined(leaves, arrays, forms)


def take_snapshot(
    examined: Examined,
    staging: Staging | None = None,
    transfers: Transfers | None = None,
    *,
    index: int = LEADER,
    size: int = 1,
    gathered: bool = False,
    shares: Assignment | None = None,
) -> Snapshot:
    """Take all leaves to host memory, or start to: the data of arrays on accelerators arrives later.

    Args:
        examined: The leaves of the tree.
        staging: Copies everything the program could change, for a snapshot that outlives the call.
        transfers: What brings arrays from accelerators. It is left to the caller to start them if they go in batches.
        index: The index of this process, which takes only what it will write.
        size: The number of processes.
        gathered: The leader takes all leaves, and the others none.
        shares: Who writes what, if the caller knows already.
    """
    leaves, arrays, forms = examined.leaves, examined.arrays, examined.forms
    if transfers is None and any(form is not None and form.copies for form in forms):
        transfers = Transfers()
    plans: list[StagedLeaf] = []
    shards: list[AnyShard] = []
    watched = {id(array) for array in staging.watched} if staging is not None else set[int]()
    if size > 1:
        shares = share_out(arrays, size, gathered=gathered) if shares is None else shares
        plans += _stage_shares(examined, shares, shards, transfers, index, gathered)
    for leaf, array, form in zip(leaves, arrays, forms, strict=True) if size == 1 else ():
        if form is not None:
            if form.copies:
                plans.append(_stage_moved(leaf, array, form, shards, transfers))
                continue
            first = len(shards)
            plans.append(_stage_jax(leaf, array, form, shards))
            if id(leaf.value) in watched:
                shards[first:] = [Shard(shard.data, stable=False) for shard in shards[first:]]
        elif array is not None:
            plans.append(_stage_numpy(leaf, shards))
        elif isinstance(leaf.value, PerProcess):
            plan = stage_value(leaf, shards)
            plans.append(in_rows(plan, shards, PerProcessRows.of([shards[-1].nbytes]), LEADER))
        else:
            plans.append(StagedValue(leaf.path, leaf.value))
    if transfers is not None and not transfers.in_batches:
        transfers.start()
    if staging is None:
        return Snapshot(tuple(plans), tuple(shards), None, transfers)
    return Snapshot(tuple(plans), *staging.settle(shards), transfers)


def _stage_shares(
    examined: Examined,
    everyones: Assignment,
    shards: list[AnyShard],
    transfers: Transfers | None,
    index: int,
    gathered: bool,
) -> Iterator[StagedLeaf]:
    """Stage the part of the tree that this process writes, of a save by several processes."""
    found = zip(examined.leaves, examined.arrays, examined.forms, everyones, strict=True)
    for leaf, array, form, shares in found:
        if isinstance(leaf.value, PerProcess):
            yield gather_value(leaf, shards, index) if gathered else stage_value(leaf, shards)
        elif array is None:
            yield StagedValue(leaf.path, leaf.value)
        elif form is None:
            yield replace(_stage_numpy(leaf, shards), shares=shares, common=True)
        elif array.is_fully_addressable:
            staged = _stage_moved(leaf, array, form, shards, transfers) if form.copies else None
            yield replace(staged or _stage_jax(leaf, array, form, shards), shares=shares, common=True)
        elif gathered:
            whole = gather_array(array, leader_only=True)
            mine: RegionData = ((Region.whole(array.shape),), [whole]) if index == LEADER else ((), [])
            yield replace(_stage_jax(leaf, array, form, shards, mine, own=True), shares=shares)
        else:
            wanted = shares.of(index) if shares else ()
            if form.copies:
                yield replace(_stage_moved(leaf, array, form, shards, transfers, wanted), shares=shares)
            else:
                yield replace(_stage_jax(leaf, array, form, shards, _held(array, wanted)), shares=shares)


def staged_sizes(
    examined: Examined, shares: Assignment | None = None, index: int = LEADER
) -> list[tuple[int, Any, Where]]:
    """For each leaf with data, how much memory its snapshot takes, the leaf's value, and where that is.

    Args:
        examined: The leaves of the tree.
        shares: Who writes what, if there are several processes. Of an array on accelerators, only that is taken.
        index: The index of this process.
    """
    sizes: list[tuple[int, Any, Where]] = []
    for number, (leaf, array, form) in enumerate(zip(examined.leaves, examined.arrays, examined.forms, strict=True)):
        if form is not None:
            nbytes = form.nbytes
            if shares is not None and form.where == "device" and form.spans:
                own = shares[number]
                nbytes = 0 if own is None else own.size_of(index) * form.spec.dtype.itemsize
            sizes.append((nbytes, leaf.value, form.where))
        elif array is not None:
            sizes.append((array.nbytes, array, "cpu"))
        elif isinstance(leaf.value, PerProcess):
            sizes.append((size_of(leaf.value.value), leaf.value, "cpu"))
    return sizes


def _stage_numpy(leaf: Leaf, shards: list[AnyShard]) -> StagedArray:
    array: Array = leaf.value
    native = array.dtype.newbyteorder("=")
    origin = NATIVE if array.dtype == native else NumpyArray("<" if array.dtype.str[0] == "<" else ">")
    spec = ArraySpec(array.shape, native)
    if not array.flags.c_contiguous or origin.order:
        shards.append(Shard(np.array(array, dtype=native, order="C", copy=True), stable=True, private=True))
    else:
        shards.append(Shard(array, stable=False))
    held = (Region.whole(spec.shape),)
    return StagedArray(leaf.path, spec, origin, held, len(shards) - 1)


def _stage_jax(
    leaf: Leaf, array: jax.Array, form: _Form, shards: list[AnyShard], mine: RegionData | None = None, own: bool = False
) -> StagedArray:
    """Stage an array. `mine` is the part to stage, by default all of it; `own` means that `mine` is a copy."""
    first = len(shards)
    if form.plain and mine is None and array is leaf.value:  # as most arrays are of which a tree has thousands
        try:
            shards.append(shard_of(array, np.asarray(memoryview(cast(Any, array)), order="C")))
            return StagedArray(leaf.path, form.spec, form.origin, form.regions, first)
        except BufferError:  # the array was deleted meanwhile; the lines below raise JAX's error
            pass
    regions, data = (form.regions, _data(array, form)) if mine is None else mine
    if own:
        shards += [Shard(each, stable=True, private=True) for each in data]
    else:
        shards += [shard_of(array, each) if form.where == "cpu" else Shard(each, stable=False) for each in data]
    origin = form.origin if array is leaf.value else PrngKeys(str(jax.random.key_impl(leaf.value)))
    return StagedArray(leaf.path, form.spec, origin, regions, first)


def _stage_moved(
    leaf: Leaf,
    array: jax.Array,
    form: _Form,
    shards: list[AnyShard],
    transfers: Transfers | None,
    wanted: Sequence[Region] | None = None,
) -> StagedArray:
    """Stage an array that is on accelerators, as transfers that have yet to be started.

    `wanted` are the regions to stage, by default all. A part of a shard is cut out on the device, if that can be done.
    """
    assert transfers is not None
    first, itemsize = len(shards), form.spec.dtype.itemsize
    held: list[Region] = []
    for region, copies in zip(form.regions, form.copies, strict=True):
        parts = [region] if wanted is None else [part for want in wanted if (part := region.intersect(want))]
        if parts and parts != [region] and not can_cut(array):
            parts = [region]
        for part in parts:
            cut = None if part == region else part.within(region)
            held.append(part)
            shards.append(transfers.add(Arriving(array, copies, part.size * itemsize, cut)))
    origin = form.origin if array is leaf.value else PrngKeys(str(jax.random.key_impl(leaf.value)))
    return StagedArray(leaf.path, form.spec, origin, tuple(held), first)


def _key_data(keys: jax.Array) -> jax.Array:
    with transfers_allowed():
        return jax.random.key_data(keys)


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
    spec, sharding = ArraySpec(array.shape, np.dtype(array.dtype)), array.sharding
    origin, where, nbytes = _origin_of(sharding), _where(sharding), spec.nbytes
    spans = not sharding.is_fully_addressable
    if spans:
        shard = math.prod(sharding.shard_shape(spec.shape)) * spec.dtype.itemsize
        nbytes = min(nbytes, shard * len(sharding.addressable_devices))
    if array.is_fully_replicated:
        plain = not spans and len(sharding.device_set) == 1 and spec.dtype.isbuiltin == 1 and where == "cpu"
        whole = Region.whole(array.shape)
        everyone = [(number, shard.device) for number, shard in enumerate(array.addressable_shards)]
        copies = (everyone,) if where == "device" and everyone else ()
        return _Form(spec, origin, nbytes, (whole,), None, plain, where, spans, copies)
    found = _copies(array)
    parts, copies = tuple(copies[0][0] for copies in found.values()), tuple(found.values())
    return _Form(spec, origin, nbytes, tuple(found), parts, False, where, spans, copies if where == "device" else ())


def _copies(array: jax.Array) -> dict[Region, list[tuple[int, Any]]]:
    """The distinct regions of an array on the devices of this process, and the shards that have each."""
    found: dict[Region, list[tuple[int, Any]]] = {}
    for number, shard in enumerate(array.addressable_shards):
        found.setdefault(Region.from_index(shard.index, array.shape), []).append((number, shard.device))
    return found


def _held(array: jax.Array, wanted: Sequence[Region]) -> RegionData:
    """The distinct regions that this process holds and that overlap with `wanted`, and their data."""
    form = _form_of(array)
    if form.parts is None:
        return (form.regions, _data(array, form)) if wanted else ((), [])
    some = [i for i, r in enumerate(form.regions) if any(r == part or r.intersect(part) for part in wanted)]
    regions, parts = tuple(form.regions[i] for i in some), tuple(form.parts[i] for i in some)
    return regions, _data(array, replace(form, regions=regions, parts=parts))


def _data(array: jax.Array, form: _Form) -> list[Array]:
    """The regions of an array in host memory, without a copy where they are already there."""
    shards = local_parts(array, max(form.parts or (), default=0) + 1)
    chosen = shards[:1] if form.parts is None else [shards[number] for number in form.parts]
    if form.where == "host":
        with transfers_allowed():
            return [np.asarray(private_part(part), order="C") for part in chosen]
    return [np.asarray(part, order="C") for part in chosen]


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
def _where(sharding: jax.sharding.Sharding) -> Where:
    if next(iter(sharding.device_set)).platform == "cpu":
        return "cpu"
    return "host" if str(sharding.memory_kind).endswith("_host") else "device"
