"""Pickles of other programs, decoded without running anything they contain.

Every class or function that a pickle names becomes an inert `PickledObject`: nothing is imported, looked up or called.
The result consists of plain values, with such objects in place of everything else.
"""

import io
import pickle
import struct
from typing import Any, cast

import numpy as np

from shardkeep.errors import IntegrityError
from shardkeep.model.arrays import dtype_from_name, dtype_name
from shardkeep.model.nodes import Node
from shardkeep.model.values import is_plain

_LIMIT = 64 << 20  # bytes: the structure of a tree has kilobytes
_MOST_CLASSES = 1000  # a tree has a handful
_MOST_IN_KEY = 100  # parts of a tuple that is a key


class PickledObject:
    """A placeholder for an object of a class that a pickle names."""

    module = ""
    name = ""

    def __new__(cls, *args: Any, **_: Any) -> "PickledObject":
        made = super().__new__(cls)
        made.args = args
        made.state = None
        return made

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        raise pickle.UnpicklingError("it sets items on an object that is not a dict")

    @classmethod
    def class_name(cls) -> str:
        return f"{cls.module}:{cls.name}"


class InertUnpickler(pickle._Unpickler):  # pyright: ignore[reportPrivateUsage]
    """The pure Python unpickler, because its opcodes can be guarded; the C one hashes and allocates unchecked."""

    dispatch = dict(pickle._Unpickler.dispatch)  # pyright: ignore[reportPrivateUsage]
    stand_in = PickledObject  # what stands for an object

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[tuple[str, str], type[PickledObject]] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = self._classes.get((module, name))
        if known is None:
            if len(self._classes) >= _MOST_CLASSES:
                raise pickle.UnpicklingError("it names too many classes")
            named = {"module": module, "name": name}
            known = self._classes[module, name] = type("PickledObject", (self.stand_in,), named)
        return known

    @staticmethod
    def is_key(value: object) -> bool:
        """Whether a value may be a key of a dict."""
        return _is_key(value)

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("persistent ids are not supported")

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("extensions are not supported")  # copyreg's cache would return real objects


def _guarded(opcode: bytes, keys: slice) -> Any:
    """An opcode that hashes these values of the stack, guarded so that it runs only if hashing them is quick."""
    load = InertUnpickler.dispatch[opcode[0]]

    def guarded(unpickler: Any) -> None:
        if not all(unpickler.is_key(value) for value in unpickler.stack[keys]):
            raise pickle.UnpicklingError("a key is not a plain value")
        load(unpickler)

    return guarded


def _load_bytearray(unpickler: Any) -> None:
    """Read the bytes that exist, instead of allocating as many as the pickle announces."""
    (length,) = struct.unpack("<Q", unpickler.read(8))
    unpickler.append(bytearray(unpickler.read(length)))


InertUnpickler.dispatch |= {
    pickle.SETITEM[0]: _guarded(pickle.SETITEM, slice(-2, -1)),
    pickle.SETITEMS[0]: _guarded(pickle.SETITEMS, slice(None, None, 2)),
    pickle.DICT[0]: _guarded(pickle.DICT, slice(None, None, 2)),
    pickle.ADDITEMS[0]: _guarded(pickle.ADDITEMS, slice(None)),
    pickle.FROZENSET[0]: _guarded(pickle.FROZENSET, slice(None)),
    pickle.BYTEARRAY8[0]: _load_bytearray,
}


def _is_key(value: object) -> bool:
    """Whether a value is quick to hash: plain, or a small tuple that does not nest or repeat itself endlessly."""
    pending: list[object] = [value]
    for _ in range(_MOST_IN_KEY):
        if not pending:
            return True
        item = pending.pop()
        kind = type(item)
        if kind is tuple and len(within := cast("tuple[object, ...]", item)) <= _MOST_IN_KEY:
            pending += within
        elif not (item is None or is_plain(item)) or (type(item) is int and item.bit_length() > 64):
            return False
    return not pending


def decode_pickle(data: bytes, where: str) -> Any:
    """The plain values and inert records in a pickle. `where` names the file in errors."""
    check_length(len(data), where)
    return decode_with(InertUnpickler(data), where)


def check_length(length: int, where: str) -> None:
    """`IntegrityError` for a pickle that is longer than any structure of a tree."""
    if length > _LIMIT:
        raise IntegrityError(
            f"{where}: a pickled structure has {length:,} bytes, more than the limit of {_LIMIT:,}", file=where
        )


def decode_with(unpickler: InertUnpickler, where: str) -> object:
    """The values that an unpickler gives. Whatever is wrong with the pickle is an `IntegrityError`."""
    try:
        return unpickler.load()
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        MemoryError,
        OverflowError,
        RecursionError,
        AssertionError,
        struct.error,
    ) as error:
        raise IntegrityError(f"{where}: a pickled structure cannot be decoded: {error!r:.200}", file=where) from error


def plain_value(value: object) -> object:
    """A decoded leaf as a plain value. Numbers that pickle as calls are rebuilt, the rest is an `OpaqueNode`."""
    if isinstance(value, PickledObject):
        scalar = _complex(value) if value.class_name() == "builtins:complex" else _numpy_scalar(value)
        return _opaque(value.class_name()) if scalar is None else scalar
    # Containers are not leaves, and one that contains itself repeatedly would take forever to inspect.
    return value if value is None or is_plain(value) else _opaque(f"builtins:{type(value).__name__}")


def _opaque(class_name: str) -> Node:
    """A node without children that is loaded as an `OpaqueNode`."""
    return Node("custom", (), (), class_name=class_name, has_aux=False)


def is_plain_within(value: object, most: int, depth: int = 50) -> bool:
    """Whether a decoded value is plain at every level, having at most `most` values in at most `depth` levels."""
    pending: list[tuple[object, int]] = [(value, 0)]
    for seen in range(most + 1):
        if not pending:
            return True
        item, level = pending.pop()
        if item is None or is_plain(item):
            continue
        if type(item) not in (list, tuple, dict) or level >= depth:
            return False
        within = cast("list[object] | tuple[object, ...] | dict[object, object]", item)
        if len(within) > most - seen:
            return False
        pending += [(child, level + 1) for child in within]
        pending += [(child, level + 1) for child in within.values()] if isinstance(within, dict) else []
    return False


def _complex(record: PickledObject) -> complex | None:
    """A complex number, which is pickled as complex(real, imag)."""
    return complex(*record.args) if [type(part) for part in record.args] == [float, float] else None


def _numpy_scalar(record: PickledObject) -> np.generic | None:
    """A NumPy scalar, which is pickled as scalar(dtype, bytes)."""
    if record.name != "scalar" or not record.module.startswith("numpy") or len(record.args) != 2:
        return None
    kind, raw = record.args
    try:
        if not isinstance(kind.args[0], str):  # NumPy would inspect nested lists, however often they repeat
            return None
        dtype = dtype_from_name(dtype_name(np.dtype(kind.args[0])))
        return np.frombuffer(raw, dtype=dtype)[0] if len(raw) == dtype.itemsize else None
    except (TypeError, ValueError, AttributeError, IndexError, SyntaxError):  # np.dtype evaluates shapes in the text
        return None
