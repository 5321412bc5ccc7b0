"""Tables of pieces: where the cells of arrays are stored, in binary columns. docs/format.md specifies them.

A manifest holds one, or names the files with several. Decoding one makes no object for each piece: the columns are
looked at where they lie.
"""

import struct
from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from shardkeep.model.arrays import Array
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.lazy import cached_property

_MAGIC = b"skpiece2"
_HEADER = struct.Struct("<8sIIQQ")  # magic, flags, numbers of leaves, of pieces, of digests
_STORED = 1  # a flag: the pieces have stored lengths
_DIGEST = 16  # bytes


@fast_dataclass
class TableRow:
    """A piece in a table: a cell of a leaf, where it is stored, and its digests, if they are known."""

    leaf: int
    cell: int
    file: int
    offset: int
    stored: int | None
    digests: Sequence[str] | None = None


def encode_table(rows: Sequence[TableRow]) -> bytes:
    """The table of some pieces, in any order."""
    rows = sorted(rows, key=attrgetter("leaf", "cell"))
    numbers = np.array([row.leaf for row in rows], np.int64)
    leaves, firsts, counts = np.unique(numbers, return_index=True, return_counts=True)
    known = [row.digests or () for row in rows]
    lengths = list(map(len, known))
    digests: Array = np.add.reduceat(np.array(lengths, np.int64), firsts)
    packed = any(row.stored is not None for row in rows)
    columns = [
        _HEADER.pack(_MAGIC, _STORED if packed else 0, len(leaves), len(rows), sum(lengths)),
        np.array([row.offset for row in rows], "<u8").tobytes(),
        np.array([row.stored or 0 for row in rows] if packed else [], "<u8").tobytes(),
        *(column.astype("<u4").tobytes() for column in (leaves, counts, digests)),
        np.array([row.cell for row in rows], "<u4").tobytes(),
        np.array([row.file for row in rows], "<u4").tobytes(),
        bytes.fromhex("".join(map("".join, known))),
    ]
    return b"".join(columns)


def table_size(leaves: int, pieces: int, digests: int, packed: bool) -> int:
    """The bytes of a table, which only the numbers of things in it decide.

    >>> table_size(1, 2, 2, packed=False) == len(encode_table([TableRow(5, i, 0, 0, None, ["0" * 32]) for i in (0, 1)]))
    True
    """
    return _HEADER.size + 8 * pieces * (2 if packed else 1) + 12 * leaves + 8 * pieces + _DIGEST * digests


@fast_dataclass
class LeafRows:
    """The rows of one leaf in a table, and its digests."""

    first: int
    last: int
    first_digest: int
    digests: int


class PieceTable:
    """A table that was read; `ValueError` if it is malformed.

    Nothing is allocated because of the counts in it before they are known to match its size. Whether the cells, files
    and offsets exist is not known here.

    >>> table = PieceTable(encode_table([TableRow(3, 0, 1, 4096, None, ["0" * 32])]))
    >>> table.run(3), table.files[0], table.offsets[0], table.digests(0, 1)
    (LeafRows(first=0, last=1, first_digest=0, digests=1), 1, 4096, ('00000000000000000000000000000000',))
    """

    def __init__(self, data: bytes) -> None:
        if len(data) < _HEADER.size:
            raise ValueError("a table of pieces is truncated")
        magic, flags, leaves, pieces, digests = _HEADER.unpack_from(data)
        if magic != _MAGIC or flags & ~_STORED:
            raise ValueError("a table of pieces has an unknown format")
        self.packed = bool(flags & _STORED)
        if table_size(leaves, pieces, digests, self.packed) != len(data):
            raise ValueError("a table of pieces does not have the size that its counts need")
        self._data, self._at = data, len(data) - _DIGEST * digests
        self._next = _HEADER.size
        offsets = self._column("<u8", pieces)
        stored = self._column("<u8", pieces if self.packed else 0)
        self._leaves, counts, lengths = (self._column("<u4", leaves) for _ in range(3))
        cells, files = self._column("<u4", pieces), self._column("<u4", pieces)
        self._ends, self._digest_ends = np.cumsum(counts, dtype=np.uint64), np.cumsum(lengths, dtype=np.uint64)
        self._check(counts, cells, pieces, digests)
        self.cells, self.files = cells.data, files.data
        self.offsets, self.stored = offsets.data, stored.data
        self.rows = pieces

    def _column(self, kind: str, count: int) -> Array:
        column = np.frombuffer(self._data, kind, count, self._next)
        self._next += column.nbytes
        return column.astype(column.dtype.newbyteorder("="), copy=False)

    def _check(self, counts: Array, cells: Array, pieces: int, digests: int) -> None:
        """The leaves rise, each has a piece, its cells rise, and the counts add up."""
        if (self._leaves[1:] <= self._leaves[:-1]).any() or (counts == 0).any():
            raise ValueError("a table of pieces has a leaf twice, or one without pieces")
        ends = [int(column[-1]) if len(column) else 0 for column in (self._ends, self._digest_ends)]
        if ends != [pieces, digests]:
            raise ValueError("the counts of a table of pieces do not add up")
        falls = cells[1:] <= cells[:-1]
        falls[self._ends[:-1].astype(np.int64) - 1] = False  # where another leaf begins
        if falls.any():
            raise ValueError("a table of pieces has a cell twice")

    @cached_property
    def _index(self) -> tuple[memoryview, memoryview, memoryview]:
        return self._leaves.data, self._ends.data, self._digest_ends.data

    def run(self, leaf: int) -> LeafRows:
        """The rows of a leaf; none if it has no pieces here."""
        leaves, ends, digest_ends = self._index
        at = bisect_left(leaves, leaf)
        if at == len(leaves) or leaves[at] != leaf:
            return LeafRows(0, 0, 0, 0)
        first, first_digest = (ends[at - 1], digest_ends[at - 1]) if at else (0, 0)
        return LeafRows(first, ends[at], first_digest, digest_ends[at] - first_digest)

    def digests(self, first: int, count: int) -> tuple[str, ...]:
        """Some of the digests, by their numbers in the table."""
        at = self._at + first * _DIGEST
        text = self._data[at : at + count * _DIGEST].hex()
        return (text,) if count == 1 else tuple([text[i : i + 32] for i in range(0, len(text), 32)])
