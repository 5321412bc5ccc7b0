"""The transaction: how a checkpoint changes from the old state to the new one in a single step.

A save records the names that it will write and holds a lock on that record while it runs (`begin`). It writes only to
names that nothing else uses. Then, with the checkpoint's lock held, it reads the committed state again, replaces its
trees in it, and renames the new document over the old one (`commit`). Only then are the replaced files removed. A save
that is not committed removes what it wrote (`release`), and later saves clean up after those that died.

A save has one or more trees. The document changes once for all of them, so all are committed or none.
"""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from shardkeep.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    ConflictError,
    IntegrityError,
    NotEnoughSpaceError,
    ShardkeepError,
    StorageError,
)
from shardkeep.layouts.plan import SavePlan
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.processes.operation import LEADER
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.base import Held, Store
from shardkeep.targets.base import Target, name_tree
from shardkeep.targets.cleanup import TRIES, clean_up, fence, names_in
from shardkeep.targets.damage import find_damage
from shardkeep.targets.running import record_lines

log = logging.getLogger("shardkeep")

_SLACK = 1 << 20  # space for the manifest, the record and the directories
_COMMITTED = "The new checkpoint was committed nevertheless, and is complete"
_NOT_COMMITTED = "Nothing was committed; what was there before is intact"


@dataclass(eq=False)
class Transaction:
    """One save's change of a checkpoint, from `begin` until it is committed or released. Add it to a `Scope`.

    Args:
        target: The checkpoint.
        writer: The index of this process. Only the leader commits.
        replaces_all: Whether the new trees replace the whole checkpoint, instead of the trees with their prefixes.
    """

    target: Target
    writer: int = LEADER
    replaces_all: bool = False
    plan: SavePlan = field(init=False)  # with the names that were reserved, from `begin` or `follow` on
    leader_gave_up: bool = False  # the leader has reported an error and will not commit
    attempted: bool = False  # the commit may have started: only reading back shows whether it happened
    _held: Held | None = None
    _replaced: Mapping[str, str] = field(default_factory=dict[str, str])  # by prefix, what was there when it began
    _looks_for_others: bool = True  # for another program's checkpoint, just before the commit
    _closed: bool = False

    @property
    def name(self) -> str:
        return name_tree(self.target.where, *(tree.draft.prefix for tree in self.plan.trees))

    def begin(self, plan: SavePlan, overwrite: bool) -> SavePlan:
        """Open the checkpoint and reserve names for the plan, which is returned with them. Done by the leader."""
        target, self.plan = self.target, plan
        target.refuse_foreign([tree.draft.prefix for tree in plan.trees], overwrite)  # before the lock creates anything
        with target.store.lock():
            current = clean_up(target, target.read_to_replace(overwrite))
            existing = self._concerned(current)
            for prefix, tree in existing.items() if not overwrite else ():
                damage = _damage_or_refuse(target, prefix, tree)
                log.warning("%s is damaged: %s. This save replaces it", name_tree(target.where, prefix), damage)
            self._replaced = {prefix: tree.save_id for prefix, tree in existing.items()}
            foreign = current is not None and any(tree.format == "foreign" for tree in current.trees.values())
            self._looks_for_others = foreign or not target.store.traits.costly_requests
            self.plan = target.reserve(plan, current)
            free = target.store.free_bytes()
            if free is not None and plan.nbytes + _SLACK > free:
                raise NotEnoughSpaceError(
                    f"saving to {target.where} needs {plan.nbytes + _SLACK:,} bytes and {free:,} are free; "
                    "nothing was written"
                )
            self._record()
        return self.plan

    def follow(self, plan: SavePlan) -> None:
        """Take part with the names that the leader has reserved. No lock is needed."""
        store = self.target.store
        self.plan = plan
        leaders = f"{store.saves}/{plan.save_id}"
        if store.size(leaders) is None:
            raise StorageError(
                f"saving to {self.target.where}: process {LEADER} sees a different directory at this path. All "
                "processes must save to the same shared directory or bucket. Nothing was written"
            )
        store.check_locks(leaders)
        self._record()

    def _concerned(self, manifest: Manifest | None) -> dict[str, Tree]:
        """The trees of a manifest that this save replaces, or is."""
        trees: Mapping[str, Tree] = manifest.trees if manifest else {}
        if self.replaces_all:
            return dict(trees)
        return {p: trees[p] for p in (plan.draft.prefix for plan in self.plan.trees) if p in trees}

    def _record(self) -> None:
        """Record durably, before anything is written, which names this process will use."""
        store, plan = self.target.store, self.plan
        suffix = "" if self.writer == LEADER else f".{self.writer}"
        self._held = store.hold(f"{store.saves}/{plan.save_id}{suffix}")
        self._held.take(record_lines(plan.names, plan.created))

    def note(self, told: object) -> None:
        """Add a line to the record."""
        assert self._held is not None
        self._held.append(json.dumps(told).encode())

    def close(self) -> None:
        """Remove the record, which is no longer needed."""
        if self._held is not None:
            self._held.remove()
        self._closed = True

    def release(self) -> None:
        """Give up: remove what was written unless it may be committed, or keep the record for a later save."""
        if self._closed or self._held is None:
            return
        store = self.target.store
        follows = self.attempted and self.writer != LEADER
        try:
            if follows and (store.traits.late_requests or not self.leader_gave_up):
                self._held.release()  # the leader may still commit, and may hold the lock for any time
                self._closed = True
                return
            with store.lock() if self.attempted and not follows else nullcontext():
                if self.attempted and self._is_committed():
                    self._held.release()
                else:
                    store.remove(self.plan.names)
                    self._held.remove()
        except (ShardkeepError, OSError) as error:
            log.warning("files of a failed save may remain at %s (%s)", self.target.where, error)
            self._held.release()
        self._closed = True

    def _is_committed(self) -> bool:
        """Whether this save is what is committed now, or what is left of it: a later one may replace single trees."""
        return self._is_in(self.target.read_if_any())

    def _is_in(self, manifest: Manifest | None) -> bool:
        """Whether a manifest has a tree of this save. Trees are committed together, so one of them shows it."""
        return any(tree.save_id == self.plan.save_id for tree in self._concerned(manifest).values())

    def commit(self, trees: Mapping[str, Tree], others: Mapping[str, tuple[int, int]]) -> None:
        """Make the trees, given by prefix, part of the checkpoint. An error says whether they were committed.

        `others` are the files that other processes have written: the size of each, and the process.
        """
        target = self.target
        with target.store.lock():
            old: list[str] = []
            for left in reversed(range(TRIES)):
                current = target.read_again() if self._looks_for_others else target.read_own()
                if self.attempted and current is not None and self._is_in(current):
                    return self._retire(current, current, old)  # only the answer was lost, and then another one fenced
                if any(tree.start for tree in self.plan.trees):
                    trees = target.adopt(trees, current)
                replaced = self._concerned(current)
                old = self._prepare(trees, replaced, others)
                there: Mapping[str, Tree] = current.trees if current else {}
                stays = {prefix: tree for prefix, tree in there.items() if prefix in trees or prefix not in replaced}
                after = Manifest(target.where, self.plan.save_id, {**stays, **trees})
                self.attempted = True
                try:
                    document = target.put(self.plan, after, current)
                except ConflictError as error:
                    if left == 0:
                        self._settle(error)
                    continue  # another process fenced, or saved another prefix: if it was ours, reading again shows it
                except OSError as error:
                    self._settle(error)
                else:
                    return self._retire(current, after, old, document)

    def _prepare(
        self, trees: Mapping[str, Tree], replaced: Mapping[str, Tree], others: Mapping[str, tuple[int, int]]
    ) -> list[str]:
        """Check that the trees may replace those that are there, and record the names that are removed then."""
        target, store = self.target, self.target.store
        for prefix in {**trees, **replaced, **self._replaced}:
            if (replaced[prefix].save_id if prefix in replaced else None) != self._replaced.get(prefix):
                raise ConflictError(
                    f"another save changed {name_tree(target.where, prefix)} while this one was running; "
                    "the other one is in place and untouched, this one was not committed"
                )
        if store.traits.has_directories and self.plan.save_id not in store.children(store.saves):
            raise StorageError(
                f"saving {self.name}: the directory was removed or renamed while this save was running. "
                "Nothing was committed"
            )
        if others:
            self._find(others)
        old = {name for tree in replaced.values() for name in target.names_of(tree)}
        old = sorted(old.difference(*map(target.names_of, trees.values()))) if old else []
        # In a bucket this is done even if there are no names: a process that takes the record over after this, and then
        # fences, does so after the document was read. So a put on condition of that document finds all files in place.
        if old or store.traits.late_requests:
            self.note(old)
        return old

    def _find(self, others: Mapping[str, tuple[int, int]]) -> None:
        """Check that the files of other processes are there. This is the only look at them, just before the commit.

        The processes may not share their storage, and a process that died after it handed in its part may have been
        cleaned up after. What is there now stays until the commit. On a disk, whoever removes files holds the lock,
        which is held here. In a bucket, whoever cleans up takes over the record of the leader, then changes the
        document, and only then removes files. If that begins before this record is put again (`note`), the put of the
        record is refused; if it begins later, the document changes after it was read, and its put is refused.
        """
        found = self.target.store.sizes(others)
        for name, (size, writer) in others.items():
            if found[name] != size:
                where = self.target.store.locate(name)
                raise StorageError(
                    f"saving {self.name}: processes {LEADER} and {writer} do not see the same files ({where}, written "
                    f"by process {writer}, is missing or truncated). All processes must save to the same shared "
                    "directory or bucket, and stay alive until it is committed. Nothing was committed"
                )

    def _retire(
        self, before: Manifest | None, after: Manifest, old: Sequence[str], document: str | None = None
    ) -> None:
        """Remove what was replaced, now that `after` is committed; failing to do so does not undo the save."""
        target = self.target
        # In a bucket the names of documents are used again, so documents are replaced and never removed.
        documents = () if target.store.traits.late_requests or document is None else target.documents
        try:
            if unneeded := {*old, *documents} - {document}:
                unneeded -= names_in(target, after)
            if target.retire(unneeded, before, after):
                self.close()
        except OSError as error:
            log.warning("%s is saved, but files of the replaced tree remain (%s)", self.name, error)

    def _settle(self, error: OSError) -> None:
        """Report a commit that failed, after reading back what is there. Nothing that may be needed is deleted."""
        try:
            committed = self._is_committed()
        except (ShardkeepError, OSError) as unreadable:
            raise CommitUnknownError(
                f"saving {self.name}: the commit failed ({error}) and what is there cannot be read back "
                f"({unreadable}); nothing was deleted. The outcome is unknown until it can be read"
            ) from error
        if not committed:
            raise error
        raise StorageError(
            f"saving {self.name}: the new checkpoint is committed and in place, but the disk did not confirm that it "
            f"will survive a power cut ({error}); the files of the old one were kept"
        ) from error

    def outcome(self) -> str:
        """For an error: what is committed now."""
        try:
            if self.attempted and self.writer != LEADER:
                return self._without_leader()
            if self.attempted and self._is_committed():
                return _COMMITTED
        except (ShardkeepError, OSError) as error:
            return f"What {self.target.where} now holds cannot be read ({error})"
        return _NOT_COMMITTED

    def _without_leader(self) -> str:
        """For a process that wrote its part and stops waiting for the commit: what is known about the commit.

        No lock is taken: a leader that died or was stopped during the commit may hold it.
        """
        store, save_id = self.target.store, self.plan.save_id
        if store.traits.late_requests:
            fence(self.target, save_id)
            final = not self.target.layout.gathers  # the put of a single exchange file may already be on its way
        else:
            final = _is_dead(store, save_id)
        if self._is_committed():
            return _COMMITTED
        if final:
            return _NOT_COMMITTED
        return (
            f"Process {LEADER} may still commit it: inspect the checkpoint before you rely on either state. "
            "What was there before is intact until then"
        )


def refuse_existing(target: Target, prefixes: Collection[str]) -> None:
    """Raise early what `begin` refuses without `overwrite`: a complete tree of a prefix, or another program's file.

    A tree that is damaged is not refused: `begin` looks again with the lock held, and the save replaces it.
    """
    try:
        current = target.read_if_any()
    except IntegrityError:
        return
    existing = {prefix: tree for prefix, tree in current.trees.items() if prefix in prefixes} if current else {}
    if not existing:
        target.refuse_foreign(prefixes, overwrite=False)
    for prefix, tree in existing.items():
        _damage_or_refuse(target, prefix, tree)


def _damage_or_refuse(target: Target, prefix: str, existing: Tree) -> str:
    """What is damaged in the tree of a prefix; `CheckpointExistsError` if it is complete."""
    damage = find_damage(target.store, [existing], described=not target.store.traits.costly_requests)
    if damage is None:
        what = f"a tree with prefix {prefix!r}" if prefix else "a checkpoint"
        raise CheckpointExistsError(f"{target.where} already holds {what}; pass overwrite=True to replace it")
    return damage


def _is_dead(store: Store, save_id: str) -> bool:
    """Whether the process that made this save has ended and left its record. On a disk, the kernel frees its lock."""
    with Scope(f"inspecting {store.url}") as scope:
        return store.try_hold(f"{store.saves}/{save_id}", scope) is not None
