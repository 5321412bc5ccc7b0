"""The documentation is true: its Python runs, and the files, make targets and public names it speaks of exist."""

import builtins
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardkeep

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WITH_CODE = [name for name in NAMES if "```python" in (ROOT / name).read_text()]


def _blocks(page: Path) -> list[tuple[int, str]]:
    """(line, code) of every Python block."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start(1)), match[1])
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


def test_the_pages_are_there() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/format.md"} <= set(NAMES)
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")


@pytest.mark.parametrize("name", WITH_CODE)
def test_every_python_block_runs(name: str, tmp_path: Path) -> None:
    """In order, in one namespace, in an empty directory, warnings being errors."""
    page = ROOT / name
    lines: list[str] = []
    for line, code in _blocks(page):  # at the lines they have on the page, so that a traceback points there
        lines += [""] * (line - len(lines)) + code.splitlines()
    script = tmp_path / "page.py"
    script.write_text("\n".join(lines) + "\n")
    workplace = tmp_path / "empty"
    workplace.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{name}:\n{done.stderr}"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name} links to {target}"


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    """Everything in backquotes that has a directory and an ending of ours."""
    text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml))`", text):
        assert any((base / path).exists() for base in (ROOT, ROOT / "src" / "shardkeep")), f"{name} names {path}"


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_that_are_named_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / name).read_text()
    named = {a or b for a, b in re.findall(r"`make ([a-z]+)`|^make ([a-z]+) +#", text, re.MULTILINE)}
    assert named <= targets, f"{name} names {sorted(named - targets)}"


@pytest.mark.parametrize("name", NAMES)
def test_public_names_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for attribute in re.findall(r"\bshardkeep\.([A-Za-z_]+)\b(?!\.)", text):
        if attribute not in ("safetensors", "serialization"):
            known = hasattr(shardkeep, attribute) or (ROOT / "src" / "shardkeep" / f"{attribute}.py").exists()
            assert known, f"{name} names shardkeep.{attribute}"
    for error in re.findall(r"`([A-Z]\w+Error)`", text):
        assert hasattr(builtins, error) or error in shardkeep.__all__, f"{name} names {error}"


def test_readme_names_every_function() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("save", "save_async", "load", "inspect", "verify", "exists", "delete"):
        assert f"shardkeep.{name}(" in readme
