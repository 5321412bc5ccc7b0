"""The containers of a tree, without their contents, and how each is built again.

Nothing in a file is executed or imported: a namedtuple, dataclass or other class is built only if it is already
imported and registered with JAX, else a `StandIn` takes its place.
"""

import dataclasses
import logging
import sys
import types
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from jax import tree_util

from shardkeep.errors import TreeError

log = logging.getLogger("shardkeep")


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
Child = Any  # a Node, LEAF or None


@dataclass(frozen=True, slots=True)
class Node:
    """One container: what kind it is and its children by name. `cls` and `aux` are live only in the saving program."""

    kind: str  # list, tuple, dict, odict, defaultdict, namedtuple, custom
    names: tuple[str, ...]
    children: tuple[Child, ...]
    keys: tuple[Any, ...] = ()
    class_name: str = ""
    cls: type | None = None
    aux: Any = None
    has_aux: bool = True
    fields: tuple[str, ...] = ()  # of a dataclass: all its fields, in order

    def build(self, children: list[Any]) -> Any:
        return _BUILDERS[self.kind](self, children)


def usable_class(node: Node) -> type | None:
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
    leaves = [tree_util.tree_structure(0)] * len(node.names)
    try:
        return tree_util.PyTreeDef.from_node_data_and_children(tree_util.default_registry, (cls, node.aux), leaves)
    except (ValueError, TypeError, RuntimeError):
        return None


def _build_namedtuple(node: Node, children: list[Any]) -> Any:
    cls = usable_class(node)
    if cls is not None:
        return tuple.__new__(cls, children)  # not cls(…): a file must not choose code to run
    name = node.class_name.rpartition(".")[2].rpartition(":")[2]
    try:
        return namedtuple(name, node.names)(*children)  # pyright: ignore[reportUntypedNamedTuple]
    except ValueError:  # names that no namedtuple could have had
        return StandIn(node.class_name, dict(zip(node.names, children, strict=True)))


def fields_of(cls: type) -> tuple[str, ...]:
    """The names of a dataclass's fields; none for any other class."""
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


def is_loaded_otherwise(node: Node) -> bool:
    """Whether the class is there with other fields: then `rebuild` says so itself."""
    cls = find_class(node.class_name)
    return cls is not None and len(fields_of(cls)) != len(node.fields)


def _as_it_is_now(cls: type, node: Node, children: list[Any]) -> tuple[Node, list[Any]] | None:
    """A saved dataclass in the order its class has now; None if its fields, or which of them are static, have changed.

    How the class takes itself apart is seen on an instance whose fields hold their own names.
    """
    if set(fields_of(cls)) != set(node.fields):
        return None
    try:
        probe: Any = object.__new__(cls)
        for name in node.fields:
            object.__setattr__(probe, name, name)
        pairs, treedef = tree_util.tree_flatten_with_path(probe, is_leaf=lambda x: x is not probe)
        order = [str(value) for _, value in pairs]
        static = [str(value) for value in treedef.node_data()[1]]
    except Exception as error:  # noqa: BLE001  (the class's own code, on values it may not like)
        log.warning("shardkeep: how %s takes itself apart cannot be seen (%s)", node.class_name, error)
        return None
    saved_static = [name for name in node.fields if name not in node.names]
    if sorted(order) != sorted(node.names) or sorted(static) != sorted(saved_static):
        return None
    if not isinstance(node.aux, tuple) or len(cast(Any, node.aux)) != len(saved_static):
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
    cls = usable_class(node)
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
