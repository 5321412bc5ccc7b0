"""Makes this process see what a program on macOS or Windows sees, as far as that is possible on Linux.

Names that the other system lacks are removed from `os`, `fcntl`, `mmap` and `signal`, calls that behave differently
there are replaced, symbols are missing from the C library, and /proc and /sys are not there. Libraries that look at
these when they are imported are imported before. The paths and the drives of the other system are not simulated.
"""

import builtins
import ctypes
import errno
import fcntl
import importlib
import io
import mmap
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

# What looks at the system while it is imported, and what is needed afterwards.
_FIRST = (
    *("asyncio", "concurrent.futures", "http.client", "logging", "multiprocessing", "pathlib", "platform", "shutil"),
    *("socket", "ssl", "subprocess", "tempfile", "unittest.mock", "urllib.request", "uuid", "zoneinfo"),
    *("numpy", "ml_dtypes", "jax", "jax.export", "jax.numpy", "obstore", "tensorstore", "xxhash", "zstandard"),
)
_LINUX = {
    os: "O_DIRECT O_TMPFILE O_PATH O_NOATIME O_LARGEFILE O_RSYNC posix_fadvise posix_fallocate POSIX_FADV_DONTNEED "
    "POSIX_FADV_WILLNEED POSIX_FADV_NORMAL POSIX_FADV_SEQUENTIAL POSIX_FADV_RANDOM POSIX_FADV_NOREUSE "
    "sched_getaffinity sched_setaffinity copy_file_range splice "
    "memfd_create eventfd getrandom getxattr setxattr listxattr removexattr "
    "pidfd_open fdatasync pipe2 setns unshare getresuid getresgid setresuid setresgid preadv pwritev",
    fcntl: "F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_ADD_SEALS F_GET_SEALS F_SETLEASE F_GETLEASE F_SETPIPE_SZ "
    "F_GETPIPE_SZ F_NOTIFY",
    mmap: "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_DOFORK MADV_HWPOISON MADV_MERGEABLE MADV_UNMERGEABLE "
    "MADV_SOFT_OFFLINE MADV_REMOVE MADV_DONTDUMP MADV_DODUMP MADV_POPULATE_READ MAP_POPULATE MAP_STACK MAP_DENYWRITE "
    "MAP_EXECUTABLE",
    resource: "prlimit RUSAGE_THREAD",
    signal: "SIGPWR SIGSTKFLT SIGCLD SIGPOLL SIGRTMIN SIGRTMAX sigtimedwait sigwaitinfo pidfd_send_signal",
}
_POSIX = {
    os: "O_CLOEXEC O_NONBLOCK O_DIRECTORY O_NOFOLLOW O_SYNC O_DSYNC pread pwrite readv writev statvfs fstatvfs sysconf "
    "pathconf fork forkpty register_at_fork link symlink chown lchown fchown fchmod getuid geteuid getgid getegid "
    "getpgid setpgid setsid killpg nice getpriority setpriority PRIO_PROCESS getloadavg uname mkfifo mknod "
    "posix_spawn",
    mmap: "PROT_READ PROT_WRITE PROT_EXEC MAP_SHARED MAP_PRIVATE MAP_ANON MAP_ANONYMOUS MAP_NORESERVE MADV_DONTNEED "
    "MADV_WILLNEED MADV_SEQUENTIAL MADV_RANDOM MADV_NORMAL MADV_FREE",
    signal: "SIGKILL SIGSTOP SIGUSR1 SIGUSR2 SIGHUP SIGALRM SIGCHLD SIGPIPE SIGQUIT pthread_sigmask pthread_kill "
    "setitimer alarm pause sigwait siginterrupt",
}
_SYMBOLS = (  # of the C library
    "syncfs sync_file_range malloc_trim mallinfo2 fallocate fallocate64 posix_fadvise posix_fadvise64 posix_fallocate "
    "renameat2 statx gettid memfd_create copy_file_range sched_getaffinity process_madvise"
)
_PATHS = "open stat lstat listdir scandir mkdir rmdir unlink remove rename replace link readlink utime"  # take paths
_FULL_SYNC = 51  # F_FULLFSYNC of macOS
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")

log: list[tuple[str, str]] = []  # syncs and renames, in order: what was done, and with which path
_fsync, _readlink, _stat, _control = os.fsync, os.readlink, os.stat, fcntl.fcntl


def simulate(name: str) -> None:
    """From now on, this process is on "macos" or "windows"."""
    for module in _FIRST:
        importlib.import_module(module)
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]  # as found when it is imported
    shutil._copyxattr = lambda *_, **__: None  # type: ignore[attr-defined]  # likewise
    subprocess._USE_POSIX_SPAWN = False  # likewise; Python 3.13 spawns most processes that way
    _remove(_LINUX)
    _hide_trees()
    if name == "macos":
        _as_macos()
    elif name == "windows":
        _as_windows()
    else:
        raise ValueError(name)


def _remove(names: dict[Any, str]) -> None:
    for module, text in names.items():
        for name in text.split():
            vars(module).pop(name, None)


def _before(module: Any, name: str, look: Callable[..., object]) -> None:
    """Call `look` with the arguments of a function before it is called."""
    plain = getattr(module, name)

    def looked_at(*arguments: Any, **others: Any) -> Any:
        look(*arguments, **others)
        return plain(*arguments, **others)

    setattr(module, name, looked_at)


def _hide_trees() -> None:
    def look(path: Any = ".", *_: Any, **__: Any) -> None:
        if isinstance(path, str | os.PathLike) and re.match(r"/(proc|sys)(/|\Z)", os.fspath(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))

    for module, names in ((os, "open stat lstat listdir scandir readlink"), (io, "open"), (builtins, "open")):
        for name in names.split():
            _before(module, name, look)


def path_of(fd: int) -> str:
    """The path of an open file."""
    return _readlink(f"/proc/self/fd/{fd}")


def _as_macos() -> None:
    sys.platform = "darwin"
    fcntl.F_FULLFSYNC = _FULL_SYNC  # type: ignore[attr-defined]

    def control(fd: int, command: int, *more: Any) -> Any:
        if command != _FULL_SYNC:
            return _control(fd, command, *more)
        log.append(("full sync", path_of(fd)))
        return _fsync(fd)

    def niceness(which: int, who: int, *_: Any) -> None:
        if which == os.PRIO_PROCESS and who not in (0, os.getpid()):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))  # a thread is no process there

    class Library(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            if name in _SYMBOLS.split():
                raise AttributeError(name)
            return super().__getattr__(name)

    fcntl.fcntl = control  # type: ignore[assignment]
    ctypes.CDLL = Library  # type: ignore[misc]
    _before(os, "setpriority", niceness)
    _before(os, "getpriority", niceness)
    _before(os, "fsync", lambda fd: log.append(("sync", path_of(fd))))
    _before(os, "replace", lambda old, new: log.append(("replace", new)))


def _as_windows() -> None:
    sys.platform = "win32"
    usage, plain_statvfs = shutil._ntuple_diskusage, os.statvfs  # type: ignore[attr-defined]

    def disk_usage(path: Any) -> Any:
        found = plain_statvfs(path)
        return usage(*(blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bfree, found.f_bavail)))

    shutil.disk_usage = disk_usage
    _remove(_POSIX)
    for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty"):
        sys.modules[name] = None  # type: ignore[assignment]
    os.supports_fd.discard(os.utime)
    plain_utime, plain_mmap, plain_library = os.utime, mmap.mmap, ctypes.CDLL

    def utime(path: Any, *arguments: Any, **others: Any) -> None:
        if isinstance(path, int):
            raise TypeError("utime: path should be string, bytes or os.PathLike, not int")
        plain_utime(path, *arguments, **others)

    class Mapping(plain_mmap):  # type: ignore[misc, valid-type]
        def __new__(cls, fileno: int, length: int, tagname: Any = None, access: int = 0, offset: int = 0) -> Any:
            return super().__new__(cls, fileno, length, access=access, offset=offset)

    def library(name: Any, *arguments: Any, **others: Any) -> Any:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        return plain_library(name, *arguments, **others)

    os.utime, mmap.mmap, ctypes.CDLL = utime, Mapping, library  # type: ignore[assignment, misc]
    _before(os, "fsync", _refuse_read_only)
    _before(os, "open", _refuse_directories)
    _before(os, "mkdir", _refuse_names)
    for name in ("unlink", "remove", "rename", "replace"):
        _before(os, name, _refuse_open_files)
    _before(os, "rename", _refuse_existing)


def _refuse_read_only(fd: int) -> None:
    if _control(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _refuse_directories(path: Any, flags: int, *_: Any, **__: Any) -> None:
    _refuse_names(path)
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def _refuse_names(path: Any, *_: Any, **__: Any) -> None:
    for part in os.fspath(path).split("/"):
        odd = re.search(r'[<>:"|?*\\\x00-\x1f]', part) or part.endswith((" ", ".")) or _RESERVED.fullmatch(part)
        if odd and part not in ("", ".", ".."):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)


def _refuse_open_files(*paths: Any, **__: Any) -> None:
    _refuse_names(paths[-1])
    if os.path.basename(paths[0]).startswith(tempfile.gettempprefix()):
        return  # there the system removes these
    fds = [fd for fd in range(3, 500) if os.path.lexists(f"/dev/fd/{fd}")]
    for path in paths:
        for fd in fds:
            try:
                same = os.path.samestat(os.fstat(fd), _stat(path))
            except OSError:
                continue
            if same:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def _refuse_existing(old: Any, new: Any) -> None:
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)


def ignore_case(root: str) -> None:
    """From now on, names below a directory are found whatever their case, as on the usual file system of macOS."""
    listdir, lstat = os.listdir, os.lstat

    def lexists(path: str) -> bool:
        try:
            lstat(path)
        except OSError:
            return False
        return True

    def found(path: Any) -> Any:
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(path, str) or not path.startswith(root + os.sep):
            return path
        real = root
        for part in path[len(root) + 1 :].split(os.sep):
            if part and not lexists(f"{real}/{part}"):
                inside = listdir(real) if lexists(f"{real}/.") else []
                part = next((name for name in inside if name.casefold() == part.casefold()), part)
            real = f"{real}/{part}"
        return real

    def wrap(module: Any, name: str) -> None:
        plain = getattr(module, name)
        setattr(module, name, lambda *paths, **others: plain(*map(found, paths), **others))

    for name in _PATHS.split():
        if hasattr(os, name):
            wrap(os, name)
    wrap(io, "open")
    wrap(builtins, "open")
