"""The Manifest: the one document that says what a checkpoint holds. Writing it is the commit.

Its JSON is specified in docs/format.md. Whatever is read from a file is checked here, before anything is
allocated or opened because of it: names stay inside the checkpoint, pieces fill their arrays exactly once,
digests are there for every block.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from shardkeep.arrays import ArraySpec, Region, dtype_from_name, dtype_name, is_partition, is_possible
from shardkeep.digests import ALGORITHM, BLOCK, block_count, check_seal, seal
from shardkeep.errors import IntegrityError, MetadataError, NewerFormatError, PrefixError, an, counted
from shardkeep.records import record
from shardkeep.tree import Path, Skeleton, flatten, join_key, nest, to_json
from shardkeep.values import Json, decode, encode, show
from shardkeep.workers import collector

MANIFEST = "manifest.json"
VERSION = 1

_HEX32 = re.compile(r"[0-9a-f]{32}")


@record
class DataFile:
    """A file of the checkpoint: its name, its size, and the digest of the bytes in it that belong to no piece."""

    name: str
    size: int
    header_length: int = 0
    header_digest: str | None = None


@record
class Piece:
    """One stored Region. `length` is that of its raw bytes, `stored` that in the file where compressed."""

    region: Region
    file: int
    offset: int
    length: int
    digests: tuple[str, ...] | None
    stored: int | None = None


@record
class StoredLeaf:
    """A saved leaf: an array with its pieces, or (kind "value") a plain value."""

    path: Path
    kind: str  # jax, numpy, prng, zarr (an array another program wrote), value
    spec: ArraySpec | None = None
    pieces: tuple[Piece, ...] = ()
    value: Any = None
    extra: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # prng: impl; jax: sharding; numpy: order; zarr: directory

    @property
    def key(self) -> str:
        return join_key(self.path)

    @property
    def shape(self) -> tuple[int, ...] | None:
        return None if self.spec is None else self.spec.shape

    @property
    def dtype(self) -> str | None:
        return None if self.spec is None else self.spec.dtype.name

    @property
    def nbytes(self) -> int:
        return 0 if self.spec is None else self.spec.nbytes


@dataclass(frozen=True, slots=True)
class Tree:
    """One saved tree: what a prefix names."""

    save_id: str
    format: str
    skeleton: Skeleton
    leaves: tuple[StoredLeaf, ...]
    files: tuple[DataFile, ...]
    metadata: Mapping[str, Any]
    created: str
    compression: str | None = None
    indexed: bool = True  # whether the index that eFormer reads may list it

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: one Tree for each prefix ("" is the tree saved without one)."""

    path: str
    save_id: str
    trees: Mapping[str, Tree]

    @property
    def prefixes(self) -> list[str]:
        return list(self.trees)

    @property
    def leaves(self) -> dict[str, StoredLeaf]:
        """Every leaf by its key; with several trees the keys begin with the prefix and a slash."""
        several = len(self.trees) > 1
        return {
            f"{prefix}/{leaf.key}" if several and prefix else leaf.key: leaf
            for prefix, tree in self.trees.items()
            for leaf in tree.leaves
        }

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the tree that `load(path)` would give."""
        return self.tree().metadata

    @property
    def nbytes(self) -> int:
        return sum(tree.nbytes for tree in self.trees.values())

    def tree(self, prefix: str | None = None) -> Tree:
        """The tree of `prefix`. None asks for the un-prefixed tree, or else for the only one."""
        if prefix is None:
            if "" in self.trees or len(self.trees) == 1:
                return self.trees.get("") or next(iter(self.trees.values()))
            raise PrefixError(f"{self.path} holds several trees: say prefix= one of {self._listed()}")
        name = check_prefix(prefix)
        found = self.trees.get(name) or self._below(name)
        if found is None:
            raise PrefixError(f"{self.path} has no tree of prefix {prefix!r}; it has {self._listed()}")
        return found

    def _below(self, prefix: str) -> Tree | None:
        """In another program's tree that knows no prefixes, one is a path: the leaves below it."""
        tree = self.trees.get("")
        if tree is None or tree.format != "foreign":
            return None
        start = tuple(prefix.split("."))
        inside = [leaf for leaf in tree.leaves if leaf.path[: len(start)] == start and len(leaf.path) > len(start)]
        if not inside:
            return None
        skeleton, found = flatten(nest([(leaf.path[len(start) :], leaf) for leaf in inside]))
        return replace(tree, skeleton=skeleton, leaves=tuple(replace(f.value, path=f.path) for f in found))

    def _listed(self) -> str:
        return ", ".join(repr(p) if p else "(no prefix)" for p in self.trees) or "none"

    def __str__(self) -> str:
        lines = [f"{self.path}: {counted(len(self.leaves), 'leaf', 'leaves')}, {self.nbytes:,} bytes"]
        for prefix, tree in self.trees.items():
            lines.append(f"  [{prefix or '(no prefix)'}] {tree.format}, saved {tree.created}")
            for leaf in tree.leaves:
                what = f"{leaf.dtype}{list(leaf.shape or ())}" if leaf.spec else show(leaf.value)
                count = f"  {leaf.nbytes:,} bytes in {counted(len(leaf.pieces), 'piece')}" if leaf.spec else ""
                lines.append(f"    {leaf.key or '(the tree itself)'}  {what}{count}")
        return "\n".join(lines)


def check_prefix(prefix: object) -> str:
    """The prefix as it is recorded; `PrefixError` for one that could leave the checkpoint or confuse it.

    >>> check_prefix("model/encoder")
    'model.encoder'
    """
    if not isinstance(prefix, str):
        raise PrefixError(f"a prefix must be a string, not {prefix!r}")
    if (
        not _is_unicode(prefix)
        or prefix.startswith("/")
        or any(ord(c) < 32 or ord(c) == 127 for c in prefix)
        or len(prefix) > 500
    ):
        raise PrefixError(f"prefix {prefix[:80]!r} must be a short relative name without control characters")
    parts = re.split(r"[/.]", prefix)
    if prefix and ("" in parts or parts[0].startswith("~") or os.path.isabs(prefix)):
        raise PrefixError(f"prefix {prefix!r} has an empty part, '..' or a leading '~'")
    return ".".join(parts)


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the metadata as JSON gives it back; `MetadataError` naming what is not JSON."""

    def copy(value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise MetadataError(f"metadata{where} has the key {key!r}; JSON keys are strings")
            return {key: copy(v, f"{where}[{key!r}]") for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [copy(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if type(value) is float and not math.isfinite(value):
            raise MetadataError(f"metadata{where} is {value}, which is not JSON; store None or a text instead")
        if value is None or type(value) in (bool, int, float) or (type(value) is str and _is_unicode(value)):
            return value
        raise MetadataError(
            f"metadata{where} is {an(type(value).__name__)}, which is not JSON; "
            "convert it (float(x), int(x), x.tolist())"
        )

    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise MetadataError(f"metadata must be a dict, not {an(type(metadata).__name__)}")
    try:
        return copy(metadata, "")
    except RecursionError:
        raise MetadataError("metadata contains itself or is nested too deeply") from None


def _is_unicode(text: str) -> bool:
    """Whether the text is free of surrogates, which JSON does not carry faithfully."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@collector.paused()
def encode_manifest(manifest: Manifest, nonce: str | None = None) -> bytes:
    """The document, sealed with its own digest. A `nonce` makes it differ from others that say the same."""
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
                "format": tree.format,
                "compression": tree.compression,
                "created": tree.created,
                "indexed": tree.indexed,
                "metadata": dict(tree.metadata),
                "structure": to_json(tree.skeleton.root),
                "files": [[f.name, f.size, f.header_length, f.header_digest] for f in tree.files],
                "leaves": [_encode_leaf(leaf) for leaf in tree.leaves],
            }
            for prefix, tree in manifest.trees.items()
        },
    }
    return seal(json.dumps(body, separators=(",", ":")).encode())


@collector.paused()
def decode_manifest(document: bytes, path: str, where: str) -> Manifest:
    """The Manifest in a document; `IntegrityError` for a damaged one, `NewerFormatError` for a later version."""
    try:
        body = json.loads(document, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where} is damaged: {error}") from None
    if not isinstance(body, dict) or "shardkeep" not in body:
        raise IntegrityError(f"{where} is not a shardkeep manifest")
    version = body["shardkeep"]
    if isinstance(version, int) and version > VERSION:
        raise NewerFormatError(
            f"{where} has format version {version}; this shardkeep reads up to {VERSION}: upgrade shardkeep to read it"
        )
    check_seal(document, where)
    if version != VERSION or body.get("block") != BLOCK or body.get("algorithm") != ALGORITHM:
        raise IntegrityError(f"{where} has no known version, digest algorithm or block size")
    try:
        trees = {check_prefix(prefix): _decode_tree(tree) for prefix, tree in body["trees"].items()}
        return Manifest(path, _checked_id(body["save"]), trees)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{where} is malformed: {error}") from error


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: an object that names a key twice means one thing to one reader, another to the next."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name appears twice")
    return found


def check_name(name: Any) -> str:
    """A file name from a document: relative, inside the checkpoint, plain."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name or len(name) > 4000:
        raise IntegrityError(f"not a file name: {str(name)[:80]!r}")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise IntegrityError(f"the file name {name!r} leaves the checkpoint")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a character, which no file system takes
        raise IntegrityError(f"not a file name: {name[:80]!r}") from None
    return name


def _checked_id(value: Any) -> str:
    if not isinstance(value, str) or not _HEX32.fullmatch(value):
        raise ValueError(f"not a save id: {value!r}")
    return value


def _encode_leaf(leaf: StoredLeaf) -> Json:
    key = join_key(leaf.path)
    written = key if key.isascii() else encode(key)
    if leaf.spec is None:
        return {"key": written, "kind": leaf.kind, "value": encode(leaf.value)}
    pieces: list[Json] = []
    for piece in leaf.pieces:
        record: dict[str, Any] = {"file": piece.file, "offset": piece.offset, "digests": piece.digests}
        if piece.region.shape != leaf.spec.shape:
            record |= {"start": list(piece.region.start), "shape": list(piece.region.shape)}
        if piece.stored is not None:
            record["stored"] = piece.stored
        pieces.append(record)
    return {
        "key": written,
        "kind": leaf.kind,
        "dtype": dtype_name(leaf.spec.dtype),
        "shape": list(leaf.spec.shape),
        "pieces": pieces,
        **leaf.extra,
    }


def _decode_tree(data: dict[str, Any]) -> Tree:
    files = tuple(_decode_file(f) for f in data["files"])
    skeleton = Skeleton.from_json(data["structure"])
    paths = skeleton.paths()
    if len(paths) != len(data["leaves"]):
        raise ValueError("the structure and the list of leaves differ")
    leaves = tuple(_decode_leaf(leaf, path, files) for leaf, path in zip(data["leaves"], paths, strict=True))
    if data["format"] not in ("safetensors", "tensorstore", "foreign") or data["compression"] not in (None, "zstd"):
        raise ValueError(f"unknown format {data['format']!r} or compression {data['compression']!r}")
    if data["compression"] is None and any(p.stored is not None for leaf in leaves for p in leaf.pieces):
        raise ValueError("a compressed piece in a tree without compression")
    if not isinstance(data["metadata"], dict) or not isinstance(data["indexed"], bool):
        raise ValueError("metadata is no object, or indexed is no boolean")
    return Tree(
        save_id=_checked_id(data["save"]),
        format=data["format"],
        skeleton=skeleton,
        leaves=leaves,
        files=files,
        metadata=data["metadata"],
        created=str(data["created"]),
        compression=data["compression"],
        indexed=data["indexed"],
    )


def _decode_file(data: list[Any]) -> DataFile:
    name, size, header_length, header_digest = data
    if not 0 <= _integer(header_length) <= _integer(size) or not (header_digest is None or _is_digest(header_digest)):
        raise ValueError(f"impossible file record for {name!r}")
    return DataFile(check_name(name), size, header_length, header_digest)


def _decode_leaf(data: dict[str, Any], path: Path, files: Sequence[DataFile]) -> StoredLeaf:
    if decode(data["key"]) != join_key(path):
        raise ValueError(f"leaf {data['key']!r} is not where the structure has it")
    if data["kind"] == "value":
        return StoredLeaf(path, "value", value=decode(data["value"]))
    if data["kind"] not in ("jax", "numpy", "prng", "zarr"):
        raise ValueError(f"unknown kind of leaf {data['kind']!r}")
    shape = tuple(map(_integer, data["shape"]))
    spec = _spec(shape, data["dtype"])
    pieces = tuple(_decode_piece(piece, spec, files) for piece in data["pieces"])
    if data["kind"] == "zarr":
        return StoredLeaf(path, "zarr", spec, extra={"directory": check_name(data["directory"])})
    if not is_partition(shape, [piece.region for piece in pieces]):
        raise ValueError(f"the pieces of leaf {data['key']!r} do not fill it exactly once")
    extra = {k: data[k] for k in ("impl", "sharding", "order") if k in data}
    if data["kind"] == "prng" and not isinstance(extra.get("impl"), str):
        raise ValueError(f"leaf {data['key']!r} names no PRNG implementation")
    if extra.get("order", "<") not in ("<", ">") or ("sharding" in extra and not _is_layout(extra["sharding"])):
        raise ValueError(f"leaf {data['key']!r} has an unknown byte order or sharding")
    return StoredLeaf(path, data["kind"], spec, pieces, extra=extra)


@lru_cache(maxsize=1024)
def _spec(shape: tuple[int, ...], dtype: str) -> ArraySpec:
    """Thousands of arrays have few of them."""
    spec = ArraySpec(shape, dtype_from_name(dtype))
    if not is_possible(shape, spec.dtype.itemsize):
        raise ValueError(f"impossible shape {shape}")
    return spec


def _is_layout(sharding: Any) -> bool:
    """Whether a recorded sharding is one: a spec of axis names."""
    if not isinstance(sharding, dict):
        return False
    spec: Any = sharding.get("spec", [])
    entries = spec if isinstance(spec, list) else [0]
    return all(
        e is None or isinstance(e, str) or (isinstance(e, list) and all(isinstance(a, str) for a in e)) for e in entries
    )


def _decode_piece(data: dict[str, Any], spec: ArraySpec, files: Sequence[DataFile]) -> Piece:
    region = Region.whole(spec.shape)
    if "start" in data:
        region = Region(tuple(map(_integer, data["start"])), tuple(map(_integer, data["shape"])))
        if len(region.start) != len(spec.shape) or min((*region.start, *region.shape), default=0) < 0:
            raise ValueError("impossible region")
    length = region.size * spec.dtype.itemsize
    stored = None if data.get("stored") is None else _integer(data["stored"])
    file, offset, digests = _integer(data["file"]), _integer(data["offset"]), data["digests"]
    if stored is not None and stored < 1:
        raise ValueError("a compressed piece without bytes")
    if not 0 <= file < len(files) or offset < 0 or offset + (length if stored is None else stored) > files[file].size:
        raise ValueError("a piece lies outside its file")
    if digests is not None:
        if len(digests) != block_count(length) or not all(_is_digest(d) for d in digests):
            raise ValueError("a piece lacks digests")
        digests = tuple(digests)
    return Piece(region, file, offset, length, digests, stored)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _HEX32.fullmatch(value) is not None


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"not an integer: {value!r}")
    return value
