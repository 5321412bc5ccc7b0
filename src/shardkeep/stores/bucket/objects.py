"""Requests for the objects of a bucket below one prefix, through obstore.

Transient errors are retried, other errors are explained, and after a put without a response the object is read before
the put is retried.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from shardkeep.config import LEASE, read
from shardkeep.errors import StorageError
from shardkeep.stores.bucket.credentials import PATIENCE, Bucket, Clients, explain, is_final, status_of, was_cut

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, PutMode, PutResult, UpdateVersion

LISTED_AT_ONCE = 1000  # names in one response
REFUSED = (AlreadyExistsError, PreconditionError)

T = TypeVar("T")


class Objects:
    """The objects of a bucket below one prefix."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self.url = f"{bucket.url}/{prefix}".rstrip("/")
        self.bucket, self._prefix = bucket, prefix
        self.lease = read(LEASE)  # seconds; the same for all that one call does
        self._cached: tuple[int, Clients] | None = None

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def key(self, name: str) -> str:
        return "/".join(part for part in (self._prefix, name) if part)

    def clients(self) -> Clients:
        """The clients, cached: reading profiles and variables takes longer than a request."""
        if self._cached is None or self._cached[0] != os.getpid():
            self._cached = (os.getpid(), self.bucket.clients())
        return self._cached[1]

    def call(self, function: Callable[..., T], name: str, *arguments: object, **options: object) -> T:
        """Send one request. Transient errors are retried, other errors are explained."""
        clients = self.clients()
        client = clients.writing if function in (obstore.put, obstore.delete) else clients.reading
        return self.asking(name, partial(function, client, self.key(name) or None, *arguments, **options))

    def asking(self, name: str, ask: Callable[[], T], again: Callable[[], bool] = lambda: True) -> T:
        """Run `ask`, and retry what the client does not retry itself, unless `again` returns False."""
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
        raise AssertionError("the last attempt returns or raises")

    def put(
        self,
        name: str,
        data: bytes | Iterable[memoryview],
        mode: "PutMode",
        telling: int | None = None,
        failures: list[Exception] | None = None,
    ) -> "UpdateVersion":
        """Put an object if a condition holds, and return its version.

        The response may be lost after the server has stored the object. The object is therefore read before a retry,
        and compared with the data, which must differ from that of every other put.

        Args:
            name: The name of the object.
            data: Its content.
            mode: The condition, as in `obstore.put`.
            telling: Compare only the size and this many bytes at the start, which must then be unique.
            failures: A list that receives the error of each failed attempt; one of those may still take effect.
        """
        parts = [memoryview(data)] if isinstance(data, bytes) else [part for part in data if len(part)]
        total = sum(map(len, parts))
        client = self.clients().sending(total)
        deadline: float | None = None
        pause = 0.2
        while True:
            try:
                return version_of(obstore.put(client, self.key(name), parts or b"", mode=mode, use_multipart=False))
            except (FileNotFoundError, BaseError) as error:
                failure = error
            if failures is not None:
                failures.append(failure)
            deadline = (
                deadline or time.monotonic() + PATIENCE
            )  # after the first attempt, which may take longer than that itself
            refused = isinstance(failure, REFUSED) and status_of(failure) != 409  # 409: S3 asks for a retry
            explained = explain(failure, self.bucket, self.locate(name))
            if isinstance(failure, FileNotFoundError) and explained is None and isinstance(mode, dict):
                raise PreconditionError(str(failure)) from failure  # the object to be replaced is gone
            if refused and pause == 0.2:
                raise failure
            if is_final(failure) and not refused:
                raise (explained or StorageError(f"{self.locate(name)}: {failure}")) from failure
            own = self._own(name, parts, total, telling or total)
            if own is not None:
                return own
            if refused:
                raise PreconditionError(f"{self.locate(name)} was written by another program") from failure
            if time.monotonic() > deadline:
                raise (explained or StorageError(f"{self.locate(name)}: {failure}")) from failure
            time.sleep(pause * (1 + os.urandom(1)[0] / 256))
            pause = min(pause * 2, 5.0)

    def _own(self, name: str, parts: Sequence[memoryview], total: int, telling: int) -> "UpdateVersion | None":
        """The version of an object if its size and its first bytes show that it is ours."""
        try:
            found, there = self.get(name, None if telling == total else telling)
        except FileNotFoundError:
            return None
        at = 0
        for part in parts if found["size"] == total else ():
            wanted = part[: telling - at]
            if memoryview(there)[at : at + len(wanted)] != wanted:
                return None
            at += len(wanted)
        return version_of(found) if at == telling else None

    def get(self, name: str, length: int | None = None) -> "tuple[ObjectMeta, bytes]":
        """The metadata of an object, and its data or its first `length` bytes."""
        options: GetOptions | None = None if length is None else {"range": (0, length)}

        def ask() -> "tuple[ObjectMeta, bytes]":
            found = obstore.get(self.clients().reading, self.key(name), options=options)
            return found.meta, bytes(found.bytes())

        meta, data = self.asking(name, ask)
        if len(data) != (meta["size"] if length is None else min(length, meta["size"])):
            raise StorageError(
                f"{self.locate(name)}: the server reported {meta['size']:,} bytes but sent {len(data):,}"
            )
        return meta, data

    def pages(self, name: str, after: str | None = None) -> Iterator[dict[str, int]]:
        """Relative names and sizes of all objects below a name, page by page; only of those `after` a name."""
        start = len(self.key(name)) + 1 if self.key(name) else 0
        reading, key = self.clients().reading, self.key(name) or None
        offset = None if after is None else self.key(after)
        # Tables of arrow, which obstore can return instead, have a type of another package.
        pages = obstore.list(reading, key, offset=offset, chunk_size=LISTED_AT_ONCE)  # pyright: ignore[reportUnknownMemberType]
        for page in pages:
            yield {each["path"][start:]: each["size"] for each in page}

    def remove_own(self, name: str, start: bytes, sure: bool = True) -> None:
        """Remove an object if it begins with `start`.

        A retry always reads the object first: the first attempt may have succeeded, and another program may have
        created a new object since.

        Args:
            name: The name of the object.
            start: The first bytes, which identify the owner.
            sure: Whether the object is known to begin with `start`, so that the first attempt need not read it.
        """
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


def version_of(meta: "ObjectMeta | PutResult") -> "UpdateVersion":
    """What identifies one version of an object: ETag and generation, as far as the server reports them."""
    found: UpdateVersion = {}
    if meta["e_tag"] is not None:
        found["e_tag"] = meta["e_tag"]
    if meta["version"] is not None:
        found["version"] = meta["version"]
    return found
