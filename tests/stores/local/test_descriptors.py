"""Open files that no exception loses, and that are never closed twice."""

import os
from pathlib import Path

import pytest

from shardkeep.stores.local.descriptors import Descriptor


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_it_is_closed_when_left_and_when_forgotten(tmp_path: Path) -> None:
    before = _open_files()
    with Descriptor(str(tmp_path / "a"), os.O_RDWR | os.O_CREAT) as file:
        os.write(file.number, b"abc")
        assert file.is_open
    assert (tmp_path / "a").read_bytes() == b"abc"
    forgotten = Descriptor(str(tmp_path / "a"), os.O_RDONLY)
    assert _open_files() == before + 1
    del forgotten
    assert _open_files() == before


def test_closed_twice_it_closes_nobody_elses_file(tmp_path: Path) -> None:
    file = Descriptor(str(tmp_path), os.O_RDONLY)
    number = file.number
    file.close()
    with open(tmp_path / "a", "w") as other:
        assert other.fileno() == number
        file.close()
        file.release()
        other.write("still open")
    with pytest.raises(ValueError, match="closed"):
        _ = file.number


def test_what_cannot_be_opened_leaves_nothing(tmp_path: Path) -> None:
    before = _open_files()
    with pytest.raises(FileNotFoundError, match="missing"):
        Descriptor(str(tmp_path / "missing"), os.O_RDONLY)
    assert _open_files() == before


def test_a_child_program_does_not_inherit_it(tmp_path: Path) -> None:
    with Descriptor(str(tmp_path), os.O_RDONLY) as file:
        assert not os.get_inheritable(file.number)
