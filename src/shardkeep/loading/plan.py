"""Plans of what is read: plain values, made before any byte is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from shardkeep.model.arrays import Array, DType, Region
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.leaves import Piece, StoredArray
from shardkeep.model.pieces import pieces_meeting
from shardkeep.remap.expressions import Function

if TYPE_CHECKING:
    from shardkeep.loading.matching import Wanted  # it needs JAX, and this does not


class _HasBytes(Protocol):
    @property
    def nbytes(self) -> int: ...


Sized = TypeVar("Sized", bound=_HasBytes)


@dataclass(slots=True)
class Destination:
    """Where the data of a leaf goes: its regions and an array for each. With `own`, these are not mapped files.

    Arrays that are there before anything is read are filled; others are made, or are what was read. What fills an array
    goes through the `functions` for it, if there are any.
    """

    leaf: StoredArray
    regions: Sequence[Region]
    own: bool
    arrays: list[Array | None]
    cast: DType | None = None  # what they are cast to once they are read
    functions: Sequence[tuple[Function, ...]] = ()

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


@fast_dataclass
class Fetch:
    """A piece to read, and what it fills: (number of the region of the destination, what both have in common)."""

    leaf: int
    piece: Piece
    fills: tuple[tuple[int, Region], ...]
    band: int | None = None  # the bytes to read, if only a band of the piece is read

    @property
    def nbytes(self) -> int:
        """The memory needed to read it."""
        return self.piece.length if self.band is None else self.band

    @property
    def parts(self) -> list[Region]:
        """The parts of the piece that are needed, relative to its start."""
        return list(dict.fromkeys(common.within(self.piece.region) for _, common in self.fills))


def plan_read(number: int, leaf: StoredArray, regions: Sequence[Region]) -> list[Fetch]:
    """The pieces, and the parts of them, that fill the regions. Nothing else is read.

    The regions are equal or disjoint, as the shards of an array are.
    """
    if len(leaf.pieces) == len(regions) == 1 and regions[0].shape == leaf.spec.shape and leaf.spec.nbytes:
        return [Fetch(number, leaf.pieces[0], ((0, regions[0]),))]
    fetches: list[Fetch] = []
    known = {region: i for i, region in enumerate(regions)}
    known = known if len(known) == len(regions) else {}
    for piece, met in pieces_meeting(leaf.pieces, regions):
        same = known.get(piece.region) if piece.length else None
        if same is not None:
            hits = [(same, piece.region)]
        else:
            hits = [(i, c) for i in met if (c := piece.region.intersect(regions[i])) is not None]
        if hits:
            fetches.append(Fetch(number, piece, tuple(hits)))
    return fetches


def plan_overlapping(number: int, leaf: StoredArray, destinations: Sequence[Region]) -> list[Fetch]:
    """`plan_read` for destination regions that may overlap. Each piece is still read once."""
    fetches: list[Fetch] = []
    for piece, met in pieces_meeting(leaf.pieces, destinations):
        hits = [(i, c) for i in met if (c := piece.region.intersect(destinations[i])) is not None]
        if hits:
            fetches.append(Fetch(number, piece, tuple(hits)))
    return fetches


def plan_destinations(
    wanted: "Sequence[Wanted]", parts: Mapping[int, Sequence[Region]]
) -> tuple[dict[int, Destination], list[Fetch]]:
    """Where the data of each array goes, by number of the leaf, and what is read to fill it.

    Args:
        wanted: The leaves to load.
        parts: The regions to read of leaves of which this process does not read all that it needs.
    """
    destinations: dict[int, Destination] = {}
    fetches: list[Fetch] = []
    for number, w in enumerate(wanted):
        leaf = w.stored
        if isinstance(leaf, StoredArray):
            regions = parts[number] if number in parts else w.regions(leaf)
            fetches += plan_read(number, leaf, regions)
            destinations[number] = Destination(leaf, regions, w.stays_on_host(leaf), [None] * len(regions))
    return destinations, fetches


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
        hits = tuple((i, c) for i, common in fetch.fills if (c := common.intersect(band)) is not None)
        if hits:
            bands.append(Fetch(fetch.leaf, fetch.piece, hits, count * row))
    return bands


def plan_steps(some: Sequence[Sized], limit: int) -> list[list[Sized]]:
    """Things in order, grouped so that those of a group have at most `limit` bytes (or are a single one)."""
    steps: list[list[Sized]] = []
    filled = 0
    for each in some:
        if not steps or filled + each.nbytes > limit:
            steps.append([])
            filled = 0
        steps[-1].append(each)
        filled += each.nbytes
    return steps
