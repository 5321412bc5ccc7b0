"""Host memory: aligned for JAX, shared by many arrays, given back; and how much of it is free."""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardkeep import system
from shardkeep.model.arrays import Array
from shardkeep.model.fastclass import fast_dataclass

_HUGE = 2 << 20  # bytes: a huge page; smaller memory cannot have one
_SLAB = 32 << 20  # limits the memory that one array keeps alive when the others of its slab are gone
ALIGN = 64  # bytes: JAX uses host memory that is aligned so without a copy
PAGE = 4096  # bytes: what the kernel maps, and what O_DIRECT is aligned to
_CGROUPS, _OWN_CGROUPS = "/sys/fs/cgroup", "/proc/self/cgroup"  # where all are, and which are those of this process


def aligned_empty(nbytes: int) -> Array:
    """New host memory that JAX can use without a copy: 64-byte aligned, and in huge pages if it is large."""
    if nbytes < _HUGE:
        memory = np.empty(nbytes + ALIGN, dtype=np.uint8)
        start = -memory.ctypes.data % ALIGN
        return memory[start : start + nbytes]
    return np.frombuffer(system.anonymous_memory(nbytes, system.HUGEPAGE), dtype=np.uint8)


def release_freed() -> int:
    """Return freed memory that the C library keeps to the system; gives the number of bytes."""
    trim = system.c_function("malloc_trim")
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
    """The memory in bytes that this process can still use, limited by the machine and by the container.

    The page cache counts as available, as in the kernel's own estimate: it goes when the memory is needed.
    """
    free = _meminfo("MemAvailable") or system.assumed_memory()
    for group in _cgroups():
        most, used = _number(group.limit), _number(group.usage)
        if most is not None and used is not None:
            free = min(free, max(most - used + group.cached(), 0))
    return max(free, 64 << 20)


class _Cgroup(NamedTuple):
    """The files of a memory cgroup: its limit, its usage, and its statistics with the names of the cached pages."""

    limit: str
    usage: str
    statistics: str
    pages: tuple[str, str]

    def cached(self) -> int:
        """The bytes of its page cache, in memory that counts as used."""
        try:
            fields = [line.split() for line in Path(self.statistics).read_text().splitlines()]
        except OSError:
            return 0
        return sum(int(value) for name, value in fields if name in self.pages)


def _cgroups() -> Iterator[_Cgroup]:
    """The memory cgroups of this process, of version 1 and 2, from the innermost to the root."""
    try:
        lines = Path(_OWN_CGROUPS).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        parts = [part for part in group.split("/") if part]
        for depth in range(len(parts), -1, -1):
            inside = "/".join(parts[:depth])
            if controllers == "":
                place, pages = f"{_CGROUPS}/{inside}", ("inactive_file", "active_file")
                yield _Cgroup(f"{place}/memory.max", f"{place}/memory.current", f"{place}/memory.stat", pages)
            else:
                place, pages = f"{_CGROUPS}/memory/{inside}", ("total_inactive_file", "total_active_file")
                limit, usage = f"{place}/memory.limit_in_bytes", f"{place}/memory.usage_in_bytes"
                yield _Cgroup(limit, usage, f"{place}/memory.stat", pages)


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
