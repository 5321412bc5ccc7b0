"""Leases: the replacement for file locks in a bucket, objects that their owner renews while it is alive."""

import logging
import os
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError

from shardkeep.config import LEASE
from shardkeep.errors import ConflictError
from shardkeep.stores.bucket.credentials import Clients
from shardkeep.stores.bucket.objects import REFUSED, Objects, version_of
from shardkeep.stores.leases import Renewed

if TYPE_CHECKING:
    from obstore import PutMode, UpdateVersion

log = logging.getLogger("shardkeep")

_checked: weakref.WeakSet[Clients] = weakref.WeakSet()  # clients whose server was tested for conditional puts
_DEAD = b', "dead": true'


def is_dead(data: bytes) -> bool:
    """Whether the owner was already found to be dead."""
    return data.partition(b"\n")[0].endswith(_DEAD + b"}")


def condemned(data: bytes) -> bytes:
    """A replacement for a record that stops its owner from continuing."""
    return b'{"owner": "%b"%b}\n' % (os.urandom(16).hex().encode(), _DEAD) + data.partition(b"\n")[2]


class Lease(Renewed):
    """An object that its owner renews while it is alive: the lock, or the record of a save.

    The first line contains the owner and a counter, so that no two puts are equal: S3 identifies versions by content.

    Args:
        store: The store that contains the object.
        name: The name of the object.
        renewed: Whether to renew it. False if it was taken over from a dead owner, and so counts as dead for others.
    """

    def __init__(self, store: Objects, name: str, renewed: bool = True) -> None:
        super().__init__(store.lease)
        self._store, self._name, self._lines = store, name, b""
        self._owner = b'{"owner": "%b"' % os.urandom(16).hex().encode()
        self._is_renewed, self._end = renewed, b"" if renewed else _DEAD
        self._count = 0
        self._lock = threading.Lock()
        self._version: UpdateVersion | None = None

    def take(self, line: bytes, mode: "PutMode" = "create") -> None:
        """Put the object and start renewing it. Raises one of `REFUSED` if the condition does not hold."""
        self._lines, self._renewed = line, time.monotonic()
        self._version = self._store.put(self._name, self._signed(line), mode)
        if self._is_renewed:
            self.start()

    def _signed(self, lines: bytes) -> bytes:
        self._count += 1
        return self._owner + b', "renewed": %d' % self._count + self._end + b"}\n" + lines

    def renew(self) -> None:
        self._put(self._lines)

    def _put(self, lines: bytes) -> None:
        with self._lock:
            if self._over.is_set:
                return
            began = time.monotonic()  # the server counts from the end of the request, which is later
            try:
                self._version = self._put_over(lines)
            except REFUSED as error:
                raise ConflictError(
                    f"{self._store.locate(self._name)} was taken over: this save did not renew its lease for "
                    f"{self._store.lease:g} s, so another program assumed that it had died. Nothing was committed. If "
                    f"the program was only suspended, save again; a longer lease can be set with {LEASE.variable}"
                ) from error
            self._lines, self._renewed = lines, began

    def _put_over(self, lines: bytes) -> "UpdateVersion":
        try:
            return self._store.put(self._name, self._signed(lines), self._version or "create")
        except REFUSED:  # by another program, or by our own put whose response was lost
            with suppress(FileNotFoundError):
                meta, data = self._store.get(self._name)
                if data.startswith(self._owner):
                    return self._store.put(self._name, self._signed(lines), version_of(meta))
            raise

    def append(self, line: bytes) -> None:
        self._put(self._lines + line + b"\n")

    def check_conditions(self) -> None:
        """Warn once per bucket if the server ignores conditional puts, so that concurrent writers are not detected."""
        clients = self._store.clients()
        if clients in _checked:
            return
        _checked.add(clients)
        data = self._signed(self._lines)
        modes: list[PutMode] = ["create", {"e_tag": f'"{"0" * 32}"', "version": "1"}]
        for mode in modes:
            with suppress(FileNotFoundError, BaseError):
                obstore.put(clients.once, self._store.key(self._name), data, mode=mode, use_multipart=False)
                log.warning(
                    "the server of %s ignores conditional puts, so concurrent saves to one checkpoint can overwrite "
                    "each other: save from one program at a time",
                    self._store.bucket.url,
                )
                return

    def remove(self) -> None:
        """Stop renewing the object and remove it."""
        self.release()
        # After a longer time another program may have taken it over, and will remove it.
        if self._count and time.monotonic() - self._renewed < self._store.lease:
            # After an interrupted put it is not known whether the object is ours, so it is read first.
            self._store.remove_own(self._name, self._owner, sure=self._version is not None)

    def release(self) -> None:
        """Stop renewing the object. It stays until another program finds it expired."""
        with self._lock:
            self._over.set()
