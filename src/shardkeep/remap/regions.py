"""Which parts of stored arrays a region of a derived array is made of, and where each goes. No data is involved."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.model.arrays import DType, Region
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.leaves import StoredArray
from shardkeep.remap.expressions import (
    Called,
    Changed,
    Expression,
    Filled,
    Function,
    Joined,
    Reshaped,
    Shape,
    Sliced,
    Stacked,
    StoredSource,
    Transposed,
    Unsized,
)


@fast_dataclass
class StridedView:
    """A part of an array in memory: where it begins, and its strides, in elements."""

    offset: int
    strides: Shape


@dataclass(frozen=True, eq=False)
class Part:
    """A region of a stored or computed array, and where it goes in the region that it is a part of.

    Attributes:
        source: The array.
        region: The region of it.
        window: Where the region goes; the window has its shape.
        functions: What is applied to its elements on the way, in order.
    """

    source: StoredArray | Called
    region: Region
    window: StridedView
    functions: tuple[Function, ...] = ()


@dataclass(frozen=True, eq=False)
class Gap:
    """A part of a region that no stored array fills: it gets a value, or (None) keeps what the template has there."""

    shape: Shape
    dtype: DType
    window: StridedView
    value: float | None
    functions: tuple[Function, ...] = ()


def strides_of(shape: Sequence[int]) -> Shape:
    """The strides of an array in C order, in elements.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def inverse_axes(axes: Sequence[int]) -> Shape:
    """The order of axes that undoes another one.

    >>> inverse_axes((2, 0, 1))
    (1, 2, 0)
    """
    return tuple(list(axes).index(axis) for axis in range(len(axes)))


def assembly(expression: Expression, region: Region) -> list[Part | Gap]:
    """What fills a region of an array: parts of stored arrays, in no overlap, and gaps."""
    if region.size == 0:
        return []
    return list(_parts(expression, region, StridedView(0, strides_of(region.shape)), ()))


def _parts(
    expression: Expression, region: Region, window: StridedView, functions: tuple[Function, ...]
) -> Iterator[Part | Gap]:
    match expression:
        case StoredSource():
            yield Part(expression.leaf, region, window, functions)
        case Called():
            yield Part(expression, region, window, functions)
        case Filled():
            yield Gap(region.shape, expression.dtype, window, expression.value, functions)
        case Changed():  # element by element, so that it does not matter when
            yield from _parts(expression.of, region, window, (expression.function, *functions))
        case Unsized():
            yield from _parts(expression.of, region, window, functions)
        case Stacked():
            axis = expression.axis
            for number in range(region.start[axis], region.start[axis] + region.shape[axis]):
                offset = window.offset + (number - region.start[axis]) * window.strides[axis]
                inner = StridedView(offset, _without(window.strides, axis))
                yield from _parts(expression.parts[number], _drop(region, axis), inner, functions)
        case Joined():
            yield from _joined(expression, region, window, functions)
        case Sliced():
            start, shape, strides = list(region.start), list(region.shape), list(window.strides)
            if expression.drop:
                start.insert(expression.axis, expression.start)
                shape.insert(expression.axis, 1)
                strides.insert(expression.axis, 0)
            else:
                start[expression.axis] += expression.start
            inner = StridedView(window.offset, tuple(strides))
            yield from _parts(expression.of, Region(tuple(start), tuple(shape)), inner, functions)
        case Transposed():
            order = inverse_axes(expression.axes)
            inner = StridedView(window.offset, tuple(window.strides[i] for i in order))
            turned = Region(tuple(region.start[i] for i in order), tuple(region.shape[i] for i in order))
            yield from _parts(expression.of, turned, inner, functions)
        case Reshaped():
            for part, inner in reshaped(expression.of.shape, expression.shape, region, window):
                yield from _parts(expression.of, part, inner, functions)
        case _:
            raise TypeError(f"unknown expression {expression!r}")


def _without(values: Shape, axis: int) -> Shape:
    return (*values[:axis], *values[axis + 1 :])


def _drop(region: Region, axis: int) -> Region:
    return Region(_without(region.start, axis), _without(region.shape, axis))


def _joined(
    expression: Joined, region: Region, window: StridedView, functions: tuple[Function, ...]
) -> Iterator[Part | Gap]:
    axis, begin = expression.axis, 0
    first, last = region.start[axis], region.start[axis] + region.shape[axis]
    for part in expression.parts:
        size = part.shape[axis]
        low, high = max(first, begin), min(last, begin + size)
        if low < high:
            start, shape = list(region.start), list(region.shape)
            start[axis], shape[axis] = low - begin, high - low
            inner = StridedView(window.offset + (low - first) * window.strides[axis], window.strides)
            yield from _parts(part, Region(tuple(start), tuple(shape)), inner, functions)
        begin += size


def reshaped(old: Shape, new: Shape, region: Region, window: StridedView) -> Iterator[tuple[Region, StridedView]]:
    """The regions of an array that a region of it, reshaped from `old` to `new`, is made of, and where each goes.

    Dimensions that only change together are treated together: others stay as they are.
    """
    kept = [i for i, n in enumerate(old) if n != 1]
    axes = [i for i, n in enumerate(new) if n != 1]
    groups: list[list[tuple[Region, StridedView]]] = []
    for ours, theirs in _groups([old[i] for i in kept], [new[i] for i in axes]):
        mine = [axes[i] for i in theirs]
        part = Region(tuple(region.start[i] for i in mine), tuple(region.shape[i] for i in mine))
        strides = tuple(window.strides[i] for i in mine)
        groups.append(list(_regrouped([old[kept[i]] for i in ours], [new[i] for i in mine], part, strides)))
    for chosen in itertools.product(*groups):
        start, shape, strides = [0] * len(old), [1] * len(old), [0] * len(old)
        flat = [
            (a, n, s) for part, inner in chosen for a, n, s in zip(part.start, part.shape, inner.strides, strict=True)
        ]
        for axis, (a, n, s) in zip(kept, flat, strict=True):
            start[axis], shape[axis], strides[axis] = a, n, s
        offset = window.offset + sum(inner.offset for _, inner in chosen)
        yield Region(tuple(start), tuple(shape)), StridedView(offset, tuple(strides))


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """The smallest groups of neighbouring dimensions that have the same number of elements, none of them being 1."""
    found: list[tuple[range, range]] = []
    i = j = 0
    while i < len(old):
        a, b, first, second = old[i], new[j], i, j
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a *= old[i]
                i += 1
            else:
                b *= new[j]
                j += 1
        found.append((range(first, i), range(second, j)))
    return found


def _regrouped(
    old: Sequence[int], new: Sequence[int], region: Region, strides: Shape
) -> Iterator[tuple[Region, StridedView]]:
    """`reshaped`, for one group of dimensions: the runs of elements that follow each other, each as boxes."""
    for start, length, offset, step in _runs(new, region, strides):
        for box in _boxes(old, start, start + length):
            first = sum(a * n for a, n in zip(box.start, strides_of(old), strict=True))
            yield box, StridedView(offset + (first - start) * step, tuple(n * step for n in strides_of(old)))


def _runs(sizes: Sequence[int], region: Region, strides: Shape) -> Iterator[tuple[int, int, int, int]]:
    """The elements of a region in runs that are evenly spaced in memory: (first element, length, offset, stride)."""
    axis = len(sizes) - 1
    start, length, whole, step = region.start[axis], region.shape[axis], sizes[axis], strides[axis]
    while axis and length == whole and strides[axis - 1] == step * whole:
        axis -= 1
        start, length, whole = region.start[axis] * whole, region.shape[axis] * whole, sizes[axis] * whole
    outer = strides_of(sizes)
    for index in np.ndindex(*region.shape[:axis]):
        first = sum((a + i) * n for a, i, n in zip(region.start, index, outer, strict=False))
        yield start + first, length, sum(i * n for i, n in zip(index, strides, strict=False)), step


def _boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[Region]:
    """The elements from `start` to `stop` of an array in C order, as rectangular regions."""
    if len(sizes) == 1:
        yield Region((start,), (stop - start,))
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row  # the complete rows
    if last < first:  # all in one row, and not all of it
        yield from _row(sizes, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _row(sizes, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Region((first, *(0,) * (len(sizes) - 1)), (last - first, *sizes[1:]))
    if last * row < stop:
        yield from _row(sizes, last, 0, stop - last * row)


def _row(sizes: Sequence[int], number: int, start: int, stop: int) -> Iterator[Region]:
    for box in _boxes(sizes[1:], start, stop):
        yield Region((number, *box.start), (1, *box.shape))


def regions_read(expression: Expression, regions: Sequence[Region]) -> list[tuple[StoredArray, list[Region]]]:
    """The stored arrays that some regions are made of, with what is needed of each, in the order of the expression."""
    found: dict[tuple[str, ...], tuple[StoredArray, list[Region]]] = {}
    for region in regions:
        for part in assembly(expression, region):
            if isinstance(part, Gap):
                continue
            source = part.source
            needed = (
                regions_read(source.of, [Region.whole(source.of.shape)])
                if isinstance(source, Called)
                else [(source, [part.region])]
            )
            for leaf, some in needed:
                found.setdefault(leaf.path, (leaf, []))[1].extend(some)
    return list(found.values())
