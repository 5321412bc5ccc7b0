"""Requests for the objects of a bucket below one prefix, through obstore.

What may pass is tried again, what went wrong is told in our words, and a put whose answer was lost is looked for before
it is tried again.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from shardkeep.errors import StorageError
from shardkeep.stores.credentials import PATIENCE, Bucket, Clients, explain, is_final, status_of, was_cut

PAGE = 1000  # names in one answer
REFUSED = (AlreadyExistsError, PreconditionError)

T = TypeVar("T")


class Objects:
    """Objects of a bucket below one prefix."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self.url = f"{bucket.url}/{prefix}".rstrip("/")
        self.bucket, self._prefix = bucket, prefix
        self._cached: tuple[int, Clients] | None = None

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
        client = clients.writing if function in (obstore.put, obstore.delete) else clients.reading
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

    def put(
        self,
        name: str,
        data: bytes | Iterable[memoryview],
        mode: Any,
        telling: int | None = None,
        failures: list[Exception] | None = None,
    ) -> dict[str, Any]:
        """Put an object on a condition and return its version; no other put may have had the same data.

        The answer may get lost after the server has done it: so what is there is read before it is tried again. With
        `telling` that is the size and so many bytes at the start, which must differ from those of every other put.
        `failures` gets what each attempt failed with: one of them may still arrive.
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
            deadline = deadline or time.monotonic() + PATIENCE  # sending alone may take longer
            refused = isinstance(failure, REFUSED) and status_of(failure) != 409  # 409: S3 wants it tried again
            explained = explain(failure, self.bucket, self.locate(name))
            if isinstance(failure, FileNotFoundError) and explained is None and isinstance(mode, dict):
                raise PreconditionError(str(failure)) from failure  # what was to be replaced is gone
            if refused and pause == 0.2:
                raise failure
            if is_final(failure) and not refused:
                raise (explained or StorageError(f"{self.locate(name)}: {failure}")) from failure
            own = self._own(name, parts, total, telling or total)
            if own is not None:
                return own
            if refused:
                raise PreconditionError(f"{self.locate(name)} was put by somebody else") from failure
            if time.monotonic() > deadline:
                raise (explained or StorageError(f"{self.locate(name)}: {failure}")) from failure
            time.sleep(pause * (1 + os.urandom(1)[0] / 256))
            pause = min(pause * 2, 5.0)

    def _own(self, name: str, parts: Sequence[memoryview], total: int, telling: int) -> dict[str, Any] | None:
        """The version of an object if it has this size and begins with this data, as nobody else's could."""
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

    def get(self, name: str, length: int | None = None) -> tuple[Any, bytes]:
        """What is told about an object, and its data, or so many bytes at its start."""
        options: Any = None if length is None else {"range": (0, length)}

        def ask() -> tuple[Any, bytes]:
            found = obstore.get(self.clients().reading, self.key(name), options=options)
            return found.meta, bytes(found.bytes())

        meta, data = self.asking(name, ask)
        if len(data) != (meta["size"] if length is None else min(length, meta["size"])):
            raise StorageError(
                f"{self.locate(name)}: the server said that it has {meta['size']:,} bytes and sent {len(data):,}"
            )
        return meta, data

    def pages(self, name: str) -> Iterator[dict[str, int]]:
        """Everything below a name, page by page: relative name and size."""
        start = len(self.key(name)) + 1 if self.key(name) else 0
        for page in obstore.list(self.clients().reading, self.key(name) or None, chunk_size=PAGE):
            yield {each["path"][start:]: each["size"] for each in page}

    def remove_own(self, name: str, start: bytes, sure: bool = True) -> None:
        """Remove an object that begins so, if it is `sure` that this one does.

        It is never removed again blindly: the first time may have done it, and it be another's by now.
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


def version_of(meta: Any) -> dict[str, Any]:
    """What identifies one state of an object, as far as the server tells."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
