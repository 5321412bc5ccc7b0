"""Damage on the disk is refused by name or does not matter; and the sweep that says so would notice otherwise."""

import random
from pathlib import Path
from typing import Any

import pytest

from faults import rot
from shardkeep.loading.blocks import BlockReader


@pytest.mark.parametrize("name", rot.SUBJECTS)
def test_damage_is_named_or_changes_nothing(name: str) -> None:
    """A sample: `make faults` flips thousands of bits and damages every file in every way."""
    points, violations = rot.sweep(name, 8 if "large" in name else 24, 7, part=(0, 12))
    assert violations == []
    assert points >= 12


def test_a_damaged_latest_checkpoint_is_told_apart_from_the_good_one(tmp_path: Path) -> None:
    assert rot.damaged_latest(tmp_path) == []


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "exchange, single"])
def test_the_sweep_notices_a_library_that_checks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    subject = rot.prepare(kind, tmp_path / "room")
    file = next(name for name in subject.files if "w" in (subject.owners(name, None) or ()))
    damage = rot.Damage(file, "flipped", lambda s, p: rot._flip(s, p, len(s.contents[file]) - 1, 0))
    assert rot.strike(subject, damage, {}, None) == []

    def accept(*_: Any) -> None:
        pass

    monkeypatch.setattr(BlockReader, "check", accept)
    noticed = rot.strike(subject, damage, {}, None)
    assert any("WRONG NUMBERS" in text for text in noticed)
    assert any("verify does not notice" in text for text in noticed)


def test_every_file_of_a_checkpoint_is_damaged_in_every_way(tmp_path: Path) -> None:
    subject, other = (rot.prepare("zstd", tmp_path / name, i) for i, name in enumerate("ab"))
    ways: dict[str, set[str]] = {}
    for damage in rot.coarse(subject, other, random.Random(1)):
        ways.setdefault(damage.file, set()).add(damage.what.split()[0])
    assert set(ways) == set(subject.files)
    assert {"page", "cut", "1", "deleted", "made", "swapped", "that"} <= ways["run/manifest.json"]
