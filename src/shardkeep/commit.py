"""The commit: how a checkpoint goes from the old state to the new one, whole.

A save records the names it will use and holds a lock on that record while it lives (`begin`). It writes to names
nothing else uses. Then, under the checkpoint's lock, what is there is read again, one tree of it is replaced, and
the new document takes the old one's place by a rename (`commit`). Only after that do replaced files go. Whoever
comes later removes what dead saves recorded and no document names: never an unknown file, never a live save's.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    ConflictError,
    NotEnoughSpaceError,
    ShardkeepError,
    StorageError,
)
from shardkeep.manifest import Manifest, Tree, check_name
from shardkeep.planning import Draft, LeafPlan, SavePlan
from shardkeep.stores.base import Held, Store
from shardkeep.tree import Path

log = logging.getLogger("shardkeep")

_LOCK_SECONDS = 60.0
_SLACK = 1 << 20  # for the manifest, the record and the directories


class Target(Protocol):
    """A place for a checkpoint, with its own documents: a directory with a manifest, or exchange files."""

    @property
    def store(self) -> Store: ...

    @property
    def where(self) -> str:
        """The target as a person names it."""
        ...

    @property
    def documents(self) -> Sequence[str]:
        """Names of the files that can say what is committed."""
        ...

    @property
    def companions(self) -> Sequence[str]:
        """Names of files written for other programs, which go when the checkpoint goes."""
        ...

    @property
    def keeps_control(self) -> bool:
        """Whether the control directory stays when no save is running."""
        ...

    def read_if_any(self) -> Manifest | None: ...

    def read(self) -> Manifest:
        """What is committed; an error that says whether there is nothing, or something unfinished."""
        ...

    def check(self, paths: Sequence[Path]) -> None:
        """Refuse arrays this target has no names for, before anything is done."""
        ...

    def plan(self, leaves: Sequence[LeafPlan], draft: Draft, current: Manifest | None) -> SavePlan:
        """Names and places for everything a save will write, nothing of it in use."""
        ...

    def finish(self, turn: "Turn", tree: Tree) -> Tree:
        """Complete files that speak of the whole save, before they are made durable."""
        ...

    def put(self, turn: "Turn", tree: Tree, current: Manifest | None) -> str:
        """Make the tree count, in one step; tells which document says so."""
        ...


@dataclass
class Turn:
    """A save's turn at a target, from `begin` until `commit` or `abandon`."""

    target: Target
    prefix: str
    base_id: str | None
    plan: SavePlan
    held: Held
    attempted: bool = False  # the commit was begun: only reading back tells whether it happened
    closed: bool = False

    @property
    def name(self) -> str:
        return f"{self.target.where} (prefix {self.prefix!r})" if self.prefix else self.target.where


def begin(target: Target, leaves: Sequence[LeafPlan], draft: Draft, overwrite: bool) -> Turn:
    """Clean up after dead saves, check that this save may go on, choose its names and record them."""
    store = target.store
    with store.lock(_LOCK_SECONDS):
        current = target.read_if_any()
        clean_up(target, current)
        existing = current.trees.get(draft.prefix) if current else None
        if existing is not None and not overwrite:
            what = f"a tree of prefix {draft.prefix!r}" if draft.prefix else "a checkpoint"
            raise CheckpointExistsError(f"{target.where} already holds {what}; pass overwrite=True to replace it")
        plan = target.plan(leaves, draft, current)
        free = store.free_bytes()
        if free is not None and plan.nbytes + _SLACK > free:
            raise NotEnoughSpaceError(
                f"saving to {target.where} needs {plan.nbytes + _SLACK:,} bytes and {free:,} are free; "
                "nothing was written"
            )
        held = record(store, plan.save_id, plan.names)
    return Turn(target, draft.prefix, existing.save_id if existing else None, plan, held)


def commit(turn: Turn, tree: Tree) -> None:
    """Make the tree part of the checkpoint. An error says whether it was committed."""
    target = turn.target
    with target.store.lock(_LOCK_SECONDS):
        current = target.read_if_any()
        replaced = current.trees.get(turn.prefix) if current else None
        if (replaced.save_id if replaced else None) != turn.base_id:
            raise ConflictError(
                f"another save changed {turn.name} while this one was writing; "
                "theirs is in place and untouched, this one was not committed"
            )
        old = [file.name for file in replaced.files] if replaced else []
        if old:
            turn.held.append(json.dumps(old).encode())
        turn.attempted = True
        try:
            document = target.put(turn, tree, current)
        except OSError as error:
            _settle(turn, error)
        else:
            others = {file.name for file in tree.files} | {document}
            if current is not None:
                others |= names_in(current, but=turn.prefix)
            _remove_replaced(turn, {*old, *target.documents} - others)


def _settle(turn: Turn, error: OSError) -> None:
    """Putting the tree in place failed: read back what is there, and say so. Nothing that may be needed is deleted."""
    try:
        committed = _is_committed(turn)
    except (ShardkeepError, OSError) as unreadable:
        raise CommitUnknownError(
            f"saving {turn.name}: the commit failed ({error}) and what is there cannot be read back ({unreadable}); "
            "nothing was deleted: the outcome is unknown until it can be read"
        ) from error
    if not committed:
        raise error
    raise StorageError(
        f"saving {turn.name}: the new checkpoint is committed and in place, but the disk did not confirm that it "
        f"will survive a power cut ({error}); the files of the old one were kept"
    ) from error


def _is_committed(turn: Turn) -> bool:
    now = turn.target.read_if_any()
    tree = now.trees.get(turn.prefix) if now else None
    return tree is not None and tree.save_id == turn.plan.save_id


def _remove_replaced(turn: Turn, names: set[str]) -> None:
    """After the commit: the old tree's files go. Failing to remove them does not undo the save."""
    try:
        if names:
            turn.target.store.remove(names)
        turn.held.release()
    except OSError as error:
        log.warning("shardkeep: %s is saved, but files of the replaced tree remain (%s)", turn.name, error)
        turn.held.abandon()
    turn.closed = True


def abandon(turn: Turn) -> None:
    """Give up: remove what was written unless it may be committed, or leave the record so that a later save does."""
    if turn.closed:
        return
    turn.closed = True
    try:
        if turn.attempted and _is_committed(turn):
            turn.held.abandon()
            return
        turn.target.store.remove(turn.plan.names)
        turn.held.release()
    except (ShardkeepError, OSError) as error:
        log.warning("shardkeep: left-overs of a failed save may remain at %s (%s)", turn.target.where, error)
        turn.held.abandon()


def clean_up(target: Target, manifest: Manifest | None) -> list[str]:
    """Remove what dead saves left and nothing needs. Call it with the lock held; tells which names went."""
    store = target.store
    dead: list[tuple[Held, list[str]]] = []
    needed = set(target.documents) | (names_in(manifest) if manifest else set())
    for save_id in store.children(store.saves):
        held = store.try_hold(f"{store.saves}/{save_id}")
        names = recorded_names(store, save_id)
        if held is None:
            needed.update(names)
        else:
            dead.append((held, names))
    removed: list[str] = []
    for held, names in dead:
        left = [name for name in names if name not in needed]
        store.remove(left)
        held.release()
        removed += left
    # Documents written aside by a save that died before the rename.
    starts = tuple(f"{document}." for document in (*target.documents, *target.companions))
    torn = [name for name in store.children("") if name.endswith(".tmp") and name.startswith(starts)]
    if torn:
        store.remove(torn)
    return removed


def recorded_names(store: Store, save_id: str) -> list[str]:
    """The names a save recorded; a torn last line counts for nothing."""
    names: list[str] = []
    try:
        lines = store.read(f"{store.saves}/{save_id}").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            names += [check_name(name) for name in json.loads(line)]
        except (ValueError, TypeError):
            break
    return names


def delete(target: Target) -> None:
    """Remove a checkpoint, what says it is committed first; files that are not shardkeep's stay."""
    store = target.store
    found = target.read()
    if all(tree.format == "foreign" for tree in found.trees.values()):
        raise CheckpointNotFoundError(f"{target.where} was written by another program; nothing was deleted")
    with store.lock(_LOCK_SECONDS):
        manifest = target.read_if_any()
        clean_up(target, manifest)
        if store.children(store.saves):
            raise ConflictError(f"a save to {target.where} is running; nothing was deleted")
        names = sorted(names_in(manifest))
        held = record(store, "0" * 32, names)  # so that a delete cut short is completed by whoever comes next
        store.remove(target.documents)
        store.sync_directory("")
        store.remove([*names, *target.companions])
        held.release()
        store.remove_control()


def record(store: Store, save_id: str, names: Iterable[str]) -> Held:
    """Tell, durably and before it is done, which names a save will use."""
    return store.hold(f"{store.saves}/{save_id}", json.dumps(list(names)).encode())


def leave(target: Target) -> None:
    """When nothing of ours is there and nobody is at work, leave no control directory behind, if that can be done."""
    store = target.store
    try:
        if not store.children(store.control):
            return
        with store.lock(_LOCK_SECONDS):
            documents = [name for name in target.documents if store.size(name) is not None]
            if (not documents or not target.keeps_control) and not store.children(store.saves):
                store.remove_control()
    except OSError as error:
        log.warning("shardkeep: the control directory at %s could not be tidied (%s)", target.where, error)


def names_in(manifest: Manifest | None, but: str | None = None) -> set[str]:
    """The data files a manifest needs, those of one prefix left out if asked."""
    trees = manifest.trees.items() if manifest else ()
    return {file.name for prefix, tree in trees if prefix != but for file in tree.files}
