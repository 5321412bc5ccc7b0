"""Grids: any cut of any array is numbered and found again."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.model.arrays import Region
from shardkeep.model.cells import CellGrid


@st.composite
def cuts(draw: Any) -> tuple[tuple[int, ...], list[list[int]]]:
    """A shape, and where the parts of each axis begin."""
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
    starts = [sorted({0, *draw(st.lists(st.integers(0, n - 1), max_size=4))}) for n in shape]
    return shape, starts


def regions_of(shape: tuple[int, ...], starts: list[list[int]]) -> list[Region]:
    """The cells in C order, made with NumPy."""
    ends = [[*some[1:], extent] for some, extent in zip(starts, shape, strict=True)]
    return [
        Region(
            tuple(some[i] for some, i in zip(starts, index, strict=True)),
            tuple(last[i] - some[i] for some, last, i in zip(starts, ends, index, strict=True)),
        )
        for index in np.ndindex(*map(len, starts))
    ]


@given(cut=cuts(), data=st.data())
def test_a_grid_has_the_cells_that_it_was_made_of(cut: Any, data: st.DataObject) -> None:
    shape, starts = cut
    regions = regions_of(shape, starts)
    grid = CellGrid.of(shape, data.draw(st.permutations(regions)))
    assert grid.count == len(regions)
    assert [grid.region(cell) for cell in range(grid.count)] == regions
    assert [grid.number(region) for region in regions] == list(range(grid.count))
    assert grid.sizes(np.arange(grid.count)).tolist() == [region.size for region in regions]
    again = CellGrid.decode(shape, grid.encode())
    assert (again.shape, again.parts) == (grid.shape, grid.parts)


@given(cut=cuts(), data=st.data())
def test_the_cells_that_meet_a_region_are_those_that_share_elements_with_it(cut: Any, data: st.DataObject) -> None:
    shape, starts = cut
    regions = regions_of(shape, starts)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    wanted = Region(start, tuple(data.draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))
    expected = [i for i, region in enumerate(regions) if region.intersect(wanted) is not None]
    assert CellGrid.of(shape, regions).meeting(wanted) == expected


def test_an_array_without_elements_has_one_cell() -> None:
    grid = CellGrid.whole((0, 5))
    assert (grid.count, grid.region(0), grid.meeting(Region((0, 0), (0, 5)))) == (1, Region((0, 0), (0, 5)), [])
    assert grid.number(Region((0, 0), (0, 5))) == 0


@pytest.mark.parametrize(
    ("parts", "expected"),
    [([0, 2, 4], 2), ([0, 3], 3), ([0, 1], [0, 1]), ([0], 5), ([0, 4], 4), ([0, 2, 3], [0, 2, 3])],
)
def test_equal_parts_are_written_as_their_length(parts: list[int], expected: object) -> None:
    assert CellGrid.of((5,), regions_of((5,), [parts])).encode() == [expected]


MALFORMED: list[Any] = [
    None, 5, "4", {}, [], [4], [4, 6, 1], [0, 6], [-1, 6], [5, 6], [4, 7], [1.0, 6], [True, 6], [[], 6], [[1], 6],
    [[0, 0], 6], [[0, 2, 1], 6], [[0, 4], 6], [[0, 2.0], 6], [[0, -1], 6], [[0, True], 6], [None, 6], ["2", 6],
]  # fmt: skip


@pytest.mark.parametrize("grid", MALFORMED, ids=repr)
def test_a_malformed_grid_is_refused(grid: Any) -> None:
    with pytest.raises(ValueError, match=r"grid|axis"):
        CellGrid.decode((4, 6), grid)


def test_a_grid_of_more_cells_than_tables_can_number_is_refused() -> None:
    assert CellGrid.decode((1 << 32,), [1]).count == 1 << 32
    with pytest.raises(ValueError, match="4,294,967,297 cells"):
        CellGrid.decode((1 + (1 << 32),), [1])


def test_an_array_without_elements_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="grid"):
        CellGrid.decode((0, 6), [1, 6])
