"""What anyone can do with a run without being its writer: list, load, hold, watch, pin, record metrics."""

import datetime
import logging
import operator
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, SupportsIndex, cast

from shardkeep.errors import (
    CheckpointNotFoundError,
    ConflictError,
    IncompleteCheckpointError,
    IntegrityError,
    MissingDataError,
    NotADirectoryPathError,
    PathError,
)
from shardkeep.jaxapi import membership
from shardkeep.model.document import check_bools
from shardkeep.model.manifest import MANIFEST
from shardkeep.model.markup import Code, facts, panel
from shardkeep.processes.operation import join
from shardkeep.runs.control import Control, Hold
from shardkeep.runs.index import Entry, Listing, RunIndex
from shardkeep.runs.keep import rank_steps
from shardkeep.runs.metrics import Metrics
from shardkeep.runs.retention import explain, is_marked, with_reasons
from shardkeep.runs.rules import Keeping
from shardkeep.runs.steps import State, Step, StepName
from shardkeep.stores.base import CONTROL
from shardkeep.stores.location import Location, is_file, location, store_at
from shardkeep.targets.resolve import look

log = logging.getLogger("shardkeep")

_LOOK_LOCAL, _LOOK_BUCKET = 0.5, 5.0  # seconds between two looks for new steps
_TRIES = 5  # how often a load starts over if its step is deleted meanwhile
_PATIENCE = 10.0  # seconds that a hold waits for a deleter to give way


class ReadableRun:
    """A run that is only read. `Run` is one that can be written, too. Only `load` needs JAX.

    Args:
        path: The directory of the run.
        keep: Which steps its writer keeps; says why each step is kept, and which is the best.
        name: How its steps are named.
    """

    def __init__(self, path: object, *, keep: Keeping = None, name: str = "step_{}") -> None:
        self._place = location(path, "Run(path)")
        self._name = StepName(name)
        _refuse_checkpoint(self._place)
        self._control = Control(self._place)
        self._index = RunIndex(self._control, self._name, keep)
        self._resumed_from: int | None = None
        self._in_use: set[int] = set()  # steps that this program is just loading

    @property
    def path(self) -> str:
        """The directory of the run, as an absolute path or a URL."""
        return str(self._place)

    def steps(self) -> list[Step]:
        """Return the committed steps of the run, oldest first, including damaged and abandoned ones.

        In a bucket, this takes about six requests, plus one for each step that is not in the index of the run.
        """
        listing = self._index.read()
        return self._with_reasons(listing, listing.steps)

    def latest(self) -> Step | None:
        """Return the newest usable step whose files are complete, or None. Contents are not verified."""
        listing = self._index.read()
        return self._first_complete(listing, listing.usable)

    def best(self) -> Step | None:
        """Return the usable step with the best metric, by `metric` and `mode` of the run's `Keep`, or None."""
        listing = self._index.read()
        if listing.keep is None or listing.keep.metric is None:
            raise ValueError(
                'best() needs to know which metric: open the run with keep=Keep(best=..., metric="eval/loss", '
                'mode="min")'
            )
        return self._first_complete(listing, rank_steps(listing.keep, listing.steps))

    def _first_complete(self, listing: Listing, steps: list[Step]) -> Step | None:
        for step in self._with_reasons(listing, steps):
            checked = self._index.check(step)
            if checked is not None:
                return checked
        return None

    def _with_reasons(self, listing: Listing, steps: list[Step]) -> list[Step]:
        why = explain(listing, listing.keep, datetime.datetime.now(datetime.UTC), self._resumed_from)
        return with_reasons(steps, why)

    def load(self, step: "int | Step | None" = None, **arguments: Any) -> Any:
        """Load a step of the run.

        Args:
            step: The number of the step, or a `Step`. The default is the newest usable step.
            **arguments: Arguments of `shardkeep.load`; for example `prefix="ema"` for a named tree.

        Returns:
            What `shardkeep.load` returns.

        Raises:
            CheckpointNotFoundError: There is no such step, or no usable one.
        """
        from shardkeep.loading.load import load  # which imports JAX

        for left in reversed(range(_TRIES)):
            with join(f"loading a step of {self.path}") as operation:
                number, path = operation.share(self._chosen(step) if operation.leads else None)
            self._in_use.add(number)
            try:
                return load(path, **arguments)
            except (CheckpointNotFoundError, IncompleteCheckpointError, MissingDataError):
                # Retention may have deleted it, which is no reason to fail if any newest step will do.
                if step is not None or left == 0 or not self._was_deleted(number):
                    raise
            finally:
                self._in_use.discard(number)
        raise AssertionError("the last try returns or raises")

    def _chosen(self, step: "int | Step | None") -> tuple[int, str]:
        if step is not None:
            entry = self._entry(step, "load")
            return entry.step.number, entry.step.path
        found = self.latest()
        if found is None:
            raise CheckpointNotFoundError(f"load: the run {self.path} has no usable step")
        return found.number, found.path

    def _was_deleted(self, number: int) -> bool:
        with join(f"looking for step {number} of {self.path}") as operation:
            return operation.share(operation.leads and number not in self._index.read().entries)

    def _entry(self, step: object, doing: str) -> Entry:
        """The entry of a step; an error that names the steps there are if there is none."""
        number = check_number(step)
        listing = self._index.read()
        entry = listing.entries.get(number)
        if entry is None:
            raise CheckpointNotFoundError(f"{doing}: {there_is_none(self._place, number, listing)}")
        if isinstance(step, Step) and step.save_id not in ("", entry.step.save_id):
            raise CheckpointNotFoundError(
                f"{doing}: {entry.step.path} was saved again since this Step was listed; take the new one from "
                "steps(), latest() or watch()"
            )
        return entry

    def record(self, step: "int | Step", metrics: Mapping[str, object]) -> None:
        """Record metrics of a committed step, for example those of an evaluation. No lock is needed.

        If a metric is recorded several times, the latest value is used. In a job with several processes, process 0
        records.

        Args:
            step: The number of the step, or a `Step`.
            metrics: Names and numbers.

        Raises:
            MetadataError: A metric is not a number.
            CheckpointNotFoundError: There is no such step.
        """
        values = Metrics(metrics)
        if _leads():
            entry = self._entry(step, "record")
            self._control.record_metrics(entry.name, entry.step.save_id, values.read())

    def pin(self, step: "int | Step") -> None:
        """Keep a step until `unpin`, regardless of the run's `Keep`. No lock is needed.

        Raises:
            CheckpointNotFoundError: There is no such step.
            ConflictError: The step is being deleted; or it is abandoned or damaged, and would be replaced when it is
                saved again.
        """
        if not _leads():
            return
        entry = self._entry(step, "pin")
        if entry.step.state in ("abandoned", "damaged"):
            raise ConflictError(
                f"{entry.step.path} is {entry.step.state}, and the run replaces it when it saves that step again, so "
                "it cannot be pinned. Copy it to another place to keep it"
            )
        if entry.is_pinned:
            return
        mark = self._control.mark("pinned", entry.name, entry.step.save_id)
        try:
            self._await_deleter(entry)
        except BaseException:
            self._control.remove([mark])
            raise

    def unpin(self, step: "int | Step") -> None:
        """Remove the pin of a step, so that the run's `Keep` applies again. Has no effect if it is not pinned."""
        if not _leads():
            return
        entry = self._entry(step, "unpin")
        if entry.pinned_when_saved and not is_marked(entry.marks, "unpinned", (entry.name, entry.step.save_id)):
            self._control.mark("unpinned", entry.name, entry.step.save_id)
        self._control.remove([mark for mark in entry.marks if mark.kind == "pinned"])

    @contextmanager
    def hold(self, step: "int | Step") -> Generator[Step]:
        """A context manager that protects a step from deletion, by this program or any other.

        It writes a small record into the run's directory. The record is removed when the block ends, and becomes
        invalid if the program dies.

        Args:
            step: The number of the step, or a `Step`.

        Raises:
            CheckpointNotFoundError: There is no such step, or it has been deleted.
            ConflictError: The step is being deleted.
            AccessError: No permission to write to the run's directory.
        """
        entry = self._entry(step, "hold")
        hold = self._take_hold(entry)
        try:
            yield entry.step
        finally:
            hold.release()

    def _take_hold(self, entry: Entry) -> Hold:
        while True:
            hold = self._control.take_hold(entry.name)
            try:
                self._await_deleter(entry)
                if hold.confirm():
                    return hold
            except BaseException:
                hold.release()
                raise
            hold.release()

    def _await_deleter(self, entry: Entry) -> None:
        """After a hold or pin was written: wait for a deleter to see it, and make sure that the step is there."""
        until = time.monotonic() + _PATIENCE
        while (state := self._state_of(entry)) == "deleting":
            if time.monotonic() > until:
                raise ConflictError(
                    f"{entry.step.path} is being deleted, or its deletion was interrupted; choose a newer step"
                )
            time.sleep(0.1)
        if state is None:
            raise CheckpointNotFoundError(f"{entry.step.path} was deleted or replaced meanwhile; choose a newer step")

    def _state_of(self, entry: Entry) -> State | None:
        """The present state of the save of a step; None if it is not there any more."""
        if is_marked(self._control.marks(), "deleting", (entry.name, entry.step.save_id)):
            return "deleting"
        found = self._index.look(entry.name, entry.step.number)
        return found.step.state if found is not None and found.step.save_id == entry.step.save_id else None

    def watch(self, after: int | None = None, timeout: float | None = None, hold: bool = True) -> Generator[Step]:
        """Yield usable steps as they are committed, and hold each one while the body of the loop runs.

        Steps are yielded in order. A step that is saved again, after the run went back, is yielded again. A step that
        is deleted before it can be held is skipped.

        Args:
            after: Start with the first step after this number. None starts with the newest step.
            timeout: End after this many seconds without a new step. None waits indefinitely.
            hold: Whether to hold each step, which needs permission to write to the run's directory.

        >>> import numpy as np, shardkeep
        >>> with shardkeep.Run(tmp / "run") as run:
        ...     for step in (1, 2, 3):
        ...         _ = run.save(step, {"w": np.zeros(2)}).wait()
        >>> [step.number for step in shardkeep.Run(tmp / "run").watch(after=1, timeout=0)]
        [2, 3]
        """
        (hold,) = check_bools(hold=hold)
        if after is not None:
            after = check_number(after)
        seen = _Seen(after)
        pause = _LOOK_BUCKET if self._place.is_url else _LOOK_LOCAL
        last = time.monotonic()
        while True:
            listing = self._index.read()
            new = seen.new_in(listing)
            for entry in new:
                step = self._with_reasons(listing, [entry.step])[0]
                try:
                    holding = self._take_hold(entry) if hold else None
                except (CheckpointNotFoundError, ConflictError):
                    continue
                try:
                    if holding is not None or self._index.check(step) is not None:
                        yield step
                finally:
                    if holding is not None:
                        holding.release()
            now = time.monotonic()
            if new:
                last = now
                continue
            left = pause if timeout is None else min(pause, last + timeout - now)
            if left <= 0:
                return
            time.sleep(left)

    def __repr__(self) -> str:
        """Nothing is looked up for this: `steps` lists the steps."""
        known = [f"{name} {value}" for name, value in self._known() if value]
        return f"<{type(self).__name__} {': '.join([self.path, *filter(None, [', '.join(known)])])}>"

    def _repr_html_(self) -> str:
        return panel(type(self).__name__, Code(self.path), [facts(self._known())])

    def _known(self) -> list[tuple[str, str | None]]:
        """What is known about the run without looking at it."""
        keep = self._index.keep
        said = "every step" if keep is None else "what its recorded rules say" if keep == "recorded" else repr(keep)
        return [("keeps", said)]


class _Seen:
    """Which saves a watcher has seen."""

    def __init__(self, after: int | None) -> None:
        self._after = after
        self._ids: set[str] | None = None

    def new_in(self, listing: Listing) -> list[Entry]:
        """The usable entries that are new, in the order of their numbers."""
        usable = [entry for _, entry in sorted(listing.entries.items()) if entry.step.is_usable]
        if self._ids is None:
            old = usable[:-1] if self._after is None else [e for e in usable if e.step.number <= (self._after or 0)]
            self._ids = {entry.step.save_id for entry in old}
        new = [entry for entry in usable if entry.step.save_id not in self._ids]
        self._ids.update(entry.step.save_id for entry in new)
        return new


def check_number(step: object) -> int:
    """The number of a step. A JAX array is refused: reading it would wait for the device."""
    if isinstance(step, Step):
        return step.number
    try:
        if hasattr(step, "copy_to_host_async") or isinstance(step, bool):
            raise TypeError
        number = operator.index(cast(SupportsIndex, step))
    except TypeError:
        hint = "; keep the step in a Python int" if hasattr(step, "shape") else ""
        raise TypeError(f"the step must be an int, not {type(step).__name__}{hint}") from None
    if number < 0:
        raise ValueError(f"the step must not be negative, got {number}")
    return number


def there_is_none(place: Location, number: int, listing: Listing) -> str:
    """For messages: that a run has no such step, and which it has."""
    numbers = sorted(listing.entries)
    if not numbers:
        return f"the run {place} has no steps"
    shown = ", ".join(map(str, numbers[-8:]))
    return f"the run {place} has no step {number}; it has {'…, ' if len(numbers) > 8 else ''}{shown}"


def _leads() -> bool:
    member = membership()
    return member is None or member.process == 0


def _refuse_checkpoint(place: Location) -> None:
    """Raise an error if a path is that of a checkpoint or of a file, and so cannot be that of a run."""
    store = store_at(place, confined=False)
    if not place.is_bucket and is_file(place):
        raise NotADirectoryPathError(f"{place} is a file; a run is a directory of checkpoints, so pass a directory")
    with Control(place).explained("opening the run"):
        if store.size(MANIFEST) is None and (place.is_url or CONTROL not in store.children("")):
            return
        try:
            look(place, search=False)
        except CheckpointNotFoundError:
            return
        except IntegrityError:
            pass  # a checkpoint that is damaged
    raise PathError(
        f"{place} is a checkpoint, not a run; a run is the directory in which steps are saved, for example "
        f"{place.parent}"
    )
