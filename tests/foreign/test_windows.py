"""Parts of files: read once, within the file."""

from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.foreign.windows import FilePart, FileWindow, opened
from shardkeep.stores.local.store import LocalStore

DATA = np.random.default_rng(1).bytes(1 << 20)


class Counted:
    """Bytes in memory that count how often they are read."""

    def __init__(self, data: bytes) -> None:
        self.size, self.reads, self._data = len(data), 0, data

    def read_into(self, offset: int, buffer: np.ndarray) -> None:
        self.reads += 1
        buffer[:] = np.frombuffer(self._data[offset : offset + buffer.size], np.uint8)


def test_neighbouring_parts_take_one_read_and_a_way_back_none() -> None:
    file = Counted(DATA)
    window = FileWindow(file)
    for offset in (*range(0, 100_000, 10), 900_000, 50_000):
        assert window.read(offset, 10) == DATA[offset : offset + 10]
    assert file.reads == 2
    assert window.read(0, 1 << 20) == DATA


@pytest.mark.parametrize(("offset", "count"), [(1 << 20, 1), (0, (1 << 20) + 1), (-1, 1), (0, -1), (1 << 62, 1 << 62)])
def test_what_is_not_in_the_file_takes_no_memory(offset: int, count: int) -> None:
    with pytest.raises(ValueError, match="it ends at byte 1,048,576"):
        FileWindow(Counted(DATA)).read(offset, count)


def test_a_part_of_a_file_ends_where_it_ends() -> None:
    part = FilePart(Counted(DATA), 100, 50)
    assert FileWindow(part).read(0, 50) == DATA[100:150]
    with pytest.raises(ValueError, match="this part"):
        part.read_into(40, np.empty(11, np.uint8))
    with pytest.raises(ValueError, match="it ends at byte 1,048,576"):
        FilePart(Counted(DATA), 1 << 20, 1)


def test_what_is_wrong_with_a_file_names_it_and_the_leaf(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    with pytest.raises(shardkeep.MissingDataError, match=r"leaf 'w': .*/none is missing"), opened(store, "none", "w"):
        pass
    (tmp_path / "some").write_bytes(b"x")
    for error in (ValueError("odd"), EOFError("odd"), MemoryError("odd")):
        with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w': .*/some: odd"), opened(store, "some", "w"):
            raise error
