"""A checkpoint in a bucket: objects below a prefix, through obstore.

An object appears whole or not at all, so data is put once under names nobody uses. What a disk does by locks is done
here by conditional puts and leases: the lock and the records of running saves are objects that their owner puts again
and again while it lives; one that has not been renewed for `LEASE` seconds, by the server's own clock, belongs to
somebody who died. The manifest is put on condition that it still is the one that was read.
"""

import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from shardkeep.errors import ConflictError, StorageError
from shardkeep.memory import aligned_empty
from shardkeep.stores.credentials import PATIENCE, Bucket, Clients, explain, is_final, status_of, was_cut
from shardkeep.workers import Crew

LEASE = float(os.environ.get("SHARDKEEP_LEASE", "60"))  # seconds
OBJECT_LIMIT = 32 << 20  # what is put as one object
LARGE = 2 * OBJECT_LIMIT  # what is larger goes up in parts
COPY_LIMIT = 5 << 30  # what S3 copies at once
CONCURRENCY = 8
_PART = 16 << 20  # of an object that must be larger than that
_GAP = 64 << 10  # reading so much too much is cheaper than another request
_RUN = 16 << 20
_PAGE = 1000  # names in one answer
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FEW = 8  # objects that are asked for one by one before all are listed

log = logging.getLogger("shardkeep")

T = TypeVar("T")
_REFUSED = (AlreadyExistsError, PreconditionError)
_checked: weakref.WeakSet[Clients] = weakref.WeakSet()  # it is known whether their server keeps conditions


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
        self.bucket, self._prefix, self._whole = bucket, prefix, whole
        self._cached: tuple[int, Clients] | None = None
        self._versions: dict[str, Any] = {}
        self._replaced: dict[str, bytes] = {}
        self._leases: list[_Lease] = []
        self._writes = False  # who only reads may remember: in a checkpoint no name is written twice
        self._in_doubt = False  # a document may still come to be in place, so what it names must stay
        self._listing = _Listing(self)
        self._documents: dict[str, bytes] = {}
        self._inside: dict[str, list[str]] | None = None  # what was seen since this took the lock or changed anything
        self._large = threading.Lock()

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def key(self, name: str) -> str:
        return "/".join(part for part in (self._prefix, name) if part)

    def clients(self) -> Clients:
        """Found once: looking at profiles and variables for each request would cost more than the request."""
        if self._cached is None or self._cached[0] != os.getpid():
            self._cached = (os.getpid(), self.bucket.clients())
        return self._cached[1]

    def call(self, function: Callable[..., T], name: str, *arguments: Any, **options: Any) -> T:
        """One request (tried again while that may help), its failure told in our words."""
        clients = self.clients()
        client = clients.writing if function in (obstore.put, obstore.delete, obstore.copy) else clients.reading
        return self.asking(name, partial(function, client, self.key(name) or None, *arguments, **options))

    def asking(self, name: str, ask: Callable[[], T], again: Callable[[], bool] = lambda: True) -> T:
        """What the client does not try again itself is tried again here, if it may be."""
        for pause in (0.2, 1.0, 3.0, None):
            try:
                return ask()
            except (FileNotFoundError, BaseError) as error:
                if pause is None or not was_cut(error) or not again():
                    explained = explain(error, self.bucket, self.locate(name))
                    if explained is None:
                        raise
                    raise explained from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def put(self, name: str, data: bytes, mode: Any) -> dict[str, Any]:
        """Put an object on a condition, and tell its version; no other put may have had the same data.

        The answer may get lost after the server has done it: so what is there is read before it is tried again.
        """
        deadline = time.monotonic() + PATIENCE
        pause = 0.2
        while True:
            try:
                put = obstore.put(self.clients().once, self.key(name), data, mode=mode, use_multipart=False)
                return _version(put)
            except (FileNotFoundError, BaseError) as error:
                failure = error
            refused = isinstance(failure, _REFUSED) and status_of(failure) != 409  # 409: S3 wants it tried again
            explained = explain(failure, self.bucket, self.locate(name))
            if isinstance(failure, FileNotFoundError) and explained is None and isinstance(mode, dict):
                raise PreconditionError(str(failure)) from failure  # what was to be replaced is gone
            if refused and pause == 0.2:
                raise failure
            if is_final(failure) and not refused:
                raise (explained or StorageError(f"{self.locate(name)}: {failure}")) from failure
            own = self._own(name, data)
            if own is not None:
                return own
            if refused:
                raise PreconditionError(f"{self.locate(name)} was put by somebody else") from failure
            if time.monotonic() > deadline:
                raise (explained or StorageError(f"{self.locate(name)}: {failure}")) from failure
            time.sleep(pause * (1 + os.urandom(1)[0] / 256))
            pause = min(pause * 2, 5.0)

    def _own(self, name: str, data: bytes) -> dict[str, Any] | None:
        """The version of an object if it holds this data, which nobody else could have put."""
        try:
            found, there = self.get(name)
        except FileNotFoundError:
            return None
        return _version(found) if there == data else None

    def get(self, name: str) -> tuple[Any, bytes]:
        """What is told about an object, and its data."""

        def ask() -> tuple[Any, bytes]:
            found = obstore.get(self.clients().reading, self.key(name))
            return found.meta, bytes(found.bytes())

        return self.asking(name, ask)

    def read(self, name: str) -> bytes:
        if name in self._documents and not self._writes:
            return self._documents[name]
        self._versions[name] = None
        self._replaced.pop(name, None)
        meta, data = self.get(name)
        self._versions[name] = _version(meta)
        if self._writes:
            self._replaced[name] = data
        elif self._whole and len(data) <= _GAP:
            self._documents[name] = data
        return data

    def size(self, name: str) -> int | None:
        # Of exchange files only sizes are known that were asked for since their documents last changed.
        if name in self._listing.sizes and not (self._writes and self._whole):
            return self._listing.sizes[name]
        try:
            return self.call(obstore.head, name)["size"]
        except FileNotFoundError:
            return None

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        wanted = list(names)
        if self._whole and not self._writes:
            return {name: self._listing.size(name) for name in wanted}
        if self._whole and len(wanted) > 2:
            listed = self._list("")
            return {name: listed.get(name) for name in wanted}
        return {name: self.size(name) for name in wanted}

    def identity(self, name: str) -> object:
        found = None
        with suppress(FileNotFoundError):
            found = self.call(obstore.head, name)
        version = _version(found) if found else None
        if self._versions.get(name, version) != version:
            self._listing.sizes.clear()  # documents keep their names here, and so may what they speak of
        self._versions[name] = version
        if found:
            self._listing.sizes[name] = found["size"]
        return version

    def open(self, name: str) -> "CloudFile":
        size = self._listing.size(name) if self._whole and not self._writes else None
        if size is None:
            size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"{self.locate(name)} is not there")
        self._listing.sizes[name] = size
        return CloudFile(self, name, size)

    def write_new(self, name: str, total: int, buffers: Iterable[memoryview]) -> None:
        if self.bucket.scheme == "s3" and total > COPY_LIMIT and name.startswith(self.control):
            raise StorageError(
                f"{self.url}: one exchange file of {total:,} bytes is more than the {COPY_LIMIT:,} that S3 can put "
                "into place: pass a smaller max_shard_size, or save to a path that does not end in .safetensors"
            )
        if total <= LARGE:
            self.call(obstore.put, name, [buffer for buffer in buffers if len(buffer)] or b"", use_multipart=False)
            return
        begun: list[bool] = []

        def stream() -> Iterator[memoryview]:
            begun.append(True)
            yield from buffers

        def put() -> None:
            parts: Any = {"chunk_size": _part_size(total), "max_concurrency": CONCURRENCY}
            obstore.put(self.clients().writing, self.key(name), stream(), **parts)

        try:
            with self._large:  # its parts go up at the same time: more of them would only take memory
                self.asking(name, put, again=lambda: not begun)
        except (FileNotFoundError, StorageError):  # did only the answer get lost that all parts are together?
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
        self._confirm(LEASE / 2)
        mode: Any = (self._versions[name] or "create") if name in self._versions else "overwrite"
        self._forget(name)
        try:
            version = self.put(name, data, mode)
        except _REFUSED as error:
            raise ConflictError(
                f"{self.locate(name)} was changed by another writer at the same moment; theirs is in place and "
                "untouched, this one was not committed"
            ) from error
        except StorageError as error:
            self._in_doubt = isinstance(error.__cause__, Exception) and not is_final(error.__cause__)
            raise
        try:
            # Stopped for long before the put went out, this may have been taken for dead and cleaned up after.
            self._confirm(LEASE)
        except ConflictError:
            self._take_back(name, version)
            raise
        self._versions[name] = version

    def _forget(self, name: str) -> None:
        if self._inside:
            self._inside = {}
        self._versions.pop(name, None)
        self._listing.sizes.pop(name, None)

    def _take_back(self, name: str, version: Any) -> None:
        """Undo a put, unless somebody has replaced it since."""
        old = self._replaced.get(name)
        with suppress(*_REFUSED):
            if old is not None:
                self.put(name, old, version)
            elif self.identity(name) == version:
                self.remove([name])

    def _confirm(self, age: float) -> None:
        """`ConflictError` if this save, or its lock, may have been taken for dead."""
        for lease in self._leases:
            lease.confirm(age)

    def rename(self, name: str, new: str) -> None:
        self._forget(new)
        self._confirm(LEASE / 2)
        self.call(obstore.copy, name, self.key(new))
        self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        if self._in_doubt:
            raise StorageError(f"{self.url}: objects that may be needed stay until the lease of {LEASE:g} s is over")
        wanted = list(names)
        for name in wanted:
            self._forget(name)
        if self.bucket.scheme == "gs":  # there is no deleting in bulk
            with Crew(CONCURRENCY) as crew:
                crew.run(partial(self._remove_some, name, self.key(name)) for name in wanted)
            return
        for start in range(0, len(wanted), 1000):
            self._remove_some("", [self.key(name) for name in wanted[start : start + 1000]])

    def _remove_some(self, name: str, keys: str | list[str]) -> None:
        with suppress(FileNotFoundError):
            self.asking(name, partial(obstore.delete, self.clients().writing, keys))

    def remove_control(self) -> None:
        self.remove([f"{self.control}/{name}" for name in self._list(self.control) if name not in ("lock", "")])

    def remove_if_empty(self) -> None:
        """A prefix without objects is nothing."""

    def children(self, name: str) -> list[str]:
        if self._inside is None:
            return self._children(name)
        if name not in self._inside:
            self._inside[name] = self._children(name)
        return self._inside[name]

    def _children(self, name: str) -> list[str]:
        found = self.call(obstore.list_with_delimiter, name)
        start = len(self.key(name)) + 1 if self.key(name) else 0
        if self._whole and not name:
            self._listing.sizes.update((each["path"][start:], each["size"]) for each in found["objects"])
        # Some servers have directories, and show those that are empty.
        if found["common_prefixes"] and not found["objects"] and not self._writes and not self._is_used(name):
            return []
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted({path[start:].strip("/") for path in paths} - {""})

    def is_empty(self) -> bool:
        """Whether no object is below the prefix."""
        return not self._is_used("")

    def _is_used(self, name: str) -> bool:
        return self.asking(name, lambda: any(inside for page in self.pages(name) for inside in page))

    def pages(self, name: str) -> Iterator[dict[str, int]]:
        """Everything below a name, page by page: relative name and size."""
        start = len(self.key(name)) + 1 if self.key(name) else 0
        for page in obstore.list(self.clients().reading, self.key(name) or None, chunk_size=_PAGE):
            yield {each["path"][start:]: each["size"] for each in page}

    def _list(self, name: str) -> dict[str, int]:
        return self.asking(name, lambda: {n: size for page in self.pages(name) for n, size in page.items()})

    def find_directories_with(self, name: str) -> list[str]:
        paths = self._list("") if self._writes else self._listing.all()
        return sorted({path.rpartition("/")[0] for path in paths if path.rpartition("/")[2] == name})

    def is_taken(self, names: Iterable[str]) -> bool:
        if not self._whole:
            return any(self.size(name) is not None for name in names)
        wanted = set(names)
        return self.asking("", lambda: any(not wanted.isdisjoint(page) for page in self.pages("")))

    @contextmanager
    def lock(self, seconds: float) -> Generator[None]:
        self._writes = True
        lease = self._take_lock(f"{self.control}/lock", time.monotonic() + seconds)
        self._leases.append(lease)
        self._inside = {}
        try:
            lease.check_conditions()
            yield
        finally:
            self._inside = None
            self._leases.remove(lease)
            try:
                lease.release()
            except StorageError as error:
                log.warning("shardkeep: the lock of %s stays until it expires (%s)", self.url, error)

    def _take_lock(self, name: str, deadline: float) -> "_Lease":
        """The lock, once it is free; or that of an owner who does not renew it any more."""
        seen: tuple[Any, float] = (None, 0.0)
        pause = 0.02
        while True:
            with suppress(*_REFUSED):
                return _Lease(self, name, b"", "create")
            with suppress(FileNotFoundError, *_REFUSED):
                version = _version(self.call(obstore.head, name))
                if version != seen[0]:
                    seen = (version, time.monotonic())
                if time.monotonic() - seen[1] > LEASE:
                    return _Lease(self, name, b"", version)
            now = time.monotonic()
            if now > deadline and now - seen[1] < LEASE / 2:  # else its owner may be dead, which soon will show
                raise ConflictError(f"another program holds the lock {self.locate(name)} for too long")
            time.sleep(pause)
            pause = min(pause * 2, 1.0)

    def hold(self, name: str, line: bytes) -> "_Lease":
        self._writes = True
        self._forget(name)
        try:
            lease = _Lease(self, name, line + b"\n", "create")
        except _REFUSED as error:
            raise ConflictError(f"{self.locate(name)} is there already: another program does the same") from error
        self._leases.append(lease)
        return lease

    def try_hold(self, name: str) -> "_Lease | None":
        """Called with the lock held, whose own age tells the time as the server has it.

        A save that was only stopped must not go on: what is put in the place of its record tells it.
        """
        try:
            meta, data = self.get(name)
            now = self.call(obstore.head, f"{self.control}/lock")["last_modified"]
            if (now - meta["last_modified"]).total_seconds() <= LEASE:
                return None
            return _Lease(self, name, data.partition(b"\n")[2], _version(meta), renewed=False)
        except (FileNotFoundError, *_REFUSED):
            return None

    def claim(self, name: str) -> bool:
        self._forget(name)
        try:
            self.put(name, os.urandom(16).hex().encode(), "create")
        except _REFUSED:
            return False
        return True

    def remove_own(self, name: str, start: bytes, sure: bool = True) -> None:
        """Remove an object that begins so, if it is `sure` that this one does.

        It is never removed again blindly: the first time may have done it, and it be another's by now.
        """
        self._forget(name)
        deadline = time.monotonic() + PATIENCE
        pause = 0.2
        while True:
            if not sure:
                try:
                    if not self.get(name)[1].startswith(start):
                        return
                except FileNotFoundError:
                    return
            try:
                obstore.delete(self.clients().once, self.key(name))
                return
            except FileNotFoundError:
                return
            except BaseError as error:
                if is_final(error) or time.monotonic() > deadline:
                    raise (explain(error, self.bucket, self.locate(name)) or error) from error
            sure = False
            time.sleep(pause * (1 + os.urandom(1)[0] / 256))
            pause = min(pause * 2, 5.0)

    def free_bytes(self) -> int | None:
        return None


class _Listing:
    """The sizes of a checkpoint's objects for who only reads: listed as far as that is cheaper than asking."""

    def __init__(self, store: CloudStore) -> None:
        self.sizes: dict[str, int] = {}
        self._store = store
        self._pages: Iterator[dict[str, int]] | None = None
        self._complete = False
        self._asked = 0
        self._lock = threading.Lock()

    def size(self, name: str) -> int | None:
        """One page tells all of a small checkpoint. Of a large one, a few objects are cheaper to ask for."""
        if name not in self.sizes and not self._complete:
            with self._lock:
                if self._pages is None:
                    self._read_page()
                elif name not in self.sizes:
                    self._asked += 1
        if name not in self.sizes and self._asked > _FEW:
            self.all()
        return self.sizes.get(name) if self._complete else self._store.size(name)

    def all(self) -> dict[str, int]:
        with self._lock:
            while not self._complete:
                self._read_page()
        return self.sizes

    def _read_page(self) -> None:
        def read() -> None:
            if self._pages is None:
                self._pages = self._store.pages("")
            page = next(self._pages, None)
            self.sizes.update(page or {})
            self._complete = page is None or len(page) < _PAGE

        try:
            self._store.asking("", read)
        except BaseException:
            self._pages = None
            raise


class _Lease:
    """An object that its owner renews while it lives: the lock, or the record of a save.

    Its first line says who and how often, so that no two puts are the same; S3 tells objects apart by their bytes.
    """

    def __init__(self, store: CloudStore, name: str, lines: bytes, mode: Any, renewed: bool = True) -> None:
        self._store, self._name, self._lines = store, name, lines
        self._owner = b'{"owner": "%b"' % os.urandom(16).hex().encode()
        self._count = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._renewed = time.monotonic()
        try:
            self._version = store.put(name, self._signed(lines), mode)
        except KeyboardInterrupt:  # it comes when the request is done, and nobody else would remove it
            with suppress(StorageError):
                store.remove_own(name, self._owner, sure=False)
            raise
        if renewed:
            with suppress(RuntimeError):  # at the end of the program no thread can be started any more
                threading.Thread(target=self._renew_often, name="shardkeep-lease", daemon=True).start()

    def _signed(self, lines: bytes) -> bytes:
        self._count += 1
        return self._owner + b', "renewed": %d}\n' % self._count + lines

    def _renew_often(self) -> None:
        while not self._over.wait(LEASE / 4):
            try:
                self._put(self._lines)
            except ConflictError:  # told to whoever needs it by `confirm`
                return
            except StorageError:
                continue

    def _put(self, lines: bytes) -> None:
        with self._lock:
            if self._over.is_set():
                return
            began = time.monotonic()  # the server counts from when it is done, which is later
            try:
                self._version = self._put_over(lines)
            except _REFUSED as error:
                raise ConflictError(
                    f"{self._store.locate(self._name)} was taken over: this save gave no sign of life for "
                    f"{LEASE:g} s and was taken for dead. Nothing was committed"
                ) from error
            self._lines, self._renewed = lines, began

    def _put_over(self, lines: bytes) -> dict[str, Any]:
        try:
            return self._store.put(self._name, self._signed(lines), self._version)
        except _REFUSED:  # by another, or by a put of ours whose answer never came
            with suppress(FileNotFoundError):
                meta, data = self._store.get(self._name)
                if data.startswith(self._owner):
                    return self._store.put(self._name, self._signed(lines), _version(meta))
            raise

    def append(self, line: bytes) -> None:
        self._put(self._lines + line + b"\n")

    def confirm(self, age: float) -> None:
        """`ConflictError` if it was taken over, which can only be if it is older than `age`."""
        if time.monotonic() - self._renewed > age:
            self._put(self._lines)

    def check_conditions(self) -> None:
        """Warn, once for a bucket, if the server takes no notice of conditions: nothing keeps writers apart there."""
        clients = self._store.clients()
        if clients in _checked:
            return
        _checked.add(clients)
        data = self._signed(self._lines)
        modes: list[Any] = ["create", {"e_tag": f'"{"0" * 32}"', "version": "1"}]
        for mode in modes:
            with suppress(FileNotFoundError, BaseError):
                obstore.put(clients.once, self._store.key(self._name), data, mode=mode, use_multipart=False)
                log.warning(
                    "shardkeep: the server of %s ignores the conditions of puts: let only one program at a time "
                    "save to a checkpoint there, for of two one could lose what it saved",
                    self._store.bucket.url,
                )
                return

    def release(self) -> None:
        self.abandon()
        # After so long without renewing it may be another's by now, who will remove it.
        if time.monotonic() - self._renewed < LEASE:
            self._store.remove_own(self._name, self._owner)

    def abandon(self) -> None:
        with self._lock:
            self._over.set()


class CloudFile:
    """An object being read, in ranges."""

    def __init__(self, store: CloudStore, name: str, size: int) -> None:
        self._store, self._name, self.size = store, name, size
        self._start = b""

    def read_into(self, offset: int, buffer: "np.ndarray[Any, Any]") -> None:
        end = offset + buffer.size
        if end > self.size:
            raise EOFError(f"{self._store.locate(self._name)} ends before byte {end}")
        if offset == 0 and 0 < end <= 8:  # a length, and what has it comes next
            self._start = bytes(self._read(0, min(_GAP, self.size)))
        if end <= len(self._start):
            buffer[...] = np.frombuffer(self._start, np.uint8)[offset:end]
        elif buffer.size:
            buffer[...] = np.frombuffer(self._read(offset, buffer.size), np.uint8)

    def _read(self, offset: int, length: int) -> memoryview:
        data = self._store.call(obstore.get_range, self._name, start=offset, length=length)
        if len(data) != length:
            raise EOFError(f"{self._store.locate(self._name)} gave {len(data)} bytes at {offset}")
        return memoryview(data)

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
        sparse = 2 * sum(size for _, size in needed) < length
        self.data = (_small_pages if sparse else aligned_empty)(length + skip)[skip:]
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


def _small_pages(nbytes: int) -> "np.ndarray[Any, Any]":
    """Memory that counts only where it is filled: arrays that lie in it keep all of it."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)


def _version(meta: Any) -> dict[str, Any]:
    """What identifies one state of an object, as far as the server tells."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _part_size(total: int) -> int:
    """Uploads have at most 10,000 parts."""
    return max(_PART, -(-total // 9000))
