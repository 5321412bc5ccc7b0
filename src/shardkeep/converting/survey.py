"""The checkpoints at and below a path, complete or not. Reads their manifests and lists their files, no more."""

import datetime
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardkeep.catalog import find
from shardkeep.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    IntegrityError,
    NewerFormatError,
    ShardkeepError,
)
from shardkeep.foreign.registry import checkpoint_files, is_recognized, is_recognized_below
from shardkeep.layouts.zarr import ZARRAY
from shardkeep.model.manifest import MANIFEST, Manifest
from shardkeep.stores.base import CONTROL, Store
from shardkeep.stores.local.store import LocalStore
from shardkeep.stores.location import Location, location, store_at
from shardkeep.targets.base import Target
from shardkeep.targets.damage import find_damage
from shardkeep.targets.exchange import SUFFIX, Exchange, exchange_bases
from shardkeep.targets.files import ForeignFile
from shardkeep.targets.running import explain_unfinished, recorded_names, unfinished_saves

CheckpointState = Literal["complete", "saving", "deleting", "unfinished", "damaged", "newer", "unreadable", "unindexed"]

_DOUBTFUL = ("unfinished", "damaged")  # what a checkpoint may look like while it is being saved or deleted
_PAUSES = (0.02, 0.1, 0.3)  # seconds: a save is between two of its first steps, or of its last, for moments
_DEEPEST = 64  # levels of directories: a link may lead back up


@dataclass(frozen=True)
class SurveyEntry:
    """A checkpoint, or what is left of one. `path` is what other commands take, `name` is relative to the survey."""

    path: str
    name: str
    state: CheckpointState
    kind: str  # directory, exchange, safetensors (another program's), or the name of a foreign reader
    target: Target | ForeignFile | None = None
    manifest: Manifest | None = None
    problem: str | None = None
    absent: bool = False  # it looked like a checkpoint, but is not one

    @property
    def store(self) -> Store | None:
        return None if self.target is None else self.target.store

    @property
    def size(self) -> int:
        """Bytes in its files; for an unfinished one, in the files that its saves recorded."""
        if self.manifest is not None:
            return self.manifest.stored_bytes
        store = self.store
        if store is None or self.state not in ("unfinished", "saving", "deleting"):
            return 0
        names = {name for save in store.children(store.saves) for name in recorded_names(store, save)}
        return sum(size or 0 for size in store.sizes(names).values())

    @property
    def created(self) -> datetime.datetime | None:
        """When it was saved: the recorded time, or the modification time of a file."""
        if self.manifest is None or self.target is None:
            return None
        trees = self.manifest.trees.values()
        recorded = [moment_of(tree.created or tree.metadata.get("timestamp")) for tree in trees]
        known = [moment for moment in recorded if moment is not None]
        if known:
            return max(known)
        return _changed(self.target.store, [f.name for tree in trees for f in tree.files[:1]])


def _changed(store: Store, names: list[str]) -> datetime.datetime | None:
    if not isinstance(store, LocalStore) or not names:
        return None
    try:
        return datetime.datetime.fromtimestamp(os.stat(store.locate(names[0])).st_mtime, datetime.UTC)
    except OSError:
        return None


def survey(path: str, without: Collection[str] = ()) -> list[SurveyEntry]:
    """Every checkpoint at and below a path, sorted by name.

    Args:
        path: Where to look.
        without: Names of directories at the path that are left out.

    Raises:
        CheckpointNotFoundError: The path does not exist.
    """
    where = location(path)
    store = store_at(where)
    if not store.children(""):
        return _survey_one(where, store)
    walk = _Walk(without)
    found = list(walk.visit(where, "", 0, frozenset()))
    if not found and walk.has_arrays:
        found = [look(where, ".", unindexed=True)]
    return sorted(look_again(found), key=lambda f: natural(f.name))


def look_again(found: Sequence[SurveyEntry]) -> list[SurveyEntry]:
    """What is found at second sight: without what was deleted meanwhile or has become complete.

    A save that has made its directory and not yet its record, or a delete that has just removed its own, looks like one
    that died. One that did looks the same later.
    """
    seen = list(found)
    for pause in _PAUSES:
        if not any(one.state in _DOUBTFUL for one in seen):
            break
        time.sleep(pause)
        looks = [look(location(one.path), one.name) if one.state in _DOUBTFUL else one for one in seen]
        seen = [one for one in looks if not one.absent]
    return seen


def _survey_one(where: Location, store: Store) -> list[SurveyEntry]:
    """The checkpoint at a path that is not a directory with files: a file, the stem of several files, or nothing."""
    target = find(where)
    if isinstance(target, Exchange):
        where = where.with_name(target.single)
    elif not isinstance(target, ForeignFile):
        if isinstance(store, LocalStore) and store.identity("") is None:
            raise CheckpointNotFoundError(f"{where} does not exist")
        return []
    found = look(where, where.name)
    if found.state == "unreadable":
        raise CheckpointNotFoundError(found.problem or "")
    return look_again([found])


@dataclass
class _Walk:
    """Walks a directory. `has_arrays`: it came across zarr arrays that belong to no checkpoint found so far.

    `without`: names at the top that are left out.
    """

    without: Collection[str] = ()
    has_arrays: bool = False

    def visit(self, where: Location, name: str, depth: int, above: frozenset[object]) -> Iterator[SurveyEntry]:
        store = store_at(where)
        try:
            inside = store.children("")
        except OSError as error:
            yield SurveyEntry(str(where), name, "unreadable", "directory", problem=str(error))
            return
        identity = store.identity("")  # None in a bucket, which has no links that could lead back up
        if depth > _DEEPEST or (identity is not None and identity in above):
            return
        if ZARRAY in inside:
            self.has_arrays = True
            return
        taken = set(self.without) if depth == 0 else set[str]()
        ours = not {MANIFEST, CONTROL}.isdisjoint(inside)
        if ours or is_recognized(inside) or is_recognized_below(store, inside):
            found = look(where, name or ".")
            if not found.absent:
                yield found
                if found.manifest is None:
                    return
            trees = found.manifest.trees.values() if found.manifest else ()
            taken |= {name.partition("/")[0] for tree in trees for name in tree.names}
        yield from _exchange_files(where, name, [n for n in inside if n not in taken])
        for file in _files_of_others(store, [n for n in inside if n not in taken]):
            yield look(where / file, f"{name}/{file}" if name else file)
        yield from self._below(where, name, [n for n in inside if n not in taken], depth, above | {identity})

    def _below(
        self, where: Location, name: str, inside: list[str], depth: int, above: frozenset[object]
    ) -> Iterator[SurveyEntry]:
        """Walk the subdirectories. Arrays without an index belong to the topmost directory that has nothing else."""
        any_found = False
        bare: list[str] = []
        before, self.has_arrays = self.has_arrays, False
        for child in inside:
            if child.startswith("."):
                continue
            for found in self.visit(where / child, f"{name}/{child}" if name else child, depth + 1, above):
                any_found = True
                yield found
            if self.has_arrays:
                bare.append(child)
                self.has_arrays = False
        if any_found:
            for child in bare:
                yield look(where / child, f"{name}/{child}" if name else child, unindexed=True)
            self.has_arrays = before
        else:
            self.has_arrays = before or bool(bare)


def _files_of_others(store: Store, inside: list[str]) -> list[str]:
    """The files that are other programs' checkpoints. Directories can have such names too."""
    named = checkpoint_files(inside)
    files = set(store.entries()[1]) if named else set[str]()
    return [name for name in named if name in files]


def _exchange_files(where: Location, name: str, inside: list[str]) -> Iterator[SurveyEntry]:
    """Safetensors files, shards of one checkpoint together, and saves of such files that left only control files."""
    control = f"{SUFFIX}.shardkeep"
    left = [child[1 : -len(control)] for child in inside if child.startswith(".") and child.endswith(control)]
    for base in dict.fromkeys([*left, *exchange_bases(inside)]):
        file = base + SUFFIX
        found = look(where / file, f"{name}/{file}" if name else file)
        if not found.absent:
            yield found


def look(where: Location, name: str, unindexed: bool = False) -> SurveyEntry:
    """The checkpoint at one place. A problem with it is a state, not an error."""
    target: Target | ForeignFile | None = None
    manifest: Manifest | None = None
    kind = "exchange" if where.name.endswith(SUFFIX) else "directory"
    try:
        target = find(where)
        manifest = target.read()
        if all(tree.format == "foreign" for tree in manifest.trees.values()):
            kind = manifest.source
        _check_files(target.store, manifest)
    except (ShardkeepError, OSError) as error:
        absent = isinstance(error, CheckpointNotFoundError)
        state, problem = _state(error, target)
        return SurveyEntry(str(where), name, state, kind, target, manifest, problem, absent)
    return SurveyEntry(str(where), name, "unindexed" if unindexed else "complete", kind, target, manifest)


def _state(error: Exception, target: Target | ForeignFile | None) -> tuple[CheckpointState, str]:
    """The state of a checkpoint that cannot be read, and what is wrong with it."""
    if isinstance(error, IncompleteCheckpointError):
        return _unfinished(error, target)
    if isinstance(error, NewerFormatError):
        return "newer", str(error)
    return "damaged" if isinstance(error, IntegrityError) else "unreadable", str(error)


def _check_files(store: Store, manifest: Manifest) -> None:
    """`IntegrityError` unless all files are there and have their size; what is in them is for `verify`."""
    damage = find_damage(store, manifest.trees.values())
    if damage is not None:
        raise IntegrityError(damage)


def _unfinished(error: Exception, target: Target | ForeignFile | None) -> tuple[CheckpointState, str]:
    """Whether a save or a delete is still at work there. It may have begun after the error was raised."""
    saves = [] if target is None else unfinished_saves(target.store)
    if target is None or not saves or not saves[0].is_running:
        return "unfinished", str(error)
    state: CheckpointState = "deleting" if saves[0].is_delete else "saving"
    return state, explain_unfinished(target.store, target.where, saves)


def moment_of(text: object) -> datetime.datetime | None:
    """A recorded ISO timestamp, read as UTC if it names no time zone; None if it is not a timestamp."""
    try:
        moment = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sorting key that compares numbers by value: step_9 comes before step_10."""
    parts = re.split(r"([0-9]+)", text)
    return [(0, int(p), p) if p.isdigit() and p.isascii() else (1, 0, p) for p in parts if p]
