"""The structure of a tree whose leaves have other keys."""

from collections.abc import Sequence

from shardkeep.model.nodes import LEAF, Child, Node
from shardkeep.model.tree import Path, Skeleton


def rebuilt(skeleton: Skeleton, before: Sequence[Path], after: Sequence[Path]) -> Skeleton:
    """The structure for leaves with other paths: containers whose leaves are all as before, and dicts for the others.

    Args:
        skeleton: The structure there was.
        before: The paths of its leaves.
        after: The paths of the leaves that there are now. None is above another.
    """
    if list(before) == list(after):
        return skeleton
    old, new = _names_below(before), _names_below(after)
    leaves, changed = set(after), _changed(before, after)

    def build(node: Child, path: Path) -> Child:
        if path in leaves:
            return LEAF
        if isinstance(node, Node) and path in old and path not in changed:
            return node
        names = tuple(new.get(path, ()))
        known = (
            dict(zip(node.names, zip(_keys_of(node), node.children, strict=True), strict=True))
            if isinstance(node, Node)
            else {}
        )
        children = tuple(build(known[name][1] if name in known else None, (*path, name)) for name in names)
        return Node(
            "dict", names, children, tuple(known[name][0] if name in known else name for name in names), cls=dict
        )

    return Skeleton(build(skeleton.root, ()))


def _keys_of(node: Node) -> Sequence[object]:
    return node.keys if node.kind.endswith("dict") else node.names


def _names_below(paths: Sequence[Path]) -> dict[Path, dict[str, None]]:
    """By path of a container, the names in it, in order."""
    found: dict[Path, dict[str, None]] = {}
    for path in paths:
        for end, name in enumerate(path):
            found.setdefault(path[:end], {})[name] = None
    return found


def _changed(before: Sequence[Path], after: Sequence[Path]) -> set[Path]:
    """The containers that have got, or lost, a leaf somewhere below."""
    return {path[:end] for path in set(before) ^ set(after) for end in range(len(path) + 1)}
