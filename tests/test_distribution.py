"""What is distributed says one thing about itself. `make test-wheel` installs it (tests/distribution/run.py)."""

import datetime
import re
import tomllib
from pathlib import Path

import yaml

import shardkeep

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
INSTALLATION = (ROOT / "docs" / "installation.md").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
HEADING = re.compile(r"^## \[(.+?)\](?: - (.+))?$", re.MULTILINE)


def test_the_changelog_the_citation_and_the_package_name_one_version() -> None:
    (unreleased, _), (newest, date), *_ = HEADING.findall(CHANGELOG)
    assert unreleased == "Unreleased"
    assert newest == CITATION["version"] == shardkeep.__version__
    assert datetime.date.fromisoformat(date) == CITATION["date-released"]
    assert f"\nshardkeep {newest}\n" in INSTALLATION
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "shardkeep._version.__version__"}


def test_the_changelog_goes_from_new_to_old_with_the_usual_headings() -> None:
    versions = [tuple(map(int, version.split("."))) for version, _ in HEADING.findall(CHANGELOG)[1:]]
    assert versions == sorted(set(versions), reverse=True)
    known = re.compile(r"Added|Changed|Deprecated|Removed|Fixed|Security|Upgrading from \d+\.\d+\.\d+")
    assert [name for name in re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE) if not known.fullmatch(name)] == []


def test_the_citation_has_what_the_citation_file_format_requires() -> None:
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["type"] == "software"
    assert CITATION["license"] == PROJECT["project"]["license"]
    assert CITATION["authors"] == PROJECT["project"]["authors"]
    assert {"message", "title", "abstract", "keywords"} <= set(CITATION)


def test_every_file_of_the_package_that_is_not_python_is_packaged() -> None:
    package = ROOT / "src" / "shardkeep"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["shardkeep"]
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    there = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert packaged == there


def test_every_folder_of_the_package_has_an_init() -> None:
    """Otherwise setuptools leaves it out."""
    package = ROOT / "src" / "shardkeep"
    assert [path for path in package.rglob("*.py") if not (path.parent / "__init__.py").is_file()] == []


def test_what_it_depends_on_and_its_extras_are_documented() -> None:
    for requirement in PROJECT["project"]["dependencies"]:
        name = re.split(r"[<>=;\[]", requirement)[0]
        assert re.search(rf"^\|.*`{name}`.*\|", INSTALLATION, re.MULTILINE), name
    documented = set(re.findall(r"^\| `shardkeep\[(\w+)\]`", INSTALLATION, re.MULTILINE))
    assert documented == set(PROJECT["project"]["optional-dependencies"])


def test_the_pythons_that_are_claimed_are_those_that_the_wheel_is_tried_on() -> None:
    claimed = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["project"]["classifiers"]), re.MULTILINE)
    (tried,) = re.findall(r"^PYTHONS \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert claimed == tried.split()
    assert PROJECT["project"]["requires-python"] == f">={claimed[0]}"
