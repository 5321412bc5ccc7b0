"""The threads of one save or load.

Executors refuse work once the interpreter begins to shut down. A save that must outlive the main thread therefore has
its own threads, started before `save_async` returns. They are daemon threads: the thread of the save itself keeps the
program alive, and helper threads orphaned by an interrupt must not.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from shardkeep.runtime.priority import priority
from shardkeep.runtime.scopes import LOOK, Bell, Scope

Task = Callable[[], None]


_MOST = 8  # threads: more only compete for the interpreter and the disk


class Crew:
    """Runs lists of tasks on several threads, including the calling one. Add it to a `Scope`, which ends the threads.

    Args:
        size: The number of threads; None means one more than there are CPUs: while one waits for the disk, the others
            copy and hash.
        more: Threads in addition to these.
        background: Whether the threads pause regularly so that the training loop is not slowed down.

    >>> done = []
    >>> with Scope("an example") as scope:
    ...     scope.add(Crew()).run([lambda i=i: done.append(i) for i in range(3)])
    >>> sorted(done)
    [0, 1, 2]
    """

    def __init__(self, size: int | None = None, more: int = 0, background: bool = False) -> None:
        self._size, self._more, self._background = size, more, background
        self._work: queue.SimpleQueue[_TaskBatch | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._released = False

    def start(self) -> None:
        """Start the threads now instead of with the first list of two or more tasks."""
        size = self._size or min(max(os.cpu_count() or 2, 2) + 1, _MOST) + self._more
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
        round_ = _TaskBatch(todo)
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
    """Run every task on a new crew, of no more threads than tasks; the first error is raised.

    >>> done = []
    >>> run_tasks([lambda: done.append(1), lambda: done.append(2)])
    >>> sorted(done)
    [1, 2]
    """
    todo = list(tasks)
    with Scope("running tasks") as scope:
        scope.add(Crew(None if size is None else min(size, max(len(todo), 1)))).run(todo)


class _TaskBatch:
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
