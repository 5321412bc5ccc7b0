"""Continuing a run: the newest usable step is loaded and verified, and what is damaged is skipped, loudly."""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from shardkeep.catalog import open_checkpoint
from shardkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConflictError,
    IntegrityError,
    MissingLeafError,
    PrefixError,
    RemapError,
    TemplateMismatchError,
)
from shardkeep.foreign.registry import checkpoint_files
from shardkeep.loading.load import load
from shardkeep.loading.mismatches import summarize
from shardkeep.loading.remapping import FromTemplate
from shardkeep.model.document import check_bools
from shardkeep.model.manifest import Manifest
from shardkeep.model.markup import Code, facts, line, panel, table
from shardkeep.model.metadata import RUN_KEY
from shardkeep.model.summaries import brief, cut
from shardkeep.processes.operation import join
from shardkeep.runs.contents import ITERATORS
from shardkeep.runs.control import Control
from shardkeep.runs.index import Listing, RunIndex
from shardkeep.runs.iterators import Redistribute, put_back
from shardkeep.runs.steps import Step, StepName, number_in, pattern_of
from shardkeep.runs.templates import Template
from shardkeep.runs.viewing import RunView
from shardkeep.stores.location import Location, location
from shardkeep.targets.resolve import find_complete, find_newest, look

log = logging.getLogger("shardkeep")

_LOOKS = 8  # at how many of them to look: directories may have such names and be no checkpoints
_SHOWN = 10  # skipped steps
_CHANGES = ("remap", "missing", "extra")  # the arguments of load that with init_from are for it alone
_BOOLS = ("verify", "mmap", "progress")  # the arguments of load that must be True or False
_OWN = ("path", "template", "per_process", "mapped")  # the arguments of load that resume does not take


@dataclass(frozen=True, repr=False)
class Resumed:
    """How a run was resumed. `run.resumed` returns it after a call of `run.resume`.

    Attributes:
        step: The step that the run continues from; 0 for a new run.
        path: The checkpoint that was loaded; None for a new state.
        fresh: Whether the run had no steps and starts from the beginning.
        init_from: The path of the checkpoint that a new run started from; None if there was none.
        skipped: Newer steps that are damaged or missing, each with the reason.
        iterators: The states of the data iterators, by name.
    """

    step: int
    path: str | None = None
    fresh: bool = False
    init_from: str | None = None
    skipped: tuple[tuple[int, str], ...] = ()
    iterators: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __repr__(self) -> str:
        skipped = f", skipped {', '.join(str(number) for number, _ in self.skipped[:8])}" if self.skipped else ""
        return f"<Resumed {self._summary()}{skipped}>"

    def _summary(self) -> str:
        new = f"a new run with the weights of {self.init_from}" if self.init_from else "a new run"
        return new if self.fresh else f"at step {self.step:,}"

    def _repr_html_(self) -> str:
        iterators = [f"{cut(name, 40)}={brief(state)}" for name, state in list(self.iterators.items())[:8]]
        parts = [
            facts([("loaded", None if self.path is None else Code(self.path)), ("iterators", ", ".join(iterators))])
        ]
        if self.skipped:
            rows = [[f"{number:,}", why.partition("\n")[0]] for number, why in self.skipped[:_SHOWN]]
            parts.append(table(("skipped step", "why"), rows, wraps=(1,)))
        more = len(self.skipped) - _SHOWN
        if more > 0:
            parts.append(line(f"… and {more:,} more"))
        return panel("Resumed", self._summary(), parts)


@dataclass(frozen=True)
class Candidate:
    """A step as the leader sees it."""

    number: int
    name: str
    path: str
    save_id: str
    state: str
    reason: str
    by_run: bool
    is_pinned: bool


def candidates_of(listing: Listing) -> list[list[object]]:
    """The steps of a run as values that can be sent to other processes, the newest first."""
    found: list[list[object]] = []
    for number, entry in sorted(listing.entries.items(), reverse=True):
        step = entry.step
        found.append(
            [number, entry.name, step.path, step.save_id, step.state, step.reason, entry.by_run, entry.is_pinned]
        )
    return found


class Resumption:
    """One `resume` of a run, made by all processes alike.

    Args:
        control: The control directory of the run, which the leader writes to.
        index: Lists its steps.
        template: What to load, and how to make it anew.
        iterators: The data iterators to position. None: a warning names those that the step has.
        redistribute: What to do with their states on another number of processes.
        prefix: The tree that is the state, in checkpoints that no Run saved.
    """

    def __init__(
        self,
        control: Control,
        index: RunIndex,
        template: Template,
        iterators: Mapping[str, object] | None,
        redistribute: Redistribute | None,
        prefix: str | None,
    ) -> None:
        self._control, self._index, self._template = control, index, template
        self._iterators, self._redistribute = iterators, redistribute
        self._prefix = prefix

    def resume(
        self,
        number: int | None,
        candidates: list[Candidate],
        init_from: object,
        name: StepName,
        changes: Mapping[str, object],
    ) -> tuple[object, Resumed]:
        """The state, and how it came about: from the step that was asked for, the newest one, or none.

        Args:
            number: The step that was asked for; None for the newest.
            candidates: The steps of the run, the newest first.
            init_from: See `fresh`.
            name: See `fresh`.
            changes: See `fresh`.
        """
        if number is not None:
            return self.exactly(number, candidates)
        return self.newest(candidates) if candidates else self.fresh(init_from, name, changes)

    def newest(self, candidates: list[Candidate]) -> tuple[Any, Resumed]:
        """The newest step that can be loaded. `IntegrityError` if there are steps and none can be."""
        skipped: list[tuple[int, str]] = []
        for position, one in enumerate(candidates):
            if one.state not in ("usable", "damaged"):
                continue
            found = self._try(one)
            if not isinstance(found, str):
                state, states = found
                return state, Resumed(one.number, one.path, skipped=tuple(skipped), iterators=states)
            skipped.append((one.number, found))
            following = next((later.number for later in candidates[position + 1 :] if later.state == "usable"), None)
            then = "no older step is left" if following is None else f"trying step {following} instead"
            log.warning(
                "step %d of %s cannot be resumed from; %s. The reason: %s", one.number, self._place, then, found
            )
        known = dict(skipped)
        lines = [f"  step {one.number}: {known.get(one.number) or one.reason or one.state}" for one in candidates]
        raise IntegrityError(
            f"the run {self._place} has steps, but none that can be resumed from:\n" + "\n".join(lines) + "\nIt does "
            "not start over. Go back to an abandoned step with resume(step=...), restore a step from a backup, delete "
            "the steps to start from the beginning, or choose another directory"
        )

    def _try(self, one: Candidate) -> tuple[Any, dict[str, Any]] | str:
        """The state of a step and of its iterators; or why it cannot be used. One that is found damaged is marked."""
        if one.state == "damaged":  # known before: by a mark, or because its manifest cannot be read
            return one.reason or "it is marked as damaged"
        try:
            return self.load(one)
        except IntegrityError as error:
            self._mark_damaged(one, str(error))
            return str(error)
        except CheckpointNotFoundError as error:
            if not self._is_gone(one):
                raise
            return str(error)

    @property
    def _place(self) -> Location:
        return self._control.place

    def load(self, one: Candidate) -> tuple[Any, dict[str, Any]]:
        """The state of a step, and the states of its iterators, which are put back."""
        saved = self._check_complete(one)
        try:
            state = self._state_in(one.path, None if one.by_run else self._prefix_in(one.path), {})
        except (MissingLeafError, TemplateMismatchError) as error:
            if not error.problems:  # nothing to do with the tree of the template
                raise
            raise self._other_tree(one, error) from None  # which suggests what `load` takes and `resume` does not
        if self._iterators is None and saved:
            log.warning(
                "resuming from step %d of %s: it has the positions of the data iterators %s"
                ", which resume() was not given, so their data starts again. Pass resume(iterators={%r: ...}); "
                "or iterators={} if that is meant",
                one.number,
                self._place,
                ", ".join(map(repr, saved)),
                saved[0],
            )
        return state, self._position(one, self._iterators) if self._iterators else {}

    @staticmethod
    def _check_complete(one: Candidate) -> list[str]:
        """`IntegrityError` if files of a step are missing or truncated, those of trees that are not loaded too.

        Returns, on the leader, the names of the iterators whose positions it has.
        """
        saved: list[str] = []
        with join(f"looking at {one.path}") as operation:
            if operation.leads:
                found, damage = find_complete(lambda: look(location(one.path), search=False))
                if damage is not None:
                    raise IntegrityError(f"{one.path} is damaged: {damage}")
                saved = list(_kinds_in(found.manifest))
            operation.share()
        return saved

    def _other_tree(
        self, one: Candidate, error: MissingLeafError | TemplateMismatchError
    ) -> MissingLeafError | TemplateMismatchError:
        """The error about a step that does not fit the template, with what can be done about it in a run."""
        keep = ' missing="keep" keeps the template\'s own values.' if isinstance(error, MissingLeafError) else ""
        told = type(error)(
            f"resuming from step {one.number} of {self._place}: the checkpoint {one.path} does not fit the template:\n"
            f"{summarize(error.problems)}\n"
            f"shardkeep.abstract({one.path!r}) gives a template that fits.{keep} If the model has changed, load this "
            "step with shardkeep.load(path, template=..., remap=...), whose errors suggest rules, save it as the same "
            'step of a new run, and resume that one; the guide "Loading into a model that changed" shows how'
        )
        told.problems = error.problems
        return told

    def _state_in(self, path: str, prefix: str | None, more: Mapping[str, Any]) -> Any:
        arguments = {**self._template.arguments, **more}
        if arguments.get("missing") == "keep" and self._template.make_some is not None:
            arguments["missing"] = FromTemplate(self._template.make_some)
        return load(path, prefix=prefix, template=self._template.like, **arguments)

    def _prefix_in(self, path: str) -> str | None:
        """The tree of a checkpoint that is the state: the one asked for, the one without a prefix, or the only one."""
        if self._prefix is not None:
            return self._prefix
        _, manifest = open_checkpoint(location(path))
        if "" in manifest.trees:
            return None
        if len(manifest.trees) == 1:
            return next(iter(manifest.trees))
        raise PrefixError(
            f"{path} has several trees and none without a prefix: {', '.join(map(repr, manifest.trees))}. Say which of "
            "them is the state: resume(prefix=...)"
        )

    def _position(self, one: Candidate, iterators: Mapping[str, object]) -> dict[str, Any]:
        _, manifest = open_checkpoint(location(one.path))
        kinds = _kinds_in(manifest)
        tree = manifest.trees.get(ITERATORS)
        counts = [leaf.processes for leaf in tree.leaves if leaf.processes is not None] if tree else []

        def states(per_process: Literal["own", "all"]) -> Mapping[str, object]:
            return load(one.path, prefix=ITERATORS, per_process=per_process)

        processes = counts[0] if counts else None
        what = f"resuming from step {one.number} of {self._place}"
        return put_back(iterators, kinds, processes, states, self._redistribute, what)

    def _mark_damaged(self, one: Candidate, reason: str) -> None:
        """Note durably, by one process, that a step is damaged."""
        with join(f"marking {one.path} as damaged") as operation:
            if operation.leads and one.save_id:
                self._control.mark("damaged", one.name, one.save_id, reason)
            operation.share()

    def _is_gone(self, one: Candidate) -> bool:
        """Whether a step that the index named has no manifest any more, as the leader sees it.

        The index is not believed about it from then on.
        """
        with join(f"looking for {one.path}") as operation:
            is_gone = False
            if operation.leads:
                found = self._index.look(one.name, one.number)
                is_gone = found is None or found.step.state == "damaged"
                if is_gone:
                    self._index.distrusted.add(one.name)
                    self._index.write(self._index.read())
            return operation.share(is_gone)

    def exactly(self, number: int, candidates: list[Candidate]) -> tuple[Any, Resumed]:
        """The step that was asked for. Later ones are marked as abandoned, durably, before this returns."""
        one = next((one for one in candidates if one.number == number), None)
        if one is None:
            there = ", ".join(str(one.number) for one in candidates[:8]) or "none"
            raise CheckpointNotFoundError(
                f"resume(step={number}): the run {self._place} has no such step. It has (the newest first): {there}"
            )
        later = [c for c in candidates if c.number > number and c.state == "usable"]
        for other in later:
            if other.is_pinned:
                raise ConflictError(
                    f"resume(step={number}): {other.path} is pinned, and going back would abandon it: the run replaces "
                    "it when it saves that step again. Unpin it first, or start another run with "
                    f"init_from={one.path!r}. Nothing was changed"
                )
        state, states = self.load(one)
        arguments = self._template.arguments
        is_verified = arguments.get("include") is None and arguments.get("verify", True)
        with join(f"going back to step {number} of {self._place}") as operation:
            if operation.leads:
                self._restore(one, is_verified)
                for other in later:
                    self._control.mark("abandoned", other.name, other.save_id, f"the run went back to step {number}")
            operation.share()
        return state, Resumed(number, one.path, iterators=states)

    def _restore(self, one: Candidate, is_verified: bool) -> None:
        """A step that the run goes back to is not abandoned any more, and not damaged if all of it was verified."""
        void = ("damaged", "abandoned") if is_verified else ("abandoned",)
        marks = [m for m in self._control.marks() if m.subject == (one.name, one.save_id) and m.kind in void]
        self._control.remove(marks)

    def fresh(self, init_from: object, name: StepName, changes: Mapping[str, Any]) -> tuple[Any, Resumed]:
        """A new state, or one that begins with the weights of another checkpoint.

        Args:
            init_from: The other checkpoint, or None.
            name: How the steps of the run are named.
            changes: Arguments for loading the other checkpoint, and no step of the run.
        """
        if init_from is not None:
            with join(f"looking for {init_from}") as operation:
                path = operation.share(_checkpoint_at(init_from) if operation.leads else None)
            state = self._state_in(path, self._prefix_in(path), changes)
            return state, Resumed(0, path, fresh=True, init_from=path)
        with join(f"resuming the run {self._place}") as operation:
            if operation.leads:
                _refuse_other_names(self._control, name)
            operation.share()
        if self._template.make is None:
            raise ValueError(
                f"resume: the run {self._place} has no steps yet, and the template has only shapes, so there is no "
                "state to start from. Pass a function that makes it, a tree of arrays, or init_from="
            )
        return self._template.make(), Resumed(0, fresh=True)


def _kinds_in(manifest: Manifest) -> dict[str, Any]:
    """The iterators whose states were saved with the main tree, and which of them are global."""
    tree, states = manifest.trees.get(""), manifest.trees.get(ITERATORS)
    if tree is None or states is None or states.save_id != tree.save_id:
        return {}
    noted = tree.metadata.get(RUN_KEY)
    found = cast(dict[str, Any], noted).get("iterators") if isinstance(noted, dict) else None
    return dict(cast(dict[str, Any], found)) if isinstance(found, dict) else {}


def _checkpoint_at(init_from: object) -> str:
    """The checkpoint that a path means: itself, or the newest one of a run or directory."""
    place = location(init_from, "resume(init_from=path)")
    try:
        look(place)
    except CheckpointNotFoundError:
        newest: Step | Location | None = RunView(place).open().latest()  # with the names that its own steps have
        if newest is None:
            newest = find_newest(place, log.warning)
        if newest is not None:
            return newest.path if isinstance(newest, Step) else str(newest)
        raise
    return str(place)


def _refuse_other_names(control: Control, name: StepName) -> None:
    """Raise an error if a run without steps has numbered checkpoints of another name: they were meant to be resumed."""
    with control.explained("listing the steps"):
        directories, files = control.store.entries()
    single = set(checkpoint_files(files))  # such as Flax's "checkpoint_100"
    numbered = [(number, each) for each in (*directories, *single) if (number := number_in(each)) is not None]
    for _, each in sorted(numbered, reverse=True)[:_LOOKS]:
        place = control.place / each
        try:
            look(place, search=False)
        except CheckpointNotFoundError:
            continue
        except IntegrityError:
            pass  # one that is damaged
        if each in single:
            raise CheckpointExistsError(
                f"resume: the run {control.place} has no steps yet, but it has the file {place} of another program. "
                "To start from the newest of its weights at step 0, pass init_from=. To start from scratch, choose "
                "another directory"
            )
        raise CheckpointExistsError(
            f"resume: the run {control.place} has no steps named {name.pattern!r}, but it has {place}. To continue "
            f"with these checkpoints, open the run with name={pattern_of(each)!r}. To start from "
            "their weights at step 0, pass init_from=. To start from scratch, choose another directory"
        )


def take_changes(arguments: dict[str, object], init_from: object) -> dict[str, object]:
    """Take the arguments that are about another program's state out of those for `load`.

    Raises:
        RemapError: There are rules, and no other checkpoint to apply them to.
    """
    if init_from is not None:
        return {name: arguments.pop(name) for name in _CHANGES if name in arguments}
    if arguments.get("remap") is not None:
        raise RemapError(
            "resume(remap=...) needs init_from=: rules change the checkpoint that a run begins with, and must not be "
            "applied again to the run's own steps, which have the new tree already. To continue a run whose model has "
            "changed, load its newest step with shardkeep.load(path, template=..., remap=...), save it as the same "
            "step of a new run, and resume that one"
        )
    return {}


def check_arguments(arguments: Mapping[str, object]) -> None:
    """Raise a `TypeError` for what `load` does not take or `resume` sets itself, even if nothing is loaded."""
    check_bools(**{name: arguments[name] for name in _BOOLS if name in arguments})
    known = [name for name in inspect.signature(load).parameters if name not in _OWN]
    for name in arguments:
        if name not in known:
            raise TypeError(
                f"resume() has no argument {name!r}; in addition to its own, it takes those of load: {', '.join(known)}"
            )
