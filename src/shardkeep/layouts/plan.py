"""What a layout is, and the plan of a save that is laid out by one: leaves, pieces, files.

A plan is a value, made before anything is written and without looking at the place where it goes. The names in it are
only the ends of names: what they begin with is chosen when they are reserved (`TreePlan.named`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from shardkeep.layouts.codecs import RAW, Codec
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.cells import CellGrid
from shardkeep.model.digests import block_count
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.leaves import Origin
from shardkeep.model.manifest import DataFile
from shardkeep.model.naming import table_name
from shardkeep.model.shares import Shares
from shardkeep.model.tables import table_size
from shardkeep.model.tree import Path, Skeleton
from shardkeep.processes.assignment import SMALL
from shardkeep.processes.operation import LEADER

# Bytes of the tables of a tree in its manifest. To read so much more of it takes less time than to open one more file,
# or a tenth of a request to a bucket. It is some 6,000 pieces.
_INLINE = 256 << 10


@fast_dataclass
class StagedValue:
    """A plain value as it will be recorded. If several processes save together, it must be the same on all."""

    path: Path
    value: Any


@fast_dataclass
class StagedArray:
    """An array as it will be recorded. `held` are the regions that this process has staged, in order.

    If several processes save together, `shares` says which of them writes which region. `common` means that each of
    them has the complete value, which must be the same on all.
    """

    path: Path
    spec: ArraySpec
    origin: Origin
    held: tuple[Region, ...] = ()
    first_held: int = 0
    shares: Shares | None = None
    common: bool = False


StagedLeaf: TypeAlias = StagedValue | StagedArray


def arrays_of(leaves: Sequence[StagedLeaf]) -> list[StagedArray]:
    """The arrays among the leaves: pieces name them by their number here."""
    return [leaf for leaf in leaves if isinstance(leaf, StagedArray)]


@fast_dataclass
class PiecePlan:
    """A Region of an array to store, and the staged shards it consists of: (number of the shard, its region)."""

    array: int
    region: Region
    nbytes: int
    sources: tuple[tuple[int, Region], ...]
    name: str = ""
    offset: int = 0

    def placed(self, offset: int, name: str) -> "PiecePlan":
        """The same piece with its offset and name. (`dataclasses.replace` takes three times as long.)"""
        return PiecePlan(self.array, self.region, self.nbytes, self.sources, name, offset)


@fast_dataclass
class FilePlan:
    """A file to write: its header, then its pieces. `size` is None if it depends on the codec."""

    name: str
    header: bytes
    pieces: tuple[PiecePlan, ...]
    size: int | None
    codec: Codec = RAW

    def named(self, name: str) -> "FilePlan":
        """The same file under another name."""
        return FilePlan(name, self.header, self.pieces, self.size, self.codec)


@fast_dataclass
class TablePlan:
    """The table of the pieces that this process writes. Without a name it goes into the manifest."""

    size: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """What is known about a tree when its save begins.

    The trees of one save have the same `save_id` and `created`. `leaves` are those of this tree in the snapshot. Of
    several `processes`, each plans what `process`, its index, writes.
    """

    save_id: str
    prefix: str
    skeleton: Skeleton
    metadata: dict[str, Any]
    created: str
    indexed: bool = True
    step: int | None = None
    leaves: slice = field(default_factory=lambda: slice(None))
    process: int = LEADER
    processes: int = 1


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What is known about a written file: its size, the digest of its header, the block digests of each piece."""

    size: int
    header_digest: str
    digests: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What one process has written of a tree: its files, and the table of its pieces, if it has any.

    Of the table of another process that is in a file, only this file is known.
    """

    files: tuple[DataFile, ...]
    table: bytes = b""
    table_file: DataFile | None = None


class Layout(Protocol):
    """How pieces become files. One writer and one reader serve all layouts. `layouts.registry` knows them by name."""

    @property
    def name(self) -> str:
        """The format that the manifest records."""
        ...

    @property
    def codec(self) -> Codec:
        """How the bytes of pieces are stored."""
        ...

    @property
    def whole(self) -> float:
        """Arrays of at most this many bytes that one process holds completely are stored as one piece."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether arrays that span processes are gathered in the first process, which writes all files."""
        ...

    def describe(self) -> str:
        """The layout in a few words. Processes that save together must use the same."""
        ...

    def check(self, paths: Sequence[Path]) -> None:
        """Refuse arrays that this layout has no names for, before anything is written."""
        ...

    def split(self, spec: ArraySpec, region: Region) -> list[Region]:
        """The regions that a shard is stored as."""
        ...

    def lay_out(self, leaves: Sequence[StagedLeaf], pieces: Sequence[PiecePlan], draft: Draft) -> list[FilePlan]:
        """The files that this process writes, each with its pieces and their offsets.

        No other process may write a file of the same name. None of them knows how many files the others have.
        """
        ...

    def claimed(self, leaves: Sequence[StagedLeaf]) -> list[str]:
        """Names that must be free for the files of other processes, unless these have the save's id in their names."""
        ...

    def complete(self, plan: "TreePlan", file: FilePlan, written: WrittenFile) -> bytes:
        """The header with the manifest, as long as the one that was planned. Asked for if the plan has a `document`."""
        ...


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Everything that this process will write of one tree.

    `start` is what all names begin with, once they are reserved. `document` is the name that the only file gets in the
    end, if its header holds the manifest and it so commits itself. `notes` go into that header: they depend on what
    is committed when the names are reserved. `grids` are the cells of the arrays, and `table` says where those are that
    this process writes, if it writes any. `claimed`: see `Layout`.
    """

    draft: Draft
    layout: Layout
    leaves: tuple[StagedLeaf, ...]
    files: tuple[FilePlan, ...]
    start: str = ""
    document: str = ""
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    grids: tuple[CellGrid, ...] = ()
    table: TablePlan | None = None
    claimed: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        draft: Draft,
        layout: Layout,
        leaves: Sequence[StagedLeaf],
        files: Sequence[FilePlan],
        number: int = 0,
    ) -> "TreePlan":
        """The plan of a tree with these files. `number` is its number among the trees of the save."""
        limit = math.inf if layout.gathers else _INLINE  # there are no files with tables beside exchange files
        table = _plan_table(files, draft, number, limit / draft.processes)
        claimed = layout.claimed(leaves) if draft.processes > 1 and draft.process == LEADER else ()
        grids = _grids(layout, leaves, files, draft)
        return cls(draft, layout, tuple(leaves), tuple(files), grids=grids, table=table, claimed=tuple(claimed))

    @property
    def names(self) -> list[str]:
        """The names of its files with data, and those that are claimed for files of other processes."""
        return [*(file.name for file in self.files), *self.claimed]

    def named(self, start: str) -> "TreePlan":
        """The plan with complete names."""
        files = tuple([file.named(start + file.name) for file in self.files])
        return replace(self, files=files, start=start, claimed=tuple([start + name for name in self.claimed]))


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Everything that this process will write in a save: one or more trees, which are committed together."""

    save_id: str
    created: str
    trees: tuple[TreePlan, ...]

    @property
    def files(self) -> list[FilePlan]:
        return [file for tree in self.trees for file in tree.files]

    @property
    def nbytes(self) -> int:
        """An upper bound on the bytes that will be written, by all processes."""
        total = 0
        for tree in self.trees:
            written = sum(file.size or len(file.header) + sum(p.nbytes for p in file.pieces) for file in tree.files)
            if tree.draft.processes > 1:  # the others write, too
                written = max(written, sum(array.spec.nbytes for array in arrays_of(tree.leaves)))
            total += written + (tree.table.size if tree.table else 0)
        return total

    @property
    def names(self) -> list[str]:
        """The names of the files, tables included."""
        tables = [tree.table.name for tree in self.trees if tree.table and tree.table.name]
        return [*(file.name for tree in self.trees for file in tree.files), *tables]

    @property
    def final_names(self) -> list[str]:
        """What the files are called once they are committed."""
        final = {name: tree.document for tree in self.trees if tree.document for name in tree.names}
        return [final.get(name, name) for name in self.names]


def plan_save(layout: Layout, leaves: Sequence[StagedLeaf], drafts: Sequence[Draft]) -> SavePlan:
    """What this process writes in a save of these leaves, wherever it goes: each tree in files of its own."""
    trees: list[TreePlan] = []
    for number, draft in enumerate(drafts):
        own = leaves[draft.leaves]
        if layout.gathers and draft.process != LEADER:  # it writes nothing
            trees.append(TreePlan(draft, layout, (), ()))
            continue
        pieces = plan_pieces(arrays_of(own), layout.split, layout.whole, draft.process)
        trees.append(TreePlan.of(draft, layout, own, layout.lay_out(own, pieces, draft), number))
    return SavePlan(drafts[0].save_id, drafts[0].created, tuple(trees))


def plan_pieces(
    arrays: Sequence[StagedArray],
    split: Callable[[ArraySpec, Region], list[Region]],
    whole: float = SMALL,
    process: int = LEADER,
) -> list[PiecePlan]:
    """The pieces that a process stores: the staged shards, split as the format requires.

    Arrays up to `whole` bytes stay whole, if there are no others that save together with this process.
    """
    pieces: list[PiecePlan] = []
    for number, array in enumerate(arrays):
        nbytes = array.spec.nbytes
        if array.shares is None and len(array.held) == 1 and nbytes <= whole:  # as most small ones are
            (region,) = array.held
            pieces.append(PiecePlan(number, region, nbytes, ((array.first_held, region),)))
            continue
        held = [(array.first_held + i, region) for i, region in enumerate(array.held)]
        itemsize = array.spec.dtype.itemsize
        uneven = len({region.shape for _, region in held}) > 1  # JAX does not do this, and a zarr grid cannot store it
        if array.shares is not None:
            known = {region: i for i, region in held}
            for region in array.shares.of(process):
                same = [(known[region], region)] if region in known else held
                sources = tuple((i, r) for i, r in same if r == region or r.intersect(region) is not None)
                for part in split(array.spec, region):
                    pieces.append(PiecePlan(number, part, part.size * itemsize, sources))
        elif uneven or nbytes <= whole:
            region = Region.whole(array.spec.shape)
            pieces.append(PiecePlan(number, region, nbytes, tuple(held)))
        else:
            for shard, region in held:
                for part in split(array.spec, region):
                    pieces.append(PiecePlan(number, part, part.size * itemsize, ((shard, region),)))
    return pieces


def _grids(
    layout: Layout, leaves: Sequence[StagedLeaf], files: Sequence[FilePlan], draft: Draft
) -> tuple[CellGrid, ...]:
    """The grid of each array, whose cells are its pieces."""
    arrays = arrays_of(leaves)
    if draft.processes == 1 and sum(len(file.pieces) for file in files) == len(arrays):  # each is a single piece
        return tuple([CellGrid.whole(array.spec.shape) for array in arrays])
    regions: list[list[Region]] = [[] for _ in arrays]
    for file in files:
        for piece in file.pieces:
            regions[piece.array].append(piece.region)
    return tuple(
        [
            CellGrid.of(array.spec.shape, some) if array.shares is None else grid_of(layout, array.spec, array.shares)
            for array, some in zip(arrays, regions, strict=True)
        ]
    )


def grid_of(layout: Layout, spec: ArraySpec, shares: Shares) -> CellGrid:
    """The grid of an array that several processes write: their shares, split as the format requires."""
    if len(shares) == 1 and spec.nbytes == 0:
        return CellGrid.whole(spec.shape)
    return CellGrid.even(spec.shape, layout.split(spec, shares.region(0))[0].shape)


def _plan_table(files: Sequence[FilePlan], draft: Draft, number: int, limit: float) -> TablePlan | None:
    """The table of the pieces in the files of a tree of this number in its save; up to a limit without a name."""
    pieces = [piece for file in files for piece in file.pieces]
    if not pieces:
        return None
    digests = sum([block_count(piece.nbytes) for piece in pieces])
    packed = any(file.size is None for file in files if file.pieces)
    size = table_size(len({piece.array for piece in pieces}), len(pieces), digests, packed)
    return TablePlan(size, "" if size <= limit else table_name(f"{draft.save_id}-{number}", draft.process))
