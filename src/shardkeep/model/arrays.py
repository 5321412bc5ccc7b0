"""Dtypes by name, and arithmetic with rectangular regions of arrays."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, cast

import ml_dtypes
import numpy as np

from shardkeep.model.fastclass import fast_dataclass

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
DType: TypeAlias = np.dtype[Any]
NUMPY_NAMES = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)
_MOST_SPLITS = 64  # beyond the number needed: split another axis rather than into thousands of slivers
_EXTENDED: dict[str, DType] = {
    name: np.dtype(kind)
    for name in dir(ml_dtypes)
    if isinstance(kind := getattr(ml_dtypes, name), type) and issubclass(kind, np.generic)
}
# Elements of these have less than a byte.
NARROW = frozenset(kind for name, kind in _EXTENDED.items() if name.startswith(("int", "uint", "float4", "float6")))
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8_e4m3fn"}


@lru_cache(maxsize=256)
def dtype_name(dtype: DType) -> str:
    """The name under which a dtype is stored; `TypeError` for those without a stored form (object, string, record).

    >>> dtype_name(np.dtype(">f4")), dtype_name(np.dtype("M8[ns]"))
    ('float32', 'datetime64[ns]')
    """
    return _name_of(dtype)


@lru_cache(maxsize=256)
def _name_of(dtype: DType) -> str:
    name = dtype.name
    if name in NUMPY_NAMES or name in _EXTENDED or (dtype.kind in "mM" and "[" in name):
        return name
    raise TypeError(f"arrays of dtype {dtype} cannot be saved")


@lru_cache(maxsize=256)
def dtype_from_name(name: str) -> DType:
    """The dtype stored under `name`; `ValueError` if there is none.

    >>> dtype_from_name("bfloat16").itemsize
    2
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (read from files)
        raise ValueError(f"a dtype name must be a string, not {name!r}")
    if name in _EXTENDED:
        return _EXTENDED[name]
    if name in NUMPY_NAMES or name.startswith(("datetime64[", "timedelta64[")):
        try:
            return np.dtype(name)
        except TypeError as error:
            raise ValueError(f"unknown dtype {name!r}") from error
    raise ValueError(f"unknown dtype {name!r}")


def parse_dtype(dtype: object) -> DType:
    """A dtype from a name (also bf16, fp16, fp32, fp64, fp8), a `np.dtype` or a `jnp` type; `ValueError` otherwise.

    >>> parse_dtype("bf16")
    dtype(bfloat16)
    """
    if isinstance(dtype, str):
        return dtype_from_name(_ALIASES.get(dtype, dtype))
    own = getattr(dtype, "dtype", None)  # jnp.float32 has one; on np.float32 it is a descriptor
    try:
        if dtype is None:
            raise TypeError("None")
        parsed: DType = own if isinstance(own, np.dtype) else np.dtype(cast(Any, dtype))
        dtype_name(parsed)
    except TypeError as error:
        raise ValueError(f"unknown dtype {dtype!r}") from error
    return parsed


def kind_of(dtype: DType) -> str:
    """ "float", "int", "complex", "bool" or "other": casts stay within one kind."""
    name = dtype.name
    if name in _EXTENDED:
        return "int" if "int" in name else "complex" if "complex" in name else "float"
    return {"f": "float", "i": "int", "u": "int", "c": "complex", "b": "bool"}.get(dtype.kind, "other")


def limits_of(dtype: DType) -> "np.finfo[np.floating[Any]]":
    """The limits of a float or complex dtype, those of `ml_dtypes` included."""
    return cast("np.finfo[np.floating[Any]]", ml_dtypes.finfo(dtype))


WIDE = frozenset(np.dtype(name) for name in ("int64", "uint64", "float64", "complex128"))  # JAX needs x64 for them


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether values of this type are whole bytes that no kernel of XLA changes."""
    return dtype.isbuiltin == 1 and kind_of(dtype) in ("int", "bool")


@lru_cache(maxsize=256)
def is_prng_dtype(dtype: Any) -> bool:
    """Whether a dtype is that of JAX's PRNG keys."""
    import jax

    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def carrier_of(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The unsigned integer with the width of a float type; None if there is none that JAX can convert it to.

    XLA may change floats where it should only move them: some kernels set the quiet bit of NaNs, for example.
    """
    if kind_of(dtype) != "float" or dtype.name.startswith(("float4", "float6")):  # float64 too: TPUs have none
        return None
    return np.dtype(f"uint{dtype.itemsize * 8}")


def kind_of_value(value: object) -> str:
    """The kind of a plain number; "other" for any other value."""
    if isinstance(value, np.generic):
        return kind_of(value.dtype)
    kinds: dict[type, str] = {bool: "bool", int: "int", float: "float", complex: "complex"}
    return kinds.get(type(value), "other")


@fast_dataclass
class ArraySpec:
    """The shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@fast_dataclass
class Region:
    """A rectangular part of an array: its start and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        return _whole(tuple(shape))

    @classmethod
    def from_index(cls, index: Sequence[slice], shape: Sequence[int]) -> "Region":
        """The region of a tuple of slices, as JAX describes shards."""
        bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
        return cls(tuple(b[0] for b in bounds), tuple(b[1] - b[0] for b in bounds))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def intersect(self, other: "Region") -> "Region | None":
        """The intersection, or None if it is empty."""
        start: list[int] = []
        shape: list[int] = []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            start.append(low)
            shape.append(high - low)
        return Region(tuple(start), tuple(shape))

    @classmethod
    def around(cls, regions: "Sequence[Region]") -> "Region":
        """The smallest region that contains all of these."""
        ends = [[a + n for a, n in zip(r.start, r.shape, strict=True)] for r in regions]
        start = tuple(map(min, zip(*(r.start for r in regions), strict=True)))
        last = map(max, zip(*ends, strict=True))
        return cls(start, tuple(b - a for a, b in zip(start, last, strict=True)))

    def within(self, outer: "Region") -> "Region":
        """The same region, relative to the start of `outer`."""
        return Region(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)


@lru_cache(maxsize=4096)  # thousands of arrays have few different shapes
def _whole(shape: tuple[int, ...]) -> Region:
    return Region((0,) * len(shape), shape)


@lru_cache(maxsize=4096)
def common_slices(one: Region, other: Region) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The intersection of two regions as slices of each of them; empty slices if there is none.

    >>> common_slices(Region((0,), (4,)), Region((3,), (5,)))
    ((slice(3, 4, None),), (slice(0, 1, None),))
    """
    common = one.intersect(other)
    if common is None:
        nowhere = (slice(0, 0),) * len(one.shape)
        return nowhere, nowhere
    return common.within(one).slices, common.within(other).slices


def is_possible(shape: Sequence[int], itemsize: int) -> bool:
    """Whether NumPy can have such an array. Sizes are limited to 63 bits, even if another axis makes it empty.

    >>> is_possible((0, 2**62), itemsize=4)
    False
    """
    return len(shape) <= 64 and min(shape, default=0) >= 0 and math.prod(max(n, 1) for n in shape) * itemsize < 2**62


def split_counts(shape: Sequence[int], itemsize: int, limit: int) -> list[int]:
    """The number of parts to split each axis into, the first axes first, so that a part has at most `limit` bytes.

    >>> split_counts((6, 10), itemsize=1, limit=20)
    [3, 1]
    """
    counts = [1] * len(shape)
    nbytes = math.prod(shape) * itemsize
    for axis, extent in enumerate(shape):
        needed = -(-nbytes // limit)
        if needed <= 1:
            break
        best = next((k for k in range(needed, min(extent, needed * _MOST_SPLITS) + 1) if extent % k == 0), None)
        if best is None and extent < needed:
            best = extent
        if best is not None:
            counts[axis] = best
            nbytes //= best
    return counts


def cut(region: Region, counts: Sequence[int]) -> list[Region]:
    """A region split into equal parts, `counts` along each axis."""
    if all(n == 1 for n in counts):
        return [region]
    shape = tuple(n // k for n, k in zip(region.shape, counts, strict=True))
    return [
        Region(tuple(a + i * n for a, i, n in zip(region.start, index, shape, strict=True)), shape)
        for index in np.ndindex(*counts)
    ]


def split_region(region: Region, itemsize: int, limit: int) -> Iterator[Region]:
    """Parts of at most `limit` bytes, but at least one element, each contiguous in the C order of the region.

    >>> [part.start for part in split_region(Region((0, 0), (4, 4)), itemsize=1, limit=8)]
    [(0, 0), (2, 0)]
    """
    axis = next((i for i, n in enumerate(region.shape) if n > 1), None)
    nbytes = region.size * itemsize
    if nbytes <= limit or axis is None:
        yield region
        return
    row = nbytes // region.shape[axis]
    step = max(limit // row, 1)
    for first in range(0, region.shape[axis], step):
        start = tuple(a + first if i == axis else a for i, a in enumerate(region.start))
        count = min(step, region.shape[axis] - first)
        band = Region(start, tuple(count if i == axis else n for i, n in enumerate(region.shape)))
        yield from split_region(band, itemsize, limit)


def bands(shape: Sequence[int], itemsize: int, chunks: Sequence[int], limit: int) -> Iterator[Region]:
    """Regions that cover an array stored in chunks: rows of chunks of at most `limit` bytes, else single chunks.

    >>> [band.shape for band in bands((5, 6), itemsize=1, chunks=(2, 3), limit=12)]
    [(2, 6), (2, 6), (1, 6)]
    """
    nbytes = math.prod(shape) * itemsize
    if not shape or nbytes <= limit:
        yield Region.whole(shape)
        return
    row = nbytes // shape[0] * chunks[0]
    steps = (chunks[0] * max(limit // max(row, 1), 1), *(shape[1:] if row <= limit else chunks[1:]))
    counts = [-(-n // step) for n, step in zip(shape, steps, strict=True)]
    for index in np.ndindex(*counts):
        start = tuple(i * step for i, step in zip(index, steps, strict=True))
        ends = [min(a + step, n) for a, step, n in zip(start, steps, shape, strict=True)]
        yield Region(start, tuple(b - a for a, b in zip(start, ends, strict=True)))


@lru_cache(maxsize=256)
def rows_of(whole: Region, parts: tuple[Region, ...]) -> tuple[tuple[tuple[slice, ...], int, tuple[int, ...]], ...]:
    """The rows of parts that fill a region: (slices of the row, its axis, its parts); empty if they do not fill it.

    Assembling a row takes one call instead of one for each part.

    >>> rows_of(Region((0, 0), (4, 6)), (Region((0, 0), (4, 3)), Region((0, 3), (4, 3))))
    (((slice(0, 4, None), slice(None, None, None)), 1, (0, 1)),)
    """
    shape, outer = parts[0].shape, whole.shape
    places = [part.within(whole).start for part in parts]
    on_grid = all(
        part.shape == shape
        and all(n > 0 and 0 <= a <= m - n and a % n == 0 for a, n, m in zip(at, shape, outer, strict=True))
        for part, at in zip(parts, places, strict=True)
    )
    if shape == outer or not on_grid or len(set(places)) < len(places) or len(places) * parts[0].size != whole.size:
        return ()
    axis = max(i for i, (n, m) in enumerate(zip(shape, outer, strict=True)) if n != m)
    count = outer[axis] // shape[axis]
    order = sorted(range(len(parts)), key=places.__getitem__)
    found: list[tuple[tuple[slice, ...], int, tuple[int, ...]]] = []
    for first in range(0, len(order), count):
        row = tuple(order[first : first + count])
        at = enumerate(zip(places[row[0]], shape, strict=True))
        found.append((tuple(slice(None) if i == axis else slice(a, a + n) for i, (a, n) in at), axis, row))
    return tuple(found)


def touched_blocks(outer: Sequence[int], inner: Region, itemsize: int, block: int) -> list[tuple[int, int]]:
    """The ranges [first, last) of blocks of a C-order array of shape `outer` that contain bytes of `inner`.

    >>> touched_blocks((8, 4), Region((6, 0), (2, 4)), itemsize=1, block=8)
    [(3, 4)]
    """
    if inner.size == 0:
        return []
    # A run is contiguous: the last axes that are complete, and one more.
    axis = len(outer)
    run = itemsize
    while axis and inner.shape[axis - 1] == outer[axis - 1]:
        axis -= 1
        run *= outer[axis]
    starts = np.zeros(1, dtype=np.int64)
    if axis:
        axis -= 1
        starts += inner.start[axis] * run
        length = run * inner.shape[axis]
        stride = run * outer[axis]
        for a, n, m in zip(inner.start[:axis][::-1], inner.shape[:axis][::-1], outer[:axis][::-1], strict=True):
            starts = ((np.arange(a, a + n) * stride)[:, None] + starts[None, :]).reshape(-1)
            stride *= m
    else:
        length = run
    firsts, lasts = starts // block, (starts + length - 1) // block + 1
    if starts.size == 1 or int(np.diff(starts).max()) <= block:  # no block is between two runs
        return [(int(firsts[0]), int(lasts[-1]))]
    ranges: list[tuple[int, int]] = []
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
        else:
            ranges.append((first, last))
    return ranges


def is_partition(shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Whether the regions fill an array of `shape` exactly once, as the cells of a grid."""
    if 0 in shape or len(regions) == 1:
        return list(regions) == [Region.whole(shape)]
    if not regions or any(0 in r.shape for r in regions):
        return False
    for axis, extent in enumerate(shape):
        edges = sorted({r.start[axis] for r in regions})
        following = dict(zip(edges, [*edges[1:], extent], strict=True))
        if edges[:1] != [0] or any(r.start[axis] + r.shape[axis] != following[r.start[axis]] for r in regions):
            return False
    # Cells of one grid with different starts cannot overlap, so if there are enough of them they fill it.
    cells = math.prod(len({r.start[axis] for r in regions}) for axis in range(len(shape)))
    return len({r.start for r in regions}) == len(regions) == cells
