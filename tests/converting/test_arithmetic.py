"""Numbers and differences of arrays of every dtype."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardkeep.converting.arithmetic import Numbers, difference_of, numbers_of
from support import pattern

EXTENDED = [
    name
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type) and issubclass(getattr(ml_dtypes, name), np.generic)
]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
PLAIN = ["bool", "float16", "float32", "float64", "complex64", "complex128", *INTEGERS]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if name in EXTENDED else np.dtype(name)


@pytest.mark.parametrize("name", [*PLAIN, *EXTENDED, "datetime64[ns]", "timedelta64[s]"])
def test_every_dtype_can_be_measured_and_compared(name: str) -> None:
    a, b = pattern(dtype_of(name), (70_000,)), pattern(dtype_of(name), (70_000,), 1)
    numbers = numbers_of(a)
    assert numbers.count == 70_000
    assert numbers.nan + numbers.inf + numbers.finite == numbers.count
    numbers.flags(a.dtype)
    same = difference_of(a, a.copy())
    assert (same.changed, same.maximum, same.same_bits) == (0, 0, True)
    changed = difference_of(a, b)
    assert changed.changed > 0
    assert not changed.same_bits


@given(hnp.arrays(np.float64, hnp.array_shapes(max_dims=2), elements=st.floats(-1e6, 1e6)))
def test_numbers_are_those_of_numpy(array: np.ndarray[Any, Any]) -> None:
    numbers = Numbers()
    for row in array:  # merged, in as many parts as there are rows
        numbers.merge(numbers_of(np.atleast_1d(row)))
    assert numbers.minimum == array.min()
    assert numbers.maximum == array.max()
    assert numbers.mean == pytest.approx(array.mean(), rel=1e-9, abs=1e-9)
    assert numbers.deviation == pytest.approx(array.std(), rel=1e-6, abs=1e-6)
    assert numbers.zero == (array == 0).sum()


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    numbers = numbers_of(np.array([1.0, np.nan, np.inf, -np.inf, 3.0], np.float32))
    assert (numbers.nan, numbers.inf, numbers.finite, numbers.mean) == (1, 2, 2, 2.0)
    assert numbers.flags(np.dtype(np.float32)) == ["nan", "inf"]


@pytest.mark.parametrize(
    ("values", "dtype", "flags"),
    [
        ([0, 0, 0], "float32", ["all_zero"]),
        ([0], "float32", []),
        ([2, 2], "float32", ["constant"]),
        ([2, 2], "int32", ["constant"]),
        ([math.nan, math.nan], "bfloat16", ["all_nan"]),
        ([1, 1e9], "float32", ["huge"]),
        ([1, 1e7], "float32", []),
        ([1, 40_000], "float16", ["huge"]),
        ([1, 448], "float8_e4m3fn", []),
        ([1, 1e-40], "float32", ["denormal"]),
        ([1, 10**9], "int64", []),
        ([1, 2, 3], "float32", []),
    ],
)
def test_what_looks_wrong_is_flagged(values: list[float], dtype: str, flags: list[str]) -> None:
    array = np.array(values).astype(dtype_of(dtype))
    assert numbers_of(array).flags(array.dtype) == flags


def test_extreme_integers_are_exact() -> None:
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    numbers = numbers_of(np.array([low, high]))
    assert (numbers.minimum, numbers.maximum) == (low, high)
    assert difference_of(np.array([low, 1]), np.array([high, 1])).maximum == 2**64 - 1
    assert difference_of(np.array([2**64 - 1], np.uint64), np.array([1], np.uint64)).maximum == 2**64 - 2


def test_nan_and_infinity_are_compared_with_sense() -> None:
    a = np.array([np.nan, np.nan, np.inf, np.inf, 1.0], np.float32)
    b = np.array([np.nan, 1.0, np.inf, -np.inf, 1.5], np.float32)
    found = difference_of(a, b)
    assert (found.count, found.changed, found.nan_a, found.nan_b) == (5, 3, 2, 1)
    assert found.maximum == math.inf
    assert difference_of(a[-1:], b[-1:]).maximum == 0.5


def test_the_sign_of_zero_is_a_bit_and_no_change() -> None:
    found = difference_of(np.array([0.0]), np.array([-0.0]))
    assert (found.changed, found.same_bits) == (0, False)


def test_other_dtypes_are_compared_by_value() -> None:
    a = np.linspace(0, 1, 100, dtype=np.float32)
    found = difference_of(a, a.astype(ml_dtypes.bfloat16))
    assert 0 < found.maximum < 0.01
    assert difference_of(np.arange(5), np.arange(5.0)).changed == 0
