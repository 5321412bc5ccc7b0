"""Checking everything that is stored, without loading it."""

import re
import time
from contextlib import nullcontext

import numpy as np

from shardkeep.digests import BLOCK, block_count, digest
from shardkeep.errors import IntegrityError, MissingDataError
from shardkeep.formats.zarr import check_zarr
from shardkeep.manifest import Manifest, Piece, StoredLeaf, Tree
from shardkeep.memory import aligned_empty
from shardkeep.opening import find, open_checkpoint
from shardkeep.progress import Bar, Progress
from shardkeep.reading import Source, check_blocks, unpack
from shardkeep.reports import Problem, VerifyReport
from shardkeep.stores.base import Store
from shardkeep.workers import Task, run_tasks

_PART = 16 << 20


def verify(path: object, *, prefix: str | None = None, progress: bool = False) -> VerifyReport:
    """Read every stored byte and compare it with its digest. Damage is reported, not raised; absence is raised.

    `progress` shows a bar.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "good", {"w": np.zeros(3)})
    >>> shardkeep.verify(tmp / "good").ok
    True
    """
    started = time.perf_counter()
    try:
        store, manifest = open_checkpoint(path)
    except IntegrityError as error:
        target = find(path)
        where = target.store.locate(target.documents[0])
        return VerifyReport(str(path), 0, 0, time.perf_counter() - started, 0, (Problem(None, where, str(error)),))
    trees = [manifest.tree(prefix)] if prefix is not None else list(manifest.trees.values())
    total = sum(file.size for tree in trees for file in tree.files)
    with Bar(f"checking {path}", total) if progress else nullcontext(lambda _: None) as show:
        check = _Check(store, manifest, show)
        run_tasks((task for tree in trees for task in check.tasks(tree)), store.concurrency)
    if check.problems and _was_replaced(path, manifest):
        return verify(path, prefix=prefix, progress=progress)  # what looked like damage was a writer at work
    return VerifyReport(
        path=manifest.path,
        nbytes=total,
        files=sum(len(tree.files) for tree in trees),
        seconds=time.perf_counter() - started,
        unchecked=sum(_carries_no_digests(leaf) for tree in trees for leaf in tree.leaves),
        problems=tuple(sorted(check.problems, key=lambda p: (p.file, p.leaf or "", p.message))),
    )


def _carries_no_digests(leaf: StoredLeaf) -> bool:
    return leaf.kind == "zarr" or any(piece.digests is None for piece in leaf.pieces)


def _was_replaced(path: object, manifest: Manifest) -> bool:
    try:
        return open_checkpoint(path)[1].save_id != manifest.save_id
    except (OSError, IntegrityError):
        return False


class _Check:
    """Collects what is wrong."""

    def __init__(self, store: Store, manifest: Manifest, progress: Progress) -> None:
        self._store, self._path, self._progress = store, manifest.path, progress
        self.problems: list[Problem] = []

    def tasks(self, tree: Tree) -> list[Task]:
        source = Source(self._store, tree.files, tree.compression)
        tasks: list[Task] = [lambda n=number: self._check_file(source, n) for number in range(len(tree.files))]
        small: list[tuple[StoredLeaf, Piece]] = []
        for leaf in tree.leaves:
            if leaf.kind == "zarr":
                tasks.append(lambda f=leaf: self._check_foreign(f))
            for piece in leaf.pieces:
                if piece.stored is None and piece.length < BLOCK:
                    small.append((leaf, piece))
                    continue
                total = block_count(piece.length)
                step = total if piece.stored is not None else _PART // BLOCK
                for first in range(0, total, step or 1):
                    last = min(first + step, total)
                    tasks.append(lambda f=leaf, p=piece, a=first, b=last: self._check_piece(source, f, p, a, b))
        return tasks + [lambda b=batch: self._check_batch(source, b) for batch in _neighbours(small)]

    def _check_file(self, source: Source, number: int) -> None:
        """What belongs to no piece: the header. (A file that is missing or cut short is told with its leaves too.)"""
        record = source.files[number]
        where = self._store.locate(record.name)
        try:
            with source.open(number, "") as file:
                header = np.empty(record.header_length, np.uint8)
                file.read_into(0, header)
                self._progress(record.header_length)
        except (IntegrityError, OSError, EOFError) as error:
            self.problems.append(Problem(None, where, f"{where}: {_reason(error)}"))
            return
        if record.header_digest is not None and digest(header.data) != record.header_digest:
            self.problems.append(
                Problem(None, where, f"{where} is damaged in its first {record.header_length:,} bytes")
            )

    def _check_foreign(self, leaf: StoredLeaf) -> None:
        """An array of another program has no digests, but its chunks must be there and of their size."""
        try:
            check_zarr(self._store, leaf)
        except (IntegrityError, OSError) as error:
            where = self._store.locate(leaf.extra["directory"])
            self.problems.append(Problem(leaf.key, where, f"leaf {leaf.key!r}: {_reason(error)}"))

    def _check_batch(self, source: Source, batch: list[tuple[StoredLeaf, Piece]]) -> None:
        """Small pieces that lie side by side, read together."""
        low = batch[0][1].offset
        try:
            with source.open(batch[0][1].file, batch[0][0].key) as file:
                memory = aligned_empty(batch[-1][1].offset + batch[-1][1].length - low)
                file.read_into(low, memory)
                self._progress(memory.size)
        except (IntegrityError, OSError, EOFError) as error:
            for leaf, piece in batch:
                where = self._store.locate(source.files[piece.file].name)
                self.problems.append(Problem(leaf.key, where, f"leaf {leaf.key!r}: {_reason(error)}"))
            return
        for leaf, piece in batch:
            where = self._store.locate(source.files[piece.file].name)
            data = memory[piece.offset - low : piece.offset - low + piece.length]
            try:
                check_blocks(piece, 0, block_count(piece.length), data, leaf.key, where)
            except IntegrityError as error:
                self.problems.append(Problem(leaf.key, where, f"leaf {leaf.key!r}: {_reason(error)}"))

    def _check_piece(self, source: Source, leaf: StoredLeaf, piece: Piece, first: int, last: int) -> None:
        where = self._store.locate(source.files[piece.file].name)
        start, end = first * BLOCK, min(last * BLOCK, piece.length)
        try:
            with source.open(piece.file, leaf.key) as file:
                memory = aligned_empty(end - start)
                if piece.stored is not None:
                    unpack(file, piece, source.files[piece.file], memory, source.compression, leaf.key, where)
                else:
                    file.read_into(piece.offset + start, memory)
                    self._progress(memory.size)
            check_blocks(piece, first, last, memory, leaf.key, where)
        except (IntegrityError, OSError, EOFError, MemoryError, OverflowError) as error:
            self.problems.append(Problem(leaf.key, where, f"leaf {leaf.key!r}: {_reason(error)}"))


def _neighbours(pieces: list[tuple[StoredLeaf, Piece]]) -> list[list[tuple[StoredLeaf, Piece]]]:
    """Pieces of one file that lie next to each other, in groups of a useful size."""
    batches: list[list[tuple[StoredLeaf, Piece]]] = []
    for leaf, piece in sorted(pieces, key=lambda at: (at[1].file, at[1].offset, at[1].length)):
        first, last = (batches[-1][0][1], batches[-1][-1][1]) if batches else (None, None)
        near = last is not None and last.file == piece.file and piece.offset == last.offset + last.length
        if not near or first is None or piece.offset + piece.length - first.offset > _PART:
            batches.append([])
        batches[-1].append((leaf, piece))
    return batches


def _reason(error: Exception) -> str:
    if isinstance(error, MissingDataError):
        return "the file is missing"
    return re.sub(r"\Aleaf '[^']*': ", "", str(error))
