"""Trees, flattened into leaves and a Skeleton, and rebuilt from them.

A `Skeleton` is a tree without its leaves. It is stored as JSON and rebuilt without importing or executing anything that
a file names: a class is used only if the program has imported it and (unless it is a namedtuple) registered it
with JAX. Otherwise an `OpaqueNode` with the same children takes its place.
"""

import base64
import logging
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from shardkeep.errors import IntegrityError, TreeError, an
from shardkeep.jaxapi import flatten_once
from shardkeep.model.auxdata import check_static
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.nodes import LEAF, Child, Node, fields_of, is_loaded_otherwise, serialize_aux, usable_class
from shardkeep.model.values import Json, JsonObject, NotPlainError, as_list, decode, encode, show

log = logging.getLogger("shardkeep")

Path = tuple[str, ...]


@fast_dataclass
class Leaf:
    """A leaf of a tree: its value and its path, the names that lead to it.

    `prefix` is that of the tree, if several trees are saved together.
    """

    path: Path
    value: Any
    prefix: str = ""

    @property
    def key(self) -> str:
        return show_key(self.path)


def show_key(path: Path) -> str:
    r"""The key of a path as users see and type it: names joined with `/`. A `/` within a name is written `\/`.

    >>> show_key(("layers", "0", "w.b")), show_key(("a/b", "c"))
    ('layers/0/w.b', 'a\\/b/c')
    """
    key = "/".join(path)
    if key.count("/") == len(path) - 1 or not path:
        return key
    return "/".join(part.replace("/", "\\/") for part in path)


def name_leaf(path: Path, prefix: str = "") -> str:
    """The key of a leaf for a message or a table, readable even if the tree is a single leaf or the key is empty.

    If several trees are saved together, the prefix of its tree follows.

    >>> name_leaf(("a", "b")), name_leaf(()), name_leaf(("",)), name_leaf(("w",), "ema")
    ('a/b', '(the tree itself)', "''", "w (prefix 'ema')")
    """
    key = (show_key(path) or "''") if path else "(the tree itself)"
    return f"{key} (prefix {prefix!r})" if prefix else key


def join_key(path: Path) -> str:
    r"""The key of a path as it is stored: names joined with dots, dots within a name escaped.

    >>> join_key(("layers", "0", "w.b"))
    'layers.0.w\\.b'
    """
    key = ".".join(path)
    if "\\" not in key and key.count(".") == len(path) - 1:  # nothing to escape
        return key
    return ".".join(part.replace("\\", "\\\\").replace(".", "\\.") for part in path)


def split_key(key: str) -> Path:
    r"""The path of a dotted key.

    >>> split_key(r"layers.0.w\.b")
    ('layers', '0', 'w.b')
    """
    parts: list[str] = [""]
    characters = iter(key)
    for character in characters:
        if character == ".":
            parts.append("")
        else:
            parts[-1] += next(characters, "") if character == "\\" else character
    return tuple(parts)


_MAX_DEPTH = 150  # JSON readers recurse, and a tree that can be saved must be readable
_MOST_LEVELS = 64  # that dots in one name make; a hostile file can have millions of them
_LEAVES: set[type[object]] = {bool, int, float, complex, str, bytes}  # and those of JAX's arrays that were seen


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The tree without its leaves."""

    root: Child

    def paths(self) -> list[Path]:
        """The paths of the leaves, in order."""
        return [path for path, node in _ends(self.root, ()) if node is not None]

    def empty_paths(self) -> list[Path]:
        """The paths at which the tree has None."""
        return [path for path, node in _ends(self.root, ()) if node is None]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The tree with these leaves."""
        remaining = iter(leaves)
        return _rebuild(self.root, remaining)

    def prune(self, keep: Sequence[bool]) -> "Skeleton":
        """Only the leaves to keep. Entries of dicts that hold none of them are dropped; other positions become None."""
        remaining = iter(keep)
        return Skeleton(_prune(self.root, remaining))

    def replaced(self) -> dict[str, Node]:
        """The classes that `rebuild` replaces: the name of each, and a node of it."""
        found: dict[str, Node] = {}
        pending = [self.root]
        while pending:
            node = pending.pop()
            if isinstance(node, Node):
                pending.extend(node.children)
                changed = node.cls is None and node.fields != () and is_loaded_otherwise(node)
                if node.kind in ("namedtuple", "custom") and not changed and usable_class(node) is None:
                    found[node.class_name] = node
        return found

    def mention_factories(self) -> None:
        """Warn once about `defaultdict`s whose `default_factory` cannot be saved."""
        lost: list[str] = []
        pending: list[tuple[Path, Child]] = [((), self.root)]
        while pending:
            path, node = pending.pop()
            if isinstance(node, Node):
                pending += [((*path, n), c) for n, c in zip(node.names, node.children, strict=True) if c is not LEAF]
                if node.kind == "defaultdict" and node.aux is not None and _factory_name(node) is None:
                    lost.append(name_leaf(path))
        if lost:
            mention_once(
                sorted(lost),
                "the default_factory of %s is not saved: only " + ", ".join(_FACTORIES) + " are. It is loaded as None, "
                "so that a missing key raises KeyError",
            )

    def to_json(self) -> Json:
        return to_json(self.root)

    @classmethod
    def from_json(cls, data: Json) -> "Skeleton":
        try:
            return cls(_from_json(data))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"malformed tree structure in a manifest: {error}") from error


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, serialize: bool = False
) -> tuple[Skeleton, list[Leaf]]:
    """The tree's Skeleton and its leaves, in order. Dicts keep their own order, whatever their keys.

    With `serialize`, auxiliary data that is not plain is put in the form in which it is stored. Functions that the
    program has registered with `jax.export` are called for this, before anything is written.

    >>> skeleton, leaves = flatten({"b": [1, None], "a": 2})
    >>> [(leaf.key, leaf.value) for leaf in leaves]
    [('b/0', 1), ('a', 2)]
    >>> skeleton.rebuild([10, 20])
    {'b': [10, None], 'a': 20}
    """
    leaves: list[Leaf] = []
    return Skeleton(_take_apart(tree, (), leaves, is_leaf, serialize)), leaves


def nest(items: Sequence[tuple[Path, Any]]) -> dict[str, Any]:
    """Nested dicts with string keys. Dots in names make levels, unless two leaves would then have the same path.

    A name with very many dots is taken as it is. A leaf below another leaf (a zarr array's directory can contain
    arrays) is named by its complete path.

    >>> nest([(("a.b",), 1), (("c", "0"), 2)])
    {'a': {'b': 1}, 'c': {'0': 2}}
    >>> nest([(("a",), 1), (("a.b",), 2)])
    {'a': 1, 'a.b': 2}
    >>> nest([(("a",), 1), (("a", "b"), 2)])
    {'a': 1, 'a/b': 2}
    """
    joined = [(path, ".".join(path)) for path, _ in items]
    split = [tuple(name.split(".")) if name.count(".") < _MOST_LEVELS else path for path, name in joined]
    count: dict[Path, int] = {}
    for place in split:
        count[place] = count.get(place, 0) + 1
    parents = {place[:i] for place in split for i in range(1, len(place))}
    paths = {path for path, _ in items}
    root: dict[str, Any] = {}
    for (path, value), place in zip(items, split, strict=True):
        collides = count[place] > 1 or place in parents or any(place[:i] in count for i in range(1, len(place)))
        below_another = any(path[:i] in paths for i in range(1, len(path)))
        holder = root
        chosen = ("/".join(path),) if below_another else (path or ("",)) if collides else place
        for name in chosen[:-1]:
            holder = holder.setdefault(name, {})
        holder[chosen[-1]] = value
    return root


def _take_apart(
    tree: Any, path: Path, leaves: list[Leaf], is_leaf: Callable[[Any], bool] | None, serialize: bool
) -> Child:
    if is_leaf is not None and is_leaf(tree):
        leaves.append(Leaf(path, tree))
        return LEAF
    if tree is None:
        return None
    if len(path) > _MAX_DEPTH:
        raise TreeError(
            f"the tree is nested more than {_MAX_DEPTH} levels deep, or contains itself: {show_key(path)!r:.80}"
        )
    node = None if type(tree) in _LEAVES or isinstance(tree, np.ndarray) else _open(tree)
    if node is None:
        leaves.append(Leaf(path, tree))
        return LEAF
    shell, children = node
    if serialize and shell.class_name:
        shell = serialize_aux(shell)
    below = tuple(
        _take_apart(child, (*path, name), leaves, is_leaf, serialize)
        for name, child in zip(shell.names, children, strict=True)
    )
    return replace(shell, children=below)


def _open(tree: Any) -> tuple[Node, Sequence[Any]] | None:
    """A container as a Node without children, and its children; None for a leaf."""
    value: object = tree
    cls = type(value)
    if cls is list or cls is tuple:
        return Node(cls.__name__, tuple(str(i) for i in range(len(tree))), ()), tree
    if cls in _DICT_KINDS:
        keys = names = tuple(tree)
        for key in keys:
            if type(key) is not str:
                _check_key(key)
                names = name_children(keys)
        aux = tree.default_factory if cls is defaultdict else None
        return Node(_DICT_KINDS[cls], names, (), keys, cls=cls, aux=aux), list(tree.values())
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return Node("namedtuple", tuple(cast(Any, cls)._fields), (), class_name=_class_name(cls), cls=cls), tree
    array = getattr(sys.modules.get("jax"), "Array", None)
    if array is None:  # where JAX is not imported, no class is registered with it
        return None
    if isinstance(tree, array):
        if issubclass(cls, array):  # not of a proxy that only claims to be an array
            _LEAVES.add(cls)
        return None
    pairs, data = flatten_once(tree)
    if data is None:  # not registered with JAX: a leaf
        return None
    names = name_children([_entry_name(entry) for entry, _ in pairs])
    fields = fields_of(cls)
    if fields and not _is_its_fields(tree, fields, names, data[1]):
        fields = ()
    shell = Node("custom", names, (), class_name=_class_name(cls), cls=cls, aux=data[1], fields=fields)
    return shell, [v for _, v in pairs]


def _is_its_fields(tree: object, fields: Sequence[str], names: Sequence[str], aux: object) -> bool:
    """Whether a dataclass flattens into its fields and keeps the static ones as auxiliary data; others may not."""
    static = [name for name in fields if name not in names]
    values = cast("tuple[object, ...]", aux) if isinstance(aux, tuple) else None
    if values is None or not set(names) <= set(fields) or len(values) != len(static):
        return False
    return all(getattr(tree, name, None) is value for name, value in zip(static, values, strict=True))


def name_children(keys: Sequence[object]) -> tuple[str, ...]:
    """A distinct name for each key: its text, and its type too where several keys have the same text.

    >>> name_children(["1", 1, 2])
    ('1', '\\\\int:1', '2')
    """
    names = [key if isinstance(key, str) else str(key) for key in keys]
    if len(set(names)) < len(names):
        counts: dict[str, int] = {}
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        for i, key in enumerate(keys):
            if counts[names[i]] > 1 and not isinstance(key, str):
                names[i] = f"\\{type(key).__name__}:{key!r}"
        while len(set(names)) < len(names):  # only a custom node can give two children one name
            names = [f"{name}\\{i}" for i, name in enumerate(names)]
    return tuple(names)


def _entry_name(entry: Any) -> str:
    from jax import tree_util

    if isinstance(entry, tree_util.GetAttrKey):
        return entry.name
    if isinstance(entry, tree_util.SequenceKey):
        return str(entry.idx)
    return str(getattr(entry, "key", entry))


def _class_name(cls: type[object]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _rebuild(node: Child, leaves: Iterator[Any]) -> Any:
    if node is LEAF:
        return next(leaves)
    if node is None:
        return None
    return node.build([_rebuild(child, leaves) for child in node.children])


def _prune(node: Child, keep: Iterator[bool]) -> Child:
    if not isinstance(node, Node):
        return LEAF if node is LEAF and next(keep) else None
    pruned = [_prune(child, keep) for child in node.children]
    kept = [child if _holds_leaf(child) else None for child in pruned]
    if not node.kind.endswith("dict"):
        return replace(node, children=tuple(kept))
    held = [i for i, child in enumerate(kept) if child is not None]
    names, keys = tuple(node.names[i] for i in held), tuple(node.keys[i] for i in held)
    return replace(node, names=names, children=tuple(kept[i] for i in held), keys=keys)


def _holds_leaf(node: Child) -> bool:
    return node is LEAF or (isinstance(node, Node) and any(_holds_leaf(child) for child in node.children))


_mentioned: set[str] = set()


def mention_once(keys: Sequence[str], what: str) -> None:
    """Warn, once per process and kind, about leaves or containers (`%s`) that are not loaded exactly as they were."""
    if what not in _mentioned:
        _mentioned.add(what)
        more = f" and {len(keys) - 3:,} more" if len(keys) > 3 else ""
        shown = ", ".join(keys[:3])
        log.warning("" + what + ". This warning is shown once", shown + more)


_DICT_KINDS: dict[type[object], str] = {dict: "dict", OrderedDict: "odict", defaultdict: "defaultdict"}
_FACTORIES: dict[str, object] = {f.__name__: f for f in (int, float, bool, str, bytes, list, dict, tuple, set)}


def _factory_name(node: Node) -> str | None:
    """The name under which the factory of a `defaultdict` is saved; None if it cannot be."""
    return next((name for name, factory in _FACTORIES.items() if factory is node.aux), None)


def _ends(node: Child, path: Path) -> Iterator[tuple[Path, Child]]:
    """The leaves below a node and the positions with None, each with its path, in order."""
    if isinstance(node, Node):
        for name, child in zip(node.names, node.children, strict=True):
            yield from _ends(child, (*path, name))
    else:
        yield path, node


def to_json(node: Child) -> Json:
    """A node and everything below it, as stored in the manifest."""
    if node is LEAF:
        return 0
    if node is None:
        return None
    children: list[Json] = [0 if child is LEAF else to_json(child) for child in node.children]
    if node.kind in ("list", "tuple"):
        return {node.kind: children}
    if node.kind.endswith("dict"):
        pairs: list[Json] = [
            [k if type(k) is str and k.isascii() else _encode_key(k), c]
            for k, c in zip(node.keys, children, strict=True)
        ]
        factory: JsonObject = {"factory": _factory_name(node)} if node.kind == "defaultdict" else {}
        return {node.kind: pairs, **factory}
    named: list[Json] = [[encode(name), child] for name, child in zip(node.names, children, strict=True)]
    written: JsonObject = {node.kind: node.class_name, "children": named}
    if node.registered:
        written["registered"] = encode(node.registered)
    if node.kind == "namedtuple":
        return written
    fields: JsonObject = {"fields": list(node.fields)} if node.fields else {}
    if node.aux_bytes is not None:
        return {**written, "aux_bytes": base64.b64encode(node.aux_bytes).decode(), **fields}
    if node.static is not None:
        return {**written, "static": node.static}
    if not node.has_aux:
        return written
    try:
        return {**written, "aux": encode(node.aux), **fields}
    except NotPlainError:
        return written


def _encode_key(key: object) -> Json:
    try:
        return encode(key)
    except NotPlainError as error:
        raise TreeError(
            f"dict key {show(key)} is {an(str(error))}; "
            "keys can be str, int, float, bool, None, bytes and tuples of them"
        ) from None


def _check_key(key: object) -> None:
    """Refuse a key that cannot be stored, before anything is written."""
    _encode_key(key)
    try:
        str(key)
    except ValueError:  # Python does not print integers of more than 4300 digits, and keys name leaves
        raise TreeError(f"dict key {show(key)} is too long for the name of a leaf; use a str or bytes") from None


def _from_json(stored: Json) -> Child:
    if stored is None:
        return None
    if not isinstance(stored, dict):
        if type(stored) is int and stored == 0:
            return LEAF
        raise TypeError("neither a leaf nor a container")
    data = cast(dict[str, Any], stored)
    kind = next(iter(data), "nothing")
    body = data[kind]
    children = as_list(data.get("children") if kind in ("namedtuple", "custom") else body)
    if kind in ("list", "tuple"):
        return Node(kind, tuple(map(str, range(len(children)))), tuple(map(_from_json, children)))
    names = keys = tuple(decode(key) for key, _ in children)
    if len(set(keys)) < len(keys):
        raise ValueError("a dict key or a child's name appears twice")
    below = tuple(_from_json(child) for _, child in children)
    if kind in ("dict", "odict", "defaultdict"):
        return Node(kind, name_children(keys), below, keys, aux=_FACTORIES.get(str(data.get("factory"))))
    if kind not in ("namedtuple", "custom"):
        raise ValueError(f"unknown container {kind!r}")
    registered, fields = decode(data.get("registered", "")), tuple(as_list(data.get("fields", [])))
    if not all(isinstance(text, str) for text in (body, registered, *names, *fields)):
        raise ValueError("the name of a class, of a child or of a field is not a string")
    if kind == "namedtuple":
        return Node(kind, names, below, class_name=body, registered=registered)
    found = Node(kind, names, below, class_name=body, fields=fields, has_aux="aux" in data, registered=registered)
    if "aux" in data:
        return replace(found, aux=decode(data["aux"]))
    if "aux_bytes" in data:
        return replace(found, aux_bytes=base64.b64decode(data["aux_bytes"], validate=True))
    return replace(found, static=check_static(data["static"])) if "static" in data and not names else found
