"""Saves in the background: the handle, the order of saves to one target, and what happens when the program ends."""

import atexit
import logging
import threading
import traceback
from collections.abc import Callable

from shardkeep.reports import SaveReport

log = logging.getLogger("shardkeep")


class PendingSave:
    """A save in the background. It finishes whether or not anyone waits, also when the program ends first."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._finished = threading.Event()
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
        return self._finished.is_set() and self._error is None

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Block until the save is durable; raises what went wrong, or `TimeoutError` (the save then goes on)."""
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the save to {self.path} is still running after {timeout} s")
        _unwaited.discard(self)
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    @property
    def report(self) -> SaveReport | None:
        """What the save took; None until it has ended well."""
        return self._report

    def start(self, work: Callable[[], SaveReport], after: Callable[[], None] = lambda: None) -> None:
        """Run `work` on a thread of its own, which keeps the program alive until it is done; then `after`."""
        threading.Thread(target=self._run, args=(work, after), name="shardkeep-save", daemon=False).start()

    def _run(self, work: Callable[[], SaveReport], after: Callable[[], None]) -> None:
        try:
            self._report = work()
        except BaseException as error:  # noqa: BLE001  (raised by wait)
            self._error = error
            _forget_frames(error)
            _unwaited.add(self)
            log.error("shardkeep: the save to %s failed: %s", self.path, error)
        del work  # the error's traceback keeps this frame, which must not keep the snapshot
        self.mention_exit(ended=True)
        self._finished.set()
        after()

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
        state = "running" if not self.done() else "failed" if self._error else "done"
        return f"<PendingSave {self.path!r} {state}>"


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the functions on the way to an error held; the traceback still shows the way."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


_unwaited: set[PendingSave] = set()


@atexit.register
def report_unwaited() -> None:
    """At the end of the program: failures that nobody asked about."""
    for pending in list(_unwaited):
        log.error("shardkeep: the save to %s FAILED and nobody waited for it: %s", pending.path, pending._error)  # pyright: ignore[reportPrivateUsage]
