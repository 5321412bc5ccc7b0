"""What hostile files must not bring about: watched in the process that reads them."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

# Reading a checkpoint does none of these.
_NEVER = (
    "os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty subprocess.Popen pty.spawn socket.connect "
    "socket.bind ctypes.dlopen pickle.find_class marshal.loads code.__new__ import os.remove os.rename os.rmdir "
    "os.mkdir os.link os.symlink os.truncate os.chmod os.chown os.utime os.putenv shutil.rmtree shutil.move "
    "shutil.copyfile webbrowser.open"
)
_PATHS = frozenset(("open", "os.listdir", "os.scandir"))
_HARMLESS = frozenset((os.path.realpath("/proc/self/mounts"),))  # what lies on which file system


class Guard:
    """Sees every file that is opened and every bit of code that is made while it is `watching`."""

    def __init__(self, room: str) -> None:
        self.room = os.path.realpath(room)  # files below it may be read
        self._forbidden = frozenset(_NEVER.split())
        self._watching = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event in self._forbidden:
            self.seen.append(f"{event}{str(arguments)[:200]}")
        elif event in _PATHS:
            self._check_path(event, arguments)
        elif event in ("exec", "compile") and not _is_library():
            self.seen.append(f"{event}: {str(arguments)[:200]}")

    def _check_path(self, event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0]
        if isinstance(path, int) or path is None:
            return
        flags = arguments[2] if event == "open" else 0
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.seen.append(f"opened to write: {path!r}")
        real = os.path.realpath(os.fsdecode(path))
        if real not in _HARMLESS and not (real + os.sep).startswith(self.room + os.sep):
            self.seen.append(f"{event} outside: {path!r}")


def _is_library() -> bool:
    """Whether code is made by `collections.namedtuple` of names it has checked, or read as a literal by `ast`."""
    frame: Any = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            return False
        place = (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name)
        if frame.f_code.co_name == "namedtuple" or place == ("ast.py", "parse"):
            return True
        frame = frame.f_back
    return False


def limit_memory(more: int) -> None:
    """Let the process have this much more address space than now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))


def most_memory() -> int:
    """The most memory this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
