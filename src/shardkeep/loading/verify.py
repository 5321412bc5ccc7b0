"""Checking every stored byte without loading it."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from shardkeep.catalog import find, open_checkpoint
from shardkeep.errors import IntegrityError, damage_of
from shardkeep.foreign.registry import checks_of, open_array
from shardkeep.loading.blocks import PART, BlockReader, Range, parts_of
from shardkeep.model.digests import BLOCK, block_count, digest
from shardkeep.model.document import check_bools
from shardkeep.model.leaves import ForeignArray, Piece, StoredArray
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.model.naming import is_table
from shardkeep.model.pieces import have_digests
from shardkeep.model.reports import Problem, VerifyReport
from shardkeep.runtime.crew import Crew, Task
from shardkeep.runtime.hostmemory import aligned_empty
from shardkeep.runtime.progress import NO_BAR, Bar, Progress
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.base import Store
from shardkeep.stores.location import Location, location, path_text
from shardkeep.targets.base import ReadTarget
from shardkeep.targets.steady import TRIES, Attempt

_SHOWN = 5  # leaves named for a file that is missing or truncated


def verify(path: object, *, prefix: str | None = None, progress: bool = False) -> VerifyReport:
    """Read every stored byte and compare it with its digest. Damage is reported in the result, not raised.

    Arrays written by other programs have no digests. For those, `verify` checks that their files are complete, and
    counts them as `unchecked`.

    Args:
        path: The checkpoint, as for `load`.
        prefix: The tree to check, if the directory has several. The default is all of them.
        progress: Whether to show a progress bar.

    Returns:
        A `VerifyReport`: `ok`, the `problems` with the leaf and the file of each, bytes, files and seconds. It is
        truthy if no damage was found.

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
    (progress,) = check_bools(progress=progress)
    for _ in range(TRIES):
        try:
            store, manifest = open_checkpoint(place)
        except IntegrityError as error:
            target = find(place)
            where = error.file or _document_of(target) or str(place)
            problem = Problem(None, where, str(error))
            return VerifyReport(path_text(path), 0, 0, time.perf_counter() - started, 0, (problem,))
        report = None
        with Attempt(manifest, partial(_look, place, manifest)) as attempt:
            report = _verify(place, store, manifest, prefix, progress, started)
            attempt.sure = report.ok
        if report is not None and not attempt.replaced:  # else it looked damaged while it was being replaced
            return report
    text = f"{place} was replaced {TRIES} times while it was being checked; try again when no save is running"
    problem = Problem(None, str(place), text)
    return VerifyReport(path_text(path), 0, 0, time.perf_counter() - started, 0, (problem,))


def _verify(
    place: Location, store: Store, manifest: Manifest, prefix: str | None, progress: bool, started: float
) -> VerifyReport:
    trees = [manifest.tree(prefix)] if prefix is not None else list(manifest.trees.values())
    total = sum(file.size for tree in trees for file in tree.files)
    with Bar(f"checking {place}", total) if progress else NO_BAR as show:
        checks = [_Check(store, tree, show) for tree in trees]
        with Scope(f"checking {place}") as scope:
            crew = scope.add(Crew(store.traits.concurrency))
            for check in checks:
                check.run(crew)
    problems = [problem for check in checks for problem in check.problems]
    return VerifyReport(
        path=manifest.path,
        nbytes=total,
        files=sum(len(tree.files) for tree in trees),
        seconds=time.perf_counter() - started,
        unchecked=sum(_carries_no_digests(leaf) for tree in trees for leaf in tree.arrays),
        problems=tuple(sorted(problems, key=lambda p: (p.file, p.leaf or "", p.message))),
    )


def _document_of(target: ReadTarget) -> str | None:
    """The document of a checkpoint that cannot be opened: the first that is there, if one is."""
    for name in target.documents:
        with suppress(OSError):  # a loop of symbolic links, for example
            if target.store.size(name) is not None:
                return target.store.locate(name)
    return None


def _carries_no_digests(leaf: StoredArray) -> bool:
    return not have_digests(leaf.pieces)


def _look(place: Location, before: Manifest) -> Manifest:
    """The manifest as it is now; the one before if there is none that can be read."""
    try:
        return open_checkpoint(place)[1]
    except (OSError, IntegrityError):
        return before


class _Check:
    """Collects what is wrong with a tree."""

    def __init__(self, store: Store, tree: Tree, progress: Progress) -> None:
        self._reader = BlockReader(store, tree.files, tree.compression)
        self._tree, self._progress = tree, progress
        self._incomplete: set[int] = set()
        self._pieces: list[tuple[StoredArray, Sequence[Piece]]] = []
        self.problems: list[Problem] = []

    def run(self, crew: Crew) -> None:
        """Check all files, then the pieces in those that are complete."""
        keys: dict[int, dict[str, None]] = {}
        self._decode(keys)
        for leaf, pieces in self._pieces:
            for piece in pieces:
                keys.setdefault(piece.file, {})[leaf.key] = None
        crew.run(
            partial(self._check_file, number, list(keys.get(number, ()))) for number in range(len(self._tree.files))
        )
        crew.run(self._tasks())

    def _decode(self, keys: dict[int, dict[str, None]]) -> None:
        """Decode all pieces, once. Leaves whose table is in a damaged file are noted in `keys`, by that file."""
        files = {self._reader.where(number): number for number in range(len(self._tree.files))}
        malformed: dict[str, list[IntegrityError]] = {}
        for leaf in self._tree.arrays:
            try:
                self._pieces.append((leaf, tuple(leaf.pieces)))
            except IntegrityError as error:
                if error.file in files:
                    keys.setdefault(files[error.file], {})[leaf.key] = None
                else:
                    malformed.setdefault(error.problem, []).append(error)
        for problem, errors in malformed.items():
            names = [error.leaf or "" for error in errors]
            key, affected = (names[0], "") if len(names) == 1 else (None, _affected(names))
            self.problems.append(Problem(key, errors[0].file or self._reader.store.url, f"{problem}{affected}"))

    def _tasks(self) -> list[Task]:
        checks = checks_of(self._reader.store, self._tree) if not self._incomplete else None
        if checks is not None:
            return [partial(self._check_own, check) for check in checks]
        tasks: list[Task] = []
        small: list[tuple[StoredArray, Piece]] = []
        for leaf, pieces in self._pieces:
            if isinstance(leaf.origin, ForeignArray):
                tasks.append(partial(self._check_foreign, leaf, leaf.origin.directory))
            for piece in pieces:
                if piece.file in self._incomplete:
                    continue
                if piece.stored is None and piece.length < BLOCK:
                    small.append((leaf, piece))
                else:
                    tasks += [partial(self._check_piece, leaf, piece, part) for part in parts_of(piece)]
        return tasks + [partial(self._check_batch, batch) for batch in _neighbours(small)]

    def _check_file(self, number: int, keys: list[str]) -> None:
        """What belongs to no piece. A missing or truncated file is one problem, however many leaves it holds."""
        record, where = self._reader.files[number], self._reader.where(number)
        key, affected = (keys[0], "") if len(keys) == 1 else (None, _affected(keys))
        try:
            file = self._reader.open(number, key)
        except (IntegrityError, OSError) as error:
            self._incomplete.add(number)
            self.problems.append(Problem(key, where, f"{damage_of(error, key, where)}{affected}"))
            return
        header = np.empty(record.header_length, np.uint8)
        try:
            with file:
                file.read_into(0, header)
            self._progress(header.size)
            if record.header_digest is not None and digest(header.data) != record.header_digest:
                problem = f"{where} is damaged in its first {header.size:,} bytes"
                if is_table(record.name):
                    problem = f"{where} is damaged{affected}"
                raise IntegrityError(problem, file=where, span=(0, header.size))
        except (IntegrityError, OSError, EOFError) as error:
            self._report(None, where, error)

    def _check_own(self, check: Callable[[Progress], None]) -> None:
        """A file with checksums of the other program's."""
        try:
            check(self._progress)
        except (IntegrityError, OSError) as error:
            found = damage_of(error, None, self._tree.files[0].name)
            self._report(found.leaf, found.file or self._reader.store.url, found)

    def _check_foreign(self, leaf: StoredArray, directory: str) -> None:
        """An array of another program has no digests, but its chunks must be there and have their sizes."""
        try:
            open_array(self._reader.store, leaf).check()
        except (IntegrityError, OSError) as error:
            place = self._reader.store.locate(directory.partition("\0")[0])
            self._report(leaf.key, place, error)

    def _check_batch(self, batch: list[tuple[StoredArray, Piece]]) -> None:
        """Small pieces that are next to each other, read together."""
        first, last = batch[0][1], batch[-1][1]
        where = self._reader.where(first.file)
        memory = aligned_empty(last.offset + last.length - first.offset)
        try:
            self._reader.fill(first.file, first.offset, memory)
        except (IntegrityError, OSError) as error:
            for leaf, _ in batch:
                self._report(leaf.key, where, error)
            return
        self._progress(memory.size)
        for leaf, piece in batch:
            start = piece.offset - first.offset
            try:
                self._reader.check(leaf, piece, (0, block_count(piece.length)), memory[start : start + piece.length])
            except IntegrityError as error:
                self._report(leaf.key, where, error)

    def _check_piece(self, leaf: StoredArray, piece: Piece, part: Range) -> None:
        try:
            memory = aligned_empty(min(part[1] * BLOCK, piece.length) - part[0] * BLOCK)
            self._reader.read(leaf, piece, part, memory)
            self._progress(memory.size if piece.stored is None else piece.stored)
        except (IntegrityError, OSError, MemoryError, OverflowError) as error:
            self._report(leaf.key, self._reader.where(piece.file), error)

    def _report(self, key: str | None, where: str, error: Exception) -> None:
        self.problems.append(Problem(key, where, str(damage_of(error, key, where))))


def _affected(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:_SHOWN])) + (", …" if len(keys) > _SHOWN else "")
    return f"; {len(keys):,} leaves are affected: {shown}" if keys else ""


def _neighbours(pieces: list[tuple[StoredArray, Piece]]) -> list[list[tuple[StoredArray, Piece]]]:
    """Pieces of one file that are next to each other, in groups of a useful size."""
    batches: list[list[tuple[StoredArray, Piece]]] = []
    for leaf, piece in sorted(pieces, key=lambda at: (at[1].file, at[1].offset, at[1].length)):
        first, last = (batches[-1][0][1], batches[-1][-1][1]) if batches else (None, None)
        near = last is not None and last.file == piece.file and piece.offset == last.offset + last.length
        if not near or first is None or piece.offset + piece.length - first.offset > PART:
            batches.append([])
        batches[-1].append((leaf, piece))
    return batches
