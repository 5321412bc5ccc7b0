"""The results of a run: the tables, the plots, and what the README and docs/performance.md show of them.

`python bench/report.py` writes all of it again from bench/results/bench.json and scale.json, without measuring.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plots import PLOTS, Medians, draw_all, is_peer, label, short

from targets import Row, rows

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DATA, SCALING, TARGETS = RESULTS / "bench.json", RESULTS / "scale.json", RESULTS / "targets.md"
README, PAGE = HERE.parent / "README.md", HERE.parent / "docs" / "performance.md"
Results = Mapping[tuple[str, str, str], Sequence[Any]]
Figure = tuple[float, ...]  # the median, the smallest and the largest of several rounds; or a single value
METRICS = {
    "durable": "durable save",
    "call": "`save_async` call",
    "stall": "stall of a donating loop",
    "stall, first": "… at the first save",
    "load": "load, warm",
    "unchecked": "load, unchecked",
    "cold": "load, cold",
    "resumed": "load in a new process, after a kill",
    "onto (8, 1)": "load onto (8, 1)",
    "onto (4, 2) swapped": "load onto (4, 2), axes swapped",
    "one layer": "load one layer",
}
# Metrics that are not times, and how they are shown.
PLAIN = {
    "kept": ("speed kept during saves", "{:.0%}"),
    "save memory": ("memory of a save, × tree", "{:.2f}"),
    "donating memory": ("memory of a donating loop, × tree", "{:.2f}"),
    "load memory": ("memory of a load, × tree", "{:.2f}"),
    "files": ("files", "{:,.0f}"),
    "bytes": ("bytes on disk", "{:,.0f}"),
}
PACKAGES = ("jax", "numpy", "orbax-checkpoint", "safetensors", "eformer", "torch")
DIGITS = 6  # of the seconds in bench.json: microseconds
SHORT = {
    "b512": ("durable", "stall", "stall, first", "load", "cold", "resumed", "onto (8, 1)", "one layer"),
    "a2048": ("durable", "call", "stall", "stall, first", "load"),
    "c": ("durable", "call", "load"),
    "c-mesh": ("durable", "call", "load"),
}


@dataclass(frozen=True)
class TreeInfo:
    """What a tree is."""

    title: str
    arrays: int
    mib: int


@dataclass(frozen=True)
class Run:
    """One run of `make bench`: everything that is shown of it."""

    machine: str  # and when
    load: float  # average, before it
    rounds: int
    again: dict[str, str]  # trees that were measured again, and when
    trees: dict[str, TreeInfo]
    figures: dict[tuple[str, str, str], Figure]  # by tree, contender, metric; seconds, or what the metric says
    targets: list[Row]

    @property
    def medians(self) -> Medians:
        return {key: figure[0] for key, figure in self.figures.items()}

    @property
    def origin(self) -> str:
        """Where and when this was measured."""
        again = sorted(self.again.items())
        later = [f" {short(self.trees[name].title)}: measured again on {day}." for name, day in again]
        return f"{self.machine}.{''.join(later)}"

    def contenders(self, tree: str) -> list[str]:
        return [c for c in dict.fromkeys(key[1] for key in self.figures if key[0] == tree) if c != "limits"]


def to_json(run: Run) -> str:
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (tree, contender, metric), figure in run.figures.items():
        results.setdefault(tree, {}).setdefault(contender, {})[metric] = list(figure)
    document = {
        "machine": run.machine,
        "load": run.load,
        "rounds": run.rounds,
        "again": run.again,
        "trees": {name: vars(tree) for name, tree in run.trees.items()},
        "results": results,
        "targets": [vars(row) for row in run.targets],
    }
    return compact(document)


def compact(document: Any) -> str:
    """JSON in which the innermost lists and objects take one line each."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    return re.sub(r"\[[^\[\]{}]*\]|\{[^\[\]{}]*\}", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"


def from_json(text: str) -> Run:
    document = json.loads(text)
    figures = {
        (tree, contender, metric): tuple(figure)
        for tree, contenders in document["results"].items()
        for contender, metrics in contenders.items()
        for metric, figure in metrics.items()
    }
    trees = {name: TreeInfo(**tree) for name, tree in document["trees"].items()}
    targets = [Row(**row) for row in document["targets"]]
    again = document.get("again", {})
    return Run(document["machine"], document["load"], document["rounds"], again, trees, figures, targets)


def read() -> Run:
    """The last run whose results were written."""
    return from_json(DATA.read_text())


def growth_rows(found: Results) -> Iterator[Row]:
    """t = a + b·leaves + c·bytes: the fixed part, and how far the others are from constant.

    All from the second point on: neighbours differ by less than the noise of two points.
    """
    for by, column, unit in (("leaves", 0, 1e6), ("bytes", 1, 1e9)):
        if ("growth", by, "points") not in found:
            continue
        (points,) = found["growth", by, "points"]
        for what, at in (("save", 2), ("load", 3)):
            base = points[1]
            slopes = [(p[at] - base[at]) / (p[column] - base[column]) for p in points[2:]]
            shown = ", ".join(f"{slope * unit:.3g}" for slope in slopes)
            unit_name = "µs for each array" if by == "leaves" else "s for each GB"
            spread = max(slopes) / max(min(slopes), 1e-12)
            yield Row(f"growth of a {what} with {by}: {shown} {unit_name}; largest / smallest", spread, 1.5, True)
            if by == "bytes":
                yield Row(f"fixed cost of a {what}, ms (10 arrays, 1 MiB)", points[0][at] * 1e3, 10, True)
    for name, most in (("shardkeep", 0.15),):
        if ("import", name, "import") in found:
            yield Row(f"import {name} on top of jax, s", statistics.median(found["import", name, "import"]), most, True)


def medians_of(found: Results) -> dict[tuple[str, str, str], float]:
    return {key: statistics.median(values) for key, values in found.items() if isinstance(values[0], float | int)}


def all_rows(medians: Medians, found: Results) -> list[Row]:
    return [row for row in (*rows(medians), *growth_rows(found)) if row.value is not None]


def print_rows(medians: Medians, found: Results) -> None:
    for row in all_rows(medians, found):
        print(row)


def machine() -> str:
    versions: list[str] = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    done = subprocess.run(["df", "--output=fstype", tempfile.gettempdir()], capture_output=True, text=True, check=False)
    system = (done.stdout.split() or ["unknown"])[-1]
    return (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {os.cpu_count()} cores, {memory:.0f} GiB of memory, "
        f"{system}, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, {', '.join(versions)}"
    )


def collect(found: Results, rounds: int, load: float) -> Run:
    """What is kept of the values of all rounds."""
    from trees import WORKLOADS, nbytes_of, shapes_of

    measured = {key[0] for key in found}
    trees = {
        name: TreeInfo(each.title, len(shapes_of(each)), round(nbytes_of(each) / 2**20))
        for name, each in WORKLOADS.items()
        if name in measured
    }
    figures = {
        key: _figure(values) for key, values in found.items() if key[0] in {*trees, "rotation"} and not _nested(values)
    }
    return Run(machine(), round(load, 1), rounds, {}, trees, figures, all_rows(medians_of(found), found))


def merge(old: Run, new: Run) -> Run:
    """A run of which some trees were measured again, with all contenders."""
    again = {row.what: row for row in new.targets}
    day = new.machine.partition(",")[0]
    return replace(
        old,
        load=max(old.load, new.load),
        rounds=min(old.rounds, new.rounds),
        again={**old.again, **dict.fromkeys(new.trees, day)},
        trees={**old.trees, **new.trees},
        figures={**{key: figure for key, figure in old.figures.items() if key[0] not in new.trees}, **new.figures},
        targets=[again.get(row.what, row) for row in old.targets],
    )


def _nested(values: Sequence[Any]) -> bool:
    return not isinstance(values[0], float | int)


def _figure(values: Sequence[float]) -> Figure:
    several = (statistics.median(values), min(values), max(values)) if len(values) > 1 else values
    return tuple(round(value, DIGITS) for value in several)


def cell(figure: Figure | None) -> str:
    """Milliseconds: the median, and the smallest and the largest."""
    if not figure:
        return "–"
    digits = 1 if figure[0] * 1e3 < 100 else 0
    middle, *ends = (f"{value * 1e3:.{digits}f}" for value in figure)
    return f"{middle} ({' – '.join(ends)})" if ends else middle


def tables(run: Run) -> str:
    """A table for each tree, with all metrics and contenders."""
    lines = [
        f"{run.origin} Load average before the run: {run.load:.1f}.",
        "",
        f"Times are in milliseconds: the median of {run.rounds} interleaved rounds, and in parentheses the smallest "
        "and the largest. Memory is the additional anonymous memory at the peak, as a multiple of the size of the "
        "tree. “The machine” is how long the same number of bytes takes without any library.",
    ]
    for name, tree in run.trees.items():
        contenders = run.contenders(name)
        lines += ["", f"### {short(tree.title)}", "", f"{tree.arrays:,} arrays, {tree.mib:,} MiB.", ""]
        lines += ["| | " + " | ".join(map(label, contenders)) + " |", "|---" * (len(contenders) + 1) + "|"]
        for metric, title in METRICS.items():
            cells = [cell(run.figures.get((name, c, metric))) for c in contenders]
            if any(each != "–" for each in cells):
                lines.append(f"| {title} | " + " | ".join(cells) + " |")
        for metric, (title, shown) in PLAIN.items():
            values = [run.medians.get((name, c, metric)) for c in contenders]
            if any(value is not None for value in values):
                cells = ["–" if value is None else shown.format(value) for value in values]
                lines.append(f"| {title} | " + " | ".join(cells) + " |")
        limits = {key[2]: cell(run.figures[key]) for key in run.figures if key[:2] == (name, "limits")}
        limits.pop("durable", None)  # one of the others, by the name that targets.py compares with
        if limits:
            lines += ["", "The machine: " + ", ".join(f"{what} {value}" for what, value in limits.items()) + "."]
    rotations = {c: run.medians for tree, c, _ in run.figures if tree == "rotation"}
    if rotations:
        shown = "; ".join(
            f"{c}: median {medians['rotation', c, 'median'] * 1e3:.0f} ms, "
            f"slowest {medians['rotation', c, 'largest'] * 1e3:.0f} ms"
            for c, medians in rotations.items()
        )
        lines += ["", "### Rotation", ""]
        lines += [f"50 MiB in 200 arrays, saved 20 times; each time the previous checkpoint is deleted. {shown}."]
    return "\n".join(lines)


def short_table(run: Run) -> str:
    """What the README shows: four trees, the metrics that people ask for, and every row where others are ahead."""
    contenders = ["shardkeep", "Orbax", "safetensors.flax", "eFormer"]
    lines = [
        f"Times in milliseconds: medians of {run.rounds} interleaved rounds of `make bench`, each in a new process, on "
        "eight simulated CPU devices. shardkeep computes digests in all of these saves and checks them in all of these "
        "loads. The stall of a donating loop is the time of the `save_async` call plus the time that the next five "
        "steps lose. Both are measured from the second save on, except where the row says otherwise.  \n" + run.origin,
        "",
        "| | " + " | ".join(map(label, contenders)) + " |",
        "|---" * (len(contenders) + 1) + "|",
    ]
    for tree, metrics in SHORT.items():
        if tree not in run.trees:
            continue
        lines.append(f"| **{short(run.trees[tree].title)}** |" + " |" * len(contenders))
        for metric in metrics:
            values = [run.medians.get((tree, c, metric)) for c in contenders]
            if any(values):
                shown = " | ".join("–" if v is None else f"{v * 1e3:,.0f}" for v in values)
                lines.append(f"| {METRICS[metric]} | {shown} |")
    lines += ["", "Where others are ahead:", "", *behind(run), ""]
    lines += [
        "[Performance](docs/performance.md) has the plots and all measurements, and says how they are made. "
        "`make bench` repeats them on your machine; `make bench-quick` takes five minutes."
    ]
    return "\n".join(lines)


def behind(run: Run) -> Iterator[str]:
    """Every measurement in which another library is faster; the longest stall; the bytes on disk."""
    medians = run.medians
    for metric, title in METRICS.items():
        for name, tree in run.trees.items():
            ours = medians.get((name, "shardkeep", metric))
            others = {c: medians[t, c, m] for t, c, m in medians if (t, m) == (name, metric) and is_peer(c)}
            if ours is None or not others:
                continue
            best = min(others, key=lambda c: others[c])
            if others[best] < ours:
                yield (
                    f"- {title}, {short(tree.title)}: {label(best)} {others[best] * 1e3:,.0f} ms, "
                    f"shardkeep {ours * 1e3:,.0f} ms"
                )
    first = [(value, key[0]) for key, value in medians.items() if key[1:] == ("shardkeep", "stall, first")]
    if first:
        seconds, name = max(first)
        yield (
            f"- first background save of a loop that donates its arrays, {short(run.trees[name].title)}: "
            f"stalls the loop for {seconds:.1f} s"
        )
    for name, tree in run.trees.items():
        ours, theirs = (medians.get((name, c, "bytes")) for c in ("shardkeep", "Orbax"))
        if ours and theirs:
            sizes = f"Orbax {theirs / 1e6:,.0f} MB, shardkeep {ours / 1e6:,.0f} MB"
            yield f"- bytes on disk, {short(tree.title)}: {sizes}; Orbax and eFormer compress by default"
            return


def sentences(run: Run, what: str) -> str:
    """What limits a save or a load, and what it costs. Nothing if that was not measured."""
    if what == "save":
        of_limit = [row.value for row in run.targets if row.what.endswith(": shardkeep: durable save, of the raw disk")]
        limit = (
            "A large save is limited by the disk. shardkeep reaches {} % of the speed at which this machine writes one "
        )
        limit += "prepared buffer past the page cache."
    else:
        medians = run.medians
        ours = [(tree, "shardkeep", "unchecked") for tree in run.trees if not tree.startswith("c")]
        of_limit = [medians[key] / medians[*key[:2], "load"] for key in ours if key in medians]
        limit = (
            "A cold load is limited by the disk. A warm load spends much of its time on digests: without them (“load, "
        )
        limit += "unchecked”), large trees take {} % of the time."
    found: dict[str, list[float]] = {}
    for row in run.targets:
        if growth := re.match(rf"growth of a {what} with (\w+): ([\d., ]+) ", row.what):
            found[growth[1]] = [float(number) for number in growth[2].split(", ")]
        elif row.what.startswith(f"fixed cost of a {what}"):
            found["fixed"] = [row.value or 0]
    if not of_limit or len(found) < 3:
        return ""
    shares = "{:.0f} to {:.0f}".format(*(100 * (value or 0) for value in (min(of_limit), max(of_limit))))
    each, gb = (f"{min(found[by]):.2g} to {max(found[by]):.2g}" for by in ("leaves", "bytes"))
    costs = f"A {what} costs about {found['fixed'][0]:.0f} ms, plus {each} µs for each array, plus {gb} s for each GB"
    return f"{limit.format(shares)} {costs}{'' if what == 'save' else ' in the page cache'}."


def targets(run: Run) -> str:
    reached = sum(row.reached for row in run.targets)
    return (
        f"# Targets\n\nRatios within the run of {run.machine.partition(',')[0]}: {reached} of {len(run.targets)} "
        "targets are reached. [profile.md](profile.md) says what limits the others.\n\n```\n"
        + "\n".join(map(str, run.targets))
        + "\n```\n"
    )


def between(text: str, name: str, content: str) -> str:
    """A page with this between the comments that mark the section."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(start)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"there is no {start} … {end} on the page")
    return f"{before}{start}\n{content}\n{end}{after}"


def documents(run: Run, scaling: Mapping[str, Any]) -> dict[Path, str]:
    """Every file that shows results, and what it has to be."""
    page = between(PAGE.read_text(), "behind", "\n".join(behind(run)))
    for what in ("save", "load"):
        page = between(page, what, sentences(run, what))
    titles = {name: tree.title for name, tree in run.trees.items()}
    drawn = draw_all(run.medians, titles, scaling)
    return {
        README: between(README.read_text(), "bench", short_table(run)),
        PAGE: between(page, "tables", tables(run)),
        TARGETS: targets(run),
        **{PLOTS / name: text for name, text in drawn.items()},
    }


def redraw() -> None:
    """Everything from the results that are there."""
    PLOTS.mkdir(exist_ok=True)
    for path, text in documents(read(), json.loads(SCALING.read_text())).items():
        path.write_text(text)


def write(found: Results, rounds: int, load: float, partly: bool = False) -> None:
    """The results of a run into bench/results, and everything that shows them. `partly`: others keep their figures."""
    run = collect(found, rounds, load)
    DATA.write_text(to_json(merge(read(), run) if partly else run))
    redraw()


if __name__ == "__main__":
    redraw()
