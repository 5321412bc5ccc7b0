"""Arrays in part of a file whose elements are not in C order, or are compressed, or in another byte order.

Where such an array is, is written in the name of its place: `model.pt@64+96@0@1.6@` is in the 96 bytes of the file from
byte 64 on, from the first element on, with strides of 1 and 6 elements.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from shardkeep.errors import IntegrityError
from shardkeep.foreign.flat import ByteSource
from shardkeep.foreign.windows import opened
from shardkeep.foreign.zips import DEFLATED, STORED, EntryBytes, ZipEntry
from shardkeep.model.arrays import Array, DType, Region
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.leaves import ForeignArray, StoredArray
from shardkeep.model.naming import check_name
from shardkeep.stores.base import Store

_AT_ONCE = 4 << 20  # bytes that are read at once although not all of them are needed
_TEXT = re.compile(
    r"(?P<file>.+)@(?P<start>\d{1,19})\+(?P<size>\d{1,19})(z(?P<stored>\d{1,19}))?"
    r"@(?P<offset>\d{1,19})@(?P<strides>[\d.]*)@(?P<flags>[scn]*)",
    re.DOTALL | re.ASCII,
)
STRIDED = "torch"  # the kind of these arrays in manifests
SWAPPED, CONJUGATED, NEGATED = "s", "c", "n"


@fast_dataclass
class StridedPlace:
    """Where the elements of an array are.

    Attributes:
        file: The name of the file.
        start: The first byte in the file that belongs to the elements of this array or of others.
        size: How many such bytes there are, once they are decompressed.
        stored: How many they are in the file, if they are compressed with deflate; else None.
        offset: The first element of the array.
        strides: The distance between neighbours along each axis, in elements.
        flags: What is done with the elements: `SWAPPED` (bytes), `CONJUGATED`, `NEGATED`.
    """

    file: str
    start: int
    size: int
    stored: int | None
    offset: int
    strides: tuple[int, ...]
    flags: str = ""

    def encode(self) -> str:
        """The name of the place."""
        packed = "" if self.stored is None else f"z{self.stored}"
        strides = ".".join(map(str, self.strides))
        return f"{self.file}@{self.start}+{self.size}{packed}@{self.offset}@{strides}@{self.flags}"

    @classmethod
    def decode(cls, text: str) -> "StridedPlace":
        """The place of a name. `ValueError` for what is none, or for a file outside the checkpoint."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:80]!r} is not a place in a file")
        strides = tuple(map(int, found["strides"].split("."))) if found["strides"] else ()
        stored = None if found["stored"] is None else int(found["stored"])
        start, size, offset = (int(found[name]) for name in ("start", "size", "offset"))
        return cls(check_name(found["file"]), start, size, stored, offset, strides, found["flags"])

    @property
    def entry(self) -> ZipEntry:
        """The bytes as an entry of an archive."""
        method, stored = (STORED, self.size) if self.stored is None else (DEFLATED, self.stored)
        return ZipEntry("elements", method, None, self.size, stored, self.start)


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first to the last one that a strided array has.

    >>> span_of((2, 3), (1, 2)), span_of((0, 3), (3, 1))
    (6, 0)
    """
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


class StridedArray:
    """Reads a strided array; an `ArrayReader`. If its elements are compressed, all of them are decompressed."""

    def __init__(self, store: Store, leaf: StoredArray) -> None:
        """Find out where it is. `IntegrityError` if it is nowhere."""
        assert isinstance(leaf.origin, ForeignArray)
        self._store, self._leaf = store, leaf
        try:
            self._place = place = StridedPlace.decode(leaf.origin.directory)
            if len(place.strides) != len(leaf.spec.shape):
                raise ValueError("it does not have one stride per axis")
            if (place.offset + span_of(leaf.spec.shape, place.strides)) * leaf.spec.dtype.itemsize > place.size:
                raise ValueError("the array reaches beyond its bytes")
            check_flags(place.flags, leaf.spec.dtype)
        except ValueError as error:
            raise IntegrityError(str(error), leaf=leaf.key) from error

    @property
    def chunks(self) -> tuple[int, ...]:
        shape, itemsize = self._leaf.spec.shape, self._leaf.spec.dtype.itemsize
        if self._place.stored is not None:
            return tuple(max(extent, 1) for extent in shape)
        found = [max(extent, 1) for extent in shape]
        for axis in sorted(range(len(shape)), key=lambda axis: -self._place.strides[axis]):
            nbytes = itemsize * int(np.prod(found, dtype=np.float64))
            found[axis] = max(found[axis] * _AT_ONCE // max(nbytes, _AT_ONCE), 1)
        return tuple(found)

    def read(self, region: Region) -> Array:
        place, dtype = self._place, self._leaf.spec.dtype
        with opened(self._store, place.file, self._leaf.key) as file:
            source: ByteSource = EntryBytes(file, place.entry)
            if place.stored is not None:
                memory = np.empty(place.size, np.uint8)
                source.read_into(0, memory)
                source = _Memory(memory)
            found = read_strided(source, dtype, place.offset, place.strides, region)
        return with_flags(found, place.flags)

    def check(self) -> None:
        with opened(self._store, self._place.file, self._leaf.key) as file:
            EntryBytes(file, self._place.entry).check()

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        place = self._place
        end = place.start + (place.size if place.stored is None else place.stored)
        if end > sizes.get(place.file, 0):
            return f"leaf {self._leaf.key!r}: {self._store.locate(place.file)} is truncated"
        return None


class _Memory:
    """Bytes in memory, as a `ByteSource`."""

    def __init__(self, memory: Array) -> None:
        self._memory = memory

    def read_into(self, offset: int, buffer: Array) -> None:
        buffer[:] = self._memory[offset : offset + buffer.size]


def read_strided(source: ByteSource, dtype: DType, offset: int, strides: Sequence[int], region: Region) -> Array:
    """A region of a strided array, as a new array in C order.

    Args:
        source: The bytes of all elements.
        dtype: Of the elements.
        offset: The first element of the array.
        strides: The distance between neighbours along each axis, in elements.
        region: The region.
    """
    found = np.empty(region.shape, dtype)
    first = offset + sum(start * stride for start, stride in zip(region.start, strides, strict=True))
    if found.size:
        _fill(source, first, tuple(strides), found)
    return found


def _fill(source: ByteSource, first: int, strides: tuple[int, ...], into: Array) -> None:
    """Fill an array with the elements from `first` on. What lies far apart is read in parts."""
    itemsize = into.dtype.itemsize
    span = span_of(into.shape, strides)
    if span * itemsize > _AT_ONCE and into.size > 1:
        reach = [(extent - 1) * stride for extent, stride in zip(into.shape, strides, strict=True)]
        axis = max(range(into.ndim), key=reach.__getitem__)
        half = into.shape[axis] // 2
        before = tuple(slice(half) if i == axis else slice(None) for i in range(into.ndim))
        after = tuple(slice(half, None) if i == axis else slice(None) for i in range(into.ndim))
        _fill(source, first, strides, into[before])
        _fill(source, first + half * strides[axis], strides, into[after])
        return
    memory = np.empty(span * itemsize, np.uint8)
    source.read_into(first * itemsize, memory)
    steps = tuple(stride * itemsize for stride in strides)
    into[...] = np.ndarray(into.shape, into.dtype, memory, strides=steps)


def check_flags(flags: str, dtype: DType) -> None:
    """`ValueError` for what cannot be done with the elements of a dtype."""
    if (CONJUGATED in flags and dtype.kind != "c") or (NEGATED in flags and dtype.kind not in "fc"):
        raise ValueError(f"numbers of the dtype {dtype.name} are said to be conjugated or negated")


def with_flags(found: Array, flags: str) -> Array:
    """The numbers that stored elements stand for."""
    if SWAPPED in flags:
        unit = found.dtype.itemsize // (2 if found.dtype.kind == "c" else 1)
        found.view(f"u{unit}").byteswap(inplace=True)
    if CONJUGATED in flags:
        found = np.conjugate(found)
    return np.negative(found) if NEGATED in flags else found
