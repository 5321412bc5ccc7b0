"""What JAX's own serialization writes, read in place: trees with a `pytreedef.json`, and databases of arrays alone.

`jax.experimental.array_serialization.pytree_serialization` writes the structure and numbers the arrays. Others, such as
levanter, write each array under its key with `GlobalAsyncCheckpointManager`: into an OCDBT database, whose keys are
the structure, or into directories, which `zarr.py` and this module find by their documents.
"""

import base64
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from shardkeep.errors import IncompleteCheckpointError, IntegrityError
from shardkeep.foreign.chunked import ArrayFiles, Cabinet, ChunkedReader, Chunks, describe_array
from shardkeep.foreign.documents import files_below, read_json
from shardkeep.foreign.ocdbt import MANIFEST as DATABASE
from shardkeep.foreign.pytreedef import decode_pytreedef
from shardkeep.model.digests import digest
from shardkeep.model.leaves import StoredArray, StoredLeaf
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.model.nodes import LEAF, Child, Node
from shardkeep.model.tree import Path, Skeleton, flatten, nest
from shardkeep.model.values import JsonObject
from shardkeep.stores.base import Store

TREE, ARRAYS = "pytreedef.json", "array_store"
ARCHIVE = "archive.zip"  # where early versions put what is not an array, pickled
METADATA = "metadata.json"  # of a step, in levanter's and other programs' directories
KIND = "jax chunks"  # of its arrays in manifests: one that is not stored has the fill value
_STRUCTURE, _LEAVES = "__jax_pytreedef_repr", "__jax_leaf_ids"
_ARRAY = re.compile(r"Array\(.*\)", re.DOTALL)  # what `pytreedef.json` calls a leaf that is stored
_NONE = "null"  # and one that is None
_DATA, _PROCESS = "d", "ocdbt.process_"  # directories of a database, and of what its processes wrote
_MOST = 10_000  # names below a database; with links from a directory to itself there is no end


class JaxReader:
    """Reads what JAX's own serialization writes; a `ForeignReader`."""

    name: str = "jax"
    kind: str = KIND

    def recognizes(self, names: Collection[str]) -> bool:
        return DATABASE in names or (TREE in names and not {ARRAYS, ARCHIVE}.isdisjoint(names))

    def detect(self, store: Store, names: Collection[str]) -> Manifest | None:
        if not self.recognizes(names):
            return None
        return _PytreeDirectory(store).manifest() if TREE in names else _database(store, names)

    def open(self, store: Store, leaf: StoredArray) -> ChunkedReader:
        return ChunkedReader(store, leaf, lambda _: None)


class _PytreeDirectory:
    """Describes a tree that has a `pytreedef.json`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._where = store.locate(TREE)

    def manifest(self) -> Manifest:
        described = read_json(self._store, TREE) or {}
        structure, told = described.get(_STRUCTURE), described.get(_LEAVES)
        if not isinstance(structure, str) or not isinstance(told, list):
            raise IntegrityError(f"{self._where} is malformed: it has no structure or no leaves", file=self._where)
        try:
            encoded = base64.b64decode(structure, validate=True)
        except ValueError as error:
            raise IntegrityError(f"{self._where} is malformed: {error}", file=self._where) from error
        root = decode_pytreedef(encoded, self._where)
        stored = [self._is_stored(number, one) for number, one in enumerate(told)]
        skeleton = Skeleton(_without(root, iter(stored), self._where))
        numbers = [number for number, is_stored in enumerate(stored) if is_stored]
        paths = skeleton.paths()
        if len(paths) != len(numbers):
            raise IntegrityError(f"{self._where} is malformed: its leaves do not match its structure", file=self._where)
        cabinet = self._cabinet(bool(numbers))
        files = ArrayFiles()
        leaves = [
            describe_array(Chunks(cabinet, str(number)), path, files, KIND)
            for path, number in zip(paths, numbers, strict=True)
        ]
        names = [TREE, *files_below(self._store, ARRAYS)] if numbers else [TREE]
        return _manifest(self._store, skeleton, leaves, files, names, json.dumps(described).encode())

    def _is_stored(self, number: int, told: object) -> bool:
        if told == _NONE or told is None:
            return False
        if not isinstance(told, str) or not _ARRAY.fullmatch(told):
            raise IntegrityError(
                f"{self._where}: leaf {number} is of the type {told!r:.60}, which is not an array: JAX pickles those, "
                "and pickles are not read",
                file=self._where,
            )
        return True

    def _cabinet(self, has_arrays: bool) -> Cabinet:
        inside = self._store.children(ARRAYS) if has_arrays else []
        if has_arrays and DATABASE not in inside:
            what = "the data of its processes was not merged" if inside else f"there is no {ARRAYS}"
            raise IncompleteCheckpointError(f"{self._store.url} is an unfinished checkpoint of JAX: {what}")
        return Cabinet.at(self._store, ARRAYS) if has_arrays else Cabinet(self._store, ARRAYS, None)


def _without(node: Child, stored: Iterator[bool], where: str) -> Child:
    """The structure with None for leaves that are None: JAX counts them as leaves."""
    if node is LEAF:
        is_stored = next(stored, None)
        if is_stored is None:
            raise IntegrityError(f"{where} is malformed: its structure has more leaves than it lists", file=where)
        return LEAF if is_stored else None
    if not isinstance(node, Node):
        return None
    return replace(node, children=tuple(_without(child, stored, where) for child in node.children))


def _database(store: Store, names: Collection[str]) -> Manifest:
    """Arrays in databases, whose keys are the structure: in one, and in those of directories below it.

    JAX puts an array into a database in the directory above its name, so a tree with several levels has several.
    """
    cabinets = [Cabinet.at(store, directory) for directory in _databases(store, names)]
    found: dict[Path, Chunks] = {}
    for cabinet in cabinets:
        above = tuple(cabinet.directory.split("/")) if cabinet.directory else ()
        for name in cabinet.arrays():
            path = (*above, *name.split("/"))
            if path in found:
                where = found[path].where
                raise IntegrityError(f"{cabinet.locate(name)} and {where} are arrays with the same name", file=where)
            found[path] = Chunks(cabinet, name)
    skeleton, leaves = flatten(nest(list(found.items())))
    files = ArrayFiles()
    stored = [describe_array(leaf.value, leaf.path, files, KIND) for leaf in leaves]
    documents = [name for each in cabinets if each.database is not None for name in sorted(each.database.files)]
    described = read_json(store, METADATA) if METADATA in names else None
    documents += [METADATA] if METADATA in names else []
    identity = b"".join(store.read(_join(cabinet.directory, DATABASE)) for cabinet in cabinets)
    return _manifest(store, skeleton, stored, files, documents, identity, described)


def _databases(store: Store, names: Collection[str]) -> list[str]:
    """The directories with databases. What is in the directories of a database itself is not looked at."""
    found: list[str] = []
    pending = [("", names)]
    for directory, inside in pending:  # which grows
        if len(pending) > _MOST:
            raise IntegrityError(f"{store.url} has more than {_MOST:,} directories and files below its database")
        found += [directory] if DATABASE in inside else []
        for name in inside:
            below = _join(directory, name)
            is_data = name == _DATA and DATABASE in inside and store.size(_join(below, DATABASE)) is None
            if not is_data and name not in (DATABASE, METADATA) and not name.startswith((".", _PROCESS)):
                pending.append((below, store.children(below)))
    return found


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def _manifest(
    store: Store,
    skeleton: Skeleton,
    leaves: Sequence[StoredLeaf],
    files: ArrayFiles,
    names: Sequence[str],
    identity: bytes,
    metadata: JsonObject | None = None,
) -> Manifest:
    save_id = digest(identity)
    packed = any(p.stored is not None for leaf in leaves if isinstance(leaf, StoredArray) for p in leaf.pieces)
    tree = Tree(
        save_id,
        "foreign",
        skeleton,
        tuple(leaves),
        files.listed(store, names),
        metadata or {},
        created="",
        compression="zstd" if packed else None,
        indexed=False,
    )
    return Manifest(store.url, save_id, {"": tree})
