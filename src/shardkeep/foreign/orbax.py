"""Orbax's checkpoints, read in place: one tree, or a step of a `CheckpointManager` with an item in each directory.

`_METADATA` has the structure of a tree, an array is stored under its keys joined with dots. Strings are in
`_strings.json`, shardings in `_sharding`, and the implementations of PRNG keys in `array_metadatas/`. An item is a tree
with its name as the prefix; the item that Orbax calls "default" is the tree without one.
"""

import datetime
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

from shardkeep.errors import IncompleteCheckpointError, IntegrityError, MissingDataError, TreeError
from shardkeep.foreign.chunked import (
    ArrayFiles,
    Cabinet,
    ChunkedReader,
    Chunks,
    Was,
    describe_array,
    note_files,
    plain_scalar,
)
from shardkeep.foreign.documents import ORBAX, files_below, names_below, parse_json, read_json
from shardkeep.foreign.flax import describe_leaf
from shardkeep.foreign.msgpack import FoundArray
from shardkeep.foreign.ocdbt import MANIFEST as DATABASE
from shardkeep.foreign.ocdbt import FileSpan
from shardkeep.foreign.orbaxmsgpack import AGGREGATE, Aggregate, is_aggregate, read_aggregate
from shardkeep.foreign.orbaxtree import OrbaxLeaf, entries_of, impls_of, shardings_of, strings_of, tree_of
from shardkeep.layouts.zarr import ZARRAY
from shardkeep.model.digests import digest
from shardkeep.model.leaves import (
    NATIVE,
    UNSHARDED,
    ForeignArray,
    JaxArray,
    Piece,
    PrngKeys,
    StoredArray,
    StoredLeaf,
    StoredValue,
)
from shardkeep.model.manifest import DataFile, Manifest, Tree, check_prefix
from shardkeep.model.nodes import LEAF
from shardkeep.model.tree import Leaf, Skeleton, flatten
from shardkeep.model.values import Json, JsonObject
from shardkeep.stores.base import Store

log = logging.getLogger("shardkeep")

KIND = "orbax chunks"  # of its arrays in manifests
CHECKPOINT, TREE = ORBAX
V1 = "orbax.checkpoint"  # an empty file of checkpoints of its newer API
MANAGER = "metadata/_ROOT_METADATA"  # in the directory of a CheckpointManager
COMMIT = "commit_success.txt"  # in a bucket a checkpoint is complete with it
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of what a save has not finished
_SHARDING, _STRINGS, _ARRAYS = "_sharding", "_strings.json", "array_metadatas"
_BESIDE = (_STRINGS, _ARRAYS)  # what only versions write that always write `_METADATA` too
_STRICT = "store_array_data_equal_to_fill_value"
_DEFAULT = "default"  # the name of the only item of a step
_METRICS = "metrics"  # an item, and the name of the file in it
_JSON = "metadata"  # the file of an item that holds JSON
_KEYS = "jax_random_key"  # the directory of an item that holds PRNG keys, and `_METADATA` behind it
_NUMPY_KEYS = "np_random_key"  # the same of NumPy's random state
_ALONE = "checkpoint"  # the name of the array that is an item
_TENSORFLOW = ".index"  # ends the name of a file of TensorFlow, which calls another one `checkpoint`
_HANDLERS = {  # those of Orbax whose items are read, in both of its APIs
    *("StandardCheckpointHandler", "PyTreeCheckpointHandler", "ArrayCheckpointHandler", "JsonCheckpointHandler"),
    *("JaxRandomKeyCheckpointHandler", "NumpyRandomKeyCheckpointHandler", "PyTreeHandler", "JsonHandler"),
}
_IMPLS = {2: "threefry2x32", 4: "rbg"}  # by numbers in a key: of keys that were saved without saying which


class OrbaxReader:
    """Reads Orbax's checkpoints; a `ForeignReader`."""

    name: str = "orbax"
    kind: str = KIND

    def recognizes(self, names: Collection[str]) -> bool:
        aggregate = AGGREGATE in names and not any(name.endswith(_TENSORFLOW) for name in names)
        return aggregate or not {CHECKPOINT, TREE, V1}.isdisjoint(names) or bool(_items_in(names))

    def detect(self, store: Store, names: Collection[str]) -> Manifest | None:
        where = store.url.rstrip("/")
        if names and TEMPORARY in os.path.basename(where):
            raise IncompleteCheckpointError(f"{where} is an unfinished Orbax checkpoint, as its name shows")
        if not self.recognizes(names) and not _items_in(names_below(store, names)):
            return None
        _refuse_unfinished(store, names)
        found = _Checkpoint(store).manifest(names)
        if found is None and AGGREGATE in names:
            _refuse_damaged(store, names)
        return found

    def open(self, store: Store, leaf: StoredArray) -> ChunkedReader:
        return ChunkedReader(store, leaf, lambda directory: is_strict(store, directory))


def _items_in(names: Collection[str]) -> list[str]:
    """The items of a step as early versions wrote it, without a document: directories with trees in them.

    Args:
        names: Names with those one level below (`state/_METADATA`). Trees in directories that are numbered, or have a
            document of their own, are checkpoints and not items of one.
    """
    found = [name.rpartition("/")[0] for name in names if name.endswith((f"/{TREE}", f"/{AGGREGATE}"))]
    return [item for item in dict.fromkeys(found) if not item[-1:].isdigit() and f"{item}/{CHECKPOINT}" not in names]


def is_strict(store: Store, directory: str) -> bool | None:
    """Whether every chunk of the arrays in a directory was stored, as far as `_METADATA` says so."""
    while True:  # names of arrays in directories can have slashes
        described = read_json(store, _join(directory, TREE))
        if described is not None:
            said = described.get(_STRICT)
            return said if isinstance(said, bool) else None
        if not directory:
            return None
        directory = directory.rpartition("/")[0]


def _refuse_unfinished(store: Store, names: Collection[str]) -> None:
    where = store.url.rstrip("/")
    if not store.traits.has_directories and COMMIT not in names:
        raise IncompleteCheckpointError(
            f"{where} is an unfinished Orbax checkpoint: in a bucket, Orbax marks complete ones with {COMMIT}, which "
            f"is missing. If you copied a complete checkpoint from a disk, add an empty file {COMMIT} to it"
        )
    temporary = [name for name in names if TEMPORARY in name]
    if temporary:
        raise IncompleteCheckpointError(f"{where} is an unfinished Orbax checkpoint: it contains {temporary[0]}")


def _refuse_damaged(store: Store, names: Collection[str]) -> None:
    """`IntegrityError` if there are arrays beside a file that should say what the tree is, and does not."""
    where = store.locate(AGGREGATE)
    if store.size(AGGREGATE) is not None and any(ZARRAY in store.children(name) for name in names):
        raise IntegrityError(f"{where} is damaged: it does not begin as the files of Orbax do", file=where)


@dataclass(frozen=True)
class _About:
    """What `_CHECKPOINT_METADATA` and the metrics say about all trees."""

    handlers: Mapping[str, str]
    created: str
    metadata: Mapping[str, Json]
    documents: tuple[str, ...]


class _Checkpoint:
    """Describes the checkpoint in a directory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: list[bytes] = []  # what tells one state of the checkpoint from another

    def manifest(self, names: Collection[str]) -> Manifest | None:
        about = self._about(names)
        item = self._item("", names, about)
        trees = {"": item} if item is not None else dict(self._items(names, about))
        if not trees:
            return None
        identity = digest(b"\0".join(self._read))
        return Manifest(
            self._store.url, identity, {prefix: _identified(tree, identity) for prefix, tree in trees.items()}
        )

    def _json(self, name: str) -> JsonObject | None:
        found = read_json(self._store, name)
        self._read.append(json.dumps([name, found]).encode())
        return found

    def _about(self, names: Collection[str]) -> _About:
        found = self._json(CHECKPOINT) if CHECKPOINT in names else None
        found = found or {}
        handlers, custom = found.get("item_handlers"), found.get("custom_metadata")
        moment = found.get("commit_timestamp_nsecs") or found.get("init_timestamp_nsecs")
        metadata: JsonObject = dict(custom) if isinstance(custom, dict) else {}
        metrics = self._json(f"{_METRICS}/{_METRICS}") if _METRICS in names else None
        metrics = metrics or found.get("metrics")
        if isinstance(metrics, dict) and metrics:
            metadata[_METRICS] = dict(metrics)
        known = handlers.items() if isinstance(handlers, dict) else [("", handlers)]
        there = tuple(name for name in (CHECKPOINT, COMMIT, V1) if name in names)
        more = tuple(f"{_METRICS}/{name}" for name in self._store.children(_METRICS)) if _METRICS in names else ()
        return _About({item: str(name) for item, name in known}, _time(moment), metadata, (*there, *more))

    def _items(self, names: Collection[str], about: _About) -> Iterator[tuple[str, Tree]]:
        """The items of a step that are trees, by prefix. Those of handlers that only a program knows are left out."""
        for item in names:
            if item == _METRICS or item.startswith("."):
                continue
            inside = self._store.children(item)
            found = self._item(item, inside, about)
            if found is not None:
                yield "" if item == _DEFAULT else check_prefix(item), found
            elif about.handlers.get(item, "").rpartition(".")[2] in _HANDLERS:
                where = self._store.locate(item)
                problem = f"{where} contains no data, although {CHECKPOINT} lists the item {item!r}"
                raise MissingDataError(problem, file=where)
            elif inside:
                log.debug("%s: its handler is unknown, so it is not read", self._store.locate(item))

    def _item(self, item: str, inside: Collection[str], about: _About) -> Tree | None:
        """The tree that an item is; None if it is of a handler that is not known, or has no files."""
        handler = about.handlers.get(item, "")
        if self._holds_tree(item, inside):
            tree = self._tree(item, inside, about)
            return _unwrapped(tree) if "ArrayCheckpoint" in handler else tree
        if _KEYS in inside:
            return self._keys(item, about)
        if _NUMPY_KEYS in inside:
            directory = _join(item, _NUMPY_KEYS)
            return self._tree(directory, self._store.children(directory), about)
        if _JSON in inside and (item or "JsonCheckpoint" in handler):  # at the top, `metadata` is that of a manager
            return self._plain(item, inside, about)
        return None

    def _holds_tree(self, directory: str, inside: Collection[str]) -> bool:
        """Whether there is a tree of arrays in a directory, or what is left of one."""
        if not {TREE, DATABASE, *_BESIDE}.isdisjoint(inside):
            return True
        return AGGREGATE in inside and is_aggregate(self._store, _join(directory, AGGREGATE))

    def _plain(self, item: str, inside: Collection[str], about: _About) -> Tree:
        """An item that is JSON: plain values."""
        name = _join(item, _JSON)
        found = parse_json(self._store, name, self._store.read(name))
        self._read.append(json.dumps([name, found]).encode())
        skeleton, leaves = _flatten(found, self._store.locate(name))
        stored = tuple(StoredValue(leaf.path, leaf.value) for leaf in leaves)
        files = ArrayFiles().listed(self._store, [_join(item, each) for each in inside] + list(about.documents))
        return Tree("", "foreign", skeleton, stored, files, dict(about.metadata), about.created)

    def _keys(self, item: str, about: _About) -> Tree:
        """An item that is PRNG keys, typed or not."""
        directory = _join(item, _KEYS)
        tree = self._tree(directory, self._store.children(directory), about)
        said = self._json(f"{directory}_metadata/{_JSON}") or {}
        if said.get("typed") and len(tree.arrays) == len(tree.leaves) == 1:
            (leaf,) = tree.arrays
            impl = said.get("impl") or said.get("random_key_impl") or _IMPLS.get((leaf.spec.shape or (0,))[-1])
            if isinstance(impl, str):
                tree = _with_leaf(tree, _as(leaf, PrngKeys(impl)))
        names = [f"{directory}_metadata/{each}" for each in self._store.children(f"{directory}_metadata")]
        names += [name for name in (_join(item, COMMIT),) if self._store.size(name) is not None]
        more = tuple(DataFile(name, self._store.size(name) or 0) for name in names)
        return _unwrapped(replace(tree, files=(*tree.files, *more)))

    def _tree(self, directory: str, inside: Collection[str], about: _About) -> Tree:
        """The tree of arrays in a directory."""
        store = self._store
        _refuse_unfinished_item(store, directory, inside)
        described = self._json(_join(directory, TREE)) if TREE in inside else None
        where = store.locate(_join(directory, TREE))
        if described is None and not set(_BESIDE).isdisjoint(inside):
            raise MissingDataError(f"{where} is missing, which describes the tree", file=where)
        cabinet = Cabinet.at(store, directory)
        if cabinet.database is not None:
            self._read.append(store.read(_join(directory, DATABASE)))
        aggregate = read_aggregate(store, _join(directory, AGGREGATE)) if AGGREGATE in inside else None
        if aggregate is not None:
            self._read.append(aggregate.identity.encode())
        metadatas = self._store.children(_join(directory, _ARRAYS)) if _ARRAYS in inside else []
        arrays = [self._json(_join(directory, f"{_ARRAYS}/{name}")) for name in sorted(metadatas)]
        facts = _Facts(
            strings_of(self._json(_join(directory, _STRINGS)) if _STRINGS in inside else None),
            shardings_of(self._json(_join(directory, _SHARDING)) if _SHARDING in inside else None),
            impls_of([found for found in arrays if found is not None]),
            aggregate,
        )
        if aggregate is not None and described is None:
            tree = aggregate.tree
        else:
            entries = entries_of(described, where) or _entries_found(cabinet, inside)
            tree = tree_of(entries, where, aggregate.values if aggregate else {})
        skeleton, leaves = _flatten(tree, where)
        files = ArrayFiles()
        stored = tuple(_leaf(cabinet, leaf, facts, files) for leaf in leaves)
        names = self._names(directory, inside, metadatas, cabinet) + ([aggregate.name] if aggregate else [])
        return Tree(
            "",
            "foreign",
            skeleton,
            stored,
            files.listed(store, [*names, *about.documents]),
            dict(about.metadata),
            about.created,
            compression="zstd" if any(p.stored is not None for leaf in stored for p in _pieces(leaf)) else None,
            indexed=False,
        )

    def _names(
        self, directory: str, inside: Collection[str], metadatas: Collection[str], cabinet: Cabinet
    ) -> list[str]:
        """The names of the files of a tree, besides those of its pieces."""
        documents = [_join(directory, name) for name in (TREE, _SHARDING, _STRINGS, COMMIT) if name in inside]
        documents += [_join(directory, f"{_ARRAYS}/{name}") for name in metadatas]
        if cabinet.database is not None:
            documents += sorted(cabinet.database.files)
        if not self._store.traits.costly_requests:  # what was merged into the database, and belongs to the tree too
            for name in ("d", *(each for each in inside if each.startswith("ocdbt.process_"))):
                documents += files_below(self._store, _join(directory, name))
        return documents


@dataclass(frozen=True)
class _Facts:
    """What documents say about the leaves of a tree, by their names."""

    strings: Mapping[str, str]
    shardings: Mapping[str, JaxArray]
    impls: Mapping[str, str]
    aggregate: Aggregate | None


def _leaf(cabinet: Cabinet, leaf: Leaf, facts: _Facts, files: ArrayFiles) -> StoredLeaf:
    """A leaf as it is stored."""
    entry = leaf.value
    if not isinstance(entry, OrbaxLeaf):
        return _leaf_inside(leaf, facts.aggregate, files)
    name = entry.name
    if entry.kind == "string":
        if name not in facts.strings:
            where = cabinet.store.locate(_join(cabinet.directory, _STRINGS))
            raise IntegrityError(f"{where} has no string {name!r}", file=where)
        return StoredValue(leaf.path, facts.strings[name])
    if entry.is_ambiguous:
        where = cabinet.locate(name)
        raise IntegrityError(
            f"{where}: several leaves of the tree have the name {name!r}, but it stores only one of them"
        )
    chunks = Chunks(cabinet, name)
    if entry.kind == "scalar" and (value := plain_scalar(chunks)) is not None:
        note_files(chunks, files)
        return StoredValue(leaf.path, value)
    if name in facts.impls:
        was = PrngKeys(facts.impls[name])
    else:
        was = NATIVE if entry.kind in ("np.ndarray", "scalar") else facts.shardings.get(name, UNSHARDED)
    return describe_array(chunks, leaf.path, files, KIND, was)


def _leaf_inside(leaf: Leaf, aggregate: Aggregate | None, files: ArrayFiles) -> StoredLeaf:
    """A leaf that is in the file with the structure."""
    assert aggregate is not None
    is_array = isinstance(leaf.value, FoundArray)
    number = files.number(FileSpan(aggregate.name, 0, aggregate.size)) if is_array else 0
    return describe_leaf(leaf, aggregate.name, number)


def _entries_found(cabinet: Cabinet, inside: Collection[str]) -> list[OrbaxLeaf]:
    """The arrays that are there, if no document lists them: dots in their names make levels."""
    if cabinet.database is not None:
        names = cabinet.arrays()
    else:
        found = (name for name in inside if name not in (_ARRAYS, COMMIT))
        store, directory = cabinet.store, cabinet.directory
        described = {".zarray", "zarr.json"}
        names = [name for name in found if not described.isdisjoint(store.children(_join(directory, name)))]
    return [OrbaxLeaf.found(name) for name in sorted(names)]


def _refuse_unfinished_item(store: Store, directory: str, inside: Collection[str]) -> None:
    if DATABASE not in inside and any(name.startswith("ocdbt.process_") for name in inside):
        raise IncompleteCheckpointError(
            f"{store.locate(directory)} is an unfinished Orbax checkpoint: the data of its processes was not merged "
            f"into {DATABASE}"
        )


def _flatten(tree: object, where: str) -> tuple[Skeleton, list[Leaf]]:
    try:
        return flatten(tree)
    except TreeError as error:
        raise IntegrityError(f"{where}: {error}", file=where) from error


def _pieces(leaf: StoredLeaf) -> Sequence[Piece]:
    return leaf.pieces if isinstance(leaf, StoredArray) else ()


def _identified(tree: Tree, identity: str) -> Tree:
    return replace(tree, save_id=identity)


def _with_leaf(tree: Tree, leaf: StoredLeaf) -> Tree:
    return replace(tree, leaves=(leaf,))


def _unwrapped(tree: Tree) -> Tree:
    """A tree of one array, which is the tree itself."""
    if [leaf.path for leaf in tree.leaves] != [(_ALONE,)]:
        return tree
    (leaf,) = tree.leaves
    return replace(tree, skeleton=Skeleton(LEAF), leaves=(replace(leaf, path=()),))


def _as(leaf: StoredArray, was: Was) -> StoredArray:
    """The same array, which was something else for the program."""
    if isinstance(leaf.origin, ForeignArray):
        return replace(leaf, origin=replace(leaf.origin, was=was))
    return replace(leaf, origin=was)


def _time(nanoseconds: Json) -> str:
    """A time as ISO 8601 in UTC; empty if there is none."""
    with suppress(TypeError, ValueError, OverflowError, OSError):
        moment = datetime.datetime.fromtimestamp(cast(int, nanoseconds) / 1e9, datetime.UTC)
        return moment.isoformat(timespec="microseconds")
    return ""


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name
