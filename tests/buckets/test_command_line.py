"""Every command works on buckets as it does on a disk."""

import time
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Place
from cli.commands import DEAD, Run
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
