"""The site builds only if nothing on it is broken, and its reference says what it should of every public name."""

import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep import errors, remap, serialization

ROOT = Path(__file__).parents[1]
REFERENCE = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
# Of classes that are not public themselves, but returned by what is.
ALSO_SHOWN = {
    "shardkeep.errors",
    "shardkeep.loading.planning.PlannedLeaf",
    "shardkeep.model.reports.Warmth",
    "shardkeep.runs.schedule.Interval",
    "shardkeep.saving.save.FormatName",
}
# Public only in name: what loading and JAX call.
NOT_SHOWN = {
    "shardkeep.OpaqueNode.tree_flatten_with_keys",
    "shardkeep.OpaqueNode.tree_unflatten",
    "shardkeep.remap.Rule.carry",
    "shardkeep.remap.Rule.name",
    "shardkeep.remap.Rule.steps",
}


def build(project: Path, into: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(into)],
        cwd=project,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("site")
    done = build(ROOT, into)
    assert done.returncode == 0, done.stdout
    return into


def project(home: Path, pages: dict[str, str], nav: str) -> Path:
    """A small project with the settings of ours, and files of its own."""
    (home / "docs").mkdir()
    (home / "docs" / "tools").symlink_to(ROOT / "docs" / "tools")
    (home / "src").symlink_to(ROOT / "src")
    (home / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[0] + f"\nnav: {nav}\n")
    for name, text in pages.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return home


def test_what_is_broken_fails_the_build(tmp_path: Path) -> None:
    page = "# A\n\nText: [file](b.md), [anchor](#b), [root](/b), [unknown][shardkeep.b], [elsewhere](../c.md).\n"
    pages = {
        "docs/index.md": page,
        "docs/forgotten.md": "# Forgotten\n\nText.\n",
        "docs/bare.md": "# B\n\n## C\n\nText.\n",
    }
    done = build(project(tmp_path, pages, "[index.md, bare.md, missing.md]"), tmp_path / "site")
    assert done.returncode == 1
    for said in (
        r"link 'b\.md', but the target is not found",
        r"link '#b', but there is no such anchor",
        r"absolute link '/b'",
        r"cross-reference target 'shardkeep\.b'",
        r"link '\.\./c\.md', but the target is not found|link 'c\.md', but the target",
        r"not included in the \"nav\".*\n.*forgotten\.md",
        r"reference to 'missing\.md' is included in the 'nav'.*not found",
        r"bare\.md: begin the page with a paragraph",
    ):
        assert re.search(said, done.stdout), f"{said}:\n{done.stdout}"
    assert "Aborted with 8 warnings in strict mode" in done.stdout


def test_a_name_that_does_not_exist_fails_the_build(tmp_path: Path) -> None:
    done = build(
        project(tmp_path, {"docs/index.md": "# A\n\nText.\n\n::: shardkeep.nothing\n"}, "[index.md]"), tmp_path / "site"
    )
    assert done.returncode == 1
    assert "shardkeep.nothing could not be found" in done.stdout


CELLS = [
    {"cell_type": "markdown", "source": ["# Short\n", "\n", "It shows a [table](../../bench/table.md). More."]},
    {
        "cell_type": "code",
        "source": ["show()"],
        "outputs": [
            {"output_type": "stream", "name": "stdout", "text": ["printed\n"]},
            {
                "output_type": "execute_result",
                "data": {"text/plain": ["a"], "text/html": ["<table>\n", "\n<tr><td>&lt;b&gt;</td></tr>\n</table>"]},
            },
        ],
    },
]


def test_files_elsewhere_in_the_repository(tmp_path: Path) -> None:
    """Pages and images become parts of the site, other files are named; comments are left out, code blocks are not."""
    pages = {
        "docs/index.md": "# A\n\nSee it at [the results](../bench/table.md#one). More.\n\n<!--\nset up\n-->\n"
        "[the script](../bench/run.py), [`run.py`](../bench/run.py), [README](../README.md#use), [section](#a)\n\n"
        "```md\n[shown](../bench/run.py)\n```\n\n```text\nError: a message\n  and more\n```\n\n"
        "```text\na     b\n```\n",
        "bench/table.md": "# Table\n\n## One\n\n![plot](plot.png) [back](../docs/index.md) [next](../NEWS.md) "
        "[tour](../docs/tours/short.ipynb)\n",
        "bench/plot.png": "",
        "docs/tours/short.ipynb": json.dumps({"cells": CELLS}),
        "bench/run.py": "",
        "README.md": "# R\n",
        "NEWS.md": "# News\n\nWhat is new.\n",
    }
    nav = "[{Start: [index.md]}, {More: [{Changes: NEWS.md}, {Tour: tours/short.ipynb}]}]"
    done = build(project(tmp_path, pages, nav), tmp_path / "site")
    assert done.returncode == 0, done.stdout
    start = (tmp_path / "site" / "index.html").read_text()
    assert '<a href="bench/table/#one">the results</a>' in start
    assert "the script (<code>bench/run.py</code> in the repository), <code>bench/run.py</code>" in start
    assert "README (<code>README.md</code> in the repository)" in start
    assert "set up" not in start
    assert "<title>Atomic, verified and fast checkpoints for JAX in open formats - shardkeep</title>" in start
    shown = re.findall('<div class="highlight( wrapped)?"><pre><span></span><code>([^<]*)<', start)
    assert shown[-2:] == [(" wrapped", "Error: a message\n  and more\n"), ("", "a     b\n")]
    assert "](../bench/run.py)" in re.sub("<[^>]*>", "", start)
    table = (tmp_path / "site" / "bench" / "table" / "index.html").read_text()
    assert 'src="../plot.png"' in table
    assert (tmp_path / "site" / "bench" / "plot.png").exists()
    assert '<a href="../../">back</a> <a href="../../NEWS/">next</a> <a href="../../tours/short/">tour</a>' in table
    tour = (tmp_path / "site" / "tours" / "short" / "index.html").read_text()
    assert '<div class="shown"><table> <tr><td>&lt;b&gt;</td></tr> </table></div>' in tour
    assert '<a href="../../bench/table/">table</a>' in tour
    assert (tmp_path / "site" / "tours" / "short.ipynb").exists()
    assert '<a href="../short.ipynb" download>' in tour
    assert (tmp_path / "site" / "llms.txt").read_text() == (
        "# shardkeep\n\n> Atomic, verified and fast checkpoints for JAX in open formats\n\n"
        "## Start\n\n- [A](./): See it at the results.\n\n## More\n\n- [Changes](NEWS/): What is new.\n"
        "- [Tour](tours/short/): It shows a table.\n"
    )


def test_llms_txt_leads_to_every_page_of_the_navigation(site: Path) -> None:
    pages = re.findall(
        r"([\w/-]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.MULTILINE
    )
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", (site / "llms.txt").read_text(), re.MULTILINE)
    assert len(listed) == len(pages) > 30
    assert [url for url in listed if not (site / url / "index.html").exists()] == []


def test_nothing_on_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)", page.read_text()
        )
        assert fetched == [], page


def public() -> dict[str, Any]:
    """Every public name and what it names."""
    found = {f"shardkeep.{name}": getattr(shardkeep, name) for name in shardkeep.__all__ if name != "remap"}
    modules = [f"shardkeep.serialization.{module.name}" for module in pkgutil.iter_modules(serialization.__path__)]
    for module in (remap, *map(importlib.import_module, modules)):
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    return found


def members() -> Iterator[tuple[str, Any]]:
    """What public classes have: functions, and what is looked up like an attribute."""
    for name, thing in public().items():
        if not inspect.isclass(thing):
            continue
        owners = [owner for owner in thing.__mro__ if owner.__module__.startswith("shardkeep.")]
        for member in {member: None for owner in owners for member in vars(owner) if not member.startswith("_")}:
            if f"{name}.{member}" not in NOT_SHOWN:
                value = inspect.getattr_static(thing, member)
                yield f"{name}.{member}", value.__func__ if isinstance(value, classmethod | staticmethod) else value


COMPUTED = (property, functools.cached_property)


def test_every_public_name_is_in_the_reference() -> None:
    shown = re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert set(shown) == {*public(), *ALSO_SHOWN}
    assert {*serialization.__all__} <= {name.rpartition(".")[2] for name in public()}
    own = {name for name, thing in vars(errors).items() if inspect.isclass(thing) and issubclass(thing, Exception)}
    assert own <= set(shardkeep.__all__)


def test_methods_and_attributes_are_on_the_site(site: Path) -> None:
    listed = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    names = {line.split()[0] for line in listed.splitlines()}
    wanted = {name for name, thing in members() if inspect.isfunction(thing) or isinstance(thing, COMPUTED)}
    assert {*public(), *wanted} - names == set()
    assert {name for name in names if name.startswith(tuple(NOT_SHOWN))} == set()
