"""Arrays that TensorStore wrote as chunks in a key-value store: an OCDBT database, or files in a directory.

Chunks whose bytes lie in a file, as they are or compressed with zstd, are described as pieces, and read as ours are.
Arrays with other chunks (in the nodes of a database, not stored, beyond the edge of the array, in other codecs) have
the origin `ForeignArray`, and `ChunkedReader` reads them.
"""

import logging
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

import numpy as np

from shardkeep.errors import IntegrityError, MissingDataError, damage_of, missing_of
from shardkeep.foreign.grids import ZARR_JSON, Grid, parse_grid
from shardkeep.foreign.ocdbt import MANIFEST, Database, FileSpan, Value, read_database, read_value
from shardkeep.layouts.codecs import RAW, ZSTD
from shardkeep.layouts.zarr import ZARRAY
from shardkeep.model.arrays import NUMPY_NAMES, Array, Region
from shardkeep.model.leaves import UNSHARDED, ForeignArray, JaxArray, NumpyArray, Piece, PrngKeys, StoredArray
from shardkeep.model.manifest import DataFile
from shardkeep.model.naming import check_name
from shardkeep.model.tree import Path
from shardkeep.model.values import JsonObject
from shardkeep.runtime.crew import run_tasks
from shardkeep.stores.base import Store

_RATIO = 1 << 15  # how often its size a zstd frame can decompress to: 128 KiB for a block of 4 bytes
_SMALL = 1 << 20  # bytes that are decompressed without asking whether a frame can hold so much
_MOST_LOOKED_UP = 1 << 16  # chunks of an array that are asked for by name; of more, the names that are there are listed
_PYTHON = ("bool", "int64", "float64", "complex128")  # what NumPy makes of Python's own numbers
_FEW = 4096  # inner chunks of a shard: so many may be described as pieces

Lookup = Callable[[Iterable[str]], Mapping[str, Value]]  # of these keys, those that are there
Was = JaxArray | NumpyArray | PrngKeys


log = logging.getLogger("shardkeep")
_reading = threading.RLock()  # what several threads ask for is read by one
_cabinets: "WeakKeyDictionary[Store, dict[str, Cabinet]]" = WeakKeyDictionary()  # a call has a store object of its own


class Cabinet:
    """The values of a key-value store by key: an OCDBT database, or the files of a directory."""

    def __init__(self, store: Store, directory: str, database: Database | None) -> None:
        self.store, self.directory, self.database = store, directory, database
        self._keys = [] if database is None else sorted(database.values)

    @classmethod
    def at(cls, store: Store, directory: str) -> "Cabinet":
        """The key-value store in a directory: a database if there is one. It is read once for each store object."""
        with _reading:
            known = _cabinets.setdefault(store, {})
            if directory not in known:
                is_database = store.size(_join(directory, MANIFEST)) is not None
                known[directory] = cls(store, directory, read_database(store, directory) if is_database else None)
            return known[directory]

    def names_in(self, name: str) -> list[str]:
        """The names of the values of an array, its document among them. In a directory, those directly in it."""
        if self.database is None:
            return self.store.children(_join(self.directory, name))
        first, last = bisect_left(self._keys, f"{name}/"), bisect_left(self._keys, f"{name}0")  # 0 follows /
        return [key[len(name) + 1 :] for key in self._keys[first:last]]

    def look_up(self, keys: Iterable[str]) -> dict[str, Value]:
        """The values that are there, of some keys."""
        if self.database is not None:
            values = self.database.values
            return {key: values[key] for key in keys if key in values}
        names = {key: check_name(_join(self.directory, key)) for key in keys}
        sizes = self.store.sizes(names.values())
        return {key: FileSpan(name, 0, size) for key, name in names.items() if (size := sizes[name]) is not None}

    def arrays(self) -> list[str]:
        """The names of all arrays, in the order of their keys. Only of a database, which has a list of them."""
        assert self.database is not None
        found = (key.rpartition("/") for key in self.database.values)
        return [name for name, _, document in found if document in (ZARRAY, ZARR_JSON)]

    def place_of(self, name: str) -> str:
        """What a manifest calls the place of an array. In a database its name is one part of it, whatever is in it."""
        if self.database is None:
            return check_name(_join(self.directory, name))
        return _join(self.directory, quote(name, safe=" ,:;=@+!*()[]{}<>'\"") if name.strip(".") else "%2E" * len(name))

    def locate(self, name: str) -> str:
        """The path or URL of an array, for messages."""
        if self.database is None:
            return self.store.locate(_join(self.directory, name))
        return f"{self.store.locate(_join(self.directory, MANIFEST))} ({name})"


class ArrayFiles:
    """The files of a tree that hold parts of its arrays, numbered as pieces name them."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def number(self, span: FileSpan) -> int:
        """The number of a file, which must have the bytes of a span."""
        self._ends[span.file] = max(self._ends.get(span.file, 0), span.offset + span.length)
        return self._numbers.setdefault(span.file, len(self._numbers))

    def listed(self, store: Store, others: Iterable[str]) -> tuple[DataFile, ...]:
        """All files with their sizes, and further files behind them. One that is too short has the size it should."""
        names = [*self._numbers, *(name for name in dict.fromkeys(others) if name not in self._numbers)]
        sizes = store.sizes(names)
        return tuple(DataFile(name, max(sizes[name] or 0, self._ends.get(name, 0))) for name in names)


class Chunks:
    """An array in a key-value store: its grid, and the values of its chunks."""

    def __init__(self, cabinet: Cabinet, name: str) -> None:
        """Read the document that describes it. `IntegrityError` if it is missing or damaged."""
        self.cabinet, self.name = cabinet, name
        self.where = cabinet.locate(name)
        found = cabinet.look_up([_join(name, ZARRAY), _join(name, ZARR_JSON)])
        if not found:
            raise MissingDataError(f"{self.where} is missing: there is no {ZARRAY} or {ZARR_JSON}", file=self.where)
        key, value = next(iter(found.items()))
        self.document = read_value(cabinet.store, value)
        self.document_name = key.rpartition("/")[2]
        self.grid: Grid = parse_grid(self.document_name, self.document, self.where)

    def values(self, region: Region) -> dict[tuple[int, ...], tuple[str, Value]]:
        """The chunks of a region that are stored: their names and values, by where they start in the array."""
        starts = {_join(self.name, name): (start, name) for name, start in self._candidates(region)}
        there = self.cabinet.look_up(starts)
        return {start: (name, there[key]) for key, (start, name) in starts.items() if key in there}

    def _candidates(self, region: Region) -> Iterable[tuple[str, tuple[int, ...]]]:
        """The names and starts of the chunks of a region that may be there. A grid can have more than there are."""
        grid = self.grid
        count = grid.chunk_count(region)
        if count <= _MOST_LOOKED_UP:
            return grid.each_chunk(region)
        if self.cabinet.database is None and grid.separator == "/":
            raise IntegrityError(f"{self.where} has {count:,} chunks, more than a directory holds", file=self.where)
        spans = grid.spans(region)
        found = ((name, grid.start_of(name)) for name in self.cabinet.names_in(self.name))
        return [
            (name, start)
            for name, start in found
            if start is not None and all(a // c in span for a, c, span in zip(start, grid.chunks, spans, strict=True))
        ]

    def parts(self, start: tuple[int, ...], value: Value) -> list[tuple[Region, Value | None]]:
        """What is stored as one each in a chunk: its region and its bytes. None: it is not stored."""
        shards = self.grid.shards
        if shards is None:
            return [(Region(start, self.grid.chunks), value)]
        size = value.length if isinstance(value, FileSpan) else len(value)
        length = shards.index_bytes(self.grid.chunks)
        if length > size:
            raise IntegrityError(f"{self.where} is damaged: a chunk is smaller than its index", file=self.where)
        index = read_value(self.cabinet.store, value, size - length if shards.at_end else 0, length)
        entries = shards.decode_index(index, size, self.where)
        regions = self.grid.stored_regions(start)
        return [
            (region, None if entry is None else _within(value, *entry))
            for region, entry in zip(regions, entries, strict=True)
        ]

    def check_size(self, value: Value, nbytes: int) -> None:
        """`IntegrityError` if some stored bytes cannot be so many elements. Nothing is read or allocated."""
        size = value.length if isinstance(value, FileSpan) else len(value)
        wrong = nbytes > max(size * _RATIO, _SMALL) or not size
        if (size != nbytes) if self.grid.compressor is None else wrong:
            where = self.cabinet.store.locate(value.file) if isinstance(value, FileSpan) else self.where
            raise IntegrityError(f"{where} is damaged: a chunk of {nbytes:,} bytes is stored in {size:,}", file=where)

    def decode(self, part: Region, stored: Value) -> Array:
        """The elements of a chunk or inner chunk. `ValueError` if it is damaged."""
        nbytes = part.size * self.grid.spec.dtype.itemsize
        self.check_size(stored, nbytes)
        memory = np.empty(nbytes, np.uint8)
        codec = RAW if self.grid.compressor is None else ZSTD
        codec.decode(np.frombuffer(read_value(self.cabinet.store, stored), np.uint8), memory)
        return memory.view(self.grid.spec.dtype).reshape(part.shape)

    def pieces(self, files: ArrayFiles) -> tuple[Piece, ...] | None:
        """The array as pieces of files, in C order of its chunks; None if some of it is not stored so."""
        grid = self.grid
        whole = Region.whole(grid.spec.shape)
        several = grid.shards is not None and math.prod(grid.chunks) > _FEW * math.prod(grid.shards.inner)
        usable = grid.is_plain and grid.is_even and grid.compressor in (None, "zstd") and not several
        count = grid.chunk_count(whole)
        if not usable or not count:
            return None
        try:
            values = self.values(whole)
            spans = {start: value for start, (_, value) in values.items() if isinstance(value, FileSpan)}
            if len(spans) < count:
                return None
            parts = self._all_parts(spans)
            for region, value in parts:
                if not isinstance(value, FileSpan):
                    return None
                self.check_size(value, region.size * grid.spec.dtype.itemsize)
        except IntegrityError:
            return None  # it is raised, with the key of the leaf, when the array is read
        return tuple(self._piece(region, value, files) for region, value in parts if isinstance(value, FileSpan))

    def _piece(self, region: Region, span: FileSpan, files: ArrayFiles) -> Piece:
        stored = None if self.grid.compressor is None else span.length
        nbytes = region.size * self.grid.spec.dtype.itemsize
        return Piece(region, files.number(span), span.offset, nbytes, None, stored)

    def _all_parts(self, spans: Mapping[tuple[int, ...], FileSpan]) -> list[tuple[Region, Value | None]]:
        """The parts of all chunks. In a bucket, the indexes of shards are read at the same time."""
        found: dict[tuple[int, ...], list[tuple[Region, Value | None]]] = {}

        def read(start: tuple[int, ...]) -> None:
            found[start] = self.parts(start, spans[start])

        traits = self.cabinet.store.traits
        if self.grid.shards is not None and traits.costly_requests and len(spans) > 1:
            run_tasks([partial(read, start) for start in spans], traits.concurrency)
        else:
            for start in spans:
                read(start)
        return [part for start in spans for part in found[start]]


def _within(value: Value, offset: int, length: int) -> Value:
    if isinstance(value, FileSpan):
        return FileSpan(value.file, value.offset + offset, length)
    return value[offset : offset + length]


def describe_array(chunks: Chunks, path: Path, files: ArrayFiles, kind: str, was: Was = UNSHARDED) -> StoredArray:
    """An array as a leaf: in pieces if it can be, else as a `ForeignArray` of a kind that `ChunkedReader` reads."""
    pieces = chunks.pieces(files)
    if pieces is not None:
        return StoredArray(path, chunks.grid.spec, pieces, was)
    place = ForeignArray(chunks.cabinet.place_of(chunks.name), kind, was)
    note_files(chunks, files)
    return StoredArray(path, chunks.grid.spec, (), place)


def note_files(chunks: Chunks, files: ArrayFiles) -> None:
    """Add the files that hold the values of an array, its document included, as far as they are there."""
    with suppress(IntegrityError):  # of a grid that no directory holds: it is raised when the array is read
        values = [value for _, value in chunks.values(Region.whole(chunks.grid.spec.shape)).values()]
        for value in (*values, *chunks.cabinet.look_up([_join(chunks.name, chunks.document_name)]).values()):
            if isinstance(value, FileSpan):
                files.number(value)


class ChunkedReader:
    """Reads an array in a key-value store; an `ArrayReader`.

    Args:
        store: Where the checkpoint is.
        leaf: The array.
        strict: What the checkpoint says: whether every chunk of the arrays in a directory was stored; None if it does
            not say. It is asked only if a chunk is not there. Where chunks may be left out, such a chunk has the fill
            value of the array, or zeros. Where nothing is said, only arrays with a fill value can leave chunks out.
    """

    def __init__(self, store: Store, leaf: StoredArray, strict: Callable[[str], bool | None]) -> None:
        assert isinstance(leaf.origin, ForeignArray)
        directory, _, name = leaf.origin.directory.rpartition("/")
        if store.size(_join(directory, MANIFEST)) is not None:
            cabinet, name = Cabinet.at(store, directory), unquote(name)
        else:
            cabinet = Cabinet(store, directory, None)
        self._store, self._leaf, self._directory = store, leaf, directory
        self._strict = strict
        self._array = Chunks(cabinet, name)
        self._checked_shards: set[tuple[int, ...]] = set()

    @property
    def chunks(self) -> tuple[int, ...]:
        return self._array.grid.chunks

    def read(self, region: Region) -> Array:
        self._compare()
        values = self._values(region)
        with self._naming():
            if self._is_plain:
                return self._put_together(region, values)
            return read_with_tensorstore(self._array, region, values)

    def check(self) -> None:
        self._compare()
        whole = Region.whole(self._leaf.spec.shape)
        for start, (name, value) in self._values(whole).items():
            with self._naming():
                if not self._is_plain:
                    read_with_tensorstore(self._array, Region(start, (1,) * len(start)), {start: (name, value)})
                    continue
                for part, stored in self._array.parts(start, value):
                    if stored is not None:
                        self._array.decode(part, stored)

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        try:
            self._compare()
            for start, (_, value) in self._values(Region.whole(self._leaf.spec.shape)).items():
                for part, stored in self._array.parts(start, value) if self._is_plain else ():
                    if stored is not None:
                        self._array.check_size(stored, part.size * self._leaf.spec.dtype.itemsize)
        except IntegrityError as error:
            return str(error)
        return None

    @property
    def _is_plain(self) -> bool:
        return self._array.grid.is_plain and self._array.grid.compressor in (None, "zstd")

    def _compare(self) -> None:
        """Refuse another array than the one that the manifest describes."""
        found, leaf = self._array.grid.spec, self._leaf
        if found != leaf.spec:
            described = f"{found.dtype.name}{list(found.shape)}"
            problem = f"{self._array.where} describes {described}, but the manifest says {leaf.dtype}{list(leaf.shape)}"
            raise IntegrityError(problem, leaf=leaf.key, file=self._array.where)

    def _values(self, region: Region) -> dict[tuple[int, ...], tuple[str, Value]]:
        """The chunks of a region that are stored. `MissingDataError` if one is not, and should be."""
        count = self._array.grid.chunk_count(region)
        values = self._array.values(region)
        if len(values) < count:
            self._refuse_missing(count - len(values), count)
        return values

    def _refuse_missing(self, missing: int, count: int) -> None:
        strict, has_fill, where = self._strict(self._directory), self._array.grid.fill is not None, self._array.where
        if strict is False and not has_fill:
            log.warning(
                "leaf %r: %s in %s. It is read as zeros, because the checkpoint says that chunks may be left out",
                self._leaf.key,
                missing_of(missing, count),
                where,
            )
        elif strict or not has_fill:
            raise MissingDataError(
                f"{missing_of(missing, count)} in {where}. The save that wrote it never finished, or files were lost",
                leaf=self._leaf.key,
                file=where,
            )

    def _naming(self) -> "_Naming":
        return _Naming(self._array.where, self._leaf.key)

    def _put_together(self, region: Region, values: Mapping[tuple[int, ...], tuple[str, Value]]) -> Array:
        grid = self._array.grid
        filler = grid.filler(self._array.where)
        made = np.zeros(region.shape, grid.spec.dtype)
        if filler is not None:
            made[...] = np.frombuffer(filler, grid.spec.dtype)[0]
        for start, (_, value) in values.items():
            for part, stored in self._array.parts(start, value):
                common = part.intersect(region)
                if stored is not None and common is not None:
                    made[common.within(region).slices] = self._array.decode(part, stored)[common.within(part).slices]
        return made


class _Naming:
    """Turns what is raised for damaged chunks into `IntegrityError`s that name the leaf."""

    def __init__(self, where: str, key: str) -> None:
        self._where, self._key = where, key

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, IntegrityError) and error.leaf is None:
            raise damage_of(error, self._key, self._where) from error
        if isinstance(error, ValueError | MemoryError | OverflowError | NotImplementedError) and not isinstance(
            error, IntegrityError
        ):
            problem = f"{self._where} cannot be read: {error}"
            raise IntegrityError(problem, leaf=self._key, file=self._where) from error


def read_with_tensorstore(array: Chunks, region: Region, values: Mapping[tuple[int, ...], tuple[str, Value]]) -> Array:
    """A region of an array in any codec. TensorStore gets the chunks that it needs, and decodes them."""
    import tensorstore  # slow to import, and few arrays need it

    grid, dtype = array.grid, array.grid.spec.dtype
    # Without enough memory for a chunk or the result, TensorStore aborts the process. NumPy raises an error first.
    np.empty(max(grid.chunk_bytes, region.size * dtype.itemsize), np.uint8)
    context = tensorstore.Context()
    place: JsonObject = {"driver": "memory", "path": "array/"}
    memory: Any = tensorstore.KvStore.open(place, context=context).result()
    memory.write(array.document_name, array.document).result()
    for name, value in values.values():
        memory.write(name, read_value(array.cabinet.store, value)).result()
    driver = "zarr" if array.document_name == ZARRAY else "zarr3"
    spec: JsonObject = {"driver": driver, "kvstore": place, "recheck_cached_data": "open"}
    open_array = tensorstore.open  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    tensor: Any = open_array(spec, read=True, context=context).result()
    data: Any = tensor[region.slices].read(order="C").result()
    return np.array(data, dtype=dtype, order="C", copy=True)


def plain_scalar(chunks: Chunks) -> object:
    """The value of an array without axes as a number of Python or NumPy; None if it is not stored as one."""
    grid = chunks.grid
    dtype = grid.spec.dtype
    if grid.spec.shape != () or not grid.is_plain or grid.compressor not in (None, "zstd"):
        return None
    if dtype.name not in NUMPY_NAMES:
        return None
    with suppress(IntegrityError, ValueError):  # of damage: it is raised when the array is read
        for start, (_, value) in chunks.values(Region((), ())).items():
            for part, stored in chunks.parts(start, value):
                if stored is not None:
                    number = chunks.decode(part, stored)
                    return number.item() if dtype.name in _PYTHON else cast(object, number[()])
    return None


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory and name else directory or name
