"""Plans are values: pieces cover arrays."""

import math

import numpy as np
import pytest

from shardkeep.layouts.plan import SMALL, StagedArray, plan_pieces
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import UNSHARDED
from support import grid_of

F4 = np.dtype("f4")


def _leaf(shape: tuple[int, ...], regions: list[Region], first: int = 0) -> StagedArray:
    return StagedArray(("w",), ArraySpec(shape, F4), UNSHARDED, tuple(regions), first)


def _unsplit(spec: ArraySpec, region: Region) -> list[Region]:
    return [region]


@pytest.mark.parametrize("counts", [(1, 1), (8, 1), (1, 8), (2, 4)])
def test_a_large_array_is_stored_as_its_shards(counts: tuple[int, int]) -> None:
    shape = (1024, 1024)
    regions = grid_of(shape, counts)
    pieces = plan_pieces([_leaf(shape, regions, first=5)], _unsplit)
    assert [p.region for p in pieces] == regions
    assert [p.sources for p in pieces] == [((5 + i, region),) for i, region in enumerate(regions)]
    assert sum(p.nbytes for p in pieces) == 4 << 20


@pytest.mark.parametrize("shape", [(), (0, 8), (8,), (512, 512)])
def test_a_small_array_is_stored_whole(shape: tuple[int, ...]) -> None:
    counts = tuple(8 if n and n % 8 == 0 else 1 for n in shape)
    (piece,) = plan_pieces([_leaf(shape, grid_of(shape, counts))], _unsplit)
    assert piece.region == Region.whole(shape)
    assert piece.nbytes == ArraySpec(shape, F4).nbytes <= SMALL


def test_whole_arrays_are_made_of_all_their_shards_when_asked() -> None:
    shape = (1024, 1024)
    (piece,) = plan_pieces([_leaf(shape, grid_of(shape, (4, 2)))], _unsplit, math.inf)
    assert piece.region == Region.whole(shape)
    assert len(piece.sources) == 8


def test_plain_values_have_no_piece() -> None:
    assert plan_pieces([], _unsplit) == []
