"""The checkpoints at a place and in a directory: which kind they are, whether complete, and which is the newest."""

import datetime
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardkeep.errors import CheckpointNotFoundError, IncompleteCheckpointError, IntegrityError, NewerFormatError
from shardkeep.foreign.registry import checkpoint_files, is_recognized, is_recognized_below
from shardkeep.model.manifest import MANIFEST, Manifest
from shardkeep.runtime.crew import run_tasks
from shardkeep.stores.base import CONTROL, Store
from shardkeep.stores.location import Location, exists, is_directory, store_at
from shardkeep.targets.base import ReadTarget
from shardkeep.targets.damage import find_damage
from shardkeep.targets.directory import Directory
from shardkeep.targets.exchange import INDEX_SUFFIX, SUFFIX, Exchange, exchange_at, exchange_bases, exchange_in
from shardkeep.targets.files import ForeignFile, file_at, file_in
from shardkeep.targets.ordering import Saved, newest_first
from shardkeep.targets.steady import TRIES, Attempt

log = logging.getLogger("shardkeep")

_MOST_KEPT = 12  # manifests that are kept in memory while the newest checkpoint is searched for

T = TypeVar("T")


def find(place: Location) -> Directory | Exchange | ForeignFile:
    """What is at a place: a checkpoint directory, exchange files, or another program's file."""
    store = store_at(place)
    inside = store.children("")
    if inside or (not place.is_url and is_directory(place)):
        return _find_inside(place, store, inside)
    if place.is_bucket:  # an empty one
        return Directory(store)
    if place.name == MANIFEST and exists(place):
        return Directory(store_at(place.parent))
    endings = (SUFFIX, INDEX_SUFFIX)
    if place.name.endswith(endings) or any(exists(place.with_name(place.name + ending)) for ending in endings):
        return exchange_at(place)
    return file_at(place) if exists(place) else Directory(store)


def _find_inside(place: Location, store: Store, inside: Sequence[str]) -> Directory | Exchange | ForeignFile:
    """What is in a directory that has these names in it."""
    directory = Directory(store)
    if CONTROL in inside or (MANIFEST in inside and directory.foreign_document(inside) is None):
        return directory
    return exchange_in(place, inside) or (None if is_recognized(inside) else file_in(place, store, inside)) or directory


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was found.

    `described`: whether the `.zarray` files of other programs' arrays were read to find out what it holds.
    """

    target: ReadTarget
    manifest: Manifest
    described: bool = True

    def damage(self) -> str | None:
        """What the sizes of its files show to be damaged."""
        return find_damage(self.target.store, self.manifest.trees.values(), self.described)


def look(place: Location, search: bool = True) -> FoundCheckpoint:
    """The checkpoint at a place; an error if there is none.

    In a bucket, our manifest is asked for by name before anything is listed.

    Args:
        place: The directory or file.
        search: Whether a directory without any document is searched for arrays of other programs.
    """
    if place.is_url and not place.name.endswith((SUFFIX, INDEX_SUFFIX, MANIFEST)):
        directory = Directory(store_at(place))
        manifest = directory.read_manifest()
        if manifest is not None and manifest.trees:
            return FoundCheckpoint(directory, manifest, described=False)
    target = find(place)
    if isinstance(target, Directory) and not search:
        return _look_inside(target, target.store.children(""))
    return FoundCheckpoint(target, target.read())


def _look_at_documents(place: Location) -> FoundCheckpoint:
    return look(place, search=False)


def _look_inside(target: ReadTarget, inside: Sequence[str]) -> FoundCheckpoint:
    """The checkpoint of a target, if one of its documents is among the names in its directory."""
    documents = {*target.documents, *target.companions}
    is_bare = isinstance(target, Directory) and documents.isdisjoint(inside) and not is_recognized(inside)
    if is_bare and not is_recognized_below(target.store, inside):
        raise CheckpointNotFoundError(f"no checkpoint at {target.where}")
    return FoundCheckpoint(target, target.read())


def find_complete(looking: Callable[[], FoundCheckpoint]) -> tuple[FoundCheckpoint, str | None]:
    """A checkpoint, and what the sizes of its files show to be damaged.

    If they show damage, the checkpoint is looked at again: a writer may have replaced it meanwhile.
    """
    found, damage = looking(), None
    for _ in range(TRIES):
        with Attempt(found.manifest, lambda: looking().manifest) as attempt:
            damage = found.damage()
            attempt.sure = damage is None
        if not attempt.replaced:
            break
        found = looking()
    return found, damage


class TooManyError(Exception):
    """More manifests would have to be read than was allowed."""


def find_newest(place: Location, warn: Callable[..., None], most: float = math.inf) -> Location | None:
    """The newest complete checkpoint in a directory, or the place itself; None if there is none.

    Args:
        place: The directory.
        warn: Called, like a method of a logger, for what is damaged or unreadable and so skipped.
        most: How many of the names in the directory may be looked at before this raises `TooManyError`.
    """
    search = _Search(place, warn, most)
    directories, files = search.store.entries()
    itself = search.look_at_root([*directories, *files])
    if itself is not None and not itself.manifest.trees:  # of a later version: which names are its own is unknown
        return place
    # Data files of a checkpoint directory belong to it. Exchange files may be one checkpoint of several.
    owner = itself if itself is not None and isinstance(itself.target, Directory) else None
    taken = (
        {file.name.partition("/")[0] for tree in owner.manifest.trees.values() for file in tree.files} if owner else ()
    )
    names = {name: name.removesuffix(SUFFIX) for name in directories if name not in taken and not name.startswith(".")}
    free = [name for name in files if name not in taken]
    exchange = {base + SUFFIX: base for base in exchange_bases(free)}
    for name in newest_first(names | exchange, search.read):
        if search.is_complete(name):
            hugging_face = itself is not None and owner is None and name == f"model{SUFFIX}"
            return place if hugging_face else search.locate(name)
    one_file = itself is not None and isinstance(itself.target, ForeignFile)
    alone = owner is not None or one_file or not (directories or files)
    if itself is not None and alone:
        return place if search.is_complete("") else None
    search.among_files = True
    whole = {name: name.partition(".")[0] for name in checkpoint_files(free)}
    return next((search.locate(n) for n in newest_first(names | whole, search.read) if search.is_complete(n)), None)


class _Search:
    """Looks at the checkpoints in one directory."""

    def __init__(self, place: Location, warn: Callable[..., None], most: float) -> None:
        self._place, self._warn, self._most = place, warn, most
        self.store = store_at(place)
        self._found: dict[str, FoundCheckpoint] = {}
        self._skipped: set[Location] = set()  # what the user was told about
        # Files of other programs count only where nothing else is found: they may be notes beside checkpoints.
        self.among_files = False

    def locate(self, name: str) -> Location:
        return self._place / name if name else self._place

    def look_at_root(self, inside: Sequence[str]) -> FoundCheckpoint | None:
        """The directory itself if it is a checkpoint, or what is at a path that is not a directory."""
        if inside:
            self._keep("", lambda place: _look_inside(_find_inside(place, self.store, inside), inside))
        else:
            self._keep("", _look_at_documents)
        return self._found.get("")

    def read(self, names: Sequence[str]) -> dict[str, Saved | None]:
        """What checkpoints say about themselves; None for what is not one. In a bucket, requests run concurrently."""
        self._most -= len(names)
        if self._most < 0:
            raise TooManyError
        told: dict[str, Saved | None] = {}

        def read(name: str) -> None:
            self._keep(name, _look_at_documents)
            found = self._found.get(name)
            if found is not None and isinstance(found.target, ForeignFile) is not self.among_files:
                found = None
            told[name] = None if found is None else _saved(found)
            if len(names) > _MOST_KEPT:
                self._found.pop(name, None)

        if self.store.traits.costly_requests:
            run_tasks([lambda name=name: read(name) for name in names], self.store.traits.concurrency)
        else:
            for name in names:
                read(name)
        return told

    def is_complete(self, name: str) -> bool:
        """Whether all files of a checkpoint are there with their sizes; warns if not."""

        def again(place: Location) -> FoundCheckpoint:
            return self._found.pop(name, None) or _look_at_documents(place)

        checked = self._try(name, lambda place: find_complete(lambda: again(place)))
        if checked is not None and checked[1] is not None:
            self._warn("skipping %s, which is damaged: %s", self.locate(name), checked[1])
        return checked is not None and checked[1] is None

    def _keep(self, name: str, looking: Callable[[Location], FoundCheckpoint]) -> None:
        try:
            found = self._try(name, looking)
        except NewerFormatError:  # it counts: `load` says what to do
            found = FoundCheckpoint(Directory(store_at(self.locate(name))), Manifest(str(self.locate(name)), "", {}))
        if found is not None:
            self._found[name] = found

    def _try(self, name: str, action: Callable[[Location], T]) -> T | None:
        """What an action gives for a checkpoint; None, and perhaps a warning, for what is not one."""
        place = self.locate(name)
        try:
            return action(place)
        except IncompleteCheckpointError:
            pass  # a save that is running, or never finished
        except (IntegrityError, PermissionError) as error:
            if place not in self._skipped:
                self._skipped.add(place)
                self._warn("skipping %s: %s", place, error)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return None


def _saved(found: FoundCheckpoint) -> Saved:
    """What a checkpoint says about itself. Where it has no time, that of its first file is taken."""
    trees = found.manifest.trees.values()
    times = [_timestamp(tree.created or tree.metadata.get("timestamp")) for tree in trees]
    known = [time for time in times if time is not None]
    if not known:
        names = [file.name for tree in trees for file in tree.files[:1]] or [*found.target.documents]
        known = [time for name in names[:1] if (time := found.target.store.modified(name)) is not None]
    return Saved(found.manifest.step, max(known)) if known else Saved(found.manifest.step)


def _timestamp(text: object) -> float | None:
    """A recorded time as a number; one without a time zone is UTC."""
    try:
        moment = datetime.datetime.fromisoformat(str(text))
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
