"""Reads local files, into memory or by mapping them."""

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkeep import system
from shardkeep.model.arrays import Array
from shardkeep.stores.local.descriptors import Descriptor

_MAX_READ = 1 << 30  # bytes: one system call reads at most 2 GiB
_HUGE = 2 << 20  # bytes: a huge page of x86-64 and most ARM kernels
# File systems on which no other machine can change a mapped file.
MAPPABLE = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "bcachefs", "ramfs"))


class LocalFile(Descriptor):
    """A regular file that `LocalStore.open` has opened. Its mappings stay valid after it is closed."""

    __slots__ = ("size",)

    size: int

    def read_into(self, offset: int, buffer: Array) -> None:
        target = buffer.data
        while len(target):
            count = system.preadv(self.number, [target[:_MAX_READ]], offset)
            if count == 0:
                raise EOFError(f"{self.path} is truncated: it ends before byte {offset + len(target)}")
            target = target[count:]
            offset += count

    def map(self, offset: int, length: int, needed: Sequence[tuple[int, int]] = ()) -> "LocalMappedFile":
        if offset + length > self.size:
            raise EOFError(f"{self.path} is truncated: it ends before byte {offset + length}")
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        return LocalMappedFile(Pages(self.number, start, offset + length - start), offset - start, self.path)


class LocalMappedFile:
    """A mapped part of a file."""

    def __init__(self, pages: "Pages", skip: int, path: str) -> None:
        self._pages, self._skip, self._path = pages, skip, path
        self.data: Array = np.asarray(pages)[skip:]

    def bring_in(self, start: int, end: int) -> None:
        if end - start >= _HUGE or 2 * (end - start) >= self.data.size:  # else huge pages would read more than needed
            self._pages.make_huge(self._skip + start, self._skip + end)
        low = (self._skip + start) // mmap.PAGESIZE * mmap.PAGESIZE
        error = self._pages.populate(low, self._skip + end - low)
        if error not in (0, errno.EINVAL):  # EINVAL: Linux before 5.14, which reads pages when they are touched
            raise OSError(errno.EIO, "Input/output error", self._path)


_libc = system.c_library()
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_READ: int = getattr(mmap, "PROT_READ", 0)
_SHARED: int = getattr(mmap, "MAP_SHARED", 0)


class Pages:
    """Mapped pages of a file with NumPy's array interface. They stay mapped while any array uses them.

    Python's `mmap` keeps a file descriptor open for each mapping, and blocks all other threads while pages are read
    from the disk.
    """

    most = 30_000  # of the 65,530 mappings that Linux allows a process
    addresses: set[int] = set()

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._address, self._length = None, length
        if _libc is None or len(Pages.addresses) >= Pages.most:
            raise OSError(errno.ENOMEM, "too many mapped files in this process")  # none, where files cannot be mapped
        self._address = _libc.mmap(None, length, _READ, _SHARED, descriptor, offset)
        if self._address == _FAILED:
            self._address = None
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        Pages.addresses.add(self._address or 0)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": (self._length,), "typestr": "|u1", "data": (self._address, True)}

    def make_huge(self, start: int, end: int) -> None:
        """Ask for huge pages for a part of the mapping. If the system refuses, small pages are used."""
        address = self._address or 0
        low = max((address + start) // _HUGE * _HUGE, address)
        high = min(-(-(address + end) // _HUGE) * _HUGE, address + self._length)
        if _libc is not None and system.HUGEPAGE is not None:
            _libc.madvise(low, high - low, system.HUGEPAGE)

    def populate(self, start: int, length: int) -> int:
        """Read pages from the disk. Returns 0, or the errno: `EINVAL` where the system cannot."""
        if _libc is None or system.POPULATE_READ is None:
            return errno.EINVAL
        failed = _libc.madvise((self._address or 0) + start, length, system.POPULATE_READ) != 0
        return ctypes.get_errno() if failed else 0

    def __del__(self, unmap: Any = getattr(_libc, "munmap", None), failed: Any = _FAILED) -> None:
        if self._address not in (None, failed):
            type(self).addresses.discard(self._address)  # before unmapping: the next mapping may get the same address
            unmap(self._address, self._length)
