"""Zarr v2 arrays that another program wrote, read through TensorStore (any compressor, order or separator).

They carry no digests, and TensorStore reads a missing chunk as zeros and decodes whatever size it finds, so every
chunk is looked at first: it must be there and hold exactly what the description declares.
"""

import io
import itertools
import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from shardkeep.arrays import ArraySpec, Region, dtype_from_name, dtype_name, is_possible
from shardkeep.errors import IntegrityError, MissingDataError
from shardkeep.manifest import StoredLeaf, no_duplicates
from shardkeep.memory import Array
from shardkeep.reading import Target
from shardkeep.stores.base import Store

ZARRAY = ".zarray"
_MANY = 10_000  # more chunks than this are listed, not asked for one by one
_MOST = 1 << 20  # names that a listing of one array may have


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """The description of an array. It may claim more chunks than any disk holds: count them before naming them."""

    spec: ArraySpec
    chunks: tuple[int, ...]
    compressor: str | None
    separator: str

    def spans(self, region: Region) -> list[range]:
        """Along each axis, the chunks that hold data of a region."""
        if region.size == 0:
            return [range(0)]
        return [
            range(a // c, -(-(a + n) // c)) for a, n, c in zip(region.start, region.shape, self.chunks, strict=True)
        ]

    def chunk_count(self, region: Region) -> int:
        """How many chunks hold data of a region."""
        return math.prod(len(span) for span in self.spans(region))

    def each_chunk(self, region: Region) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Of each chunk that holds data of a region, the name and where it begins."""
        for index in _indices(self.spans(region)):
            start = tuple(i * c for i, c in zip(index, self.chunks, strict=True))
            yield self.separator.join(map(str, index)) or "0", start

    def chunk_names(self, region: Region) -> list[str]:
        """Names of the chunks that hold data of a region."""
        return [name for name, _ in self.each_chunk(region)]

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * self.spec.dtype.itemsize


def _indices(spans: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Like `itertools.product`, which would first make room for every number of every span."""
    if not spans:
        yield ()
        return
    for number in spans[0]:
        for rest in _indices(spans[1:]):
            yield (number, *rest)


def describe(store: Store, directory: str) -> ZarrArray:
    """What `.zarray` says, checked."""
    name = _join(directory, ZARRAY)
    where = store.locate(name)
    try:
        data = json.loads(store.read(name), object_pairs_hook=no_duplicates)
        shape, chunks = tuple(data["shape"]), tuple(data["chunks"])
        dtype = _dtype(data["dtype"])
        compressor = data["compressor"]["id"] if data.get("compressor") else None
        separator = data.get("dimension_separator", ".")
    except (FileNotFoundError, NotADirectoryError):
        raise MissingDataError(f"{where} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SyntaxError) as error:
        # SyntaxError: np.dtype evaluates shapes in the text of a dtype
        raise IntegrityError(f"{where} is not a zarr description: {error}") from error
    whole = [n for n in (*shape, *chunks) if type(n) is not int or n < 0]
    if (
        whole
        or not is_possible(shape, dtype.itemsize)
        or len(shape) != len(chunks)
        or len(shape) > 32
        or 0 in chunks
        or separator not in (".", "/")
    ):
        raise IntegrityError(f"{where} describes an impossible array")
    return ZarrArray(ArraySpec(shape, dtype), chunks, compressor, separator)


def _dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str):
        raise TypeError("dtype is no string")
    if name[:1] in "<>|":
        return dtype_from_name(dtype_name(np.dtype(name)))
    return dtype_from_name(name)


def read_zarr(store: Store, target: Target) -> None:
    """Fill a target whose leaf is a zarr array of another program."""
    leaf = target.leaf
    array = _described(store, leaf)
    needed = {name for region in target.regions for name in _check_chunks(store, leaf, array, region)}
    with _naming(store, leaf):
        opened = _open(store, leaf.extra["directory"], needed)
        for number, region in enumerate(target.regions):
            target.arrays[number] = _read(opened, array, region)


def check_zarr(store: Store, leaf: StoredLeaf) -> None:
    """`IntegrityError` unless an array of another program can be read: described well, every chunk there and whole."""
    array = _described(store, leaf)
    whole = Region.whole(array.spec.shape)
    _check_chunks(store, leaf, array, whole)
    directory = leaf.extra["directory"]
    with _naming(store, leaf):
        _open(store, directory, ())  # TensorStore knows best what else of a description it cannot read
        if array.compressor in (None, "zstd"):
            return
        for name, start in array.each_chunk(whole):  # to read one element is to decode its chunk
            _read(_open(store, directory, (name,)), array, Region(start, (1,) * len(start)))


@contextmanager
def _naming(store: Store, leaf: StoredLeaf) -> Generator[None]:
    """What TensorStore cannot read is an error that names the leaf."""
    try:
        yield
    except (ValueError, MemoryError, OverflowError, NotImplementedError) as error:
        where = store.locate(leaf.extra["directory"])
        raise IntegrityError(f"leaf {leaf.key!r}: {where} cannot be read: {error}") from error


def _open(store: Store, directory: str, chunks: Iterable[str]) -> Any:
    """An array opened by TensorStore, to read these chunks of it."""
    import tensorstore  # not needed for checkpoints of our own, and slow to import

    context = tensorstore.Context()
    place: dict[str, Any] = {"driver": "file", "path": store.locate(directory) + os.sep}
    if store.remote:  # our client fetches, TensorStore decodes
        place = {"driver": "memory", "path": "array/"}
        memory = tensorstore.KvStore.open(place, context=context).result()
        for name in (ZARRAY, *sorted(chunks)):
            memory.write(name, store.read(_join(directory, name))).result()
    spec: dict[str, Any] = {"driver": "zarr", "kvstore": place, "recheck_cached_data": "open"}
    return tensorstore.open(spec, read=True, context=context).result()


def _read(opened: Any, array: ZarrArray, region: Region) -> Array:
    """A region as an array of its own."""
    dtype = array.spec.dtype
    # TensorStore ends the program if there is no memory for a chunk or for the result; NumPy raises an error.
    np.empty(max(array.chunk_bytes, region.size * dtype.itemsize), np.uint8)
    data: Any = opened[region.slices].read(order="C").result()
    return np.array(data, dtype=dtype, order="C", copy=True)


def _described(store: Store, leaf: StoredLeaf) -> ZarrArray:
    directory = leaf.extra["directory"]
    array = describe(store, directory)
    if array.spec != leaf.spec:
        raise IntegrityError(
            f"leaf {leaf.key!r}: {store.locate(directory)} describes {array.spec.dtype.name}"
            f"{list(array.spec.shape)}, the index says {leaf.dtype}{list(leaf.shape or ())}"
        )
    return array


def _check_chunks(store: Store, leaf: StoredLeaf, array: ZarrArray, region: Region) -> list[str]:
    """The names of the chunks of a region, each of which is there and holds what it should."""
    directory = leaf.extra["directory"]
    names = _chunks_there(store, directory, array, region)
    count = array.chunk_count(region)
    if len(names) < count:
        there = set(names)
        missing = next(name for name, _ in array.each_chunk(region) if name not in there)
        raise MissingDataError(
            f"leaf {leaf.key!r}: {count - len(names)} of {count} chunks are missing, among them "
            f"{store.locate(_join(directory, missing))}; the save that wrote it never finished, or files were lost"
        )
    for name in names:
        _check_chunk(store, _join(directory, name), array, leaf.key)
    return names


def _check_chunk(store: Store, name: str, array: ZarrArray, key: str) -> None:
    """The chunk's decoded size, without decoding more than it may have."""
    with store.open(name) as file:  # which refuses a link that leads out of the checkpoint; TensorStore follows it
        found = file.size
    if array.compressor == "zstd":
        found = _zstd_size(store.read(name), array.chunk_bytes)
    if array.compressor in (None, "zstd") and found != array.chunk_bytes:
        raise IntegrityError(
            f"leaf {key!r}: {store.locate(name)} is damaged: it does not hold exactly {array.chunk_bytes:,} bytes"
        )


def _zstd_size(data: bytes, limit: int) -> int | None:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
            total = 0
            while total <= limit and (block := reader.read(1 << 20)):
                total += len(block)
    except zstandard.ZstdError:
        return None
    # A frame cut short just ends: the decoder says so only by giving fewer bytes.
    return total


def file_names(store: Store, directory: str, array: ZarrArray) -> Sequence[str]:
    """The files of an array that are there."""
    chunks = _chunks_there(store, directory, array, Region.whole(array.spec.shape))
    return [_join(directory, name) for name in (ZARRAY, *chunks)]


def _chunks_there(store: Store, directory: str, array: ZarrArray, region: Region) -> list[str]:
    """The names of those chunks of a region that are there."""
    few = array.chunk_count(region) <= _MANY
    names = array.chunk_names(region) if few else _list_chunks(store, directory, array, region)
    sizes = store.sizes([_join(directory, name) for name in names])
    return [name for name in names if sizes[_join(directory, name)] is not None]


def _list_chunks(store: Store, directory: str, array: ZarrArray, region: Region) -> list[str]:
    """What is in an array's directory under the names of chunks of a region."""
    spans = array.spans(region)
    levels = [spans] if array.separator == "." else [[span] for span in spans]
    found = [""]
    for level in levels:
        inside = (_join(parent, name) for parent in found for name in store.children(_join(directory, parent)))
        numbered = (name for name in inside if _is_within(name.rpartition("/")[2].split("."), level))
        found = list(itertools.islice(numbered, _MOST + 1))
        if len(found) > _MOST:  # links from a directory to itself would go on for ever
            raise IntegrityError(f"{store.locate(directory)} holds more than {_MOST:,} chunks of one array")
    return found


def _is_within(numbers: Sequence[str], spans: Sequence[range]) -> bool:
    """Whether the parts of a name are numbers, as zarr writes them, of chunks in some spans."""
    return len(numbers) == len(spans) and all(
        text.isdecimal() and text == str(int(text)) and int(text) in span
        for text, span in zip(numbers, spans, strict=True)
    )


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory and name else directory or name
