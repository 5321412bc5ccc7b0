"""One contender, one tree, one round: everything about it, in a process of its own, as one line of JSON.

python bench/worker.py CONTENDER WORKLOAD DIRECTORY times|memory
"""

import gc
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contenders import CONTENDERS, clocked
from limits import PART, on_two_threads
from trees import WORKLOADS, Workload, builder, mesh_of, nbytes_of, stepper, template

IDLE_STEPS = 5
STALLED_STEPS = 5
SAVES = 4  # the first is a figure of its own
BACK_TO_BACK = 3.0  # seconds
REPEATED = 5  # measurements of which one is the median, of many small arrays on one device
ENOUGH = 3.0  # seconds: no more measurements after that
TOUCHED = 2.5  # times the tree: in the page cache, as arrays, and some more


def warm_up(contender: Any, where: Path) -> None:
    """The first use of a library imports and compiles: that is not what is measured."""
    tiny = {"tiny": jnp.ones((8, 8)), "more": jnp.ones(8)}
    contender.save(where / "tiny", tiny)
    abstract = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for k, v in tiny.items()}
    contender.load(where / "tiny", abstract)
    if (wait := contender.start(where / "tiny-async", tiny)) is not None:
        wait()


def saves_in_background(contender: Any, where: Path) -> bool:
    wait = contender.start(where / "first-async", {"w": jnp.ones(8)})
    if wait is not None:
        wait()
    return wait is not None


def files_below(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def into_cache(path: Path) -> None:
    for file in files_below(path):
        with open(file, "rb") as opened:
            while opened.read(16 << 20):
                pass


def out_of_cache(path: Path) -> None:
    for file in files_below(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def settle(nbytes: int) -> None:
    """What was written before is on the disk, and what XLA needed to make the tree is freed."""
    os.sync()
    gc.collect()
    time.sleep(1)
    touch_memory(nbytes)
    gc.collect()  # looks at all that the interpreter has, as a program does that runs: after a pause that is slow


def touch_memory(nbytes: int) -> None:
    """A virtual machine gets memory that was not used for a while from its host, slowly: so it is used just before."""
    pages = mmap.mmap(-1, int(nbytes * TOUCHED), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory: Any = np.frombuffer(pages, np.uint8)
    on_two_threads(lambda at: memory[at : at + PART : 4096].fill(0), range(0, memory.size, PART))


def repeated(measure: Callable[[], float], workload: Workload) -> float:
    """The median of several measurements where one takes milliseconds, and so is far from the next one."""
    taken = [measure()]
    while workload.kind == "many" and not workload.mesh and len(taken) < REPEATED and sum(taken) < ENOUGH:
        taken.append(measure())
    return statistics.median(taken)


def loaded(contender: Any, path: Path, nbytes: int, wanted: Any, verify: bool = True) -> float:
    """Seconds until all arrays are there."""
    gc.collect()
    touch_memory(nbytes)
    gc.collect()  # as in `settle`
    return clocked(lambda: jax.block_until_ready(contender.load(path, wanted, verify)))[0]


def times(contender: Any, workload: Workload, where: Path) -> dict[str, float]:
    found = durably(contender, workload, where)
    if saves_in_background(contender, where):
        found |= in_the_background(contender, builder(workload), workload, where)
    return found


def durably(contender: Any, workload: Workload, where: Path) -> dict[str, float]:
    """Durable saves, and the loads of one of them."""
    found: dict[str, float] = {}
    fresh = builder(workload)
    paths: list[Path] = []

    def save() -> float:
        tree = fresh(len(paths) + 1)
        settle(nbytes_of(workload))
        paths.append(where / f"durable-{len(paths)}")
        return clocked(partial(contender.save, paths[-1], tree))[0]

    found["durable"] = repeated(save, workload)
    path = paths[-1]
    files = files_below(path)
    found["files"], found["bytes"] = len(files), sum(file.stat().st_size for file in files)
    os.sync()
    wanted = template(workload)

    def load(wanted: Any, verify: bool = True) -> float:
        return repeated(partial(loaded, contender, path, nbytes_of(workload), wanted, verify), workload)

    into_cache(path)
    found["load"] = load(wanted)
    if contender.checks:
        found["unchecked"] = load(wanted, verify=False)
    if workload.mesh and workload.kind == "llama":
        found["onto (8, 1)"] = load(template(workload, mesh_of(8, 1)))
        found["onto (4, 2) swapped"] = load(template(workload, mesh_of(4, 2), swapped=True))
        found["one layer"] = load(template(workload, match="layers.1."))
    if workload.kind != "many":  # those are a few MiB
        gc.collect()  # what is mapped stays in the cache
        out_of_cache(path)
        found["cold"] = load(wanted)
    return found


def in_the_background(contender: Any, fresh: Any, workload: Workload, where: Path) -> dict[str, float]:
    """What a save in the background costs the loop: the call, the steps right after it, and the steps beside it."""
    step = stepper()
    work = jnp.eye(1024, dtype=jnp.float32) * 0.5
    state = fresh(2)
    for _ in range(3):
        state, work = jax.block_until_ready(step(state, work))

    def one() -> float:
        nonlocal state, work
        seconds, (state, work) = clocked(lambda: jax.block_until_ready(step(state, work)))
        return seconds

    settle(nbytes_of(workload))
    found: dict[str, float] = {}
    calls: list[float] = []
    stalls: list[float] = []
    slow = workload.kind == "many" and workload.mesh  # each takes the others ten seconds, and all of them alike
    before = [one() for _ in range(IDLE_STEPS)]
    for number in range(2 if slow else SAVES):
        called, wait = clocked(lambda number=number: contender.start(where / f"stall-{number}", state))
        steps = [one() for _ in range(STALLED_STEPS)]
        wait()
        after = [one() for _ in range(IDLE_STEPS)]
        calls.append(called)
        stalls.append(called + sum(steps) - STALLED_STEPS * statistics.median(before + after))
        before = after
    found["call, first"], found["call"] = calls[0], statistics.median(calls[1:])
    found["stall, first"], found["stall"] = stalls[0], statistics.median(stalls[1:])
    if slow:
        return found
    idle = statistics.median([*before, *(one() for _ in range(3))])
    # Steps on the main thread, and a save begun whenever the one before is done.
    begun = time.perf_counter()
    wait, count, saves = None, 0, 0
    running: threading.Thread | None = None
    while time.perf_counter() - begun < BACK_TO_BACK:
        if running is None or not running.is_alive():
            wait = contender.start(where / f"beside-{saves}", state)
            running = threading.Thread(target=wait)
            running.start()
            saves += 1
        one()
        count += 1
    elapsed = time.perf_counter() - begun
    if running is not None:
        running.join()
    found["kept"] = count * idle / elapsed
    return found


class Sampler:
    """The most anonymous memory that the process held beyond what it had at the start."""

    def __init__(self) -> None:
        self._over = threading.Event()
        gc.collect()
        self._base = self.peak = anonymous()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.peak = max(self.peak, anonymous())

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.growth = max(self.peak, anonymous()) - self._base


def anonymous() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10


def memory(contender: Any, workload: Workload, where: Path) -> dict[str, float]:
    """Growth of anonymous memory, as a multiple of the tree."""
    total = nbytes_of(workload)
    fresh = builder(workload)
    tree = fresh(1)
    found: dict[str, float] = {}
    with Sampler() as sampler:
        contender.save(where / "durable", tree)
    found["save memory"] = sampler.growth / total
    del tree
    into_cache(where / "durable")
    with Sampler() as sampler:
        tree = jax.block_until_ready(contender.load(where / "durable", template(workload)))
    found["load memory"] = sampler.growth / total
    del tree
    if not saves_in_background(contender, where):
        return found
    step, work = stepper(), jnp.eye(1024, dtype=jnp.float32) * 0.5
    state = fresh(2)
    for _ in range(3):
        state, work = jax.block_until_ready(step(state, work))
    growths: list[float] = []
    with Sampler() as sampler:
        for number in range(6):
            wait = contender.start(where / f"donated-{number}", state)
            for _ in range(3):
                state, work = jax.block_until_ready(step(state, work))
            wait()
            growths.append(sampler.peak)
    found["donating memory"] = sampler.growth / total
    found["donating memory, later"] = (growths[-1] - growths[2]) / total
    return found


def main() -> None:
    name, workload, where, what = sys.argv[1:]
    contender = CONTENDERS[name]()
    warm_up(contender, Path(where))
    measure: Callable[..., dict[str, float]] = {"times": times, "memory": memory}[what]
    print(json.dumps(measure(contender, WORKLOADS[workload], Path(where))), flush=True)


if __name__ == "__main__":
    main()
