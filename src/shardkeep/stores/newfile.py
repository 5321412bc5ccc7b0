"""Local files being written, so that they are on the disk soon and do not fill the page cache.

What goes through the page cache is sent to the disk at once, not when it is synced, and leaves the cache when it is
there: the memory is used again for what comes next. What lies in memory as it will in the file goes past the cache: the
disk takes blocks from aligned memory to aligned places, and only the ends, less than a block each, go through it.
"""

import errno
import os
from collections.abc import Sequence
from typing import Any, cast

from shardkeep.memory import PAGE, Array
from shardkeep.stores.descriptors import Descriptor

DIRECT = frozenset(("ext4", "xfs")) if hasattr(os, "O_DIRECT") else frozenset[str]()  # file systems that gain by it
_MAX_WRITE = 1 << 30  # one system call takes at most 2 GiB
_MAX_BUFFERS = 1024
_LARGE = 256 << 10  # what is written of this size is sent to the disk at once


class LocalNewFile:
    """A file being written at its final name, which nothing else uses.

    `size`: there is room for so many bytes before the first is written. `direct`: `write_aligned` goes past the cache.
    """

    def __init__(self, path: str, size: int = 0, direct: bool = False) -> None:
        self.path = path
        self._file = Descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._direct: Descriptor | None = None
        try:
            if direct:
                self._direct = Descriptor(path, os.O_WRONLY | os.O_DIRECT)
            if size:
                os.posix_fallocate(self._file.number, 0, size)  # several threads write best where there is room already
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                error.filename = error.filename or path
                raise

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        written = write_at(self._file.number, offset, buffers, self.path)
        if written >= _LARGE:
            self._send()

    def _send(self) -> None:
        """What is in the page cache is sent to the disk; what is there already leaves the cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.number, 0, 0, os.POSIX_FADV_DONTNEED)

    def write_aligned(self, offset: int, memory: Array) -> None:
        """Put `memory` at `offset`; both lie equally far from the start of a block."""
        end = offset + memory.size
        first, last = -(-offset // PAGE) * PAGE, end // PAGE * PAGE
        if self._direct is None or first >= last:
            self.write(offset, [_view(memory)])
            return
        head, tail = first - offset, last - offset
        self.write(offset, [_view(memory[:head])])
        try:
            write_at(self._direct.number, first, [_view(memory[head:tail])], self.path)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a disk with larger blocks
                raise
            self.write(first, [_view(memory[head:tail])])
        self.write(last, [_view(memory[tail:])])

    def sync(self) -> None:
        try:
            os.fsync(self._file.number)
        except OSError as error:
            error.filename = error.filename or self.path
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
    return memoryview(cast(Any, memory))


def write_at(descriptor: int, offset: int, buffers: Sequence[memoryview], path: str) -> int:
    """Write all of `buffers` at `offset`, however little the system takes at a time; says how much it was."""
    pending = [b for b in buffers if len(b)]
    start = offset
    while pending:
        batch: list[memoryview] = []
        total = 0
        for buffer in pending[:_MAX_BUFFERS]:
            batch.append(buffer[: _MAX_WRITE - total])
            total += len(batch[-1])
            if total >= _MAX_WRITE:
                break
        try:
            count = os.pwritev(descriptor, batch, offset)
        except OSError as error:
            error.filename = error.filename or path
            raise
        offset += count
        while pending and count >= len(pending[0]):
            count -= len(pending.pop(0))
        if count:
            pending[0] = pending[0][count:]
    return offset - start
