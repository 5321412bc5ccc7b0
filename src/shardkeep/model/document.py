"""The document of a manifest. Writing it is the commit.

Its JSON is specified in docs/format.md. Everything read from a file is validated here before anything is allocated or
opened because of it: names stay inside the checkpoint, pieces fill their arrays exactly once, every block has a digest.
"""

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, SupportsIndex, TypedDict, cast

import numpy as np

from shardkeep.errors import IntegrityError, NewerFormatError, an
from shardkeep.model.digests import ALGORITHM, BLOCK, check_seal, seal
from shardkeep.model.fileseries import SHORTEST, decode_series, join_series
from shardkeep.model.leafrecords import HEX32, LeafRecord, LeafWriter, Tables, decode_leaf, integer, is_digest
from shardkeep.model.leaves import StoredArray
from shardkeep.model.manifest import OURS, DataFile, Manifest, Tree, check_prefix
from shardkeep.model.metadata import decode_metadata, encode_metadata
from shardkeep.model.naming import check_name, clean_name, is_table
from shardkeep.model.pieces import CellPattern, ReadTable, TableSet, TableSource, in_tables
from shardkeep.model.tree import Skeleton, to_json
from shardkeep.model.values import Json, JsonObject, as_list, to_text

VERSION = 2  # of the format: raised when an older reader would misread a document
_STEPS = 1 << 63  # recorded steps are below

_FORMATS = {"safetensors": "safetensors", "tensorstore": "zarr", "foreign": "foreign"}  # on disk → for people
_NAMES_ON_DISK = {name: on_disk for on_disk, name in _FORMATS.items()}
_START = b'{"shardkeep":'
_ROOT_FIELDS = {"digest", "algorithm", "block", "save", "trees"}
_MARKS = (b"shardkeep", b"xxh3-128", b'"digests":', b'"leaves":[', b'"tables":[')
_SOURCE = re.compile(r"[a-z0-9][a-z0-9 ._-]{0,39}")  # a word or two for a table
_FIRST_SOURCE = "eformer"  # of a foreign tree without a source: documents had none while no other kind could be read


# What the parts of a document hold. Those of a file are taken to be like this, and checked field by field: whatever is
# not, raises an error that `decode_manifest` reports.
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
    files: list[Json]
    tables: list[dict[str, Json]]  # not in version 1
    patterns: NotRequired[list[list[int]]]
    leaves: list[LeafRecord]


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
    }
    trees = ",".join([f"{to_text(prefix)}:{_encode_tree(tree)}" for prefix, tree in manifest.trees.items()])
    return seal(f'{to_text(body)[:-1]},"trees":{{{trees}}}}}'.encode())


def _encode_tree(tree: Tree) -> str:
    found, writer = in_tables(tree), LeafWriter()
    leaves = ",".join([writer.write(leaf, found.pieces.get(number)) for number, leaf in enumerate(tree.leaves)])
    body: JsonObject = {
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
        "files": encode_files(tree.files),
        "tables": [_encode_source(source) for source in found.sources],
        **({"patterns": [list(pattern.tables) for pattern in writer.patterns]} if writer.patterns else {}),
    }
    return f'{to_text(body)[:-1]},"leaves":[{leaves}]}}'


def _encode_source(source: TableSource) -> Json:
    where: JsonObject = {"data": source.text} if source.file is None else {"file": source.file}
    return {**where, **({"base": source.base} if source.base else {}), **({} if source.checked else {"digests": False})}


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


def decode_manifest(document: bytes, path: str, where: str, read: ReadTable | None = None) -> Manifest:
    """The Manifest in a document; `IntegrityError` for a damaged one, `NewerFormatError` for one that is not known.

    Args:
        document: The document.
        path: Where the checkpoint is.
        where: Where the document is, for messages.
        read: Reads a file with a table of pieces, when a piece in it is needed. None: there can be no such files.
    """
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
    if type(version) is not int or version < 1 or body.get("block") != BLOCK or body.get("algorithm") != ALGORITHM:
        raise IntegrityError(f"{where} has an unknown version, digest algorithm or block size", file=where)
    try:
        records = cast("dict[str, _TreeRecord]", body["trees"])
        tabled = _Tabled(where, read) if version > 1 else None
        trees = {_checked_prefix(prefix): _decode_tree(tree, tabled) for prefix, tree in records.items()}
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


def check_bools(**given: object) -> list[bool]:
    """Arguments that must be True or False, in order, also NumPy's. Anything else raises a `TypeError` that names it.

    >>> check_bools(overwrite=np.True_, copy=False)
    [True, False]
    """
    for name, value in given.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} must be True or False, not {value!r:.80}")
    return [bool(value) for value in given.values()]


def no_duplicates(pairs: list[tuple[str, Json]]) -> JsonObject:
    """For `json.loads`: refuse an object with a repeated key, which readers interpret differently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a repeated key")
    return found


def _checked_prefix(prefix: str) -> str:
    """The prefix, which must be in the form in which prefixes are recorded."""
    if check_prefix(prefix) != prefix:
        raise ValueError(f"not a prefix: {prefix!r:.80}")
    return prefix


def _checked_id(value: object) -> str:
    if not isinstance(value, str) or not HEX32.fullmatch(value):
        raise ValueError(f"not a save id: {value!r}")
    return value


@dataclass(frozen=True)
class _Tabled:
    """How the tables of a document with tables are read."""

    where: str
    read: ReadTable | None

    def tables_of(self, data: _TreeRecord, files: Sequence[DataFile]) -> Tables:
        sources = [self._source(record, files) for record in as_list(data["tables"])]
        patterns = [CellPattern(tuple(map(integer, as_list(pattern)))) for pattern in as_list(data.get("patterns", []))]
        if any(not 0 <= table < len(sources) for pattern in patterns for table in pattern.counts):
            raise ValueError("a pattern refers to a missing table")
        found = TableSet(sources, files, data["compression"] is not None, self.where, self.read)
        return Tables(found, patterns)

    def _source(self, record: Mapping[str, Json], files: Sequence[DataFile]) -> TableSource:
        base, checked = integer(record.get("base", 0)), record.get("digests", True)
        if base < 0 or not isinstance(checked, bool) or ("file" in record) == ("data" in record):
            raise ValueError("a table is neither in the manifest nor in a file")
        if "data" in record:
            if not isinstance(text := record["data"], str):
                raise ValueError("a table is not text")
            return TableSource(None, text, base, checked)
        number = integer(record["file"])
        if not 0 <= number < len(files) or self.read is None:
            raise ValueError("a table refers to a missing file")
        file = files[number]
        if file.header_digest is None or file.header_length != file.size:
            raise ValueError(f"the table in {file.name} has no digest")
        return TableSource(number, "", base, checked)


def _decode_tree(data: _TreeRecord, tabled: _Tabled | None) -> Tree:
    """A tree, the pieces of which are in tables, or before version 2 in the records of its leaves."""
    if not isinstance(data["format"], str) or not isinstance(data["compression"], str | None):
        raise TypeError("the format or the compression of a tree is not text")
    if data["format"] not in _FORMATS or data["compression"] not in (None, "zstd"):
        named = " with compression ".join(repr(name) for name in (data["format"], data["compression"]) if name)
        raise NewerFormatError(
            f"has a tree in the format {named}, which is unknown: upgrade shardkeep, or register that layout"
        )
    files = decode_files(as_list(data["files"]), series=tabled is not None)
    skeleton = Skeleton.from_json(data["structure"])
    paths = skeleton.paths()
    if len(paths) != len(data["leaves"]):
        raise ValueError("the structure and the list of leaves do not match")
    stored = files if tabled is None else tabled.tables_of(data, files)
    leaves = tuple(
        [decode_leaf(leaf, path, i, stored) for i, (leaf, path) in enumerate(zip(data["leaves"], paths, strict=True))]
    )
    if tabled is None and data["compression"] is None:
        arrays = (leaf for leaf in leaves if isinstance(leaf, StoredArray))
        if any(piece.stored is not None for array in arrays for piece in array.pieces):
            raise ValueError("a tree without compression has a compressed piece")
    metadata: Json = {} if data["metadata"] == {} else decode_metadata(data["metadata"])
    if not isinstance(metadata, dict) or not isinstance(data["indexed"], bool) or not isinstance(data["created"], str):
        raise ValueError("metadata is not an object, indexed is not a boolean, or created is not text")
    published = data.get("published", False)
    if not isinstance(published, bool):
        raise ValueError("published is not a boolean")
    for file in files if published else ():
        if not is_table(file.name):
            check_name(clean_name(file.name, _checked_id(data["save"])))
    if "step" in data and not 0 <= integer(data["step"]) < _STEPS:
        raise ValueError(f"invalid step {data['step']}")
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
        created=data["created"],
        compression=data["compression"],
        indexed=data["indexed"],
        published=published,
        step=data.get("step"),
        source=source,
    )


def encode_files(files: Sequence[DataFile]) -> list[Json]:
    """Files as a manifest, and the record of a save by several processes, have them."""
    records: list[Json] = [[file.name, file.size, file.header_length, file.header_digest] for file in files]
    return records if len(files) < SHORTEST else join_series(files, records)


def decode_files(records: Sequence[Json], series: bool = True) -> tuple[DataFile, ...]:
    """The files in such records; `ValueError` if one is malformed. `series`: whether a record may be of a series."""
    files: list[DataFile] = []
    for record in records:
        if series and isinstance(record, dict):
            files += decode_series(record)
            continue
        name, size, header_length, header_digest = as_list(record)
        size, header_length = integer(size), integer(header_length)
        if not 0 <= header_length <= size or not (header_digest is None or is_digest(header_digest)):
            raise ValueError(f"invalid file record for {name!r}")
        files.append(DataFile(check_name(name), size, header_length, header_digest))
    if any(isinstance(record, dict) for record in records) and len({file.name for file in files}) < len(files):
        raise ValueError("a file has two records")
    return tuple(files)
