"""Runs on the command line: `ls RUN`, `pin`, `unpin`, `save-now`, and what `clean` leaves alone."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from cli.commands import Run, leave_dead_save
from runs.runs import ONE, damage, data_file, new_state, numbers, state_of, trained
from shardkeep import Keep
from shardkeep.cli.output import human
from shardkeep.runs import writing
from shardkeep.runs.control import INDEX
from shardkeep.runs.viewing import RunView

KEEP = Keep(last=2, every=4, best=1, metric="loss", mode="max")


def rows(run: Run, path: Path) -> dict[int, dict[str, Any]]:
    return {one["step"]: one for one in run.document("ls", path)["steps"]}


def test_ls_shows_the_steps_of_a_run_and_why_each_is_kept(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "run", range(1, 8), keep=KEEP)
    shown = rows(run, tmp_path / "run")
    assert {step: one["kept"] for step, one in shown.items()} == {
        1: ["best"],
        4: ["every"],
        6: ["last"],
        7: ["newest", "last"],
    }
    assert shown[4]["path"] == str(tmp_path / "run/step_4")
    assert shown[4]["metrics"] == {"loss": 0.25}
    assert shown[4]["array_bytes"] == shardkeep.inspect(tmp_path / "run/step_4").nbytes
    assert {one["state"] for one in shown.values()} == {"complete"}
    document = run.document("ls", tmp_path / "run")
    assert document["checkpoints"] == []
    assert document["run"]["writer"] is None
    assert document["run"]["rules"]["keep"]["every"] == 4
    lines = run("ls", tmp_path / "run").out.splitlines()
    assert lines[0].split() == ["STEP", "AGE", "SIZE", "STATE", "METRICS", "KEPT"]
    assert lines[2].split()[-2:] == ["loss=0.25", "every"]
    assert len(lines) == 5


def test_a_size_is_that_of_the_files_in_a_run_as_elsewhere(run: Run, tmp_path: Path) -> None:
    """Also if it comes from the index, and not from the manifest of the step."""
    trained(tmp_path / "run", [1])
    step = tmp_path / "run/step_1"
    size = sum(file.stat().st_size for file in step.glob("*.safetensors"))
    assert size > shardkeep.inspect(step).nbytes
    assert rows(run, tmp_path / "run")[1]["stored_bytes"] == size
    assert run.document("ls", step)["checkpoints"][0]["stored_bytes"] == size
    shown = [run("ls", path).out.splitlines()[1].split(f" {human(size)} ") for path in (tmp_path / "run", step)]
    assert [len(parts) for parts in shown] == [2, 2]
    (indexed,) = json.loads((tmp_path / "run" / INDEX).read_text())["steps"].values()
    assert indexed["stored_bytes"] == size
    assert shardkeep.Run(tmp_path / "run").steps()[0].stored_bytes == size


def test_ls_shows_damaged_abandoned_pinned_and_held_steps(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2, 3, 4, 5, 6])
    damage(tmp_path / "run", 6)
    with shardkeep.Run(tmp_path / "run", keep=None) as opened:
        assert opened.resume(new_state, shardings=ONE)[1] == 5
        assert opened.resume(new_state, shardings=ONE, step=4)[1] == 4
    opened.pin(2)
    os.truncate(data_file(tmp_path / "run", 3), 10)
    with opened.hold(1):
        shown = rows(run, tmp_path / "run")
        text = run("ls", tmp_path / "run").out
    assert {step: one["state"] for step, one in shown.items()} == {
        1: "complete",
        2: "complete",
        3: "damaged",
        4: "complete",
        5: "abandoned",
        6: "damaged",
    }
    assert "held" in shown[1]["kept"]
    assert "pinned" in shown[2]["kept"]
    assert shown[5]["kept"] == shown[6]["kept"] == []
    assert "instead of" in shown[3]["problem"]
    assert "does not match its digest" in shown[6]["problem"]
    assert "\nstep 6: leaf 'w': " in text
    assert "held" not in run("ls", tmp_path / "run").out


def test_what_is_in_a_run_beside_its_steps_is_listed_after_them(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "run", [1])
    shardkeep.save(tmp_path / "run/export/model.safetensors", {"w": state_of(1)["w"]})
    leave_dead_save(tmp_path / "run/step_2")
    document = run.document("ls", tmp_path / "run")
    assert [one["name"] for one in document["checkpoints"]] == ["export/model.safetensors", "step_2"]
    assert [one["step"] for one in document["steps"]] == [1]
    assert "unfinished" in run("ls", tmp_path / "run").out
    # A directory of runs is listed as before.
    assert [one["name"] for one in run.document("ls", tmp_path)["checkpoints"]] == [
        "run/export/model.safetensors",
        "run/step_1",
        "run/step_2",
    ]


def test_a_step_that_is_deleted_while_the_run_is_listed_is_left_out(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run", [1, 2, 3])
    steps = RunView.steps

    def and_then_deleted(view: RunView) -> object:
        listed = steps(view)
        shardkeep.delete(tmp_path / "run/step_1")
        return listed

    monkeypatch.setattr(RunView, "steps", and_then_deleted)
    document = run.document("ls", tmp_path / "run")
    assert [(one["step"], one["state"]) for one in document["steps"]] == [(2, "complete"), (3, "complete")]
    assert document["checkpoints"] == []


def test_ls_of_a_run_changes_nothing(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "run", [1, 2])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    run("ls", tmp_path / "run")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_ls_names_the_writer_and_a_run_without_steps(run: Run, tmp_path: Path) -> None:
    with shardkeep.Run(tmp_path / "run") as opened:
        opened.resume(new_state, shardings=ONE)
        told = run("ls", tmp_path / "run").out
    assert told.startswith(f"no steps in {tmp_path}/run\nwritten by process {os.getpid()} on ")


def test_a_pinned_step_outlives_the_rules_until_it_is_unpinned(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with shardkeep.Run(path, save_every=1, keep=Keep(last=1)) as opened:
        state, _ = opened.resume(new_state, shardings=ONE)
        opened.save(1, state).wait()
        told = run.document("pin", f"{path}@latest")
        assert told == {"run": str(path), "step": 1, "path": f"{path}/step_1", "pinned": True}
        opened.save(2, state)
        opened.wait()
        assert numbers(opened) == [1, 2]
        assert run("unpin", f"{path}@1").out == f"unpinned  {path}/step_1: the rules of its run apply to it again\n"
        opened.save(3, state)
        opened.wait()
        assert numbers(opened) == [3]
    assert run("pin", f"{path}@3").out == f"pinned  {path}/step_3: it is kept until it is unpinned\n"


def test_pin_needs_a_step_of_a_run(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "run", [1])
    for words, said in (
        (["pin", tmp_path / "run/step_1"], "does not name a step of a run; write RUN@1000, RUN@latest or RUN@best"),
        (["pin", f"{tmp_path}/run@2"], "has no step 2; it has 1"),
        (["unpin", f"{tmp_path}/none@latest"], "there is no usable step in"),
    ):
        refused = run(*words)
        assert refused.code == 2
        assert said in refused.err
    assert not (tmp_path / "none").exists()


def test_save_now_makes_the_writer_save(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is gone when the save is committed. The writer looks for it more often here than it usually does."""
    monkeypatch.setattr(writing, "POLL", 0.05)
    path, step = tmp_path / "run", 0
    with shardkeep.Run(path) as opened:
        state, _ = opened.resume(new_state, shardings=ONE)
        asked = run("save-now", path)
        assert asked.code == 0
        assert f"requested a save of {path} from process {os.getpid()} on " in asked.out
        assert "it checks for requests every 10 s and saves at one of its next steps" in asked.out
        saved, until = None, time.monotonic() + 60
        while saved is None and time.monotonic() < until:
            step += 1
            saved = opened.step(step, state)
            time.sleep(0.01)
        assert saved is not None
        opened.wait()
        assert numbers(opened) == [step]
        assert list((path / ".shardkeep-run").glob("requests/*")) == []
        document = run.document("save-now", path)
        assert (path / document["request"]).exists()
        assert document["seconds"] == 10


def test_save_now_is_refused_where_nobody_would_save(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "run", [1])
    refused = run("save-now", tmp_path / "run")
    assert refused.code == 2
    assert "no program is writing to the run" in refused.err
    assert list((tmp_path / "run/.shardkeep-run").glob("requests/*")) == []
    for path in (tmp_path, tmp_path / "none"):
        assert "is not a run: no shardkeep.Run has written to it" in run("save-now", path).err


def test_clean_leaves_pinned_and_held_steps_and_the_control_directory_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    opened = trained(path, [1, 2, 3])
    opened.pin(1)
    left = [leave_dead_save(path / f"step_{step}") for step in (1, 2, 3, 4)]
    control = {file: file.read_bytes() for file in (path / ".shardkeep-run").rglob("*") if file.is_file()}
    assert len(control) >= 2
    with opened.hold(2):
        done = run("clean", path, "--yes")
    assert done.code == 1
    assert "step_1: not cleaned up: the step is pinned; unpin it first" in done.out
    assert "step_2: not cleaned up: a reader holds the step; try again when it has finished" in done.out
    assert [file.exists() for file in left] == [True, True, False, False]
    now = {file: file.read_bytes() for file in (path / ".shardkeep-run").rglob("*") if file.is_file()}
    assert now == control
    run("unpin", f"{path}@1")
    assert run("clean", path, "--yes").code == 0
    assert [file.exists() for file in left] == [False] * 4
    assert run("verify", path).code == 0
    assert numbers(opened) == [1, 2, 3]


def test_clean_of_the_step_itself_respects_pins_too(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "run", [1]).pin(1)
    left = leave_dead_save(tmp_path / "run/step_1")
    told = run.document("clean", tmp_path / "run/step_1", "--yes")
    assert told["left_over"][0]["problem"] == "the step is pinned; unpin it first"
    assert left.exists()


def test_metrics_that_are_no_json_numbers_are_strings(run: Run, tmp_path: Path) -> None:
    trained(tmp_path / "run", [1]).record(1, {"loss": float("nan"), "best": float("inf")})
    assert rows(run, tmp_path / "run")[1]["metrics"] == {"loss": "nan", "best": "inf"}


def test_what_a_run_notes_about_a_step_is_neither_shown_nor_exported(run: Run, tmp_path: Path) -> None:
    """It stays in the checkpoint, and in copies of it that can be steps themselves."""
    with shardkeep.Run(tmp_path / "run", metadata={"commit": "abc"}) as opened:
        opened.resume(new_state, shardings=ONE)
        opened.save(1, state_of(1), metrics={"loss": 0.5})
    step, file, copy = tmp_path / "run/step_1", tmp_path / "model.safetensors", tmp_path / "copies/step_1"
    for destination in (file, copy):
        assert run("convert", step, destination).code == 0
    for path in (step, file, copy):
        shown = run("inspect", path).out
        assert "shardkeep_run" not in shown
        assert 'commit: "abc"' in shown
        assert run.document("inspect", path)["trees"][0]["metadata"] == {"commit": "abc"}
        manifest = shardkeep.inspect(path)
        assert manifest.metadata == {"commit": "abc"}
        assert "shardkeep_run" not in manifest._repr_html_()
    assert b"shardkeep_run" not in file.read_bytes()
    assert shardkeep.inspect(step).tree().metadata["shardkeep_run"]["metrics"] == {"loss": 0.5}
    assert shardkeep.Run(tmp_path / "copies").steps()[0].metrics == {"loss": 0.5}
