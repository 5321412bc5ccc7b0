"""Tables of pieces in binary: what goes in comes out, and a hostile table is an error and costs nothing."""

import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.model.tables import PieceTable, TableRow, encode_table, table_size

HEADER = struct.Struct("<8sIIQQ")
digests = st.integers(0, (1 << 128) - 1).map("{:032x}".format)


@st.composite
def tables(draw: Any) -> list[TableRow]:
    packed = draw(st.booleans())
    places = draw(st.sets(st.tuples(st.integers(0, 9), st.integers(0, (1 << 32) - 1)), min_size=1, max_size=20))
    return [
        TableRow(
            leaf,
            cell,
            draw(st.integers(0, (1 << 32) - 1)),
            draw(st.integers(0, (1 << 64) - 1)),
            draw(st.none() | st.integers(1, (1 << 64) - 1)) if packed else None,
            tuple(draw(st.lists(digests, max_size=3))),
        )
        for leaf, cell in places
    ]


def rows_of(table: PieceTable, leaf: int, lengths: list[int]) -> list[TableRow]:
    """The rows of a leaf, given how many digests each has."""
    run = table.run(leaf)
    found, digest = [], run.first_digest
    for row, length in zip(range(run.first, run.last), lengths, strict=True):
        known = table.digests(digest, length)
        stored = table.stored[row] or None if table.packed else None
        found.append(TableRow(leaf, table.cells[row], table.files[row], table.offsets[row], stored, known))
        digest += length
    assert digest == run.first_digest + run.digests
    return found


@given(rows=tables())
def test_what_goes_in_comes_out(rows: list[TableRow]) -> None:
    data = encode_table(rows)
    table = PieceTable(data)
    for leaf in range(11):
        own = sorted((row for row in rows if row.leaf == leaf), key=lambda row: row.cell)
        assert rows_of(table, leaf, [len(row.digests or ()) for row in own]) == own
    total = sum(len(row.digests or ()) for row in rows)
    packed = any(row.stored is not None for row in rows)
    assert len(data) == table_size(len({row.leaf for row in rows}), len(rows), total, packed)


def test_a_piece_takes_less_than_60_bytes_in_a_manifest_and_16_more_for_each_further_digest() -> None:
    """Base64 makes a third more of the table of a save by one process; a table in a file is as it is."""
    alone = [TableRow(i, 0, 0, 0, None, ["0" * 32]) for i in range(100)]
    assert len(encode_table(alone)) * 4 / 3 / 100 < 60
    spread = [TableRow(i, 7, 0, 0, None, ["0" * 32]) for i in range(100)]
    longer = [TableRow(i, 7, 0, 0, None, ["0" * 32] * 2) for i in range(100)]
    assert len(encode_table(spread)) == 32 + 44 * 100
    assert len(encode_table(longer)) - len(encode_table(spread)) == 16 * 100


ROWS = [
    TableRow(1, 0, 0, 0, None, ["a" * 32]),
    TableRow(1, 1, 0, 64, None, ["b" * 32, "c" * 32]),
    TableRow(4, 2, 1, 0, None, ["d" * 32]),
]


@given(cut=st.integers(0, len(encode_table(ROWS)) - 1))
def test_a_table_that_is_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="table of pieces"):
        PieceTable(encode_table(ROWS)[:cut])


@pytest.mark.parametrize("more", [b"\0", b"\0" * 16, encode_table(ROWS)])
def test_a_table_with_more_bytes_than_its_counts_need_is_refused(more: bytes) -> None:
    with pytest.raises(ValueError, match="size that its counts need"):
        PieceTable(encode_table(ROWS) + more)


@pytest.mark.parametrize("field", [2, 3, 4])
@pytest.mark.parametrize("value", [0, 1, 5, 1 << 20, (1 << 32) - 1])
def test_counts_that_are_not_those_of_the_table_are_refused(field: int, value: int) -> None:
    data = encode_table(ROWS)
    fields = list(HEADER.unpack_from(data))
    fields[field] = value
    with pytest.raises(ValueError, match="counts need"):
        PieceTable(HEADER.pack(*fields) + data[HEADER.size :])


@pytest.mark.parametrize("count", [1 << 28, 1 << 40, (1 << 64) - 1])
def test_huge_counts_allocate_nothing(count: int) -> None:
    data = HEADER.pack(b"skpiece2", 0, min(count, (1 << 32) - 1), count, count) + bytes(1000)
    tracemalloc.start()
    with pytest.raises(ValueError, match="counts need"):
        PieceTable(data)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 16


@pytest.mark.parametrize(("at", "value"), [(0, b"skpiece3"), (8, b"\2\0\0\0"), (8, b"\0\0\0\x80")])
def test_an_unknown_magic_or_flag_is_refused(at: int, value: bytes) -> None:
    data = encode_table(ROWS)
    with pytest.raises(ValueError, match="unknown format"):
        PieceTable(data[:at] + value + data[at + len(value) :])


def test_a_flag_that_does_not_fit_is_refused() -> None:
    data = encode_table(ROWS)
    with pytest.raises(ValueError, match="counts need"):
        PieceTable(data[:8] + struct.pack("<I", 1) + data[12:])


LEAVES = HEADER.size + 8 * 3  # where the columns of the leaves begin, after the offsets


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        ("leaves", [1, 1], "leaf twice"),
        ("leaves", [4, 1], "leaf twice"),
        ("counts", [3, 0], "without pieces"),
        ("counts", [0, 3], "without pieces"),
        ("counts", [1, 1], "add up"),
        ("counts", [2, 2], "add up"),
        ("counts", [2, (1 << 32) - 1], "add up"),
        ("digests", [3, 2], "add up"),
        ("digests", [(1 << 32) - 1, 5], "add up"),
        ("cells", [0, 0, 2], "cell twice"),
        ("cells", [1, 0, 2], "cell twice"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(column: str, values: list[int], problem: str) -> None:
    data = encode_table(ROWS)
    at = LEAVES + {"leaves": 0, "counts": 8, "digests": 16, "cells": 24}[column]
    changed = struct.pack(f"<{len(values)}I", *values)
    with pytest.raises(ValueError, match=problem):
        PieceTable(data[:at] + changed + data[at + len(changed) :])


@given(data=st.data())
def test_no_change_of_any_byte_gives_another_error(data: st.DataObject) -> None:
    table = bytearray(encode_table(ROWS))
    for _ in range(data.draw(st.integers(1, 4))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = PieceTable(bytes(table))
    except ValueError:
        return
    for leaf in (0, 1, 4):
        run = found.run(leaf)
        assert 0 <= run.first <= run.last <= 3
        assert 0 <= run.digests <= 4
