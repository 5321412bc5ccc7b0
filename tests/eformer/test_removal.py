"""Removing run directories of a Checkpointer: never half, never what a reader holds, never by mistake."""

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.eformer import removal
from shardkeep.eformer.removal import Removal, Removals, remove_run
from shardkeep.errors import ConflictError
from shardkeep.foreign.rundirs import read_metadata, write_metadata
from shardkeep.runs.control import Control
from shardkeep.stores.location import Location, location, store_at


def described(path: Path, is_temporary: bool = True) -> Location:
    """A checkpoint with its metadata."""
    shardkeep.save(path, {"w": np.ones(3)})
    write_metadata(location(path), {"step": 1, "timestamp": "2026-01-01T00:00:00", "is_temporary": is_temporary})
    return location(path)


@pytest.mark.parametrize("if_temporary", [True, False])
def test_only_what_is_still_temporary_is_removed_if_that_is_asked_for(tmp_path: Path, if_temporary: bool) -> None:
    place = described(tmp_path / "run-1", is_temporary=False)
    assert remove_run(Removal(place, if_temporary))
    assert (tmp_path / "run-1").exists() == if_temporary


def test_what_is_gone_is_removed_already(tmp_path: Path) -> None:
    assert remove_run(Removal(location(tmp_path / "run-1"), if_temporary=False))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_metadata_and_one_with_damaged_metadata_go_if_they_are_asked_for(tmp_path: Path) -> None:
    for name, text in (("run-1", None), ("run-2", "{")):
        described(tmp_path / name)
        (tmp_path / name / "metadata.json").unlink()
        if text is not None:
            (tmp_path / name / "metadata.json").write_text(text)
        assert remove_run(Removal(location(tmp_path / name), if_temporary=True))
        assert (tmp_path / name).exists()
        assert remove_run(Removal(location(tmp_path / name), if_temporary=False))
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("has_metadata", [True, False])
def test_a_held_directory_stays_as_it_was(tmp_path: Path, has_metadata: bool) -> None:
    place = described(tmp_path / "run-1", is_temporary=False)
    if not has_metadata:
        (tmp_path / "run-1/metadata.json").unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "run-1").iterdir() if path.is_file()}
    hold = Control(location(tmp_path)).take_hold("run-1")
    assert not remove_run(Removal(place, if_temporary=False))
    assert {path.name: path.read_bytes() for path in (tmp_path / "run-1").iterdir() if path.is_file()} == before
    hold.release()
    assert remove_run(Removal(place, if_temporary=False))
    assert not (tmp_path / "run-1").exists()


def test_a_directory_that_is_being_saved_to_is_not_removed(tmp_path: Path) -> None:
    place = described(tmp_path / "run-1")
    with store_at(place).lock(), pytest.raises(ConflictError, match="lock"):
        shutting(place)
    assert (tmp_path / "run-1/manifest.json").exists()
    assert read_metadata(place)["being_deleted"], "a later program completes it"


def shutting(place: Location) -> None:
    remove_run(Removal(place, if_temporary=True))


def test_one_that_is_held_is_tried_again_with_the_next_one(tmp_path: Path) -> None:
    removals, first, second = Removals(), described(tmp_path / "run-1"), described(tmp_path / "run-2")
    hold = Control(location(tmp_path)).take_hold("run-1")
    removals.add(Removal(first, if_temporary=True))
    removals.wait()
    assert (tmp_path / "run-1/manifest.json").exists()
    hold.release()
    removals.add(Removal(second, if_temporary=True))
    removals.wait()
    assert sorted(path.name for path in tmp_path.glob("run-*")) == []


def test_what_cannot_be_removed_is_logged_and_the_next_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = described(tmp_path / "run-1"), described(tmp_path / "run-2")
    real = removal.remove_run

    def refused(one: Removal) -> bool:
        if one.place == first:
            raise PermissionError("not yours")
        return real(one)

    monkeypatch.setattr(removal, "remove_run", refused)
    removals = Removals()
    with caplog.at_level(logging.ERROR):
        removals.add(Removal(first, if_temporary=True))
        removals.add(Removal(second, if_temporary=True))
        removals.wait()
    assert sorted(path.name for path in tmp_path.glob("run-*")) == ["run-1"]
    assert "run-1 could not be removed: not yours" in caplog.text


def test_waiting_for_one_place_does_not_wait_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, place = threading.Event(), location(tmp_path / "run-1")
    monkeypatch.setattr(removal, "remove_run", lambda _: go.wait(60))
    removals = Removals()
    removals.add(Removal(place, if_temporary=True))
    removals.wait(location(tmp_path / "run-2"))
    waiting = threading.Thread(target=removals.wait, args=(place,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    go.set()
    waiting.join(60)
    assert not waiting.is_alive()
