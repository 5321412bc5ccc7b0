"""The structure of a tree as JAX exports it: a FlatBuffer of nested nodes, decoded without running anything."""

import struct

from shardkeep.errors import IntegrityError
from shardkeep.model.nodes import LEAF, Child, Node
from shardkeep.model.tree import name_children

_LEAF, _NONE, _TUPLE, _LIST, _DICT, _CUSTOM = range(6)  # kinds of nodes
_KIND, _CHILDREN, _NAMES, _CLASS = range(4)  # fields of a node, in their order
_DEEPEST = 150  # levels, as of trees that are saved


def decode_pytreedef(data: bytes, where: str) -> Child:
    """The tree without its leaves. `IntegrityError` if it is malformed.

    Classes that were registered for export are nodes with the names that they were registered under.
    """
    try:
        reader = _FlatBuffer(data)
        return reader.node(reader.offset(0), 0)
    except (struct.error, ValueError, IndexError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{where} is malformed: {error}", file=where) from error


class _FlatBuffer:
    """Reads nodes. A table takes four bytes at least, so there cannot be more nodes than that."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = len(data) // 4

    def offset(self, at: int) -> int:
        """Where the offset at a place points to."""
        (step,) = struct.unpack_from("<I", self._data, at)
        return at + step

    def node(self, table: int, depth: int) -> Child:
        """The node of a table."""
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            raise ValueError("its structure contains itself, or is nested too deeply")
        at = self._field(table, _KIND)
        (kind,) = struct.unpack_from("<b", self._data, at) if at else (_LEAF,)
        if kind == _LEAF:
            return LEAF
        if kind == _NONE:
            return None
        children = tuple(self.node(self.offset(each), depth + 1) for each in self._vector(table, _CHILDREN))
        numbers = tuple(str(number) for number in range(len(children)))
        if kind in (_TUPLE, _LIST):
            return Node("tuple" if kind == _TUPLE else "list", numbers, children)
        if kind == _DICT:
            keys = tuple(self._text(self.offset(each)) for each in self._vector(table, _NAMES))
            if len(keys) != len(children) or len(set(keys)) != len(keys):
                raise ValueError("a dict has other keys than children")
            return Node("dict", name_children(keys), children, keys)
        if kind != _CUSTOM:
            raise ValueError(f"a node has the unknown kind {kind}")
        at = self._field(table, _CLASS)
        return Node("custom", numbers, children, class_name=self._text(self.offset(at)) if at else "", has_aux=False)

    def _field(self, table: int, number: int) -> int:
        """Where a field of a table is; 0 if it has its default."""
        (back,) = struct.unpack_from("<i", self._data, table)
        vtable = table - back
        if vtable < 0:
            raise ValueError("a table lies outside")
        (size,) = struct.unpack_from("<H", self._data, vtable)
        if 4 + 2 * number >= size:
            return 0
        (step,) = struct.unpack_from("<H", self._data, vtable + 4 + 2 * number)
        return table + step if step else 0

    def _vector(self, table: int, number: int) -> range:
        """Where the offsets in a vector are."""
        at = self._field(table, number)
        if not at:
            return range(0)
        start = self.offset(at)
        (count,) = struct.unpack_from("<I", self._data, start)
        if start + 4 + 4 * count > len(self._data):
            raise ValueError("a vector ends outside")
        return range(start + 4, start + 4 + 4 * count, 4)

    def _text(self, at: int) -> str:
        (length,) = struct.unpack_from("<I", self._data, at)
        if at + 4 + length > len(self._data):
            raise ValueError("a string ends outside")
        return self._data[at + 4 : at + 4 + length].decode()
