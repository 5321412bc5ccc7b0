"""What a load asks of the place that it reads, a ReadTarget, and a save of the place that it commits to, a Target."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from shardkeep.layouts.plan import Layout, SavePlan
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.stores.base import Store


class ReadTarget(Protocol):
    """A place from which a checkpoint is read, and the documents that say what it holds."""

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

    def read_if_any(self) -> Manifest | None:
        """What is committed; None if nothing is. `IntegrityError` if it is damaged."""
        ...

    def read(self) -> Manifest:
        """What is committed; otherwise an error that says what is there instead."""
        ...


class Target(ReadTarget, Protocol):
    """A place for a checkpoint and the documents that commit it: a directory with a manifest, or exchange files."""

    @property
    def layout(self) -> Layout:
        """How the files of new trees are laid out."""
        ...

    @property
    def keeps_control(self) -> bool:
        """Whether the control directory stays when no save is running."""
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

    def read_own(self) -> Manifest | None:
        """The same, if there was no other program's checkpoint when the save began.

        One that appears during the save is not looked for: in a bucket that lists every object that the save wrote.
        """
        ...

    def foreign_document(self, inside: Collection[str]) -> str | None:
        """The path of another program's file that has the name of one of the documents; None if there is none.

        Args:
            inside: The names in the directory.
        """
        ...

    def refuse_foreign(self, prefixes: Collection[str], overwrite: bool) -> None:
        """`CheckpointExistsError` if a save would replace another program's file, or hide its arrays."""
        ...

    def reserve(self, plan: SavePlan, current: Manifest | None) -> SavePlan:
        """The plan with names that nothing uses, and with what it notes of the committed state.

        Called with the lock held, which is kept until the names are recorded.
        """
        ...

    def names_of(self, tree: Tree) -> set[str]:
        """Every name that belongs to a tree: its files, and what is kept there for other programs."""
        ...

    def adopt(self, trees: Mapping[str, Tree], current: Manifest | None) -> Mapping[str, Tree]:
        """The trees as they are to be committed, with the names that each takes over from the tree it replaces.

        Called with the lock held.
        """
        ...

    def put(self, plan: SavePlan, manifest: Manifest, current: Manifest | None) -> str:
        """Commit a new manifest in one step; returns the name of the document that commits it."""
        ...

    def retire(self, names: Collection[str], before: Manifest | None, after: Manifest | None) -> bool:
        """Remove names that nothing needs any more, and update what other programs read.

        `after` is committed; `before` was until now, or is the same in a clean-up. Returns whether all of it was done.
        """
        ...

    def fence(self) -> Manifest | None:
        """In a bucket: put the document again with a new nonce, so that late puts of dead saves are refused.

        Returns what is committed; `ConflictError` if another writer replaced the document at the same time.
        """
        ...


def name_tree(where: str, prefix: str, *more: str) -> str:
    """A tree at a path, or several, for messages.

    >>> name_tree("run", "ema"), name_tree("run", "", "ema")
    ("run (prefix 'ema')", "run (without a prefix, prefix 'ema')")
    """
    if not prefix and not more:
        return where
    shown = ", ".join(f"prefix {each!r}" if each else "without a prefix" for each in (prefix, *more))
    return f"{where} ({shown})"
