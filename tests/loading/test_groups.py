"""Groups of arrays that go to devices: every region once, in the order of the files, within the memory they may use."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardkeep.loading.broadcast import Broadcast
from shardkeep.loading.groups import GroupPlan, plan_groups, plan_groups_of_all
from shardkeep.loading.matching import Wanted
from shardkeep.loading.read import STEP
from shardkeep.loading.shardings import Place, device_regions
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import UNSHARDED, Piece, StoredArray
from support import grid_of, mesh_of

P = PartitionSpec
MB, GB = 1 << 20, 1 << 30
MESH = mesh_of(2, 4)
ONE = SingleDeviceSharding(jax.devices()[0])
SPECS = [None, P(), P("b"), P("a", "b"), P(None, "b"), P(("a", "b"))]


def leaf_of(
    name: str, shape: tuple[int, int], grid: tuple[int, int] = (1, 1), file: int = 0, at: int = 0, packed: bool = False
) -> StoredArray:
    """A float32 array in pieces that follow one another in a file."""
    pieces: list[Piece] = []
    for region in grid_of(shape, grid):
        nbytes = region.size * 4
        pieces.append(Piece(region, file, at, nbytes, None, nbytes // 2 if packed else None))
        at += nbytes
    return StoredArray((name,), ArraySpec(shape, np.dtype("float32")), tuple(pieces), UNSHARDED)


def wanted(leaf: StoredArray, spec: Any = None) -> Wanted:
    return Wanted(leaf, Place(ONE if spec is None else NamedSharding(MESH, spec)))


def planned(some: Sequence[Wanted], limit: int, cast: Any = None) -> GroupPlan:
    leaves = dict(enumerate(some))
    return plan_groups(leaves, dict.fromkeys(leaves, None if cast is None else np.dtype(cast)), limit)


def sizes(plan: GroupPlan) -> list[int]:
    return [sum(part.nbytes for part in group) for group in plan.groups]


rows = st.integers(1, 200).map(lambda n: n * 64)


@given(
    st.lists(st.tuples(rows, st.sampled_from(SPECS), st.sampled_from([(1, 1), (8, 1), (2, 2)])), max_size=8),
    st.sampled_from([1, 3 * MB, 64 * MB, 500 * MB, 64 * GB]),
)
def test_every_region_is_in_one_part_and_the_memory_suffices(leaves: list[Any], limit: int) -> None:
    some = [wanted(leaf_of(str(i), (n, 4096), grid), spec) for i, (n, spec, grid) in enumerate(leaves)]
    plan = planned(some, limit)
    covered: dict[int, list[Region]] = {number: [] for number in range(len(some))}
    for group in plan.groups:
        assert len(group) == 1 or sum(part.nbytes for part in group) <= plan.step
        for part in group:
            covered[part.number] += part.regions
            assert part.whole or len(part.regions) == 1
    for number, w in enumerate(some):
        shape = w.stored.shape
        needed = set(device_regions(w.place.sharding, shape).values())
        assert len(covered[number]) == len(set(covered[number]))
        # Rows that are all needed may be one region. Otherwise there is one for each that some device holds.
        assert set(covered[number]) in (needed, {Region.whole(shape)})
    largest = max(sizes(plan), default=0)
    assert largest <= plan.sent
    assert plan.nbytes <= max(limit, largest + plan.step)
    assert plan.nbytes <= 2 * max(sum(sizes(plan)), 1)


def test_a_small_part_is_read_while_more_is_sent() -> None:
    plan = planned([wanted(leaf_of(str(i), (1024, 4096))) for i in range(100)], limit=400 * MB)
    assert (plan.step, plan.sent, plan.beside) == (100 * MB, 300 * MB, 100 * MB)
    assert max(sizes(plan)) <= 100 * MB
    plenty = planned([wanted(leaf_of(str(i), (1024, 4096))) for i in range(1000)], limit=400 * GB)
    assert (plenty.step, plenty.nbytes) == (STEP, 4 * STEP)


def test_of_arrays_larger_than_a_step_one_is_read_while_another_is_sent() -> None:
    plan = planned([wanted(leaf_of(str(i), (600 * 256, 1024))) for i in range(4)], limit=8 * GB)
    assert sizes(plan) == [600 * MB] * 4
    assert plan.sent == 1200 * MB
    tight = planned([wanted(leaf_of(str(i), (600 * 256, 1024))) for i in range(4)], limit=1 * GB)
    assert tight.nbytes <= 1 * GB


def test_a_region_larger_than_the_limit_takes_what_it_needs() -> None:
    plan = planned([wanted(leaf_of("w", (256 * 600, 1024)))], limit=100 * MB)
    assert (plan.sent, plan.beside) == (600 * MB, 25 * MB)


@pytest.mark.parametrize(
    ("spec", "grid", "limit", "parts"),
    [
        (P("b"), (1, 1), 64 * GB, 4),  # rows of one piece: each block is read once, but for those at the edges
        (P(None, "b"), (1, 4), 64 * GB, 4),  # a piece for each device
        (P(None, "b"), (1, 1), 64 * GB, 1),  # every device needs something of every block
        (P(None, "b"), (1, 1), 2 * GB, 4),  # the same, but there is no memory to read all of it at once
        (P(), (4, 1), 64 * GB, 1),
    ],
)
def test_a_large_leaf_goes_region_by_region(spec: Any, grid: tuple[int, int], limit: int, parts: int) -> None:
    """Unless its blocks would have to be read several times, and there is memory to avoid that."""
    plan = planned([wanted(leaf_of("w", (256 * 1024, 1024), grid), spec)], limit)
    assert [len(group) for group in plan.groups] == [1] * parts
    assert {part.whole for group in plan.groups for part in group} == {parts == 1}


def test_a_compressed_piece_that_several_regions_share_is_decoded_once() -> None:
    packed = leaf_of("w", (256 * 1024, 1024), packed=True)
    assert [len(group) for group in planned([wanted(packed, P("b"))], 64 * GB).groups] == [1]


def test_casts_and_compressed_pieces_count() -> None:
    plain, packed = leaf_of("w", (256 * 600, 1024)), leaf_of("w", (256 * 600, 1024), packed=True)
    assert planned([wanted(plain)], 8 * GB).beside == 37.5 * MB
    assert planned([wanted(plain)], 8 * GB, "bfloat16").beside == 300 * MB
    assert planned([wanted(packed)], 8 * GB).beside == 600 * MB
    grown = planned([wanted(plain)], 8 * GB, "complex64")
    assert (sizes(grown), grown.beside) == ([1200 * MB], 600 * MB)


def test_parts_are_in_the_order_of_the_files() -> None:
    leaves = [leaf_of("a", (64, 64), file=1), leaf_of("b", (64, 64), file=0, at=1 << 20), leaf_of("c", (64, 64))]
    plan = planned([wanted(leaf) for leaf in leaves], 8 * GB)
    assert [[part.leaf.key for part in group] for group in plan.groups] == [["c", "b", "a"]]


def test_empty_arrays_and_no_arrays_take_next_to_nothing() -> None:
    assert planned([], 8 * GB).groups == ()
    empty = planned([wanted(leaf_of("w", (0, 64)), P("b")), wanted(leaf_of("v", (0, 64)))], 8 * GB)
    assert (sizes(empty), empty.nbytes) == ([0], 1)


def test_processes_that_read_for_each_other_plan_the_same_groups() -> None:
    """In the order of the files, and within the memory of the process that has least."""
    leaves = {n: wanted(leaf_of(str(n), (1024, 4096), at=(7 - n) * 16 * MB)) for n in range(8)}
    seen: list[GroupPlan] = []
    for index in range(3):
        view: Any = SimpleNamespace(index=index, size=3)
        broadcast = Broadcast(view, dict.fromkeys(map(id, leaves.values()), 0), 2, 128 * MB)
        seen.append(plan_groups_of_all(leaves, {}, broadcast))
    assert seen[0] == seen[1] == seen[2]
    plan = seen[0]
    assert [[part.number for part in group] for group in plan.groups] == [[7, 6], [5, 4], [3, 2], [1, 0]]
    assert all(part.whole for group in plan.groups for part in group)
    assert plan.step == 32 * MB
    assert plan.nbytes <= 128 * MB + 2 * 16 * MB
