"""Saves in the background: the handle, and what happens when the program ends."""

import atexit
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from shardkeep.errors import CallbackError, ProcessError
from shardkeep.model.markup import Code, line, panel
from shardkeep.model.reports import SaveReport, parts_of
from shardkeep.runtime.scopes import LOOK, Latch, Scope, sweep
from shardkeep.saving.callbacks import Callback, is_inside_callback
from shardkeep.system import after_fork_in_child

log = logging.getLogger("shardkeep")


class BackgroundSave:
    """A save on its own thread. The thread keeps the program alive until the save and its callback have ended."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.report: SaveReport | None = None
        self.error: BaseException | None = None
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._committed = Latch()  # or failed
        self._finished = Latch()  # and the callback has run
        self._callback_errors: list[CallbackError] = []  # at most one: the first wait raises it
        self._mentioned = False

    @classmethod
    def nothing(cls, path: str) -> "BackgroundSave":
        """A save that has ended without writing anything, because saving is turned off."""
        save = cls(path)
        save.report = SaveReport(path, 0, 0, 0.0)
        save._committed.set()
        save._finished.set()
        return save

    def done(self) -> bool:
        if not self._finished.is_set and self._process != os.getpid():
            raise ProcessError(
                f"the save to {self.path} runs in process {self._process}, from which this process was forked; "
                "only that process can wait for it"
            )
        thread = self._thread
        # Looked at first: then it has set what it sets.
        ended = thread is not None and thread.ident is not None and not thread.is_alive()
        if ended and not self._finished.is_set:
            if not self._committed.is_set:
                self._settle(None, RuntimeError(f"the thread of the save to {self.path} ended before the save did"))
            self._finished.set()
        return self._finished.is_set

    @property
    def is_settled(self) -> bool:
        """Whether it has ended and there is nothing to raise."""
        return self.done() and self.error is None and not self._callback_errors

    def wait(self, timeout: float | None = None) -> SaveReport:
        # A callback waits for commits only: two callbacks could wait for each other, or one for itself.
        inside = is_inside_callback()
        latch = self._committed if inside else self._finished
        until = None if timeout is None else time.monotonic() + timeout
        while not self.done() and not latch.is_set:
            left = LOOK if until is None else min(until - time.monotonic(), LOOK)
            if left <= 0:
                raise TimeoutError(f"the save to {self.path} is still running after {timeout} s")
            latch.wait(left)
        if self.error is not None:
            _unwaited.discard(self)
            raise self.error
        if not inside:
            _unwaited.discard(self)
            with suppress(IndexError):  # there is none, or it was raised
                raise self._callback_errors.pop()
        assert self.report is not None
        return self.report

    def start(
        self,
        outer: Scope,
        scope: Scope,
        work: Callable[[], SaveReport],
        callback: Callback | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `work` on a new thread, then `callback`, then `after`.

        The thread takes over both scopes: `scope`, which is closed after `work`, and `outer`, which holds the callback.
        """
        arguments = (outer, scope, work, callback, after)
        run = threading.Thread(target=self._run, args=arguments, name="shardkeep-save", daemon=False)
        self._thread = run
        outer.give_to(run)
        scope.give_to(run)
        run.start()

    def _run(
        self,
        outer: Scope,
        scope: Scope,
        work: Callable[[], SaveReport],
        callback: Callback | None,
        after: Callable[[], None],
    ) -> None:
        report, error = None, None
        with outer:
            if not outer.take_over():
                return  # an interrupt ended `save_async`, which has cleaned up
            try:
                with scope:
                    if not scope.take_over():
                        return
                    report = work()
            except BaseException as raised:  # noqa: BLE001  (raised by wait)
                error = raised
                _forget_frames(error)
                scope.__exit__(type(raised))  # in case the block was not even entered
            del work  # the error's traceback keeps this frame, which must not keep the snapshot
            self._settle(report, error)
            if callback is not None and error is None:
                self._note(callback.run(BaseException))
        self._finished.set()
        after()

    def _settle(self, report: SaveReport | None, error: BaseException | None) -> None:
        if error is not None:
            self.error = error
            _unwaited.add(self)
            log.error("the save to %s failed: %s", self.path, error)
            sweep()
        self.report = report
        self.mention_exit(ended=True)
        self._committed.set()

    def _note(self, error: CallbackError | None) -> None:
        """Log what the callback raised, and keep it for the first wait."""
        if error is not None:
            log.error("%s", error)
            self._callback_errors.append(error)
            _unwaited.add(self)

    def mention_exit(self, ended: bool = False) -> None:
        """Log once that the program is being kept alive, and once that the save has ended."""
        if threading.main_thread().is_alive():
            return
        if not self._mentioned:
            self._mentioned = True
            log.warning("the program has ended; finishing the save to %s first", self.path)
        if ended and self.error is None:
            log.warning("the save to %s is finished", self.path)

    def describe(self) -> str:
        """Its state in a few words."""
        if self.error is not None:
            return f"failed: {type(self.error).__name__}"
        if not self._committed.is_set:
            return "running"
        return "done" if self._finished.is_set else "saved, callback pending"

    def unraised(self) -> str:
        """What nobody has asked about."""
        if self.error is not None:
            return f"the save to {self.path} FAILED and wait() was never called: {self.error}"
        return f"{self._callback_errors[0]} (wait() was never called)" if self._callback_errors else ""


class PendingSave:
    """A save that runs in the background, as returned by `save_async`.

    The save finishes even if `wait` is never called. If the main program ends first, the process stays alive until the
    save is done.

    Attributes:
        path: Where the checkpoint is being saved.
        report: The `SaveReport`, once the checkpoint is committed. None while the save is running, and if it failed.

    >>> import numpy as np, shardkeep
    >>> pending = shardkeep.save_async(tmp / "step_1", {"w": np.ones(3)})
    >>> report = pending.wait()
    >>> pending.done(), pending.succeeded(), pending.report is report
    (True, True, True)
    """

    __slots__ = ("__weakref__", "_save")

    def __init__(self, save: BackgroundSave) -> None:
        self._save = save

    @property
    def path(self) -> str:
        """Where the checkpoint is being saved."""
        return self._save.path

    @property
    def report(self) -> SaveReport | None:
        """The `SaveReport`, once the checkpoint is committed. None while the save is running, and if it failed."""
        return self._save.report

    def done(self) -> bool:
        """Whether the save has ended, successfully or not, and its callback (if any) has run."""
        return self._save.done()

    def succeeded(self) -> bool:
        """Whether the save has ended and the checkpoint is committed, even if its callback raised an exception."""
        return self._save.done() and self._save.error is None

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Block until the checkpoint is committed and the callback (if any) has run.

        Inside a commit callback, it waits for the commit only.

        Args:
            timeout: The maximum number of seconds to wait. None waits indefinitely.

        Returns:
            The report of the save.

        Raises:
            TimeoutError: The save is still running. It continues.
            CallbackError: The checkpoint is committed, but the callback raised an exception. Only the first call raises
                this; later calls return the report.
            ShardkeepError: The save failed. Every call raises the error.
        """
        return self._save.wait(timeout)

    def __repr__(self) -> str:
        return f"<PendingSave {self.path!r}: {self._save.describe()}>"

    def _repr_html_(self) -> str:
        state, error, report = self._save.describe(), self._save.error, self._save.report
        parts = [line(state, heading=True)]
        if error is not None:
            parts.append(line(str(error).partition("\n")[0]))
        if report is not None:
            parts += parts_of(report)
        return panel("PendingSave", Code(self.path), parts)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the functions on the way to an error held; the traceback still shows the way."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


_unwaited: set[BackgroundSave] = set()
after_fork_in_child(_unwaited.clear)


@atexit.register
def report_unwaited() -> None:
    """At the end of the program: failures that nobody asked about."""
    for save in list(_unwaited):
        log.error("%s", save.unraised())
