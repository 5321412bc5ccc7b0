"""Damage that file sizes show: files of a checkpoint that are missing, truncated or too long. No contents are read."""

from collections.abc import Iterable, Mapping

from shardkeep.errors import IntegrityError
from shardkeep.foreign.registry import open_array
from shardkeep.model.leaves import ForeignArray, StoredArray
from shardkeep.model.manifest import Tree
from shardkeep.stores.base import Store


def find_damage(store: Store, trees: Iterable[Tree], described: bool = True) -> str | None:
    """What is wrong with the sizes of the files that `trees` name; None if all files are there with their sizes.

    On a disk this costs one `stat` per file, in a bucket at most one LIST request per 1,000 objects.

    Args:
        store: Where the checkpoint is.
        trees: The trees to check.
        described: Whether what describes the arrays of other programs, such as `.zarray` files, is read: it tells how
            many chunks there should be.
    """
    trees = list(trees)
    sizes = store.sizes(dict.fromkeys(file.name for tree in trees for file in tree.files))
    files = {file.name: file.size for tree in trees for file in tree.files}
    wrong = [name for name, size in files.items() if sizes[name] != size]
    if wrong:
        where = store.locate(wrong[0])
        found = sizes[wrong[0]]
        what = "is missing" if found is None else f"has {found:,} bytes instead of {files[wrong[0]]:,}"
        more = f"; {len(wrong):,} of {len(files):,} files are missing or have the wrong size" if len(wrong) > 1 else ""
        return f"{where} {what}{more}"
    arrays = (leaf for tree in trees for leaf in tree.arrays) if described else ()
    foreign = (leaf for leaf in arrays if isinstance(leaf.origin, ForeignArray))
    return next((text for leaf in foreign if (text := _find_in_array(store, leaf, files))), None)


def _find_in_array(store: Store, leaf: StoredArray, files: Mapping[str, int]) -> str | None:
    """What is wrong with an array that another program wrote, as far as the sizes of files show it."""
    try:
        return open_array(store, leaf).find_damage(files)
    except IntegrityError as error:
        return str(error)
