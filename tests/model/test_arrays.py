"""Dtypes by name, and the arithmetic of regions, against brute force."""

import itertools
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtypes import EXTENDED, NUMPY, dtype_of
from shardkeep.model.arrays import (
    ArraySpec,
    Region,
    cut,
    dtype_from_name,
    dtype_name,
    is_partition,
    kind_of,
    parse_dtype,
    rows_of,
    touched_blocks,
)


@pytest.mark.parametrize("name", [*EXTENDED, *NUMPY, "datetime64[ns]", "timedelta64[25us]", "datetime64[D]"])
def test_a_dtype_is_found_again_under_its_name(name: str) -> None:
    dtype = dtype_from_name(name)
    assert dtype_name(dtype) == name
    assert dtype == dtype_of(name)


@pytest.mark.parametrize("dtype", ["O", "U3", "S2", "V4", np.dtype([("a", "i4")]), "M8", np.longdouble])
def test_dtypes_without_a_fixed_meaning_have_no_name(dtype: Any) -> None:
    with pytest.raises(TypeError, match="cannot be saved"):
        dtype_name(np.dtype(dtype))


@pytest.mark.parametrize(
    "name", ["object", "O", "f4", "<f4", "float31", "", "datetime64[x]", "str", "int", "V8", "M8[ns]"]
)
def test_an_unknown_name_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        dtype_from_name(name)


@pytest.mark.parametrize("name", [None, 3, ["int8"]])
def test_a_name_that_is_no_string_is_a_value_error(name: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"string|unhashable"):
        dtype_from_name(name)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "float32"),
        ("fp64", "float64"),
        ("fp8", "float8_e4m3fn"),
        ("int4", "int4"),
        (jnp.bfloat16, "bfloat16"),
        (jnp.float8_e5m2, "float8_e5m2"),
        (np.float32, "float32"),
        (np.dtype("int16"), "int16"),
        (float, "float64"),
        (np.dtype(ml_dtypes.uint4), "uint4"),
    ],
)
def test_a_dtype_may_be_said_in_many_ways(asked: Any, name: str) -> None:
    assert parse_dtype(asked).name == name


@pytest.mark.parametrize("asked", ["bf17", object, "O", 3.5, [1], "", str])
def test_an_unknown_dtype_is_a_value_error(asked: Any) -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        parse_dtype(asked)


def test_none_is_no_dtype() -> None:
    """NumPy takes None for float64, which would be a surprise."""
    with pytest.raises(ValueError, match="unknown dtype"):
        parse_dtype(None)


@pytest.mark.parametrize("name", EXTENDED + NUMPY)
def test_the_kind_of_a_dtype(name: str) -> None:
    expected = "bool" if name == "bool" else next(k for k in ("complex", "float", "int") if k in name)
    assert kind_of(dtype_from_name(name)) == expected


def test_datetimes_are_of_another_kind() -> None:
    assert kind_of(np.dtype("M8[s]")) == "other"


@pytest.mark.parametrize(("shape", "nbytes"), [((), 4), ((0,), 0), ((3, 0), 0), ((2, 3), 24)])
def test_the_bytes_of_a_spec(shape: tuple[int, ...], nbytes: int) -> None:
    assert ArraySpec(shape, np.dtype("f4")).nbytes == nbytes


def _cells(region: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, a + n) for a, n in zip(region.start, region.shape, strict=True))))


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Region(tuple(b[0] for b in bounds), tuple(b[1] - b[0] for b in bounds))


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.data(), shapes)
def test_the_intersection_holds_the_common_cells(data: st.DataObject, shape: tuple[int, ...]) -> None:
    first, second = data.draw(regions(shape)), data.draw(regions(shape))
    common = first.intersect(second)
    assert (set() if common is None else _cells(common)) == _cells(first) & _cells(second)
    assert common == second.intersect(first)


@given(st.data(), shapes)
def test_a_region_cuts_what_its_slices_cut(data: st.DataObject, shape: tuple[int, ...]) -> None:
    region = data.draw(regions(shape))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    assert array[region.slices].size == region.size == len(_cells(region))
    assert Region.from_index(region.slices, shape) == region or region.size == 0
    assert Region.whole(shape).intersect(region) in (region, None)


@given(st.data(), shapes)
def test_within_counts_from_the_outer_start(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = data.draw(regions(shape))
    inner = data.draw(regions(outer.shape))
    moved = Region(tuple(a + b for a, b in zip(inner.start, outer.start, strict=True)), inner.shape)
    assert moved.within(outer) == inner


def test_open_slices_mean_the_whole_axis() -> None:
    assert Region.from_index((slice(None), slice(2, None)), (4, 6)) == Region((0, 2), (4, 4))


@settings(max_examples=300)
@given(
    st.data(),
    st.lists(st.integers(1, 6), max_size=4).map(tuple),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 40),
)
def test_touched_blocks_are_those_that_hold_a_byte(
    data: st.DataObject, outer: tuple[int, ...], itemsize: int, block: int
) -> None:
    inner = data.draw(regions(outer))
    numbers = np.arange(np.prod(outer, dtype=int) * itemsize).reshape(*outer, itemsize) // block
    needed = set(numbers[inner.slices].reshape(-1).tolist())
    ranges = touched_blocks(outer, inner, itemsize, block)
    assert {n for first, last in ranges for n in range(first, last)} == needed
    assert all(a < b for a, b in ranges)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "ranges are merged and in order"


def test_touched_blocks_of_a_column_of_a_large_array_are_quick() -> None:
    found = touched_blocks((1 << 20, 1024), Region((0, 512), (1 << 20, 1)), 4, 4 << 20)
    assert found == [(0, 1024)]


def test_touched_blocks_count_beyond_32_bits() -> None:
    shape = (1 << 20, 1 << 20)
    last = (1 << 20) - 1
    assert touched_blocks(shape, Region((last, last), (1, 1)), 8, 4 << 20) == [((1 << 21) - 1, 1 << 21)]


def _fills(shape: tuple[int, ...], found: list[Region]) -> bool:
    """Whether the regions lie in the array and hold every element once, by looking at each."""
    if any(
        a < 0 or n < 0 or a + n > extent for r in found for a, n, extent in zip(r.start, r.shape, shape, strict=True)
    ):
        return False
    counts = np.zeros(shape, int)
    for region in found:
        counts[region.slices] += 1
    return bool((counts == 1).all())


@settings(max_examples=300)
@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
def test_a_partition_fills_the_array_exactly_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Whatever is_partition accepts fills the array; every grid is accepted; a grid with one change is not."""
    cuts = [sorted({0, *data.draw(st.lists(st.integers(0, n - 1), max_size=2)), n}) for n in shape]
    grid = [
        Region(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in itertools.product(*(itertools.pairwise(c) for c in cuts))
    ]
    shuffled = data.draw(st.permutations(grid))
    assert is_partition(shape, shuffled)
    other = data.draw(st.lists(regions(shape), max_size=4))
    if is_partition(shape, other):
        assert _fills(shape, other)
    assert not is_partition(shape, shuffled[1:])
    assert not is_partition(shape, [*shuffled, data.draw(st.sampled_from(grid))])


@settings(max_examples=300)
@given(st.data(), st.integers(1, 6))
def test_in_one_dimension_every_exact_cover_is_a_partition(data: st.DataObject, extent: int) -> None:
    found = data.draw(st.lists(regions((extent,)).filter(lambda region: region.size), max_size=4))
    assert is_partition((extent,), found) == _fills((extent,), found)


def test_empty_arrays_have_one_empty_piece() -> None:
    assert is_partition((0, 3), [Region((0, 0), (0, 3))])
    assert is_partition((), [Region((), ())])
    assert not is_partition((), [])
    assert not is_partition((0,), [])
    assert not is_partition((), [Region((), ()), Region((), ())])


@pytest.mark.parametrize(
    "found",
    [
        [Region((-1,), (5,))],
        [Region((0,), (5,))],
        [Region((0,), (3,))],
        [Region((1,), (3,))],
        [Region((0,), (2,)), Region((1,), (3,))],
        [Region((0,), (4,)), Region((0,), (4,))],
        [Region((0,), (4,)), Region((2,), (0,))],
    ],
)
def test_gaps_overlaps_and_overhang_are_no_partition(found: list[Region]) -> None:
    assert not is_partition((4,), found)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_parts_on_a_grid_are_put_together_in_rows(axes: list[tuple[int, int]], offset: int, random: Any) -> None:
    whole = Region((offset,) * len(axes), tuple(n * k for n, k in axes))
    parts = cut(whole, [k for _, k in axes])
    random.shuffle(parts)
    rows = rows_of(whole, tuple(parts))
    assert bool(rows) == (len(parts) > 1)
    data = np.arange(whole.size).reshape(whole.shape)
    found = np.full_like(data, -1)
    for slices, axis, numbers in rows:
        np.concatenate([data[parts[n].within(whole).slices] for n in numbers], axis, out=found[slices])
    assert not rows or (found == data).all()
    assert sorted(n for _, _, numbers in rows for n in numbers) == list(range(len(parts) if rows else 0))


@pytest.mark.parametrize(
    "parts",
    [
        [((0, 0), (2, 4))],  # half is missing
        [((0, 0), (2, 4)), ((0, 0), (2, 4))],  # twice the same
        [((0, 0), (2, 4)), ((1, 0), (2, 4))],  # not on a grid
        [((0, 0), (1, 4)), ((1, 0), (3, 4))],  # not of one shape
        [((0, 0), (2, 4)), ((4, 0), (2, 4))],  # outside
        [((0, 0), (4, 4))],  # all of it
        [((0, 0), (0, 4)), ((0, 0), (0, 4))],
    ],
)
def test_other_parts_are_in_no_rows(parts: Any) -> None:
    assert rows_of(Region((0, 0), (4, 4)), tuple(Region(*part) for part in parts)) == ()
