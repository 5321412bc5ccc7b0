"""File descriptors that are never leaked, not even if an exception is raised while one is opened; and, through them,
writes of any size, and directories and files that survive a power cut."""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from typing import Self

from shardkeep import system

_MAX_PATH = system.longest_path()
_MAX_WRITE = 1 << 30  # one system call takes at most 2 GiB
_MAX_BUFFERS = 1024  # IOV_MAX of Linux


class Descriptor:
    """An open file, closed at the end of a `with` block, by `release`, or when it is garbage-collected.

    Args:
        path: The file to open.
        flags: Flags of `os.open`.

    >>> with Descriptor("/", os.O_RDONLY) as directory:
    ...     os.fstat(directory.number).st_nlink > 0
    True
    """

    __slots__ = ("__weakref__", "_numbers", "path")

    def __init__(self, path: str, flags: int) -> None:
        self.path = path
        self._numbers: list[int] = []
        # A single call, so that no signal handler can raise between opening the file and storing its descriptor.
        self._numbers.extend(map(os.open, (path,), (flags | system.OPEN_FLAGS,), (0o666,)))

    @property
    def number(self) -> int:
        """The file descriptor. Raises `ValueError` if the file is closed."""
        if not self._numbers:
            raise ValueError("the file is closed")
        return self._numbers[0]

    @property
    def is_open(self) -> bool:
        return bool(self._numbers)

    def close(self) -> None:
        if self._numbers:
            list(map(os.close, map(self._numbers.pop, (0,))))  # a single call, too: no descriptor is closed twice

    release = __del__ = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_at(file: Descriptor, offset: int, buffers: Sequence[memoryview]) -> int:
    """Write all of `buffers` at `offset`, with as many system calls as needed; returns the number of bytes."""
    pending = [b for b in buffers if len(b)]
    start = offset
    while pending:
        batch = pending[:_MAX_BUFFERS]
        total = sum(map(len, batch))
        is_all = len(batch) == len(pending) and total <= _MAX_WRITE
        if total > _MAX_WRITE:
            batch = _cut(batch)
        try:
            count = system.pwritev(file.number, batch, offset)
        except OSError as error:
            error.filename = error.filename or file.path
            raise
        offset += count
        if is_all and count == total:
            break
        while pending and count >= len(pending[0]):
            count -= len(pending.pop(0))
        if count:
            pending[0] = pending[0][count:]
    return offset - start


def _cut(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The first `_MAX_WRITE` bytes of buffers that have more."""
    batch: list[memoryview] = []
    room = _MAX_WRITE
    for buffer in buffers:
        batch.append(buffer[:room])
        room -= len(batch[-1])
        if not room:
            break
    return batch


def make_directories(path: str, changed: list[str] | None = None) -> None:
    """Like `os.makedirs`. Adds the directories to sync to `changed`, so that the new ones survive a power cut."""
    if len(os.fsencode(path)) >= _MAX_PATH:  # checked before the first levels are created
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        if changed is not None:
            changed.append(os.path.dirname(directory))  # before the directory is there: this may be interrupted
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", directory) from None


def make_durable_directories(path: str) -> None:
    """Like `os.makedirs`, and the new directories survive a power cut."""
    changed: list[str] = []
    try:
        make_directories(path, changed)
    finally:
        for directory in changed:
            sync_path(directory)


def sync_path(path: str, sync: Callable[[int], None] = system.fsync) -> None:
    """Make a file or a directory survive a power cut. With `os.fsync`, the cache of the drive may keep it."""
    flags = os.O_RDONLY
    if not system.OPENS_DIRECTORIES:
        if os.path.isdir(path):
            return
        flags = os.O_RDWR  # such systems do not sync what was opened for reading
    with Descriptor(path, flags) as opened:
        try:
            sync(opened.number)
        except OSError as error:
            error.filename = error.filename or path
            raise


def sync_file_system(path: str) -> bool:
    """Sync the whole file system of `path` in one call; False where there is no such call."""
    call = system.c_function("syncfs")
    if call is None:
        return False
    with Descriptor(path, os.O_RDONLY) as opened:
        if call(opened.number) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    return True
