"""Files written past the page cache, from memory that lies as they do."""

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.memory import PAGE
from shardkeep.stores import newfile
from shardkeep.stores.mapping import file_system
from shardkeep.stores.newfile import DIRECT, LocalNewFile
from support import bits, pattern

MIB = 1 << 20


def _needs_direct(tmp_path: Path) -> None:
    if file_system(str(tmp_path)) not in DIRECT:
        pytest.skip("the file system of the tests is written through the page cache")


def _fill(file: LocalNewFile, data: Any, cuts: list[int], room: int = 3 * MIB) -> None:
    """Parts from cut to cut, each in smaller bits."""
    for start, end in itertools.pairwise(cuts):
        with file.at(start) as filling:
            for at in range(start, end, room):
                part = data[at : min(at + room, end)]
                filling.take(part.size)[...] = part


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [1, PAGE, MIB, MIB + 1, 5 * MIB - 7, 40 * MIB + 4095])
def test_a_file_is_what_was_added(tmp_path: Path, size: int, direct: bool) -> None:
    data = pattern(np.uint8, (size,))
    cuts = sorted({0, size, *(at for at in (1, 17, PAGE, MIB - 3, 2 * MIB, 33 * MIB + 1) if at < size)})
    with LocalNewFile(str(tmp_path / "file"), size, direct) as file:
        _fill(file, data, cuts)
    assert (tmp_path / "file").read_bytes() == bits(data)


@pytest.mark.parametrize("lengths", [[MIB], [100, 17 * MIB, 3], [PAGE, 0, MIB], [20 * MIB, 20 * MIB + 1]])
def test_a_file_is_its_buffers(tmp_path: Path, lengths: list[int]) -> None:
    data = [pattern(np.uint8, (n,), number) for number, n in enumerate(lengths)]
    with LocalNewFile(str(tmp_path / "file"), sum(lengths), direct=True) as file:
        file.write_all(memoryview(one) for one in data)
    assert (tmp_path / "file").read_bytes() == b"".join(map(bits, data))


def test_most_of_a_large_file_does_not_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _needs_direct(tmp_path)
    written: dict[bool, int] = {True: 0, False: 0}
    plain = os.pwritev

    def watched(descriptor: int, buffers: Any, offset: int) -> int:
        import fcntl

        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        written[direct] += sum(map(len, buffers))
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", watched)
    data = pattern(np.uint8, (20 * MIB + 5,))
    with LocalNewFile(str(tmp_path / "file"), data.size, direct=True) as file:
        _fill(file, data, [0, 9 * MIB + 1, data.size])
    assert written[True] > 19 * MIB
    assert 0 < written[False] < 4 * PAGE * 4
    assert (tmp_path / "file").read_bytes() == bits(data)


def test_a_disk_with_larger_blocks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.pwritev
    refused: list[int] = []

    def picky(descriptor: int, buffers: Any, offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", picky)
    data = pattern(np.uint8, (2 * MIB + 5,))
    with LocalNewFile(str(tmp_path / "file"), data.size, direct=True) as file:
        _fill(file, data, [0, data.size])
    assert refused or file_system(str(tmp_path)) not in DIRECT
    assert (tmp_path / "file").read_bytes() == bits(data)


def test_after_an_error_nothing_more_is_written(tmp_path: Path) -> None:
    def fail(file: LocalNewFile) -> None:
        with file.at(0) as filling:
            filling.take(MIB)[...] = 1
            raise ValueError("stop")

    with LocalNewFile(str(tmp_path / "file"), 2 * MIB, direct=True) as file, pytest.raises(ValueError, match="stop"):
        fail(file)
    assert not any((tmp_path / "file").read_bytes())


def test_few_buffers_are_kept(tmp_path: Path) -> None:
    with LocalNewFile(str(tmp_path / "file"), 1, direct=True) as file:
        several = [file.at(0) for _ in range(5)]
        for one in several:
            one.__exit__(None)
    assert len(newfile._free) <= 2
