"""Pieces in tables: decoded when they are asked for, only those, and checked against their array and its files."""

import base64
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.errors import IntegrityError
from shardkeep.loading.read import read_tables
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.cells import CellGrid
from shardkeep.model.digests import BLOCK, block_count, digest
from shardkeep.model.leaves import NATIVE, Piece, StoredArray
from shardkeep.model.manifest import DataFile
from shardkeep.model.pieces import (
    CellPattern,
    StoredPieces,
    TableSet,
    TableSource,
    inline_table,
    pieces_meeting,
)
from shardkeep.model.tables import TableRow, encode_table
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.scopes import Scope

SPEC = ArraySpec((6, BLOCK // 2), np.dtype(np.uint8))
FILES = [DataFile("0", 3 * BLOCK), DataFile("1", 3 * BLOCK)]
GRID = CellGrid(SPEC.shape, (4, SPEC.shape[1]))  # two cells, of two blocks and one
ROWS = [TableRow(5, 0, 0, 0, None, ["a" * 32, "b" * 32]), TableRow(5, 1, 1, BLOCK, None, ["c" * 32])]
PIECES = [
    Piece(Region((0, 0), (4, BLOCK // 2)), 0, 0, 2 * BLOCK, ("a" * 32, "b" * 32)),
    Piece(Region((4, 0), (2, BLOCK // 2)), 1, BLOCK, BLOCK, ("c" * 32,)),
]


def tables_of(*tables: Sequence[TableRow], packed: bool = False) -> TableSet:
    return TableSet([inline_table(encode_table(rows)) for rows in tables], FILES, packed, "manifest.json", None)


def pieces_of(
    tables: TableSet, leaf: int = 5, grid: CellGrid = GRID, pattern: tuple[int, ...] | None = None
) -> StoredPieces:
    return StoredPieces(tables, leaf, ("w",), SPEC, grid, None if pattern is None else CellPattern(pattern))


def test_pieces_are_a_sequence() -> None:
    pieces = pieces_of(tables_of(ROWS))
    assert (list(pieces), len(pieces), pieces[-1], pieces[:1]) == (PIECES, 2, PIECES[1], PIECES[:1])
    assert pieces == pieces_of(tables_of(ROWS)) == tuple(PIECES) == pieces
    assert len({pieces, tuple(PIECES)}) == 1
    assert pieces != tuple(PIECES[:1])
    with pytest.raises(IndexError):
        pieces[2]


def test_cells_come_from_the_tables_of_the_pattern_and_count_files_from_their_base() -> None:
    tables = [inline_table(encode_table(ROWS[1:]), base=0), inline_table(encode_table(ROWS[:1]), base=1)]
    pieces = pieces_of(TableSet(tables, FILES, False, "manifest.json", None), pattern=(1, 0))
    assert [(piece.region, piece.file) for piece in pieces] == [(PIECES[0].region, 1), (PIECES[1].region, 1)]


def test_tables_are_read_at_once_before_they_are_needed() -> None:
    data = [encode_table(ROWS[:1]), encode_table(ROWS[1:])]
    files = [*FILES, *(DataFile(f"t{i}", len(d), len(d), digest(d)) for i, d in enumerate(data))]
    read: list[str] = []
    both = threading.Barrier(2)

    def reading(file: DataFile) -> bytes:
        both.wait(60)
        read.append(file.name)
        return data[int(file.name[1:])]

    tables = TableSet([TableSource(2), TableSource(3)], files, False, "manifest.json", reading)
    leaf = StoredArray(("x",), SPEC, pieces_of(tables, pattern=(0, 1)), NATIVE)
    with Scope("a test") as scope:
        crew = scope.add(Crew(2))
        read_tables([(leaf, [PIECES[1].region]), (leaf, [PIECES[0].region])], crew)
        assert (sorted(read), list(leaf.pieces)) == (["t0", "t1"], PIECES)
        read_tables([(leaf, [Region.whole(SPEC.shape)])], crew)
    assert len(read) == 2


def test_a_table_that_cannot_be_read_ahead_is_an_error_of_the_leaf_that_needs_it() -> None:
    def reading(file: DataFile) -> bytes:
        raise IntegrityError(f"{file.name} is damaged", file=file.name)

    tables = TableSet([TableSource(0)], FILES, False, "manifest.json", reading)
    leaf = StoredArray(("w",), SPEC, pieces_of(tables), NATIVE)
    with Scope("a test") as scope:
        read_tables([(leaf, [PIECES[0].region])], scope.add(Crew(2)))
    with pytest.raises(IntegrityError, match="is damaged") as caught:
        leaf.pieces[0]
    assert caught.value.leaf == "w"


def test_only_the_tables_of_the_cells_that_are_needed_are_read() -> None:
    data = [encode_table(ROWS[:1]), encode_table(ROWS[1:])]
    files = [*FILES, *(DataFile(f"t{i}", len(d), len(d), digest(d)) for i, d in enumerate(data))]
    read: list[str] = []

    def reading(file: DataFile) -> bytes:
        read.append(file.name)
        return data[int(file.name[1:])]

    tables = TableSet([TableSource(2), TableSource(3)], files, False, "manifest.json", reading)
    pieces = pieces_of(tables, pattern=(0, 1))
    assert (len(pieces), read) == (2, [])
    assert pieces.meeting([Region((5, 0), (1, 1))]) == [(PIECES[1], [0])]
    assert read == ["t1"]
    assert (list(pieces), list(pieces), read) == (PIECES, PIECES, ["t1", "t0"])


def test_regions_get_the_pieces_that_they_meet() -> None:
    pieces = pieces_of(tables_of(ROWS))
    regions = [Region((3, 0), (2, 1)), Region((0, 0), (1, 1))]
    assert pieces_meeting(pieces, regions) == [(PIECES[0], [0, 1]), (PIECES[1], [0])]
    assert [piece for piece, _ in pieces_meeting(tuple(PIECES), regions)] == PIECES


@given(data=st.data())
def test_any_pieces_of_any_leaves_come_back(data: st.DataObject) -> None:
    """Leaves cut at random, their cells spread over tables at random, some compressed, some without digests."""
    count = data.draw(st.integers(1, 3))
    checked, packed = [data.draw(st.booleans()) for _ in range(count)], data.draw(st.booleans())
    rows: list[list[TableRow]] = [[] for _ in range(count)]
    expected: dict[int, tuple[CellGrid, tuple[int, ...], list[Piece]]] = {}
    for leaf in data.draw(st.sets(st.integers(0, 50), min_size=1, max_size=4)):
        shape = (data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 3, BLOCK // 3])))
        grid = CellGrid(shape, tuple(data.draw(st.integers(max(n // 4, 1), n)) for n in shape))
        pattern = tuple(data.draw(st.integers(0, count - 1)) for _ in range(grid.count))
        pieces: list[Piece] = []
        for cell, table in enumerate(pattern):
            region = grid.region(cell)
            digests = [f"{data.draw(st.integers(0, 99)):032x}" for _ in range(block_count(region.size))]
            known = tuple(digests) if checked[table] else None
            stored = data.draw(st.none() | st.integers(1, 100)) if packed else None
            offset = data.draw(st.integers(0, 1 << 40))
            rows[table].append(TableRow(leaf, cell, cell, offset, stored, known))
            pieces.append(Piece(region, cell, offset, region.size, known, stored))
        expected[leaf] = grid, pattern, pieces
    files = [DataFile(str(i), 1 << 50) for i in range(max(len(pieces) for _, _, pieces in expected.values()))]
    tables = TableSet(
        [inline_table(encode_table(some), checked=known) for some, known in zip(rows, checked, strict=True)],
        files,
        packed,
        "manifest.json",
        None,
    )
    for leaf, (grid, pattern, pieces) in expected.items():
        spec = ArraySpec(grid.shape, np.dtype(np.uint8))
        found = StoredPieces(tables, leaf, ("w",), spec, grid, CellPattern(pattern))
        assert list(found) == pieces
        some = data.draw(st.lists(st.sampled_from(range(len(pieces))), unique=True))
        assert found.cells(some) == [pieces[i] for i in some]


def changed(row: int, **fields: Any) -> list[TableRow]:
    rows = [TableRow(r.leaf, r.cell, r.file, r.offset, r.stored, r.digests) for r in ROWS]
    for name, value in fields.items():
        object.__setattr__(rows[row], name, value)
    return rows


HOSTILE = {
    "a cell outside of the grid": (changed(1, cell=2), "not in the grid|lacks cell"),
    "the last possible cell": (changed(1, cell=(1 << 32) - 1), "not in the grid|lacks cell"),
    "a cell too few": (ROWS[:1], "1 instead of 2"),
    "a cell too many": ([*ROWS, TableRow(5, 2, 0, 0, None, [])], "3 instead of 2"),
    "another leaf": (changed(0, leaf=4), "1 instead of 2"),
    "a file that is not there": (changed(0, file=2), "outside its file"),
    "the last possible file": (changed(0, file=(1 << 32) - 1), "outside its file"),
    "an offset outside of the file": (changed(0, offset=BLOCK + 1), "outside its file"),
    "the last possible offset": (changed(0, offset=(1 << 64) - 1), "outside its file"),
    "too few digests": (changed(0, digests=["a" * 32]), "missing digests"),
    "too many digests": (changed(1, digests=["a" * 32] * 2), "missing digests"),
    "a compressed piece": (changed(0, stored=1), "without compression"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_table_is_an_error_that_names_the_leaf(case: str) -> None:
    rows, problem = HOSTILE[case]
    pieces = pieces_of(tables_of(rows))
    for _ in range(2):  # also when the table is known
        with pytest.raises(IntegrityError, match=problem) as raised:
            list(pieces)
        assert raised.value.leaf == "w"


def test_a_table_that_is_not_there_is_an_error() -> None:
    for pattern in (None, (0, 3)):
        with pytest.raises(IntegrityError, match="has no table"):
            list(pieces_of(tables_of() if pattern is None else tables_of(ROWS[:1]), pattern=pattern))


@pytest.mark.parametrize("text", ["!", "A", "AAAA\n", "é", "", base64.b64encode(encode_table(ROWS)).decode()[:-4]])
def test_a_table_that_is_no_base64_or_cut_short_is_an_error(text: str) -> None:
    pieces = pieces_of(TableSet([TableSource(text=text)], FILES, False, "manifest.json", None))
    with pytest.raises(IntegrityError, match=r"manifest\.json is malformed: a table of pieces"):
        pieces[0]


def test_a_huge_grid_is_refused_before_its_cells_are_looked_at() -> None:
    spec = ArraySpec((1 << 16, 1 << 16), np.dtype(np.uint8))
    grid = CellGrid.decode(spec.shape, [1, 1])
    pieces = StoredPieces(tables_of(ROWS), 5, ("w",), spec, grid)
    assert len(pieces) == 1 << 32
    with pytest.raises(IntegrityError, match="2 instead of 4,294,967,296"):
        pieces.meeting([Region((0, 0), (1, 1))])
