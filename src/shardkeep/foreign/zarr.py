"""Zarr v2 arrays of other programs, read with TensorStore (any compressor, order or separator).

They have no digests. TensorStore reads a missing chunk as zeros and decodes chunks of any size, so every chunk is
checked first: it must exist and have exactly the size that `.zarray` declares.
"""

import io
import itertools
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import zstandard

from shardkeep.errors import IntegrityError, MissingDataError, missing_of
from shardkeep.foreign.grids import Grid, parse_grid
from shardkeep.layouts.zarr import ZARRAY
from shardkeep.model.arrays import Array, Region
from shardkeep.model.leaves import ForeignArray, StoredArray
from shardkeep.model.manifest import Tree
from shardkeep.model.values import JsonObject
from shardkeep.stores.base import Store

KIND = "zarr"  # of these arrays in manifests
_MANY = 10_000  # above this number, chunks are listed instead of looked up one by one
_MOST = 1 << 20  # limit on the names in the listing of one array


def describe(store: Store, directory: str) -> Grid:
    """The content of an array's `.zarray`, checked."""
    name = _join(directory, ZARRAY)
    where = store.locate(name)
    try:
        document = store.read(name)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingDataError(f"{where} is missing", file=where) from None
    return parse_grid(ZARRAY, document, where)


def has_zarr_arrays(tree: Tree) -> bool:
    """Whether the arrays of a tree, or some of them, are zarr arrays: ours or another program's."""
    return tree.format == "zarr" or any(leaf.kind == KIND for leaf in tree.arrays)


class ZarrReader:
    """Reads a zarr array of another program; an `ArrayReader`."""

    def __init__(self, store: Store, leaf: StoredArray) -> None:
        """Read `.zarray`. `IntegrityError` if it is missing or damaged."""
        assert isinstance(leaf.origin, ForeignArray)
        self._store, self._leaf, self._directory = store, leaf, leaf.origin.directory
        self._array = describe(store, self._directory)
        self._opened: _TensorStoreArray | None = None

    @property
    def chunks(self) -> tuple[int, ...]:
        return self._array.chunks

    def read(self, region: Region) -> Array:
        self._compare()
        names = self._check_chunks(region)
        with self._naming():
            if self._opened is None:
                self._opened = _TensorStoreArray(self._store, self._directory)
            return self._opened.read(self._array, region, names)

    def check(self) -> None:
        self._compare()
        whole = Region.whole(self._array.spec.shape)
        self._check_chunks(whole)
        with self._naming():
            opened = _TensorStoreArray(self._store, self._directory)
            opened.open()  # TensorStore checks the rest of .zarray
            if self._array.compressor in (None, "zstd"):
                return
            for name, start in self._array.each_chunk(whole):  # reading one element decodes its chunk
                one = _TensorStoreArray(self._store, self._directory)
                one.read(self._array, Region(start, (1,) * len(start)), [name])

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        array, key, where = self._array, self._leaf.key, self._store.locate(self._directory)
        whole = Region.whole(array.spec.shape)
        count = array.chunk_count(whole)
        if count > len(sizes):  # it may claim more chunks than any disk holds
            return f"leaf {key!r}: chunks are missing in {where}"
        chunks = [sizes.get(_join(self._directory, name)) for name in array.chunk_names(whole)]
        if None in chunks:
            return f"leaf {key!r}: {missing_of(chunks.count(None), count)}"
        if array.compressor is None and any(size != array.chunk_bytes for size in chunks):
            return f"leaf {key!r}: a chunk in {where} is truncated"
        return None

    def _compare(self) -> None:
        """Refuse another array than the one that the manifest describes."""
        found, leaf = self._array.spec, self._leaf
        if found != leaf.spec:
            where = self._store.locate(_join(self._directory, ZARRAY))
            described = f"{found.dtype.name}{list(found.shape)}"
            problem = f"{where} describes {described}, but the manifest says {leaf.dtype}{list(leaf.shape)}"
            raise IntegrityError(problem, leaf=leaf.key, file=where)

    def _check_chunks(self, region: Region) -> list[str]:
        """The names of the chunks of a region, after checking that each exists and has the right size."""
        store, key, array, directory = self._store, self._leaf.key, self._array, self._directory
        names = _chunks_there(store, directory, array, region)
        count = array.chunk_count(region)
        if len(names) < count:
            there = set(names)
            missing = next(name for name, _ in array.each_chunk(region) if name not in there)
            example = ": " if count - len(names) == 1 else ", for example "
            where = store.locate(_join(directory, missing))
            problem = f"{missing_of(count - len(names), count)}{example}{where}"
            raise MissingDataError(
                f"{problem}. The save that wrote it never finished, or files were lost", leaf=key, file=where
            )
        for name in names:
            _check_chunk(store, _join(directory, name), array, key)
        return names

    @contextmanager
    def _naming(self) -> Generator[None]:
        """Turn TensorStore's errors into `IntegrityError`s that name the leaf."""
        try:
            yield
        except (ValueError, MemoryError, OverflowError, NotImplementedError) as error:
            where = self._store.locate(self._directory)
            problem = f"TensorStore cannot read {where}: {error}"
            raise IntegrityError(problem, leaf=self._leaf.key, file=where) from error


class _TensorStoreArray:
    """An array that TensorStore has opened. In a bucket our own client fetches its chunks, each once."""

    def __init__(self, store: Store, directory: str) -> None:
        self._store, self._directory = store, directory
        self._tensor: Any = None
        self._memory: Any = None
        self._fetched: set[str] = set()

    def open(self) -> Any:
        import tensorstore  # slow to import, and our own checkpoints do not need it

        if self._tensor is None:
            context = tensorstore.Context()
            place: JsonObject = {"driver": "file", "path": self._store.locate(self._directory) + os.sep}
            if not self._store.traits.has_paths:
                place = {"driver": "memory", "path": "array/"}
                self._memory = tensorstore.KvStore.open(place, context=context).result()
                self._fetch([ZARRAY])
            spec: JsonObject = {"driver": "zarr", "kvstore": place, "recheck_cached_data": "open"}
            open_array = tensorstore.open  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            self._tensor = open_array(spec, read=True, context=context).result()
        return self._tensor

    def read(self, array: Grid, region: Region, chunks: Iterable[str]) -> Array:
        """Read a region, which lies in these chunks, into a new array."""
        tensor, dtype = self.open(), array.spec.dtype
        if self._memory is not None:
            self._fetch(sorted(chunks))
        # Without enough memory for a chunk or the result, TensorStore aborts the process. NumPy raises an error first.
        np.empty(max(array.chunk_bytes, region.size * dtype.itemsize), np.uint8)
        data: Any = tensor[region.slices].read(order="C").result()
        return np.array(data, dtype=dtype, order="C", copy=True)

    def _fetch(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._fetched:
                self._memory.write(name, self._store.read(_join(self._directory, name))).result()
                self._fetched.add(name)


def _check_chunk(store: Store, name: str, array: Grid, key: str) -> None:
    """Check the decoded size of a chunk, decoding no more than it should have."""
    with store.open(name) as file:  # refuses symbolic links out of the checkpoint, which TensorStore would follow
        found = file.size
    if array.compressor == "zstd":
        found = _zstd_size(store.read(name), array.chunk_bytes)
    if array.compressor in (None, "zstd") and found != array.chunk_bytes:
        where = store.locate(name)
        problem = f"{where} is damaged: its data does not have exactly {array.chunk_bytes:,} bytes"
        raise IntegrityError(problem, leaf=key, file=where)


def _zstd_size(data: bytes, limit: int) -> int | None:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
            total = 0
            while total <= limit and (block := reader.read(1 << 20)):
                total += len(block)
    except zstandard.ZstdError:
        return None
    # For a truncated frame the decoder raises no error; it only returns fewer bytes.
    return total


def file_names(store: Store, directory: str, array: Grid) -> Sequence[str]:
    """The files of an array that exist."""
    chunks = _chunks_there(store, directory, array, Region.whole(array.spec.shape))
    return [_join(directory, name) for name in (ZARRAY, *chunks)]


def _chunks_there(store: Store, directory: str, array: Grid, region: Region) -> list[str]:
    """The names of the chunks of a region that exist."""
    few = array.chunk_count(region) <= _MANY
    names = array.chunk_names(region) if few else _list_chunks(store, directory, array, region)
    sizes = store.sizes([_join(directory, name) for name in names])
    return [name for name in names if sizes[_join(directory, name)] is not None]


def _list_chunks(store: Store, directory: str, array: Grid, region: Region) -> list[str]:
    """The names in an array's directory that are those of chunks of a region."""
    spans = array.spans(region)
    levels = [spans] if array.separator == "." else [[span] for span in spans]
    found = [""]
    for level in levels:
        inside = (_join(parent, name) for parent in found for name in store.children(_join(directory, parent)))
        numbered = (name for name in inside if _is_within(name.rpartition("/")[2].split("."), level))
        found = list(itertools.islice(numbered, _MOST + 1))
        if len(found) > _MOST:  # symbolic links from a directory to itself would never end
            raise IntegrityError(f"{store.locate(directory)} contains more than {_MOST:,} chunks of one array")
    return found


def _is_within(numbers: Sequence[str], spans: Sequence[range]) -> bool:
    """Whether the parts of a name are chunk numbers, written as zarr does, within these ranges."""
    return len(numbers) == len(spans) and all(
        text.isdecimal() and text == str(int(text)) and int(text) in span
        for text, span in zip(numbers, spans, strict=True)
    )


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory and name else directory or name
