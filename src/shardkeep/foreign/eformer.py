"""eFormer's checkpoint directories, read in place, and the index that lets eFormer read ours.

Version 1.0 of the index has no prefixes; 2.0 has them, and so have later versions, which are named after the package.
Without an index, the directory is searched for zarr arrays. Tree structures come from `<prefix>_structure.json`; the
pickles in it are decoded without running anything.
"""

import base64
import binascii
import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NotRequired, TypedDict, cast

from shardkeep.errors import IncompleteCheckpointError, IntegrityError
from shardkeep.foreign.base import CompanionIndex
from shardkeep.foreign.documents import ORBAX
from shardkeep.foreign.orbaxmsgpack import AGGREGATE
from shardkeep.foreign.pickles import PickledObject, decode_pickle, is_plain_within, plain_value
from shardkeep.foreign.zarr import KIND, ZarrReader, describe, file_names, has_zarr_arrays
from shardkeep.layouts.zarr import ZARRAY, zarr_dtype
from shardkeep.model.digests import digest
from shardkeep.model.document import no_duplicates
from shardkeep.model.leaves import ForeignArray, StoredArray, StoredLeaf, StoredValue
from shardkeep.model.manifest import MANIFEST, DataFile, Manifest, Tree, check_prefix
from shardkeep.model.metadata import untagged
from shardkeep.model.naming import check_name, dotted_names, prefix_directory
from shardkeep.model.nodes import LEAF, Child, Node, find_class
from shardkeep.model.tree import Path, Skeleton, flatten, name_children, nest
from shardkeep.model.values import Json, JsonObject, is_plain
from shardkeep.stores.base import CONTROL, Store

log = logging.getLogger("shardkeep")

TENSORSTORE_INDEX = "tensorstore_index.json"
CHECKPOINT_METADATA = "checkpoint_metadata.json"
_MARK = "shardkeep"
_RECORDED = frozenset(  # the fields of eFormer's metadata, which its manager records all together
    ("version", "timestamp", "checksum", "array_metadata", "framework_version", "custom_metadata")
)
_MOST_AUX = 10_000  # plain values allowed in the aux data of one node
_FLAT = re.compile(r"\A<flat index (\d+)>\Z")  # JAX's name for a child without a name
_FACTORIES: dict[str, object] = {f.__name__: f for f in (int, float, bool, str, bytes, list, dict, tuple, set)}


class EformerReader:
    """Reads checkpoints of eFormer, and zarr arrays without an index; a `ForeignReader`."""

    name: str = "eformer"
    kind: str = KIND

    def recognizes(self, names: Collection[str]) -> bool:
        return TENSORSTORE_INDEX in names

    def detect(self, store: Store, names: Collection[str]) -> Manifest | None:
        # Arrays without an index may be what a dead save of ours left: they are looked for only elsewhere.
        ours = MANIFEST in names or store.control in names
        return None if ours and TENSORSTORE_INDEX not in names else _detect(store, search=not ours)

    def open(self, store: Store, leaf: StoredArray) -> ZarrReader:
        return ZarrReader(store, leaf)


class _ListedArray(TypedDict):
    """One array in the index. Those of a file are checked where they are used."""

    path: str
    shape: list[int]
    dtype: str


class _Structure(TypedDict):
    """A structure file: the leaves in order, and the pickled structure of the tree."""

    prefix: str
    leaf_keys_full: list[str]
    arr_mask: list[bool]
    array_relpaths: list[str]
    nonarray_payload: dict[str, str]
    treedef_b64: str
    extras: NotRequired[JsonObject | None]


def _detect(store: Store, search: bool) -> Manifest | None:
    """The checkpoint in a directory. `search`: whether to search for zarr arrays if there is no index."""
    index = _read_json(store, TENSORSTORE_INDEX)
    if index is None:
        return _discover(store) if search else None
    where = store.locate(TENSORSTORE_INDEX)
    if _MARK in index and not search:
        return None  # next to our own control directory: left by a save or delete that did not finish
    if _MARK in index:
        raise IncompleteCheckpointError(
            f"{where} was written by shardkeep, but {MANIFEST} is missing from that directory. Copy {MANIFEST} there "
            "from the original checkpoint, or save again"
        )
    if index.get("format") != "tensorstore":
        raise IntegrityError(
            f"{where} has the format {index.get('format')!r}; only 'tensorstore' is supported", file=where
        )
    try:
        prefixes = cast("dict[str, list[_ListedArray]]", index.get("prefixes", {}))
        grouped = {p: _paths(entries) for p, entries in prefixes.items() if check_prefix(p)}
        if "arrays" in index or not grouped:
            grouped = {"": _paths(cast("list[_ListedArray]", index["arrays"])), **grouped}
    except (TypeError, AttributeError, KeyError) as error:
        raise IntegrityError(f"{where} is malformed: {error}", file=where) from error
    if len(grouped) > 1 and not grouped.get("", True):
        del grouped[""]
    return _manifest(store, grouped, digest(store.read(TENSORSTORE_INDEX)))


def _discover(store: Store) -> Manifest | None:
    found = store.find_directories_with(ZARRAY)
    if not found:
        return None
    above = {name[:i] for name in found for i, c in enumerate(name) if c == "/"}
    # Arrays in a subdirectory with a checkpoint of its own, finished or not, do not belong to this one.
    documents = {MANIFEST, CONTROL, TENSORSTORE_INDEX, *ORBAX, AGGREGATE}
    if any(not documents.isdisjoint(store.children(name)) for name in sorted(above)):
        return None
    log.warning("%s has no %s; a search found %d zarr arrays", store.url, TENSORSTORE_INDEX, len(found))
    manifest = _manifest(store, {"": found}, digest("\n".join(found).encode()))
    if store.size(CHECKPOINT_METADATA) is not None:
        return manifest
    # Other programs may have written them: JAX's `GlobalAsyncCheckpointManager`, for example.
    return replace(manifest, trees={prefix: replace(tree, source="zarr") for prefix, tree in manifest.trees.items()})


def _manifest(store: Store, grouped: Mapping[str, list[str]], identity: str) -> Manifest:
    metadata = _read_json(store, CHECKPOINT_METADATA) or {}
    for key in ("checksum", "array_metadata", "custom_metadata"):
        if not isinstance(metadata.get(key, {}), dict | None):
            raise IntegrityError(f"{store.locate(CHECKPOINT_METADATA)} is malformed: {key!r} is not a JSON object")
    trees: dict[str, Tree] = {}
    for prefix, directories in grouped.items():
        name = check_prefix(prefix)
        if name in trees:
            raise IntegrityError(f"{store.locate(TENSORSTORE_INDEX)} is malformed: it lists the prefix {name!r} twice")
        structure = _read_json(store, f"{prefix}_structure.json") if prefix else None
        trees[name] = _tree(store, prefix, directories, metadata, structure, identity)
    return Manifest(store.url, identity, trees)


def _tree(
    store: Store,
    prefix: str,
    directories: Sequence[str],
    metadata: Mapping[str, Json],
    structure: JsonObject | None,
    identity: str,
) -> Tree:
    leaves: list[StoredLeaf] = []
    files: list[DataFile] = []
    if structure is None:
        skeleton, places = _nested(directories, prefix.replace(".", "/"), store.locate(TENSORSTORE_INDEX))
    else:
        name = f"{prefix}_structure.json"
        skeleton, places, extras = _structured(cast(_Structure, structure), store.locate(name))
        metadata = {**metadata, "custom_metadata": extras}
        files.append(DataFile(name, store.size(name) or 0))  # part of the tree, so it is removed with it
    for path, place in zip(skeleton.paths(), places, strict=True):
        if not isinstance(place, str):
            leaves.append(StoredValue(path, place.value))
            continue
        array = describe(store, place)
        leaves.append(StoredArray(path, array.spec, (), ForeignArray(place, KIND)))
        files += [DataFile(name, store.size(name) or 0) for name in file_names(store, place, array)]
    return Tree(identity, "foreign", skeleton, tuple(leaves), tuple(files), dict(metadata), created="")


def _nested(directories: Sequence[str], prefix: str, where: str) -> tuple[Skeleton, list[str]]:
    """The nested dict implied by the names of arrays, and the directory of each leaf."""
    start = f"{prefix}/" if prefix else ""
    places = {tuple(d.removeprefix(start).split("/")): d for d in directories}
    if len(places) < len(set(directories)):
        raise IntegrityError(f"{where} is malformed: two arrays of prefix {prefix!r} have the same name", file=where)
    skeleton, found = flatten(nest(list(places.items())))
    return skeleton, [leaf.value for leaf in found]


_MALFORMED = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    StopIteration,
    RecursionError,
    binascii.Error,
)


class _Plain:
    """A leaf that is not an array."""

    def __init__(self, value: object) -> None:
        self.value = value


def _structured(structure: _Structure, where: str) -> tuple[Skeleton, list[str | _Plain], JsonObject]:
    """The tree in a structure file, the directory or value of each leaf, and the user's metadata."""
    try:
        keys, mask = structure["leaf_keys_full"], structure["arr_mask"]
        relpaths = iter(structure["array_relpaths"])
        payload = structure["nonarray_payload"]
        treedef = decode_pickle(base64.b64decode(structure["treedef_b64"]), where)
        start = len(str(structure["prefix"]).split("."))
        names: list[Path] = [tuple(_FLAT.sub(r"\1", part) for part in str(key).split("."))[start:] for key in keys]
        places: list[str | _Plain] = []
        no_leaves: dict[int, Node | None] = {}
        for number, (is_array, _) in enumerate(zip(mask, keys, strict=True)):
            if is_array:
                places.append(check_name(next(relpaths)))
                continue
            value = plain_value(decode_pickle(base64.b64decode(payload[str(number)]), where))
            if value is None:
                no_leaves[number] = None
            elif isinstance(value, Node):
                no_leaves[number] = value
            else:
                places.append(_Plain(value))
        return _skeleton(treedef, names, no_leaves), places, dict(structure.get("extras") or {})
    except _MALFORMED as error:
        if isinstance(error, IntegrityError):
            raise
        raise IntegrityError(f"{where} is malformed: {error!r}", file=where) from error


def _skeleton(treedef: Any, names: Sequence[Path], no_leaves: Mapping[int, Node | None]) -> Skeleton:
    """A pickled PyTreeDef (nodes in post-order) as a Skeleton.

    `no_leaves` gives, by leaf number, the nodes that replace leaves which are neither arrays nor plain values.
    """
    if not isinstance(treedef, PickledObject) or treedef.name != "PyTreeDef":
        raise ValueError("not a pickled PyTreeDef")
    nodes = cast(tuple[Any, list[Any]], treedef.state)[1]
    stack: list[tuple[Child, int]] = []  # (child, its first leaf)
    leaves = 0
    for kind, arity, data, cls, *_ in nodes:
        children = stack[len(stack) - arity :] if arity else []
        del stack[len(stack) - len(children) :]
        first = children[0][1] if children else leaves
        if kind == 0:
            stack.append((no_leaves.get(leaves, LEAF), leaves))
            leaves += 1
        else:
            stack.append((_node(kind, data, cls, [c for c, _ in children], [f for _, f in children], names), first))
    ((root, _),) = stack
    skeleton = Skeleton(root)
    if leaves != len(names) or len(skeleton.paths()) != len(names) - len(no_leaves):
        raise ValueError("the structure does not match its list of leaves")
    return skeleton


def _node(kind: int, data: Any, cls: Any, children: list[Child], firsts: list[int], names: Sequence[Path]) -> Child:
    below = tuple(children)
    numbers = tuple(str(i) for i in range(len(children)))
    if kind == 1:
        return None
    if kind in (2, 4):
        return Node("tuple" if kind == 2 else "list", numbers, below)
    if kind == 5:
        keys = tuple(_key(key) for key in data)
        return Node("dict", name_children(keys), below, keys)
    if kind == 3:
        name = data.class_name()
        loaded = find_class(name)
        fields = getattr(loaded, "_fields", None) or _names_of(firsts, names) or numbers
        return Node("namedtuple", tuple(fields) if len(fields) == len(children) else numbers, below, class_name=name)
    return _custom(cls.class_name(), data, _names_of(firsts, names) or numbers, below)


def _custom(class_name: str, aux: Any, names: tuple[str, ...], below: tuple[Child, ...]) -> Node:
    """A node of a registered class. Aux data that is not plain is dropped: rebuilding then needs a template."""
    if class_name == "collections:OrderedDict":
        keys = tuple(_key(key) for key in aux)
        return Node("odict", name_children(keys), below, keys)
    if class_name == "collections:defaultdict":
        factory, keys = aux[0], tuple(_key(key) for key in aux[1])
        named = None if factory is None else factory.class_name().removeprefix("builtins:")
        return Node("defaultdict", name_children(keys), below, keys, aux=_FACTORIES.get(str(named)))
    plain = is_plain_within(aux, _MOST_AUX)
    return Node("custom", names, below, class_name=class_name, aux=aux if plain else None, has_aux=plain)


def _key(key: object) -> object:
    """A dict key, if it is plain or a small tuple of plain values (deeper nesting could be endless)."""
    kind = type(key)
    if key is None or is_plain(key) or (kind is tuple and is_plain_within(key, 100)):
        return key
    raise ValueError("a dict key is not a plain value")


def _names_of(firsts: list[int], names: Sequence[Path]) -> tuple[str, ...] | None:
    """The names of sibling nodes, taken from leaf paths: the first position where their first leaves differ."""
    paths = [names[i] for i in firsts if i < len(names)]
    if len(paths) != len(firsts) or not paths:
        return None
    for depth in range(min(len(p) for p in paths)):
        found = tuple(p[depth] for p in paths)
        if len(set(found)) == len(found) and (len(found) > 1 or depth == len(paths[0]) - 1):
            return found
    return None


def _paths(entries: Sequence[_ListedArray]) -> list[str]:
    return [check_name(entry["path"]) for entry in entries]


def _read_json(store: Store, name: str) -> JsonObject | None:
    try:
        data: Json = json.loads(store.read(name), object_pairs_hook=no_duplicates)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{store.locate(name)} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise IntegrityError(f"{store.locate(name)} does not contain a JSON object")
    return data


class EformerIndex:
    """The index that lets eFormer read our trees, and the metadata that it expects; a `Companions`."""

    program: str = "eFormer"
    index: str = TENSORSTORE_INDEX
    names: Sequence[str] = (TENSORSTORE_INDEX, CHECKPOINT_METADATA)

    def read_index(self, store: Store) -> CompanionIndex | None:
        if store.size(TENSORSTORE_INDEX) is None:
            return None
        try:
            index = _read_json(store, TENSORSTORE_INDEX) or {}
            entries = list(cast("list[_ListedArray]", index.get("arrays", [])))
            for listed in cast("dict[str, list[_ListedArray]]", index.get("prefixes", {})).values():
                entries += listed
            save_id = index.get(_MARK)
            arrays = frozenset(str(entry["path"]) for entry in entries)
            return CompanionIndex(save_id if isinstance(save_id, str) else None, arrays)
        except (IntegrityError, TypeError, AttributeError, KeyError):
            return CompanionIndex(None, None)

    def documents(self, manifest: Manifest, empty: bool = False) -> dict[str, bytes | None]:
        trees = {p: entries for p, tree in manifest.trees.items() if (entries := _entries(p, tree)) is not None}
        if not trees and not empty:
            return {CHECKPOINT_METADATA: None, TENSORSTORE_INDEX: None}
        index: dict[str, object] = {"format": "tensorstore", "version": "2.0", _MARK: manifest.save_id}
        index["prefixes"] = {p: entries for p, entries in trees.items() if p}
        if "" in trees or not trees:
            index["arrays"] = trees.get("", [])
        # Of the trees that were saved together, only the main one has metadata.
        newest = (tree.metadata for tree in manifest.trees.values() if tree.save_id == manifest.save_id)
        metadata = untagged(dict(next(filter(None, newest), dict[str, object]())))
        return {
            CHECKPOINT_METADATA: json.dumps(metadata, allow_nan=False).encode(),
            TENSORSTORE_INDEX: json.dumps(index, indent=1).encode(),
        }

    def carry_metadata(
        self, before: Tree, after: Sequence[StoredArray], same: Mapping[Path, Path]
    ) -> Mapping[str, object]:
        """Checksums stay with arrays that are the same; others are described anew, by their shape and dtype."""
        if before.source != EformerReader.name and not before.metadata.keys() >= _RECORDED:
            return before.metadata
        arrays = before.arrays
        old = dict(zip([leaf.path for leaf in arrays], dotted_names([leaf.path for leaf in arrays]), strict=True))
        names = dotted_names([leaf.path for leaf in after])
        kept = {name: old[same[leaf.path]] for name, leaf in zip(names, after, strict=True) if leaf.path in same}
        found = dict(before.metadata)
        checksums, described = found.get("checksum"), found.get("array_metadata")
        if isinstance(checksums, dict):
            parts = _by_array(cast(JsonObject, checksums), set(old.values()))
            found["checksum"] = {
                name + part: checksum for name, was in kept.items() for part, checksum in parts.get(was, {}).items()
            }
        if isinstance(described, dict) and described:
            known = cast(JsonObject, described)
            facts = {name: {"shape": list(x.shape), "dtype": x.dtype} for name, x in zip(names, after, strict=True)}
            found["array_metadata"] = {name: known.get(kept.get(name, ""), facts[name]) for name in names}
        return found


def _by_array(recorded: JsonObject, names: Collection[str]) -> dict[str, JsonObject]:
    """What is recorded of each array, by what follows its name: nothing, or the region of a part, as in `w[0:2]`."""
    found: dict[str, JsonObject] = {}
    for entry, fact in recorded.items():
        name = entry if entry in names else entry.rpartition("[")[0]
        found.setdefault(name, {})[entry[len(name) :]] = fact
    return found


def _entries(prefix: str, tree: Tree) -> list[_ListedArray] | None:
    """The arrays of a tree that eFormer would find under their own keys; None for a tree it would misread."""
    if not tree.indexed or not has_zarr_arrays(tree):
        return None
    directory = prefix_directory(prefix)
    if directory != prefix.replace(".", "/"):
        return None  # eFormer takes the prefix from the path
    start = f"{directory}/" if directory else ""
    present = tree.clean_names or {file.name for file in tree.files}
    arrays = tree.arrays
    entries: list[_ListedArray] = []
    for leaf in arrays:
        place = leaf.origin.directory if isinstance(leaf.origin, ForeignArray) else start + "/".join(leaf.path)
        if f"{place}/{ZARRAY}" in present and _same_type(leaf):
            entries.append({"path": place, "shape": list(leaf.spec.shape), "dtype": leaf.spec.dtype.name})
    keys = Counter(entry["path"].replace("/", ".") for entry in entries)
    entries = [entry for entry in entries if keys[entry["path"].replace("/", ".")] == 1]  # eFormer would mix them up
    return entries if entries or not arrays else None


def _same_type(leaf: StoredArray) -> bool:
    """Whether zarr has the leaf's dtype, so that its bits are not stored under another one."""
    if isinstance(leaf.origin, ForeignArray):
        return True
    name = zarr_dtype(leaf.spec.dtype)
    return leaf.holds_numbers and (name == leaf.spec.dtype.name or name == leaf.spec.dtype.str)
