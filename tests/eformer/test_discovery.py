"""Finding the checkpoints of a Checkpointer by their metadata."""

from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.eformer.discovery import RunLoader, find_latest_checkpoint, read_checkpoint_metadata, require_prefix
from shardkeep.errors import CheckpointNotFoundError, IntegrityError, PrefixError
from shardkeep.foreign.rundirs import write_metadata
from shardkeep.stores.location import location


def described(path: Path, step: int, timestamp: str, **more: object) -> str:
    shardkeep.save(path, {"w": np.full(3, float(step))}, prefix="model")
    write_metadata(location(path), {"step": step, "timestamp": timestamp, "is_temporary": False, **more})
    return str(path)


def test_the_newest_is_by_time_then_by_step_and_one_that_is_being_removed_is_none(tmp_path: Path) -> None:
    described(tmp_path / "run-9", 9, "2026-01-02T00:00:00")
    described(tmp_path / "run-20", 20, "2026-01-01T00:00:00")
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "run-9")
    described(tmp_path / "run-10", 10, "2026-01-02T00:00:00")
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "run-10")
    described(tmp_path / "run-30", 30, "2026-02-01T00:00:00", being_deleted=True)
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "run-10")
    assert find_latest_checkpoint(f"file://{tmp_path}") == f"file://{tmp_path}/run-10"
    assert find_latest_checkpoint(tmp_path / "nothing") is None


def test_the_base_may_be_a_checkpoint_itself(tmp_path: Path) -> None:
    described(tmp_path / "base", 3, "2026-01-01T00:00:00")
    assert find_latest_checkpoint(tmp_path / "base") == str(tmp_path / "base")


def test_metadata_is_read_as_it_is(tmp_path: Path) -> None:
    path = described(tmp_path / "run-1", 1, "2026-01-01T00:00:00", mine=[1])
    assert read_checkpoint_metadata(path)["mine"] == [1]
    with pytest.raises(FileNotFoundError, match=r"metadata\.json"):
        read_checkpoint_metadata(tmp_path)
    (tmp_path / "run-1/metadata.json").write_text("[]")
    with pytest.raises(IntegrityError, match="not a JSON object"):
        read_checkpoint_metadata(path)


@pytest.mark.parametrize("structured", [True, False])
def test_both_loads_find_the_newest_and_add_its_metadata(tmp_path: Path, structured: bool) -> None:
    described(tmp_path / "run-1", 1, "2026-01-01T00:00:00")
    described(tmp_path / "run-2", 2, "2026-01-02T00:00:00")
    loader = RunLoader(tmp_path, None)
    tree, metadata = loader.load_checkpoint(None, prefix="model", structured=structured)
    again, same = loader.load_pytree(None, prefix="model", discover_latest=True, load_treedef=structured)
    assert np.asarray(tree["w"]).tolist() == np.asarray(again["w"]).tolist() == [2.0, 2.0, 2.0]
    assert (metadata["step"], metadata["is_temporary"]) == (2, False)
    assert metadata == same


def test_nothing_to_be_found_is_an_error_that_says_what_was_looked_for(tmp_path: Path) -> None:
    loader = RunLoader(tmp_path, None)
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint found under .*metadata\.json"):
        loader.load_checkpoint(None)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint at"):
        loader.load_pytree(None, prefix="model", discover_latest=True, discover_raise=False)


@pytest.mark.parametrize("prefix", [None, "", 3])
def test_a_structured_load_needs_a_prefix(prefix: object) -> None:
    with pytest.raises(PrefixError, match="it needs a prefix that is a non-empty string"):
        require_prefix(prefix, "it")


def test_the_manager_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="manager must be an AsyncCheckpointManager, not a str"):
        RunLoader(tmp_path, "manager")  # type: ignore[arg-type]
