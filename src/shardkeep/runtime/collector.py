"""Pauses of Python's cyclic garbage collector."""

import gc
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

from shardkeep.runtime.scopes import Scope, frame_above


class _Collector:
    """Pauses Python's cyclic garbage collector while thousands of objects are created that are not garbage.

    Each collection visits every object of the program, which takes longer than saving many small arrays. After the
    pause the new objects are moved to the oldest generation, so that no collection of them follows immediately.

    The pause is a threshold of 0, under which no collection starts. Whether the collector is enabled stays the
    program's own choice: what it enables or disables during a pause is as it wants it afterwards.
    """

    _MANY = 10_000

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pauses: set[_Pause] = set()
        self._thresholds = (0, 0, 0)  # those of the program, while ours is 0; else 0
        self._has_frozen = False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause the collector for a `with` block, in which no code of the user's may run."""
        with Scope("pausing the garbage collector", frame_above(2)) as scope:
            self.pause(scope.add(_Pause(self)))
            yield

    def pause(self, pause: "_Pause") -> None:
        with self._lock:
            self._pauses.add(pause)
            thresholds = gc.get_threshold()
            if thresholds[0]:  # else there is a pause already, or the program wants no collections
                self._thresholds = thresholds
                gc.set_threshold(0, *thresholds[1:])

    def resume(self, pause: "_Pause") -> None:
        with self._lock:
            self._pauses.discard(pause)
            if self._pauses:
                return
            runs = gc.isenabled() and self._thresholds[0] > 0
            # What is frozen already was frozen by the program, which uses freezing itself.
            if runs and gc.get_count()[0] > self._MANY and gc.get_freeze_count() == 0:
                self._has_frozen = True
                gc.freeze()  # together with unfreeze: moves all objects to the oldest generation
            if self._has_frozen:
                gc.unfreeze()
                self._has_frozen = False
            self._restore()

    def _restore(self) -> None:
        if self._thresholds[0] and gc.get_threshold()[0] == 0:  # else the program has set another one meanwhile
            gc.set_threshold(*self._thresholds)
        self._thresholds = (0, 0, 0)  # last: if this is interrupted, it is done again

    def start_over(self) -> None:
        """Reset in a forked child, where the threads of the parent do not exist."""
        self._restore()
        self.__init__()


class _Pause:
    """One active pause of the collector."""

    def __init__(self, collector: _Collector) -> None:
        self._collector = collector

    def release(self) -> None:
        self._collector.resume(self)


collector = _Collector()
os.register_at_fork(after_in_child=collector.start_over)
