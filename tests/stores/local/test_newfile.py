"""Files being written: sent to the disk at once, and past the page cache from memory that lies as they do."""

import errno
import fcntl
import itertools
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep import system
from shardkeep.runtime.hostmemory import PAGE, aligned_empty
from shardkeep.stores.local.mounts import mount_of
from shardkeep.stores.local.newfile import DIRECT, LocalNewFile
from support import bits, cached_pages, pattern

MIB = 1 << 20


def _needs_direct(tmp_path: Path) -> None:
    if mount_of(str(tmp_path)).kind not in DIRECT:
        pytest.skip("the file system of the tests is written through the page cache")


def _aligned(size: int) -> Any:
    memory = aligned_empty(size + 2 * MIB)[:size]
    memory[...] = pattern(np.uint8, (size,))
    return memory


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [1, PAGE, MIB, MIB + 1, 5 * MIB - 7, 40 * MIB + 4095])
def test_a_file_is_what_was_written(tmp_path: Path, size: int, direct: bool) -> None:
    data = _aligned(size)
    cuts = sorted({0, size, *(at for at in (1, 17, PAGE, MIB - 3, 2 * MIB, 33 * MIB + 1) if at < size)})
    with LocalNewFile(str(tmp_path / "file"), size, direct) as file:
        for number, (start, end) in enumerate(itertools.pairwise(cuts)):
            if number % 2:
                file.write(start, [memoryview(data[start:end])])
            else:
                file.write_aligned(start, data[start:end])
    assert (tmp_path / "file").read_bytes() == bits(data)


@pytest.mark.parametrize("lengths", [[MIB], [100, 17 * MIB, 3], [PAGE, 0, MIB], [1] * 3000, [20 * MIB, 20 * MIB + 1]])
def test_a_file_is_its_buffers(tmp_path: Path, lengths: list[int]) -> None:
    data = [pattern(np.uint8, (n,), number) for number, n in enumerate(lengths)]
    with LocalNewFile(str(tmp_path / "file")) as file:
        file.write(0, [memoryview(one) for one in data])
        file.sync()
    assert (tmp_path / "file").read_bytes() == b"".join(map(bits, data))


def test_most_of_what_is_aligned_does_not_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _needs_direct(tmp_path)
    written: dict[bool, int] = {True: 0, False: 0}
    plain = system.pwritev

    def watched(descriptor: int, buffers: Any, offset: int) -> int:
        written[_is_direct(descriptor)] += sum(map(len, buffers))
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(system, "pwritev", watched)
    data = _aligned(20 * MIB + 5)
    with LocalNewFile(str(tmp_path / "file"), data.size, direct=True) as file:
        for start, end in itertools.pairwise([0, 9 * MIB + 1, data.size]):
            file.write_aligned(start, data[start:end])
    assert written[True] > 19 * MIB
    assert 0 < written[False] < 4 * PAGE
    assert (tmp_path / "file").read_bytes() == bits(data)


def test_a_disk_with_larger_blocks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = system.pwritev
    refused: list[int] = []

    def picky(descriptor: int, buffers: Any, offset: int) -> int:
        if _is_direct(descriptor):
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(system, "pwritev", picky)
    data = _aligned(2 * MIB + 5)
    with LocalNewFile(str(tmp_path / "file"), data.size, direct=True) as file:
        file.write_aligned(0, data)
    assert refused or mount_of(str(tmp_path)).kind not in DIRECT
    assert (tmp_path / "file").read_bytes() == bits(data)


def test_what_was_written_goes_to_the_disk_and_leaves_the_page_cache_without_a_sync(tmp_path: Path) -> None:
    """Pages that are not on the disk yet cannot leave the cache."""
    _needs_direct(tmp_path)
    with LocalNewFile(str(tmp_path / "file")) as file:
        file.write(0, [memoryview(pattern(np.uint8, (3 * MIB,)))])
        deadline = time.monotonic() + 20
        while cached_pages(tmp_path / "file") > MIB // mmap.PAGESIZE and time.monotonic() < deadline:
            time.sleep(0.01)
            file.write(3 * MIB, [memoryview(bytes(MIB))])  # the next write lets go of what is there by then
        file.sync()
    assert cached_pages(tmp_path / "file") == 0
    assert (tmp_path / "file").read_bytes() == bits(pattern(np.uint8, (3 * MIB,))) + bytes(MIB)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    _needs_direct(tmp_path)
    with pytest.raises(OSError, match="file") as raised:
        LocalNewFile(str(tmp_path / "file"), 1 << 50)
    assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert raised.value.filename == str(tmp_path / "file")
