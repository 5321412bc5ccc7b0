"""Writing files in parallel; each block is hashed right before it is written."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

from shardkeep.errors import TreeError
from shardkeep.layouts.assembly import part_of
from shardkeep.layouts.plan import FilePlan, PiecePlan, SavePlan, TreePlan, WrittenFile, WrittenPart
from shardkeep.model.arrays import Array, common_slices, rows_of
from shardkeep.model.digests import BLOCK, block_count, blocks, digest
from shardkeep.runtime.crew import Crew, Task
from shardkeep.runtime.hostmemory import PAGE, address_of, aligned_empty
from shardkeep.runtime.priority import priority
from shardkeep.runtime.progress import Progress
from shardkeep.saving.snapshot import Snapshot
from shardkeep.saving.transfer import AnyShard, Arriving
from shardkeep.stores.base import NewFile, Store, is_editable

_LARGE = 4 << 20  # files from this size on are tasks of their own, and larger ones several tasks
_ALIGNED = 1 << 20  # the same, if they are in memory as they will be on the disk
_PART = 16 << 20  # bytes of a large file that one task writes
_HASHED_AT_ONCE = 4 << 20  # bytes hashed before they are written: more would not stay in the cache
_ROOM = 8 << 20  # memory for bytes that are assembled or copied before they are written
_KEPT = 32  # finished files that are not closed yet
_FEW = 8  # files: up to so many are synced one by one, so that an error names its file
_SMALL = 64 << 10  # smaller pieces and files take longer in the interpreter than on the disk
_OFTEN = 8  # small pieces between two looks at the clock: they take 0.1 ms, and a pause is due after 2
_BATCH = 8 << 20  # bytes of small files that one task writes
_FILE_COST = 64 << 10  # creating a file takes about as long as writing this

_ROOMS = 2  # buffers kept for the next save
_rooms: list[Array] = []

BlockRanges = Sequence[tuple[int, int, int]]  # (piece, first block, last block)


def write_files(
    store: Store,
    plan: SavePlan,
    snapshot: Snapshot,
    crew: Crew,
    opened: "NewFiles",
    progress: Progress,
) -> list[WrittenFile]:
    """Write the files as planned, with a digest for every byte. The directories are not synced yet."""
    writers = [_FileWriter(store, tree, file, snapshot, opened, progress) for tree in plan.trees for file in tree.files]
    tasks: list[tuple[Task, list[PiecePlan]]] = []  # with the pieces that each writes
    batch: list[_FileWriter] = []
    cost = 0
    for writer in writers:
        if writer.parts:
            for part in writer.parts:
                tasks.append((partial(writer.write_part, part), [writer.plan.pieces[number] for number, _, _ in part]))
            continue
        batch.append(writer)
        cost += _FILE_COST + writer.nbytes
        if cost >= _BATCH or store.traits.costly_requests:
            tasks.append((partial(_write_all, batch), [piece for each in batch for piece in each.plan.pieces]))
            batch, cost = [], 0
    if batch:
        tasks.append((partial(_write_all, batch), [piece for each in batch for piece in each.plan.pieces]))
    if snapshot.transfers is None:
        crew.run([task for task, _ in tasks])
    else:
        snapshot.transfers.run([(task, _arriving(pieces, snapshot.shards)) for task, pieces in tasks], crew)
    if len(writers) <= _FEW:  # here, where each error is raised; then they leave the page cache
        opened.sync()
    opened.release()
    return [writer.result() for writer in writers]


def write_tables(store: Store, plan: SavePlan, written: Sequence[WrittenFile], opened: "NewFiles") -> list[WrittenPart]:
    """What this process has written of each tree, once its pieces are in tables. They are not synced yet."""
    parts: list[WrittenPart] = []
    rest = iter(written)
    for tree in plan.trees:
        part = part_of(tree, [next(rest) for _ in tree.files])
        parts.append(part)
        if part.table_file:
            file = store.write_new(part.table_file.name, part.table_file.size, [memoryview(part.table)])
            if file is not None:
                opened.add(file)
    opened.release()
    return parts


def _write_all(batch: "list[_FileWriter]") -> None:
    for writer in batch:
        writer.write_whole()
        if writer.nbytes < _SMALL:
            priority.yield_to_training()


def _arriving(pieces: Sequence[PiecePlan], shards: Sequence[AnyShard]) -> list[Arriving]:
    """The data that pieces consist of and that comes from accelerators."""
    found = {shard: shards[shard] for piece in pieces for shard, _ in piece.sources}
    return [shard for shard in found.values() if isinstance(shard, Arriving)]


class _FileWriter:
    """Writes one file, in one task or in parts, and collects its digests."""

    def __init__(
        self,
        store: Store,
        tree: TreePlan,
        plan: FilePlan,
        snapshot: Snapshot,
        opened: "NewFiles",
        progress: Progress,
    ) -> None:
        self._store, self._tree, self.plan, self._opened, self._progress = store, tree, plan, opened, progress
        self._shards, self._memory = snapshot.shards, snapshot.memory
        self.nbytes = sum(piece.nbytes for piece in plan.pieces)
        self.size = plan.size
        self.loose_digest = digest(plan.header)  # of the bytes that the digests of pieces do not cover
        self.digests: list[list[str]] = [[""] * block_count(piece.nbytes) for piece in plan.pieces]
        large = self.nbytes >= (_LARGE if self._memory is None else _ALIGNED)
        self.parts = _split(plan) if large and plan.size is not None and store.traits.editable else []
        self.file: NewFile | None = None
        self._left = len(self.parts)
        self._lock = threading.Lock()

    def write_whole(self) -> None:
        limit = self._store.traits.object_limit
        if limit is not None and self.nbytes > 2 * limit:
            self.write_large()
            return
        everything = [(number, 0, block_count(piece.nbytes)) for number, piece in enumerate(self.plan.pieces)]
        segments = self._segments(everything)
        if self.plan.size is None:
            segments = [self.plan.codec.encode(segments[0])]
            self.size = len(segments[0])
            self.loose_digest = digest(segments[0])
        header = self._header() if self._tree.document else self.plan.header
        total = len(header) + sum(map(len, segments))
        file = self._store.write_new(self.plan.name, total, [memoryview(header), *segments])
        if file is not None:
            self._opened.add(file)
            self._opened.finish(file)
        self._progress(self.nbytes)

    def result(self) -> WrittenFile:
        """Sizes and digests, once everything is hashed."""
        return WrittenFile(self.size or 0, self.loose_digest, tuple(map(tuple, self.digests)))

    def _header(self) -> bytes:
        """The header with the manifest, once everything is hashed."""
        return self._tree.layout.complete(self._tree, self.plan, self.result())

    def write_large(self) -> None:
        """Write a file that is too large for memory: hash it first, then put it part by part."""
        parts = _split(self.plan)
        for part in parts:
            self._segments(part)
        before = [list(digests) for digests in self.digests]
        header = self._header() if self._tree.document else self.plan.header

        def stream() -> Iterator[memoryview]:
            yield memoryview(header)
            for part in parts:
                segments = self._segments(part)
                if self.digests != before:
                    raise TreeError(
                        f"an array in {self.plan.name} was modified while it was being saved; nothing was committed"
                    )
                yield from segments
                self._progress(sum(map(len, segments)))

        self._store.write_new(self.plan.name, len(header) + self.nbytes, stream())

    def write_part(self, part: BlockRanges) -> None:
        number, first, _ = part[0]
        offset = self.plan.pieces[number].offset + first * BLOCK
        memory = self._in_place(part, offset)
        if memory is None:
            self._write_copied(part, offset)
        else:
            self._write_in_place(part, offset, memory)
        with self._lock:
            self._left -= 1
            if self._left == 0 and self.file is not None:
                if self._tree.document:
                    self.file.write(0, [memoryview(self._header())])
                self._opened.finish(self.file)
                self.file = None

    def _write_copied(self, part: BlockRanges, offset: int) -> None:
        pieces, shards, progress = self.plan.pieces, self._shards, self._progress
        with _BufferedWriter(self._open(), offset) as run:
            for number, first, last in part:
                piece, digests = pieces[number], self.digests[number]
                view = _view(piece, shards) if piece.nbytes < _SMALL else None
                if view is not None:  # as of most small pieces, for which what follows takes longer than their bytes
                    digests[0] = digest(view)
                    run.add(view)
                    progress(piece.nbytes)
                    if number % _OFTEN == 0:
                        priority.yield_to_training()
                    continue
                several = len(piece.sources) > 1
                memory = run.room(piece.nbytes) if several and piece.nbytes <= _ROOM else None
                raw = gather(piece, shards, memory)
                stable = len(piece.sources) != 1 or shards[piece.sources[0][0]].stable
                for block, start, end in blocks(first, last, raw.size):
                    data = raw[start:end]
                    if not stable:  # the program could change it between hashing and writing
                        data = run.room(end - start)
                        data[...] = raw[start:end]
                    view = memoryview(cast(Any, data))
                    digests[block] = digest(view)
                    run.add(view)
                    progress(end - start)
                if piece.nbytes < _SMALL and number % _OFTEN == 0:
                    priority.yield_to_training()

    def _write_in_place(self, part: BlockRanges, offset: int, memory: Array) -> None:
        view, at = memoryview(cast(Any, memory)), 0
        for number, first, last in part:
            for block, start, end in blocks(first, last, self.plan.pieces[number].nbytes):
                self.digests[number][block] = digest(view[at : at + end - start])
                at += end - start
        self._open().write_aligned(offset, memory)
        self._progress(at)

    def _in_place(self, part: BlockRanges, offset: int) -> Array | None:
        """The memory of the part, if it is laid out in the snapshot exactly as in the file."""
        if self._memory is None:
            return None
        origin = address_of(self._memory)
        spans: list[tuple[int, int]] = []
        for number, first, last in part:
            piece = self.plan.pieces[number]
            (shard, region), *others = piece.sources
            begin = address_of(self._shards[shard].data) - origin + first * BLOCK
            end = begin + min(last * BLOCK, piece.nbytes) - first * BLOCK
            inside = 0 <= begin <= end <= self._memory.size
            if others or region != piece.region or not inside or (spans and begin != spans[-1][1]):
                return None
            spans.append((begin, end))
        memory = self._memory[spans[0][0] : spans[-1][1]]
        return memory if (address_of(memory) - offset) % PAGE == 0 else None

    def _open(self) -> NewFile:
        """The file, opened by the first part and closed by the last, so that few are open at a time."""
        with self._lock:
            if self.file is None:
                assert is_editable(self._store), "only its files are written in parts"
                new = self._store.create(self.plan.name, self.plan.size or 0, self._memory is not None)
                self.file = self._opened.add(new)
                if not self._tree.document:  # else it is written last
                    self.file.write(0, [memoryview(self.plan.header)])
            return self.file

    def _segments(self, part: BlockRanges) -> list[memoryview]:
        """The bytes of (piece, first block, last block) ranges. Their digests are recorded."""
        segments: list[memoryview] = []
        for number, first, last in part:
            piece = self.plan.pieces[number]
            raw = gather(piece, self._shards)[first * BLOCK : last * BLOCK]
            if not all(self._shards[shard].stable for shard, _ in piece.sources):
                raw = raw.copy()  # the program could change it between hashing and writing
            view = memoryview(cast(Any, raw))
            for block in range(first, last):
                start = (block - first) * BLOCK
                self.digests[number][block] = digest(view[start : start + BLOCK])
            segments.append(view)
        return segments


class _BufferedWriter:
    """Consecutive bytes of a file, written a few at a time while they are in the cache."""

    def __init__(self, file: NewFile, offset: int) -> None:
        self._file, self._offset = file, offset
        self._views: list[memoryview] = []
        self._nbytes = self._taken = 0
        self._memory: Array | None = None

    def room(self, nbytes: int) -> Array:
        """Memory, at most `_ROOM`, for the bytes that are added next."""
        if self._memory is None:
            with suppress(IndexError):
                self._memory = _rooms.pop()
        if self._memory is None:
            self._memory = aligned_empty(_ROOM)
        if self._taken + nbytes > _ROOM:
            self._flush()
            self._taken = 0
        memory = self._memory[self._taken : self._taken + nbytes]
        self._taken += nbytes
        return memory

    def add(self, view: memoryview) -> None:
        self._views.append(view)
        self._nbytes += len(view)
        if self._nbytes >= _HASHED_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        self._file.write(self._offset, self._views)
        self._offset += self._nbytes
        self._views, self._nbytes = [], 0

    def __enter__(self) -> "_BufferedWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()
        if self._memory is not None and len(_rooms) < _ROOMS:
            _rooms.append(self._memory)


@dataclass(eq=False)
class NewFiles:
    """The files that a save has open. They belong to its scope and are closed after its threads have ended.

    A finished file is closed some files later: pages that are on the disk by then leave the page cache.
    """

    _open: list[NewFile] = field(default_factory=list[NewFile])
    _finished: deque[NewFile] = field(default_factory=deque[NewFile])

    def add(self, file: NewFile) -> NewFile:
        self._open.append(file)
        return file

    def finish(self, file: NewFile) -> None:
        self._finished.append(file)
        if len(self._finished) > _KEPT:
            with suppress(IndexError):  # another thread has closed it
                oldest = self._finished.popleft()
                oldest.close()
                self._open.remove(oldest)

    def sync(self) -> None:
        for file in self._open:
            file.sync()

    def release(self) -> None:
        while self._open:
            self._open[-1].close()
            self._open.pop()


def _split(plan: FilePlan) -> list[list[tuple[int, int, int]]]:
    """The parts of a large file, as consecutive (piece, first block, last block) ranges."""
    parts: list[list[tuple[int, int, int]]] = [[]]
    room = _PART
    for number, piece in enumerate(plan.pieces):
        nbytes = piece.nbytes
        # Small pieces keep the interpreter busy, and several threads would only compete for it.
        if 0 < nbytes < _SMALL and nbytes // 4 <= room:
            parts[-1].append((number, 0, 1))
            room -= nbytes // 4
            continue
        total = block_count(nbytes)
        step = _PART // BLOCK if len(piece.sources) == 1 else max(total, 1)
        for first in range(0, total, step):
            last = min(first + step, total)
            size = min(last * BLOCK, nbytes) - first * BLOCK
            cost = size if size >= _SMALL else size // 4
            if parts[-1] and cost > room:
                parts.append([])
                room = _PART
            parts[-1].append((number, first, last))
            room -= cost
    return parts


def _view(piece: PiecePlan, shards: Sequence[AnyShard]) -> memoryview | None:
    """The bytes of a piece if they are all of a shard, in C order, and nothing can change them."""
    number, region = piece.sources[0]
    shard = shards[number]
    if region is not piece.region or len(piece.sources) > 1 or not shard.stable:
        return None
    data = shard.data
    # Only memory of NumPy's own dtypes can be cast to bytes without another array.
    if not data.flags.c_contiguous or data.dtype.isbuiltin != 1 or data.dtype.kind not in "biuf":
        return None
    return data.data.cast("B")


def gather(piece: PiecePlan, shards: Sequence[AnyShard], memory: Array | None = None) -> Array:
    """The bytes of a piece in C order: a view if they are contiguous, else assembled, in `memory` if given."""
    if not piece.nbytes:  # a process may hold any empty part of an empty array, or none
        return np.empty(0, np.uint8)
    (shard, region), *others = piece.sources
    if not others:
        data = shards[shard].data
        if region is not piece.region and region != piece.region:
            data = data[piece.region.within(region).slices]
        return (data if data.flags.c_contiguous else np.ascontiguousarray(data)).reshape(-1).view(np.uint8)
    memory = aligned_empty(piece.nbytes) if memory is None else memory
    whole: Array = memory.view(shards[shard].data.dtype).reshape(piece.region.shape)
    rows = rows_of(piece.region, tuple([region for _, region in piece.sources]))
    for slices, axis, numbers in rows:
        np.concatenate([shards[piece.sources[n][0]].data for n in numbers], axis, out=whole[slices])
    for shard, region in () if rows else piece.sources:
        here, there = common_slices(piece.region, region)
        whole[here] = shards[shard].data[there]
    return memory
