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
