"""A crew of threads that belongs to one save or load.

Executors refuse work once the interpreter begins to exit, so a save that has to outlive the main thread brings
threads of its own, started before `save_async` returns.
"""

import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress

Task = Callable[[], None]


def default_size() -> int:
    """One more than there are processors: while one waits for the disk, the others copy and hash."""
    return min(max(os.cpu_count() or 2, 2) + 1, 8)


class Crew:
    """Runs lists of tasks on several threads, the calling one included.

    >>> done = []
    >>> with Crew() as crew:
    ...     crew.run([lambda i=i: done.append(i) for i in range(3)])
    >>> sorted(done)
    [0, 1, 2]
    """

    def __init__(self, size: int | None = None, more: int = 0, polite: bool = False) -> None:
        """`size` threads, or if that is None as many as usual and `more`; `polite` ones let others go first."""
        self._size, self._more, self._polite = size, more, polite
        self._work: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> "Crew":
        """Start the threads now rather than when there is work for more than one."""
        size = self._size or default_size() + self._more
        for i in range(size - 1 - len(self._threads)):
            thread = threading.Thread(target=self._serve, name=f"shardkeep-{i}", daemon=False)
            thread.start()
            self._threads.append(thread)
        return self

    def run(self, tasks: Iterable[Task]) -> None:
        """Run every task; the first error ends the others' turn and is raised here."""
        todo = list(tasks)
        if len(todo) < 2:
            for task in todo:
                task()
            return
        self.start()
        round_ = _Round(todo)
        helpers = min(len(self._threads), len(todo) - 1)
        for _ in range(helpers):
            self._work.put(round_)
        round_.work()
        round_.wait(helpers)
        if round_.error is not None:
            error, round_.error = round_.error, None
            raise error

    def close(self, *_unused: object) -> None:
        for _thread in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _serve(self) -> None:
        if self._polite:
            manners.be_polite()
        while (round_ := self._work.get()) is not None:
            if round_.behind:
                manners.step_back()
            round_.work()
            left = round_.left
            del round_  # while this waits for more it must not hold on to what the tasks held
            left.release()

    def __enter__(self) -> "Crew":
        return self

    __exit__ = close


class _Round:
    """One list of tasks being worked off."""

    def __init__(self, tasks: list[Task]) -> None:
        self.error: BaseException | None = None
        self.left = threading.Semaphore(0)
        self.behind = manners.is_behind  # as the thread that waits for it
        self._next = iter(tasks)
        self._lock = threading.Lock()

    def work(self) -> None:
        while self.error is None:
            with self._lock:
                task = next(self._next, None)
            if task is None:
                return
            try:
                task()
            except BaseException as error:  # noqa: BLE001  (raised again by the thread that called run)
                self.error = self.error or error
            del task

    def wait(self, helpers: int) -> None:
        """Until the helpers are done. An interrupt ends their turn, but they are waited for all the same."""
        while helpers:
            try:
                self.left.acquire()
                helpers -= 1
            except KeyboardInterrupt as interrupt:
                self.error = interrupt


class Turns:
    """Who is at work on a target in this program: saves to one target go one after another, in order of the calls."""

    def __init__(self) -> None:
        self._last: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def queue(self, target: str) -> tuple[threading.Event | None, Callable[[], None]]:
        """(what to wait for before beginning, what to call when done)."""
        mine = threading.Event()
        with self._lock:
            before = self._last.get(target)
            self._last[target] = mine

        def done() -> None:
            with self._lock:
                if self._last.get(target) is mine:
                    del self._last[target]
            mine.set()

        return before, done


turns = Turns()


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
        self._lock = threading.Lock()
        self._held_off, self._was_on = 0, False

    @contextmanager
    def paused(self) -> Generator[None]:
        with self._lock:
            if self._held_off == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._held_off += 1
        try:
            yield
        finally:
            with self._lock:
                self._held_off -= 1
                if self._held_off == 0 and self._was_on:
                    if gc.get_count()[0] > self._MANY and gc.get_freeze_count() == 0:  # else they are someone's
                        gc.freeze()  # moves all objects aside, and back to the old ones
                        gc.unfreeze()
                    gc.enable()


collector = _Collector()
