"""Plans of what is read: plain values, made before any byte is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkeep.model.arrays import Array, DType, Region
from shardkeep.model.leaves import Piece, StoredArray
from shardkeep.model.records import record

if TYPE_CHECKING:
    from shardkeep.loading.select import Wanted  # it needs JAX, and this does not


@dataclass(slots=True)
class Target:
    """Where the data of a leaf goes: its regions and an array for each. With `own`, these are not mapped files."""

    leaf: StoredArray
    regions: Sequence[Region]
    own: bool
    arrays: list[Array | None]
    cast: DType | None = None  # what they are cast to once they are read

    @property
    def whole(self) -> Array:
        """The array of the only region."""
        (array,) = self.arrays
        assert array is not None
        return array

    @property
    def dtype(self) -> DType:
        """The dtype of the arrays once they are read and cast."""
        return self.leaf.spec.dtype if self.cast is None else self.cast

    def nbytes(self, number: int) -> int:
        return self.regions[number].size * self.leaf.spec.dtype.itemsize

    def take(self, number: int, memory: Array) -> None:
        """Use this memory for a region."""
        self.arrays[number] = memory.view(self.leaf.spec.dtype).reshape(self.regions[number].shape)


@record
class Fetch:
    """A piece to read, and where its data goes: (number of the target, the region they have in common)."""

    leaf: int
    piece: Piece
    targets: tuple[tuple[int, Region], ...]
    band: int | None = None  # the bytes to read, if only a band of the piece is read

    @property
    def nbytes(self) -> int:
        """The memory needed to read it."""
        return self.piece.length if self.band is None else self.band

    @property
    def parts(self) -> list[Region]:
        """The parts of the piece that are needed, relative to its start."""
        return list(dict.fromkeys(common.within(self.piece.region) for _, common in self.targets))


def plan_read(number: int, leaf: StoredArray, targets: Sequence[Region]) -> list[Fetch]:
    """The pieces, and the parts of them, that fill the target regions. Nothing else is read.

    Targets are equal or disjoint, as the shards of an array are.
    """
    if len(leaf.pieces) == len(targets) == 1 and leaf.pieces[0].region == targets[0] and leaf.pieces[0].length:
        return [Fetch(number, leaf.pieces[0], ((0, targets[0]),))]
    fetches: list[Fetch] = []
    known = {target: i for i, target in enumerate(targets)}
    known = known if len(known) == len(targets) else {}
    for piece in leaf.pieces:
        same = known.get(piece.region) if piece.length else None
        if same is not None:
            hits = [(same, piece.region)]
        else:
            hits = [(i, c) for i, target in enumerate(targets) if (c := piece.region.intersect(target)) is not None]
        if hits:
            fetches.append(Fetch(number, piece, tuple(hits)))
    return fetches


def plan_targets(wanted: "Sequence[Wanted]", whole: bool = False) -> tuple[dict[int, Target], list[Fetch]]:
    """Where the data of each array goes, by number of the leaf, and what is read to fill it.

    Args:
        wanted: The leaves to load.
        whole: Whether to read every array completely, and not only what this process needs of it.
    """
    targets: dict[int, Target] = {}
    fetches: list[Fetch] = []
    for number, w in enumerate(wanted):
        leaf = w.stored
        if isinstance(leaf, StoredArray):
            regions = [Region.whole(leaf.spec.shape)] if whole else w.regions(leaf)
            fetches += plan_read(number, leaf, regions)
            targets[number] = Target(leaf, regions, w.stays_on_host(leaf), [None] * len(regions))
    return targets, fetches


def split_fetch(fetch: Fetch, limit: int) -> list[Fetch]:
    """The bands, along its first axis longer than 1, in which a piece larger than `limit` is read."""
    region = fetch.piece.region
    axis = next((i for i, n in enumerate(region.shape) if n > 1), None)
    if fetch.piece.length <= limit or fetch.piece.stored is not None or axis is None:
        return [fetch]
    row = fetch.piece.length // region.shape[axis]
    step = max(limit // row, 1)
    bands: list[Fetch] = []
    for first in range(0, region.shape[axis], step):
        count = min(step, region.shape[axis] - first)
        start = tuple(a + first if i == axis else a for i, a in enumerate(region.start))
        band = Region(start, tuple(count if i == axis else n for i, n in enumerate(region.shape)))
        hits = tuple((i, c) for i, common in fetch.targets if (c := common.intersect(band)) is not None)
        if hits:
            bands.append(Fetch(fetch.leaf, fetch.piece, hits, count * row))
    return bands


def plan_steps(fetches: Sequence[Fetch], limit: int) -> list[list[Fetch]]:
    """Fetches in order, grouped so that the pieces of a group have at most `limit` bytes (or are a single piece)."""
    steps: list[list[Fetch]] = []
    filled = 0
    for fetch in fetches:
        if not steps or filled + fetch.nbytes > limit:
            steps.append([])
            filled = 0
        steps[-1].append(fetch)
        filled += fetch.nbytes
    return steps
