"""`shardkeep stats`: the numbers in each array, and which arrays look wrong."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardkeep.arrays import Region
from shardkeep.cli.arithmetic import Numbers, numbers_of
from shardkeep.cli.blocks import (
    Opened,
    choose_trees,
    compile_match,
    logical,
    matches,
    open_at,
    read_region,
    regions_of,
    steady,
)
from shardkeep.cli.output import Cell, Output, UsageError, bar, counted, json_number, json_value, layout, plain, short
from shardkeep.manifest import StoredLeaf, Tree
from shardkeep.progress import Progress
from shardkeep.reading import Source
from shardkeep.workers import Task, run_tasks


@dataclass
class _Measured:
    """A leaf and what was found in it."""

    prefix: str
    leaf: StoredLeaf
    numbers: Numbers = field(default_factory=Numbers)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def flags(self) -> list[str]:
        if self.leaf.spec is None:
            return _flags_of_value(self.leaf.value)
        return [] if self.leaf.kind == "prng" else self.numbers.flags(self.leaf.spec.dtype)


def stats(path: str, output: Output, prefix: str | None, match: str | None) -> int:
    """Show the numbers of every array that is chosen."""
    opened = open_at(path)
    trees = choose_trees(opened.manifest, prefix)
    pattern = compile_match(match)
    chosen = {name: [leaf for leaf in tree.leaves if matches(leaf, pattern)] for name, tree in trees.items()}
    if match is not None and not any(chosen.values()):
        raise UsageError(f"--match {match!r} finds no leaf in {path}")
    measured = [_Measured(name, leaf) for name, leaves in chosen.items() for leaf in leaves]
    with steady(opened), bar("reading", sum(m.leaf.nbytes for m in measured)) as progress:
        run_tasks(task for m in measured for task in _tasks(opened, trees[m.prefix], m, progress))
    shown = [m for m in measured if m.leaf.spec is not None or m.flags]
    if output.as_json:
        output.document({"path": path, "leaves": [_document(m) for m in shown]})
        return 0
    _show(shown, len(trees) > 1, output)
    return 0


def _tasks(opened: Opened, tree: Tree, measured: _Measured, progress: Progress) -> list[Task]:
    leaf = measured.leaf
    if leaf.spec is None or leaf.kind == "prng":
        return []
    source = opened.source(tree)
    return [lambda r=region: _measure(opened, source, measured, r, progress) for region in regions_of(opened, leaf)]


def _measure(opened: Opened, source: Source, measured: _Measured, region: Region, progress: Progress) -> None:
    found = numbers_of(read_region(opened, source, measured.leaf, region, progress))
    with measured.lock:
        measured.numbers.merge(found)


def _flags_of_value(value: Any) -> list[str]:
    """Plain numbers that are not finite are worth a line; other plain values are not numbers to look at."""
    if not isinstance(value, float | complex | np.inexact):
        return []
    parts = [float(value.real), float(value.imag)]
    return [name for name, test in (("nan", math.isnan), ("inf", math.isinf)) if any(map(test, parts))]


def _show(measured: Sequence[_Measured], several: bool, output: Output) -> None:
    titles = ("KEY", "TYPE", "MIN", "MAX", "MEAN", "STD", "NAN", "INF", "ZERO", "FLAGS")
    head: list[Cell] = [(title, "bold") for title in titles]
    output.table([head, *(_row(m, several) for m in measured)], right=range(2, 9))
    flagged = [m for m in measured if m.flags]
    if flagged:
        output.line(output.paint(f"{counted(len(flagged), 'leaf', 'leaves')} flagged", "yellow"))


def _row(measured: _Measured, several: bool) -> list[Cell]:
    leaf, numbers = measured.leaf, measured.numbers
    key = plain(leaf.key) or "(the tree itself)"
    name = f"{plain(measured.prefix)}/{key}" if several and measured.prefix else key
    flags: Cell = (", ".join(flag.replace("_", " ") for flag in measured.flags), "yellow")
    if leaf.spec is None:
        return [name, short(leaf.value), "", "", "", "", "", "", "", flags]
    if leaf.kind == "prng" or not numbers.count:
        return [name, layout(*logical(leaf)), "", "", "", "", "", "", "", flags]
    counts = [f"{n:,}" for n in (numbers.nan, numbers.inf, numbers.zero)]
    return [name, layout(*logical(leaf)), *(_shown(f) for f in _figures(measured)), *counts, flags]


def _figures(measured: _Measured) -> list[float | int | str | None]:
    """Least, greatest, mean and standard deviation; of times, which have no mean, the first and the last."""
    numbers, spec = measured.numbers, measured.leaf.spec
    if numbers.least is None or numbers.greatest is None:
        return [None] * 4
    if spec is not None and spec.dtype.kind in "mM":
        ends = np.array([numbers.least, numbers.greatest], np.int64).view(spec.dtype)
        return [str(ends[0]), str(ends[1]), None, None]
    return [numbers.least, numbers.greatest, numbers.mean, numbers.deviation]


def _shown(value: float | int | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _document(measured: _Measured) -> dict[str, Any]:
    leaf, numbers = measured.leaf, measured.numbers
    body: dict[str, Any] = {"prefix": measured.prefix, "key": leaf.key, "kind": leaf.kind, "flags": measured.flags}
    if leaf.spec is None:
        return {**body, "value": json_value(leaf.value)}
    dtype, shape = logical(leaf)
    body |= {"dtype": dtype, "shape": list(shape)}
    if leaf.kind == "prng":
        return body
    least, greatest, mean, deviation = (json_number(figure) for figure in _figures(measured))
    return body | {
        "count": numbers.count,
        "min": least,
        "max": greatest,
        "mean": mean,
        "std": deviation,
        "nan": numbers.nan,
        "inf": numbers.inf,
        "zero": numbers.zero,
        "denormal": numbers.denormal,
    }
