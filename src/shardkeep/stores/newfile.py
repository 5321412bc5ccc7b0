"""Local files being written: past the page cache where that pays, so that they are on the disk when they are done.

The disk takes blocks from aligned memory to aligned places. What is written here comes from a `Bounce`, which lies in
memory as it will lie in the file; only the ends of a part, less than a block each, go through the page cache.
"""

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from shardkeep.memory import PAGE, Array, aligned_empty
from shardkeep.stores.base import ROOM

DIRECT = frozenset(("ext4", "xfs")) if hasattr(os, "O_DIRECT") else frozenset[str]()  # file systems that gain by it
DIRECT_FROM = 1 << 20  # below, the page cache is faster
_MAX_WRITE = 1 << 30  # one system call takes at most 2 GiB
_MAX_BUFFERS = 1024
_KEPT = 2  # bounce buffers that wait for the next save
_free: list[Array] = []
_lock = threading.Lock()


class LocalNewFile:
    """A file being written at its final name, which nothing else uses. `direct`: its file system knows how."""

    def __init__(self, path: str, size: int, direct: bool) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._direct = -1
        try:
            if direct and size >= DIRECT_FROM:
                self._open_direct(size)
        except BaseException:
            self.close()
            raise

    def _open_direct(self, size: int) -> None:
        try:
            self._direct = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
            os.posix_fallocate(self._descriptor, 0, size)  # several threads may write only where there is room already
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise OSError(error.errno, error.strerror, self.path) from None

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        write_at(self._descriptor, offset, buffers, self.path)

    def write_all(self, buffers: Iterable[memoryview]) -> None:
        """Put `buffers` one after another from the start."""
        with self.at(0) as bounce:
            for buffer in buffers:
                data = np.frombuffer(buffer, np.uint8)
                for start in range(0, data.size, ROOM):
                    part = data[start : start + ROOM]
                    bounce.take(part.size)[...] = part

    def at(self, offset: int) -> "Bounce":
        """Collects what belongs at `offset`, and writes it."""
        return Bounce(self, offset)

    def write_aligned(self, offset: int, memory: Array) -> None:
        """Put `memory` at `offset`; both lie equally far from the start of a block."""
        end = offset + memory.size
        first, last = -(-offset // PAGE) * PAGE, end // PAGE * PAGE
        if self._direct < 0 or first >= last:
            self.write(offset, [_view(memory)])
            return
        head, tail = first - offset, last - offset
        self.write(offset, [_view(memory[:head])])
        try:
            write_at(self._direct, first, [_view(memory[head:tail])], self.path)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a disk with larger blocks
                raise
            self.write(first, [_view(memory[head:tail])])
        self.write(last, [_view(memory[tail:])])

    def close(self) -> None:
        for descriptor in (self._direct, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._direct = self._descriptor = -1

    def __enter__(self) -> "LocalNewFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Bounce:
    """Collects what belongs at one place of a file, and writes it in large parts."""

    def __init__(self, file: LocalNewFile, offset: int) -> None:
        self._file, self._offset = file, offset
        with _lock:
            memory = _free.pop() if _free else None
        self._memory = aligned_empty(ROOM + PAGE) if memory is None else memory
        self._start = self._end = offset % PAGE

    def take(self, nbytes: int) -> Array:
        if self._end + nbytes > self._memory.size:
            self._flush()
        memory = self._memory[self._end : self._end + nbytes]
        self._end += nbytes
        return memory

    def _flush(self) -> None:
        self._file.write_aligned(self._offset, self._memory[self._start : self._end])
        self._offset += self._end - self._start
        self._start = self._end = self._offset % PAGE

    def __enter__(self) -> "Bounce":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._end > self._start:
                self._flush()
        finally:
            with _lock:
                if len(_free) < _KEPT:
                    _free.append(self._memory)


def _view(memory: Array) -> memoryview:
    return memoryview(cast(Any, memory))


def write_at(descriptor: int, offset: int, buffers: Sequence[memoryview], path: str) -> None:
    """Write all of `buffers` at `offset`, however little the system takes at a time."""
    pending = [b for b in buffers if len(b)]
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
            raise OSError(error.errno, error.strerror, path) from None
        offset += count
        while pending and count >= len(pending[0]):
            count -= len(pending.pop(0))
        if count:
            pending[0] = pending[0][count:]
