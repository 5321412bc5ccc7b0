"""Weights of Keras 3: `.weights.h5` files, other HDF5 files of arrays, and the one in a `.keras` archive.

Of a `.keras` archive only the weights are read: the model in `config.json` names classes and functions of programs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import cast

from shardkeep.errors import CheckpointNotFoundError, IntegrityError, damage_of
from shardkeep.foreign.base import UnreadableArray, UnreadableError, unreadable
from shardkeep.foreign.flat import After, native, read_region
from shardkeep.foreign.hdf5 import MAGIC, FoundDataset, Hdf5, UnreadDataset, read_chunks
from shardkeep.foreign.windows import FileWindow, opened
from shardkeep.foreign.zips import STORED, EntryBytes, ZipEntry, read_directory
from shardkeep.model.arrays import Array, ArraySpec, Region
from shardkeep.model.digests import digest
from shardkeep.model.leaves import UNSHARDED, ForeignArray, Piece, StoredArray
from shardkeep.model.manifest import DataFile, Manifest, Tree
from shardkeep.model.tree import Path, flatten
from shardkeep.runtime.progress import Progress
from shardkeep.stores.base import Store, StoredFile

_KERAS, _WEIGHTS = ".keras", ".weights.h5"
_INSIDE = "model.weights.h5"  # the name of the weights in an archive


class KerasReader:
    """Reads the weights of Keras models; a `FileReader`."""

    name: str = "keras"
    kind: str = "keras"
    main: Collection[str] = ()

    def among(self, names: Collection[str]) -> Sequence[str]:
        return sorted(name for name in names if name.endswith((_KERAS, _WEIGHTS)) and not name.startswith("."))

    def detect(self, store: Store, name: str) -> Manifest | None:
        where = store.locate(name)
        with store.open(name) as file:
            named = name.endswith((_KERAS, _WEIGHTS))
            if not named and FileWindow(file).read(0, min(8, file.size)) != MAGIC:
                return None
            try:
                part = _weights(file, name)
                tree = _tree(Hdf5(FileWindow(part)).find(), DataFile(name, file.size), part.start)
            except UnreadableError as error:
                raise CheckpointNotFoundError(f"no readable checkpoint at {where}: {error}") from error
            except (ValueError, EOFError) as error:
                raise IntegrityError(f"{where} is not a complete file of weights: {error}", file=where) from error
        return Manifest(where, tree.save_id, {"": tree})

    def open(self, store: Store, leaf: StoredArray) -> "KerasArray":
        return KerasArray(store, leaf)

    def checks(self, store: Store, tree: Tree) -> Sequence[Callable[[Progress], None]]:
        """Read the whole file, which has a CRC in an archive, and compare the checksums of chunks."""
        (file,) = tree.files
        arrays = [leaf for leaf in tree.arrays if isinstance(leaf.origin, ForeignArray)]
        return [partial(_check_file, store, file), *(partial(_check_array, store, leaf, file.name) for leaf in arrays)]


def _check_file(store: Store, file: DataFile, progress: Progress) -> None:
    where = store.locate(file.name)
    try:
        with store.open(file.name) as opened:
            _weights(opened, file.name).check()
    except (ValueError, EOFError) as error:
        raise damage_of(error, None, where) from error
    progress(file.size)


def _check_array(store: Store, leaf: StoredArray, file: str, progress: Progress) -> None:
    try:
        (KerasArray if leaf.unreadable is None else UnreadableArray)(store, leaf).check()
    except CheckpointNotFoundError as error:
        raise damage_of(error, leaf.key, store.locate(file)) from error


def _weights(file: StoredFile, name: str) -> EntryBytes:
    """The HDF5 file: the one in an archive, or the whole file as if it were in one."""
    if not name.endswith(_KERAS):
        return EntryBytes(file, ZipEntry("", STORED, None, file.size, file.size, 0))
    entries = {entry.name: entry for entry in read_directory(FileWindow(file)).entries}
    if _INSIDE not in entries:
        raise UnreadableError(f"the archive holds no {_INSIDE}, which Keras 3 writes")
    if entries[_INSIDE].method != STORED:
        raise UnreadableError(f"{_INSIDE} is compressed in the archive; unzip it and load {_INSIDE}")
    return EntryBytes(file, entries[_INSIDE])


def _tree(found: Sequence[tuple[Path, FoundDataset | UnreadDataset]], file: DataFile, start: int) -> Tree:
    """The tree of some arrays: nested dicts of their names. `start` is where the HDF5 file begins in the file."""
    root: dict[str, object] = {}
    for names, dataset in found:
        inside = root
        for group in names[:-1]:
            inside = cast("dict[str, object]", inside.setdefault(group, {}))
        inside[names[-1]] = dataset
    skeleton, leaves = flatten(root)
    stored = tuple(
        _leaf(cast(FoundDataset | UnreadDataset, leaf.value), leaf.path, file.name, start) for leaf in leaves
    )
    identity = digest(repr((file.size, found)).encode())
    return Tree(identity, "foreign", skeleton, stored, (file,), {}, created="")


def _leaf(found: FoundDataset | UnreadDataset, path: Path, name: str, start: int) -> StoredArray:
    if isinstance(found, UnreadDataset):
        return unreadable(path, name, found.reason)
    spec = _native(found.spec)
    if found.chunk is not None or found.spec != spec:
        return StoredArray(path, spec, (), ForeignArray(f"{name}@{found.header}", KerasReader.kind))
    piece = Piece(Region.whole(spec.shape), 0, start + found.offset, spec.nbytes, None)
    return StoredArray(path, spec, (piece,), UNSHARDED)


def _native(spec: ArraySpec) -> ArraySpec:
    return ArraySpec(spec.shape, spec.dtype.newbyteorder("="))


class KerasArray:
    """Reads an array in chunks, or in another byte order; an `ArrayReader`. Checksums of chunks are compared."""

    def __init__(self, store: Store, leaf: StoredArray) -> None:
        """Read its description. `IntegrityError` if that is damaged, or describes another array."""
        assert isinstance(leaf.origin, ForeignArray)
        self._store, self._leaf = store, leaf
        self._name, _, place = leaf.origin.directory.rpartition("@")
        with opened(store, self._name, leaf.key) as file:
            self._size = file.size
            if not place.isdecimal() or len(place) > 18:
                raise ValueError(f"{place[:80]!r} is not the location of an array")
            self._found = Hdf5(FileWindow(_weights(file, self._name))).dataset(int(place))
            if _native(self._found.spec) != leaf.spec:
                raise ValueError(f"there is a different array at byte {place}")

    @property
    def chunks(self) -> tuple[int, ...]:
        shape = tuple(max(n, 1) for n in self._leaf.spec.shape)
        return self._found.chunk or (1, *shape[1:])[: len(shape)]

    def read(self, region: Region) -> Array:
        found = self._found
        with opened(self._store, self._name, self._leaf.key) as file:
            part = _weights(file, self._name)
            if found.chunk is None:
                return read_region(After(part, found.offset), found.spec, region)
            return native(read_chunks(FileWindow(part), found, region))

    def check(self) -> None:
        with opened(self._store, self._name, self._leaf.key) as file:
            window = FileWindow(_weights(file, self._name))
            for chunk in self._found.chunks:
                read_chunks(window, self._found, Region(chunk.start, (1,) * len(chunk.start)))

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        if sizes.get(self._name) == self._size:
            return None
        return f"leaf {self._leaf.key!r}: {self._store.locate(self._name)} has the wrong size"
