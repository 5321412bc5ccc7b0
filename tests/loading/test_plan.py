"""Reads touch only what is needed, once, and steps stay within the budget."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.loading.plan import Fetch, plan_read, plan_steps
from shardkeep.model.arrays import ArraySpec, Region, is_partition
from shardkeep.model.leaves import UNSHARDED, Piece, StoredArray
from support import grid_of

F4 = np.dtype("f4")


@given(st.sampled_from([(1, 1), (4, 1), (2, 4), (1, 8)]), st.sampled_from([(1, 1), (2, 2), (8, 1), (1, 4)]))
def test_what_is_planned_to_be_read_fills_every_target_once(saved: tuple[int, int], wanted: tuple[int, int]) -> None:
    shape = (16, 32)
    stored = _stored(shape, grid_of(shape, saved))
    targets = grid_of(shape, wanted)
    filled = [np.zeros(t.shape, int) for t in targets]
    for fetch in plan_read(0, stored, targets):
        for number, common in fetch.fills:
            filled[number][common.within(targets[number]).slices] += 1
            assert common.intersect(fetch.piece.region) == common
    assert all((array == 1).all() for array in filled)


def test_pieces_outside_the_targets_are_not_read() -> None:
    shape = (16, 32)
    stored = _stored(shape, grid_of(shape, (8, 1)))
    fetches = plan_read(3, stored, [Region((4, 0), (2, 32))])
    assert [f.piece.region for f in fetches] == [Region((4, 0), (2, 32))]
    assert fetches[0].leaf == 3
    assert fetches[0].parts == [Region((0, 0), (2, 32))]


def test_one_part_wanted_by_several_targets_is_read_once() -> None:
    stored = _stored((4, 4), [Region.whole((4, 4))])
    (fetch,) = plan_read(0, stored, [Region((0, 0), (2, 4)), Region((0, 0), (2, 4))])
    assert len(fetch.fills) == 2
    assert fetch.parts == [Region((0, 0), (2, 4))]


def test_a_piece_wanted_as_it_is_by_several_targets_goes_to_each() -> None:
    region = Region((0, 0), (2, 4))
    stored = _stored((4, 4), [region, Region((2, 0), (2, 4))])
    (fetch,) = plan_read(0, stored, [region, region])
    assert fetch.fills == ((0, region), (1, region))


def test_empty_arrays_are_not_read() -> None:
    assert plan_read(0, _stored((0, 4), [Region.whole((0, 4))]), [Region.whole((0, 4))]) == []


def test_scalars_are_read() -> None:
    assert len(plan_read(0, _stored((), [Region.whole(())]), [Region.whole(())])) == 1


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 30))
def test_steps_keep_the_order_and_stay_within_the_limit(sizes: list[int], limit: int) -> None:
    region = Region((0,), (1,))
    fetches = [Fetch(i, Piece(region, 0, 0, n, None), ((0, region),)) for i, n in enumerate(sizes)]
    steps = plan_steps(fetches, limit)
    assert list(itertools.chain(*steps)) == fetches
    for step in steps:
        assert step
        assert len(step) == 1 or sum(f.piece.length for f in step) <= limit


def _stored(shape: tuple[int, ...], regions: list[Region]) -> StoredArray:
    assert is_partition(shape, regions)
    pieces = tuple(Piece(r, 0, 0, r.size * 4, None) for r in regions)
    return StoredArray(("w",), ArraySpec(shape, F4), pieces, UNSHARDED)
