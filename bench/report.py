"""The results of a run: a list of what is reached, tables, plots, and the short table of the README."""

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from targets import Row, rows
from trees import WORKLOADS, nbytes_of, shapes_of

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
Results = Mapping[tuple[str, str, str], Sequence[Any]]
METRICS = {
    "durable": "durable save",
    "call": "`save_async` call",
    "stall": "stall of a donating loop",
    "stall, first": "… by the first save",
    "load": "load, warm",
    "unchecked": "load, unchecked",
    "cold": "load, cold",
    "onto (8, 1)": "load onto (8, 1)",
    "onto (4, 2) swapped": "load onto (4, 2), axes swapped",
    "one layer": "load one layer",
}
PACKAGES = ("jax", "numpy", "orbax-checkpoint", "safetensors", "eformer", "torch")
BOUNDS = "What bounds the rows that were short when they were looked at: [profile.md](profile.md)."
START, END = "<!-- bench -->", "<!-- /bench -->"


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


def all_rows(medians: Mapping[tuple[str, str, str], float], found: Results) -> list[Row]:
    return [row for row in (*rows(medians), *growth_rows(found)) if row.value is not None]


def print_rows(medians: Mapping[tuple[str, str, str], float], found: Results) -> None:
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


def cell(values: Sequence[float] | None) -> str:
    if not values:
        return "–"
    middle = statistics.median(values) * 1e3
    digits = 1 if middle < 100 else 0
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({min(values) * 1e3:.{digits}f} – {max(values) * 1e3:.{digits}f})"


def contenders_of(found: Results, workload: str) -> list[str]:
    return [c for c in dict.fromkeys(key[1] for key in found if key[0] == workload) if c != "limits"]


def tables(found: Results, rounds: int, load: float) -> str:
    lines = [
        "# Benchmark",
        "",
        f"{machine()}. Load average before it: {load:.1f}.",
        "",
        f"Milliseconds: medians of {rounds} rounds (smallest – largest), interleaved, each in a fresh process. How "
        "each is measured is said in `bench/run.py`. shardkeep writes digests and checks them in every load but those "
        "marked unchecked; the others have none to check, or do not check them by default. The stall of a donating "
        "loop is the `save_async` call and what the next five steps took too long.",
    ]
    for workload, described in WORKLOADS.items():
        if not any(key[0] == workload for key in found):
            continue
        lines += ["", f"## {described.title}", ""]
        lines += [f"{len(shapes_of(described)):,} arrays, {nbytes_of(described) / 2**20:,.0f} MiB.", ""]
        contenders = contenders_of(found, workload)
        lines += ["| | " + " | ".join(contenders) + " |", "|---" * (len(contenders) + 1) + "|"]
        for metric, title in METRICS.items():
            cells = [cell(found.get((workload, c, metric))) for c in contenders]
            if any(each != "–" for each in cells):
                lines.append(f"| {title} | " + " | ".join(cells) + " |")
        lines += list(_plain_rows(found, workload, contenders))
        if (workload, "limits", "memcpy") in found:
            limits = {key[2]: cell(found[key]) for key in found if key[:2] == (workload, "limits")}
            limits.pop("durable", None)
            lines += ["", "The machine: " + ", ".join(f"{name} {value}" for name, value in limits.items()) + "."]
    for name in ("shardkeep", "Orbax"):
        if ("rotation", name, "median") in found:
            middle, largest = (found["rotation", name, each][0] * 1e3 for each in ("median", "largest"))
            lines += ["", f"Twenty times a save of 50 MiB in 200 arrays, the one before deleted, {name}: "]
            lines[-1] += f"median {middle:.0f} ms, largest {largest:.0f} ms."
    return "\n".join(lines) + "\n"


def _plain_rows(found: Results, workload: str, contenders: Sequence[str]) -> Iterator[str]:
    """What is no time."""
    plain = {
        "kept": ("speed kept beside saves", "{:.0%}"),
        "save memory": ("memory of a save, × tree", "{:.2f}"),
        "donating memory": ("memory of a donating loop, × tree", "{:.2f}"),
        "load memory": ("memory of a load, × tree", "{:.2f}"),
        "files": ("files", "{:,.0f}"),
        "bytes": ("bytes on disk", "{:,.0f}"),
    }
    for metric, (title, shown) in plain.items():
        values = [found.get((workload, c, metric)) for c in contenders]
        if any(values):
            yield f"| {title} | " + " | ".join(shown.format(statistics.median(v)) if v else "–" for v in values) + " |"


def plot(found: Results) -> None:
    """Bars on a log scale, one picture for each of four metrics."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    for metric in ("durable", "stall", "load", "cold"):
        workloads = [w for w in WORKLOADS if (w, "shardkeep", metric) in found]
        contenders = [c for c in dict.fromkeys(key[1] for key in found if key[2] == metric) if c != "limits"]
        figure, axes = plt.subplots(figsize=(10, 4.5))
        width = 0.8 / max(len(contenders), 1)
        for number, contender in enumerate(contenders):
            heights = [statistics.median(found.get((w, contender, metric), [float("nan")])) * 1e3 for w in workloads]
            places = [i + (number - len(contenders) / 2 + 0.5) * width for i in range(len(workloads))]
            axes.bar(places, heights, width, label=contender)
        axes.set_yscale("log")
        axes.set_ylabel("ms, log scale")
        axes.set_xticks(range(len(workloads)), workloads)
        axes.set_title(METRICS[metric].replace("`", ""))
        axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(RESULTS / f"{metric}.png", dpi=110)
        plt.close(figure)


SHORT = {
    "b512": ("durable", "stall", "stall, first", "load", "cold", "onto (8, 1)", "one layer"),
    "c-mesh": ("durable", "call", "load"),
}


def short_table(medians: Mapping[tuple[str, str, str], float], rounds: int) -> str:
    """What the README shows: two trees, the most asked for metrics."""
    contenders = ["shardkeep", "Orbax", "safetensors.flax", "eFormer"]
    lines = [
        f"Milliseconds, medians of {rounds} interleaved rounds of one `make bench`, each in a fresh process, on eight "
        "virtual CPU devices. shardkeep writes digests and checks them in all of these loads; the call to `save_async` "
        "and its stall are of the second save and later. Free memory and the interpreter's objects are touched before "
        f"each timing, for all alike: a virtual machine gets memory back from its host slowly.  \n{machine()}.",
        "",
        "| | " + " | ".join(contenders) + " |",
        "|---" * (len(contenders) + 1) + "|",
    ]
    for workload, metrics in SHORT.items():
        lines.append(f"| **{WORKLOADS[workload].title}** |" + " |" * len(contenders))
        for metric in metrics:
            values = [medians.get((workload, c, metric)) for c in contenders]
            shown = " | ".join("–" if v is None else f"{v * 1e3:,.0f}" for v in values)
            lines.append(f"| {METRICS[metric]} | {shown} |")
    lines += [
        "",
        "![Durable saves, log scale](bench/results/durable.png)",
        "![Loads with cached files, log scale](bench/results/load.png)",
        "",
        "[All trees, all metrics, the limits of the machine, and what is and is not reached](bench/results/table.md). "
        "`make bench` measures it on your machine, `make bench-quick` a part of it in five minutes.",
    ]
    return "\n".join(lines)


def write(found: Results, rounds: int, load: float) -> None:
    """Everything into bench/results, the short table into the README."""
    RESULTS.mkdir(exist_ok=True)
    medians = medians_of(found)
    reached = "\n".join(str(row) for row in all_rows(medians, found))
    (RESULTS / "table.md").write_text(
        tables(found, rounds, load) + f"\n## What is reached\n\n{BOUNDS}\n\n```\n{reached}\n```\n"
    )
    plot(found)
    text = README.read_text()
    if START in text and END in text:
        before, after = text.split(START)[0], text.split(END)[1]
        README.write_text(f"{before}{START}\n{short_table(medians, rounds)}\n{END}{after}")
