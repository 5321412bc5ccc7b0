"""The notebooks run from top to bottom in an empty directory, and show what they are committed with."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "docs" / "tools" / "notebooks.py"
FOLDER = ROOT / "docs" / "notebooks"
# What the text of each is about must be in what it shows.
SHOWN = {
    "five-minutes": ["✓ no problems", "✗ 1 problem", "not loaded: params/embed", "step_200\n", "same values: True"],
    "killed-run": [
        "killed by SIGKILL\n", "[10, 20]\n", "starts at step 20\n", "same bits: True\n", "✗ 1 problem",
        "cannot be resumed from; trying step 30 instead", "<Resumed at step 30, skipped 40>", "✓ no problems",
    ],
    "reshard": [
        "P(data, model) on data=4 model=2", "8 devices, (128, 128) each\n", "2 devices, (128, 512) each\n",
        "[['w'], None, None, ['w']]", "(256, 512) [Ellipsis, Ellipsis, Ellipsis] 100",
        "to try: remap.stack(", "{'layers': {'b': (4, 512), 'w': (4, 256, 512)}, 'step': ()}", "[remap.unstack(",
    ],
}  # fmt: skip


def outputs_of(notebook: dict[str, Any]) -> list[str]:
    """What each code cell shows, as text and as HTML."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            texts = [text for out in cell["outputs"] for text in (out.get("data") or {"": out["text"]}).values()]
            found.append("\n".join(map("".join, texts)))
    return found


def shape(text: str) -> str:
    """A text without what differs from run to run: times, rates, lengths of bars, ids, and the last bits of a loss."""
    text = re.sub(r"\b[0-9a-f]{32}\b", "ID", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[T ][\d:.]+\+00:00", "TIME", text)
    text = re.sub(r"[\d.,]+ (ms|s|min|[kMG]B/s)\b", "SOME", text)
    return re.sub(r"(loss=|width:)[\d.e-]+", r"\1SOME", text)


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_it_runs_and_shows_what_it_is_committed_with(name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.ipynb"
    command = [sys.executable, str(TOOL), "run", str(path), "--into", str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    ran, committed = (outputs_of(json.loads(file.read_text())) for file in (tmp_path / path.name, path))
    assert list(map(shape, ran)) == list(map(shape, committed)), "run `make notebooks` and look at the difference"
    everything = "\n".join(ran)
    assert [text for text in SHOWN[name] if text not in everything] == []


@pytest.mark.parametrize("name", SHOWN)
def test_it_is_committed_as_it_was_run_and_without_the_machine(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text()
    notebook = json.loads(text)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert [cell for cell in notebook["cells"] if cell["metadata"]] == []
    assert not re.search(r"/(tmp|var|root|home|Users|private)\b", text)


def test_what_differs_in_words_or_numbers_is_seen() -> None:
    assert shape("262.7 kB, 41 ms (6.5 MB/s)") == shape("262.7 kB, 1.2 s (99 kB/s)")
    assert shape("starts at step 20") != shape("starts at step 30")
    assert shape("262.7 kB in 1 file") != shape("262.8 kB in 1 file")


def test_code_with_fences_stays_code_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    from notebooks import to_markdown

    cell = {"cell_type": "code", "source": ['print("""\n', '````text\n"""', ")"], "outputs": []}
    page = to_markdown({"cells": [cell]}, "a<b.ipynb")
    assert page.startswith('`````python\nprint("""\n````text\n""")\n`````\n')
    assert 'href="../a&lt;b.ipynb"' in page
