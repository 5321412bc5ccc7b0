"""What a call has taken, and how it is given back, however the call ends.

An exception can be raised between any two lines: by Ctrl-C, or by a signal handler that calls `sys.exit`. So a resource
is added to a `Scope` before it is taken, and releasing it is harmless if it was never taken, or is already released.
If another interrupt ends the clean-up itself, the scope stays in a list, and whoever comes next completes it: the next
call that opens a scope, a save that waits for this one, or the end of the program.

A signal handler may call shardkeep while the code it interrupted holds a lock. So nothing here, and nothing that is
shared by several calls, is guarded by a lock that the same thread cannot take twice.
"""

import atexit
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple, Protocol, TypeVar

log = logging.getLogger("shardkeep")

LOOK = 0.5  # seconds after which a waiting thread checks whether what it waits for can still happen


class Resource(Protocol):
    """Something a call takes. `release` may be called before it is taken, and more than once."""

    def release(self) -> None: ...


R = TypeVar("R", bound=Resource)


def frame_above(depth: int) -> FrameType:
    """The frame of the function that calls this (0), of the one that called that (1), and so on."""
    return sys._getframe(depth + 1)  # pyright: ignore[reportPrivateUsage]


class _Owner(NamedTuple):
    """The call a scope belongs to."""

    thread: int
    frame: FrameType

    def is_running(self) -> bool:
        frame = sys._current_frames().get(self.thread)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame is self.frame:
                return True
            frame = frame.f_back
        return False


class Scope:
    """The resources of one call. They are released in reverse order, each only after those added later.

    The scope belongs to the function that makes it, or to the one whose `frame` is given.

    >>> class Door:
    ...     def release(self):
    ...         print("closed")
    >>> with Scope("an example") as scope:
    ...     door = scope.add(Door())
    closed
    """

    def __init__(self, what: str, frame: FrameType | None = None) -> None:
        if frame is None:
            sweep()
        self.what = what
        self._held: list[Resource] = []
        self._owner = _Owner(threading.get_ident(), frame or frame_above(1))
        self._thread: threading.Thread | None = None
        self._right = [True]  # to close it, or to go on with it: taken by one thread only

    def add(self, resource: R) -> R:
        _open.add(self)  # not before: only inside the `with` block does any exception close it
        self._held.append(resource)
        return resource

    def give_to(self, thread: threading.Thread) -> None:
        """Leave the scope to a thread about to be started, unless the `with` block ends with an exception first."""
        self._thread = thread

    def take_over(self) -> bool:
        """Called by that thread: False if the scope was closed before the thread came to it."""
        if not self._take_right():
            return False
        self._owner = _Owner(threading.get_ident(), frame_above(1))
        self._thread = None
        return True

    def _take_right(self) -> bool:
        try:
            return self._right.pop()
        except IndexError:
            return False

    @property
    def is_below(self) -> bool:
        """Whether the call is suspended below the present one, on the same thread: a signal handler is running."""
        return self._owner.thread == threading.get_ident() and self._thread is None and self._owner.is_running()

    @property
    def is_left(self) -> bool:
        """Whether its call is over, or its thread has ended: nobody will close it any more."""
        if self._thread is not None and self._thread.ident is not None:
            return not self._thread.is_alive()
        return not self._owner.is_running()

    def close(self) -> None:
        """Release everything. An interrupt ends this; what is left is released by `sweep`."""
        self._owner = _Owner(threading.get_ident(), frame_above(0))
        self._thread = None
        while self._held:
            resource = self._held[-1]
            try:
                resource.release()
            except Exception as error:  # noqa: BLE001  (the others must be released all the same)
                log.error("shardkeep: %s: cleaning up failed: %s: %s", self.what, type(error).__name__, error)
            with suppress(ValueError):
                self._held.remove(resource)
        _open.discard(self)
        self._owner = _NOBODY  # a frame keeps its variables

    def close_if_left(self) -> None:
        if self.is_left and (self._thread is None or self._thread.ident is not None or self._take_right()):
            self.close()

    def __enter__(self) -> "Scope":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(failed=kind is not None)

    def end(self, failed: bool) -> None:
        """Close it if it is this thread's: it was not given away, or could not be."""
        thread = self._thread  # looked at first: once that thread has taken over, another is not the owner any more
        if thread is None:
            close = self._owner.thread == threading.get_ident()
        else:
            close = failed and (thread is threading.current_thread() or self._take_right())
        if close:
            self.close()


_NOBODY = _Owner(-1, frame_above(0))
_open: set[Scope] = set()


def sweep() -> None:
    """Complete the clean-up of calls that were interrupted during it."""
    for scope in tuple(_open):
        scope.close_if_left()


def is_nested(mine: Scope) -> bool:
    """Whether the call of this scope was made by a signal handler that interrupted another call of shardkeep."""
    return any(scope.is_below for scope in tuple(_open) if scope is not mine)


class Bell:
    """Wakes those who wait. It holds no lock, so a signal handler may use it wherever it interrupts."""

    def __init__(self) -> None:
        self._waiting: list[queue.SimpleQueue[None]] = []

    def ring(self) -> None:
        for waiting in tuple(self._waiting):
            waiting.put(None)

    @contextmanager
    def waiting(self) -> Generator[Callable[[float], None]]:
        """A function that waits for the next ring, or so many seconds. Check what you wait for inside, before calling.

        >>> bell = Bell()
        >>> with bell.waiting() as wait:
        ...     bell.ring()
        ...     wait(60)
        """
        mine: queue.SimpleQueue[None] = queue.SimpleQueue()

        def wait(seconds: float) -> None:
            with suppress(queue.Empty):
                mine.get(timeout=max(seconds, 0))

        try:
            self._waiting.append(mine)
            yield wait
        finally:
            with suppress(ValueError):
                self._waiting.remove(mine)


class Latch:
    """Set once, waited for by anyone.

    >>> latch = Latch()
    >>> latch.wait(0)
    False
    >>> latch.set()
    >>> latch.wait()
    True
    """

    def __init__(self) -> None:
        self.is_set = False
        self._bell = Bell()

    def set(self) -> None:
        self.is_set = True
        self._bell.ring()

    def wait(self, seconds: float | None = None) -> bool:
        until = None if seconds is None else time.monotonic() + seconds
        with self._bell.waiting() as wait:
            while not self.is_set:
                left = LOOK if until is None else min(until - time.monotonic(), LOOK)
                if left <= 0:
                    return False
                wait(left)
        return True


def _forget() -> None:
    """In a forked child: what the parent has taken is the parent's."""
    _open.clear()


atexit.register(sweep)
os.register_at_fork(after_in_child=_forget)
