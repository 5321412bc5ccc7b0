"""What a layout is, and the plan of a save that is laid out by one: leaves, pieces, files.

A plan is a value, made before anything is written and without looking at the place where it goes. The names in it are
only the ends of names: what they begin with is chosen when they are reserved (`TreePlan.named`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from shardkeep.layouts.codecs import RAW, Codec
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.leaves import Origin, Piece, StoredArray, StoredValue
from shardkeep.model.manifest import DataFile, Tree
from shardkeep.model.tree import Path, Skeleton
from shardkeep.processes.assignment import SMALL, Share
from shardkeep.processes.operation import LEADER


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
    shares: tuple[Share, ...] = ()
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
    is committed when the names are reserved.
    """

    draft: Draft
    layout: Layout
    leaves: tuple[StagedLeaf, ...]
    files: tuple[FilePlan, ...]
    start: str = ""
    document: str = ""
    notes: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]

    def named(self, start: str) -> "TreePlan":
        """The plan with complete names."""
        return replace(self, files=tuple([file.named(start + file.name) for file in self.files]), start=start)

    def tree(self, written: Sequence[WrittenFile]) -> Tree:
        """The Tree to commit, once sizes and digests are known."""
        draft = self.draft
        pieces: list[list[Piece]] = [[] for leaf in self.leaves if isinstance(leaf, StagedArray)]
        files: list[DataFile] = []
        for number, (plan, done) in enumerate(zip(self.files, written, strict=True)):
            loose = done.size if plan.size is None else len(plan.header)
            files.append(DataFile(plan.name, done.size, loose, done.header_digest))
            for piece, digests in zip(plan.pieces, done.digests, strict=True):
                stored = done.size if plan.size is None else None
                pieces[piece.array].append(Piece(piece.region, number, piece.offset, piece.nbytes, digests, stored))
        if self.document:  # no digest can be in the header that it covers
            files = [DataFile(self.document, files[0].size, len(self.files[0].header))]
        found = iter(pieces)
        leaves = tuple(
            StoredArray(leaf.path, leaf.spec, tuple(next(found)), leaf.origin)
            if isinstance(leaf, StagedArray)
            else StoredValue(leaf.path, leaf.value)
            for leaf in self.leaves
        )
        return Tree(
            save_id=draft.save_id,
            format=self.layout.name,
            skeleton=draft.skeleton,
            leaves=leaves,
            files=tuple(files),
            metadata=draft.metadata,
            created=draft.created,
            compression=self.layout.codec.name,
            indexed=draft.indexed,
            step=draft.step,
        )


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
        return sum(file.size or len(file.header) + sum(p.nbytes for p in file.pieces) for file in files)

    def files_of(self, writer: int) -> list[FilePlan]:
        """The files that one of the processes writes."""
        return [file for tree in self.trees for file in tree.files if file.writer == writer]

    def final_names(self, writer: int) -> list[str]:
        """What the files that one of the processes writes are called once they are committed."""
        return [tree.document or file.name for tree in self.trees for file in tree.files if file.writer == writer]


def plan_save(layout: Layout, leaves: Sequence[StagedLeaf], drafts: Sequence[Draft]) -> SavePlan:
    """What a save of these leaves writes, wherever it goes: each tree in files of its own."""
    trees: list[TreePlan] = []
    for draft in drafts:
        own = leaves[draft.leaves]
        pieces = plan_pieces(arrays_of(own), layout.split, layout.whole)
        trees.append(TreePlan(draft, layout, tuple(own), tuple(layout.lay_out(own, pieces, draft))))
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
        if array.shares:
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
