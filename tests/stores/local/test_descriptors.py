"""Open files that no exception loses, and that are never closed twice; writes of any size."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardkeep import system
from shardkeep.stores.local import descriptors
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


@pytest.mark.parametrize("most_bytes", [1, 7, 100, 1 << 30])
@pytest.mark.parametrize("most_buffers", [1, 3, 1024])
@pytest.mark.parametrize("taken", [None, 5])
def test_every_byte_is_written_however_few_one_call_takes(
    most_bytes: int, most_buffers: int, taken: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`taken`: the kernel may write fewer bytes than it was given."""
    monkeypatch.setattr(descriptors, "_MAX_WRITE", most_bytes)
    monkeypatch.setattr(descriptors, "_MAX_BUFFERS", most_buffers)
    if taken is not None:

        def write_a_few(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return os.pwrite(fd, b"".join(buffers)[:taken], offset)

        monkeypatch.setattr(system, "pwritev", write_a_few)
    for lengths in ([250], [0, 3, 0], [100, 100, 50], [1] * 20, [7, 0, 7, 7], []):
        buffers = [memoryview(os.urandom(length)) for length in lengths]
        path = tmp_path / f"file {lengths}"
        with Descriptor(str(path), os.O_WRONLY | os.O_CREAT) as file:
            assert descriptors.write_at(file, 11, buffers) == sum(lengths)
        if any(lengths):
            assert path.read_bytes() == bytes(11) + b"".join(buffers)
