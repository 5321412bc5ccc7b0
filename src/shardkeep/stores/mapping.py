"""Local files being read: into memory, or as memory."""

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

_MAX_READ = 1 << 30
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: fails with an error where touching the page would be a SIGBUS
# Where another machine cannot change files that are mapped.
MAPPABLE = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "bcachefs", "ramfs"))


class LocalFile:
    """An open file; its mappings stay valid after it is closed."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, offset: int, buffer: "np.ndarray[Any, Any]") -> None:
        target = memoryview(cast(Any, buffer))
        while len(target):
            count = os.preadv(self._descriptor, [target[:_MAX_READ]], offset)
            if count == 0:
                raise EOFError(f"{self._path} ends before byte {offset + len(target)}")
            target = target[count:]
            offset += count

    def map(self, offset: int, length: int, needed: Sequence[tuple[int, int]] = ()) -> "LocalMapping":
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(self._descriptor, offset + length - start, access=mmap.ACCESS_READ, offset=start)
        return LocalMapping(memory, offset - start, self._path)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> "LocalFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalMapping:
    """A part of a file as memory."""

    def __init__(self, memory: mmap.mmap, skip: int, path: str) -> None:
        self._memory = memory
        self._skip = skip
        self._path = path
        self.data = np.frombuffer(memory, dtype=np.uint8)[skip:]

    def bring_in(self, start: int, end: int) -> None:
        low = (self._skip + start) // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._memory.madvise(_POPULATE_READ, low, self._skip + end - low)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14, where pages come in as they are touched
                raise OSError(errno.EIO, "Input/output error", self._path) from error


def file_system(directory: str) -> str:
    """The kind of file system a directory is on; nothing if nobody knows."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    real = os.path.realpath(directory)
    best, kind = "", ""
    for line in mounts:
        fields = line.split(" ")
        point = fields[1].replace("\\040", " ")
        inside = point == "/" or real == point or real.startswith(point + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind
