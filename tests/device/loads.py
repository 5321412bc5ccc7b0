"""For programs on the simulated device that load: saved states, templates, and the host memory that loads use."""

import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import shardkeep
from device import control as device
from shardkeep.runtime import hostmemory
from shardkeep.runtime.budget import Claim, budget
from support import bits, pattern

P = PartitionSpec


def mesh_of_devices(*shape: int) -> Mesh:
    """A mesh over all simulated devices, with the axes a and b."""
    devices = np.array(jax.devices()).reshape(shape or (-1,))
    return Mesh(devices, ("a", "b")[: devices.ndim])


def sharding_of(kind: str) -> Sharding:
    """single, replicated, sharded (by rows), columns, or half: by rows over half of the devices, twice."""
    if kind == "single":
        return SingleDeviceSharding(jax.devices()[0])
    if kind == "half":
        return NamedSharding(mesh_of_devices(2, -1), P("b"))
    specs = {"replicated": P(), "sharded": P("a"), "columns": P(None, "a")}
    return NamedSharding(mesh_of_devices(), specs[kind])


def save_host(path: str | Path, leaves: int = 16, shape: tuple[int, int] = (64, 256), **more: Any) -> dict[str, Any]:
    """Save NumPy arrays, and return them."""
    host = {f"{i:02}": pattern("float32", shape, seed=i) for i in range(leaves)}
    shardkeep.save(path, host, **more)
    return host


def like(host: dict[str, Any], sharding: Sharding | str, dtype: Any = None) -> dict[str, Any]:
    """A template that asks for JAX arrays."""
    place = sharding_of(sharding) if isinstance(sharding, str) else sharding
    return {key: jax.ShapeDtypeStruct(a.shape, dtype or a.dtype, sharding=place) for key, a in host.items()}


def is_same(found: dict[str, Any], host: dict[str, Any]) -> bool:
    """Whether all arrays have the same bits, on every device."""
    whole = all(bits(found[key]) == bits(array) for key, array in host.items())
    shards = [(shard, host[key]) for key in host if isinstance(found[key], jax.Array) for shard in _shards(found[key])]
    return whole and all(bits(shard.data) == bits(array[shard.index]) for shard, array in shards)


def _shards(array: jax.Array) -> Any:
    return () if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array.addressable_shards


def settle() -> None:
    """Wait for all transfers, and begin to count anew."""
    device.wait_for("finished", device.counters()["enqueued"])
    device.reset()


def arrived() -> list[int]:
    """The bytes that went to each device."""
    moved = [r for r in device.log() if r.what == "enqueued" and r.origin == "host"]
    return [sum(r.bytes for r in moved if r.device == d.id) for d in jax.devices()]


class HostMemory:
    """Counts the memory that loads allocate for data, and what they claim of the budget."""

    def __init__(self) -> None:
        self.live = self.most = self.most_claimed = 0
        empty, take = hostmemory.aligned_empty, Claim.take

        def allocate(nbytes: int) -> Any:
            memory = empty(nbytes)
            self.live += nbytes
            self.most = max(self.most, self.live)
            weakref.finalize(memory if memory.base is None or nbytes >= 2 << 20 else memory.base, self._free, nbytes)
            return memory

        def claim(mine: Any, *arguments: Any, **more: Any) -> None:
            take(mine, *arguments, **more)
            self.most_claimed = max(self.most_claimed, budget.used)

        hostmemory.aligned_empty = allocate
        Claim.take = claim

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes


def is_of_a_call(thread: str) -> bool:
    """Whether a thread belongs to a save or load, which ends it. What it saved stays warm without it."""
    return thread.startswith("shardkeep") and thread != "shardkeep-warm"


def left_behind(memory: HostMemory) -> dict[str, int]:
    """What exists of loads that are over, and should not."""
    device.wait_for("finished", device.counters()["enqueued"])
    some = jax.device_put(np.zeros(1), jax.devices("cpu")[0])
    threads = sum(is_of_a_call(thread.name) for thread in threading.enumerate())
    found: dict[str, int] = {}
    for _ in range(500):  # JAX hears of the end of a transfer a moment later, and lets go of memory in such calls
        jax.block_until_ready([some, some])
        counted = device.counters()
        found = {
            "claimed": budget.used,
            "threads": threads,
            "host": memory.live,
            "device": counted["device_live_bytes"] + counted["pinned_live_bytes"],
            "views": counted["views"],
        }
        if not any(found.values()):
            break
        time.sleep(0.01)
    return found
