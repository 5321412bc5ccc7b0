"""Regions of arrays that lie in one run: the right elements, and few bytes besides."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.foreign import flat
from shardkeep.foreign.flat import After, native, read_region
from shardkeep.model.arrays import ArraySpec, Region
from support import assert_same


class Bytes:
    """Bytes in memory that count how many are read."""

    def __init__(self, data: bytes) -> None:
        self.taken, self._data = 0, data

    def read_into(self, offset: int, buffer: np.ndarray) -> None:
        self.taken += buffer.size
        buffer[:] = np.frombuffer(self._data[offset : offset + buffer.size], np.uint8)


@given(st.data(), st.sampled_from([1, 40, 1 << 20]), st.booleans(), st.sampled_from(["<f4", ">f4", "i1"]))
def test_any_region_in_either_order(data: st.DataObject, most: int, fortran: bool, dtype: str) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4)))
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    region = Region(start, tuple(data.draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flat, "_MOST", most)
        source = After(Bytes(b"head" + array.tobytes("F" if fortran else "C")), 4)
        found = read_region(source, ArraySpec(shape, array.dtype), region, fortran)
    assert_same(found, np.array(array[region.slices], array.dtype.newbyteorder("="), order="C").reshape(region.shape))


@pytest.mark.parametrize(("region", "most"), [(Region((3, 0), (2, 1000)), 8000), (Region((0, 10), (10, 1)), 40_000)])
def test_little_is_read_besides(region: Region, most: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(flat, "_MOST", 1 << 20)
    source = Bytes(bytes(4 * 1000 * 100))
    read_region(source, ArraySpec((100, 1000), np.dtype("f4")), region)
    assert source.taken <= most


def test_numbers_stay_the_same_in_this_machines_byte_order() -> None:
    assert_same(native(np.array([1, 2], ">i4")), np.array([1, 2], np.int32))
