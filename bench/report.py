"""The results of a run: a list of what is reached, tables, plots, and the short table of the README."""

import datetime
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trees import WORKLOADS, nbytes_of, shapes_of

from targets import Row, rows

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
    "resumed": "load of a new process, after a kill",
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
    "b512": ("durable", "stall", "stall, first", "load", "cold", "resumed", "onto (8, 1)", "one layer"),
    "a2048": ("durable", "call", "stall", "stall, first", "load"),
    "c": ("durable", "call", "load"),
    "c-mesh": ("durable", "call", "load"),
}
Medians = Mapping[tuple[str, str, str], float]


def short_table(medians: Medians, rounds: int, measured_on: str) -> str:
    """What the README shows: four trees, the metrics that people ask for, and every row where others are ahead."""
    contenders = ["shardkeep", "Orbax", "safetensors.flax", "eFormer"]
    lines = [
        f"Times in milliseconds: medians of {rounds} interleaved rounds of one `make bench`, each in a new process, on "
        "eight simulated CPU devices. shardkeep computes digests in all of these saves and checks them in all of these "
        "loads. The `save_async` call and the stall are those of the second and later saves. Free memory and the "
        "objects of the interpreter are touched before each measurement, for every library, because a virtual machine "
        f"gets memory back from its host slowly.  \n{measured_on}.",
        "",
        "| | " + " | ".join(contenders) + " |",
        "|---" * (len(contenders) + 1) + "|",
    ]
    for workload, metrics in SHORT.items():
        lines.append(f"| **{WORKLOADS[workload].title}** |" + " |" * len(contenders))
        for metric in metrics:
            values = [medians.get((workload, c, metric)) for c in contenders]
            if not any(values):
                continue
            shown = " | ".join("–" if v is None else f"{v * 1e3:,.0f}" for v in values)
            lines.append(f"| {METRICS[metric]} | {shown} |")
    lines += ["", "Where others are ahead:", "", *behind(medians)]
    lines += [
        "",
        "![Durable saves, log scale](bench/results/durable.png)",
        "![Loads with cached files, log scale](bench/results/load.png)",
        "",
        "[All trees and metrics, the limits of the machine, and which targets are met](bench/results/table.md). "
        "`make bench` measures them on your machine, `make bench-quick` a part of them in five minutes.",
    ]
    return "\n".join(lines)


def behind(medians: Medians) -> Iterator[str]:
    """Every measurement in which another library is faster; the longest stall; the bytes on disk."""
    for metric, title in METRICS.items():
        for workload, described in WORKLOADS.items():
            ours = medians.get((workload, "shardkeep", metric))
            others = {c: medians[w, c, m] for w, c, m in medians if (w, m) == (workload, metric) and is_peer(c)}
            if ours is None or not others:
                continue
            best = min(others, key=lambda c: others[c])
            if others[best] < ours:
                yield f"- {title}, {described.title}: {best} {others[best] * 1e3:,.0f} ms, shardkeep {ours * 1e3:,.0f}"
    first = [(medians[key], WORKLOADS[key[0]].title) for key in medians if key[1:] == ("shardkeep", "stall, first")]
    if first:
        seconds, title = max(first)
        yield f"- the first background save of a loop that donates its arrays stalls it for {seconds:.1f} s, {title}"
    for workload, described in WORKLOADS.items():
        sizes = {c: medians[w, c, m] for w, c, m in medians if (w, m) == (workload, "bytes")}
        if {"shardkeep", "Orbax"} <= sizes.keys():
            mb = {c: f"{sizes[c] / 1e6:,.0f} MB" for c in sizes}
            yield f"- bytes on disk: Orbax and eFormer compress by default ({described.title}: {mb['Orbax']}, " + (
                f"shardkeep {mb['shardkeep']})"
            )
            return


def is_peer(contender: str) -> bool:
    return contender != "limits" and not contender.startswith("shardkeep")


def read_tables(text: str) -> tuple[dict[tuple[str, str, str], float], int, str]:
    """What `tables` has written: medians in seconds (and bytes), the number of rounds, the machine."""
    titles = {title: metric for metric, title in METRICS.items()} | {"bytes on disk": "bytes"}
    workloads = {described.title: workload for workload, described in WORKLOADS.items()}
    medians: dict[tuple[str, str, str], float] = {}
    workload, contenders = "", list[str]()
    for line in text.splitlines():
        cells = [each.strip() for each in line.strip("|").split("|")]
        if line.startswith("## "):
            workload = workloads.get(line.removeprefix("## "), "")
        elif line.startswith("| |"):
            contenders = cells[1:]
        elif workload and line.startswith("| ") and cells[0] in titles:
            metric = titles[cells[0]]
            for contender, value in zip(contenders, cells[1:], strict=True):
                if value != "–":
                    number = float(value.split(" ")[0].replace(",", ""))
                    medians[workload, contender, metric] = number if metric == "bytes" else number / 1e3
    rounds = re.search(r"medians of (\d+) rounds", text)
    measured_on = re.search(r"^(.*)\. Load average", text, re.MULTILINE)
    if rounds is None or measured_on is None:
        raise ValueError("this is not a table of `make bench`")
    return medians, int(rounds[1]), measured_on[1]


def write_readme(table: str) -> None:
    """The short table into the README, from the full one."""
    text = README.read_text()
    if START in text and END in text:
        before, after = text.split(START)[0], text.split(END)[1]
        README.write_text(f"{before}{START}\n{short_table(*read_tables(table))}\n{END}{after}")


def write(found: Results, rounds: int, load: float) -> None:
    """Everything into bench/results, the short table into the README."""
    RESULTS.mkdir(exist_ok=True)
    medians = medians_of(found)
    reached = "\n".join(str(row) for row in all_rows(medians, found))
    table = tables(found, rounds, load) + f"\n## What is reached\n\n{BOUNDS}\n\n```\n{reached}\n```\n"
    (RESULTS / "table.md").write_text(table)
    plot(found)
    write_readme(table)


if __name__ == "__main__":  # the README again from results that are there, without measuring anything
    write_readme((RESULTS / "table.md").read_text())
