"""What the operating system offers, looked up once, and what is done where it lacks something.

Each capability is here, or at the top of the one module that uses it, and is found by its name and not by that of the
system. On Linux the names here are the functions of `os` themselves, so a call costs nothing more.
docs/portability.md says what is tested where.
"""

import ctypes
import errno
import importlib.util
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence

HAS_LOCKS = importlib.util.find_spec("fcntl") is not None
"""Whether the kernel locks files and unlocks them when their process ends."""

OPENS_DIRECTORIES = hasattr(os, "O_DIRECTORY")
"""Whether a directory can be opened, and so be synced."""

RESERVES_NAMES = sys.platform == "win32"
"""Whether names such as `aux` belong to devices, whatever directory they are in."""

OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0) | getattr(os, "O_BINARY", 0)
"""For every file: children do not inherit it, and its bytes are not changed."""

NONBLOCK = getattr(os, "O_NONBLOCK", 0)
"""Opening a pipe does not wait for its other end."""

DIRECT: int | None = getattr(os, "O_DIRECT", None)
"""A flag for files that are written past the page cache."""

fadvise: Callable[[int, int, int, int], None] | None = getattr(os, "posix_fadvise", None)
DONTNEED: int = getattr(os, "POSIX_FADV_DONTNEED", 0)
"""With `fadvise`: what was written goes to the disk now, and leaves the page cache."""

# What `madvise` can be told; None where the system does not know it. In the page cache, huge pages make reading as fast
# as O_DIRECT, and mapping faster.
HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
NOHUGEPAGE: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)
# MADV_POPULATE_READ of Linux 5.14, for which Python has no name: an error where touching the page would raise SIGBUS.
POPULATE_READ = None if HUGEPAGE is None else 22

_mmap: Callable[..., mmap.mmap] = mmap.mmap  # its parameters depend on the system
_ANONYMOUS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | getattr(mmap, "MAP_NORESERVE", 0)
_PART = 8 << 20  # bytes written or read at a time where each part is copied once more
_NOT_THERE = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY)  # of a file system
_LONG = 4096  # bytes of a path, where the system does not say how many it takes
# Not known on every system: then this much is taken to be free, enough for small models on any laptop.
_SOME_MEMORY = 2 << 30  # bytes


def after_fork_in_child(call: Callable[[], object]) -> None:
    """Make this call in every forked child. Does nothing where programs cannot fork."""
    register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
    if register is not None:
        register(after_in_child=call)


def c_library() -> "ctypes.CDLL | None":
    """The functions of the C library that this process uses, or None where it cannot be opened."""
    try:
        return ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):  # Windows has one for each compiler
        return None


def c_function(name: str) -> Callable[..., int] | None:
    """A function of the C library, or None if there is none of this name."""
    return getattr(c_library(), name, None)


def _no_locks(fd: int, operation: int, /) -> None:
    """Raise what a file system without locks raises."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


_fcntl = importlib.import_module("fcntl") if HAS_LOCKS else None
LOCK_SHARED: int = getattr(_fcntl, "LOCK_SH", 0)
LOCK_EXCLUSIVE: int = getattr(_fcntl, "LOCK_EX", 0)
LOCK_NOW: int = getattr(_fcntl, "LOCK_NB", 0)
UNLOCK: int = getattr(_fcntl, "LOCK_UN", 0)
flock: Callable[[int, int], None] = getattr(_fcntl, "flock", _no_locks)

_FULL_SYNC: int | None = getattr(_fcntl, "F_FULLFSYNC", None)
_control: Callable[[int, int], int] | None = getattr(_fcntl, "fcntl", None)
HAS_FULL_SYNC = _FULL_SYNC is not None
"""Whether `os.fsync` leaves data in the cache of the drive, as on macOS, and another call does not."""


def _full_sync(fd: int) -> None:
    """Write a file to the disk and empty the whole cache of the drive, also of what `os.fsync` has sent there."""
    assert _control is not None
    assert _FULL_SYNC is not None
    try:
        _control(fd, _FULL_SYNC)
    except OSError as error:
        if error.errno not in _NOT_THERE:  # as on network file systems
            raise
        os.fsync(fd)


fsync: Callable[[int], None] = _full_sync if HAS_FULL_SYNC else os.fsync
"""Make a file survive a power cut."""

_moving = threading.RLock()  # held while the position of a file matters; a signal handler may read another file


def _pread(fd: int, length: int, offset: int, /) -> bytes:
    with _moving:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, length)


def _preadv(fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
    data = pread(fd, min(len(buffers[0]), _PART), offset)
    buffers[0][: len(data)] = data
    return len(data)


def _pwrite(fd: int, data: memoryview, offset: int, /) -> int:
    with _moving:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def _pwritev(fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
    return pwrite(fd, buffers[0][:_PART], offset)


# These may read or write less than they are asked to; then their callers go on.
pread = getattr(os, "pread", _pread)
pwrite = getattr(os, "pwrite", _pwrite)
preadv = getattr(os, "preadv", _preadv)
pwritev = getattr(os, "pwritev", _pwritev)


def _no_link(src: str, dst: str) -> None:
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), src, None, dst)


link: Callable[[str, str], None] = getattr(os, "link", _no_link)


def _write_zeros(fd: int, offset: int, length: int, /) -> None:
    zeros = memoryview(bytes(min(length, _PART)))
    while length > 0:
        written = pwrite(fd, zeros[:length], offset)
        offset, length = offset + written, length - written


fallocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
allocate = fallocate or _write_zeros
"""Reserve the space of a new file, so that the disk cannot fill up while it is used."""


def fd_or_path(fd: int, path: str) -> int | str:
    """What `os.utime` takes for an open file."""
    return fd if os.utime in os.supports_fd else path


def anonymous_memory(nbytes: int, advice: int | None) -> mmap.mmap:
    """New memory, of which only the pages that are touched count.

    Args:
        nbytes: Its size.
        advice: What `madvise` is told about it, where the system knows that.
    """
    pages = _mmap(-1, nbytes, flags=_ANONYMOUS) if _ANONYMOUS else _mmap(-1, nbytes)
    advise: Callable[[int], None] | None = getattr(pages, "madvise", None)
    if advice is not None and advise is not None:
        advise(advice)
    return pages


def assumed_memory() -> int:
    """The bytes of memory that are taken to be free where the system does not say: half of all."""
    ask: Callable[[str], int] | None = getattr(os, "sysconf", None)
    try:
        return _SOME_MEMORY if ask is None else ask("SC_PAGE_SIZE") * ask("SC_PHYS_PAGES") // 2
    except (ValueError, OSError):
        return _SOME_MEMORY


def longest_path() -> int:
    """The number of bytes that a path may have: 4,096 on Linux, 1,024 on macOS."""
    ask: Callable[[str, str], int] | None = getattr(os, "pathconf", None)
    try:
        return _LONG if ask is None else ask(os.sep, "PC_PATH_MAX")
    except (ValueError, OSError):
        return _LONG
