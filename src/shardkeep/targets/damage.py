"""Damage that file sizes show: files of a checkpoint that are missing, truncated or too long. No contents are read."""

from collections.abc import Iterable

from shardkeep.errors import IntegrityError, missing_of
from shardkeep.foreign.zarr import describe
from shardkeep.model.arrays import Region
from shardkeep.model.leaves import ForeignArray
from shardkeep.model.manifest import Tree
from shardkeep.stores.base import Store


def find_damage(store: Store, trees: Iterable[Tree], described: bool = True) -> str | None:
    """What is wrong with the sizes of the files that `trees` name; None if all files are there with their sizes.

    On a disk this costs one `stat` per file, in a bucket at most one LIST request per 1,000 objects.

    Args:
        store: Where the checkpoint is.
        trees: The trees to check.
        described: Whether the `.zarray` files of arrays that other programs wrote are read, which tells how many chunks
            there should be.
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
    arrays = ((leaf.key, leaf.origin) for tree in trees for leaf in tree.arrays) if described else ()
    foreign = ((key, origin.directory) for key, origin in arrays if isinstance(origin, ForeignArray))
    return next((text for key, directory in foreign if (text := _missing_chunks(store, key, directory, files))), None)


def _missing_chunks(store: Store, key: str, directory: str, files: dict[str, int]) -> str | None:
    """What is wrong with the chunks of an array that another program wrote, as far as sizes show it."""
    try:
        array = describe(store, directory)
    except IntegrityError as error:
        return str(error)
    whole = Region.whole(array.spec.shape)
    count = array.chunk_count(whole)
    start = f"{directory}/" if directory else ""
    if count > len(files):  # it may claim more chunks than any disk holds
        return f"leaf {key!r}: chunks are missing in {store.locate(directory)}"
    chunks = [files.get(start + name) for name in array.chunk_names(whole)]
    if None in chunks:
        return f"leaf {key!r}: {missing_of(chunks.count(None), count)}"
    if array.compressor is None and any(size != array.chunk_bytes for size in chunks):
        return f"leaf {key!r}: a chunk in {store.locate(directory)} is truncated"
    return None
