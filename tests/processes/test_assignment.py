"""Who writes what: everything once, by one who holds it, evenly."""

import math
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkeep.model.arrays import Region, is_partition
from shardkeep.model.shares import Shares, Writers
from shardkeep.processes.assignment import (
    SMALL,
    _assign,
    _Held,
    _held_by,
    _held_on_mesh,
    _pattern,
    _shared_out,
    share_out,
)
from support import mesh_of

P = PartitionSpec
MB = 1 << 20


Holders = list[tuple[int, ...]]  # of each cell of a grid


@dataclass(frozen=True)
class Device:
    """What an assignment looks at of a device of another process, which one process alone cannot have."""

    id: int
    process_index: int
    platform: str = "cpu"  # at which a mesh of JAX 0.12 looks, as at the next
    device_kind: str = "cpu"


def held(shape: tuple[int, ...], counts: tuple[int, ...], holders: Holders, itemsize: int = 1) -> _Held:
    """An array as processes hold it."""
    longest = max(map(len, holders))
    rows = np.array([list(found) + [found[0]] * (longest - len(found)) for found in holders])
    return _Held(shape, itemsize, _pattern(counts, rows))


def loads_of(arrays: list[_Held], writers: list[Writers], size: int) -> list[int]:
    load = np.zeros(size, np.int64)
    for each, found in zip(arrays, writers, strict=True):
        load += np.bincount(found.numbers, minlength=size) * each.nbytes
    return load.tolist()


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[tuple[_Held, Holders]]]:
    """Arrays as several processes hold them: a grid of cells, each with its holders. Some arrays are alike."""
    size = draw(st.integers(1, 6))
    arrays: list[tuple[_Held, Holders]] = []
    for _ in range(draw(st.integers(1, 6))):
        counts = tuple(draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3)))
        part = draw(st.lists(st.sampled_from([1, 3, 64, 1000]), min_size=len(counts), max_size=len(counts)))
        shape = tuple(a * b for a, b in zip(counts, part, strict=True))
        one = st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(lambda found: tuple(sorted(found)))
        holders = draw(st.lists(one, min_size=math.prod(counts), max_size=math.prod(counts)))
        arrays += [(held(shape, counts, holders, draw(st.sampled_from([1, 2, 4]))), holders)] * draw(st.integers(1, 4))
    return size, arrays


@given(trees())
def test_every_byte_has_one_writer_who_holds_it(tree: tuple[int, list[tuple[_Held, Holders]]]) -> None:
    size, found = tree
    arrays = [each for each, _ in found]
    # At most some hundred parts each: checking them takes long.
    for parts in (arrays, [each.cut(max(1000, each.nbytes // 64)) for each in arrays]):
        writers, load = _assign(parts, size)
        for (whole, holders), part, own in zip(found, parts, writers, strict=True):
            shares = Shares(part.shape, part.pattern.counts, own)
            assert is_partition(part.shape, [region for region, _ in shares])
            assert sorted(region.start for i in range(size) for region in shares.of(i)) == sorted(
                region.start for region, _ in shares
            )
            cell = tuple(n // count for n, count in zip(whole.shape, whole.pattern.counts, strict=True))
            for region, writer in shares:
                inside = np.ravel_multi_index(
                    [a // n for a, n in zip(region.start, cell, strict=True)], whole.pattern.counts
                )
                assert writer in holders[inside]
        assert load.tolist() == loads_of(parts, writers, size)


@given(trees())
def test_it_is_as_even_as_one_cell_after_the_other(tree: tuple[int, list[tuple[_Held, Holders]]]) -> None:
    """The largest first, each to the holder that has the least: what is dealt out together is no worse than that."""
    size, found = tree
    _, load = _assign([each for each, _ in found], size)
    cells = [(len(one) > 1, -each.nbytes, one) for each, holders in found for one in holders]
    greedy = [0] * size
    for _, nbytes, holders in sorted(cells):
        greedy[min(holders, key=greedy.__getitem__)] -= nbytes
    largest = max((each.nbytes for each, holders in found if any(len(one) > 1 for one in holders)), default=0)
    assert load.max() <= max(greedy) + largest


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40), st.integers(1, 8))
def test_what_all_hold_is_spread_to_within_the_largest_piece(lengths: list[int], size: int) -> None:
    everyone = tuple(range(size))
    _, load = _assign([held((length,), (1,), [everyone], 4) for length in lengths], size)
    assert load.max() - load.min() <= 4 * max(lengths)
    assert load.sum() == 4 * sum(lengths)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("size", "cells"), [(2, 2), (4, 2), (2, 4), (8, 4)])
def test_a_process_writes_what_all_of_its_devices_hold(size: int, cells: int, alike: bool) -> None:
    """Of arrays in parts, each of which all processes have on one device, each writes every part as often."""
    everyone = tuple(range(size))
    lengths = [MB + (0 if alike else 4 * i) for i in range(size * cells)]
    arrays = [held((length * cells,), (cells,), [everyone] * cells) for length in lengths]
    writers, load = _assign(arrays, size)
    assert load.max() - load.min() < MB
    written = np.zeros((size, cells), int)
    for own in writers:
        written[own.numbers, np.arange(cells)] += 1
    assert written.tolist() == [[cells] * cells] * size


def test_what_only_one_holds_is_made_up_for_by_the_others() -> None:
    own = held((3 * MB,), (1,), [(0,)])
    common = [held((MB,), (1,), [(0, 1)]) for _ in range(5)]
    writers, load = _assign([*common, own], 2)
    assert load.tolist() == [4 * MB, 4 * MB]
    assert writers[-1].numbers.tolist() == [0]


def test_groups_of_replicas_write_alike() -> None:
    """With 8 shards on 4 groups of 2 processes, there are two ways to share out each of hundreds of arrays."""
    arrays = [held((8, MB), (8,) + (1,), [(i // 2, i // 2 + 4) for i in range(8)]) for _ in range(300)]
    writers, load = _assign(arrays, 8)
    assert set(load.tolist()) == {300 * MB}
    assert len(set(map(id, writers))) == 2
    assert len({own.digest for own in writers}) == 2


def test_small_arrays_that_all_hold_go_to_few_processes() -> None:
    """So a load, which needs all of them, needs few tables and files. It is as even as before."""
    size, everyone = 64, tuple(range(64))
    small = [held((1000 + i % 3,), (1,), [everyone]) for i in range(300)]
    large = [held((64 * 100_000,), (64,), [(i,) for i in range(64)])]
    writers, load = _assign([*small, *large], size)
    assert len({int(own.numbers[0]) for own in writers[:-1]}) <= 100
    assert len({int(own.numbers[0]) for own in _assign(small, size)[0]}) == size, "there is nothing else to write"
    few, load = _assign([*small, *large * 40], size)
    assert len({int(own.numbers[0]) for own in few[:300]}) <= 6
    assert load.max() <= 1.125 * load.mean()


@given(st.permutations("abc"), st.lists(st.sampled_from(["a", "b", "c", "ab", "ca", "bc", "bca", None]), max_size=3))
def test_a_mesh_is_read_as_jax_reads_it(order: list[str], axes: list[str | None]) -> None:
    used = "".join(filter(None, axes))
    if len(set(used)) < len(used):
        return
    devices = np.array([Device(i, i * 5 // 7 % 6) for i in range(24)]).reshape(2, 3, 4)
    spec = P(*(None if names is None else tuple(names) if len(names) > 1 else names for names in axes))
    sharding = NamedSharding(Mesh(devices, tuple(order)), spec)
    ours, complete = _held_on_mesh(sharding, 3)
    theirs, expected = _held_by(sharding, (24, 48, 72))
    assert complete == expected
    assert ours == theirs
    assert ours.alone.tolist() == theirs.alone.tolist()
    assert ours.group.tolist() == theirs.group.tolist()
    assert [group.tolist() for group in ours.groups] == [group.tolist() for group in theirs.groups]


def test_one_large_array_is_cut_for_all_who_hold_it() -> None:
    array = np.zeros((64, MB // 8), np.float32)  # 32 MiB
    for size in (2, 3, 4, 5):
        (shares,) = share_out([array], size, gathered=False)
        assert shares is not None
        load = [sum(region.size * 4 for region, writer in shares if writer == i) for i in range(size)]
        assert is_partition(array.shape, [region for region, _ in shares])
        assert max(load) <= 1.125 * array.nbytes / size + SMALL, f"{size}: {load}"


def test_small_arrays_stay_whole() -> None:
    mesh = mesh_of(8)
    small = jax.device_put(np.zeros((64, 64), np.float32), NamedSharding(mesh, P("a")))
    large = jax.device_put(np.zeros((64, SMALL), np.uint8), NamedSharding(mesh, P("a")))
    shares = share_out([small, None, large, np.zeros(3)], 2, gathered=False)
    assert [next(iter(found))[0] if found else None for found in shares] == [
        Region.whole((64, 64)),
        None,
        Region((0, 0), (8, SMALL)),
        Region.whole((3,)),
    ]
    assert [len(found) if found else 0 for found in shares] == [1, 0, 8, 1]


def test_empty_arrays_have_one_piece_however_they_are_cut() -> None:
    array = jax.device_put(np.zeros((0, 64), np.float32), NamedSharding(mesh_of(8), P(None, "a")))
    ((share,),) = (list(found or ()) for found in share_out([array], 3, gathered=False))
    assert share[0] == Region.whole((0, 64))


def test_gathered_arrays_are_the_leaders() -> None:
    shares = share_out([np.zeros((4, 4)), None, np.zeros(())], 3, gathered=True)
    assert [list(found or ()) for found in shares] == [[(Region.whole((4, 4)), 0)], [], [(Region.whole(()), 0)]]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=10), st.integers(1, 5))
def test_all_processes_come_to_the_same_result(rows: list[int], size: int) -> None:
    arrays = [np.zeros((n, 1000), np.float32) for n in rows]
    first = share_out(arrays, size, gathered=False)
    _shared_out.cache_clear()
    again = share_out(list(arrays), size, gathered=False)
    assert [list(found or ()) for found in first] == [list(found or ()) for found in again]


def test_a_tree_that_is_saved_again_costs_nothing() -> None:
    """The same objects come back, for new arrays of the same kinds; another shape or sharding is something else."""
    mesh = mesh_of(8)
    tree = [jax.device_put(np.zeros((64, SMALL), np.uint8), NamedSharding(mesh, P("a"))), np.zeros((3, 4))]
    first = share_out(tree, 2, gathered=False)
    again = share_out([tree[0] + 1, np.ones((3, 4))], 2, gathered=False)
    assert all(one is other for one, other in zip(first, again, strict=True))
    other = share_out([jax.device_put(tree[0], NamedSharding(mesh, P(None, "a"))), tree[1]], 2, gathered=False)
    assert [found.counts for found in other if found] == [(1, 8), (1, 1)]
    assert share_out(tree, 3, gathered=False)[0] is not first[0]
