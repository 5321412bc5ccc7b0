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
    writer: int = LEADER

    def placed(self, offset: int, name: str) -> "PiecePlan":
        """The same piece with its offset and name. (`dataclasses.replace` takes three times as long.)"""
        return PiecePlan(self.array, self.region, self.nbytes, self.sources, name, offset, self.writer)


@fast_dataclass
class FilePlan:
    """A file to write: its header, then its pieces. `size` is None if it depends on the codec."""

    name: str
    header: bytes
    pieces: tuple[PiecePlan, ...]
    size: int | None
    writer: int = LEADER
    codec: Codec = RAW

    def named(self, name: str) -> "FilePlan":
        """The same file under another name."""
        return FilePlan(name, self.header, self.pieces, self.size, self.writer, self.codec)


@fast_dataclass
class TablePlan:
    """The table of the pieces that one process writes. Without a name it goes into the manifest."""

    writer: int
    size: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """What is known about a tree when its save begins.

    The trees of one save have the same `save_id` and `created`. `leaves` are those of this tree in the snapshot.
    """

    save_id: str
    prefix: str
    skeleton: Skeleton
    metadata: dict[str, Any]
    created: str
    indexed: bool = True
    step: int | None = None
    leaves: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What is known about a written file: its size, the digest of its header, the block digests of each piece."""

    size: int
    header_digest: str
    digests: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What one process has written of a tree: its files, and the table of its pieces.

    Of the table of another process, which is in a file, only the digest is known.
    """

    files: tuple[WrittenFile, ...]
    table: bytes = b""
    table_digest: str = ""


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
        """The files to write, each with its pieces and their offsets."""
        ...

    def complete(self, plan: "TreePlan", file: FilePlan, written: WrittenFile) -> bytes:
        """The header with the manifest, as long as the one that was planned. Asked for if the plan has a `document`."""
        ...


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Everything a save will write of one tree.

    `start` is what all names begin with, once they are reserved. `document` is the name that the only file gets in the
    end, if its header holds the manifest and it so commits itself. `notes` go into that header: they depend on what
    is committed when the names are reserved. `grids` are the cells of the arrays that the pieces are, and `tables` say
    where they are, one table for each process that writes some.
    """

    draft: Draft
    layout: Layout
    leaves: tuple[StagedLeaf, ...]
    files: tuple[FilePlan, ...]
    start: str = ""
    document: str = ""
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    grids: tuple[CellGrid, ...] = ()
    tables: tuple[TablePlan, ...] = ()

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
        tables = _plan_tables(files, f"{draft.save_id}-{number}", limit)
        return cls(draft, layout, tuple(leaves), tuple(files), grids=_grids(leaves, files), tables=tables)

    @property
    def names(self) -> list[str]:
        """The names of its files with data."""
        return [file.name for file in self.files]

    def named(self, start: str) -> "TreePlan":
        """The plan with complete names."""
        return replace(self, files=tuple([file.named(start + file.name) for file in self.files]), start=start)

    def files_of(self, writer: int) -> list[FilePlan]:
        """The files that one of the processes writes."""
        return [file for file in self.files if file.writer == writer]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Everything a save will write: one or more trees, which are committed together."""

    save_id: str
    created: str
    trees: tuple[TreePlan, ...]

    @property
    def files(self) -> list[FilePlan]:
        return [file for tree in self.trees for file in tree.files]

    @property
    def nbytes(self) -> int:
        """An upper bound on the bytes that will be written."""
        files = (file for tree in self.trees for file in tree.files)
        tables = sum(table.size for tree in self.trees for table in tree.tables)
        return tables + sum(file.size or len(file.header) + sum(p.nbytes for p in file.pieces) for file in files)

    def names_of(self, writer: int) -> list[str]:
        """The names of the files that one of the processes writes."""
        names = [file.name for tree in self.trees for file in tree.files_of(writer)]
        tables = [table for tree in self.trees for table in tree.tables if table.writer == writer]
        return [*names, *(table.name for table in tables if table.name)]

    def final_names(self, writer: int) -> list[str]:
        """What the files that one of the processes writes are called once they are committed."""
        final = {name: tree.document for tree in self.trees if tree.document for name in tree.names}
        return [final.get(name, name) for name in self.names_of(writer)]


def plan_save(layout: Layout, leaves: Sequence[StagedLeaf], drafts: Sequence[Draft]) -> SavePlan:
    """What a save of these leaves writes, wherever it goes: each tree in files of its own."""
    trees: list[TreePlan] = []
    for number, draft in enumerate(drafts):
        own = leaves[draft.leaves]
        pieces = plan_pieces(arrays_of(own), layout.split, layout.whole)
        trees.append(TreePlan.of(draft, layout, own, layout.lay_out(own, pieces, draft), number))
    return SavePlan(drafts[0].save_id, drafts[0].created, tuple(trees))


def plan_pieces(
    arrays: Sequence[StagedArray], split: Callable[[ArraySpec, Region], list[Region]], whole: float = SMALL
) -> list[PiecePlan]:
    """The pieces to store: the staged shards, split as the format requires. Arrays up to `whole` bytes stay whole."""
    pieces: list[PiecePlan] = []
    for number, array in enumerate(arrays):
        held = [(array.first_held + i, region) for i, region in enumerate(array.held)]
        itemsize = array.spec.dtype.itemsize
        uneven = len({region.shape for _, region in held}) > 1  # JAX does not do this, and a zarr grid cannot store it
        if array.shares is not None:
            for region, writer in array.shares:
                sources = tuple((i, r) for i, r in held if r == region or r.intersect(region) is not None)
                for part in split(array.spec, region):
                    pieces.append(PiecePlan(number, part, part.size * itemsize, sources, writer=writer))
        elif uneven or array.spec.nbytes <= whole:
            region = Region.whole(array.spec.shape)
            pieces.append(PiecePlan(number, region, array.spec.nbytes, tuple(held)))
        else:
            for shard, region in held:
                for part in split(array.spec, region):
                    pieces.append(PiecePlan(number, part, part.size * itemsize, ((shard, region),)))
    return pieces


def _grids(leaves: Sequence[StagedLeaf], files: Sequence[FilePlan]) -> tuple[CellGrid, ...]:
    """The grid of each array, whose cells are its pieces."""
    arrays = arrays_of(leaves)
    regions: list[list[Region]] = [[] for _ in arrays]
    for file in files:
        for piece in file.pieces:
            regions[piece.array].append(piece.region)
    return tuple([CellGrid.of(array.spec.shape, some) for array, some in zip(arrays, regions, strict=True)])


def _plan_tables(files: Sequence[FilePlan], name: str, limit: float) -> tuple[TablePlan, ...]:
    """A table for each process that writes pieces: in the manifest if all tables of this size are within the limit."""
    by_writer: dict[int, list[FilePlan]] = {}
    for file in files:
        if file.pieces:
            by_writer.setdefault(file.writer, []).append(file)
    tables: list[TablePlan] = []
    for writer, own in sorted(by_writer.items()):
        pieces = [piece for file in own for piece in file.pieces]
        digests = sum([block_count(piece.nbytes) for piece in pieces])
        packed = any(file.size is None for file in own)
        size = table_size(len({piece.array for piece in pieces}), len(pieces), digests, packed)
        tables.append(TablePlan(writer, size, "" if size * len(by_writer) <= limit else table_name(name, writer)))
    return tuple(tables)
