"""Regions of arrays whose bytes lie one after the other, read without reading the rest of the array."""

import math
from typing import Protocol

import numpy as np

from shardkeep.model.arrays import Array, ArraySpec, Region

_MOST = 4 << 20  # bytes read at once that are not all needed: beyond that, a part of them costs another read


class ByteSource(Protocol):
    """Where the bytes of an array are: a file, for example."""

    def read_into(self, offset: int, buffer: Array) -> None:
        """Fill `buffer`, of bytes, with those at an offset; `ValueError` or `EOFError` if there are not enough."""
        ...


class After:
    """The bytes after a header, or after others; a `ByteSource`."""

    def __init__(self, source: ByteSource, start: int) -> None:
        self._source, self._start = source, start

    def read_into(self, offset: int, buffer: Array) -> None:
        self._source.read_into(self._start + offset, buffer)


def read_region(source: ByteSource, spec: ArraySpec, region: Region, fortran: bool = False) -> Array:
    """A region of an array as a new array in C order. Of the source, parts are read in order of their offsets.

    Args:
        source: The bytes of the array.
        spec: Its shape and dtype, in whichever byte order it is stored.
        region: The region.
        fortran: Whether the first axis is the one along which elements are neighbours.
    """
    if fortran:
        turned = ArraySpec(spec.shape[::-1], spec.dtype)
        found = read_region(source, turned, Region(region.start[::-1], region.shape[::-1]))
        return native(np.ascontiguousarray(found.transpose()).reshape(region.shape))
    found = np.empty(region.shape, spec.dtype)
    if found.size:
        _fill(source, 0, spec.shape, region, found)
    return native(found)


def _fill(source: ByteSource, offset: int, shape: tuple[int, ...], region: Region, into: Array) -> None:
    """Fill `into` with a region of the array of this shape that begins at `offset`."""
    row = into.dtype.itemsize * math.prod(shape[1:])
    if region.shape[1:] == shape[1:]:
        first = region.start[0] if shape else 0
        source.read_into(offset + first * row, into.reshape(-1).view(np.uint8))
        return
    inner = Region(region.start[1:], region.shape[1:])
    step = _MOST // row  # rows that are read at once
    for first in range(0, region.shape[0], max(step, 1)):
        at = offset + (region.start[0] + first) * row
        if step == 0:
            _fill(source, at, shape[1:], inner, into[first])
            continue
        part = into[first : first + step]
        block = np.empty((len(part), *shape[1:]), into.dtype)
        source.read_into(at, block.reshape(-1).view(np.uint8))
        part[...] = block[(slice(None), *inner.slices)]


def native(array: Array) -> Array:
    """The same numbers in the byte order of this machine."""
    return array if array.dtype.isnative else array.byteswap(inplace=True).view(array.dtype.newbyteorder("="))
