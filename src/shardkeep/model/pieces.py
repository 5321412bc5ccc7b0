"""The pieces of arrays in tables, which are decoded where they are needed, and read from their files only then."""

import base64
import binascii
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, overload

import numpy as np

from shardkeep.errors import IntegrityError, damage_of
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.cells import CellGrid
from shardkeep.model.digests import BLOCK, block_count
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.lazy import cached_property
from shardkeep.model.leaves import Piece, StoredArray
from shardkeep.model.manifest import DataFile, Tree
from shardkeep.model.tables import LeafRows, PieceTable, TableRow, encode_table
from shardkeep.model.tree import Path, show_key

ReadTable = Callable[[DataFile], bytes]  # reads a file that is a table, and checks it against its record


@fast_dataclass
class TableSource:
    """Where a table is: in a file, by its number in the tree, or in the manifest, as Base64.

    The numbers of files in the table count from `base` in the tree's files. `checked`: its pieces have digests.
    """

    file: int | None = None
    text: str = ""
    base: int = 0
    checked: bool = True


def inline_table(table: bytes, base: int = 0, checked: bool = True) -> TableSource:
    """A table in the manifest itself."""
    return TableSource(text=base64.b64encode(table).decode(), base=base, checked=checked)


class TableSet:
    """The tables of a tree, each read and decoded once, when a piece in it is needed.

    Args:
        sources: Where they are.
        files: The files of the tree.
        packed: Whether pieces may be stored in another form than their raw bytes.
        where: The manifest, for messages.
        read: Reads a file.
        known: Tables of files that need not be read, by number.
    """

    def __init__(
        self,
        sources: Sequence[TableSource],
        files: Sequence[DataFile],
        packed: bool,
        where: str,
        read: ReadTable | None,
        known: Mapping[int, bytes] | None = None,
    ) -> None:
        self.sources, self.files, self.packed, self.where = tuple(sources), files, packed, where
        self._read, self._known = read, known or {}
        self._tables: dict[int, PieceTable] = {}

    def table(self, number: int) -> PieceTable:
        """A table; `ValueError` if it is malformed, `IntegrityError` if its file is missing or damaged."""
        found = self._tables.get(number)
        if found is None:
            found = PieceTable(self._bytes_of(number))
            if found.packed and not self.packed:
                raise ValueError("a tree without compression has a compressed piece")
            self._tables[number] = found
        return found

    def try_table(self, number: int) -> None:
        """Read a table now. What is wrong with it is raised later, with the name of a leaf that needs a piece in it."""
        with suppress(IntegrityError, ValueError):
            self.table(number)

    def unread(self, number: int) -> bool:
        """Whether a table is in a file that was not read yet."""
        if number in self._tables or number in self._known or number >= len(self.sources):
            return False
        return self.sources[number].file is not None

    def _bytes_of(self, number: int) -> bytes:
        source = self.sources[number]
        if number in self._known:
            return self._known[number]
        if source.file is None:
            try:
                return base64.b64decode(source.text, validate=True)
            except (binascii.Error, ValueError) as error:
                raise ValueError(f"a table of pieces is not Base64: {error}") from None
        assert self._read is not None, "tables in files are refused where no files can be read"
        return self._read(self.files[source.file])

    def name(self, number: int) -> str:
        """The file that a table is in, for messages."""
        file = self.sources[number].file if number < len(self.sources) else None
        return self.where if file is None else f"{self.where} ({self.files[file].name})"


class CellPattern:
    """Which table has which cell of an array, by the number of the cell."""

    def __init__(self, tables: tuple[int, ...]) -> None:
        self.tables = tables

    @cached_property
    def counts(self) -> Counter[int]:
        """How many cells each table has."""
        return Counter(self.tables)


class StoredPieces(Sequence[Piece]):
    """The pieces of an array: the cells of its grid. Each is decoded when it is asked for.

    `IntegrityError` then, if its table is malformed: it lacks the cell, or has one outside of the array or of a file.

    Args:
        tables: The tables of the tree.
        leaf: The number of the leaf in the tree.
        path: The path of the leaf, for messages.
        spec: The shape and the dtype of the array.
        grid: The cells.
        pattern: Which table has which cell. None: all are in the first.
    """

    __slots__ = ("grid", "leaf", "path", "pattern", "spec", "tables")

    def __init__(
        self,
        tables: TableSet,
        leaf: int,
        path: Path,
        spec: ArraySpec,
        grid: CellGrid,
        pattern: CellPattern | None = None,
    ) -> None:
        self.tables, self.leaf, self.path, self.spec, self.grid, self.pattern = tables, leaf, path, spec, grid, pattern

    def __len__(self) -> int:
        return self.grid.count

    @overload
    def __getitem__(self, index: int) -> Piece: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...

    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(index, slice):
            return self.cells(range(len(self))[index])
        cell = range(len(self))[index]
        table = 0 if self.pattern is None else self.pattern.tables[cell]
        try:
            return self._decoder(table).piece(cell)
        except (IntegrityError, ValueError) as error:
            raise self._damage(error, table) from None

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.cells(range(len(self))))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{len(self)} pieces>"

    def cells(self, numbers: Iterable[int]) -> list[Piece]:
        """Some of the pieces, by the numbers of their cells."""
        decoders: dict[int, _Decoder] = {}
        found: list[Piece] = []
        for cell in numbers:
            table = 0 if self.pattern is None else self.pattern.tables[cell]
            try:
                decoder = decoders.get(table)
                if decoder is None:
                    decoder = decoders[table] = self._decoder(table)
                found.append(decoder.piece(cell))
            except (IntegrityError, ValueError) as error:
                raise self._damage(error, table) from None
        return found

    def _damage(self, error: IntegrityError | ValueError, table: int) -> IntegrityError:
        """The error for a piece in a table that is malformed, or in a file that is missing or damaged."""
        if isinstance(error, IntegrityError):
            return damage_of(error, show_key(self.path), error.file or "")
        where, key = self.tables.name(table), show_key(self.path)
        return IntegrityError(f"{where} is malformed: {error}", leaf=key, file=where)

    def _decoder(self, number: int) -> "_Decoder":
        """What decodes the cells in one table, which has as many as it should."""
        if number >= len(self.tables.sources):
            raise ValueError("it has no table for a piece")
        table = self.tables.table(number)
        run = table.run(self.leaf)
        wanted = self.grid.count if self.pattern is None else self.pattern.counts[number]
        if run.last - run.first != wanted:
            raise ValueError(f"a table has {run.last - run.first:,} instead of {wanted:,} pieces of a leaf")
        return _Decoder(self, table, run, self.tables.sources[number])

    def tables_meeting(self, regions: Sequence[Region]) -> set[int]:
        """The tables of the pieces that have elements of some regions."""
        if self.pattern is None:
            return {0}
        return {self.pattern.tables[cell] for region in regions for cell in self.grid.meeting(region)}

    def meeting(self, regions: Sequence[Region]) -> list[tuple[Piece, list[int]]]:
        """The pieces that have elements of any of some regions, each with the numbers of these regions."""
        met: dict[int, list[int]] = {}
        for number, region in enumerate(regions):
            for cell in self.grid.meeting(region):
                met.setdefault(cell, []).append(number)
        cells = sorted(met)
        return list(zip(self.cells(cells), map(met.__getitem__, cells), strict=True))


class _Decoder:
    """Decodes the pieces of one leaf that are in one table."""

    def __init__(self, pieces: StoredPieces, table: PieceTable, run: LeafRows, source: TableSource) -> None:
        self._pieces, self._table, self._run, self._source = pieces, table, run, source

    @cached_property
    def _firsts(self) -> Sequence[int]:
        """Where the digests of each row begin, and where those of the last end."""
        run, pieces = self._run, self._pieces
        nbytes = pieces.grid.sizes(np.asarray(self._table.cells[run.first : run.last])) * pieces.spec.dtype.itemsize
        return [run.first_digest, *(np.cumsum(-(-nbytes // BLOCK)) + run.first_digest).tolist()]

    def piece(self, cell: int) -> Piece:
        table, run, pieces = self._table, self._run, self._pieces
        row = run.first
        if run.last - row > 1:
            row = bisect_left(table.cells, cell, row, run.last)
        if row == run.last or table.cells[row] != cell:
            raise ValueError(f"a table lacks cell {cell:,}")
        if table.cells[run.last - 1] >= pieces.grid.count:
            raise ValueError("a table has a cell that is not in the grid")
        region = pieces.grid.region(cell)
        length = (pieces.grid.size if pieces.grid.count == 1 else region.size) * pieces.spec.dtype.itemsize
        stored = table.stored[row] or None if table.packed else None
        file, offset, files = self._source.base + table.files[row], table.offsets[row], pieces.tables.files
        if file >= len(files) or offset + (length if stored is None else stored) > files[file].size:
            raise ValueError("a piece lies outside its file")
        return Piece(region, file, offset, length, self._digests(row, length), stored)

    def _digests(self, row: int, length: int) -> tuple[str, ...] | None:
        run = self._run
        if not self._source.checked:
            if run.digests:
                raise ValueError("a piece has unexpected digests")
            return None
        if run.last - run.first == 1:
            first = run.first_digest
            last = end = first + block_count(length)
        else:
            firsts = self._firsts
            first, last, end = firsts[row - run.first], firsts[row - run.first + 1], firsts[-1]
        if end != run.first_digest + run.digests:
            raise ValueError("a piece has missing digests")
        return self._table.digests(first, last - first)


def pieces_meeting(pieces: Sequence[Piece], regions: Sequence[Region]) -> Iterable[tuple[Piece, Sequence[int]]]:
    """The pieces that may have elements of regions, each with the numbers of those. No others are decoded."""
    if isinstance(pieces, StoredPieces):
        return pieces.meeting(regions)
    numbers = range(len(regions))
    return [(piece, numbers) for piece in pieces]


def regions_in(pieces: Sequence[Piece]) -> list[Region]:
    """The parts of the array that pieces are. None of them is decoded."""
    if isinstance(pieces, StoredPieces):
        return list(map(pieces.grid.region, range(len(pieces))))
    return [piece.region for piece in pieces]


def packed_in(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces that are stored in another form than their raw bytes. In a tree without any, none is decoded."""
    if isinstance(pieces, StoredPieces) and not pieces.tables.packed:
        return []
    return [piece for piece in pieces if piece.stored is not None]


def have_digests(pieces: Sequence[Piece]) -> bool:
    """Whether there are pieces, and each has digests. None of them is decoded."""
    if isinstance(pieces, StoredPieces):
        used = {0} if pieces.pattern is None else pieces.pattern.counts
        return all(source.checked for number, source in enumerate(pieces.tables.sources) if number in used)
    return bool(pieces) and all(piece.digests is not None for piece in pieces)


class InTables(NamedTuple):
    """The pieces of a tree in tables: where these are, and the arrays by the numbers of their leaves."""

    sources: Sequence[TableSource]
    pieces: Mapping[int, StoredPieces]


def in_tables(tree: Tree) -> InTables:
    """The pieces of a tree as a manifest has them. Those that are in tables already are not decoded.

    Others come from another program's checkpoint, or from a manifest that had no tables yet.
    """
    arrays = [(i, leaf) for i, leaf in enumerate(tree.leaves) if isinstance(leaf, StoredArray) and leaf.pieces]
    known = {i: leaf.pieces for i, leaf in arrays if isinstance(leaf.pieces, StoredPieces) and leaf.pieces.leaf == i}
    sets = {id(pieces.tables): pieces.tables for pieces in known.values()}
    if len(known) == len(arrays) and len(sets) == 1:
        return InTables(next(iter(sets.values())).sources, known)
    rows: dict[bool, list[TableRow]] = {True: [], False: []}  # with digests, and without
    cells: dict[int, tuple[CellGrid, dict[int, bool]]] = {}  # by leaf: whether the cells have digests
    for i, leaf in arrays:
        grid, checked = cells[i] = CellGrid.of(leaf.spec.shape, [piece.region for piece in leaf.pieces]), {}
        for piece in leaf.pieces:
            cell, digests = grid.number(piece.region), piece.digests
            checked[cell] = digests is not None
            rows[digests is not None].append(TableRow(i, cell, piece.file, piece.offset, piece.stored, digests))
    kinds = [kind for kind, some in rows.items() if some]
    sources = [inline_table(encode_table(rows[kind]), checked=kind) for kind in kinds]
    tables = TableSet(sources, tree.files, tree.compression is not None, "", None)
    pieces: dict[int, StoredPieces] = {}
    for i, leaf in arrays:
        grid, checked = cells[i]
        spread = CellPattern(tuple([kinds.index(checked[cell]) for cell in sorted(checked)]))
        pieces[i] = StoredPieces(tables, i, leaf.path, leaf.spec, grid, spread if len(kinds) > 1 else None)
    return InTables(sources, pieces)
