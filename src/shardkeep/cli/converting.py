"""`shardkeep convert`: write any checkpoint in another format, in bounded memory, with an ordinary save.

The arrays that are saved are backed by files: memory-mapped from the source or, if they must be decompressed, cast or
assembled, prepared in an unnamed scratch file next to the destination. So the operating system can evict their pages
whenever it needs memory.
"""

import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from shardkeep.catalog import new_target
from shardkeep.cli.output import Output, bar, counted, human, name_prefix, plain, shows_progress
from shardkeep.converting.blocks import Opened, choose_trees, compile_include, matches, no_match, open_at, steady
from shardkeep.converting.making import cast_spec, make
from shardkeep.converting.rename import renamed, subtrees
from shardkeep.converting.restoring import RestoringTarget, recorded_leaf
from shardkeep.converting.usage import UsageError
from shardkeep.model.arrays import parse_dtype
from shardkeep.model.leaves import StoredArray, StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.naming import dotted_names
from shardkeep.model.reports import SaveReport
from shardkeep.model.tree import Path, name_leaf, show_key
from shardkeep.processes.operation import join
from shardkeep.saving.save import SaveRequest, run_save
from shardkeep.stores.location import location
from shardkeep.targets.exchange import Exchange, parse_size
from shardkeep.targets.transaction import Target, refuse_existing


@dataclass(frozen=True)
class Conversion:
    """The arguments of the command."""

    source: str
    destination: str
    format: Literal["safetensors", "zarr"] = "safetensors"
    compression: str | None = None
    dtype: str | None = None
    include: str | None = None
    prefix: str | None = None
    subtree: str | None = None
    rename: Sequence[str] = ()
    max_shard_size: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class _Converted:
    """The result for one tree."""

    prefix: str
    leaves: int
    cast: int
    scratch: int
    lost: dict[Path, int]
    seconds: float
    report: SaveReport


def convert(wanted: Conversion, output: Output) -> int:
    """Write the trees of a checkpoint to another path. Each is committed completely or not at all."""
    opened = open_at(wanted.source)
    dtype = _parse_dtype(wanted.dtype)
    target = _target(wanted)
    trees = choose_trees(opened.manifest, wanted.prefix)
    if isinstance(target, Exchange) and len(trees) > 1:
        raise UsageError(
            f"{wanted.source} contains several trees ({', '.join(map(name_prefix, trees))}), and "
            f"{wanted.destination} can hold one: choose it with --prefix, or convert to a directory"
        )
    _refuse_existing(target, list(trees), wanted)
    pattern = compile_include(wanted.include)
    chosen = {name: _choose(tree, pattern) for name, tree in trees.items()}
    if not any(tree.leaves for tree in chosen.values()) and wanted.include is not None:
        raise no_match(wanted.include, trees.values(), wanted.source)
    if wanted.subtree is not None:
        chosen = subtrees(chosen, wanted.subtree)
    if wanted.rename:
        chosen = renamed(chosen, wanted.rename)
    done: list[_Converted] = []
    for name, tree in chosen.items():
        if tree.leaves or wanted.include is None:
            done.append(_convert_tree(opened, name, tree, target, dtype, wanted.overwrite))
            if not output.as_json:
                _show(done[-1], wanted, output)
    if output.as_json:
        output.document(_document(wanted, done))
    return 0


def _parse_dtype(name: str | None) -> np.dtype[Any] | None:
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


def _refuse_existing(target: Target, prefixes: Sequence[str], wanted: Conversion) -> None:
    """Before any work is done; the commit refuses it again."""
    for prefix in () if wanted.overwrite else prefixes:
        refuse_existing(target, prefix)


def _choose(tree: Tree, pattern: re.Pattern[str] | None) -> Tree:
    """The tree with only the leaves that match."""
    keep = [matches(leaf, pattern) for leaf in tree.leaves]
    if all(keep):
        return tree
    leaves = tuple(leaf for leaf, kept in zip(tree.leaves, keep, strict=True) if kept)
    return replace(tree, skeleton=tree.skeleton.prune(keep), leaves=leaves)


def _convert_tree(
    opened: Opened, prefix: str, tree: Tree, target: Target, dtype: np.dtype[Any] | None, overwrite: bool
) -> _Converted:
    started = time.perf_counter()
    specs = [cast_spec(leaf, dtype) for leaf in tree.leaves]
    recorded = [recorded_leaf(leaf, spec) for leaf, spec in zip(tree.leaves, specs, strict=True)]
    with steady(opened), bar("reading", tree.nbytes) as progress:
        made = make(opened, tree, specs, isinstance(target, Exchange), _scratch_directory(target), progress)
    changed = [
        leaf.path
        for leaf, spec in zip(tree.leaves, specs, strict=True)
        if isinstance(leaf, StoredArray) and leaf.spec != spec
    ]
    request = SaveRequest(
        target=cast(Target, RestoringTarget(target, tree, recorded, made.parts)),
        tree=made.arrays,
        prefix=prefix or None,
        metadata=_metadata(tree, recorded, set(changed)),
        overwrite=overwrite,
        indexed=tree.indexed,
        step=tree.step,
        verbose=shows_progress(),
    )
    with join(f"saving to {target.where}") as operation:
        report = run_save(request, operation)
    seconds = time.perf_counter() - started
    return _Converted(prefix, len(recorded), len(changed), made.scratch, made.lost, seconds, report)


def _scratch_directory(target: Target) -> str:
    """The nearest existing directory above the destination, which is on the same disk."""
    place = target.store.url
    while not os.path.isdir(place):
        above = os.path.dirname(place)
        if above == place:
            return tempfile.gettempdir()
        place = above
    return place


def _metadata(tree: Tree, recorded: Sequence[StoredLeaf], changed: set[Path]) -> dict[str, Any]:
    """The metadata, without what the eFormer API recorded for arrays that were left out or changed."""
    metadata = dict(tree.metadata)
    if not {"checksum", "array_metadata"} <= metadata.keys():
        return metadata
    arrays = [leaf for leaf in recorded if isinstance(leaf, StoredArray)]
    leaves = dict(zip(dotted_names([leaf.path for leaf in arrays]), arrays, strict=True))
    checksums, described = metadata["checksum"], metadata["array_metadata"]
    if isinstance(checksums, dict):
        same = {name for name, leaf in leaves.items() if leaf.path not in changed}
        metadata["checksum"] = {name: text for name, text in checksums.items() if name in same}
    if isinstance(described, dict):
        kept = {name: facts for name, facts in described.items() if name in leaves}
        for name in kept:
            if leaves[name].path in changed:
                kept[name] = {"shape": list(leaves[name].shape), "dtype": leaves[name].dtype}
        metadata["array_metadata"] = kept
    return metadata


def _show(done: _Converted, wanted: Conversion, output: Output) -> None:
    prefix = f" [{plain(done.prefix)}]" if done.prefix else ""
    report = done.report
    output.line(
        f"{plain(wanted.source)}{prefix} → {output.paint(plain(report.path), 'bold')}: "
        f"{counted(done.leaves, 'leaf', 'leaves')}, {human(report.nbytes)} in {counted(report.files, 'file')}, "
        f"{done.seconds:.2f} s"
    )
    if wanted.dtype is not None:
        output.line(f"  {counted(done.cast, 'array')} cast to {wanted.dtype}")
    for path, count in done.lost.items():
        text = f"  {plain(name_leaf(path))}: {counted(count, 'value')} became infinite or NaN as {wanted.dtype}"
        output.line(output.paint(text, "yellow"))


def _document(wanted: Conversion, done: Sequence[_Converted]) -> dict[str, Any]:
    return {
        "source": wanted.source,
        "destination": wanted.destination,
        "format": wanted.format,
        "compression": wanted.compression,
        "trees": [
            {
                "prefix": one.prefix,
                "path": one.report.path,
                "leaves": one.leaves,
                "cast": one.cast,
                "lost_to_cast": {show_key(path): count for path, count in one.lost.items()},
                "stored_bytes": one.report.nbytes,
                "files": one.report.files,
                "scratch_bytes": one.scratch,
                "seconds": one.seconds,
            }
            for one in done
        ],
    }
