"""Writes local files so that the data reaches the disk early and does not fill the page cache.

Data that goes through the page cache is written back immediately instead of at the sync, and then dropped from the
cache, so that the memory is reused. Data whose alignment in memory matches its offset in the file bypasses the cache
(O_DIRECT). Only its first and last bytes, less than a block each, go through the cache.
"""

import errno
import os
from collections.abc import Sequence

from shardkeep import system
from shardkeep.model.arrays import Array
from shardkeep.runtime.hostmemory import PAGE
from shardkeep.stores.local.descriptors import Descriptor, write_at

DIRECT = frozenset(("ext4", "xfs"))  # file systems on which this is faster
_LARGE = 256 << 10  # writes of at least this size start writeback immediately


class LocalNewFile:
    """A new file, written under its final name.

    Args:
        path: The path; it must not exist.
        size: The number of bytes to allocate before the first write.
        direct: Whether `write_aligned` bypasses the page cache.
    """

    def __init__(self, path: str, size: int = 0, direct: bool = False) -> None:
        self._file = Descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._direct: Descriptor | None = None
        try:
            if direct and system.DIRECT is not None:
                self._direct = Descriptor(path, os.O_WRONLY | system.DIRECT)
            if size and system.fallocate is not None:
                system.fallocate(self._file.number, 0, size)  # parallel writes are faster into allocated space
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                error.filename = error.filename or path
                raise

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        written = write_at(self._file, offset, buffers)
        if written >= _LARGE:
            self._send()

    def _send(self) -> None:
        """Start writeback of this file, and drop clean pages from the page cache."""
        if system.fadvise is not None:
            system.fadvise(self._file.number, 0, 0, system.DONTNEED)

    def write_aligned(self, offset: int, memory: Array) -> None:
        """Write `memory` at `offset`; both must have the same distance from a block boundary."""
        end = offset + memory.size
        first, last = -(-offset // PAGE) * PAGE, end // PAGE * PAGE
        if self._direct is None or first >= last:
            self.write(offset, [_view(memory)])
            return
        head, tail = first - offset, last - offset
        self.write(offset, [_view(memory[:head])])
        try:
            write_at(self._direct, first, [_view(memory[head:tail])])
        except OSError as error:
            if error.errno != errno.EINVAL:  # the disk has larger blocks
                raise
            self.write(first, [_view(memory[head:tail])])
        self.write(last, [_view(memory[tail:])])

    def sync(self) -> None:
        try:
            system.fsync(self._file.number)
        except OSError as error:
            error.filename = error.filename or self._file.path
            raise

    def close(self) -> None:
        if self._file.is_open:
            self._send()
            self._file.close()
        if self._direct is not None:
            self._direct.close()

    def __enter__(self) -> "LocalNewFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _view(memory: Array) -> memoryview:
    return memory.data
