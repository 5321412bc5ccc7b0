"""Checking every stored byte without loading it."""

import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

import numpy as np

from shardkeep.catalog import find, open_checkpoint
from shardkeep.errors import IntegrityError
from shardkeep.foreign.registry import open_array
from shardkeep.loading.read import Source, check_blocks, unpack
from shardkeep.model.digests import BLOCK, block_count, digest
from shardkeep.model.leaves import ForeignArray, Piece, StoredArray
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.model.reports import Problem, VerifyReport
from shardkeep.runtime.crew import Task, run_tasks
from shardkeep.runtime.memory import aligned_empty
from shardkeep.runtime.progress import Bar, Progress
from shardkeep.stores.base import Store, StoredFile
from shardkeep.stores.location import Location, location, path_text
from shardkeep.targets.transaction import Target

_PART = 16 << 20
_SHOWN = 5  # leaves named for a file that is missing or truncated


def verify(path: object, *, prefix: str | None = None, progress: bool = False) -> VerifyReport:
    """Read every stored byte and compare it with its digest. Damage is reported in the result, not raised.

    Arrays that another program wrote have no digests. For those, `verify` checks that their files are complete, and
    counts them as `unchecked`.

    Args:
        path: A checkpoint directory, a safetensors file or a Hugging Face folder; a local path or a URL.
        prefix: Which of several trees in the directory to check. By default all of them.
        progress: Whether to show a progress bar.

    Returns:
        A report: `ok`, the `problems` with the leaf and the file of each, bytes, files and seconds. It is true in a
        condition if everything is as it was saved.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at `path`.
        PrefixError: There is no tree with this prefix.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "good", {"w": np.zeros(3)})
    >>> shardkeep.verify(tmp / "good").ok
    True
    """
    started = time.perf_counter()
    place = location(path, "verify(path)")
    try:
        store, manifest = open_checkpoint(place)
    except IntegrityError as error:
        target = find(place)
        where = target.store.locate(_document_of(target))
        problem = Problem(None, where, str(error))
        return VerifyReport(path_text(path), 0, 0, time.perf_counter() - started, 0, (problem,))
    trees = [manifest.tree(prefix)] if prefix is not None else list(manifest.trees.values())
    total = sum(file.size for tree in trees for file in tree.files)
    with Bar(f"checking {place}", total) if progress else nullcontext(lambda _: None) as show:
        check = _Check(store, manifest, show)
        run_tasks((task for tree in trees for task in check.tasks(tree)), store.concurrency)
    if check.problems and _was_replaced(place, manifest):
        return verify(path, prefix=prefix, progress=progress)  # it looked damaged while it was being replaced
    return VerifyReport(
        path=manifest.path,
        nbytes=total,
        files=sum(len(tree.files) for tree in trees),
        seconds=time.perf_counter() - started,
        unchecked=sum(_carries_no_digests(leaf) for tree in trees for leaf in tree.arrays),
        problems=tuple(sorted(check.problems, key=lambda p: (p.file, p.leaf or "", p.message))),
    )


def _document_of(target: Target) -> str:
    """The document of a checkpoint that cannot be opened: the first that is there."""
    for name in target.documents:
        with suppress(OSError):  # a loop of symbolic links, for example
            if target.store.size(name) is not None:
                return name
    return target.documents[0]


def _carries_no_digests(leaf: StoredArray) -> bool:
    return isinstance(leaf.origin, ForeignArray) or any(piece.digests is None for piece in leaf.pieces)


def _was_replaced(place: Location, manifest: Manifest) -> bool:
    try:
        return open_checkpoint(place)[1].save_id != manifest.save_id
    except (OSError, IntegrityError):
        return False


@dataclass(frozen=True, slots=True)
class _Files(Source):
    """The files of a saved tree, and the keys of the leaves in each."""

    keys: dict[int, list[str]] = field(default_factory=dict[int, list[str]])


class _Check:
    """Collects what is wrong. A file that is missing or truncated is one problem, however many leaves it holds."""

    def __init__(self, store: Store, manifest: Manifest, progress: Progress) -> None:
        self._store, self._path, self._progress = store, manifest.path, progress
        self._lock = threading.RLock()
        self._incomplete: set[str] = set()
        self.problems: list[Problem] = []

    def _open(self, source: _Files, number: int) -> StoredFile | None:
        """A file of the tree; None if it is missing or does not have its size, which is reported once."""
        try:
            return source.open_file(number)
        except (IntegrityError, OSError) as error:
            where = source.where(number)
            with self._lock:
                if where in self._incomplete:
                    return None
                self._incomplete.add(where)
            reason = _with_file(where, str(error))
            keys = list(dict.fromkeys(source.keys.get(number, ())))
            if len(keys) == 1:
                self.problems.append(Problem(keys[0], where, f"leaf {keys[0]!r}: {reason}"))
                return None
            shown = ", ".join(map(repr, keys[:_SHOWN])) + (", …" if len(keys) > _SHOWN else "")
            affected = f"; {len(keys):,} leaves are affected: {shown}" if keys else ""
            self.problems.append(Problem(None, where, reason + affected))
            return None

    def tasks(self, tree: Tree) -> list[Task]:
        source = _Files(self._store, tree.files, tree.compression)
        for leaf in tree.arrays:
            for piece in leaf.pieces:
                source.keys.setdefault(piece.file, []).append(leaf.key)
        tasks: list[Task] = [lambda n=number: self._check_file(source, n) for number in range(len(tree.files))]
        small: list[tuple[StoredArray, Piece]] = []
        for leaf in tree.arrays:
            if isinstance(leaf.origin, ForeignArray):
                tasks.append(lambda f=leaf, d=leaf.origin.directory: self._check_foreign(f, d))
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

    def _check_file(self, source: _Files, number: int) -> None:
        """The bytes of a file that belong to no piece: its header."""
        record = source.files[number]
        where = source.where(number)
        file = self._open(source, number)
        if file is None:
            return
        try:
            with file:
                header = np.empty(record.header_length, np.uint8)
                file.read_into(0, header)
                self._progress(record.header_length)
        except (IntegrityError, OSError, EOFError) as error:
            self.problems.append(Problem(None, where, _with_file(where, str(error))))
            return
        if record.header_digest is not None and digest(header.data) != record.header_digest:
            self.problems.append(
                Problem(None, where, f"{where} is damaged in its first {record.header_length:,} bytes")
            )

    def _check_foreign(self, leaf: StoredArray, directory: str) -> None:
        """An array of another program has no digests, but its chunks must be there and have their sizes."""
        try:
            open_array(self._store, leaf).check()
        except (IntegrityError, OSError) as error:
            self._report(leaf, self._store.locate(directory), error)

    def _check_batch(self, source: _Files, batch: list[tuple[StoredArray, Piece]]) -> None:
        """Small pieces that are next to each other, read together."""
        low = batch[0][1].offset
        where = source.where(batch[0][1].file)
        file = self._open(source, batch[0][1].file)
        if file is None:
            return
        try:
            with file:
                memory = aligned_empty(batch[-1][1].offset + batch[-1][1].length - low)
                file.read_into(low, memory)
                self._progress(memory.size)
        except (IntegrityError, OSError, EOFError) as error:
            for leaf, _ in batch:
                self._report(leaf, where, error)
            return
        for leaf, piece in batch:
            data = memory[piece.offset - low : piece.offset - low + piece.length]
            try:
                check_blocks(piece, 0, block_count(piece.length), data, leaf.key, where)
            except IntegrityError as error:
                self._report(leaf, where, error)

    def _check_piece(self, source: _Files, leaf: StoredArray, piece: Piece, first: int, last: int) -> None:
        where = source.where(piece.file)
        start, end = first * BLOCK, min(last * BLOCK, piece.length)
        file = self._open(source, piece.file)
        if file is None:
            return
        try:
            with file:
                memory = aligned_empty(end - start)
                if piece.stored is not None:
                    unpack(file, piece, source.files[piece.file], memory, source.compression, leaf.key, where)
                else:
                    file.read_into(piece.offset + start, memory)
                    self._progress(memory.size)
            check_blocks(piece, first, last, memory, leaf.key, where)
        except (IntegrityError, OSError, EOFError, MemoryError, OverflowError) as error:
            self._report(leaf, where, error)

    def _report(self, leaf: StoredArray, where: str, error: Exception) -> None:
        start = f"leaf {leaf.key!r}: "
        self.problems.append(Problem(leaf.key, where, start + _with_file(where, str(error).removeprefix(start))))


def _with_file(where: str, reason: str) -> str:
    """What is wrong, with the file named once."""
    return reason if where in reason else f"{where}: {reason}"


def _neighbours(pieces: list[tuple[StoredArray, Piece]]) -> list[list[tuple[StoredArray, Piece]]]:
    """Pieces of one file that are next to each other, in groups of a useful size."""
    batches: list[list[tuple[StoredArray, Piece]]] = []
    for leaf, piece in sorted(pieces, key=lambda at: (at[1].file, at[1].offset, at[1].length)):
        first, last = (batches[-1][0][1], batches[-1][-1][1]) if batches else (None, None)
        near = last is not None and last.file == piece.file and piece.offset == last.offset + last.length
        if not near or first is None or piece.offset + piece.length - first.offset > _PART:
            batches.append([])
        batches[-1].append((leaf, piece))
    return batches
