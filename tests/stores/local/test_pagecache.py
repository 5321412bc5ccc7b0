"""Parts of local files are brought into the page cache, and files leave it."""

import mmap
import os
from pathlib import Path

import pytest

from shardkeep import system
from shardkeep.stores.local.pagecache import bring_in, send_out
from support import cached_pages

SIZE = (5 << 20) + 100  # neither whole huge pages nor whole pages
PAGES = -(-SIZE // mmap.PAGESIZE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that is on the disk and not in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    with open(path, "rb") as opened:
        os.fsync(opened.fileno())
    send_out(str(path))
    if cached_pages(path):
        pytest.skip("files of this file system do not leave the page cache")
    return path


def test_a_file_is_brought_in_part_by_part_and_sent_out(file: Path) -> None:
    part, starts, lengths = 2 << 20, list[int](), list[int]()
    while not lengths or lengths[-1]:
        starts.append(sum(lengths))
        lengths.append(bring_in(str(file), starts[-1], part))
    assert lengths == [part, part, SIZE - 2 * part, 0]
    assert cached_pages(file) > PAGES // 2  # the kernel moves a few now and then
    send_out(str(file))
    assert cached_pages(file) == 0


def test_a_kernel_that_cannot_read_mappings_in(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "POPULATE_READ", 99)  # the kernel refuses it as it refuses all it does not know
    assert bring_in(str(file), 2 << 20, SIZE) == SIZE - (2 << 20)
    assert cached_pages(file) > (PAGES - (2 << 20) // mmap.PAGESIZE) // 2


def test_only_what_is_asked_for_is_read(file: Path) -> None:
    assert bring_in(str(file), 2 << 20, 2 << 20) == 2 << 20
    assert 0 < cached_pages(file) < PAGES


def test_nothing_stays_open_or_mapped(file: Path) -> None:
    before = os.listdir("/proc/self/fd")
    bring_in(str(file), 0, SIZE)
    send_out(str(file))
    assert os.listdir("/proc/self/fd") == before
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_a_file_that_is_gone(file: Path) -> None:
    file.unlink()
    with pytest.raises(FileNotFoundError):
        bring_in(str(file), 0, SIZE)
    send_out(str(file))
