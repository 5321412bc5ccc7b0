"""What `bench/report.py` and `bench/plots.py` make of the results of the last benchmark."""

import importlib
import itertools
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGE = {"light": "#ffffff", "dark": "#0d1117"}  # the backgrounds of GitHub; those of the site are close to them
MOST_BYTES = 20_000  # of a plot
TITLES = {"x": "(x) one tree", "y": "(y) another tree"}


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("report")
    finally:
        sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def plots(report: ModuleType) -> ModuleType:
    return sys.modules["plots"]


def drawn(plots: ModuleType) -> list[Path]:
    return sorted(plots.PLOTS.iterdir())


def test_everything_shows_the_results_of_the_last_benchmark(report: ModuleType, plots: ModuleType) -> None:
    """The tables, the plots, and where others are ahead. `python bench/report.py` writes them."""
    made = report.documents(report.read(), json.loads(report.SCALING.read_text()))
    different = [str(path.relative_to(ROOT)) for path, text in made.items() if path.read_text() != text]
    assert different == []
    assert drawn(plots) == sorted(path for path in made if path.parent == plots.PLOTS)


def test_the_readme_and_the_page_show_where_others_are_ahead(report: ModuleType) -> None:
    ahead = list(report.behind(report.read()))
    assert any("safetensors" in line for line in ahead)
    assert any("Orbax" in line for line in ahead)
    for page in (report.README, report.PAGE):
        assert "\n".join(ahead) in page.read_text()


def test_every_plot_has_a_version_for_both_themes_with_the_same_text(plots: ModuleType) -> None:
    names = [path.name for path in drawn(plots)]
    assert names
    assert len(names) == 2 * len([name for name in names if name.endswith("-light.svg")])
    for light in plots.PLOTS.glob("*-light.svg"):
        dark = light.with_name(light.name.replace("-light", "-dark"))
        assert [each.text for each in texts(light)] == [each.text for each in texts(dark)]
        assert light.read_text() != dark.read_text()


def test_plots_can_be_read_on_the_page_of_their_theme(plots: ModuleType) -> None:
    """As WCAG asks: 4.5 for text, 3 for bars and lines."""
    for path in drawn(plots):
        page = PAGE[path.stem.rpartition("-")[2]]
        assert path.stat().st_size < MOST_BYTES
        for text in texts(path):
            assert contrast(text.attrib["fill"], page) >= 4.5, f"{path.name}: {text.text}"
        for kind in ("rect", "circle"):
            for shape in of_kind(path, kind):
                assert contrast(shape.attrib["fill"], page) >= 3, f"{path.name}: {shape.attrib}"


def test_nothing_lies_outside_of_a_plot(plots: ModuleType) -> None:
    for path in drawn(plots):
        height = float(ET.parse(path).getroot().attrib["height"])
        for text in texts(path):
            assert 0 <= float(text.attrib["x"]) <= plots.WIDTH
            assert 0 < float(text.attrib["y"]) < height
        for bar in of_kind(path, "rect"):
            assert 0 <= float(bar.attrib["x"]) < float(bar.attrib["x"]) + float(bar.attrib["width"]) <= plots.WIDTH


def test_a_library_has_the_same_colour_everywhere(plots: ModuleType) -> None:
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)
    contenders = {plots.label(contender): contender for contender in plots.COLOURS}
    seen: set[str] = set()
    for plot in plots.COMPARISONS:
        for theme in plots.THEMES:
            things = list(ET.parse(plots.PLOTS / f"{plot}-{theme}.svg").getroot())
            for text, bar in itertools.pairwise(things):
                if bar.tag.endswith("rect"):
                    assert bar.attrib["fill"] == plots.COLOURS[contenders[text.text or ""]]
                    seen.add(text.text or "")
    assert seen >= {"shardkeep", "shardkeep (zarr)", "Orbax", "safetensors", "eFormer"}


def test_a_plot_names_the_next_best_library_and_the_ratio_to_it(plots: ModuleType) -> None:
    medians = {("x", "shardkeep", "load"): 0.1, ("x", "shardkeep, tensorstore", "load"): 0.15}
    medians |= {("x", "Orbax", "load"): 0.9, ("x", "eFormer", "load"): 0.42, ("x", "limits", "load"): 0.01}
    assert plots.next_best(medians, "x", "load") == ("eFormer", pytest.approx(4.2))
    shown = words(plots, medians)
    assert shown[0] == "Warm loads: 4.2 times as fast as eFormer"
    bars = shown[shown.index("4.2× as fast as eFormer") + 1 :]
    assert bars[::2] == ["shardkeep", "shardkeep (zarr)", "eFormer", "Orbax"]
    assert bars[1::2] == ["100 ms", "150 ms", "420 ms", "900 ms"]


def test_a_plot_says_where_another_library_is_ahead(plots: ModuleType) -> None:
    medians = {("x", "shardkeep", "load"): 0.1, ("x", "Orbax", "load"): 0.2}
    medians |= {("y", "shardkeep", "load"): 0.1, ("y", "Orbax", "load"): 0.05}
    shown = words(plots, medians)
    title = "Warm loads: 2.0 times as fast as Orbax; Orbax is ahead for another tree"
    assert " ".join(shown).startswith(title)
    assert "Orbax is ahead, 2.0×" in shown
    assert words(plots, {key: value for key, value in medians.items() if key[0] == "y"})[0].startswith(
        "Other libraries are ahead"
    )
    assert "Faster than the next best library in 1 of 2" in plots.overview(medians, TITLES, plots.THEMES["light"])


def test_a_run_without_other_libraries_has_no_comparisons(report: ModuleType, plots: ModuleType) -> None:
    scaling = json.loads(report.SCALING.read_text())
    drawn = plots.draw_all({("x", "shardkeep", "load"): 0.1, ("x", "limits", "load"): 0.01}, TITLES, scaling)
    assert sorted(drawn) == ["scale-dark.svg", "scale-light.svg"]


def test_results_are_kept_as_medians_and_ranges(report: ModuleType) -> None:
    found = {("c", "shardkeep", "load"): [0.3, 0.1, 0.2], ("c", "shardkeep", "files"): [3]}
    found |= {("c", "Orbax", "load"): [0.7, 0.9, 0.8]}
    found |= {("rotation", "Orbax", "median"): [0.25], ("rotation", "Orbax", "largest"): [0.5]}
    found |= {("growth", "leaves", "points"): [[(n, 8 * n, 0.1 * n, 0.2 * n) for n in (1, 2, 3, 5)]]}
    run = report.collect(found, 3, 1.26)
    assert run.figures["c", "shardkeep", "load"] == (0.2, 0.1, 0.3)
    assert run.trees["c"].arrays == 1984
    assert report.from_json(report.to_json(run)) == run
    tables = report.tables(run)
    assert "| load, warm | 200 (100 – 300) | 800 (700 – 900) |" in tables
    assert "| files | 3 | – |" in tables
    assert "Load average before the run: 1.3" in tables
    assert "Orbax: median 250 ms, slowest 500 ms" in tables
    assert [row.value for row in run.targets if row.what.startswith("growth")] == [pytest.approx(1), pytest.approx(1)]


def test_a_tree_that_is_measured_again_replaces_only_its_own_figures(report: ModuleType) -> None:
    old = report.collect(
        {
            ("c", "shardkeep", "durable"): [0.5],
            ("c", "shardkeep", "stall"): [0.1],
            ("c", "safetensors.flax", "durable"): [0.25],
            ("a512", "shardkeep", "load"): [1.0],
            ("a512", "Orbax", "load"): [8.0],
        },
        5,
        0.5,
    )
    new = report.collect({("c", "shardkeep", "durable"): [0.3], ("c", "safetensors.flax", "durable"): [0.3]}, 5, 0.2)
    merged = report.merge(old, new)
    assert merged.figures["c", "shardkeep", "durable"] == (0.3,)
    assert ("c", "shardkeep", "stall") not in merged.figures
    assert merged.figures["a512", "Orbax", "load"] == (8.0,)
    assert (merged.trees, merged.rounds, merged.load, merged.machine) == (old.trees, 5, 0.5, old.machine)
    assert list(merged.again) == ["c"]
    assert "2,000 arrays of 16 KiB, one device: measured again on 20" in merged.origin
    assert old.origin == f"{old.machine}."
    assert report.from_json(report.to_json(merged)) == merged
    assert [row.what for row in merged.targets] == [row.what for row in old.targets]
    values = {row.what: row.value for row in merged.targets}
    assert values["c: durable save, of safetensors + fsync"] == 1
    assert values["a512: shardkeep: load, warm, × Orbax"] == 8


def test_what_a_save_costs_is_said_from_the_targets(report: ModuleType) -> None:
    rows = {
        "a: shardkeep: durable save, of the raw disk": 0.5,
        "b: shardkeep: durable save, of the raw disk": 0.75,
        "fixed cost of a save, ms (10 arrays, 1 MiB)": 3.0,
        "growth of a save with leaves: 30.1, 20.2 µs for each array; largest / smallest": 1.5,
        "growth of a save with bytes: 0.25, 0.5 s for each GB; largest / smallest": 2.0,
    }
    targets = [report.Row(what, value, 1.0) for what, value in rows.items()]
    text = report.sentences(report.Run("", 0, 1, {}, {}, {}, targets), "save")
    assert "shardkeep reaches 50 to 75 % of the speed" in text
    assert text.endswith("A save costs about 3 ms, plus 20 to 30 µs for each array, plus 0.25 to 0.5 s for each GB.")
    assert report.sentences(report.Run("", 0, 1, {}, {}, {}, targets[:4]), "save") == ""


def test_a_page_without_the_place_for_results_is_an_error(report: ModuleType) -> None:
    assert report.between("a <!-- x -->old<!-- /x --> b", "x", "new") == "a <!-- x -->\nnew\n<!-- /x --> b"
    with pytest.raises(ValueError, match="there is no <!-- x -->"):
        report.between("a <!-- x --> b", "x", "new")


def texts(path: Path) -> list[ET.Element]:
    return of_kind(path, "text")


def of_kind(path: Path, kind: str) -> list[ET.Element]:
    return [each for each in ET.parse(path).getroot() if each.tag.endswith(kind)]


def words(plots: ModuleType, medians: dict[tuple[str, str, str], float]) -> list[str]:
    """What a plot of loads says, from top to bottom."""
    comparison = plots.Comparison(**{**vars(plots.COMPARISONS["load"]), "trees": ("x", "y")})
    text = plots.compare(comparison, medians, TITLES, plots.THEMES["light"])
    return re.findall(r"<text[^>]*>([^<]*)</text>", text)


def contrast(one: str, other: str) -> float:
    """Between two colours, from 1 to 21."""
    least, most = sorted(map(luminance, (one, other)))
    return (most + 0.05) / (least + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
