"""Weights of Keras 3: as h5py writes them, and as Keras wrote them (tests/fixtures/keras, `make test-keras`)."""

import zipfile
from pathlib import Path
from typing import Any

import h5py
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Place, _alone, place  # noqa: F401
from foreign.conformance import FileReaderTests, arrays
from shardkeep.foreign.keras import KerasReader
from shardkeep.model.arrays import Region
from shardkeep.stores.local.store import LocalStore
from support import assert_same, pattern

FIXTURES = Path(__file__).parents[1] / "fixtures" / "keras"
PLAIN = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32")


class TestWeights(FileReaderTests):
    name = "keras"
    dtypes = (*PLAIN, "bfloat16")
    options: dict[str, Any] = {}

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        return write_weights(path / "m.weights.h5", arrays, **self.options)


class TestCompressedWeights(TestWeights):
    options = {"compression": "gzip", "shuffle": True, "fletcher32": True}


class TestNewestHdf5(TestWeights):
    """With the newest version of the format, which is another one for groups and descriptions."""

    dtypes = ("bool", "int8", "uint16", "float16", "float32", "bfloat16")  # of more than eight members it has a heap

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        return write_weights(path / "m.weights.h5", arrays, libver="latest")


class TestArchive(TestWeights):
    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        inside = write_weights(path / "weights", arrays, **self.options)
        with zipfile.ZipFile(path / "m.keras", "w") as archive:
            archive.writestr("metadata.json", "{}")
            archive.writestr("config.json", '{"module": "os", "class_name": "system"}')
            archive.write(inside, "model.weights.h5")
        inside.unlink()
        return path / "m.keras"


class TestCompressedWeightsInAnArchive(TestArchive):
    options = {"compression": "gzip", "chunks": True}


def write_weights(path: Path, arrays: dict[str, np.ndarray], libver: Any = None, **options: Any) -> Path:
    """Write arrays, by dotted key, as Keras does."""
    with h5py.File(path, "w", libver=libver) as file:
        file.create_group("vars")  # Keras makes one for each layer, with or without weights
        for key, array in arrays.items():
            made = file.create_dataset(
                key.replace(".", "/"), data=array, **(options if array.size and array.ndim else {})
            )
            if array.dtype == ml_dtypes.bfloat16:
                made.attrs["dtype"] = "bfloat16"
    return path


def test_arrays_in_one_run_are_pieces_of_the_file(tmp_path: Path) -> None:
    leaves = shardkeep.inspect(write_weights(tmp_path / "a.weights.h5", arrays())).leaves
    assert {key: leaf.kind for key, leaf in leaves.items()} == {
        "b": "jax", "empty": "jax", "layers/0/w": "jax", "layers/1/w": "jax", "scalar": "jax",
    }  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"chunks": (2, 3, 2), "compression": "gzip"}, {"dtype": ">f4"}, {"dtype": ">i2"}], ids=str
)
def test_any_region_of_an_array_that_does_not_lie_in_one_run(options: dict[str, Any], tmp_path: Path) -> None:
    data = np.arange(5 * 4 * 3, dtype=options.pop("dtype", "f4")).reshape(5, 4, 3)
    path = write_weights(tmp_path / "a.weights.h5", {"w@x": data}, **options)
    (leaf,) = shardkeep.inspect(path).trees[""].arrays
    assert leaf.kind == "keras"
    array = KerasReader().open(LocalStore(str(tmp_path)), leaf)
    for start, shape in (
        ((0, 0, 0), (5, 4, 3)),
        ((1, 2, 0), (3, 1, 3)),
        ((4, 3, 2), (1, 1, 1)),
        ((2, 0, 0), (0, 4, 3)),
    ):
        found = array.read(Region(start, shape))
        expected = data[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        assert_same(found, np.array(expected, expected.dtype.newbyteorder("="), order="C"))
        assert found.flags.writeable
    array.check()


@pytest.mark.parametrize("damaged", ["fletcher32", "gzip"])
def test_damage_in_a_chunk_is_found(damaged: str, tmp_path: Path) -> None:
    options = {"fletcher32": True} if damaged == "fletcher32" else {"compression": "gzip"}
    data = pattern("float32", (8, 4))
    path = write_weights(tmp_path / "a.weights.h5", {"w": data, "other": np.ones(3, np.float32)}, **options)
    with h5py.File(path) as file:
        chunk = file["w"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset + 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        shardkeep.IntegrityError,
        match=r"leaf 'w': .*a\.weights\.h5.*chunk at \(0, 0\) (does not match|cannot be|is cut)",
    ):
        shardkeep.load(path)
    (problem,) = shardkeep.verify(path).problems
    assert problem.leaf == "w"
    assert_same(shardkeep.load(path, include="other"), {"other": jnp.ones(3)})


def test_verify_compares_the_crc_of_an_archive(tmp_path: Path) -> None:
    path = TestArchive().write(tmp_path, arrays())
    assert shardkeep.verify(path).ok
    content = bytearray(path.read_bytes())
    content[content.index(arrays()["layers.1.w"].tobytes())] ^= 1
    path.write_bytes(content)
    (problem,) = shardkeep.verify(path).problems
    assert "does not match its CRC" in problem.message


def _linked(file: Any, how: str, outside: Path) -> None:
    if how == "external link":
        file["w"] = h5py.ExternalLink(str(outside), "w")
    elif how == "soft link":
        file["v"] = np.ones(3)
        file["w"] = h5py.SoftLink("/v")
    elif how == "external storage":
        file.create_dataset("w", (8,), "u1", external=[(str(outside), 0, 8)])
    elif how == "virtual dataset":
        layout = h5py.VirtualLayout((8,), "u1")
        layout[:] = h5py.VirtualSource(str(outside), "w", (8,))
        file.create_virtual_dataset("w", layout)


@pytest.mark.parametrize("how", ["external link", "soft link", "external storage", "virtual dataset"])
def test_nothing_outside_the_file_is_read(how: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside.h5"
    with h5py.File(outside, "w") as file:
        file["w"] = np.frombuffer(b"s3cret!!", np.uint8)
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        _linked(file, how, outside)
    (tmp_path / "renamed").write_bytes((tmp_path / "a.weights.h5").read_bytes())
    for name in ("a.weights.h5", "renamed"):
        with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"'w'.*(is a link|its data is in external files)"):
            shardkeep.load(tmp_path / name, include="w")


def _text(file: Any) -> None:
    file["w"] = "text"


def _compound(file: Any) -> None:
    file["w"] = np.zeros(3, [("x", "f4")])


def _reference(file: Any) -> None:
    file["v"] = np.zeros(3)
    file["w"] = file["v"].ref


def _opaque(file: Any) -> None:
    file["w"] = np.zeros(3, "V2")


def _null(file: Any) -> None:
    file["w"] = h5py.Empty("f4")


def _plugin(file: Any) -> None:
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk((3,))
    made.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)
    h5py.h5d.create(file.id, b"w", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((3,)), made)


def _deep(file: Any) -> None:
    file["/".join("w" * 60)] = np.zeros(3)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (_text, "which JAX does not support"),
        (_compound, "which JAX does not support"),
        (_reference, "which JAX does not support"),
        (_opaque, "not numbers that JAX supports"),
        (_null, "without a shape"),
        (_plugin, "compressed with HDF5's filter 32015"),
    ],
)
def test_what_is_not_read_is_named_and_leaves_the_rest_readable(write: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.weights.h5"
    with h5py.File(path, "w") as file:
        file["good"] = np.ones(3, np.float32)
        write(file)
    assert_same(shardkeep.load(path, include="good"), {"good": jnp.ones(3)})
    assert shardkeep.inspect(path).leaves["w"].kind == "unreadable"
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=rf"leaf 'w' of .*a\.weights\.h5 cannot .*{says}"):
        shardkeep.load(path)
    (problem,) = shardkeep.verify(path).problems
    assert (problem.leaf, problem.file) == ("w", str(path))


def test_groups_without_an_end_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        _deep(file)
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"a\.weights\.h5: .*more than 50 levels"):
        shardkeep.load(tmp_path / "a.weights.h5")


def test_groups_in_a_circle_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        file["g/w"] = np.zeros(3)
        file["g/again"] = file["g"]
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"has two names, or contains itself"):
        shardkeep.load(tmp_path / "a.weights.h5")


def test_arrays_that_were_never_written_are_damage(tmp_path: Path) -> None:
    """HDF5 gives their fill value, however large they are."""
    for options in ({}, {"chunks": (1 << 10,)}):
        with h5py.File(tmp_path / "a.weights.h5", "w") as file:
            file.create_dataset("w", (1 << 40,), "f4", **options)
        with pytest.raises(shardkeep.IntegrityError, match=r"a\.weights\.h5 .*'w': it(s data does not have| has 0 of)"):
            shardkeep.load(tmp_path / "a.weights.h5")


def test_archives_that_are_not_those_of_keras_3_are_refused(tmp_path: Path) -> None:
    inside = write_weights(tmp_path / "model.weights.h5", arrays())
    for name, method, says in (
        ("other.h5", zipfile.ZIP_STORED, "holds no"),
        ("model.weights.h5", zipfile.ZIP_DEFLATED, "unzip"),
    ):
        with zipfile.ZipFile(tmp_path / "m.keras", "w", method) as archive:
            archive.write(inside, name)
        with pytest.raises(shardkeep.CheckpointNotFoundError, match=rf"m\.keras: .*{says}"):
            shardkeep.load(tmp_path / "m.keras")


def test_weights_in_a_bucket_are_read_by_ranges(place: Place, tmp_path: Path) -> None:
    for made in (TestWeights(), TestCompressedWeightsInAnArchive()):
        path = made.write(tmp_path, arrays())
        place.put(f"run/{path.name}", path.read_bytes())
        found = shardkeep.load(f"{place.url}/run/{path.name}", include="layers/1")
        assert_same(found, {"layers": {"1": {"w": jnp.asarray(arrays()["layers.1.w"])}}})
        assert shardkeep.verify(f"{place.url}/run/{path.name}").ok


def test_a_model_is_loaded_into_a_template_of_its_weights(tmp_path: Path) -> None:
    kernel, bias = pattern("float32", (8, 4)), pattern("float32", (4,))
    path = write_weights(tmp_path / "a.weights.h5", {"layers.dense.vars.0": kernel, "layers.dense.vars.1": bias})
    template = {"layers": {"dense": {"vars": [np.zeros((8, 4), np.float32), np.zeros(4, np.float32)]}}}
    assert_same(shardkeep.load(path, template=template), {"layers": {"dense": {"vars": [kernel, bias]}}})


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*.weights.h5")), ids=lambda path: path.name)
def test_what_keras_wrote_is_read_as_h5py_reads_it(fixture: Path) -> None:
    found = shardkeep.inspect(fixture).leaves
    with h5py.File(fixture) as file:
        names: list[str] = []
        file.visititems(lambda name, one: names.append(name) if isinstance(one, h5py.Dataset) else None)
        assert sorted(found) == sorted(names)
        for name in names:
            whole = file[name][()]
            mine = shardkeep.load(fixture, include=f"^{name}$", template=None)
            for part in name.split("/"):
                mine = mine[part]
            assert np.asarray(mine).tobytes() == np.asarray(whole).tobytes()
    archive = fixture.with_name(fixture.name.replace(".weights.h5", ".keras"))
    if archive.exists():
        assert_same(shardkeep.load(archive), shardkeep.load(fixture))
    assert shardkeep.verify(fixture).ok
