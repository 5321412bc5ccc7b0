"""What the system offers, and what is done without it. test_portable.py uses it all at once."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardkeep import system


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_linux_lacks_nothing_and_pays_nothing() -> None:
    names = ("pread", "pwrite", "preadv", "pwritev", "link", "fsync")
    assert [name for name in names if getattr(system, name) is not getattr(os, name)] == []
    assert system.allocate is os.posix_fallocate
    assert system.flock is fcntl.flock
    assert system.HAS_LOCKS
    assert system.OPENS_DIRECTORIES
    assert system.HUGEPAGE == 14
    assert system.c_function("syncfs") is not None
    assert system.c_function("no_such_function") is None
    assert not system.HAS_FULL_SYNC
    assert not system.RESERVES_NAMES


@pytest.mark.parametrize("positioned", [True, False])
def test_bytes_are_written_and_read_at_offsets_without_the_calls_for_it(
    positioned: bool, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not positioned:
        monkeypatch.setattr(system, "pread", system._pread)
        monkeypatch.setattr(system, "pwrite", system._pwrite)
    assert system._pwritev(fd, [memoryview(b"abc"), memoryview(b"def")], 4) == 3
    assert system._pwritev(fd, [memoryview(b"xy")], 0) == 2
    assert os.pread(fd, 100, 0) == b"xy\0\0abc"
    room = bytearray(5)
    assert system._preadv(fd, [memoryview(room)], 3) == 4
    assert room == b"\0abc\0"
    assert system._preadv(fd, [memoryview(room)], 7) == 0


def test_space_is_allocated_by_writing(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_PART", 1000)
    system._write_zeros(fd, 10, 2500)
    assert os.fstat(fd).st_size == 2510
    assert os.fstat(fd).st_blocks * 512 >= 2500


@pytest.mark.parametrize(
    ("code", "syncs"), [(0, ["full"]), (errno.ENOTSUP, ["full", "plain"]), (errno.EINVAL, ["full", "plain"])]
)
def test_a_full_sync_is_a_plain_one_where_the_file_system_has_none(
    code: int, syncs: list[str], fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(system, "_FULL_SYNC", 51)
    monkeypatch.setattr(system, "_control", _answering(code, done))
    monkeypatch.setattr(os, "fsync", lambda fd: done.append("plain"))
    system._full_sync(fd)
    assert done == syncs


def test_a_failed_full_sync_is_an_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_FULL_SYNC", 51)
    monkeypatch.setattr(system, "_control", _answering(errno.EIO, []))
    with pytest.raises(OSError, match="Input/output error"):
        system._full_sync(fd)


def _answering(code: int, done: list[str]) -> Callable[[int, int], int]:
    def control(fd: int, command: int) -> int:
        done.append("full")
        if code:
            raise OSError(code, os.strerror(code))
        return 0

    return control


def test_memory_without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_ANONYMOUS", 0)
    pages = system.anonymous_memory(3 << 20, None)
    assert len(pages) == 3 << 20
    assert pages[-1] == 0


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(OSError, match="No locks") as raised:
        system._no_locks(0, 0)
    assert raised.value.errno == errno.ENOLCK
    with pytest.raises(OSError, match="not supported") as raised:
        system._no_link("a", "b")
    assert raised.value.errno == errno.ENOTSUP


def test_memory_and_paths_have_limits() -> None:
    assert 0 < system.assumed_memory() < 1 << 50
    assert system.longest_path() == 4096
