"""The thread that looks after a run while it trains: it tidies up after commits and looks for requests."""

import logging
import queue
import threading
import time
from collections.abc import Callable

from shardkeep.errors import ShardkeepError
from shardkeep.runtime.priority import priority
from shardkeep.runtime.scopes import LOOK, Latch

log = logging.getLogger("shardkeep")

Task = Callable[[], None]


class Housekeeping:
    """Runs tasks one after another on a thread of its own, and between them another one again and again.

    Args:
        what: What it looks after, for messages.
        again: The task to run again and again.
        seconds: How long it waits before each time.
    """

    def __init__(self, what: str, again: Task, seconds: float) -> None:
        self._what, self._again, self._seconds = what, again, seconds
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shardkeep-run", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, task: Task) -> None:
        """Have a task run soon. What it raises is logged."""
        self._tasks.put(task)

    def _run(self) -> None:
        priority.lower()
        due = time.monotonic() + self._seconds
        while True:
            try:
                task = self._tasks.get(timeout=max(due - time.monotonic(), 0))
            except queue.Empty:
                task = self._again
                due = time.monotonic() + self._seconds
            if task is None:
                return
            try:
                task()
            except (ShardkeepError, OSError) as error:
                log.error("%s: %s", self._what, error)
            except Exception:
                log.exception("%s: an unexpected error", self._what)
            del task

    def wait(self) -> None:
        """Wait until all tasks that were put before are done."""
        done = Latch()
        self._tasks.put(done.set)
        while self._thread.is_alive() and not done.wait(LOOK):
            pass

    def close(self, seconds: float | None = None) -> None:
        """End the thread, after the tasks that were put before; waits for it for at most so long."""
        self._tasks.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)
