"""The containers of a tree without their contents, and how each is rebuilt.

Nothing that a file names is imported or executed. A namedtuple, dataclass or other class is rebuilt only if the
program has imported it and registered it with JAX; otherwise an `OpaqueNode` takes its place.
"""

import dataclasses
import enum
import logging
import sys
import threading
import types
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, cast

from shardkeep.errors import TreeError
from shardkeep.jaxapi import flatten_once
from shardkeep.model.auxdata import build_static, describe_static, deserializer_named, has_serializers, serializer_of
from shardkeep.model.summaries import brief, cut
from shardkeep.model.values import Json, NotPlainError, encode

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef

log = logging.getLogger("shardkeep")

_MOST_SHOWN = 8  # children of an OpaqueNode


class OpaqueNode:
    """A placeholder for a class that cannot be rebuilt. It holds the children of the original node by name.

    `load` returns one if the class is not imported or not registered with JAX, or if its auxiliary data could not be
    stored. Pass a `template` to get the class back. An `OpaqueNode` is a PyTree node and can be saved again.

    Args:
        class_name: The class, as `module:qualname`.
        children: The children of the node by name. They can be accessed as attributes and as items.

    >>> layer = OpaqueNode("models:Dense", {"kernel": 1, "bias": 2})
    >>> layer.kernel, layer["bias"], layer
    (1, 2, OpaqueNode('models:Dense', kernel=1, bias=2))
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        _register_opaque_nodes()
        return super().__new__(cls)

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
        return isinstance(other, OpaqueNode) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = [f"{cut(name, 40)}={brief(value)}" for name, value in list(self.children.items())[:_MOST_SHOWN]]
        more = ["…"] if len(self.children) > len(shown) else []
        return f"OpaqueNode({', '.join([repr(self.class_name), *shown, *more])})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, tuple[str, ...]]]:
        from jax import tree_util

        children = [(tree_util.GetAttrKey(name), value) for name, value in self.children.items()]
        return children, (self.class_name, tuple(self.children))

    @classmethod
    def tree_unflatten(cls, aux: tuple[str, tuple[str, ...]], children: Sequence[Any]) -> "OpaqueNode":
        return cls(aux[0], dict(zip(aux[1], children, strict=True)))


_registering = threading.RLock()
_is_registered = False


def _register_opaque_nodes() -> None:
    """Register `OpaqueNode` with JAX, which is imported for this only once there is one, or a class is looked up."""
    global _is_registered
    if not _is_registered:
        from jax import tree_util

        with _registering, suppress(ValueError):  # another thread, or the code a signal interrupted, was first
            tree_util.register_pytree_with_keys_class(OpaqueNode)
        _is_registered = True


if "jax" in sys.modules:
    _register_opaque_nodes()


class _Position(enum.Enum):
    """Marks the position of a leaf in a Skeleton. Leaves are filled in order."""

    LEAF = enum.auto()


LEAF: Final = _Position.LEAF
Child: TypeAlias = "Node | Literal[_Position.LEAF] | None"


@dataclass(frozen=True, slots=True)
class Node:
    """One container: its kind and its children by name.

    For a tree of this program, `cls` and `aux` are live objects. A node read from a file has no `cls`. Its auxiliary
    data is in `aux` if it is plain (`has_aux`), in `aux_bytes` if a registered function serialized it, or in `static`.
    """

    kind: str  # list, tuple, dict, odict, defaultdict, namedtuple, custom
    names: tuple[str, ...]
    children: tuple[Child, ...]
    keys: tuple[object, ...] = ()
    class_name: str = ""
    cls: type[object] | None = None
    aux: object = None
    has_aux: bool = True
    fields: tuple[str, ...] = ()  # of a dataclass: the names of all its fields, in order
    registered: str = ""  # the name the class is registered under with jax.export
    aux_bytes: bytes | None = None
    static: Json = None

    def build(self, children: list[Any]) -> Any:
        return _BUILDERS[self.kind](self, children)


def serialize_aux(node: Node) -> Node:
    """A Node of a live tree with auxiliary data that is not plain in the form in which it is stored."""
    assert node.cls is not None
    found = serializer_of(node.cls) if has_serializers() else None
    if found is not None:
        node = replace(node, registered=found[0])
    if node.kind == "namedtuple" or _is_plain_aux(node.aux):
        return node
    if found is None:
        return replace(node, static=describe_static(node.aux)) if type(node.aux) is node.cls else node
    return replace(node, aux_bytes=_call_serializer(node, *found))


def _is_plain_aux(aux: object) -> bool:
    try:
        encode(aux)
    except NotPlainError:
        return False
    return True


def _call_serializer(node: Node, name: str, serialize: Callable[[object], bytes]) -> bytes:
    try:
        return bytes(memoryview(serialize(node.aux)))
    except Exception as error:  # the program's own code
        raise TreeError(
            f"the serializer registered for {node.class_name} as {name!r} failed: {error!r}; nothing was written"
        ) from error


def usable_class(node: Node) -> type[object] | None:
    """The class a Node can be rebuilt as: the live one, or one that this program has registered; else None."""
    cls = node.cls if node.cls is not None else _registered_class(node)
    if cls is None:
        return None
    if node.kind == "namedtuple":
        return cls if _is_namedtuple(cls, node.names) else None
    if node.cls is None and not node.has_aux:
        if node.aux_bytes is not None:
            usable = deserializer_named(node.registered) is not None
        else:
            node = replace(node, aux=None if node.static is None else build_static(cls, node.static))
            usable = node.aux is not None
        if not usable:
            return None
    return cls if _treedef(cls, node) is not None else None


def _is_namedtuple(cls: type[object], names: tuple[str, ...]) -> bool:
    return getattr(cls, "_fields", 0) == names and issubclass(cls, tuple)


def _registered_class(node: Node) -> type[object] | None:
    """The class registered under the stored name, wherever it is defined now; else the one at the stored place."""
    found = deserializer_named(node.registered) if node.registered else None
    return find_class(node.class_name) if found is None else found[0]


def find_class(class_name: str) -> type[object] | None:
    """A class by `module:qualname`, if the program has imported it. Nothing is imported to find it."""
    module, _, qualname = class_name.partition(":")
    found: object = sys.modules.get(module)
    for name in qualname.split("."):
        found = vars(found).get(name) if isinstance(found, types.ModuleType | type) else None
    return found if isinstance(found, type) else None


def import_of(node: Node) -> str | None:
    """The module whose import is likely to register the class of a node read from a file, by the name of the class.

    For a class of a private module this is the package around it. None if the class would still be unusable.
    """
    module, _, qualname = node.class_name.partition(":")
    names = module.split(".")
    is_saved = node.kind == "namedtuple" or node.has_aux or node.static is not None or node.aux_bytes is not None
    if not is_saved or "<" in qualname or not all(map(str.isidentifier, names)):
        return None
    private = next((i for i, name in enumerate(names) if i and name.startswith("_")), len(names))
    public = ".".join(names[:private])
    return None if public in sys.modules else public


def _treedef(cls: type[object], node: Node) -> "PyTreeDef | None":
    """JAX's description of one node of a registered class; None if the class is not registered."""
    if "jax" not in sys.modules and cls is not OpaqueNode:
        return None  # nothing can be registered with it
    from jax import tree_util

    _register_opaque_nodes()
    leaves = [tree_util.tree_structure(0)] * len(node.names)
    try:
        return tree_util.PyTreeDef.from_node_data_and_children(tree_util.default_registry, (cls, node.aux), leaves)
    except (ValueError, TypeError, RuntimeError):
        return None


def _build_namedtuple(node: Node, children: list[Any]) -> Any:
    cls = usable_class(node)
    if cls is not None:
        # not cls(…): a file must not choose which code runs
        return tuple.__new__(cast("type[tuple[Any, ...]]", cls), children)  # pyright: ignore[reportUnknownMemberType]
    name = node.class_name.rpartition(".")[2].rpartition(":")[2]
    try:
        return namedtuple(name, node.names)(*children)  # pyright: ignore[reportUntypedNamedTuple]
    except ValueError:  # names that no namedtuple can have
        return OpaqueNode(node.class_name, dict(zip(node.names, children, strict=True)))


def fields_of(cls: type[object]) -> tuple[str, ...]:
    """The names of a dataclass's fields; none for any other class."""
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


def is_loaded_otherwise(node: Node) -> bool:
    """Whether the class does not have the fields that it was saved with, which `rebuild` reports."""
    cls = _registered_class(node)
    return cls is not None and len(fields_of(cls)) != len(node.fields)


def _as_it_is_now(cls: type[object], node: Node, children: list[Any]) -> tuple[Node, list[Any]] | None:
    """A saved dataclass in the field order its class has now; None if its fields, or the static ones, have changed.

    The order is read off an instance whose fields hold their own names.
    """
    if set(fields_of(cls)) != set(node.fields):
        return None
    try:
        probe = object.__new__(cls)
        for name in node.fields:
            object.__setattr__(probe, name, name)
        pairs, data = flatten_once(probe)
        order = [str(value) for _, value in pairs]
        if data is None:
            raise TypeError("it is not registered")
        static = [str(value) for value in data[1]]
    except Exception as error:  # noqa: BLE001  (the class's own code, on values it may not expect)
        log.warning("the fields of %s cannot be compared with the saved ones: flattening it raised %s", cls, error)
        return None
    saved_static = [name for name in node.fields if name not in node.names]
    if sorted(order) != sorted(node.names) or sorted(static) != sorted(saved_static):
        return None
    placed = dict(zip(node.names, children, strict=True))
    if node.aux_bytes is not None:  # only the registered function knows the order of what it returns
        same = static == saved_static
        return (replace(node, names=tuple(order)), [placed[n] for n in order]) if same else None
    if not isinstance(node.aux, tuple):
        return None
    aux = cast("tuple[object, ...]", node.aux)
    if len(aux) != len(saved_static):
        return None
    by_name = dict(zip(saved_static, aux, strict=True))
    return replace(node, names=tuple(order), aux=tuple(by_name[n] for n in static)), [placed[n] for n in order]


def _build_custom(node: Node, children: list[Any]) -> Any:
    cls = _registered_class(node) if node.cls is None else node.cls
    if cls is not None and node.cls is None and node.fields:
        now = _as_it_is_now(cls, node, children)
        if now is None:
            log.warning("%s no longer has the fields it was saved with: it is loaded as an OpaqueNode", node.class_name)
            return OpaqueNode(node.class_name, dict(zip(node.names, children, strict=True)))
        node, children = now
    cls = usable_class(node)
    if cls is None:
        return OpaqueNode(node.class_name, dict(zip(node.names, children, strict=True)))
    try:
        return cast("PyTreeDef", _treedef(cls, _with_aux(cls, node))).unflatten(children)
    except Exception as error:  # the class's own code: it may refuse what an older version of it saved
        raise TreeError(f"{node.class_name} rejected the saved values ({error}); pass template=") from error


def _with_aux(cls: type[object], node: Node) -> Node:
    """The node with its auxiliary data as an object."""
    if node.cls is not None or node.has_aux:
        return node
    if node.static is not None:
        return replace(node, aux=build_static(cls, node.static))
    found = deserializer_named(node.registered)
    assert found is not None
    assert node.aux_bytes is not None
    return replace(node, aux=found[1](node.aux_bytes))


_BUILDERS: dict[str, Callable[[Node, list[Any]], Any]] = {
    "list": lambda node, children: children,
    "tuple": lambda node, children: tuple(children),
    "dict": lambda node, children: dict(zip(node.keys, children, strict=True)),
    "odict": lambda node, children: OrderedDict(zip(node.keys, children, strict=True)),
    "defaultdict": lambda node, children: defaultdict(cast(Any, node.aux), zip(node.keys, children, strict=True)),
    "namedtuple": _build_namedtuple,
    "custom": _build_custom,
}
