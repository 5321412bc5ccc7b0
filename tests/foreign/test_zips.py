"""Zip archives as Python writes them, with and without zip64; and changed."""

import io
import struct
import zipfile
from typing import Any

import numpy as np
import pytest

from shardkeep.foreign.windows import FileWindow
from shardkeep.foreign.zips import DEFLATED, EntryBytes, ZipEntry, read_directory

CONTENT = {"a/data.npy": b"x" * 1000, "é": b"", "b": np.random.default_rng(1).bytes(300_000)}


class Memory:
    def __init__(self, data: bytes) -> None:
        self.size, self._data = len(data), data

    def read_into(self, offset: int, buffer: np.ndarray) -> None:
        if offset + buffer.size > self.size:
            raise EOFError("it ends before that")
        buffer[:] = np.frombuffer(self._data[offset : offset + buffer.size], np.uint8)


def archive(method: int = zipfile.ZIP_STORED, comment: bytes = b"", zip64: bool = False) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as out:
        out.comment = comment
        for name, data in CONTENT.items():
            with out.open(name, "w", force_zip64=zip64) as file:
                file.write(data)
    return made.getvalue()


def contents(data: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in read_directory(FileWindow(Memory(data))).entries:
        EntryBytes(Memory(data), entry).check()
        memory = np.empty(entry.size, np.uint8)
        EntryBytes(Memory(data), entry).read_into(0, memory)
        found[entry.name] = memory.tobytes()
    return found


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("comment", [b"", b"PK\x05\x06 of someone" * 50])
def test_entries_are_read_as_they_were_written(method: int, zip64: bool, comment: bytes) -> None:
    assert contents(archive(method, comment, zip64)) == CONTENT


def test_an_archive_written_to_a_pipe_and_an_empty_one() -> None:
    """Without seeking, sizes follow the data of an entry."""

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.data += bytes(data)
            return len(data)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("a", b"x" * 1000)
    assert contents(pipe.data) == {"a": b"x" * 1000}
    assert contents(b"PK\x05\x06" + bytes(18)) == {}


def test_the_directory_of_a_large_archive_has_numbers_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one with more than 65,535 entries, or more than 4 GiB."""
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    data = archive(zip64=True)
    assert b"PK\x06\x06" in data
    assert contents(data) == CONTENT


def test_a_part_of_an_entry_in_any_order() -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        data = archive(method)
        (entry,) = (entry for entry in read_directory(FileWindow(Memory(data))).entries if entry.name == "b")
        source = EntryBytes(Memory(data), entry)
        for offset, count in ((250_000, 100), (0, 10), (10, 299_990), (299_999, 1), (5, 0)):
            memory = np.empty(count, np.uint8)
            source.read_into(offset, memory)
            assert memory.tobytes() == CONTENT["b"][offset : offset + count]
        with pytest.raises(ValueError, match="'b' has 300,000 bytes"):
            source.read_into(299_999, np.empty(2, np.uint8))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_every_changed_byte_of_an_entry_is_found(method: int) -> None:
    data = bytearray(archive(method))
    start = data.index(b"a/data.npy") + 10
    data[start + 5] ^= 4
    with pytest.raises(
        ValueError, match="'a/data.npy' (does not match its CRC|cannot be decompressed|ends after|has more)"
    ):
        contents(bytes(data))


def test_an_entry_has_no_more_bytes_than_the_directory_says() -> None:
    import zlib

    packed = zlib.compress(b"x" * 100)[2:-4]
    entry = ZipEntry("w", DEFLATED, zlib.crc32(b"x" * 50), 50, len(packed), 0)
    with pytest.raises(ValueError, match="has more bytes than its 50"):
        EntryBytes(Memory(packed), entry).check()


def _field(data: bytes, at: int, form: str, value: int) -> bytes:
    """The archive with a field of the directory entry of "b" changed."""
    start = data.rindex(b"PK\x01\x02")
    return data[: start + at] + struct.pack(form, value) + data[start + at + struct.calcsize(form) :]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no directory"),
    "no directory": (archive()[:-30], "no directory"),
    "encrypted": (_field(archive(), 8, "<H", 1), "encrypted"),
    "another method": (_field(archive(), 10, "<H", 12), "method 12"),
    "a bomb": (_field(archive(zipfile.ZIP_DEFLATED), 24, "<L", 0xFFFFFFF0), "cannot have 4,294,967,280 bytes"),
    "two sizes": (_field(archive(), 24, "<L", 5), "cannot have 5 bytes"),
    "an entry outside": (_field(archive(), 42, "<L", 0x7FFFFFFF), "it ends at byte"),
    "another header": (_field(archive(), 42, "<L", 0), "header of the entry 'b' is damaged"),
    "one entry twice": (
        archive().replace(
            b"PK\x05\x06" + struct.pack("<4H", 0, 0, 3, 3), b"PK\x05\x06" + struct.pack("<4H", 0, 0, 4, 4)
        ),
        "cannot have 4 entries",
    ),
    "too many entries": (archive()[:-14] + struct.pack("<2H", 60_000, 60_000) + archive()[-10:], "damaged|cannot have"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_sound_archive_is_refused(what: str) -> None:
    data, says = HOSTILE[what]
    with pytest.raises(ValueError, match=says):
        contents(data)


def test_entries_that_share_bytes_are_refused() -> None:
    """So that a small archive cannot hold much: each byte is in one entry."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as out:
        out.writestr("w", b"x" * 100)
        out.writestr("v", b"y" * 10)
        out.filelist[1].header_offset = 0
        out.filelist[1].filename = out.filelist[1].orig_filename = "w2"
    with pytest.raises(ValueError, match="overlaps|header of the entry"):
        read_directory(FileWindow(Memory(made.getvalue())))
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as out:
        out.writestr("w", b"x")
        with pytest.warns(UserWarning, match="Duplicate name"):
            out.writestr("w", b"y")
    with pytest.raises(ValueError, match="two of its entries have the same name"):
        read_directory(FileWindow(Memory(twice.getvalue())))
