"""What a process has while it writes to a run: the lock, the agreement with other processes, signals, housekeeping."""

import atexit
import datetime
import logging
import os
import time
import weakref
from collections.abc import Collection, Iterable, Sequence

from shardkeep.errors import CallbackError, CheckpointExistsError
from shardkeep.processes.operation import Operation
from shardkeep.runs.agreement import Agreement
from shardkeep.runs.control import POLL, Control, WriterLock
from shardkeep.runs.housekeeping import Housekeeping, Task
from shardkeep.runs.index import Listing, RunIndex
from shardkeep.runs.keep import Keep
from shardkeep.runs.preemption import Signals
from shardkeep.runs.retention import Retention
from shardkeep.runs.schedule import Schedule
from shardkeep.runs.steps import State, StepName
from shardkeep.saving.pending import BackgroundSave
from shardkeep.system import after_fork_in_child

log = logging.getLogger("shardkeep")

_ANNOUNCED = -1  # in place of a step that is due by time: the processes will agree on one
_AT_EXIT = 30.0  # seconds that the end of the program waits for housekeeping


class Writer:
    """The writing side of a run. Process 0 leads: it alone has the lock and writes to the control directory.

    Args:
        control: The control directory of the run.
        index: Lists its steps.
        name: How they are named.
        keep: Which of them stay; None for all.
        schedule: When saves are due.
        in_use: Steps that must not be deleted at the moment.

    Attributes:
        leads: Whether this process leads.
        is_alone: Whether it is the only one.
        agreement: What the processes agree on.
        known: On the leader, the steps that are there, each with its state.
        resumed_from: The step that the run was resumed from; None before that, and for a new run.
    """

    def __init__(
        self,
        control: Control,
        index: RunIndex,
        name: StepName,
        keep: Keep | None,
        schedule: Schedule,
        in_use: Collection[int],
    ) -> None:
        self._control, self._index, self._name, self._schedule = control, index, name, schedule
        self._retention = Retention(control, index, keep)
        self._lock = WriterLock(control.place)
        self._in_use = in_use
        self._signals: Signals | None = None
        self._housekeeping: Housekeeping | None = None
        self._requested: set[str] = set()
        self._timed: int | None = None  # the step that was found to be due by time
        self.agreement: Agreement | None = None
        self.leads = self.is_alone = True
        self.known: dict[int, State] = {}
        self.resumed_from: int | None = None
        self.resumed = False

    def open(self, operation: Operation, signals: Sequence[str]) -> Agreement:
        """Take the lock, and connect with the other processes."""
        self.leads, self.is_alone = operation.leads, operation.size == 1
        _open.add(self)
        try:
            run_id = ""
            if self.leads:
                self._lock.take()
                listing = self._retention.settle(self._index.read())
                self.note(listing)
                if not listing.is_indexed:
                    self._index.write(listing)
                run_id = os.urandom(8).hex()
            agreement = self.agreement = Agreement(operation.share(run_id))
            self._signals = Signals(signals, agreement.request)
            if self.leads:
                self._housekeeping = Housekeeping(f"the run {self._control.place}", self._look_for_requests, POLL)
                self._housekeeping.start()
                self._housekeeping.put(self._retention.remove_remains)
        except BaseException:
            self.close()
            raise
        return agreement

    def note(self, listing: Listing) -> None:
        """Remember which steps are there."""
        self.known = {number: entry.step.state for number, entry in listing.entries.items()}

    def _look_for_requests(self) -> None:
        found = set(self._control.requests())
        if found - self._requested and self.agreement is not None:
            self.agreement.request("shardkeep save-now", stop=False)
        self._requested = found

    def decide(self, number: int) -> str:
        """On the leader, what to do about a step that is to be saved: "save", "replace" or "skip"."""
        self._lock.confirm()
        state = self.known.get(number)
        newest = max((n for n, s in self.known.items() if s == "usable"), default=-1)
        if not self.resumed and number <= newest and self.known:
            raise CheckpointExistsError(
                f"the run {self._control.place} has steps up to {newest}, and step {number} was to be saved without "
                "resuming. Call run.resume() before the loop, which continues with the newest step, or "
                "run.resume(step=...), which goes back; or choose another directory for a new run. Nothing was written"
            )
        self._index.deleted.discard(self._name.of(number))
        if state is None:
            return "save"
        if state == "usable":
            return "skip"
        # In a bucket the index is believed. If this save is committed and the index not written, it must not be wrong.
        self._index.distrusted.add(self._name.of(number))
        self._index.write(self._index.read())
        return "replace"

    def is_time(self, number: int) -> bool:
        """Whether a step is due by time. Several processes agree on a later call instead, which process 0 announces."""
        if self._timed == number:
            return True
        if not self.leads or not self._schedule.due_by_time(time.monotonic()):
            return False
        if self.is_alone:
            self._timed = number
            return True
        if self._timed is None and self.agreement is not None:
            self._timed = _ANNOUNCED
            self.agreement.request("save_every", stop=False)
        return False

    def restart_time(self) -> None:
        """Count the time until the next save from now on."""
        self._timed = None
        self._schedule.restart_time(time.monotonic())

    def begin(self) -> set[str]:
        """A save begins now. Returns the requests that it fulfils."""
        self.restart_time()
        return set(self._requested)

    def confirm(self) -> None:
        """Raise `ConflictError` if another program has taken the run over."""
        self._lock.confirm()

    def committed(self, number: int, fulfilled: Iterable[str]) -> None:
        """A step is committed: delete what is not kept any more, in the background. Called on the leader."""
        self.known[number] = "usable"
        self.resumed = True  # from here on, the steps of this run are this program's own
        names = list(fulfilled)
        self._put(lambda: self._tidy(number, names))

    def fulfil(self, names: Iterable[str]) -> None:
        """Requests are fulfilled, because the step that they ask for was committed before."""
        given = list(names)
        if given:
            self._put(lambda: self._control.remove_requests(given))

    def _put(self, task: Task) -> None:
        if self._housekeeping is not None:
            self._housekeeping.put(task)

    def _tidy(self, committed: int, fulfilled: Sequence[str]) -> None:
        for names in (self._index.distrusted, self._index.deleted):
            names.discard(self._name.of(committed))
        if fulfilled:
            self._control.remove_requests(fulfilled)
        self._lock.confirm()
        now = datetime.datetime.now(datetime.UTC)
        listing, deleted = self._retention.run(self.resumed_from, tuple(self._in_use), now)
        for number in deleted:
            self.known.pop(number, None)
        if not listing.is_indexed:
            self._index.write(listing)

    def wait(self) -> None:
        """Wait until housekeeping has nothing left to do."""
        if self._housekeeping is not None:
            self._housekeeping.wait()

    def close(self, seconds: float | None = None) -> None:
        """Give everything back. Harmless if called twice, and if opening or closing was interrupted."""
        if self._signals is not None:
            self._signals.close()
        if self.agreement is not None:
            self.agreement.close()
        if self._housekeeping is not None:
            self._housekeeping.close(seconds)
        self._lock.release()
        _open.discard(self)  # last: what an interrupt has cut short is completed at the end of the program


class LastSave:
    """The save of a run that goes on in the background. There is one at a time.

    Args:
        raises: Whether what goes wrong is raised; else it is only logged.

    Attributes:
        save: The save; None if there is none, or it is over and its error was told.
    """

    def __init__(self, raises: bool) -> None:
        self._raises = raises
        self.save: BackgroundSave | None = None

    def settle(self) -> bool:
        """Wait for it. What went wrong is raised, or was logged when it happened: then False is returned."""
        if self.save is None:
            return True
        try:
            self.save.wait()
        except CallbackError:
            pass  # committed; what could not be tidied up afterwards was logged
        except Exception:
            self.save = None
            if self._raises:
                raise
            return False
        self.save = None
        return True


_open: weakref.WeakSet[Writer] = weakref.WeakSet()
after_fork_in_child(_open.clear)


@atexit.register
def _close_all() -> None:
    """At the end of the program: pending saves have ended by now; no lock may stay behind."""
    for writer in tuple(_open):
        writer.close(_AT_EXIT)
