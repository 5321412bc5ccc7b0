"""`RUN@latest`, `RUN@best`, `RUN@1000`: which checkpoint is meant."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from cli.commands import Run, environment
from runs.runs import damage, trained
from shardkeep import Keep
from shardkeep.cli.selecting import Selection
from shardkeep.runs.control import Control
from shardkeep.stores.location import location

BEST = Keep(last=2, best=1, metric="loss", mode="max")


@pytest.fixture(scope="module")
def exp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 1, 4 and 5 of five. The loss of the first is the largest."""
    path = tmp_path_factory.mktemp("runs") / "exp"
    trained(path, range(1, 6), keep=BEST)
    return path


def test_latest_best_and_numbers_name_steps(run: Run, exp: Path) -> None:
    for which, step in (("latest", 5), ("best", 1), ("4", 4)):
        told = run.document("inspect", f"{exp}@{which}")
        assert told["path"] == str(exp / f"step_{step}")
    assert run.document("inspect", f"{exp}@best", "--mode", "min")["path"] == str(exp / "step_5")
    assert run.document("inspect", f"{exp}@best", "--metric", "loss")["path"] == str(exp / "step_1")


def test_every_command_that_reads_takes_steps(run: Run, exp: Path, tmp_path: Path) -> None:
    assert run.document("verify", f"{exp}@latest")["path"] == str(exp / "step_5")
    assert [one["path"] for one in run.document("verify", f"{exp}@1", f"{exp}@best")] == [str(exp / "step_1")] * 2
    assert run.document("stats", f"{exp}@best")["leaves"][0]["max"] == 1.0
    told = run.document("diff", f"{exp}@best", f"{exp}@latest")
    assert [told["a"], told["b"]] == [str(exp / "step_1"), str(exp / "step_5")]
    out = tmp_path / "m@latest"
    assert run("convert", f"{exp}@latest", out).code == 0
    assert shardkeep.load(out)["n"] == 5


def test_of_a_step_with_iterators_the_state_is_converted_to_one_file_if_it_is_chosen(run: Run, tmp_path: Path) -> None:
    with shardkeep.Run(tmp_path / "exp") as training:
        training.save(1, {"w": np.arange(3)}, iterators={"train": {"seen": 7}})
    out = tmp_path / "best.safetensors"
    refused = run("convert", f"{tmp_path}/exp@1", out)
    assert refused.code == 2
    assert "(no prefix), iterators" in refused.err
    assert "choose it with --prefix, '' for the one without a prefix, or convert to a directory" in refused.err
    assert run("convert", f"{tmp_path}/exp@1", out, "--prefix", "").code == 0
    assert shardkeep.load(out)["w"].tolist() == [0, 1, 2]


def test_a_path_that_exists_is_a_path(run: Run, exp: Path, tmp_path: Path) -> None:
    for name in ("exp@5", "exp@best", "a@b"):
        shardkeep.save(tmp_path / name, {"w": np.ones(2)})
        assert run.document("inspect", tmp_path / name)["path"] == str(tmp_path / name)
    shutil.copytree(exp, tmp_path / "exp")
    assert run.document("inspect", tmp_path / "exp@5")["path"] == str(tmp_path / "exp@5")
    assert run.document("inspect", tmp_path / "exp@4")["path"] == str(tmp_path / "exp/step_4")
    shardkeep.save(tmp_path / "exp@4.safetensors", {"w": np.ones(2)})
    assert run.document("inspect", tmp_path / "exp@4.safetensors")["path"].endswith("exp@4.safetensors")
    (tmp_path / "exp@1").mkdir()
    refused = run("inspect", tmp_path / "exp@1")
    assert refused.code == 2
    assert f"no checkpoint at {tmp_path}/exp@1" in refused.err


def test_what_is_wrong_is_said(run: Run, exp: Path, tmp_path: Path) -> None:
    for given, said in (
        (f"{exp}@7", f"the run {exp} has no step 7; it has 1, 4, 5"),
        (f"{exp}@lates", "'lates' is not a step; write @latest, @best or the number of a step"),
        (f"{tmp_path}@latest", "there is no usable step in"),
        (f"{tmp_path}/none@3", f"the run {tmp_path}/none has no steps"),
        (f"{exp}/step_5@3", "is a checkpoint, not a run"),
    ):
        refused = run("inspect", given)
        assert refused.code == 2
        assert said in refused.err
    refused = run("inspect", f"{exp}@best", "--metric", "accuracy", "--mode", "max")
    assert "no usable step has the metric 'accuracy'; the metrics of its steps are loss" in refused.err
    assert "whether a smaller or a larger accuracy is better" in run("stats", f"{exp}@best", "--metric", "accuracy").err


def test_best_needs_a_metric(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2])
    refused = run("inspect", f"{tmp_path}/run@best")
    assert refused.code == 2
    expected = (
        "the run does not specify which metric to use; pass --metric and --mode (the metrics of its steps are loss)"
    )
    assert expected in refused.err
    told = run.document("inspect", f"{tmp_path}/run@best", "--metric", "loss", "--mode", "min")
    assert told["path"] == str(tmp_path / "run/step_2")


def test_the_names_of_the_steps_are_those_of_the_run(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2], name="at-{:04d}")
    assert run.document("inspect", f"{tmp_path}/run@2")["path"] == str(tmp_path / "run/at-0002")


def test_a_directory_without_a_run_has_steps_too(run: Run, tmp_path: Path) -> None:
    """Checkpoints that no Run saved: by number if they are named step_1, the newest whatever its name is."""
    for step in (9, 10):
        shardkeep.save(tmp_path / "a" / f"step_{step}", {"n": step})
        shardkeep.save(tmp_path / "b" / f"run-{step}", {"n": step})
    assert run.document("inspect", f"{tmp_path}/a@9")["path"] == str(tmp_path / "a/step_9")
    assert run.document("inspect", f"{tmp_path}/a@latest")["path"] == str(tmp_path / "a/step_10")
    assert run.document("inspect", f"{tmp_path}/b@latest")["path"] == str(tmp_path / "b/run-10")


def test_the_latest_step_is_a_complete_one(run: Run, exp: Path, tmp_path: Path) -> None:
    shutil.copytree(exp, tmp_path / "run")
    os.truncate(next((tmp_path / "run/step_5").glob("*.safetensors")), 10)
    assert run.document("inspect", f"{tmp_path}/run@latest")["path"] == str(tmp_path / "run/step_4")
    damage(tmp_path / "run", 4)
    assert run("verify", f"{tmp_path}/run@4").code == 1


def test_a_run_without_an_index_has_no_rules(run: Run, exp: Path, tmp_path: Path) -> None:
    shutil.copytree(exp, tmp_path / "run")
    index = tmp_path / "run/.shardkeep-run/index.json"
    document = json.loads(index.read_text())
    assert document["rules"] == {"name": "step_{}", "keep": {"last": 2, "best": 1, "metric": "loss", "mode": "max"}}
    index.unlink()
    assert "does not specify which metric to use" in run("inspect", f"{tmp_path}/run@best").err
    assert run.document("inspect", f"{tmp_path}/run@latest")["path"] == str(tmp_path / "run/step_5")


@pytest.mark.parametrize("words", [["stats", "{}@2"], ["diff", "{}@1", "{}@2"]])
def test_a_step_is_held_while_a_command_reads_it(tmp_path: Path, words: list[str]) -> None:
    """The command cannot end before its output is read, which is more than a pipe holds."""
    path, control = tmp_path / "run", Control(location(tmp_path / "run"))
    with shardkeep.Run(path, keep=None) as writer:
        for step in (1, 2):
            writer.save(step, {f"a leaf with a long name {i:05d}": np.full(1, step) for i in range(2000)})
    command = [sys.executable, "-m", "shardkeep", *(word.format(path) for word in words)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        until = time.monotonic() + 100
        while "step_2" not in control.held_steps() and time.monotonic() < until:
            time.sleep(0.05)
        held = control.held_steps()
        process.communicate(timeout=100)
    assert held == {f"step_{word[-1]}" for word in words[1:]}
    assert control.held_steps() == set()


def test_a_step_that_cannot_be_held_is_read_all_the_same(exp: Path, tmp_path: Path) -> None:
    shutil.copytree(exp, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/.shardkeep-run")
    with Selection().held(f"{tmp_path}/run@4") as path:
        assert path == str(tmp_path / "run/step_4")
    assert not (tmp_path / "run/.shardkeep-run").exists(), "no Run has written to this directory"
    shutil.copytree(exp / ".shardkeep-run", tmp_path / "run/.shardkeep-run")
    (tmp_path / "run/.shardkeep-run/holds").rmdir() if (tmp_path / "run/.shardkeep-run/holds").exists() else None
    (tmp_path / "run/.shardkeep-run/holds").write_text("a file where a directory is needed")
    with Selection().held(f"{tmp_path}/run@4") as path:
        assert path == str(tmp_path / "run/step_4")
