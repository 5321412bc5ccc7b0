"""Zarr arrays of other programs, as `.zarray` (version 2) or `zarr.json` (version 3) describe them: a grid of chunks.

An array may declare more chunks than any disk holds: count them before naming them.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict, cast

import numpy as np

from shardkeep.errors import IntegrityError
from shardkeep.foreign.crc32c import crc32c
from shardkeep.layouts.zarr import ZARRAY
from shardkeep.model.arrays import ArraySpec, DType, Region, dtype_from_name, dtype_name, is_possible
from shardkeep.model.document import no_duplicates
from shardkeep.model.values import Json

ZARR_JSON = "zarr.json"
_MOST_AXES = 32  # more than NumPy has in its oldest supported version
_NO_CHUNK = (1 << 64) - 1  # offset and length of an inner chunk that is not stored
_ENTRY = 16  # bytes of the offset and the length of an inner chunk
# What the reading of JSON of another shape raises. SyntaxError: np.dtype evaluates shapes in the text of a dtype.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, SyntaxError, OverflowError)


# What the documents hold. What is not like this raises an error that `parse_grid` reports.
class _NamedRecord(TypedDict):
    """A codec, or whatever else has a name and a configuration."""

    name: str
    configuration: NotRequired["_ConfigurationRecord"]


class _ConfigurationRecord(TypedDict):
    """All that one of them can have; few have all of it."""

    chunk_shape: list[int]
    separator: NotRequired[str]
    endian: NotRequired[str]
    codecs: "list[_NamedRecord]"
    index_codecs: "list[_NamedRecord]"
    index_location: NotRequired[str]


class _ZarrayRecord(TypedDict):
    """The content of `.zarray`."""

    shape: list[int]
    chunks: list[int]
    dtype: str
    compressor: NotRequired[dict[str, str] | None]
    dimension_separator: NotRequired[str]
    order: NotRequired[str]
    filters: NotRequired[Json]
    fill_value: NotRequired[Json]


class _ZarrJsonRecord(TypedDict):
    """The content of `zarr.json`."""

    zarr_format: int
    node_type: str
    shape: list[int]
    data_type: str
    chunk_grid: _NamedRecord
    chunk_key_encoding: _NamedRecord
    codecs: list[_NamedRecord]
    storage_transformers: NotRequired[Json]
    fill_value: NotRequired[Json]


@dataclass(frozen=True, slots=True)
class Shards:
    """How the chunks of a version 3 array are divided again: inner chunks, and an index that says where each lies.

    `at_end`: where the index is. `checked`: whether it has a CRC-32C.
    """

    inner: tuple[int, ...]
    at_end: bool
    checked: bool

    def index_bytes(self, chunks: tuple[int, ...]) -> int:
        """The size of the index of a chunk."""
        count = math.prod(a // b for a, b in zip(chunks, self.inner, strict=True))
        return count * _ENTRY + 4 * self.checked

    def decode_index(self, data: bytes, size: int, where: str) -> list[tuple[int, int] | None]:
        """Where each inner chunk lies in its chunk of `size` bytes (offset, length), in C order; None: it is not there.

        `IntegrityError` if the index does not match its checksum, or an inner chunk is not within the chunk.
        """
        if self.checked:
            data, checksum = data[:-4], data[-4:]
            if crc32c(data) != int.from_bytes(checksum, "little"):
                raise IntegrityError(f"{where} is damaged: the index of a chunk does not match its CRC-32C", file=where)
        numbers = cast("list[int]", np.frombuffer(data, "<u8").tolist())
        found: list[tuple[int, int] | None] = []
        for offset, length in zip(numbers[0::2], numbers[1::2], strict=True):
            is_there = (offset, length) != (_NO_CHUNK, _NO_CHUNK)
            if is_there and offset + length > size:
                raise IntegrityError(f"{where} is damaged: an inner chunk lies outside its chunk", file=where)
            found.append((offset, length) if is_there else None)
        return found


@dataclass(frozen=True, slots=True)
class Grid:
    """An array, and the grid of chunks that it is stored in.

    Attributes:
        spec: Its shape and dtype.
        chunks: The shape of a chunk.
        compressor: The name of the compressor of a chunk, or of an inner chunk; None if there is none.
        separator: Between the numbers in the name of a chunk.
        start: What the name of every chunk begins with.
        is_plain: Whether a chunk, decompressed, has the bytes of its elements in C order, as this machine has them.
        fill: The value of what is not stored, as the document has it.
        shards: The inner chunks.
    """

    spec: ArraySpec
    chunks: tuple[int, ...]
    compressor: str | None
    separator: str
    start: str = ""
    is_plain: bool = True
    fill: Json = None
    shards: Shards | None = None

    def spans(self, region: Region) -> list[range]:
        """For each axis, the range of chunks that contain data of a region."""
        if region.size == 0:
            return [range(0)]
        return [
            range(a // c, -(-(a + n) // c)) for a, n, c in zip(region.start, region.shape, self.chunks, strict=True)
        ]

    def chunk_count(self, region: Region) -> int:
        """The number of chunks that contain data of a region."""
        return math.prod(len(span) for span in self.spans(region))

    def each_chunk(self, region: Region) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name and start of each chunk that contains data of a region."""
        for index in _indices(self.spans(region)):
            start = tuple(i * c for i, c in zip(index, self.chunks, strict=True))
            yield self._name(index), start

    def _name(self, index: tuple[int, ...]) -> str:
        numbers = self.separator.join(map(str, index))
        if not self.start:
            return numbers or "0"
        return f"{self.start}{self.separator}{numbers}" if numbers else self.start

    def start_of(self, name: str) -> tuple[int, ...] | None:
        """Where the chunk of a name starts in the array; None if it is not the name of one of its chunks."""
        text = name.removeprefix(f"{self.start}{self.separator}") if self.start else name
        numbers = text.split(self.separator)
        if len(numbers) != len(self.chunks) or not all(n.isdecimal() and n.isascii() and len(n) < 20 for n in numbers):
            return None
        index = tuple(map(int, numbers))
        return tuple(i * c for i, c in zip(index, self.chunks, strict=True)) if self._name(index) == name else None

    def chunk_names(self, region: Region) -> list[str]:
        """The names of the chunks that contain data of a region."""
        return [name for name, _ in self.each_chunk(region)]

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * self.spec.dtype.itemsize

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what is compressed as one: a chunk or an inner chunk."""
        return self.chunks if self.shards is None else self.shards.inner

    @property
    def is_even(self) -> bool:
        """Whether no chunk reaches beyond the array."""
        return all(n % c == 0 for n, c in zip(self.spec.shape, self.chunks, strict=True))

    def filler(self, where: str) -> bytes | None:
        """The bytes of the element that stands for what is not stored; None for zero. `IntegrityError` if unknown."""
        try:
            return _fill(self.fill, self.spec.dtype)
        except _MALFORMED as error:
            raise IntegrityError(
                f"{where} has the fill value {self.fill!r:.40}, which is not supported", file=where
            ) from error

    def stored_regions(self, start: tuple[int, ...]) -> list[Region]:
        """The regions of the array that are stored as one each in the chunk that begins at `start`, in C order."""
        inner = self.stored_shape
        counts = [range(c // i) for c, i in zip(self.chunks, inner, strict=True)]
        return [
            Region(tuple(a + n * i for a, n, i in zip(start, index, inner, strict=True)), inner)
            for index in _indices(counts)
        ]


def _indices(spans: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Like `itertools.product`, which would first store all numbers of all spans."""
    if not spans:
        yield ()
        return
    for number in spans[0]:
        for rest in _indices(spans[1:]):
            yield (number, *rest)


def parse_grid(name: str, document: bytes, where: str) -> Grid:
    """The grid that a document of this name describes, checked. `IntegrityError` if it is none, or is impossible."""
    try:
        found: Json = json.loads(document, object_pairs_hook=no_duplicates)
        is_first = name == ZARRAY
        grid = _read_zarray(cast(_ZarrayRecord, found)) if is_first else _read_zarr_json(cast(_ZarrJsonRecord, found))
        shape, chunks = grid.spec.shape, grid.chunks
        inner = grid.stored_shape
        whole = [n for n in (*shape, *chunks, *inner) if type(n) is not int or n < 0]
        if (
            whole
            or not is_possible(shape, grid.spec.dtype.itemsize)
            or not is_possible(chunks, grid.spec.dtype.itemsize)
            or not len(shape) == len(chunks) == len(inner) <= _MOST_AXES
            or 0 in (*chunks, *inner)
            or any(c % i for c, i in zip(chunks, inner, strict=True))
            or grid.separator not in (".", "/")
        ):
            raise IntegrityError(f"{where} does not describe a valid array", file=where)
    except _MALFORMED as error:
        if isinstance(error, IntegrityError):
            raise
        raise IntegrityError(f"{where} is not a valid {name} file: {error}", file=where) from error
    return grid


def _read_zarray(data: _ZarrayRecord) -> Grid:
    shape, chunks = tuple(data["shape"]), tuple(data["chunks"])
    dtype, swapped = _dtype(data["dtype"])
    compressor = data.get("compressor")
    plain = not swapped and data.get("order", "C") == "C" and not data.get("filters")
    return Grid(
        ArraySpec(shape, dtype),
        chunks,
        compressor["id"] if compressor else None,
        data.get("dimension_separator", "."),
        is_plain=plain,
        fill=data.get("fill_value"),
    )


def _read_zarr_json(data: _ZarrJsonRecord) -> Grid:
    if data["zarr_format"] != 3 or data["node_type"] != "array" or data["chunk_grid"]["name"] != "regular":
        raise ValueError("it is not an array of zarr version 3 with a regular grid")
    if data.get("storage_transformers"):
        raise ValueError("it has storage transformers")
    encoding, kind = data["chunk_key_encoding"], data["chunk_key_encoding"]["name"]
    if kind not in ("default", "v2"):
        raise ValueError(f"chunk_key_encoding {kind!r} is unknown")
    codecs = list(data["codecs"])
    shards = None
    if codecs and codecs[0]["name"] == "sharding_indexed":
        if len(codecs) > 1:
            raise ValueError("its shards have further codecs")
        inside = _configuration(codecs[0])
        shards, codecs = _shards(inside), list(inside["codecs"])
    plain, compressor = _chain(codecs)
    separator = _configuration(encoding).get("separator", "/" if kind == "default" else ".")
    return Grid(
        ArraySpec(tuple(data["shape"]), dtype_from_name(data["data_type"])),
        tuple(_configuration(data["chunk_grid"])["chunk_shape"]),
        compressor,
        separator,
        "c" if kind == "default" else "",
        plain,
        data.get("fill_value"),
        shards,
    )


def _configuration(named: _NamedRecord) -> _ConfigurationRecord:
    return named.get("configuration") or cast(_ConfigurationRecord, {})


def _shards(data: _ConfigurationRecord) -> Shards:
    index = data["index_codecs"]
    names = [codec["name"] for codec in index]
    if names not in (["bytes"], ["bytes", "crc32c"]) or _configuration(index[0]).get("endian", "little") != "little":
        raise ValueError(f"the index of its shards is encoded with {names}, which is not supported")
    location = data.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"index_location {location!r} is unknown")
    inner = tuple(data["chunk_shape"])
    return Shards(inner, location == "end", len(names) == 2)


def _chain(codecs: Sequence[_NamedRecord]) -> tuple[bool, str | None]:
    """Whether a chain of codecs leaves elements as they are in memory, and how their bytes are compressed."""
    names = [codec["name"] for codec in codecs]
    if names[:1] != ["bytes"] or names[1:] not in ([], ["zstd"]):
        return False, ", ".join(map(str, names))
    return _configuration(codecs[0]).get("endian", "little") == "little", "zstd" if names[1:] else None


def _dtype(name: object) -> tuple[DType, bool]:
    """The dtype that a name in `.zarray` means, and whether its bytes are in the other order."""
    if not isinstance(name, str):
        raise TypeError("dtype is not a string")
    if name[:1] in "<>|":
        found = np.dtype(name)
        return dtype_from_name(dtype_name(found)), not found.isnative
    return dtype_from_name(name), False


def _fill(value: Json, dtype: DType) -> bytes | None:
    """The bytes of a fill value; None for zero."""
    special = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    if value is None:
        return None
    if isinstance(value, str) and value.startswith("0x"):
        bits = bytes.fromhex(value[2:])[::-1]
        if len(bits) != dtype.itemsize:
            raise ValueError(f"fill_value {value!r} does not match its dtype")
        return bits
    if isinstance(value, list):
        real, imaginary = (special.get(str(part), part) for part in value)
        number: object = complex(float(cast(float, real)), float(cast(float, imaginary)))
    else:
        number = special[value] if isinstance(value, str) else value
    filled = np.zeros((), dtype)
    with np.errstate(all="ignore"):
        filled[()] = number
    data = filled.tobytes()
    return data if any(data) else None
