"""Which programs' checkpoints are read, and which programs find documents for them beside our manifest.

To read another kind of checkpoint, write a module in this package with a `ForeignReader` (a kind that fills a
directory) or a `FileReader` (a kind that is one file or a set of files), and list it here.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from shardkeep.errors import IntegrityError
from shardkeep.foreign.base import (
    ArrayReader,
    ChecksummedReader,
    Companions,
    FileReader,
    ForeignReader,
    UnreadableArray,
)
from shardkeep.foreign.dcp import DcpReader
from shardkeep.foreign.documents import names_below
from shardkeep.foreign.eformer import EformerIndex, EformerReader
from shardkeep.foreign.flax import FlaxReader
from shardkeep.foreign.jaxarrays import JaxReader
from shardkeep.foreign.keras import KerasReader
from shardkeep.foreign.numpy import NumpyReader
from shardkeep.foreign.orbax import OrbaxReader
from shardkeep.foreign.torch import TorchReader
from shardkeep.model.leaves import StoredArray
from shardkeep.model.manifest import OURS, Manifest, Tree
from shardkeep.model.tree import Path
from shardkeep.runtime.progress import Progress
from shardkeep.stores.base import Store

READERS: list[ForeignReader] = [OrbaxReader(), JaxReader(), DcpReader(), EformerReader()]
FILE_READERS: list[FileReader] = [FlaxReader(), KerasReader(), NumpyReader(), TorchReader()]
COMPANIONS: list[Companions] = [EformerIndex()]


def detect(store: Store, names: Collection[str]) -> Manifest | None:
    """Another program's checkpoint in a directory; None if there is none that can be read.

    Args:
        store: The directory or bucket prefix.
        names: What is directly in it.
    """
    for reader in READERS:
        found = reader.detect(store, names)
        if found is not None:
            return _said_by(reader, found)
    return None


def detect_file(store: Store, name: str) -> Manifest | None:
    """Another program's checkpoint in a file, or in files of which one is given; None if it cannot be read."""
    for reader in FILE_READERS:
        found = reader.detect(store, name)
        if found is not None:
            return _said_by(reader, found)
    return None


def checks_of(store: Store, tree: Tree) -> Sequence[Callable[[Progress], None]] | None:
    """Tasks that compare a tree's files with the checksums that their format has; None if it has none.

    Each raises `IntegrityError` for what is damaged. Together they read all that `load` would.
    """
    found = (reader for reader in FILE_READERS if reader.name == tree.source and isinstance(reader, ChecksummedReader))
    reader = next(found, None)
    return None if reader is None else reader.checks(store, tree)


def _said_by(reader: ForeignReader | FileReader, found: Manifest) -> Manifest:
    """A manifest that says which reader described its trees, unless it says so itself."""
    named = {p: replace(t, source=reader.name) if t.source == OURS else t for p, t in found.trees.items()}
    return replace(found, trees=named)


def checkpoint_files(names: Collection[str]) -> list[str]:
    """Those of the names in a directory that are, by themselves, other programs' checkpoints."""
    found = [name for reader in FILE_READERS for name in reader.among(names)]
    return list(dict.fromkeys(found))


def main_files(names: Collection[str]) -> list[str]:
    """Those of the names in a directory that the directory stands for, whatever other files it holds."""
    return list(dict.fromkeys(name for reader in FILE_READERS for name in reader.main if name in names))


def is_recognized(names: Collection[str]) -> bool:
    """Whether the names in a directory tell that another program's checkpoint is there, or was meant to be."""
    return any(reader.recognizes(names) for reader in READERS)


def is_recognized_below(store: Store, names: Collection[str]) -> bool:
    """Whether what is in the directories of a place tells so. Costs a listing of each, if there are few."""
    return is_recognized(names_below(store, names))


def carry_metadata(before: Tree, after: Sequence[StoredArray], same: Mapping[Path, Path]) -> Mapping[str, object]:
    """The metadata of a tree whose arrays were changed; see `Companions.carry_metadata`."""
    for companions in COMPANIONS:
        before = replace(before, metadata=companions.carry_metadata(before, after, same))
    return before.metadata


def open_array(store: Store, leaf: StoredArray) -> ArrayReader:
    """The reader of an array that another program wrote. `IntegrityError` if its description is damaged."""
    if leaf.unreadable is not None:
        return UnreadableArray(store, leaf)
    reader = next((reader for reader in (*READERS, *FILE_READERS) if reader.kind == leaf.origin.kind), None)
    if reader is None:
        raise IntegrityError(
            f"leaf {leaf.key!r} is an array of another program, of the kind {leaf.origin.kind!r}, which this version "
            "of shardkeep cannot read"
        )
    return reader.open(store, leaf)
