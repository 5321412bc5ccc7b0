"""Zip archives of other programs: their directory, and the bytes of an entry, read within what the file justifies.

Only entries that are stored as they are or deflated can be read, which is what NumPy, PyTorch and Keras write. An entry
that is read from its first byte to its last is compared with its CRC.
"""

import struct
import zlib
from collections.abc import Sequence

import numpy as np

from shardkeep.foreign.flat import ByteSource
from shardkeep.foreign.windows import FileWindow
from shardkeep.model.arrays import Array
from shardkeep.model.digests import digest
from shardkeep.model.fastclass import fast_dataclass

STORED, DEFLATED = 0, 8  # methods
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_LONGEST_END = 22 + 65535  # the end record, with the longest comment
_MOST_ENTRIES = 1 << 20  # each takes about a kilobyte of memory once it is a leaf of a tree
_BLOCK = 256 << 10  # compressed bytes read at once, and bytes decompressed at once
_BEST_RATIO = 1040  # what deflate can make of one byte is a little less
_ENCRYPTED, _UTF8 = 0x1, 0x800  # flags


@fast_dataclass
class ZipEntry:
    """A file in an archive.

    Attributes:
        name: Its name, which may be anything: never use it as a path.
        method: How it is compressed: `STORED` or `DEFLATED`.
        crc: The CRC-32 of its bytes; None if it is not to be compared.
        size: The number of its bytes.
        stored: The number of bytes that it has in the archive.
        start: Where those begin.
    """

    name: str
    method: int
    crc: int | None
    size: int
    stored: int
    start: int


@fast_dataclass
class ZipDirectory:
    """What an archive holds: its entries in the order of the archive, and a digest of what it says about them."""

    entries: tuple[ZipEntry, ...]
    identity: str


def read_directory(window: FileWindow) -> ZipDirectory:
    """The entries of an archive. They lie in it one after the other, and no two have one name.

    `ValueError` for what is no zip archive, or one that is damaged, encrypted or compressed in another way.
    """
    start, size, count = _find_directory(window)
    if count > _MOST_ENTRIES or 46 * count > size:
        raise ValueError(f"its directory of {size:,} bytes cannot have {count:,} entries")
    text = window.read(start, size)
    found: list[tuple[ZipEntry, bytes]] = []
    at = 0
    for _ in range(count):
        entry, raw, at = _parse_entry(text, at)
        found.append((entry, raw))
    if at != size:
        raise ValueError(f"its directory has {size - at:,} bytes after the last entry")
    entries: list[ZipEntry] = []
    free = 0  # the first byte that belongs to no entry yet
    found.sort(key=lambda each: each[0].start)
    headers = window.read_each([(entry.start, 30 + len(raw)) for entry, raw in found])
    for (entry, raw), header in zip(found, headers, strict=True):
        data = _data_start(header, entry, raw)
        if entry.start < free or data + entry.stored > start:
            raise ValueError(f"the entry {entry.name[:80]!r} overlaps with another one, or is incomplete")
        free = data + entry.stored
        entries.append(ZipEntry(entry.name, entry.method, entry.crc, entry.size, entry.stored, data))
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError("two of its entries have the same name")
    return ZipDirectory(tuple(entries), digest(text))


def _find_directory(window: FileWindow) -> tuple[int, int, int]:
    """The offset and size of the directory, and the number of its entries."""
    length = min(window.size, _LONGEST_END)
    tail = window.read(window.size - length, length)
    at = tail.rfind(_END)
    while at >= 0 and (len(tail) - at < 22 or struct.unpack_from("<H", tail, at + 20)[0] != len(tail) - at - 22):
        at = tail.rfind(_END, 0, at)
    if at < 0:
        raise ValueError("it is not a complete zip archive: it has no directory at its end")
    disk, first_disk, here, count, size, start = struct.unpack_from("<4H2L", tail, at + 4)
    end = window.size - length + at
    if end >= 20 and window.read(end - 20, 4) == _LOCATOR64:
        disk, record_at, disks = struct.unpack("<LQL", window.read(end - 16, 16))
        if window.read(record_at, 4) != _END64 or disks > 1:
            raise ValueError("its zip64 directory is damaged")
        disk, first_disk, here, count, size, start = struct.unpack("<2L4Q", window.read(record_at + 16, 40))
        end = record_at
    if disk or first_disk or here != count or start + size != end:
        raise ValueError("its directory is damaged, or it is one of several files of one archive")
    return start, size, count


def _parse_entry(text: bytes, at: int) -> tuple[ZipEntry, bytes, int]:
    """The entry of a directory at an offset (`start` is that of its header), its name as bytes, and where it ends."""
    if text[at : at + 4] != _ENTRY or at + 46 > len(text):
        raise ValueError("its directory is damaged")
    flags, method, _, crc, stored, size, name_length, extra_length, comment_length = struct.unpack_from(
        "<2HL3L3H", text, at + 8
    )
    (start,) = struct.unpack_from("<L", text, at + 42)
    ends = at + 46 + name_length
    raw, extra = text[at + 46 : ends], text[ends : ends + extra_length]
    end = ends + extra_length + comment_length
    if end > len(text):
        raise ValueError("its directory is damaged")
    name = raw.decode("utf-8" if flags & _UTF8 else "cp437")
    if flags & _ENCRYPTED or method not in (STORED, DEFLATED):
        raise ValueError(
            f"the entry {name[:80]!r} is encrypted, or compressed with method {method}; only deflate is supported"
        )
    size, stored, start = _long_numbers(extra, (size, stored, start))
    if size != stored if method == STORED else size > stored * _BEST_RATIO:
        raise ValueError(f"the entry {name[:80]!r} cannot have {size:,} bytes, stored in {stored:,}")
    return ZipEntry(name, method, crc, size, stored, start), raw, end


def _long_numbers(extra: bytes, numbers: Sequence[int]) -> list[int]:
    """Sizes and offsets, those of more than 32 bits from the zip64 field."""
    if 0xFFFFFFFF not in numbers:
        return list(numbers)
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            longs = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            return [next(longs, n) if n == 0xFFFFFFFF else n for n in numbers]
        at += 4 + length
    return list(numbers)


def _data_start(header: bytes, entry: ZipEntry, raw: bytes) -> int:
    """Where the bytes of an entry begin: after its header, which must say the same as the directory."""
    method, name_length, extra_length = struct.unpack_from("<H16x2H", header, 8)
    if header[:4] != _LOCAL or method != entry.method or name_length != len(raw) or header[30:] != raw:
        raise ValueError(f"the header of the entry {entry.name[:80]!r} is damaged")
    return entry.start + 30 + name_length + extra_length


class EntryBytes:
    """The bytes of an entry; a `ByteSource`. To go back in a compressed one, it is decompressed from its start."""

    def __init__(self, archive: ByteSource, entry: ZipEntry) -> None:
        self._file, self._entry = archive, entry
        self.start, self.size = entry.start, entry.size
        self._begin()

    def _begin(self) -> None:
        self._at = self._taken = 0  # bytes given, and bytes of the archive used for them
        self._crc = 0 if self._entry.crc is not None else None  # of what was given; None once something was left out
        self._decoder = zlib.decompressobj(-15)

    def read_into(self, offset: int, buffer: Array) -> None:
        """Fill `buffer` with the bytes at an offset. `ValueError` for damage, such as another CRC at the end."""
        if offset + buffer.size > self._entry.size:
            raise ValueError(f"the entry {self._entry.name[:80]!r} has {self._entry.size:,} bytes")
        if self._entry.method == STORED:
            if offset == 0:
                self._begin()
            elif offset != self._at:
                self._crc = None
            self._file.read_into(self._entry.start + offset, buffer)
            self._at = offset
            self._count(buffer)
            return
        if offset < self._at:
            self._begin()
        skipped = np.empty(min(offset - self._at, _BLOCK), np.uint8)
        while self._at < offset:
            self._inflate(skipped[: offset - self._at])
        self._inflate(buffer)

    def check(self) -> None:
        """Read all of it. `ValueError` if it is damaged."""
        self._begin()
        memory = np.empty(min(self._entry.size, _BLOCK), np.uint8)
        while self._at < self._entry.size:
            self.read_into(self._at, memory[: self._entry.size - self._at])
        self._count(memory[:0])  # of an entry without bytes
        if self._entry.method == DEFLATED and self._next(1):
            raise ValueError(f"the entry {self._entry.name[:80]!r} has more bytes than its {self._entry.size:,}")

    def _inflate(self, buffer: Array) -> None:
        done = 0
        while done < buffer.size:
            part = self._next(min(buffer.size - done, _BLOCK))
            if not part:
                raise ValueError(f"the entry {self._entry.name[:80]!r} ends after {self._at + done:,} bytes")
            buffer[done : done + len(part)] = np.frombuffer(part, np.uint8)
            done += len(part)
        self._count(buffer)

    def _next(self, most: int) -> bytes:
        """The next bytes of a compressed entry; empty at its end."""
        while not self._decoder.eof:
            packed = self._decoder.unconsumed_tail
            if not packed:
                memory = np.empty(min(_BLOCK, self._entry.stored - self._taken), np.uint8)
                self._file.read_into(self._entry.start + self._taken, memory)
                self._taken += memory.size
                packed = memory.tobytes()
            try:
                part = self._decoder.decompress(packed, most)
            except zlib.error as error:
                raise ValueError(f"the entry {self._entry.name[:80]!r} cannot be decompressed: {error}") from None
            if part:
                return part
            if self._taken == self._entry.stored and not self._decoder.unconsumed_tail and not self._decoder.eof:
                break
        return b""

    def _count(self, given: Array) -> None:
        """Take note of bytes that were given, and compare the CRC after the last one."""
        self._at += given.size
        if self._crc is None:
            return
        self._crc = zlib.crc32(given.data, self._crc)
        if self._at == self._entry.size and self._crc != self._entry.crc:
            raise ValueError(f"the entry {self._entry.name[:80]!r} does not match its CRC")
