"""Reading files into host memory: only the blocks that are needed, each checked against its digest."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from shardkeep.errors import IntegrityError
from shardkeep.foreign.base import ArrayReader
from shardkeep.foreign.registry import open_array
from shardkeep.loading.blocks import PART, BlockReader, Range, parts_of
from shardkeep.loading.plan import Destination, Fetch, plan_steps, split_fetch
from shardkeep.model.arrays import Array, Region, bands, touched_blocks
from shardkeep.model.digests import BLOCK, block_count
from shardkeep.model.leaves import ForeignArray, StoredArray
from shardkeep.model.pieces import StoredPieces
from shardkeep.remap.moving import change_into
from shardkeep.runtime.crew import Crew, Task
from shardkeep.runtime.hostmemory import ALIGN, Slabs, address_of
from shardkeep.runtime.progress import Progress
from shardkeep.stores.base import MappedFile, Store

_MAP_FROM = 128 << 10  # mapping a file costs more than reading this much
STEP = 256 << 20  # bytes of pieces that are in memory at once, besides the arrays that are made of them
_NEAR = 4 << 10  # pieces no further apart are read ahead together
_REQUEST = 1 << 20  # a request to a bucket takes about as long as reading this

Maps = dict[int, tuple[MappedFile, int]]  # by file: its mapping, and the offset at which it starts


def read_into(
    reader: BlockReader,
    destinations: Mapping[int, Destination],
    fetches: Sequence[Fetch],
    budget: int,
    crew: Crew,
    progress: Progress,
    claim: Callable[[int], None] | None = None,
) -> None:
    """Fill destinations, by number of the leaf. Pieces are read in steps: the memory for these fits the budget.

    Before each step that needs such memory, `claim` is called with its size, and may wait until there is so much.
    """
    crew.run(
        partial(_read_foreign, reader.store, destination, progress)
        for destination in destinations.values()
        if isinstance(destination.leaf.origin, ForeignArray) and destination.regions
    )
    limit = min(budget, STEP)
    fetches = sorted(fetches, key=lambda fetch: (fetch.piece.file, fetch.piece.offset))
    alone = _fed_by_one(fetches, destinations)
    if not reader.mapped or reader.store.traits.costly_requests:
        whole = [_goes_whole(fetch, destinations, alone) for fetch in fetches]
        fetches = [part for f, w in zip(fetches, whole, strict=True) for part in ([f] if w else split_fetch(f, limit))]
        alone = _fed_by_one(fetches, destinations)
    claimed = False
    for step in plan_steps(fetches, limit):
        maps = _map_files(reader, step, destinations)
        unmapped = [fetch for fetch in step if fetch.piece.stored is not None or fetch.piece.file not in maps]
        read = [(fetch, _goes_whole(fetch, destinations, alone)) for fetch in unmapped]
        staying = Slabs(fetch.piece.length for fetch, whole in read if whole)
        passing = Slabs(fetch.piece.length for fetch, whole in read if not whole)  # freed after this step
        if claim is not None and (passing.nbytes or claimed):
            claim(passing.nbytes)
            claimed = passing.nbytes > 0
        into = {id(fetch): staying if whole else passing for fetch, whole in read}
        units = [_Unit(reader, f, destinations[f.leaf], maps, into.get(id(f), passing)) for f in step]
        _deliver(units, alone)
        crew.run(_tasks(units, reader, progress))
        crew.run([unit.copy for unit in units if unit.copies and len(unit.ranges) > 1])  # several threads read these
        del units, staying, passing, into  # the memory of this step is free before the next one takes as much
    allocate(
        [(each, n) for each in destinations.values() for n, array in enumerate(each.arrays) if array is None]
    )  # empty


def read_tables(needed: Iterable[tuple[StoredArray, Sequence[Region]]], crew: Crew) -> None:
    """Read the tables of pieces that regions of arrays need from their files, several at a time."""
    tables: dict[tuple[int, int], Task] = {}
    for leaf, regions in needed:
        pieces = leaf.pieces
        if isinstance(pieces, StoredPieces):
            for number in filter(pieces.tables.unread, pieces.tables_meeting(regions)):
                tables[id(pieces.tables), number] = partial(pieces.tables.try_table, number)
    crew.run(tables.values())


def _read_foreign(store: Store, destination: Destination, progress: Progress) -> None:
    """An array of another program, which has no pieces."""
    array = open_array(store, destination.leaf)
    if any(memory is not None for memory in destination.arrays):
        _fill_from(array, destination, progress)
        return
    destination.arrays[:] = [array.read(region) for region in destination.regions]
    progress(sum(map(destination.nbytes, range(len(destination.regions)))))


def _fill_from(array: ArrayReader, destination: Destination, progress: Progress) -> None:
    """Fill memory that is there already, which may be scattered: each chunk is read once for all of it."""
    spec = destination.leaf.spec
    for cell in bands(spec.shape, spec.dtype.itemsize, array.chunks, PART):
        common = [(n, c) for n, region in enumerate(destination.regions) if (c := region.intersect(cell)) is not None]
        if not common:
            continue
        hull = Region.around([part for _, part in common])
        data = array.read(hull)
        for n, part in common:
            filled = destination.arrays[n]
            assert filled is not None
            place = filled[(*part.within(destination.regions[n]).slices, ...)]
            change_into(
                place, data[(*part.within(hull).slices, ...)], destination.functions[n] if destination.functions else ()
            )
        progress(data.nbytes)


def _goes_whole(fetch: Fetch, destinations: Mapping[int, Destination], alone: set[tuple[int, int]]) -> bool:
    """Whether the piece is exactly the only region that it fills, so that it can be read into its final place."""
    number, common = fetch.fills[0]
    wanted = destinations[fetch.leaf].regions[number]
    return len(fetch.fills) == 1 and (fetch.leaf, number) in alone and common == wanted == fetch.piece.region


def _fed_by_one(fetches: Sequence[Fetch], destinations: Mapping[int, Destination]) -> set[tuple[int, int]]:
    """The regions, as (leaf, number of the region), that a single piece fills, and that may be the memory it is in."""
    count: dict[tuple[int, int], int] = {}
    for fetch in fetches:
        for number, _ in fetch.fills:
            count[fetch.leaf, number] = count.get((fetch.leaf, number), 0) + 1
    return {pair for pair, n in count.items() if n == 1 and destinations[pair[0]].arrays[pair[1]] is None}


def _map_files(reader: BlockReader, step: Sequence[Fetch], destinations: Mapping[int, Destination]) -> Maps:
    """Mappings of the files from which this step reads enough, with the offsets at which they start."""
    if not reader.mapped:
        return {}
    spans: dict[int, tuple[int, int, StoredArray]] = {}
    needed: dict[int, list[tuple[int, int]]] = {}
    for fetch in step:
        piece = fetch.piece
        if piece.stored is None and piece.length:
            low, high, leaf = spans.get(piece.file, (piece.offset, 0, destinations[fetch.leaf].leaf))
            spans[piece.file] = (min(low, piece.offset), max(high, piece.offset + piece.length), leaf)
            if reader.store.traits.costly_requests:
                ranges = needed_blocks(fetch, destinations[fetch.leaf].leaf)
                needed.setdefault(piece.file, []).extend(
                    (piece.offset + a * BLOCK, min(b * BLOCK, piece.length) - a * BLOCK) for a, b in ranges
                )
    maps: Maps = {}
    for number, (low, high, leaf) in spans.items():
        if high - low >= _MAP_FROM or reader.store.traits.costly_requests:
            mapping = reader.map(number, low, high, leaf, needed.get(number, ()))
            if mapping is not None:  # else it is read
                maps[number] = mapping, low
    return maps


def needed_blocks(fetch: Fetch, leaf: StoredArray) -> list[Range]:
    """The ranges of blocks of a piece that a fetch reads."""
    count = block_count(fetch.piece.length)
    if count == 1:
        return [(0, 1)]
    wanted = sum(common.size for common in {common for _, common in fetch.fills})
    if wanted == fetch.piece.region.size:  # regions do not overlap
        return [(0, count)]
    found: list[tuple[int, int]] = []
    for part in fetch.parts:
        found += touched_blocks(fetch.piece.region.shape, part, leaf.spec.dtype.itemsize, BLOCK)
    return _merged(found)


class _Unit:
    """One piece that is being read."""

    __slots__ = ("_whole", "copies", "destination", "fetch", "mapping", "memory", "piece", "ranges")

    def __init__(self, reader: BlockReader, fetch: Fetch, destination: Destination, maps: Maps, slabs: Slabs) -> None:
        self.fetch, self.destination, self.piece = fetch, destination, fetch.piece
        self._whole: Array | None = None
        self.copies: list[tuple[int, Region]] = []  # parts that must be copied: (number of the region, part)
        self.mapping = maps.get(self.piece.file) if self.piece.stored is None else None
        if self.mapping:
            start = self.piece.offset - self.mapping[1]
            self.memory = self.mapping[0].data[start : start + self.piece.length]
        else:
            if self.piece.length > PART:  # check that it is complete before allocating much memory
                reader.open(self.piece.file, destination.leaf.key).close()
            try:
                self.memory = slabs.take(self.piece.length)
            except (MemoryError, OSError, OverflowError, ValueError) as error:
                problem = f"cannot allocate {self.piece.length:,} bytes ({error})"
                raise IntegrityError(problem, leaf=destination.leaf.key) from error
        self.ranges = parts_of(self.piece, needed_blocks(fetch, destination.leaf))

    def view(self, common: Region) -> Array:
        """A view of a part of the piece."""
        if self._whole is None:
            self._whole = self.memory.view(self.destination.leaf.spec.dtype).reshape(self.piece.region.shape)
        if common == self.piece.region:
            return self._whole
        return self._whole[(*common.within(self.piece.region).slices, ...)]

    def usable_view(self, number: int, common: Region) -> Array | None:
        """A view of this part, if JAX can use it without a copy (the user, if it must own its memory)."""
        if common != self.destination.regions[number]:
            return None
        view = self.view(common)
        private = self.mapping is None and len(self.fetch.fills) == 1
        aligned = view.flags.c_contiguous and address_of(view) % ALIGN == 0
        return view if aligned and (private or not self.destination.own) else None

    def copy(self) -> None:
        """Copy the parts that cannot be used in place."""
        for number, common in self.copies:
            filled = self.destination.arrays[number]
            assert filled is not None
            place = (*common.within(self.destination.regions[number]).slices, ...)
            if self.destination.functions:
                change_into(filled[place], self.view(common), self.destination.functions[number])
            else:
                filled[place] = self.view(common)


def _tasks(units: Sequence[_Unit], reader: BlockReader, progress: Progress) -> list[Task]:
    """Tasks of a useful size: parts of large pieces, or many small pieces."""
    large: list[Task] = []
    small: list[tuple[_Unit, int, int]] = []
    tasks: list[Task] = []
    size = 0
    files = len({unit.piece.file for unit in units})
    overhead = _REQUEST * files // max(len(units), 1) if reader.store.traits.costly_requests else 4096
    for unit in units:
        for first, last in unit.ranges:
            if last - first >= PART // BLOCK:
                large.append(partial(_read_all, reader, progress, [(unit, first, last)]))
                continue
            small.append((unit, first, last))
            size += min(unit.piece.length, (last - first) * BLOCK) + overhead
            if size >= PART:
                tasks.append(partial(_read_all, reader, progress, small))
                small, size = [], 0
    if small:
        tasks.append(partial(_read_all, reader, progress, small))
    return [*large, *tasks]


def _read_all(reader: BlockReader, progress: Progress, ranges: Sequence[tuple[_Unit, int, int]]) -> None:
    spans: list[tuple[MappedFile, int, int]] = []
    for unit, first, last in ranges:
        if unit.mapping is None:
            continue
        mapping, low = unit.mapping[0], unit.piece.offset - unit.mapping[1]
        start, end = low + first * BLOCK, low + min(last * BLOCK, unit.piece.length)
        if spans and spans[-1][0] is mapping and 0 <= start - spans[-1][2] <= _NEAR:  # one call for many small pieces
            spans[-1] = (mapping, spans[-1][1], end)
        else:
            spans.append((mapping, start, end))
    for mapping, start, end in spans:
        mapping.bring_in(start, end)
    for unit, first, last in ranges:
        leaf, memory = unit.destination.leaf, unit.memory[first * BLOCK : last * BLOCK]
        (reader.read if unit.mapping is None else reader.check)(leaf, unit.piece, (first, last), memory)
        progress(memory.size)
        if len(unit.ranges) == 1:
            unit.copy()  # while it is in the cache


def _deliver(units: Sequence[_Unit], alone: set[tuple[int, int]]) -> None:
    """Use views where possible. The rest is copied later, into memory that is allocated here, in one thread."""
    lacking: list[tuple[Destination, int]] = []
    for unit in units:
        for number, common in unit.fetch.fills:
            view = unit.usable_view(number, common) if (unit.fetch.leaf, number) in alone else None
            if view is not None:
                unit.destination.arrays[number] = view
            else:
                unit.copies.append((number, common))
                lacking.append((unit.destination, number))
    allocate(lacking)


def allocate(wanted: Sequence[tuple[Destination, int]]) -> None:
    """Allocate memory for regions that have none."""
    lacking = {(id(each), number): each for each, number in wanted if each.arrays[number] is None}
    slabs = Slabs(each.nbytes(number) for (_, number), each in lacking.items())
    for (_, number), each in lacking.items():
        each.take(number, slabs.take(each.nbytes(number)))


def _merged(ranges: list[Range]) -> list[Range]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
