"""Saved trees with other keys: only a subtree, or every key changed by regular expressions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardkeep.converting.usage import UsageError
from shardkeep.foreign.registry import carry_metadata
from shardkeep.model.leaves import StoredArray, StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.nodes import Child, Node
from shardkeep.model.tree import Path, Skeleton, flatten, split_key

_SHOWN = 8  # keys that a message lists


def subtrees(trees: Mapping[str, Tree], key: str) -> dict[str, Tree]:
    """The subtree at `key` of each tree that has one, with keys relative to it."""
    found = {name: below for name, tree in trees.items() if (below := _below(tree, key)) is not None}
    if not found:
        tops = list(dict.fromkeys(leaf.path[0] for tree in trees.values() for leaf in tree.leaves if leaf.path))
        more = ", …" if len(tops) > _SHOWN else ""
        raise UsageError(f"--subtree {key!r} does not exist; the top level has {', '.join(tops[:_SHOWN])}{more}")
    return found


def _below(tree: Tree, key: str) -> Tree | None:
    for path in (tuple(key.strip("/").split("/")), split_key(key)):
        inside = [leaf for leaf in tree.leaves if leaf.path[: len(path)] == path]
        if not inside:
            continue
        if inside[0].path == path:
            raise UsageError(f"--subtree {key!r} is a leaf, not a subtree; select it with --include")
        leaves = [replace(leaf, path=leaf.path[len(path) :]) for leaf in inside]
        metadata = _metadata(tree, inside, leaves)
        return replace(tree, skeleton=Skeleton(_at(tree.skeleton.root, path)), leaves=tuple(leaves), metadata=metadata)
    return None


def _at(node: Child, path: Path) -> Child:
    for name in path:
        assert isinstance(node, Node), "the path of a leaf leads through containers"
        node = node.children[node.names.index(name)]
    return node


def renamed(trees: Mapping[str, Tree], rules: Sequence[str]) -> dict[str, Tree]:
    """The trees with each rule `OLD=NEW` applied in turn to every key, whose names are joined with `/`.

    The new keys define the structure, so lists and custom classes become dicts.
    """
    parsed = [_parse(rule) for rule in rules]
    used: set[int] = set()
    found = {name: _renamed(tree, parsed, used) for name, tree in trees.items()}
    for number, rule in enumerate(rules):
        if number not in used:
            raise UsageError(f"--rename {rule!r} changes no key{_examples(trees)}")
    return found


def _examples(trees: Mapping[str, Tree]) -> str:
    keys = [leaf.key for tree in trees.values() for leaf in tree.leaves]
    return f"; the keys are {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}" if keys else ""


def _parse(rule: str) -> tuple[re.Pattern[str], str]:
    old, equals, new = rule.rpartition("=")
    try:
        pattern = re.compile(old)
        pattern.sub(new, "")
    except re.error as error:
        raise UsageError(f"--rename {rule!r}: not a valid regular expression or replacement: {error}") from None
    if not equals or not old:
        raise UsageError(f"--rename {rule!r}: write OLD=NEW, for example '^encoder/=model/'")
    return pattern, new


def _renamed(tree: Tree, rules: Sequence[tuple[re.Pattern[str], str]], used: set[int]) -> Tree:
    owners: dict[str, StoredLeaf] = {}
    for leaf in tree.leaves:
        key = "/".join(leaf.path)
        for number, (pattern, new) in enumerate(rules):
            after = _replaced(pattern, new, key)
            if after != key:
                used.add(number)
            key = after
        if not all(key.split("/")):
            raise UsageError(f"--rename would change {leaf.key!r} to {key!r}, which contains an empty name")
        if key in owners:
            raise UsageError(f"--rename would change both {owners[key].key!r} and {leaf.key!r} to {key!r}")
        owners[key] = leaf
    for key, leaf in owners.items():
        above = next((key[:i] for i, c in enumerate(key) if c == "/" and key[:i] in owners), None)
        if above is not None:
            raise UsageError(
                f"--rename would change {leaf.key!r} to {key!r}, but {above!r} would be a leaf ({owners[above].key!r})"
            )
    skeleton, places = flatten(_nested(owners))
    before: list[StoredLeaf] = [place.value for place in places]
    leaves = [replace(leaf, path=place.path) for leaf, place in zip(before, places, strict=True)]
    return replace(tree, skeleton=skeleton, leaves=tuple(leaves), metadata=_metadata(tree, before, leaves))


def _replaced(pattern: re.Pattern[str], new: str, key: str) -> str:
    try:
        return pattern.sub(new, key)
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename: {new!r} is not a valid replacement for {pattern.pattern!r}: {error}") from None


def _nested(owners: Mapping[str, StoredLeaf]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, leaf in owners.items():
        *above, last = key.split("/")
        holder = root
        for name in above:
            holder = holder.setdefault(name, {})
        holder[last] = leaf
    return root


def _metadata(tree: Tree, before: Sequence[StoredLeaf], after: Sequence[StoredLeaf]) -> Mapping[str, object]:
    """The metadata, with what it records for each array under the array's new name."""
    arrays = [leaf for leaf in after if isinstance(leaf, StoredArray)]
    return carry_metadata(tree, arrays, {new.path: old.path for old, new in zip(before, after, strict=True)})
