"""The structure of a tree whose leaves have other keys."""

from collections.abc import Mapping, Sequence

from shardkeep.model.nodes import LEAF, Child, Node
from shardkeep.model.tree import Path, Skeleton


def blanks_of(skeleton: Skeleton) -> dict[Path, Child]:
    """The positions without a leaf, as they are: None, and containers that have no children."""
    found: dict[Path, Child] = {}
    pending: list[tuple[Path, Child]] = [((), skeleton.root)]
    while pending:
        path, node = pending.pop()
        if isinstance(node, Node) and node.children:
            pending += [((*path, name), child) for name, child in zip(node.names, node.children, strict=True)][::-1]
        elif node is not LEAF:
            found[path] = node
    return found


def rebuilt(
    skeleton: Skeleton, before: Sequence[Path], after: Sequence[Path], blanks: Mapping[Path, Child]
) -> Skeleton:
    """The structure for leaves with other paths: containers that have all they had, and dicts for the others.

    Args:
        skeleton: The structure there was.
        before: The paths of its leaves.
        after: The paths of the leaves that there are now. None is above another.
        blanks: The positions without a leaf that there are now. Leaves may have taken their places.
    """
    empty = blanks_of(skeleton)
    if list(before) == list(after) and blanks.keys() == empty.keys():
        return skeleton
    kept = _free(blanks, after)
    old, new = _names_below([*before, *empty]), _names_below([*after, *kept])
    leaves, changed = set(after), _changed([*before, *empty], [*after, *kept])

    def build(node: Child, path: Path) -> Child:
        if path in leaves:
            return LEAF
        if path in kept:
            return kept[path]
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


def _free(blanks: Mapping[Path, Child], leaves: Sequence[Path]) -> dict[Path, Child]:
    """The positions without a leaf that are neither at, nor above, nor below the place of a leaf or another one."""
    ends = set(leaves)
    taken = {path[:end] for path in [*leaves, *blanks] for end in range(len(path))} | ends
    return {
        path: node
        for path, node in blanks.items()
        if path not in taken and not any(path[:end] in ends for end in range(len(path)))
    }


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
