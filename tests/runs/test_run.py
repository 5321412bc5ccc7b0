"""A run with one process: saving when it is due, resuming, errors, closing."""

import logging
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from runs.runs import ONE, damage, new_state, numbers, state_of, trained
from shardkeep import Keep, Run
from shardkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConflictError,
    MetadataError,
    MissingLeafError,
    NotADirectoryPathError,
    PathError,
    StorageError,
)


class Data:
    """An iterator with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_new_run_begins_with_a_new_state_at_step_0(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        state, step = run.resume(new_state, shardings=ONE)
        assert (step, state["n"], np.asarray(state["w"]).tolist()) == (0, 0, [0.0] * 64)
        assert run.resumed is not None
        assert run.resumed.fresh
    assert run.latest() is None


def test_a_run_continues_with_the_newest_step_and_its_iterators(tmp_path: Path) -> None:
    data = Data()
    with Run(tmp_path / "run", save_every=10) as run:
        run.resume(new_state, shardings=ONE)
        for step in range(1, 26):
            next(data)
            run.step(step, state_of(step), iterators={"train": data})
    again = Data()
    with Run(tmp_path / "run", save_every=10) as run:
        state, step = run.resume(new_state, iterators={"train": again}, shardings=ONE)
        assert (step, state["n"], again.position) == (20, 20, 20)
        assert run.resumed is not None
        assert run.resumed.path == str(tmp_path / "run" / "step_20")
        assert (run.resumed.skipped, run.resumed.fresh) == ((), False)


def test_steps_are_saved_at_or_past_each_multiple(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", range(8, 400, 8), save_every=100)
    assert numbers(run) == [104, 200, 304]


def test_a_step_is_one_ordinary_checkpoint_with_all_its_trees(tmp_path: Path) -> None:
    with Run(tmp_path / "run", metadata={"config": "a"}) as run:
        run.resume(new_state, shardings=ONE)
        run.save(7, state_of(7), trees={"ema": {"w": np.ones(2)}}, iterators={"x": {"at": 3}}, metadata={"note": 1})
    path = tmp_path / "run" / "step_7"
    manifest = shardkeep.inspect(path)
    assert sorted(manifest.prefixes) == ["", "ema", "iterators"]
    assert len({tree.save_id for tree in manifest.trees.values()}) == 1
    assert manifest.step == 7
    assert shardkeep.load(path)["n"] == 7
    assert run.load(prefix="ema")["w"].tolist() == [1, 1]
    assert run.load(7, prefix="iterators") == {"x": {"at": 3}}
    assert run.steps()[0].metadata == {"config": "a", "note": 1}


def test_saving_a_committed_step_again_does_nothing(tmp_path: Path) -> None:
    with Run(tmp_path / "run", save_every=1) as run:
        run.resume(new_state, shardings=ONE)
        assert run.step(1, state_of(1)) is not None
        before = shardkeep.inspect(tmp_path / "run" / "step_1").save_id if run.wait() is None else ""
        pending = run.save(1, state_of(99))
        assert pending.done()
        assert pending.wait().files == 0
        assert run.step(1, state_of(99)) is None
    assert shardkeep.inspect(tmp_path / "run" / "step_1").save_id == before


def test_metrics_are_recorded_as_numbers_nan_and_infinity_too(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        run.resume(new_state, shardings=ONE)
        given = {"a": jnp.float32(0.5), "b": np.float64(math.inf), "c": math.nan, "d": 3, "e": jnp.bfloat16(2)}
        given |= {"largest": -sys.float_info.max, "least": 5e-324, "huge": 10**400, "negative": -(10**400)}
        run.save(1, state_of(1), metrics=given)
        run.wait()
        found = dict(run.steps()[0].metrics)
        assert math.isnan(found.pop("c"))
        assert found.pop("largest") == -sys.float_info.max
        assert found.pop("least") == 5e-324
        assert (found.pop("huge"), found.pop("negative")) == (math.inf, -math.inf)
        assert found == {"a": 0.5, "b": math.inf, "d": 3.0, "e": 2.0}


def test_a_save_of_the_last_step_records_the_metrics_of_that_step(tmp_path: Path) -> None:
    with Run(tmp_path / "run", save_every=2, keep=Keep(last=9)) as run:
        run.resume(new_state, shardings=ONE)
        for number in (1, 2, 3):
            run.step(number, state_of(number), metrics={"loss": jnp.float32(number)})
        run.save(3, state_of(3))
        run.save(4, state_of(4))
        run.step(5, state_of(5), metrics={"loss": 5})
        run.save(5, state_of(5), metrics={"accuracy": 0.5})
        run.wait()
        found = {step.number: dict(step.metrics) for step in run.steps()}
    assert found == {2: {"loss": 2.0}, 3: {"loss": 3.0}, 4: {}, 5: {"accuracy": 0.5}}


def test_metrics_from_before_going_back_are_not_recorded_with_the_step_that_replaces_it(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        run.resume(new_state, shardings=ONE)
        run.save(1, state_of(1))
        run.step(2, state_of(2), metrics={"loss": 9.0})
        run.resume(new_state, step=1, shardings=ONE)
        run.save(2, state_of(2))
        run.wait()
        assert dict(run.steps()[-1].metrics) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("low", "metric 'loss' is a str, not a number"),
        (None, "metric 'loss' is None, not a number"),
        (True, "metric 'loss' is a bool, not a number"),
        (np.zeros(3), r"metric 'loss' is an array of shape \(3,\)"),
        (jnp.zeros((2, 2)), r"metric 'loss' is an array of shape \(2, 2\)"),
        (jnp.complex64(1), "metric 'loss' has dtype complex64"),
        (1j, "metric 'loss' is a complex, not a number"),
    ],
)
def test_a_metric_that_is_no_number_is_refused_at_the_call(tmp_path: Path, value: Any, message: str) -> None:
    with Run(tmp_path / "run") as run:
        run.resume(new_state, shardings=ONE)
        with pytest.raises(MetadataError, match=message):
            run.save(1, state_of(1), metrics={"loss": value})
        with pytest.raises(MetadataError, match=message):
            run.record(1, {"loss": value})
    assert run.steps() == []


def test_late_metrics_are_added_and_the_latest_wins(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", [1, 2], keep=Keep(last=5, metric="eval", mode="max"))
    reader = Run(tmp_path / "run", keep=Keep(last=5, metric="eval", mode="max"))
    assert reader.best() is None
    reader.record(1, {"eval": 0.1})
    reader.record(2, {"eval": 0.5})
    reader.record(1, {"eval": 0.7, "loss": 9})
    best = reader.best()
    assert best is not None
    assert (best.number, dict(best.metrics)) == (1, {"loss": 9.0, "eval": 0.7})
    with pytest.raises(CheckpointNotFoundError, match="has no step 3; it has 1, 2"):
        run.record(3, {"eval": 1})


def test_a_second_writer_is_refused_with_who_holds_the_run_and_readers_are_not(tmp_path: Path) -> None:
    with Run(tmp_path / "run", save_every=1) as run:
        run.resume(new_state, shardings=ONE)
        run.step(1, state_of(1))
        run.wait()
        other = Run(tmp_path / "run")
        assert numbers(other) == [1]
        assert other.load()["n"] == 1
        here = f"this program has already opened the run .*: process {os.getpid()} on .*since.*close\\(\\) of that Run"
        with pytest.raises(ConflictError, match=here):
            other.resume(new_state, shardings=ONE)
    with other:
        assert other.resume(new_state, shardings=ONE)[1] == 1


def test_opening_and_reading_write_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert (run.steps(), run.latest()) == ([], None)
    run.close()
    assert not (tmp_path / "run").exists()
    trained(tmp_path / "run", [1])
    before = sorted(p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*"))
    reader = Run(tmp_path / "run")
    assert reader.load()["n"] == 1
    assert [step.number for step in reader.watch(timeout=0, hold=False)] == [1]
    assert sorted(p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")) == before


def test_a_path_that_is_a_checkpoint_is_refused(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "ckpt", {"w": np.ones(2)})
    with pytest.raises(PathError, match=f"is a checkpoint, not a run; .* for example {tmp_path}"):
        Run(tmp_path / "ckpt")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryPathError, match="is a file; a run is a directory"):
        Run(tmp_path / "file")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"on_error": "hide"}, ValueError, "on_error must be"),
        ({"on_preemption": "stop"}, ValueError, "on_preemption must be"),
        ({"keep": 3}, TypeError, "keep must be a shardkeep.Keep"),
        ({"save_every": 0}, ValueError, "greater than 0"),
        ({"save_every": "often"}, ValueError, "save_every takes"),
        ({"name": "step"}, ValueError, "name='step'"),
        ({"format": "npz"}, ValueError, "npz"),
        ({"signals": ("SIGNOTHING",)}, ValueError, "SIGNOTHING"),
        ({"metadata": {"shardkeep_run": 1}}, MetadataError, "choose another key"),
        ({"metadata": {"x": object()}}, MetadataError, "no obvious JSON form"),
    ],
)
def test_bad_arguments_are_refused_when_the_run_is_opened(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Run(tmp_path / "run", **arguments)


def test_a_step_must_be_a_python_int(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        run.resume(new_state, shardings=ONE)
        with pytest.raises(TypeError, match="keep the step in a Python int"):
            run.step(jnp.int32(1), state_of(1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be an int, not str"):
            run.save("1", state_of(1))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="must not be negative"):
            run.due(-1)
        run.step(np.int64(1), state_of(1))


def test_a_loop_that_does_not_resume_never_overwrites_or_skips_steps(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2, 3])
    with Run(tmp_path / "run", save_every=1, keep=None) as run:
        with pytest.raises(CheckpointExistsError, match=r"has steps up to 3, but step 1 .* Call run.resume\(\)"):
            run.step(1, state_of(1))
        run.save(4, state_of(4))  # after the newest one: nothing is lost
    assert numbers(run) == [1, 2, 3, 4]


def test_iterators_that_were_not_saved_are_an_error(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1])
    with Run(tmp_path / "run") as run:
        with pytest.raises(MissingLeafError, match="no state of iterator 'train'"):
            run.resume(new_state, iterators={"train": Data()}, shardings=ONE)
        assert run.resume(new_state, shardings=ONE)[1] == 1
    assert run.steps()[0].state == "usable"


def test_trees_and_metadata_must_not_use_names_of_the_run(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        run.resume(new_state, shardings=ONE)
        with pytest.raises(ValueError, match="this name is reserved for iterators"):
            run.save(1, state_of(1), trees={"iterators": {}})
        with pytest.raises(MetadataError, match="choose another key"):
            run.save(1, state_of(1), metadata={"shardkeep_run": 1})


def test_due_is_stable_and_tells_what_step_does(tmp_path: Path) -> None:
    with Run(tmp_path / "run", save_every=10) as run:
        run.resume(new_state, shardings=ONE)
        for step in range(0, 41, 4):
            before = run.due(step)
            assert (run.step(step, state_of(step)) is not None) == before
            assert run.due(step) == before
        assert not run.due(0)
    assert numbers(run) == [12, 20, 32, 40][-3:]


def test_a_time_makes_a_save_due(tmp_path: Path) -> None:
    with Run(tmp_path / "run", save_every="1 h", keep=None) as run:
        run.resume(new_state, shardings=ONE)
        assert run.step(1, state_of(1)) is None
        run._schedule.restart_time(-1e9)
        assert run.due(2)
        assert run.step(2, state_of(2)) is not None
        assert run.due(2) is False or run.step(2, state_of(2)) is None
        assert run.step(3, state_of(3)) is None
    assert numbers(run) == [2]


def test_an_error_of_an_earlier_save_is_raised_at_the_next_call(tmp_path: Path) -> None:
    with Run(tmp_path / "run", save_every=1) as run:
        run.resume(new_state, shardings=ONE)
        (tmp_path / "run" / "step_1").write_text("in the way")
        (tmp_path / "run" / "step_2").mkdir()
        with pytest.raises(StorageError, match="is a file"):
            run.step(1, state_of(1))
        assert run.step(2, state_of(2)) is not None
        run.wait()
    assert numbers(run) == [2]


def break_saves(run: Path, name: str) -> None:
    """Let a save to this step fail when it is committed: its lock is a directory."""
    (run / name / ".shardkeep" / "lock").mkdir(parents=True)


def test_a_save_that_fails_in_the_background_is_raised_by_the_next_step_once(tmp_path: Path) -> None:
    with Run(tmp_path / "run", save_every=10) as run:
        run.resume(new_state, shardings=ONE)
        break_saves(tmp_path / "run", "step_10")
        pending = run.step(10, state_of(10))
        assert pending is not None
        with pytest.raises(StorageError, match="step_10"):
            pending.wait()
        with pytest.raises(StorageError, match="step_10"):
            run.step(11, state_of(11))
        assert run.step(12, state_of(12)) is None
        assert run.step(20, state_of(20)) is not None
    assert numbers(run) == [20]


def test_on_error_log_only_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Run(tmp_path / "run", save_every=1, on_error="log") as run:
        run.resume(new_state, shardings=ONE)
        break_saves(tmp_path / "run", "step_1")
        run.step(1, state_of(1))
        run.wait()
        run.step(2, state_of(2))
    assert numbers(run) == [2]
    assert "step_1 failed" in caplog.text


def test_an_exception_in_the_loop_is_not_hidden_and_the_save_is_completed(tmp_path: Path) -> None:
    def train() -> None:
        with Run(tmp_path / "run", save_every=1) as run:
            run.resume(new_state, shardings=ONE)
            run.step(1, state_of(1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert numbers(Run(tmp_path / "run")) == [1]
    with Run(tmp_path / "run") as run:
        assert run.resume(new_state, shardings=ONE)[1] == 1


def test_an_error_of_the_last_save_does_not_hide_that_of_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        with Run(tmp_path / "run", save_every=1) as run:
            run.resume(new_state, shardings=ONE)
            break_saves(tmp_path / "run", "step_1")
            run.step(1, state_of(1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert "closing the run" in caplog.text


def test_close_raises_what_the_last_save_raised_and_releases_the_lock(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", save_every=1)
    run.resume(new_state, shardings=ONE)
    break_saves(tmp_path / "run", "step_1")
    run.step(1, state_of(1))
    with pytest.raises(StorageError, match="step_1"):
        run.close()
    run.close()
    with pytest.raises(ValueError, match="is closed; open it again"):
        run.step(2, state_of(2))
    assert not (tmp_path / "run" / ".shardkeep-run" / "writer").exists()
    assert [t.name for t in threading.enumerate() if t.name.startswith("shardkeep-run")] == []


def test_stop_saves_the_next_step_and_then_stops(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        run.resume(new_state, shardings=ONE)
        run.step(1, state_of(1))
        run.stop()
        assert not run.stopping
        run.step(2, state_of(2))
        assert run.stopping
        assert numbers(run) == [2]


def test_a_stop_is_not_lost_if_an_earlier_save_failed(tmp_path: Path) -> None:
    """The error is raised, and the next call saves and stops."""
    with Run(tmp_path / "run", save_every=1) as run:
        run.resume(new_state, shardings=ONE)
        break_saves(tmp_path / "run", "step_1")
        pending = run.step(1, state_of(1))
        assert pending is not None
        with pytest.raises(StorageError):
            pending.wait()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StorageError, match="step_1"):
            run.step(2, state_of(2))
        assert not run.stopping
        run.step(3, state_of(3))
        assert run.stopping
    assert numbers(run) == [3]


def test_a_stop_is_not_lost_if_its_own_save_cannot_be_made(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        run.resume(new_state, shardings=ONE)
        run.stop()
        with pytest.raises(MetadataError):
            run.step(1, state_of(1), metrics={"loss": "high"})
        break_saves(tmp_path / "run", "step_2")
        with pytest.raises(StorageError, match="step_2"):
            run.step(2, state_of(2))
        with pytest.raises(TypeError, match="must be an int"):
            run.save(2.5, state_of(2))  # pyright: ignore[reportArgumentType]
        assert not run.stopping
        run.save(3, state_of(3))
        assert run.stopping
    assert numbers(run) == [3]


def test_with_on_error_log_a_run_stops_and_the_log_does_not_claim_that_it_was_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path / "run", on_error="log") as run:
        run.resume(new_state, shardings=ONE)
        break_saves(tmp_path / "run", "step_2")
        run.stop()
        run.step(2, state_of(2))
        assert run.stopping
        assert "stops after step 2, which could not be saved" in caplog.text
        run.save(2, state_of(2))  # what follows the loop is another try
    assert numbers(run) == []


def test_a_signal_saves_the_next_step_and_the_earlier_handler_is_called(tmp_path: Path) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    try:
        with Run(tmp_path / "run") as run:
            run.resume(new_state, shardings=ONE)
            run.step(1, state_of(1))
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert not run.stopping
            run.step(2, state_of(2))
            assert run.stopping
            assert numbers(run) == [2]
        assert called == [signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_preemption_can_be_ignored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Run(tmp_path / "run", on_preemption="ignore") as run:
        run.resume(new_state, shardings=ONE)
        assert signal.getsignal(signal.SIGTERM) is before


def test_off_the_main_thread_stop_works_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        with Run(tmp_path / "run") as run:
            run.resume(new_state, shardings=ONE)
            run.stop()
            run.step(5, state_of(5))
            stopped.append(run.stopping)

    stopped: list[bool] = []
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert stopped == [True]
    assert "run.stop()" in caplog.text


def test_a_pinned_step_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    with Run(tmp_path / "run", keep=Keep(last=1)) as run:
        run.resume(new_state, shardings=ONE)
        run.save(1, state_of(1), pin=True)
        run.save(2, state_of(2))
        run.wait()
        run.pin(2)
        run.save(3, state_of(3))
        run.save(4, state_of(4))
        run.wait()
        assert numbers(run) == [1, 2, 4]
        assert [step.kept for step in run.steps()] == [("pinned",), ("pinned",), ("newest", "last")]
        with pytest.raises(ConflictError, match="is pinned and was not deleted; call unpin"):
            run.delete(1)
        run.unpin(1)
        run.unpin(2)
        run.save(5, state_of(5))
        run.wait()
        assert numbers(run) == [5]
        run.pin(5)
        run.pin(5)
        run.unpin(5)
        run.delete(5)
    assert numbers(run) == []


def test_a_step_that_will_be_replaced_cannot_be_pinned(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2, 3])
    damage(tmp_path / "run", 3)
    with Run(tmp_path / "run") as run:
        assert run.resume(new_state, shardings=ONE)[1] == 2
        run.resume(new_state, step=1, shardings=ONE)
        with pytest.raises(ConflictError, match=r"step_2 is abandoned, and the run replaces it .* cannot be pinned"):
            run.pin(2)
        with pytest.raises(ConflictError, match="step_3 is damaged, and the run replaces it"):
            run.pin(3)


def test_the_state_may_be_donated_as_soon_as_step_returns(tmp_path: Path) -> None:
    update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Run(tmp_path / "run", save_every=1, keep=None) as run:
        state, step = run.resume(lambda: {"w": jnp.zeros(1000)}, shardings=ONE)
        while step < 5:
            state, step = update(state), step + 1
            run.step(step, state, metrics={"w": state["w"][0]})
    for step in run.steps():
        assert float(run.load(step)["w"][0]) == step.number == step.metrics["w"]


def test_the_log_says_when_a_run_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with Run(tmp_path / "run") as run:
        run.stop()  # before it is opened for writing
        run.resume(new_state, shardings=ONE)
        run.save(3, state_of(3))
        assert run.stopping
    assert "stops after step 3, which is saved (run.stop())" in caplog.text


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("save_every", [10, "1 h", None])
def test_step_numbers_that_go_down_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save_every: Any
) -> None:
    with Run(tmp_path / "run", save_every=save_every) as run:
        run.resume(new_state, shardings=ONE)
        for _ in range(3):
            for step in range(26):
                run.step(step, state_of(step))
            run.step(25, state_of(25))  # the same once more is nothing to report
    (message,) = warned(caplog)
    assert "run.step(0) comes after step 25. Step numbers must grow over the whole run" in message


def test_step_numbers_that_start_again_after_a_resume_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "run", [10, 20])
    with Run(tmp_path / "run", save_every=10) as run:
        run.resume(new_state, shardings=ONE)
        run.step(1, state_of(1))
        assert "run.step(1) comes after step 20" in "".join(warned(caplog))
        caplog.clear()
        run.resume(new_state, step=10, shardings=ONE)
        run.step(11, state_of(11))
    assert warned(caplog) == []


def test_saved_positions_that_resume_does_not_restore_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path / "run") as run:
        run.resume(new_state, shardings=ONE)
        run.save(1, state_of(1), iterators={"train": Data(), "eval": {"at": 3}})
    assert warned(caplog) == []
    with Run(tmp_path / "run") as run:
        run.resume(new_state, shardings=ONE)
        (message,) = warned(caplog)
        assert "'train', 'eval'" in message or "'eval', 'train'" in message
        assert "Pass resume(iterators={" in message
        caplog.clear()
        run.resume(new_state, iterators={}, shardings=ONE)
        run.resume(new_state, iterators={"train": Data()}, shardings=ONE)
        run.save(2, state_of(2))
        run.wait()
        run.resume(new_state, shardings=ONE)
    assert warned(caplog) == []


def test_a_run_that_was_opened_again_after_an_error_can_be_closed_first(tmp_path: Path) -> None:
    first = Run(tmp_path / "run")
    first.resume(new_state, shardings=ONE)
    second = Run(tmp_path / "run")
    with pytest.raises(ConflictError, match="this program has already opened"):
        second.resume(new_state, shardings=ONE)
    first.close()
    with second:
        assert second.resume(new_state, shardings=ONE)[1] == 0
