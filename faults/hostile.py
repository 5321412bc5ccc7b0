"""Checkpoints whose files are to be made hostile: which file, how its bytes are opened, and how they are closed again
so that seals and lengths are right and the reader gets to see what is inside.
"""

import base64
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import zstandard
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardkeep
from faults.hostile_cases import Case, Files, MemoryStore, files_in
from faults.hostile_chunks import chunk_cases
from faults.hostile_files import file_cases
from faults.hostile_torch import torch_cases
from faults.mutate import PICKLED
from faults.piecetables import changed, put_rows, rows_of
from shardkeep.foreign import eformer, zarr
from shardkeep.foreign.pickles import decode_pickle, plain_value
from shardkeep.foreign.zarr import describe
from shardkeep.model.digests import digest, seal
from shardkeep.model.perprocess import PerProcessRows
from support import Dense, Keyed, Point

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "eformer"
GOLDEN = FIXTURES.parents[1] / "golden"
_ZEROS = b"0" * 32
# Numbers as they are in a table: of all widths, and those next to a limit.
_NUMBERS = [
    number.to_bytes(width, "little")
    for width in (4, 8)
    for number in (0, 1, 2, 255, 1 << 12, 1 << 22, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
] + [number.to_bytes(8, "little") for number in (1 << 32, (1 << 62) - 1, 1 << 63, (1 << 64) - 1)]


def cases() -> list[Case]:
    """All of them, made anew: our own formats, and what other programs write."""
    with tempfile.TemporaryDirectory() as room:
        own = _own(Path(room))
        foreign = _foreign(Path(room))
    return [*own, *foreign, *_eformer(), *chunk_cases(), *file_cases(), *torch_cases()]


def _tree() -> Any:
    return {
        "point": Point(np.arange(3, dtype=np.float32), [1, 2.5, "x", b"y", 1j, None]),
        "keyed": Keyed(np.int8(3), ()),
        "dense": Dense(jnp.ones((2, 3)), np.zeros(3), "n"),
        "key": jax.random.key(1),
        "data": shardkeep.PerProcess({"epoch": 1, "buffer": np.arange(3)}),
        1: {(0, "k"): np.zeros((0, 5))},
    }


def _own(room: Path) -> Iterator[Case]:
    zarr = {"format": "zarr", "compression": "zstd"}
    for name, arguments in {"safetensors": {}, "zstd": zarr}.items():
        shardkeep.save(room / name, _tree(), metadata={"a": [1, None]}, **arguments)  # type: ignore[arg-type]
        shardkeep.save(room / name, {"w": jnp.ones(3)}, prefix="a.b", **arguments)  # type: ignore[arg-type]
        files = files_in(room / name)
        yield Case(f"manifest, {name}", files, files["manifest.json"], lambda t: {"manifest.json": reseal(t)})
    yield from _documents_with_pieces()
    yield from _tables(room)
    shardkeep.save(room / "chunk", {"w": np.arange(500, dtype=np.uint16)}, **zarr)  # type: ignore[arg-type]
    files = files_in(room / "chunk")
    yield Case("zstd chunk", files, files["w/0"], _with_chunk(files), _frames(), is_json=False)
    yield _per_process(room)

    shardkeep.save(room / "single" / "model.safetensors", _tree())
    files = files_in(room / "single")
    whole = files["model.safetensors"]
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    header, data = whole[8:length].rstrip(), whole[length:]
    inner = json.loads(header)["__metadata__"]["shardkeep"]

    def pack(text: bytes) -> Files:
        text = text.ljust(length - 8)
        return {"model.safetensors": reseal(struct.pack("<Q", len(text)) + text + data, len(text) + 8)}

    def embed(text: bytes) -> Files:
        return pack(header.replace(json.dumps(inner).encode(), _as_string(reseal(text))))

    yield Case("exchange header", files, header, pack, target="model.safetensors")
    yield Case("exchange manifest", files, inner.encode(), embed, target="model.safetensors")

    shardkeep.save(room / "several" / "model.safetensors", _tree(), max_shard_size=16)
    files = files_in(room / "several")
    name = "model.safetensors.index.json"
    index = files[name]
    within = json.loads(index)["metadata"]["shardkeep"]
    yield Case("exchange index", files, index, lambda t: {name: reseal(t)}, target=name)

    def nest(text: bytes) -> Files:
        return {name: reseal(index.replace(json.dumps(within).encode(), _as_string(reseal(text))))}

    yield Case("manifest in an index", files, within.encode(), nest, target=name)


def _per_process(room: Path) -> Case:
    """A value that differs between processes: its JSON changes, its digests are right."""
    inside = {"a": np.arange(3, dtype=">i2"), "b": b"xyz", ("k", 1): [1, 2.5, None, (True, "s", 1j)], 0: np.float32(1)}
    shardkeep.save(room / "value", {"p": shardkeep.PerProcess(inside)}, format="zarr")
    files = files_in(room / "value")
    (length,) = struct.unpack("<Q", files["p/0.0"][:8])
    data = files["p/0.0"][8 + length :]
    manifest = json.loads(files["manifest.json"])
    record = next(file for file in manifest["trees"][""]["files"] if file[0] == "p/0.0")
    (leaf,) = manifest["trees"][""]["leaves"]
    (row,) = rows_of(manifest["trees"][""])
    data = data[: leaf["lengths"][0] - 8 - length]

    def whole(text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text + data

    def close(text: bytes) -> Files:
        raw = whole(text)
        record[1:] = [len(raw), 0, digest(b"")]
        leaf["shape"], leaf["lengths"] = [1, len(raw)], [len(raw)]
        put_rows(manifest["trees"][""], [changed(row, digests=[digest(raw)])])
        return {"p/0.0": raw, "manifest.json": reseal(json.dumps(manifest, separators=(",", ":")).encode())}

    def parse(text: bytes) -> None:
        raw = np.frombuffer(whole(text), np.uint8)
        PerProcessRows((raw.size,), raw.size).decode(0, raw, "p")

    return Case(
        "a value of a process", {**files, **close(start := files["p/0.0"][8 : 8 + length])}, start, close, parse=parse
    )


def _foreign(room: Path) -> Iterator[Case]:
    (room / "hf").mkdir()
    tensors = {"a.b": np.ones((2, 4), np.float32), "c": np.arange(5, dtype=np.int8), "d": np.zeros((0, 2), np.float16)}
    safetensors.numpy.save_file(tensors, room / "hf" / "model.safetensors", metadata={"format": "pt", "dtypes": "{}"})
    files = files_in(room / "hf")
    whole = files["model.safetensors"]
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    header, data = whole[8:length], whole[length:]

    def pack(text: bytes) -> Files:
        return {"model.safetensors": struct.pack("<Q", len(text)) + text + data}

    yield Case("safetensors header", files, header, pack, target="model.safetensors")
    yield Case(
        "safetensors file", files, whole, lambda t: {"model.safetensors": t}, is_json=False, target="model.safetensors"
    )
    files = {p.name: p.read_bytes() for p in (FIXTURES / "safetensors_sharded").glob("model*")}
    name = "model.safetensors.index.json"
    yield Case("safetensors index", files, files[name], lambda t: {name: t}, target=name)


def _eformer() -> Iterator[Case]:
    for fixture in ("ts_plain", "ts_two_prefixes", "index_v1_0", "index_v2_0", "pytree_builtins", "pytree_optax"):
        files = files_in(FIXTURES / fixture / "ckpt")
        for name in sorted(files):
            if name.endswith("_index.json") or (name.endswith(".json") and fixture in ("ts_plain", "pytree_builtins")):
                yield Case(f"{fixture}: {name}", files, files[name], lambda t, n=name: {n: t})
            if name.endswith("_structure.json"):
                yield from _pickles(fixture, name, files)
    files = files_in(FIXTURES / "ts_plain" / "ckpt")
    yield Case(
        "zarr description",
        files,
        files["w/.zarray"],
        lambda t: {"w/.zarray": t},
        parse=lambda t: describe(MemoryStore({"w/.zarray": t}), "w"),  # type: ignore[arg-type]
    )
    chunk: dict[str, Any] = {"words": _frames(), "is_json": False, "parse": lambda t: zarr._zstd_size(t, 48)}
    yield Case("zarr chunk", files, files["w/0.0"], lambda t: {"w/0.0": t}, **chunk)


def _pickles(fixture: str, name: str, files: Files) -> Iterator[Case]:
    """The pickles inside a structure: that of the tree, and one of a value."""
    structure = json.loads(files[name])
    payload = structure["nonarray_payload"]

    def with_tree(text: bytes) -> dict[str, Any]:
        return {**structure, "treedef_b64": base64.b64encode(text).decode()}

    def with_value(text: bytes) -> dict[str, Any]:
        first = next(iter(payload))
        return {**structure, "nonarray_payload": {**payload, first: base64.b64encode(text).decode()}}

    start = base64.b64decode(structure["treedef_b64"])
    what: dict[str, Any] = {"words": PICKLED, "is_json": False}
    yield Case(
        f"{fixture}: the pickled tree of {name}",
        files,
        start,
        lambda t: {name: json.dumps(with_tree(t)).encode()},
        **what,
        parse=lambda t: eformer._structured(with_tree(t), name),
    )
    if payload:
        yield Case(
            f"{fixture}: a pickled value of {name}",
            files,
            base64.b64decode(next(iter(payload.values()))),
            lambda t: {name: json.dumps(with_value(t)).encode()},
            **what,
            parse=lambda t: plain_value(decode_pickle(t, name)),
        )


def reseal(document: bytes, length: int | None = None) -> bytes:
    """The document with its seal made right, if there is a place for one; `length`: as far as it is sealed."""
    sealed, rest = document[:length], b"" if length is None else document[length:]
    at = sealed.find(b'digest":"', 0, 200) + 9
    if at < 9 or len(sealed) < at + 32:
        return document
    return seal(sealed[:at] + _ZEROS + sealed[at + 32 :]) + rest


def _as_string(text: bytes) -> bytes:
    """Bytes as a JSON string; what is no UTF-8 becomes lone surrogates."""
    return json.dumps(text.decode("utf-8", "surrogateescape")).encode()


def _documents_with_pieces() -> Iterator[Case]:
    """Manifests of arrays in several pieces: of version 1, with tables and patterns, and with a series of files."""
    for name in ("v1/safetensors", "v1/zstd", "v2/safetensors", "v2/zstd", "v2/tables/two/zstd", "v2/series"):
        files = files_in(GOLDEN / name)
        yield Case(f"manifest, {name}", files, files["manifest.json"], lambda t: {"manifest.json": reseal(t)})


def _tables(room: Path) -> Iterator[Case]:
    """The bytes of tables of pieces, whose digests are right: in a manifest, and in a file."""
    spread = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec("x"))
    tree = {"w": jax.device_put(np.arange(1 << 19, dtype=np.float32), spread), "v": np.ones(3), "e": np.zeros((0, 2))}
    shardkeep.save(room / "table", tree)
    files = files_in(room / "table")
    manifest = json.loads(files["manifest.json"])
    stored = manifest["trees"][""]
    table = base64.b64decode(stored["tables"][0]["data"])

    def inside(text: bytes) -> Files:
        stored["tables"] = [{"data": base64.b64encode(text).decode()}]
        return {"manifest.json": reseal(json.dumps(manifest, separators=(",", ":")).encode())}

    yield Case("table in a manifest", files, table, inside, _NUMBERS, is_json=False)
    number = len(stored["files"])

    def beside(text: bytes) -> Files:
        stored["files"][number:] = [["0.pieces", len(text), len(text), digest(text)]]
        stored["tables"] = [{"file": number}]
        return {"0.pieces": text, "manifest.json": reseal(json.dumps(manifest, separators=(",", ":")).encode())}

    yield Case("table in a file", {**files, **beside(table)}, table, beside, _NUMBERS, is_json=False)


def _with_chunk(files: Files) -> Callable[[bytes], Files]:
    """A manifest that agrees with whatever lies in the chunk."""
    manifest = json.loads(files["manifest.json"])
    record = next(file for file in manifest["trees"][""]["files"] if file[0] == "w/0")
    (row,) = rows_of(manifest["trees"][""])

    def close(text: bytes) -> Files:
        record[1:] = [len(text), len(text), digest(text)]
        put_rows(manifest["trees"][""], [changed(row, stored=len(text))])
        return {"w/0": text, "manifest.json": reseal(json.dumps(manifest, separators=(",", ":")).encode())}

    return close


def _frames() -> list[bytes]:
    """Frames and parts of frames: bombs, huge windows, frames to be skipped, other sizes."""
    plain = [zstandard.compress(bytes(n)) for n in (0, 1, 999, 1000, 1001)]
    large = zstandard.ZstdCompressor(level=1).compressobj()
    plain.append(b"".join(large.compress(bytes(8 << 20)) for _ in range(64)) + large.flush())  # half a gigabyte
    window = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    ).compressobj()
    open_end = window.compress(bytes(1000)) + window.flush()
    return [
        *plain,
        open_end,
        b"\x28\xb5\x2f\xfd",
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        b"\x28\xb5\x2f\xfd\xe4" + b"\xff" * 8,
    ]
