"""`shardkeep stats`: a summary of the values of each array, and which arrays look wrong."""

import math
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardkeep.cli.output import (
    Cell,
    Output,
    bar,
    counted,
    json_number,
    json_value,
    layout,
    name_prefix,
    plain,
    short,
)
from shardkeep.cli.parser import FINDINGS
from shardkeep.converting.arithmetic import Numbers, numbers_of
from shardkeep.converting.blocks import (
    Opened,
    choose_trees,
    compile_include,
    matches,
    no_match,
    open_at,
    read_region,
    regions_of,
    steady,
)
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import StoredArray, StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.tree import name_leaf
from shardkeep.runtime.crew import Task, run_tasks
from shardkeep.runtime.progress import Progress

_MEANS = {"all_nan": "nan"}  # a flag that is a special case of another


@dataclass
class _Measured:
    """A leaf and the statistics of its values."""

    prefix: str
    leaf: StoredLeaf
    numbers: Numbers = field(default_factory=Numbers)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def flags(self) -> list[str]:
        if not isinstance(self.leaf, StoredArray):
            return _flags_of_value(self.leaf.value)
        return self.numbers.flags(self.leaf.spec.dtype) if self.leaf.holds_numbers else []


def stats(path: str, output: Output, prefix: str | None, include: str | None, fail_on: Collection[str] = ()) -> int:
    """Summarize every chosen array; 1 if a leaf has one of the flags in `fail_on`."""
    opened = open_at(path)
    trees = choose_trees(opened.manifest, prefix)
    pattern = compile_include(include)
    chosen = {name: [leaf for leaf in tree.leaves if matches(leaf, pattern)] for name, tree in trees.items()}
    if include is not None and not any(chosen.values()):
        raise no_match(include, trees.values(), path)
    measured = [_Measured(name, leaf) for name, leaves in chosen.items() for leaf in leaves]
    with steady(opened), bar("reading", sum(m.leaf.nbytes for m in measured)) as progress:
        run_tasks(task for m in measured for task in _tasks(opened, trees[m.prefix], m, progress))
    shown = [m for m in measured if isinstance(m.leaf, StoredArray) or m.flags]
    failed = [m for m in shown if any(_MEANS.get(flag, flag) in fail_on for flag in m.flags)]
    if output.as_json:
        body = {"path": path, "fail_on": list(fail_on), "failed": bool(failed)}
        output.document(body | {"leaves": [_document(m) for m in shown]})
    else:
        _show(shown, len(trees) > 1, output)
        if failed:
            said = f"{counted(len(failed), 'leaf', 'leaves')} flagged {_either(fail_on)}"
            output.line(output.paint(f"failed: {said}", "red"))
    return FINDINGS if failed else 0


def _tasks(opened: Opened, tree: Tree, measured: _Measured, progress: Progress) -> list[Task]:
    leaf, reader = measured.leaf, opened.source(tree)
    if not isinstance(leaf, StoredArray) or not leaf.holds_numbers:
        return []

    def measure(region: Region) -> None:
        found = numbers_of(read_region(reader, leaf, region, progress))
        with measured.lock:
            measured.numbers.merge(found)

    return [lambda r=region: measure(r) for region in regions_of(opened, leaf)]


def _flags_of_value(value: object) -> list[str]:
    """The flags of a plain value: numbers that are not finite."""
    if not isinstance(value, float | complex | np.inexact):
        return []
    parts = [float(value.real), float(value.imag)]
    return [name for name, test in (("nan", math.isnan), ("inf", math.isinf)) if any(map(test, parts))]


def _show(measured: Sequence[_Measured], several: bool, output: Output) -> None:
    titles = (
        *(("PREFIX",) if several else ()),
        "KEY",
        "TYPE",
        "MIN",
        "MAX",
        "MEAN",
        "STD",
        "NAN",
        "INF",
        "ZERO",
        "FLAGS",
    )
    head: list[Cell] = [(title, "bold") for title in titles]
    output.table([head, *(_row(m, several) for m in measured)], right=range(2 + several, 9 + several))
    flagged = [m for m in measured if m.flags]
    if flagged:
        output.line(output.paint(f"{counted(len(flagged), 'leaf', 'leaves')} flagged", "yellow"))


def _row(measured: _Measured, several: bool) -> list[Cell]:
    leaf, numbers = measured.leaf, measured.numbers
    name: list[Cell] = [name_prefix(measured.prefix)] if several else []
    name.append(plain(name_leaf(leaf.path)))
    flags: Cell = (", ".join(map(_spelled, measured.flags)), "yellow")
    if not isinstance(leaf, StoredArray):
        return [*name, short(leaf.value), *[""] * 7, flags]
    if not leaf.holds_numbers or not numbers.count:
        return [*name, layout(leaf), *[""] * 7, flags]
    counts = [f"{n:,}" for n in (numbers.nan, numbers.inf, numbers.zero)]
    return [*name, layout(leaf), *(_shown(f) for f in _figures(numbers, leaf.spec)), *counts, flags]


def _spelled(flag: str) -> str:
    return flag.replace("_", " ")


def _either(flags: Collection[str]) -> str:
    *first, last = map(_spelled, flags)
    return f"{', '.join(first)} or {last}" if first else last


def _figures(numbers: Numbers, spec: ArraySpec) -> list[float | int | str | None]:
    """Min, max, mean and standard deviation; for times, which have no mean, the earliest and the latest."""
    if numbers.minimum is None or numbers.maximum is None:
        return [None] * 4
    if spec.dtype.kind in "mM":
        ends = np.array([numbers.minimum, numbers.maximum], np.int64).view(spec.dtype)
        return [str(ends[0]), str(ends[1]), None, None]
    return [numbers.minimum, numbers.maximum, numbers.mean, numbers.deviation]


def _shown(value: float | int | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _document(measured: _Measured) -> dict[str, object]:
    leaf, numbers = measured.leaf, measured.numbers
    body: dict[str, object] = {"prefix": measured.prefix, "key": leaf.key, "path": list(leaf.path), "kind": leaf.kind}
    body["flags"] = measured.flags
    if not isinstance(leaf, StoredArray):
        return {**body, "value": json_value(leaf.value)}
    body |= {"dtype": leaf.logical_dtype, "shape": list(leaf.logical_shape)}
    if not leaf.holds_numbers:
        return body
    minimum, maximum, mean, deviation = (json_number(figure) for figure in _figures(numbers, leaf.spec))
    return body | {
        "count": numbers.count,
        "min": minimum,
        "max": maximum,
        "mean": mean,
        "std": deviation,
        "nan": numbers.nan,
        "inf": numbers.inf,
        "zero": numbers.zero,
        "denormal": numbers.denormal,
    }
