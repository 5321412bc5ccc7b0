"""`clean`: left-overs of dead saves go, everything else stays."""

import shutil
from pathlib import Path

import numpy as np

import shardkeep
from cli.commands import DEAD, GOLDEN, Run, data_file, kill_save, leave_dead_save
from shardkeep.catalog import find
from shardkeep.stores.location import location
from support import assert_same, record

TREE = {"w": np.ones((2, 3), np.float32)}


def test_left_overs_are_told_and_then_removed(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "good", TREE)
    left = leave_dead_save(tmp_path / "good")
    strange = tmp_path / "good" / "notes.bin"
    strange.write_bytes(b"mine")
    torn = tmp_path / "good" / "manifest.json.0123456789abcdef.tmp"
    torn.write_bytes(b"{")
    told = run("clean", tmp_path, "--dry-run")
    assert told.code == 1
    assert left.name in told.out
    assert "1,000" in told.out
    assert left.exists()
    done = run("clean", tmp_path, "--yes")
    assert done.code == 0
    assert "removed 2 files, 1.0 kB" in done.out
    assert not left.exists()
    assert not torn.exists()
    assert strange.exists()
    assert_same(shardkeep.load(tmp_path / "good"), TREE)
    assert run("clean", tmp_path, "--yes").out.startswith("nothing to clean up")


def test_what_never_became_a_checkpoint_goes_altogether(run: Run, tmp_path: Path) -> None:
    leave_dead_save(tmp_path / "dead")
    leave_dead_save(tmp_path / "files" / "m.safetensors")
    document = run.document("clean", tmp_path, "--yes")
    assert [one["name"] for one in document["left_over"]] == ["dead", "files/m.safetensors"]
    assert all(one["removed"] for one in document["left_over"])
    assert document["left_over"][0]["files"] == [{"name": f"{DEAD}-00000.safetensors", "size": 1000}]
    assert not (tmp_path / "dead").exists()
    assert list((tmp_path / "files").iterdir()) == []


def test_a_running_save_is_never_touched(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", TREE)
    store = find(location(tmp_path / "c")).store
    live = tmp_path / "c" / "live.safetensors"
    held = record(store, "aa" * 16, [live.name])
    live.write_bytes(b"y" * 10)
    left = leave_dead_save(tmp_path / "c", "bb" * 16)
    record(store, DEAD, [left.name, live.name]).release()
    document = run.document("clean", tmp_path / "c", "--yes")
    assert document["left_over"][0]["running_saves"] == 1
    assert [file["name"] for file in document["left_over"][0]["files"]] == [left.name]
    assert live.exists()
    assert not left.exists()
    held.remove()


def test_a_file_that_only_a_series_names_is_needed(run: Run, tmp_path: Path) -> None:
    """As after a save that died between its commit and the removal of its record."""
    path = tmp_path / "c"
    shutil.copytree(GOLDEN.parent / "v2" / "series", path)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    left = leave_dead_save(path, "bb" * 16)
    record(find(location(path)).store, DEAD, [*files, left.name]).release()
    assert "removed 1 file, 1.0 kB" in run("clean", tmp_path, "--yes").out
    assert sorted(file.name for file in path.glob("*.safetensors")) == files
    assert shardkeep.verify(path).ok


def test_a_damaged_checkpoint_is_left_alone(run: Run, tmp_path: Path) -> None:
    """Without a readable manifest nobody knows which files are needed."""
    shardkeep.save(tmp_path / "c", TREE)
    data = data_file(tmp_path / "c")
    record(find(location(tmp_path / "c")).store, DEAD, [data.name]).release()
    (tmp_path / "c" / "manifest.json").write_bytes(b"{")
    result = run("clean", tmp_path, "--yes")
    assert result.code == 1
    assert "not cleaned up" in result.out
    assert data.exists()


def test_files_a_checkpoint_needs_stay_even_if_a_dead_save_recorded_them(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", TREE)
    record(find(location(tmp_path / "c")).store, DEAD, [data_file(tmp_path / "c").name, "manifest.json"]).release()
    document = run.document("clean", tmp_path, "--yes")
    assert document["left_over"][0]["files"] == []
    assert_same(shardkeep.load(tmp_path / "c"), TREE)


def test_without_a_terminal_it_must_be_told_to_go_on(run: Run, tmp_path: Path) -> None:
    left = leave_dead_save(tmp_path / "c")
    result = run("clean", tmp_path / "c")
    assert result.code == 2
    assert "--yes" in result.err
    assert left.exists()


def test_what_a_killed_save_left_is_found_and_removed(run: Run, tmp_path: Path) -> None:
    kill_save(tmp_path / "c", "tensorstore")
    assert run("clean", tmp_path, "--dry-run").code == 1
    assert run("clean", tmp_path, "--yes").code == 0
    assert list(tmp_path.iterdir()) == []


def test_looking_changes_nothing(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", TREE)
    leave_dead_save(tmp_path / "c")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    run("clean", tmp_path, "--dry-run")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
