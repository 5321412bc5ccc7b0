"""A checkpoint in a bucket: objects below a prefix, through obstore.

An object appears whole or not at all, so data is put once under names nobody uses. What a disk does by locks is done
here by conditional puts and leases: the lock and the records of running saves are objects that their owner puts again
and again while it lives; one that has not been renewed for `LEASE` seconds, by the server's own clock, belongs to
somebody who died. The manifest is put on condition that it still is the one that was read.
"""

import datetime
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from shardkeep.errors import AccessError, ConflictError, StorageError
from shardkeep.memory import aligned_empty
from shardkeep.stores.credentials import Bucket, explain
from shardkeep.workers import Crew

LEASE = float(os.environ.get("SHARDKEEP_LEASE", "60"))  # seconds
OBJECT_LIMIT = 32 << 20  # what is put as one object
LARGE = 2 * OBJECT_LIMIT  # what is larger goes up in parts
CONCURRENCY = 8
_PART = 16 << 20  # of an object that must be larger than that
_PATIENCE = 60.0  # seconds in which what may pass is tried again
_GAP = 64 << 10  # reading so much too much is cheaper than another request
_RUN = 16 << 20

log = logging.getLogger("shardkeep")

T = TypeVar("T")


class CloudStore:
    """Objects of a bucket below one prefix."""

    mappable = False
    remote = True
    concurrency: int | None = CONCURRENCY
    object_limit: int | None = OBJECT_LIMIT

    def __init__(self, bucket: Bucket, prefix: str, control: str, whole: bool = True) -> None:
        """`whole`: everything below the prefix belongs to the checkpoint, so it may be listed."""
        self.url = f"{bucket.url}/{prefix}".rstrip("/")
        self.control = control
        self.saves = f"{control}/saves"
        self._bucket, self._prefix, self._whole = bucket, prefix, whole
        self._sizes: dict[str, int] | None = None
        self._versions: dict[str, Any] = {}
        self._leases: list[_Lease] = []

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self._prefix, name) if part)

    def call(self, function: Callable[..., T], name: str, *arguments: Any, **options: Any) -> T:
        """One request (tried again while that may help), its failure told in our words."""
        clients = self._bucket.clients()
        client = clients.writing if function in (obstore.put, obstore.delete, obstore.copy) else clients.reading
        try:
            return function(client, self._key(name) or None, *arguments, **options)
        except (FileNotFoundError, BaseError) as error:
            explained = explain(error, self._bucket, self.locate(name))
            if explained is None:
                raise
            raise explained from error

    def put(self, name: str, data: bytes, mode: Any) -> dict[str, Any]:
        """Put an object on a condition, and tell its version.

        The answer may get lost after the server has done it: so what is there is read before it is tried again.
        """
        deadline = time.monotonic() + _PATIENCE
        pause = 0.2
        while True:
            try:
                put = obstore.put(self._bucket.clients().once, self._key(name), data, mode=mode, use_multipart=False)
                return _version(put)
            except (AlreadyExistsError, PreconditionError):
                if pause == 0.2:
                    raise
                return self._own(name, data) or self._missed(name)
            except BaseError as error:
                explained = explain(error, self._bucket, self.locate(name))
                if isinstance(explained, AccessError) or time.monotonic() > deadline:
                    raise (explained or error) from error
            own = self._own(name, data)
            if own is not None:
                return own
            time.sleep(pause * (1 + os.urandom(1)[0] / 256))
            pause = min(pause * 2, 5.0)

    def _own(self, name: str, data: bytes) -> dict[str, Any] | None:
        """The version of an object if it holds this data, which nobody else could have put."""
        try:
            found = self.call(obstore.get, name)
        except FileNotFoundError:
            return None
        return _version(found.meta) if bytes(found.bytes()) == data else None

    def _missed(self, name: str) -> Any:
        raise PreconditionError(f"{self.locate(name)} was put by somebody else")

    def read(self, name: str) -> bytes:
        self._versions[name] = None
        try:
            found = self.call(obstore.get, name)
            data = bytes(found.bytes())
        except BaseError as error:  # cut off while it came in
            raise StorageError(f"reading {self.locate(name)}: {error}") from error
        self._versions[name] = _version(found.meta)
        return data

    def size(self, name: str) -> int | None:
        try:
            return self.call(obstore.head, name)["size"]
        except FileNotFoundError:
            return None

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        wanted = list(names)
        if self._whole and len(wanted) > 2:
            listed = self._list("")
            return {name: listed.get(name) for name in wanted}
        return {name: self.size(name) for name in wanted}

    def identity(self, name: str) -> object:
        if not name:
            return None  # there are no directories
        try:
            return _version(self.call(obstore.head, name))
        except FileNotFoundError:
            return None

    def open(self, name: str) -> "CloudFile":
        if self._sizes is None:
            self._sizes = self._list("") if self._whole else {}
        size = self._sizes.get(name)
        if size is None:
            size = self.size(name)
            if size is None:
                raise FileNotFoundError(f"{self.locate(name)} is not there")
            self._sizes[name] = size
        return CloudFile(self, name, size)

    def write_new(self, name: str, total: int, buffers: Iterable[memoryview]) -> None:
        if total <= LARGE:
            self.call(obstore.put, name, [buffer for buffer in buffers if len(buffer)] or b"", use_multipart=False)
            return
        try:
            self.call(obstore.put, name, iter(buffers), chunk_size=_part_size(total), max_concurrency=CONCURRENCY)
        except FileNotFoundError:  # the answer that all parts are together got lost, and they cannot be twice
            if self.size(name) != total:
                raise

    def create(self, name: str) -> Any:
        raise NotImplementedError("objects are put whole")

    def write_into(self, name: str, offset: int, data: bytes) -> None:
        raise NotImplementedError("objects are put whole")

    def sync(self, names: Sequence[str]) -> None:
        """What was put is durable."""

    def sync_directory(self, name: str) -> None:
        """What was removed stays removed."""

    def replace(self, name: str, data: bytes) -> None:
        for lease in self._leases:
            lease.confirm()
        mode: Any = "overwrite"
        if name in self._versions:
            mode = self._versions[name] or "create"
        try:
            self.put(name, data, mode)
        except (AlreadyExistsError, PreconditionError) as error:
            raise ConflictError(
                f"{self.locate(name)} was changed by another writer at the same moment; theirs is in place and "
                "untouched, this one was not committed"
            ) from error

    def rename(self, name: str, new: str) -> None:
        self.call(obstore.copy, name, self._key(new))
        self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        wanted = list(names)
        if self._bucket.scheme == "gs" or len(wanted) == 1:  # there is no deleting in bulk
            with Crew(CONCURRENCY) as crew:
                crew.run(partial(self._remove_one, name) for name in wanted)
            return
        try:
            for start in range(0, len(wanted), 1000):
                keys = [self._key(name) for name in wanted[start : start + 1000]]
                obstore.delete(self._bucket.clients().writing, keys)
        except (FileNotFoundError, BaseError) as error:
            raise explain(error, self._bucket, self.url) or error from error

    def _remove_one(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.call(obstore.delete, name)

    def remove_control(self) -> None:
        self.remove([f"{self.control}/{name}" for name in self._list(self.control) if name != "lock"])

    def remove_if_empty(self) -> None:
        """A prefix without objects is nothing."""

    def children(self, name: str) -> list[str]:
        found = self.call(obstore.list_with_delimiter, name)
        start = len(self._key(name)) + 1 if self._key(name) else 0
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted({path[start:].strip("/") for path in paths} - {""})

    def _list(self, name: str) -> dict[str, int]:
        """Everything below a name: (relative name, size)."""
        start = len(self._key(name)) + 1 if self._key(name) else 0
        try:
            pages = obstore.list(self._bucket.clients().reading, self._key(name) or None, chunk_size=1000)
            return {each["path"][start:]: each["size"] for page in pages for each in page}
        except (FileNotFoundError, BaseError) as error:
            raise explain(error, self._bucket, self.locate(name)) or error from error

    def find_directories_with(self, name: str) -> list[str]:
        return sorted({path.rpartition("/")[0] for path in self._list("") if path.rpartition("/")[2] == name})

    def is_taken(self, names: Iterable[str]) -> bool:
        there = self._list("") if self._whole else None
        return any((name in there) if there is not None else self.size(name) is not None for name in names)

    @contextmanager
    def lock(self, seconds: float) -> Generator[None]:
        lease = self._take_lock(f"{self.control}/lock", time.monotonic() + seconds)
        try:
            yield
        finally:
            try:
                lease.release()
            except StorageError as error:
                log.warning("shardkeep: the lock of %s stays until it expires (%s)", self.url, error)

    def _take_lock(self, name: str, deadline: float) -> "_Lease":
        """The lock, once it is free; or that of an owner who does not renew it any more."""
        mine = os.urandom(16).hex().encode()
        seen: tuple[Any, float] = (None, 0.0)
        pause = 0.02
        while True:
            try:
                return _Lease(self, name, mine, self.put(name, mine, "create"))
            except (AlreadyExistsError, PreconditionError):
                with suppress(FileNotFoundError):
                    there = self.call(obstore.head, name)
                    version = _version(there)
                    renewal = (version, there["last_modified"])
                    if renewal != seen[0]:
                        seen = (renewal, time.monotonic())
                    if time.monotonic() - seen[1] > LEASE:
                        with suppress(PreconditionError):
                            return _Lease(self, name, mine, self.put(name, mine, version))
            if time.monotonic() > max(deadline, seen[1] + LEASE + 1):
                raise ConflictError(f"another program holds the lock {self.locate(name)} for too long") from None
            time.sleep(pause)
            pause = min(pause * 2, 1.0)

    def hold(self, name: str, line: bytes) -> "_Lease":
        data = line + b"\n"
        lease = _Lease(self, name, data, self.put(name, data, "create"))
        self._leases.append(lease)
        return lease

    def try_hold(self, name: str) -> "_Lease | None":
        """Called with the lock held, whose own age tells the time as the server has it."""
        now = datetime.datetime.now(datetime.UTC)  # for those who only look
        try:
            record = self.call(obstore.head, name)
            with suppress(FileNotFoundError):
                now = self.call(obstore.head, f"{self.control}/lock")["last_modified"]
        except FileNotFoundError:
            return None
        if (now - record["last_modified"]).total_seconds() <= LEASE:
            return None
        return _Lease(self, name, b"", _version(record), renewed=False)

    def claim(self, name: str) -> bool:
        try:
            self.put(name, os.urandom(16).hex().encode(), "create")
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def free_bytes(self) -> int | None:
        return None


class _Lease:
    """An object that its owner renews while it lives: the lock, or the record of a save."""

    def __init__(self, store: CloudStore, name: str, data: bytes, version: Any, renewed: bool = True) -> None:
        self._store, self._name, self._data = store, name, data
        self._version = version
        self._renewed = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()
        if renewed:
            with suppress(RuntimeError):  # at the end of the program no thread can be started any more
                threading.Thread(target=self._renew_often, name="shardkeep-lease", daemon=True).start()

    def _renew_often(self) -> None:
        while not self._over.wait(LEASE / 4):
            with suppress(StorageError, FileNotFoundError):
                self._put(self._data)

    def _put(self, data: bytes) -> None:
        with self._lock:
            if self._over.is_set():
                return
            try:
                put = self._store.put(self._name, data, self._version)
            except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
                raise ConflictError(
                    f"{self._store.locate(self._name)} was taken over: this save gave no sign of life for "
                    f"{LEASE:g} s and was taken for dead. Nothing was committed"
                ) from error
            self._version = put
            self._data, self._renewed = data, time.monotonic()

    def append(self, line: bytes) -> None:
        self._put(self._data + line + b"\n")

    def confirm(self) -> None:
        """`ConflictError` if it may have been taken over."""
        if time.monotonic() - self._renewed > LEASE / 2 and not self._over.is_set():
            self._put(self._data)

    def release(self) -> None:
        self.abandon()
        # After so long without renewing it may be another's by now, who will remove it.
        if time.monotonic() - self._renewed < LEASE:
            self._store.remove([self._name])

    def abandon(self) -> None:
        with self._lock:
            self._over.set()


class CloudFile:
    """An object being read, in ranges."""

    def __init__(self, store: CloudStore, name: str, size: int) -> None:
        self._store, self._name, self.size = store, name, size

    def read_into(self, offset: int, buffer: "np.ndarray[Any, Any]") -> None:
        if offset + buffer.size > self.size:
            raise EOFError(f"{self._store.locate(self._name)} ends before byte {offset + buffer.size}")
        if buffer.size:
            data = self._store.call(obstore.get_range, self._name, start=offset, length=buffer.size)
            if len(data) != buffer.size:
                raise EOFError(f"{self._store.locate(self._name)} gave {len(data)} bytes at {offset}")
            buffer[...] = np.frombuffer(memoryview(data), np.uint8)

    def map(self, offset: int, length: int, needed: Sequence[tuple[int, int]] = ()) -> "CloudMapping":
        return CloudMapping(self, offset, length, needed or [(offset, length)])

    def close(self) -> None: ...

    def __enter__(self) -> "CloudFile":
        return self

    def __exit__(self, *_: object) -> None: ...


class CloudMapping:
    """A part of an object as memory that is filled as it is asked for, neighbours in one request."""

    def __init__(self, file: CloudFile, offset: int, length: int, needed: Sequence[tuple[int, int]]) -> None:
        self._file, self._offset = file, offset
        skip = offset % 64  # what is aligned in the file is aligned in memory
        self.data = aligned_empty(length + skip)[skip:]
        self._runs = [_Run(start, end) for start, end in _merged(needed)]

    def bring_in(self, start: int, end: int) -> None:
        for run in self._runs:
            if run.start < self._offset + end and run.end > self._offset + start:
                with run.lock:
                    if not run.there:
                        low = run.start - self._offset
                        self._file.read_into(run.start, self.data[low : low + run.end - run.start])
                        run.there = True


class _Run:
    """Bytes that are fetched together."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.there = start, end, False
        self.lock = threading.Lock()


def _merged(needed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, length) ranges as (start, end) of requests: neighbours together, none too large.

    >>> _merged([(0, 10), (20, 10), (1 << 30, 5)])
    [(0, 30), (1073741824, 1073741829)]
    """
    spans: list[tuple[int, int]] = []
    for offset, length in sorted(needed):
        if spans and offset <= spans[-1][1] + _GAP:
            spans[-1] = (spans[-1][0], max(spans[-1][1], offset + length))
        else:
            spans.append((offset, offset + length))
    return [(a, min(a + _RUN, end)) for start, end in spans for a in range(start, end, _RUN)]


def _version(meta: Any) -> dict[str, Any]:
    """What identifies one state of an object, as far as the server tells."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _part_size(total: int) -> int:
    """Uploads have at most 10,000 parts."""
    return max(_PART, -(-total // 9000))
