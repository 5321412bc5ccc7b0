"""What shardkeep asks of a reader of other programs' checkpoints, and of documents that it writes for them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardkeep.model.arrays import Array, Region
from shardkeep.model.leaves import StoredArray
from shardkeep.model.manifest import Manifest
from shardkeep.stores.base import Store


class ArrayReader(Protocol):
    """One array that another program wrote. It has no digests, so the reader says what is missing or damaged.

    Any method may raise `IntegrityError`, or `MissingDataError` for data that is not there. Use it on one thread.
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


class ForeignReader(Protocol):
    """A kind of checkpoint directory that another program writes.

    Arrays whose bytes are somewhere in a file, as they are, can be described by a `Piece` without digests. Others have
    the origin `ForeignArray`, with the reader's `kind`, and are read by what `open` returns.
    """

    @property
    def name(self) -> str:
        """What `shardkeep ls` calls such a checkpoint."""
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
