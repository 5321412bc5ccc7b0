"""What a cluster of thousands of processes has and one machine has not, for `scale.py`: devices, a coordination
service, and a bucket. They are looked at, and asked, by shardkeep's own functions only, and count what they are asked.
"""

import bisect
import contextlib
import datetime
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import obstore
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from obstore.exceptions import AlreadyExistsError, PreconditionError

from shardkeep.stores.bucket.credentials import Bucket, Clients

LISTED = 1000  # names in one response of a bucket


@dataclass(frozen=True)
class Device:
    """What JAX's `Mesh` and `NamedSharding`, and shardkeep, ask a device."""

    id: int
    process_index: int
    client: Any
    platform: str = "cpu"
    device_kind: str = "a stand-in"


class Client:
    """What JAX asks for the process that this one is."""

    platform = "cpu"

    def process_index(self) -> int:
        return 0


@dataclass(frozen=True)
class Array:
    """An array without data: what an assignment and a plan need to know of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: NamedSharding

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def mesh_of(processes: int, replicas: int, devices: int = 1) -> Mesh:
    """A mesh of `replicas` groups, over each of which arrays are sharded; so many devices for each process."""
    client, count = Client(), processes * devices
    found = np.empty(count, object)
    found[:] = [Device(i, i // devices, client) for i in range(count)]
    return Mesh(found.reshape(replicas, count // replicas), ("replica", "fsdp"))


def transformer(mesh: Mesh, blocks: int, width: int) -> dict[str, Array]:
    """Parameters and the two moments of Adam: ten arrays for each block, eight of them sharded, two replicated."""
    shards = mesh.shape["fsdp"]
    width, hidden = -(-width // shards) * shards, 4 * -(-width // shards) * shards
    kinds = {
        "norm1": ((width,), PartitionSpec()),
        "norm2": ((width,), PartitionSpec()),
        **{name: ((width, width), PartitionSpec("fsdp")) for name in ("query", "key", "value", "output")},
        **{name: ((width, hidden), PartitionSpec("fsdp")) for name in ("gate", "up")},
        **{name: ((hidden, width), PartitionSpec(None, "fsdp")) for name in ("down", "more")},
    }
    return {
        f"{part}/{block}/{name}": Array(shape, np.dtype(np.float32), NamedSharding(mesh, spec))
        for part in ("params", "mu", "nu")
        for block in range(blocks)
        for name, (shape, spec) in kinds.items()
    }


class Service:
    """The key-value calls of JAX's coordination service, in memory. `requests` counts them by kind."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self._keys: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            self.requests["heartbeat" if "/alive/" in key else "set"] += 1
            if key in self._keys and not allow_overwrite:
                raise JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self._keys[key] = value
            self._changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        with self._changed:
            self.requests["get"] += 1
            if key not in self._keys:
                raise JaxRuntimeError(f"NOT_FOUND: {key}")
            return self._keys[key]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self._changed:
            self.requests["wait"] += 1
            if not self._changed.wait_for(lambda: key in self._keys, milliseconds / 1000):
                raise JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self._keys[key]

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        with self._changed:
            self.requests["directory"] += 1
            return [(key, value) for key, value in self._keys.items() if key.startswith(directory)]

    def key_value_delete(self, directory: str) -> None:
        with self._changed:
            self.requests["delete"] += 1
            for key in [key for key in self._keys if key.startswith(directory)]:
                del self._keys[key]


@dataclass
class Stored:
    """An object: its bytes, or only their number."""

    key: str
    data: bytes
    size: int
    version: int

    @property
    def meta(self) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC)
        return {
            "path": self.key,
            "size": self.size,
            "e_tag": f'"{self.version}"',
            "version": None,
            "last_modified": now,
        }

    def bytes(self) -> bytes:
        return self.data


@dataclass
class Cloud:
    """A bucket in memory, in the place of obstore's functions: each request takes a while, and not too many a second.

    `requests` counts them by kind. Data objects have a size and no data.
    """

    seconds: float = 0.0
    rate: float = 3500.0  # a second: what S3 answers under one prefix at least
    requests: Counter[str] = field(default_factory=Counter)
    objects: dict[str, Stored] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)
    _lock: Any = field(default_factory=threading.Lock)
    _next: float = 0.0

    def declare(self, key: str, size: int, data: bytes = b"") -> None:
        """An object that is there, without a request."""
        if key not in self.objects:
            bisect.insort(self._names, key)
        self.objects[key] = Stored(key, data, size, next(self._numbers))

    def declare_all(self, sizes: dict[str, int]) -> None:
        """The same for many objects that are new."""
        self.objects |= {key: Stored(key, b"", size, next(self._numbers)) for key, size in sizes.items()}
        self._names = sorted(self.objects)

    def _ask(self, kind: str) -> None:
        with self._lock:
            self.requests[kind] += 1
            now = time.monotonic()
            self._next = max(self._next, now) + 1 / self.rate
            wait = self._next - now
        if self.seconds:
            time.sleep(self.seconds + wait)

    def put(self, _: Any, key: str, file: Any, *, mode: Any = "overwrite", **__: Any) -> dict[str, Any]:
        self._ask("put")
        data = file if isinstance(file, bytes) else b"".join(file)
        with self._lock:
            there = self.objects.get(key)
            if mode == "create" and there is not None:
                raise AlreadyExistsError(key)
            if isinstance(mode, dict) and (there is None or there.meta["e_tag"] != mode.get("e_tag")):
                raise PreconditionError(key)
            self.declare(key, len(data), data)
            return self.objects[key].meta

    def _find(self, kind: str, key: str) -> Stored:
        self._ask(kind)
        with self._lock:
            if key not in self.objects:
                raise FileNotFoundError(key)
            return self.objects[key]

    def get(self, _: Any, key: str, *, options: Any = None) -> Stored:
        return self._find("get", key)

    def head(self, _: Any, key: str) -> dict[str, Any]:
        return self._find("head", key).meta

    def delete(self, _: Any, keys: str | list[str]) -> None:
        self._ask("delete")
        with self._lock:
            for key in [keys] if isinstance(keys, str) else keys:
                if self.objects.pop(key, None):
                    self._names.remove(key)

    def list(self, _: Any, prefix: str | None = None, *, offset: str | None = None, **__: Any) -> Iterator[Any]:
        start = f"{prefix}/" if prefix else ""
        after = max(offset or "", start)
        while True:
            self._ask("list")
            with self._lock:
                first = bisect.bisect_right(self._names, after)
                found = [name for name in self._names[first : first + LISTED] if name.startswith(start)]
                page = [self.objects[name].meta for name in found]
            if page:
                yield page
            if len(page) < LISTED:
                return
            after = found[-1]

    def list_with_delimiter(self, _: Any, prefix: str | None = None, **__: Any) -> dict[str, Any]:
        start = f"{prefix}/" if prefix else ""
        with self._lock:
            first, last = (bisect.bisect_left(self._names, start + end) for end in ("", "\U0010ffff"))
            below = self._names[first:last]
            inside = [name for name in below if "/" not in name[len(start) :]]
            deeper = {start + name[len(start) :].partition("/")[0] for name in below if "/" in name[len(start) :]}
            objects = [self.objects[name].meta for name in inside]
        for _page in range(max(-(-(len(objects) + len(deeper)) // LISTED), 1)):
            self._ask("list")
        return {"objects": objects, "common_prefixes": sorted(deeper)}

    @contextlib.contextmanager
    def in_place(self) -> Iterator["CloudBucket"]:
        """In the place of obstore's functions while a context lasts."""
        names = ("put", "get", "head", "delete", "list", "list_with_delimiter")
        real = {name: getattr(obstore, name) for name in names}
        for name in names:
            setattr(obstore, name, getattr(self, name))
        try:
            yield CloudBucket("s3", "a-bucket")
        finally:
            for name in names:
                setattr(obstore, name, real[name])


class CloudBucket(Bucket):
    """A bucket that needs no keys."""

    def clients(self) -> Clients:
        client: Any = object()
        return Clients(client, client, client, lambda _: client)
