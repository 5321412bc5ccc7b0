"""The manifest: the document that says what a checkpoint holds. Writing it is the commit.

Its JSON is specified in docs/format.md. Everything read from a file is validated here before anything is allocated or
opened because of it: names stay inside the checkpoint, pieces fill their arrays exactly once, every block has a digest.
"""

import json
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, cast

from shardkeep.errors import IntegrityError, NewerFormatError, PrefixError, an, counted
from shardkeep.model.arrays import ArraySpec, Region, dtype_from_name, dtype_name, is_partition, is_possible
from shardkeep.model.digests import ALGORITHM, BLOCK, block_count, check_seal, seal
from shardkeep.model.keys import KeyTable
from shardkeep.model.metadata import decode_metadata, encode_metadata
from shardkeep.model.naming import clean_name
from shardkeep.model.perprocess import KIND, Rows
from shardkeep.model.records import record
from shardkeep.model.summaries import MOST_SHOWN, cut, row_of, rows_of
from shardkeep.model.tree import Path, Skeleton, flatten, join_key, nest, show_key, to_json
from shardkeep.model.values import Json, decode, encode, is_unicode

MANIFEST = "manifest.json"
VERSION = 1
_STEPS = 1 << 63  # recorded steps are below

_FORMATS = {"safetensors": "safetensors", "tensorstore": "zarr", "foreign": "foreign"}  # on disk → for people
_NAMES_ON_DISK = {name: on_disk for on_disk, name in _FORMATS.items()}
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
    """One stored Region. `length` is the number of its raw bytes, `stored` that in the file if it is compressed."""

    region: Region
    file: int
    offset: int
    length: int
    digests: tuple[str, ...] | None
    stored: int | None = None


@record
class StoredLeaf:
    """A saved leaf: an array, or a plain value. `inspect(path).leaves["layers/0/w"]` is one.

    Attributes:
        key: The names on the way to the leaf, joined with `/`.
        path: The same as a tuple of names.
        kind: What the leaf was when it was saved: "jax" (a `jax.Array`), "numpy" (a `numpy.ndarray`), "prng" (typed
            PRNG keys, stored as their key data), "per_process" (a `PerProcess` value of each process), "zarr" (an
            array that another program wrote) or "value" (a plain Python or NumPy value).
        shape: The shape of an array; None for a plain value.
        dtype: The name of an array's dtype, for example "bfloat16"; None for a plain value.
        nbytes: The size of an array, uncompressed; 0 for a plain value.
        value: A plain value; None for an array.
        processes: How many processes saved a `PerProcess` leaf, each its own value; None for any other leaf.

    Anything else is internal and may change.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "step_1", {"layers": [{"w": np.zeros((2, 3), np.float32)}], "step": 1})
    >>> shardkeep.inspect(tmp / "step_1").leaves["layers/0/w"]
    <StoredLeaf layers/0/w: float32[2, 3], 24 bytes in 1 piece>
    """

    path: Path
    kind: str
    spec: ArraySpec | None = None
    pieces: tuple[Piece, ...] = ()
    value: Any = None
    extra: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # prng: impl; jax: sharding; numpy: order; per_process: lengths; zarr: directory

    @property
    def key(self) -> str:
        """The names on the way to the leaf, joined with `/`."""
        return show_key(self.path)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of an array; None for a plain value."""
        return None if self.spec is None else self.spec.shape

    @property
    def dtype(self) -> str | None:
        """The name of an array's dtype; None for a plain value."""
        return None if self.spec is None else self.spec.dtype.name

    @property
    def nbytes(self) -> int:
        """The size of an array, uncompressed; 0 for a plain value."""
        return 0 if self.spec is None else self.spec.nbytes

    @property
    def processes(self) -> int | None:
        """How many processes saved a `PerProcess` leaf, each its own value; None for any other leaf."""
        return len(self.extra["lengths"]) if self.kind == KIND else None

    def __dir__(self) -> list[str]:
        return ["dtype", "key", "kind", "nbytes", "path", "processes", "shape", "value"]

    def __repr__(self) -> str:
        return f"<StoredLeaf {row_of(self)}>"


@dataclass(frozen=True, repr=False)
class Tree:
    """One saved tree of a checkpoint. `inspect(path).tree(prefix)` is one.

    Attributes:
        format: How it is stored: "safetensors", "zarr", or "foreign" if another program wrote it.
        compression: "zstd" or None.
        created: When it was saved: ISO 8601 in UTC; empty if another program wrote it and did not say.
        metadata: The metadata it was saved with.
        leaves: Its leaves, a tuple of `StoredLeaf`, in the order of the tree.
        nbytes: The size of its arrays, uncompressed.
        save_id: The id of the save that wrote it.
        step: The training step that was passed to `save`; None if there was none.

    Anything else is internal and may change.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "step_1", {"w": np.zeros(3)}, prefix="ema", metadata={"step": 1})
    >>> tree = shardkeep.inspect(tmp / "step_1").tree("ema")
    >>> tree.format, tree.nbytes, len(tree.leaves), tree.metadata
    ('safetensors', 24, 1, {'step': 1})
    """

    save_id: str
    format: str
    skeleton: Skeleton
    leaves: tuple[StoredLeaf, ...]
    files: tuple[DataFile, ...]
    metadata: Mapping[str, Any]
    created: str
    compression: str | None = None
    indexed: bool = True  # whether the index that eFormer reads may list it
    published: bool = False  # whether its files also have clean names, without the save's id, for other programs
    step: int | None = None  # the training step, if the save recorded one

    @property
    def nbytes(self) -> int:
        """The size of its arrays, uncompressed."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @cached_property
    def clean_names(self) -> dict[str, str]:
        """The clean names of its files, each with the name that the manifest has."""
        return {clean_name(file.name, self.save_id): file.name for file in self.files} if self.published else {}

    @cached_property
    def names(self) -> set[str]:
        """The names of its files, clean names included."""
        return {file.name for file in self.files}.union(self.clean_names)

    def __dir__(self) -> list[str]:
        return ["compression", "created", "format", "leaves", "metadata", "nbytes", "save_id", "step"]

    def __repr__(self) -> str:
        return "\n".join([f"<Tree: {_title(self)}>", *rows_of(self.leaves)])


@dataclass(frozen=True, repr=False)
class Manifest:
    """What a checkpoint holds, as `inspect` returns it. Printing it shows the first leaves of each tree.

    Attributes:
        path: Where the checkpoint is.
        trees: Its trees, a `Tree` for each prefix. The tree that was saved without a prefix has the key "".
        save_id: The id of the save that was committed last.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "step_1", {"w": np.zeros((2, 3), np.float32), "step": 1}, metadata={"loss": 0.5})
    >>> manifest = shardkeep.inspect(tmp / "step_1")
    >>> manifest.prefixes, list(manifest.leaves), manifest.nbytes, manifest.metadata
    ([''], ['w', 'step'], 24, {'loss': 0.5})
    """

    path: str
    save_id: str
    trees: Mapping[str, Tree]

    @property
    def prefixes(self) -> list[str]:
        """The prefixes of its trees, "" for the tree without one."""
        return list(self.trees)

    @property
    def leaves(self) -> dict[str, StoredLeaf]:
        """Every leaf by its key. If there are several trees, keys begin with the prefix and a slash."""
        several = len(self.trees) > 1
        return KeyTable(
            (f"{prefix}/{leaf.key}" if several and prefix else leaf.key, leaf)
            for prefix, tree in self.trees.items()
            for leaf in tree.leaves
        )

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the tree that `load(path)` would return."""
        return self.tree().metadata

    @property
    def step(self) -> int | None:
        """The step recorded for the tree that `load(path)` gives; of several trees with prefixes, the highest one."""
        if "" in self.trees or len(self.trees) == 1:
            return self.tree().step
        return max((tree.step for tree in self.trees.values() if tree.step is not None), default=None)

    @property
    def nbytes(self) -> int:
        """The size of all arrays, uncompressed."""
        return sum(tree.nbytes for tree in self.trees.values())

    def tree(self, prefix: str | None = None) -> Tree:
        """One tree of the checkpoint.

        Args:
            prefix: The prefix it was saved with. None means the tree without a prefix, or else the only one.

        Raises:
            PrefixError: There is no such tree, or there are several and `prefix` does not say which.
        """
        if prefix is None:
            if "" in self.trees or len(self.trees) == 1:
                return self.trees.get("") or next(iter(self.trees.values()))
            raise PrefixError(f"{self.path} contains several trees; pass prefix= one of {self._listed()}")
        name = check_prefix(prefix)
        found = self.trees.get(name) or self._below(name)
        if found is None:
            raise PrefixError(f"{self.path} has no tree with prefix {prefix!r}; it has {self._listed()}")
        return found

    def _below(self, prefix: str) -> Tree | None:
        """In another program's tree without prefixes, a prefix is a path: the leaves below it."""
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

    def __repr__(self) -> str:
        count = sum(len(tree.leaves) for tree in self.trees.values())
        lines = [f"<Manifest {self.path}: {counted(count, 'leaf', 'leaves')}, {self.nbytes:,} bytes>"]
        shown = list(self.trees.items())[:4]
        for prefix, tree in shown:
            lines += [f"  {cut(prefix, 48) or '(no prefix)'}: {_title(tree)}"]
            lines += rows_of(tree.leaves, max((MOST_SHOWN + 1) // len(shown) - 1, 2))
        if len(self.trees) > len(shown):
            lines.append(f"  … and {counted(len(self.trees) - len(shown), 'more tree')}")
        return "\n".join(lines)


def _title(tree: Tree) -> str:
    when = f", saved {tree.created}" if tree.created else ""
    return f"{tree.format}, {counted(len(tree.leaves), 'leaf', 'leaves')}, {tree.nbytes:,} bytes{when}"


def check_prefix(prefix: object) -> str:
    """The prefix as it is recorded; `PrefixError` for one that could leave the checkpoint or be ambiguous.

    >>> check_prefix("model/encoder")
    'model.encoder'
    """
    if not isinstance(prefix, str):
        raise PrefixError(f"a prefix must be a string, not {prefix!r}")
    if (
        not is_unicode(prefix)
        or prefix.startswith("/")
        or any(ord(c) < 32 or ord(c) == 127 for c in prefix)
        or len(prefix) > 500
    ):
        raise PrefixError(
            f"prefix {prefix[:80]!r} must be a relative name of at most 500 characters without control characters"
        )
    parts = re.split(r"[/.]", prefix)
    if prefix and ("" in parts or parts[0].startswith("~") or os.path.isabs(prefix)):
        raise PrefixError(f"prefix {prefix!r} must not contain an empty part or '..', or start with '~'")
    return ".".join(parts)


def check_step(step: Any) -> int | None:
    """The step as it is recorded, from any integer; `TypeError` or `ValueError` for anything else.

    >>> check_step(100), check_step(None)
    (100, None)
    """
    if step is None:
        return None
    if isinstance(step, bool) or getattr(getattr(step, "dtype", None), "kind", "i") not in "iu":
        raise TypeError(f"step must be an integer, not {step!r}")
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an integer, not {an(type(step).__name__)}") from None
    if not 0 <= number < _STEPS:
        raise ValueError(f"step must be from 0 to 2**63 - 1, not {number}")
    return number


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
                "metadata": encode_metadata(dict(tree.metadata)) if tree.metadata else {},
                "structure": to_json(tree.skeleton.root),
                "files": [[f.name, f.size, f.header_length, f.header_digest] for f in tree.files],
                "leaves": [_encode_leaf(leaf) for leaf in tree.leaves],
            }
            for prefix, tree in manifest.trees.items()
        },
    }
    return seal(json.dumps(body, separators=(",", ":"), allow_nan=False).encode())


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
        raise IntegrityError(f"{where} has an unknown version, digest algorithm or block size")
    try:
        trees = {check_prefix(prefix): _decode_tree(tree) for prefix, tree in body["trees"].items()}
        return Manifest(path, _checked_id(body["save"]), trees)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{where} is malformed: {error}") from error


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: refuse an object with a repeated key, which readers interpret differently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a repeated key")
    return found


def check_name(name: Any) -> str:
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
        raise ValueError("the structure and the list of leaves do not match")
    leaves = tuple(_decode_leaf(leaf, path, files) for leaf, path in zip(data["leaves"], paths, strict=True))
    if data["format"] not in _FORMATS or data["compression"] not in (None, "zstd"):
        raise ValueError(f"unknown format {data['format']!r} or compression {data['compression']!r}")
    if data["compression"] is None and any(p.stored is not None for leaf in leaves for p in leaf.pieces):
        raise ValueError("a tree without compression has a compressed piece")
    metadata = decode_metadata(data["metadata"])
    if not isinstance(metadata, dict) or not isinstance(data["indexed"], bool):
        raise ValueError("metadata is not an object, or indexed is not a boolean")
    published = data.get("published", False)
    if not isinstance(published, bool):
        raise ValueError("published is not a boolean")
    for file in files if published else ():
        check_name(clean_name(file.name, _checked_id(data["save"])))
    if "step" in data and not 0 <= _integer(data["step"]) < _STEPS:
        raise ValueError(f"impossible step {data['step']}")
    return Tree(
        save_id=_checked_id(data["save"]),
        format=_FORMATS[data["format"]],
        skeleton=skeleton,
        leaves=leaves,
        files=files,
        metadata=cast(dict[str, Any], metadata),
        created=str(data["created"]),
        compression=data["compression"],
        indexed=data["indexed"],
        published=published,
        step=data.get("step"),
    )


def _decode_file(data: list[Any]) -> DataFile:
    name, size, header_length, header_digest = data
    if not 0 <= _integer(header_length) <= _integer(size) or not (header_digest is None or _is_digest(header_digest)):
        raise ValueError(f"invalid file record for {name!r}")
    return DataFile(check_name(name), size, header_length, header_digest)


def _decode_leaf(data: dict[str, Any], path: Path, files: Sequence[DataFile]) -> StoredLeaf:
    if decode(data["key"]) != join_key(path):
        raise ValueError(f"leaf {data['key']!r} is not at this place in the structure")
    if data["kind"] == "value":
        return StoredLeaf(path, "value", value=decode(data["value"]))
    if data["kind"] not in ("jax", "numpy", "prng", KIND, "zarr"):
        raise ValueError(f"unknown kind of leaf {data['kind']!r}")
    shape = tuple(map(_integer, data["shape"]))
    spec = _spec(shape, data["dtype"])
    pieces = tuple(_decode_piece(piece, spec, files) for piece in data["pieces"])
    if data["kind"] == "zarr":
        return StoredLeaf(path, "zarr", spec, extra={"directory": check_name(data["directory"])})
    if not is_partition(shape, [piece.region for piece in pieces]):
        raise ValueError(f"the pieces of leaf {data['key']!r} do not fill it exactly once")
    extra = {k: data[k] for k in ("impl", "sharding", "order", "lengths") if k in data}
    if data["kind"] == KIND:
        Rows.stored(extra.get("lengths"), spec)
    if data["kind"] == "prng" and not isinstance(extra.get("impl"), str):
        raise ValueError(f"leaf {data['key']!r} has no PRNG implementation")
    if extra.get("order", "<") not in ("<", ">") or ("sharding" in extra and not _is_layout(extra["sharding"])):
        raise ValueError(f"leaf {data['key']!r} has an unknown byte order or sharding")
    return StoredLeaf(path, data["kind"], spec, pieces, extra=extra)


@lru_cache(maxsize=1024)
def _spec(shape: tuple[int, ...], dtype: str) -> ArraySpec:
    """Cached: thousands of arrays share a few specs."""
    spec = ArraySpec(shape, dtype_from_name(dtype))
    if not is_possible(shape, spec.dtype.itemsize):
        raise ValueError(f"invalid shape {shape}")
    return spec


def _is_layout(sharding: Any) -> bool:
    """Whether a recorded sharding is well-formed: a spec of axis names."""
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
            raise ValueError("invalid region")
    length = region.size * spec.dtype.itemsize
    stored = None if data.get("stored") is None else _integer(data["stored"])
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


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _HEX32.fullmatch(value) is not None


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"not an integer: {value!r}")
    return value
