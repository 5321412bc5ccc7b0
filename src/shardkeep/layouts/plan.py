"""The values a plan is made of: leaves, pieces, files, and what is known of a save when it begins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shardkeep.layouts.codecs import RAW, Codec
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import Origin
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


def arrays_of(leaves: Sequence[StagedLeaf]) -> list[StagedArray]:
    """The arrays among the leaves: pieces name them by their number here."""
    return [leaf for leaf in leaves if isinstance(leaf, StagedArray)]


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


@record
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
