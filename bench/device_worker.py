"""What `bench/devices.py` measures, in a process whose devices are simulated."""

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkeep
from device import control as device

LEAVES = 24
LOOK = 0.002  # seconds between two looks at the memory


def place(kind: str) -> Any:
    """The sharding of all leaves."""
    devices = np.array(jax.devices())
    if kind == "single":
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if kind == "half":
        return NamedSharding(Mesh(devices.reshape(2, -1), ("a", "b")), P("b"))
    return NamedSharding(Mesh(devices, ("a",)), P() if kind == "replicated" else P("a"))


def state(kind: str, nbytes: int, leaves: int = LEAVES) -> dict[str, jax.Array]:
    """A tree on the devices, made at full speed, with the counters at 0 afterwards."""
    device.set_rate(0)
    columns = 1024 if nbytes // leaves > 64 << 10 else 128
    rows = max(nbytes // (4 * columns * leaves) // 8 * 8, 8)
    sharding = place(kind)
    tree = {}
    for leaf in range(leaves):
        values = np.random.default_rng(leaf).random((rows, columns), np.float32)
        tree[f"layer{leaf}"] = jax.make_array_from_callback(values.shape, sharding, lambda index, v=values: v[index])
        jax.block_until_ready(tree)
    quiet()
    return tree


def quiet() -> None:
    """Wait for transfers, and begin to count anew."""
    device.wait_for("finished", device.counters()["enqueued"])
    gc.collect()
    device.reset()


def anonymous() -> int:
    """The anonymous memory of this process in bytes."""
    return _status("RssAnon:")


def resident() -> int:
    """The anonymous memory of this process and what it has of mapped files, in bytes."""
    return _status("RssAnon:") + _status("RssFile:")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def saves(root: str, kind: str, nbytes: int, rate: float, links: int, rounds: int) -> dict[str, float]:
    """Bytes moved of those written, blocked time of the ideal, and memory kept of the state: medians, the last's most.

    Args:
        root: Where the checkpoint goes.
        kind: How the leaves lie on the devices.
        nbytes: The size of the state.
        rate: 1e9 bytes a second, of each link.
        links: How many links of this process carry data.
        rounds: How many saves.
    """
    tree = state(kind, nbytes)
    size = sum(array.nbytes for array in tree.values())
    shardkeep.save_async(f"{root}/{kind}", tree).wait()  # imports, threads, buffers
    before = anonymous()
    moved, blocked, kept = [], [], []
    for _ in range(rounds):
        quiet()
        device.set_rate(rate)
        started = time.perf_counter()
        pending = shardkeep.save_async(f"{root}/{kind}", tree, overwrite=True)
        seconds = time.perf_counter() - started
        report = pending.wait()
        counted = device.counters()
        mine = counted["device_to_host_bytes"] + counted["device_to_pinned_bytes"]
        moved.append(mine / leaf_bytes(report, size))
        blocked.append(seconds / (mine / (links * rate * 1e9)))
        kept.append((anonymous() - before) / size)
        del pending, report
    return {
        "moved": max(moved),
        "blocked": statistics.median(blocked),
        "best": min(blocked),
        "kept": max(0.0, statistics.median(kept)),
    }


def leaf_bytes(report: Any, size: int) -> int:
    """What this process wrote of the leaves: its share without the headers of its files."""
    return round(size * report.share / report.nbytes)


def calls(root: str, nbytes: int, rate: float, rounds: int, kind: str, leaves: int = LEAVES) -> dict[str, float]:
    """The milliseconds after which `save_async` returns, and how many transfers had ended by then."""
    tree = state(kind, nbytes, leaves)
    shardkeep.save_async(f"{root}/{kind}", tree).wait()
    seconds = []
    for _ in range(rounds):
        quiet()
        device.set_rate(rate)
        started = time.perf_counter()
        pending = shardkeep.save_async(f"{root}/{kind}", tree, overwrite=True)
        seconds.append(time.perf_counter() - started)
        device.set_rate(0)
        pending.wait()
    return {"call": statistics.median(seconds) * 1000, "best": min(seconds) * 1000}


class Peak:
    """The most host memory that a block of code had, without that of the simulated devices.

    That is resident memory, mapped files included. All memory that is allocated on the devices is resident, too: it is
    counted a moment before, so what is found here is never too much.
    """

    def __enter__(self) -> "Peak":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before must count if it is used again
        device.set_touch(True)
        self._before, self.nbytes, self._over = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        device.set_touch(False)

    def _look(self) -> None:
        while not self._over.wait(LOOK):
            self.nbytes = max(self.nbytes, self._now() - self._before)

    def _now(self) -> int:
        return resident() - device.counters()["device_live_bytes"]


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - started
    del result
    gc.collect()
    return seconds


def loads(root: str, kind: str, nbytes: int, rate: float, links: int, budget: int, rounds: int) -> dict[str, float]:
    """Load time by the slower of reading (as `verify` does) and transferring, round by round; most host memory by the
    budget."""
    path = f"{root}/{kind}"
    tree = state(kind, nbytes)
    sharding = place(kind)
    template = {key: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for key, a in tree.items()}
    shardkeep.save(path, tree)
    size = sum(array.nbytes for array in tree.values())
    for array in tree.values():
        array.delete()
    del tree, array
    shardkeep.set_memory_budget(budget)
    counted = links * rate * 1e9
    copies = {"replicated": links, "half": links / 2}.get(kind, 1)
    transfer = size * copies / counted
    read, ratios, peaks = [], [], []
    for _ in range(rounds):
        quiet()
        read.append(timed(lambda: shardkeep.verify(path)))
        device.set_rate(rate)
        whole = timed(lambda: jax.block_until_ready(shardkeep.load(path, template=template)))
        ratios.append(whole / max(read[-1], transfer))  # of the same moment: the machine does other things too
        quiet()
        with Peak() as peak:
            loaded = jax.block_until_ready(shardkeep.load(path, template=template))
        peaks.append(peak.nbytes)
        del loaded
    return {
        "load": statistics.median(ratios),
        "best": min(ratios),
        "memory": max(peaks) / budget,
        "read": statistics.median(read),
        "transfer": transfer,
    }
