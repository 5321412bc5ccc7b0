"""Listing the steps of a run; the index is a cache, never the truth."""

import json
import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from runs.runs import ONE, new_state, numbers, state_of, trained
from shardkeep import Keep, Run
from shardkeep.runs import index
from shardkeep.runs.control import Control
from shardkeep.runs.index import RunIndex
from shardkeep.runs.steps import StepName
from shardkeep.runs.viewing import RunView
from shardkeep.stores.location import location

INDEX = ".shardkeep-run/index.json"


def index_of(path: Path) -> RunIndex:
    return RunIndex(Control(location(path)), StepName("step_{}"))


def test_a_listing_says_the_same_with_and_without_the_index(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", [1, 2, 3], metadata={"a": [1, {"b": float("inf")}]})
    run.record(2, {"eval": float("-inf")})
    with_index = run.steps()
    assert index_of(tmp_path / "run").read().entries[1].step == with_index[0].__class__(
        **{**vars(with_index[0]), "kept": ()}
    )
    (tmp_path / "run" / INDEX).unlink()
    assert run.steps() == with_index


UNUSABLE = {
    "empty": b"",
    "cut": b"{",
    "a list": b"[]",
    "nothing": b"{}",
    "later": b'{"version": 9}',
    "no step": b'{"version": 1, "steps": {"x": 3}}',
    "deep": b"[" * 100_000,
    "huge": b'{"version": 1, "metrics": {}, "steps": {"step_1": {"save_id": "", "metrics": {}, "metadata": {}, '
    b'"time": "", "nbytes": Infinity, "stored_bytes": 0, "by_run": true, "pinned": false, "identity": null}}}',
}


@pytest.mark.parametrize("content", UNUSABLE.values(), ids=UNUSABLE)
def test_an_index_that_cannot_be_used_is_ignored(tmp_path: Path, content: bytes) -> None:
    run = trained(tmp_path / "run", [1, 2])
    before = run.steps()
    (tmp_path / "run" / INDEX).write_bytes(content)
    assert run.steps() == before


def test_a_manifest_that_has_changed_is_read_again(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", [1, 2])
    shardkeep.save(tmp_path / "run" / "step_2", {"w": np.zeros(5)}, overwrite=True, metadata={"new": True})
    listing = index_of(tmp_path / "run").read()
    assert not listing.is_indexed
    assert not listing.entries[2].by_run
    assert run.steps()[1].metadata == {"new": True}


def test_the_index_has_all_steps_when_a_run_is_closed(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2, 3])
    assert index_of(tmp_path / "run").read().is_indexed
    assert sorted(json.loads((tmp_path / "run" / INDEX).read_bytes())["steps"]) == ["step_1", "step_2", "step_3"]


def test_new_rules_are_noted_when_a_run_is_opened(tmp_path: Path) -> None:
    trained(tmp_path, [1, 2], keep=None)
    keep = Keep(best=1, metric="loss", mode="min")
    with Run(tmp_path, keep=keep) as run:
        run.resume(new_state, shardings=ONE)
        assert RunView(location(tmp_path)).keep == keep


def test_other_files_and_directories_are_no_steps(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", [1])
    (tmp_path / "run" / "step_5").mkdir()
    (tmp_path / "run" / "step_6").write_text("a file")
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "step_7").mkdir()
    (tmp_path / "run" / "step_7" / "notes.txt").write_text("no checkpoint")
    shardkeep.save(tmp_path / "run" / "best", state_of(3))
    assert numbers(run) == [1]


def test_marks_of_saves_that_are_gone_are_void_and_those_of_other_names_are_left_alone(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", [1, 2])
    control = Control(location(tmp_path / "run"))
    control.mark("damaged", "step_1", "an earlier save")
    control.mark("pinned", "step_9", "gone")
    control.mark("pinned", "epoch_1", "another name")
    control.record_metrics("step_1", "an earlier save", {"loss": 0.0})
    listing = index_of(tmp_path / "run").read()
    assert [step.state for step in listing.steps] == ["usable", "usable"]
    assert sorted((one.step, one.save_id) for one in listing.void) == [
        ("step_1", "an earlier save"),
        ("step_1", "an earlier save"),
        ("step_9", "gone"),
    ]
    with Run(tmp_path / "run") as run:
        run.save(3, state_of(3))
    assert [mark.step for mark in control.marks()] == ["epoch_1"]


def test_a_step_of_a_later_format_version_is_not_passed_over(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", [1, 2])
    path = tmp_path / "run" / "step_2" / "manifest.json"
    path.write_text(path.read_text().replace('{"shardkeep":2,', '{"shardkeep":999,'))
    assert [(s.number, s.state) for s in run.steps()] == [(1, "usable"), (2, "usable")]
    with pytest.raises(shardkeep.NewerFormatError, match="format version 999"):
        run.load()


def test_a_child_that_is_forked_while_the_index_is_read_can_read_it(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2])
    index, forked = index_of(tmp_path / "run"), threading.Event()
    held = threading.Event()

    def hold() -> None:
        with index.lock:
            held.set()
            forked.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    child = multiprocessing.get_context("fork").Process(target=index.read)
    child.start()
    forked.set()
    thread.join()
    child.join(30)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0


def test_a_step_that_is_committed_between_two_looks_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, [1])
    (tmp_path / INDEX).unlink()
    manifest = tmp_path / "step_1/manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    assert [step.state for step in index_of(tmp_path).read().steps] == ["damaged"]
    real = index.look

    def look_and_then_commit(place: object, **arguments: object) -> object:
        try:
            return real(place, **arguments)
        finally:
            manifest.write_bytes(content)

    monkeypatch.setattr(index, "look", look_and_then_commit)
    assert [step.state for step in index_of(tmp_path).read().steps] == ["usable"]
