"""Statistics and differences of arrays of any dtype, in float64 (integers exactly), run by run and merged."""

import math
from dataclasses import dataclass

import numpy as np

from shardkeep.converting.blocks import Array, runs_of
from shardkeep.model.arrays import DType, kind_of, limits_of

_HUGE = 1e8  # absolute values above are flagged: weights and moments of a healthy run are far smaller
_DENORMALS = 0.01  # the share of denormal values above which an array is flagged


def widened(run: Array) -> Array:
    """Values as float64, or complex128 if complex: exact for every dtype but 64-bit integers. Times become integers."""
    if run.dtype.kind in "mM":
        return run.view(np.int64).astype(np.float64)
    return run.astype(np.complex128 if kind_of(run.dtype) == "complex" else np.float64)


def _integers(run: Array) -> Array:
    """Integers that NumPy can compare and subtract: booleans and those of ml_dtypes become int64."""
    if run.dtype.kind in "mM":
        return run.view(np.int64)
    return run if run.dtype.kind in "iu" and run.dtype.isbuiltin == 1 else run.astype(np.int64)


def is_exact(dtype: DType) -> bool:
    """Whether values are compared as integers."""
    return kind_of(dtype) in ("int", "bool") or dtype.kind in "mM"


@dataclass
class Numbers:
    """Statistics of the values seen so far. All but the counts are of finite values (if complex, of magnitudes)."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    zero: int = 0
    denormal: int = 0
    minimum: float | int | None = None
    maximum: float | int | None = None
    finite: int = 0
    mean: float = 0.0
    squares: float = 0.0  # the sum of squared distances from the mean

    @property
    def deviation(self) -> float | None:
        return math.sqrt(self.squares / self.finite) if self.finite else None

    def merge(self, other: "Numbers") -> None:
        """Merge in the statistics of other values (Chan's formula, which is numerically stable)."""
        for name in ("count", "nan", "inf", "zero", "denormal"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if not other.finite:
            return
        assert other.minimum is not None
        assert other.maximum is not None
        if self.minimum is None or self.maximum is None:
            self.minimum, self.maximum = other.minimum, other.maximum
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        total = self.finite + other.finite
        apart = other.mean - self.mean
        self.mean += apart * other.finite / total
        self.squares += other.squares + apart * apart * self.finite * other.finite / total
        self.finite = total

    def flags(self, dtype: DType) -> list[str]:
        """The flags of an array that looks wrong: all_nan or nan, inf, all_zero or constant, huge, denormal."""
        found: list[str] = []
        if self.nan:
            found.append("all_nan" if self.nan == self.count else "nan")
        if self.inf:
            found.append("inf")
        if self.count > 1 and self.zero == self.count:
            found.append("all_zero")
        elif self.count > 1 and self.finite == self.count and self.minimum == self.maximum:
            found.append("constant")
        # Not for 8-bit floats and narrower: quantization uses their full range on purpose.
        if kind_of(dtype) in ("float", "complex") and dtype.itemsize > 1 and self.finite:
            assert self.minimum is not None
            assert self.maximum is not None
            if max(abs(self.minimum), abs(self.maximum)) >= min(_HUGE, float(limits_of(dtype).max) / 2):
                found.append("huge")
            if self.denormal > _DENORMALS * self.count:
                found.append("denormal")
        return found


def numbers_of(array: Array) -> Numbers:
    """The statistics of an array."""
    found = Numbers()
    for run in runs_of(array):
        found.merge(_numbers_of_run(run))
    return found


def _numbers_of_run(run: Array) -> Numbers:
    found = Numbers(count=run.size)
    with np.errstate(all="ignore"):
        wide = widened(run)
        if np.iscomplexobj(wide):
            wide = np.abs(wide)
        if run.dtype.kind in "mM":
            wide[np.isnat(run)] = np.nan
        finite = np.isfinite(wide)
        found.finite = int(np.count_nonzero(finite))
        values = wide
        if found.finite < found.count:
            found.nan = int(np.count_nonzero(np.isnan(wide)))
            found.inf = found.count - found.nan - found.finite
            values = wide[finite]
        if not found.finite:
            return found
        found.zero = found.finite - int(np.count_nonzero(values))
        found.minimum, found.maximum = float(values.min()), float(values.max())
        if is_exact(run.dtype):
            exact = _integers(run)[finite]
            found.minimum, found.maximum = int(exact.min()), int(exact.max())
        elif run.dtype.name != "float8_e8m0fnu":  # has no zero and no denormals
            tiny = float(limits_of(run.dtype).smallest_normal)
            found.denormal = int(np.count_nonzero(np.abs(values) < tiny)) - found.zero
        found.mean = float(values.mean())
        apart = values - found.mean
        found.squares = float(np.square(apart, out=apart).sum())  # not np.dot, which starts threads
    return found


@dataclass
class Difference:
    """How two arrays of the same shape differ. Two NaNs are equal here, and so are 0.0 and -0.0."""

    count: int = 0
    changed: int = 0
    maximum: float | int = 0  # of the absolute differences
    nan_a: int = 0
    nan_b: int = 0
    same_bits: bool = True

    def merge(self, other: "Difference") -> None:
        self.count += other.count
        self.changed += other.changed
        self.maximum = max(self.maximum, other.maximum)
        self.nan_a += other.nan_a
        self.nan_b += other.nan_b
        self.same_bits = self.same_bits and other.same_bits


def difference_of(a: Array, b: Array) -> Difference:
    """The Difference of two arrays of the same shape, whose dtypes may differ."""
    found = Difference()
    for one, other in zip(runs_of(a), runs_of(b), strict=True):
        found.merge(_difference_of_run(one, other))
    return found


def _difference_of_run(a: Array, b: Array) -> Difference:
    found = Difference(count=a.size)
    if a.dtype == b.dtype and is_exact(a.dtype):
        first, second = _integers(a), _integers(b)
        changed = first != second
        found.changed = int(np.count_nonzero(changed))
        if found.changed:
            found.maximum = _integer_distance(first[changed], second[changed])
        found.same_bits = found.changed == 0
        return found
    found.same_bits = a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))
    with np.errstate(all="ignore"):
        if found.same_bits:
            found.nan_a = found.nan_b = int(np.count_nonzero(np.isnan(a)))
            return found
        wide_a, wide_b = widened(a), widened(b)
        nan_a, nan_b = np.isnan(wide_a), np.isnan(wide_b)
        found.nan_a, found.nan_b = int(np.count_nonzero(nan_a)), int(np.count_nonzero(nan_b))
        changed = (wide_a != wide_b) & ~(nan_a & nan_b)
        found.changed = int(np.count_nonzero(changed))
        both = changed & ~nan_a & ~nan_b
        if both.any():
            found.maximum = float(np.abs(wide_a[both] - wide_b[both]).max())
    return found


def _integer_distance(a: Array, b: Array) -> int:
    """The exact maximum distance, which may need one bit more than the integers themselves."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    if a.dtype.kind == "u":
        return int((high - low).max())
    # In two's complement the difference modulo 2^64 is the distance, because the distance is never negative.
    return int((high.astype(np.int64).view(np.uint64) - low.astype(np.int64).view(np.uint64)).max())
