"""Plans of what is written: plain values, made before any byte is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import Origin, Piece, StoredArray, StoredValue
from shardkeep.model.manifest import DataFile, Tree
from shardkeep.model.records import record
from shardkeep.model.tree import Path, Skeleton
from shardkeep.processes.assignment import SMALL, Share
from shardkeep.processes.operation import LEADER


@record
class StagedValue:
    """A plain value as it will be recorded. If several processes save together, it must be the same on all."""

    path: Path
    value: Any


@record
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


@record
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


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file to write: its header, then its pieces. `size` is None if it depends on compression."""

    name: str
    header: bytes
    pieces: tuple[PiecePlan, ...]
    size: int | None
    writer: int = LEADER


@dataclass(frozen=True, slots=True)
class Draft:
    """What is known about a save when it begins."""

    save_id: str
    prefix: str
    skeleton: Skeleton
    metadata: dict[str, Any]
    created: str
    indexed: bool = True
    step: int | None = None


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Everything a save will write."""

    save_id: str
    format: str
    compression: str | None
    skeleton: Skeleton
    leaves: tuple[StagedLeaf, ...]
    files: tuple[FilePlan, ...]
    directory: str = ""

    def files_of(self, writer: int) -> list[FilePlan]:
        """The files that one of the processes writes."""
        return [file for file in self.files if file.writer == writer]

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]

    @property
    def nbytes(self) -> int:
        """An upper bound on the bytes that will be written."""
        return sum(file.size or len(file.header) + sum(p.nbytes for p in file.pieces) for file in self.files)

    def tree(self, written: Sequence["WrittenFile"], draft: Draft) -> Tree:
        """The Tree to commit, once sizes and digests are known."""
        pieces: list[list[Piece]] = [[] for leaf in self.leaves if isinstance(leaf, StagedArray)]
        files: list[DataFile] = []
        for number, (plan, done) in enumerate(zip(self.files, written, strict=True)):
            loose = done.size if plan.size is None else len(plan.header)
            files.append(DataFile(plan.name, done.size, loose, done.header_digest))
            for piece, digests in zip(plan.pieces, done.digests, strict=True):
                stored = done.size if plan.size is None else None
                pieces[piece.array].append(Piece(piece.region, number, piece.offset, piece.nbytes, digests, stored))
        found = iter(pieces)
        leaves = tuple(
            StoredArray(leaf.path, leaf.spec, tuple(next(found)), leaf.origin)
            if isinstance(leaf, StagedArray)
            else StoredValue(leaf.path, leaf.value)
            for leaf in self.leaves
        )
        return Tree(
            save_id=self.save_id,
            format=self.format,
            skeleton=self.skeleton,
            leaves=leaves,
            files=tuple(files),
            metadata=draft.metadata,
            created=draft.created,
            compression=self.compression,
            indexed=draft.indexed,
            step=draft.step,
        )


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What is known about a written file: its size, the digest of its header, the block digests of each piece."""

    size: int
    header_digest: str
    digests: tuple[tuple[str, ...], ...]


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
