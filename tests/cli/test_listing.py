"""`ls`: what is found where, and in which state."""

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import shardkeep
from cli.commands import FIXTURES, GOLDEN, Run, data_file, kill_save, leave_dead_save
from shardkeep.stores.local.store import LocalStore
from shardkeep.targets.running import DELETE
from support import record

TREE = {"w": np.ones((2, 3), np.float32), "step": 1}


def found(run: Run, path: Path) -> dict[str, dict[str, object]]:
    return {one["name"]: one for one in run.document("ls", path)["checkpoints"]}


def states(run: Run, path: Path) -> dict[str, object]:
    return {name: one["state"] for name, one in found(run, path).items()}


def test_checkpoints_below_are_listed_in_natural_order(run: Run, tmp_path: Path) -> None:
    for step in (10, 9, 100):
        shardkeep.save(tmp_path / f"step_{step}", TREE)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    assert list(found(run, tmp_path)) == ["step_9", "step_10", "step_100"]
    text = run("ls", tmp_path)
    assert text.code == 0
    assert [line.split()[0] for line in text.out.splitlines()] == ["NAME", "step_9", "step_10", "step_100"]


def test_what_is_told_of_a_checkpoint(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", TREE, prefix="model")
    shardkeep.save(tmp_path / "c", TREE, prefix="ema", format="zarr", compression="zstd")
    one = found(run, tmp_path)["c"]
    manifest = shardkeep.inspect(tmp_path / "c")
    assert one["path"] == str(tmp_path / "c")
    assert one["complete"] is True
    assert one["prefixes"] == ["model", "ema"]
    assert one["formats"] == {"model": "safetensors", "ema": "zarr"}
    assert one["compression"] == {"model": None, "ema": "zstd"}
    assert one["stored_bytes"] == sum(f.size for t in manifest.trees.values() for f in t.files)
    assert one["array_bytes"] == 48
    assert one["leaves"] == 4
    assert one["created"][:19] == max(tree.created for tree in manifest.trees.values())[:19]
    line = run("ls", tmp_path).out.splitlines()[1]
    assert "safetensors, zarr+zstd" in line
    assert line.endswith("model, ema")


def test_the_path_itself_may_be_a_checkpoint(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path, TREE, format="zarr")
    shardkeep.save(tmp_path / "step_1", TREE)
    shardkeep.save(tmp_path / "model.safetensors", TREE)
    assert list(found(run, tmp_path)) == [".", "model.safetensors", "step_1"]
    assert list(found(run, tmp_path / "model.safetensors")) == ["model.safetensors"]


def test_unfinished_running_damaged_and_newer_ones_are_shown_as_such(run: Run, tmp_path: Path) -> None:
    leave_dead_save(tmp_path / "dead")
    running = record(LocalStore(str(tmp_path / "running")), "ab" * 16, ["x"])
    leave_dead_save(tmp_path / "out.safetensors")
    for name in ("torn", "lost", "future"):
        shardkeep.save(tmp_path / name, TREE)
    (tmp_path / "torn" / "manifest.json").write_bytes(b'{"shardkeep": 1')
    data_file(tmp_path / "lost").unlink()
    manifest = (tmp_path / "future" / "manifest.json").read_text().replace('"shardkeep":2', '"shardkeep":9')
    (tmp_path / "future" / "manifest.json").write_text(manifest)
    shown = found(run, tmp_path)
    running.release()
    assert {name: one["state"] for name, one in shown.items()} == {
        "dead": "unfinished",
        "future": "newer",
        "lost": "damaged",
        "out.safetensors": "unfinished",
        "running": "saving",
        "torn": "damaged",
    }
    assert not any(one["complete"] for one in shown.values())
    assert shown["dead"]["stored_bytes"] == 1000
    assert "never finished" in str(shown["dead"]["problem"])
    text = run("ls", tmp_path).out
    assert "\ndead holds no committed checkpoint" in text
    assert "-00000.safetensors is missing" in text


def test_a_save_that_was_killed_is_unfinished(run: Run, tmp_path: Path) -> None:
    kill_save(tmp_path / "c", "safetensors")
    shown = found(run, tmp_path)["c"]
    assert shown["state"] == "unfinished"
    assert int(str(shown["stored_bytes"])) > 8000


def test_checkpoints_of_other_programs_are_listed(run: Run) -> None:
    shown = found(run, FIXTURES)
    assert shown["ts_plain/ckpt"]["kind"] == "eformer"
    assert shown["ts_plain/ckpt"]["created"] is not None
    assert shown["safetensors_sharded/model.safetensors"]["files"] == 2
    assert shown["safetensors_sharded/model.safetensors"]["kind"] == "safetensors"
    assert shown["broken_killed_mid_save/ckpt"]["state"] == "damaged"
    assert shown["ts_two_prefixes/ckpt"]["prefixes"] == ["model", "optimizer"]
    runs = [name for name in shown if name.startswith("checkpointer_runs/base")]
    assert runs == [f"checkpointer_runs/base/run-{step}" for step in (10, 20, 25)]


def test_golden_checkpoints_are_complete(run: Run) -> None:
    assert set(states(run, GOLDEN).values()) == {"complete"}


def test_several_safetensors_files_in_one_place_are_listed_one_by_one(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b", "m-00001-of-00002"):
        safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / f"{name}.safetensors")
    assert list(found(run, tmp_path)) == ["a.safetensors", "b.safetensors", "m-00001-of-00002.safetensors"]


def test_arrays_without_an_index_are_one_unindexed_checkpoint(run: Run, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "ts_plain" / "ckpt", tmp_path / "run" / "step_1")
    (tmp_path / "run" / "step_1" / "tensorstore_index.json").unlink()
    assert states(run, tmp_path / "run" / "step_1") == {".": "unindexed"}
    shardkeep.save(tmp_path / "run" / "step_2", TREE)
    assert states(run, tmp_path / "run") == {"step_1": "unindexed", "step_2": "complete"}


def test_links_are_followed_but_not_in_circles(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "step_1", TREE)
    os.symlink("step_1", tmp_path / "latest")
    (tmp_path / "deep").mkdir()
    os.symlink("..", tmp_path / "deep" / "up")
    assert list(found(run, tmp_path)) == ["latest", "step_1"]


def test_nothing_there(run: Run, tmp_path: Path) -> None:
    empty = run("ls", tmp_path)
    assert (empty.code, empty.out) == (0, f"no checkpoints in {tmp_path} or below\n")
    assert run.document("ls", tmp_path)["checkpoints"] == []
    assert run("ls", tmp_path / "nowhere").code == 2
    assert run("ls", tmp_path / "nowhere.safetensors").code == 2


def test_a_manifest_of_another_program_is_no_checkpoint(run: Run, tmp_path: Path) -> None:
    """Browser extensions and web applications have a manifest.json too."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "app", "version": "1.0"}')
    assert found(run, tmp_path) == {}
    shardkeep.save(tmp_path / "app" / "step_1", TREE)
    assert states(run, tmp_path) == {"app/step_1": "complete"}
    assert not shardkeep.exists(tmp_path / "app")
    # But one of ours that something overwrote is damaged.
    shutil.copy(tmp_path / "app" / "manifest.json", tmp_path / "app" / "step_1")
    assert states(run, tmp_path) == {"app/step_1": "damaged"}


def test_a_truncated_file_is_named(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", TREE)
    os.truncate(data_file(tmp_path / "c"), 20)
    one = found(run, tmp_path)["c"]
    assert one["state"] == "damaged"
    assert re.fullmatch(rf"{data_file(tmp_path / 'c')} has [\d,]+ bytes instead of [\d,]+", str(one["problem"]))


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Have something happen while the command pauses before it looks again."""
    todo = [happens]
    monkeypatch.setattr(time, "sleep", lambda _: todo.pop()() if todo else None)


def test_a_save_that_has_made_its_directory_only_is_not_unfinished(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c/.shardkeep").mkdir(parents=True)
    meanwhile(monkeypatch, lambda: shardkeep.save(tmp_path / "c", TREE))
    assert states(run, tmp_path) == {"c": "complete"}


def test_a_save_that_has_not_locked_its_record_yet_is_running(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_dead_save(tmp_path / "c")
    locked = []
    meanwhile(monkeypatch, lambda: locked.append(record(LocalStore(str(tmp_path / "c")), "ab" * 16, ["x"])))
    shown = found(run, tmp_path)["c"]
    locked[0].release()
    assert shown["state"] == "saving"
    assert "is running" in str(shown["problem"])


def test_a_delete_is_shown_while_it_runs_and_leaves_nothing_to_show(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shardkeep.save(tmp_path / "other", TREE)
    running = record(LocalStore(str(tmp_path / "c")), DELETE, ["x"])
    shown = found(run, tmp_path)["c"]
    assert shown["state"] == "deleting"
    assert "is being deleted" in str(shown["problem"])
    told = run("verify", tmp_path)
    assert told.code == 0
    assert f"deleting  {tmp_path}/c: not checked, a delete is running\n" in told.out
    running.release()
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c/.shardkeep").mkdir(parents=True)  # as after its record was removed
    meanwhile(monkeypatch, lambda: shutil.rmtree(tmp_path / "c"))
    assert states(run, tmp_path) == {"other": "complete"}


def test_what_a_dead_save_left_is_shown_with_what_removes_it(run: Run, tmp_path: Path) -> None:
    leave_dead_save(tmp_path / "c")
    assert "remove the remains with shardkeep clean" in run("ls", tmp_path).out
    assert run("clean", tmp_path, "--yes").code == 0
    assert states(run, tmp_path) == {}
