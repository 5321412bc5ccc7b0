"""Checking everything that is stored, without loading it."""

import time

import numpy as np

from shardkeep.digests import BLOCK, block_count, digest
from shardkeep.errors import IntegrityError, MissingDataError
from shardkeep.formats.zarr import check_zarr
from shardkeep.manifest import Manifest, Piece, StoredLeaf, Tree
from shardkeep.memory import aligned_empty
from shardkeep.opening import find, open_checkpoint
from shardkeep.reading import Source, check_blocks, unpack
from shardkeep.reports import Problem, VerifyReport
from shardkeep.stores.base import Store
from shardkeep.workers import Crew, Task

_PART = 16 << 20


def verify(path: object, *, prefix: str | None = None) -> VerifyReport:
    """Read every stored byte and compare it with its digest. Damage is reported, not raised; absence is raised.

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
    check = _Check(store, manifest)
    with Crew() as crew:
        crew.run(task for tree in trees for task in check.tasks(tree))
    if check.problems and _was_replaced(path, manifest):
        return verify(path, prefix=prefix)  # what looked like damage was a writer at work
    return VerifyReport(
        path=manifest.path,
        nbytes=sum(file.size for tree in trees for file in tree.files),
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

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._path = store, manifest.path
        self.problems: list[Problem] = []

    def tasks(self, tree: Tree) -> list[Task]:
        source = Source(self._store, tree.files, tree.compression)
        tasks: list[Task] = [lambda n=number: self._check_file(source, n) for number in range(len(tree.files))]
        for leaf in tree.leaves:
            if leaf.kind == "zarr":
                tasks.append(lambda f=leaf: self._check_foreign(f))
            for piece in leaf.pieces:
                total = block_count(piece.length)
                step = total if piece.stored is not None else _PART // BLOCK
                for first in range(0, total, step or 1):
                    last = min(first + step, total)
                    tasks.append(lambda f=leaf, p=piece, a=first, b=last: self._check_piece(source, f, p, a, b))
        return tasks

    def _check_file(self, source: Source, number: int) -> None:
        """What belongs to no piece: the header. (A file that is missing or cut short is told with its leaves too.)"""
        record = source.files[number]
        where = self._store.locate(record.name)
        try:
            with source.open(number, "") as file:
                header = np.empty(record.header_length, np.uint8)
                file.read_into(0, header)
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
            check_blocks(piece, first, last, memory, leaf.key, where)
        except (IntegrityError, OSError, EOFError, MemoryError, OverflowError) as error:
            self.problems.append(Problem(leaf.key, where, f"leaf {leaf.key!r}: {_reason(error)}"))


def _reason(error: Exception) -> str:
    if isinstance(error, MissingDataError):
        return "the file is missing"
    return str(error).removeprefix("leaf '': ")
