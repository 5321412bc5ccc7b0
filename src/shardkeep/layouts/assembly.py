"""From what was written to the tree that is committed: its files, and its pieces in tables."""

from collections.abc import Mapping, Sequence

import numpy as np

from shardkeep.layouts.plan import StagedArray, TreePlan, WrittenFile, WrittenPart, arrays_of
from shardkeep.model.arrays import Array
from shardkeep.model.cells import CellGrid
from shardkeep.model.digests import digest
from shardkeep.model.leaves import StoredArray, StoredLeaf, StoredValue
from shardkeep.model.manifest import DataFile, Tree
from shardkeep.model.pieces import CellPattern, StoredPieces, TableSet, TableSource, inline_table
from shardkeep.model.shares import Shares, Writers
from shardkeep.model.tables import TableRow, encode_table


def part_of(plan: TreePlan, written: Sequence[WrittenFile]) -> WrittenPart:
    """What this process has written of a tree, with the table of its pieces."""
    leaves = [number for number, leaf in enumerate(plan.leaves) if isinstance(leaf, StagedArray)]
    rows: list[TableRow] = []
    files: list[DataFile] = []
    for number, (file, done) in enumerate(zip(plan.files, written, strict=True)):
        stored = done.size if file.size is None else None
        loose = done.size if file.size is None else len(file.header)
        files.append(DataFile(file.name, done.size, loose, done.header_digest))
        for piece, digests in zip(file.pieces, done.digests, strict=True):
            cell = plan.grids[piece.array].number(piece.region)
            rows.append(TableRow(leaves[piece.array], cell, number, piece.offset, stored, digests))
    if not plan.table:
        return WrittenPart(tuple(files))
    table, name = encode_table(rows), plan.table.name
    return WrittenPart(tuple(files), table, DataFile(name, len(table), len(table), digest(table)) if name else None)


def assemble(plan: TreePlan, parts: Mapping[int, WrittenPart]) -> Tree:
    """The tree to commit, once all processes have written their parts of it. No piece of theirs is decoded."""
    bases: dict[int, int] = {}
    files: list[DataFile] = []
    for writer, part in sorted(parts.items()):
        bases[writer] = len(files)
        files += part.files
    if plan.document:  # no digest can be in the header that it covers
        files = [DataFile(plan.document, files[0].size, len(plan.files[0].header))]
    sources: dict[int, TableSource] = {}  # by writer
    known: dict[int, bytes] = {}
    for writer, part in sorted(parts.items()):
        if part.table:
            known[len(sources)] = part.table
        if part.table_file:
            sources[writer] = TableSource(len(files), base=bases[writer])
            files.append(part.table_file)
        elif part.table:
            sources[writer] = inline_table(part.table, bases[writer])
    tables = TableSet(list(sources.values()), files, plan.layout.codec.name is not None, "", None, known)
    draft = plan.draft
    return Tree(
        save_id=draft.save_id,
        format=plan.layout.name,
        skeleton=draft.skeleton,
        leaves=_leaves(plan, tables, list(sources)),
        files=tuple(files),
        metadata=draft.metadata,
        created=draft.created,
        compression=plan.layout.codec.name,
        indexed=draft.indexed,
        step=draft.step,
    )


def _leaves(plan: TreePlan, tables: TableSet, writers: Sequence[int]) -> tuple[StoredLeaf, ...]:
    """The leaves, with pieces in the tables of these writers."""
    arrays = arrays_of(plan.leaves)
    numbers = np.full(plan.draft.processes, -1)
    numbers[list(writers)] = np.arange(len(writers))
    several = len(writers) > 1
    patterns = _patterns([array.shares for array in arrays], plan.grids, numbers) if several else [None] * len(arrays)
    stored = zip(plan.grids, patterns, strict=True)
    leaves: list[StoredLeaf] = []
    for number, leaf in enumerate(plan.leaves):
        if isinstance(leaf, StagedArray):
            pieces = StoredPieces(tables, number, leaf.path, leaf.spec, *next(stored))
            leaves.append(StoredArray(leaf.path, leaf.spec, pieces, leaf.origin))
        else:
            leaves.append(StoredValue(leaf.path, leaf.value))
    return tuple(leaves)


def _patterns(
    everyones: Sequence[Shares | None], grids: Sequence[CellGrid], numbers: Array
) -> list[CellPattern | None]:
    """For each array, which table has which cell. Arrays that are spread alike share one; None: all in the first.

    `numbers` are those of the tables, by writer.
    """
    known: dict[tuple[Writers, tuple[int, ...], tuple[int, ...]], CellPattern | None] = {}
    same: dict[tuple[int, ...], CellPattern] = {}
    found: list[CellPattern | None] = []
    for shares, grid in zip(everyones, grids, strict=True):
        if shares is None:
            found.append(None)
            continue
        counts = grid.counts if grid.size else shares.counts
        key = shares.writers, shares.counts, counts
        if key not in known:
            cells = shares.writers.numbers.reshape(shares.counts)
            for axis, (parts, count) in enumerate(zip(counts, shares.counts, strict=True)):
                cells = np.repeat(cells, parts // count, axis=axis) if parts > count else cells
            spread = tuple(numbers[cells.reshape(-1)].tolist())
            assert min(spread) >= 0, "every process that writes a piece has handed in a table"
            known[key] = same.setdefault(spread, CellPattern(spread)) if any(spread) else None
        found.append(known[key])
    return found
