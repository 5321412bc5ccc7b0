"""Writing any checkpoint in another format, in bounded memory.

The arrays that are stored are backed by files: memory-mapped from the source or, if they must be decompressed, cast or
assembled, prepared in an unnamed scratch file next to the destination. So the operating system can evict their pages
whenever it needs memory. No array is put on a device, and no class of the tree has to be imported.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from shardkeep.catalog import new_target
from shardkeep.converting.blocks import Opened, choose_trees, compile_include, matches, no_match, open_at, steady
from shardkeep.converting.rename import renamed, subtrees
from shardkeep.converting.rules import remapped
from shardkeep.converting.scratch import cast_spec, make, recorded_leaf, snapshot_of
from shardkeep.converting.usage import UsageError
from shardkeep.errors import IntegrityError
from shardkeep.foreign.registry import carry_metadata
from shardkeep.layouts.plan import Draft
from shardkeep.model.arrays import DType, parse_dtype
from shardkeep.model.leaves import StoredArray
from shardkeep.model.manifest import Tree, check_prefix
from shardkeep.model.metadata import check_metadata, without_notes
from shardkeep.model.reports import SaveReport
from shardkeep.model.tree import Path
from shardkeep.runtime.progress import Progress
from shardkeep.saving.store import store_snapshot
from shardkeep.stores.location import location
from shardkeep.targets.base import Target
from shardkeep.targets.exchange import Exchange, parse_size
from shardkeep.targets.running import now
from shardkeep.targets.transaction import refuse_existing

ShowProgress = Callable[[str, int], AbstractContextManager[Progress]]  # what is done, and to how many bytes


@dataclass(frozen=True)
class Conversion:
    """What to convert, into what: the arguments of the command."""

    source: str
    destination: str
    format: Literal["safetensors", "zarr"] = "safetensors"
    compression: str | None = None
    dtype: str | None = None
    include: str | None = None
    prefix: str | None = None
    subtree: str | None = None
    rename: Sequence[str] = ()
    remap: str | None = None  # a file with rules
    max_shard_size: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Converted:
    """The result for one tree."""

    prefix: str
    leaves: int
    cast: int  # arrays
    scratch: int  # bytes of the scratch file
    lost: dict[Path, int]  # by leaf, the number of values that a cast made infinite or NaN
    seconds: float
    report: SaveReport


def convert(wanted: Conversion, show: ShowProgress, verbose: bool = False) -> Iterator[Converted]:
    """Write the trees of a checkpoint to another path, one after another. Each is committed completely or not at all.

    Args:
        wanted: What to convert.
        show: Makes a progress bar for reading.
        verbose: Whether to show a progress bar for writing.
    """
    opened = open_at(wanted.source)
    dtype = _parse_dtype(wanted.dtype)
    target = _target(wanted)
    trees = choose_trees(opened.manifest, wanted.prefix)
    if isinstance(target, Exchange) and len(trees) > 1:
        how = "--prefix, '' for the one without a prefix," if "" in trees else "--prefix,"
        raise UsageError(
            f"{wanted.source} contains several trees ({', '.join(name or '(no prefix)' for name in trees)}), and "
            f"{wanted.destination} can hold only one: choose it with {how} or convert to a directory"
        )
    if not wanted.overwrite:  # before any work is done; the commit refuses it again
        refuse_existing(target, trees)
    for prefix, tree in _chosen(trees, wanted).items():
        if tree.leaves or wanted.include is None:
            yield _convert_tree(opened, prefix, tree, target, dtype, wanted.overwrite, show, verbose)


def _chosen(trees: dict[str, Tree], wanted: Conversion) -> dict[str, Tree]:
    """The trees as they are written: some of their leaves, renamed and changed by rules."""
    pattern = compile_include(wanted.include)
    chosen = {name: _choose(tree, pattern) for name, tree in trees.items()}
    if not any(tree.leaves for tree in chosen.values()) and wanted.include is not None:
        raise no_match(wanted.include, trees.values(), wanted.source)
    if wanted.subtree is not None:
        chosen = subtrees(chosen, wanted.subtree)
    if wanted.rename:
        chosen = renamed(chosen, wanted.rename)
    return chosen if wanted.remap is None else remapped(chosen, wanted.remap)


def _parse_dtype(name: str | None) -> DType | None:
    try:
        return None if name is None else parse_dtype(name)
    except ValueError as error:
        raise UsageError(f"--dtype {name}: {error}; use for example bfloat16, float16 or float32") from None


def _target(wanted: Conversion) -> Target:
    if wanted.compression is not None and wanted.format == "safetensors":
        raise UsageError(f"--compression {wanted.compression} needs --format zarr: safetensors has no compression")
    try:
        if wanted.max_shard_size is not None:
            parse_size(wanted.max_shard_size)
    except ValueError as error:
        raise UsageError(f"--max-shard-size: {error}") from None
    try:
        return new_target(location(wanted.destination), wanted.format, wanted.compression, wanted.max_shard_size)
    except ValueError as error:
        raise UsageError(f"{wanted.destination}: {error}".replace("max_shard_size", "--max-shard-size")) from None


def _choose(tree: Tree, pattern: re.Pattern[str] | None) -> Tree:
    """The tree with only the leaves that match."""
    keep = [matches(leaf, pattern) for leaf in tree.leaves]
    if all(keep):
        return tree
    leaves = tuple(leaf for leaf, kept in zip(tree.leaves, keep, strict=True) if kept)
    arrays = [leaf for leaf in leaves if isinstance(leaf, StoredArray)]
    metadata = carry_metadata(tree, arrays, {leaf.path: leaf.path for leaf in arrays})
    return replace(tree, skeleton=tree.skeleton.prune(keep), leaves=leaves, metadata=metadata)


def _convert_tree(
    opened: Opened,
    prefix: str,
    tree: Tree,
    target: Target,
    dtype: DType | None,
    overwrite: bool,
    show: ShowProgress,
    verbose: bool,
) -> Converted:
    started = time.perf_counter()
    specs = [cast_spec(leaf, dtype) for leaf in tree.leaves]
    recorded = [recorded_leaf(leaf, spec) for leaf, spec in zip(tree.leaves, specs, strict=True)]
    with steady(opened), show("reading", tree.nbytes) as progress:
        made = make(opened, tree, specs, target.layout.gathers, _scratch_directory(target), progress)
    arrays = [leaf for leaf in recorded if isinstance(leaf, StoredArray)]
    same = {new.path: new.path for old, new in zip(tree.arrays, arrays, strict=True) if old.spec == new.spec}
    metadata = carry_metadata(tree, arrays, same)
    if isinstance(target, Exchange):  # which cannot be a step of a run
        metadata = without_notes(metadata)
    draft = Draft(
        save_id=os.urandom(16).hex(),
        prefix=check_prefix(prefix) if prefix else "",
        skeleton=tree.skeleton,
        metadata=check_metadata(dict(metadata)),
        created=now(),
        indexed=tree.indexed,
        step=tree.step,
    )
    snapshot = snapshot_of(recorded, made)
    check = partial(_compare, tree)
    report = store_snapshot(target, snapshot, draft, overwrite=overwrite, verbose=verbose, check=check)
    seconds = time.perf_counter() - started
    return Converted(prefix, len(recorded), len(arrays) - len(same), made.scratch, made.lost, seconds, report)


def _compare(source: Tree, written: Tree) -> None:
    """Before the commit: arrays that were not cast must still have the digests they were saved with."""
    for old, new in zip(source.arrays, written.arrays, strict=True):
        if old.spec != new.spec:
            continue
        known = {piece.region: piece.digests for piece in old.pieces if piece.digests is not None}
        for piece in new.pieces:
            if known.get(piece.region, piece.digests) != piece.digests:
                problem = f"leaf {old.key!r} changed while it was being converted; nothing was committed"
                raise IntegrityError(problem, leaf=old.key)


def _scratch_directory(target: Target) -> str:
    """The nearest existing directory above the destination, which is on the same disk."""
    place = target.store.url
    while not os.path.isdir(place):
        above = os.path.dirname(place)
        if above == place:
            return tempfile.gettempdir()
        place = above
    return place
