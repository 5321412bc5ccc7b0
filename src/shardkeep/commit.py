"""The commit: how a checkpoint goes from the old state to the new one, whole.

A save records the names it will use and holds a lock on that record while it lives (`begin`). It writes to names
nothing else uses. Then, under the checkpoint's lock, what is there is read again, one tree of it is replaced, and
the new document takes the old one's place by a rename (`commit`). Only after that do replaced files go. Whoever
comes later removes what dead saves recorded and no document names: never an unknown file, never a live save's.
"""

import json
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from shardkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    ConflictError,
    IncompleteCheckpointError,
    NotEnoughSpaceError,
    ShardkeepError,
    StorageError,
)
from shardkeep.manifest import Manifest, Tree, check_name
from shardkeep.planning import Draft, FilePlan, LeafPlan, SavePlan, WrittenFile
from shardkeep.processes import ALONE, LEADER, Operation
from shardkeep.scopes import Scope
from shardkeep.stores.base import Held, Store
from shardkeep.tree import Path

log = logging.getLogger("shardkeep")

_LOCK_SECONDS = 60.0
_SLACK = 1 << 20  # for the manifest, the record and the directories
_COMMITTED = "The new checkpoint was committed all the same and is whole"
_NOT_COMMITTED = "Nothing was committed; what was there before is intact"
_TRIES = 10  # to replace a document that others replace at the same time, in a bucket


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

    def describe(self) -> str:
        """The format, in a word or two."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether arrays that span processes are brought together in the first of them."""
        ...

    def plan(
        self, leaves: Sequence[LeafPlan], draft: Draft, current: Manifest | None, at: str | None = None
    ) -> SavePlan:
        """Names and places for everything a save will write, nothing of it in use; or those below `at`."""
        ...

    def complete(self, turn: "Turn", file: FilePlan, written: WrittenFile) -> bytes:
        """The header of a file whose digests are known, where it cannot be filled in by `finish`."""
        ...

    def finish(self, turn: "Turn", tree: Tree) -> Tree:
        """Complete files that speak of the whole save, durably."""
        ...

    def put(self, turn: "Turn", tree: Tree, current: Manifest | None) -> str:
        """Commit the tree, in one step; returns the name of the document that says so."""
        ...

    def fence(self) -> Manifest | None:
        """In a bucket: put the document again with a fresh nonce, so that late puts of dead saves are refused.

        Returns what is committed; `ConflictError` if somebody else replaced the document at the same moment.
        """
        ...


@dataclass(eq=False)
class Turn:
    """A save's turn at a target, from `begin` until it is committed or released."""

    target: Target
    draft: Draft
    plan: SavePlan = field(init=False)
    held: Held | None = None
    base_id: str | None = None
    writer: int = LEADER
    leader_gave_up: bool = False  # it has told so, and will not commit any more
    attempted: bool = False  # the commit may have been begun: only reading back tells whether it happened
    closed: bool = False

    def __post_init__(self) -> None:
        self.plan = SavePlan(self.draft.save_id, "", None, self.draft.skeleton, (), ())  # nothing, so far

    @property
    def name(self) -> str:
        prefix = self.draft.prefix
        return f"{self.target.where} (prefix {prefix!r})" if prefix else self.target.where

    def record(self) -> None:
        """Tell, durably and before it is done, which names this process will use."""
        store = self.target.store
        suffix = "" if self.writer == LEADER else f".{self.writer}"
        self.held = store.hold(f"{store.saves}/{self.draft.save_id}{suffix}")
        self.held.take(json.dumps([file.name for file in self.plan.files_of(self.writer)]).encode())

    def note(self, told: object) -> None:
        """Add a line to the record."""
        assert self.held is not None
        self.held.append(json.dumps(told).encode())

    def close(self) -> None:
        """The record is not needed any more."""
        if self.held is not None:
            self.held.remove()
        self.closed = True

    def release(self) -> None:
        """Give up: remove what was written unless it may be committed, or leave the record for a later save."""
        if self.closed or self.held is None:
            return
        store = self.target.store
        follows = self.attempted and self.writer != LEADER
        try:
            if follows and (store.remote or not self.leader_gave_up):
                self.held.release()  # the leader may commit yet, and hold the lock as long as it likes
                self.closed = True
                return
            with store.lock(_LOCK_SECONDS) if self.attempted and not follows else nullcontext():
                if self.attempted and _is_committed(self):
                    self.held.release()
                else:
                    store.remove(file.name for file in self.plan.files_of(self.writer))
                    self.held.remove()
        except (ShardkeepError, OSError) as error:
            log.warning("shardkeep: left-overs of a failed save may remain at %s (%s)", self.target.where, error)
            self.held.release()
        self.closed = True


def begin(turn: Turn, leaves: Sequence[LeafPlan], overwrite: bool, operation: Operation = ALONE) -> None:
    """Clean up after dead saves, check that this save may go on, choose its names and record them."""
    if not operation.leads:
        _follow(turn, leaves, operation)
        return
    target, draft = turn.target, turn.draft
    store = target.store
    with store.lock(_LOCK_SECONDS):
        current = target.read_if_any()
        current = clean_up(target, current)
        existing = current.trees.get(draft.prefix) if current else None
        if existing is not None and not overwrite:
            what = f"a tree of prefix {draft.prefix!r}" if draft.prefix else "a checkpoint"
            raise CheckpointExistsError(f"{target.where} already holds {what}; pass overwrite=True to replace it")
        turn.base_id = existing.save_id if existing else None
        turn.plan = target.plan(leaves, draft, current)
        free = store.free_bytes()
        if free is not None and turn.plan.nbytes + _SLACK > free:
            raise NotEnoughSpaceError(
                f"saving to {target.where} needs {turn.plan.nbytes + _SLACK:,} bytes and {free:,} are free; "
                "nothing was written"
            )
        turn.record()
    if operation.size > 1:
        operation.share([draft.save_id, draft.created, turn.plan.directory])


def _follow(turn: Turn, leaves: Sequence[LeafPlan], operation: Operation) -> None:
    """Begin as one of several processes, under the names that the leader chose."""
    target, store = turn.target, turn.target.store
    save_id, created, directory = operation.share()
    turn.draft = replace(turn.draft, save_id=save_id, created=created)
    turn.writer = operation.index
    turn.plan = target.plan(leaves, turn.draft, None, directory)
    if store.size(f"{store.saves}/{save_id}") is None:
        raise StorageError(
            f"saving to {target.where}: this directory is not the one that process {LEADER} sees. All processes must "
            "save to the same shared directory or bucket. Nothing was written"
        )
    turn.record()


def commit(turn: Turn, tree: Tree) -> None:
    """Make the tree part of the checkpoint. An error says whether it was committed."""
    target = turn.target
    with target.store.lock(_LOCK_SECONDS):
        old: list[str] = []
        for left in reversed(range(_TRIES)):
            current = target.read_if_any()
            replaced = current.trees.get(turn.draft.prefix) if current else None
            if turn.attempted and replaced is not None and replaced.save_id == turn.plan.save_id:
                return _retire(turn, tree, current, old)  # only the answer was lost, and then somebody fenced
            old = _prepare(turn, tree, replaced)
            turn.attempted = True
            try:
                document = target.put(turn, tree, current)
            except ConflictError as error:
                if left == 0:
                    _settle(turn, error)
                continue  # somebody fenced, or saved another prefix without the lock: if it was ours, that shows now
            except OSError as error:
                _settle(turn, error)
            else:
                return _retire(turn, tree, current, old, document)


def _prepare(turn: Turn, tree: Tree, replaced: Tree | None) -> list[str]:
    """Check that the tree may take the place of `replaced`, and record the names that go then."""
    target = turn.target
    if (replaced.save_id if replaced else None) != turn.base_id:
        raise ConflictError(
            f"another save changed {turn.name} while this one was writing; "
            "theirs is in place and untouched, this one was not committed"
        )
    if not target.store.remote and turn.plan.save_id not in target.store.children(target.store.saves):
        raise StorageError(
            f"saving {turn.name}: the directory was removed or renamed while this save was writing. "
            "Nothing was committed"
        )
    if any(file.writer != LEADER for file in turn.plan.files):
        _find_again(turn, tree)
    old = [file.name for file in replaced.files] if replaced else []
    # In a bucket also if there is nothing to tell: whoever takes the record over after this, and then fences, does so
    # after the document was read. So a put on condition of that document finds all files of this save in place.
    if old or target.store.remote:
        turn.note(old)
    return old


def _retire(turn: Turn, tree: Tree, current: Manifest | None, old: Sequence[str], document: str | None = None) -> None:
    """Remove what was replaced, now that the tree is committed; failing to do so does not undo the save."""
    target, store = turn.target, turn.target.store
    needed = {file.name for file in tree.files} | (names_in(current, but=turn.draft.prefix) if current else set())
    # A document of a bucket has a name that is used again: it is replaced, never removed.
    documents = () if store.remote or document is None else target.documents
    try:
        if unneeded := {*old, *documents} - needed - {document}:
            store.remove(unneeded)
        turn.close()
    except OSError as error:
        log.warning("shardkeep: %s is saved, but files of the replaced tree remain (%s)", turn.name, error)


def _find_again(turn: Turn, tree: Tree) -> None:
    """What other processes wrote is still there: one that died after it was done may have been cleaned up after."""
    others = {
        file.name: (file.size, plan.writer)
        for file, plan in zip(tree.files, turn.plan.files, strict=True)
        if plan.writer != LEADER
    }
    found = turn.target.store.sizes(others)
    for name, (size, writer) in others.items():
        if found[name] != size:
            raise StorageError(f"saving {turn.name}: {name}, written by process {writer}, is gone")


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
    tree = now.trees.get(turn.draft.prefix) if now else None
    return tree is not None and tree.save_id == turn.plan.save_id


def outcome(target: Target, turn: Turn | None) -> str:
    """For an error: what is there now."""
    try:
        if turn is not None and turn.attempted and turn.writer != LEADER:
            return give_up_on_leader(turn)
        if turn is not None and turn.attempted and _is_committed(turn):
            return _COMMITTED
    except (ShardkeepError, OSError) as error:
        return f"What {target.where} holds now cannot be read ({error})"
    return _NOT_COMMITTED


def give_up_on_leader(turn: Turn) -> str:
    """For the error of a process that has handed in its part and waits for the commit no longer: what is known of it.

    No lock is taken: a leader that died or was stopped inside its commit may hold it.
    """
    store, save_id = turn.target.store, turn.plan.save_id
    if store.remote:
        fence(turn.target, save_id)
        final = not turn.target.gathers  # one exchange file that is already on its way is not stopped
    else:
        final = _is_dead(store, save_id)
    if _is_committed(turn):
        return _COMMITTED
    if final:
        return _NOT_COMMITTED
    return (
        f"Process {LEADER} may still commit it; look at the checkpoint before relying on either state. "
        "What was there before is intact until then"
    )


def _is_dead(store: Store, save_id: str) -> bool:
    """Whether the process that made this save has ended and left its record: on a disk that sets its lock free."""
    with Scope(f"looking at {store.url}") as scope:
        return store.try_hold(f"{store.saves}/{save_id}", scope) is not None


@dataclass(frozen=True)
class LeftOvers:
    """What dead saves left: their records, now held, and names that nothing needs; and how many saves are running."""

    records: list[Held]
    names: list[str]
    running: int


def left_overs(target: Target, manifest: Manifest | None, scope: Scope) -> LeftOvers:
    """What the next save would remove. Call it with the lock held; the records are held until the scope is closed."""
    store = target.store
    records: list[Held] = []
    names: list[str] = []
    needed = set(target.documents) | (names_in(manifest) if manifest else set())
    saves = store.children(store.saves)
    alive: set[str] = set()
    for save_id in sorted(saves):
        # The processes of one save live as long as their leader: it may commit what the others wrote.
        led = save_id.partition(".")[0] in alive
        held = None if led else store.try_hold(f"{store.saves}/{save_id}", scope)
        recorded = recorded_names(store, save_id)
        if held is None:
            alive.add(save_id)
            needed.update(recorded)
        else:
            records.append(held)
            names += recorded
    # Documents written aside by a save that died before the rename.
    starts = tuple(f"{document}." for document in (*target.documents, *target.companions))
    names += [name for name in store.children("") if name.endswith(".tmp") and name.startswith(starts)]
    return LeftOvers(records, [name for name in names if name not in needed], len(saves) - len(records))


def clean_up(target: Target, current: Manifest | None) -> Manifest | None:
    """Remove what dead saves left, and return what is committed. Call it with the lock held.

    In a bucket the document that would commit a dead save may still be on its way: it is fenced off first.
    """
    store = target.store
    with Scope(f"cleaning up at {target.where}") as scope:
        found = left_overs(target, current, scope)
        names = found.names
        if store.remote and any(not name.startswith(f"{store.control}/") for name in names):
            current = fence(target)
            needed = names_in(current)  # a dead save may have been committed after all
            names = [name for name in names if name not in needed]
        if names:
            store.remove(names)
        for held in found.records:
            held.remove()
    return current


def fence(target: Target, save_id: str | None = None) -> Manifest | None:
    """Make sure that no dead save is committed after this, and return what is committed. The lock is not needed.

    In a bucket a put may arrive long after its sender died. Each put of the document that commits a save depends on the
    version that was read; this changes the version and nothing else. A live save that is refused because of it reads
    again and tries again, unless its record was taken over: so take over the records of dead saves before, or name a
    `save_id` whose record is taken over here. What is not committed when this returns never will be.

    On a local disk nothing is done: there a save is dead only when its process is. A single exchange file in a bucket
    that is already on its way is not stopped; it needs none of the objects that a cleaner removes.
    """
    store = target.store
    if not store.remote:
        return target.read_if_any()
    for left in reversed(range(_TRIES)):
        try:
            if save_id is not None:
                _condemn(store, f"{store.saves}/{save_id}")
                save_id = None
            return target.fence()
        except ConflictError:
            if left == 0:
                raise
            time.sleep(0.1)
    raise AssertionError("the last try returns or raises")


def _condemn(store: Store, record_name: str) -> None:
    """Take over the record of a save in a bucket, alive or not, so that it gives up."""
    from shardkeep.stores.leases import condemned  # which needs the client of buckets

    try:
        store.replace(record_name, condemned(store.read(record_name)))
    except FileNotFoundError:
        pass  # it has ended


def recorded_names(store: Store, save_id: str) -> list[str]:
    """The names a save recorded; a torn last line counts for nothing."""
    names: list[str] = []
    try:
        lines = store.read(f"{store.saves}/{save_id}").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            told = json.loads(line)
            if isinstance(told, list):
                names += [check_name(name) for name in told]
        except (ValueError, TypeError, RecursionError):
            break
    return names


def delete(target: Target) -> None:
    """Remove a checkpoint, what says it is committed first; files that are not shardkeep's stay.

    In a bucket this frees names that are used again, which nothing else does: of the document and of the claims.
    """
    store = target.store
    try:
        trees = target.read().trees
    except IncompleteCheckpointError:
        trees = {}  # what a save that never finished left goes too
    except CheckpointNotFoundError:
        if all(store.size(name) is None for name in target.documents):
            raise
        trees = {}  # and what says that nothing is committed
    if trees and all(tree.format == "foreign" for tree in trees.values()):
        raise CheckpointNotFoundError(f"{target.where} was written by another program; nothing was deleted")
    with store.lock(_LOCK_SECONDS), Scope(f"deleting {target.where}") as scope:
        manifest = clean_up(target, target.read_if_any())
        if store.children(store.saves):
            raise ConflictError(f"a save to {target.where} is running; nothing was deleted")
        names = sorted(names_in(manifest))
        # A record, so that a delete cut short is completed by whoever comes next.
        held = scope.add(store.hold(f"{store.saves}/{'0' * 32}"))
        held.take(json.dumps(names).encode())
        store.remove(target.documents)
        store.sync_directory("")
        store.remove([*names, *target.companions])
        held.remove()
        store.remove_control()


def leave(target: Target, waits: bool = True) -> None:
    """When nothing of ours is there and nobody is at work, leave no control directory behind, if that can be done.

    Not if somebody else has the lock, unless it `waits` for that.
    """
    store = target.store
    if store.remote:  # there are no directories, and what is claimed stays so: those names may still be written to
        return
    try:
        if not store.children(store.control):
            return
        with store.lock(_LOCK_SECONDS if waits else 0):
            documents = [name for name in target.documents if store.size(name) is not None]
            if (not documents or not target.keeps_control) and not store.children(store.saves):
                store.remove_control()
    except OSError as error:
        if waits or not isinstance(error, ConflictError):
            log.warning("shardkeep: the control directory at %s could not be tidied (%s)", target.where, error)


def names_in(manifest: Manifest | None, but: str | None = None) -> set[str]:
    """The data files a manifest needs, those of one prefix left out if asked."""
    trees = manifest.trees.items() if manifest else ()
    return {file.name for prefix, tree in trees if prefix != but for file in tree.files}
