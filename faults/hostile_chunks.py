"""Checkpoints of Orbax and JAX to be made hostile: their documents, databases, and indexes of shards."""

import base64
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tensorstore  # noqa: F401  (imported now, and not when an input needs it)

from faults.hostile_cases import Case, Files, MemoryStore, files_in, read_arrays
from faults.hostile_files import PACKED
from shardkeep.foreign.crc32c import crc32c
from shardkeep.foreign.documents import ORBAX
from shardkeep.foreign.ocdbt import _MANIFEST_MAGIC, _NODE_MAGIC, _opened, read_database
from shardkeep.foreign.orbaxmsgpack import AGGREGATE
from shardkeep.foreign.pytreedef import decode_pytreedef
from shardkeep.targets.directory import Directory

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures"


def chunk_cases() -> Iterator[Case]:
    """All of them, made anew."""
    yield from _documents()
    yield from _aggregates()
    yield from _databases()
    yield from _shards()
    yield from _trees()


def read_all(files: Files) -> None:
    """Describe a checkpoint, and read the arrays that are put together from chunks."""
    store: Any = MemoryStore(files)
    for tree in Directory(store).read().trees.values():
        read_arrays(store, tree)


def _case(name: str, files: Files, start: bytes, close: Callable[[bytes], Files], is_json: bool = True) -> Case:
    return Case(name, files, start, close, is_json=is_json, parse=lambda t: read_all({**files, **close(t)}))


def _documents() -> Iterator[Case]:
    """JSON beside arrays, and of arrays."""
    root = FIXTURES / "orbax"
    for fixture, names in {
        "std_default_mixed/ckpt": [*ORBAX, "_sharding", "array_metadatas/process_0"],
        "v1_save/ckpt/state": ["_strings.json"],
        "manager_composite/ckpt/ckpt_000001": ["cfg/metadata", "rng/jax_random_key_metadata/metadata", ORBAX[0]],
        "manager_root/ckpt/10": ["metrics/metrics"],
        "no_ocdbt_zarr2/ckpt": ["f32/.zarray", "py_int/.zarray"],
        "no_ocdbt_zarr3/ckpt": ["params.dense.kernel/zarr.json"],
    }.items():
        files = files_in(root / fixture)
        for name in names:
            yield _case(f"orbax: {fixture}: {name}", files, files[name], lambda t, n=name: {n: t})


def _aggregates() -> Iterator[Case]:
    """The file with the structure of early versions, with and without a document beside it."""
    for version in ("0.2.7", "0.5.5"):
        files = files_in(FIXTURES / "orbax_early" / version / "together")
        start, words = files[AGGREGATE], (*PACKED, b"\xb7PLACEHOLDER://params.a", b"\xb0PLACEHOLDER://..")

        def close(text: bytes) -> Files:
            return {AGGREGATE: text}

        def parse(text: bytes, files: Files = files) -> None:
            read_all({**files, AGGREGATE: text})

        yield Case(f"orbax: early {version}", files, start, close, words, is_json=False, parse=parse)


def _databases() -> Iterator[Case]:
    """The bodies of a manifest and of nodes, with lengths and checksums that are right."""
    files = files_in(FIXTURES / "orbax" / "uncompressed_zarr2" / "ckpt")
    name = "manifest.ocdbt"
    body = _opened(files[name], _MANIFEST_MAGIC, name)._body
    yield _case("orbax: manifest of a database", files, body, lambda t: {name: packed(t, _MANIFEST_MAGIC)}, False)
    whole = "orbax: a whole manifest"
    yield _case(whole, files, files[name], lambda t: {name: t}, False)
    for fixture in ("uncompressed_zarr2", "sharded8_default"):
        files = files_in(FIXTURES / "orbax" / fixture / "ckpt")
        store: Any = MemoryStore(files)
        (node,) = [n for n in read_database(store, "").files if n.startswith("d/")]
        body = _opened(files[node], _NODE_MAGIC, node)._body
        yield _case(f"orbax: node of a database, {fixture}", files, body, partial(_with_node, node), False)


def _with_node(name: str, body: bytes) -> Files:
    """A node, and a manifest that refers to it."""
    node = packed(body, _NODE_MAGIC)
    config = bytes(16) + bytes([0, 100]) + varint(8 << 20) + bytes([4, 0])
    table = bytes([1, len(name), 0]) + name.encode()
    version = bytes([1, 1, 0, 0, 0]) + varint(len(node)) + bytes(3) + bytes(8)
    return {name: node, "manifest.ocdbt": packed(config + table + version + b"\0", _MANIFEST_MAGIC)}


def packed(body: bytes, magic: int) -> bytes:
    """A manifest or node with this body, not compressed."""
    data = magic.to_bytes(4, "big") + (18 + len(body)).to_bytes(8, "little") + b"\0\0" + body
    return data + crc32c(data).to_bytes(4, "little")


def varint(number: int) -> bytes:
    found = bytearray()
    while number >= 128:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _shards() -> Iterator[Case]:
    """A chunk with inner chunks; the checksum of its index is made right."""
    files = files_in(FIXTURES / "orbax" / "no_ocdbt_zarr3" / "ckpt")
    name = "params.dense.bias/c/0"

    def close(text: bytes) -> Files:
        return {name: text[:-4] + crc32c(text[-20:-4]).to_bytes(4, "little")}

    def parse(text: bytes) -> None:
        Case("", files, b"", close).read(text)

    yield Case("orbax: shard", files, files[name], close, is_json=False, parse=parse)


def _trees() -> Iterator[Case]:
    """What JAX writes about the structure of a tree."""
    files = files_in(FIXTURES / "jax" / "pytree")
    name = "pytreedef.json"
    yield _case(f"jax: {name}", files, files[name], lambda t: {name: t})
    described = json.loads(files[name])

    def close(text: bytes) -> Files:
        return {name: json.dumps({**described, "__jax_pytreedef_repr": base64.b64encode(text).decode()}).encode()}

    start = base64.b64decode(described["__jax_pytreedef_repr"])
    parse = partial(decode_pytreedef, where=os.path.join("memory", name))
    yield Case("jax: structure", files, start, close, is_json=False, parse=parse)
