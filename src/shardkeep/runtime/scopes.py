"""Resources of a call, released however the call ends; waiting without locks.

An exception can be raised between any two lines, by Ctrl-C or by a signal handler that calls `sys.exit`. A resource is
therefore added to a `Scope` before it is acquired, and releasing it is harmless if it was never acquired or is already
released. If another interrupt ends the cleanup itself, the scope stays registered, and the cleanup is completed by the
next call that opens a scope, by a save that waits for this one, or at the end of the program.

A signal handler may call shardkeep while the code it interrupted holds a lock. State that is shared by several calls is
therefore never guarded by a non-reentrant lock.
"""

import atexit
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType
from typing import NamedTuple, Protocol, TypeVar

from shardkeep.system import after_fork_in_child

log = logging.getLogger("shardkeep")

_SUSPENDS = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR  # flags of code whose frames can be suspended
LOOK = 0.5  # seconds between two checks of a waiting thread whether its condition can still become true


class Resource(Protocol):
    """Something a call acquires. `release` may be called before it is acquired, and more than once."""

    def release(self) -> None: ...


R = TypeVar("R", bound=Resource)


def frame_above(depth: int) -> FrameType:
    """The frame of the calling function (0), of its caller (1), and so on."""
    return sys._getframe(depth + 1)  # pyright: ignore[reportPrivateUsage]


class _Owner(NamedTuple):
    """The call that a scope belongs to."""

    thread: int
    frame: FrameType

    def is_running(self) -> bool:
        """Whether the call is on the stack of its thread, or may be: that thread goes on while this one looks."""
        last = None
        frame = sys._current_frames().get(self.thread)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame is self.frame:
                return True
            last, frame = frame, frame.f_back
        # The frame of a generator that has been suspended meanwhile has no caller: what is below it is not known.
        return last is not None and bool(last.f_code.co_flags & _SUSPENDS)


class Scope(AbstractContextManager["Scope", None]):
    """The resources of one call, released in reverse order.

    Args:
        what: A description of the call, for messages.
        frame: The frame of the function that the scope belongs to; None means the function that creates the scope.

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
        self._right = [True]  # the right to close the scope or to continue with it; only one thread can take it

    def add(self, resource: R) -> R:
        """Register a resource before it is acquired."""
        _open.add(self)  # not earlier: an exception closes the scope only inside the `with` block
        self._held.append(resource)
        return resource

    def give_to(self, thread: threading.Thread) -> None:
        """Hand the scope over to a thread about to be started, unless the `with` block raises first."""
        self._thread = thread

    def take_over(self) -> bool:
        """Called by that thread. Returns False if the scope was closed in the meantime."""
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
        """Whether a signal handler has interrupted the call and is now making the current one on the same thread."""
        return self._owner.thread == threading.get_ident() and self._thread is None and self._owner.is_running()

    def close(self) -> None:
        """Release everything. After an interrupt, `sweep` releases the rest."""
        self._owner = _Owner(threading.get_ident(), frame_above(0))
        self._thread = None
        while self._held:
            resource = self._held[-1]
            try:
                resource.release()
            except Exception as error:  # noqa: BLE001  (the other resources must still be released)
                log.error("%s: cleanup failed: %s: %s", self.what, type(error).__name__, error)
            with suppress(ValueError):
                self._held.remove(resource)
        _open.discard(self)
        self._owner = _NOBODY  # a frame keeps its local variables alive

    def close_if_left(self) -> None:
        """Close the scope if its call has returned, or its thread has ended, but its cleanup was interrupted."""
        thread = self._thread
        if thread is not None and thread.ident is not None:
            if not thread.is_alive():
                self.close()
        # Only the call starts the thread, so a thread that has not begun after the call has returned never will.
        elif not self._owner.is_running() and (thread is None or (thread.ident is None and self._take_right())):
            self.close()

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the scope if it belongs to this thread: it was never handed over, or that failed."""
        thread = self._thread  # read first: once that thread has taken over, this one is no longer the owner
        if thread is None:
            close = self._owner.thread == threading.get_ident()
        else:
            close = kind is not None and (thread is threading.current_thread() or self._take_right())
        if close:
            self.close()


_NOBODY = _Owner(-1, frame_above(0))
_open: set[Scope] = set()


def sweep() -> None:
    """Complete the cleanup of calls that were interrupted during it."""
    for scope in tuple(_open):
        scope.close_if_left()


def is_nested(mine: Scope) -> bool:
    """Whether a signal handler made this call while another call of shardkeep was running on the same thread."""
    return any(scope.is_below for scope in tuple(_open) if scope is not mine)


class Bell:
    """Wakes waiting threads. It uses no lock, so a signal handler may use it at any point."""

    def __init__(self) -> None:
        self._waiting: list[queue.SimpleQueue[None]] = []

    def ring(self) -> None:
        for waiting in tuple(self._waiting):
            waiting.put(None)

    @contextmanager
    def waiting(self) -> Generator[Callable[[float], None]]:
        """Yield a function that waits for the next ring, or at most for a number of seconds.

        Check the condition inside the `with` block before each wait, so that no ring is missed.

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


class Latch(Bell):
    """A flag that is set once and that any number of threads can wait for.

    >>> latch = Latch()
    >>> latch.wait(0)
    False
    >>> latch.set()
    >>> latch.wait()
    True
    """

    is_set = False

    def set(self) -> None:
        self.is_set = True
        self.ring()

    def wait(self, seconds: float | None = None) -> bool:
        until = None if seconds is None else time.monotonic() + seconds
        with self.waiting() as wait:
            while not self.is_set:
                left = LOOK if until is None else min(until - time.monotonic(), LOOK)
                if left <= 0:
                    return False
                wait(left)
        return True


def _forget() -> None:
    """In a forked child: the resources belong to the parent."""
    _open.clear()


atexit.register(sweep)
after_fork_in_child(_forget)
