"""The snapshot: canaries for what it relies on in JAX, and what it copies."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardkeep
from shardkeep.model.leaves import PrngKeys
from shardkeep.model.tree import flatten
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.hostmemory import aligned_empty
from shardkeep.runtime.scopes import Scope
from shardkeep.saving import snapshot as staging
from shardkeep.saving.donation import Staging
from shardkeep.saving.snapshot import Snapshot, examine, staged_sizes, take_snapshot
from support import bits, mesh_of, pattern


def _address(array: Any) -> int:
    return np.asarray(array).ctypes.data


def _snapshot(tree: Any, keep: bool = True) -> Snapshot:
    with Scope("a snapshot") as scope:  # which ends the threads
        return take_snapshot(examine(flatten(tree)[1]), Staging(scope.add(Crew())) if keep else None)


class TestCanaries:
    """If one of these fails after an upgrade of JAX, saves or loads are no longer safe (or no longer fast)."""

    def test_asarray_of_a_cpu_array_is_a_view(self) -> None:
        array = jnp.arange(1000.0)
        assert _address(array) == array.unsafe_buffer_pointer()
        assert _address(array) == _address(array)

    def test_asarray_of_a_shard_is_a_view(self) -> None:
        array = jax.device_put(jnp.zeros((16, 64)), NamedSharding(mesh_of(8), PartitionSpec("a")))
        for shard in array.addressable_shards:
            assert _address(shard.data) == shard.data.unsafe_buffer_pointer()
            assert np.asarray(shard.data).flags.c_contiguous

    @pytest.mark.parametrize("spread", [False, True])
    def test_a_view_keeps_its_bytes_when_the_array_is_donated(self, spread: bool) -> None:
        step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
        sharding = NamedSharding(mesh_of(8), PartitionSpec("a")) if spread else None
        for number in range(200):
            array = jax.device_put(jnp.full((64, 256), number, jnp.float32), sharding)
            views = [np.asarray(shard.data) for shard in array.addressable_shards]
            for _ in range(3):
                array = step(array)
            array.block_until_ready()
            assert all((view == number).all() for view in views), number

    def test_a_view_keeps_its_bytes_while_donations_race(self) -> None:
        """The view is taken while computations on the array are still queued."""
        step = jax.jit(lambda x: x + 1, donate_argnums=0)
        array = jnp.zeros((512, 512))
        views = []
        for number in range(100):
            views.append((number, np.asarray(array)))
            array = step(array)
        array.block_until_ready()
        for number, view in views:
            assert (view == number).all(), number

    def test_a_view_keeps_its_bytes_when_the_array_is_deleted(self) -> None:
        for number in range(50):
            array = jnp.full(100_000, number, jnp.int32)
            view = np.asarray(array)
            array.delete()
            others = [jnp.full(100_000, -1, jnp.int32) for _ in range(3)]
            jax.block_until_ready(others)
            assert (view == number).all()

    def test_aligned_memory_is_used_without_a_copy(self) -> None:
        memory = aligned_empty(4096 * 16).view(np.float32).reshape(128, 128)
        memory[:] = 1
        array = jax.device_put(memory)
        assert _address(array) == memory.ctypes.data
        sharding = NamedSharding(mesh_of(8), PartitionSpec("a"))
        made = jax.make_array_from_callback((128, 128), sharding, lambda index: memory[index])
        assert _address(made.addressable_shards[0].data) == memory.ctypes.data
        assert _address(made.addressable_shards[1].data) == memory[16:].ctypes.data

    def test_memory_that_is_not_aligned_is_copied(self) -> None:
        memory = aligned_empty(1 << 16)[4 : 4 + 4096].view(np.float32)
        memory[:] = 1
        array = jax.device_put(memory)
        array.block_until_ready()
        memory[:] = 2
        assert (np.asarray(array) == 1).all()

    def test_a_mapped_array_is_not_written_by_donation(self, tmp_path: Path) -> None:
        """Loading maps files: a donated array must never write into the checkpoint."""
        shardkeep.save(tmp_path / "run", {"w": jnp.ones((1024, 1024))})
        step = jax.jit(lambda x: x * 3, donate_argnums=0)
        for _ in range(10):
            array = shardkeep.load(tmp_path / "run")["w"]
            step(array).block_until_ready()
        assert shardkeep.verify(tmp_path / "run").ok


class TestSnapshot:
    def test_cpu_arrays_are_views_and_numpy_arrays_are_copies(self) -> None:
        array, mutable = jnp.ones(1000), np.ones(1000)
        snapshot = _snapshot({"a": array, "b": mutable})
        assert _address(snapshot.shards[0].data) == _address(array)
        assert not np.shares_memory(snapshot.shards[1].data, mutable)
        assert all(shard.stable for shard in snapshot.shards)

    def test_a_save_in_the_foreground_borrows_numpy_arrays(self) -> None:
        mutable = np.ones(1000)
        snapshot = _snapshot({"b": mutable}, keep=False)
        assert np.shares_memory(snapshot.shards[0].data, mutable)
        assert not snapshot.shards[0].stable

    def test_each_region_is_held_once_however_often_it_is_replicated(self) -> None:
        mesh = mesh_of(2, 4)
        for spec, count in (
            (PartitionSpec(), 1),
            (PartitionSpec("a"), 2),
            (PartitionSpec("b"), 4),
            (PartitionSpec("a", "b"), 8),
        ):
            array = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, spec))
            snapshot = _snapshot({"w": array})
            assert len(snapshot.shards) == count
            assert snapshot.nbytes == array.nbytes

    def test_what_is_staged_is_counted(self) -> None:
        _, leaves = flatten({"a": jnp.ones(10, jnp.float32), "b": np.ones(3), "c": 5, "d": "text"})
        assert [nbytes for nbytes, _, _ in staged_sizes(examine(leaves))] == [40, 24]

    def test_prng_keys_are_staged_as_their_data(self) -> None:
        snapshot = _snapshot({"key": jax.random.key(3)})
        assert isinstance(snapshot.leaves[0].origin, PrngKeys)
        assert np.array_equal(snapshot.shards[0].data, jax.random.key_data(jax.random.key(3)))


@pytest.mark.parametrize("devices", [range(8), [3, 1, 7, 5, 0, 2, 4, 6]])
def test_where_the_parts_of_an_array_lie_does_not_depend_on_how_it_was_made(devices: Any) -> None:
    """What is known of the first array of a sharding must hold for all: parts in any order, outputs of jit, copies."""
    mesh = Mesh(np.array(jax.devices())[list(devices)].reshape(4, 2), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec("b", "a"))
    data = pattern(np.float32, (16, 8))
    put = jax.device_put(data, sharding)
    parts = [jax.device_put(data[index], device) for device, index in sharding.devices_indices_map(data.shape).items()]
    made = {
        "put": put,
        "in order": jax.make_array_from_single_device_arrays(data.shape, sharding, parts),
        "in reverse": jax.make_array_from_single_device_arrays(data.shape, sharding, parts[::-1]),
        "mixed": jax.make_array_from_single_device_arrays(data.shape, sharding, [*parts[5:], *parts[:5]]),
        "callback": jax.make_array_from_callback(data.shape, sharding, lambda index: data[index]),
        "jit": jax.jit(lambda x: x, out_shardings=sharding)(put),
        "copied": jnp.copy(put),
    }
    for name in made:  # each of them as the one that is looked at first
        staging._forms.clear()
        tree = {name: made[name], **made}
        snapshot = _snapshot(tree)
        for leaf in snapshot.leaves:
            for number, region in enumerate(leaf.held):
                found = snapshot.shards[leaf.first_held + number].data
                assert bits(found) == bits(data[region.slices]), (name, leaf.key, region)
