"""Data goes through functions in small steps, in arrays that are the functions' own."""

import numpy as np
import pytest

from shardkeep import RemapError
from shardkeep.remap.moving import change_into, changed, window_of


def test_functions_get_parts_that_they_may_write_to() -> None:
    data = np.arange(3 << 20, dtype=np.float32).reshape(3, -1)
    data.flags.writeable = False
    sizes: list[int] = []

    def double(part: np.ndarray) -> np.ndarray:
        sizes.append(part.nbytes)
        part *= 2
        return part

    window = np.zeros_like(data).T[::1].T
    change_into(window, data, (double, np.negative))
    assert np.array_equal(window, -2 * data)
    assert max(sizes) <= 4 << 20
    assert len(sizes) == 3


def test_a_function_that_changes_the_form_is_refused() -> None:
    with pytest.raises(RemapError, match=r"returned float64\[2\] for an array of the shape \[2\], but int32"):
        changed(np.zeros(2, np.int32), (lambda a: a * 0.5,), np.dtype(np.int32))
    with pytest.raises(RemapError, match=r"returned int32\[1\] for an array of the shape \[2\]"):
        changed(np.zeros(2, np.int32), (lambda a: a[:1],), np.dtype(np.int32))


def test_a_window_outside_its_memory_is_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="buffer|strides"):
        window_of(np.zeros(8, np.float32), 6, (3,), (1,))
    scalar = window_of(np.zeros((), np.float32), 0, (), ())
    scalar[...] = 3
    assert scalar == 3
