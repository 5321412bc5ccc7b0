"""Data on its way into a derived array: through functions, in steps that take little memory beside it."""

from collections.abc import Sequence

import numpy as np

from shardkeep.errors import RemapError
from shardkeep.model.arrays import Array, Region, split_region
from shardkeep.remap.expressions import Function

_STEP = 4 << 20  # bytes that go through functions at once: a copy and the results, of each thread


def change_into(window: Array, data: Array, functions: Sequence[Function]) -> None:
    """Fill a window with data, after functions that work on each element. They get arrays of their own."""
    if not functions:
        window[...] = data
        return
    for part in split_region(Region.whole(data.shape), data.dtype.itemsize, _STEP):
        place = (*part.slices, ...)
        window[place] = changed(np.array(data[place], order="C"), functions, window.dtype)


def changed(data: Array, functions: Sequence[Function], dtype: object) -> Array:
    """Data after functions that work on each element. `RemapError` if the result has another shape or dtype."""
    shape = data.shape
    for function in functions:
        data = np.asarray(function(data))
    if data.shape != shape or data.dtype != dtype:
        raise RemapError(
            f"remap.apply(..., elementwise=True): the function returned {data.dtype.name}{list(data.shape)} for "
            f"an array of the shape {list(shape)}, but {dtype}{list(shape)} was expected"
        )
    return data


def window_of(buffer: Array, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Array:
    """A part of contiguous memory as an array. NumPy checks that it is inside."""
    size, raw = buffer.dtype.itemsize, buffer.reshape(-1).view(np.uint8)
    return np.ndarray(shape, buffer.dtype, raw, offset * size, [stride * size for stride in strides])
