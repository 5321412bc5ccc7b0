"""NumPy's files: `.npz` archives, as `numpy.savez` and `jax.numpy.savez` write them, and single `.npy` arrays.

A slash or a dot in the name of an array makes a level of the tree. Arrays of Python objects are refused: they are
pickles. NumPy has no names for bfloat16 and float8_e5m2, and writes `V2` and `f1`; they are read as what they were.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from shardkeep.errors import CheckpointNotFoundError, IntegrityError
from shardkeep.foreign.base import UnreadableError, unreadable
from shardkeep.foreign.flat import After, ByteSource, read_region
from shardkeep.foreign.npy import MAGIC, NpyArray, parse_npy
from shardkeep.foreign.windows import FileWindow, opened
from shardkeep.foreign.zips import DEFLATED, STORED, EntryBytes, ZipEntry, read_directory
from shardkeep.model.arrays import Array, ArraySpec, Region
from shardkeep.model.digests import digest
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.leaves import UNSHARDED, ForeignArray, Piece, StoredArray, StoredLeaf, StoredValue
from shardkeep.model.manifest import DataFile, Manifest, Tree
from shardkeep.model.tree import Leaf, flatten, mention_once, nest
from shardkeep.stores.base import Store

_NPY, _NPZ = ".npy", ".npz"
_MOST_LEVELS = 40  # of the tree, that slashes and dots in one name make
_MOST_TEXT = 1 << 20  # bytes of strings in an archive, which become plain values that take hundreds of bytes each
_COLUMNS = 4 << 20  # bytes of an array in Fortran order that are read at once, if so few are wanted
_LAST_CHARACTER = 0x10FFFF  # of Unicode: NumPy looks at none
_START = 256  # bytes of an array's file that are read first: the header of most


class NumpyReader:
    """Reads `.npy` and `.npz` files; a `FileReader`."""

    name: str = "numpy"
    kind: str = "numpy"
    main: Collection[str] = ()

    def among(self, names: Collection[str]) -> Sequence[str]:
        return sorted(name for name in names if name.endswith((_NPY, _NPZ)) and not name.startswith("."))

    def detect(self, store: Store, name: str) -> Manifest | None:
        where = store.locate(name)
        with store.open(name) as file:
            window = FileWindow(file)
            is_named = name.endswith((_NPY, _NPZ))
            if not is_named and window.read(0, min(6, file.size)) != MAGIC:
                return None
            try:
                tree = _archive(window, name) if name.endswith(_NPZ) else _single(window, name)
            except UnreadableError as error:
                raise CheckpointNotFoundError(f"no readable checkpoint at {where}: {error}") from error
            except (ValueError, EOFError) as error:
                if not is_named:
                    return None  # several arrays one after the other, for example: Equinox's files
                raise IntegrityError(f"{where} is not a complete NumPy file: {error}", file=where) from error
        return Manifest(where, tree.save_id, {"": tree})

    def open(self, store: Store, leaf: StoredArray) -> "NpzArray":
        return NpzArray(store, leaf)


@fast_dataclass
class _FoundEntry:
    """An array that was found: as it is in the file at `offset`, or read by a `NpzArray` at `place`."""

    spec: ArraySpec
    place: str
    offset: int | None = None


@fast_dataclass
class _Unreadable:
    """Something in an archive that is not read, and why."""

    reason: str


def _single(window: FileWindow, name: str) -> Tree:
    """The tree of a `.npy` file, which is an array."""
    entry = _whole(window.size)
    value, described = _describe(window, entry, f"{name}@")
    if isinstance(value, _FoundEntry) and value.spec == described.spec and not described.fortran:
        value = _FoundEntry(value.spec, value.place, described.start)
    if described.is_unnamed:
        _mention_unnamed([name])
    header = digest(window.read(0, described.start))
    return _tree(value, DataFile(name, window.size, described.start, header), header)


def _archive(window: FileWindow, name: str) -> Tree:
    """The tree of a `.npz` file."""
    directory = read_directory(window)
    found: list[tuple[tuple[str, ...], object]] = []
    unnamed: list[str] = []
    text = 0
    for entry in directory.entries:
        key = entry.name.removesuffix(_NPY)
        if entry.name.count("/") + entry.name.count(".") > _MOST_LEVELS:
            raise UnreadableError(f"the name {key[:80]!r} has more than {_MOST_LEVELS} parts")
        try:
            if key == entry.name:
                raise UnreadableError(f"this entry of the archive is not an array; NumPy's names end in {_NPY}")
            value, described = _describe(window, entry, f"{name}@{_place_of(entry)}")
        except UnreadableError as error:
            found.append((tuple(key.split("/")), _Unreadable(str(error))))
            continue
        except ValueError as error:
            raise ValueError(f"array {key!r}: {error}") from error
        text += described.spec.nbytes if described.is_text else 0
        if text > _MOST_TEXT:
            raise UnreadableError(f"its arrays of strings have more than {_MOST_TEXT:,} bytes")
        unnamed += [key] if described.is_unnamed else []
        found.append((tuple(key.split("/")), value))
    if unnamed:
        _mention_unnamed(unnamed)
    return _tree(nest(found), DataFile(name, window.size), directory.identity)


def _describe(window: FileWindow, entry: ZipEntry, place: str) -> tuple[object, NpyArray]:
    """What is in an entry: an array, or strings in lists as deep as the array has axes; and its header."""
    source = EntryBytes(window, entry)
    described = _parse(source, entry.size)
    spec = described.spec
    if not described.is_text:
        return _FoundEntry(ArraySpec(spec.shape, spec.dtype.newbyteorder("=")), place), described
    memory = np.empty(spec.nbytes, np.uint8)
    source.read_into(described.start, memory)
    if spec.dtype.kind == "U" and (memory.view(f"{spec.dtype.str[0]}u4") > _LAST_CHARACTER).any():
        raise ValueError("it contains text that is not valid Unicode")
    found = memory.view(spec.dtype).reshape(spec.shape) if spec.nbytes else np.empty(spec.shape, spec.dtype)
    return found.tolist(), described


def _parse(source: ByteSource, size: int) -> NpyArray:
    """The header of an array's file of this size."""

    def read(offset: int, count: int) -> bytes:
        if offset + count > size:
            raise ValueError(f"it ends after {size:,} bytes")
        if offset + count <= start.size:
            return start[offset : offset + count].tobytes()
        memory = np.empty(count, np.uint8)
        source.read_into(offset, memory)
        return memory.tobytes()

    start = np.empty(min(_START, size), np.uint8)
    source.read_into(0, start)
    return parse_npy(read, size)


def _tree(value: object, file: DataFile, identity: str) -> Tree:
    skeleton, leaves = flatten(value)
    stored = tuple(_leaf(leaf, file.name) for leaf in leaves)
    return Tree(identity, "foreign", skeleton, stored, (file,), {}, created="")


def _leaf(leaf: Leaf, name: str) -> StoredLeaf:
    found = leaf.value
    if isinstance(found, _Unreadable):
        return unreadable(leaf.path, name, found.reason)
    if not isinstance(found, _FoundEntry):
        return StoredValue(leaf.path, found)
    if found.offset is None:
        return StoredArray(leaf.path, found.spec, (), ForeignArray(found.place, NumpyReader.kind))
    piece = Piece(Region.whole(found.spec.shape), 0, found.offset, found.spec.nbytes, None)
    return StoredArray(leaf.path, found.spec, (piece,), UNSHARDED)


def _mention_unnamed(names: Sequence[str]) -> None:
    mention_once(
        names, "NumPy has no name for the dtype of %s: what it writes as V2 is read as bfloat16, and f1 as float8_e5m2"
    )


def _whole(size: int) -> ZipEntry:
    """A file as if it were the only entry of an archive."""
    return ZipEntry("", STORED, None, size, size, 0)


def _place_of(entry: ZipEntry) -> str:
    return f"{entry.start},{entry.stored},{entry.size},{entry.method},{entry.crc}"


def _entry_at(place: str) -> ZipEntry | None:
    """The entry that is at a place; None if it is not one."""
    numbers = place.split(",")
    if len(numbers) != 5 or not all(n.isdecimal() and n.isascii() and len(n) < 20 for n in numbers):
        return None
    start, stored, size, method, crc = map(int, numbers)
    return ZipEntry("", method, crc, size, stored, start) if method in (STORED, DEFLATED) else None


class NpzArray:
    """Reads an array in a NumPy file; an `ArrayReader`. One that is compressed is decompressed from its start."""

    def __init__(self, store: Store, leaf: StoredArray) -> None:
        """Read its header. `IntegrityError` if that is damaged, or describes another array."""
        assert isinstance(leaf.origin, ForeignArray)
        self._store, self._leaf = store, leaf
        self._name, _, place = leaf.origin.directory.rpartition("@")
        with opened(store, self._name, leaf.key) as file:
            self._size = file.size
            entry = _entry_at(place) if place else _whole(file.size)
            if entry is None or entry.start + entry.stored > file.size:
                raise ValueError(f"{place[:80]!r} is not the location of an array")
            self._entry, self._described = entry, _parse(EntryBytes(file, entry), entry.size)
            found = self._described.spec
            if found.shape != leaf.spec.shape or found.dtype.newbyteorder("=") != leaf.spec.dtype:
                raise ValueError("there is a different array at its location")

    @property
    def chunks(self) -> tuple[int, ...]:
        shape = tuple(max(n, 1) for n in self._leaf.spec.shape)
        if self._entry.method == DEFLATED or not shape:
            return shape
        if not self._described.fortran:
            return (1, *shape[1:])
        column = max(self._leaf.nbytes // shape[-1], 1)
        return (*shape[:-1], min(max(_COLUMNS // column, 1), shape[-1]))

    def read(self, region: Region) -> Array:
        described = self._described
        with opened(self._store, self._name, self._leaf.key) as file:
            entry = EntryBytes(file, self._entry)
            entry.read_into(0, np.empty(described.start, np.uint8))  # the CRC is that of the header too
            return read_region(After(entry, described.start), described.spec, region, described.fortran)

    def check(self) -> None:
        with opened(self._store, self._name, self._leaf.key) as file:
            EntryBytes(file, self._entry).check()

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        if sizes.get(self._name) == self._size:
            return None
        return f"leaf {self._leaf.key!r}: {self._store.locate(self._name)} has the wrong size"
