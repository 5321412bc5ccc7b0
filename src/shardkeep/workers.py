"""A crew of threads that belongs to one save or load.

Executors refuse work once the interpreter begins to exit, so a save that has to outlive the main thread brings
threads of its own, started before `save_async` returns. They are daemons: the thread of the save itself keeps the
program alive, and helpers that an interrupt left behind must not.
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
    """One more than there are processors: while one waits for the disk, the others copy and hash."""
    return min(max(os.cpu_count() or 2, 2) + 1, 8)


class Crew:
    """Runs lists of tasks on several threads, the calling one included. Add it to a `Scope`, which ends the threads.

    >>> done = []
    >>> with Scope("an example") as scope:
    ...     scope.add(Crew()).run([lambda i=i: done.append(i) for i in range(3)])
    >>> sorted(done)
    [0, 1, 2]
    """

    def __init__(self, size: int | None = None, more: int = 0, polite: bool = False) -> None:
        """`size` threads, or if that is None as many as usual and `more`; `polite` ones let others go first."""
        self._size, self._more, self._polite = size, more, polite
        self._work: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._released = False

    def start(self) -> None:
        """Start the threads now rather than when there is work for more than one."""
        size = self._size or default_size() + self._more
        for i in range(size - 1 - len(self._threads)):
            thread = threading.Thread(target=self._serve, name=f"shardkeep-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def run(self, tasks: Iterable[Task]) -> None:
        """Run every task; the first error ends the others' turn and is raised here, when no task runs any more."""
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
        """End the threads, each when it has finished its task."""
        self._released = True
        for _thread in self._threads:
            self._work.put(None)
        for thread in self._threads:
            with suppress(RuntimeError):  # never started
                thread.join()

    def _serve(self) -> None:
        if self._polite:
            manners.be_polite()
        while not self._released and (round_ := self._work.get()) is not None:
            if round_.behind:
                manners.step_back()
            round_.help()
            del round_  # while this waits for more it must not hold on to what the tasks held


def run_tasks(tasks: Iterable[Task], size: int | None = None) -> None:
    """Run every task on a crew of its own; the first error is raised.

    >>> done = []
    >>> run_tasks([lambda: done.append(1), lambda: done.append(2)])
    >>> sorted(done)
    [1, 2]
    """
    with Scope("running tasks") as scope:
        scope.add(Crew(size)).run(tasks)


class _Round:
    """One list of tasks being worked off."""

    def __init__(self, tasks: list[Task]) -> None:
        self.behind = manners.is_behind  # as the thread that waits for it
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
        """What a helper does: only if the round is not over yet, so that nobody need wait for one who comes late."""
        me = threading.current_thread()
        try:
            self._helping.append(me)
            self.work()
        finally:
            self._helped.append(me)
            self._bell.ring()

    def end(self) -> None:
        """Begin no more tasks, and wait until those begun have ended. An interrupt does not end the waiting."""
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


class _Manners:
    """What a thread in the background leaves to the training loop: processors, and the interpreter.

    Python's threads take turns, but each time the loop has waited for the disk or a device it gets the interpreter
    back only when the other one's turn is over. So after some work a polite thread sleeps twice as long as that took.
    """

    _TURN = 0.002
    _MOST = 0.04
    _NICE = 10

    def __init__(self) -> None:
        self._mine = threading.local()

    def be_polite(self) -> None:
        """From now on, in this thread."""
        self._mine.since = time.thread_time()

    @property
    def is_behind(self) -> bool:
        return getattr(self._mine, "behind", False)

    def step_back(self) -> None:
        """From now on, in this thread: where there are too few processors, the loop's threads go first."""
        if self.is_behind:
            return
        self._mine.behind = True
        if sys.platform == "linux":  # where it is the thread's, not the program's
            with suppress(OSError):
                mine = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, mine, max(os.getpriority(os.PRIO_PROCESS, mine), self._NICE))

    def after_you(self) -> None:
        """Called now and then by work on many small things."""
        since: float | None = getattr(self._mine, "since", None)
        if since is not None and (worked := time.thread_time() - since) > self._TURN:
            time.sleep(min(2 * worked, self._MOST))
            self._mine.since = time.thread_time()


manners = _Manners()


class _Collector:
    """Python's search for cyclic garbage, held off while anyone makes thousands of objects that are none.

    Each such search looks at every object of the program, which takes longer than to save many small arrays. It is
    not made up for at once: thousands of new objects count as old ones then, which are looked at less often.
    """

    _MANY = 10_000

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pauses: set[_Pause] = set()
        self._is_ours = False  # whether it was on, and we have turned it off
        self._has_frozen = False

    @contextmanager
    def paused(self) -> Generator[None]:
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
            if gc.get_count()[0] > self._MANY and gc.get_freeze_count() == 0:  # else they are someone's
                self._has_frozen = True
                gc.freeze()  # moves all objects aside, and back to the old ones
            if self._has_frozen:
                gc.unfreeze()
                self._has_frozen = False
            gc.enable()
            self._is_ours = False

    def start_over(self) -> None:
        """In a forked child, where nobody goes on with what the parent's threads did."""
        if self._is_ours:
            gc.enable()
        self.__init__()


class _Pause:
    """One reason to pause."""

    def __init__(self, collector: _Collector) -> None:
        self._collector = collector

    def release(self) -> None:
        self._collector.resume(self)


collector = _Collector()
os.register_at_fork(after_in_child=collector.start_over)
