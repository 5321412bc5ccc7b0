"""NumPy's files: written by NumPy, and changed."""

import io
import logging
import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from buckets.fixtures import Place, _alone, place  # noqa: F401
from foreign.conformance import FileReaderTests, arrays, nested
from shardkeep.cli.main import main
from shardkeep.foreign.numpy import NumpyReader
from shardkeep.model.arrays import Region
from shardkeep.stores.local.store import LocalStore
from support import assert_same, mesh_of, pattern

FIXTURES = Path(__file__).parents[1] / "fixtures" / "numpy"
PLAIN = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64")


class TestArchive(FileReaderTests):
    name = "numpy"
    dtypes = (*PLAIN, "bfloat16", "float8_e5m2")

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        np.savez(path / "state.npz", **arrays)
        return path / "state.npz"


class TestCompressedArchive(TestArchive):
    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        np.savez_compressed(path / "state.npz", **arrays)
        return path / "state.npz"


class TestArchiveWithSlashes(TestArchive):
    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        jnp.savez(path / "state.npz", **{key.replace(".", "/"): array for key, array in arrays.items()})
        return path / "state.npz"


class TestTurnedArchive(TestArchive):
    """In Fortran order, with the other byte order, compressed."""

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        def turned(array: np.ndarray) -> np.ndarray:
            swapped = array.astype(array.dtype.newbyteorder(">")) if array.dtype.isbuiltin == 1 else array
            return np.asfortranarray(swapped) if array.ndim else swapped

        np.savez_compressed(path / "state.npz", **{key: turned(array) for key, array in arrays.items()})
        return path / "state.npz"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">i2", "<V2"])
@pytest.mark.parametrize("compressed", [False, True, None])
def test_any_region_of_an_array_in_any_order(
    order: Any, dtype: str, compressed: bool | None, tmp_path: Path, rng: np.random.Generator, monkeypatch: Any
) -> None:
    monkeypatch.setattr("shardkeep.foreign.flat._MOST", 40)  # so that regions are read in several parts
    data = rng.integers(0, 200, (5, 4, 3)).astype(ml_dtypes.bfloat16 if dtype == "<V2" else dtype, order=order)
    path = tmp_path / ("a.npy" if compressed is None else "a.npz")
    np.save(path, data) if compressed is None else (np.savez_compressed if compressed else np.savez)(path, w=data)
    (leaf,) = shardkeep.inspect(path).trees[""].arrays
    assert leaf.spec.dtype == data.dtype.newbyteorder("=")
    if leaf.pieces:  # as it is in the file
        assert (order, dtype, compressed) in (("C", "<f4", None), ("C", "<V2", None))
        return
    array = NumpyReader().open(LocalStore(str(tmp_path)), leaf)
    for start in np.ndindex(5, 4, 3):
        shape = tuple(int(rng.integers(0, n - a + 1)) for a, n in zip(start, data.shape, strict=True))
        found = array.read(Region(start, shape))
        expected = data[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        assert_same(found, np.ascontiguousarray(expected).astype(leaf.spec.dtype))
        assert found.flags.c_contiguous
        assert found.flags.writeable
    array.check()


def test_a_single_array_is_a_tree_of_one_leaf(tmp_path: Path) -> None:
    for number, data in enumerate((pattern("float32", (8, 6)), np.array(2.5, np.float32), np.zeros((0, 3), np.int8))):
        for order in ("C", "F"):
            np.save(tmp_path / f"{number}.npy", np.asarray(data, order=order))  # type: ignore[call-overload]
            assert_same(shardkeep.load(tmp_path / f"{number}.npy"), jnp.asarray(data))
            assert shardkeep.verify(tmp_path / f"{number}.npy").ok
    (tmp_path / "0.npy").rename(tmp_path / "of any name")
    assert_same(shardkeep.load(tmp_path / "of any name"), jnp.asarray(pattern("float32", (8, 6))))


def test_an_array_in_c_order_is_mapped(tmp_path: Path) -> None:
    data = pattern("float32", (512, 512))
    np.save(tmp_path / "w.npy", data)
    found = shardkeep.load(tmp_path / "w.npy", template=data)
    assert_same(found, data)
    (leaf,) = shardkeep.inspect(tmp_path / "w.npy").leaves.values()
    assert leaf.kind == "jax"


def test_each_device_reads_its_part_of_a_stored_array(tmp_path: Path) -> None:
    data = pattern("float32", (64, 40))
    np.savez(tmp_path / "w.npz", w=np.asfortranarray(data), v=data)
    for spec in (PartitionSpec("a"), PartitionSpec(None, "b"), PartitionSpec("b", "a")):
        sharding = NamedSharding(mesh_of(4, 2), spec)
        found = shardkeep.load(tmp_path / "w.npz", shardings=sharding)
        for key in ("w", "v"):
            assert found[key].sharding == sharding
            assert_same(np.asarray(found[key]), data)


def test_slashes_and_dots_in_names_make_levels_unless_they_collide(tmp_path: Path) -> None:
    names = ["a/b", "a/c.d", "e.0", "e.1", "x", "x.y", "arr_0"]
    np.savez(tmp_path / "n.npz", **{name: np.full(2, i, np.int8) for i, name in enumerate(names)})
    found = shardkeep.load(tmp_path / "n.npz")
    assert set(found) == {"a", "e", "x", "x.y", "arr_0"}
    assert set(found["a"]) == {"b", "c"}
    assert set(found["a"]["c"]) == {"d"}
    template = {"a": {"c.d": np.zeros(2, np.int8)}, "e": [np.zeros(2, np.int8)] * 2}
    assert_same(shardkeep.load(tmp_path / "n.npz", template=template)["a"]["c.d"], np.full(2, 1, np.int8))


def test_strings_become_plain_values(tmp_path: Path) -> None:
    np.savez_compressed(
        tmp_path / "s.npz",
        name="grüße",
        raw=np.bytes_(b"xy"),
        tags=np.array([["a", "bc"], ["", "d"]]),
        none=np.array([], "U3"),
    )
    found = shardkeep.load(tmp_path / "s.npz")
    assert found == {"name": "grüße", "raw": b"xy", "tags": [["a", "bc"], ["", "d"]], "none": []}
    np.save(tmp_path / "s.npy", np.array("x" * 100))
    assert shardkeep.load(tmp_path / "s.npy") == "x" * 100


@pytest.mark.parametrize("order", "<>")
def test_characters_that_do_not_exist_are_damage(order: str, tmp_path: Path) -> None:
    """NumPy looks at none of them, and its strings then raise a SystemError."""
    header = f"{{'descr': '{order}U2', 'fortran_order': False, 'shape': (), }}".encode()
    good, bad = (np.array([0x61, last], f"{order}u4").tobytes() for last in (0x10FFFF, 0x110000))
    (tmp_path / "s.npy").write_bytes(_npy(header, good))
    assert shardkeep.load(tmp_path / "s.npy") == "a\U0010ffff"
    (tmp_path / "s.npy").write_bytes(_npy(header, bad))
    with pytest.raises(shardkeep.IntegrityError, match=r"s\.npy .*is not valid Unicode"):
        shardkeep.load(tmp_path / "s.npy")


def test_bfloat16_is_read_although_numpy_has_no_name_for_it(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """NumPy itself gives two raw bytes for each element."""
    monkeypatch.setattr("shardkeep.model.tree._mentioned", set())
    data = pattern(ml_dtypes.bfloat16, (4, 3))
    np.savez(tmp_path / "b.npz", w=data)
    assert np.load(tmp_path / "b.npz")["w"].dtype == "V2"
    with caplog.at_level(logging.WARNING, "shardkeep"):
        assert_same(shardkeep.load(tmp_path / "b.npz"), {"w": jnp.asarray(data)})
    assert "NumPy has no name for the dtype of w: what it writes as V2 is read as bfloat16" in caplog.text


UNREADABLE: dict[str, tuple[Any, str]] = {
    "objects": (np.array([{}, None], object), "array of Python objects, stored as a pickle"),
    "float8": (np.zeros(3, ml_dtypes.float8_e4m3fn), "which several dtypes share"),
    "int4": (np.zeros(3, ml_dtypes.int4), "which several dtypes share"),
    "a structure": (np.zeros(3, [("x", "f4"), ("y", "i4")]), "structured array"),
    "long doubles": (np.zeros(3, np.longdouble), "which JAX does not support"),
    "much text": (np.zeros(1 << 17, "U1"), "bytes of text"),
    "endless text": (np.zeros(1 << 17, "U0"), "bytes of text|valid array"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_is_not_read_is_named_and_not_called_damaged(what: str, tmp_path: Path) -> None:
    data, says = UNREADABLE[what]
    np.save(tmp_path / "u.npy", data)
    for read in (shardkeep.load, shardkeep.inspect, shardkeep.verify):
        with pytest.raises(shardkeep.CheckpointNotFoundError, match=rf"u\.npy: .*({says})"):
            read(tmp_path / "u.npy")
    assert not shardkeep.exists(tmp_path / "u.npy")


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_is_not_read_leaves_the_rest_of_an_archive_readable(what: str, tmp_path: Path, capsys: Any) -> None:
    data, says = UNREADABLE[what]
    path = tmp_path / "u.npz"
    np.savez_compressed(path, **{"good": np.ones(3, np.float32), "x/bad": data})
    assert_same(shardkeep.load(path, include="good"), {"good": jnp.ones(3)})
    leaf = shardkeep.inspect(path).leaves["x/bad"]
    assert leaf.kind == "unreadable"
    assert "<StoredLeaf x/bad: unreadable: " in repr(leaf)
    template = {"good": np.ones(3, np.float32), "x": {"bad": np.ones(3)}}
    with pytest.raises(shardkeep.TemplateMismatchError, match=rf"'x/bad': saved data that cannot be read .*({says})"):
        shardkeep.load(path, template=template)
    arguments: dict[str, Any]
    for arguments in {}, {"include": "bad"}, {"mmap": False}:
        with pytest.raises(shardkeep.CheckpointNotFoundError, match=rf"leaf 'x/bad' of .*u\.npz cannot .*({says})"):
            shardkeep.load(path, **arguments)
    (problem,) = shardkeep.verify(path).problems
    assert (problem.leaf, problem.file) == ("x/bad", str(path))
    assert main(["inspect", str(path)]) == 0
    assert re.search(rf"bad +unreadable.* ({says})", capsys.readouterr().out)
    assert main(["convert", str(path), str(tmp_path / "ours")]) == 2
    assert "'x/bad'" in capsys.readouterr().err
    assert main(["convert", str(path), str(tmp_path / "ours"), "--include", "good"]) == 0


def test_a_file_of_equinox_is_named_and_not_called_damaged(tmp_path: Path) -> None:
    """It is several `.npy` files one after the other."""
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", {"w": np.ones((2, 3)), "b": np.zeros(3)})
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="it is an Equinox checkpoint"):
        shardkeep.load(tmp_path / "model.eqx")


def test_no_pickle_is_ever_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "run"),)

    array = np.empty(1, object)
    array[0] = Evil()
    np.savez(tmp_path / "evil.npz", a=array)
    (tmp_path / "evil.npy").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.npz", "evil.npy"):
        with pytest.raises(shardkeep.ShardkeepError, match="evil"):
            shardkeep.load(tmp_path / name)
    assert not (tmp_path / "run").exists()


def test_files_in_the_archive_that_are_no_arrays_cannot_be_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("notes.txt", "of someone")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"leaf 'notes/txt' of .* is not an array"):
        shardkeep.load(tmp_path / "a.npz")
    assert_same(shardkeep.load(tmp_path / "a.npz", include="w"), {"w": np.ones(3)})


@pytest.mark.parametrize("compressed", [False, True])
def test_verify_and_whole_loads_compare_the_crc(compressed: bool, tmp_path: Path) -> None:
    data = pattern("float32", (100, 7))
    path = tmp_path / "c.npz"
    (np.savez_compressed if compressed else np.savez)(path, w=data, other=np.ones(5, np.float32))
    (leaf,) = (shardkeep.inspect(path).leaves["w"],)
    assert shardkeep.verify(path).ok
    content = bytearray(path.read_bytes())
    start = int(leaf.origin.directory.split("@")[1].split(",")[0])  # type: ignore[attr-defined]
    content[start + 200] ^= 1
    path.write_bytes(content)
    with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w': .*c\.npz.*(CRC|decompressed|ends after|more bytes)"):
        shardkeep.load(path)
    (problem,) = shardkeep.verify(path).problems
    assert problem.leaf == "w"
    assert_same(shardkeep.load(path, include="other"), {"other": jnp.ones(5)})
    assert main(["verify", str(path)]) == 1


def test_an_archive_in_a_bucket_is_read_by_ranges(place: Place, tmp_path: Path) -> None:
    for name, write in ("stored.npz", np.savez), ("packed.npz", np.savez_compressed):
        write(tmp_path / name, **arrays())
        place.put(f"run/{name}", (tmp_path / name).read_bytes())
        found = shardkeep.load(f"{place.url}/run/{name}", include="layers")
        assert_same(found, {"layers": _on_device(nested(arrays())["layers"])})
        assert shardkeep.verify(f"{place.url}/run/{name}").ok
    np.save(tmp_path / "w.npy", np.asfortranarray(arrays()["layers.0.w"]))
    place.put("run/w.npy", (tmp_path / "w.npy").read_bytes())
    assert_same(shardkeep.load(f"{place.url}/run/w.npy"), jnp.asarray(arrays()["layers.0.w"]))


def _on_device(tree: Any) -> Any:
    import jax

    return jax.tree.map(jnp.asarray, tree)


def _npy(header: bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H" if version[0] == 1 else "<L", len(header)) + header + data


HEADERS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "needed|ends after"),
    "only the magic": (b"\x93NUMPY", "ends after"),
    "a later version": (_npy(b"{}", version=b"\x04\x00"), "version 4.0"),
    "an enormous header": (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", "2,147,483,647 bytes"),
    "code": (_npy(b"{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (1,)}"), "header is damaged"),
    "nested deeply": (_npy(b"(" * 60_000), "header is damaged"),
    "another field": (_npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (0,), 'x': True}"), "header is damaged"),
    "a field twice": (_npy(b"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (0,)}"), "damaged"),
    "a shape below zero": (_npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"), "damaged"),
    "an enormous shape": (
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 9999999999)}"),
        "does not describe a valid array",
    ),
    "an endless number": (
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 6000 + b",)}"),
        "damaged|valid array",
    ),
    "a dtype that is a program": (
        _npy(b"{'descr': '(9999999999,)f4', 'fortran_order': False, 'shape': (1,)}"),
        "dtype",
    ),
    "too few bytes": (_npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", bytes(7)), "ends at byte"),
    "too many bytes": (_npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", bytes(9)), "ends at byte"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_numpy_does_not_write_is_refused(what: str, tmp_path: Path) -> None:
    document, says = HEADERS[what]
    (tmp_path / "h.npy").write_bytes(document)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("h.npy", document)
    (tmp_path / "h.npz").write_bytes(buffer.getvalue())
    for name in ("h.npy", "h.npz"):
        with pytest.raises(shardkeep.ShardkeepError, match=rf"{name}.*({says})"):
            shardkeep.load(tmp_path / name)
    assert not shardkeep.exists(tmp_path / "h.npy")


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }          \n",
        b'{"shape":(2L,),"descr":"<f4","fortran_order":False}',
        b"{ 'fortran_order' : True , 'shape' : ( 2 , ) , 'descr' : '<f4' }\n",
    ],
)
def test_a_header_as_other_programs_write_it_is_read(header: bytes, tmp_path: Path) -> None:
    data = np.array([1.5, -2], np.float32)
    for version in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        (tmp_path / "h.npy").write_bytes(_npy(header, data.tobytes(), version))
        assert_same(shardkeep.load(tmp_path / "h.npy"), jnp.asarray(data))


def test_a_bomb_takes_no_more_memory_than_a_region_of_it(tmp_path: Path) -> None:
    """64 MiB of zeros in 64 KiB; and an array that claims more than deflate can make of its bytes is refused."""
    np.savez_compressed(tmp_path / "z.npz", w=np.zeros((1 << 10, 1 << 14), np.float32))
    (leaf,) = shardkeep.inspect(tmp_path / "z.npz").trees[""].arrays
    tracemalloc.start()
    try:
        NumpyReader().open(LocalStore(str(tmp_path)), leaf).read(Region((1000, 0), (1, 1 << 14)))
        NumpyReader().open(LocalStore(str(tmp_path)), leaf).check()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    with zipfile.ZipFile(tmp_path / "n.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999,)}", bytes(8)))
    with pytest.raises(shardkeep.IntegrityError, match=r"n\.npz.*array 'w'"):
        shardkeep.load(tmp_path / "n.npz")


def test_what_a_manifest_says_about_a_place_is_checked(tmp_path: Path) -> None:
    from dataclasses import replace

    path = tmp_path / "s.npz"
    np.savez(path, w=np.ones((2, 3)), v=np.zeros(5, np.int8))
    (leaf,) = (leaf for leaf in shardkeep.inspect(path).trees[""].arrays if leaf.key == "w")
    (other,) = (leaf for leaf in shardkeep.inspect(path).trees[""].arrays if leaf.key == "v")
    places = ["s.npz@", "s.npz@1", "s.npz@0,1,1,0,0", "s.npz@0,99999,99999,0,0", "s.npz@0,9,9,7,0", "x.npz@"]
    for directory in [*places, other.origin.directory]:  # type: ignore[union-attr]
        changed = replace(leaf, origin=replace(leaf.origin, directory=directory))  # type: ignore[type-var]
        with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w': .*[sx]\.npz"):
            NumpyReader().open(LocalStore(str(tmp_path)), changed)


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*.np?")), ids=lambda path: path.name)
def test_what_other_versions_of_numpy_wrote_is_read_as_numpy_reads_it(fixture: Path) -> None:
    expected = np.load(fixture)
    found = shardkeep.load(fixture)
    pairs = (
        [(found, expected)] if isinstance(expected, np.ndarray) else [(found[n], expected[n]) for n in expected.files]
    )
    for mine, theirs in pairs:
        native = np.array(theirs, theirs.dtype.newbyteorder("="), order="C")
        assert_same(np.array(mine), native)
    assert shardkeep.verify(fixture).ok
