"""What shardkeep asks of a reader of other programs' checkpoints, and of documents that it writes for them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from shardkeep.errors import CheckpointNotFoundError
from shardkeep.model.arrays import Array, ArraySpec, Region
from shardkeep.model.leaves import UNREADABLE, ForeignArray, StoredArray
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.model.tree import Path
from shardkeep.runtime.progress import Progress
from shardkeep.stores.base import Store


class UnreadableError(ValueError):
    """A file, or an array in it, is not damaged, but holds something that is not read."""


class ArrayReader(Protocol):
    """One array that another program wrote. It has no digests, so the reader says what is missing or damaged.

    All methods may raise `IntegrityError`, or `MissingDataError` for data that is not there. Use it on one thread.
    """

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of the parts that it is stored in: of each, all is read, whatever is asked for."""
        ...

    def read(self, region: Region) -> Array:
        """A region, as an array in C order that the caller may write to."""
        ...

    def check(self) -> None:
        """Return only if `read` can read all of it."""
        ...

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        """What the sizes of the checkpoint's files, by name, show to be damaged. No data is read."""
        ...


def unreadable(path: Path, file: str, reason: str, spec: ArraySpec | None = None) -> StoredArray:
    """A leaf that stands for something that cannot be read, so that all else can. Whoever loads it is told why.

    Args:
        path: Its path in the tree.
        file: The name of the file that it is in.
        reason: Why it is not read, as a sentence without its end.
        spec: Its shape and dtype, if it is an array that one can have.
    """
    place = ForeignArray(f"{file}\0{reason}", UNREADABLE)
    return StoredArray(path, spec or ArraySpec((), np.dtype(np.uint8)), (), place)


class UnreadableArray:
    """Reads nothing, and says why; an `ArrayReader`."""

    def __init__(self, store: Store, leaf: StoredArray) -> None:
        """Stand for a leaf that `unreadable` gave."""
        assert isinstance(leaf.origin, ForeignArray)
        self._leaf = leaf
        self._where = store.locate(leaf.origin.directory.partition("\0")[0])

    @property
    def chunks(self) -> tuple[int, ...]:
        return tuple(max(extent, 1) for extent in self._leaf.spec.shape)

    def read(self, region: Region) -> Array:
        raise CheckpointNotFoundError(
            f"leaf {self._leaf.key!r} of {self._where} cannot be read: {self._leaf.unreadable}. Load the others with "
            "include= and a pattern that does not match it"
        )

    def check(self) -> None:
        self.read(Region.whole(self._leaf.spec.shape))

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        """None: what is there is not damaged."""


class ForeignReader(Protocol):
    """A kind of checkpoint directory that another program writes.

    Arrays whose bytes are somewhere in a file, as they are, can be described by a `Piece` without digests. Others have
    the origin `ForeignArray`, with the reader's `kind`, and are read by what `open` returns.
    """

    @property
    def name(self) -> str:
        """What such a checkpoint is called: the `source` of its trees, which `shardkeep ls` shows as its kind."""
        ...

    @property
    def kind(self) -> str:
        """The kind of its arrays in manifests: readers of the same kind read each other's arrays."""
        ...

    def recognizes(self, names: Collection[str]) -> bool:
        """Whether the names in a directory suffice to tell that it is such a checkpoint, or was meant to be one."""
        ...

    def detect(self, store: Store, names: Collection[str]) -> Manifest | None:
        """The checkpoint in a directory, as a manifest of trees with the format "foreign"; None if there is none.

        Everything in it is checked: names stay inside the directory, and the files listed are those that are there.

        Args:
            store: The directory or bucket prefix.
            names: What is directly in it. Among them may be a manifest or control directory of ours, with nothing
                committed: what a search would find there may be the rest of a dead save.

        Raises:
            IntegrityError: There is such a checkpoint, but its description is damaged.
        """
        ...

    def open(self, store: Store, leaf: StoredArray) -> ArrayReader:
        """One of its arrays. `IntegrityError` if its own description is missing or damaged."""
        ...


class FileReader(Protocol):
    """A kind of checkpoint that another program writes as one file, or as several files with names of one pattern.

    Files of any other kind may lie beside it. What it says of arrays is as in a `ForeignReader`.
    """

    @property
    def name(self) -> str:
        """What such a checkpoint is called: the `source` of its trees, which `shardkeep ls` shows as its kind."""
        ...

    @property
    def kind(self) -> str:
        """The kind of its arrays in manifests that have the origin `ForeignArray`."""
        ...

    @property
    def main(self) -> Collection[str]:
        """Names of files that a folder stands for, even if it holds others of this kind (`pytorch_model.bin`)."""
        ...

    def among(self, names: Collection[str]) -> Sequence[str]:
        """Those of the names in a directory that are checkpoints of this kind, as far as names tell.

        Several files that are one checkpoint are named by one of them, which is what `detect` is given then.
        """
        ...

    def detect(self, store: Store, name: str) -> Manifest | None:
        """The checkpoint in a file, as a manifest of a tree with the format "foreign"; None if it is of another kind.

        Everything in it is checked, as by a `ForeignReader`. The file exists, and may have any name and any content:
        look at the name or at the first bytes before reading more.

        Args:
            store: The directory of the file, or the bucket prefix.
            name: The name of the file in it, which need not be one that `among` gives.

        Raises:
            CheckpointNotFoundError: It is of this kind, in a form that cannot be read. Say which, and what to do.
            IntegrityError: It is of this kind, but damaged.
        """
        ...

    def open(self, store: Store, leaf: StoredArray) -> ArrayReader:
        """One of its arrays that have no pieces. `IntegrityError` if its own description is missing or damaged."""
        ...


@runtime_checkable
class ChecksummedReader(Protocol):
    """A reader of files that have checksums of their own, which `verify` compares instead of only reading them."""

    def checks(self, store: Store, tree: Tree) -> Sequence[Callable[[Progress], None]]:
        """Tasks that together read the files of a tree. Each raises `IntegrityError` for what is damaged."""
        ...


@dataclass(frozen=True)
class CompanionIndex:
    """What an index for another program says.

    `save_id` is that of the save of ours that wrote it, if we did. `arrays` are the directories of the arrays it lists;
    None if it cannot be parsed.
    """

    save_id: str | None
    arrays: frozenset[str] | None


class Companions(Protocol):
    """Documents beside our manifest that let another program read our trees. We never need them ourselves."""

    @property
    def program(self) -> str:
        """The program that reads them."""
        ...

    @property
    def index(self) -> str:
        """The name of the document that lists arrays. Without it, the program sees nothing."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The names of all documents, the index included."""
        ...

    def read_index(self, store: Store) -> CompanionIndex | None:
        """The index in a directory, whoever wrote it; None if there is none."""
        ...

    def documents(self, manifest: Manifest, empty: bool = False) -> dict[str, bytes | None]:
        """What goes with a manifest, by name, in the order of writing; None for a document that must not exist.

        Args:
            manifest: What is committed.
            empty: If the program can read none of the trees, return an index without arrays instead of none.
        """
        ...

    def carry_metadata(
        self, before: Tree, after: Sequence[StoredArray], same: Mapping[Path, Path]
    ) -> Mapping[str, object]:
        """The metadata of a tree whose arrays were changed: what the program recorded of each array goes with it.

        Args:
            before: The tree with its metadata. Unless the program described it, its metadata stays as it is.
            after: The arrays that there are now.
            same: For those that hold what an array of `before` did, under whatever name: its path by theirs.
        """
        ...
