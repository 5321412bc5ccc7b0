"""Leases: what a disk does by locks is done in a bucket by objects that their owner puts again while it lives."""

import logging
import os
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import obstore
from obstore.exceptions import BaseError

from shardkeep.errors import ConflictError, StorageError
from shardkeep.scopes import Latch
from shardkeep.stores.credentials import Clients
from shardkeep.stores.objects import REFUSED, Objects, version_of

LEASE = float(os.environ.get("SHARDKEEP_LEASE", "60"))  # seconds

log = logging.getLogger("shardkeep")

_checked: weakref.WeakSet[Clients] = weakref.WeakSet()  # it is known whether their server keeps conditions
_DEAD = b', "dead": true'


def is_dead(data: bytes) -> bool:
    """Whether somebody has found out before that the owner of this died."""
    return data.partition(b"\n")[0].endswith(_DEAD + b"}")


def condemned(data: bytes) -> bytes:
    """A record as it is put in the place of one whose owner shall not go on."""
    return b'{"owner": "%b"%b}\n' % (os.urandom(16).hex().encode(), _DEAD) + data.partition(b"\n")[2]


class Lease:
    """An object that its owner renews while it lives: the lock, or the record of a save.

    Its first line says who and how often, so that no two puts are the same; S3 tells objects apart by their bytes.
    """

    def __init__(self, store: Objects, name: str, renewed: bool = True) -> None:
        """Not `renewed`: taken from an owner who died, and so dead for whoever comes next."""
        self._store, self._name, self._lines = store, name, b""
        self._owner = b'{"owner": "%b"' % os.urandom(16).hex().encode()
        self._is_renewed, self._end = renewed, b"" if renewed else _DEAD
        self._count = 0
        self._over = Latch()
        self._lock = threading.Lock()
        self._renewed = time.monotonic()
        self._version: dict[str, Any] | None = None

    def take(self, line: bytes, mode: Any = "create") -> None:
        """Put the object, on a condition, and go on renewing it; one of `REFUSED` is raised if that does not hold."""
        self._lines, self._renewed = line, time.monotonic()
        self._version = self._store.put(self._name, self._signed(line), mode)
        if self._is_renewed:
            with suppress(RuntimeError):  # at the end of the program no thread can be started any more
                threading.Thread(target=self._renew_often, name="shardkeep-lease", daemon=True).start()

    def _signed(self, lines: bytes) -> bytes:
        self._count += 1
        return self._owner + b', "renewed": %d' % self._count + self._end + b"}\n" + lines

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
            if self._over.is_set:
                return
            began = time.monotonic()  # the server counts from when it is done, which is later
            try:
                self._version = self._put_over(lines)
            except REFUSED as error:
                raise ConflictError(
                    f"{self._store.locate(self._name)} was taken over: this save gave no sign of life for "
                    f"{LEASE:g} s and was taken for dead. Nothing was committed"
                ) from error
            self._lines, self._renewed = lines, began

    def _put_over(self, lines: bytes) -> dict[str, Any]:
        try:
            return self._store.put(self._name, self._signed(lines), self._version or "create")
        except REFUSED:  # by another, or by a put of ours whose answer never came
            with suppress(FileNotFoundError):
                meta, data = self._store.get(self._name)
                if data.startswith(self._owner):
                    return self._store.put(self._name, self._signed(lines), version_of(meta))
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

    def remove(self) -> None:
        """Stop renewing the object, and remove it."""
        self.release()
        # After so long without renewing it may be another's by now, who will remove it.
        if self._count and time.monotonic() - self._renewed < LEASE:
            # A put that was interrupted may have been done: then it is looked at before it is removed.
            self._store.remove_own(self._name, self._owner, sure=self._version is not None)

    def release(self) -> None:
        """Stop renewing the object. It stays until somebody finds it dead."""
        with self._lock:
            self._over.set()
