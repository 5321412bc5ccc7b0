"""Which programs' checkpoints are read, and which programs find documents for them beside our manifest.

To read another kind of checkpoint, write a module in this package with a `ForeignReader` (a kind that fills a
directory) or a `FileReader` (a kind that is one file or a set of files), and list it here.
"""

from collections.abc import Collection

from shardkeep.errors import IntegrityError
from shardkeep.foreign.base import ArrayReader, Companions, FileReader, ForeignReader
from shardkeep.foreign.eformer import EformerIndex, EformerReader
from shardkeep.model.leaves import StoredArray
from shardkeep.model.manifest import Manifest
from shardkeep.stores.base import Store

READERS: list[ForeignReader] = [EformerReader()]
FILE_READERS: list[FileReader] = []
COMPANIONS: list[Companions] = [EformerIndex()]


def detect(store: Store, names: Collection[str]) -> Manifest | None:
    """Another program's checkpoint in a directory; None if there is none that can be read.

    Args:
        store: The directory or bucket prefix.
        names: What is directly in it.
    """
    found = (reader.detect(store, names) for reader in READERS)
    return next((manifest for manifest in found if manifest is not None), None)


def detect_file(store: Store, name: str) -> Manifest | None:
    """Another program's checkpoint in a file, or in files of which one is given; None if it cannot be read."""
    found = (reader.detect(store, name) for reader in FILE_READERS)
    return next((manifest for manifest in found if manifest is not None), None)


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


def name_reader(names: Collection[str], manifest: Manifest) -> str:
    """What a checkpoint is called in listings, if all of its trees are another program's."""
    kinds = {leaf.kind for tree in manifest.trees.values() for leaf in tree.arrays}
    known = (reader.name for reader in READERS if reader.kind in kinds or reader.recognizes(names))
    of_files = (reader.name for reader in FILE_READERS if reader.kind in kinds or reader.among(names))
    return next(known, None) or next(of_files, "foreign")


def open_array(store: Store, leaf: StoredArray) -> ArrayReader:
    """The reader of an array that another program wrote. `IntegrityError` if its description is damaged."""
    reader = next((reader for reader in (*READERS, *FILE_READERS) if reader.kind == leaf.kind), None)
    if reader is None:
        raise IntegrityError(
            f"leaf {leaf.key!r} is an array of another program, of the kind {leaf.kind!r}, which this version of "
            "shardkeep cannot read"
        )
    return reader.open(store, leaf)
