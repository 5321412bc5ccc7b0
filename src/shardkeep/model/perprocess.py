"""Leaves that differ between processes, and how their values are stored.

The values of one leaf are stored as a uint8 array of rows. Each process has as many consecutive rows as its value
needs, padded with zeros, and writes only those. docs/format.md specifies the encoding of a value.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias, cast, final

import numpy as np

from shardkeep.errors import IntegrityError, an
from shardkeep.jaxapi import transfers_allowed
from shardkeep.model.arrays import Array, ArraySpec, Region, dtype_from_name, dtype_name, is_possible
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.nodes import LEAF, Child
from shardkeep.model.shares import Shares, Writers
from shardkeep.model.summaries import brief
from shardkeep.model.tree import Leaf, Path, Skeleton
from shardkeep.model.values import Json, JsonObject, NotPlainError, as_list, decode, encode, show

_MAX_DEPTH = 100  # of containers in one value
_ROUND = 64  # bytes: JAX can use rows that begin there without a copy
_WIDEST = 16 << 20  # bytes of a row: little is wasted, and a row is one chunk of a zarr array
_START = struct.Struct("<Q")
_Dict: TypeAlias = dict[object, object]
_Sequence: TypeAlias = Sequence[object]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PerProcess:
    """A leaf whose value differs between processes, such as the state of a data iterator.

    Use it anywhere in a tree; JAX treats it as a leaf. Each process saves its own value, and `load` returns each
    process's own value, without the wrapper. This needs the same number of processes as the save. With
    `load(..., per_process="all")`, any number of processes can load, and each gets the list of all values.

    Args:
        value: A str, int, float, complex, bool, None, bytes, NumPy scalar or NumPy array, or nested dicts, lists and
            tuples of them. A JAX array of this process is saved and loaded as a NumPy array.

    >>> import numpy as np, shardkeep
    >>> state = {"w": np.zeros(3), "data": PerProcess({"epoch": 2, "offset": 1024})}
    >>> _ = shardkeep.save(tmp / "step_7", state)
    >>> shardkeep.load(tmp / "step_7")["data"]
    {'epoch': 2, 'offset': 1024}
    >>> shardkeep.load(tmp / "step_7", per_process="all")["data"]
    [{'epoch': 2, 'offset': 1024}]
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerProcess) and _is_same(self.value, other.value)

    def __hash__(self) -> int:
        return hash((PerProcess, self.value))

    def __repr__(self) -> str:
        return f"PerProcess({brief(self.value)})"


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values are equal; of arrays also their types and shapes."""
    if hasattr(a, "dtype") and hasattr(b, "dtype"):
        one, other = np.asarray(a), np.asarray(b)
        return one.dtype == other.dtype and one.shape == other.shape and bool(np.all(one == other))
    if type(a) is not type(b) or not isinstance(a, dict | list | tuple):
        return a is b or bool(a == b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in cast(_Dict, a))
    return len(cast(_Sequence, a)) == len(b) and all(map(_is_same, cast(_Sequence, a), b))


def find_problem_inside(
    value: object, problem_of: Callable[[object], str | None], where: str = "PerProcess value", depth: int = 0
) -> str | None:
    """Why a value cannot be saved, and where in it; None if it can. `problem_of` judges what is not a container."""
    if depth > _MAX_DEPTH:
        return f"{where:.60}…: nested too deeply (over {_MAX_DEPTH} levels), or contains itself"
    if type(value) not in (dict, list, tuple):
        problem = problem_of(value)
        return None if problem is None else f"{where}: {problem}"
    pairs = cast(_Dict, value).items() if isinstance(value, dict) else enumerate(cast(_Sequence, value))
    for key, inside in pairs:
        try:
            encode(key)
        except NotPlainError as error:
            key = f"dict key {show(key):.60} is {an(str(error))}"
            return f"{where}: {key}; use str, int, float, bool, None, bytes or tuples of them"
        problem = find_problem_inside(inside, problem_of, f"{where}[{show(key):.60}]", depth + 1)
        if problem is not None:
            return problem
    return None


def size_of(value: object) -> int:
    """About how many bytes the data in a value takes: the arrays and the bytes in it."""
    if isinstance(value, dict | list | tuple):
        inside = cast(_Dict, value).values() if isinstance(value, dict) else cast(_Sequence, value)
        return sum(map(size_of, inside))
    return len(value) if isinstance(value, bytes | str) else int(getattr(value, "nbytes", 0))


def encode_value(value: object) -> Array:
    """The bytes of a value that can be saved: 8 of length, JSON, then arrays and bytes."""
    data: list[bytes | memoryview] = []
    text = json.dumps(_encode(value, data), separators=(",", ":")).encode()
    return np.frombuffer(b"".join([_START.pack(len(text)), text, *data]), np.uint8)


def _encode(value: object, data: list[bytes | memoryview]) -> Json:
    """The typed JSON of a value. `data` gets the bytes that it speaks of."""
    if type(value) is dict:
        return {"dict": [[encode(key), _encode(inside, data)] for key, inside in cast(_Dict, value).items()]}
    if type(value) is list or type(value) is tuple:
        children = [_encode(inside, data) for inside in cast(_Sequence, value)]
        return children if isinstance(value, list) else {"tuple": children}
    if type(value) is bytes:
        data.append(value)
        return {"data": len(value)}
    if isinstance(value, np.generic) or not hasattr(value, "dtype"):
        return encode(value)
    with transfers_allowed():
        array: Array = np.asarray(value)
    native = array.dtype.newbyteorder("=")
    data.append(np.ascontiguousarray(array, native).reshape(-1).view(np.uint8).data)
    order = [] if array.dtype == native else [">"]
    return {"array": [dtype_name(array.dtype), list(array.shape), *order]}


def decode_value(raw: Array) -> Any:
    """The value that `encode_value` was given; `ValueError` for any other bytes."""
    if raw.size < _START.size:
        raise ValueError("it is too short")
    (length,) = _START.unpack(raw[: _START.size].tobytes())
    reader = _Reader(raw, _START.size)
    try:
        document = json.loads(reader.take(length).tobytes(), object_pairs_hook=_one_pair)
        value = _decode(document, reader, 0)
    except (KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if reader.position != raw.size:
        raise ValueError(f"{raw.size - reader.position:,} bytes are left over")
    return value


@dataclass(slots=True)
class _Reader:
    """Bytes that are taken one after another, each once: what is decoded is never larger than what is stored."""

    raw: Array
    position: int

    def take(self, count: int) -> Array:
        if not 0 <= count <= self.raw.size - self.position:
            raise ValueError(f"it declares {count:,} bytes, but only {self.raw.size - self.position:,} are left")
        self.position += count
        return self.raw[self.position - count : self.position]


def _one_pair(pairs: list[tuple[str, Json]]) -> JsonObject:
    if len(pairs) != 1:
        raise ValueError("an object that is not a typed value")
    return dict(pairs)


def _decode(data: Json, reader: _Reader, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(data, list):
        return [_decode(inside, reader, depth + 1) for inside in data]
    tag, body = next(iter(data.items())) if isinstance(data, dict) else ("", None)
    if tag == "tuple":
        return tuple(_decode(inside, reader, depth + 1) for inside in as_list(body))
    if tag == "dict":
        pairs = [(decode(key), _decode(inside, reader, depth + 1)) for key, inside in _pairs(body)]
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a dict key appears twice")
        return dict(pairs)
    if tag == "data":
        return reader.take(_count(body)).tobytes()
    return _decode_array(reader, *as_list(body)) if tag == "array" else decode(data)


def _decode_array(reader: _Reader, name: Json, sizes: Json, order: Json = "<") -> Array:
    dtype, shape = dtype_from_name(cast(str, name)), tuple(map(_count, as_list(sizes)))
    swapped = order == ">" and dtype.kind != "V"
    if not (swapped or order == "<") or not is_possible(shape, dtype.itemsize):
        raise ValueError(f"invalid array {name}{list(shape)}")
    raw = reader.take(math.prod(shape) * dtype.itemsize)
    array: Array = np.empty(shape, dtype)  # its own memory: the caller may write to it
    array.reshape(-1).view(np.uint8)[...] = raw
    return array.astype(dtype.newbyteorder(">")) if swapped else array


def _pairs(value: Json) -> Iterator[list[Json]]:
    return map(as_list, as_list(value))


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"not a size: {value!r:.60}")
    return value


@final
@fast_dataclass
class PerProcessRows:
    """The origin of an array that was a `PerProcess` leaf: which of its rows hold the value of which process."""

    lengths: tuple[int, ...]  # bytes of each process's value
    width: int
    kind: ClassVar = "per_process"

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "PerProcessRows":
        """The rows for values of these lengths.

        >>> PerProcessRows.of([10, 200]).shape
        (2, 256)
        """
        return cls(tuple(lengths), min(-(-max(lengths) // _ROUND) * _ROUND, _WIDEST))

    @classmethod
    def stored(cls, lengths: Json, spec: ArraySpec) -> "PerProcessRows":
        """The rows of a stored leaf; `ValueError` if it cannot have been written like that."""
        found = cls(tuple(map(_count, as_list(lengths))), spec.shape[1] if len(spec.shape) == 2 else 0)
        if spec.dtype != np.uint8 or not found.lengths or 0 in (found.width, *found.lengths):
            raise ValueError("the values of processes are missing")
        if found.shape != spec.shape:
            raise ValueError(f"values of {len(found.lengths)} processes do not fill {list(spec.shape)}")
        return found

    @property
    def counts(self) -> list[int]:
        return [-(-length // self.width) for length in self.lengths]

    @property
    def shape(self) -> tuple[int, int]:
        return (sum(self.counts), self.width)

    @property
    def spec(self) -> ArraySpec:
        return ArraySpec(self.shape, np.dtype(np.uint8))

    def region(self, process: int) -> Region:
        """The rows of a process."""
        counts = self.counts
        return Region((sum(counts[:process]), 0), (counts[process], self.width))

    @property
    def shares(self) -> Shares:
        """Every row, and the process that writes it."""
        return Shares(self.shape, (self.shape[0], 1), Writers(np.repeat(np.arange(len(self.lengths)), self.counts)))

    def fill(self, process: int, raw: Array) -> Array:
        """The rows of a process with its bytes in them."""
        filled: Array = np.zeros((self.counts[process], self.width), np.uint8)
        filled.reshape(-1)[: raw.size] = raw
        return filled

    def decode(self, process: int, rows: Array, key: str) -> Any:
        """The value of a process, from its rows; `IntegrityError` if it is malformed."""
        try:
            return decode_value(rows.reshape(-1)[: self.lengths[process]])
        except ValueError as error:
            raise IntegrityError(f"the value of process {process} is malformed: {error}", leaf=key) from error


UNSETTLED = PerProcessRows((), 0)  # while it is not known yet how many bytes the other processes have


def fold_containers(skeleton: Skeleton, leaves: Sequence[Leaf], places: set[Path]) -> tuple[Skeleton, list[Leaf]]:
    """A template in which there is one leaf in each of these places, also where it has a container.

    A `PerProcess` leaf may hold a dict, and comes back as one: so a loaded tree can be the next template.
    """
    remaining = iter(leaves)
    folded: list[Leaf] = []

    def fold(node: Child, path: Path) -> Child:
        if node is None:
            return None
        if node is LEAF:
            folded.append(next(remaining))
            return LEAF
        before = len(folded)
        below = tuple(fold(child, (*path, name)) for name, child in zip(node.names, node.children, strict=True))
        if path not in places:
            return replace(node, children=below)
        folded[before:] = [Leaf(path, PerProcess(None))]
        return LEAF

    return Skeleton(fold(skeleton.root, ())), folded
