"""The settings: what they accept and refuse, that one function reads them all, and that their page tells the truth."""

import re
from pathlib import Path
from typing import Any

import pytest

from shardkeep import config
from shardkeep.config import (
    DEBUG,
    LEASE,
    MEMORY_BUDGET,
    PROCESS_DEADLINE,
    PROCESS_SILENCE,
    SETTINGS,
    WARM,
    Setting,
    read,
)

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "configuration.md").read_text()
ROWS = {row[1]: row[2] for row in re.finditer(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE)}
SHOWN: dict[object, str] = {None: "half of the free memory", False: "not set"}  # defaults that are not numbers


def test_every_setting_is_in_the_table() -> None:
    settings = [value for value in vars(config).values() if isinstance(value, Setting)]
    assert settings == list(SETTINGS)
    assert len({setting.variable for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.variable)
def test_a_variable_that_is_not_set_means_the_default(setting: Setting[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(setting.variable, raising=False)
    assert read(setting) == setting.default
    assert setting.reason.endswith(".")


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        (MEMORY_BUDGET, "12345", 12345),
        (MEMORY_BUDGET, "", None),
        (LEASE, "2", 2.0),
        (PROCESS_SILENCE, "0.5", 0.5),
        (PROCESS_DEADLINE, "1e3", 1000.0),
        (PROCESS_DEADLINE, "inf", float("inf")),
        (WARM, "never", "never"),
        (DEBUG, "1", True),
        (DEBUG, "", False),
    ],
)
def test_a_variable_is_read_at_every_call(
    setting: Setting[Any], text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting.variable, text)
    assert read(setting) == value
    monkeypatch.delenv(setting.variable)
    assert read(setting) == setting.default


@pytest.mark.parametrize(
    ("setting", "text"),
    [(MEMORY_BUDGET, text) for text in ("8GB", "1.5", "0", "-1")]
    + [(setting, text) for setting in (LEASE, PROCESS_SILENCE, PROCESS_DEADLINE) for text in ("soon", "", "0", "nan")]
    + [(WARM, text) for text in ("", "0", "always")]
    + [(LEASE, "inf")],  # nobody would ever take over the lock of a save that died
)
def test_what_is_not_allowed_is_refused_by_name(
    setting: Setting[Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting.variable, text)
    with pytest.raises(ValueError, match=rf"^{setting.variable} must be {setting.allowed}, not '{text}'$"):
        read(setting)


def test_only_this_module_reads_variables_of_ours() -> None:
    """Also not at import: a program sets them after it has imported the library."""
    for path in (ROOT / "src").rglob("*.py"):
        if path.name != "config.py":
            found = re.findall(r"(?:environ|getenv).{0,6}SHARDKEEP_\w+", path.read_text())
            assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_the_page_shows_every_variable_with_its_default_and_no_other() -> None:
    assert list(ROWS) == [setting.variable for setting in SETTINGS]
    for setting in SETTINGS:
        default: Any = setting.default
        assert ROWS[setting.variable] == (
            SHOWN.get(default) or (default if isinstance(default, str) else f"{default:g}")
        )


def test_every_variable_that_a_page_names_exists() -> None:
    known = {setting.variable for setting in SETTINGS}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert set(re.findall(r"SHARDKEEP_[A-Z_]+", page.read_text())) <= known, page.name
