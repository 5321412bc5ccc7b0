"""Finding checkpoints at and below a place, whole or not, without opening what cannot be one."""

import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardkeep.arrays import Region
from shardkeep.cli.output import moment_of, natural
from shardkeep.commit import Target, recorded_names
from shardkeep.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    IntegrityError,
    NewerFormatError,
    ShardkeepError,
)
from shardkeep.exchange import SUFFIX, Exchange, exchange_bases
from shardkeep.formats.eformer import INDEX as EFORMER_INDEX
from shardkeep.formats.zarr import ZARRAY, describe
from shardkeep.manifest import MANIFEST, Manifest
from shardkeep.opening import find
from shardkeep.scopes import Scope
from shardkeep.stores.base import Store
from shardkeep.stores.local import CONTROL, LocalStore
from shardkeep.stores.places import location, sibling, store_at

State = Literal["complete", "saving", "unfinished", "damaged", "newer", "unreadable", "unindexed"]
Kind = Literal["directory", "exchange", "eformer", "safetensors"]

_DEEPEST = 64


@dataclass(frozen=True)
class Found:
    """A checkpoint, or what is left of one. `path` is what other commands take, `name` how it was found."""

    path: str
    name: str
    state: State
    kind: Kind
    target: Target | None = None
    manifest: Manifest | None = None
    problem: str | None = None
    absent: bool = False  # a document is there, and says that nothing is committed

    @property
    def store(self) -> Store | None:
        return None if self.target is None else self.target.store

    @property
    def size(self) -> int:
        """Bytes in the files it names; of an unfinished one, in the files its saves recorded."""
        if self.manifest is not None:
            return sum({f.name: f.size for tree in self.manifest.trees.values() for f in tree.files}.values())
        store = self.store
        if store is None or self.state not in ("unfinished", "saving"):
            return 0
        names = {name for save in store.children(store.saves) for name in recorded_names(store, save)}
        return sum(size or 0 for size in store.sizes(names).values())

    @property
    def created(self) -> datetime.datetime | None:
        """When it was last saved to: as recorded, or else when its file was changed."""
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


def survey(path: str) -> list[Found]:
    """Every checkpoint at and below a path, by name."""
    where = location(path)
    store = store_at(where)
    if not store.children(""):
        return _survey_one(path, store)
    walk = _Walk()
    found = list(walk.visit(where, "", 0, frozenset()))
    if not found and walk.has_arrays:
        found = [look(where, ".", unindexed=True)]
    return sorted(found, key=lambda f: natural(f.name))


def _survey_one(path: str, store: Store) -> list[Found]:
    """A path that is no directory with something in it: a file, the start of file names, or nothing."""
    target = find(path)
    if not isinstance(target, Exchange):
        if isinstance(store, LocalStore) and store.identity("") is None:
            raise CheckpointNotFoundError(f"{location(path)} does not exist")
        return []
    found = look(target.where, os.path.basename(target.where))
    if found.state == "unreadable":
        raise CheckpointNotFoundError(found.problem or "")
    return [found]


@dataclass
class _Walk:
    """Goes down a directory. `has_arrays`: zarr arrays were met that no checkpoint found so far holds."""

    has_arrays: bool = False

    def visit(self, where: str, name: str, depth: int, above: frozenset[object]) -> Iterator[Found]:
        store = store_at(where)
        try:
            inside = store.children("")
        except OSError as error:
            yield Found(where, name, "unreadable", "directory", problem=str(error))
            return
        identity = store.identity("")  # None where there are no directories, and so no links that lead back up
        if depth > _DEEPEST or (identity is not None and identity in above):
            return
        if ZARRAY in inside:
            self.has_arrays = True
            return
        taken: set[str] = set()
        if not {MANIFEST, CONTROL, EFORMER_INDEX}.isdisjoint(inside):
            found = look(where, name or ".")
            if not found.absent:
                yield found
                if found.manifest is None:
                    return
            trees = found.manifest.trees.values() if found.manifest else ()
            taken = {file.name.partition("/")[0] for tree in trees for file in tree.files}
        yield from _exchange_files(where, name, [n for n in inside if n not in taken])
        yield from self._below(where, name, [n for n in inside if n not in taken], depth, above | {identity})

    def _below(self, where: str, name: str, inside: list[str], depth: int, above: frozenset[object]) -> Iterator[Found]:
        """Arrays without an index belong to the topmost directory that holds nothing else."""
        any_found = False
        bare: list[str] = []
        before, self.has_arrays = self.has_arrays, False
        for child in inside:
            if child.startswith("."):
                continue
            for found in self.visit(
                sibling(where, f"{where}/{child}"), f"{name}/{child}" if name else child, depth + 1, above
            ):
                any_found = True
                yield found
            if self.has_arrays:
                bare.append(child)
                self.has_arrays = False
        if any_found:
            for child in bare:
                yield look(sibling(where, f"{where}/{child}"), f"{name}/{child}" if name else child, unindexed=True)
            self.has_arrays = before
        else:
            self.has_arrays = before or bool(bare)


def _exchange_files(where: str, name: str, inside: list[str]) -> Iterator[Found]:
    """Safetensors files by what their names have in common, and saves of such that left only their control files."""
    control = f"{SUFFIX}.shardkeep"
    left = [child[1 : -len(control)] for child in inside if child.startswith(".") and child.endswith(control)]
    for base in dict.fromkeys([*left, *exchange_bases(inside)]):
        file = base + SUFFIX
        found = look(sibling(where, f"{where}/{file}"), f"{name}/{file}" if name else file)
        if not found.absent:
            yield found


def look(path: str, name: str, unindexed: bool = False) -> Found:
    """What lies at one place; whatever is wrong with it is a state, not an error."""
    target: Target | None = None
    manifest: Manifest | None = None
    kind: Kind = "exchange" if path.endswith(SUFFIX) else "directory"
    try:
        target = find(path)
        manifest = target.read()
        if all(tree.format == "foreign" for tree in manifest.trees.values()):
            kind = "safetensors" if isinstance(target, Exchange) else "eformer"
        _check_files(target.store, manifest)
    except (ShardkeepError, OSError) as error:
        absent = isinstance(error, CheckpointNotFoundError)
        return Found(path, name, _state(error, target), kind, target, manifest, str(error), absent)
    return Found(path, name, "unindexed" if unindexed else "complete", kind, target, manifest)


def _state(error: Exception, target: Target | None) -> State:
    if isinstance(error, IncompleteCheckpointError):
        return _unfinished(target)
    if isinstance(error, NewerFormatError):
        return "newer"
    return "damaged" if isinstance(error, IntegrityError) else "unreadable"


def _check_files(store: Store, manifest: Manifest) -> None:
    """`IntegrityError` unless all files are there and have their size; what is in them is for `verify`."""
    for tree in manifest.trees.values():
        sizes = store.sizes(file.name for file in tree.files)
        wrong = [file for file in tree.files if sizes[file.name] != file.size]
        if wrong:
            what = f"{len(wrong)} of {len(tree.files)} files are missing or do not have their size"
            raise IntegrityError(f"{what}, among them {store.locate(wrong[0].name)}")
        there = {file.name for file in tree.files}
        for leaf in tree.leaves:
            if leaf.kind != "zarr" or leaf.spec is None:
                continue
            directory = leaf.extra["directory"]
            names = describe(store, directory).chunk_names(Region.whole(leaf.spec.shape))
            start = f"{directory}/" if directory else ""
            missing = [name for name in names if start + name not in there]
            if missing:
                raise IntegrityError(f"leaf {leaf.key!r}: {len(missing)} of {len(names)} chunks are missing")


def _unfinished(target: Target | None) -> State:
    """Whether a save is still at work there."""
    if target is None:
        return "unfinished"
    store = target.store
    with Scope(f"looking at {target.where}") as scope:
        for save in store.children(store.saves):
            try:
                if store.try_hold(f"{store.saves}/{save}", scope) is None:
                    return "saving"
            except OSError:  # not ours to look at
                return "unfinished"
    return "unfinished"
