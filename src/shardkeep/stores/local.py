"""A checkpoint in a local (or locally mounted) directory."""

import ctypes
import errno
import fcntl
import os
import stat
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

from shardkeep.errors import ConflictError, IntegrityError
from shardkeep.stores.mapping import MAPPABLE, LocalFile, file_system
from shardkeep.stores.newfile import DIRECT, LocalNewFile, write_at

CONTROL = ".shardkeep"
_FEW_FILES = 8
_LARGE = 1 << 20  # room is made for files from this size on, before they are written
_SMALL = 256 << 10  # files below stay in the page cache until they are synced together
_MAX_PATH = 4096
_MAX_DOCUMENT = 2 << 30


_locked: set[int] = set()  # descriptors with a lock, which a forked child must not keep alive


def _unlock(descriptor: int) -> None:
    _locked.discard(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone leaves it to a child that was just forked
    os.close(descriptor)


def _let_go() -> None:
    for descriptor in _locked:
        with suppress(OSError):
            os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go)


class LocalStore:
    """Files below one directory. `confined`: a symbolic link that leads out of it is not followed."""

    def __init__(self, root: str, control: str = CONTROL, confined: bool = True) -> None:
        self.url = root
        self.control = control
        self.saves = f"{control}/saves"
        self._root = root
        self._confined = confined
        self._inside: dict[str, bool] = {}
        self.remote = False
        self.concurrency = None
        self.object_limit = None

    def locate(self, name: str) -> str:
        return os.path.join(self._root, name) if name else self._root

    def read(self, name: str) -> bytes:
        path = self._checked(name)
        descriptor = _open_plain(path)
        with open(descriptor, "rb") as file:
            if os.fstat(descriptor).st_size > _MAX_DOCUMENT:
                raise IntegrityError(f"{path} is too large to be a document of a checkpoint")
            return file.read()

    def size(self, name: str) -> int | None:
        try:
            found = os.stat(self.locate(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        return {name: self.size(name) for name in names}

    def identity(self, name: str) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.locate(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (found.st_ino, found.st_size, found.st_mtime_ns)

    def open(self, name: str) -> "LocalFile":
        path = self._checked(name)
        return LocalFile(_open_plain(path), path)

    def _checked(self, name: str) -> str:
        path = self.locate(name)
        if "/" not in name and not os.path.islink(path):
            return path
        if self._confined and not self._is_inside(path):
            raise IntegrityError(f"{path} is a symbolic link, or lies behind one, that leads out of {self._root}")
        return path

    def _is_inside(self, path: str) -> bool:
        """Whether a path stays below the root when links are followed; directories are looked at once."""
        inside = self._holds(os.path.dirname(path))
        return inside and (not os.path.islink(path) or os.path.realpath(path).startswith(self._real_root))

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
    def _file_system(self) -> str:
        return file_system(self._root)

    @property
    def mappable(self) -> bool:
        return self._file_system in MAPPABLE

    def create(self, name: str, size: int, aligned: bool = False) -> LocalNewFile:
        able = size >= _LARGE and self._file_system in DIRECT
        return LocalNewFile(self._place_for(name), size if able else 0, aligned and able)

    def _place_for(self, name: str) -> str:
        """Where a new file goes, its directory made; never behind a link that leads out of the checkpoint."""
        path = self.locate(name)
        if "/" in name and not self._is_inside(path):
            raise IntegrityError(f"{path} lies behind a symbolic link that leads out of {self._root}; remove the link")
        make_directories(os.path.dirname(path), durable=False)  # `sync` comes later
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
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_at(descriptor, 0, list(buffers), path)
        finally:
            os.close(descriptor)
        return None

    def sync(self, names: Sequence[str]) -> None:
        paths = [self.locate(name) for name in names]
        if len(paths) > _FEW_FILES and sync_file_system(self._root):
            return
        for path in paths:
            sync_path(path)
        directories: set[str] = set()
        for name in names:
            while name:  # all those above it, the root last: any of them may be new
                name = os.path.dirname(name)
                directories.add(self.locate(name))
        for directory in directories:
            sync_path(directory)

    def replace(self, name: str, data: bytes) -> None:
        path = self.locate(name)
        aside = f"{path}.{os.urandom(8).hex()}.tmp"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                write_at(descriptor, 0, [memoryview(data)], aside)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(aside, path)
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
                continue  # behind a link that leads out: not ours to remove
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
                except OSError:  # not empty, or not ours to remove
                    break
                directory = os.path.dirname(directory)

    def write_into(self, name: str, offset: int, data: bytes) -> None:
        descriptor = os.open(self.locate(name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_at(descriptor, offset, [memoryview(data)], self.locate(name))
        finally:
            os.close(descriptor)

    def rename(self, name: str, new: str) -> None:
        os.rename(self.locate(name), self.locate(new))
        sync_path(os.path.dirname(self.locate(new)))

    def sync_directory(self, name: str) -> None:
        sync_path(self.locate(name))

    def remove_control(self) -> None:
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
        try:
            return sorted(os.listdir(self.locate(name)))
        except (FileNotFoundError, NotADirectoryError):
            return []

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
    def lock(self, seconds: float) -> Generator[None]:
        path = self.locate(f"{self.control}/lock")
        deadline = time.monotonic() + seconds
        for part in (self.control, self.saves, f"{self.control}/claims", f"{self.control}/lock"):
            if os.path.islink(self.locate(part)):  # files are made and removed there: it must be there
                raise IntegrityError(f"{self.locate(part)} is a symbolic link, which shardkeep never makes; remove it")
        while True:
            make_directories(os.path.dirname(path))
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # a delete was faster
                continue
            _locked.add(descriptor)
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    wait_for_lock(descriptor, path, deadline)
                # Removed while we waited? Then the lock is another file now.
                if not os.path.exists(path) or os.fstat(descriptor).st_nlink == 0:
                    continue
                yield
                return
            finally:
                if descriptor in _locked:
                    _unlock(descriptor)

    def hold(self, name: str, line: bytes) -> "LocalHeld":
        path = self.locate(name)
        make_directories(os.path.dirname(path))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _locked.add(descriptor)
        held = LocalHeld(path, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            write_at(descriptor, 0, [memoryview(line + b"\n")], path)
            os.fsync(descriptor)
            sync_path(os.path.dirname(path))
        except BaseException:
            held.release()
            raise
        return held

    def try_hold(self, name: str) -> "LocalHeld | None":
        path = self.locate(name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        _locked.add(descriptor)
        return LocalHeld(path, descriptor)

    def claim(self, name: str) -> bool:
        path = self.locate(name)
        make_directories(os.path.dirname(path))
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            return False
        sync_path(os.path.dirname(path))
        return True

    def free_bytes(self) -> int:
        place = self._root
        while not os.path.isdir(place):  # not even the directory could be made
            place = os.path.dirname(place)
        stats = os.statvfs(place)
        return stats.f_bavail * stats.f_frsize


@dataclass(slots=True)
class LocalHeld:
    """A locked record file. The lock goes with the process, however it ends."""

    _path: str
    _descriptor: int

    def append(self, line: bytes) -> None:
        # A line torn by a crash is the last one and is ignored; what was there before stays readable.
        end = os.fstat(self._descriptor).st_size
        write_at(self._descriptor, end, [memoryview(line + b"\n")], self._path)
        os.fsync(self._descriptor)

    def release(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        if self._descriptor in _locked:
            _unlock(self._descriptor)
        self._descriptor = -1

    def abandon(self) -> None:
        if self._descriptor in _locked:
            _unlock(self._descriptor)
        self._descriptor = -1


def _open_plain(path: str) -> int:
    """Open a file to read; what is no plain file (and could block, or never end) is an `IntegrityError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise IntegrityError(f"{path} is a symbolic link that leads nowhere") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IntegrityError(f"{path} is not a plain file")
    return descriptor


def make_directories(path: str, durable: bool = True) -> None:
    """Like `os.makedirs`, and if it is to be durable the new names survive a power cut."""
    if len(os.fsencode(path)) >= _MAX_PATH:  # before the first levels of it are made
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", directory) from None
        else:
            if durable:
                sync_path(os.path.dirname(directory))


def sync_path(path: str) -> None:
    """Make a file or a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)


def sync_file_system(path: str) -> bool:
    """Make everything on the file system of `path` durable in one call; False where there is no such call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if call is None:
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if call(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(descriptor)
    return True


def wait_for_lock(descriptor: int, path: str, deadline: float) -> None:
    """Take the lock of an open file, or `ConflictError` when the deadline has passed."""
    pause = 0.001
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConflictError(
                    f"another program holds the lock {path} for too long; if it is stuck, end it and try again"
                ) from None
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
