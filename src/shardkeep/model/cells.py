"""How an array is cut into pieces: the cells of a grid, numbered in C order, so that they fill it exactly once."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import cast

import numpy as np

from shardkeep.model.arrays import Array, Region
from shardkeep.model.lazy import cached_property
from shardkeep.model.values import Json

MOST_CELLS = 1 << 32  # of one array: tables number them with 32 bits


class CellGrid:
    """The cells of an array. Each axis is cut into parts; a cell is one part of every axis.

    Args:
        shape: The shape of the array.
        parts: For each axis, the length of its parts (the last may be shorter), or where they begin.

    >>> grid = CellGrid((4, 6), (2, (0, 5)))
    >>> grid.count, grid.region(3), grid.meeting(Region((0, 0), (4, 1)))
    (4, Region(start=(2, 5), shape=(2, 1)), [0, 2])
    """

    def __init__(self, shape: tuple[int, ...], parts: tuple[int | tuple[int, ...], ...]) -> None:
        self.shape, self.parts = shape, parts

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "CellGrid":
        """A single cell, which is all of an array."""
        return _whole(shape)

    @classmethod
    def even(cls, shape: tuple[int, ...], cell: tuple[int, ...]) -> "CellGrid":
        """The grid whose cells have this shape."""
        return _whole(shape) if cell == shape else _grid(shape, cell)

    @classmethod
    def of(cls, shape: tuple[int, ...], regions: Sequence[Region]) -> "CellGrid":
        """The grid whose cells are these regions, which fill the array exactly once."""
        if len(regions) == 1:
            return _whole(shape)
        return _grid(shape, tuple([_parts(sorted({r.start[i] for r in regions}), n) for i, n in enumerate(shape)]))

    @classmethod
    def decode(cls, shape: tuple[int, ...], data: Json) -> "CellGrid":
        """The grid in a document; `ValueError` if it is malformed or has too many cells."""
        if not isinstance(data, list) or len(data) != len(shape) or 0 in shape:
            raise ValueError("a grid does not have the axes of its array")
        if set(map(type, data)) <= {int}:
            return _even_grid(shape, tuple(cast("list[int]", data)))
        return _checked_grid(shape, tuple([_checked(entry, extent) for entry, extent in zip(data, shape, strict=True)]))

    def encode(self) -> Json:
        return [part if isinstance(part, int) else list(part) for part in self.parts]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of parts of each axis."""
        return tuple(
            -(-n // part) if isinstance(part, int) else len(part)
            for part, n in zip(self.parts, self.shape, strict=True)
        )

    @cached_property
    def count(self) -> int:
        """The number of cells."""
        return math.prod(self.counts) if self.size else 1

    @cached_property
    def size(self) -> int:
        """The number of elements of the array."""
        return math.prod(self.shape)

    @cached_property
    def _all(self) -> Region:
        return Region.whole(self.shape)

    def region(self, cell: int) -> Region:
        """The part of the array that a cell is."""
        if self.count == 1:
            return self._all
        start: list[int] = []
        shape: list[int] = []
        for part, count, extent in zip(reversed(self.parts), reversed(self.counts), reversed(self.shape), strict=True):
            cell, at = divmod(cell, count)
            if isinstance(part, int):
                first, last = at * part, min(at * part + part, extent)
            else:
                first, last = part[at], part[at + 1] if at + 1 < count else extent
            start.append(first)
            shape.append(last - first)
        return Region(tuple(reversed(start)), tuple(reversed(shape)))

    def number(self, region: Region) -> int:
        """The number of the cell that is this region."""
        if self.count == 1:  # as of most arrays
            return 0
        found = 0
        for part, count, first in zip(self.parts, self.counts, region.start, strict=True):
            found = found * count + (first // part if isinstance(part, int) else bisect_left(part, first))
        return found

    def meeting(self, region: Region) -> list[int]:
        """The cells that have elements of a region, in order."""
        if not region.size:
            return []
        spans: list[range] = []
        for part, first, length in zip(self.parts, region.start, region.shape, strict=True):
            if isinstance(part, int):
                spans.append(range(first // part, (first + length - 1) // part + 1))
            else:
                spans.append(range(bisect_right(part, first) - 1, bisect_left(part, first + length)))
        return list(self._numbers(spans))

    def _numbers(self, spans: Sequence[range]) -> Iterator[int]:
        strides = [math.prod(self.counts[axis + 1 :]) for axis in range(len(spans))]
        for indices in product(*spans):
            yield sum(i * stride for i, stride in zip(indices, strides, strict=True))

    def sizes(self, cells: Array) -> Array:
        """The number of elements of each of some cells."""
        found = np.ones(len(cells), np.int64)
        rest = cells.astype(np.int64)
        for part, count, extent in zip(reversed(self.parts), reversed(self.counts), reversed(self.shape), strict=True):
            rest, at = np.divmod(rest, count)
            starts = range(0, extent, part) if isinstance(part, int) else part
            found *= np.diff(np.array([*starts, extent], np.int64))[at]
        return found


@lru_cache(maxsize=4096)  # thousands of arrays have few different shapes
def _whole(shape: tuple[int, ...]) -> CellGrid:
    return CellGrid(shape, shape)


@lru_cache(maxsize=1024)  # and few different shardings
def _grid(shape: tuple[int, ...], parts: tuple[int | tuple[int, ...], ...]) -> CellGrid:
    return CellGrid(shape, parts)


@lru_cache(maxsize=1024)
def _even_grid(shape: tuple[int, ...], lengths: tuple[int, ...]) -> CellGrid:
    """The grid of a document, where each axis has parts of one length: as almost all have."""
    return _checked_grid(shape, tuple([_checked(part, extent) for part, extent in zip(lengths, shape, strict=True)]))


def _checked_grid(shape: tuple[int, ...], parts: tuple[int | tuple[int, ...], ...]) -> CellGrid:
    grid = _grid(shape, parts)
    if grid.count > MOST_CELLS:
        raise ValueError(f"a grid has {grid.count:,} cells")
    return grid


def _parts(starts: list[int], extent: int) -> int | tuple[int, ...]:
    """The parts of an axis that begin at these places."""
    step = starts[1] if len(starts) > 1 else extent
    return step if starts == list(range(0, extent, step)) else tuple(starts)


def _checked(entry: Json, extent: int) -> int | tuple[int, ...]:
    if type(entry) is int and 1 <= entry <= extent:
        return entry
    if not isinstance(entry, list):
        raise ValueError(f"the parts of an axis of {extent:,} cannot be {entry!r:.40}")
    starts = [start for start in entry if type(start) is int]
    bounds = [*starts, extent]
    if len(starts) != len(entry) or starts[:1] != [0] or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError("the parts of an axis do not begin one after another")
    return tuple(starts)
