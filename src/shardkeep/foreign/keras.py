"""Weights of Keras 3: `.weights.h5` files, other HDF5 files of arrays, and the one in a `.keras` archive.

Of a `.keras` archive only the weights are read: the model in `config.json` names classes and functions of programs.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast
from urllib.parse import quote, unquote

import numpy as np

from shardkeep.errors import CheckpointNotFoundError, IntegrityError, damage_of
from shardkeep.foreign.hdf5 import MAGIC, FoundDataset, Opened, UnreadableError, open_hdf5
from shardkeep.foreign.windows import Window, opened
from shardkeep.foreign.zips import STORED, EntryBytes, ZipEntry, read_directory
from shardkeep.model.arrays import Array, Region
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
            if not named and Window(file).read(0, min(8, file.size)) != MAGIC:
                return None
            try:
                part = _weights(file, name)
                with open_hdf5(part, where) as hdf5:
                    tree = _tree(hdf5.find(), DataFile(name, file.size), part.start)
            except UnreadableError as error:
                raise CheckpointNotFoundError(f"no checkpoint that can be read at {where}: {error}") from error
            except (ValueError, EOFError) as error:
                raise IntegrityError(f"{where} is not a complete file of weights: {error}", file=where) from error
        return Manifest(where, tree.save_id, {"": tree})

    def open(self, store: Store, leaf: StoredArray) -> "KerasArray":
        return KerasArray(store, leaf)

    def checks(self, store: Store, tree: Tree) -> Sequence[Callable[[Progress], None]]:
        """Read the whole file, which has a CRC in an archive, and compare the checksums of chunks; see `Checked`."""
        (file,) = tree.files
        arrays = [leaf for leaf in tree.arrays if isinstance(leaf.origin, ForeignArray)]
        return [partial(_check_file, store, file), *(partial(_check_array, store, leaf) for leaf in arrays)]


def _check_file(store: Store, file: DataFile, progress: Progress) -> None:
    where = store.locate(file.name)
    try:
        with store.open(file.name) as opened:
            _weights(opened, file.name).check()
    except (ValueError, EOFError) as error:
        raise damage_of(error, None, where) from error
    progress(file.size)


def _check_array(store: Store, leaf: StoredArray, progress: Progress) -> None:
    KerasArray(store, leaf).check()


def _weights(file: StoredFile, name: str) -> EntryBytes:
    """The HDF5 file: the one in an archive, or the whole file as if it were in one."""
    if not name.endswith(_KERAS):
        return EntryBytes(file, ZipEntry("", STORED, None, file.size, file.size, 0))
    entries = {entry.name: entry for entry in read_directory(Window(file)).entries}
    if _INSIDE not in entries:
        raise UnreadableError(f"the archive holds no {_INSIDE}, as those of Keras 3 do")
    if entries[_INSIDE].method != STORED:
        raise UnreadableError(f"{_INSIDE} is compressed in the archive; unzip it and load {_INSIDE}")
    return EntryBytes(file, entries[_INSIDE])


def _tree(found: Sequence[FoundDataset], file: DataFile, start: int) -> Tree:
    """The tree of some datasets: nested dicts of their names. `start` is where the HDF5 file begins in the file."""
    root: dict[str, object] = {}
    for dataset in found:
        inside = root
        for group in dataset.path[:-1]:
            inside = cast("dict[str, object]", inside.setdefault(group, {}))
        inside[dataset.path[-1]] = dataset
    skeleton, leaves = flatten(root)
    stored = tuple(_leaf(cast(FoundDataset, leaf.value), leaf.path, file.name, start) for leaf in leaves)
    identity = digest(repr((file.size, [(d.path, d.spec.shape, d.spec.dtype.name, d.offset) for d in found])).encode())
    return Tree(identity, "foreign", skeleton, stored, (file,), {}, created="")


def _leaf(found: FoundDataset, path: Path, name: str, start: int) -> StoredArray:
    if found.offset is None:
        return StoredArray(
            path, found.spec, (), ForeignArray(f"{name}@{quote('/'.join(found.path))}", KerasReader.kind)
        )
    piece = Piece(Region.whole(found.spec.shape), 0, start + found.offset, found.spec.nbytes, None)
    return StoredArray(path, found.spec, (piece,), UNSHARDED)


class KerasArray:
    """Reads an array that does not lie in one run of the file; an `ArrayReader`. libhdf5 compares its checksums."""

    def __init__(self, store: Store, leaf: StoredArray) -> None:
        """Read its description. `IntegrityError` if that is damaged, or describes another array."""
        assert isinstance(leaf.origin, ForeignArray)
        self._store, self._leaf = store, leaf
        self._name, _, place = leaf.origin.directory.rpartition("@")
        self._path: Path = tuple(unquote(place).split("/"))
        with self._opened() as hdf5:
            self._chunks = hdf5.describe(self._path, leaf.spec).chunks

    @property
    def chunks(self) -> tuple[int, ...]:
        return self._chunks

    def read(self, region: Region) -> Array:
        with self._opened() as hdf5:
            return hdf5.read(self._path, self._leaf.spec, region)

    def check(self) -> None:
        spec = self._leaf.spec
        with self._opened() as hdf5:
            for start in np.ndindex(*(-(-n // c) for n, c in zip(spec.shape, self._chunks, strict=True))):
                at = tuple(i * c for i, c in zip(start, self._chunks, strict=True))
                part = tuple(min(c, n - a) for a, c, n in zip(at, self._chunks, spec.shape, strict=True))
                hdf5.read(self._path, spec, Region(at, part))

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        if sizes.get(self._name) == self._size:
            return None
        return f"leaf {self._leaf.key!r}: {self._store.locate(self._name)} does not have its size"

    @contextmanager
    def _opened(self) -> Generator[Opened]:
        with opened(self._store, self._name, self._leaf.key) as file:
            self._size = file.size
            with open_hdf5(_weights(file, self._name), self._store.locate(self._name)) as hdf5:
                yield hdf5
