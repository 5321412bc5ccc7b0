"""The plots of the benchmarks, as SVG for light and for dark pages. Needs nothing but the standard library.

`report.py` draws them from the files in `bench/results`. The same numbers always give the same bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PLOTS = Path(__file__).parents[1] / "docs" / "plots"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', Helvetica, Arial, sans-serif"
WIDTH = 640  # fits a column of text on GitHub and on the site, and can still be read on a phone
US = "shardkeep"

# A library has the same colour in every plot and in both themes. Each stands out from a white and from a black page.
COLOURS = {
    "shardkeep": "#1f6fd0",
    "shardkeep, tensorstore": "#5897e0",
    "Orbax": "#d5692a",
    "safetensors.flax": "#2b9a68",
    "eFormer": "#a865c9",
    "torch DCP": "#b08415",
}
# What plots and tables call them.
LABELS = {"shardkeep, tensorstore": "shardkeep (zarr)", "safetensors.flax": "safetensors"}


@dataclass(frozen=True)
class Theme:
    """The colours of everything but the libraries. The background is that of the page."""

    text: str
    muted: str
    line: str


THEMES = {"light": Theme("#1f2328", "#59636e", "#d1d9e0"), "dark": Theme("#f0f6fc", "#a3abb5", "#3d444d")}


@dataclass(frozen=True)
class Comparison:
    """A plot of one metric, for some trees. What has braces takes a ratio to the next best library, or its name."""

    metric: str
    title: str  # takes the range of the ratios, such as "4 to 13 times", and the next best library
    subtitle: str
    verdict: str  # takes a ratio and a name
    trees: tuple[str, ...]
    unit: str = "ms"


COMPARISONS = {
    "load": Comparison(
        "load",
        "Warm loads: {} as fast as {}",
        "Milliseconds to load from the page cache; shardkeep checks every digest.",
        "{} as fast as {}",
        ("b512", "a2048", "c"),
    ),
    "cold": Comparison(
        "cold",
        "Cold loads: {} as fast as {}",
        "Milliseconds to load from the disk; shardkeep checks every digest.",
        "{} as fast as {}",
        ("b512", "a2048", "f"),
    ),
    "save": Comparison(
        "durable",
        "Durable saves: {} as fast as {}",
        "Milliseconds until everything is on the disk. shardkeep also computes digests.",
        "{} as fast as {}",
        ("b512", "a2048", "c"),
    ),
    "stall": Comparison(
        "stall",
        "Background saves stall training {} less than {}",
        "Milliseconds that a loop that donates its arrays loses to a background save.",
        "{} less than {}",
        ("b512", "a2048", "c"),
    ),
    "memory": Comparison(
        "donating memory",
        "Background saves take {} less memory than {}",
        "Additional memory of a loop that donates its arrays, at the peak, as a multiple of the size of the tree.",
        "{} less than {}",
        ("a512", "b512", "f"),
        unit="× the tree",
    ),
}
# What the overview shows, as its headings say it.
OVERVIEW = {
    "durable": "Durable save",
    "call": "save_async call",
    "stall": "Stall of a loop that donates its arrays",
    "stall, first": "Stall at the first save of such a loop",
    "load": "Warm load",
    "cold": "Cold load",
    "resumed": "Load in a new process after a kill",
    "onto (8, 1)": "Load onto an (8, 1) mesh",
    "onto (4, 2) swapped": "Load onto a (4, 2) mesh, axes swapped",
    "one layer": "Load one layer",
}
Medians = Mapping[tuple[str, str, str], float]  # by (tree, contender, metric)


def label(contender: str) -> str:
    return LABELS.get(contender, contender)


def is_peer(contender: str) -> bool:
    """Whether it is another library."""
    return contender != "limits" and not contender.startswith(US)


def next_best(medians: Medians, tree: str, metric: str) -> tuple[str, float] | None:
    """The other library with the smallest value, and its value over shardkeep's."""
    ours = medians.get((tree, US, metric))
    others = {c: value for (t, c, m), value in medians.items() if (t, m) == (tree, metric) and is_peer(c)}
    if not ours or not others:
        return None
    best = min(others, key=lambda c: others[c])
    return best, others[best] / ours


def times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×"


def short(title: str) -> str:
    """The title of a tree without its letter."""
    return title.partition(") ")[2]


class Drawing:
    """An SVG file from top to bottom: `y` is where the next thing goes."""

    def __init__(self, theme: Theme) -> None:
        self.theme, self.y = theme, 0.0
        self._lines: list[str] = []

    def text(
        self, x: float, text: str, size: int = 12, *, y: float | None = None, bold: bool = False, muted: bool = False,
        anchor: str = "start",
    ) -> None:  # fmt: skip
        colour = self.theme.muted if muted else self.theme.text
        weight = ' font-weight="600"' if bold else ""
        at = f'x="{x:g}" y="{self.y if y is None else y:g}"'
        end = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._lines.append(f'<text {at} font-size="{size}" fill="{colour}"{weight}{end}>{escape(text)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        at = f'x="{x:.1f}" y="{y:g}" width="{max(width, 1.5):.1f}" height="{height:g}"'
        self._lines.append(f'<rect {at} rx="2" fill="{colour}"/>')

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.0) -> None:
        shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._lines.append(f'<polyline points="{shown}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        self._lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')

    def head(self, title: str, subtitle: str) -> None:
        """The message, and what is measured below it, on as many lines as they need."""
        self._title = title
        for part in wrapped(title):
            self.y += 21
            self.text(0, part, 16, bold=True)
        for part in wrapped(subtitle, 102):
            self.y += 18
            self.text(0, part, muted=True)

    def finished(self) -> str:
        height = self.y + 10
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" role="img" font-family="{FONT}">'
        )
        return "\n".join([start, f"<title>{escape(self._title)}</title>", *self._lines, "</svg>"]) + "\n"


def wrapped(text: str, most: int = 66) -> list[str]:
    """Lines of at most so many characters. 66 large ones fit into the width."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def range_of(ratios: Sequence[float]) -> str:
    least, most = times(min(ratios))[:-1], times(max(ratios))[:-1]
    return f"{least} times" if least == most else f"{least} to {most} times"


def compare(plot: Comparison, medians: Medians, titles: Mapping[str, str], theme: Theme) -> str | None:
    """Bars of every library for some trees, each tree on its own scale from zero. None if nothing was measured."""
    ratios = {tree: found for tree in plot.trees if (found := next_best(medians, tree, plot.metric))}
    if not ratios:
        return None
    ahead = [ratio for _, ratio in ratios.values() if ratio >= 1]
    exceptions = [f"{label(best)} is ahead for {short(titles[t])}" for t, (best, ratio) in ratios.items() if ratio < 1]
    names = {label(best) for best, ratio in ratios.values() if ratio >= 1}
    name = names.pop() if len(names) == 1 else "the next best library"
    message = plot.title.format(range_of(ahead), name) if ahead else "Other libraries are ahead"
    drawing = Drawing(theme)
    drawing.head("; ".join([message, *exceptions]), f"{plot.subtitle} Shorter is better.")
    left, right = 130, WIDTH - 78  # names to the left, values to the right
    for tree, (best, ratio) in ratios.items():
        drawing.y += 34
        drawing.text(0, short(titles[tree]), 13, bold=True)
        name = label(best)
        verdict = plot.verdict.format(times(ratio), name) if ratio >= 1 else f"{name} is ahead, {times(1 / ratio)}"
        drawing.text(WIDTH - 2, verdict, 13, bold=True, anchor="end")
        values = {c: medians[tree, c, plot.metric] for c in COLOURS if (tree, c, plot.metric) in medians}
        for contender, value in sorted(values.items(), key=lambda item: item[1]):
            drawing.y += 20
            drawing.text(left - 8, label(contender), anchor="end", bold=contender == US)
            width = (right - left) * value / max(values.values())
            drawing.bar(left, drawing.y - 11, width, 14, COLOURS[contender])
            shown = f"{value * 1e3:,.0f} ms" if plot.unit == "ms" else f"{value:.2f}×"
            drawing.text(left + width + 7, shown, bold=contender == US)
    return drawing.finished()


def overview(medians: Medians, titles: Mapping[str, str], theme: Theme) -> str | None:
    """Every tree and metric: how many times as fast as the next best library, on a log scale around 1."""
    found = {
        metric: rows
        for metric in OVERVIEW
        if (rows := {tree: best for tree in titles if (best := next_best(medians, tree, metric))})
    }
    ratios = [ratio for rows in found.values() for _, ratio in rows.values()]
    if not ratios:
        return None
    drawing = Drawing(theme)
    drawing.head(
        f"Faster than the next best library in {sum(r > 1 for r in ratios)} of {len(ratios)} measurements",
        "Speed of shardkeep relative to the next best library, whose name and color each bar has. Log scale.",
    )
    left, right = 310, WIDTH - 110
    most = max(max(ratios), 1 / min(ratios))
    least = min(0.4, *ratios)

    def place(ratio: float) -> float:
        return left + (right - left) * math.log(ratio / least) / math.log(most / least)

    top = drawing.y + 14
    rows: list[tuple[float, str, str, float]] = []
    for metric, trees in found.items():
        drawing.y += 30
        drawing.text(0, OVERVIEW[metric], 13, bold=True)
        for tree, (best, ratio) in trees.items():
            drawing.y += 16
            rows.append((drawing.y, tree, best, ratio))
    one = place(1.0)
    drawing.line([(one, top), (one, drawing.y + 6)], theme.muted)
    for y, tree, best, ratio in rows:
        drawing.text(12, short(titles[tree]), 11, y=y, muted=True)
        drawing.bar(min(one, place(ratio)), y - 9, abs(place(ratio) - one), 11, COLOURS[best])
        drawing.text(max(one, place(ratio)) + 6, f"{times(ratio)} {label(best)}", 11, y=y)
    return drawing.finished()


# The work of one process in a save, and that of process 0 once all have written, as `scale.py` names the columns.
OWN = ("assignment, later (s)", "plan (s)", "compared (s)")
LEADER = ("records (s)", "commit (s)")


def scale(data: Mapping[str, Any], theme: Theme) -> str:
    """Seconds of a save against the number of processes, both axes logarithmic. `data`: what `scale.py` has written."""
    tree = data["trees"][0]
    columns: Mapping[str, Sequence[float]] = tree["columns"]
    processes: Sequence[int] = tree["processes"]
    commit = [sum(seconds) for seconds in zip(*(columns[name] for name in LEADER), strict=True)]
    plan = [sum(seconds) for seconds in zip(*(columns[name] for name in OWN), strict=True)]
    lines = [
        ("process 0: collects and commits", COLOURS[US], commit),
        ("every process: plans its part", theme.muted, plan),
    ]
    drawing = Drawing(theme)
    drawing.head(
        f"{processes[-1]:,} processes: {commit[-1]:.0f} s to commit, {plan[-1]:.1f} s to plan in each process",
        f"Seconds of one save to a bucket, {data['latency'] * 1e3:.0f} ms a request, without the data. "
        f"{tree['title']}. Log scales.",
    )
    left, right, top, bottom = 45, WIDTH - 228, drawing.y + 25, drawing.y + 285
    values = [value for _, _, line in lines for value in line]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = math.log(processes[0]), math.log(processes[-1])

    def x(count: int) -> float:
        return left + (right - left) * (math.log(count) - first) / (last - first)

    def y(seconds: float) -> float:
        return bottom - (bottom - top) * (math.log10(seconds) - low) / (high - low)

    for power in range(low, high + 1):
        drawing.line([(left, y(10.0**power)), (right, y(10.0**power))], theme.line)
        drawing.text(left - 8, f"{10.0**power:g} s", y=y(10.0**power) + 4, muted=True, anchor="end")
    for count in processes:
        drawing.text(x(count), f"{count:,}", y=bottom + 20, muted=True, anchor="middle")
    for name, colour, line in lines:
        points = [(x(count), y(seconds)) for count, seconds in zip(processes, line, strict=True)]
        drawing.line(points, colour, 2.5)
        for point in points:
            drawing.dot(*point, colour)
        drawing.text(points[-1][0] + 12, name, y=points[-1][1] + 4)
    drawing.y = bottom + 42
    drawing.text((left + right) / 2, "processes", muted=True, anchor="middle")
    return drawing.finished()


def draw_all(medians: Medians, titles: Mapping[str, str], scaling: Mapping[str, Any]) -> dict[str, str]:
    """Every plot by the name of its file."""
    drawn: dict[str, str] = {}
    for name, theme in THEMES.items():
        for plot, comparison in COMPARISONS.items():
            if text := compare(comparison, medians, titles, theme):
                drawn[f"{plot}-{name}.svg"] = text
        if text := overview(medians, titles, theme):
            drawn[f"overview-{name}.svg"] = text
        drawn[f"scale-{name}.svg"] = scale(scaling, theme)
    return drawn
