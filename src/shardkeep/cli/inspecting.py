"""`shardkeep inspect`: what a checkpoint contains, without reading any array."""

import json
import re
from dataclasses import dataclass, field

from shardkeep.cli.listing import format_of
from shardkeep.cli.output import Cell, Output, age, counted, human, json_value, layout, name_prefix, plain, short
from shardkeep.converting.blocks import choose_trees, compile_include, matches, no_match, open_at
from shardkeep.converting.survey import moment_of, natural
from shardkeep.model.leafrecords import encode_origin
from shardkeep.model.leaves import ForeignArray, NumpyArray, StoredArray, StoredLeaf
from shardkeep.model.manifest import OURS, Tree
from shardkeep.model.metadata import untagged, without_notes
from shardkeep.model.pieces import have_digests, regions_in
from shardkeep.model.tree import name_leaf


@dataclass
class _Branch:
    """A subtree: its children by name, in order, and the number and size of its leaves."""

    children: dict[str, "_Branch | StoredLeaf"] = field(default_factory=dict[str, "_Branch | StoredLeaf"])
    leaves: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class _Row:
    """A line of the tree: a leaf, a subtree, or a folded subtree."""

    depth: int
    path: tuple[str, ...]
    branch: _Branch | None
    leaf: StoredLeaf | None = None
    folded: bool = False


def inspect(
    path: str, output: Output, prefix: str | None, include: str | None, depth: int | None, sort: str | None
) -> int:
    """Show the trees of a checkpoint, or one of them."""
    opened = open_at(path)
    trees = choose_trees(opened.manifest, prefix)
    pattern = compile_include(include)
    shown = {name: _rows(tree, pattern, depth, sort) for name, tree in trees.items()}
    if include is not None and not any(shown.values()):
        raise no_match(include, trees.values(), path)
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
    when = (
        f", saved {saved.isoformat(timespec='seconds')} ({age(saved)} ago)".replace("(now ago)", "(now)")
        if saved
        else ""
    )
    leaves, files = counted(len(tree.leaves), "leaf", "leaves"), counted(len(tree.files), "file")
    size = f"{leaves}, {human(tree.nbytes)} of arrays in {files}"
    output.line(f"{output.paint(name_prefix(prefix), 'cyan')}: {_format(tree)}, {size}{when}")
    metadata = without_notes(tree.metadata)
    if metadata:
        output.line("  metadata:")
        for key, value in metadata.items():
            output.line(f"    {plain(str(key))}: {plain(json.dumps(untagged(value), ensure_ascii=False))}")
    output.table([_cells(row) for row in rows], right=(2,), indent="  ")


def _format(tree: Tree) -> str:
    """How a tree is stored; of another program's, which kind of checkpoint it is."""
    return format_of(tree) if tree.source == OURS else f"{format_of(tree)} ({tree.source})"


def _cells(row: _Row) -> list[Cell]:
    name = "  " * row.depth + plain(name_leaf(row.path[-1:]))
    if row.leaf is not None:
        if not isinstance(row.leaf, StoredArray):
            return [name, (short(row.leaf.value), "dim")]  # of any length: it has the rest of the line
        return [name, layout(row.leaf), human(row.leaf.nbytes), (_stored(row.leaf), "dim")]
    assert row.branch is not None
    if not row.folded:
        return [(name, "bold"), ""]
    return [(f"{name}/…", "bold"), counted(row.branch.leaves, "leaf", "leaves"), human(row.branch.nbytes), ""]


def _stored(leaf: StoredArray) -> str:
    """How an array is stored, if there is something to say: in several pieces, sharded over a mesh, as NumPy."""
    if leaf.unreadable is not None:
        return plain(leaf.unreadable)
    said: list[str] = []
    if len(leaf.pieces) > 1:
        said.append(f"{len(leaf.pieces)} pieces")
    if leaf.sharding is not None:
        said.append(plain(str(leaf.sharding)))
    if isinstance(leaf.was, NumpyArray | ForeignArray):
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


def _document(path: str, save_id: str, trees: dict[str, Tree], shown: dict[str, list[_Row]]) -> dict[str, object]:
    return {
        "path": path,
        "save_id": save_id,
        "array_bytes": sum(tree.nbytes for tree in trees.values()),
        "stored_bytes": sum(file.size for tree in trees.values() for file in tree.files),
        "trees": [
            {
                "prefix": prefix,
                "format": tree.format,
                "source": tree.source,
                "compression": tree.compression,
                "created": tree.created or None,
                "save_id": tree.save_id,
                "array_bytes": tree.nbytes,
                "metadata": untagged(without_notes(tree.metadata)),
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


def describe_leaf(leaf: StoredLeaf) -> dict[str, object]:
    """What `--json` says of a leaf."""
    body: dict[str, object] = {"key": leaf.key, "path": list(leaf.path), "kind": leaf.kind}
    if not isinstance(leaf, StoredArray):
        return {**body, "type": type(leaf.value).__name__, "value": json_value(leaf.value)}
    body |= {"dtype": leaf.logical_dtype, "shape": list(leaf.logical_shape), "bytes": leaf.nbytes}
    body["digests"] = have_digests(leaf.pieces)
    body["pieces"] = [{"start": list(r.start), "shape": list(r.shape)} for r in regions_in(leaf.pieces)]
    body["sharding"] = encode_origin(leaf.was).get("sharding")
    return body
