"""Where eFormer 0.0.101 breaks its promises, and we keep them. One section for each line of the list."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from shardkeep.serialization import AsyncCheckpointManager, tree_deserialize_leaves, tree_serialize_leaves
from shardkeep.serialization.sharding_utils import create_sharding_tree_from_index
from support import assert_same, mesh_of, run_python

P = PartitionSpec
Log = Callable[[], list[str]]
MESH = mesh_of(8)


def sharded(value: float, shape: tuple[int, ...] = (8, 4), spec: Any = P("a")) -> jax.Array:
    return jax.device_put(jnp.full(shape, value), NamedSharding(MESH, spec))


# --- a save killed half-way loads as zeros; an overwrite killed half-way loads as a mix of two steps

# Forked before any device is in use; each child is killed at its k-th operation on a file of the checkpoint.
KILLED = """
import itertools, os, signal, sys
from signals import die_at_change
from shardkeep.serialization import AsyncCheckpointManager

def step(n):
    return {f"l{i}": np.full((64, 8), n, np.float32) for i in range(6)}

for k in itertools.count(FIRST, 3):
    path = f"PATH/{k}"
    manager = AsyncCheckpointManager(use_tensorstore=TENSORSTORE)
    if OVERWRITE:
        manager.save(step(1), path)
    if os.fork() == 0:
        die_at_change(k, path)
        manager.save(step(2), path)
        os._exit(0)
    if os.wait()[1] != signal.SIGKILL:
        print(k)
        break
"""


def _killed(path: Path, overwrite: bool, tensorstore: bool) -> list[Path]:
    """Checkpoints whose save was killed, each at a later moment; the last one was not."""
    first = 1 if overwrite else 0
    code = KILLED.replace("PATH", str(path)).replace("OVERWRITE", str(overwrite)).replace("FIRST", str(first))
    last = int(run_python(code.replace("TENSORSTORE", str(tensorstore))))
    return [path / str(k) for k in range(first, last + 1, 3)]


def _steps(path: Path) -> set[float]:
    return {float(x) for array in AsyncCheckpointManager().load(path, None)[0].values() for x in np.unique(array)}


@pytest.mark.parametrize("tensorstore", [True, False])
def test_a_save_killed_half_way_is_not_there(tensorstore: bool, tmp_path: Path) -> None:
    *killed, whole = _killed(tmp_path, overwrite=False, tensorstore=tensorstore)
    assert len(killed) > 4
    outcomes: list[str] = []
    for path in killed:
        try:
            assert _steps(path) == {2.0}
            outcomes.append("whole")
        except (FileNotFoundError, shardkeep.IncompleteCheckpointError):
            assert not shardkeep.exists(path)
            outcomes.append("absent")
    assert "absent" in outcomes
    assert outcomes == sorted(outcomes)  # once it is committed it stays
    assert _steps(whole) == {2.0}


@pytest.mark.parametrize("tensorstore", [True, False])
def test_an_overwrite_killed_half_way_is_the_old_step_or_the_new_one(tensorstore: bool, tmp_path: Path) -> None:
    *killed, whole = _killed(tmp_path, overwrite=True, tensorstore=tensorstore)
    outcomes = [_steps(path) for path in killed]
    assert all(len(steps) == 1 for steps in outcomes)
    assert {1.0} in outcomes
    assert outcomes == sorted(outcomes, key=max)
    assert _steps(whole) == {2.0}


def test_saves_killed_at_any_time_leave_one_whole_step(tmp_path: Path) -> None:
    """A training loop with sharded arrays on eight devices, overwriting as fast as it can, killed from outside."""
    code = """
from shardkeep.serialization import AsyncCheckpointManager
from jax.sharding import NamedSharding, PartitionSpec
mesh = mesh_of(8)
where = NamedSharding(mesh, PartitionSpec("a"))
manager = AsyncCheckpointManager()
for n in range(100000):
    manager.save({k: jax.device_put(np.full((8, 5000), n, np.float32), where) for k in "abcdefgh"}, PATH, mesh)
    print(n, flush=True)
"""
    start = "import jax, numpy as np\nfrom support import mesh_of\n"
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    for delay in (0.0, 0.03, 0.3):
        path = tmp_path / str(delay)
        program = start + code.replace("PATH", repr(str(path)))
        child = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "0\n"
            time.sleep(delay)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            said = [0, *map(int, child.communicate()[0].split())]
        (step,) = _steps(path)
        assert step in (said[-1], said[-1] + 1)


# --- single-bit flips and deleted chunks go unnoticed even with validation on


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("compression", [True, False])
def test_every_single_bit_flip_is_noticed(validation: bool, compression: bool, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(enable_validation=validation, enable_compression=compression)
    manager.save({"w": jnp.arange(6.0)}, tmp_path, MESH)
    chunk = tmp_path / "w" / "0"
    good = chunk.read_bytes()
    for bit in range(0, len(good) * 8, 5):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        chunk.write_bytes(damaged)
        try:
            loaded = manager.load(tmp_path, None)[0]
        except shardkeep.IntegrityError:
            continue
        assert compression  # a bit of the frame that carries no data: what is loaded is right all the same
        assert_same(loaded, {"w": jnp.arange(6.0)})
    chunk.write_bytes(good)
    assert_same(manager.load(tmp_path, None)[0], {"w": jnp.arange(6.0)})


def test_a_flip_in_any_file_we_wrote_is_noticed_or_harmless(tmp_path: Path) -> None:
    """The manifest and the descriptions included; the documents for eFormer are not read by us."""
    manager = AsyncCheckpointManager()
    tree = {"w": jnp.arange(6.0), "n": 3}
    manager.save(tree, tmp_path, MESH, metadata={"step": 1})
    for file in [p for p in tmp_path.rglob("*") if p.is_file() and ".shardkeep" not in p.parts]:
        good = file.read_bytes()
        for place in range(0, len(good), max(len(good) // 12, 1)):
            damaged = bytearray(good)
            damaged[place] ^= 4
            file.write_bytes(damaged)
            try:
                loaded, metadata = manager.load(tmp_path, None)
            except (shardkeep.IntegrityError, shardkeep.NewerFormatError):
                continue
            assert file.name in ("tensorstore_index.json", "checkpoint_metadata.json", ".zarray", ".zgroup")
            assert_same(loaded, tree)
            assert metadata["custom_metadata"] == {"step": 1}
        file.write_bytes(good)


def test_a_deleted_chunk_is_noticed(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(enable_validation=True)
    manager.save({"w": sharded(1.0, (8, 1_000_000))}, tmp_path, MESH)
    (tmp_path / "w" / "1.0").unlink()
    with pytest.raises(FileNotFoundError, match=r"leaf 'w'.*w/1.0 is missing"):
        manager.load(tmp_path, None)


# --- overwriting with another shape or sharding destroys the old checkpoint


def test_overwriting_with_another_shape_or_sharding_replaces_the_old_one_whole(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    for array in (
        jnp.ones((4, 4)),
        sharded(2.0, (16, 2)),
        sharded(3.0, (8, 40_000), P("a")),
        sharded(4.0, (8, 40_000), P(None, "a")),
        jnp.zeros((), jnp.int8),
        jnp.ones((0, 3)),
    ):
        manager.save({"w": array}, tmp_path, MESH)
        assert_same(manager.load(tmp_path, None)[0], {"w": jnp.asarray(np.asarray(array))})


@pytest.mark.parametrize("tensorstore", [True, False])
def test_an_overwrite_that_fails_leaves_the_old_one(tensorstore: bool, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore)
    manager.save({"w": jnp.ones(4)}, tmp_path, MESH)
    with pytest.raises(TypeError, match="cannot be saved"):
        manager.save({"w": jnp.zeros((2, 2)), "f": print}, tmp_path, MESH)
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(ValueError, match="deleted or donated"):
        manager.save({"w": deleted}, tmp_path, MESH)
    assert_same(manager.load(tmp_path, None)[0], {"w": jnp.ones(4)})


def test_an_array_that_was_loaded_survives_an_overwrite(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    manager.save({"w": jnp.ones(1 << 20)}, tmp_path, MESH)
    loaded = manager.load(tmp_path, None)[0]["w"]
    manager.save({"w": jnp.zeros((3, 3))}, tmp_path, MESH)
    assert_same(loaded, jnp.ones(1 << 20))


# --- None/int/float/str leaves are dropped


@pytest.mark.parametrize("tensorstore", [True, False])
def test_leaves_that_are_no_arrays_are_kept(tensorstore: bool, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore)
    tree = {"none": None, "i": 3, "f": 0.5, "s": "text", "b": True, "w": jnp.ones(2)}
    manager.save(tree, tmp_path / "a", MESH)
    loaded, _ = manager.load(tmp_path / "a", None)
    assert_same(loaded, {k: v for k, v in tree.items() if v is not None})
    manager.save_pytree(tree, tmp_path / "b", MESH, prefix="p")
    assert_same(manager.load_pytree(tmp_path / "b", None, prefix="p")[0], tree)
    assert_same(shardkeep.load(tmp_path / "a"), tree)


# --- {"a.b": x, "a": {"b": y}} loses one array


@pytest.mark.parametrize("tensorstore", [True, False])
def test_keys_that_look_alike_keep_their_arrays(tensorstore: bool, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore, enable_validation=True)
    tree = {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(3)}}
    manager.save(tree, tmp_path, MESH)
    assert_same(manager.load(tmp_path, None, validate=True)[0], tree)
    assert_same(manager.load_tree_parallel(tmp_path)[0], tree)


def test_a_safetensors_file_cannot_hold_both_and_says_so(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=False)
    with pytest.raises(ValueError, match=r"two leaves would both be called 'a\.b'"):
        manager.save({"a.b": jnp.ones(2), "a": {"b": jnp.zeros(3)}}, tmp_path / "m.safetensors", MESH)
    assert list(tmp_path.iterdir()) == []


# --- two prefixes saved at once damage the index


@pytest.mark.parametrize("shared", [True, False])
def test_prefixes_saved_at_once_by_threads_are_all_there(shared: bool, tmp_path: Path) -> None:
    managers = [AsyncCheckpointManager()] * 8 if shared else [AsyncCheckpointManager() for _ in range(8)]

    def save(number: int) -> None:
        for step in range(3):
            tree = {"w": jnp.full(100, number + step / 10), "number": number}
            managers[number].save(tree, tmp_path, MESH, prefix=f"p{number}", metadata={"step": step})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(save, range(8)))
    for number in range(8):
        loaded, metadata = managers[0].load(tmp_path, None, prefix=f"p{number}")
        assert_same(loaded, {"w": jnp.full(100, number + 0.2), "number": number})
        assert metadata["custom_metadata"] == {"step": 2}
    assert shardkeep.verify(tmp_path).ok


def test_prefixes_saved_once_each_are_all_in_eformers_index(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    pending = [manager.save_async({"w": jnp.ones(5)}, tmp_path, MESH, prefix=f"p{i}") for i in range(8)]
    for save in pending:
        save.wait()
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    assert sorted(index["prefixes"]) == [f"p{i}" for i in range(8)]


def test_prefixes_saved_at_once_by_processes_are_all_there(tmp_path: Path) -> None:
    code = """
import os
from shardkeep.serialization import AsyncCheckpointManager
for n in range(4):
    if os.fork() == 0:
        for _ in range(5):
            AsyncCheckpointManager().save({"w": np.full(100, n)}, PATH, prefix=f"p{n}")
        os._exit(0)
print([os.wait()[1] for _ in range(4)])
"""
    assert run_python(code.replace("PATH", repr(str(tmp_path)))) == "[0, 0, 0, 0]\n"
    for n in range(4):
        assert_same(shardkeep.load(tmp_path, prefix=f"p{n}"), {"w": np.full(100, n)})


# --- dtype, validate, enable, enable_compression, use_async, prefix_filter, float_dtype do nothing on TensorStore


def test_arguments_do_something_on_tensorstore(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    manager.save({"a": jnp.ones((64, 64)), "b": jnp.ones(2)}, tmp_path / "c", MESH, prefix="p")
    assert manager.load(tmp_path / "c", None, dtype="bf16")[0]["a"].dtype == jnp.bfloat16
    with (
        pytest.warns(DeprecationWarning, match="use prefix"),
        pytest.raises(ValueError, match="no tree with prefix 'x'"),
    ):
        manager.load(tmp_path / "c", None, prefix_filter="x")
    manager.enable = False
    manager.save({"a": jnp.zeros(1)}, tmp_path / "c", MESH, prefix="p")
    assert manager.load(tmp_path / "c", None)[0]["a"].shape == (64, 64)
    manager.enable, manager.enable_compression = True, True
    manager.save({"a": jnp.ones((64, 64))}, tmp_path / "z", MESH, float_dtype="fp16")
    assert (tmp_path / "z" / "a" / "0.0").stat().st_size < 64 * 64
    assert manager.load(tmp_path / "z", None)[0]["a"].dtype == jnp.float16
    (tmp_path / "c" / "p" / "b" / "0").write_bytes(bytes(8))
    with pytest.raises(ValueError, match="leaf 'b'"):
        manager.load(tmp_path / "c", None, validate=True)
    assert_same(manager.load(tmp_path / "c", None, validate=False)[0]["b"], jnp.zeros(2))
    seen: list[str] = []
    with pytest.raises(ValueError, match="leaf 'b'"):
        manager.load(tmp_path / "c", None, use_async=False, callback=lambda array, key: seen.append(key))
    assert seen == ["a"]


# --- save_pytree ignores use_tensorstore=False


def test_save_pytree_honours_use_tensorstore(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=False)
    manager.save_pytree({"w": jnp.ones(2)}, tmp_path, MESH, prefix="p")
    assert not manager.is_tensorstore(tmp_path)
    assert len(list((tmp_path / "p").glob("*.safetensors"))) == 1
    assert list(tmp_path.rglob(".zarray")) == []


# --- NumPy leaves and PRNG keys crash


@pytest.mark.parametrize("tensorstore", [True, False])
def test_numpy_leaves_and_prng_keys_are_saved(tensorstore: bool, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore, enable_validation=True)
    tree = {"n": np.arange(3, dtype=np.int32), "k": jax.random.key(5), "s": np.float32(2), "raw": jax.random.PRNGKey(1)}
    for prefix, arguments in (("a", {}), ("b", {"do_all_gather": True}), ("c", {"cpu_offload": True})):
        manager.save(tree, tmp_path, MESH, prefix=prefix, **arguments)
        loaded, _ = manager.load(tmp_path, None, prefix=prefix, validate=True)
        assert_same(loaded, {**tree, "n": jnp.arange(3)})
    manager.save_pytree(tree, tmp_path, MESH, prefix="d")
    assert_same(manager.load_pytree(tmp_path, MESH, prefix="d")[0]["k"], tree["k"])


# --- fp8 SafeTensors cannot be read back


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e8m0fnu"])
def test_fp8_safetensors_are_read_back(dtype: str, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=False)
    tree = {"w": jnp.float32([1, 2, 0.5]).astype(dtype)}
    manager.save(tree, tmp_path / "m.safetensors", MESH)
    assert_same(manager.load(tmp_path / "m.safetensors", None)[0], tree)


# --- loading unpickles and follows ../: tests/serialization/test_fixtures.py


def test_nothing_we_write_is_a_pickle(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    manager.save_pytree({"w": jnp.ones(2), "x": (1, None)}, tmp_path, MESH, prefix="p", extras={"a": 1})
    documents = {p.name for p in tmp_path.iterdir() if p.is_file()}
    assert documents == {"manifest.json", "tensorstore_index.json", "checkpoint_metadata.json", ".zgroup"}
    for name in documents:
        json.loads((tmp_path / name).read_text())


# --- file:// and s3:// land in odd local folders


def test_urls_land_where_they_say_or_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_credentials: None
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = AsyncCheckpointManager()
    manager.save({"w": jnp.ones(2)}, f"file://{tmp_path}/with%20space", MESH)
    tree_serialize_leaves(f"file://{tmp_path}/leaves", {"w": jnp.ones(2)})
    for url in ("s3://bucket/x", "gs://bucket/x", "file://host/x"):
        for call in (
            lambda url=url: manager.save({"w": jnp.ones(2)}, url, MESH),
            lambda url=url: manager.load(url, None),
            lambda url=url: tree_serialize_leaves(url, {"w": jnp.ones(2)}),
            lambda url=url: tree_deserialize_leaves(url, None),
        ):
            with pytest.raises((ValueError, shardkeep.AccessError), match=r"no credentials|file://host"):
                call()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["leaves", "with space"]
    assert_same(manager.load(f"file://{tmp_path}/with%20space", None)[0], {"w": jnp.ones(2)})


# --- nothing works inside a running event loop (Jupyter)


def test_every_call_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    async def main() -> None:
        manager = AsyncCheckpointManager()
        tree = {"w": jnp.ones(2)}
        manager.save(tree, tmp_path / "a", MESH)
        manager.save_async(tree, tmp_path / "b", MESH)
        manager.wait_until_finished()
        manager.save_pytree(tree, tmp_path / "c", MESH, prefix="p")
        tree_serialize_leaves(tmp_path / "d", tree, manager.global_manager)
        tree_serialize_leaves(tmp_path / "e", tree, manager)
        assert_same(tree_deserialize_leaves(tmp_path / "d", MESH, manager.global_manager), tree)
        assert_same(tree_deserialize_leaves(tmp_path / "e", MESH, manager), tree)
        for name in "abcde":
            assert_same(manager.load(tmp_path / name, MESH)[0], tree)
            assert_same(manager.load_tree_parallel(tmp_path / name)[0], tree)
        assert_same(manager.load_pytree(tmp_path / "c", MESH, prefix="p")[0], tree)

    asyncio.run(main())


# --- a failed save's error is raised by the next save


def test_the_next_save_does_not_raise_what_failed_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    manager = AsyncCheckpointManager()
    tree = {"w": jnp.ones(2)}
    with pytest.raises(NotADirectoryError, match="file"):
        manager.save(tree, tmp_path / "file", MESH)
    manager.save(tree, tmp_path / "a", MESH)
    pending = manager.save_async(tree, tmp_path / "file" / "below", MESH)
    with pytest.raises(NotADirectoryError, match="file"):
        pending.wait()
    tree_serialize_leaves(tmp_path / "file" / "below", tree, manager.global_manager)
    for save in (manager.save, lambda *a: manager.save_async(*a).wait()):
        save(tree, tmp_path / "b", MESH)
    tree_serialize_leaves(tmp_path / "c", tree, manager.global_manager)
    with pytest.raises(NotADirectoryError, match="file"):
        manager.wait_until_finished()
    for name in "abc":
        assert shardkeep.exists(tmp_path / name)


# --- create_sharding_tree_from_index returns {} for a prefixed checkpoint


def test_a_prefixed_checkpoint_has_a_sharding_tree(tmp_path: Path) -> None:
    AsyncCheckpointManager().save({"w": jnp.ones(8), "l": [jnp.ones(8)]}, tmp_path, MESH, prefix="model")
    for prefix in (None, "model"):
        tree = create_sharding_tree_from_index(tmp_path, MESH, prefix, P("a"))
        assert tree == {"w": NamedSharding(MESH, P("a")), "l": {"0": NamedSharding(MESH, P("a"))}}


# --- the "async" save blocks to the end


def test_an_async_save_returns_while_the_disk_is_still_at_work(tmp_path: Path) -> None:
    """The commit is held back until the call has returned: were it part of the call, this would never end."""
    manager, opened = AsyncCheckpointManager(), threading.Event()

    def hold(_: str) -> None:
        assert opened.wait(60)

    first = manager.save_async({"w": jnp.ones(2)}, tmp_path, MESH, callback=hold)
    second = manager.save_async({"w": jnp.zeros(2)}, tmp_path, MESH)  # behind the first, to the same place
    assert not first.done()
    assert not second.done()
    opened.set()
    manager.wait_until_finished()
    assert_same(manager.load(tmp_path, None)[0], {"w": jnp.zeros(2)})
