"""The steps of a run, listed: what is there, as the index, the manifests and the marks say.

The index is a cache of what manifests say. On a disk an entry is used if its manifest is still the same file. In a
bucket it is used as it is: whoever writes the run takes a step out of the index before the step is saved again. What is
loaded is always read from the manifest itself.
"""

import datetime
import json
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from shardkeep.errors import (
    CheckpointNotFoundError,
    ConflictError,
    IncompleteCheckpointError,
    IntegrityError,
    NewerFormatError,
)
from shardkeep.foreign.rundirs import METADATA, describe, is_described_later
from shardkeep.model.manifest import MANIFEST, OURS, Manifest
from shardkeep.model.metadata import RUN_KEY, decode_metadata, encode_metadata, without_notes
from shardkeep.runs.control import INDEX, RUN_CONTROL, UNREADABLE, Control, Mark, MetricRecord, numbers_in
from shardkeep.runs.keep import Keep
from shardkeep.runs.rules import Keeping, Rules, encode_rules, recorded_keep
from shardkeep.runs.steps import Step, StepName
from shardkeep.runtime.crew import run_tasks
from shardkeep.stores.base import CONTROL
from shardkeep.stores.location import store_at
from shardkeep.system import after_fork_in_child
from shardkeep.targets.resolve import find_complete, look

log = logging.getLogger("shardkeep")

_VERSION = 1  # of the index; another one is ignored
_UNREADABLE: Mapping[str, object] = {}  # in place of rules that cannot be read


@dataclass(frozen=True)
class Entry:
    """A step, and what retention needs to know about it beside.

    `by_run`: a Run saved it. `pinned_when_saved`: it was saved with `pin=True`. `by_others`: a Checkpointer or another
    library did, which does not write to the index. `identity`: of its manifest, on a disk.
    """

    name: str
    step: Step
    by_run: bool = False
    pinned_when_saved: bool = False
    by_others: bool = False
    identity: Any = None
    marks: tuple[Mark, ...] = ()

    @property
    def is_pinned(self) -> bool:
        """Whether it is pinned: by a mark, or since it was saved and not unpinned."""
        kinds = {mark.kind for mark in self.marks}
        return "pinned" in kinds or (self.pinned_when_saved and "unpinned" not in kinds)


@dataclass(frozen=True)
class Listing:
    """What was found in a run.

    `entries`: by number. `unfinished`: names of directories with saves that were never committed. `void`: marks and
    metrics of saves that are not there any more. `is_indexed`: whether the index says the same. `keep`: which of the
    steps stay; None for all.
    """

    entries: dict[int, Entry] = field(default_factory=dict[int, Entry])
    unfinished: tuple[str, ...] = ()
    void: tuple[Mark | MetricRecord, ...] = ()
    metrics: Mapping[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    is_indexed: bool = True
    keep: Keep | None = None

    @property
    def steps(self) -> list[Step]:
        """The steps, the oldest first."""
        return [entry.step for _, entry in sorted(self.entries.items())]

    @property
    def usable(self) -> list[Step]:
        """The usable steps, the newest first."""
        return [step for step in reversed(self.steps) if step.is_usable]


class RunIndex:
    """Lists the steps of a run.

    Args:
        control: Its control directory.
        name: How its steps are named.
        keep: Which of them stay.

    Attributes:
        keep: Which of them stay. The writer replaces "recorded" by what that means when it opens the run.
        records_rules: Whether the index is written with the rules of this program, for programs that open the run
            later. Before the run was resumed or a step was committed, those that are recorded stay as they are.
        distrusted: Names of steps that are being saved again: the index has no say about them, and is written without
            them, until the writer takes them out of this set.
        deleted: Names of steps that the writer has deleted. Some servers go on listing them as empty directories.
        lock: Held while the index is read or written.
    """

    def __init__(self, control: Control, name: StepName, keep: Keeping = None) -> None:
        self._control, self._name, self.keep = control, name, keep
        self.records_rules = False
        self._recorded: object = None  # the rules in the index that was read last
        self.distrusted: set[str] = set()
        self.deleted: set[str] = set()
        # The index is put on condition of the version that was read last, and a writer has two threads that do both.
        self.lock = threading.RLock()
        _all.add(self)

    def read(self) -> Listing:
        """What is there now. In a bucket: one delimited listing, the index, the names of marks and late metrics, and
        the manifests of steps that are not indexed."""
        store = self._control.store
        with self._control.explained("listing the steps"):
            directories, _ = store.entries()
            parsed = {name: self._name.parse(name) for name in directories if name not in self.deleted}
            names = {name: number for name, number in parsed.items() if number is not None}
            has_control = RUN_CONTROL in directories
            indexed, known_metrics, recorded = self._read_index() if has_control else ({}, {}, None)
            marks = self._control.marks() if has_control else []
            records = self._control.metric_records() if has_control else []
            entries, unfinished, looked = self._entries(names, indexed)
            metrics = self._metrics(records, entries, known_metrics)
        by_subject: dict[tuple[str, str], list[Mark]] = {}
        for mark in marks:
            by_subject.setdefault(mark.subject, []).append(mark)
        found = {
            names[name]: self._marked(entry, by_subject.get((name, entry.step.save_id), []), records, metrics)
            for name, entry in entries.items()
        }
        void = [one for one in (*marks, *records) if self._is_void(one, entries, unfinished)]
        self._recorded = recorded
        keep = recorded_keep(recorded) if isinstance(self.keep, str) else self.keep
        same = not looked and (not self.records_rules or recorded == self._rules())
        same = same and indexed.keys() == entries.keys() and known_metrics.keys() == metrics.keys()
        return Listing(found, tuple(unfinished), tuple(void), metrics, same, keep)

    def _read_index(self) -> tuple[dict[str, Entry], dict[str, dict[str, float]], object]:
        """What the index says: steps and metrics, none if it cannot be used, and rules; None if it has no rules."""
        recorded: object = None
        try:
            with self.lock:
                content = self._control.store.read(INDEX)
            recorded = _UNREADABLE
            found = json.loads(content)
            recorded = found.get("rules")
            if found["version"] != _VERSION:
                return {}, {}, recorded
            entries = {name: self._decoded(name, one) for name, one in found["steps"].items()}
            metrics = {file: numbers_in(decode_metadata(values)) for file, values in found["metrics"].items()}
        except (FileNotFoundError, KeyError, TypeError, AttributeError, *UNREADABLE):
            return {}, {}, recorded
        return entries, metrics, recorded

    def _rules(self) -> object:
        """The rules to record."""
        if self.records_rules and not isinstance(self.keep, str):
            return encode_rules(Rules(self._name.pattern, self.keep))
        return self._recorded

    def _decoded(self, name: str, one: Mapping[str, Any]) -> Entry:
        number = self._name.parse(name)
        if number is None:
            raise ValueError(name)
        step = Step(
            number,
            str(self._control.place / name),
            numbers_in(decode_metadata(one["metrics"])),
            cast(dict[str, Any], decode_metadata(one["metadata"])),
            _moment(one["time"]),
            int(one["nbytes"]),
            int(one["stored_bytes"]),
            save_id=str(one["save_id"]),
        )
        identity = one["identity"]
        identity = tuple(cast("list[Any]", identity)) if isinstance(identity, list) else None
        return Entry(name, step, bool(one["by_run"]), bool(one["pinned"]), identity=identity)

    def write(self, listing: Listing) -> None:
        """Replace the index. Only the writer of the run does so. Not being able to is no error: it is a cache."""
        known = listing.entries.values()
        readable = [e for e in known if e.step.save_id and not e.by_others and e.name not in self.distrusted]
        rules = self._rules()
        document = {
            "version": _VERSION,
            **({} if rules is None else {"rules": rules}),
            "steps": {entry.name: _encoded(entry) for entry in readable},
            "metrics": {file: encode_metadata(values) for file, values in listing.metrics.items()},
        }
        try:
            with self.lock:
                self._control.store.replace(INDEX, json.dumps(document).encode())
        except ConflictError:
            raise  # another program has taken over the run
        except OSError as error:
            log.warning(
                "the index of %s could not be written, which makes listing slower: %s", self._control.place, error
            )

    def _entries(
        self, names: Mapping[str, int], indexed: Mapping[str, Entry]
    ) -> tuple[dict[str, Entry], list[str], bool]:
        """An entry for each step, from the index where that is valid; unfinished saves; whether any was looked at."""
        store = self._control.store
        found: dict[str, Entry] = {}
        unfinished: list[str] = []
        unknown: list[str] = []
        for name in names:
            entry = indexed.get(name)
            costly = store.traits.costly_requests
            trusted = entry is not None and name not in self.distrusted
            if trusted and entry and (costly or entry.identity == store.identity(f"{name}/{MANIFEST}")):
                found[name] = entry
            else:
                unknown.append(name)

        def read(name: str) -> None:
            entry = self.look(name, names[name])
            if entry is None:
                return
            if entry.step.state == "damaged" and not entry.step.reason:
                unfinished.append(name)
            else:
                found[name] = entry

        run_tasks([partial(read, name) for name in unknown], store.traits.concurrency)
        return found, unfinished, bool(unknown)

    def look(self, name: str, number: int) -> Entry | None:
        """A step as its manifest says; None if there is none. One that is damaged without a reason is unfinished."""
        place = self._control.place / name
        identity = None if place.is_url else self._control.store.identity(f"{name}/{MANIFEST}")
        step = Step(number, str(place))
        try:
            if place.is_url and not store_at(place).children(""):
                return None  # an empty directory, which some servers have
            manifest = look(place, search=False).manifest
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            return self._without_manifest(name, step)
        except NewerFormatError:
            return Entry(name, step)  # loading it says what to do
        except IntegrityError as error:
            return Entry(name, replace(step, state="damaged", reason=str(error)))
        entry = replace(entry_of(name, step, manifest), identity=identity)
        if entry.by_run:
            return entry
        return self._by_others(entry) if manifest.source == OURS else replace(entry, by_others=True)

    def _by_others(self, entry: Entry) -> Entry | None:
        """A checkpoint that no Run saved. One of a Checkpointer is a step once its `metadata.json` is written."""
        described = self._control.store.size(f"{entry.name}/{METADATA}") is not None
        if not described:
            return None if is_described_later(entry.step.metadata) else entry
        found = describe(self._control.store, self._control.place, entry.name)
        if found is not None and found.being_deleted:
            entry = replace(entry, step=replace(entry.step, state="deleting"))
        return replace(entry, by_others=True)

    def _without_manifest(self, name: str, step: Step) -> Entry | None:
        """A directory without a manifest: a save that was never committed, one that lost its manifest, or no step."""
        store = store_at(self._control.place / name)
        inside = store.children("")
        if CONTROL not in inside:
            return None
        if store.children(store.saves):
            return Entry(name, replace(step, state="damaged"))
        # Between the two looks, a save may have been committed, or a delete completed.
        again = store.children("")
        if MANIFEST in again:
            with suppress(CheckpointNotFoundError, IntegrityError, NewerFormatError):
                look(self._control.place / name, search=False)
                return self.look(name, step.number)
        if not {CONTROL, MANIFEST}.issuperset(inside) and not {CONTROL, MANIFEST}.issuperset(again):
            return Entry(name, replace(step, state="damaged", reason=f"{step.path}: its manifest is missing"))
        return None

    def _is_void(self, one: Mark | MetricRecord, entries: Mapping[str, Entry], unfinished: Sequence[str]) -> bool:
        """Whether a mark or a record is about a save that is gone. Where that cannot be known, it is not."""
        if self._name.parse(one.step) is None or one.step in unfinished:
            return False
        entry = entries.get(one.step)
        return entry is None or (entry.step.save_id not in ("", one.save_id))

    def _metrics(
        self, records: Sequence[MetricRecord], entries: Mapping[str, Entry], known: Mapping[str, dict[str, float]]
    ) -> dict[str, dict[str, float]]:
        """The contents of the records that are about steps that are there."""
        wanted = [r for r in records if r.step in entries and entries[r.step].step.save_id == r.save_id]
        found = {record.file: known[record.file] for record in wanted if record.file in known}

        def read(record: MetricRecord) -> None:
            found[record.file] = self._control.read_metrics(record)

        run_tasks([partial(read, r) for r in wanted if r.file not in known], self._control.store.traits.concurrency)
        return found

    def _marked(
        self,
        entry: Entry,
        marks: Sequence[Mark],
        records: Sequence[MetricRecord],
        metrics: Mapping[str, Mapping[str, float]],
    ) -> Entry:
        """An entry with its late metrics, its marks and the state that they give it."""
        step = entry.step
        late = [metrics[r.file] for r in records if r.subject == (entry.name, step.save_id) and r.file in metrics]
        if late:
            step = replace(step, metrics={k: v for some in (step.metrics, *late) for k, v in some.items()})
        by_kind = {mark.kind: mark for mark in marks}
        for state in ("deleting", "damaged", "abandoned"):
            if state in by_kind:
                reason = self._control.reason(by_kind[state]) if state == "damaged" else ""
                step = replace(step, state=state, reason=reason or step.reason)
                break
        return replace(entry, step=step, marks=tuple(marks))

    def check(self, step: Step) -> Step | None:
        """A usable step as its manifest says now; None if it is gone or its files are not complete, with a warning."""
        name = self._name.of(step.number)
        try:
            found, damage = find_complete(lambda: look(self._control.place / name, search=False))
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            return None
        except NewerFormatError:
            return step
        except IntegrityError as error:
            log.warning("skipping %s, which is damaged: %s", step.path, error)
            return None
        if damage is not None:
            log.warning("skipping %s, which is damaged: %s", step.path, damage)
            return None
        now = entry_of(name, step, found.manifest).step
        if now.save_id == step.save_id:
            return step
        return replace(now, kept=step.kept)  # saved again meanwhile


def entry_of(name: str, step: Step, manifest: Manifest) -> Entry:
    """What a manifest says about a step."""
    tree = manifest.trees.get("") or next(iter(manifest.trees.values()))
    noted = tree.metadata.get(RUN_KEY)
    by_run = isinstance(noted, dict)
    own = cast(dict[str, Any], noted) if isinstance(noted, dict) else {}
    step = replace(
        step,
        metrics=numbers_in(own.get("metrics") if tree.source == OURS else tree.metadata.get("metrics")),
        metadata=without_notes(tree.metadata),
        time=_moment(tree.created),
        nbytes=manifest.nbytes,
        stored_bytes=manifest.stored_bytes,
        save_id=tree.save_id,
        source=tree.source,
    )
    return Entry(name, step, by_run, bool(own.get("pinned")))


def _encoded(entry: Entry) -> dict[str, Any]:
    step = entry.step
    return {
        "save_id": step.save_id,
        "metrics": encode_metadata(dict(step.metrics)),
        "metadata": encode_metadata(dict(step.metadata)),
        "time": "" if step.time is None else step.time.isoformat(),
        "nbytes": step.nbytes,
        "stored_bytes": step.stored_bytes,
        "by_run": entry.by_run,
        "pinned": entry.pinned_when_saved,
        "identity": list(cast("tuple[Any, ...]", entry.identity)) if isinstance(entry.identity, tuple) else None,
    }


def _moment(text: Any) -> datetime.datetime | None:
    with suppress(ValueError, TypeError):
        moment = datetime.datetime.fromisoformat(text)
        return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    return None


def _renew_locks() -> None:
    """In a forked child: the thread that held a lock is not there."""
    for index in tuple(_all):
        index.lock = threading.RLock()


_all: weakref.WeakSet[RunIndex] = weakref.WeakSet()
after_fork_in_child(_renew_locks)
