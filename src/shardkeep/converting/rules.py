"""Saved trees changed by rules that a file has, as `shardkeep.remap.to_json` gives them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardkeep.converting.usage import UsageError
from shardkeep.errors import RemapError
from shardkeep.foreign.registry import carry_metadata
from shardkeep.model.manifest import Tree
from shardkeep.remap.changes import remap_tree
from shardkeep.remap.expressions import DerivedArray
from shardkeep.remap.functions import from_json
from shardkeep.remap.rules import Rule


def read_rules(path: str) -> list[Rule]:
    """The rules in a file. `UsageError` if it cannot be read or has no rules."""
    try:
        return from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:  # a RemapError is a ValueError
        raise UsageError(f"--remap {path}: {error}") from None


def remapped(trees: Mapping[str, Tree], path: str) -> dict[str, Tree]:
    """The only tree, changed by the rules in a file."""
    rules = read_rules(path)
    if len(trees) > 1:
        names = ", ".join(name or "(no prefix)" for name in trees)
        raise UsageError(f"--remap changes one tree, and there are several ({names}): choose one with --prefix")
    return {name: _remapped(tree, rules, path) for name, tree in trees.items()}


def _remapped(tree: Tree, rules: list[Rule], path: str) -> Tree:
    try:
        found = remap_tree(tree, rules)
        found.refuse_kept()
    except RemapError as error:
        raise UsageError(f"--remap {path}: {error}") from None
    return replace(found.tree, metadata=_metadata(tree, found.tree))


def _metadata(before: Tree, after: Tree) -> Mapping[str, object]:
    """The metadata, with what it records for each array that is stored as it was, under whatever name."""
    old = {(leaf.spec, leaf.pieces, leaf.origin): leaf.path for leaf in before.arrays}
    stored = [leaf for leaf in after.arrays if not isinstance(leaf, DerivedArray)]
    same = {leaf.path: old[key] for leaf in stored if (key := (leaf.spec, leaf.pieces, leaf.origin)) in old}
    return carry_metadata(before, after.arrays, same)
