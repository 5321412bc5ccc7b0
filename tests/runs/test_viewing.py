"""A run as its own files describe it."""

from pathlib import Path

import pytest

import shardkeep
from runs.runs import trained
from shardkeep import Keep
from shardkeep.runs.viewing import RunView, is_run
from shardkeep.stores.location import location


def test_what_its_writer_noted_is_known(tmp_path: Path) -> None:
    keep = Keep(last=2)
    trained(tmp_path / "run", [1, 2, 3], keep=keep, name="at-{}")
    view = RunView(location(tmp_path / "run"))
    assert view.keep == keep
    assert list(view.steps()) == ["at-2", "at-3"]
    assert view.open().latest() is not None
    assert view.path_of(3) == str(tmp_path / "run/at-3")


def test_without_an_index_no_rule_is_claimed(tmp_path: Path) -> None:
    """Neither that every step is kept nor that some are not."""
    trained(tmp_path / "run", [1, 2])
    assert {step.kept for step in RunView(location(tmp_path / "run")).steps().values()} == {("every step is kept",)}
    index = tmp_path / "run/.shardkeep-run/index.json"
    for content in ("{", "[]", '{"version": 1}'):
        index.write_text(content)
        assert {step.kept for step in RunView(location(tmp_path / "run")).steps().values()} == {()}


def test_a_step_that_was_never_finished_has_a_path_and_one_that_is_not_there_has_none(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1])
    saves = tmp_path / "run/step_2/.shardkeep/saves"
    saves.mkdir(parents=True)
    (saves / ("ab" * 16)).write_text("[]\n")
    view = RunView(location(tmp_path / "run"))
    assert view.path_of(2) == str(tmp_path / "run/step_2")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"@3: the run .*/run has no step 3; it has 1"):
        view.path_of(3)


def test_protection_is_by_pins_and_holds(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", [1, 2])
    with shardkeep.Run(tmp_path / "run", keep=None) as writer:
        writer.resume({"w": run.load()["w"], "n": 0})
        writer.save(3, run.load(), pin=True)
    run.pin(1)
    with run.hold(2):
        view = RunView(location(tmp_path / "run"))
        assert [view.protection(f"step_{step}") for step in (1, 2, 3, 4)] == ["pinned", "held", "pinned", None]
    assert RunView(location(tmp_path / "run")).protection("step_2") is None


def test_a_directory_is_a_run_if_a_run_has_written_to_it(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "a/step_1", {"n": 1})
    assert not is_run(location(tmp_path / "a"))
    trained(tmp_path / "b", [1])
    assert is_run(location(tmp_path / "b"))
    with pytest.raises(shardkeep.PathError, match="is a checkpoint, not a run"):
        RunView(location(tmp_path / "a/step_1"))
