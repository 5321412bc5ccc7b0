"""Programs beside each other: a sample of what `make faults` does for minutes."""

from pathlib import Path
from typing import Any

import pytest

from faults import beside


def test_a_load_beside_a_writer_gives_exactly_one_committed_state(tmp_path: Path) -> None:
    saves, loads, violations = beside.readers_beside(tmp_path, 6)
    assert violations == []
    assert saves == 36
    assert loads > 12


def test_writers_of_different_prefixes_lose_none(tmp_path: Path) -> None:
    assert beside.prefixes(tmp_path, 3) == []


def test_of_two_writers_each_wins_whole_or_is_told(tmp_path: Path) -> None:
    assert beside.two_writers(tmp_path, 6) == []


@pytest.mark.parametrize("arguments", [{}, {"format": "zarr"}])
def test_mapped_arrays_stay_when_their_checkpoint_is_replaced_or_deleted(tmp_path: Path, arguments: Any) -> None:
    assert beside.hold(str(tmp_path / "run"), 5, arguments) == []
