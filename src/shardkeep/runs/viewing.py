"""A run as its own files describe it, for programs that do not know how it was opened: the command line."""

import datetime
import json
from contextlib import suppress
from dataclasses import replace

from shardkeep.errors import CheckpointNotFoundError
from shardkeep.foreign.orbax import MANAGER
from shardkeep.foreign.registry import is_recognized, is_recognized_below
from shardkeep.model.lazy import cached_property
from shardkeep.model.manifest import MANIFEST
from shardkeep.runs.control import INDEX, RUN_CONTROL, UNREADABLE, Control
from shardkeep.runs.index import Listing, RunIndex
from shardkeep.runs.keep import Keep
from shardkeep.runs.reading import ReadableRun, there_is_none
from shardkeep.runs.retention import EVERY_STEP, explain, with_reasons
from shardkeep.runs.rules import Rules, decode_rules
from shardkeep.runs.steps import Step, StepName, number_in, pattern_of
from shardkeep.stores.location import Location, location, store_at

_USUAL = Rules("step_{}", None)  # if nothing says otherwise
_LOOKS = 8  # at how many numbered directories to look for one that is a checkpoint


def is_run(place: Location) -> bool:
    """Whether a directory is that of a run: a `Run` has written to it."""
    control = Control(place)
    with control.explained("listing"):
        return RUN_CONTROL in control.store.entries()[0]


def has_steps_of_others(place: Location) -> bool:
    """Whether a directory is that of an Orbax `CheckpointManager`, whose checkpoints are steps as those of a run."""
    control = Control(place)
    with control.explained("listing"):
        return control.store.size(MANAGER) is not None


class RunView:
    """A run, or a directory whose checkpoints are named like the steps of one. Looking at it changes nothing.

    Args:
        place: The directory.

    Attributes:
        control: Its control directory.
        noted: What its writer noted about it; None if that is not known.
    """

    def __init__(self, place: Location) -> None:
        self.place = place
        self.control = Control(place)
        self.noted = _noted(self.control)
        self._rules = self.noted or _rules_by_names(self.control)
        self.open()  # raises what is wrong with the path

    def open(self, keep: Keep | None = None) -> ReadableRun:
        """The run, to read it, with the rules of its writer or with others."""
        return ReadableRun(str(self.place), keep=keep or self._rules.keep, name=self._rules.name)

    @property
    def keep(self) -> Keep | None:
        """Which of its steps stay, as far as it is known; None also if all do."""
        return self._rules.keep

    @cached_property
    def listing(self) -> Listing:
        """Its steps and unfinished saves, read once."""
        return RunIndex(self.control, StepName(self._rules.name)).read()

    @cached_property
    def held(self) -> set[str]:
        """The names of the steps that readers hold, read once."""
        with self.control.explained("listing the holds"):
            return self.control.held_steps()

    def steps(self) -> dict[str, Step]:
        """The steps by the names of their directories, the oldest first, each with all that keeps it."""
        why = explain(self.listing, self._rules.keep, datetime.datetime.now(datetime.UTC))
        if self.noted is None:  # whether all are kept is not known
            why = {number: tuple(one for one in some if one != EVERY_STEP) for number, some in why.items()}
        steps: dict[str, Step] = {}
        for _, entry in sorted(self.listing.entries.items()):
            (step,) = with_reasons([entry.step], why)
            steps[entry.name] = replace(step, kept=(*step.kept, "held")) if entry.name in self.held else step
        return steps

    def path_of(self, number: int) -> str:
        """The path of a step, also of one that is damaged or was never finished."""
        name = StepName(self._rules.name).of(number)
        if number not in self.listing.entries and name not in self.listing.unfinished:
            raise CheckpointNotFoundError(f"{self.place}@{number}: {there_is_none(self.place, number, self.listing)}")
        return str(self.place / name)

    def number_of(self, path: str) -> int | None:
        """The number of the step at a path; None if it is not a step of this run."""
        place = location(path)
        return StepName(self._rules.name).parse(place.name) if place.parent == self.place else None

    def protection(self, name: str) -> str | None:
        """Why nothing may be removed from a step: it is "pinned", or "held" by a reader; else None."""
        if any(entry.is_pinned for entry in self.listing.entries.values() if entry.name == name):
            return "pinned"
        return "held" if name in self.held else None


def _noted(control: Control) -> Rules | None:
    """What the index says about the run itself."""
    with control.explained("reading the index"), suppress(FileNotFoundError, AttributeError, *UNREADABLE):
        return decode_rules(json.loads(control.store.read(INDEX)).get("rules"))
    return None


def _rules_by_names(control: Control) -> Rules:
    """What the names of the checkpoints in a directory tell, if nobody noted how steps are named."""
    with control.explained("listing the steps"):
        names = control.store.entries()[0]
    numbered = sorted(((n, each) for each in names if (n := number_in(each)) is not None), reverse=True)
    if any(StepName(_USUAL.name).parse(each) is not None for _, each in numbered):
        return _USUAL
    for _, each in numbered[:_LOOKS]:
        pattern = pattern_of(each)
        inside = control.store.children(each)
        if pattern is not None and (
            MANIFEST in inside or is_recognized(inside) or is_recognized_below(store_at(control.place / each), inside)
        ):
            return Rules(StepName(pattern).pattern, None)
    return _USUAL
