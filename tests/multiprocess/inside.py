"""What scripts inside a cluster use: arrays over all processes, exact comparisons, faults, counters.

The values of every state are made with NumPy from a number, so that each process, and the test itself, knows all of
them without asking another.
"""

import contextlib
import ctypes
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from support import assert_same, bits, pattern

MODES = {"off": 0, "count": 1, "kill": 2, "torn": 3, "interrupt": 4, "fail": 5, "pause": 6}


def say(**facts: Any) -> None:
    """Tell the test."""
    print("SAID " + json.dumps(facts), flush=True)


def mesh_over(shape: tuple[int, ...] | None = None, axes: tuple[str, ...] = ("a", "b")) -> Mesh:
    """A mesh over all devices of all processes."""
    devices = np.array(jax.devices())
    return Mesh(devices.reshape(shape or (len(devices), *[1] * (len(axes) - 1))), axes)


def spread(values: Any, spec: P, shape: tuple[int, ...] | None = None, axes: tuple[str, ...] = ("a", "b")) -> jax.Array:
    """An array over all devices of all processes; each process brings only what its devices hold."""
    return put(values, NamedSharding(mesh_over(shape, axes), spec))


def put(values: Any, sharding: Any) -> jax.Array:
    dtype = jax.dtypes.canonicalize_dtype(values.dtype)  # a process may have no part of it
    return jax.make_array_from_callback(np.shape(values), sharding, lambda index: values[index], dtype=dtype)


def caught(call: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a call raised (kind None: nothing), and how long it took."""
    started = time.monotonic()
    try:
        call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (it is what the test wants to see)
        return {
            "kind": type(error).__name__,
            "bases": [base.__name__ for base in type(error).__mro__],
            "message": str(error),
            "seconds": time.monotonic() - started,
        }
    return {"kind": None, "bases": [], "message": "", "seconds": time.monotonic() - started}


def holds(array: Any, values: Any) -> bool:
    """Whether every shard that this process has is as it should be, bit by bit."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if not isinstance(array, jax.Array):
        return bool(array.dtype == values.dtype and array.shape == values.shape and _bits(array) == _bits(values))
    assert array.addressable_shards, "this process has no part of it"
    return (
        array.dtype == values.dtype
        and array.shape == values.shape
        and all(_bits(s.data) == _bits(values[s.index]) for s in array.addressable_shards)
    )


def _bits(array: Any) -> bytes:
    """The bits that count: the spare ones of an int4 in its byte are set by NumPy and clear in JAX."""
    array = np.asarray(array)
    return bits(array.astype(np.int8) if array.dtype.name in ("int4", "int2", "int1") else array)


def differences(tree: Any, values: Any) -> list[str]:
    """Leaves of `tree` that are not, where this process sees them, what `values` says; none if all are."""
    found: list[str] = []
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    wanted, other = jax.tree_util.tree_flatten(values)
    if structure != other:
        return [f"structure {structure} is not {other}"]
    for (path, leaf), value in zip(paths, wanted, strict=True):
        name = jax.tree_util.keystr(path)
        if isinstance(value, np.ndarray):
            if not hasattr(leaf, "dtype"):
                found.append(f"{name}: {leaf!r:.60} is no array")
            elif not holds(leaf, value):
                found.append(f"{name}: {leaf.dtype}{list(leaf.shape)} differs from {value.dtype}{list(value.shape)}")
        elif type(leaf) is not type(value) or leaf != value:
            found.append(f"{name}: {leaf!r:.60} is not {value!r:.60}")
    return found


class Adam(NamedTuple):
    """As optimizers keep their state."""

    count: Any
    mu: Any
    nu: Any


def values_of(number: int) -> Any:
    """A state like those of training, in NumPy, another for each number. What is called `…key` is data of PRNG keys."""

    def some(dtype: Any, *shape: int) -> np.ndarray:
        return pattern(dtype, shape, seed=number * 1000 + len(shape) * 100 + sum(shape))

    layers = [
        {"kernel": some("float32", 64, 48), "bias": some("bfloat16", 48)},
        {"kernel": some("bfloat16", 64, 48 + number % 2 * 8), "bias": some("float16", 16)},
    ]
    odd = {
        "fp8": some("float8_e4m3fn", 16, 8),
        "fp8 other": some("float8_e5m2", 8),
        "int4": some("int4", 8, 16),
        "bool": some("bool", 8, 4),
        "complex": some("complex64", 4, 4),
        "scalar": some("float32"),
        "empty": np.zeros((0, 8), np.float32),
        "three": some("int8", 4, 8, 4),
        "uneven": some("uint16", 7, 3),
        "wide": some("float32", 1024, 384),
        "long": some("uint8", 1 << 21),
    }
    return {
        "params": {"layers": layers, "odd": odd},
        "opt": (Adam(np.array(number, np.int32), [some("float32", 64, 48)], [some("float32", 48)]), None),
        "dropout key": some("uint32", 2),
        "many key": some("uint32", 8, 2),
        "host": some("float64", 5, 3),
        "step": number,
        "name": f"state {number}",
        "rate": 0.1 * number,
    }


SPECS = [
    P("a"),
    P("b"),
    P("a", "b"),
    P(None, "a"),
    P(("a", "b")),
    P(),
    P("b", "a"),
    P(None, ("b", "a")),
    P(None, None, "a"),
]


def shardings_of(values: Any, mesh: Mesh, turn: int = 0) -> Any:
    """For each array of a state a sharding that fits it, by turns one of all kinds."""
    paths, structure = jax.tree_util.tree_flatten_with_path(values)
    chosen: list[Any] = []
    for number, (path, value) in enumerate(paths):
        if not isinstance(value, np.ndarray) or _name(path) == "host":
            chosen.append(None)
            continue
        shape = value.shape[:-1] if _name(path).endswith("key") else value.shape
        specs = SPECS[:1] if 0 in shape else SPECS  # what is empty has a test of its own
        fitting = [spec for spec in specs if len(spec) <= len(shape) and _divides(spec, shape, mesh)]
        chosen.append(NamedSharding(mesh, fitting[(number + turn) % len(fitting)]))
    return jax.tree_util.tree_unflatten(structure, chosen)


def _divides(spec: P, shape: tuple[int, ...], mesh: Mesh) -> bool:
    sharding = NamedSharding(mesh, spec)
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _name(path: Any) -> str:
    return str(getattr(path[-1], "key", "")) if path else ""


def arrays_of(values: Any, mesh: Mesh, turn: int = 0) -> Any:
    """A state on the devices of a mesh, which may be those of several processes."""
    paths, structure = jax.tree_util.tree_flatten_with_path(values)
    shardings = structure.flatten_up_to(shardings_of(values, mesh, turn))
    placed: list[Any] = []
    for (path, value), sharding in zip(paths, shardings, strict=True):
        if sharding is None:
            placed.append(value)
        elif _name(path).endswith("key"):
            spec = P(*sharding.spec, *[None] * (value.ndim - len(sharding.spec)))
            placed.append(jax.random.wrap_key_data(put(value, NamedSharding(sharding.mesh, spec)), impl="threefry2x32"))
        else:
            placed.append(put(value, sharding))
    return jax.tree_util.tree_unflatten(structure, placed)


def abstract_of(values: Any, mesh: Mesh, turn: int = 0) -> Any:
    """A template: shapes, dtypes and shardings, no data."""
    paths, structure = jax.tree_util.tree_flatten_with_path(values)
    shardings = structure.flatten_up_to(shardings_of(values, mesh, turn))
    made: list[Any] = []
    for (path, value), sharding in zip(paths, shardings, strict=True):
        if sharding is None:
            made.append(value)
        elif _name(path).endswith("key"):
            made.append(jax.ShapeDtypeStruct(value.shape[:-1], jax.random.key(0).dtype, sharding=sharding))
        else:
            made.append(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
    return jax.tree_util.tree_unflatten(structure, made)


def fault(
    directory: Any, mode: str, at: int = 1, calls: str = "write", code: int = errno.EIO, again: bool = True
) -> None:
    """Let file system calls below a directory fail from now on, or the process die at one (see faults/shim.c)."""
    ctypes.CDLL(None).shim_arm(
        str(directory).encode(), calls.encode(), MODES[mode], at, code, again, f"{directory}.pause".encode()
    )


def no_fault() -> None:
    fault("/nowhere", "off")


class Traffic:
    """What this process has read and written with system calls, has needed of memory, and had JAX compile."""

    def __init__(self) -> None:
        self._compiled = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self.reset()

    def _listen(self, event: str, *_: Any, **__: Any) -> None:
        self._compiled += "backend_compile" in event

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
        self._start = self._now()

    def _now(self) -> dict[str, int]:
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        memory = {name: int(status[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS")}
        return {"read": int(io["rchar"]), "written": int(io["wchar"]), "compiled": self._compiled, **memory}

    def since(self) -> dict[str, int]:
        """Bytes read and written, the peak of memory above what there was, programs compiled: since the reset."""
        now = self._now()
        found = {name: now[name] - self._start[name] for name in ("read", "written", "compiled")}
        return {**found, "memory": now["VmHWM"] - self._start["VmRSS"]}


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def meet(root: Path, name: str, index: int, size: int, seconds: float = 60, but: int = -1) -> None:
    """Wait until all processes (`but` one) are here: through files, without a word to JAX or to shardkeep."""
    (root / f"{name}.{index}.here").touch()
    deadline = time.monotonic() + seconds
    while not all((root / f"{name}.{i}.here").exists() for i in range(size) if i != but):
        assert time.monotonic() < deadline, f"not all processes came to {name}"
        time.sleep(0.002)


def files_below(path: Any) -> dict[str, int]:
    """Names and sizes of all files in a directory, those of the control directory included."""
    return {
        os.path.relpath(os.path.join(where, name), path): os.path.getsize(os.path.join(where, name))
        for where, _, names in os.walk(path)
        for name in names
    }


__all__ = [
    "MODES",
    "Adam",
    "Traffic",
    "abstract_of",
    "arrays_of",
    "assert_same",
    "bits",
    "caught",
    "differences",
    "environment",
    "fault",
    "files_below",
    "holds",
    "meet",
    "mesh_over",
    "no_fault",
    "pattern",
    "put",
    "say",
    "shardings_of",
    "spread",
    "values_of",
]
