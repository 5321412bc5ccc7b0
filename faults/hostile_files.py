"""The files of Flax, NumPy and Keras to be made hostile: as a whole, and the parts that checksums would protect."""

import io
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.serialization
import h5py
import ml_dtypes
import numpy as np

from faults.hostile_cases import Case, Files, MemoryStore, read_arrays
from shardkeep.foreign.registry import checks_of, detect_file

# What begins values, and lengths that no file has.
PACKED = [
    b"\x80", b"\x81\xa1w", b"\x8f", b"\x90", b"\x91", b"\x9f", b"\xa0", b"\xbf", b"\xc0", b"\xc1", b"\xc2", b"\xc3",
    b"\xc4\x00", b"\xc4\xff", b"\xc5\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc7\x00\x01", b"\xc7\xff\x01",
    b"\xc7\x05\x02",
    b"\xc8\xff\xff\x03", b"\xc9\xff\xff\xff\xff\x01", b"\xca" + bytes(4), b"\xcb\x7f\xf8" + bytes(6),
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7), b"\xd4\x01\x93", b"\xd8\x03" + b"\x93" * 16, b"\xd9\xff", b"\xda\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 300,
    b"\x81\xa1w" * 200,
    b"\x93\x91\x03\xa4int8\xc4\x03abc", b"\x93\x91\xcf\x3f" + b"\xff" * 7, b"\xa6object", b"\xa7float64",
    b"\xa8bfloat16",
    b"\xa4int4", b"\xa5str32", b"\xadchunked_array", b"\xb9__msgpack_chunked_array__\xc3", b"\xa5shape",
    b"\xa6chunks", b"\xa10",
    b"\xb0//GDAPlaceholder",
]  # fmt: skip
_HEADER = [
    b"'descr': '|O', ", b"'descr': '<f8', ", b"'descr': '>f4', ", b"'descr': '|V2', ", b"'<V1'", b"'<f1'",
    b"'<U99999'",
    b"'<U0'", b"'|S0'", b"'<M8[ns]'", b"'<M8[99999999999s]'", b"[('x', '<f4')]", b"'<f16'", b"'(9,)f4'", b"True",
    b"False",
    b"(", b")", b"()", b"(0,)", b"(-1,)", b"(3,)", b"(99999999999999999999,)", b"(4611686018427387904, 4)",
    b"(1," * 70,
    b"(0, 4611686018427387904)", b"(9" * 3000, b"{", b"}", b"{}", b"__import__('os').system('id')",
    b"'shape': (1, 2L), ",
    b"\x93NUMPY\x02\x00", b"\x93NUMPY\x03\x00\xff\xff\xff\xff", b"\x93NUMPY\x01\x00\xff\xff", b"'", b'"', b",",
    b":", b"\\", b"\0",
]  # fmt: skip
_ZIPPED = [
    b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06" + bytes(18), b"PK\x06\x06", b"PK\x06\x07" + bytes(16),
    b"\xff\xff\xff\xff",
    b"\xff\xff", b"\x01\x00\x10\x00" + b"\xff" * 16, b"\x01\x00\x08\x00" + b"\xff" * 8, b"../../x.npy",
    b"/etc/passwd.npy",
    b"w.npy", b"\x08\x00", b"\x0c\x00", b"\x63\x00", b"a." * 60, b"a/" * 60,
]  # fmt: skip
_HDF5 = [
    b"\x89HDF\r\n\x1a\n", b"TREE", b"SNOD", b"HEAP", b"OHDR", b"OCHK", b"FRHP", b"FHDB", b"BTHD", b"FSHD",
    b"GCOL", b"EADB", b"FADB",
    b"\xff" * 8, bytes(8), b"\x01" + bytes(7), b"\x08" + bytes(7), b"\x10\x00\x10\x00", b"\x0b\x00",
    b"\x11\x00\x10\x00",
    b"\x60" + bytes(7), b"\x00\x10" + bytes(6), b"\xff\xff\xff\x7f" + bytes(4), b"\x00\x00\x00\x00\x00\x00\x00\x10",
]  # fmt: skip


def file_cases() -> Iterator[Case]:
    """A case for each kind of file, and for each part inside an archive."""
    yield from _flax()
    yield from _numpy()
    with tempfile.TemporaryDirectory() as room:
        yield from _keras(Path(room))


def _tree() -> dict[str, Any]:
    return {
        "params": {"0": {"w": np.ones((3, 4), np.float32), "b": np.zeros(3, ml_dtypes.bfloat16)}, "1": {}},
        "step": 7,
        "scalar": np.float32(1),
        "z": 1j,
        "text": "x",
        "raw": b"y",
        "some": [1.5, None, True],
    }


def _flax() -> Iterator[Case]:
    yield _case("flax: a state", "state.msgpack", flax.serialization.msgpack_serialize(_tree()), PACKED)
    before = flax.serialization.MAX_CHUNK_SIZE
    flax.serialization.MAX_CHUNK_SIZE = 20
    try:
        chunked = flax.serialization.msgpack_serialize(_tree())
    finally:
        flax.serialization.MAX_CHUNK_SIZE = before
    yield _case("flax: arrays in chunks", "checkpoint_7", chunked, PACKED)


def _numpy() -> Iterator[Case]:
    arrays = {
        "a/w": np.ones((3, 4), np.float32),
        "f": np.asfortranarray(np.ones((2, 3), ">i2")),
        "b": np.ones(3, ml_dtypes.bfloat16),
        "text": np.array(["x", "yz"]),
    }
    for name, write in ("stored", np.savez), ("deflated", np.savez_compressed):
        archive = io.BytesIO()
        write(archive, **arrays)  # type: ignore[arg-type]
        yield _case(f"numpy: an archive, {name}", "state.npz", archive.getvalue(), _ZIPPED)
    for key in ("a/w", "f", "text"):
        single = io.BytesIO()
        np.save(single, arrays[key])
        yield _case(f"numpy: an array, {key}", "state.npy", single.getvalue(), _HEADER)
        yield _case(f"numpy: an array in an archive, {key}", "state.npz", single.getvalue(), _HEADER, _zipped)


def _zipped(text: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED if len(text) % 2 else zipfile.ZIP_STORED) as made:
        made.writestr("w.npy", text)
    return archive.getvalue()


def _keras(room: Path) -> Iterator[Case]:
    for version in ("earliest", "latest"):
        with h5py.File(room / version, "w", libver=version) as file:
            file["layers/dense/vars/0"] = np.ones((3, 4), np.float32)
            made = file.create_dataset("layers/dense/vars/1", data=np.zeros(3, ml_dtypes.bfloat16))
            made.attrs["dtype"] = "bfloat16"
            packed = {"chunks": (4, 4), "compression": "gzip", "fletcher32": True} if version == "earliest" else {}
            file.create_dataset("packed", data=np.ones((8, 4)), **packed)
            file["swapped"] = np.ones(3, ">f4")
        whole = (room / version).read_bytes()
        yield _case(f"keras: weights, {version}", "m.weights.h5", whole, _HDF5)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made_archive:
        made_archive.writestr("config.json", "{}")
        made_archive.writestr("model.weights.h5", whole)
    yield _case("keras: an archive", "m.keras", archive.getvalue(), _ZIPPED)


def _case(name: str, file: str, start: bytes, words: list[bytes], wrap: Callable[[bytes], bytes] | None = None) -> Case:
    """A case of one file, whose bytes are changed before they are wrapped."""

    def close(text: bytes) -> Files:
        return {file: text if wrap is None else wrap(text)}

    return Case(name, close(start), start, close, words, False, file, lambda text: _read_all(close(text), file))


def _read_all(files: Files, name: str) -> None:
    """Everything that an inspection, a load and a check do with another program's file, in memory."""
    store: Any = MemoryStore(files)
    found = detect_file(store, name)
    for tree in found.trees.values() if found else ():
        read_arrays(store, tree)
        for check in checks_of(store, tree) or ():
            check(lambda done: None)
