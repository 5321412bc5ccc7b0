"""Host memory: aligned for JAX, shared by many arrays, given back; and how much of it is free."""

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from shardkeep.model.arrays import Array
from shardkeep.model.fastclass import fast_dataclass

_HUGE = 2 << 20  # bytes: a huge page; smaller memory cannot have one
_SLAB = 32 << 20  # limits the memory that one array keeps alive when the others of its slab are gone
ALIGN = 64  # bytes: JAX uses host memory that is aligned so without a copy
PAGE = 4096  # bytes: what the kernel maps, and what O_DIRECT is aligned to
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def aligned_empty(nbytes: int) -> Array:
    """New host memory that JAX can use without a copy: 64-byte aligned, and in huge pages if it is large."""
    if nbytes < _HUGE:
        memory = np.empty(nbytes + ALIGN, dtype=np.uint8)
        start = -memory.ctypes.data % ALIGN
        return memory[start : start + nbytes]
    # Not reserved: if only a part of a large array is read, only the touched pages use memory.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)


def release_freed() -> int:
    """Return freed memory that the C library keeps to the system; gives the number of bytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return 0
    before = _resident()
    trim(0)
    return before - _resident()


def _resident() -> int:
    """The resident memory of this process in bytes."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


class Slabs:
    """Memory for many arrays. Small ones share huge pages, which are much faster to touch than small pages.

    Args:
        sizes: The sizes of all arrays that will be asked for, in bytes.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._left = self.nbytes = sum(map(room, sizes))
        self._slab, self._start = aligned_empty(0), 0

    def take(self, nbytes: int) -> Array:
        """Memory for one of the announced arrays."""
        taken = room(nbytes)
        if self._start + taken > self._slab.size:
            self._slab, self._start = aligned_empty(max(taken, min(self._left, _SLAB))), 0
        memory = self._slab[self._start : self._start + nbytes]
        self._start += taken
        self._left -= taken
        return memory


def room(nbytes: int) -> int:
    """The space that an array of `nbytes` takes in a sequence of aligned arrays."""
    return -(-nbytes // ALIGN) * ALIGN


def file_order(sizes: Sequence[int]) -> list[int]:
    """The order in which arrays of these sizes follow one another in a file, and copies of them in memory.

    Those that can begin on a page do; of the others, those come first that JAX can use without a copy. What lies in
    memory as in a file is written from there.

    >>> file_order([100, 4096, 128, 8192])
    [1, 3, 2, 0]
    """
    return sorted(range(len(sizes)), key=lambda number: (sizes[number] % PAGE != 0, sizes[number] % ALIGN != 0))


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offsets of arrays of these sizes in one block of memory, in the order of a file, and the block's size.

    >>> lay_out([100, 4096, 8192])
    ([12288, 0, 4096], 12416)
    """
    starts, end = [0] * len(sizes), 0
    for number in file_order(sizes):
        starts[number] = end
        end += room(sizes[number])
    return starts, end


def address_of(memory: Array) -> int:
    return memory.__array_interface__["data"][0]


@fast_dataclass
class Shard:
    """The data of one region in host memory.

    `stable` means that nothing can change it while it is being written, `private` that nothing else refers to it: it
    need not be copied, even if the program donates its arrays.
    """

    data: Array
    stable: bool
    private: bool = False

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def release(self) -> None:
        """Called when the data is written."""


def available_memory() -> int:
    """The memory in bytes that this process can still use, limited by the machine and by the container."""
    free = _meminfo("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in _cgroup_files():
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            free = min(free, max(most - now, 0))
    return max(free, 64 << 20)


def _cgroup_files() -> list[tuple[str, str]]:
    """The (limit, usage) files of the memory cgroups of this process, from the innermost to the root."""
    found: list[tuple[str, str]] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = "/sys/fs/cgroup" if controllers == "" else "/sys/fs/cgroup/memory"
        names = ("memory.max", "memory.current")
        names = names if controllers == "" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        parts = [part for part in group.split("/") if part]
        for depth in range(len(parts), -1, -1):
            place = "/".join([base, *parts[:depth]])
            found.append((f"{place}/{names[0]}", f"{place}/{names[1]}"))
    return found


def _meminfo(name: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # the file is missing or contains "max": no limit
        return None
