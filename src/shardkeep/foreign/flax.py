"""Files that `flax.serialization` writes, described as a Tree so that the usual load path reads their arrays.

Such a file is one MessagePack value. An array is a run of bytes in it, which a Piece describes. Arrays above 1 GiB,
which Flax cuts in chunks of that size, are put together here.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from shardkeep.errors import CheckpointNotFoundError, IntegrityError
from shardkeep.foreign.flat import read_region
from shardkeep.foreign.msgpack import FoundArray, begins_a_dict, scan, scan_whole
from shardkeep.foreign.windows import FileWindow, opened
from shardkeep.model.arrays import Array, Region
from shardkeep.model.digests import digest
from shardkeep.model.leaves import UNSHARDED, ForeignArray, Piece, StoredArray, StoredLeaf, StoredValue
from shardkeep.model.manifest import DataFile, Manifest, Tree
from shardkeep.model.tree import Leaf, flatten
from shardkeep.stores.base import Store, StoredFile

_ELSEWHERE = "//GDAPlaceholder:"  # begins the string that Flax writes for an array that several processes save
_STEP = re.compile(r"checkpoint_([0-9]{1,18})")  # the name that `flax.training.checkpoints` gives a file


class FlaxReader:
    """Reads files of `flax.serialization` and of `flax.training.checkpoints`; a `FileReader`."""

    name: str = "flax"
    kind: str = "flax"
    main: Collection[str] = ("flax_model.msgpack",)  # Hugging Face's name

    def among(self, names: Collection[str]) -> Sequence[str]:
        return sorted(name for name in names if _is_named(name))

    def detect(self, store: Store, name: str) -> Manifest | None:
        where = store.locate(name)
        with store.open(name) as file:
            window = FileWindow(file)
            if not _is_named(name) and not (file.size and begins_a_dict(window.read(0, min(16, file.size)))):
                return None
            try:
                found = scan_whole(window)
            except (ValueError, EOFError) as error:
                if not _is_named(name):
                    return None
                raise IntegrityError(f"{where} is not a complete Flax msgpack file: {error}", file=where) from error
            tree = _tree(found, name, file.size, where)
        return Manifest(where, tree.save_id, {"": tree})

    def open(self, store: Store, leaf: StoredArray) -> "ChunkedArray":
        return ChunkedArray(store, leaf)


def _is_named(name: str) -> bool:
    """Whether a file has a name that Flax, or programs that use it, give their files."""
    return _STEP.fullmatch(name) is not None or (name.endswith(".msgpack") and not name.startswith("."))


def _tree(found: object, name: str, size: int, where: str) -> Tree:
    skeleton, leaves = flatten(found)
    for leaf in leaves:
        if isinstance(leaf.value, str) and leaf.value.startswith(_ELSEWHERE):
            raise CheckpointNotFoundError(
                f"no readable checkpoint at {where}: its array {leaf.key!r} was sharded over several "
                f"processes and saved in the directory {name}_gda, which this version of shardkeep cannot read"
            )
    stored = tuple(describe_leaf(leaf, name, 0) for leaf in leaves)
    identity = identity_of(leaves, size)
    step = _STEP.fullmatch(name)
    number = None if step is None else int(step[1])
    return Tree(identity, "foreign", skeleton, stored, (DataFile(name, size),), {}, created="", step=number)


def identity_of(leaves: Sequence[Leaf], size: int) -> str:
    """A digest that tells a file with these leaves from others. The content of arrays is not looked at."""
    return digest(repr((size, [_described(leaf.value) for leaf in leaves])).encode())


def _described(value: object) -> object:
    return (value.spec.shape, value.spec.dtype.name, value.runs) if isinstance(value, FoundArray) else value


def describe_leaf(leaf: Leaf, name: str, number: int) -> StoredLeaf:
    """A leaf that `scan` found in a file, by the name and the number of the file."""
    array = leaf.value
    if not isinstance(array, FoundArray):
        return StoredValue(leaf.path, array)
    if len(array.runs) == 1:
        ((offset, length),) = array.runs
        piece = Piece(Region.whole(array.spec.shape), number, offset, length, None)
        return StoredArray(leaf.path, array.spec, (piece,), UNSHARDED)
    return StoredArray(leaf.path, array.spec, (), ForeignArray(f"{name}@{array.start}", FlaxReader.kind))


class ChunkedArray:
    """Reads an array that Flax has cut in chunks; an `ArrayReader`."""

    def __init__(self, store: Store, leaf: StoredArray) -> None:
        """Read where the chunks are. `IntegrityError` if they are not those of the array."""
        assert isinstance(leaf.origin, ForeignArray)
        self._store, self._leaf = store, leaf
        self._name, _, start = leaf.origin.directory.rpartition("@")
        with opened(store, self._name, leaf.key) as file:
            self._size = file.size
            if not start.isdecimal() or len(start) > 18:
                raise ValueError(f"{start[:80]!r} is not the location of an array")
            found, _ = scan(FileWindow(file), int(start))
            if not isinstance(found, FoundArray) or found.spec != leaf.spec:
                raise ValueError(f"there is a different array at byte {start}")
            self._runs = found.runs

    @property
    def chunks(self) -> tuple[int, ...]:
        return (1, *self._leaf.spec.shape[1:])

    def read(self, region: Region) -> Array:
        with opened(self._store, self._name, self._leaf.key) as file:
            return read_region(_ChunkBytes(file, self._runs), self._leaf.spec, region)

    def check(self) -> None:
        """Nothing but the places of the chunks can be checked, which was done."""

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        if sizes.get(self._name) == self._size:
            return None
        return f"leaf {self._leaf.key!r}: {self._store.locate(self._name)} has the wrong size"


class _ChunkBytes:
    """The bytes of an array that lie in several runs of a file; a `ByteSource`."""

    def __init__(self, file: StoredFile, runs: tuple[tuple[int, int], ...]) -> None:
        self._file, self._runs = file, runs

    def read_into(self, offset: int, buffer: Array) -> None:
        done, first = 0, 0
        for start, length in self._runs:
            skip = max(offset - first, 0)
            if skip < length and done < buffer.size:
                count = min(length - skip, buffer.size - done)
                self._file.read_into(start + skip, buffer[done : done + count])
                done += count
            first += length
