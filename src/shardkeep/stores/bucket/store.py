"""A checkpoint in a bucket: objects below a prefix, through obstore.

An object appears atomically, so data is put once, under unused names. Conditional puts and leases replace file locks:
the lock and the records of running saves are objects that their owner renews. An object that was not renewed for
`SHARDKEEP_LEASE` seconds, by the clock of the server, belongs to a dead process. The manifest is put on the condition
that it is still the version that was read.

A request may arrive long after its sender was declared dead. Deletes cannot have conditions, so a deleted name is never
used again. Everything else is put on a condition that no longer holds by then.
"""

import logging
import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import obstore

from shardkeep.errors import ConflictError, StorageError
from shardkeep.runtime.crew import run_tasks
from shardkeep.runtime.scopes import Scope, frame_above, sweep
from shardkeep.stores.base import LOCK_SECONDS, Traits
from shardkeep.stores.bucket.credentials import Bucket, is_final, list_below
from shardkeep.stores.bucket.leases import Lease, is_dead
from shardkeep.stores.bucket.listing import FEW, SizeListing, sizes_of
from shardkeep.stores.bucket.objects import REFUSED, Objects, version_of
from shardkeep.stores.bucket.ranges import GAP, BucketFile
from shardkeep.system import after_fork_in_child

if TYPE_CHECKING:
    from obstore import PutMode, UpdateVersion

OBJECT_LIMIT = 32 << 20  # size of the objects that data is packed into
LARGE = 2 * OBJECT_LIMIT  # larger objects are uploaded in parts
CONCURRENCY = 8  # requests: a single one reaches only a part of the bandwidth
_PART = 16 << 20  # size of a part
_DOCUMENTS = 192  # requests for small documents and lists: 3,840 a second at 50 ms each; S3 allows 5,500 a second

log = logging.getLogger("shardkeep")


class BucketStore(Objects):
    """A store in a bucket: the objects below one prefix.

    Args:
        bucket: The bucket.
        prefix: The prefix of the checkpoint.
        control: The name of the control directory.
        whole: Whether everything below the prefix belongs to the checkpoint, so that it may be listed.
    """

    mappable = False
    traits = Traits(
        editable=False,
        has_directories=False,
        has_paths=False,
        costly_requests=True,
        late_requests=True,
        concurrency=CONCURRENCY,
        object_limit=OBJECT_LIMIT,
        documents_at_once=_DOCUMENTS,
    )
    has_leases = True

    def __init__(self, bucket: Bucket, prefix: str, control: str, whole: bool = True) -> None:
        super().__init__(bucket, prefix)
        self.control = control
        self.saves = f"{control}/saves"
        self._whole = whole
        self._versions: dict[str, UpdateVersion | None] = {}
        self._unsent: dict[str, list[memoryview]] = {}  # files that `rename` puts under their final names
        self._leases: list[Lease] = []
        self._writes = False  # readers may cache: in a checkpoint no name is written twice
        self._in_doubt = False  # a put may still take effect, so the data it refers to must stay
        self._listing = SizeListing(self, self.size)
        self._documents: dict[str, bytes] = {}
        self._inside: dict[str, list[str]] | None = (
            None  # children listed since the lock was taken and nothing was changed
        )
        self._large = threading.Lock()

    def read(self, name: str) -> bytes:
        if name in self._documents and not self._writes:
            return self._documents[name]
        self._versions[name] = None
        meta, data = self.get(name)
        self._versions[name] = version_of(meta)
        if not self._writes and self._whole and len(data) <= GAP:
            self._documents[name] = data
        return data

    def size(self, name: str) -> int | None:
        # For exchange files, only sizes requested since the last change of their documents are cached.
        if name in self._listing.sizes and not (self._writes and self._whole):
            return self._listing.sizes[name]
        try:
            return self.call(obstore.head, name)["size"]
        except FileNotFoundError:
            return None

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        wanted = list(names)
        if self._whole and not self._writes:
            if sum(name not in self._listing.sizes for name in wanted) > FEW:
                self._listing.all()
            return {name: self._listing.size(name) for name in wanted}
        if self._whole and len(wanted) > 2:
            return sizes_of(self, sorted(set(wanted)), _DOCUMENTS)
        return {name: self.size(name) for name in wanted}

    def modified(self, name: str) -> float | None:
        try:
            return self.call(obstore.head, name)["last_modified"].timestamp()
        except FileNotFoundError:
            return None

    def identity(self, name: str) -> object:
        if not name:
            return None  # a bucket has no directories
        found = None
        with suppress(FileNotFoundError):
            found = self.call(obstore.head, name)
        version = version_of(found) if found else None
        if self._versions.get(name, version) != version:
            self._listing.sizes.clear()  # the files that documents refer to may keep their names
        self._versions[name] = version
        if found:
            self._listing.sizes[name] = found["size"]
        return version

    def open(self, name: str) -> BucketFile:
        size = self._listing.size(name) if self._whole and not self._writes else None
        if size is None:
            size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"{self.locate(name)} does not exist")
        self._listing.sizes[name] = size
        return BucketFile(self, name, size)

    def write_new(self, name: str, total: int, buffers: Iterable[memoryview]) -> None:
        """Put an object under a new name. Data under a temporary name is kept in memory until `rename` sends it."""
        if self._is_temporary(name):
            self._unsent[name] = list(buffers)
            return
        if total <= LARGE:
            try:
                self.put(name, buffers, "create")
            except REFUSED as error:
                raise ConflictError(
                    f"{self.locate(name)} was written by another program at the same time. Its data is untouched; this "
                    "save was not committed"
                ) from error
            return
        begun: list[bool] = []

        def stream() -> Iterator[memoryview]:
            begun.append(True)
            yield from buffers

        def put() -> None:
            client, size = self.clients().writing, _part_size(total)
            obstore.put(client, self.key(name), stream(), chunk_size=size, max_concurrency=CONCURRENCY)

        try:
            with self._large:  # its parts are uploaded in parallel already
                self.asking(name, put, again=lambda: not begun)
        except (FileNotFoundError, StorageError):  # the upload may be complete, with only the response lost
            if self.size(name) != total:
                raise

    def sync(self, names: Sequence[str]) -> None:
        """Nothing to do: objects are durable once put."""

    def sync_directory(self, name: str) -> None:
        """Nothing to do: a bucket has no directories."""

    def replace(self, name: str, data: bytes) -> None:
        self._commit(name, [memoryview(data)])

    def _commit(self, name: str, data: list[memoryview], telling: int | None = None) -> None:
        """Put a document on the condition that it is still the version that was read."""
        self._writes = True
        self._confirm(self.lease / 2)
        failures: list[Exception] = []
        mode: PutMode = (self._versions[name] or "create") if name in self._versions else "overwrite"
        self._forget(name)
        try:
            self._versions[name] = self.put(name, data, mode, telling, failures)
        except REFUSED as error:
            raise ConflictError(
                f"{self.locate(name)} was changed by another program at the same time. Its version is in place; this "
                "save was not committed"
            ) from error
        except StorageError:
            self._in_doubt = not all(map(is_final, failures))
            raise

    def _forget(self, name: str) -> None:
        if self._inside:
            self._inside = {}
        self._versions.pop(name, None)
        self._listing.sizes.pop(name, None)

    def _is_temporary(self, name: str) -> bool:
        return name.startswith(f"{self.control}/") and name.endswith(".tmp")

    def _confirm(self, age: float) -> None:
        """Raise `ConflictError` if this save or its lock was taken over."""
        for lease in self._leases:
            lease.confirm(age)

    def rename(self, name: str, new: str) -> None:
        """Put data written under a temporary name, on the condition that `new` is still the version that was read."""
        data = self._unsent[name]
        self._versions.setdefault(new, None)
        self._commit(new, data, telling=len(data[0]))
        del self._unsent[name]

    def remove(self, names: Iterable[str]) -> None:
        wanted = [name for name in names if self._unsent.pop(name, None) is None]
        if not wanted:
            return
        if self._in_doubt:
            raise StorageError(
                f"{self.url}: a commit may still take effect, so its objects are kept until the lease of "
                f"{self.lease:g} s has expired"
            )
        self._confirm(self.lease / 2)  # once declared dead, this process must not remove anything
        for name in wanted:
            self._forget(name)
        if self.bucket.scheme == "gs":  # Google Cloud Storage has no bulk delete
            run_tasks((partial(self._remove_some, name, self.key(name)) for name in wanted), CONCURRENCY)
            return
        for start in range(0, len(wanted), 1000):
            self._remove_some("", [self.key(name) for name in wanted[start : start + 1000]])

    def _remove_some(self, name: str, keys: str | list[str]) -> None:
        with suppress(FileNotFoundError):
            self.asking(name, partial(obstore.delete, self.clients().writing, keys))

    def clear(self, last: str) -> None:
        self.remove([name for name in self._list("") if name != last])
        self.remove([last])

    def remove_control(self) -> None:
        self.remove([f"{self.control}/{name}" for name in self._list(self.control) if name not in ("lock", "")])

    def remove_if_empty(self) -> None:
        """Nothing to do: a prefix without objects does not exist."""

    def children(self, name: str) -> list[str]:
        if self._inside is None:
            return self._children(name)
        if name not in self._inside:
            self._inside[name] = self._children(name)
        return self._inside[name]

    def _children(self, name: str) -> list[str]:
        directories, files = self._entries(name)
        return sorted({*directories, *files})

    def entries(self) -> tuple[list[str], list[str]]:
        return self._entries("")

    def _entries(self, name: str) -> tuple[list[str], list[str]]:
        found = self.call(list_below, name)
        start = len(self.key(name)) + 1 if self.key(name) else 0
        if self._whole and not name:
            self._listing.sizes.update((each["path"][start:], each["size"]) for each in found["objects"])
        # Some servers have directories, and list empty ones.
        if found["common_prefixes"] and not found["objects"] and not self._writes and not self._is_used(name):
            return [], []
        paths = found["common_prefixes"], [each["path"] for each in found["objects"]]
        directories, files = (sorted({path[start:].strip("/") for path in some} - {""}) for some in paths)
        return directories, files

    def is_empty(self) -> bool:
        """Whether there are no objects below the prefix."""
        return not self._is_used("")

    def _is_used(self, name: str) -> bool:
        return self.asking(name, lambda: any(inside for page in self.pages(name) for inside in page))

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
    def lock(self, seconds: float = LOCK_SECONDS) -> Generator[None]:
        self._writes = True
        name = f"{self.control}/lock"
        with Scope(f"locking {self.locate(name)}", frame_above(2)) as scope:
            lock = scope.add(_Lock(self, name, scope))
            lock.take(time.monotonic() + seconds)
            self._inside = {}
            yield

    def hold(self, name: str) -> "_SaveRecord":
        self._writes = True
        self._forget(name)
        return _SaveRecord(self, name)

    def try_hold(self, name: str, scope: Scope) -> Lease | None:
        """Take over the record of a dead save; None if its owner is alive. Call this with the lock held.

        The lock was just renewed, so its timestamp tells the time of the server. The new record stops an owner that was
        only suspended.
        """
        held = scope.add(Lease(self, name, renewed=False))
        try:
            meta, data = self.get(name)
            now = self.call(obstore.head, f"{self.control}/lock")["last_modified"]
            if (now - meta["last_modified"]).total_seconds() <= self.lease and not is_dead(data):
                return None
            held.take(data.partition(b"\n")[2], version_of(meta))
        except (FileNotFoundError, *REFUSED):
            return None
        return held

    def is_held(self, name: str) -> bool:
        """By this machine's clock: only a writer learns the server's time."""
        try:
            meta, data = self.get(name)
        except FileNotFoundError:
            return False
        return not is_dead(data) and time.time() - meta["last_modified"].timestamp() <= self.lease

    def watch(self, lease: Lease) -> None:
        """Commit nothing from now on unless this lease is still ours."""
        self._leases.append(lease)

    def unlock(self, lease: Lease | None) -> None:
        self._inside = None
        if lease in self._leases:
            self._leases.remove(lease)

    def check_locks(self, name: str) -> None:
        """There are none: leases do without."""

    def claim(self, name: str) -> bool:
        self._forget(name)
        try:
            self.put(name, os.urandom(16).hex().encode(), "create")
        except REFUSED:
            return False
        return True

    def remove_own(self, name: str, start: bytes, sure: bool = True) -> None:
        self._forget(name)
        super().remove_own(name, start, sure)

    def free_bytes(self) -> int | None:
        return None


class _Lock:
    """The lock of a checkpoint, held by one call."""

    def __init__(self, store: BucketStore, name: str, scope: Scope) -> None:
        self._store, self._name, self._scope = store, name, scope
        self._lease: Lease | None = None
        self._place = store.locate(name)

    def take(self, deadline: float) -> None:
        """Wait until the lock is free or has expired."""
        seen: tuple[UpdateVersion | None, float] = (None, 0.0)
        pause = 0.02
        _locks.add(self)
        while not self._try("create"):
            self._refuse_below()
            with suppress(FileNotFoundError):
                version = version_of(self._store.call(obstore.head, self._name))
                if version != seen[0]:
                    seen = (version, time.monotonic())
                if time.monotonic() - seen[1] > self._store.lease and self._try(version):
                    break
            now = time.monotonic()
            if now > deadline and now - seen[1] < self._store.lease / 2:  # else the lock may soon expire
                raise ConflictError(
                    f"timed out waiting for the lock {self._place}, which another program holds. End that program if "
                    "it hangs; the lock of a dead program expires by itself"
                )
            time.sleep(pause)
            pause = min(pause * 2, 1.0)
            sweep()  # a call of this program whose cleanup was interrupted may hold it
        assert self._lease is not None
        self._store.watch(self._lease)
        self._lease.check_conditions()

    def _try(self, mode: "PutMode") -> bool:
        self._lease = Lease(self._store, self._name)
        try:
            self._lease.take(b"", mode)
        except REFUSED:
            return False
        return True

    def _refuse_below(self) -> None:
        """Raise `ConflictError` if the lock is held by a call that this one interrupted."""
        if any(o is not self and o._place == self._place and o._scope.is_below for o in tuple(_locks)):
            raise ConflictError(
                f"a signal handler made this call while a call on the same thread holds the lock {self._place}, so "
                "waiting for it would never end. Nothing was changed. In a signal handler, set a flag and save from "
                "the training loop"
            )

    def release(self) -> None:
        self._store.unlock(self._lease)
        try:
            if self._lease is not None:
                self._lease.remove()
        except StorageError as error:
            log.warning("could not remove the lock of %s; it will expire (%s)", self._store.url, error)
        _locks.discard(self)


_locks: set[_Lock] = set()
after_fork_in_child(_locks.clear)


class _SaveRecord(Lease):
    """The record of a running save."""

    def __init__(self, store: BucketStore, name: str) -> None:
        super().__init__(store, name)
        self._cloud = store

    def take(self, line: bytes, mode: "PutMode" = "create") -> None:
        try:
            super().take(line + b"\n", mode)
        except REFUSED as error:
            place = self._cloud.locate(self._name)
            raise ConflictError(f"{place} already exists: another program is using the same save id") from error
        self._cloud.watch(self)


def _part_size(total: int) -> int:
    """The size of a part: an upload can have at most 10,000 parts."""
    return max(_PART, -(-total // 9000))
