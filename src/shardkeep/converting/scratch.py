"""The arrays of a saved tree, backed by files: memory-mapped from the source, or prepared in an unnamed scratch file.

Either way the operating system can evict the pages when memory is short, so that a tree of any size can be passed to
a save at once. Arrays that must be decompressed, cast or assembled go through the scratch file, block by block.
"""

import errno
import mmap
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from shardkeep import system
from shardkeep.converting.blocks import Array, Opened, read_region, regions_of
from shardkeep.converting.usage import UsageError
from shardkeep.errors import storage_error
from shardkeep.layouts.plan import StagedArray, StagedValue
from shardkeep.loading.adapt import check_fits
from shardkeep.loading.blocks import BlockReader, Range, parts_of
from shardkeep.model.arrays import ArraySpec, DType, Region, kind_of
from shardkeep.model.digests import BLOCK
from shardkeep.model.leaves import NATIVE, UNSHARDED, ForeignArray, NumpyArray, Piece, StoredArray, StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.pieces import packed_in, regions_in
from shardkeep.model.tree import Path
from shardkeep.remap.expressions import DerivedArray
from shardkeep.remap.moving import change_into, window_of
from shardkeep.remap.regions import Gap, assembly
from shardkeep.remap.regions import Part as StoredPart
from shardkeep.runtime.crew import Task, run_tasks
from shardkeep.runtime.hostmemory import Shard, room
from shardkeep.runtime.progress import Progress
from shardkeep.saving.snapshot import Snapshot
from shardkeep.stores.base import MappedFile

_MOST_MAPPINGS = 30_000  # Linux allows 65,530 per process


@dataclass(frozen=True)
class PlannedShard:
    """A region of a leaf (given by its number) that is saved as one shard."""

    leaf: int
    region: Region


@dataclass
class Made:
    """The parts of a tree, their arrays in the same order, and what `convert` reports about them."""

    parts: list[PlannedShard]
    arrays: list[Array]
    scratch: int  # bytes of the scratch file
    lost: dict[Path, int]  # by leaf, the number of values that a cast made infinite or NaN


def cast_spec(leaf: StoredLeaf, dtype: DType | None) -> ArraySpec | None:
    """What an array becomes: casts stay within one kind, and never touch PRNG keys or values of processes."""
    if not isinstance(leaf, StoredArray):
        return None
    spec = leaf.spec
    if dtype is None or not leaf.holds_numbers or kind_of(spec.dtype) in ("other", "bool"):
        return spec
    return replace(spec, dtype=dtype) if kind_of(spec.dtype) == kind_of(dtype) else spec


def recorded_leaf(leaf: StoredLeaf, spec: ArraySpec | None) -> StoredLeaf:
    """A leaf as the conversion records it; an array that another program wrote is recorded as a `jax.Array`."""
    if spec is None or not isinstance(leaf, StoredArray):
        return leaf
    origin = leaf.origin
    if isinstance(origin, ForeignArray):
        origin = origin.was or UNSHARDED
    if isinstance(origin, NumpyArray) and spec != leaf.spec:
        origin = NATIVE  # a cast array has the machine's own byte order
    return StoredArray(leaf.path, spec, (), origin)


def snapshot_of(recorded: Sequence[StoredLeaf], made: Made) -> Snapshot:
    """The leaves of a conversion, each with the parts that were made of it."""
    held: dict[int, list[Region]] = {}
    first: dict[int, int] = {}
    for number, part in enumerate(made.parts):
        held.setdefault(part.leaf, []).append(part.region)
        first.setdefault(part.leaf, number)  # the parts of a leaf follow each other
    leaves = [
        StagedArray(leaf.path, leaf.spec, leaf.origin, tuple(held.get(i, ())), first.get(i, 0))
        if isinstance(leaf, StoredArray)
        else StagedValue(leaf.path, leaf.value)
        for i, leaf in enumerate(recorded)
    ]
    return Snapshot(tuple(leaves), tuple(Shard(array, stable=False) for array in made.arrays))


def make(
    opened: Opened, tree: Tree, specs: Sequence[ArraySpec | None], whole: bool, directory: str, progress: Progress
) -> Made:
    """All arrays of a tree, every byte verified.

    Args:
        opened: The checkpoint.
        tree: The tree in it.
        specs: The shape and dtype that each leaf gets; None for plain values.
        whole: Whether to assemble arrays that are stored in several pieces.
        directory: Where to create the scratch file.
        progress: Called with the number of bytes read.
    """
    maker = _Maker(opened, opened.source(tree), progress)
    mapped = maker.reader.mapped and len(tree.files) <= _MOST_MAPPINGS
    made = Made([], [], 0, maker.lost)
    scratch: list[tuple[int, int]] = []  # (part, where it begins)
    for number, (leaf, spec) in enumerate(zip(tree.leaves, specs, strict=True)):
        if spec is None or not isinstance(leaf, StoredArray):
            continue
        regions = _regions(leaf, whole)
        direct = mapped and spec == leaf.spec and _is_stored_so(leaf, regions)
        for i, region in enumerate(regions):
            made.parts.append(PlannedShard(number, region))
            made.arrays.append(maker.mapped(leaf, leaf.pieces[i]) if direct else np.empty(0, spec.dtype))
            if not direct:
                scratch.append((len(made.parts) - 1, made.scratch))
                made.scratch += room(region.size * spec.dtype.itemsize)
    rooms = _allot(made, scratch, directory)
    tasks = [
        task
        for number, leaf in enumerate(tree.leaves)
        if number in rooms and isinstance(leaf, StoredArray)
        for task in maker.filling(leaf, rooms[number])
    ]
    run_tasks([*maker.checks, *tasks])
    return made


def _allot(made: Made, scratch: Sequence[tuple[int, int]], directory: str) -> dict[int, list[tuple[Region, Array]]]:
    """Give parts that go through the scratch file their memory; returns the regions to fill, by leaf."""
    memory = _scratch(made.scratch, directory)
    rooms: dict[int, list[tuple[Region, Array]]] = {}
    for number, start in scratch:
        part, dtype = made.parts[number], made.arrays[number].dtype
        end = start + part.region.size * dtype.itemsize
        made.arrays[number] = memory[start:end].view(dtype).reshape(part.region.shape)
        rooms.setdefault(part.leaf, []).append((part.region, made.arrays[number]))
    return rooms


def _regions(leaf: StoredArray, whole: bool) -> list[Region]:
    """The parts in which a leaf is saved: its pieces, unless they must be assembled."""
    regions = regions_in(leaf.pieces)
    even = len({region.shape for region in regions}) == 1
    if whole or isinstance(leaf.origin, ForeignArray) or not even:
        return [Region.whole(leaf.spec.shape)]
    return regions


def _is_stored_so(leaf: StoredArray, regions: Sequence[Region]) -> bool:
    """Whether the stored bytes of each part are the bytes to save."""
    pieces = leaf.pieces
    return bool(pieces) and regions_in(pieces) == regions and not packed_in(pieces)


class _Maker:
    """Maps files, and collects the verification of what was mapped and the values that casts lost."""

    def __init__(self, opened: Opened, reader: BlockReader, progress: Progress) -> None:
        self.reader = reader
        self.checks: list[Task] = []
        self.lost: dict[Path, int] = {}
        self._opened, self._progress = opened, progress
        self._maps: dict[int, MappedFile] = {}
        self._lock = threading.Lock()

    def mapped(self, leaf: StoredArray, piece: Piece) -> Array:
        """A piece, memory-mapped from its file; it is verified later, by one of `checks`."""
        if piece.length == 0:
            return np.empty(piece.region.shape, leaf.spec.dtype)
        if piece.file not in self._maps:
            mapping = self.reader.map(piece.file, 0, self.reader.files[piece.file].size, leaf)
            if mapping is None:
                raise OSError(errno.ENOMEM, "too many mapped files in this process")
            self._maps[piece.file] = mapping
        mapping = self._maps[piece.file]
        self.checks += [partial(self._check, leaf, piece, mapping, part) for part in parts_of(piece)]
        return (
            mapping.data[piece.offset : piece.offset + piece.length].view(leaf.spec.dtype).reshape(piece.region.shape)
        )

    def _check(self, leaf: StoredArray, piece: Piece, mapping: MappedFile, part: Range) -> None:
        start = piece.offset + part[0] * BLOCK
        end = piece.offset + min(part[1] * BLOCK, piece.length)
        mapping.bring_in(start, end)
        self.reader.check(leaf, piece, part, mapping.data[start:end])
        self._progress(end - start)

    def filling(self, leaf: StoredArray, rooms: Sequence[tuple[Region, Array]]) -> list[Task]:
        """Tasks that read a leaf into its memory, block by block."""
        if isinstance(leaf, DerivedArray):
            ((whole, memory),) = rooms
            return [
                task for part in assembly(leaf.expression, whole) for task in self._filling_part(leaf, part, memory)
            ]

        def fill(region: Region) -> None:
            data = read_region(self.reader, leaf, region, self._progress)
            for outer, memory in rooms:
                common = outer.intersect(region)
                if common is not None:
                    part = data[(*common.within(region).slices, ...)]
                    memory[(*common.within(outer).slices, ...)] = self._cast(part, memory.dtype, leaf)

        return [lambda r=region: fill(r) for region in regions_of(self._opened, leaf)]

    def _filling_part(self, leaf: DerivedArray, part: StoredPart | Gap, memory: Array) -> list[Task]:
        """Tasks that fill a part of a derived array: each block of the array that it comes from is read once."""
        if isinstance(part, Gap):
            window = window_of(memory, part.window.offset, part.shape, part.window.strides)
            assert part.value is not None, "there is no template"
            value = self._cast(np.full((1,) * window.ndim, part.value, part.dtype), memory.dtype, leaf)
            return [partial(change_into, window, np.broadcast_to(value, window.shape), ())]
        assert isinstance(part.source, StoredArray), "rules in a file have no functions"
        source, window = part.source, window_of(memory, part.window.offset, part.region.shape, part.window.strides)

        def fill(region: Region) -> None:
            data = read_region(self.reader, source, region, self._progress)
            window[(*region.within(part.region).slices, ...)] = self._cast(data, memory.dtype, leaf)

        blocks = [region.intersect(part.region) for region in regions_of(self._opened, source)]
        return [partial(fill, block) for block in blocks if block is not None]

    def _cast(self, data: Array, dtype: DType, leaf: StoredLeaf) -> Array:
        """The values as another dtype. Integers out of range are an error; floats that become infinite are counted."""
        if data.dtype == dtype:
            return data
        if kind_of(dtype) == "int":
            try:
                check_fits(int(data.min()), int(data.max()), dtype, leaf.key)
            except ValueError as error:
                raise UsageError(str(error)) from None
            return data.astype(dtype)
        with np.errstate(all="ignore"):
            made = data.astype(dtype)
            lost = int(np.count_nonzero(np.isfinite(data))) - int(np.count_nonzero(np.isfinite(made)))
        if lost:
            with self._lock:
                self.lost[leaf.path] = self.lost.get(leaf.path, 0) + lost
        return made


def _scratch(nbytes: int, directory: str) -> Array:
    """Memory backed by an unnamed file, which disappears with the last reference to it, however the program ends.

    Disk space is allocated at once: if the disk filled up later, the program would be killed when it uses the memory.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            system.allocate(file.fileno(), 0, nbytes)
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    except OSError as error:
        raise storage_error(
            error, f"allocating a scratch file of {nbytes:,} bytes in {directory}", "Nothing was written"
        ) from error
