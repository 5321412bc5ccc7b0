"""Who reads what: everything that several processes need once, by one of them, evenly, neighbours together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.loading.matching import Wanted
from shardkeep.loading.owners import Owners, most_needed, needed_by, outline_of, plan_owners
from shardkeep.loading.shardings import Place
from shardkeep.model.arrays import ArraySpec, Region, cut, is_partition
from shardkeep.model.digests import BLOCK
from shardkeep.model.leaves import NATIVE, Piece, StoredArray
from shardkeep.model.perprocess import PerProcessRows

MB = 1 << 20


@dataclass(frozen=True, eq=False)
class Device:
    """A device of a process."""

    process_index: int


@dataclass(frozen=True)
class Spread:
    """A sharding over several processes with one device each: the devices in a grid, by axis of the array."""

    grid: tuple[tuple[int, ...], ...]  # for each part along the first axis, the processes that hold it
    is_fully_addressable: bool = False

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] // len(self.grid), *shape[1:])

    def devices_indices_map(self, shape: tuple[int, ...]) -> Mapping[Any, tuple[slice, ...]]:
        rows = shape[0] // len(self.grid)
        return {
            Device(process): (slice(n * rows, (n + 1) * rows), *(slice(0, m) for m in shape[1:]))
            for n, processes in enumerate(self.grid)
            for process in processes
        }


def leaf_of(
    shape: tuple[int, ...], counts: Sequence[int] = (), offset: int = 0, sharding: Any = None, **more: Any
) -> Wanted:
    """A float32 array that is stored in a grid of pieces, one after the other in a file."""
    pieces: list[Piece] = []
    for region in cut(Region.whole(shape), counts or (1,) * len(shape)):
        pieces.append(Piece(region, 0, offset, region.size * 4, None))
        offset += region.size * 4
    leaf = StoredArray(("x",), ArraySpec(shape, np.dtype("f4")), tuple(pieces), NATIVE)
    return Wanted(leaf, Place(sharding), **more)


def regions_of(plans: Sequence[Owners], leaf: int) -> list[Region]:
    return [region for plan in plans for region in plan.reads.get(leaf, ())]


def read_by(plan: Owners) -> int:
    return sum(region.size * 4 for regions in plan.reads.values() for region in regions)


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([1, 3, 100, 4096, 1 << 18]), st.sampled_from([1, 2, 4])),
        min_size=1,
        max_size=6,
    ),
    st.integers(2, 7),
)
def test_what_all_need_is_read_once_and_evenly(leaves: list[tuple[int, int, int]], size: int) -> None:
    wanted, offset = {}, 0
    for number, (rows, columns, pieces) in enumerate(leaves):
        wanted[number] = leaf_of((rows * pieces, columns), (pieces, 1), offset)
        offset += wanted[number].stored.nbytes
    plans = [plan_owners(wanted, index, size, 2) for index in range(size)]
    group = tuple(range(size))
    assert all(plan.groups == plans[0].groups for plan in plans)
    assert list(plans[0].groups) == [group]
    for number, w in wanted.items():
        assert is_partition(w.stored.spec.shape, regions_of(plans, number))
    # Nobody reads more than its share and what cannot be cut further: a piece of a block, or a few rows of blocks.
    assert max(map(read_by, plans)) <= offset / size + 4 * BLOCK
    owners = [part.owner for part in plans[0].groups[group]]
    assert owners == sorted(owners), "each reads one part of the files"


def test_large_pieces_are_cut_between_blocks() -> None:
    plans = [plan_owners({0: leaf_of((4096, 4096))}, index, 4, 2) for index in range(4)]
    assert [plan.reads[0] for plan in plans] == [[Region((1024 * i, 0), (1024, 4096))] for i in range(4)]
    plans = [plan_owners({0: leaf_of((5 * 256, 1024))}, index, 4, 2) for index in range(4)]
    assert sorted(read_by(plan) for plan in plans) == [0, 0, MB, 4 * MB], "not cut inside a block"


def test_rows_that_do_not_fill_blocks_are_cut_where_both_end_or_else_anywhere() -> None:
    together = [plan_owners({0: leaf_of((4096, 3072))}, index, 4, 2) for index in range(4)]
    assert [read_by(plan) for plan in together] == [12 * MB] * 4
    odd = [plan_owners({0: leaf_of((4001, 4001))}, index, 4, 2) for index in range(4)]
    assert max(map(read_by, odd)) < 4001 * 4001 + 3 * BLOCK
    assert is_partition((4001, 4001), regions_of(odd, 0))


def test_each_group_of_replicas_has_its_own_owners() -> None:
    halves = Spread(((0, 2), (1, 3)))
    wanted = {0: leaf_of((2048, 2048), (4, 1), sharding=halves), 1: leaf_of((1024, 1024), offset=16 * MB)}
    plans = [plan_owners(wanted, index, 4, 2) for index in range(4)]
    assert [sorted(plan.groups) for plan in plans] == [[(0, 1, 2, 3), (i % 2, i % 2 + 2)] for i in range(4)]
    assert [sum(region.size for region in plan.reads[0]) * 4 for plan in plans] == [4 * MB] * 4
    assert is_partition((2048, 2048), regions_of(plans, 0))
    assert plans[0].groups[0, 2] == plans[2].groups[0, 2]


def test_parts_that_few_need_are_read_by_each() -> None:
    mixed = Spread(((0, 1, 2), (0,)))
    plans = [plan_owners({0: leaf_of((2048, 1024), sharding=mixed)}, index, 3, 3) for index in range(3)]
    assert Region((1024, 0), (1024, 1024)) in plans[0].reads[0]
    assert [list(plan.groups) for plan in plans] == [[(0, 1, 2)]] * 3
    few = plan_owners({0: leaf_of((2048, 1024), sharding=Spread(((0, 1), (2,))))}, 0, 3, 3)
    assert few == Owners({}, {}), "as if nothing were sent"


def test_compressed_pieces_stay_whole() -> None:
    w = leaf_of((4096, 4096))
    assert isinstance(w.stored, StoredArray)
    piece = Piece(w.stored.pieces[0].region, 0, 0, 64 * MB, None, stored=5)
    packed = Wanted(StoredArray(("x",), w.stored.spec, (piece,), NATIVE))
    plans = [plan_owners({0: packed}, index, 4, 2) for index in range(4)]
    assert sorted(read_by(plan) for plan in plans) == [0, 0, 0, 64 * MB]


def test_what_is_not_shared_out() -> None:
    rows = PerProcessRows.of([64, 64])
    own = leaf_of((4, 4), own=np.zeros((4, 4), np.float32))
    empty = leaf_of((0, 4))
    values = Wanted(StoredArray(("x",), rows.spec, (), rows), as_numpy=True, process=1)
    for w in (own, empty, values):
        assert needed_by(w, 2) is None
        assert outline_of(w, 2) == ""
        assert plan_owners({0: w}, 0, 2, 2) == Owners({}, {})


def test_outlines_differ_where_processes_need_different_parts() -> None:
    shape = (2048, 1024)
    seen = [leaf_of(shape, sharding=Spread(grid)) for grid in (((0, 1),), ((0,), (1,)), ((1,), (0,)))]
    seen += [leaf_of(shape), leaf_of(shape[::-1]), leaf_of(shape, sharding=Spread(((0,),)))]
    texts = [outline_of(w, 2) for w in seen]
    assert texts[0] == texts[3], "both processes need all of it, one way or the other"
    assert len(set(texts)) == len(texts) - 1


@pytest.mark.parametrize(("grid", "most"), [(((0, 1), (0,)), 8), (((0,), (1,)), 4), (((0, 1),), 8)])
def test_the_most_that_one_process_needs(grid: tuple[tuple[int, ...], ...], most: int) -> None:
    assert most_needed(leaf_of((2048, 1024), sharding=Spread(grid)), 2) == most * MB
