"""What must work on every system. `python core.py DIRECTORY` runs it; test_portable.py does so on simulated systems."""

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from portable import elsewhere
from shardkeep import system
from shardkeep.cli.main import main
from shardkeep.stores.local.mounts import mount_of
from support import assert_same
from test_golden import EXPECTED, GOLDEN, golden

CASES: dict[str, Callable[[Path], None]] = {}
DYING = 9  # the exit code of a save that was ended


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[function.__name__] = function
    return function


def a_tree(number: int = 0) -> dict[str, Any]:
    return {
        "layers": [{"w": jnp.full((64, 3), number, jnp.bfloat16), "b": np.arange(5.0) + number} for _ in range(3)],
        "big": jnp.arange(1_000_000, dtype=jnp.float32) + number,
        "aux": np.int64(number),
        "Config.json": jnp.ones(2),
        "key": jax.random.key(number),
        "empty": jnp.zeros((0, 4)),
        "step": number,
        "name": "text",
    }


WAYS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "zarr": {"format": "zarr"},
    "zstd": {"format": "zarr", "compression": "zstd"},
    "model.safetensors": {},
}


@case
def what_the_other_system_lacks_is_not_there(place: Path) -> None:
    """Without this, the cases below would prove nothing."""
    with pytest.raises(FileNotFoundError):
        Path("/proc/self/mounts").read_text()
    assert mount_of(str(place)).kind == ""
    assert system.c_function("syncfs") is None
    assert system.HUGEPAGE is None
    assert (system.preadv.__module__, system.pwritev.__module__) == ("shardkeep.system",) * 2
    assert system.assumed_memory() > 0
    if system.HAS_LOCKS:
        assert system.HAS_FULL_SYNC
        return
    with pytest.raises(ModuleNotFoundError, match="fcntl"):
        importlib.import_module("fcntl")
    assert system.pread.__module__ == "shardkeep.system"
    (place / "open").touch()
    with open(place / "open"):
        with pytest.raises(PermissionError):
            os.unlink(place / "open")
        with pytest.raises(PermissionError):
            os.replace(place / "open", place / "other")
    with pytest.raises(PermissionError):
        os.open(place, os.O_RDONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        (place / "aux").mkdir()


@case
def every_format_comes_back_and_can_be_replaced(place: Path) -> None:
    for name, way in WAYS.items():
        tree = a_tree() if not name.endswith(".safetensors") else {"big": a_tree()["big"], "b": jnp.ones(3)}
        for overwrite in (False, True, True):
            shardkeep.save(place / name, tree, overwrite=overwrite, **way)
            assert_same(shardkeep.load(place / name), tree)
            assert shardkeep.verify(place / name).ok
    pending = shardkeep.save_async(place / "later", a_tree(3))
    pending.wait()
    assert_same(shardkeep.load(place / "later"), a_tree(3))
    assert not list(place.rglob("*.tmp"))


@case
def golden_files_load(place: Path) -> None:
    for version, trees in EXPECTED.items():
        for name, expected in trees.items():
            path, _, prefix = name.partition("#")
            tree = shardkeep.load(GOLDEN / version / path, prefix=prefix or None, per_process="all")
            assert golden.expected(tree) == expected, name
            assert shardkeep.verify(GOLDEN / version / path, prefix=prefix or None).ok


@case
def checkpoints_are_listed_inspected_and_deleted(place: Path) -> None:
    for step in (1, 2, 10):
        shardkeep.save(place / f"step_{step}", a_tree(step), format="zarr")
    latest = shardkeep.latest(place)
    assert latest is not None
    assert Path(str(latest)).name == "step_10"
    assert shardkeep.inspect(place / "step_2").tree().leaves
    shardkeep.delete(place / "step_2")
    assert not shardkeep.exists(place / "step_2")
    for command in (["inspect", "step_1"], ["verify", "step_1"], ["ls", "."], ["diff", "step_1", "step_10"]):
        code = main([command[0], *(str(place / name) for name in command[1:])])
        assert code in (0, 1), command


@case
def damage_is_found(place: Path) -> None:
    shardkeep.save(place / "c", a_tree())
    file = max((path for path in (place / "c").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert not shardkeep.verify(place / "c").ok
    assert main(["verify", str(place / "c")]) == 1
    with pytest.raises(shardkeep.IntegrityError, match="does not match its digest"):
        shardkeep.load(place / "c")


@case
def one_format_is_converted_into_another(place: Path) -> None:
    tree = {"layers": {"w": jnp.arange(3000, dtype=jnp.bfloat16).reshape(30, 100), "b": jnp.ones(7)}}
    shardkeep.save(place / "a", tree)
    for name, options in {"z": ["--format", "zarr"], "x.safetensors": [], "c": ["--dtype", "float32"]}.items():
        assert main(["convert", str(place / "a"), str(place / name), *options]) == 0
        assert shardkeep.verify(place / name).ok
    assert_same(shardkeep.load(place / "z"), tree)


@case
def a_run_saves_and_resumes(place: Path) -> None:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for session in range(2):
        with shardkeep.Run(place, save_every=2, keep=shardkeep.Keep(last=2)) as run:
            state, step = run.resume(lambda: {"w": jnp.zeros(300_000)}, shardings=one)
            assert step == 5 * session
            assert float(state["w"][0]) == step
            for _ in range(5):
                state, step = {"w": state["w"] + 1}, step + 1
                run.step(step, state)
            run.save(step, state)
    with shardkeep.Run(place, keep=shardkeep.Keep(last=2)) as run:
        assert [step.number for step in run.steps()] == [8, 10]


@case
def a_save_that_dies_changes_nothing_before_its_commit(place: Path) -> None:
    os.environ["SHARDKEEP_LEASE"] = "1"
    dying: dict[int, subprocess.Popen[bytes]] = {}
    for committed, when in ((1, "before"), (2, "after")):
        shardkeep.save(place / when, a_tree(1))
        dying[committed] = subprocess.Popen([sys.executable, __file__, "die", str(place / when), when])
    for committed, program in dying.items():
        assert program.wait(timeout=100) == DYING
        path = place / str(program.args[-1])  # type: ignore[index]
        assert_same(shardkeep.load(path), a_tree(committed))
        time.sleep(0 if system.HAS_LOCKS else 1.1)  # then a lease tells who is alive
        shardkeep.save(path, a_tree(3), overwrite=True)
        assert_same(shardkeep.load(path), a_tree(3))
        assert len(list(path.glob("*.safetensors"))) == 1
        assert not list((path / ".shardkeep" / "saves").iterdir())


def die(path: str, when: str) -> None:
    """Save, and end just before or just after the manifest is replaced."""
    plain = os.replace

    def replace(old: str, new: str) -> None:
        if new.endswith("manifest.json"):
            if when == "after":
                plain(old, new)
            os._exit(DYING)
        plain(old, new)

    os.replace = replace
    shardkeep.save(path, a_tree(2), overwrite=True)


@case
def a_commit_that_the_system_refuses_changes_nothing(place: Path) -> None:
    """Windows does not replace a file that is open."""
    shardkeep.save(place / "c", a_tree(1))
    with open(place / "c" / "manifest.json"):
        if system.HAS_LOCKS:
            shardkeep.save(place / "c", a_tree(2), overwrite=True)
        else:
            with pytest.raises(shardkeep.StorageError, match="Permission denied"):
                shardkeep.save(place / "c", a_tree(2), overwrite=True)
    assert_same(shardkeep.load(place / "c"), a_tree(2 if system.HAS_LOCKS else 1))
    shardkeep.save(place / "c", a_tree(3), overwrite=True)
    assert len(list((place / "c").glob("*.safetensors"))) == 1


@case
def the_cache_of_the_drive_is_emptied_before_the_commit(place: Path) -> None:
    if not system.HAS_FULL_SYNC:
        return
    shardkeep.save(place / "c", a_tree(), format="zarr")
    elsewhere.log.clear()
    shardkeep.save(place / "c", a_tree(), format="zarr", overwrite=True)
    root, synced = str(place / "c"), list(elsewhere.log)
    commit = synced.index(("replace", f"{root}/manifest.json"))
    manifest = max(i for i, (_, path) in enumerate(synced[:commit]) if path.startswith(f"{root}/manifest.json."))
    assert synced[manifest][0] == "full sync"
    data = {str(path) for path in (place / "c").glob("~*/**/*") if path.is_file() and path.name != ".zgroup"}
    assert data
    assert data <= {path for what, path in synced[:manifest] if what == "sync"}
    last = max(i for i, (what, path) in enumerate(synced[:manifest]) if what == "sync" and path in data)
    assert any(what == "full sync" for what, _ in synced[last:manifest])
    assert ("full sync", root) in synced[commit:]


@case
def names_that_differ_by_case_do_not_meet(place: Path) -> None:
    elsewhere.ignore_case(str(place))
    (place / "Probe").touch()
    assert (place / "pROBE").exists()
    tree = {
        "a": jnp.ones(3),
        "A": jnp.zeros(4),
        "x": {"B": jnp.ones(2), "b": jnp.ones(5)},
        "Manifest.json": jnp.ones(1),
    }
    for _ in range(3):
        shardkeep.save(place / "one", tree, format="zarr", overwrite=True)
        assert_same(shardkeep.load(place / "one"), tree)
    two = {"m": {"w": jnp.ones(3)}, "M": {"w": jnp.zeros(4)}}
    for _ in range(3):
        shardkeep.save(place / "two", trees=two, tree=None, format="zarr", overwrite=True)
        for prefix, expected in two.items():
            assert_same(shardkeep.load(place / "two", prefix=prefix), expected)
            assert shardkeep.verify(place / "two", prefix=prefix).ok
    shardkeep.delete(place / "two")
    assert not (place / "two").exists()


def run(directory: Path) -> None:
    """Run all cases, and write what came of each to results.json: nothing, or the traceback of an error."""
    results = dict.fromkeys(CASES, "")
    for name, function in CASES.items():
        (directory / name).mkdir()
        try:
            function(directory / name)
        except Exception:  # noqa: BLE001  (it is the result)
            results[name] = traceback.format_exc()
    (directory / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[1] == "die":
        die(*sys.argv[2:])
    else:
        run(Path(sys.argv[1]))
