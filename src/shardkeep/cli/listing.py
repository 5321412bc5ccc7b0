"""`shardkeep ls`: the checkpoints at and below a path."""

from collections.abc import Mapping

from shardkeep.cli.output import Cell, Output, age, counted, human, name_prefix, plain
from shardkeep.converting.survey import Found, survey
from shardkeep.model.manifest import Tree

_STYLES = {"complete": "green", "saving": "cyan", "unfinished": "yellow", "unindexed": "yellow"}


def ls(path: str, output: Output) -> int:
    """List the checkpoints at and below a path, each with its state."""
    found = survey(path)
    if output.as_json:
        output.document({"path": path, "checkpoints": [_document(one) for one in found]})
        return 0
    if not found:
        output.line(f"no checkpoints in {plain(path)} or below")
        return 0
    head: list[Cell] = [(title, "bold") for title in ("NAME", "AGE", "SIZE", "LEAVES", "FORMAT", "STATE", "PREFIXES")]
    output.table([head, *(_row(one) for one in found)], right=(1, 2, 3))
    for one in found:
        if one.problem:
            output.line(output.paint(_problem(one.name, one.path, one.problem), "yellow"))
    return 0


def _problem(name: str, path: str, problem: str) -> str:
    """What is wrong with a checkpoint, which is named once."""
    rest = problem.removeprefix(path)
    return plain(name + rest) if rest != problem and rest[:1] in (" ", ":") else plain(f"{name}: {problem}")


def _row(found: Found) -> list[Cell]:
    trees: Mapping[str, Tree] = found.manifest.trees if found.manifest else {}
    leaves = sum(len(tree.leaves) for tree in trees.values())
    return [
        plain(found.name),
        age(found.created),
        human(found.size) if found.manifest or found.size else "-",
        f"{leaves:,}" if found.manifest else "-",
        describe_format(found),
        (found.state, _STYLES.get(found.state, "red")),
        ", ".join(map(name_prefix, trees)) if set(trees) - {""} else "",
    ]


def describe_format(found: Found) -> str:
    """The format or formats of a checkpoint, for a table."""
    if found.manifest is None:
        return "-"
    trees = list(found.manifest.trees.values())
    files = len({file.name for tree in trees for file in tree.files})
    if found.kind in ("exchange", "safetensors"):
        foreign = " (foreign)" if found.kind == "safetensors" else ""
        return f"safetensors {counted(files, 'file')}{foreign}"
    if found.kind != "directory":
        return found.kind
    return ", ".join(dict.fromkeys(format_of(tree) for tree in trees)) or "empty"


def format_of(tree: Tree) -> str:
    """The format of a tree: safetensors, zarr, zarr+zstd, or foreign for one that another program wrote."""
    return tree.format + (f"+{tree.compression}" if tree.compression else "")


def _document(found: Found) -> dict[str, object]:
    trees: Mapping[str, Tree] = found.manifest.trees if found.manifest else {}
    created = found.created
    return {
        "name": found.name,
        "path": found.path,
        "state": found.state,
        "complete": found.state == "complete",
        "kind": found.kind,
        "created": created.isoformat(timespec="seconds") if created else None,
        "stored_bytes": found.size,
        "array_bytes": sum(tree.nbytes for tree in trees.values()),
        "leaves": sum(len(tree.leaves) for tree in trees.values()),
        "files": len({file.name for tree in trees.values() for file in tree.files}),
        "formats": {prefix: tree.format for prefix, tree in trees.items()},
        "compression": {prefix: tree.compression for prefix, tree in trees.items()},
        "prefixes": list(trees),
        "save_id": found.manifest.save_id if found.manifest else None,
        "problem": found.problem,
    }
