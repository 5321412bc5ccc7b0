"""`shardkeep inspect`: what a checkpoint holds, without reading an array."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from shardkeep.cli.blocks import choose_trees, compile_match, logical, matches, open_at
from shardkeep.cli.listing import format_of
from shardkeep.cli.output import (
    Cell,
    Output,
    UsageError,
    age,
    counted,
    human,
    json_value,
    layout,
    moment_of,
    natural,
    plain,
    short,
)
from shardkeep.manifest import StoredLeaf, Tree


@dataclass
class _Branch:
    """A level of the tree: its children by name, in order, and what lies below it."""

    children: dict[str, "_Branch | StoredLeaf"] = field(default_factory=dict[str, "_Branch | StoredLeaf"])
    leaves: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class _Row:
    """A line of the tree: a level, a leaf, or a folded level."""

    depth: int
    path: tuple[str, ...]
    branch: _Branch | None
    leaf: StoredLeaf | None = None
    folded: bool = False


def inspect(
    path: str, output: Output, prefix: str | None, match: str | None, depth: int | None, sort: str | None
) -> int:
    """Show a checkpoint's trees."""
    opened = open_at(path)
    trees = choose_trees(opened.manifest, prefix)
    pattern = compile_match(match)
    shown = {name: _rows(tree, pattern, depth, sort) for name, tree in trees.items()}
    if match is not None and not any(shown.values()):
        raise UsageError(f"--match {match!r} finds no leaf in {path}")
    if output.as_json:
        output.document(_document(path, opened.manifest.save_id, trees, shown))
        return 0
    leaves = sum(len(tree.leaves) for tree in trees.values())
    size = sum(file.size for tree in trees.values() for file in tree.files)
    output.line(
        f"{output.paint(plain(opened.manifest.path), 'bold')}: {counted(leaves, 'leaf', 'leaves')}, "
        f"{human(sum(tree.nbytes for tree in trees.values()))} of arrays, {human(size)} on disk"
    )
    for name, tree in trees.items():
        _show_tree(name, tree, shown[name], output)
    return 0


def _show_tree(prefix: str, tree: Tree, rows: list[_Row], output: Output) -> None:
    output.line()
    saved = moment_of(tree.created)
    when = f", saved {tree.created} ({age(saved)} ago)".replace("(now ago)", "(now)") if saved else ""
    title = plain(prefix) or "(no prefix)"
    output.line(
        f"{output.paint(title, 'cyan')}: {format_of(tree)}, {counted(len(tree.leaves), 'leaf', 'leaves')}, "
        f"{human(tree.nbytes)} in {counted(len(tree.files), 'file')}{when}"
    )
    if tree.metadata:
        output.line("  metadata:")
        for key, value in tree.metadata.items():
            output.line(f"    {plain(str(key))}: {plain(json.dumps(value, ensure_ascii=False))}")
    output.table([_cells(row) for row in rows], right=(2,), indent="  ")


def _cells(row: _Row) -> list[Cell]:
    name = "  " * row.depth + (plain(row.path[-1]) if row.path else "(the tree itself)")
    if row.leaf is not None:
        if row.leaf.spec is None:
            return [name, (short(row.leaf.value), "dim"), "", ""]
        return [name, layout(*logical(row.leaf)), human(row.leaf.nbytes), (_stored(row.leaf), "dim")]
    assert row.branch is not None
    if not row.folded:
        return [(name, "bold"), "", "", ""]
    return [(f"{name}/…", "bold"), counted(row.branch.leaves, "leaf", "leaves"), human(row.branch.nbytes), ""]


def _stored(leaf: StoredLeaf) -> str:
    """How an array lies on disk, where that is worth a word: in several pieces, laid out over a mesh, as NumPy."""
    said: list[str] = []
    if len(leaf.pieces) > 1:
        said.append(f"{len(leaf.pieces)} pieces")
    sharding = leaf.extra.get("sharding")
    if sharding:
        spec = ", ".join("+".join(e) if isinstance(e, list) else str(e) for e in sharding.get("spec", []))
        mesh = " ".join(f"{axis}={size}" for axis, size in sharding.get("mesh", {}).items())
        said.append(plain(f"P({spec}) on {mesh}"))
    if leaf.kind in ("numpy", "zarr"):
        said.append(leaf.kind)
    return ", ".join(said)


def _rows(tree: Tree, pattern: re.Pattern[str] | None, depth: int | None, sort: str | None) -> list[_Row]:
    root = _Branch()
    for leaf in tree.leaves:
        if not matches(leaf, pattern):
            continue
        if not leaf.path:
            return [_Row(0, (), None, leaf)]
        branch = root
        _count(branch, leaf)
        for name in leaf.path[:-1]:
            below = branch.children.setdefault(name, _Branch())
            assert isinstance(below, _Branch)
            branch = below
            _count(branch, leaf)
        branch.children[leaf.path[-1]] = leaf
    rows: list[_Row] = []
    _unroll(root, (), depth, sort, rows)
    return rows


def _count(branch: _Branch, leaf: StoredLeaf) -> None:
    branch.leaves += 1
    branch.nbytes += leaf.nbytes


def _unroll(branch: _Branch, path: tuple[str, ...], depth: int | None, sort: str | None, rows: list[_Row]) -> None:
    children = list(branch.children.items())
    if sort == "size":
        children.sort(key=lambda child: child[1].nbytes, reverse=True)
    elif sort == "name":
        children.sort(key=lambda child: natural(child[0]))
    for name, child in children:
        where = (*path, name)
        if isinstance(child, StoredLeaf):
            rows.append(_Row(len(path), where, None, child))
        elif depth is not None and len(where) >= depth:
            rows.append(_Row(len(path), where, child, folded=True))
        else:
            rows.append(_Row(len(path), where, child))
            _unroll(child, where, depth, sort, rows)


def _document(path: str, save_id: str, trees: dict[str, Tree], shown: dict[str, list[_Row]]) -> dict[str, Any]:
    return {
        "path": path,
        "save_id": save_id,
        "array_bytes": sum(tree.nbytes for tree in trees.values()),
        "stored_bytes": sum(file.size for tree in trees.values() for file in tree.files),
        "trees": [
            {
                "prefix": prefix,
                "format": tree.format,
                "compression": tree.compression,
                "created": tree.created or None,
                "save_id": tree.save_id,
                "array_bytes": tree.nbytes,
                "metadata": _strict(tree.metadata),
                "files": [{"name": file.name, "size": file.size} for file in tree.files],
                "leaves": [describe_leaf(row.leaf) for row in shown[prefix] if row.leaf is not None],
                "folded": [
                    {"path": list(row.path), "leaves": row.branch.leaves, "bytes": row.branch.nbytes}
                    for row in shown[prefix]
                    if row.folded and row.branch is not None
                ],
            }
            for prefix, tree in trees.items()
        ],
    }


def describe_leaf(leaf: StoredLeaf) -> dict[str, Any]:
    """A leaf as JSON."""
    body: dict[str, Any] = {"key": leaf.key, "path": list(leaf.path), "kind": leaf.kind}
    if leaf.spec is None:
        return {**body, "type": type(leaf.value).__name__, "value": json_value(leaf.value)}
    dtype, shape = logical(leaf)
    digests = bool(leaf.pieces) and all(piece.digests is not None for piece in leaf.pieces)
    body |= {"dtype": dtype, "shape": list(shape), "bytes": leaf.nbytes, "digests": digests}
    body["pieces"] = [{"start": list(p.region.start), "shape": list(p.region.shape)} for p in leaf.pieces]
    body["sharding"] = leaf.extra.get("sharding")
    return body


def _strict(value: Any) -> Any:
    """Metadata of another program may hold NaN, which JSON has not: such numbers become texts."""
    if isinstance(value, dict):
        return {str(key): _strict(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_strict(inner) for inner in value]
    return str(value) if isinstance(value, float) and json_value(value) != value else value
