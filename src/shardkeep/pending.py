"""Saves in the background: the handle, and what happens when the program ends."""

import atexit
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable

from shardkeep.errors import ProcessError
from shardkeep.reports import SaveReport
from shardkeep.scopes import LOOK, Latch, Scope, sweep

log = logging.getLogger("shardkeep")


class PendingSave:
    """A save in the background. It finishes whether or not anyone waits, also when the program ends first."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._finished = Latch()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._mentioned = False

    @classmethod
    def nothing(cls, path: str) -> "PendingSave":
        """The handle of a save that was not to be made."""
        pending = cls(path)
        pending._report = SaveReport(path, 0, 0, 0.0)
        pending._finished.set()
        return pending

    def done_well(self) -> bool:
        """Whether the save has ended and nothing went wrong."""
        return self.done() and self._error is None

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        if not self._finished.is_set and self._process != os.getpid():
            raise ProcessError(
                f"the save to {self.path} is made by the process that this one was forked from (its id is "
                f"{self._process}); only that process can wait for it"
            )
        ended = self._thread is not None and _has_ended(self._thread)
        if ended and not self._finished.is_set:
            self._end(None, RuntimeError(f"the thread of the save to {self.path} ended before the save did"))
        return self._finished.is_set

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Block until the save is durable; raises what went wrong, or `TimeoutError` (the save then goes on)."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            left = LOOK if until is None else min(until - time.monotonic(), LOOK)
            if left <= 0:
                raise TimeoutError(f"the save to {self.path} is still running after {timeout} s")
            self._finished.wait(left)
        _unwaited.discard(self)
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    @property
    def report(self) -> SaveReport | None:
        """What the save took; None until it has ended well."""
        return self._report

    def start(self, scope: Scope, work: Callable[[], SaveReport], after: Callable[[], None] = lambda: None) -> None:
        """Run `work` on a thread of its own, which keeps the program alive until it is done; then `after`.

        The thread takes over the scope, and `work` closes it.
        """
        run = threading.Thread(target=self._run, args=(scope, work, after), name="shardkeep-save", daemon=False)
        self._thread = run
        scope.give_to(run)
        run.start()

    def _run(self, scope: Scope, work: Callable[[], SaveReport], after: Callable[[], None]) -> None:
        report, error = None, None
        try:
            with scope:
                if not scope.take_over():
                    return  # an interrupt ended `save_async`, which has cleaned up
                report = work()
        except BaseException as raised:  # noqa: BLE001  (raised by wait)
            error = raised
            _forget_frames(error)
            scope.end(failed=True)  # in case the block was not even entered
        del work  # the error's traceback keeps this frame, which must not keep the snapshot
        self._end(report, error)
        after()

    def _end(self, report: SaveReport | None, error: BaseException | None) -> None:
        if error is not None:
            self._error = error
            _unwaited.add(self)
            log.error("shardkeep: the save to %s failed: %s", self.path, error)
            sweep()
        self._report = report
        self.mention_exit(ended=True)
        self._finished.set()

    def mention_exit(self, ended: bool = False) -> None:
        """Say once that the program is being kept alive, and once that it is not any more."""
        if threading.main_thread().is_alive():
            return
        if not self._mentioned:
            self._mentioned = True
            log.warning("shardkeep: the program has ended; finishing the save to %s first", self.path)
        if ended and self._error is None:
            log.warning("shardkeep: the save to %s is finished", self.path)

    def __repr__(self) -> str:
        state = "running" if not self._finished.is_set else "failed" if self._error else "done"
        return f"<PendingSave {self.path!r} {state}>"


def _has_ended(thread: threading.Thread) -> bool:
    return thread.ident is not None and not thread.is_alive()


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the functions on the way to an error held; the traceback still shows the way."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


_unwaited: set[PendingSave] = set()
os.register_at_fork(after_in_child=_unwaited.clear)


@atexit.register
def report_unwaited() -> None:
    """At the end of the program: failures that nobody asked about."""
    for pending in list(_unwaited):
        log.error("shardkeep: the save to %s FAILED and nobody waited for it: %s", pending.path, pending._error)  # pyright: ignore[reportPrivateUsage]
