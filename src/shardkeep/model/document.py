"""The document of a manifest. Writing it is the commit.

Its JSON is specified in docs/format.md. Everything read from a file is validated here before anything is allocated or
opened because of it: names stay inside the checkpoint, pieces fill their arrays exactly once, every block has a digest.
"""

import json
import operator
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NotRequired, SupportsIndex, TypedDict, TypeGuard, cast

from shardkeep.errors import IntegrityError, NewerFormatError, an
from shardkeep.model.arrays import ArraySpec, Region, dtype_from_name, dtype_name, is_partition, is_possible
from shardkeep.model.digests import ALGORITHM, BLOCK, block_count, check_seal, seal
from shardkeep.model.leaves import (
    NATIVE,
    UNSHARDED,
    Axes,
    ByteOrder,
    ForeignArray,
    JaxArray,
    NumpyArray,
    Origin,
    Piece,
    PrngKeys,
    SavedSharding,
    StoredArray,
    StoredLeaf,
    StoredValue,
)
from shardkeep.model.manifest import OURS, DataFile, Manifest, Tree, check_prefix
from shardkeep.model.metadata import decode_metadata, encode_metadata
from shardkeep.model.naming import clean_name
from shardkeep.model.perprocess import PerProcessRows
from shardkeep.model.tree import Path, Skeleton, join_key, to_json
from shardkeep.model.values import Json, JsonObject, decode, encode

VERSION = 1  # of the format: raised when an older reader would misread a document
_STEPS = 1 << 63  # recorded steps are below

_FORMATS = {"safetensors": "safetensors", "tensorstore": "zarr", "foreign": "foreign"}  # on disk → for people
_NAMES_ON_DISK = {name: on_disk for on_disk, name in _FORMATS.items()}
_ARRAYS = tuple(origin.kind for origin in (JaxArray, NumpyArray, PrngKeys, PerProcessRows))
_START = b'{"shardkeep":'
_ROOT_FIELDS = {"digest", "algorithm", "block", "save", "trees"}
_MARKS = (b"shardkeep", b"xxh3-128", b'"digests":', b'"leaves":[')
_HEX32 = re.compile(r"[0-9a-f]{32}")
_SOURCE = re.compile(r"[a-z0-9][a-z0-9 ._-]{0,39}")  # a word or two for a table
_FIRST_SOURCE = "eformer"  # of a foreign tree without a source: documents had none while no other kind could be read


# What the parts of a document hold. Those of a file are taken to be like this, and checked field by field: whatever is
# not, raises an error that `decode_manifest` reports. A leaf has the fields of an array, or a value.
_FileRecord = list[Json]  # name, size, length and digest of the header


class _PieceRecord(TypedDict):
    file: int
    offset: int
    digests: Sequence[str] | None
    start: NotRequired[list[int]]
    shape: NotRequired[list[int]]
    stored: NotRequired[int | None]


class _LeafRecord(TypedDict):
    key: Json
    kind: str
    value: Json
    dtype: str
    shape: list[int]
    pieces: list[_PieceRecord]
    order: NotRequired[ByteOrder]
    impl: NotRequired[str]
    lengths: NotRequired[Json]
    sharding: NotRequired[Json]
    directory: NotRequired[str]
    was: NotRequired["_LeafRecord"]


class _TreeRecord(TypedDict):
    save: str
    format: str
    compression: str | None
    created: str
    indexed: bool
    published: NotRequired[bool]
    step: NotRequired[int]
    source: NotRequired[str]
    metadata: Json
    structure: Json
    files: list[_FileRecord]
    leaves: list[_LeafRecord]


def add_format(name: str) -> None:
    """Know the name of another format, which is the same on disk."""
    _FORMATS.setdefault(name, name)


def encode_manifest(manifest: Manifest, nonce: str | None = None) -> bytes:
    """The document, sealed with its own digest. A `nonce` makes it differ from others with the same contents."""
    body = {
        "shardkeep": VERSION,
        "digest": "0" * 32,
        "algorithm": ALGORITHM,
        "block": BLOCK,
        "save": manifest.save_id,
        **({} if nonce is None else {"nonce": nonce}),
        "trees": {
            prefix: {
                "save": tree.save_id,
                "format": _NAMES_ON_DISK.get(tree.format, tree.format),
                "compression": tree.compression,
                "created": tree.created,
                "indexed": tree.indexed,
                **({"published": True} if tree.published else {}),
                **({} if tree.step is None else {"step": tree.step}),
                **({} if tree.source == OURS else {"source": tree.source}),
                "metadata": encode_metadata(dict(tree.metadata)) if tree.metadata else {},
                "structure": to_json(tree.skeleton.root),
                "files": [[f.name, f.size, f.header_length, f.header_digest] for f in tree.files],
                "leaves": [_encode_leaf(leaf) for leaf in tree.leaves],
            }
            for prefix, tree in manifest.trees.items()
        },
    }
    return seal(json.dumps(body, separators=(",", ":"), allow_nan=False).encode())


def is_foreign_manifest(document: bytes) -> bool:
    """Whether a `manifest.json` was certainly not written by shardkeep, for example the manifest of a web app.

    Damage does not make one of ours foreign: what is empty, or has any mark of ours in it, is not.

    >>> is_foreign_manifest(b'{"name": "my app", "icons": []}'), is_foreign_manifest(b'{"shardkeep":1,"dig')
    (True, False)
    """
    if document.startswith(_START) or _START.startswith(document) or not document.strip(b"\0 \t\r\n"):
        return False
    try:
        body: Json = json.loads(document)
    except (ValueError, RecursionError):
        return b"\0" not in document and not any(mark in document for mark in _MARKS)
    if not isinstance(body, dict):
        return True
    return "shardkeep" not in body and len(_ROOT_FIELDS & body.keys()) < 2


def decode_manifest(document: bytes, path: str, where: str) -> Manifest:
    """The Manifest in a document; `IntegrityError` for a damaged one, `NewerFormatError` for one that is not known."""
    try:
        body: Json = json.loads(document, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where} is damaged: {error}", file=where) from None
    if not isinstance(body, dict) or "shardkeep" not in body:
        raise IntegrityError(f"{where} is not a shardkeep manifest", file=where)
    version = body["shardkeep"]
    if isinstance(version, int) and version > VERSION:
        raise NewerFormatError(
            f"{where} has format version {version}; this shardkeep reads up to {VERSION}: upgrade shardkeep to read it"
        )
    check_seal(document, where)
    if version != VERSION or body.get("block") != BLOCK or body.get("algorithm") != ALGORITHM:
        raise IntegrityError(f"{where} has an unknown version, digest algorithm or block size", file=where)
    try:
        records = cast("dict[str, _TreeRecord]", body["trees"])
        trees = {check_prefix(prefix): _decode_tree(tree) for prefix, tree in records.items()}
        return Manifest(path, _checked_id(body["save"]), trees)
    except NewerFormatError as error:
        raise NewerFormatError(f"{where} {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{where} is malformed: {error}", file=where) from error


def check_step(step: object) -> int | None:
    """The step as it is recorded, from any integer; `TypeError` or `ValueError` for anything else.

    >>> check_step(100), check_step(None)
    (100, None)
    """
    if step is None:
        return None
    if isinstance(step, bool) or getattr(getattr(step, "dtype", None), "kind", "i") not in "iu":
        raise TypeError(f"step must be an integer, not {step!r}")
    try:
        number = operator.index(cast(SupportsIndex, step))
    except TypeError:
        raise TypeError(f"step must be an integer, not {an(type(step).__name__)}") from None
    if not 0 <= number < _STEPS:
        raise ValueError(f"step must be from 0 to 2**63 - 1, not {number}")
    return number


def no_duplicates(pairs: list[tuple[str, Json]]) -> JsonObject:
    """For `json.loads`: refuse an object with a repeated key, which readers interpret differently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a repeated key")
    return found


def check_name(name: object) -> str:
    """A file name from a document: relative, inside the checkpoint, without odd characters."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name or len(name) > 4000:
        raise IntegrityError(f"not a file name: {str(name)[:80]!r}")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise IntegrityError(f"the file name {name!r} points outside the checkpoint")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate, which no file system accepts
        raise IntegrityError(f"not a file name: {name[:80]!r}") from None
    return name


def _checked_id(value: object) -> str:
    if not isinstance(value, str) or not _HEX32.fullmatch(value):
        raise ValueError(f"not a save id: {value!r}")
    return value


def _encode_leaf(leaf: StoredLeaf) -> Json:
    key = join_key(leaf.path)
    written = key if key.isascii() else encode(key)
    if not isinstance(leaf, StoredArray):
        return {"key": written, "kind": leaf.kind, "value": encode(leaf.value)}
    pieces: list[_PieceRecord] = []
    for piece in leaf.pieces:
        record: _PieceRecord = {"file": piece.file, "offset": piece.offset, "digests": piece.digests}
        if piece.region.shape != leaf.spec.shape:
            record["start"], record["shape"] = list(piece.region.start), list(piece.region.shape)
        if piece.stored is not None:
            record["stored"] = piece.stored
        pieces.append(record)
    return {
        "key": written,
        "kind": leaf.origin.kind,
        "dtype": dtype_name(leaf.spec.dtype),
        "shape": list(leaf.spec.shape),
        "pieces": cast("list[Json]", pieces),
        **encode_origin(leaf.origin),
    }


def encode_origin(origin: Origin) -> JsonObject:
    """What a manifest says about the origin of an array, besides its kind."""
    match origin:
        case JaxArray(SavedSharding(spec, mesh)):
            axes: list[Json] = [list(entry) if isinstance(entry, tuple) else entry for entry in spec]
            sizes: JsonObject = dict(mesh)
            return {"sharding": {"spec": axes, "mesh": sizes}}
        case NumpyArray(order) if order is not None:
            return {"order": order}
        case PrngKeys(impl):
            return {"impl": impl}
        case PerProcessRows(lengths):
            return {"lengths": list(lengths)}
        case ForeignArray(directory, _, was):
            return {
                "directory": directory,
                **({} if was is None else {"was": {"kind": was.kind, **encode_origin(was)}}),
            }
        case _:
            return {}


def _decode_tree(data: _TreeRecord) -> Tree:
    if not isinstance(data["format"], str) or not isinstance(data["compression"], str | None):
        raise TypeError("the format or the compression of a tree is not text")
    if data["format"] not in _FORMATS or data["compression"] not in (None, "zstd"):
        named = " with compression ".join(repr(name) for name in (data["format"], data["compression"]) if name)
        raise NewerFormatError(
            f"has a tree in the format {named}, which is not known here: upgrade shardkeep, or register that layout"
        )
    files = tuple(_decode_file(f) for f in data["files"])
    skeleton = Skeleton.from_json(data["structure"])
    paths = skeleton.paths()
    if len(paths) != len(data["leaves"]):
        raise ValueError("the structure and the list of leaves do not match")
    leaves = tuple(_decode_leaf(leaf, path, files) for leaf, path in zip(data["leaves"], paths, strict=True))
    arrays = (leaf for leaf in leaves if isinstance(leaf, StoredArray))
    if data["compression"] is None and any(p.stored is not None for array in arrays for p in array.pieces):
        raise ValueError("a tree without compression has a compressed piece")
    metadata: Json = {} if data["metadata"] == {} else decode_metadata(data["metadata"])
    if not isinstance(metadata, dict) or not isinstance(data["indexed"], bool):
        raise ValueError("metadata is not an object, or indexed is not a boolean")
    published = data.get("published", False)
    if not isinstance(published, bool):
        raise ValueError("published is not a boolean")
    for file in files if published else ():
        check_name(clean_name(file.name, _checked_id(data["save"])))
    if "step" in data and not 0 <= _integer(data["step"]) < _STEPS:
        raise ValueError(f"impossible step {data['step']}")
    source = data.get("source", OURS if data["format"] != "foreign" else _FIRST_SOURCE)
    if not isinstance(source, str) or not _SOURCE.fullmatch(source):
        raise ValueError("source is not the name of a kind of checkpoint")
    return Tree(
        save_id=_checked_id(data["save"]),
        format=_FORMATS[data["format"]],
        skeleton=skeleton,
        leaves=leaves,
        files=files,
        metadata=metadata,
        created=str(data["created"]),
        compression=data["compression"],
        indexed=data["indexed"],
        published=published,
        step=data.get("step"),
        source=source,
    )


def _decode_file(data: _FileRecord) -> DataFile:
    name, size, header_length, header_digest = data
    size, header_length = _integer(size), _integer(header_length)
    if not 0 <= header_length <= size or not (header_digest is None or _is_digest(header_digest)):
        raise ValueError(f"invalid file record for {name!r}")
    return DataFile(check_name(name), size, header_length, header_digest)


def _decode_leaf(data: _LeafRecord, path: Path, files: Sequence[DataFile]) -> StoredLeaf:
    if decode(data["key"]) != join_key(path):
        raise ValueError(f"leaf {data['key']!r} is not at this place in the structure")
    if data["kind"] == "value":
        return StoredValue(path, decode(data["value"]))
    is_foreign = data["kind"] not in _ARRAYS
    if is_foreign and not (isinstance(data["kind"], str) and "directory" in data):
        raise ValueError(f"unknown kind of leaf {data['kind']!r}")
    shape = tuple(map(_integer, data["shape"]))
    spec = _spec(shape, data["dtype"])
    pieces = tuple(_decode_piece(piece, spec, files) for piece in data["pieces"])
    if is_foreign:
        return StoredArray(path, spec, (), _decode_foreign(data, spec))
    if not is_partition(shape, [piece.region for piece in pieces]):
        raise ValueError(f"the pieces of leaf {data['key']!r} do not fill it exactly once")
    return StoredArray(path, spec, pieces, _decode_origin(data, spec))


def _decode_foreign(data: _LeafRecord, spec: ArraySpec) -> ForeignArray:
    """An array that another program wrote, and what it was for that program."""
    was = data.get("was")
    origin = None
    if was is not None:
        if was["kind"] not in (JaxArray.kind, NumpyArray.kind, PrngKeys.kind):
            raise ValueError(f"leaf {data['key']!r} was of an unknown kind")
        origin = _decode_origin({**was, "key": data["key"]}, spec)
        assert not isinstance(origin, ForeignArray | PerProcessRows)
    return ForeignArray(check_name(data.get("directory")), data["kind"], origin)


def _decode_origin(data: _LeafRecord, spec: ArraySpec) -> Origin:
    """What an array was, from what is recorded besides its kind. Malformed records are refused for every kind."""
    kind = data["kind"]
    rows = PerProcessRows.stored(data.get("lengths"), spec) if kind == PerProcessRows.kind else None
    sharded = _decode_sharding(data["sharding"]) if "sharding" in data else UNSHARDED
    if data.get("order", "<") not in ("<", ">") or sharded is None:
        raise ValueError(f"leaf {data['key']!r} has an unknown byte order or sharding")
    if rows is not None:
        return rows
    if kind == PrngKeys.kind:
        if not isinstance(impl := data.get("impl"), str):
            raise ValueError(f"leaf {data['key']!r} has no PRNG implementation")
        return PrngKeys(impl)
    if kind == NumpyArray.kind:
        return NumpyArray(data["order"]) if "order" in data else NATIVE
    return sharded


def _decode_sharding(data: Json) -> JaxArray | None:
    """A `jax.Array` with this sharding; None if its spec is malformed. The mesh is only shown: it may be missing."""
    spec = data.get("spec", []) if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(spec, list):
        return None
    entries = tuple(tuple(axes) if isinstance(axes, list) else axes for axes in spec)
    for axes in entries:
        if not (axes is None or all(isinstance(axis, str) for axis in (axes if isinstance(axes, tuple) else (axes,)))):
            return None
    mesh = data.get("mesh")
    sizes = mesh.items() if isinstance(mesh, dict) else ()
    return _sharded(cast("tuple[Axes, ...]", entries), tuple((axis, size) for axis, size in sizes if type(size) is int))


@lru_cache(maxsize=1024)
def _sharded(spec: tuple[Axes, ...], mesh: tuple[tuple[str, int], ...]) -> JaxArray:
    """Cached: thousands of arrays share a few shardings."""
    return JaxArray(SavedSharding(spec, mesh))


@lru_cache(maxsize=1024)
def _spec(shape: tuple[int, ...], dtype: str) -> ArraySpec:
    """Cached: thousands of arrays share a few specs."""
    spec = ArraySpec(shape, dtype_from_name(dtype))
    if not is_possible(shape, spec.dtype.itemsize):
        raise ValueError(f"invalid shape {shape}")
    return spec


def _decode_piece(data: _PieceRecord, spec: ArraySpec, files: Sequence[DataFile]) -> Piece:
    region = Region.whole(spec.shape)
    if "start" in data:
        region = Region(tuple(map(_integer, data["start"])), tuple(map(_integer, cast(list[int], data.get("shape")))))
        if len(region.start) != len(spec.shape) or min((*region.start, *region.shape), default=0) < 0:
            raise ValueError("invalid region")
    length = region.size * spec.dtype.itemsize
    stored = data.get("stored")
    stored = None if stored is None else _integer(stored)
    file, offset, digests = _integer(data["file"]), _integer(data["offset"]), data["digests"]
    if stored is not None and stored < 1:
        raise ValueError("a compressed piece has no bytes")
    if not 0 <= file < len(files) or offset < 0 or offset + (length if stored is None else stored) > files[file].size:
        raise ValueError("a piece lies outside its file")
    if digests is not None:
        if len(digests) != block_count(length) or not all(_is_digest(d) for d in digests):
            raise ValueError("a piece has missing or invalid digests")
        digests = tuple(digests)
    return Piece(region, file, offset, length, digests, stored)


def _is_digest(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _HEX32.fullmatch(value) is not None


def _integer(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"not an integer: {value!r}")
    return value
