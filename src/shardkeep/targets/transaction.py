"""The commit: how a checkpoint changes from the old state to the new one in a single step.

A save records the names that it will write and holds a lock on that record while it runs (`begin`). It writes only to
names that nothing else uses. Then, with the checkpoint's lock held, it reads the committed state again, replaces one
tree in it, and renames the new document over the old one (`commit`). Only then are the replaced files removed. Later
saves remove what dead saves recorded and no document names. Unknown files and files of running saves are never removed.
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shardkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    ConflictError,
    IncompleteCheckpointError,
    IntegrityError,
    NotEnoughSpaceError,
    ShardkeepError,
    StorageError,
)
from shardkeep.layouts.plan import StagedLeaf
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.processes.operation import ALONE, LEADER, Operation
from shardkeep.runtime.collector import collector
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.base import Held, Store
from shardkeep.targets.base import LOCK_SECONDS, Target, Turn, is_committed
from shardkeep.targets.damage import find_damage
from shardkeep.targets.running import DELETE, now, record_lines, recorded_names

log = logging.getLogger("shardkeep")

_SLACK = 1 << 20  # space for the manifest, the record and the directories
_COMMITTED = "The new checkpoint was committed nevertheless, and is complete"
_NOT_COMMITTED = "Nothing was committed; what was there before is intact"
_TRIES = 10  # attempts, in a bucket, to replace a document that others replace at the same time


def begin(turn: Turn, leaves: Sequence[StagedLeaf], overwrite: bool, operation: Operation = ALONE) -> None:
    """Clean up after dead saves, check that this save may proceed, choose its names and record them."""
    if not operation.leads:
        _follow(turn, leaves, operation)
        return
    target, draft = turn.target, turn.draft
    store = target.store
    with store.lock(LOCK_SECONDS):
        current = target.read_to_replace(overwrite)
        current = clean_up(target, current)
        existing = current.trees.get(draft.prefix) if current else None
        if existing is not None and not overwrite:
            damage = _damage_or_refuse(target, draft.prefix, existing)
            log.warning("%s is damaged: %s. This save replaces it", turn.name, damage)
        turn.base_id = existing.save_id if existing else None
        with collector.paused():
            turn.plan = target.plan(leaves, draft, current)
        free = store.free_bytes()
        if free is not None and turn.plan.nbytes + _SLACK > free:
            raise NotEnoughSpaceError(
                f"saving to {target.where} needs {turn.plan.nbytes + _SLACK:,} bytes and {free:,} are free; "
                "nothing was written"
            )
        turn.record()
    operation.share([draft.save_id, draft.created, turn.plan.directory])


def refuse_existing(target: Target, prefix: str) -> None:
    """Raise early what `begin` refuses without `overwrite`: a complete tree of this prefix, or another program's file.

    A tree that is damaged is not refused: `begin` looks again with the lock held, and the save replaces it.
    """
    try:
        current = target.read_if_any()
    except IntegrityError:
        return
    if current is None or prefix not in current.trees:
        refuse_foreign(target, target.store.children(""))
    else:
        _damage_or_refuse(target, prefix, current.trees[prefix])


def refuse_foreign(target: Target, inside: Collection[str]) -> None:
    """`CheckpointExistsError` if a save would replace a file of another program."""
    foreign = target.foreign_document(inside)
    if foreign is not None:
        raise CheckpointExistsError(
            f"{foreign} was not written by shardkeep, and a save to {target.where} would replace it; save to another "
            "directory. Nothing was written"
        )


def _damage_or_refuse(target: Target, prefix: str, existing: Tree) -> str:
    """What is damaged in the tree of a prefix; `CheckpointExistsError` if it is complete."""
    damage = find_damage(target.store, [existing], described=not target.store.remote)
    if damage is None:
        what = f"a tree with prefix {prefix!r}" if prefix else "a checkpoint"
        raise CheckpointExistsError(f"{target.where} already holds {what}; pass overwrite=True to replace it")
    return damage


def _follow(turn: Turn, leaves: Sequence[StagedLeaf], operation: Operation) -> None:
    """Begin as one of several processes, with the names that the leader chose."""
    target, store = turn.target, turn.target.store
    save_id, created, directory = operation.share()
    turn.draft = replace(turn.draft, save_id=save_id, created=created)
    turn.writer = operation.index
    with collector.paused():
        turn.plan = target.plan(leaves, turn.draft, None, directory)
    if store.size(f"{store.saves}/{save_id}") is None:
        raise StorageError(
            f"saving to {target.where}: process {LEADER} sees a different directory at this path. All processes must "
            "save to the same shared directory or bucket. Nothing was written"
        )
    turn.record()


def commit(turn: Turn, tree: Tree) -> None:
    """Make the tree part of the checkpoint. An error says whether it was committed."""
    target = turn.target
    with target.store.lock(LOCK_SECONDS):
        old: list[str] = []
        for left in reversed(range(_TRIES)):
            current = target.read_again()
            replaced = current.trees.get(turn.draft.prefix) if current else None
            if turn.attempted and replaced is not None and replaced.save_id == turn.plan.save_id:
                return _retire(turn, tree, current, old)  # only the answer was lost, and then another process fenced
            if turn.plan.directory:
                tree = target.adopt(turn, tree, current)
            old = _prepare(turn, tree, replaced)
            turn.attempted = True
            try:
                document = target.put(turn, tree, current)
            except ConflictError as error:
                if left == 0:
                    _settle(turn, error)
                continue  # another process fenced, or saved another prefix: if it was ours, reading again shows it
            except OSError as error:
                _settle(turn, error)
            else:
                return _retire(turn, tree, current, old, document)


def _prepare(turn: Turn, tree: Tree, replaced: Tree | None) -> list[str]:
    """Check that the tree may replace `replaced`, and record the names that are removed then."""
    target = turn.target
    if (replaced.save_id if replaced else None) != turn.base_id:
        raise ConflictError(
            f"another save changed {turn.name} while this one was running; "
            "the other one is in place and untouched, this one was not committed"
        )
    if not target.store.remote and turn.plan.save_id not in target.store.children(target.store.saves):
        raise StorageError(
            f"saving {turn.name}: the directory was removed or renamed while this save was running. "
            "Nothing was committed"
        )
    if any(file.writer != LEADER for file in turn.plan.files):
        _find_again(turn, tree)
    old = sorted(target.names_of(replaced) - target.names_of(tree)) if replaced else []
    # In a bucket this is done even if there are no names: a process that takes the record over after this, and then
    # fences, does so after the document was read. So a put on condition of that document finds all files in place.
    if old or target.store.remote:
        turn.note(old)
    return old


def _retire(turn: Turn, tree: Tree, current: Manifest | None, old: Sequence[str], document: str | None = None) -> None:
    """Remove what was replaced, now that the tree is committed; failing to do so does not undo the save."""
    target, store = turn.target, turn.target.store
    trees = {**(current.trees if current else {}), turn.draft.prefix: tree}
    # In a bucket the names of documents are used again, so documents are replaced and never removed.
    documents = () if store.remote or document is None else target.documents
    try:
        if unneeded := {*old, *documents} - {document}:
            unneeded -= target.names_of(tree) | names_in(target, current, but=turn.draft.prefix)
        if target.retire(unneeded, current, Manifest(target.where, tree.save_id, trees)):
            turn.close()
    except OSError as error:
        log.warning("%s is saved, but files of the replaced tree remain (%s)", turn.name, error)


def _find_again(turn: Turn, tree: Tree) -> None:
    """Check that the files of other processes are still there: a process that died may have been cleaned up after."""
    others = {
        file.name: (file.size, plan.writer)
        for file, plan in zip(tree.files, turn.plan.files, strict=True)
        if plan.writer != LEADER
    }
    found = turn.target.store.sizes(others)
    for name, (size, writer) in others.items():
        if found[name] != size:
            raise StorageError(f"saving {turn.name}: {name}, written by process {writer}, is missing or truncated")


def _settle(turn: Turn, error: OSError) -> None:
    """Report a commit that failed, after reading back what is there. Nothing that may be needed is deleted."""
    try:
        committed = is_committed(turn)
    except (ShardkeepError, OSError) as unreadable:
        raise CommitUnknownError(
            f"saving {turn.name}: the commit failed ({error}) and what is there cannot be read back ({unreadable}); "
            "nothing was deleted. The outcome is unknown until it can be read"
        ) from error
    if not committed:
        raise error
    raise StorageError(
        f"saving {turn.name}: the new checkpoint is committed and in place, but the disk did not confirm that it "
        f"will survive a power cut ({error}); the files of the old one were kept"
    ) from error


def outcome(target: Target, turn: Turn | None) -> str:
    """For an error: what is committed now."""
    try:
        if turn is not None and turn.attempted and turn.writer != LEADER:
            return give_up_on_leader(turn)
        if turn is not None and turn.attempted and is_committed(turn):
            return _COMMITTED
    except (ShardkeepError, OSError) as error:
        return f"What {target.where} now holds cannot be read ({error})"
    return _NOT_COMMITTED


def give_up_on_leader(turn: Turn) -> str:
    """For the error of a process that wrote its part and stops waiting for the commit: what is known about the commit.

    No lock is taken: a leader that died or was stopped during the commit may hold it.
    """
    store, save_id = turn.target.store, turn.plan.save_id
    if store.remote:
        fence(turn.target, save_id)
        final = not turn.target.gathers  # the put of a single exchange file may already be on its way
    else:
        final = _is_dead(store, save_id)
    if is_committed(turn):
        return _COMMITTED
    if final:
        return _NOT_COMMITTED
    return (
        f"Process {LEADER} may still commit it: inspect the checkpoint before you rely on either state. "
        "What was there before is intact until then"
    )


def _is_dead(store: Store, save_id: str) -> bool:
    """Whether the process that made this save has ended and left its record. On a disk, the kernel frees its lock."""
    with Scope(f"inspecting {store.url}") as scope:
        return store.try_hold(f"{store.saves}/{save_id}", scope) is not None


@dataclass(frozen=True)
class LeftOvers:
    """What dead saves left: their records, which are now held, and names that nothing needs; and how many saves run."""

    records: list[Held]
    names: list[str]
    running: int


def left_overs(target: Target, manifest: Manifest | None, scope: Scope) -> LeftOvers:
    """What the next save would remove. Call it with the lock held; the records are held until the scope closes."""
    store = target.store
    records: list[Held] = []
    names: list[str] = []
    needed = set(target.documents) | (names_in(target, manifest) if manifest else set())
    saves = store.children(store.saves)
    alive: set[str] = set()
    for save_id in sorted(saves):
        # All processes of a save count as alive while their leader is: it may commit what the others wrote.
        led = save_id.partition(".")[0] in alive
        held = None if led else store.try_hold(f"{store.saves}/{save_id}", scope)
        recorded = recorded_names(store, save_id)
        if held is None:
            alive.add(save_id)
            needed.update(recorded)
        else:
            records.append(held)
            names += recorded
    # Documents that a save wrote to a temporary file and did not rename.
    starts = tuple(f"{document}." for document in (*target.documents, *target.companions))
    names += [name for name in store.children("") if name.endswith(".tmp") and name.startswith(starts)]
    return LeftOvers(records, [name for name in names if name not in needed], len(saves) - len(records))


def clean_up(target: Target, current: Manifest | None) -> Manifest | None:
    """Remove what dead saves left, and return what is committed. Call it with the lock held.

    In a bucket the put that would commit a dead save may still be on its way: it is fenced off first.
    """
    store = target.store
    with Scope(f"cleaning up at {target.where}") as scope:
        found = left_overs(target, current, scope)
        names = found.names
        if store.remote and any(not name.startswith(f"{store.control}/") for name in names):
            current = fence(target)
            needed = names_in(target, current)  # a dead save may have been committed
            names = [name for name in names if name not in needed]
        if names or found.records:
            target.retire(names, current, current)
        for held in found.records:
            held.remove()
    return current


def fence(target: Target, save_id: str | None = None) -> Manifest | None:
    """Make sure that no dead save is committed after this, and return what is committed. The lock is not needed.

    In a bucket a put may arrive long after its sender died. Each put of the document that commits a save depends on the
    version that was read; this changes the version and nothing else. A running save that is refused because of it reads
    and tries again, unless its record was taken over. So take over the records of dead saves first, or pass a `save_id`
    whose record is taken over here. A save that is not committed when this returns never will be.

    On a local disk nothing is done: there a save is dead only when its process is. In a bucket, the put of a single
    exchange file that is already on its way is not stopped; it needs none of the objects that a clean-up removes.
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
    """Take over the record of a save in a bucket, running or not, so that it gives up."""
    from shardkeep.stores.bucket.leases import condemned  # imports the client for buckets

    try:
        store.replace(record_name, condemned(store.read(record_name)))
    except FileNotFoundError:
        pass  # the save has ended


def delete(target: Target) -> None:
    """Remove a checkpoint, first the document that commits it. Files that shardkeep did not write stay.

    In a bucket, only this frees names that are used again: those of the document and of the claims.
    """
    store = target.store
    try:
        trees = target.read().trees
    except IncompleteCheckpointError:
        trees = {}  # what an unfinished save left is removed too
    except CheckpointNotFoundError:
        if all(store.size(name) is None for name in target.documents) or target.foreign_document(store.children("")):
            raise
        trees = {}  # a document that says that nothing is committed is removed too
    if trees and all(tree.format == "foreign" for tree in trees.values()):
        raise CheckpointNotFoundError(f"{target.where} was written by another program; nothing was deleted")
    with store.lock(LOCK_SECONDS), Scope(f"deleting {target.where}") as scope:
        manifest = clean_up(target, target.read_if_any())
        if store.children(store.saves):
            raise ConflictError(f"a save to {target.where} is running; nothing was deleted")
        names = sorted(names_in(target, manifest))
        # Recorded, so that the next save or delete completes a delete that was interrupted.
        held = scope.add(store.hold(f"{store.saves}/{DELETE}"))
        held.take(record_lines(names if store.remote else [*names, *target.companions], now()))
        store.remove([*target.documents, *target.companions])  # both before the files that they list
        store.sync_directory("")
        target.retire(names, manifest, None)
        held.remove()
        store.remove_control()


def leave(target: Target, waits: bool = True) -> None:
    """Remove the control directory if there is no checkpoint and no save is running.

    Args:
        target: The checkpoint's place.
        waits: Whether to wait for the lock. If not, nothing is done while another process holds it.
    """
    store = target.store
    if store.remote:  # there are no directories, and claimed names may still be written to
        return
    try:
        if not store.children(store.control):
            return
        with store.lock(LOCK_SECONDS if waits else 0):
            documents = [name for name in target.documents if store.size(name) is not None]
            if (not documents or not target.keeps_control) and not store.children(store.saves):
                store.remove_control()
    except OSError as error:
        if waits or not isinstance(error, ConflictError):
            log.warning("the control directory at %s could not be removed (%s)", target.where, error)


def names_in(target: Target, manifest: Manifest | None, but: str | None = None) -> set[str]:
    """The names that belong to the trees of a manifest, without those of the prefix `but`."""
    trees = manifest.trees.items() if manifest else ()
    return {name for prefix, tree in trees if prefix != but for name in target.names_of(tree)}
