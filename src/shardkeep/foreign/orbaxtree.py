"""The documents that Orbax writes beside arrays, as values: the tree, strings, shardings and keys. Pure functions."""

import base64
import binascii
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NotRequired, TypedDict, cast

from shardkeep.errors import IntegrityError, MissingDataError
from shardkeep.model.leaves import Axes, JaxArray, SavedSharding
from shardkeep.model.tree import Path, nest
from shardkeep.model.values import Json, JsonObject

_SEQUENCE = 1  # the kind of a key that is an index; any other is a key of a dict
_EMPTY: dict[str, object] = {"None": None, "Dict": {}, "List": [], "Tuple": ()}  # by the kind of what has no leaves
_STORED = ("scalar", "string", "np.ndarray", "jax.Array")  # kinds of what is stored somewhere
_NO_VALUES: Mapping[Path, object] = {}


@dataclass(frozen=True)
class OrbaxLeaf:
    """A leaf, or what has no leaves, as `_METADATA` lists it.

    Attributes:
        keys: The way to it: names, and whether each is an index of a list.
        kind: What it was: "jax.Array", "np.ndarray", "scalar", "string", or what has no leaves.
        is_skipped: Whether nothing is stored for it.
        name: Its name in the checkpoint.
        is_ambiguous: Whether another leaf has the same name.
    """

    keys: tuple[tuple[str, bool], ...]
    kind: str
    is_skipped: bool
    name: str
    is_ambiguous: bool = False

    @classmethod
    def found(cls, name: str) -> "OrbaxLeaf":
        """An array that was found, and is not listed."""
        return cls((), "jax.Array", False, name)


def entries_of(document: JsonObject | None, where: str) -> list[OrbaxLeaf]:
    """What `_METADATA` lists, in its order; nothing if there is no document. `IntegrityError` if it is malformed."""
    if document is None:
        return []
    try:
        listed = cast("Mapping[str, _EntryRecord]", document["tree_metadata"]).values()
        entries = [_entry(each) for each in listed]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise IntegrityError(f"{where} is malformed: {error!r}", file=where) from error
    counts = Counter(entry.name for entry in entries if not entry.is_skipped)
    return [replace(e, is_ambiguous=True) if not e.is_skipped and counts[e.name] > 1 else e for e in entries]


class _KeyRecord(TypedDict):
    key: str
    key_type: int


class _ValueRecord(TypedDict):
    value_type: str
    skip_deserialize: NotRequired[bool]


class _EntryRecord(TypedDict):
    """One leaf in `_METADATA`. Those of a file are checked where they are used."""

    key_metadata: list[_KeyRecord]
    value_metadata: _ValueRecord


def _entry(listed: _EntryRecord) -> OrbaxLeaf:
    keys = tuple((str(key["key"]), key["key_type"] == _SEQUENCE) for key in listed["key_metadata"])
    about = listed["value_metadata"]
    kind, skipped = about["value_type"], about.get("skip_deserialize", False)
    if not isinstance(kind, str) or not isinstance(skipped, bool):
        raise TypeError("value_type is not a string, or skip_deserialize is not a boolean")
    return OrbaxLeaf(keys, kind, skipped or kind in _EMPTY, ".".join(key for key, _ in keys))


class _Container(dict[str, object]):
    """A container that is being filled. `is_list`: whether its keys are indices."""

    is_list: bool = False


def tree_of(entries: Sequence[OrbaxLeaf], where: str, values: Mapping[Path, object] = _NO_VALUES) -> object:
    """The tree of entries: dicts and lists, with an `OrbaxLeaf` for each leaf, and what has no leaves as it is.

    `values` are those that are known by their paths, and that stand in the tree themselves.
    """
    if entries and all(not entry.keys and entry.name for entry in entries):
        return nest([((entry.name,), entry) for entry in entries])
    root = _Container()
    for entry in entries:
        value = _value_of(entry, where, values)
        if not entry.keys:
            if len(entries) > 1:
                raise IntegrityError(f"{where} is malformed: a leaf is the tree itself, and not alone", file=where)
            return value
        holder: object = root
        for depth, (key, is_index) in enumerate(entry.keys):
            if not isinstance(holder, _Container) or (holder and holder.is_list != is_index):
                raise IntegrityError(f"{where} is malformed: {entry.name!r} is below a leaf, or in a list", file=where)
            holder.is_list = is_index
            if depth < len(entry.keys) - 1:
                holder = holder.setdefault(key, _Container())
            elif key in holder:
                raise IntegrityError(f"{where} is malformed: it lists {entry.name!r} twice", file=where)
            else:
                holder[key] = value
    return _settled(root, where, 0)


def _value_of(entry: OrbaxLeaf, where: str, values: Mapping[Path, object]) -> object:
    path = tuple(key for key, _ in entry.keys)
    if path in values:
        return values[path]
    if entry.is_skipped and entry.kind in _STORED:
        problem = f"{where} lists {entry.name!r} as a value that is in the file checkpoint, but it is not there"
        raise MissingDataError(problem, file=where)
    return _EMPTY.get(entry.kind) if entry.is_skipped else entry


def _settled(branch: object, where: str, depth: int) -> object:
    """A container as a dict or list, and those in it."""
    if not isinstance(branch, _Container):
        return branch
    if depth > 200:  # more than `flatten` takes, and less than Python's limit
        raise IntegrityError(f"{where} is malformed: its tree is nested too deeply", file=where)
    inside = {key: _settled(child, where, depth + 1) for key, child in branch.items()}
    numbers = [str(number) for number in range(len(inside))]
    if branch.is_list and inside.keys() == set(numbers):
        return [inside[number] for number in numbers]
    return inside


def strings_of(document: JsonObject | None) -> dict[str, str]:
    """The strings in `_strings.json`, by the names of the leaves."""
    return {name: text for name, text in (document or {}).items() if isinstance(text, str)}


def impls_of(documents: Iterable[JsonObject]) -> dict[str, str]:
    """The implementations of PRNG keys in `array_metadatas/`, by the names of the leaves."""
    found: dict[str, str] = {}
    for document in documents:
        listed = document.get("array_metadatas")
        for each in listed if isinstance(listed, list) else ():
            about = each.get("array_metadata") if isinstance(each, dict) else None
            name = about.get("param_name") if isinstance(about, dict) else None
            more = about.get("ext_metadata") if isinstance(about, dict) else None
            impl = more.get("random_key_impl") if isinstance(more, dict) else None
            if isinstance(name, str) and isinstance(impl, str):
                found[name] = impl
    return found


def shardings_of(document: JsonObject | None) -> dict[str, JaxArray]:
    """The named shardings in `_sharding`, by the names of the leaves. What cannot be understood is left out."""
    found: dict[str, JaxArray] = {}
    known: dict[str, JaxArray | None] = {}  # thousands of arrays share a few
    for encoded, text in (document or {}).items():
        if not isinstance(text, str):
            continue
        if text not in known:
            known[text] = _sharding(text)
        sharding = known[text]
        try:
            name = base64.b64decode(encoded, validate=True).decode()
        except (binascii.Error, ValueError):
            continue
        if sharding is not None:
            found[name] = sharding
    return found


def _sharding(text: str) -> JaxArray | None:
    try:
        said: Json = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.get("sharding_type") != "NamedSharding":
        return None
    shape, names, spec = said.get("shape"), said.get("axis_names"), said.get("partition_spec")
    if not isinstance(shape, list) or not isinstance(names, list) or not isinstance(spec, list):
        return None
    axes = [tuple(entry) if isinstance(entry, list) else entry for entry in spec]
    used = [axis for entry in axes for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None]
    sizes = dict(zip(map(str, names), shape, strict=False))
    if len(names) != len(shape) or not all(type(n) is int and n > 0 for n in shape):
        return None
    if not all(isinstance(axis, str) and axis in sizes for axis in used):
        return None
    return JaxArray(
        SavedSharding(cast("tuple[Axes, ...]", tuple(axes)), cast("tuple[tuple[str, int], ...]", tuple(sizes.items())))
    )
