"""Locks and records in a local directory: files that the kernel unlocks when their process ends.

Other hosts may not see that a file is locked, and some file systems have no locks. There a record is also renewed, and
counts as alive until it was not renewed for a lease; and the lock is, beside, a file that exists while it is held.
"""

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field

from shardkeep import system
from shardkeep.config import LEASE, read
from shardkeep.errors import ConflictError
from shardkeep.runtime.scopes import Scope, sweep
from shardkeep.stores.leases import Renewed
from shardkeep.stores.local.descriptors import Descriptor, make_directories, sync_path, write_at

_locks: "set[LockFile]" = set()  # locked, or about to be
# What flock raises where there are no locks: Lustre without `-o flock`, NFS without lockd, and others.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


@dataclass(eq=False)
class LockFile:
    """A file that is locked while a call needs it. The kernel releases the lock when the process ends."""

    path: str
    scope: Scope | None = None
    file: Descriptor | None = None
    is_lockable: bool = True  # False if the file system was found to have no locks
    renewal: "Renewed | None" = None  # of a record that is renewed, too

    def open(self, flags: int) -> Descriptor:
        _locks.add(self)
        self.file = Descriptor(self.path, os.O_RDWR | flags)
        return self.file

    def try_lock(self, how: int = system.LOCK_EXCLUSIVE) -> bool:
        """Lock the file; False if another program has locked it. Nothing is locked where there are no locks."""
        assert self.file is not None
        try:
            system.flock(self.file.number, how | system.LOCK_NOW)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.is_lockable = False
        return True

    def refuse_below(self) -> None:
        """`ConflictError` if the lock is held by a call that this one interrupted, and so is never released."""
        if any(o is not self and o.path == self.path and o.scope and o.scope.is_below for o in tuple(_locks)):
            raise ConflictError(
                f"a signal handler made this call while a call on the same thread holds the lock {self.path}, so "
                "waiting for it would never end. Nothing was changed. In a signal handler, set a flag and save from "
                "the training loop"
            )

    def wait(self, deadline: float) -> None:
        """Lock the file; `ConflictError` once the deadline has passed."""
        pause = 0.001
        while not self.try_lock():
            if time.monotonic() > deadline:
                raise timed_out(self.path)
            time.sleep(pause)
            pause = min(pause * 2, 0.1)
            sweep()  # the holder may be a call in this program whose clean-up was interrupted

    def now(self) -> float:
        """The time of the file system, by whose clock files are changed."""
        assert self.file is not None
        where = system.fd_or_path(self.file.number, self.path) if self.file.is_open else self.path
        os.utime(where)
        return os.stat(where).st_mtime

    def release(self) -> None:
        if self.renewal is not None:
            self.renewal.stop()
        if self.file is not None and self.file.is_open:
            with suppress(OSError):  # there may be no locks here
                system.flock(self.file.number, system.UNLOCK)  # closing is not enough if a child was just forked
            self.file.close()
        _locks.discard(self)


def timed_out(path: str) -> ConflictError:
    """The error of a call that did not get a lock."""
    return ConflictError(
        f"timed out waiting for the lock {path}, which another program holds; if that program hangs, end it and try "
        "again"
    )


def _let_go() -> None:
    """Close the parent's locks in a forked child, which must not keep them alive."""
    for lock in _locks:
        if lock.file is not None:
            lock.file.close()
    _locks.clear()


system.after_fork_in_child(_let_go)


@dataclass(eq=False)
class LocalHeld(LockFile):
    """A record file, locked as long as its save is alive, and renewed where other hosts may not see the lock."""

    is_renewed: bool = False
    changed: list[str] = field(default_factory=list[str])  # directories that are synced with the record

    def take(self, line: bytes) -> None:
        make_directories(os.path.dirname(self.path), self.changed)
        file = self.open(os.O_CREAT | os.O_EXCL)
        while not self.try_lock():  # somebody looks whether it is alive
            time.sleep(0.001)
        write_at(file, 0, [memoryview(line + b"\n")])
        system.fsync(file.number)  # first: on most file systems, this takes the new directories to the disk as well
        for directory in dict.fromkeys([*self.changed, os.path.dirname(self.path)]):
            sync_path(directory)
        self.changed.clear()
        if self.is_renewed or not self.is_lockable:
            self.renewal = _RenewedRecord(self)
            self.renewal.start()

    def take_over(self, now: float | None) -> bool:
        """Lock the record of a dead save; False if the save is alive or the record is gone.

        Args:
            now: The time of the file system where the lock does not say everything.
        """
        try:
            file = self.open(0)
        except FileNotFoundError:
            return False
        taken = self.try_lock()
        if taken and now is not None and now - os.fstat(file.number).st_mtime <= read(LEASE):
            taken = False
        if not taken:
            self.release()
        return taken

    def append(self, line: bytes) -> None:
        # A line that a crash cut short is the last one, and is ignored.
        assert self.file is not None
        end = os.fstat(self.file.number).st_size
        write_at(self.file, end, [memoryview(line + b"\n")])
        system.fsync(self.file.number)

    def confirm(self, age: float) -> None:
        # The kernel keeps the lock for as long as the process lives. Only the file may have been removed.
        try:
            if self.file is not None and self.file.is_open and os.fstat(self.file.number).st_nlink:
                return
        except OSError as error:
            if error.errno not in (errno.ESTALE, errno.ENOENT):  # how file systems of others tell it
                raise
        raise ConflictError(f"{self.path} was removed by another program while this one was using it")

    def remove(self) -> None:
        if self.file is None or self.file.is_open:  # closed: it is removed already, or it belongs to the parent
            if not system.HAS_LOCKS:
                self.release()  # such systems do not remove open files
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        self.release()


class _RenewedRecord(Renewed):
    """Renews a record by setting its time of change."""

    def __init__(self, held: LocalHeld) -> None:
        super().__init__(read(LEASE))
        self._held = held

    def renew(self) -> None:
        self._held.confirm(0)
        if (file := self._held.file) is not None:
            os.utime(system.fd_or_path(file.number, file.path))
            self._renewed = time.monotonic()


class HeldFile(Renewed):
    """A lock where other hosts do not see those of the kernel: a file that exists while one program holds it.

    It contains the name of its owner. Whoever removes it, the owner or one who finds it expired, first creates a second
    file that is named after that owner: only one can do so, and no other owner's file is ever removed.

    Args:
        path: The file.
        lock: The lock of this host, which the caller holds.
    """

    def __init__(self, path: str, lock: LockFile) -> None:
        super().__init__(read(LEASE))
        self._path, self._lock = path, lock
        self._owner = os.urandom(16).hex()
        self._is_taken = False

    def take(self, deadline: float) -> None:
        """Create the file as soon as there is none, or one that has expired; `ConflictError` after the deadline."""
        pause = 0.01
        while not self._create():
            self._lock.refuse_below()
            owner, age = self._look()
            if age > self._lease:
                self._remove(owner)
            elif time.monotonic() > deadline and age < self._lease / 2:  # else it may soon expire
                raise timed_out(self._path)
            else:
                time.sleep(pause)
                pause = min(pause * 2, 1.0)
                sweep()  # as in `LockFile.wait`
        self.start()

    def _create(self) -> bool:
        self._is_taken, self._renewed = True, time.monotonic()  # or about to be
        try:
            with Descriptor(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                write_at(file, 0, [memoryview(self._owner.encode())])
        except FileExistsError:
            self._is_taken = False
        return self._is_taken

    def _look(self) -> tuple[str, float]:
        """Who holds the lock (empty: it is just being taken), and for how many seconds it was not renewed."""
        now = self._lock.now()
        try:
            with Descriptor(self._path, os.O_RDONLY) as file:
                return system.pread(file.number, 100, 0).decode("ascii", "replace"), now - os.fstat(
                    file.number
                ).st_mtime
        except FileNotFoundError:
            return "", 0.0

    def _remove(self, owner: str) -> None:
        """Remove the file if it is that of an owner."""
        mine = f"{self._path}-{owner}"
        try:
            Descriptor(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL).close()
        except FileExistsError:
            # Another one is removing it, or died while it did.
            with suppress(FileNotFoundError):
                if self._lock.now() - os.stat(mine).st_mtime > self._lease:
                    os.unlink(mine)
            time.sleep(0.01)
            return
        with suppress(FileNotFoundError):
            if self._look()[0] == owner:
                os.unlink(self._path)
        os.unlink(mine)

    def renew(self) -> None:
        if self._look()[0] != self._owner:
            raise ConflictError(
                f"the lock {self._path} was taken over: this program did not renew it for {self._lease:g} s, so "
                "another one assumed that it had died. Nothing was committed. If the program was only suspended, save "
                f"again; a longer lease can be set with {LEASE.variable}"
            )
        os.utime(self._path)
        self._renewed = time.monotonic()

    def confirm_taken(self) -> None:
        """Before a commit: `ConflictError` if the lock was taken over, because this program was suspended."""
        self.confirm(self._lease / 2)

    def release(self) -> None:
        self.stop()
        if self._is_taken:
            self._is_taken = False
            with suppress(FileNotFoundError):  # the directory was removed, as by a delete
                self._remove(self._owner)
