"""Deleting old steps: never what is needed, held, pinned or not ours."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import shardkeep
from runs.runs import ONE, new_state, numbers, state_of, trained
from shardkeep import Keep, Run
from shardkeep.errors import CheckpointNotFoundError, ConflictError
from shardkeep.runs.control import Control
from shardkeep.runs.retention import delete_step
from shardkeep.stores.location import location


def test_what_the_rules_do_not_keep_is_deleted_after_each_commit(tmp_path: Path) -> None:
    with Run(tmp_path / "run", save_every=1, keep=Keep(last=2, every=5)) as run:
        run.resume(new_state, shardings=ONE)
        for step in range(1, 13):
            run.step(step, state_of(step))
            run.wait()
            assert len(numbers(run)) <= 2 + step // 5
    assert numbers(run) == [5, 10, 11, 12]
    assert [step.kept for step in run.steps()] == [("every",), ("every",), ("last",), ("newest", "last")]
    there = {p.name for p in (tmp_path / "run").iterdir()}
    assert there == {".shardkeep-run", "step_5", "step_10", "step_11", "step_12"}


def test_the_best_stays_and_never_costs_the_newest_its_place(tmp_path: Path) -> None:
    keep = Keep(best=1, metric="loss", mode="min")
    with Run(tmp_path / "run", save_every=1, keep=keep) as run:
        run.resume(new_state, shardings=ONE)
        for step, loss in enumerate([5.0, 1.0, 3.0, float("nan")], start=1):
            run.step(step, state_of(step), metrics={"loss": loss})
    assert numbers(run) == [2, 4]
    best = run.best()
    assert best is not None
    assert best.number == 2


def test_steps_await_a_metric_that_an_evaluator_records_later(tmp_path: Path) -> None:
    keep = Keep(best=1, metric="eval", mode="min")
    with Run(tmp_path / "run", save_every=1, keep=keep) as run:
        run.resume(new_state, shardings=ONE)
        for step in (1, 2, 3):
            run.step(step, state_of(step))
        run.wait()
        assert numbers(run) == [1, 2, 3]
        evaluator = Run(tmp_path / "run", keep=keep)
        for step, value in ((1, 0.5), (2, 0.1)):
            evaluator.record(step, {"eval": value})
        run.step(4, state_of(4))
    assert numbers(run) == [2, 3, 4]


def test_a_metric_that_was_never_seen_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path / "run", [1, 2, 3, 4], keep=Keep(best=1, metric="typo", mode="min"))
    warnings = [r.getMessage() for r in caplog.records if "none of the" in r.getMessage()]
    assert len(warnings) == 1
    assert "has the metric 'typo'" in warnings[0]
    assert "recorded are: 'loss'" in warnings[0]


def test_nothing_is_deleted_before_this_program_has_committed_a_step(tmp_path: Path) -> None:
    """A step that the rules do not keep may be what a resume has to fall back to."""
    trained(tmp_path / "run", [1, 2, 3])
    with Run(tmp_path / "run", keep=Keep(last=1)) as run:
        run.resume(new_state, shardings=ONE)
        run.wait()
        assert numbers(run) == [1, 2, 3]
        run.save(4, state_of(4))
    assert numbers(run) == [4]


def test_a_held_step_is_not_deleted_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shardkeep")
    with Run(tmp_path / "run", save_every=1, keep=Keep(last=1)) as run:
        run.resume(new_state, shardings=ONE)
        run.step(1, state_of(1))
        run.wait()
        with Run(tmp_path / "run").hold(1) as held:
            for step in (2, 3):
                run.step(step, state_of(step))
            run.wait()
            assert numbers(run) == [1, 3]
            assert shardkeep.load(held.path)["n"] == 1
            with pytest.raises(ConflictError, match="is held and was not deleted; wait until its reader has finished"):
                run.delete(1)
        run.step(4, state_of(4))
    assert numbers(run) == [4]
    assert "step_1 was not deleted: it is held" in caplog.text


def test_a_reader_that_comes_after_the_mark_is_refused_and_one_before_it_is_seen(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", [1, 2])
    control = Control(location(tmp_path / "run"))
    entry = run._index.read().entries[1]
    mark = control.mark("deleting", entry.name, entry.step.save_id)
    threading.Timer(0.5, lambda: control.remove([mark])).start()  # the deleter saw the hold and gave way
    with run.hold(1) as held:
        assert held.number == 1
        assert delete_step(control, entry) == "held"
    assert control.marks() == []
    assert delete_step(control, entry) == "deleted"
    with pytest.raises(CheckpointNotFoundError, match="has no step 1; it has 2"), run.hold(1):
        pass


def test_deletion_takes_marks_and_metrics_along(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", [1, 2])
    run.record(1, {"eval": 1})
    run.pin(1)
    run.unpin(1)
    with run.__class__(tmp_path / "run", keep=Keep(last=1)) as again:
        again.resume(new_state, shardings=ONE)
        again.save(3, state_of(3))
    control = Control(location(tmp_path / "run"))
    assert (control.marks(), control.metric_records()) == ([], [])


def test_what_cannot_be_deleted_is_reported_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path / "run", save_every=1, keep=Keep(last=1)) as run:
        run.resume(new_state, shardings=ONE)
        run.step(1, state_of(1))
        run.wait()
        lock = tmp_path / "run" / "step_1" / ".shardkeep" / "lock"
        lock.unlink(missing_ok=True)
        lock.mkdir()
        run.step(2, state_of(2))
        run.wait()
        assert "step_1 was not deleted" in caplog.text
        lock.rmdir()
        run.step(3, state_of(3))
    assert numbers(run) == [3]


READER = """
import sys
from shardkeep import Run
run = Run(sys.argv[1])
seen = 0
for step in run.watch(timeout=1):
    for _ in range(3):
        assert run.load(step)["n"] == step.number
    seen += 1
print(seen)
"""


def test_retention_never_takes_a_step_from_a_reader_in_another_program(tmp_path: Path) -> None:
    with Run(tmp_path / "run", save_every=1, keep=Keep(last=1)) as run:
        run.resume(new_state, shardings=ONE)
        run.step(1, state_of(1))
        variables = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
        arguments = [sys.executable, "-c", READER, str(tmp_path / "run")]
        reader = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)
        step = 1
        while reader.poll() is None and step < 60:
            step += 1
            run.step(step, state_of(step))
        out, errors = reader.communicate(timeout=60)
        assert reader.returncode == 0, errors
        assert int(out) >= 1
        run.save(step + 1, state_of(step + 1))
        run.wait()
    assert numbers(run) == [step + 1]
