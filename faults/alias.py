"""Host memory that is changed while an array that may alias it is saved, and working directories that are gone."""

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardkeep
from dtypes import SAMPLE
from faults import parallel
from faults.result import Result
from servers.gcs import GCSServer
from shardkeep.stores.location import location, store_at
from ways import COMPUTED, PLACED, host_memory

FORMATS: tuple[Any, ...] = ("safetensors", "tensorstore")
_SHAPE = (64, 256)
Found = tuple[int, list[str]]


def _fill(memory: Any, seed: int) -> None:
    memory[...] = np.random.default_rng(seed).integers(0, 2, memory.shape).astype(memory.dtype)


def _change(memory: Any) -> None:
    raw = memory.view(np.uint8)
    np.bitwise_xor(raw, 1, out=raw)


def _tree(array: jax.Array) -> dict[str, Any]:
    """The smallest few arrays of a tree are copied in any case, to see whether they are donated: not this one."""
    return {"w": array, **{f"small{number}": jnp.full(1, number, jnp.int32) for number in range(4)}}


def _made(make: Callable[[Any], Any], memory: Any) -> Any:
    """The array, or None where this way cannot make one of this type."""
    try:
        made: Any = make(memory)
    except (TypeError, ValueError, BufferError):
        return None
    return made.block_until_ready() if isinstance(made, jax.Array) else None


def afterwards(room: str, dtype: str, repeats: int, names: list[str] | None = None) -> Found:
    """`save_async`, then the memory changes at once: what is saved is the state at the call, bit by bit."""
    points, found = 0, []
    for name in names or PLACED:
        for number in range(2 * repeats):
            memory = host_memory(_SHAPE, getattr(jnp, dtype), start=64 * (number % 3))
            _fill(memory, number)
            array = _made(PLACED[name], memory)
            if array is None:
                continue
            expected = np.asarray(array).tobytes()
            path = f"{room}/{dtype}-{points}"
            held = number < 2  # at first nothing is written before the change, then whoever is faster
            lock = store_at(location(path)).lock(30) if held else threading.Lock()
            with lock:
                pending = shardkeep.save_async(path, _tree(array), format=FORMATS[number % 2], copy=number % 5 == 4)
                _change(memory)
            pending.wait()
            points += 1
            if np.asarray(shardkeep.load(path)["w"]).tobytes() != expected:
                found.append(f"{name}, {dtype}, {FORMATS[number % 2]}: other bytes than at the call were saved")
            shardkeep.delete(path)
    return points, found


def behind_jax(room: str, names: list[str] | None = None) -> Found:
    """With `copy=True` also the memory of results may be changed, as by a tensor of another library that shares it."""
    points, found = 0, []
    for name in names or COMPUTED:
        for format in FORMATS:
            array = COMPUTED[name](host_memory(_SHAPE))
            views = [np.asarray(shard.data) for shard in array.addressable_shards]
            expected = np.asarray(array).tobytes()
            path = f"{room}/{points}"
            with store_at(location(path)).lock(30):
                pending = shardkeep.save_async(path, _tree(array), format=format, copy=True)
                for view in views:
                    ctypes.memset(view.__array_interface__["data"][0], 0x55, view.nbytes)
            pending.wait()
            points += 1
            if np.asarray(shardkeep.load(path)["w"]).tobytes() != expected:
                found.append(f"{name}, {format}, copy=True: other bytes than at the call were saved")
    return points, found


def meanwhile(room: str, dtype: str, repeats: int) -> Found:
    """`save` while another thread changes the memory: whatever is saved, the digests are those of what is stored."""
    memory = host_memory((1024, 1024), getattr(jnp, dtype))
    made = {name: array for name, make in PLACED.items() if (array := _made(make, memory)) is not None}
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            _change(memory)

    thread = threading.Thread(target=change)
    thread.start()
    found: list[str] = []
    names = ("run", "run", "model.safetensors")
    try:
        for number in range(repeats):
            path = f"{room}/{dtype}/{number}/{names[number % 3]}"
            some = dict(list(made.items())[number % 4 :: 4])
            shardkeep.save(path, some, format=FORMATS[number % 3 % 2])
            found += [f"{dtype}, save {number}: {problem}" for problem in shardkeep.verify(path).problems]
            shardkeep.delete(path)
    finally:
        over.set()
        thread.join()
    return repeats, found


def without_directory(room: str) -> Found:
    """Every public call in a process whose working directory was deleted: a typed error or the right result."""
    gone = tempfile.mkdtemp()
    os.chdir(gone)
    os.rmdir(gone)
    points, found = 0, []
    with GCSServer() as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        for place in (room, f"file://{room}/url", "gs://bucket/run", "run", "./run"):
            relative = place in ("run", "./run")
            for name, format in (("a", "safetensors"), ("b", "tensorstore"), ("c/model.safetensors", "safetensors")):
                for what, call, value in _calls(f"{place}/{name}", format):
                    expected = shardkeep.PathError if relative else value
                    points += 1
                    try:
                        told = call()
                    except Exception as error:  # noqa: BLE001  (what comes is the finding)
                        told = type(error)
                    if told != expected:
                        found.append(f"{what} {place}/{name}: {told!r}, not {expected!r}")
    return points, found


def _calls(path: str, format: Any) -> list[tuple[str, Callable[[], Any], Any]]:
    """Public calls by name, in order, and what they give where all is well."""
    tree = {"w": np.arange(1000.0)}
    return [
        ("save", lambda: shardkeep.save(path, tree, format=format).files > 0, True),
        ("save_async", lambda: shardkeep.save_async(path, tree, format=format, overwrite=True).wait().files > 0, True),
        ("exists", lambda: shardkeep.exists(path), True),
        ("inspect", lambda: list(shardkeep.inspect(path).leaves), ["w"]),
        ("load", lambda: bool((shardkeep.load(path)["w"] == tree["w"]).all()), True),
        ("verify", lambda: shardkeep.verify(path).ok, True),
        ("latest", lambda: shardkeep.latest(os.path.dirname(path)) is not None, True),
        ("delete", lambda: shardkeep.delete(path), None),
    ]


def _sum(answers: list[Any]) -> tuple[int, tuple[str, ...]]:
    points, found = 0, []
    for answer in answers:
        if isinstance(answer, Exception):
            found.append(str(answer))
        else:
            points += answer[0]
            found += answer[1]
    return points, tuple(found)


def run(quick: bool = False) -> Iterator[Result]:
    """Every way to make an array that is known, in every kind of dtype."""
    repeats, saves = (1, 6) if quick else (8, 60)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        rooms = iter([Path(directory) / str(number) for number in range(4)])
        room = str(next(rooms))
        found = _sum(parallel.spread(afterwards, [(room, dtype, repeats) for dtype in SAMPLE]))
        how = f"{len(PLACED)} ways to create an array, on one device or eight; {len(SAMPLE)} dtypes, both formats"
        yield Result("host memory that an array aliases changes after `save_async`", how, *found)
        room = str(next(rooms))
        found = _sum(parallel.spread(behind_jax, [(room,)]))
        how = (
            f"{len(COMPUTED)} kinds of computed arrays, overwritten through their addresses; `copy=True`, both formats"
        )
        yield Result("the memory of a computed array changes after `save_async`", how, *found)
        room = str(next(rooms))
        found = _sum(parallel.spread(meanwhile, [(room, dtype, saves) for dtype in SAMPLE]))
        how = "another thread changes it continuously; the stored bytes must match their digests"
        yield Result("host memory that arrays alias changes during a `save`", how, *found)
        room = str(next(rooms))
        found = _sum(parallel.spread(without_directory, [(room,)], seconds=120))
        how = (
            "`save`, `load`, `delete` and five other functions with paths, file:// and gs:// URLs; relative paths must "
            "raise `PathError`"
        )
        yield Result("the working directory was deleted", how, *found)
