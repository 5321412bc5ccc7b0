"""Deleting the steps that a `Keep` does not keep, so that no reader loses what it holds.

A deleter writes a mark, reads the holds again, and only then deletes. A reader writes its hold and then looks for the
mark. So either the deleter sees the hold or the reader sees the mark. The mark of a deleter that died is settled by
the next writer of the run.
"""

import datetime
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from shardkeep.catalog import delete
from shardkeep.errors import CheckpointNotFoundError, ConflictError, IntegrityError, NewerFormatError, ShardkeepError
from shardkeep.model.manifest import OURS
from shardkeep.runs.control import Control, Mark
from shardkeep.runs.index import Entry, Listing, RunIndex
from shardkeep.runs.keep import Keep, choose_steps
from shardkeep.runs.steps import Step

log = logging.getLogger("shardkeep")

EVERY_STEP = "every step is kept"  # why a step stays in a run that deletes none
_ENOUGH = 3  # steps without the metric before the user is told

Outcome = Literal["deleted", "held", "pinned"]


def explain(
    listing: Listing, keep: Keep | None, now: datetime.datetime, resumed_from: int | None = None
) -> dict[int, tuple[str, ...]]:
    """Why each usable step stays, for a run whose steps are kept by `keep`; None keeps every step."""
    why = {} if keep is None else choose_steps(keep, listing.steps, now)
    usable = [entry for entry in listing.entries.values() if entry.step.is_usable]
    newest = max((entry.step.number for entry in usable), default=None)
    for entry in usable:
        number = entry.step.number
        more = [
            reason
            for reason, holds in (
                (EVERY_STEP, keep is None),
                ("pinned", entry.is_pinned),
                ("resumed from", number == resumed_from == newest),
                ("not saved by a Run", not entry.by_run),
            )
            if holds
        ]
        if more:
            why[number] = (*why.get(number, ()), *more)
    return why


def with_reasons(steps: Sequence[Step], why: dict[int, tuple[str, ...]]) -> list[Step]:
    """The steps, each with why it is kept."""
    return [replace(step, kept=why.get(step.number, ()) if step.is_usable else ()) for step in steps]


def delete_step(control: Control, entry: Entry) -> Outcome:
    """Delete one step of a run, unless it is held or pinned. Only the writer of the run calls this."""
    mark = control.mark("deleting", entry.name, entry.step.save_id)
    protection = control.protection(*mark.subject)
    if protection is not None:
        control.remove([mark])
        return protection
    try:
        (_delete if entry.step.source == OURS else delete)(entry.step.path)
    except (CheckpointNotFoundError, ConflictError, IntegrityError, NewerFormatError):  # nothing was deleted
        control.remove([mark])
        raise
    control.remove([*entry.marks, *(r for r in control.metric_records() if r.subject == mark.subject), mark])
    return "deleted"


def _delete(path: str) -> None:
    try:
        delete(path)
    except CheckpointNotFoundError:
        pass  # it is gone already


class Retention:
    """Deletes what is not kept, and resolves what dead writers left. Only the writer of the run uses it.

    Args:
        control: The control directory of the run.
        index: Lists its steps, and knows which of them stay.
    """

    def __init__(self, control: Control, index: RunIndex) -> None:
        self._control, self._index = control, index
        self._reported: set[tuple[str, str]] = set()  # what was logged once

    def settle(self, listing: Listing) -> Listing:
        """Settle interrupted deletions: a step that is still complete stays, others are deleted completely."""
        dying = [entry for entry in listing.entries.values() if any(mark.kind == "deleting" for mark in entry.marks)]
        if not dying:
            return listing
        for entry in dying:
            if self._index.check(entry.step) is None:  # files are missing: its deletion has begun
                self._try(entry, partial(self._complete, entry))
            self._control.remove([mark for mark in entry.marks if mark.kind == "deleting"])
        return self._index.read()

    def remove_remains(self) -> None:
        """Remove saves that were never committed, marks and metrics of steps that are gone, and holds of the dead."""
        listing = self._index.read()
        for name in listing.unfinished:
            try:
                _delete(str(self._control.place / name))
            except ConflictError:
                pass  # a save to it is running
            except (ShardkeepError, OSError) as error:
                self._report(name, str(error), logging.WARNING)
        if listing.unfinished:
            listing = self._index.read()  # their marks are void now
        self._control.remove(listing.void)
        self._control.remove_dead_holds()

    def run(
        self, resumed_from: int | None, in_use: Collection[int], now: datetime.datetime
    ) -> tuple[Listing, list[int]]:
        """Delete what is not kept. Returns what is left, and what was deleted."""
        listing = self.settle(self._index.read())
        why = explain(listing, listing.keep, now, resumed_from)
        self._warn_unseen(listing)
        deleted: list[int] = []
        for number, entry in sorted(listing.entries.items()):
            if entry.step.is_usable and number not in why and number not in in_use and entry.step.save_id:
                self._try(entry, partial(self._delete_step, entry, deleted))
        left = {number: entry for number, entry in listing.entries.items() if number not in deleted}
        return replace(listing, entries=left, is_indexed=listing.is_indexed and not deleted), deleted

    def _complete(self, entry: Entry) -> None:
        """Complete a deletion that was interrupted."""
        _delete(entry.step.path)
        self._index.deleted.add(entry.name)

    def _delete_step(self, entry: Entry, deleted: list[int]) -> None:
        outcome = delete_step(self._control, entry)
        if outcome == "deleted":
            deleted.append(entry.step.number)
            self._index.deleted.add(entry.name)
        else:
            self._report(entry.name, f"it is {outcome}", logging.INFO)

    def _try(self, entry: Entry, action: Callable[[], None]) -> None:
        """Try to delete a step, and report why it could not be. One whose manifest is damaged is marked and stays."""
        try:
            action()
        except IntegrityError as error:
            if not is_marked(entry.marks, "damaged", (entry.name, entry.step.save_id)):
                self._control.mark("damaged", entry.name, entry.step.save_id, str(error))
            self._report(entry.name, str(error), logging.WARNING)
        except (ShardkeepError, OSError) as error:
            self._report(entry.name, str(error), logging.WARNING)

    def _report(self, name: str, why: str, level: int) -> None:
        if (name, why) not in self._reported:
            self._reported.add((name, why))
            log.log(level, "%s was not deleted: %s", self._control.place / name, why)

    def _warn_unseen(self, listing: Listing) -> None:
        """Say that a metric was never seen: then every step awaits it, and none is deleted."""
        keep = listing.keep
        if keep is None or keep.best is None or keep.metric is None:
            return
        own = [entry.step for entry in listing.entries.values() if entry.by_run and entry.step.is_usable]
        if len(own) < max(_ENOUGH, keep.best + 1) or any(keep.metric in step.metrics for step in own):
            return
        seen = sorted({name for step in own for name in step.metrics})
        if ("", keep.metric) not in self._reported:
            self._reported.add(("", keep.metric))
            log.warning(
                "%s: none of the %d steps has the metric %r, which Keep(best=%d) needs, so no step is deleted. Pass it "
                "to run.step(metrics=...) or run.record(). The metrics that were recorded are: %s",
                self._control.place,
                len(own),
                keep.metric,
                keep.best,
                ", ".join(map(repr, seen)) or "none",
            )


def is_marked(marks: Sequence[Mark], kind: str, subject: tuple[str, str]) -> bool:
    """Whether a save of a step has a mark of this kind."""
    return any(mark.kind == kind and mark.subject == subject for mark in marks)
