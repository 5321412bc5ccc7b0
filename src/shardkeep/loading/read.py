"""Reading files into host memory: only the blocks that are needed, each checked against its digest."""

import errno
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import zstandard

from shardkeep.errors import IntegrityError, MissingDataError
from shardkeep.loading.plan import Fetch, plan_steps, split_fetch
from shardkeep.model.arrays import Array, Region, touched_blocks
from shardkeep.model.digests import BLOCK, block_count, blocks, digest
from shardkeep.model.leaves import Piece, StoredArray
from shardkeep.model.manifest import DataFile
from shardkeep.runtime.crew import Crew, Task
from shardkeep.runtime.memory import ALIGN, Slabs, address_of
from shardkeep.runtime.progress import Progress
from shardkeep.stores.base import Mapping, Store, StoredFile

_MAP_FROM = 128 << 10  # mapping a file costs more than reading this much
_PART = 16 << 20
_STEP = 256 << 20
_NEAR = 4 << 10  # pieces no further apart are read ahead together
_REQUEST = 1 << 20  # a request to a bucket takes about as long as reading this

Maps = dict[int, tuple[Mapping, int]]  # by file: its mapping, and the offset at which it starts


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a saved tree."""

    store: Store
    files: Sequence[DataFile]
    compression: str | None = None
    verify: bool = True
    mapped: bool = True
    places: dict[int, str] = field(default_factory=dict[int, str])

    def where(self, number: int) -> str:
        """The path or URL of a file, for messages."""
        if number not in self.places:
            self.places[number] = self.store.locate(self.files[number].name)
        return self.places[number]

    def open(self, number: int, key: str) -> StoredFile:
        """A file of the tree that holds data of a leaf. It is there and has its size."""
        try:
            return self.open_file(number)
        except MissingDataError as error:
            raise MissingDataError(f"leaf {key!r}: {error}") from None
        except IntegrityError as error:
            raise IntegrityError(f"leaf {key!r}: {error}") from None

    def open_file(self, number: int) -> StoredFile:
        """A file of the tree. `MissingDataError` or `IntegrityError` if it is missing or does not have its size."""
        record = self.files[number]
        where = self.where(number)
        try:
            file = self.store.open(record.name)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingDataError(f"{where} is missing") from None
        if file.size == record.size:
            return file
        file.close()
        if file.size < record.size:
            raise IntegrityError(f"{where} is truncated: it has {file.size:,} of {record.size:,} bytes")
        raise IntegrityError(f"{where} has {file.size:,} bytes instead of {record.size:,}")


@dataclass(slots=True)
class Target:
    """Where the data of a leaf goes: its regions and an array for each. With `own`, these are not mapped files."""

    leaf: StoredArray
    regions: Sequence[Region]
    own: bool
    arrays: list[Array | None]

    def nbytes(self, number: int) -> int:
        return self.regions[number].size * self.leaf.spec.dtype.itemsize

    def take(self, number: int, memory: Array) -> None:
        """Use this memory for a region."""
        self.arrays[number] = memory.view(self.leaf.spec.dtype).reshape(self.regions[number].shape)


def read_targets(
    source: Source, targets: Sequence[Target], fetches: Sequence[Fetch], budget: int, crew: Crew, progress: Progress
) -> None:
    """Fill every target. Pieces are read in steps, so that memory beyond the targets stays within the budget."""
    limit = min(budget, _STEP)
    fetches = sorted(fetches, key=lambda fetch: (fetch.piece.file, fetch.piece.offset))
    alone = _fed_by_one(fetches)
    if not source.mapped or source.store.remote:
        fetches = [part for f in fetches for part in ([f] if _goes_whole(f, targets, alone) else split_fetch(f, limit))]
        alone = _fed_by_one(fetches)
    for step in plan_steps(fetches, limit):
        maps = _map_files(source, step, targets)
        read = [(fetch, _goes_whole(fetch, targets, alone)) for fetch in step if not _is_mapped(fetch.piece, maps)]
        staying = Slabs(fetch.piece.length for fetch, whole in read if whole)
        passing = Slabs(fetch.piece.length for fetch, whole in read if not whole)  # freed after this step
        into = {id(fetch): staying if whole else passing for fetch, whole in read}
        units = [_Unit(source, f, targets[f.leaf], maps, into.get(id(f), passing), progress) for f in step]
        _deliver(units, alone)
        crew.run(_tasks(units))
        crew.run(_late_copies(units))
    for target in targets:
        _fill_empty(target)


def _goes_whole(fetch: Fetch, targets: Sequence[Target], alone: set[tuple[int, int]]) -> bool:
    """Whether the piece is exactly its only target, so that it can be read into its final place."""
    number, common = fetch.targets[0]
    wanted = targets[fetch.leaf].regions[number]
    return len(fetch.targets) == 1 and (fetch.leaf, number) in alone and common == wanted == fetch.piece.region


def _fed_by_one(fetches: Sequence[Fetch]) -> set[tuple[int, int]]:
    """The (leaf, target) pairs that a single piece fills."""
    count: dict[tuple[int, int], int] = {}
    for fetch in fetches:
        for number, _ in fetch.targets:
            count[fetch.leaf, number] = count.get((fetch.leaf, number), 0) + 1
    return {pair for pair, n in count.items() if n == 1}


def _map_files(source: Source, step: Sequence[Fetch], targets: Sequence[Target]) -> Maps:
    """Mappings of the files from which this step reads enough, with the offsets at which they start."""
    if not source.mapped:
        return {}
    spans: dict[int, tuple[int, int, str]] = {}
    needed: dict[int, list[tuple[int, int]]] = {}
    for fetch in step:
        piece = fetch.piece
        if piece.stored is None and piece.length:
            low, high, key = spans.get(piece.file, (piece.offset, 0, targets[fetch.leaf].leaf.key))
            spans[piece.file] = (min(low, piece.offset), max(high, piece.offset + piece.length), key)
            if source.store.remote:
                ranges = needed_blocks(fetch, targets[fetch.leaf].leaf)
                needed.setdefault(piece.file, []).extend(
                    (piece.offset + a * BLOCK, min(b * BLOCK, piece.length) - a * BLOCK) for a, b in ranges
                )
    maps: Maps = {}
    for number, (low, high, key) in spans.items():
        if high - low >= _MAP_FROM or source.store.remote:
            with source.open(number, key) as file:
                try:
                    maps[number] = file.map(low, high - low, needed.get(number, ())), low
                except OSError as error:
                    if error.errno != errno.ENOMEM:  # the process has as many mappings as allowed: read the rest
                        raise
    return maps


def _is_mapped(piece: Piece, maps: Maps) -> bool:
    return piece.stored is None and piece.file in maps


def needed_blocks(fetch: Fetch, leaf: StoredArray) -> list[tuple[int, int]]:
    """The ranges of blocks of a piece that a fetch reads."""
    count = block_count(fetch.piece.length)
    if count == 1:
        return [(0, 1)]
    wanted = sum(common.size for common in {common for _, common in fetch.targets})
    if wanted == fetch.piece.region.size:  # targets do not overlap
        return [(0, count)]
    found: list[tuple[int, int]] = []
    for part in fetch.parts:
        found += touched_blocks(fetch.piece.region.shape, part, leaf.spec.dtype.itemsize, BLOCK)
    return _merged(found)


class _Unit:
    """One piece that is being read."""

    __slots__ = ("_progress", "_source", "_whole", "copies", "fetch", "mapping", "memory", "piece", "ranges", "target")

    def __init__(
        self, source: Source, fetch: Fetch, target: Target, maps: Maps, slabs: Slabs, progress: Progress
    ) -> None:
        self.fetch, self.target, self.piece = fetch, target, fetch.piece
        self._source, self._progress = source, progress
        self._whole: Array | None = None
        self.copies: list[tuple[int, Region]] = []  # parts that must be copied: (number of the target, part)
        self.mapping = maps[self.piece.file] if _is_mapped(self.piece, maps) else None
        if self.mapping:
            start = self.piece.offset - self.mapping[1]
            self.memory = self.mapping[0].data[start : start + self.piece.length]
        else:
            if self.piece.length > _PART:  # check that it is complete before allocating much memory
                source.open(self.piece.file, target.leaf.key).close()
            try:
                self.memory = slabs.take(self.piece.length)
            except (MemoryError, OSError, OverflowError, ValueError) as error:
                raise IntegrityError(
                    f"leaf {target.leaf.key!r}: cannot allocate {self.piece.length:,} bytes ({error})"
                ) from error
        self.ranges = self._ranges()

    def _ranges(self) -> list[tuple[int, int]]:
        """The blocks to read, in ranges of the size of a task."""
        if self.piece.stored is not None:
            return [(0, block_count(self.piece.length))]
        found = needed_blocks(self.fetch, self.target.leaf)
        if self.piece.length <= _PART:
            return found
        step = _PART // BLOCK
        return [(a, min(a + step, last)) for first, last in found for a in range(first, last, step)]

    def mapped(self, first: int, last: int) -> tuple[Mapping, int, int] | None:
        """The mapping that holds these blocks, with the range to read ahead; None if the piece is not mapped."""
        if self.mapping is None:
            return None
        low = self.piece.offset - self.mapping[1]
        return self.mapping[0], low + first * BLOCK, low + min(last * BLOCK, self.piece.length)

    def read(self, first: int, last: int) -> None:
        """Read blocks, unless they are mapped, and check them."""
        key, where = self.target.leaf.key, self._source.where(self.piece.file)
        start, end = first * BLOCK, min(last * BLOCK, self.piece.length)
        if not self.mapping:
            with self._source.open(self.piece.file, key) as file:
                if self.piece.stored is not None:
                    record = self._source.files[self.piece.file]
                    unpack(file, self.piece, record, self.memory, self._source.compression, key, where)
                else:
                    _read_exactly(file, self.piece.offset + start, self.memory[start:end], where)
        if self._source.verify:
            check_blocks(self.piece, first, last, self.memory[start:end], key, where)
        self._progress(end - start)

    @property
    def is_far(self) -> bool:
        return self._source.store.remote

    def view(self, common: Region) -> Array:
        """A view of a part of the piece."""
        if self._whole is None:
            self._whole = self.memory.view(self.target.leaf.spec.dtype).reshape(self.piece.region.shape)
        if common == self.piece.region:
            return self._whole
        return self._whole[(*common.within(self.piece.region).slices, ...)]

    def usable_view(self, number: int, common: Region) -> Array | None:
        """A view of this part, if JAX can use it without a copy (or the user, if the target must own its memory)."""
        if common != self.target.regions[number]:
            return None
        view = self.view(common)
        private = self.mapping is None and len(self.fetch.targets) == 1
        aligned = view.flags.c_contiguous and address_of(view) % ALIGN == 0
        return view if aligned and (private or not self.target.own) else None

    def copy(self) -> None:
        """Copy the parts that cannot be used in place to their targets."""
        for number, common in self.copies:
            filled = self.target.arrays[number]
            assert filled is not None
            filled[common.within(self.target.regions[number]).slices] = self.view(common)


def _tasks(units: Sequence[_Unit]) -> list[Task]:
    """Tasks of a useful size: parts of large pieces, or many small pieces."""
    large: list[Task] = []
    small: list[tuple[_Unit, int, int]] = []
    tasks: list[Task] = []
    size = 0
    files = len({unit.piece.file for unit in units})
    overhead = _REQUEST * files // max(len(units), 1) if units and units[0].is_far else 4096
    for unit in units:
        for first, last in unit.ranges:
            if last - first >= _PART // BLOCK:
                large.append(partial(_read_all, [(unit, first, last)]))
                continue
            small.append((unit, first, last))
            size += min(unit.piece.length, (last - first) * BLOCK) + overhead
            if size >= _PART:
                tasks.append(partial(_read_all, small))
                small, size = [], 0
    if small:
        tasks.append(partial(_read_all, small))
    return [*large, *tasks]


def _read_all(ranges: Sequence[tuple[_Unit, int, int]]) -> None:
    spans: list[tuple[Mapping, int, int]] = []
    for unit, first, last in ranges:
        if (span := unit.mapped(first, last)) is None:
            continue
        mapping, start, end = span
        if spans and spans[-1][0] is mapping and 0 <= start - spans[-1][2] <= _NEAR:  # one call for many small pieces
            spans[-1] = (mapping, spans[-1][1], end)
        else:
            spans.append(span)
    for mapping, start, end in spans:
        mapping.bring_in(start, end)
    for unit, first, last in ranges:
        unit.read(first, last)
        if len(unit.ranges) == 1:
            unit.copy()  # while it is in the cache


def _deliver(units: Sequence[_Unit], alone: set[tuple[int, int]]) -> None:
    """Use views where possible. The rest is copied later, into memory that is allocated here, in one thread."""
    lacking: list[tuple[Target, int]] = []
    for unit in units:
        for number, common in unit.fetch.targets:
            view = unit.usable_view(number, common) if (unit.fetch.leaf, number) in alone else None
            if view is not None:
                unit.target.arrays[number] = view
            else:
                unit.copies.append((number, common))
                lacking.append((unit.target, number))
    _allocate(lacking)


def _late_copies(units: Sequence[_Unit]) -> list[Task]:
    """The copies out of pieces that several threads have read."""
    return [unit.copy for unit in units if unit.copies and len(unit.ranges) > 1]


def _allocate(wanted: Sequence[tuple[Target, int]]) -> None:
    """Allocate memory for regions that have none."""
    lacking = {(id(target), number): target for target, number in wanted if target.arrays[number] is None}
    slabs = Slabs(target.nbytes(number) for (_, number), target in lacking.items())
    for (_, number), target in lacking.items():
        target.take(number, slabs.take(target.nbytes(number)))


def _fill_empty(target: Target) -> None:
    """Allocate regions without elements, which no piece fills."""
    for number, array in enumerate(target.arrays):
        if array is None:
            assert target.regions[number].size == 0
            _allocate([(target, number)])


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def check_blocks(piece: Piece, first: int, last: int, data: Array, key: str, where: str) -> None:
    """`IntegrityError` unless the blocks match their digests. Pieces without digests are not checked."""
    if piece.digests is None or (last - first == 1 and digest(data.data) == piece.digests[first]):
        return
    for number, start, end in blocks(first, last, piece.length):
        if digest(data[start - first * BLOCK : end - first * BLOCK].data) != piece.digests[number]:
            at = (
                ""
                if piece.stored is not None
                else f" between bytes {piece.offset + start:,} and {piece.offset + end:,}"
            )
            raise IntegrityError(f"leaf {key!r}: {where} is damaged{at}: the data does not match its digest")


def unpack(
    file: StoredFile, piece: Piece, record: DataFile, memory: Array, compression: str | None, key: str, where: str
) -> None:
    """Decode a compressed or bit-packed piece, never beyond its declared size."""
    assert piece.stored is not None
    packed = np.empty(piece.stored, np.uint8)
    _read_exactly(file, piece.offset, packed, where)
    if record.header_digest is not None and compression is not None and digest(packed.data) != record.header_digest:
        raise IntegrityError(f"leaf {key!r}: {where} is damaged: it does not match its digest")
    if compression is None:  # two 4-bit floats per byte, the low half first, as other programs write them
        memory[0::2] = packed & 15
        memory[1::2] = packed >> 4
        return
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed.data)) as reader:
            view = memoryview(memory.data)
            filled = 0
            while filled < piece.length and (count := reader.readinto(view[filled:])):
                filled += count
            complete = filled == piece.length and not reader.read(1)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"leaf {key!r}: {where} is damaged: {error}") from error
    if not complete:
        raise IntegrityError(f"leaf {key!r}: {where} is damaged: it does not decompress to {piece.length:,} bytes")


def _read_exactly(file: StoredFile, offset: int, buffer: Array, where: str) -> None:
    try:
        file.read_into(offset, buffer)
    except EOFError as error:
        raise IntegrityError(f"{where} is damaged: {error}") from error
