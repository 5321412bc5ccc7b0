"""Which process writes which part of an array. All processes have these, so they cost little however many there are."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardkeep.model.arrays import Region
from shardkeep.model.digests import digest
from shardkeep.model.lazy import cached_property

Numbers = NDArray[np.int64]


class Writers:
    """The process that writes each cell of a grid, by the number of the cell. Arrays that are alike share one.

    Args:
        numbers: The index of the process for each cell.

    >>> writers = Writers(np.array([0, 1, 0]))
    >>> len(writers), writers.cells_of(0), writers.cells_of(7)
    (3, [0, 2], [])
    """

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return self.numbers.size

    def __repr__(self) -> str:
        return f"Writers({self.digest})"

    @cached_property
    def digest(self) -> str:
        """The same for the same processes: 16 characters."""
        return digest(np.ascontiguousarray(self.numbers, np.int64).view(np.uint8).data)[:16]

    def cells_of(self, process: int) -> list[int]:
        """The numbers of the cells that a process writes. Proportional to them, after the first call."""
        order, sorted_ = self._by_process
        first, last = np.searchsorted(sorted_, [process, process + 1])
        return order[first:last].tolist()

    @cached_property
    def _by_process(self) -> tuple[Numbers, Numbers]:
        order = np.argsort(self.numbers, kind="stable")
        return order, self.numbers[order]


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Who writes what of an array: the cells of a grid that divides it evenly, numbered in C order.

    Args:
        shape: The shape of the array.
        counts: The number of cells along each axis.
        writers: The process that writes each cell.

    >>> shares = Shares((4, 6), (2, 1), Writers(np.array([1, 0])))
    >>> shares.of(1), len(shares)
    ((Region(start=(0, 0), shape=(2, 6)),), 2)
    """

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    writers: Writers
    _own: dict[int, tuple[Region, ...]] = field(default_factory=dict[int, tuple[Region, ...]], repr=False)

    @classmethod
    def whole(cls, shape: tuple[int, ...], writer: int) -> "Shares":
        """One process writes the array, in one piece."""
        return cls(shape, (1,) * len(shape), _all_by(writer))

    @property
    def cell(self) -> tuple[int, ...]:
        """The shape of a cell."""
        return tuple(n // count for n, count in zip(self.shape, self.counts, strict=True))

    def region(self, number: int) -> Region:
        """A cell of the grid."""
        shape, start = self.cell, list[int]()
        for count, extent in zip(reversed(self.counts), reversed(shape), strict=True):
            number, at = divmod(number, count)
            start.append(at * extent)
        return Region(tuple(reversed(start)), shape)

    def of(self, process: int) -> tuple[Region, ...]:
        """The regions that a process writes. What is computed once for this process serves every save."""
        if process not in self._own:
            self._own[process] = tuple(map(self.region, self.writers.cells_of(process)))
        return self._own[process]

    def size_of(self, process: int) -> int:
        """The number of elements that a process writes."""
        return len(self.of(process)) * math.prod(self.cell)

    def is_by_one(self, split: Sequence[int], times: Sequence[int]) -> bool:
        """Whether each block of cells is written by a single process.

        Args:
            split: How many parts each cell is divided into, along each axis.
            times: The number of these parts in a block, along each axis.
        """
        return _is_by_one(self.writers, self.counts, tuple(split), tuple(times))

    def __len__(self) -> int:
        return len(self.writers)

    def __iter__(self) -> Iterator[tuple[Region, int]]:
        """Every region and the process that writes it: work that grows with the number of processes."""
        return ((self.region(number), int(writer)) for number, writer in enumerate(self.writers.numbers))


@lru_cache(maxsize=64)
def _all_by(writer: int) -> Writers:
    return Writers(np.array([writer]))


@lru_cache(maxsize=4096)  # thousands of arrays share a few grids and writers
def _is_by_one(writers: Writers, counts: tuple[int, ...], split: tuple[int, ...], times: tuple[int, ...]) -> bool:
    found = writers.numbers.reshape(counts)
    for axis, (parts, extent) in enumerate(zip(split, times, strict=True)):
        found = np.repeat(found, parts, axis=axis) if parts > 1 else found
        blocks = found.reshape(*found.shape[:axis], -1, extent, *found.shape[axis + 1 :])
        first = blocks.take(0, axis=axis + 1)
        if extent > 1 and not np.array_equal(blocks, np.broadcast_to(np.expand_dims(first, axis + 1), blocks.shape)):
            return False
        found = first
    return True
