"""The priority of background threads, so that they do not slow down the training loop."""

import os
import sys
import threading
import time
from contextlib import suppress


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
