"""Loading onto devices that copy: read and check a group of arrays while the ones before it are being transferred."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import Any
from weakref import ref

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from shardkeep.jaxapi import block_until_ready, device_put, refuse_without_jax, service_error, transfers_allowed
from shardkeep.loading.blocks import BlockReader
from shardkeep.loading.broadcast import Broadcast
from shardkeep.loading.derive import read_derived
from shardkeep.loading.groups import GroupPlan, LeafRegions, plan_groups, plan_groups_of_all
from shardkeep.loading.hostcasts import cast_before, cast_destinations
from shardkeep.loading.matching import Wanted
from shardkeep.loading.place import put_leaves
from shardkeep.loading.plan import Destination, plan_read
from shardkeep.loading.read import read_into
from shardkeep.loading.request import LoadRequest
from shardkeep.loading.shardings import device_regions
from shardkeep.model.arrays import Array
from shardkeep.remap.expressions import DerivedArray
from shardkeep.runtime.budget import Claim, budget
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.progress import Progress

_LOOKS, _LOOK = 20, 0.0005  # how often, and after how many seconds, to look whether JAX has let go of memory


@dataclass(frozen=True, slots=True)
class Means:
    """What a load reads with.

    Attributes:
        reader: The files.
        request: What was asked for.
        crew: Its threads.
        progress: The progress bar.
        claim: Its share of the memory budget.
        broadcast: What processes read for each other; None if each reads what it needs.
    """

    reader: BlockReader
    request: LoadRequest
    crew: Crew
    progress: Progress
    claim: Claim
    broadcast: Broadcast | None = None


def load_to_devices(wanted: Mapping[int, Wanted], means: Means) -> dict[int, jax.Array]:
    """The arrays of the leaves, by number, on their devices.

    Groups of arrays are read in order. The transfers of a group are started at once and run while the next group is
    read. What is in host memory, being read or being sent, fits the claim, which is taken and given back here. JAX
    keeps the memory of an array until its transfer is done, and nothing else refers to it then.
    """
    refuse_without_jax()
    casts = {number: cast_before(w, means.request) for number, w in wanted.items()}
    if means.broadcast is None:
        return _load_groups(plan_groups(wanted, casts, budget.limit), wanted, means)
    shared = {number: w for number, w in wanted.items() if means.broadcast.covers(w)}
    rest = {number: w for number, w in wanted.items() if number not in shared}
    arrays = _load_groups(plan_groups(rest, casts, budget.limit), rest, means) if rest else {}
    if shared:
        arrays |= _load_groups(plan_groups_of_all(shared, casts, means.broadcast), shared, means)
    return arrays


def _load_groups(plan: GroupPlan, wanted: Mapping[int, Wanted], means: Means) -> dict[int, jax.Array]:
    means.claim.take(plan.nbytes, means.claim.scope.what)
    sent, arrays = _Sent(plan.sent), _Arrays(wanted)
    try:
        for group in plan.groups:
            nbytes = sum(part.nbytes for part in group)
            sent.make_room(nbytes)
            destinations = _read(group, wanted, plan.step, means)
            transfer = sent.add(_Transfer(nbytes, destinations))  # before it is started, which can be interrupted
            transfer.arrays = arrays.put(group, destinations)
            del destinations  # only JAX refers to their memory now
        sent.finish()
    except BaseException:  # also Ctrl-C: the claim is given back when JAX does not use the memory any more
        sent.abandon()
        raise
    means.claim.release()
    return arrays.done


def _read(group: Sequence[LeafRegions], wanted: Mapping[int, Wanted], limit: int, means: Means) -> list[Destination]:
    """What the parts of a group become in host memory: read, checked, and cast where that makes it smaller."""
    destinations = [
        Destination(part.leaf, part.regions, False, [None] * len(part.regions), part.cast) for part in group
    ]
    numbered = dict(enumerate(destinations))
    leaves = {i: wanted[part.number] for i, part in enumerate(group)}
    owners = means.broadcast.owners(leaves) if means.broadcast else None
    for i, regions in owners.reads.items() if owners else ():
        destinations[i].regions, destinations[i].arrays = regions, [None] * len(regions)
    fetches = [fetch for i, each in numbered.items() for fetch in plan_read(i, each.leaf, each.regions)]
    if means.request.remap:
        owns = [(destination, wanted[part.number].own) for destination, part in zip(destinations, group, strict=True)]
        derived = [(destination, own) for destination, own in owns if isinstance(destination.leaf, DerivedArray)]
        read_derived(means.reader, derived, numbered, fetches, limit, means.crew, means.progress)
    else:
        read_into(means.reader, numbered, fetches, limit, means.crew, means.progress)
    if means.broadcast and owners:
        means.broadcast.complete(owners, numbered, leaves, means.progress)
    cast_destinations(destinations, means.crew)
    return destinations


class _Sent:
    """Transfers that have been started, the oldest first, and the bytes of host memory that they use."""

    def __init__(self, most: int) -> None:
        self._most, self._nbytes = most, 0
        self._waiting: deque[_Transfer] = deque()

    def make_room(self, nbytes: int) -> None:
        """Wait for the oldest transfers until `nbytes` more fit, or nothing is being sent."""
        while self._waiting and self._nbytes + nbytes > self._most:
            self._finish()

    def finish(self) -> None:
        """Wait for all of them."""
        while self._waiting:
            self._finish()

    def abandon(self) -> None:
        """Wait for all of them after an error, which is raised then: their memory counts until they are done."""
        for transfer in self._waiting:
            for array in transfer.arrays:
                with suppress(service_error()):
                    block_until_ready([array])  # each by itself: another may have failed before it
        self._waiting.clear()

    def _finish(self) -> None:
        transfer = self._waiting.popleft()
        transfer.wait()
        self._nbytes -= transfer.nbytes

    def add(self, transfer: "_Transfer") -> "_Transfer":
        self._waiting.append(transfer)
        self._nbytes += transfer.nbytes
        return transfer


class _Transfer:
    """One group on its way: the arrays that it fills, and the host memory that JAX keeps for it."""

    def __init__(self, nbytes: int, filled: Sequence[Destination]) -> None:
        self.nbytes = nbytes
        self.arrays: Sequence[jax.Array] = ()  # once they are on their way
        self._memory = {id(memory): ref(memory) for each in filled for memory in map(_owner, each.arrays)}

    def wait(self) -> None:
        """Wait until the arrays are on their devices and the memory is free.

        JAX hears a moment after the first that it may let go of the memory, and does so in the next call that has to do
        with several arrays. A device that keeps the memory, instead of copying it, is not waited for.
        """
        block_until_ready(self.arrays)
        for _ in range(_LOOKS):
            block_until_ready([*self.arrays[-1:]] * 2)
            if all(memory() is None for memory in self._memory.values()):
                return
            sleep(_LOOK)


def _owner(array: Array | None) -> Any:
    """The array that all views of the same memory refer to."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner


class _Arrays:
    """The arrays on their devices. Large ones arrive in parts, region by region."""

    def __init__(self, wanted: Mapping[int, Wanted]) -> None:
        self._wanted = wanted
        self.done: dict[int, jax.Array] = {}
        self._parts: dict[int, dict[Any, jax.Array]] = {}  # by leaf and device

    def put(self, group: Sequence[LeafRegions], destinations: Sequence[Destination]) -> list[jax.Array]:
        """Start the transfers of a group, and return the arrays that they fill."""
        whole = {
            part.number: (self._wanted[part.number], destination)
            for part, destination in zip(group, destinations, strict=True)
            if part.whole
        }
        placed = put_leaves(whole)
        self.done |= placed
        cut = [(part, destination) for part, destination in zip(group, destinations, strict=True) if not part.whole]
        return [*placed.values(), *self._put_parts(cut)]

    def _put_parts(self, cut: Sequence[tuple[LeafRegions, Destination]]) -> list[jax.Array]:
        """Start the transfers of regions to each device that holds them, all in one call."""
        sources: list[Any] = []
        places: list[Sharding] = []
        slots: list[tuple[int, Any]] = []
        for part, destination in cut:
            sharding = self._wanted[part.number].place.sharding
            assert sharding is not None
            for device, region in device_regions(sharding, part.leaf.spec.shape).items():
                if region == part.regions[0]:
                    sources.append(destination.whole)
                    places.append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
                    slots.append((part.number, device))
        with transfers_allowed():
            arrays: list[jax.Array] = device_put(sources, places) if sources else []
        for (number, device), array in zip(slots, arrays, strict=True):
            self._parts.setdefault(number, {})[device] = array
        for part, _ in cut:
            self._assemble(part)
        return arrays

    def _assemble(self, part: LeafRegions) -> None:
        """Make the array of a leaf if all its parts have been sent."""
        sharding, shape = self._wanted[part.number].place.sharding, part.leaf.spec.shape
        assert sharding is not None
        found, regions = self._parts.get(part.number, {}), device_regions(sharding, shape)
        if len(found) == len(regions):
            del self._parts[part.number]
            parts = [found[device] for device in regions]
            self.done[part.number] = jax.make_array_from_single_device_arrays(shape, sharding, parts)
