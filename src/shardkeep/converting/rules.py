"""Saved trees changed by rules that a file has, as `shardkeep.remap.to_json` gives them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardkeep.converting.usage import UsageError
from shardkeep.errors import RemapError
from shardkeep.model.leaves import StoredArray
from shardkeep.model.manifest import Tree
from shardkeep.model.naming import dotted_names
from shardkeep.model.values import Json
from shardkeep.remap.changes import remap_tree
from shardkeep.remap.expressions import DerivedArray
from shardkeep.remap.functions import from_json
from shardkeep.remap.rules import Rule

_BY_NAME = ("checksum", "array_metadata")  # metadata with an entry for each array


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
    """The metadata, without what it records for arrays that are not the same any more under the same name."""
    if not set(_BY_NAME) & before.metadata.keys():
        return before.metadata
    old, new = _names(before), _names(after)
    same = {name for name, leaf in new.items() if not isinstance(leaf, DerivedArray) and old.get(name) == leaf}
    metadata = dict(before.metadata)
    for entry in _BY_NAME:
        recorded: Json = metadata.get(entry)
        if isinstance(recorded, dict):
            metadata[entry] = {name: facts for name, facts in recorded.items() if name in same}
    return metadata


def _names(tree: Tree) -> dict[str, StoredArray]:
    return dict(zip(dotted_names([leaf.path for leaf in tree.arrays]), tree.arrays, strict=True))
