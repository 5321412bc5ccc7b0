"""The threads of one save or load.

Executors refuse work once the interpreter begins to shut down. A save that must outlive the main thread therefore has
its own threads, started before `save_async` returns. They are daemon threads: the thread of the save itself keeps the
program alive, and helper threads orphaned by an interrupt must not.
"""

import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress

from shardkeep.scopes import LOOK, Bell, Scope, frame_above

Task = Callable[[], None]


def default_size() -> int:
    """The number of CPUs plus one: while one thread waits for the disk, the others copy and hash."""
    return min(max(os.cpu_count() or 2, 2) + 1, 8)


class Crew:
    """Runs lists of tasks on several threads, including the calling one. Add it to a `Scope`, which ends the threads.

    Args:
        size: The number of threads; None means the default size.
        more: Threads in addition to the default size.
        background: Whether the threads pause regularly so that the training loop is not slowed down.

    >>> done = []
    >>> with Scope("an example") as scope:
    ...     scope.add(Crew()).run([lambda i=i: done.append(i) for i in range(3)])
    >>> sorted(done)
    [0, 1, 2]
    """

    def __init__(self, size: int | None = None, more: int = 0, background: bool = False) -> None:
        self._size, self._more, self._background = size, more, background
        self._work: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._released = False

    def start(self) -> None:
        """Start the threads now instead of with the first list of two or more tasks."""
        size = self._size or default_size() + self._more
        for i in range(size - 1 - len(self._threads)):
            thread = threading.Thread(target=self._serve, name=f"shardkeep-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def run(self, tasks: Iterable[Task]) -> None:
        """Run every task. After the first error no further task starts; it is raised once the running ones are done."""
        todo = list(tasks)
        if len(todo) < 2:
            for task in todo:
                task()
            return
        self.start()
        round_ = _Round(todo)
        try:
            for _ in range(min(len(self._threads), len(todo) - 1)):
                self._work.put(round_)
            round_.work()
        finally:
            round_.end()
        round_.raise_error()

    def release(self) -> None:
        """End the threads after their current tasks."""
        self._released = True
        for _thread in self._threads:
            self._work.put(None)
        for thread in self._threads:
            with suppress(RuntimeError):  # never started
                thread.join()

    def _serve(self) -> None:
        if self._background:
            priority.enable_pauses()
        while not self._released and (round_ := self._work.get()) is not None:
            if round_.low_priority:
                priority.lower()
            round_.help()
            del round_  # a waiting thread must not keep the tasks' memory alive


def run_tasks(tasks: Iterable[Task], size: int | None = None) -> None:
    """Run every task on a new crew; the first error is raised.

    >>> done = []
    >>> run_tasks([lambda: done.append(1), lambda: done.append(2)])
    >>> sorted(done)
    [1, 2]
    """
    with Scope("running tasks") as scope:
        scope.add(Crew(size)).run(tasks)


class _Round:
    """One list of tasks and its progress."""

    def __init__(self, tasks: list[Task]) -> None:
        self.low_priority = priority.is_low  # the helpers get the priority of the thread that waits for them
        self._error: BaseException | None = None
        self._next, self._lock = iter(tasks), threading.Lock()
        self._total, self._done = len(tasks), list[None]()
        self._over = False
        self._helping, self._helped = list[threading.Thread](), list[threading.Thread]()
        self._bell = Bell()

    def work(self) -> None:
        try:
            while not self._over and self._error is None:
                with self._lock:
                    task = next(self._next, None)
                if task is None:
                    return
                task()
                self._done.append(None)
                del task
        except BaseException as error:  # noqa: BLE001  (raised again by the thread that called run)
            self._error = self._error or error

    def help(self) -> None:
        """Run tasks on a helper thread. A helper that arrives after the round has ended does nothing."""
        me = threading.current_thread()
        try:
            self._helping.append(me)
            self.work()
        finally:
            self._helped.append(me)
            self._bell.ring()

    def end(self) -> None:
        """Start no more tasks, and wait for the running ones, even through an interrupt."""
        self._over = True
        with self._bell.waiting() as wait:
            while any(thread.is_alive() for thread in self._helping if thread not in self._helped):
                try:
                    wait(LOOK)
                except BaseException as interrupt:  # noqa: BLE001  (raised by `raise_error`)
                    self._error = self._error or interrupt

    def raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        if len(self._done) != self._total:
            raise RuntimeError("a thread ended before its task was done")


class _Priority:
    """Keeps background threads from slowing down the training loop.

    When the training loop has waited for a device or the disk, it gets the interpreter back only at the end of another
    thread's switch interval. A background thread therefore sleeps after 2 ms of work, for twice as long as it worked.
    """

    _WORK = 0.002  # seconds between two pauses
    _LONGEST = 0.04  # seconds of one pause
    _NICE = 10

    def __init__(self) -> None:
        self._mine = threading.local()

    def enable_pauses(self) -> None:
        """Let `yield_to_training` pause in this thread from now on."""
        self._mine.since = time.thread_time()

    @property
    def is_low(self) -> bool:
        """Whether this thread has called `lower`."""
        return getattr(self._mine, "low", False)

    def lower(self) -> None:
        """Lower the scheduling priority of this thread, so that the training loop gets the CPUs first."""
        if self.is_low:
            return
        self._mine.low = True
        if sys.platform == "linux":  # elsewhere this would change the priority of the whole process
            with suppress(OSError):
                mine = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, mine, max(os.getpriority(os.PRIO_PROCESS, mine), self._NICE))

    def yield_to_training(self) -> None:
        """Pause if this thread has worked for 2 ms since the last pause. Called between small pieces of work."""
        since: float | None = getattr(self._mine, "since", None)
        if since is not None and (worked := time.thread_time() - since) > self._WORK:
            time.sleep(min(2 * worked, self._LONGEST))
            self._mine.since = time.thread_time()


priority = _Priority()


class _Collector:
    """Pauses Python's cyclic garbage collector while thousands of objects are created that are not garbage.

    Each collection visits every object of the program, which takes longer than saving many small arrays. After the
    pause the new objects are moved to the oldest generation, so that no collection of them follows immediately.
    """

    _MANY = 10_000

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pauses: set[_Pause] = set()
        self._is_ours = False  # whether the collector was enabled and we disabled it
        self._has_frozen = False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause the collector for a `with` block or, as a decorator, for a call."""
        with Scope("pausing the garbage collector", frame_above(2)) as scope:
            self.pause(scope.add(_Pause(self)))
            yield

    def pause(self, pause: "_Pause") -> None:
        with self._lock:
            self._pauses.add(pause)
            self._is_ours = gc.isenabled() or self._is_ours
            gc.disable()

    def resume(self, pause: "_Pause") -> None:
        with self._lock:
            self._pauses.discard(pause)
            if self._pauses or not self._is_ours:
                return
            if gc.get_count()[0] > self._MANY and gc.get_freeze_count() == 0:  # else the program uses freezing itself
                self._has_frozen = True
                gc.freeze()  # together with unfreeze: moves all objects to the oldest generation
            if self._has_frozen:
                gc.unfreeze()
                self._has_frozen = False
            gc.enable()
            self._is_ours = False

    def start_over(self) -> None:
        """Reset in a forked child, where the threads of the parent do not exist."""
        if self._is_ours:
            gc.enable()
        self.__init__()


class _Pause:
    """One active pause of the collector."""

    def __init__(self, collector: _Collector) -> None:
        self._collector = collector

    def release(self) -> None:
        self._collector.resume(self)


collector = _Collector()
os.register_at_fork(after_in_child=collector.start_over)
