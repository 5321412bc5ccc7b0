"""Leases: what its owner renews while it is alive, where the kernel does not tell others that a process has died."""

import threading
import time
from contextlib import suppress

from shardkeep.errors import ConflictError, StorageError
from shardkeep.runtime.scopes import Latch


class Renewed:
    """Something that its owner renews, four times in each lease. Others take it for dead after one lease without.

    Args:
        lease: Its length in seconds.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._over = Latch()
        self._renewed = time.monotonic()

    def start(self) -> None:
        """Renew it from now on, until it is stopped."""
        with suppress(RuntimeError):  # no thread can be started at the end of the program
            threading.Thread(target=self._renew_often, name="shardkeep-lease", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _renew_often(self) -> None:
        while not self._over.wait(self._lease / 4):
            try:
                self.renew()
            except ConflictError:  # `confirm` reports it
                return
            except (StorageError, OSError, ValueError):  # ValueError: the file was closed just now
                continue

    def renew(self) -> None:
        """Renew it now. `ConflictError` if it was taken over."""
        raise NotImplementedError

    def confirm(self, age: float) -> None:
        """Renew it if that was more than `age` seconds ago. `ConflictError` if it was taken over."""
        if time.monotonic() - self._renewed > age:
            self.renew()
