"""`shardkeep ls`: the checkpoints at and below a path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardkeep.cli.output import Cell, Output, age, counted, human, json_number, name_prefix, plain
from shardkeep.converting.survey import SurveyEntry, look, look_again, survey
from shardkeep.model.manifest import OURS, Tree
from shardkeep.model.metadata import untagged
from shardkeep.runs.rules import encode_rules
from shardkeep.runs.steps import Step
from shardkeep.runs.viewing import RunView, has_steps_of_others, is_run
from shardkeep.stores.location import Location, is_directory, location

_STYLES = {
    "complete": "green",
    "saving": "cyan",
    "deleting": "cyan",
    "unfinished": "yellow",
    "unindexed": "yellow",
    "abandoned": "dim",
}


def ls(path: str, output: Output) -> int:
    """List the steps of a run, or the checkpoints at and below a path, each with its state."""
    place = location(path)
    if is_directory(place) and (is_run(place) or has_steps_of_others(place)):
        return _ls_run(place, path, output)
    found = survey(path)
    if output.as_json:
        output.document({"path": path, "checkpoints": [_document(one) for one in found]})
        return 0
    if not found:
        output.line(f"no checkpoints in {plain(path)} or below")
    else:
        _show(found, output)
    return 0


def _ls_run(place: Location, path: str, output: Output) -> int:
    """List the steps of a run, and then what else there is in its directory."""
    view = RunView(place)
    rows = _rows_of(view.steps())
    found = survey(path, without=[row.name for row in rows])
    writer = view.control.writer()
    if output.as_json:
        noted = None if view.noted is None else encode_rules(view.noted)
        about = {"path": path, "run": {"rules": noted, "writer": writer}, "steps": [row.document() for row in rows]}
        output.document({**about, "checkpoints": [_document(one) for one in found]})
        return 0
    titles = ("STEP", "AGE", "SIZE", "STATE", "METRICS", "KEPT")
    foreign = any(row.kind != OURS for row in rows)
    head: list[Cell] = [(title, "bold") for title in ((*titles, "KIND") if foreign else titles)]
    if rows:
        output.table([head, *([*row.cells(), *([row.kind] if foreign else [])] for row in rows)], right=(0, 1, 2))
    else:
        output.line(f"no steps in {plain(path)}")
    for row in rows:
        if row.problem:
            output.line(output.paint(_problem(f"step {row.step.number}", row.step.path, row.problem), "yellow"))
    if found:
        output.line()
        _show(found, output)
    if writer is not None:
        output.line(f"written by {plain(writer)}")
    return 0


@dataclass(frozen=True)
class _Listed:
    """A step of a run as it is listed."""

    name: str
    step: Step
    state: str  # as for other checkpoints, or abandoned or deleting
    problem: str | None
    kind: str

    def cells(self) -> list[Cell]:
        step = self.step
        metrics = " ".join(f"{name}={value:.6g}" for name, value in step.metrics.items())
        return [
            str(step.number),
            age(step.time),
            human(step.stored_bytes) if step.save_id else "-",
            (self.state, _STYLES.get(self.state, "red")),
            plain(metrics),
            ", ".join(step.kept),
        ]

    def document(self) -> dict[str, object]:
        step = self.step
        return {
            "step": step.number,
            "name": self.name,
            "path": step.path,
            "kind": self.kind,
            "state": self.state,
            "complete": self.state == "complete",
            "created": step.time.isoformat(timespec="seconds") if step.time else None,
            "stored_bytes": step.stored_bytes,
            "array_bytes": step.nbytes,
            "metrics": {name: json_number(value) for name, value in step.metrics.items()},
            "metadata": untagged(dict(step.metadata)),
            "kept": list(step.kept),
            "save_id": step.save_id or None,
            "problem": self.problem,
        }


def _rows_of(steps: Mapping[str, Step]) -> list[_Listed]:
    """The steps with their states. On a disk, the sizes of their files are compared too.

    Those that retention has deleted since they were listed are left out.
    """
    places = {name: location(step.path) for name, step in steps.items()}
    compared = [name for name, step in steps.items() if step.is_usable and not places[name].is_url]
    looks = [look(places[name], name) for name in compared]
    found = {one.name: one for one in look_again([one for one in looks if not one.absent])}
    rows: list[_Listed] = []
    for name, step in steps.items():
        if name not in compared:
            state = "complete" if step.is_usable else step.state
            rows.append(_Listed(name, step, state, step.reason or None, step.source))
        elif name in found:
            rows.append(_Listed(name, step, found[name].state, found[name].problem, step.source))
    return rows


def _show(found: Sequence[SurveyEntry], output: Output) -> None:
    head: list[Cell] = [(title, "bold") for title in ("NAME", "AGE", "SIZE", "LEAVES", "FORMAT", "STATE", "PREFIXES")]
    output.table([head, *(_row(one) for one in found)], right=(1, 2, 3))
    for one in found:
        if one.problem:
            output.line(output.paint(_problem(one.name, one.path, one.problem), "yellow"))


def _problem(name: str, path: str, problem: str) -> str:
    """What is wrong with a checkpoint, which is named once."""
    rest = problem.removeprefix(path)
    return plain(name + rest) if rest != problem and rest[:1] in (" ", ":") else plain(f"{name}: {problem}")


def _row(found: SurveyEntry) -> list[Cell]:
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


def describe_format(found: SurveyEntry) -> str:
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


def _document(found: SurveyEntry) -> dict[str, object]:
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
