"""`shardkeep convert`: any checkpoint into either format, in bounded memory, through the library's one save path.

What is saved are arrays over files: parts of the source as they are mapped or, where they must be decoded, cast or put
together, parts of an unnamed scratch file beside the destination. Either way the pages belong to a file, so the system
can take them back whenever it needs memory.
"""

import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from shardkeep.arrays import parse_dtype
from shardkeep.cli.blocks import Opened, choose_trees, compile_match, matches, open_at, steady
from shardkeep.cli.making import cast_spec, make
from shardkeep.cli.output import Output, UsageError, bar, counted, human, plain, shows_progress
from shardkeep.cli.renaming import renamed, subtrees
from shardkeep.cli.restoring import RestoringTarget, recorded_leaf
from shardkeep.commit import Target
from shardkeep.errors import CheckpointExistsError
from shardkeep.exchange import Exchange
from shardkeep.manifest import StoredLeaf, Tree
from shardkeep.metadata import dotted_names
from shardkeep.opening import new_target
from shardkeep.reports import SaveReport
from shardkeep.saving import SaveRequest, run_save
from shardkeep.tree import Path


@dataclass(frozen=True)
class Conversion:
    """What was asked for."""

    source: str
    destination: str
    format: Literal["safetensors", "tensorstore"] = "safetensors"
    compression: str | None = None
    dtype: str | None = None
    match: str | None = None
    prefix: str | None = None
    subtree: str | None = None
    rename: Sequence[str] = ()
    max_shard_size: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class _Converted:
    """What became of one tree."""

    prefix: str
    leaves: int
    cast: int
    scratch: int
    lost: dict[str, int]
    seconds: float
    report: SaveReport


def convert(wanted: Conversion, output: Output) -> int:
    """Write the trees of a checkpoint to another place, each of them whole or not at all."""
    opened = open_at(wanted.source)
    dtype = _parse_dtype(wanted.dtype)
    target = _target(wanted)
    trees = choose_trees(opened.manifest, wanted.prefix)
    if isinstance(target, Exchange) and len(trees) > 1:
        named = ", ".join(repr(name) for name in trees)
        raise UsageError(
            f"{wanted.destination} takes one tree, {wanted.source} holds {named}: choose one with --prefix"
        )
    _refuse_existing(target, list(trees), wanted)
    pattern = compile_match(wanted.match)
    chosen = {name: _choose(tree, pattern) for name, tree in trees.items()}
    if not any(tree.leaves for tree in chosen.values()) and wanted.match is not None:
        raise UsageError(f"--match {wanted.match!r} finds no leaf in {wanted.source}")
    if wanted.subtree is not None:
        chosen = subtrees(chosen, wanted.subtree)
    if wanted.rename:
        chosen = renamed(chosen, wanted.rename)
    done: list[_Converted] = []
    for name, tree in chosen.items():
        if tree.leaves or wanted.match is None:
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
        raise UsageError(f"--dtype {name}: {error}; for example bfloat16, float16, float32") from None


def _target(wanted: Conversion) -> Target:
    if wanted.compression is not None and wanted.format != "tensorstore":
        raise UsageError(f"--compression {wanted.compression} needs --format tensorstore")
    try:
        return new_target(wanted.destination, wanted.format, wanted.compression, wanted.max_shard_size)
    except ValueError as error:
        raise UsageError(str(error).replace("max_shard_size", "--max-shard-size")) from None


def _refuse_existing(target: Target, prefixes: Sequence[str], wanted: Conversion) -> None:
    """Before any work is done; the commit refuses it again."""
    found = None if wanted.overwrite else target.read_if_any()
    for prefix in prefixes:
        if found is not None and prefix in found.trees:
            what = f"a tree of prefix {prefix!r}" if prefix else "a checkpoint"
            raise CheckpointExistsError(f"{wanted.destination} already holds {what}; pass overwrite=True to replace it")


def _choose(tree: Tree, pattern: re.Pattern[str] | None) -> Tree:
    """The tree with only those leaves that match."""
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
    changed = [leaf.path for leaf, spec in zip(tree.leaves, specs, strict=True) if leaf.spec != spec]
    request = SaveRequest(
        target=cast(Target, RestoringTarget(target, tree, recorded, made.parts)),
        tree=made.arrays,
        prefix=prefix or None,
        metadata=_metadata(tree, recorded, set(changed)),
        overwrite=overwrite,
        indexed=tree.indexed,
        verbose=shows_progress(),
    )
    report = run_save(request)
    seconds = time.perf_counter() - started
    return _Converted(prefix, len(recorded), len(changed), made.scratch, made.lost, seconds, report)


def _scratch_directory(target: Target) -> str:
    """The nearest directory above the destination that is there: on the same disk, which has to have the room."""
    place = target.store.url
    while not os.path.isdir(place):
        above = os.path.dirname(place)
        if above == place:
            return tempfile.gettempdir()
        place = above
    return place


def _metadata(tree: Tree, recorded: Sequence[StoredLeaf], changed: set[Path]) -> dict[str, Any]:
    """The metadata, but for what the eFormer API recorded of arrays that are no longer there or no longer the same."""
    metadata = dict(tree.metadata)
    if not {"checksum", "array_metadata"} <= metadata.keys():
        return metadata
    arrays = [leaf for leaf in recorded if leaf.spec is not None]
    leaves = dict(zip(dotted_names([leaf.path for leaf in arrays]), arrays, strict=True))
    checksums, described = metadata["checksum"], metadata["array_metadata"]
    if isinstance(checksums, dict):
        same = {name for name, leaf in leaves.items() if leaf.path not in changed}
        metadata["checksum"] = {name: text for name, text in checksums.items() if name in same}
    if isinstance(described, dict):
        kept = {name: facts for name, facts in described.items() if name in leaves}
        for name in kept:
            if leaves[name].path in changed:
                kept[name] = {"shape": list(leaves[name].shape or ()), "dtype": leaves[name].dtype}
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
    for key, count in done.lost.items():
        text = f"  {plain(key)}: {counted(count, 'number')} became infinite or NaN as {wanted.dtype}"
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
                "lost_to_cast": one.lost,
                "stored_bytes": one.report.nbytes,
                "files": one.report.files,
                "scratch_bytes": one.scratch,
                "seconds": one.seconds,
            }
            for one in done
        ],
    }
