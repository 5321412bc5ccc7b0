"""Which process reads what of a load in which the others get it from there: each byte once, in the order of the files.

Processes that need the same regions are a group. Its members read about the same number of bytes, each a part of the
files in one go. Every process plans the parts of its own groups, and the others of a group plan the same.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from jax.sharding import Sharding

from shardkeep.loading.matching import Wanted
from shardkeep.model.arrays import Region
from shardkeep.model.digests import BLOCK, digest
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.leaves import StoredArray
from shardkeep.model.perprocess import PerProcessRows
from shardkeep.processes.assignment import Holding, held_by
from shardkeep.remap.expressions import DerivedArray, sources_of

_WIDEST_STEP = 4 * BLOCK  # bytes: pieces are cut between blocks if one such place in so many bytes is between rows

Processes = tuple[int, ...]  # their indices, in order


@fast_dataclass
class OwnedPart:
    """A part of a leaf, and the process that reads it.

    Attributes:
        leaf: The number of the leaf.
        region: The part.
        owner: The process.
    """

    leaf: int
    region: Region
    owner: int


@fast_dataclass
class Owners:
    """Who reads what of some leaves, as far as it concerns one process.

    Attributes:
        groups: For each group that the process belongs to, what its members need, in the order of the files.
        reads: What the process reads of each leaf; no leaf is in it that has no part in any group.
    """

    groups: dict[Processes, list[OwnedPart]]
    reads: dict[int, list[Region]]


def needed_by(w: Wanted, size: int) -> Sequence[Holding] | None:
    """The regions of a leaf and the processes that need each; None if they differ, or the leaf has no data."""
    leaf = w.stored
    if not isinstance(leaf, StoredArray) or isinstance(leaf.origin, PerProcessRows) or 0 in leaf.spec.shape:
        return None
    if w.own is not None:  # a part of it is the template's
        return None
    sharding = w.place.sharding
    if sharding is None or sharding.is_fully_addressable or w.needs_whole(leaf):
        return [(Region.whole(leaf.spec.shape), tuple(range(size)))]
    return held_by(sharding, leaf.spec.shape)


def outline_of(w: Wanted, size: int) -> str:
    """What the processes must have in common to share out a leaf; empty for one that each reads itself."""
    needed = needed_by(w, size)
    if needed is None:
        return ""
    leaf, sharding = w.stored, w.place.sharding
    assert isinstance(leaf, StoredArray)
    by_all = sharding is None or (len(needed) == 1 and len(needed[0][1]) == size)
    return f"{leaf.key}: {leaf.dtype}{list(leaf.spec.shape)} {'' if by_all else _digest_of(sharding, leaf.spec.shape)}"


@lru_cache(maxsize=1024)  # thousands of leaves share a few layouts
def _digest_of(sharding: Sharding, shape: tuple[int, ...]) -> str:
    return digest(repr([(r.start, r.shape, holders) for r, holders in held_by(sharding, shape)]).encode())


def most_needed(w: Wanted, size: int) -> int:
    """The most bytes that a single process needs of a leaf."""
    leaf = w.stored
    assert isinstance(leaf, StoredArray)
    return max(_counts(tuple(needed_by(w, size) or ())), default=0) * leaf.spec.dtype.itemsize


@lru_cache(maxsize=1024)
def _counts(needed: tuple[Holding, ...]) -> Sequence[int]:
    counts: dict[int, int] = {}
    for region, holders in needed:
        for process in holders:
            counts[process] = counts.get(process, 0) + region.size
    return tuple(counts.values())


def plan_owners(wanted: Mapping[int, Wanted], index: int, size: int, least: int) -> Owners:
    """Who reads what of leaves that all processes load alike.

    Args:
        wanted: The leaves, by number.
        index: The process that this is for.
        size: The number of processes.
        least: A region that fewer processes need is read by each of them.
    """
    parts: dict[Processes, list[_Part]] = {}
    alone: dict[int, list[Region]] = {}
    shared: set[int] = set()
    for number, w in wanted.items():
        for region, group in needed_by(w, size) or ():
            if index not in group:
                continue
            if len(group) < least:
                alone.setdefault(number, []).append(region)
            else:
                shared.add(number)
                parts.setdefault(group, []).extend(_parts(number, w, region))
    groups = {group: _share_out(sorted(some, key=_place), group) for group, some in parts.items()}
    reads = {number: alone.get(number, []) for number in shared}
    for some in groups.values():
        for part in some:
            if part.owner == index:
                reads[part.leaf].append(part.region)
    return Owners(groups, reads)


@fast_dataclass
class _Part:
    """A part of a leaf that has no owner yet.

    Attributes:
        leaf: The number of the leaf.
        region: The part.
        nbytes: Its size.
        place: Where in the files it is: file and offset.
        rows: It may be cut into so many rows and multiples of that; 0: not at all.
    """

    leaf: int
    region: Region
    nbytes: int
    place: tuple[int, int]
    rows: int = 0

    def cut(self, nbytes: int) -> "tuple[_Part | None, _Part | None]":
        """The first part, of about this size, and the rest. One of them is None if the part is not cut."""
        axis = _axis(self.region)
        if self.rows == 0 or axis is None:
            return (self, None) if 2 * nbytes >= self.nbytes else (None, self)
        row = self.nbytes // self.region.shape[axis]
        count = max(round(nbytes / (row * self.rows)), 0) * self.rows
        if count == 0:
            return None, self
        if count >= self.region.shape[axis]:
            return self, None
        return self._rows(axis, 0, count, row), self._rows(axis, count, self.region.shape[axis] - count, row)

    def _rows(self, axis: int, first: int, count: int, row: int) -> "_Part":
        start = tuple(a + first if i == axis else a for i, a in enumerate(self.region.start))
        shape = tuple(count if i == axis else n for i, n in enumerate(self.region.shape))
        return _Part(self.leaf, Region(start, shape), count * row, self.place, self.rows)


def _parts(number: int, w: Wanted, region: Region) -> list[_Part]:
    """A region in the parts in which it is stored."""
    leaf = w.stored
    assert isinstance(leaf, StoredArray)
    itemsize = leaf.spec.dtype.itemsize
    if isinstance(leaf, DerivedArray) or not leaf.pieces:
        return [_Part(number, region, region.size * itemsize, first_place(leaf))]
    found: list[_Part] = []
    for piece in leaf.pieces:
        common = piece.region.intersect(region)
        if common is not None:
            nbytes = common.size * itemsize
            rows = _rows_together(common, nbytes) if piece.stored is None else 0
            found.append(_Part(number, common, nbytes, (piece.file, piece.offset), rows))
    return found


def first_place(leaf: StoredArray) -> tuple[int, int]:
    """Where in the files a leaf begins, or what it is made of first: file and offset."""
    stored = sources_of(leaf.expression)[:1] if isinstance(leaf, DerivedArray) else [leaf]
    return next(((piece.file, piece.offset) for each in stored for piece in each.pieces), (-1, 0))


def _rows_together(region: Region, nbytes: int) -> int:
    """How many rows are read together, so that different processes read different blocks; 0 for what is not cut."""
    axis = _axis(region)
    if nbytes <= BLOCK or axis is None:
        return 0
    row = nbytes // region.shape[axis]
    rows = BLOCK // math.gcd(BLOCK, row)
    return rows if rows * row <= max(_WIDEST_STEP, row) else math.ceil(BLOCK / row)


def _axis(region: Region) -> int | None:
    """The axis along which a region is cut: its parts are one after the other in memory."""
    return next((axis for axis, n in enumerate(region.shape) if n > 1), None)


def _place(part: _Part) -> tuple[int, int]:
    return part.place


def _share_out(parts: Sequence[_Part], group: Processes) -> list[OwnedPart]:
    """An owner for each part. Each member gets neighbours, and cuts are made only where one member's share ends."""
    total = sum(part.nbytes for part in parts)
    owned: list[OwnedPart] = []
    at = done = 0
    for part in parts:
        rest: _Part | None = part
        while rest is not None:
            end = total * (at + 1) // len(group)
            fits = at == len(group) - 1 or done + rest.nbytes <= end
            first, rest = (rest, None) if fits else rest.cut(end - done)
            if first is not None:
                owned.append(OwnedPart(first.leaf, first.region, group[at]))
                done += first.nbytes
            if rest is not None:
                at += 1
    return owned
