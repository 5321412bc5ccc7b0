"""Canaries for how arrays that alias host memory are told from those that do not, and what saves make of it."""

import ctypes
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import shardkeep
from dtypes import SAMPLE, dtype_of
from shardkeep.model.tree import flatten
from shardkeep.saving.buffers import owns_its_buffer, shard_of
from shardkeep.saving.donation import Staging
from shardkeep.saving.snapshot import examine, take_snapshot
from shardkeep.stores.location import location, store_at
from support import bits, crew_of, mesh_of, pattern
from ways import COMPUTED, PLACED, host_memory, lies_in, one, replicated, sharded


@pytest.mark.parametrize("start", [0, 64], ids=["on a page", "behind one"])
@pytest.mark.parametrize("name", PLACED)
def test_an_array_in_host_memory_is_never_taken_for_its_own(name: str, start: int) -> None:
    """If this fails after an upgrade of JAX, `save_async` may save what the program wrote later."""
    memory = host_memory((64, 64), start=start)
    array = PLACED[name](memory)
    assert not (lies_in(array, memory) and owns_its_buffer(array)), array.traceback


@pytest.mark.parametrize("name", COMPUTED)
def test_a_result_is_in_memory_of_its_own_and_known_to_be(name: str) -> None:
    """If this fails after an upgrade of JAX, saves in the background copy what they need not, or worse."""
    memory = host_memory((64, 64))
    array = COMPUTED[name](memory)
    assert not lies_in(array, memory)
    assert owns_its_buffer(array), array.traceback


@pytest.mark.parametrize("dtype", SAMPLE)
@pytest.mark.parametrize("name", ["device_put", "device_put, sharded", "callback, replicated", "x[:]"])
def test_of_any_dtype(name: str, dtype: str) -> None:
    memory = host_memory((64, 64), dtype_of(dtype))
    assert not owns_its_buffer(PLACED[name](memory))
    assert owns_its_buffer(jax.jit(lambda x: x)(PLACED[name](memory)))


def test_some_ways_do_alias() -> None:
    """Else the tests above prove nothing."""
    memory = host_memory((64, 64))
    aliasing = {name for name, make in PLACED.items() if lies_in(make(memory), memory)}
    assert {"device_put", "device_put, sharded", "dlpack", "callback, sharded", "parts, sharded", "x[:]"} <= aliasing


def test_the_data_of_keys_is_looked_at() -> None:
    memory = host_memory((64, 2), np.uint32)
    (shard,) = take_snapshot(examine(flatten(jax.random.wrap_key_data(jax.device_put(memory)))[1])).shards
    assert np.shares_memory(shard.data, memory)
    assert not shard.stable
    (shard,) = take_snapshot(examine(flatten(jax.jit(jax.random.split)(jax.random.key(0)))[1])).shards
    assert shard.stable or jax.__version_info__ < (0, 9)  # which hides that keys were computed: they are copied


def test_large_memory_on_a_page_is_not_xlas_whoever_made_the_array() -> None:
    array = jax.jit(lambda: jnp.ones(1 << 18))
    array = [array() for _ in range(4)][-1]  # by its fast path, from here
    on_a_page, behind = host_memory((1 << 18,)), host_memory((1 << 18,), start=64)
    assert [shard_of(array, part).stable for part in (on_a_page, behind, on_a_page[:1000])] == [False, True, True]


class TestLoads:
    """Memory of our own loads is stable: saving what was loaded needs no copy."""

    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        arrays = {f"w{i}": jnp.asarray(pattern(np.float32, (512, 1024), i)) for i in range(3)}
        small = {f"b{i}": jnp.full((16,), i, jnp.bfloat16) for i in range(3)}
        shardkeep.save(tmp_path / "run", {**arrays, **small, "x": jnp.arange(8, dtype=jnp.int4)})
        return tmp_path / "run"

    @pytest.mark.parametrize("mmap", [True, False])
    @pytest.mark.parametrize("where", ["one device", "another", "sharded", "replicated", "like a template"])
    def test_what_was_loaded_is_known(self, saved: Path, mmap: Any, where: str) -> None:
        tree = shardkeep.load(saved)
        arguments: dict[str, Any] = {
            "one device": {},
            "another": {"shardings": SingleDeviceSharding(jax.devices()[3])},
            "sharded": {"mesh": mesh_of(8), "partition_rules": [("w", sharded().spec), (".*", replicated().spec)]},
            "replicated": {"shardings": replicated()},
            "like a template": {"template": jax.eval_shape(lambda: tree)},
        }[where]
        tree = shardkeep.load(saved, mmap=mmap, **arguments)
        assert [name for name, array in tree.items() if not owns_its_buffer(array)] == []
        assert all(shard.stable for shard in take_snapshot(examine(flatten(tree)[1])).shards)

    def test_what_the_program_made_during_a_load_is_not(self, saved: Path) -> None:
        """Functions and callbacks are called by the load, and may give it memory of the program."""
        memory = {name: host_memory((512, 1024)) for name in ("callback", "function", "jax")}

        def instead(array: Any) -> Any:
            return jax.device_put(memory["function"])

        for loaded in (
            shardkeep.load(saved, include="w0", shardings=instead)["w0"],
            shardkeep.load(saved, include="w0", shardings=lambda _: memory["jax"].view())["w0"],
        ):
            assert not isinstance(loaded, jax.Array) or not owns_its_buffer(loaded)
        from shardkeep.serialization.async_manager import AsyncCheckpointManager

        manager = AsyncCheckpointManager()
        for callback in (lambda array, key: jax.device_put(memory["callback"]), lambda array, key: memory["callback"]):
            tree, _ = manager.load(saved, None, callback=callback)
            assert not owns_its_buffer(tree["w0"])


class TestSnapshot:
    @pytest.mark.parametrize("where", [one, sharded, replicated])
    def test_what_may_be_aliased_is_copied_before_save_async_returns(self, where: Any) -> None:
        memory = host_memory((64, 64))
        tree = {"put": jax.device_put(memory, where()), "own": jax.jit(lambda x: x, out_shardings=where())(memory)}
        with crew_of() as crew:
            snapshot = take_snapshot(examine(flatten(tree)[1]), Staging(crew))
        copied = snapshot.leaves[1].first_held
        assert not any(np.shares_memory(shard.data, memory) for shard in snapshot.shards)
        assert all(shard.stable for shard in snapshot.shards)
        views = [np.asarray(shard.data) for shard in tree["own"].addressable_shards]
        assert all(any(np.shares_memory(s.data, view) for view in views) for s in snapshot.shards[copied:])

    def test_copy_copies_everything(self) -> None:
        tree = {"a": jnp.ones((64, 64)), "b": jax.jit(lambda: jnp.ones(8), out_shardings=sharded())(), "c": np.ones(3)}
        views = [np.asarray(shard.data) for name in "ab" for shard in tree[name].addressable_shards]
        with crew_of() as crew:
            snapshot = take_snapshot(examine(flatten(tree)[1]), Staging(crew, copy=True))
        assert not any(np.shares_memory(shard.data, view) for shard in snapshot.shards for view in [*views, tree["c"]])

    def test_a_save_in_the_foreground_copies_block_by_block(self) -> None:
        memory = host_memory((64, 64))
        (shard,) = take_snapshot(examine(flatten(jax.device_put(memory))[1])).shards
        assert not shard.stable
        assert np.shares_memory(shard.data, memory)


@pytest.mark.parametrize("way", ["device_put", "device_put, sharded", "dlpack", "callback, replicated", "x[:]"])
@pytest.mark.parametrize("format", ["safetensors", "tensorstore"])
def test_memory_that_changes_after_save_async_is_saved_as_it_was(tmp_path: Path, way: str, format: Any) -> None:
    memory = host_memory((1024, 2048))  # 8 MiB: smaller ones may be copied because they are watched for donation
    memory[...] = expected = pattern(np.float32, memory.shape)
    array = PLACED[way](memory)
    with store_at(location(str(tmp_path / "run"))).lock(5):  # nothing is written before it changes
        pending = shardkeep.save_async(tmp_path / "run", {"w": array}, format=format)
        memory[...] = 7
    pending.wait()
    assert bits(shardkeep.load(tmp_path / "run")["w"]) == bits(expected)


def test_copy_saves_also_what_is_changed_behind_the_back_of_jax(tmp_path: Path) -> None:
    """As a tensor of PyTorch can that shares the memory of a result: nobody can see that."""
    array = jax.jit(lambda: jnp.ones((1024, 2048)))()
    seen = np.asarray(array)
    address = seen.__array_interface__["data"][0]
    with store_at(location(str(tmp_path / "run"))).lock(5):
        pending = shardkeep.save_async(tmp_path / "run", {"w": array}, copy=True)
        ctypes.memset(address, 0, seen.nbytes)
    pending.wait()
    assert (np.asarray(shardkeep.load(tmp_path / "run")["w"]) == 1).all()


def test_memory_that_changes_during_a_foreground_save_still_has_matching_digests(tmp_path: Path) -> None:
    memory = host_memory((2048, 1024))
    arrays = {"one": jax.device_put(memory), "all": jax.device_put(memory, sharded())}
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            memory.view(np.uint32)[...] += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for number in range(4):
            shardkeep.save(tmp_path / str(number), arrays, format=("safetensors", "tensorstore")[number % 2])  # type: ignore[arg-type]
    finally:
        over.set()
        thread.join()
    assert [shardkeep.verify(tmp_path / str(number)).ok for number in range(4)] == [True] * 4


def test_an_array_without_a_traceback_is_copied() -> None:
    from jax._src.lib import _jax

    _jax.set_tracebacks_enabled(False)
    try:
        array = jnp.ones(8) + 1
    finally:
        _jax.set_tracebacks_enabled(True)
    assert array.traceback is None
    assert not owns_its_buffer(array)
    assert [shard.stable for shard in take_snapshot(examine(flatten(array)[1])).shards] == [False]
