"""The safetensors format: 8 bytes of length, a JSON header, tensors back to back.

Data starts on a page boundary. Pieces that consist of complete pages come first, so that each of them starts on a
page, then pieces whose length is a multiple of 64. A mapped file can then be used as an array without a copy.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar, cast

from shardkeep.errors import IntegrityError, TreeError
from shardkeep.layouts.codecs import RAW, Codec
from shardkeep.layouts.plan import Draft, FilePlan, PiecePlan, StagedArray, StagedLeaf, TreePlan, WrittenFile, arrays_of
from shardkeep.model.arrays import ArraySpec, DType, Region, cut, dtype_from_name, dtype_name, is_possible, split_counts
from shardkeep.model.document import no_duplicates
from shardkeep.model.tree import Path, join_key
from shardkeep.model.values import Json, to_text
from shardkeep.processes.assignment import SMALL
from shardkeep.runtime.hostmemory import PAGE, file_order

HEADER_LIMIT = 100_000_000  # the most that readers of the format accept
FILE_LIMIT = 8 << 30  # bytes: trees have few files, and none is unwieldy to copy

TO_CODE = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
FROM_CODE = {code: name for name, code in TO_CODE.items()}


@dataclass(frozen=True)
class SafetensorsLayout:
    """Few large files, with pieces packed as the devices hold them.

    Args:
        limit: The size limit of a file in bytes; larger arrays are split. None for the default limit without splitting.
    """

    limit: int | None = None
    name: str = "safetensors"
    codec: Codec = RAW
    whole: float = SMALL
    gathers: bool = False

    def describe(self) -> str:
        return f"{self.name}, compression {self.codec.name}"

    def check(self, paths: Sequence[Path]) -> None:
        """Do nothing: any leaf has a name here."""

    def split(self, spec: ArraySpec, region: Region) -> list[Region]:
        if self.limit is None:
            return [region]
        return cut(region, split_counts(region.shape, spec.dtype.itemsize, self.limit))

    def lay_out(self, leaves: Sequence[StagedLeaf], pieces: Sequence[PiecePlan], draft: Draft) -> list[FilePlan]:
        arrays = arrays_of(leaves)
        keys = [join_key(array.path) for array in arrays]
        named = [(piece, _piece_name(keys[piece.array], arrays[piece.array].spec, piece)) for piece in pieces]
        lengths = [6 * len(name) + 50 * len(piece.region.shape) + 200 for piece, name in named]
        metadata = {"shardkeep": "1", "shardkeep_save": draft.save_id}
        groups = group_by_size([piece.nbytes for piece in pieces], named, self.limit or FILE_LIMIT, lengths)
        start = draft.save_id if draft.processes == 1 else f"{draft.save_id}-{draft.process:05d}"
        return [
            pack(f"{start}-{number:05d}.safetensors", arrays, group, metadata) for number, group in enumerate(groups)
        ]

    def claimed(self, leaves: Sequence[StagedLeaf]) -> list[str]:
        return []

    def complete(self, plan: TreePlan, file: FilePlan, written: WrittenFile) -> bytes:
        return file.header


def _piece_name(key: str, spec: ArraySpec, piece: PiecePlan) -> str:
    """The leaf's key, followed by the region if it is a part, after a backslash that no key contains unescaped."""
    key = key if key.isascii() else safe_text(key)
    if piece.region.shape == spec.shape:
        return f"\\{key}" if key in ("", "__metadata__") else key
    extent = ",".join(f"{a}:{a + n}" for a, n in zip(piece.region.start, piece.region.shape, strict=True))
    return f"{key}\\[{extent}]"


def safe_text(name: str) -> str:
    """A tensor name that all JSON readers understand alike: surrogates are written as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


_T = TypeVar("_T")


class TensorEntry(TypedDict):
    """What a header says of one tensor."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def group_by_size(
    sizes: Sequence[int],
    items: Sequence[_T],
    limit: int,
    lengths: Sequence[int] | None = None,
) -> list[list[_T]]:
    """Group consecutive items so that no group exceeds `limit`, except for single items that do by themselves.

    Args:
        sizes: The size of each item in bytes.
        items: The items.
        limit: The size limit of a group in bytes.
        lengths: How many bytes each item takes in the header, which has its own limit.

    >>> group_by_size([4, 4, 9, 1], "abcd", 8)
    [['a', 'b'], ['c'], ['d']]
    """
    groups: list[list[_T]] = []
    filled = header = 0
    for size, item, length in zip(sizes, items, lengths or [0] * len(sizes), strict=True):
        if not groups or filled + size > limit or header + length > HEADER_LIMIT // 2:
            groups.append([])
            filled = header = 0
        groups[-1].append(item)
        filled += size
        header += length
    return groups


def pack(
    name: str,
    arrays: Sequence[StagedArray],
    named: Sequence[tuple[PiecePlan, str]],
    metadata: dict[str, str],
    room: int = 0,
) -> FilePlan:
    """One file with its pieces in place, each under its name in the file.

    `room` reserves header bytes for metadata that is filled in later.
    """
    ordered = [named[number] for number in file_order([piece.nbytes for piece, _ in named])]
    known: dict[tuple[DType, tuple[int, ...]], tuple[str, bool]] = {}
    notes: dict[str, str] = {}
    entries: list[str] = []
    end = 0
    for piece, key in ordered:
        dtype = arrays[piece.array].spec.dtype
        kind = dtype, piece.region.shape
        if kind not in known:
            code = TO_CODE.get(dtype_name(dtype))
            # Without a code it is stored as bytes; the bytes of a wider dtype become a last axis.
            tail = () if code is not None or dtype.itemsize == 1 else (dtype.itemsize,)
            entry = {"dtype": code or "U8", "shape": [*piece.region.shape, *tail]}
            known[kind] = f'{to_text(entry)[:-1]},"data_offsets":', code is None
        start, is_noted = known[kind]
        if is_noted:
            notes[key] = dtype.name
        entries.append(f"{to_text(key)}:{start}[{end},{end + piece.nbytes}]}}")
        end += piece.nbytes
    if notes:
        metadata = {**metadata, "dtypes": json.dumps(notes)}
    header = encode_header(metadata, entries, room)
    placed: list[PiecePlan] = []
    at = len(header)
    for piece, key in ordered:
        placed.append(piece.placed(at, key))
        at += piece.nbytes
    return FilePlan(name, header, tuple(placed), at)


def encode_header(metadata: dict[str, str], entries: Sequence[str], room: int = 0) -> bytes:
    """The start of a file, padded with spaces so that data begins on a page boundary. `entries` are those of tensors.

    No two of them have the same name.
    """
    start = f'{{"__metadata__":{to_text(metadata)}'
    text = (",".join([start, *entries]) + "}").encode()
    length = -(-(8 + len(text) + room) // PAGE) * PAGE - 8
    if length > HEADER_LIMIT:
        raise TreeError(
            f"the keys of this tree need a header of {length:,} bytes, but a safetensors file allows at most "
            f"{HEADER_LIMIT:,}; save to a directory, or pass a smaller max_shard_size"
        )
    return struct.pack("<Q", length) + text.ljust(length)


def decode_header(start: bytes, file_size: int, where: str) -> tuple[dict[str, str], dict[str, TensorEntry], int]:
    """The metadata, the tensors and the offset of the data in a file that begins with `start`, all of it checked."""
    length = header_length(start, file_size, where)
    try:
        header: Json = json.loads(start[8 : 8 + length], object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{where} is not a safetensors file: its header is not valid JSON ({error})", file=where
        ) from None
    if not isinstance(header, dict):
        raise IntegrityError(f"{where} is not a safetensors file: its header is not a JSON object", file=where)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise IntegrityError(f"{where}: __metadata__ contains values that are not strings", file=where)
    tensors = cast("dict[str, TensorEntry]", header)  # each is checked below
    end = 0
    try:
        for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            end = _check_entry(name, entry, end, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(f"{where} has a malformed header ({error})", file=where) from None
    if 8 + length + end != file_size:
        raise IntegrityError(
            f"{where} has {file_size:,} bytes, but its header describes {8 + length + end:,}", file=where
        )
    return cast("dict[str, str]", metadata), tensors, 8 + length


def header_length(start: bytes, file_size: int, where: str) -> int:
    """The header length that a file announces, checked against its size before anything else is read."""
    if len(start) < 8:
        raise IntegrityError(f"{where} is too short to be a safetensors file", file=where)
    (length,) = struct.unpack("<Q", start[:8])
    if length > min(file_size - 8, HEADER_LIMIT):
        raise IntegrityError(f"{where} is not a safetensors file: it declares a header of {length:,} bytes", file=where)
    return length


def _check_entry(name: str, entry: TensorEntry, begin: int, where: str) -> int:
    start, end = entry["data_offsets"]
    shape = entry["shape"]
    if any(type(n) is not int or n < 0 for n in (start, end, *shape)) or not is_possible(shape, 16):
        raise ValueError(f"invalid shape or offsets for {name!r}")
    bits = _BITS[entry["dtype"]]
    for n in shape:
        bits *= n
    if start != begin or (end - start) * 8 != bits:
        raise IntegrityError(
            f"{where}: the offsets of tensor {name!r} do not match its shape and its neighbors", file=where
        )
    return end


def element_type(code: str) -> DType | None:
    """The dtype for a safetensors code; None for packed sub-byte types."""
    return dtype_from_name(FROM_CODE[code]) if code in FROM_CODE else None


_WHOLE_BITS = {code: dtype_from_name(name).itemsize * 8 for code, name in FROM_CODE.items()}
_BITS = _WHOLE_BITS | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
