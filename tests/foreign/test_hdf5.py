"""HDF5 as h5py writes it, found as h5py finds it; what is refused is in test_keras.py."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from foreign.test_zips import Memory
from shardkeep.foreign.flat import After, read_region
from shardkeep.foreign.hdf5 import Hdf5, read_chunks
from shardkeep.foreign.windows import FileWindow
from shardkeep.model.arrays import Region
from support import assert_same

FIXTURES = Path(__file__).parents[1] / "fixtures" / "keras"
ARRAYS = {
    "a": np.arange(7, dtype=np.int64),
    "g/b": np.ones((3, 0, 2), np.uint8),
    "g/h/c": np.array(2.5),
    "g/h/d": np.arange(6, dtype=">f8").reshape(2, 3),
    "g/e": np.array([True, False]),
}


def _read(data: bytes) -> dict[str, np.ndarray]:
    window = FileWindow(Memory(data))
    found: dict[str, np.ndarray] = {}
    for path, dataset in Hdf5(window).find():
        assert Hdf5(window).dataset(dataset.header) == dataset
        whole = Region.whole(dataset.spec.shape)
        if dataset.chunk is None:
            found["/".join(path)] = read_region(After(window, dataset.offset), dataset.spec, whole)
        else:
            found["/".join(path)] = read_chunks(window, dataset, whole)
    return found


@pytest.mark.parametrize("libver", ["earliest", "v108", "v110", "latest"])
def test_arrays_are_found_as_h5py_writes_them(libver: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f", "w", libver=libver) as file:
        for name, array in ARRAYS.items():
            file[name] = array
    found = _read((tmp_path / "f").read_bytes())
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert_same(found[name], array.astype(array.dtype.newbyteorder("=")))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": 9},
        {"shuffle": True},
        {"fletcher32": True},
        {"compression": 1, "shuffle": True, "fletcher32": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(10,), (7, 5), (100, 3, 2)], ids=str)
def test_chunks_are_put_together(options: dict[str, Any], shape: tuple[int, ...], tmp_path: Path) -> None:
    data = np.random.default_rng(2).integers(0, 9, shape).astype(np.float32)
    with h5py.File(tmp_path / "f", "w") as file:
        file.create_dataset("w", data=data, chunks=tuple(min(n, 3) for n in shape), **options)
    assert_same(_read((tmp_path / "f").read_bytes())["w"], data)


def test_many_members_and_long_headers_are_in_several_places(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f", "w") as file:
        for number in range(700):
            file[f"group/{number}"] = np.full(2, number)
        for number in range(60):
            file["group/0"].attrs[f"attribute {number}"] = "x" * 300
    found = _read((tmp_path / "f").read_bytes())
    assert [int(found[f"group/{number}"][0]) for number in range(700)] == list(range(700))


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_every_cut_is_damage(libver: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f", "w", libver=libver) as file:
        for name, array in ARRAYS.items():
            file[name] = array
    data = (tmp_path / "f").read_bytes()
    sizes = {name: array.nbytes for name, array in _read(data).items()}
    for end in range(0, len(data) - 1, 37):
        try:
            found = _read(data[:end])
        except ValueError:
            continue
        assert {name: array.nbytes for name, array in found.items()} == sizes  # what was cut off is not used


def test_a_changed_byte_of_a_newer_description_does_not_match_its_checksum(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f", "w", libver="latest") as file:
        file["w"] = np.arange(5)
    data = (tmp_path / "f").read_bytes()
    ((path, dataset),) = Hdf5(FileWindow(Memory(data))).find()
    for at in (20, 45, dataset.header + 10, dataset.header + 40):
        with pytest.raises(ValueError, match="checksum"):
            _read(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert path == ("w",)


def test_keras_files_are_read_as_h5py_reads_them() -> None:
    for fixture in sorted(FIXTURES.glob("*.weights.h5")):
        found = _read(fixture.read_bytes())
        with h5py.File(fixture) as file:
            for name, array in found.items():
                assert array.tobytes() == file[name][()].tobytes()
