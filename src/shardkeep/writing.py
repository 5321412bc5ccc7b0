"""Bytes to files: hashed while hot, written in parallel, each block once."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import numpy as np
import zstandard

from shardkeep.arrays import common_slices, rows_of
from shardkeep.digests import BLOCK, block_count, blocks, digest
from shardkeep.errors import TreeError
from shardkeep.memory import PAGE, Array, Shard, address_of, aligned_empty
from shardkeep.planning import FilePlan, LeafPlan, PiecePlan, WrittenFile
from shardkeep.progress import Progress
from shardkeep.stores.base import NewFile, Store
from shardkeep.workers import Crew, Task, manners

_LARGE = 4 << 20  # files from this size on are written on their own, and in parts if they are still larger
_ALIGNED = 1 << 20  # from this size on, too, if they lie in memory as they will on the disk
_PART = 16 << 20  # what one task writes of a large file
_RUN = 4 << 20  # what is hashed and then written: more is not hot any more
_ROOM = 8 << 20  # for what is put together or copied before it is written
_KEPT = 32  # files that wait to be closed
_FEW = 8
_SMALL = 64 << 10
_BATCH = 8 << 20  # what one task writes in small files
_FILE_COST = 64 << 10  # making a file costs about as much as writing this
_ZSTD_LEVEL = 1

_ROOMS = 2  # rooms that wait for the next save
_rooms: list[Array] = []

Part = Sequence[tuple[int, int, int]]  # (piece, first block, last block)
Complete = Callable[[FilePlan, WrittenFile], bytes]


def write_files(
    store: Store,
    files: Sequence[FilePlan],
    leaves: Sequence[LeafPlan],
    shards: Sequence[Shard],
    crew: Crew,
    opened: "NewFiles",
    progress: Progress,
    complete: Complete | None = None,
    memory: Array | None = None,
) -> list[WrittenFile]:
    """Write files as planned. What the caller gets has a digest for every byte; their names are not synced yet.

    `complete` gives a file its header once its digests are known: objects are put whole, and never changed.
    `memory`: where shards were copied to; what lies there as it will in a file is written from there.
    """
    writers = [_FileWriter(store, file, leaves, shards, progress, complete, memory, opened) for file in files]
    tasks: list[Task] = []
    batch: list[_FileWriter] = []
    cost = 0
    for writer in writers:
        if writer.parts:
            tasks.extend(writer.part_tasks())
            continue
        batch.append(writer)
        cost += _FILE_COST + writer.nbytes
        if cost >= _BATCH or store.remote:
            tasks.append(partial(_write_all, batch))
            batch, cost = [], 0
    if tasks:
        crew.run([*tasks, partial(_write_all, batch)] if batch else tasks)
    else:
        _write_all(batch)
    if len(files) <= _FEW:  # by who wrote them, who learns of every error, and then they leave the page cache
        opened.sync()
    opened.release()
    return [WrittenFile(writer.size or 0, writer.loose_digest, tuple(map(tuple, writer.digests))) for writer in writers]


def _write_all(batch: "list[_FileWriter]") -> None:
    for writer in batch:
        writer.write_whole()
        if writer.nbytes < _SMALL:
            manners.after_you()


class _FileWriter:
    """Writes one file, whole or in parts, and collects its digests."""

    def __init__(
        self,
        store: Store,
        plan: FilePlan,
        leaves: Sequence[LeafPlan],
        shards: Sequence[Shard],
        progress: Progress,
        complete: Complete | None,
        memory: Array | None,
        opened: "NewFiles",
    ) -> None:
        self._store, self._plan, self._progress, self._complete = store, plan, progress, complete
        self._leaves, self._shards, self._memory, self._opened = leaves, shards, memory, opened
        self.nbytes = sum(piece.nbytes for piece in plan.pieces)
        self.size = plan.size
        self.loose_digest = digest(plan.header)  # of what the digests of raw pieces do not cover
        self.digests: list[list[str]] = [[""] * block_count(piece.nbytes) for piece in plan.pieces]
        large = self.nbytes >= (_LARGE if memory is None else _ALIGNED)
        self.parts = _split(plan) if large and plan.size is not None and not store.remote else []
        self.file: NewFile | None = None
        self._left = len(self.parts)
        self._lock = threading.Lock()

    def write_whole(self) -> None:
        if self._store.object_limit is not None and self.nbytes > 2 * self._store.object_limit:
            self.write_large()
            return
        everything = [(number, 0, block_count(piece.nbytes)) for number, piece in enumerate(self._plan.pieces)]
        segments = self._segments(everything)
        if self._plan.size is None:
            segments = [memoryview(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(segments[0]))]
            self.size = len(segments[0])
            self.loose_digest = digest(segments[0])
        header = self._plan.header if self._complete is None else self._complete(self._plan, self.result())
        total = len(header) + sum(map(len, segments))
        file = self._store.write_new(self._plan.name, total, [memoryview(header), *segments])
        if file is not None:
            self._opened.add(file)
            self._opened.finish(file)
        self._progress(self.nbytes)

    def result(self) -> WrittenFile:
        """What is known once everything is hashed."""
        return WrittenFile(self.size or 0, self.loose_digest, tuple(map(tuple, self.digests)))

    def write_large(self) -> None:
        """A file too large to be held: hashed first, then put part by part."""
        parts = _split(self._plan)
        for part in parts:
            self._segments(part)
        before = [list(digests) for digests in self.digests]
        header = self._plan.header if self._complete is None else self._complete(self._plan, self.result())

        def stream() -> Iterator[memoryview]:
            yield memoryview(header)
            for part in parts:
                segments = self._segments(part)
                if self.digests != before:
                    raise TreeError(f"an array in {self._plan.name} was changed while it was being saved")
                yield from segments
                self._progress(sum(map(len, segments)))

        self._store.write_new(self._plan.name, len(header) + self.nbytes, stream())

    def part_tasks(self) -> list[Task]:
        return [lambda part=part: self._write_part(part) for part in self.parts]

    def _write_part(self, part: Part) -> None:
        number, first, _ = part[0]
        offset = self._plan.pieces[number].offset + first * BLOCK
        lying = self._lying(part, offset)
        if lying is None:
            self._write_copied(part, offset)
        else:
            self._write_lying(part, offset, lying)
        with self._lock:
            self._left -= 1
            if self._left == 0 and self.file is not None:
                self._opened.finish(self.file)
                self.file = None

    def _write_copied(self, part: Part, offset: int) -> None:
        with _Run(self._open(), offset) as run:
            for number, first, last in part:
                piece, digests = self._plan.pieces[number], self.digests[number]
                several = len(piece.sources) > 1
                memory = run.room(piece.nbytes) if several and piece.nbytes <= _ROOM else None
                raw = gather(piece, self._leaves[piece.leaf], self._shards, memory)
                stable = several or all(self._shards[shard].stable for shard, _ in piece.sources)
                for block, start, end in blocks(first, last, raw.size):
                    data = raw[start:end]
                    if not stable:  # someone could change it between hashing and writing
                        data = run.room(end - start)
                        data[...] = raw[start:end]
                    view = memoryview(cast(Any, data))
                    digests[block] = digest(view)
                    run.add(view)
                    self._progress(end - start)
                if piece.nbytes < _SMALL:
                    manners.after_you()

    def _write_lying(self, part: Part, offset: int, lying: Array) -> None:
        view, at = memoryview(cast(Any, lying)), 0
        for number, first, last in part:
            for block, start, end in blocks(first, last, self._plan.pieces[number].nbytes):
                self.digests[number][block] = digest(view[at : at + end - start])
                at += end - start
        self._open().write_aligned(offset, lying)
        self._progress(at)

    def _lying(self, part: Part, offset: int) -> Array | None:
        """All of the part, if it lies in the snapshot's memory just as it will in the file."""
        if self._memory is None:
            return None
        origin = address_of(self._memory)
        spans: list[tuple[int, int]] = []
        for number, first, last in part:
            piece = self._plan.pieces[number]
            (shard, region), *others = piece.sources
            begin = address_of(self._shards[shard].data) - origin + first * BLOCK
            end = begin + min(last * BLOCK, piece.nbytes) - first * BLOCK
            inside = 0 <= begin <= end <= self._memory.size
            if others or region != piece.region or not inside or (spans and begin != spans[-1][1]):
                return None
            spans.append((begin, end))
        lying = self._memory[spans[0][0] : spans[-1][1]]
        return lying if (address_of(lying) - offset) % PAGE == 0 else None

    def _open(self) -> NewFile:
        """The file, opened by the first part and closed by the last: few are open at any time."""
        with self._lock:
            if self.file is None:
                new = self._store.create(self._plan.name, self._plan.size or 0, self._memory is not None)
                self.file = self._opened.add(new)
                self.file.write(0, [memoryview(self._plan.header)])
            return self.file

    def _segments(self, part: Part) -> list[memoryview]:
        """The bytes of (piece, first block, last block) ranges, their digests noted."""
        segments: list[memoryview] = []
        for number, first, last in part:
            piece = self._plan.pieces[number]
            raw = gather(piece, self._leaves[piece.leaf], self._shards)[first * BLOCK : last * BLOCK]
            if not all(self._shards[shard].stable for shard, _ in piece.sources):
                raw = raw.copy()  # someone could change it between hashing and writing
            view = memoryview(cast(Any, raw))
            for block in range(first, last):
                start = (block - first) * BLOCK
                self.digests[number][block] = digest(view[start : start + BLOCK])
            segments.append(view)
        return segments


class _Run:
    """Bytes on their way to one place of a file, written a few at a time, while they are hot."""

    def __init__(self, file: NewFile, offset: int) -> None:
        self._file, self._offset = file, offset
        self._views: list[memoryview] = []
        self._nbytes = self._taken = 0
        self._memory: Array | None = None

    def room(self, nbytes: int) -> Array:
        """Memory, at most `_ROOM`, for bytes that are to be added next."""
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
        if self._nbytes >= _RUN:
            self._flush()

    def _flush(self) -> None:
        self._file.write(self._offset, self._views)
        self._offset += self._nbytes
        self._views, self._nbytes = [], 0

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()
        if self._memory is not None and len(_rooms) < _ROOMS:
            _rooms.append(self._memory)


class NewFiles:
    """The files a save has open. They belong to its scope: no thread may write any more when they are closed.

    A finished file is closed some files later: what is on the disk by then leaves the page cache.
    """

    def __init__(self) -> None:
        self._open: list[NewFile] = []
        self._finished: deque[NewFile] = deque()

    def add(self, file: NewFile) -> NewFile:
        self._open.append(file)
        return file

    def finish(self, file: NewFile) -> None:
        self._finished.append(file)
        if len(self._finished) > _KEPT:
            with suppress(IndexError):  # another thread was faster
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
    """A large file as parts of consecutive (piece, first block, last block) ranges."""
    parts: list[list[tuple[int, int, int]]] = [[]]
    room = _PART
    for number, piece in enumerate(plan.pieces):
        total = block_count(piece.nbytes)
        step = _PART // BLOCK if len(piece.sources) == 1 else max(total, 1)
        for first in range(0, total, step):
            last = min(first + step, total)
            size = min(last * BLOCK, piece.nbytes) - first * BLOCK
            # Small pieces are work for the interpreter, which several threads only keep from each other.
            cost = size if size >= _SMALL else size // 4
            if parts[-1] and cost > room:
                parts.append([])
                room = _PART
            parts[-1].append((number, first, last))
            room -= cost
    return parts


def gather(piece: PiecePlan, leaf: LeafPlan, shards: Sequence[Shard], memory: Array | None = None) -> Array:
    """The piece's bytes in C order: a view where they lie in one piece, else put together, in `memory` if given."""
    assert leaf.spec is not None
    if not piece.nbytes:  # of an empty array a process may hold any empty part, or none
        return np.empty(0, np.uint8)
    (shard, region), *others = piece.sources
    if not others:
        data = shards[shard].data
        if region != piece.region:
            data = data[piece.region.within(region).slices]
        return (data if data.flags.c_contiguous else np.ascontiguousarray(data)).reshape(-1).view(np.uint8)
    memory = aligned_empty(piece.nbytes) if memory is None else memory
    whole: Array = memory.view(leaf.spec.dtype).reshape(piece.region.shape)
    rows = rows_of(piece.region, tuple([region for _, region in piece.sources]))
    for slices, axis, numbers in rows:
        np.concatenate([shards[piece.sources[n][0]].data for n in numbers], axis, out=whole[slices])
    for shard, region in () if rows else piece.sources:
        here, there = common_slices(piece.region, region)
        whole[here] = shards[shard].data[there]
    return memory
