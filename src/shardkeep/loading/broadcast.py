"""Loading what several processes need: one of them reads it, and the others get it through JAX's collectives.

No process enters a collective before all have read their parts. Until then an error of one is an error of all, and a
process that is missing is one within the time limits of `processes/operation.py`.
"""

import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardkeep.loading.hostcasts import sent_to_devices
from shardkeep.loading.matching import Wanted
from shardkeep.loading.owners import OwnedPart, Owners, needed_by, outline_of, plan_owners
from shardkeep.loading.plan import Destination
from shardkeep.loading.read import STEP, allocate
from shardkeep.loading.request import LoadRequest
from shardkeep.model.arrays import Array, Region
from shardkeep.model.digests import digest
from shardkeep.processes.collectives import SENT, share_bytes
from shardkeep.processes.operation import Operation
from shardkeep.runtime.budget import budget
from shardkeep.runtime.progress import Progress
from shardkeep.stores.base import Store

_PAYS = 4  # processes that need the same: for fewer, what is read less is hardly worth sending
_FRACTION = 8  # of the budget may be on its way: it is there twice, as a row of each process and as what they make up


class StartOver(Exception):
    """Another process found that the checkpoint was replaced while it was being loaded."""


def fewest_replicas(request: LoadRequest, store: Store, size: int) -> int | None:
    """How many processes must need a region for it to be sent to them; None if each reads what it needs.

    "auto" is for storage that is shared through a network, and for calls of the main thread: programs may have
    collectives of their own running there while another thread loads.
    """
    if request.broadcast is False:
        return None
    if request.broadcast is True:
        return 2
    pays = size >= _PAYS and not store.mappable and threading.current_thread() is threading.main_thread()
    return _PAYS if pays else None


def agree(
    operation: Operation, wanted: Sequence[Wanted], request: LoadRequest, least: int, at_once: int
) -> "Broadcast | None":
    """What is broadcast of these leaves: those that all processes load alike. None if there is nothing.

    Args:
        operation: The load.
        wanted: The leaves.
        request: What was asked for.
        least: A region that fewer processes need is read by each of them.
        at_once: How many leaves are read at once.
    """
    outlines = [outline_of(w, operation.size) for w in wanted]
    lines = [f"{len(wanted)} {at_once}"]
    sent = sent_to_devices(wanted, request)
    lines += [f"{text} {bool(text) and number in sent}" for number, text in enumerate(outlines)]
    brought = operation.gather([digest("\n".join(lines).encode()), budget.limit])
    alike, limit = operation.share(_compared(brought) if operation.leads else None) or (None, 0)
    if alike is None:
        raise StartOver
    numbers = range(len(wanted))
    if not alike:
        everyones = operation.gather([digest(line.encode())[:16] for line in lines])
        numbers = operation.share(_alike(everyones) if operation.leads else None)
    chosen: dict[int, int] = {}
    for number in numbers:
        w = wanted[number]
        if any(len(group) >= least for _, group in needed_by(w, operation.size) or ()):
            chosen[id(w)] = 0 if number in sent else w.stored.nbytes
    return Broadcast(operation, chosen, least, limit) if chosen else None


def _compared(brought: Sequence[tuple[str, int] | Literal[False]]) -> tuple[bool, int] | None:
    """Whether all loads are alike, and the least budget; None if a process has to start over."""
    loads = [each for each in brought if each]
    if len(loads) < len(brought):
        return None
    return len({lines for lines, _ in loads}) == 1, min(limit for _, limit in loads)


def _alike(everyones: Sequence[Sequence[str]]) -> list[int]:
    """The numbers of the leaves that all processes load alike; none if they do not go through as many together."""
    if len({digests[0] for digests in everyones}) > 1:
        return []
    leaves = zip(*(digests[1:] for digests in everyones), strict=True)
    return [number for number, digests in enumerate(leaves) if len(set(digests)) == 1]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The leaves of a load that processes read for each other, and how.

    Attributes:
        operation: The load.
        leaves: These leaves, which all processes have: by their ids, the bytes that they take in host memory for good.
        least: A region that fewer processes need is read by each of them.
        budget: The host memory that each process may use.
    """

    operation: Operation
    leaves: dict[int, int]
    least: int
    budget: int

    @property
    def nbytes(self) -> int:
        """The host memory that sending takes."""
        return 2 * self._limit

    @property
    def _limit(self) -> int:
        return max(min(SENT, self.budget // _FRACTION), 1)

    def steps(self, wanted: Sequence[Wanted], at_once: int) -> list[list[Wanted]]:
        """The leaves in the steps in which they are read, the same on all processes.

        What a process reads for others is there twice until it is sent. So that is not more than a step of any load.
        Leaves for devices that copy go in groups of their own.
        """
        most = max(min(STEP, self.budget // 4), 1) * self.operation.size
        steps: list[list[Wanted]] = []
        filled = 0
        for w in wanted:
            nbytes = self.leaves.get(id(w), 0)
            if not steps or len(steps[-1]) == at_once or (filled and filled + nbytes > most):
                steps.append([])
                filled = 0
            steps[-1].append(w)
            filled += nbytes
        return steps

    def covers(self, w: Wanted) -> bool:
        return id(w) in self.leaves

    def owners(self, wanted: Mapping[int, Wanted]) -> Owners | None:
        """Who reads what of some leaves, up to the next `complete`. None if all of them are read by each process."""
        covered = {number: w for number, w in wanted.items() if self.covers(w)}
        return plan_owners(covered, self.operation.index, self.operation.size, self.least) if covered else None

    def complete(
        self,
        owners: Owners,
        destinations: Mapping[int, Destination],
        wanted: Mapping[int, Wanted],
        progress: Progress,
    ) -> None:
        """Send what this process has read to those that need it, and receive what it needs.

        Args:
            owners: Who has read what.
            destinations: What this process has read, by number of the leaf. They become what it needs.
            wanted: The leaves, by number.
            progress: Counts what is received.
        """
        mine: dict[tuple[int, Region], Array] = {}
        for number in owners.reads:
            destination = destinations[number]
            read = dict(zip(destination.regions, destination.arrays, strict=True))
            destination.regions = wanted[number].regions(destination.leaf)
            destination.arrays = [read.get(region) for region in destination.regions]
            allocate([(destination, n) for n, array in enumerate(destination.arrays) if array is None])
            for region, array in read.items():
                assert array is not None
                mine[number, region] = array
                place = _place_in(destination, region)
                if place is not array:
                    place[...] = array
        self._wait_for_all()
        for group in sorted(owners.groups):  # in one order on all processes, so none waits for one that waits for it
            parts: dict[int, list[OwnedPart]] = {process: [] for process in group}
            for part in owners.groups[group]:
                parts[part.owner].append(part)
            at_once = self._limit // len(group)
            streams = [
                _sending(some, mine)
                if process == self.operation.index
                else _receiving(some, destinations, at_once, progress)
                for process, some in parts.items()
            ]
            lengths = [sum(_nbytes(part, destinations) for part in some) for some in parts.values()]
            share_bytes(streams, lengths, group, self._limit)

    def _wait_for_all(self) -> None:
        """Until all processes have read their parts. A process that has to start over brings False instead."""
        brought = self.operation.gather(True)
        if not self.operation.share(all(brought)):
            raise StartOver


def _place_in(destination: Destination, part: Region) -> Array:
    """The memory of a part in the region that it is a part of."""
    for region, array in zip(destination.regions, destination.arrays, strict=True):
        if region.intersect(part) == part:
            assert array is not None
            return array if region == part else array[(*part.within(region).slices, ...)]
    raise AssertionError(f"{part} is not needed")


def _nbytes(part: OwnedPart, destinations: Mapping[int, Destination]) -> int:
    return part.region.size * destinations[part.leaf].leaf.spec.dtype.itemsize


def _sending(parts: Sequence[OwnedPart], read: Mapping[tuple[int, Region], Array]) -> Generator[Array]:
    """The bytes of parts that this process has read."""
    for part in parts:
        yield np.ascontiguousarray(read[part.leaf, part.region]).reshape(-1).view(np.uint8)


def _receiving(
    parts: Sequence[OwnedPart], destinations: Mapping[int, Destination], at_once: int, progress: Progress
) -> Generator[Array]:
    """Memory for the bytes of parts that another process has read: where they belong, or aside, a few rows at once."""
    for part in parts:
        place = _place_in(destinations[part.leaf], part.region)
        for rows in [place] if place.flags.c_contiguous else _rows_of(place, at_once):
            memory = rows if rows.flags.c_contiguous else np.empty(rows.shape, rows.dtype)
            yield memory.reshape(-1).view(np.uint8)
            if memory is not rows:
                rows[...] = memory
            progress(memory.nbytes)


def _rows_of(place: Array, nbytes: int) -> Generator[Array]:
    """Memory of a part, in order, in pieces of about `nbytes` and of whole rows."""
    axis = next((axis for axis, n in enumerate(place.shape) if n > 1), 0)
    step = max(nbytes * place.shape[axis] // place.nbytes, 1)
    for start in range(0, place.shape[axis], step):
        yield place[(*[slice(None)] * axis, slice(start, start + step))]
