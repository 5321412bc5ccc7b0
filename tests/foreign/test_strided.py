"""Arrays whose elements are anywhere in a file: the name of their place, and every region of every layout."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep.foreign import strided
from shardkeep.foreign.strided import STRIDED, StridedArray, StridedPlace, read_strided, span_of
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import ForeignArray, StoredArray
from shardkeep.stores.local.store import LocalStore


class Memory:
    def __init__(self, array: np.ndarray) -> None:
        self.raw, self.most = array.reshape(-1).view(np.uint8), 0

    def read_into(self, offset: int, buffer: np.ndarray) -> None:
        assert offset >= 0
        assert offset + buffer.size <= self.raw.size
        self.most = max(self.most, buffer.size)
        buffer[:] = self.raw[offset : offset + buffer.size]


PLACES = [
    StridedPlace("model.pt", 64, 96, None, 0, (1, 6)),
    StridedPlace("a@b+c@.bin", 1 << 40, 7, 5, 3, (), "sc"),
    StridedPlace("x", 0, 0, None, 0, (0,), "n"),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.encode())
def test_a_place_has_a_name_that_gives_it_back(place: StridedPlace) -> None:
    assert StridedPlace.decode(place.encode()) == place


@pytest.mark.parametrize(
    "text", ["", "x", "x@1+2", "x@1+2@0@1@q", "x@-1+2@0@1@", "x@1+2@0@١@", "@1+2@0@1@", "x@1+2@0@1..2@"]
)
def test_other_names_are_no_places(text: str) -> None:
    with pytest.raises(ValueError, match="is not a place in a file|invalid literal"):
        StridedPlace.decode(text)


@given(st.data())
def test_any_region_of_any_layout(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    strides = tuple(data.draw(st.integers(0, 12)) for _ in shape)
    first = data.draw(st.integers(0, 7))
    base = np.arange(first + span_of(shape, strides) + 3, dtype=np.int32)
    whole = np.lib.stride_tricks.as_strided(base[first:], shape, [4 * stride for stride in strides])
    start = tuple(data.draw(st.integers(0, extent)) for extent in shape)
    region = Region(start, tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True)))
    found = read_strided(Memory(base), base.dtype, first, strides, region)
    np.testing.assert_array_equal(found, whole[region.slices])
    assert found.flags.c_contiguous


def test_parts_far_apart_are_read_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more at once than a limit, however large the array is."""
    monkeypatch.setattr(strided, "_AT_ONCE", 256)
    base = np.arange(64 * 50, dtype=np.float32)
    memory = Memory(base)
    found = read_strided(memory, base.dtype, 0, (1, 64), Region((3, 1), (40, 48)))
    np.testing.assert_array_equal(found, base.reshape(50, 64).T[3:43, 1:49])
    assert memory.most <= 256


def array_at(path: Path, place: StridedPlace, shape: tuple[int, ...], dtype: str = "int32") -> StridedArray:
    leaf = StoredArray(("w",), ArraySpec(shape, np.dtype(dtype)), (), ForeignArray(place.encode(), STRIDED))
    return StridedArray(LocalStore(str(path)), leaf)


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (StridedPlace("f", 0, 16, None, 0, (1,)), (2, 2), "does not have one stride per axis"),
        (StridedPlace("f", 0, 16, None, 1, (1,)), (4,), "reaches beyond its bytes"),
        (StridedPlace("f", 0, 16, None, 0, (1,), "c"), (4,), "conjugated or negated"),
    ],
)
def test_a_place_that_does_not_fit_is_damage(
    place: StridedPlace, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(shardkeep.IntegrityError, match=f"leaf 'w': .*{message}"):
        array_at(tmp_path, place, shape)


@pytest.mark.parametrize("text", ["../x@0+16@0@1@", "/etc/passwd@0+16@0@1@", "..@0+16@0@1@", "a/..@0+16@0@1@"])
def test_no_place_is_outside_the_checkpoint(text: str) -> None:
    with pytest.raises(shardkeep.IntegrityError, match="points outside the checkpoint"):
        StridedPlace.decode(text)


def test_a_file_that_is_missing_or_too_short_is_damage(tmp_path: Path) -> None:
    array = array_at(tmp_path, StridedPlace("f", 8, 16, None, 0, (1,)), (4,))
    with pytest.raises(shardkeep.MissingDataError, match="leaf 'w': .*f is missing"):
        array.read(Region((0,), (4,)))
    (tmp_path / "f").write_bytes(bytes(20))
    assert array.find_damage({"f": 20}) is not None
    assert array.find_damage({"f": 24}) is None
    for read in (array.check, lambda: array.read(Region((0,), (4,)))):
        with pytest.raises(shardkeep.IntegrityError, match="leaf 'w'"):
            read()


def test_chunks_are_bands_along_the_longest_stride(tmp_path: Path) -> None:
    array = array_at(tmp_path, StridedPlace("f", 0, 1 << 40, None, 0, (1, 1000)), (1000, 100_000))
    assert array.chunks == (1000, 1048)
    assert array_at(tmp_path, StridedPlace("f", 0, 0, None, 0, (1, 1)), (0, 3)).chunks == (1, 3)
