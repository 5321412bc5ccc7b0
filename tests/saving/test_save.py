"""save and save_async: what is saved is what was there at the call; what cannot be saved is told before anything."""

import asyncio
import gc
import logging
import os
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from faults.spawner import Fault, Spawner
from faults.states import make, same
from shardkeep.runtime import progress
from support import FORMATS, assert_same, mesh_of, run_python, save_as

SAVES = {"save": shardkeep.save, "save_async": lambda *a, **k: shardkeep.save_async(*a, **k).wait()}
KINDS = list(FORMATS)


def _start(kind: str, path: Path, tree: Any) -> tuple[Path, shardkeep.PendingSave]:
    ending, arguments = FORMATS[kind]
    target = path.with_name(path.name + ending)
    return target, shardkeep.save_async(target, tree, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_donated_right_after_the_call_is_saved_as_it_was(tmp_path: Path, kind: str) -> None:
    step = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    state = jax.device_put(
        jnp.arange(1 << 19, dtype=jnp.float32).reshape(512, 1024), NamedSharding(mesh_of(8), PartitionSpec("a"))
    )
    pending, expected = [], []
    for number in range(4):
        expected.append(np.array(state))
        pending.append(_start(kind, tmp_path / str(number), {"w": state}))
        for _ in range(3):
            state = step(state)
    for (path, handle), array in zip(pending, expected, strict=True):
        handle.wait()
        assert np.array_equal(np.asarray(shardkeep.load(path)["w"]), array)


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_deleted_right_after_the_call_is_saved(tmp_path: Path, kind: str) -> None:
    array = jnp.arange(100_000, dtype=jnp.float32)
    expected = np.array(array)
    path, pending = _start(kind, tmp_path / "run", {"w": array})
    array.delete()
    pending.wait()
    assert np.array_equal(np.asarray(shardkeep.load(path)["w"]), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["C", "F", "strided", "swapped", "0-d"])
def test_a_numpy_array_changed_right_after_the_call_is_saved_as_it_was(tmp_path: Path, kind: str, layout: str) -> None:
    plain = np.arange(300_000, dtype=np.float32).reshape(500, 600)
    array = {
        "C": plain,
        "F": np.asfortranarray(plain),
        "strided": np.repeat(plain, 2, axis=1)[:, ::2],
        "swapped": plain.astype(">f4"),
        "0-d": np.array(7, np.int32),
    }[layout]
    expected = array.copy()
    path, pending = _start(kind, tmp_path / "run", {"w": array, "again": array})
    array[...] = 0
    pending.wait()
    loaded = shardkeep.load(path)
    for name in ("w", "again"):
        assert loaded[name].dtype == expected.dtype
        assert np.array_equal(loaded[name], expected)


def test_a_tree_changed_right_after_the_call_is_saved_as_it_was(tmp_path: Path) -> None:
    tree = {"layers": [{"w": np.ones(3)}], "step": 1}
    pending = shardkeep.save_async(tmp_path / "run", tree)
    tree["step"] = 2
    tree["layers"].append({"w": np.zeros(4)})  # type: ignore[attr-defined]
    pending.wait()
    assert_same(shardkeep.load(tmp_path / "run"), {"layers": [{"w": np.ones(3)}], "step": 1})


def test_metadata_is_copied_at_the_call(tmp_path: Path) -> None:
    metadata = {"loss": [1.5], "run": {"name": "a"}}
    pending = shardkeep.save_async(tmp_path / "run", {"w": np.ones(3)}, metadata=metadata)
    metadata["loss"].append(2.5)  # type: ignore[attr-defined]
    metadata["run"]["name"] = "b"  # type: ignore[index]
    pending.wait()
    assert shardkeep.inspect(tmp_path / "run").metadata == {"loss": [1.5], "run": {"name": "a"}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_numpy_array_changed_while_save_runs_still_loads(tmp_path: Path, kind: str) -> None:
    """A blocking save reads arrays while it writes: bytes and digest come from one copy, so they agree."""
    array = np.zeros(6 << 20, np.uint8)
    done = threading.Event()

    def scribble() -> None:
        while not done.is_set():
            array[:] = array + 1

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        paths = [save_as(kind, tmp_path / str(i), {"w": array}) for i in range(3)]
    finally:
        done.set()
        thread.join()
    for path in paths:
        assert shardkeep.load(path)["w"].shape == array.shape
        assert shardkeep.verify(path).ok


@pytest.mark.parametrize("how", SAVES)
class TestRefusals:
    """Each is typed, names the place, and happens before anything is written."""

    @pytest.mark.parametrize(
        ("leaf", "message"),
        [
            (object(), r"layers/1/w: an object is neither"),
            (lambda x: x, r"layers/1/w: a function"),
            (np.ma.masked_array([1, 2], [True, False]), r"layers/1/w: a MaskedArray"),
            (np.array([{}, None]), r"layers/1/w: NumPy dtype object"),
            (np.array(["a", "b"]), r"layers/1/w: NumPy dtype <U1"),
            (np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]), r"layers/1/w: NumPy dtype"),
            (np.longdouble(1) * np.ones(2, np.longdouble), r"layers/1/w: NumPy dtype"),
            (jax.ShapeDtypeStruct((2,), jnp.float32), r"layers/1/w: an abstract array"),
            ({1, 2}, r"layers/1/w: a set is neither"),
            (open, r"layers/1/w: a function"),
            (..., r"layers/1/w: ... marks a leaf that is not loaded"),
        ],
    )
    def test_a_leaf_that_is_no_data_is_named(self, tmp_path: Path, how: str, leaf: Any, message: str) -> None:
        tree = {"layers": [{"w": np.ones(3)}, {"w": leaf}]}
        with pytest.raises(shardkeep.UnsupportedLeafError, match=message):
            SAVES[how](tmp_path / "run", tree)
        assert os.listdir(tmp_path) == []

    def test_every_bad_leaf_is_listed(self, tmp_path: Path, how: str) -> None:
        tree = {f"f{i}": print for i in range(12)}
        with pytest.raises(shardkeep.UnsupportedLeafError, match=r"12 leaves cannot be saved(.|\n)*f0(.|\n)*2 more"):
            SAVES[how](tmp_path / "run", tree)

    def test_a_value_inside_jit_is_named(self, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
        @jax.jit
        def step(x: Any) -> Any:
            SAVES[how](tmp_path / "run", {"x": x})
            return x

        with pytest.raises(shardkeep.UnsupportedLeafError, match="x: a traced value inside jit"):
            step(jnp.ones(3))
        assert caplog.messages == []
        assert os.listdir(tmp_path) == []

    def test_a_deleted_array_is_named(self, tmp_path: Path, how: str) -> None:
        array = jnp.ones(3)
        array.delete()
        with pytest.raises(shardkeep.UnsupportedLeafError, match="gone: the array has been deleted"):
            SAVES[how](tmp_path / "run", {"gone": array})
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"a": {"b": [1, object()]}}, r"metadata\['a'\]\['b'\]\[1\] is an object"),
            ({"a": jnp.ones(2)}, r"metadata\['a'\] is a"),
            ({"a": {(1,): 2}}, r"metadata\['a'\] has the key \(1,\)"),
            ({"a": {1, 2}}, r"metadata\['a'\] is a set"),
            ({"a": b"x"}, r"metadata\['a'\] is bytes"),
            ([1, 2], "metadata must be a dict"),
            ("text", "metadata must be a dict"),
        ],
    )
    def test_metadata_without_a_json_form_is_named(self, tmp_path: Path, how: str, metadata: Any, message: str) -> None:
        with pytest.raises(shardkeep.MetadataError, match=message):
            SAVES[how](tmp_path / "run", {"w": np.ones(3)}, metadata=metadata)
        assert os.listdir(tmp_path) == []

    def test_metadata_that_contains_itself_is_refused(self, tmp_path: Path, how: str) -> None:
        loop: dict[str, Any] = {}
        loop["self"] = loop
        with pytest.raises(shardkeep.MetadataError, match="contains itself"):
            SAVES[how](tmp_path / "run", {"w": np.ones(3)}, metadata=loop)

    @pytest.mark.parametrize(
        "prefix", ["../x", "/x", "a//b", "a/../b", ".", "..", "a.", ".a", "a\nb", "a\0b", "~x", 5, "x" * 600]
    )
    def test_a_bad_prefix_is_refused(self, tmp_path: Path, how: str, prefix: Any) -> None:
        with pytest.raises(shardkeep.PrefixError, match="prefix"):
            SAVES[how](tmp_path / "run", {"w": np.ones(3)}, prefix=prefix)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        ("name", "arguments", "message"),
        [
            ("run", {"format": "hdf5"}, "format must be"),
            ("run", {"format": None}, "format must be"),
            ("run", {"compression": "gzip", "format": "zarr"}, "compression must be"),
            ("run", {"compression": "zstd"}, "no compression"),
            ("run", {"max_shard_size": 5}, "max_shard_size is only for exchange files"),
            ("m.safetensors", {"max_shard_size": 0}, "must be positive"),
            ("m.safetensors", {"max_shard_size": -5}, "must be positive"),
            ("m.safetensors", {"max_shard_size": "5 parsec"}, "not a size"),
            ("m.safetensors", {"max_shard_size": ""}, "not a size"),
            ("m.safetensors", {"format": "zarr"}, "needs format='safetensors'"),
            ("m.safetensors", {"compression": "zstd"}, "no compression"),
            ("", {}, "directory|path"),
        ],
    )
    def test_arguments_that_do_not_fit_are_refused(
        self, tmp_path: Path, how: str, name: str, arguments: Any, message: str
    ) -> None:
        if not name:
            with pytest.raises(ValueError, match="not a path"):
                SAVES[how]("", {"w": np.ones(3)})
            return
        with pytest.raises(ValueError, match=message):
            SAVES[how](tmp_path / name, {"w": np.ones(3)}, **arguments)
        assert os.listdir(tmp_path) == []

    def test_two_leaves_of_one_exchange_name_are_refused(self, tmp_path: Path, how: str) -> None:
        with pytest.raises(shardkeep.KeyCollisionError, match=r"'a\.b'"):
            SAVES[how](tmp_path / "m.safetensors", {"a.b": np.ones(3), "a": {"b": np.ones(3)}})
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_existing_tree_is_not_overwritten_unasked(self, tmp_path: Path, how: str, kind: str) -> None:
        ending, arguments = FORMATS[kind]
        path = tmp_path / ("run" + ending)
        SAVES[how](path, {"w": np.ones(3)}, **arguments)
        with pytest.raises(shardkeep.CheckpointExistsError, match="overwrite=True"):
            SAVES[how](path, {"w": np.zeros(3)}, **arguments)
        assert_same(shardkeep.load(path), {"w": np.ones(3)})
        SAVES[how](path, {"w": np.zeros(3)}, overwrite=True, **arguments)
        assert_same(shardkeep.load(path), {"w": np.zeros(3)})

    def test_a_path_that_is_a_file_is_refused(self, tmp_path: Path, how: str) -> None:
        (tmp_path / "file").write_text("precious")
        for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "file" / "m.safetensors"):
            with pytest.raises(shardkeep.NotADirectoryPathError, match="file"):
                SAVES[how](path, {"w": np.ones(3)})
        assert (tmp_path / "file").read_text() == "precious"

    def test_a_tree_that_contains_itself_is_refused(self, tmp_path: Path, how: str) -> None:
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(shardkeep.TreeError, match="nested more than 150 levels deep, or contains itself"):
            SAVES[how](tmp_path / "run", loop)
        assert os.listdir(tmp_path) == []

    def test_a_dict_key_that_has_no_stored_form_is_named(self, tmp_path: Path, how: str) -> None:
        with pytest.raises(shardkeep.TreeError, match="dict key"):
            SAVES[how](tmp_path / "run", {object(): np.ones(3)})
        assert os.listdir(tmp_path) == []


def test_save_async_refuses_an_existing_tree_at_the_call(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)})
    with pytest.raises(shardkeep.CheckpointExistsError, match="already"):
        shardkeep.save_async(tmp_path / "run", {"w": np.zeros(3)})


def test_a_failed_first_save_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path) -> None:
    with Spawner() as spawner:
        outcome = spawner.run(
            "save", Fault(str(tmp_path), "fail", 3, calls="write"), path=str(tmp_path / "run"), kind="plain", number=1
        )
    assert outcome.error == "StorageError"
    assert not shardkeep.exists(tmp_path / "run")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint"):
        shardkeep.load(tmp_path / "run")
    assert not (tmp_path / "run").exists() or os.listdir(tmp_path / "run") == []


def test_a_report_tells_bytes_files_and_phases(tmp_path: Path) -> None:
    tree = {"w": np.ones((256, 1024)), "b": np.ones(10)}
    report = shardkeep.save(tmp_path / "run", tree)
    files = list((tmp_path / "run").rglob("*.safetensors"))
    assert report.path == str(tmp_path / "run")
    assert report.files == len(files)
    assert report.nbytes == sum(p.stat().st_size for p in files)
    assert set(report.phases) == {"snapshot", "write", "sync", "commit"}
    assert abs(sum(report.phases.values()) - report.seconds) < 0.05
    assert re.search(r"\([\d.]+ [GMk]B/s; snapshot", str(report))


def test_saving_works_in_a_thread(tmp_path: Path) -> None:
    def work() -> None:
        shardkeep.save(tmp_path / "a", make("sharded", 1))
        shardkeep.save_async(tmp_path / "b", make("sharded", 2)).wait()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert same(shardkeep.load(tmp_path / "a")["step"], 1)
    assert same(shardkeep.load(tmp_path / "b")["step"], 2)


def test_saving_and_loading_work_inside_a_running_event_loop(tmp_path: Path) -> None:
    """As in Jupyter and in servers."""

    async def main() -> Any:
        shardkeep.save(tmp_path / "a", {"w": np.ones(3)})
        pending = shardkeep.save_async(tmp_path / "b", {"w": jnp.ones(3)})
        await asyncio.to_thread(pending.wait)
        shardkeep.save(tmp_path / "c.safetensors", {"w": np.ones(3)})
        return [shardkeep.load(tmp_path / name)["w"].sum() for name in ("a", "b", "c.safetensors")]

    assert asyncio.run(main()) == [3, 3, 3]


def test_saving_works_in_a_spawned_child(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, sys\n"
        "import numpy as np, jax.numpy as jnp, shardkeep\n"
        "def work(path):\n"
        "    shardkeep.save_async(path + '/child', {'w': jnp.arange(5.0)})\n"
        "    shardkeep.save(path + '/sync', {'w': np.arange(5.0)})\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    child = context.Process(target=work, args=(sys.argv[1],))\n"
        "    child.start(); child.join(60)\n"
        "    assert child.exitcode == 0, child.exitcode\n"
    )
    run_python(
        f"import subprocess, sys; subprocess.run([sys.executable, {str(program)!r}, {str(tmp_path)!r}], check=True)"
    )
    assert shardkeep.load(tmp_path / "child")["w"].tolist() == [0, 1, 2, 3, 4]
    assert shardkeep.load(tmp_path / "sync")["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_save_in_an_atexit_handler_works(tmp_path: Path) -> None:
    run_python(
        f"import atexit; atexit.register(lambda: shardkeep.save({str(tmp_path / 'last')!r}, {{'w': np.ones(3)}}))"
    )
    assert shardkeep.load(tmp_path / "last")["w"].sum() == 3


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _ours() -> list[str]:
    """Threads of saves and loads; those for calls to other processes may be left by other tests of this process."""
    others = ("shardkeep-calls", "shardkeep-waits", "shardkeep-alive")
    return [t.name for t in threading.enumerate() if t.name.startswith("shardkeep") and t.name not in others]


def test_fifty_saves_and_loads_leak_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    tree = {"w": jnp.ones((64, 64)), "n": np.ones(2 << 17), "s": 1}
    arguments: list[Any] = [{}, {"format": "zarr"}, {"format": "zarr", "compression": "zstd"}]
    shardkeep.save(tmp_path / "run", tree)
    shardkeep.load(tmp_path / "run")
    gc.collect()
    before = _descriptors()
    for number in range(50):
        name = "m.safetensors" if number % 4 == 3 else "run"
        more = {} if number % 4 == 3 else arguments[number % 3]
        save = shardkeep.save if number % 2 else lambda *a, **k: shardkeep.save_async(*a, **k).wait()
        save(tmp_path / name, tree, overwrite=True, **more)
        shardkeep.load(tmp_path / name)
        shardkeep.verify(tmp_path / name)
    gc.collect()
    _settle()
    assert _ours() == []
    assert _descriptors() <= before


def _settle() -> None:
    """A thread that has set its event may need a moment to end."""
    deadline = time.monotonic() + 5
    while _ours() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_fifty_failing_saves_and_loads_leak_no_thread_and_no_descriptor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    tree = {"w": jnp.ones((64, 64)), "n": np.ones(2 << 17)}
    shardkeep.save(tmp_path / "run", tree)
    (tmp_path / "file").touch()
    bad = tmp_path / "damaged"
    shardkeep.save(bad, tree)
    (data,) = bad.glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    gc.collect()
    before = _descriptors()
    for number in range(50):
        with pytest.raises(shardkeep.CheckpointExistsError, match="already"):
            shardkeep.save(tmp_path / "run", tree)
        with pytest.raises(shardkeep.NotADirectoryPathError, match="file"):
            shardkeep.save_async(tmp_path / "file" / "below", tree).wait()
        with pytest.raises(shardkeep.IntegrityError, match="damaged"):
            shardkeep.load(bad, mmap=not number % 2)
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint"):
            shardkeep.load(tmp_path / "nothing")
        with pytest.raises(shardkeep.UnsupportedLeafError, match="x:"):
            shardkeep.save_async(tmp_path / "new", {"x": object(), **tree})
    gc.collect()
    _settle()
    assert _ours() == []
    assert _descriptors() <= before
    shardkeep.save(tmp_path / "run", tree, overwrite=True)


def test_saves_that_have_ended_keep_no_arrays(tmp_path: Path) -> None:
    """A disk that stays full must not fill the memory too: handles are remembered, snapshots are not."""
    printed = run_python(
        f"""
import tracemalloc, gc, pathlib
file = pathlib.Path({str(tmp_path)!r}) / "file"
file.touch()
tracemalloc.start()
handles = []
for _ in range(10):
    pending = shardkeep.save_async(file / "below", {{"w": np.ones(1 << 20)}})
    while not pending.done():
        pass
    handles.append(pending)
    handles.append(shardkeep.save_async(file.parent / "run", {{"w": np.ones(1 << 20)}}, overwrite=True))
    handles[-1].wait()
gc.collect()
print(tracemalloc.get_traced_memory()[0])
"""
    )
    assert int(printed) < 8 << 20  # less than one of the twenty snapshots


@pytest.mark.skipif(os.geteuid() != 0, reason="a limit of threads for another user needs root")
@pytest.mark.parametrize("spare", [0, 1, 2, 3])
@pytest.mark.parametrize("action", ["save", "save_async"])
def test_a_save_that_cannot_have_its_threads_stops_no_later_save(action: str, spare: int) -> None:
    """Containers limit threads: such a failure must leave no thread, no held memory and no turn that never ends."""
    with Spawner() as spawner, tempfile.TemporaryDirectory() as room:
        os.chmod(room, 0o777)
        child = spawner.start("save_with_few_threads", uid=65534, path=f"{room}/run", how=action, spare=spare)
        outcome = child.wait(20)
    assert outcome.ok, outcome
    assert outcome.value == {"threads": 1, "held": 0, "loaded": 3}


def test_a_bar_is_shown_only_when_it_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 0)
    tree = {"w": np.ones(1 << 18)}
    capfd.readouterr()
    shardkeep.save(tmp_path / "quiet", tree)
    shardkeep.save_async(tmp_path / "quiet", tree, overwrite=True).wait()
    shardkeep.load(tmp_path / "quiet")
    shardkeep.verify(tmp_path / "quiet")
    assert capfd.readouterr().err == ""
    shardkeep.save(tmp_path / "shown", tree, progress=True)
    shardkeep.save_async(tmp_path / "shown", tree, overwrite=True, progress=True).wait()
    shardkeep.load(tmp_path / "shown", progress=True)
    shardkeep.verify(tmp_path / "shown", progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["saving", "saving", "loading", "checking"]
    assert all(re.search(r" 100% 2\.1 MB in .* s \(.* .B/s\)$", line) for line in lines)


EXITS = """
import os, signal, sys, threading, time
from pathlib import Path
import shardkeep
from shardkeep.stores.local.store import LocalStore

path = Path(sys.argv[1])
shardkeep.save(path, {"s": 1})
before = sorted(str(file) for file in path.rglob("*") if file.is_file())
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
write = LocalStore.write_new

def slow(*arguments):  # the helpers are still at work when the calling thread has nothing left to do
    if threading.current_thread() is not threading.main_thread():
        helping.set()
        time.sleep(0.5)
    return write(*arguments)

def terminate():
    helping.wait()
    time.sleep(0.25)
    os.kill(os.getpid(), signal.SIGTERM)

helping = threading.Event()
LocalStore.write_new = slow
threading.Thread(target=terminate, daemon=True).start()
try:
    shardkeep.save(path, {f"l{i}": np.ones(300_000) for i in range(16)}, overwrite=True, format="zarr")
except SystemExit as left:
    print("left with", left.code)
time.sleep(1)
files = sorted(str(file) for file in path.rglob("*") if file.is_file() and "claims" not in str(file))
print(files == before or files, shardkeep.load(path))
"""


def test_a_handler_that_exits_while_helpers_write_leaves_no_files(tmp_path: Path) -> None:
    assert run_python(EXITS, str(tmp_path / "run")) == "left with 3\nTrue {'s': 1}\n"
