"""Checksums and messages of HDF5, compared with what h5py writes and with published values."""

from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest

from foreign.test_zips import Memory
from shardkeep.foreign.base import UnreadableError
from shardkeep.foreign.hdf5 import Hdf5, UnreadDataset
from shardkeep.foreign.hdf5types import fletcher32, lookup3, parse_filters, parse_link
from shardkeep.foreign.windows import FileWindow

DTYPES = ["bool", *(f"{order}{kind}" for order in "<>" for kind in ("i1", "i2", "u4", "i8", "f2", "f4", "f8"))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_dtypes_and_shapes_are_those_of_h5py(dtype: str, libver: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f", "w", libver=libver) as file:
        file["w"] = np.zeros((2, 1, 3), dtype)
    ((_, found),) = Hdf5(FileWindow(Memory((tmp_path / "f").read_bytes()))).find()
    assert (found.spec.dtype, found.spec.shape) == (np.dtype(dtype), (2, 1, 3))


@pytest.mark.parametrize("text", ["bfloat16", np.bytes_("bfloat16")], ids=["variable", "fixed"])
def test_raw_bytes_are_bfloat16_where_keras_notes_it(text: Any, tmp_path: Path) -> None:
    for noted in (text, "float16", None):
        with h5py.File(tmp_path / "f", "w") as file:
            file["w"] = np.zeros(3, ml_dtypes.bfloat16)
            if noted is not None:
                file["w"].attrs["dtype"] = noted
        find = Hdf5(FileWindow(Memory((tmp_path / "f").read_bytes()))).find
        if noted is text:
            assert find()[0][1].spec.dtype == ml_dtypes.bfloat16
        else:
            assert find() == [(("w",), UnreadDataset("it holds raw bytes, not numbers that JAX supports"))]


def test_checksums_are_the_published_ones() -> None:
    """Those of Bob Jenkins's lookup3.c, and of the Fletcher-32 that HDF5 has."""
    assert lookup3(b"") == 0xDEADBEEF
    assert lookup3(b"Four score and seven years ago") == 0x17770551
    assert fletcher32(b"") == 0
    assert fletcher32(b"abcdef") == _fletcher(b"abcdef")
    data = np.random.default_rng(4).bytes(200_001)
    assert fletcher32(data) == _fletcher(data)
    assert fletcher32(b"\xff" * 1000) == _fletcher(b"\xff" * 1000)


def _fletcher(data: bytes) -> int:
    """The same, word by word."""
    first = second = 0
    for at in range(0, len(data), 2):
        first += int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big")
        first = (first & 0xFFFF) + (first >> 16)
        second += first
        second = (second & 0xFFFF) + (second >> 16)
    return second << 16 | first


def test_damaged_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline is damaged"):
        parse_filters(b"\x07\x01")
    with pytest.raises(ValueError, match="link is damaged"):
        parse_link(b"\x01\x00\x09abc")
    with pytest.raises(UnreadableError, match="'abc' is a link"):
        parse_link(b"\x01\x08\x40\x03abc" + bytes(8))
