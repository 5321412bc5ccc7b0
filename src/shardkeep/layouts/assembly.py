"""From what was written to the tree that is committed: its files, and its pieces in tables."""

from collections.abc import Mapping, Sequence

from shardkeep.layouts.plan import StagedArray, TreePlan, WrittenFile, WrittenPart
from shardkeep.model.digests import digest
from shardkeep.model.leaves import StoredArray, StoredLeaf, StoredValue
from shardkeep.model.manifest import DataFile, Tree
from shardkeep.model.pieces import CellPattern, StoredPieces, TableSet, TableSource, inline_table
from shardkeep.model.tables import TableRow, encode_table


def part_of(plan: TreePlan, writer: int, written: Sequence[WrittenFile]) -> WrittenPart:
    """What a process has written of a tree, with the table of its pieces: it knows only its own files."""
    leaves = [number for number, leaf in enumerate(plan.leaves) if isinstance(leaf, StagedArray)]
    rows: list[TableRow] = []
    for number, (file, done) in enumerate(zip(plan.files_of(writer), written, strict=True)):
        stored = done.size if file.size is None else None
        for piece, digests in zip(file.pieces, done.digests, strict=True):
            cell = plan.grids[piece.array].number(piece.region)
            rows.append(TableRow(leaves[piece.array], cell, number, piece.offset, stored, digests))
    table = encode_table(rows) if rows else b""
    return WrittenPart(tuple(written), table, digest(table))


def assemble(plan: TreePlan, parts: Mapping[int, WrittenPart]) -> Tree:
    """The tree to commit, once all processes have written their parts of it. No piece of theirs is decoded."""
    files: list[DataFile] = []
    bases: dict[int, int] = {}
    for writer, part in sorted(parts.items()):
        bases[writer] = len(files)
        for file, done in zip(plan.files_of(writer), part.files, strict=True):
            loose = done.size if file.size is None else len(file.header)
            files.append(DataFile(file.name, done.size, loose, done.header_digest))
    if plan.document:  # no digest can be in the header that it covers
        files = [DataFile(plan.document, files[0].size, len(plan.files[0].header))]
    sources: list[TableSource] = []
    known: dict[int, bytes] = {}
    for number, table in enumerate(plan.tables):
        part = parts[table.writer]
        if table.name:
            sources.append(TableSource(len(files), base=bases[table.writer]))
            files.append(DataFile(table.name, table.size, table.size, part.table_digest))
        else:
            sources.append(inline_table(part.table, bases[table.writer]))
        if part.table:
            known[number] = part.table
    tables = TableSet(sources, files, plan.layout.codec.name is not None, "", None, known)
    draft = plan.draft
    return Tree(
        save_id=draft.save_id,
        format=plan.layout.name,
        skeleton=draft.skeleton,
        leaves=_leaves(plan, tables),
        files=tuple(files),
        metadata=draft.metadata,
        created=draft.created,
        compression=plan.layout.codec.name,
        indexed=draft.indexed,
        step=draft.step,
    )


def _leaves(plan: TreePlan, tables: TableSet) -> tuple[StoredLeaf, ...]:
    patterns = _patterns(plan) if len(plan.tables) > 1 else [None] * len(plan.grids)
    arrays = zip(plan.grids, patterns, strict=True)
    leaves: list[StoredLeaf] = []
    for number, leaf in enumerate(plan.leaves):
        if isinstance(leaf, StagedArray):
            pieces = StoredPieces(tables, number, leaf.path, leaf.spec, *next(arrays))
            leaves.append(StoredArray(leaf.path, leaf.spec, pieces, leaf.origin))
        else:
            leaves.append(StoredValue(leaf.path, leaf.value))
    return tuple(leaves)


def _patterns(plan: TreePlan) -> list[CellPattern | None]:
    """For each array, which table has which cell. Arrays that are spread alike share one; None: all in the first."""
    numbers = {table.writer: number for number, table in enumerate(plan.tables)}
    spread = [[0] * grid.count for grid in plan.grids]
    for file in plan.files:
        for piece in file.pieces:
            spread[piece.array][plan.grids[piece.array].number(piece.region)] = numbers[file.writer]
    known: dict[tuple[int, ...], CellPattern] = {}
    return [known.setdefault(some, CellPattern(some)) if any(some) else None for some in map(tuple, spread)]
