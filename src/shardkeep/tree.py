"""A tree taken apart into its leaves and its Skeleton, and put together again.

A `Skeleton` is what is left of a tree when its leaves are taken out. It is written as JSON and rebuilt without
importing or executing anything a file names: a class is used only if the program has already imported it and
(unless it is a namedtuple) registered it with JAX. Otherwise its place is taken by a stand-in of the same shape.
"""

import dataclasses
import logging
import sys
import types
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np
from jax import tree_util

from shardkeep.errors import IntegrityError, TreeError
from shardkeep.values import Json, NotPlainError, decode, encode

log = logging.getLogger("shardkeep")

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
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
    return ".".join(p.replace("\\", "\\\\").replace(".", "\\.") if "." in p or "\\" in p else p for p in path)


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


@tree_util.register_pytree_with_keys_class
class StandIn:
    """Holds the place of a class that is not imported, or that needs a template: its children by name.

    >>> layer = StandIn("models:Dense", {"kernel": 1, "bias": 2})
    >>> layer.kernel, layer["bias"], layer
    (1, 2, StandIn('models:Dense', kernel=1, bias=2))
    """

    def __init__(self, class_name: str, children: dict[str, Any]) -> None:
        self.class_name = class_name
        self.children = children

    def __getitem__(self, name: str) -> Any:
        return self.children[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["children"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StandIn({self.class_name!r}, {', '.join(f'{k}={v!r}' for k, v in self.children.items())})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        children = [(tree_util.GetAttrKey(name), value) for name, value in self.children.items()]
        return children, (self.class_name, tuple(self.children))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> "StandIn":
        return cls(aux[0], dict(zip(aux[1], children, strict=True)))


class _Leaf:
    """Marks a leaf's place in a Skeleton; leaves are filled in order."""


LEAF = _Leaf()
_MAX_DEPTH = 150  # JSON readers recurse; a tree that can be taken apart must also be readable
_PLAIN = frozenset((bool, int, float, complex, str, bytes))
_Child = Any  # a Node, LEAF or None


@dataclass(frozen=True, slots=True)
class Node:
    """One container: what kind it is and its children by name. `cls` and `aux` are live only in the saving program."""

    kind: str  # list, tuple, dict, odict, defaultdict, namedtuple, custom
    names: tuple[str, ...]
    children: tuple[_Child, ...]
    keys: tuple[Any, ...] = ()
    class_name: str = ""
    cls: type | None = None
    aux: Any = None
    has_aux: bool = True
    fields: tuple[str, ...] = ()  # of a dataclass: all its fields, in order

    def build(self, children: list[Any]) -> Any:
        return _BUILDERS[self.kind](self, children)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The tree without its leaves."""

    root: _Child

    def paths(self) -> list[Path]:
        """Where the leaves are, in order."""
        return [path for path, _ in self._places(self.root, ())]

    def _places(self, node: _Child, path: Path) -> Iterator[tuple[Path, _Child]]:
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
                changed = node.cls is None and node.fields != () and _is_loaded_otherwise(node)
                if node.kind in ("namedtuple", "custom") and not changed and _usable_class(node) is None:
                    found[node.class_name] = None
        return list(found)

    def to_json(self) -> Json:
        return _to_json(self.root)

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

    >>> nest([(("a.b",), 1), (("c", "0"), 2)])
    {'a': {'b': 1}, 'c': {'0': 2}}
    >>> nest([(("a",), 1), (("a.b",), 2)])
    {'a': 1, 'a.b': 2}
    """
    split = [tuple(".".join(path).split(".")) for path, _ in items]
    count: dict[Path, int] = {}
    for place in split:
        count[place] = count.get(place, 0) + 1
    parents = {place[:i] for place in split for i in range(1, len(place))}
    root: dict[str, Any] = {}
    for (path, value), place in zip(items, split, strict=True):
        collides = count[place] > 1 or place in parents or any(place[:i] in count for i in range(1, len(place)))
        holder = root
        chosen = (path or ("",)) if collides else place
        for name in chosen[:-1]:
            holder = holder.setdefault(name, {})
        holder[chosen[-1]] = value
    return root


def _take_apart(tree: Any, path: Path, leaves: list[Leaf], is_leaf: Callable[[Any], bool] | None) -> _Child:
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
                _encode_key(key)  # refuses what could not be written, before anything is
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
    shell = Node("custom", names, (), class_name=_class_name(cls), cls=cls, aux=data[1], fields=_fields_of(cls))
    return shell, [v for _, v in pairs]


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


def _rebuild(node: _Child, leaves: Iterator[Any]) -> Any:
    if node is LEAF:
        return next(leaves)
    if node is None:
        return None
    return node.build([_rebuild(child, leaves) for child in node.children])


def _prune(node: _Child, keep: Iterator[bool]) -> _Child:
    if not isinstance(node, Node):
        return LEAF if node is LEAF and next(keep) else None
    pruned = [_prune(child, keep) for child in node.children]
    kept = [child if _holds_leaf(child) else None for child in pruned]
    if not node.kind.endswith("dict"):
        return replace(node, children=tuple(kept))
    held = [i for i, child in enumerate(kept) if child is not None]
    names, keys = tuple(node.names[i] for i in held), tuple(node.keys[i] for i in held)
    return replace(node, names=names, children=tuple(kept[i] for i in held), keys=keys)


def _holds_leaf(node: _Child) -> bool:
    return node is LEAF or (isinstance(node, Node) and any(_holds_leaf(child) for child in node.children))


def _usable_class(node: Node) -> type | None:
    """The class a Node may be rebuilt as: the live one, or one already imported that has the same shape."""
    cls = node.cls
    if cls is None and node.has_aux:
        cls = find_class(node.class_name)
    if node.kind == "namedtuple":
        return cls if cls is not None and issubclass(cls, tuple) and getattr(cls, "_fields", 0) == node.names else None
    return cls if cls is not None and _treedef(cls, node) is not None else None


def find_class(class_name: str) -> type | None:
    """A class the program has already imported, by "module:qualname"; nothing is imported to find it."""
    module, _, qualname = class_name.partition(":")
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = vars(found).get(name) if isinstance(found, types.ModuleType | type) else None
    return found if isinstance(found, type) else None


def _treedef(cls: type, node: Node) -> Any:
    """JAX's own description of one node of a registered class; None if JAX does not know the class."""
    make = getattr(tree_util.PyTreeDef, "from_node_data_and_children", None) or getattr(
        tree_util.PyTreeDef, "make_from_node_data_and_children", None
    )
    assert make is not None, "this version of JAX has no way to make a tree node"
    try:
        return make(tree_util.default_registry, (cls, node.aux), [tree_util.tree_structure(0)] * len(node.names))
    except (ValueError, TypeError, RuntimeError):
        return None


def _build_namedtuple(node: Node, children: list[Any]) -> Any:
    cls = _usable_class(node)
    if cls is not None:
        return tuple.__new__(cls, children)  # not cls(…): a file must not choose code to run
    name = node.class_name.rpartition(".")[2].rpartition(":")[2]
    try:
        return namedtuple(name, node.names)(*children)  # pyright: ignore[reportUntypedNamedTuple]
    except ValueError:  # names that no namedtuple could have had
        return StandIn(node.class_name, dict(zip(node.names, children, strict=True)))


def _fields_of(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


def _is_loaded_otherwise(node: Node) -> bool:
    """Whether the class is there with other fields: then `rebuild` says so itself."""
    cls = find_class(node.class_name)
    return cls is not None and len(_fields_of(cls)) != len(node.fields)


def _as_it_is_now(cls: type, node: Node, children: list[Any]) -> tuple[Node, list[Any]] | None:
    """A saved dataclass in the order its class has now; None if its fields, or which of them are static, have changed.

    How the class takes itself apart is seen on an instance whose fields hold their own names.
    """
    if set(_fields_of(cls)) != set(node.fields):
        return None
    probe: Any = object.__new__(cls)
    for name in node.fields:
        object.__setattr__(probe, name, name)
    pairs, treedef = tree_util.tree_flatten_with_path(probe, is_leaf=lambda x: x is not probe)
    order = [value for _, value in pairs]
    static: Any = treedef.node_data()[1]
    saved_static = [name for name in node.fields if name not in node.names]
    if (
        sorted(map(str, order)) != sorted(node.names)
        or not isinstance(static, tuple)
        or not isinstance(node.aux, tuple)
    ):
        return None
    if sorted(map(str, cast(Any, static))) != sorted(saved_static) or len(node.aux) != len(saved_static):
        return None
    by_name = dict(zip(saved_static, cast(Any, node.aux), strict=True))
    placed = dict(zip(node.names, children, strict=True))
    return replace(node, names=tuple(order), aux=tuple(by_name[n] for n in static)), [placed[n] for n in order]


def _build_custom(node: Node, children: list[Any]) -> Any:
    cls = find_class(node.class_name) if node.cls is None else node.cls
    if cls is not None and node.cls is None and node.fields:
        now = _as_it_is_now(cls, node, children)
        if now is None:
            log.warning("shardkeep: %s has other fields than when it was saved: a stand-in is used", node.class_name)
            return StandIn(node.class_name, dict(zip(node.names, children, strict=True)))
        node, children = now
    cls = _usable_class(node)
    if cls is None:
        return StandIn(node.class_name, dict(zip(node.names, children, strict=True)))
    try:
        return _treedef(cls, node).unflatten(children)
    except Exception as error:  # the class's own code: it may refuse what an older version of it saved
        raise TreeError(f"{node.class_name} refused the saved values ({error}); load with template=") from error


def _build_dict(node: Node, children: list[Any]) -> Any:
    pairs = zip(node.keys, children, strict=True)
    if node.kind == "odict":
        return OrderedDict(pairs)
    return defaultdict(node.aux, pairs) if node.kind == "defaultdict" else dict(pairs)


_BUILDERS: dict[str, Callable[[Node, list[Any]], Any]] = {
    "list": lambda node, children: children,
    "tuple": lambda node, children: tuple(children),
    "dict": _build_dict,
    "odict": _build_dict,
    "defaultdict": _build_dict,
    "namedtuple": _build_namedtuple,
    "custom": _build_custom,
}
_DICT_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "odict", defaultdict: "defaultdict"}
_FACTORIES: dict[str, Any] = {f.__name__: f for f in (int, float, bool, str, bytes, list, dict, tuple, set)}


def _to_json(node: _Child) -> Json:
    if node is LEAF:
        return 0
    if node is None:
        return None
    children = [0 if child is LEAF else _to_json(child) for child in node.children]
    if node.kind in ("list", "tuple"):
        return {node.kind: children}
    if node.kind.endswith("dict"):
        pairs: list[Any] = [
            [k if type(k) is str and k.isascii() else _encode_key(k), c]
            for k, c in zip(node.keys, children, strict=True)
        ]
        factory = {"factory": getattr(node.aux, "__name__", None)} if node.kind == "defaultdict" else {}
        return {node.kind: pairs, **factory}
    named: list[Any] = [[encode(name), child] for name, child in zip(node.names, children, strict=True)]
    if node.kind == "namedtuple":
        return {"namedtuple": node.class_name, "children": named}
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
            f"dict key {key!r} is a {error}; keys may be str, int, float, bool, None, bytes and tuples of them"
        ) from None


def _from_json(data: Any) -> _Child:
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
