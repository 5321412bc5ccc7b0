"""Every command works on buckets as it does on a disk."""

import time
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Place
from cli.commands import DEAD, Run
from shardkeep.runs.control import Control
from shardkeep.stores.location import location, store_at
from support import assert_same, pattern, record


def test_every_command_takes_a_bucket(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(capsys)
    url = place.url
    tree = {"layer": {"w": pattern(np.float32, (64, 32)), "b": np.zeros(3, np.float32)}, "step": 3}
    shardkeep.save(f"{url}/run/step_1", tree)
    shardkeep.save(f"{url}/run/step_2", {**tree, "step": 4}, format="zarr")
    shardkeep.save(f"{url}/out/m.safetensors", tree["layer"])

    listed = run.document("ls", url)["checkpoints"]
    assert [(each["name"], each["state"]) for each in listed] == [
        ("out/m.safetensors", "complete"),
        ("run/step_1", "complete"),
        ("run/step_2", "complete"),
    ]
    assert "step_2" in run("ls", f"{url}/run").out
    assert run("ls", f"{place.scheme}://bucket").code == 0
    assert "float32[64,32]" in run("inspect", f"{url}/run/step_1").out
    assert run("verify", f"{url}/run/step_2").code == 0
    assert [each["ok"] for each in run.document("verify", f"{url}/run")] == [True, True]
    assert run("diff", f"{url}/run/step_1", f"{url}/run/step_2").code == 1
    assert "all zero" in run("stats", f"{url}/out/m.safetensors").out
    assert run("convert", f"{url}/run/step_1", tmp_path / "here", "--format", "zarr").code == 0
    assert_same(shardkeep.load(tmp_path / "here"), tree)
    assert run("convert", tmp_path / "here", f"{url}/back").code == 0
    assert_same(shardkeep.load(f"{url}/back"), tree)

    store = store_at(location(f"{url}/run/step_1"))
    with store.lock(5):
        record(store, DEAD, ["dead.safetensors"]).release()
        store.write_new("dead.safetensors", 3, [memoryview(b"abc")])
    assert run("clean", url, "--yes").code == 0
    assert "run/step_1/dead.safetensors" in place.names(), "its save may be alive"
    monkeypatch.setenv("SHARDKEEP_LEASE", "1.0")
    time.sleep(2.5)  # the server counts whole seconds
    assert "dead.safetensors" in run("clean", url, "--yes").out
    assert "run/step_1/dead.safetensors" not in place.names()
    assert_same(shardkeep.load(f"{url}/run/step_1"), tree)


def test_the_command_line_knows_runs_in_a_bucket(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, url = Run(capsys), f"{place.url}/exp"
    keep = shardkeep.Keep(last=1, best=1, metric="loss", mode="min")
    with shardkeep.Run(url, keep=keep) as writer:
        writer.resume({"n": 0})
        for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
            writer.save(step, {"n": step, "w": np.full(8, step)}, metrics={"loss": loss}).wait()
        writer.wait()
        assert run("save-now", url).code == 0
        assert len(Control(location(url)).requests()) == 1
    listed = run.document("ls", url)["steps"]
    assert [(each["step"], each["kept"]) for each in listed] == [(20, ["best"]), (30, ["newest", "last"])]
    assert run.document("inspect", f"{url}@latest")["path"] == f"{url}/step_30"
    assert run.document("stats", f"{url}@best")["leaves"][0]["max"] == 20
    assert run("verify", f"{url}@20").code == 0
    assert run("diff", f"{url}@best", f"{url}@latest").code == 1
    assert run("convert", f"{url}@best", tmp_path / "best").code == 0
    assert shardkeep.load(tmp_path / "best")["n"] == 20
    assert run("pin", f"{url}@20").code == 0
    assert "pinned" in run("ls", url).out
    assert run("clean", url, "--yes").code == 0
    assert run("unpin", f"{url}@20").code == 0
    refused = run("save-now", url)
    assert refused.code == 2
    assert "no program is writing to the run" in refused.err
    assert not [name for name in place.names("exp/.shardkeep-run") if "/holds/" in name]
    assert [step.number for step in shardkeep.Run(url).steps()] == [20, 30]
