"""The control directory of a run: who writes it, marks on steps, readers' holds, late metrics, requests.

Every file in it is written once under a name that is never used again, because in a bucket a request to remove it may
arrive late. The exceptions are the record of the writer and the index. The name of a mark says all that a listing
needs.
"""

import json
import logging
import math
import os
import time
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

from shardkeep.config import LEASE, read
from shardkeep.errors import ConflictError, ShardkeepError, storage_error
from shardkeep.model.metadata import decode_metadata, encode_metadata
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.base import Held, Store
from shardkeep.stores.location import Location, store_at
from shardkeep.system import after_fork_in_child
from shardkeep.targets.running import maker_of, now, record_lines

log = logging.getLogger("shardkeep")

RUN_CONTROL = ".shardkeep-run"
POLL = 10.0  # seconds between two looks of the writer for requests of other programs
INDEX = f"{RUN_CONTROL}/index.json"
UNREADABLE = (ValueError, RecursionError, OverflowError)  # what a file raises that is damaged, or was made to do harm
_WRITER = f"{RUN_CONTROL}/writer"
_LOCK_SECONDS = 30.0  # how long others may hold the lock of the control directory, which they do for moments
_YOUNG = 60.0  # seconds: a record that nobody holds may be that of a reader who is about to hold it
_TRIES = 5  # how often a file is written anew if its directory was removed meanwhile

Kind = Literal["pinned", "unpinned", "damaged", "abandoned", "deleting"]


@dataclass(frozen=True)
class Mark:
    """A mark on one save of a step: a step that is saved again has another id, and so none of its old marks."""

    kind: str
    step: str  # the name of the step's directory
    save_id: str
    file: str

    @property
    def subject(self) -> tuple[str, str]:
        """What it is about: the name of the step and the id of its save."""
        return self.step, self.save_id


@dataclass(frozen=True)
class MetricRecord:
    """Metrics that were recorded for a save of a step after it was committed."""

    step: str
    save_id: str
    time: str
    file: str

    @property
    def subject(self) -> tuple[str, str]:
        """What it is about: the name of the step and the id of its save."""
        return self.step, self.save_id


class Control:
    """The control directory of the run at a place. Nothing is written before something is marked, held or recorded."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self.store = store_at(place, RUN_CONTROL, confined=False)

    def explained(self, doing: str) -> AbstractContextManager[None]:
        """What the operating system refuses becomes a `StorageError`."""
        return _explained(doing, self.place)

    def _names(self, kind: str) -> list[str]:
        """The names of the files of one kind."""
        with self.explained(f"listing the {kind}"):
            return self.store.children(f"{RUN_CONTROL}/{kind}")

    def _write(self, name: str, content: Mapping[str, Any]) -> str:
        """Write a new file, durably."""
        data = json.dumps(content).encode()
        for left in reversed(range(_TRIES)):
            try:
                self.store.write_new(name, len(data), [memoryview(data)])
                self.store.sync([name])
                break
            except FileNotFoundError:  # another process has removed the directory, which was empty
                if left == 0:
                    raise
        return name

    def marks(self) -> list[Mark]:
        """All marks, also void ones."""
        found: list[Mark] = []
        for name in self._names("marks"):
            kind, _, rest = name.partition("~")
            step, save_id, _ = _split(rest)
            if step:
                found.append(Mark(kind, step, save_id, f"{RUN_CONTROL}/marks/{name}"))
        return found

    def mark(self, kind: Kind, step: str, save_id: str, reason: str = "") -> Mark:
        """Mark one save of a step, durably."""
        file = f"{RUN_CONTROL}/marks/{kind}~{step}~{save_id}~{_random()}"
        with self.explained(f"marking {step} as {kind}"):
            self._write(file, {"reason": reason, "time": now()})
        return Mark(kind, step, save_id, file)

    def reason(self, mark: Mark) -> str:
        """Why a mark was made, as far as it says."""
        with suppress(FileNotFoundError, *UNREADABLE):
            content = json.loads(self.store.read(mark.file))
            if isinstance(content, dict):
                return str(cast(dict[str, Any], content).get("reason", ""))
        return ""

    def remove(self, files: Iterable[Mark | MetricRecord]) -> None:
        """Remove marks or metrics. It is no error if they are gone."""
        names = [one.file for one in files]
        if names:
            with self.explained("removing marks"):
                self.store.remove(names)

    def metric_records(self) -> list[MetricRecord]:
        """The metrics that were recorded late, the oldest first."""
        found: list[MetricRecord] = []
        for name in self._names("metrics"):
            step, save_id, moment = _split(name)
            if step:
                found.append(MetricRecord(step, save_id, moment, f"{RUN_CONTROL}/metrics/{name}"))
        return sorted(found, key=lambda record: record.time)

    def record_metrics(self, step: str, save_id: str, metrics: Mapping[str, float]) -> None:
        """Record metrics of one save of a step. Of several values of one metric, the latest is used."""
        file = f"{RUN_CONTROL}/metrics/{step}~{save_id}~{time.time_ns():020d}-{_random()}"
        with self.explained(f"recording metrics of {step}"):
            self._write(file, cast(Any, encode_metadata(dict(metrics))))

    def read_metrics(self, record: MetricRecord) -> dict[str, float]:
        """What was recorded. Nothing if a crash has cut it short, or it is gone."""
        with suppress(FileNotFoundError, *UNREADABLE):
            return numbers_in(decode_metadata(json.loads(self.store.read(record.file))))
        return {}

    def take_hold(self, step: str) -> "Hold":
        """Write a hold on a step. The caller then checks that the step is not being deleted."""
        hold = Hold(self.place, step)
        with self.explained(f"holding {step}"):
            hold.take()
        return hold

    def is_held(self, step: str) -> bool:
        """Whether a reader that is alive holds the step. The holds of dead ones are removed."""
        held = False
        for name in self._names("holds"):
            if name.rpartition("~")[0] == step:
                held = self._is_alive(f"{RUN_CONTROL}/holds/{name}") or held
        return held

    def remove_dead_holds(self) -> None:
        """Remove the holds of readers that died, also those on steps that are gone."""
        for name in self._names("holds"):
            self._is_alive(f"{RUN_CONTROL}/holds/{name}")

    def protection(self, step: str, save_id: str | None = None) -> Literal["pinned", "held"] | None:
        """Why a step must not be deleted, other than by the rules. Ask when its deletion is announced.

        Args:
            step: The name of its directory.
            save_id: The id of its save; None for any.
        """
        pins = (mark for mark in self.marks() if mark.kind == "pinned" and mark.step == step)
        if any(save_id in (None, mark.save_id) for mark in pins):
            return "pinned"
        return "held" if self.is_held(step) else None

    def held_steps(self) -> set[str]:
        """The names of the steps that readers hold now, as far as one can tell without changing anything."""
        return {
            name.rpartition("~")[0]
            for name in self._names("holds")
            if self.store.is_held(f"{RUN_CONTROL}/holds/{name}")
        }

    def _is_alive(self, name: str) -> bool:
        """Whether a hold is held. Where clocks could deceive, only a hold that was taken over is dead.

        That of a dead reader is removed, unless it is so young that its reader may be about to take it.
        """
        if self.store.is_held(name):
            return True
        written = self.store.modified(name)
        if written is None:
            return False
        if not self.store.has_leases and time.time() - written < _YOUNG:
            return False  # perhaps just being taken: its reader will find the mark of the deletion
        locking = store_at(self.place, RUN_CONTROL, confined=False)  # which caches what it lists under the lock
        with Scope(f"reading the holds in {self.place}") as scope, locking.lock(_LOCK_SECONDS):
            old = locking.try_hold(name, scope)
            if old is not None:
                old.remove()
        return old is None and self.store.modified(name) is not None

    def requests(self) -> list[str]:
        """The requests for a save that were not granted yet."""
        return [f"{RUN_CONTROL}/requests/{name}" for name in self._names("requests")]

    def request_save(self) -> str:
        """Ask the writer of the run for a save. Returns the name of the request, which is removed when it is done."""
        with self.explained("requesting a save"):
            return self._write(f"{RUN_CONTROL}/requests/{_random()}", {"time": now()})

    def remove_requests(self, names: Iterable[str]) -> None:
        """Remove requests that are done."""
        with self.explained("removing requests"):
            self.store.remove(names)

    def writer(self) -> str | None:
        """Who writes the run, for messages; None if nobody does."""
        return _named(self.store) if self.store.is_held(_WRITER) else None


class Hold:
    """A reader's hold on a step, until it is released, or until nobody has this object any more.

    Releasing it twice is harmless.
    """

    def __init__(self, place: Location, step: str) -> None:
        self._store = store_at(place, RUN_CONTROL, confined=False)
        self._name = f"{RUN_CONTROL}/holds/{step}~{_random()}"
        self._held = self._store.hold(self._name)
        # If Ctrl-C strikes while it is taken or released, the variables that refer to it are lost.
        self._lost = weakref.finalize(self, _remove, self._held, f"the hold on {place / step}")
        self._lost.atexit = False

    def take(self) -> None:
        try:
            self._held.take(record_lines([], now()))
        except BaseException:
            self.release()
            raise

    def confirm(self) -> bool:
        """Whether the record is still there: a deletion may have removed it before it was locked."""
        return self._store.modified(self._name) is not None

    def release(self) -> None:
        if self._lost.alive:
            _remove(self._held, self._name)
            self._lost.detach()


class WriterLock:
    """The right to write to a run, held by one process at a time until it is released."""

    def __init__(self, place: Location) -> None:
        self._place = place
        self._store = store_at(place, RUN_CONTROL, confined=False)
        self._held: Held | None = None

    def take(self) -> None:
        """Take the lock. `ConflictError` with who holds it if that process is alive.

        On a disk the kernel knows that. In a bucket a lease that is renewed while we look is alive; one that is not is
        waited out.
        """
        with _explained("opening", self._place):
            self._take()

    def _take(self) -> None:
        pause, lease = 0.2, read(LEASE)
        before = self._seen()
        waits = False
        while not self._try():
            seen = self._seen()
            if not self._store.has_leases or (None not in (before, seen) and seen != before):
                raise self._taken_already()
            if not waits:
                waits = True
                log.warning(
                    "waiting up to %g s for the lease of the last writer of %s to expire: %s",
                    lease,
                    self._place,
                    _named(self._store),
                )
            before = seen
            time.sleep(pause)
            pause = min(pause * 1.5, lease / 10)

    def _seen(self) -> object:
        """What changes whenever the lock is renewed; None if nobody has it."""
        return self._store.identity(_WRITER)

    def _try(self) -> bool:
        """Take the lock if nobody who is alive holds it."""
        locking = store_at(self._place, RUN_CONTROL, confined=False)
        with Scope(f"opening the run {self._place}") as scope, locking.lock(_LOCK_SECONDS):
            if self._seen() is not None:
                old = locking.try_hold(_WRITER, scope)
                if old is None:
                    return False
                old.remove()
            held = self._held = self._store.hold(_WRITER)
            try:
                held.take(record_lines([], now()))
            except BaseException:
                self.release()
                raise
            _taken.add(self)
        return True

    def _taken_already(self) -> ConflictError:
        """The error that says who has the lock: another object of this program, or another program."""
        maker, who = maker_of(self._store, _WRITER), _named(self._store)
        mine = [lock for lock in tuple(_taken) if lock._held is not None and lock._place == self._place]
        if mine and maker is not None and maker[1] == os.getpid():
            return ConflictError(
                f"this program has already opened the run {self._place} for writing, with another Run object: {who}. "
                "Call close() of that Run first, or use `with shardkeep.Run(...) as run:`, which closes it also after "
                "an error. If no variable refers to it any more, restart the program or the notebook's kernel"
            )
        return ConflictError(
            f"another program writes to the run {self._place}: {who}. A run has one writer at a time; end that program "
            "first, or choose another directory. Readers need no lock: latest(), steps(), load() and watch() work "
            "meanwhile"
        )

    def confirm(self) -> None:
        """Raise `ConflictError` if another program has taken the lock over, because this one was suspended."""
        if self._held is None:
            raise ConflictError(f"this program no longer writes to the run {self._place}")
        self._held.confirm(read(LEASE) / 2)

    def release(self) -> None:
        """Give the lock up. Harmless if it was never taken."""
        if self._held is not None:
            _remove(self._held, f"the lock of the run {self._place}")
            self._held = None


_taken: weakref.WeakSet[WriterLock] = weakref.WeakSet()
after_fork_in_child(_taken.clear)


@contextmanager
def _explained(doing: str, place: Location) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, ShardkeepError):
            raise
        raise storage_error(error, f"{doing} in {place}", "Check the path and its permissions") from error


def _remove(held: Held, what: str) -> None:
    """Give back what was held. If that fails it expires, so this is no reason to end a training."""
    try:
        held.remove()
    except (ShardkeepError, OSError) as error:
        log.warning("%s could not be removed: %s", what, error)


def numbers_in(found: Any) -> dict[str, float]:
    """The metrics in what was read: names and numbers, nothing else."""
    if not isinstance(found, dict):
        return {}
    pairs = cast(dict[Any, Any], found).items()
    return {
        str(name): _as_float(value)
        for name, value in pairs
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an int with hundreds of digits
        return math.inf if value > 0 else -math.inf


def _split(name: str) -> tuple[str, str, str]:
    """The name of the step, the id of the save, and what comes last. The name of a step may contain `~`."""
    parts = name.rsplit("~", 2)
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else ("", "", "")


def _random() -> str:
    return os.urandom(8).hex()


def _named(store: Store) -> str:
    found = maker_of(store, _WRITER)
    if found is None:
        return "a process that is not known"
    host, pid, since = found
    return f"process {pid} on {host}, since {since:%F %T} UTC"
