"""What the processes under fault do: states known by a kind and a number, and actions with plain arguments."""

import contextlib
import dataclasses
import errno
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

import jax
import ml_dtypes
import numpy as np

import shardkeep
from multiprocess.inside import arrays_of, mesh_over, values_of
from shardkeep.cli.main import main
from shardkeep.runtime.budget import budget

_PATIENCE = 180.0  # seconds that a reader waits for the writer beside it, which may have been given up

for _name in shardkeep.__all__:  # imported now: children are under fault, or another user
    getattr(shardkeep, _name)


def make(kind: str, number: int) -> Any:
    """The state of that kind and number: the same in every process, no two numbers alike in any array."""
    random = np.random.default_rng(number)
    return _KINDS[kind](random, number)


def _plain(random: np.random.Generator, number: int) -> Any:
    layers = [
        {"k": random.standard_normal((16, 8)).astype(ml_dtypes.bfloat16), "b": random.integers(0, 99, 5, np.int32)}
        for _ in range(2)
    ]
    return {
        "w": random.standard_normal((40, 30)).astype(np.float32),
        "layers": layers,
        "empty": np.zeros((0, 3), np.float32),
        "zero": np.array(number, np.int16),
        "step": number,
        "name": f"state {number}",
        "none": None,
    }


def _fewer(random: np.random.Generator, number: int) -> Any:
    return {"w": random.standard_normal(11).astype(np.float32), "step": number}


def _other(random: np.random.Generator, number: int) -> Any:
    """The keys of the plain state, with other dtypes and shapes."""
    return {"w": random.standard_normal((3, 5, 7)), "layers": random.integers(0, 99, (4, 4), np.uint8), "step": number}


def _many(random: np.random.Generator, number: int) -> Any:
    return {"step": number, "leaves": [random.standard_normal(9) for _ in range(12)]}


def _large(random: np.random.Generator, number: int) -> Any:
    """Above the size that one task writes, so that a file is written in parts."""
    return {
        "big": random.integers(0, 255, (33 << 20) + 5, np.uint8),
        "small": random.standard_normal(3),
        "step": number,
    }


def _wide(random: np.random.Generator, number: int) -> Any:
    return {"big": random.integers(0, 255, 5 << 20, np.uint8), "small": random.standard_normal(3), "step": number}


def _sharded(random: np.random.Generator, number: int) -> Any:
    """Arrays on eight devices, large enough that each shard is a piece of its own."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return {
        "spread": jax.device_put(random.standard_normal((512, 640)).astype(np.float32), spread),
        "one": jax.numpy.asarray(random.standard_normal((4, 4)).astype(np.float32)),
        "step": number,
    }


_KINDS = {
    "plain": _plain,
    "fewer": _fewer,
    "other": _other,
    "many": _many,
    "large": _large,
    "wide": _wide,
    "sharded": _sharded,
}


def save(
    path: str, kind: str, number: int, linkless: bool = False, trees: dict[str, str] | None = None, **arguments: Any
) -> None:
    """Save a state; `trees` are the kinds of further states of the same number, by prefix, committed with it."""
    if linkless:
        os.link = _refuse_link
    further = {prefix: make(each, number) for prefix, each in (trees or {}).items()}
    shardkeep.save(path, make(kind, number), trees=further, **arguments)


def _refuse_link(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))  # what file systems without hard links answer


def save_async(path: str, kind: str, number: int, **arguments: Any) -> None:
    shardkeep.save_async(path, make(kind, number), **arguments).wait()


def save_often(path: str, kind: str, first: int, count: int, **arguments: Any) -> None:
    for number in range(first, first + count):
        shardkeep.save(path, make(kind, number), overwrite=True, **arguments)


def save_in_turn(path: str, kind: str, first: int, count: int, variants: list[dict[str, Any]]) -> None:
    """Like `save_often`, with the arguments of each variant in turn."""
    for number in range(first, first + count):
        arguments = variants[number % len(variants)]
        shardkeep.save(path, make(kind, number), overwrite=True, **arguments)


def save_together(index: int, port: int, path: str, number: int, format: Any) -> None:
    """Save as one of two JAX processes, over what is there; one that died is given up after two seconds."""
    jax.config.update("jax_num_cpu_devices", 2)
    place = f"127.0.0.1:{port}"
    jax.distributed.initialize(place, 2, index, coordinator_bind_address=place)
    tree = arrays_of(values_of(number), mesh_over((2, 2)), 1)
    os.environ["SHARDKEEP_PROCESS_SILENCE"] = "2"
    shardkeep.save(path, tree, format=format, overwrite=True)


def load(path: str, kind: str, number: int, **arguments: Any) -> None:
    assert same(shardkeep.load(path, **arguments), make(kind, number)), "what was loaded is another state"


def load_until(path: str, kind: str, last: int, **arguments: Any) -> dict[str, int]:
    """Load until the state numbered `last` is there; every load must be exactly one of the states."""
    loads, seen = 0, set()
    until = time.monotonic() + _PATIENCE
    while last not in seen:
        assert time.monotonic() < until, "the writer has not come to its end"
        tree = shardkeep.load(path, **arguments)
        number = int(tree["step"])
        assert same(tree, make(kind, number)), f"a load gave a mix: it says {number}"
        loads += 1
        seen.add(number)
    return {"loads": loads, "states": len(seen)}


def verify_until(path: str, last: int) -> dict[str, int]:
    """Verify until the state numbered `last` is there; no report may speak of damage."""
    count = 0
    until = time.monotonic() + _PATIENCE
    while True:
        assert time.monotonic() < until, "the writer has not come to its end"
        report = shardkeep.verify(path)
        assert report.ok, str(report)
        count += 1
        if shardkeep.load(path)["step"] == last:
            return {"reports": count}


def check(path: str) -> list[bool]:
    return [shardkeep.exists(path), shardkeep.verify(path).ok]


def load_within(path: str, gigabytes: int) -> None:
    """Load with little memory to be had."""
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
    shardkeep.load(path)


def with_few_files(act: str, spare: int, **arguments: Any) -> None:
    """Save or load when only `spare` more files may be open."""
    lowest = os.open(os.devnull, os.O_RDONLY)  # the number that the next file gets
    os.close(lowest)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
    try:
        globals()[act](**arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def save_with_few_threads(path: str, how: str, spare: int) -> dict[str, int]:
    """Save when only `spare` more threads may be started, then again without that limit."""
    tree = {"w": np.ones(5 << 20)}  # large enough to be written by several threads
    shardkeep.save(path, {"w": np.ones(3)})
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (threading.active_count() + spare, hard))
    with contextlib.suppress(RuntimeError):
        pending = getattr(shardkeep, how)(path, tree, overwrite=True)
        if how == "save_async":
            pending.wait(10)
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    shardkeep.save_async(path, {"w": np.full(3, 3.0)}, overwrite=True).wait(5)
    loaded = int(shardkeep.load(path)["w"][0])
    deadline = time.monotonic() + 2
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"threads": threading.active_count(), "held": budget.used, "loaded": loaded}


def _layer(fields: dict[str, int]) -> Any:
    """A registered dataclass called Layer with these fields, those marked 1 static."""
    made = dataclasses.make_dataclass("Layer", list(fields), namespace={"__module__": __name__})
    data = [name for name, static in fields.items() if not static]
    meta = [name for name, static in fields.items() if static]
    globals()["Layer"] = jax.tree_util.register_dataclass(made, data_fields=data, meta_fields=meta)
    return made


def save_layer(path: str) -> None:
    layer = _layer({"kernel": 0, "bias": 0, "name": 1})
    shardkeep.save(path, {"d": layer(kernel=np.ones(2), bias=np.zeros(3), name="n")})


def load_layer(path: str, fields: dict[str, int]) -> list[Any]:
    _layer(fields)
    loaded = shardkeep.load(path)["d"]
    return [type(loaded).__name__, *(list(np.shape(getattr(loaded, name, None))) for name in ("kernel", "bias"))]


def end_during_save(path: str, kind: str, number: int, how: str, pause: str, **arguments: Any) -> None:
    """A program that ends while its save stops at a call, which goes on only when the main thread is no more."""
    pending = shardkeep.save_async(path, make(kind, number), **arguments)
    if how == "fail":
        return
    while not (pending.done() or os.path.exists(f"{pause}.reached")):
        time.sleep(0.001)
    threading.Thread(target=_go_on, args=(pause,), daemon=True).start()
    if how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "exit":
        sys.exit(3)
    elif how == "raise":
        raise RuntimeError("mine")
    elif how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        pending.wait()


def _go_on(pause: str) -> None:
    threading.main_thread().join()
    with open(f"{pause}.go", "w"):
        pass


def command(arguments: list[str]) -> int:
    """The command line; its output is in the log."""
    return main(arguments)


def fail_then_delete(path: str, kind: str, number: int) -> None:
    try:
        shardkeep.save(path, make(kind, number), overwrite=True)
    except shardkeep.StorageError:
        shardkeep.delete(path)
    else:
        raise AssertionError("the save did not fail")


def delete(path: str) -> None:
    shardkeep.delete(path)


_BUSY = (shardkeep.ConflictError, shardkeep.CheckpointNotFoundError, shardkeep.IncompleteCheckpointError)


def save_whatever(path: str, kind: str, count: int) -> None:
    """Save while others delete: a conflict is an answer, anything else is not."""
    for number in range(count):
        with contextlib.suppress(shardkeep.ConflictError):
            shardkeep.save(path, make(kind, number), overwrite=True)


def delete_whatever(path: str, count: int) -> None:
    for _ in range(count):
        with contextlib.suppress(*_BUSY):
            shardkeep.delete(path)
        time.sleep(0.01)


def load_whatever(path: str, kind: str, count: int) -> None:
    for _ in range(count):
        try:
            tree = shardkeep.load(path)
        except shardkeep.MissingDataError:
            raise
        except _BUSY:
            continue
        assert same(tree, make(kind, tree["step"])), "a mix"


def same(a: Any, b: Any) -> bool:
    """Same structure and types, same bits."""
    if isinstance(b, jax.Array | np.ndarray):
        kind = jax.Array if isinstance(b, jax.Array) else np.ndarray
        alike = isinstance(a, kind) and a.dtype == b.dtype and a.shape == b.shape
        return bool(alike and np.asarray(a).tobytes() == np.asarray(b).tobytes())
    if type(a) is not type(b):
        return False
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
