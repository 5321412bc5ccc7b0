"""What readers of a run do: hold and watch."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import shardkeep
from runs.runs import ONE, damage, new_state, state_of, trained
from shardkeep import Keep, Run
from shardkeep.errors import AccessError, CheckpointNotFoundError
from shardkeep.runs.reading import ReadableRun


def test_watch_yields_each_step_once_in_order(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2, 3])
    reader = Run(tmp_path / "run")
    assert [s.number for s in reader.watch(timeout=0)] == [3]
    assert [s.number for s in reader.watch(after=0, timeout=0)] == [1, 2, 3]
    assert [s.number for s in reader.watch(after=3, timeout=0)] == []


def test_watch_waits_for_steps_and_holds_them(tmp_path: Path) -> None:
    seen: list[int] = []
    reader = ReadableRun(tmp_path / "run")
    holds = tmp_path / "run" / ".shardkeep-run" / "holds"

    def watch() -> None:
        for step in reader.watch(after=0):
            seen.append(step.number)
            assert len(list(holds.iterdir())) == 1
            if step.number == 3:
                return

    thread = threading.Thread(target=watch)
    thread.start()
    with Run(tmp_path / "run", save_every=1, keep=None) as run:
        run.resume(new_state, shardings=ONE)
        for step in (1, 2, 3):
            run.step(step, state_of(step))
            while len(seen) < step:
                time.sleep(0.01)
    thread.join(20)
    assert seen == [1, 2, 3]
    assert not holds.exists() or list(holds.iterdir()) == []


def test_a_step_that_is_saved_again_after_going_back_comes_again(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2])
    watching = Run(tmp_path / "run").watch(after=0, timeout=0)
    assert [next(watching).number, next(watching).number] == [1, 2]
    with Run(tmp_path / "run", keep=None) as run:
        run.resume(new_state, step=1, shardings=ONE)
        run.save(2, state_of(22))
    assert next(watching).number == 2
    assert list(watching) == []


def test_a_step_that_was_listed_before_it_was_saved_again_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    """The metric of an evaluator that was still busy with the old weights would choose the wrong step as the best."""
    trained(tmp_path / "run", [1, 2])
    reader = Run(tmp_path / "run")
    old = reader.latest()
    assert old is not None
    with Run(tmp_path / "run", keep=None) as run:
        run.resume(new_state, step=1, shardings=ONE)
        run.save(2, state_of(22)).wait()
        for use in (reader.load, reader.pin, run.delete, lambda step: reader.record(step, {"eval": 1})):
            with pytest.raises(CheckpointNotFoundError, match="step_2 was saved again since this Step was listed"):
                use(old)
    new = reader.latest()
    assert new is not None
    assert "eval" not in new.metrics
    reader.record(new, {"eval": 2})
    assert reader.load(new)["n"] == 22


def test_a_watcher_that_stops_or_fails_leaves_no_hold(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2])
    holds = tmp_path / "run" / ".shardkeep-run" / "holds"
    for _ in Run(tmp_path / "run").watch(after=0, timeout=0):
        assert list(holds.iterdir())
        break
    watching = Run(tmp_path / "run").watch(after=0, timeout=0)
    next(watching)
    with pytest.raises(KeyError, match="mine"):
        watching.throw(KeyError("mine"))
    with pytest.raises(KeyError, match="mine"), Run(tmp_path / "run").hold(1):
        raise KeyError("mine")
    assert not holds.exists() or list(holds.iterdir()) == []


def test_latest_and_best_pass_over_steps_whose_files_are_not_complete(tmp_path: Path) -> None:
    keep = Keep(last=9, metric="loss", mode="min")
    trained(tmp_path / "run", [1, 2, 3])
    next((tmp_path / "run" / "step_3").glob("*.safetensors")).unlink()
    reader = Run(tmp_path / "run", keep=keep)
    latest, best = reader.latest(), reader.best()
    assert latest is not None
    assert latest.number == 2
    assert best is not None
    assert best.number == 2
    assert reader.load()["n"] == 2


def test_best_needs_a_metric(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"best\(\) needs to know which metric"):
        Run(tmp_path / "run").best()


def test_a_damaged_step_can_still_be_named(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2])
    damage(tmp_path / "run", 2)
    with Run(tmp_path / "run") as run:
        with pytest.raises(shardkeep.IntegrityError, match="step_2"):
            run.load(2)
        with pytest.raises(CheckpointNotFoundError, match="has no step 7"):
            run.load(7)
    with Run(tmp_path / "empty") as run, pytest.raises(CheckpointNotFoundError, match="has no usable step"):
        run.load()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_permission_to_write_one_watches_without_holds() -> None:
    script = (
        "import os, sys, shardkeep\n"
        "run = shardkeep.Run(sys.argv[1])\n"
        "list(run.watch(timeout=0, hold=False))\n"
        "os.setuid(65534)\n"
        "print([s.number for s in run.watch(after=0, timeout=0, hold=False)])\n"
        "try:\n"
        "    list(run.watch(timeout=0))\n"
        "except shardkeep.AccessError as error:\n"
        "    print(type(error).__name__, 'holding step_2' in str(error))\n"
    )
    with tempfile.TemporaryDirectory() as directory:  # which another user may enter
        Path(directory).chmod(0o755)
        trained(Path(directory) / "run", [1, 2])
        out = subprocess.run([sys.executable, "-c", script, f"{directory}/run"], capture_output=True, text=True)
    assert out.stdout == f"[1, 2]\n{AccessError.__name__} True\n", out.stderr


def test_reading_a_run_does_not_import_jax(tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2])
    script = (
        "import sys\n"
        "from shardkeep.runs.reading import ReadableRun\n"
        "run = ReadableRun(sys.argv[1])\n"
        "run.pin(1); run.record(1, {'a': 1}); run.unpin(1); run.latest()\n"
        "with run.hold(2): pass\n"
        "print([s.number for s in run.watch(after=0, timeout=0)], 'jax' in sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], capture_output=True, text=True)
    assert out.stdout == "[1, 2] False\n", out.stderr
