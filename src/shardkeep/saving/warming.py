"""The newest checkpoint in the page cache: a program that is started again on this machine loads it from memory.

A save writes past the page cache and leaves nothing there. Once it is committed, a thread of its own reads what this
process has written, and the checkpoint before it leaves the cache. Nothing waits for that thread, and it does not keep
the program alive. It reads for at most half of the time, and stops while saves and loads are running.
"""

import atexit
import errno
import logging
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from shardkeep.model.reports import NOT_WARMED, Warmth
from shardkeep.runtime.budget import budget
from shardkeep.runtime.hostmemory import available_memory
from shardkeep.runtime.priority import priority
from shardkeep.runtime.save_queue import QueueEntry
from shardkeep.runtime.scopes import LOOK, Latch
from shardkeep.stores.base import Store
from shardkeep.stores.local.pagecache import bring_in, send_out
from shardkeep.system import after_fork_in_child

log = logging.getLogger("shardkeep")

LEAST_WARMED = 16 << 20  # bytes: less is read from the disk within about 10 ms
_PART = 16 << 20  # bytes read at a time, a multiple of a huge page: a save that begins meets no more
_TURN = 0.005  # seconds of work between two pauses: small files are many
_PLENTY = 4  # times the checkpoint: with less available memory, the program or its data need it more
_SERIES = 8  # checkpoints that stay warm at once: a program saves a few series side by side, not many
_CALM = 0.3  # seconds that it waits before it begins, and while others are running: saves may follow at once


def keep_warm(where: str, store: Store, names: Sequence[str], nbytes: int) -> Warmth:
    """Begin to bring files into the page cache, in the background, and the checkpoint before them out of it.

    Args:
        where: The checkpoint.
        store: Where it is.
        names: The files of it that this process wrote, with `LEAST_WARMED` bytes or more.
        nbytes: The bytes of the whole checkpoint.
    """
    if not store.mappable:
        return NOT_WARMED
    warming = Warming(where, [store.locate(name) for name in names], nbytes)
    with suppress(RuntimeError):  # the program is ending: no thread can be started
        warming.start()
    return warming


class Warming(Warmth):
    """One checkpoint on its way into the page cache, and in it, until the next one of its series is saved.

    Checkpoints whose paths differ in numbers only are a series.

    Attributes:
        line: Those of this process, the newest last.
    """

    line: "ClassVar[list[Warming]]" = []

    def __init__(self, where: str, paths: Sequence[str], nbytes: int) -> None:
        self._where, self._paths, self._nbytes = where, paths, nbytes
        self._series = re.sub(r"\d+", "0", where)
        self._before: list[Warming] = []
        self._over = Latch()  # its checkpoint is no longer the newest, or the program ends
        self._looked = 0.0  # when it last looked whether to go on
        self._complete = False
        self._thread = threading.Thread(target=self._run, name="shardkeep-warm", daemon=True)

    def __reduce__(self) -> tuple[type[Warmth], tuple[()]]:
        return Warmth, ()  # another process knows nothing of it

    def start(self) -> None:
        line = self.line
        self._before = [other for other in line if other._series == self._series] or line[: 1 - _SERIES]
        line.append(self)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return self._complete

    def stop(self) -> None:
        """End the thread after the part that it is reading."""
        self._over.set()

    def _run(self) -> None:
        priority.lower()
        while self._before:
            self._before[-1].leave()
            with suppress(ValueError):  # another one has removed it
                self.line.remove(self._before[-1])
            self._before.pop()
        try:
            self._looked = time.perf_counter() - _CALM  # it begins with a pause
            self._complete = all(map(self._bring_in, self._paths))
        except FileNotFoundError:
            log.info("%s was removed before it was in the page cache", self._where)
        except (OSError, EOFError) as error:  # EOFError: it became shorter
            level = logging.WARNING if getattr(error, "errno", None) == errno.EIO else logging.INFO
            log.log(level, "%s cannot be read into the page cache: %s", self._where, error)
        if self._complete:
            log.info("%s is in the page cache", self._where)

    def leave(self) -> None:
        """Let its files leave the page cache, as soon as the thread has ended."""
        self.stop()
        self.wait()
        self._complete = False
        for path in self._paths:
            send_out(path)

    def _bring_in(self, path: str) -> bool:
        """Read a file; False if it is given up."""
        start = 0
        while self._may_read():
            length = bring_in(path, start, _PART)
            if length < _PART:
                return True
            start += length
        return False

    def _may_read(self) -> bool:
        """Whether to go on. Now and then it waits first, and looks at the memory."""
        worked = time.perf_counter() - self._looked
        if worked < _TURN:
            return True
        pause = worked  # the disk is free for the program's data half of the time
        while not self._over.wait(pause):
            if QueueEntry.line or budget.claims:  # a save or a load is running, and needs the disk and the memory
                pause = _CALM
                continue
            self._looked = time.perf_counter()
            return self._has_room()
        return False

    def _has_room(self) -> bool:
        free, needed = available_memory(), _PLENTY * self._nbytes
        if free >= needed:
            return True
        log.info(
            "%s is not kept in the page cache: %s bytes of memory are available, but it needs %s (%s times its size)",
            self._where,
            f"{free:,}",
            f"{needed:,}",
            _PLENTY,
        )
        return False


@atexit.register
def _end() -> None:
    for warming in list(Warming.line):
        warming.stop()
    for warming in list(Warming.line):
        warming.wait(LOOK)


after_fork_in_child(Warming.line.clear)
