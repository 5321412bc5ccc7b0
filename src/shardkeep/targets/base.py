"""What a save asks of the place that it commits to (a Target), and the save's turn there."""

import json
import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from shardkeep.errors import ShardkeepError
from shardkeep.layouts.plan import Draft, FilePlan, SavePlan, StagedLeaf, WrittenFile
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.model.tree import Path
from shardkeep.processes.operation import LEADER
from shardkeep.stores.base import Held, Store
from shardkeep.targets.running import record_lines

log = logging.getLogger("shardkeep")

LOCK_SECONDS = 60.0


class Target(Protocol):
    """A place for a checkpoint and the documents that commit it: a directory with a manifest, or exchange files."""

    @property
    def store(self) -> Store: ...

    @property
    def where(self) -> str:
        """The path or URL, for messages."""
        ...

    @property
    def documents(self) -> Sequence[str]:
        """The names of the files that can commit a checkpoint."""
        ...

    @property
    def companions(self) -> Sequence[str]:
        """The names of files written for other programs, which are removed together with the checkpoint."""
        ...

    @property
    def keeps_control(self) -> bool:
        """Whether the control directory stays when no save is running."""
        ...

    def read_if_any(self) -> Manifest | None:
        """What is committed; None if nothing is. `IntegrityError` if it is damaged."""
        ...

    def read(self) -> Manifest:
        """What is committed; otherwise an error that says what is there instead."""
        ...

    def read_to_replace(self, overwrite: bool) -> Manifest | None:
        """What is committed, for a save that may replace it. Call it with the lock held.

        A damaged manifest is set aside, with a warning, and None is returned. Damaged exchange files are replaced, with
        a warning; only with `overwrite` if they may be another program's.
        """
        ...

    def read_again(self) -> Manifest | None:
        """What is committed, for the commit of a save that began with `read_to_replace`."""
        ...

    def foreign_document(self, inside: Collection[str]) -> str | None:
        """The path of another program's file that has the name of one of the documents; None if there is none.

        Args:
            inside: The names in the directory.
        """
        ...

    def check(self, paths: Sequence[Path]) -> None:
        """Refuse arrays that this target has no names for, before anything is written."""
        ...

    def describe(self) -> str:
        """The format, in a few words."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether arrays that span processes are gathered in the first process."""
        ...

    def plan(
        self, leaves: Sequence[StagedLeaf], draft: Draft, current: Manifest | None, at: str | None = None
    ) -> SavePlan:
        """Unused names, and the layout, for everything a save will write; or the names below `at`."""
        ...

    def complete(self, turn: "Turn", file: FilePlan, written: WrittenFile) -> bytes:
        """The header of a file whose digests are known, where `finish` cannot fill it in."""
        ...

    def finish(self, turn: "Turn", tree: Tree) -> Tree:
        """Complete the files that describe the whole save, durably."""
        ...

    def names_of(self, tree: Tree) -> set[str]:
        """Every name that belongs to a tree: its files, and what is kept there for other programs."""
        ...

    def adopt(self, turn: "Turn", tree: Tree, current: Manifest | None) -> Tree:
        """The tree as it is to be committed, with the names that it takes over from the tree it replaces.

        Called if the plan has a directory, with the lock held.
        """
        ...

    def retire(self, names: Collection[str], before: Manifest | None, after: Manifest | None) -> bool:
        """Remove names that nothing needs any more, and update what other programs read.

        `after` is committed; `before` was until now, or is the same in a clean-up. Returns whether all of it was done.
        """
        ...

    def put(self, turn: "Turn", tree: Tree, current: Manifest | None) -> str:
        """Commit the tree in one step; returns the name of the document that commits it."""
        ...

    def fence(self) -> Manifest | None:
        """In a bucket: put the document again with a new nonce, so that late puts of dead saves are refused.

        Returns what is committed; `ConflictError` if another writer replaced the document at the same time.
        """
        ...


@dataclass(eq=False)
class Turn:
    """One save to a target, from `begin` until it is committed or released."""

    target: Target
    draft: Draft
    plan: SavePlan = field(init=False)
    held: Held | None = None
    base_id: str | None = None
    writer: int = LEADER
    leader_gave_up: bool = False  # the leader has reported an error and will not commit
    attempted: bool = False  # the commit may have started: only reading back shows whether it happened
    closed: bool = False

    def __post_init__(self) -> None:
        self.plan = SavePlan(self.draft.save_id, "", None, self.draft.skeleton, (), ())  # empty until `begin`

    @property
    def name(self) -> str:
        prefix = self.draft.prefix
        return f"{self.target.where} (prefix {prefix!r})" if prefix else self.target.where

    def record(self) -> None:
        """Record durably, before anything is written, which names this process will use."""
        store = self.target.store
        suffix = "" if self.writer == LEADER else f".{self.writer}"
        self.held = store.hold(f"{store.saves}/{self.draft.save_id}{suffix}")
        self.held.take(record_lines([file.name for file in self.plan.files_of(self.writer)], self.draft.created))

    def note(self, told: object) -> None:
        """Add a line to the record."""
        assert self.held is not None
        self.held.append(json.dumps(told).encode())

    def close(self) -> None:
        """Remove the record, which is no longer needed."""
        if self.held is not None:
            self.held.remove()
        self.closed = True

    def release(self) -> None:
        """Give up: remove what was written unless it may be committed, or keep the record for a later save."""
        if self.closed or self.held is None:
            return
        store = self.target.store
        follows = self.attempted and self.writer != LEADER
        try:
            if follows and (store.remote or not self.leader_gave_up):
                self.held.release()  # the leader may still commit, and may hold the lock for any time
                self.closed = True
                return
            with store.lock(LOCK_SECONDS) if self.attempted and not follows else nullcontext():
                if self.attempted and is_committed(self):
                    self.held.release()
                else:
                    store.remove(file.name for file in self.plan.files_of(self.writer))
                    self.held.remove()
        except (ShardkeepError, OSError) as error:
            log.warning("files of a failed save may remain at %s (%s)", self.target.where, error)
            self.held.release()
        self.closed = True


def is_committed(turn: Turn) -> bool:
    """Whether what is committed now is this save."""
    now = turn.target.read_if_any()
    tree = now.trees.get(turn.draft.prefix) if now else None
    return tree is not None and tree.save_id == turn.plan.save_id
