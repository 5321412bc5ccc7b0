"""Storing a snapshot that was not taken of a tree in memory."""

from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.catalog import new_target
from shardkeep.layouts.plan import Draft
from shardkeep.model.manifest import Tree
from shardkeep.model.tree import flatten
from shardkeep.saving.snapshot import examine, take_snapshot
from shardkeep.saving.store import store_snapshot
from shardkeep.stores.location import location
from support import assert_same

TREE = {"w": np.arange(10.0), "n": 3}


def draft() -> Draft:
    return Draft("1" * 32, "", flatten(TREE)[0], {"loss": 0.5}, "2026-01-01T00:00:00+00:00", step=7)


@pytest.mark.parametrize("name", ["c", "c.safetensors"])
def test_a_snapshot_and_a_draft_make_a_checkpoint(name: str, tmp_path: Path) -> None:
    target = new_target(location(tmp_path / name), "safetensors", None, None)
    report = store_snapshot(target, take_snapshot(examine(flatten(TREE)[1])), draft(), overwrite=False)
    assert_same(shardkeep.load(tmp_path / name), TREE)
    found = shardkeep.inspect(tmp_path / name)
    assert (found.step, found.metadata, found.save_id) == (7, {"loss": 0.5}, "1" * 32)
    assert report.files == 1


def test_a_check_that_raises_prevents_the_commit(tmp_path: Path) -> None:
    def refuse(tree: Tree) -> None:
        raise shardkeep.IntegrityError(f"{len(tree.leaves)} leaves are not right")

    target = new_target(location(tmp_path / "c"), "zarr", None, None)
    with pytest.raises(shardkeep.IntegrityError, match="2 leaves are not right"):
        store_snapshot(target, take_snapshot(examine(flatten(TREE)[1])), draft(), overwrite=False, check=refuse)
    assert not shardkeep.exists(tmp_path / "c")
    assert list(tmp_path.rglob("*0")) == []
