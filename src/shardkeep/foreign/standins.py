"""Decoded pickles as trees: containers as they are, tensors and plain values as leaves, other objects as stand-ins.

A stand-in is loaded as an `OpaqueNode` with the class's name, and holds what was pickled of the object. Nothing that a
file names is looked up.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from shardkeep.errors import IntegrityError
from shardkeep.foreign.pickles import PickledObject, plain_value
from shardkeep.foreign.torchpickles import StandIn, Storage, Tensor, tensor_of
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.nodes import LEAF, Child, Node
from shardkeep.model.tree import Path, Skeleton, name_children, nest
from shardkeep.model.values import is_plain

_DEEPEST = 100  # levels of a tree; a tree that is saved again may have 150
_MOST_DOTS = 60  # in a key that makes levels of the tree
_FEW = 1000  # values that any pickle may have
# Calls that stand for their only argument, and its type.
_SIMPLE: dict[str, type[object]] = {"torch:Size": tuple, "torch:device": str}


@fast_dataclass
class TakenApart:
    """A tree and its leaves in order: the path of each, and the tensor or the plain value."""

    skeleton: Skeleton
    leaves: tuple[tuple[Path, object], ...]


def take_apart(value: object, length: int, where: str) -> TakenApart:
    """The tree of a decoded pickle.

    Dots in the names of a dict that holds tensors (a state dict) make levels, as in safetensors files.

    Args:
        value: What the pickle gives.
        length: The length of the pickle, which bounds the size of the tree: what a pickle repeats is repeated in it.
        where: The file, for errors.
    """
    taker = _Taker(_FEW + length // 2, where)
    root = taker.child(value, ())
    return TakenApart(Skeleton(root), tuple(taker.leaves))


class Placed:
    """An array, as whoever passes the tree describes it: a leaf."""


class _Taker:
    """Goes through a value once."""

    def __init__(self, most: int, where: str) -> None:
        self.leaves: list[tuple[Path, object]] = []
        self._left, self._where = most, where
        self._above: set[int] = set()  # what contains the value that is looked at

    def child(self, value: object, path: Path) -> Child:
        self._left -= 1
        if self._left < 0 or len(path) > _DEEPEST:
            what = "nested too deeply" if self._left >= 0 else "repeats itself too often"
            raise IntegrityError(f"{self._where}: what is pickled is {what}", file=self._where)
        if value is None:
            return None
        if is_plain(value) or isinstance(value, Placed):
            return self._leaf(value, path)
        if isinstance(value, type):
            return self._leaf(f"{getattr(value, 'module', '')}.{getattr(value, 'name', '')}", path)
        if isinstance(value, Storage):
            return self._storage(value, path)
        if id(value) in self._above:
            return _opaque(f"builtins:{type(value).__name__}")
        self._above.add(id(value))
        try:
            return self._container(value, path)
        finally:
            self._above.remove(id(value))

    def _leaf(self, value: object, path: Path) -> Child:
        self.leaves.append((path, value))
        return LEAF

    def _container(self, value: object, path: Path) -> Child:
        if isinstance(value, dict):
            return self._dict(cast("dict[object, object]", value), path)
        if type(value) in (list, tuple):
            return self._sequence(type(value).__name__, cast("Sequence[object]", value), path)
        if isinstance(value, PickledObject):
            tensor = tensor_of(value, self._where)
            return self._record(value, path) if tensor is None else self._tensor(tensor, path)
        return _opaque(f"builtins:{type(value).__name__}")

    def _dict(self, value: Mapping[object, object], path: Path) -> Child:
        if self._is_state_dict(value):
            value = {**nest([((str(name),), item) for name, item in value.items()])}
        if any(isinstance(key, PickledObject) for key in value):
            return self._custom("builtins:dict", [("items", list(value.items()))], path)
        keys = tuple(value)
        names = name_children(keys)
        return Node("dict", names, self._children(names, list(value.values()), path), keys)

    def _is_state_dict(self, value: Mapping[object, object]) -> bool:
        """Whether it holds tensors, and names with dots."""
        dots = [key.count(".") if isinstance(key, str) else _MOST_DOTS + 1 for key in value]
        if not 0 < max(dots, default=0) <= _MOST_DOTS:
            return False
        return any(isinstance(item, Placed) or tensor_of(item, self._where) is not None for item in value.values())

    def _sequence(self, kind: str, values: Sequence[object], path: Path) -> Child:
        numbers = tuple(map(str, range(len(values))))
        return Node(kind, numbers, self._children(numbers, values, path))

    def _children(self, names: Sequence[str], values: Sequence[object], path: Path) -> tuple[Child, ...]:
        return tuple(self.child(item, (*path, name)) for name, item in zip(names, values, strict=True))

    def _tensor(self, tensor: Tensor, path: Path) -> Child:
        if tensor.dtype is not None:
            return self._leaf(tensor, path)
        about = [("dtype", f"torch.{tensor.type_name}"), ("shape", tensor.shape)]
        return self._custom("torch:Tensor", about, path)

    def _storage(self, storage: Storage, path: Path) -> Child:
        if storage.dtype is None:
            return self._custom("torch:Storage", [("type", storage.type_name), ("count", storage.count)], path)
        whole = Tensor(storage, storage.dtype, storage.dtype.name, 0, (storage.count,), (1,))
        return self._leaf(whole, path)

    def _record(self, value: PickledObject, path: Path) -> Child:
        """An object that is no tensor: a plain value, if it stands for one, or a stand-in with what was pickled."""
        name = value.class_name()
        if len(value.args) == 1 and type(value.args[0]) is _SIMPLE.get(name):
            return self.child(value.args[0], path)
        plain = plain_value(value)
        if is_plain(plain):
            return self._leaf(plain, path)
        state: object = value.state
        inside: dict[object, object] = {}
        if isinstance(state, dict):
            inside |= cast("dict[object, object]", state)
        items = value.items if isinstance(value, StandIn) else []
        parts: dict[str, object] = {"args": value.args, "state": None if inside else state, "items": items}
        for what, held in parts.items():
            if held:
                inside["_" * (what in inside) + what] = held
        return self._custom(name, list(inside.items()), path)

    def _custom(self, class_name: str, inside: Sequence[tuple[object, object]], path: Path) -> Node:
        names = name_children([name for name, _ in inside])
        children = self._children(names, [item for _, item in inside], path)
        return Node("custom", names, children, class_name=class_name, has_aux=False)


def _opaque(class_name: str) -> Node:
    return Node("custom", (), (), class_name=class_name, has_aux=False)
