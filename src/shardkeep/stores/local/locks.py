"""Locks and records in a local directory: files that the kernel unlocks when their process ends."""

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass

from shardkeep.errors import ConflictError
from shardkeep.runtime.scopes import Scope, sweep
from shardkeep.stores.local.descriptors import Descriptor, make_directories, sync_path, write_at

_locks: "set[LockFile]" = set()  # locked, or about to be


@dataclass(eq=False)
class LockFile:
    """A file that is locked while a call needs it. The kernel releases the lock when the process ends."""

    path: str
    scope: Scope | None = None
    file: Descriptor | None = None

    def open(self, flags: int) -> Descriptor:
        _locks.add(self)
        self.file = Descriptor(self.path, os.O_RDWR | flags)
        return self.file

    def try_lock(self) -> bool:
        assert self.file is not None
        try:
            fcntl.flock(self.file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def refuse_below(self) -> None:
        """`ConflictError` if the lock is held by a call that this one interrupted, and so is never released."""
        if any(o is not self and o.path == self.path and o.scope and o.scope.is_below for o in tuple(_locks)):
            raise ConflictError(
                f"a signal handler made this call while a call on the same thread holds the lock {self.path}, so "
                "waiting for it would never end. Nothing was changed. In a signal handler, set a flag and save from "
                "the training loop"
            )

    def release(self) -> None:
        if self.file is not None and self.file.is_open:
            fcntl.flock(self.file.number, fcntl.LOCK_UN)  # closing is not enough if a child was just forked
            self.file.close()
        _locks.discard(self)


def _let_go() -> None:
    """Close the parent's locks in a forked child, which must not keep them alive."""
    for lock in _locks:
        if lock.file is not None:
            lock.file.close()
    _locks.clear()


os.register_at_fork(after_in_child=_let_go)


class LocalHeld(LockFile):
    """A record file, locked as long as its save is alive."""

    def take(self, line: bytes) -> None:
        make_directories(os.path.dirname(self.path))
        file = self.open(os.O_CREAT | os.O_EXCL)
        fcntl.flock(file.number, fcntl.LOCK_EX)
        write_at(file, 0, [memoryview(line + b"\n")])
        os.fsync(file.number)
        sync_path(os.path.dirname(self.path))

    def take_over(self) -> bool:
        """Lock the record of a dead save; False if the save is alive or the record is gone."""
        try:
            self.open(0)
        except FileNotFoundError:
            return False
        taken = self.try_lock()
        if not taken:
            self.release()
        return taken

    def append(self, line: bytes) -> None:
        # A line that a crash cut short is the last one, and is ignored.
        assert self.file is not None
        end = os.fstat(self.file.number).st_size
        write_at(self.file, end, [memoryview(line + b"\n")])
        os.fsync(self.file.number)

    def confirm(self, age: float) -> None:
        # The kernel keeps the lock for as long as the process lives. Only the file may have been removed.
        if self.file is None or not self.file.is_open or not os.fstat(self.file.number).st_nlink:
            raise ConflictError(f"{self.path} was removed by another program while this one was using it")

    def remove(self) -> None:
        if self.file is None or self.file.is_open:  # closed: it is removed already, or it belongs to the parent
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        self.release()


def wait_for_lock(file: Descriptor, deadline: float) -> None:
    """Lock an open file; `ConflictError` once the deadline has passed."""
    pause = 0.001
    while True:
        try:
            return fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConflictError(
                    f"timed out waiting for the lock {file.path}, which another program holds; if that program hangs, "
                    "end it and try again"
                ) from None
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
        sweep()  # the holder may be a call in this program whose clean-up was interrupted
