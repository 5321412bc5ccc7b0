"""What is removed from a checkpoint, and when: what dead saves left, what a delete removes, unused control directories.

All of this holds the checkpoint's lock, except for the fence. Unknown files and files of running saves are never
removed.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from shardkeep.errors import CheckpointNotFoundError, ConflictError, IncompleteCheckpointError
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.base import LOCK_SECONDS, Held, Store
from shardkeep.targets.base import ReadTarget, Target
from shardkeep.targets.files import ForeignFile
from shardkeep.targets.running import DELETE, now, record_lines, recorded_names

log = logging.getLogger("shardkeep")

TRIES = 10  # attempts, in a bucket, to replace a document that others replace at the same time


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
    needed = set(target.documents)
    if manifest:
        needed |= names_in(target, manifest)
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
        if store.traits.late_requests and any(not name.startswith(f"{store.control}/") for name in names):
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
    if not store.traits.late_requests:
        return target.read_if_any()
    for left in reversed(range(TRIES)):
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


def delete(target: Target | ForeignFile) -> None:
    """Remove a checkpoint, first the document that commits it. Files that shardkeep did not write stay.

    In a bucket, only this frees names that are used again: those of the document and of the claims.
    """
    if isinstance(target, ForeignFile):
        target.read()
        raise _not_ours(target)
    store = target.store
    try:
        trees: Mapping[str, Tree] = target.read().trees
    except IncompleteCheckpointError:
        trees = {}  # what an unfinished save left is removed too
    except CheckpointNotFoundError:
        if all(store.size(name) is None for name in target.documents) or target.foreign_document(store.children("")):
            raise
        trees = {}  # a document that says that nothing is committed is removed too
    if trees and all(tree.format == "foreign" for tree in trees.values()):
        raise _not_ours(target)
    with store.lock(), Scope(f"deleting {target.where}") as scope:
        manifest = clean_up(target, target.read_if_any())
        if store.children(store.saves):
            raise ConflictError(f"a save to {target.where} is running; nothing was deleted")
        names = sorted(names_in(target, manifest))
        # Recorded, so that the next save or delete completes a delete that was interrupted.
        held = scope.add(store.hold(f"{store.saves}/{DELETE}"))
        held.take(record_lines(names if store.traits.late_requests else [*names, *target.companions], now()))
        store.remove([*target.documents, *target.companions])  # both before the files that they list
        store.sync_directory("")
        target.retire(names, manifest, None)
        held.remove()
        store.remove_control()


def _not_ours(target: ReadTarget) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"{target.where} was written by another program; nothing was deleted")


def leave(target: Target, waits: bool = True) -> None:
    """Remove the control directory if there is no checkpoint and no save is running.

    Args:
        target: The checkpoint's place.
        waits: Whether to wait for the lock. If not, nothing is done while another process holds it.
    """
    store = target.store
    if store.traits.late_requests:  # there are no directories, and claimed names may still be written to
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


def names_in(target: Target, manifest: Manifest | None) -> set[str]:
    """The names that belong to the trees of a manifest."""
    return {name for tree in manifest.trees.values() for name in target.names_of(tree)} if manifest else set()
