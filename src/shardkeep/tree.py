"""A tree taken apart into its leaves and its Skeleton, and put together again.

A `Skeleton` is what is left of a tree when its leaves are taken out. It is written as JSON and rebuilt without
importing or executing anything a file names: a class is used only if the program has already imported it and
(unless it is a namedtuple) registered it with JAX. Otherwise its place is taken by a stand-in of the same shape.
"""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np
from jax import tree_util

from shardkeep.errors import IntegrityError, TreeError, an
from shardkeep.nodes import LEAF, Child, Node, fields_of, is_loaded_otherwise, usable_class
from shardkeep.records import record
from shardkeep.values import Json, NotPlainError, decode, encode, show

log = logging.getLogger("shardkeep")

Path = tuple[str, ...]


@record
class Leaf:
    """A value of the tree and its place: the names on the way to it."""

    path: Path
    value: Any

    @property
    def key(self) -> str:
        return join_key(self.path)


def join_key(path: Path) -> str:
    r"""The dotted key of a path. Dots within a name are escaped, so that `split_key` can undo it.

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


_MAX_DEPTH = 150  # JSON readers recurse; a tree that can be taken apart must also be readable
_PLAIN = frozenset((bool, int, float, complex, str, bytes))


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The tree without its leaves."""

    root: Child

    def paths(self) -> list[Path]:
        """Where the leaves are, in order."""
        return [path for path, _ in self._places(self.root, ())]

    def _places(self, node: Child, path: Path) -> Iterator[tuple[Path, Child]]:
        if node is LEAF:
            yield path, node
        elif node is not None:
            for name, child in zip(node.names, node.children, strict=True):
                yield from self._places(child, (*path, name))

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The tree with `leaves` in their places."""
        remaining = iter(leaves)
        return _rebuild(self.root, remaining)

    def prune(self, keep: Sequence[bool]) -> "Skeleton":
        """Without the leaves not kept: dict entries left empty go, other positions become None."""
        remaining = iter(keep)
        return Skeleton(_prune(self.root, remaining))

    def stand_ins(self) -> list[str]:
        """Names of the classes that `rebuild` will replace by stand-ins."""
        found: dict[str, None] = {}
        pending = [self.root]
        while pending:
            node = pending.pop()
            if isinstance(node, Node):
                pending.extend(node.children)
                changed = node.cls is None and node.fields != () and is_loaded_otherwise(node)
                if node.kind in ("namedtuple", "custom") and not changed and usable_class(node) is None:
                    found[node.class_name] = None
        return list(found)

    def mention_factories(self) -> None:
        """Say once which `defaultdict`s come back without the function that makes their missing values."""
        lost: list[str] = []
        pending: list[tuple[Path, Child]] = [((), self.root)]
        while pending:
            path, node = pending.pop()
            if isinstance(node, Node):
                pending += [((*path, n), c) for n, c in zip(node.names, node.children, strict=True) if c is not LEAF]
                if node.kind == "defaultdict" and node.aux is not None and _factory_name(node) is None:
                    lost.append(join_key(path))
        mention_once(
            sorted(lost),
            "%s: the default_factory is none of " + ", ".join(_FACTORIES) + ", the only ones that are saved. It comes "
            "back as None, so that a missing key is a KeyError",
        )

    def to_json(self) -> Json:
        return to_json(self.root)

    @classmethod
    def from_json(cls, data: Json) -> "Skeleton":
        try:
            return cls(_from_json(data))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"malformed tree structure in a manifest: {error}") from error


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[Skeleton, list[Leaf]]:
    """The tree's Skeleton and its leaves, in order; dicts in their own order, whatever their keys.

    >>> skeleton, leaves = flatten({"b": [1, None], "a": 2})
    >>> [(leaf.key, leaf.value) for leaf in leaves]
    [('b.0', 1), ('a', 2)]
    >>> skeleton.rebuild([10, 20])
    {'b': [10, None], 'a': 20}
    """
    leaves: list[Leaf] = []
    return Skeleton(_take_apart(tree, (), leaves, is_leaf)), leaves


def nest(items: Sequence[tuple[Path, Any]]) -> dict[str, Any]:
    """Nested dicts of strings. Dots in names make levels, unless that would make two leaves meet: then they stay.

    A leaf that lies below another one (a directory that is an array can hold arrays) goes by its whole path.

    >>> nest([(("a.b",), 1), (("c", "0"), 2)])
    {'a': {'b': 1}, 'c': {'0': 2}}
    >>> nest([(("a",), 1), (("a.b",), 2)])
    {'a': 1, 'a.b': 2}
    >>> nest([(("a",), 1), (("a", "b"), 2)])
    {'a': 1, 'a/b': 2}
    """
    split = [tuple(".".join(path).split(".")) for path, _ in items]
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


def _take_apart(tree: Any, path: Path, leaves: list[Leaf], is_leaf: Callable[[Any], bool] | None) -> Child:
    if is_leaf is not None and is_leaf(tree):
        leaves.append(Leaf(path, tree))
        return LEAF
    if tree is None:
        return None
    if len(path) > _MAX_DEPTH:
        raise TreeError(
            f"the tree is nested too deeply (over {_MAX_DEPTH} levels), or contains itself: {join_key(path)!r:.80}"
        )
    node = None if isinstance(tree, jax.Array | np.ndarray) or type(tree) in _PLAIN else _open(tree)
    if node is None:
        leaves.append(Leaf(path, tree))
        return LEAF
    shell, children = node
    below = tuple(
        _take_apart(child, (*path, name), leaves, is_leaf) for name, child in zip(shell.names, children, strict=True)
    )
    return replace(shell, children=below)


def _open(tree: Any) -> tuple[Node, Sequence[Any]] | None:
    """One container as a Node without children, and its children; None for a leaf."""
    cls: type[Any] = type(tree)
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
    if isinstance(tree, tuple) and hasattr(cls, "_fields"):
        return Node("namedtuple", tuple(cast(Any, cls)._fields), (), class_name=_class_name(cls), cls=cls), tree
    pairs, treedef = tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    data = treedef.node_data()
    if data is None:  # JAX does not know the type: a leaf
        return None
    names = name_children([_entry_name(path[0]) for path, _ in pairs])
    fields = fields_of(cls)
    if fields and not _is_its_fields(tree, fields, names, data[1]):
        fields = ()
    shell = Node("custom", names, (), class_name=_class_name(cls), cls=cls, aux=data[1], fields=fields)
    return shell, [v for _, v in pairs]


def _is_its_fields(tree: Any, fields: Sequence[str], names: Sequence[str], aux: Any) -> bool:
    """Whether a dataclass takes itself apart into its fields, the static ones aside; its own code may do otherwise."""
    static = [name for name in fields if name not in names]
    if not isinstance(aux, tuple) or not set(names) <= set(fields) or len(cast(Any, aux)) != len(static):
        return False
    return all(getattr(tree, name, None) is value for name, value in zip(static, cast(Any, aux), strict=True))


def name_children(keys: Sequence[Any]) -> tuple[str, ...]:
    """A distinct name for each key: its text; where texts collide, all but strings say their type.

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
        while len(set(names)) < len(names):  # only a custom node can name two children alike
            names = [f"{name}\\{i}" for i, name in enumerate(names)]
    return tuple(names)


def _entry_name(entry: Any) -> Any:
    if isinstance(entry, tree_util.GetAttrKey):
        return entry.name
    if isinstance(entry, tree_util.SequenceKey):
        return str(entry.idx)
    return str(getattr(entry, "key", entry))


def _class_name(cls: type) -> str:
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
    """Log, once in this process, what of these leaves or containers (`%s`) does not come back as it was."""
    if keys and what not in _mentioned:
        _mentioned.add(what)
        more = f" and {len(keys) - 3:,} more" if len(keys) > 3 else ""
        shown = ", ".join(repr(key) if key else "the tree itself" for key in keys[:3])
        log.warning("shardkeep: " + what + ". This is said once", shown + more)


_DICT_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "odict", defaultdict: "defaultdict"}
_FACTORIES: dict[str, Any] = {f.__name__: f for f in (int, float, bool, str, bytes, list, dict, tuple, set)}


def _factory_name(node: Node) -> str | None:
    """The name a `defaultdict`'s factory is saved under; None if it would not be found again by it."""
    return next((name for name, factory in _FACTORIES.items() if factory is node.aux), None)


def to_json(node: Child) -> Json:
    """A node and what is below it, as the manifest has it."""
    if node is LEAF:
        return 0
    if node is None:
        return None
    children = [0 if child is LEAF else to_json(child) for child in node.children]
    if node.kind in ("list", "tuple"):
        return {node.kind: children}
    if node.kind.endswith("dict"):
        pairs: list[Any] = [
            [k if type(k) is str and k.isascii() else _encode_key(k), c]
            for k, c in zip(node.keys, children, strict=True)
        ]
        factory = {"factory": _factory_name(node)} if node.kind == "defaultdict" else {}
        return {node.kind: pairs, **factory}
    named: list[Any] = [[encode(name), child] for name, child in zip(node.names, children, strict=True)]
    if node.kind == "namedtuple":
        return {"namedtuple": node.class_name, "children": named}
    if not node.has_aux:
        return {"custom": node.class_name, "children": named}
    try:
        fields = {"fields": list(node.fields)} if node.fields else {}
        return {"custom": node.class_name, "children": named, "aux": encode(node.aux), **fields}
    except NotPlainError:
        return {"custom": node.class_name, "children": named}


def _encode_key(key: Any) -> Json:
    try:
        return encode(key)
    except NotPlainError as error:
        raise TreeError(
            f"dict key {show(key)} is {an(str(error))}; "
            "keys may be str, int, float, bool, None, bytes and tuples of them"
        ) from None


def _check_key(key: Any) -> None:
    """Refuse a key that could not be written, before anything is."""
    _encode_key(key)
    try:
        str(key)
    except ValueError:  # Python does not write out integers beyond 4300 digits, and leaves are named by their keys
        raise TreeError(f"dict key {show(key)} is too long for the name of a leaf; use a str or bytes") from None


def _from_json(data: Any) -> Child:
    if data is None:
        return None
    if type(data) is int and data == 0:
        return LEAF
    return _container_from_json(cast(dict[str, Any], data))


def _container_from_json(data: dict[str, Any]) -> Node:
    kind = next(iter(data), "nothing")
    body = data[kind]
    if kind in ("list", "tuple"):
        return Node(kind, tuple(str(i) for i in range(len(body))), tuple(_from_json(child) for child in body))
    if kind in ("dict", "odict", "defaultdict"):
        keys = tuple(decode(key) for key, _ in body)
        if len(set(keys)) < len(keys):
            raise ValueError("a dict key appears twice")
        below = tuple(_from_json(child) for _, child in body)
        return Node(kind, name_children(keys), below, keys, aux=_FACTORIES.get(str(data.get("factory"))))
    if kind not in ("namedtuple", "custom"):
        raise ValueError(f"unknown container {kind!r}")
    names = tuple(str(decode(name)) for name, _ in data["children"])
    if len(set(names)) < len(names):
        raise ValueError("a child's name appears twice")
    below = tuple(_from_json(child) for _, child in data["children"])
    has_aux = kind == "namedtuple" or "aux" in data
    aux = decode(data["aux"]) if kind == "custom" and has_aux else None
    fields = tuple(str(name) for name in data.get("fields", ()))
    return Node(kind, names, below, class_name=str(body), aux=aux, has_aux=has_aux, fields=fields)
