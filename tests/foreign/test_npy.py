"""The header of any array that NumPy writes says the same as NumPy; the rest is in test_numpy.py."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from foreign.test_zips import Memory
from shardkeep.foreign.npy import parse_npy
from shardkeep.foreign.windows import FileWindow

DTYPES = (
    npst.boolean_dtypes()
    | npst.integer_dtypes()
    | npst.unsigned_integer_dtypes()
    | npst.floating_dtypes(sizes=(16, 32, 64))
    | npst.complex_number_dtypes(sizes=(64, 128))
    | npst.datetime64_dtypes()
    | npst.unicode_string_dtypes(max_len=5)
)


@given(npst.arrays(DTYPES, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)), st.booleans())
def test_every_header_is_read_as_numpy_reads_it(array: Any, fortran: bool) -> None:
    made = io.BytesIO()
    np.save(made, np.asfortranarray(array) if fortran and array.ndim else array)
    data = made.getvalue()
    found = parse_npy(FileWindow(Memory(data)).read, len(data))
    assert (found.spec.shape, found.spec.dtype) == (array.shape, array.dtype)
    assert found.is_text == (array.dtype.kind in "US")
    again = np.frombuffer(data[found.start :], found.spec.dtype).reshape(
        array.shape, order="F" if found.fortran else "C"
    )
    assert again.tobytes() == array.tobytes()


def test_a_changed_byte_of_a_header_never_gives_another_size() -> None:
    made = io.BytesIO()
    np.save(made, np.arange(12, dtype=np.int16).reshape(3, 4))
    data = made.getvalue()
    for at in range(128):
        for changed in (data[at] ^ 1, 0, 0x39, 255):
            text = data[:at] + bytes([changed]) + data[at + 1 :]
            try:
                found = parse_npy(FileWindow(Memory(text)).read, len(text))
            except ValueError:
                continue
            assert found.start + found.spec.nbytes == len(text)


def test_the_size_of_the_file_must_be_that_of_the_array() -> None:
    made = io.BytesIO()
    np.save(made, np.arange(3))
    for data in (made.getvalue()[:-1], made.getvalue() + b"x"):
        with pytest.raises(ValueError, match="describes an array that ends at byte 152"):
            parse_npy(FileWindow(Memory(data)).read, len(data))
