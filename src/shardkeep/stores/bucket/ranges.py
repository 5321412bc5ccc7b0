"""Reads ranges of objects, directly or through memory that is filled on demand."""

import mmap
import threading
from collections.abc import Sequence

import numpy as np
import obstore

from shardkeep import system
from shardkeep.errors import IntegrityError, StorageError
from shardkeep.model.arrays import Array
from shardkeep.runtime.hostmemory import aligned_empty
from shardkeep.stores.bucket.objects import Objects

GAP = 64 << 10  # reading this many bytes too much is cheaper than another request
_MOST_IN_REQUEST = 16 << 20  # bytes in one request: larger ones are split, so that several connections share them
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class BucketFile:
    """An object that is read in ranges."""

    def __init__(self, store: Objects, name: str, size: int) -> None:
        self._store, self._name, self.size = store, name, size
        self._start = b""

    def read_into(self, offset: int, buffer: Array) -> None:
        end = offset + buffer.size
        if end > self.size:
            raise IntegrityError(f"{self._store.locate(self._name)} is truncated: it ends before byte {end}")
        if offset == 0 and 0 < end <= 8:  # the length of a header: the header is read next
            self._start = bytes(self._read(0, min(GAP, self.size)))
        if end <= len(self._start):
            buffer[...] = np.frombuffer(self._start, np.uint8)[offset:end]
        elif buffer.size:
            buffer[...] = np.frombuffer(self._read(offset, buffer.size), np.uint8)

    def _read(self, offset: int, length: int) -> memoryview:
        data = self._store.call(obstore.get_range, self._name, start=offset, length=length)
        if len(data) != length:
            raise StorageError(
                f"{self._store.locate(self._name)}: requested {length:,} bytes at offset {offset:,}, but the server "
                f"sent {len(data):,}"
            )
        return memoryview(data)

    def map(self, offset: int, length: int, needed: Sequence[tuple[int, int]] = ()) -> "BucketMappedFile":
        return BucketMappedFile(self, offset, length, needed or [(offset, length)])

    def close(self) -> None: ...

    def __enter__(self) -> "BucketFile":
        return self

    def __exit__(self, *_: object) -> None: ...


class BucketMappedFile:
    """A part of an object in memory that is filled on demand; adjacent ranges share a request."""

    def __init__(self, file: BucketFile, offset: int, length: int, needed: Sequence[tuple[int, int]]) -> None:
        self._file, self._offset = file, offset
        skip = offset % 64  # so that memory has the alignment of the file
        sparse = 2 * sum(size for _, size in needed) < length
        self.data = (_small_pages if sparse else aligned_empty)(length + skip)[skip:]
        self._ranges = [_FetchedRange(start, end) for start, end in merged(needed)]

    def bring_in(self, start: int, end: int) -> None:
        for part in self._ranges:
            if part.start < self._offset + end and part.end > self._offset + start:
                with part.lock:
                    if not part.there:
                        low = part.start - self._offset
                        self._file.read_into(part.start, self.data[low : low + part.end - part.start])
                        part.there = True


class _FetchedRange:
    """Bytes that are fetched in one request."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.there = start, end, False
        self.lock = threading.Lock()


def merged(needed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Combine (offset, length) ranges into (start, end) requests: adjacent ones merged, large ones split.

    >>> merged([(0, 10), (20, 10), (1 << 30, 5)])
    [(0, 30), (1073741824, 1073741829)]
    """
    spans: list[tuple[int, int]] = []
    for offset, length in sorted(needed):
        if spans and offset <= spans[-1][1] + GAP:
            spans[-1] = (spans[-1][0], max(spans[-1][1], offset + length))
        else:
            spans.append((offset, offset + length))
    return [(a, min(a + _MOST_IN_REQUEST, end)) for start, end in spans for a in range(start, end, _MOST_IN_REQUEST)]


def _small_pages(nbytes: int) -> Array:
    """Memory of which only the filled pages are used, for sparse reads."""
    return np.frombuffer(system.anonymous_memory(nbytes, system.NOHUGEPAGE), dtype=np.uint8)
