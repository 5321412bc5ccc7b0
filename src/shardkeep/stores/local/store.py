"""A checkpoint in a local (or locally mounted) directory."""

import errno
import logging
import os
import shutil
import stat
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from shardkeep import system
from shardkeep.config import LEASE, read
from shardkeep.errors import IntegrityError
from shardkeep.model.lazy import cached_property
from shardkeep.runtime.crew import run_tasks
from shardkeep.runtime.scopes import Scope, frame_above
from shardkeep.stores.base import CONTROL, LOCK_SECONDS, Traits
from shardkeep.stores.local.descriptors import (
    Descriptor,
    make_directories,
    make_durable_directories,
    sync_file_system,
    sync_path,
    write_at,
)
from shardkeep.stores.local.locks import HeldFile, LocalHeld, LockFile
from shardkeep.stores.local.mapping import MAPPABLE, LocalFile
from shardkeep.stores.local.mounts import LOCAL, Mount, mount_of
from shardkeep.stores.local.newfile import DIRECT, LocalNewFile

log = logging.getLogger("shardkeep")

_FEW_FILES = 8  # files: above this, one sync of the file system is faster than one for each of them
_LARGE = 1 << 20  # space for files of at least this size is allocated before they are written
_SMALL = 256 << 10  # smaller files stay in the page cache until all are synced together
_MAX_DOCUMENT = 2 << 30  # bytes: a leaf takes about 200 in a manifest, so this is ten million leaves
_COPIED = 8 << 20  # bytes read at a time when a file is copied
_MANY = 64  # files: more are looked at concurrently where each look may cost a round trip
_LOOKS = 16  # looks at once: network file systems answer so many from one client without queueing them
# What a hard link raises where there are no hard links, or no more of this file.
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_UNSHARED = "locks-are-not-shared"  # the file in the control directory that says so
_lockless: set[str] = set()  # directories in which no file can be locked


class LocalStore:
    """Files below one directory."""

    traits = Traits(
        editable=True,
        has_directories=True,
        has_paths=True,
        costly_requests=False,
        late_requests=False,
    )

    def __init__(self, root: str, control: str = CONTROL, confined: bool = True) -> None:
        """A store for the directory `root`.

        Args:
            root: The directory, which need not exist.
            control: The name of the control directory in it.
            confined: Whether symbolic links that lead out of it are refused.
        """
        self.url = root
        self.control = control
        self.saves = f"{control}/saves"
        self._root = root
        self._confined = confined
        self._inside: dict[str, bool] = {}
        self._lock: LockFile | None = None  # while it is held
        self._guard: HeldFile | None = None  # the same where other hosts do not see locks
        self._changed: list[str] = []  # directories that `lock` has changed, and that are not synced yet

    @property
    def has_leases(self) -> bool:
        if self._root in _lockless or not system.HAS_LOCKS:
            return True
        mount = self._mount
        trusted = mount.kind in LOCAL or mount.shares_locks
        return not trusted or (mount.kind not in LOCAL and self.size(f"{self.control}/{_UNSHARED}") is not None)

    def locate(self, name: str) -> str:
        return os.path.join(self._root, name) if name else self._root

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            if file.size > _MAX_DOCUMENT:
                path = self.locate(name)
                raise IntegrityError(f"{path} is too large for a manifest or index", file=path)
            with open(file.number, "rb", closefd=False) as content:
                return content.read()

    def size(self, name: str) -> int | None:
        try:
            found = os.stat(self.locate(name))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        wanted = list(names)
        found: dict[str, int | None] = {}

        def look(some: Sequence[str]) -> None:
            found.update({name: self.size(name) for name in some})

        if self.mappable or len(wanted) < _MANY:
            look(wanted)
        else:
            run_tasks([partial(look, wanted[first::_LOOKS]) for first in range(_LOOKS)], _LOOKS)
        return found

    def modified(self, name: str) -> float | None:
        try:
            return os.stat(self.locate(name)).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None

    def identity(self, name: str) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.locate(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (found.st_ino, found.st_size, found.st_mtime_ns)

    def open(self, name: str) -> LocalFile:
        """Open a file for reading; `IntegrityError` for a link that leads out, and for anything that could block."""
        path = self.locate(name)
        linked = "/" in name or os.path.islink(path)
        if linked and self._confined and not self._is_inside(path):
            raise _leads_out(path, self._root)
        try:
            file = LocalFile(path, os.O_RDONLY | system.NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise IntegrityError(f"{path} is a broken symbolic link", file=path) from None
            raise
        found = os.fstat(file.number)
        if not stat.S_ISREG(found.st_mode):
            file.close()
            raise IntegrityError(f"{path} is not a regular file", file=path)
        file.size = found.st_size
        return file

    def _is_inside(self, path: str) -> bool:
        """Whether a path stays below the root when links are followed. Each directory is checked once."""
        inside = self._holds(os.path.dirname(path))
        return inside and (not os.path.islink(path) or (os.path.realpath(path) + os.sep).startswith(self._real_root))

    def _holds(self, directory: str) -> bool:
        known = self._inside.get(directory)
        if known is None:
            plain = directory.startswith(self._root + os.sep) and not os.path.islink(directory)
            if directory == self._root or (plain and self._holds(os.path.dirname(directory))):
                known = True
            else:
                known = (os.path.realpath(directory) + os.sep).startswith(self._real_root)
            self._inside[directory] = known
        return known

    @cached_property
    def _real_root(self) -> str:
        return os.path.realpath(self._root).rstrip(os.sep) + os.sep

    @cached_property
    def _mount(self) -> Mount:
        return mount_of(self._root)

    @property
    def mappable(self) -> bool:
        return self._mount.kind in MAPPABLE

    def create(self, name: str, size: int, aligned: bool = False) -> LocalNewFile:
        able = size >= _LARGE and self._mount.kind in DIRECT
        return LocalNewFile(self._place_for(name), size if able else 0, aligned and able)

    def _place_for(self, name: str) -> str:
        """The path for a new file, its directory created; never below a link that leads out of the checkpoint."""
        path = self.locate(name)
        if "/" in name and not self._is_inside(path):
            raise IntegrityError(
                f"{path} is below a symbolic link that leads out of {self._root}; remove the link", file=path
            )
        make_directories(os.path.dirname(path))  # `sync` follows
        return path

    def write_new(self, name: str, total: int, buffers: Iterable[memoryview]) -> LocalNewFile | None:
        path = self._place_for(name)
        if total >= _SMALL:
            file = LocalNewFile(path)
            try:
                file.write(0, list(buffers))
            except BaseException:
                file.close()
                raise
            return file
        with Descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as new:
            write_at(new, 0, list(buffers))
        return None

    def sync(self, names: Sequence[str]) -> None:
        paths = [self.locate(name) for name in names]
        if len(paths) > _FEW_FILES and sync_file_system(self._root):
            return
        for path in paths:
            sync_path(path, os.fsync)
        directories: set[str] = set()
        for name in names:
            parent: str = name
            while parent:  # all parents up to the root: any of them may be new
                parent = os.path.dirname(parent)
                directories.add(self.locate(parent))
        for directory in directories:
            sync_path(directory, os.fsync)
        if system.HAS_FULL_SYNC and paths:
            sync_path(paths[0])  # empties the cache of the drive, once for all of them

    def replace(self, name: str, data: bytes) -> None:
        path = self.locate(name)
        aside = f"{path}.{os.urandom(8).hex()}.tmp"
        try:
            with Descriptor(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as new:
                write_at(new, 0, [memoryview(data)])
                system.fsync(new.number)
            if self._guard is not None:
                self._guard.confirm_taken()
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(aside)
            raise
        sync_path(os.path.dirname(path))

    def remove(self, names: Iterable[str]) -> None:
        directories: set[str] = set()
        for name in names:
            path = self.locate(name)
            if not self._is_inside(os.path.join(os.path.dirname(path), "x")):
                continue  # below a link that leads out: not part of the checkpoint
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
            directories.add(os.path.dirname(path))
        self._remove_empty(directories)

    def _remove_empty(self, directories: set[str]) -> None:
        for directory in sorted(directories, key=len, reverse=True):
            while len(directory) > len(self._root):
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    pass
                except OSError:  # not empty, or no permission
                    break
                directory = os.path.dirname(directory)

    def clear(self, last: str) -> None:
        for name in sorted(self.children(""), key=lambda name: name == last):
            path = self.locate(name)
            with suppress(FileNotFoundError):  # another process may be clearing it too
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
        with suppress(FileNotFoundError):
            os.rmdir(self._root)

    def rename(self, name: str, new: str) -> None:
        if self._guard is not None:
            self._guard.confirm_taken()
        os.replace(self.locate(name), self.locate(new))
        sync_path(os.path.dirname(self.locate(new)))

    def link(self, name: str, new: str) -> None:
        old, path = self.locate(name), self.locate(new)
        directory = os.path.dirname(path)
        if not self._holds(directory):
            raise IntegrityError(
                f"{path} is behind a symbolic link that leads out of {self._root}; remove the link", file=path
            )
        for _ in range(3):
            try:
                return system.link(old, path)
            except FileNotFoundError:
                if os.path.isdir(directory):
                    raise
                make_directories(directory)  # `sync` comes later
            except FileExistsError:
                if os.path.samestat(os.stat(old), os.lstat(path)):
                    return
                os.unlink(path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                make_directories(directory)
                with suppress(FileNotFoundError):
                    os.unlink(path)
                return _copy(old, path)
        raise FileExistsError(errno.EEXIST, "another program is creating files here", path)

    def sync_directory(self, name: str) -> None:
        sync_path(self.locate(name))

    def remove_control(self) -> None:
        if self._lock is not None and not system.HAS_LOCKS:
            self._lock.release()  # such systems do not remove open files; the guard still excludes others
        for name in ("saves", "claims", ""):
            directory = self.locate(f"{self.control}/{name}".rstrip("/"))
            for inside in self.children(f"{self.control}/{name}".rstrip("/")):
                with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                    os.unlink(os.path.join(directory, inside))
            with suppress(OSError):
                os.rmdir(directory)

    def remove_if_empty(self) -> None:
        with suppress(OSError):
            os.rmdir(self._root)

    def children(self, name: str) -> list[str]:
        path = self.locate(name)
        linked = name.partition("/")[0] != self.control and ("/" in name or (name and os.path.islink(path)))
        if linked and self._confined and not self._is_inside(path):
            raise _leads_out(path, self._root)
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def entries(self) -> tuple[list[str], list[str]]:
        directories: list[str] = []
        files: list[str] = []
        for name in self.children(""):
            (directories if os.path.isdir(self.locate(name)) else files).append(name)
        return directories, files

    def is_taken(self, names: Iterable[str]) -> bool:
        directories: set[str] = set()
        for name in names:
            if os.path.lexists(self.locate(name)):
                return True
            while name := os.path.dirname(name):
                directories.add(name)
        places = [self.locate(directory) for directory in directories]
        return any(os.path.islink(p) or (os.path.lexists(p) and not os.path.isdir(p)) for p in places)

    def find_directories_with(self, name: str) -> list[str]:
        found: list[str] = []
        for directory, _, files in os.walk(self._root):
            if name in files:
                relative = os.path.relpath(directory, self._root)
                found.append("" if relative == "." else relative.replace(os.sep, "/"))
        return sorted(found)

    @contextmanager
    def lock(self, seconds: float = LOCK_SECONDS) -> Generator[None]:
        for part in (self.control, self.saves, f"{self.control}/claims", f"{self.control}/lock"):
            if os.path.islink(self.locate(part)):  # files are created and removed there
                raise IntegrityError(
                    f"{self.locate(part)} is a symbolic link, which shardkeep never creates; remove it"
                )
        path, deadline = self.locate(f"{self.control}/lock"), time.monotonic() + seconds
        with Scope(f"locking {path}", frame_above(2)) as scope:
            try:
                while True:
                    make_directories(os.path.dirname(path), self._changed)
                    lock = scope.add(LockFile(path, scope))
                    try:
                        file = lock.open(os.O_CREAT)
                    except FileNotFoundError:  # a delete removed the directory
                        continue
                    if not lock.try_lock():
                        self._sync_changed()  # whoever has the lock relies on them, too
                        lock.refuse_below()
                        lock.wait(deadline)
                    if not lock.is_lockable:
                        _lockless.add(self._root)
                    # If the file was removed while we waited, the lock is a different file now.
                    is_there = os.path.exists(path) and os.fstat(file.number).st_nlink
                    if is_there and (not self.has_leases or self._take_guard(lock, deadline, scope)):
                        break
                    lock.release()
                self._lock = lock
                yield
                if self._changed:  # no record was taken, with which they would have been synced
                    self._sync_changed()
            except BaseException:
                with suppress(OSError):  # what went wrong before says more
                    self._sync_changed()
                raise
            finally:
                self._lock = self._guard = None

    def _sync_changed(self) -> None:
        """Make the directories that were made for the lock survive a power cut."""
        while self._changed:
            with suppress(FileNotFoundError):  # a delete removed it again
                sync_path(self._changed[-1])
            self._changed.pop()  # not before: this may be interrupted

    def _take_guard(self, lock: LockFile, deadline: float, scope: Scope) -> bool:
        """Exclude other hosts too, where they do not see the lock. False if the directory was removed."""
        guard = scope.add(HeldFile(f"{lock.path}.held", lock))
        try:
            guard.take(deadline)
        except FileNotFoundError:
            return False
        self._guard = guard
        return True

    def hold(self, name: str) -> LocalHeld:
        return LocalHeld(self.locate(name), is_renewed=self._mount.kind not in LOCAL, changed=self._changed)

    def try_hold(self, name: str, scope: Scope) -> LocalHeld | None:
        held = scope.add(LocalHeld(self.locate(name)))
        now = None if not self.has_leases else time.time() if self._lock is None else self._lock.now()
        return held if held.take_over(now) else None

    def is_held(self, name: str) -> bool:
        try:
            with self.open(name) as record:
                lock = LockFile(record.path, file=record)
                is_free = lock.try_lock(system.LOCK_SHARED)
                if is_free and (self.has_leases or not lock.is_lockable):  # by this clock: nothing is written
                    is_free = time.time() - os.fstat(record.number).st_mtime > read(LEASE)
                lock.release()
                return not is_free
        except (FileNotFoundError, NotADirectoryError, IntegrityError):
            return False
        except OSError:  # unreadable: it may be alive
            return True

    def check_locks(self, name: str) -> None:
        if self._mount.kind not in LOCAL and not self.has_leases and not self.is_held(name):
            log.warning(
                "%s: locks of other hosts are not visible here, although the file system (%s) should share them. "
                "Saves are protected by leases instead, as on file systems that do not share locks",
                self._root,
                self._mount.kind,
            )
            self.claim(f"{self.control}/{_UNSHARED}")

    def claim(self, name: str) -> bool:
        path = self.locate(name)
        make_durable_directories(os.path.dirname(path))
        try:
            Descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL).close()
        except FileExistsError:
            return False
        sync_path(os.path.dirname(path))
        return True

    def free_bytes(self) -> int:
        place = self._root
        while not os.path.isdir(place):  # the directory could not be created
            place = os.path.dirname(place)
        return shutil.disk_usage(place).free


def _copy(old: str, new: str) -> None:
    """Copy a file to a new name."""
    with Descriptor(old, os.O_RDONLY) as source, Descriptor(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as copy:
        at = 0
        while data := system.pread(source.number, _COPIED, at):
            write_at(copy, at, [memoryview(data)])
            at += len(data)


def _leads_out(path: str, root: str) -> IntegrityError:
    return IntegrityError(f"{path} is, or is below, a symbolic link that leads out of {root}", file=path)
