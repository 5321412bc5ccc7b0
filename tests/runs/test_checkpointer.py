"""Runs and eFormer's Checkpointer: its directories are steps of a run, and it respects readers of them."""

import datetime
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from runs.runs import ONE, new_state, numbers, state_of
from shardkeep import Keep, Run
from shardkeep.errors import CheckpointExistsError, CheckpointNotFoundError, ConflictError, PrefixError
from shardkeep.foreign.rundirs import read_metadata, write_metadata
from shardkeep.runs.control import Control
from shardkeep.serialization import Checkpointer, CheckpointInterval
from shardkeep.stores.location import location

MINUTE = datetime.timedelta(minutes=1)


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = datetime.datetime(2026, 1, 1)

    def __call__(self) -> datetime.datetime:
        return self.now


def checkpointed(base: Path, steps: Any) -> None:
    checkpointer = Checkpointer(base, None, [CheckpointInterval(1)])
    for step in steps:
        checkpointer.on_step(pytree=state_of(step), step=step)
    checkpointer.wait_until_finished()


def test_the_directories_of_a_checkpointer_are_resumed_and_never_deleted(tmp_path: Path) -> None:
    checkpointed(tmp_path / "base", (1, 2, 3))
    with Run(tmp_path / "base", name="run-{}", save_every=1, keep=Keep(last=1)) as run:
        state, step = run.resume(new_state, shardings=ONE)
        assert (step, state["n"], float(state["w"][0])) == (3, 3, 3.0)
        for step in (4, 5):
            run.step(step, state_of(step))
        run.wait()
        assert numbers(run) == [1, 2, 3, 5]
    with Run(tmp_path / "base", name="run-{}") as run:
        assert run.resume(new_state, shardings=ONE)[1] == 5
    assert all("not saved by a Run" in step.kept for step in run.steps()[:3])


def test_a_directory_that_eformer_wrote_is_resumed(tmp_path: Path) -> None:
    """Its only tree has a prefix."""
    fixture = Path(__file__).parents[1] / "fixtures/eformer/checkpointer_runs"
    shutil.copytree(fixture / "base", tmp_path / "base")
    expected = np.load(fixture / "expected.npz")
    with Run(tmp_path / "base", name="run-{}", keep=Keep(last=1)) as run:
        for number, array in ((None, "a2"), (10, "a0")):
            state, step = run.resume({"w": jnp.zeros((2, 2))}, step=number)
            assert step == (number or 25)
            assert np.asarray(state["w"]).tobytes() == expected[array].tobytes()
        run.save(26, state)
        run.wait()
        assert numbers(run) == [10, 20, 25, 26]
        with pytest.raises(CheckpointNotFoundError, match="was written by another program; nothing was deleted"):
            run.delete(10)
        assert "deleting" not in [step.state for step in run.steps()]
    assert Run(tmp_path / "base", name="run-{}").load(26)["w"].shape == (2, 2)


def test_of_several_trees_one_is_chosen_by_its_prefix(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "base", None, [])
    for prefix in ("model", "optimizer"):
        checkpointer.save_pytree(state_of(len(prefix)), prefix, step=1)
    with Run(tmp_path / "base", name="run-{}") as run:
        with pytest.raises(PrefixError, match=r"several trees .*'model', 'optimizer'.* resume\(prefix="):
            run.resume(new_state, shardings=ONE)
        state, step = run.resume(new_state, shardings=ONE, prefix="optimizer")
        assert (step, state["n"]) == (1, 9)
        run.save(2, state_of(2)).wait()
        assert run.resume(new_state, shardings=ONE, prefix="optimizer")[1] == 2


def test_what_has_no_metadata_yet_or_is_being_removed_is_no_usable_step(tmp_path: Path) -> None:
    checkpointed(tmp_path / "base", (1, 2, 3))
    (tmp_path / "base/run-3/metadata.json").unlink()
    place = location(tmp_path / "base/run-2")
    write_metadata(place, {**read_metadata(place), "being_deleted": True})
    run = Run(tmp_path / "base", name="run-{}")
    assert {step.number: step.state for step in run.steps()} == {1: "usable", 2: "deleting"}
    with run:
        assert run.resume(new_state, shardings=ONE)[1] == 1
    assert (tmp_path / "base/run-2/manifest.json").exists(), "a Run does not delete what it did not save"
    assert (tmp_path / "base/run-3/manifest.json").exists()


@pytest.mark.parametrize(
    ("saved", "name"),
    [("run-7", "run-{}"), ("ckpt_007", "ckpt_{:03d}"), ("7", "{}"), ("step-10", "step-{}")],
)
def test_numbered_checkpoints_of_another_name_are_no_reason_to_start_anew(
    tmp_path: Path, saved: str, name: str
) -> None:
    shardkeep.save(tmp_path / "base" / saved, state_of(7))
    with Run(tmp_path / "base") as run:
        with pytest.raises(CheckpointExistsError) as refused:
            run.resume(new_state, shardings=ONE)
        assert f"open the run with name={name!r}" in str(refused.value)
        assert str(tmp_path / "base" / saved) in str(refused.value)
        assert run.resume(new_state, shardings=ONE, init_from=tmp_path / "base" / saved)[1] == 0
    with Run(tmp_path / "base", name=name) as run:
        assert run.resume(new_state, shardings=ONE)[1] == int(saved.strip("runckpste-_"))


def test_other_directories_with_numbers_are_no_steps(tmp_path: Path) -> None:
    for name in ("logs1", "events.2", "data-3"):
        (tmp_path / "base" / name).mkdir(parents=True)
        (tmp_path / "base" / name / "file.txt").write_text("no checkpoint")
    shardkeep.save(tmp_path / "base/pretrained", state_of(7))
    with Run(tmp_path / "base") as run:
        assert run.resume(new_state, shardings=ONE)[1] == 0


def test_a_temporary_checkpoint_that_is_held_is_removed_later(tmp_path: Path) -> None:
    clock, base = Clock(), tmp_path / "base"
    checkpointer = Checkpointer(base, MINUTE, [], dt_now_injection=clock)
    reader = Run(base, name="run-{}")

    def step(number: int) -> list[str]:
        clock.now += MINUTE
        checkpointer.on_step(pytree={"w": jnp.full(3, number)}, step=number)
        checkpointer.wait_until_finished()
        return sorted(path.name for path in base.glob("run-*"))

    assert step(1) == ["run-1"]
    with reader.hold(1):
        assert step(2) == ["run-1", "run-2"]
        assert read_metadata(location(base / "run-1")) == {
            "step": 1,
            "timestamp": "2026-01-01T00:01:00",
            "is_temporary": True,
        }
        assert int(reader.load(1)["w"][0]) == 1
        assert step(3) == ["run-1", "run-3"]
    assert step(4) == ["run-4"]
    reader.pin(4)
    assert step(5) == ["run-4", "run-5"]
    assert step(6) == ["run-4", "run-6"]
    assert Control(location(base)).held_steps() == set()


def test_a_hold_on_what_is_being_removed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkeep.runs.reading._PATIENCE", 0.2)
    checkpointed(tmp_path / "base", (1,))
    place = location(tmp_path / "base/run-1")
    reader = Run(tmp_path / "base", name="run-{}")
    write_metadata(place, {**read_metadata(place), "being_deleted": True})
    with pytest.raises(ConflictError, match="is being deleted"), reader.hold(1):
        pass
    assert Control(location(tmp_path / "base")).held_steps() == set()


def test_a_new_run_begins_with_the_newest_of_a_checkpointer(tmp_path: Path) -> None:
    checkpointed(tmp_path / "base", (1, 2))
    with Run(tmp_path / "fine") as run:
        state, step = run.resume(new_state, shardings=ONE, init_from=tmp_path / "base")
    assert (step, int(np.asarray(state["n"]))) == (0, 2)
