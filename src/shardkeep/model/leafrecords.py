"""The records of leaves in a manifest: what each was, and where its pieces are.

docs/format.md specifies them. What is read is validated here, field by field, before anything is allocated because of
it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, NotRequired, TypedDict, TypeGuard, cast

from shardkeep.model.arrays import ArraySpec, Region, dtype_from_name, dtype_name, is_partition, is_possible
from shardkeep.model.cells import CellGrid
from shardkeep.model.digests import block_count
from shardkeep.model.leaves import (
    NATIVE,
    UNSHARDED,
    Axes,
    ByteOrder,
    ForeignArray,
    JaxArray,
    NumpyArray,
    Origin,
    Piece,
    PrngKeys,
    SavedSharding,
    StoredArray,
    StoredLeaf,
    StoredValue,
)
from shardkeep.model.manifest import DataFile
from shardkeep.model.naming import check_name
from shardkeep.model.perprocess import PerProcessRows
from shardkeep.model.pieces import CellPattern, StoredPieces, TableSet
from shardkeep.model.tree import Path, join_key
from shardkeep.model.values import Json, JsonObject, as_list, decode, encode, is_plain, to_text

HEX32 = re.compile(r"[0-9a-f]{32}")
_ARRAYS = tuple(origin.kind for origin in (JaxArray, NumpyArray, PrngKeys, PerProcessRows))


class Tables(NamedTuple):
    """The tables of a tree, and which of them have the cells of which arrays."""

    set: TableSet
    patterns: Sequence[CellPattern]


# What the records hold. Those of a file are taken to be like this, and checked field by field: whatever is not, raises
# an error that `decode_manifest` reports. A leaf has the fields of an array, or a value.
class _PieceRecord(TypedDict):
    file: int
    offset: int
    digests: Sequence[str] | None
    start: NotRequired[list[int]]
    shape: NotRequired[list[int]]
    stored: NotRequired[int | None]


class LeafRecord(TypedDict):
    key: Json
    kind: str
    value: Json
    dtype: str
    shape: list[int]
    pieces: list[_PieceRecord]  # in version 1
    grid: NotRequired[Json]
    pattern: NotRequired[Json]
    order: NotRequired[ByteOrder]
    impl: NotRequired[str]
    lengths: NotRequired[Json]
    sharding: NotRequired[Json]
    directory: NotRequired[str]
    was: NotRequired["LeafRecord"]


@dataclass(eq=False)
class LeafWriter:
    """Writes the records of the leaves of a tree, as JSON. Thousands of arrays share what their records say of them.

    `patterns` are those that the records name, each with its number.
    """

    patterns: dict[CellPattern, int] = field(default_factory=dict[CellPattern, int])
    # What it says before the pieces, and after them, by spec and origin: the tree holds those.
    _known: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict[tuple[int, int], tuple[str, str]])

    def write(self, leaf: StoredLeaf, pieces: StoredPieces | None) -> str:
        """The record of a leaf, with the pieces of an array that has any."""
        key = join_key(leaf.path)
        start = f'{{"key":{to_text(key if key.isascii() else encode(key))}'
        if not isinstance(leaf, StoredArray):
            return f'{start},"kind":{to_text(leaf.kind)},"value":{to_text(encode(leaf.value))}}}'
        shared = id(leaf.spec), id(leaf.origin)
        if shared not in self._known:
            array = {"kind": leaf.origin.kind, "dtype": dtype_name(leaf.spec.dtype), "shape": leaf.spec.shape}
            more = encode_origin(leaf.origin)
            self._known[shared] = "," + to_text(array)[1:-1], "," + to_text(more)[1:-1] if more else ""
        array, origin = self._known[shared]
        if pieces is None or (pieces.grid.count == 1 and pieces.pattern is None):
            return f"{start}{array}{origin}}}"
        grid = f',"grid":{to_text(pieces.grid.encode())}' if pieces.grid.count > 1 else ""
        if pieces.pattern is None:
            return f"{start}{array}{grid}{origin}}}"
        number = self.patterns.setdefault(pieces.pattern, len(self.patterns))
        return f'{start}{array}{grid},"pattern":{number}{origin}}}'


def encode_origin(origin: Origin) -> JsonObject:
    """What a manifest says about the origin of an array, besides its kind."""
    match origin:
        case JaxArray(SavedSharding(spec, mesh)):
            axes: list[Json] = [list(entry) if isinstance(entry, tuple) else entry for entry in spec]
            sizes: JsonObject = dict(mesh)
            return {"sharding": {"spec": axes, "mesh": sizes}}
        case NumpyArray(order) if order is not None:
            return {"order": order}
        case PrngKeys(impl):
            return {"impl": impl}
        case PerProcessRows(lengths):
            return {"lengths": list(lengths)}
        case ForeignArray(directory, _, was):
            return {
                "directory": directory,
                **({} if was is None else {"was": {"kind": was.kind, **encode_origin(was)}}),
            }
        case _:
            return {}


def decode_leaf(data: LeafRecord, path: Path, number: int, stored: "Tables | Sequence[DataFile]") -> StoredLeaf:
    """A leaf, the pieces of which are in tables, or before version 2 in the record itself, with the tree's files."""
    key = data["key"]
    if (key if isinstance(key, str) else decode(key)) != join_key(path):
        raise ValueError(f"leaf {data['key']!r} is not at this place in the structure")
    if data["kind"] == "value":
        if not is_plain(value := decode(data["value"])):
            raise ValueError(f"leaf {data['key']!r} is not a plain value")
        return StoredValue(path, value)
    is_foreign = data["kind"] not in _ARRAYS
    if is_foreign and not (isinstance(data["kind"], str) and "directory" in data):
        raise ValueError(f"unknown kind of leaf {data['kind']!r}")
    shape = tuple(map(integer, as_list(data["shape"])))
    spec = _spec(shape, data["dtype"])
    if is_foreign:
        return StoredArray(path, spec, (), _decode_foreign(data, spec))
    if isinstance(stored, Tables):
        pieces = _pieces_in_tables(data, path, number, spec, stored)
    else:
        pieces = tuple([_decode_piece(piece, spec, stored) for piece in data["pieces"]])
        if not is_partition(shape, [piece.region for piece in pieces]):
            raise ValueError(f"the pieces of leaf {data['key']!r} do not cover it exactly once")
    return StoredArray(path, spec, pieces, _decode_origin(data, spec))


def _pieces_in_tables(data: LeafRecord, path: Path, number: int, spec: ArraySpec, tables: "Tables") -> StoredPieces:
    grid = CellGrid.decode(spec.shape, data["grid"]) if "grid" in data else CellGrid.whole(spec.shape)
    pattern = None
    if "pattern" in data:
        pattern = tables.patterns[at] if (at := integer(data["pattern"])) >= 0 else None
        if pattern is None or len(pattern.tables) != grid.count:
            raise ValueError(f"leaf {data['key']!r} has no table for each of its pieces")
    return StoredPieces(tables.set, number, path, spec, grid, pattern)


def _decode_foreign(data: LeafRecord, spec: ArraySpec) -> ForeignArray:
    """An array that another program wrote, and what it was for that program."""
    was = data.get("was")
    origin = None
    if was is not None:
        if was["kind"] not in (JaxArray.kind, NumpyArray.kind, PrngKeys.kind):
            raise ValueError(f"leaf {data['key']!r} has an origin of an unknown kind")
        origin = _decode_origin({**was, "key": data["key"]}, spec)
        assert not isinstance(origin, ForeignArray | PerProcessRows)
    return ForeignArray(check_name(data.get("directory")), data["kind"], origin)


def _decode_origin(data: LeafRecord, spec: ArraySpec) -> Origin:
    """What an array was, from what is recorded besides its kind. Malformed records are refused for every kind."""
    kind = data["kind"]
    rows = PerProcessRows.stored(data.get("lengths"), spec) if kind == PerProcessRows.kind else None
    sharded = _decode_sharding(data["sharding"]) if "sharding" in data else UNSHARDED
    if data.get("order", "<") not in ("<", ">") or sharded is None:
        raise ValueError(f"leaf {data['key']!r} has an unknown byte order or sharding")
    if rows is not None:
        return rows
    if kind == PrngKeys.kind:
        if not isinstance(impl := data.get("impl"), str):
            raise ValueError(f"leaf {data['key']!r} has no PRNG implementation")
        return PrngKeys(impl)
    if kind == NumpyArray.kind:
        return NumpyArray(data["order"]) if "order" in data else NATIVE
    return sharded


def _decode_sharding(data: Json) -> JaxArray | None:
    """A `jax.Array` with this sharding; None if it is malformed. The mesh is only shown: it may be missing."""
    if not isinstance(data, dict):
        return None
    spec, mesh = data.get("spec", []), data.get("mesh", {})
    if not isinstance(spec, list) or not isinstance(mesh, dict):
        return None
    entries = tuple([tuple(axes) if isinstance(axes, list) else axes for axes in spec])
    return _sharded(entries, tuple([(axis, integer(size)) for axis, size in mesh.items()]))


@lru_cache(maxsize=1024)
def _sharded(entries: tuple[object, ...], mesh: tuple[tuple[str, int], ...]) -> JaxArray | None:
    """Cached: thousands of arrays share a few shardings."""
    spec = cast("tuple[Axes, ...]", entries)
    for axes in spec:
        if not (axes is None or all(isinstance(axis, str) for axis in (axes if isinstance(axes, tuple) else (axes,)))):
            return None
    return JaxArray(SavedSharding(spec, mesh))


@lru_cache(maxsize=1024)
def _spec(shape: tuple[int, ...], dtype: str) -> ArraySpec:
    """Cached: thousands of arrays share a few specs."""
    spec = ArraySpec(shape, dtype_from_name(dtype))
    if not is_possible(shape, spec.dtype.itemsize):
        raise ValueError(f"invalid shape {shape}")
    return spec


def _decode_piece(data: _PieceRecord, spec: ArraySpec, files: Sequence[DataFile]) -> Piece:
    region = Region.whole(spec.shape)
    if "start" in data:
        region = Region(*(tuple(map(integer, as_list(data.get(side)))) for side in ("start", "shape")))
        if len(region.start) != len(spec.shape) or min((*region.start, *region.shape), default=0) < 0:
            raise ValueError("invalid region")
    length = region.size * spec.dtype.itemsize
    stored = data.get("stored")
    stored = None if stored is None else integer(stored)
    file, offset, digests = integer(data["file"]), integer(data["offset"]), data["digests"]
    if stored is not None and stored < 1:
        raise ValueError("a compressed piece has no bytes")
    if not 0 <= file < len(files) or offset < 0 or offset + (length if stored is None else stored) > files[file].size:
        raise ValueError("a piece lies outside its file")
    if digests is not None:
        if len(as_list(digests)) != block_count(length) or not all(is_digest(d) for d in digests):
            raise ValueError("a piece has missing or invalid digests")
        digests = tuple(digests)
    return Piece(region, file, offset, length, digests, stored)


def is_digest(value: object) -> TypeGuard[str]:
    """Whether a value is a digest as documents have it."""
    return isinstance(value, str) and HEX32.fullmatch(value) is not None


def integer(value: object) -> int:
    """The value, which must be an integer; `ValueError` for anything else, also a boolean."""
    if type(value) is not int:
        raise ValueError(f"not an integer: {value!r}")
    return value
