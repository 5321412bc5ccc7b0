"""A long life: a thousand saves in the background by one process, some of them failing. Nothing may pile up."""

import gc
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import shardkeep
from faults import parallel
from faults.result import Result
from faults.states import same

_ZARR = {"format": "zarr"}
_KEPT = 3  # checkpoints that stay when names rotate
_GROWTH = 24 << 20  # anonymous memory moves by this much anyhow: arenas of the allocator, and what JAX keeps


@dataclass(frozen=True)
class Held:
    """What the process holds at one moment."""

    memory: int
    threads: int
    descriptors: int
    files: int

    @classmethod
    def now(cls, room: Path) -> "Held":
        gc.collect()
        deadline = time.monotonic() + 5
        while threading.active_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.01)  # those of the last save are just ending
        status = Path("/proc/self/status").read_text()
        memory = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))
        files = sum(len(names) for _, _, names in os.walk(room))
        return cls(memory, threading.active_count(), len(os.listdir("/proc/self/fd")), files)


def state(number: int) -> Any:
    """A megabyte and some small leaves."""
    return {
        "w": jnp.full((256, 1024), number, jnp.float32),
        "host": np.full(1000, number),
        "layers": [{"b": jnp.arange(5) + number} for _ in range(3)],
        "step": number,
    }


def save_on(room: Path, number: int, late: list[Any]) -> None:
    """Begin save `number`: overwrites, new names with old ones deleted, both formats, and every tenth one fails."""
    variants: list[dict[str, Any]] = [{}, _ZARR, {**_ZARR, "compression": "zstd"}]
    arguments = variants[number // 3 % 3]
    if number % 10 == 9:  # there is something, and it is not to be overwritten
        late.append(shardkeep.save_async(room / "one", state(number), **arguments))
    elif number % 3 == 0:
        late.append(shardkeep.save_async(room / "one", state(number), overwrite=True, **arguments))
    elif number % 3 == 1:
        late.append(shardkeep.save_async(room / "model.safetensors", state(number), overwrite=True))
    else:
        late.append(shardkeep.save_async(room / f"step-{number}", state(number), **arguments))
        kept = sorted(room.glob("step-*"), key=lambda path: int(path.name[5:]))
        for old in [path for path in kept if shardkeep.exists(path)][:-_KEPT]:
            shardkeep.delete(old)


def live(room: str, count: int, warm: int) -> list[str]:
    """So many saves; gives what grew between save `warm` and the last, and what did not end as it should."""
    place = Path(room)
    late: list[Any] = []
    violations: list[str] = []
    before = None
    shardkeep.save(place / "one", state(0))
    for number in range(count):
        try:
            save_on(place, number, late)
        except shardkeep.CheckpointExistsError:
            pass
        if len(late) > 2 or number in (warm, count - 1):
            violations += _wait_all(late)
        if number == warm:
            before = Held.now(place)
    after = Held.now(place)
    assert before is not None
    violations += _grown(before, after)
    last = max(n for n in range(count) if n % 3 == 0 and n % 10 != 9)
    if not same(shardkeep.load(place / "one"), state(last)) or not shardkeep.verify(place / "one").ok:
        violations.append("the last save is not what is there")
    return violations


def _wait_all(late: list[Any]) -> list[str]:
    """Wait for every save; one that was to fail must say why."""
    found: list[str] = []
    for pending in late:
        try:
            pending.wait(60)
        except shardkeep.CheckpointExistsError:
            pass
        except Exception as error:  # noqa: BLE001  (nothing else was to be expected)
            found.append(f"{type(error).__name__}: {error}")
    late.clear()
    return found


def _grown(before: Held, after: Held) -> list[str]:
    found: list[str] = []
    if after.memory > before.memory + _GROWTH:
        found.append(f"memory went from {before.memory >> 20} to {after.memory >> 20} MiB")
    if after.threads > before.threads or after.descriptors > before.descriptors:
        found.append(f"threads or descriptors: {before} became {after}")
    if after.files > before.files + 40:  # what stays differs with the formats of the last few
        found.append(f"files: {before.files} became {after.files}")
    return found


def run(quick: bool = False) -> list[Result]:
    """A thousand saves in one process."""
    count = 150 if quick else 1050
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as room:
        ((answer),) = parallel.spread(live, [(room, count, count // 5)])
    violations = [str(answer)] if isinstance(answer, Exception) else answer
    how = (
        "one process; both formats, exchange files, overwrites, new paths with old ones deleted; every tenth is refused"
    )
    return [Result("a thousand background saves", how, count, tuple(violations))]
