"""What a process has while it writes to a run: the lock, the agreement with other processes, signals, housekeeping."""

import atexit
import datetime
import logging
import os
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

from shardkeep.errors import CallbackError, CheckpointExistsError, ConflictError
from shardkeep.processes.operation import Operation, join
from shardkeep.runs.agreement import Agreement
from shardkeep.runs.contents import Contents, checked_metadata
from shardkeep.runs.control import POLL, Control, WriterLock
from shardkeep.runs.housekeeping import Housekeeping, Task
from shardkeep.runs.index import Entry, Listing, RunIndex
from shardkeep.runs.preemption import Signals
from shardkeep.runs.retention import Retention, delete_step
from shardkeep.runs.schedule import Schedule
from shardkeep.runs.steps import State, StepName
from shardkeep.saving.pending import BackgroundSave
from shardkeep.saving.save import FormatName, start_save
from shardkeep.stores.location import Location
from shardkeep.system import after_fork_in_child

log = logging.getLogger("shardkeep")

_ANNOUNCED = -1  # in place of a step that is due by time: the processes will agree on one
_AT_EXIT = 30.0  # seconds that the end of the program waits for housekeeping


class Writer:
    """The writing side of a run. Process 0 leads: it alone has the lock and writes to the control directory.

    Args:
        control: The control directory of the run.
        index: Lists its steps, and knows which of them stay.
        name: How they are named.
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
        schedule: Schedule,
        in_use: Collection[int],
    ) -> None:
        self._control, self._index, self._name, self._schedule = control, index, name, schedule
        self._retention = Retention(control, index)
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
                self._index.keep = listing.keep  # as long as this program writes, whatever becomes of the index
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

    def adopt(self) -> None:
        """The run was resumed: from here on, the index has the rules of this program. Called on the leader."""
        self._index.records_rules = True
        listing = self._index.read()
        self.note(listing)
        if not listing.is_indexed:
            self._index.write(listing)

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
                f"the run {self._control.place} has steps up to {newest}, but step {number} would be saved without "
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
        self._index.records_rules = True
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

    def delete(self, entry: Entry) -> None:
        """Delete a step. Called on the leader. `ConflictError` if it is pinned or held."""
        outcome = "pinned" if entry.is_pinned else delete_step(self._control, entry)
        if outcome != "deleted":
            how = "call unpin() first" if outcome == "pinned" else "wait until its reader has finished"
            raise ConflictError(f"{entry.step.path} is {outcome} and was not deleted; {how}")
        self._index.deleted.add(entry.name)
        listing = self._index.read()
        self.note(listing)
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


class Saves:
    """The saves of a run, each in the background, one at a time.

    Args:
        place: The directory of the run.
        name: How its steps are named.
        format: How arrays are stored.
        metadata: What is stored with every step.
        raises: Whether what goes wrong is raised; else it is only logged.

    Attributes:
        last: The save that began last; None if there is none, or it is over and its error was told.
    """

    def __init__(
        self, place: Location, name: StepName, format: FormatName, metadata: Mapping[str, object] | None, raises: bool
    ) -> None:
        self._place, self._name, self._raises = place, name, raises
        self._format: FormatName = format
        self._metadata = checked_metadata(metadata)
        self.last: BackgroundSave | None = None

    def path_of(self, number: int) -> str:
        """Where a step is saved."""
        return str(self._place / self._name.of(number))

    def settle(self) -> bool:
        """Wait for the last save. What went wrong is raised, or was logged when it happened: then False is returned."""
        if self.last is None:
            return True
        try:
            self.last.wait()
        except CallbackError:
            pass  # committed; what could not be tidied up afterwards was logged
        except Exception:
            self.last = None
            if self._raises:
                raise
            return False
        self.last = None
        return True

    def start(self, writer: Writer, number: int, contents: Contents) -> BackgroundSave | None:
        """Start the save of a step, on all processes in the same call; None if it is committed already."""
        with join(f"saving step {number} of {self._place}") as operation:
            self.settle()
            checked = contents.checked(self._metadata)
            operation.gather(None)  # all have come here without an error
            how = operation.share(writer.decide(number) if operation.leads else None)
            fulfilled = writer.begin()
            if how == "skip":
                writer.fulfil(fulfilled)
                return None
            request = checked.request(
                self._place / self._name.of(number),
                self._format,
                number,
                replaces=how == "replace",
                before=writer.confirm,
                after=lambda: writer.committed(number, fulfilled),
                order=self,
            )
            self.last = start_save(request, operation)
            return self.last


_open: weakref.WeakSet[Writer] = weakref.WeakSet()
after_fork_in_child(_open.clear)


@atexit.register
def _close_all() -> None:
    """At the end of the program: pending saves have ended by now; no lock may stay behind."""
    for writer in tuple(_open):
        writer.close(_AT_EXIT)
