"""Who writes what: everything once, by one who holds it, evenly."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from shardkeep.model.arrays import Region, cut, is_partition
from shardkeep.processes.assignment import SMALL, _assign, _cut, share_out
from support import mesh_of

P = PartitionSpec
MB = 1 << 20


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, ...], list[tuple[Region, tuple[int, ...]]]]]]:
    """Arrays as several processes hold them: a grid of regions, each with its holders."""
    size = draw(st.integers(1, 6))
    arrays = []
    for _ in range(draw(st.integers(1, 6))):
        counts = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
        part = draw(st.lists(st.sampled_from([1, 3, 64, 1000]), min_size=len(counts), max_size=len(counts)))
        shape = tuple(a * b for a, b in zip(counts, part, strict=True))
        holders = st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(lambda found: tuple(sorted(found)))
        arrays.append((shape, [(region, draw(holders)) for region in cut(Region.whole(shape), counts)]))
    return size, arrays


@given(trees(), st.sampled_from([1, 2, 4]))
def test_every_byte_has_one_writer_who_holds_it(tree: object, itemsize: int) -> None:
    size, arrays = tree  # type: ignore[misc]
    itemsizes = [itemsize] * len(arrays)
    whole = [found for _, found in arrays]
    for holdings in (whole, [_cut(found, itemsize, 1000) for found in whole]):
        shares, load = _assign(holdings, itemsizes, size)
        for (shape, _), found, shared in zip(arrays, holdings, shares, strict=True):
            assert is_partition(shape, [region for region, _ in shared])
            assert len({region.shape for region, _ in shared}) == 1, "a zarr grid has chunks of one shape"
            for (region, holders), (written, writer) in zip(found, shared, strict=True):
                assert region == written
                assert writer in holders
        expected = [sum(r.size for shared in shares for r, w in shared if w == i) * itemsize for i in range(size)]
        assert load == expected


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40), st.integers(1, 8))
def test_what_all_hold_is_spread_to_within_the_largest_piece(lengths: list[int], size: int) -> None:
    everyone = tuple(range(size))
    holdings = [[(Region((0,), (length,)), everyone)] for length in lengths]
    _, load = _assign(holdings, [4] * len(lengths), size)
    assert max(load) - min(load) <= 4 * max(lengths)
    assert sum(load) == 4 * sum(lengths)


def test_a_process_writes_what_all_of_its_devices_hold() -> None:
    """Of arrays in two halves, each of which both processes have on one device, each writes first and second halves."""
    halves = [[(Region((start,), (MB,)), (0, 1)) for start in (0, MB)] for _ in range(8)]
    shares, load = _assign(halves, [1] * 8, 2)
    written = [[region.start[0] for found in shares for region, writer in found if writer == i] for i in range(2)]
    assert load == [8 * MB, 8 * MB]
    assert [sorted(starts) for starts in written] == [[0] * 4 + [MB] * 4] * 2


def test_what_only_one_holds_is_made_up_for_by_the_others() -> None:
    own = [[(Region((0,), (3 * MB,)), (0,))]]
    common = [[(Region((0,), (MB,)), (0, 1))] for _ in range(5)]
    shares, load = _assign([*common, *own], [1] * 6, 2)
    assert load == [4 * MB, 4 * MB]
    assert shares[-1][0][1] == 0


def test_one_large_array_is_cut_for_all_who_hold_it() -> None:
    array = np.zeros((64, MB // 8), np.float32)  # 32 MiB
    for size in (2, 3, 4, 5):
        (shares,) = share_out([array], size, gathered=False)
        load = [sum(region.size * 4 for region, writer in shares if writer == i) for i in range(size)]
        assert is_partition(array.shape, [region for region, _ in shares])
        assert max(load) <= 1.125 * array.nbytes / size + SMALL, f"{size}: {load}"


def test_small_arrays_stay_whole() -> None:
    mesh = mesh_of(8)
    small = jax.device_put(np.zeros((64, 64), np.float32), NamedSharding(mesh, P("a")))
    large = jax.device_put(np.zeros((64, SMALL), np.uint8), NamedSharding(mesh, P("a")))
    shares = share_out([small, None, large, np.zeros(3)], 2, gathered=False)
    assert [region for region, _ in shares[0]] == [Region.whole((64, 64))]
    assert shares[1] == ()
    assert len(shares[2]) == 8
    assert is_partition(large.shape, [region for region, _ in shares[2]])
    assert [region for region, _ in shares[3]] == [Region.whole((3,))]


def test_empty_arrays_have_one_piece_however_they_are_cut() -> None:
    array = jax.device_put(np.zeros((0, 64), np.float32), NamedSharding(mesh_of(8), P(None, "a")))
    ((share,),) = share_out([array], 3, gathered=False)
    assert share[0] == Region.whole((0, 64))


def test_gathered_arrays_are_the_leaders() -> None:
    shares = share_out([np.zeros((4, 4)), None, np.zeros(())], 3, gathered=True)
    assert shares == [((Region.whole((4, 4)), 0),), (), ((Region.whole(()), 0),)]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=10), st.integers(1, 5))
def test_all_processes_come_to_the_same_result(rows: list[int], size: int) -> None:
    arrays = [np.zeros((n, 1000), np.float32) for n in rows]
    assert share_out(arrays, size, gathered=False) == share_out(list(arrays), size, gathered=False)
