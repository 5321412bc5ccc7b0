"""The thread that looks after a run while it trains: it tidies up after commits and looks for requests."""

import logging
import queue
import threading
from collections.abc import Callable

from shardkeep.errors import ShardkeepError
from shardkeep.runtime.priority import priority
from shardkeep.runtime.scopes import LOOK, Latch

log = logging.getLogger("shardkeep")

Task = Callable[[], None]


class Housekeeping:
    """Runs tasks one after another on a thread of its own, and another one whenever it had nothing to do for a while.

    Args:
        what: What it looks after, for messages.
        idle: The task to run when there is nothing else to do.
        seconds: How long it waits for that.
    """

    def __init__(self, what: str, idle: Task, seconds: float) -> None:
        self._what, self._idle, self._seconds = what, idle, seconds
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shardkeep-run", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, task: Task) -> None:
        """Have a task run soon. What it raises is logged."""
        self._tasks.put(task)

    def _run(self) -> None:
        priority.lower()
        while True:
            try:
                task = self._tasks.get(timeout=self._seconds)
            except queue.Empty:
                task = self._idle
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
