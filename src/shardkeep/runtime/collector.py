"""Pauses of Python's cyclic garbage collector."""

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from shardkeep.runtime.scopes import Scope, frame_above
from shardkeep.system import after_fork_in_child

_MANY = 10_000  # new objects that are worth moving to the oldest generation


class _Collector:
    """Pauses Python's cyclic garbage collector while thousands of objects are created that are not garbage.

    Each collection visits every object of the program, which takes longer than saving many small arrays. After the
    pause the new objects are moved to the oldest generation, so that no collection of them follows immediately.

    The pause is a threshold of 0, under which no collection starts. Whether the collector is enabled stays the
    program's own choice: what it enables or disables during a pause is as it wants it afterwards.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pauses: set[_Pause] = set()
        self.thresholds = (0, 0, 0)  # those of the program, while ours is 0; else 0
        self.has_frozen = False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause the collector for a `with` block, in which no code of the user's may run."""
        with Scope("pausing the garbage collector", frame_above(2)) as scope:
            pause = scope.add(_Pause(self))
            with self.lock:
                self.pauses.add(pause)
                thresholds = gc.get_threshold()
                if thresholds[0]:  # else there is a pause already, or the program wants no collections
                    self.thresholds = thresholds
                    gc.set_threshold(0, *thresholds[1:])
            yield

    def restore(self) -> None:
        """Give the program its thresholds back."""
        thresholds = self.thresholds  # a signal handler that saves, and so runs this too, resets them
        if thresholds[0] and gc.get_threshold()[0] == 0:  # else the program has set another one meanwhile
            gc.set_threshold(*thresholds)
        self.thresholds = (0, 0, 0)  # last: if this is interrupted, it is done again

    def start_over(self) -> None:
        """Reset in a forked child, where the threads of the parent do not exist."""
        self.restore()
        self.__init__()


@dataclass(frozen=True, eq=False)
class _Pause:
    """One active pause of the collector."""

    collector: _Collector

    def release(self) -> None:
        ours = self.collector
        with ours.lock:
            ours.pauses.discard(self)
            if ours.pauses:
                return
            runs = gc.isenabled() and ours.thresholds[0] > 0
            # What is frozen already was frozen by the program, which uses freezing itself.
            if runs and gc.get_count()[0] > _MANY and gc.get_freeze_count() == 0:
                ours.has_frozen = True
                gc.freeze()  # together with unfreeze: moves all objects to the oldest generation
                gc.unfreeze()
            elif ours.has_frozen:  # an exception came between the two
                gc.unfreeze()
            ours.has_frozen = False
            ours.restore()


collector = _Collector()
after_fork_in_child(collector.start_over)
