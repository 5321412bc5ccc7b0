"""Arrays of any checkpoint, read block by block into host memory: bounded, verified, and without a device."""

import os
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from shardkeep.catalog import open_checkpoint
from shardkeep.converting.usage import UsageError
from shardkeep.errors import ConflictError
from shardkeep.foreign.registry import open_array
from shardkeep.loading.blocks import BlockReader
from shardkeep.loading.plan import Destination, plan_read
from shardkeep.loading.read import read_into
from shardkeep.model.arrays import Array, Region, bands, split_region
from shardkeep.model.leaves import ForeignArray, StoredArray, StoredLeaf
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.model.tree import name_leaf
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.progress import Progress
from shardkeep.stores.base import CONTROL, Store
from shardkeep.stores.location import location
from shardkeep.targets.steady import Attempt

READ_BYTES = 16 << 20  # bytes that each thread reads at once
_EXAMPLES = 3  # keys that a message lists


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is being read."""

    path: str
    store: Store
    manifest: Manifest

    def source(self, tree: Tree) -> BlockReader:
        return BlockReader(self.store, tree.files, tree.compression, mapped=self.store.mappable)

    def look(self) -> Manifest:
        """The manifest as it is now."""
        return open_checkpoint(location(self.path))[1]


def open_at(path: str) -> Opened:
    """The checkpoint at `path`, whichever program wrote it."""
    return Opened(path, *open_checkpoint(location(path)))


@contextmanager
def steady(*checkpoints: Opened) -> Generator[None]:
    """Read a single version of each checkpoint inside this context.

    Raises:
        ConflictError: A writer replaced one of them in the meantime.
    """
    with ExitStack() as stack:
        attempts = [stack.enter_context(Attempt(each.manifest, each.look)) for each in checkpoints]
        yield
        for checkpoint, attempt in zip(checkpoints, attempts, strict=True):
            # In a directory digests tell one state from another. Exchange files and arrays of other programs have none.
            foreign = any(tree.format == "foreign" for tree in checkpoint.manifest.trees.values())
            attempt.sure = not foreign and os.path.basename(checkpoint.store.control) == CONTROL
    for checkpoint, attempt in zip(checkpoints, attempts, strict=True):
        if attempt.replaced:
            raise ConflictError(f"{checkpoint.path} was replaced while it was being read; run the command again")


def compile_include(include: str | None) -> re.Pattern[str] | None:
    """The pattern that `--include` gives; None without the option."""
    try:
        return None if include is None else re.compile(include)
    except re.error as error:
        raise UsageError(f"--include {include!r} is not a valid regular expression: {error}") from None


def no_match(include: str, trees: Iterable[Tree], where: str) -> UsageError:
    """The error for an `--include` that matches no leaf."""
    keys = list(dict.fromkeys(name_leaf(leaf.path) for tree in trees for leaf in tree.leaves))
    more = ", …" if len(keys) > _EXAMPLES else ""
    found = f"the keys are {', '.join(keys[:_EXAMPLES])}{more}" if keys else "there are no leaves"
    return UsageError(f"--include {include!r} matches no leaf in {where}; {found}")


def choose_trees(manifest: Manifest, prefix: str | None) -> dict[str, Tree]:
    """The trees of a checkpoint by prefix: all of them, or the one with the given prefix."""
    if prefix is None:
        return dict(manifest.trees)
    tree = manifest.tree(prefix)
    names = [name for name, candidate in manifest.trees.items() if candidate is tree]
    return {names[0] if names else prefix: tree}


def matches(leaf: StoredLeaf, include: re.Pattern[str] | None) -> bool:
    """Whether `include` matches a leaf's key, as in `shardkeep.load`: `re.search` on the names joined with `/`."""
    return include is None or include.search("/".join(leaf.path)) is not None


def regions_of(opened: Opened, leaf: StoredArray, limit: int = READ_BYTES) -> list[Region]:
    """Regions of at most `limit` bytes that cover an array, chosen so that every stored piece is read once.

    A compressed piece can only be decompressed as a whole, so it is one region, whatever its size.
    """
    itemsize = leaf.spec.dtype.itemsize
    if isinstance(leaf.origin, ForeignArray):
        cells = bands(leaf.spec.shape, itemsize, open_array(opened.store, leaf).chunks, limit)
        return [cell for cell in cells if cell.size]
    found: list[Region] = []
    for piece in leaf.pieces:
        found += [piece.region] if piece.stored is not None else split_region(piece.region, itemsize, limit)
    return [region for region in found if region.size]


def read_region(reader: BlockReader, leaf: StoredArray, region: Region, progress: Progress) -> Array:
    """A verified region of an array as NumPy. Do not write to it: it may be the memory-mapped file."""
    destination = Destination(leaf, [region], own=False, arrays=[None])
    # One thread, because the caller runs several of these at once.
    read_into(reader, {0: destination}, plan_read(0, leaf, [region]), READ_BYTES, Crew(1), progress)
    return destination.whole


def runs_of(array: Array, count: int = 1 << 15) -> Iterator[Array]:
    """An array as flat runs, short enough that the results of computing with one stay in the CPU's cache."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, count):
        yield flat[start : start + count]
