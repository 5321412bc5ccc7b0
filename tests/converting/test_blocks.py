"""Reading in blocks: everything once, nothing too large."""

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from cli.commands import FIXTURES
from shardkeep.converting.blocks import open_at, read_region, regions_of, runs_of, split_region, steady
from shardkeep.errors import ConflictError
from shardkeep.model.arrays import Region, is_partition
from support import FORMATS, mesh_of, save_as


@given(st.lists(st.integers(1, 7), max_size=4), st.sampled_from([1, 2, 8]), st.integers(1, 300))
def test_a_region_is_split_into_parts_that_fill_it_and_fit(shape: list[int], itemsize: int, limit: int) -> None:
    whole = Region.whole(shape)
    parts = list(split_region(whole, itemsize, limit))
    assert sum(part.size for part in parts) == whole.size
    seen = np.zeros(shape, int)
    for part in parts:
        assert part.size * itemsize <= max(limit, itemsize)
        seen[part.slices] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("limit", [1 << 16, 1 << 30])
def test_blocks_put_together_are_the_array(tmp_path: Path, kind: str, limit: int) -> None:
    array = np.arange(600 * 600, dtype=np.float32).reshape(600, 600)
    spread = jax.device_put(array, NamedSharding(mesh_of(4, 2), PartitionSpec("b", "a")))
    opened = open_at(str(save_as(kind, tmp_path / "c", {"w": spread})))
    tree = opened.manifest.tree()
    (leaf,) = tree.leaves
    made = np.zeros_like(array)
    regions = regions_of(opened, leaf, limit)
    assert all(region.size for region in regions)
    for region in regions:
        made[region.slices] = read_region(opened.source(tree), leaf, region, lambda _: None)
    np.testing.assert_array_equal(made, array)


def test_arrays_of_another_program_are_cut_between_their_chunks() -> None:
    opened = open_at(str(FIXTURES / "pytree_sharded_2x4" / "ckpt"))
    arrays = opened.manifest.tree().arrays
    for leaf in arrays:
        for limit in (1, 64, 1 << 20):
            assert is_partition(leaf.shape or (), regions_of(opened, leaf, limit))
    assert max(len(regions_of(opened, leaf, 1)) for leaf in arrays) == 8


def test_runs_are_flat_and_short() -> None:
    runs = list(runs_of(np.arange(10).reshape(2, 5), 4))
    assert [run.tolist() for run in runs] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(runs_of(np.zeros((0, 3)))) == []


def test_a_checkpoint_replaced_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = save_as("exchange", tmp_path / "c", {"w": np.ones(3)})
    opened = open_at(str(path))
    with pytest.raises(ConflictError, match="was replaced while it was being read"), steady(opened):
        save_as("exchange", tmp_path / "c", {"w": np.zeros(3)}, overwrite=True)
    with steady(open_at(str(path))):
        pass
