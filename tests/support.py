"""What the tests share: an exact comparison of trees, classes to put in trees, formats to save in, subprocesses."""

import ctypes
import json
import mmap
import os
import struct
import subprocess
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import Mesh

import shardkeep
from dtypes import NUMPY, WIDE, dtype_of
from shardkeep.model.arrays import Region
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.scopes import Scope, frame_above
from shardkeep.stores.base import Held, Store
from signals import START

for _name in shardkeep.__all__:  # imported now: who becomes another user may not be able to read the sources any more
    getattr(shardkeep, _name)


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Same structure, same types, same dtypes and shapes, same bits."""
    place = where or "(root)"
    if isinstance(expected, jax.Array):
        assert isinstance(actual, jax.Array), f"{place}: a {type(actual).__name__} is no jax.Array"
        assert actual.dtype == expected.dtype, f"{place}: {actual.dtype} is not {expected.dtype}"
        assert actual.shape == expected.shape, f"{place}: {actual.shape} is not {expected.shape}"
        if jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(actual) == jax.random.key_impl(expected), place
            actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
        assert bits(actual) == bits(expected), f"{place}: bits differ"
        return
    assert type(actual) is type(expected), f"{place}: {type(actual)} is not {type(expected)}"
    if isinstance(expected, np.ndarray | np.generic):
        assert actual.dtype == expected.dtype, f"{place}: {actual.dtype} is not {expected.dtype}"
        assert actual.shape == expected.shape, f"{place}: {actual.shape} is not {expected.shape}"
        assert bits(actual) == bits(expected), f"{place}: bits differ"
    elif isinstance(expected, float):
        assert struct.pack(">d", actual) == struct.pack(">d", expected), f"{place}: {actual!r} is not {expected!r}"
    elif isinstance(expected, complex):
        assert_same(actual.real, expected.real, f"{place}.real")
        assert_same(actual.imag, expected.imag, f"{place}.imag")
    elif isinstance(expected, dict):
        assert len(actual) == len(expected), f"{place}: {list(actual)} is not {list(expected)}"
        for (a, x), (b, y) in zip(actual.items(), expected.items(), strict=True):
            assert_same(a, b, f"{place} key {b!r}")
            assert_same(x, y, f"{where}[{b!r}]")
        if isinstance(expected, defaultdict):
            assert actual.default_factory is expected.default_factory, place
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{place}: {len(actual)} is not {len(expected)}"
        for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif expected is None or isinstance(expected, bool | int | str | bytes):
        assert actual == expected, f"{place}: {actual!r} is not {expected!r}"
    else:
        ours, theirs = _opened(actual), _opened(expected)
        assert ours[1] == theirs[1], f"{place}: {ours[1]!r} is not {theirs[1]!r}"
        assert_same(list(ours[0]), list(theirs[0]), where)


def bits(array: Any) -> bytes:
    """The C-order bytes of an array; sub-byte types have one byte per element."""
    return np.asarray(array).tobytes()


def _opened(tree: Any) -> tuple[Any, Any]:
    opened = tree_util.default_registry.flatten_one_level(tree)
    assert opened is not None, f"{type(tree)} is not a registered node"
    return opened


class Point(NamedTuple):
    x: Any
    y: Any


@tree_util.register_dataclass
@dataclass
class Dense:
    """A registered dataclass with a static field."""

    kernel: Any
    bias: Any
    name: str = field(default="dense", metadata={"static": True})


@tree_util.register_pytree_with_keys_class
class Keyed:
    """A custom node with key paths and plain aux data."""

    def __init__(self, left: Any, right: Any, tag: Any = "t") -> None:
        self.left, self.right, self.tag = left, right, tag

    def tree_flatten_with_keys(self) -> Any:
        children = ((tree_util.GetAttrKey("left"), self.left), (tree_util.GetAttrKey("right"), self.right))
        return children, self.tag

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Keyed":
        return cls(*children, tag=aux)


@tree_util.register_pytree_node_class
class Unkeyed:
    """A custom node without key paths; its aux data is whatever `tag` is."""

    def __init__(self, items: Any, tag: Any = None) -> None:
        self.items, self.tag = tuple(items), tag

    def tree_flatten(self) -> Any:
        return self.items, self.tag

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Unkeyed":
        return cls(children, aux)


# How a test saves: (ending of the path, arguments of save).
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "safetensors": ("", {}),
    "tensorstore": ("", {"format": "zarr"}),
    "zstd": ("", {"format": "zarr", "compression": "zstd"}),
    "exchange": (".safetensors", {}),
    "shards": (".safetensors", {"max_shard_size": 64}),
}


def save_as(kind: str, path: Path, tree: Any, **more: Any) -> Path:
    """Save in one of FORMATS; gives back the path that was used."""
    ending, arguments = FORMATS[kind]
    target = path.with_name(path.name + ending)
    shardkeep.save(target, tree, **arguments, **more)
    return target


def mesh_of(*shape: int) -> Mesh:
    """A mesh over the first devices, with axes a, b, c."""
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), tuple("abc"[: len(shape)]))


def grid_of(shape: tuple[int, ...], counts: tuple[int, ...]) -> list[Region]:
    """The regions of the shards of an array that is cut into that many parts along each dimension."""
    step = [n // k for n, k in zip(shape, counts, strict=True)]
    return [
        Region(tuple(i * n for i, n in zip(index, step, strict=True)), tuple(step)) for index in np.ndindex(*counts)
    ]


def pattern(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """An array whose bits run through everything its dtype can hold, NaNs included."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype == np.bool_:
        return (raw % 2).astype(np.bool_).reshape(shape)
    width = _SUB_BYTE.get(dtype.name)
    if width is not None:
        # One byte per element; integers below a byte are sign-extended as their own casts make them.
        values = raw % (1 << width)
        if dtype.name.startswith("int"):
            values = np.where(values >= 1 << (width - 1), values | (256 - (1 << width)), values).astype(np.uint8)
        raw = values
    return raw.view(dtype).reshape(shape)


_SUB_BYTE = {"int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
_SUB_BYTE |= {"float6_e2m3fn": 6, "float6_e3m2fn": 6}


def every_dtype() -> list[str]:
    """Every dtype that this JAX can hold without 64-bit types, by name."""
    plain = [name for name in NUMPY if name not in WIDE]
    names = [*_SUB_BYTE, *(name for name in dir(jnp) if name.startswith(("bfloat", "float8"))), *plain]
    found: list[str] = []
    for name in names:
        try:
            jax.device_put(np.zeros(1, dtype_of(name))).block_until_ready()
        except (TypeError, ValueError, RuntimeError):  # JAX 0.10 has no 6-bit floats, for example
            continue
        found.append(name)
    return found


def all_bits(dtype: str) -> np.ndarray:
    """16 x 16 values: every bit pattern of a type of at most one byte, else many, with NaNs of every payload kind."""
    parsed = dtype_of(dtype)
    values = pattern(parsed, (256,))
    if parsed.itemsize == 1:
        width = _SUB_BYTE.get(dtype, 1 if dtype == "bool" else 8)
        raw = (np.arange(256) % (1 << width)).astype(np.uint8)
        if dtype.startswith("int") and width < 8:
            raw = np.where(raw >= 1 << (width - 1), raw | (256 - (1 << width)), raw).astype(np.uint8)
        return raw.view(parsed).reshape(16, 16)
    top = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "complex64": 0x7F800000}.get(dtype)
    if top is not None:
        raw = values.view(np.uint32 if dtype == "complex64" else f"u{parsed.itemsize}")
        sign = 0x8000 if top < 1 << 16 else 0x80000000
        raw[0:64:2] = top + 1 + np.arange(32)  # signaling NaNs; the last payload bits are what conversions lose
        raw[1:64:2] = (top | sign) + 1 + np.arange(32)
        raw[64], raw[65], raw[66], raw[67] = sign, top, top | sign, 1  # -0.0, both infinities, the smallest subnormal
    return values.reshape(16, 16)


def run_python(code: str, *arguments: str, devices: int = 1, timeout: float = 100, **environment: str) -> str:
    """What a program prints that runs `code` in a process of its own, with `from support import *` in front.

    It has the signals of a program that was started from a terminal.
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    env.update(environment)
    start = START + "import jax, jax.numpy as jnp, numpy as np, shardkeep\nfrom support import *\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code, *arguments],
        env=env,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


__all__ = [
    "FORMATS",
    "Dense",
    "Keyed",
    "OrderedDict",
    "Point",
    "Unkeyed",
    "all_bits",
    "assert_same",
    "bits",
    "defaultdict",
    "every_dtype",
    "mesh_of",
    "pattern",
    "run_python",
    "save_as",
]


def cached_pages(path: Path) -> int:
    """How many pages of a file are in the page cache."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    with open(path, "rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    found = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(page & 1 for page in found)


def hold(store: Store, name: str, line: bytes) -> Held:
    """A record that is taken."""
    held = store.hold(name)
    held.take(line)
    return held


def record(store: Store, save_id: str, names: list[str]) -> Held:
    """The record of a running save, as a save makes it."""
    return hold(store, f"{store.saves}/{save_id}", json.dumps(names).encode())


@contextmanager
def crew_of(*arguments: Any, **more: Any) -> Iterator[Crew]:
    """A crew, ended when the block is left."""
    with Scope("a test", frame_above(2)) as scope:
        yield scope.add(Crew(*arguments, **more))
