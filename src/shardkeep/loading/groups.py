"""The order in which arrays go to devices that copy them: in groups, so that they pass through bounded host memory."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from jax.sharding import SingleDeviceSharding

from shardkeep.loading.blocks import parts_of
from shardkeep.loading.broadcast import Broadcast
from shardkeep.loading.matching import Wanted
from shardkeep.loading.owners import first_place, most_needed
from shardkeep.loading.plan import plan_overlapping, plan_steps
from shardkeep.loading.read import STEP, needed_blocks
from shardkeep.loading.shardings import device_regions, needed_regions
from shardkeep.model.arrays import DType, Region
from shardkeep.model.digests import BLOCK
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.leaves import StoredArray
from shardkeep.model.pieces import packed_in, pieces_meeting
from shardkeep.remap.expressions import DerivedArray, sources_of
from shardkeep.remap.regions import regions_read

_LEAST = 32 << 20  # a group with fewer bytes keeps several threads and devices less busy than it could
_GROUPS = 16  # the first group is read, and the last one sent, while nothing else happens: 1/16 of the time each
_AGAIN = 1.25  # a leaf is cut if that reads at most so many times the blocks


@fast_dataclass
class LeafRegions:
    """Regions of one leaf that are read and sent together.

    Attributes:
        number: The number of the leaf.
        leaf: What is stored of it.
        regions: The regions.
        whole: Whether they are all that this process needs of the leaf.
        cast: The dtype that they are cast to before they are sent; None if they are not.
    """

    number: int
    leaf: StoredArray
    regions: tuple[Region, ...]
    whole: bool
    cast: DType | None = None

    @property
    def _sizes(self) -> list[int]:
        """The bytes of what is read, and of what it is cast to."""
        count = sum(region.size for region in self.regions)
        dtypes = [self.leaf.spec.dtype] if self.cast is None else [self.leaf.spec.dtype, self.cast]
        return sorted(count * dtype.itemsize for dtype in dtypes)

    @property
    def nbytes(self) -> int:
        """The host memory that it takes."""
        return self._sizes[-1]

    @property
    def beside(self) -> int:
        """The host memory that it takes beside that while it is read: for a cast, or for an encoded piece."""
        cast = 0 if self.cast is None else self._sizes[0]
        stored = sources_of(self.leaf.expression) if isinstance(self.leaf, DerivedArray) else [self.leaf]
        return max([cast, *(piece.length for leaf in stored for piece in packed_in(leaf.pieces))])


@fast_dataclass
class GroupPlan:
    """The parts to load, in groups, and the host memory for them.

    Attributes:
        groups: The parts that are read and sent together, in order.
        step: The most bytes in a group of several parts, and of pieces that are read at once and cut.
        sent: The bytes that may be on their way to devices or be read for them.
        beside: The bytes that reading a group takes beside.
    """

    groups: tuple[tuple[LeafRegions, ...], ...]
    step: int
    sent: int
    beside: int

    @property
    def nbytes(self) -> int:
        """All host memory that the load uses."""
        return self.sent + self.beside


def plan_groups(wanted: Mapping[int, Wanted], casts: Mapping[int, DType | None], limit: int) -> GroupPlan:
    """How to load leaves, if at most `limit` bytes of host memory may be used.

    A quarter of it is filled while half is being sent, and the last quarter is for what reading takes beside. Arrays
    larger than a quarter get as much memory as lets one be read while another is sent, if there is so much. A single
    region larger than the limit takes what it needs.
    """
    total = sum(w.stored.nbytes for w in wanted.values())
    step = max(min(STEP, limit // 4, max(total // _GROUPS, _LEAST), total), 1)
    parts = _plan_parts(wanted, casts, step, limit // 4)
    groups = tuple(tuple(p for some in group for p in some.parts) for group in plan_steps(_together(parts, step), step))
    sizes = [_nbytes(group) for group in groups]
    beside = max([step, *(part.beside for part in parts)])
    most = max(sizes, default=0)
    sent = max(most, min(max(3 * step, 2 * most), sum(sizes), limit - beside))
    return GroupPlan(groups, step, sent, beside)


def plan_groups_of_all(
    wanted: Mapping[int, Wanted], casts: Mapping[int, DType | None], broadcast: Broadcast
) -> GroupPlan:
    """How to load leaves that processes read for each other: all of them plan the same groups, of whole leaves.

    What a leaf takes is what the process needs that needs most of it.
    """
    shares = [
        _Share(_leaf_of(number, w, casts), most_needed(w, broadcast.operation.size)) for number, w in wanted.items()
    ]
    shares.sort(key=lambda share: (first_place(share.part.leaf), share.part.number))
    step = max(min(STEP, broadcast.budget // 4), 1)
    groups = plan_steps(shares, step)
    sizes = [sum(share.nbytes for share in group) for group in groups]
    most = max(sizes, default=0)
    # Parts of arrays that this process reads, before they are put together, and what sending takes.
    beside = most + max([step, *(share.part.beside for share in shares)]) + broadcast.nbytes
    sent = max(most, min(max(3 * step, 2 * most), sum(sizes), broadcast.budget - beside))
    return GroupPlan(tuple(tuple(share.part for share in group) for group in groups), step, sent, beside)


@fast_dataclass
class _Share:
    """What a process needs of a leaf, and what the one needs that needs most of it."""

    part: LeafRegions
    nbytes: int


def _leaf_of(number: int, w: Wanted, casts: Mapping[int, DType | None]) -> LeafRegions:
    leaf = w.stored
    assert isinstance(leaf, StoredArray)
    return LeafRegions(number, leaf, tuple(w.regions(leaf)), True, casts.get(number))


def _plan_parts(
    wanted: Mapping[int, Wanted], casts: Mapping[int, DType | None], step: int, large: int
) -> list[LeafRegions]:
    """What is sent of each leaf, in the order of the files.

    Leaves larger than `step` go region by region, unless the same blocks would have to be read several times. Those
    that are `large` do also then.
    """
    parts: list[LeafRegions] = []
    for number, w in wanted.items():
        leaf = w.stored
        assert isinstance(leaf, StoredArray)
        sharding, shape, cast = w.place.sharding, leaf.spec.shape, casts.get(number)
        if sharding is None or isinstance(sharding, SingleDeviceSharding) or w.shape is not None:
            parts.append(LeafRegions(number, leaf, (Region.whole(shape),), True, cast))
            continue
        whole = LeafRegions(number, leaf, needed_regions(sharding, shape), True, cast)
        regions = tuple(dict.fromkeys(device_regions(sharding, shape).values()))
        if whole.nbytes > step and len(regions) > 1 and (whole.nbytes > large or _can_be_cut(leaf, regions)):
            parts += [LeafRegions(number, leaf, (region,), False, cast) for region in regions]
        else:
            parts.append(whole)
    return sorted(parts, key=_position)


@fast_dataclass
class _Together:
    """Parts that should be in one group."""

    parts: tuple[LeafRegions, ...]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.parts)


def _together(parts: Sequence[LeafRegions], step: int) -> list[_Together]:
    """Parts in order, those together that are made of the same stored array, which is then read once."""
    found: list[_Together] = []
    for _, some in groupby(parts, _position):
        alike = tuple(some)
        shared = isinstance(alike[0].leaf, DerivedArray) and _nbytes(alike) <= step
        found += [_Together(alike)] if shared else [_Together((part,)) for part in alike]
    return found


def _can_be_cut(leaf: StoredArray, regions: Sequence[Region]) -> bool:
    """Whether the regions can be read one after the other without reading many blocks more than once."""
    return sum(_bytes_read(leaf, [region]) for region in regions) <= _AGAIN * _bytes_read(leaf, regions)


def _bytes_read(leaf: StoredArray, regions: Sequence[Region]) -> int:
    if isinstance(leaf, DerivedArray):
        return sum(_bytes_read(stored, some) for stored, some in regions_read(leaf.expression, regions))
    ranges = [r for f in plan_overlapping(0, leaf, regions) for r in parts_of(f.piece, needed_blocks(f, leaf))]
    return sum(last - first for first, last in ranges) * BLOCK


def _position(part: LeafRegions) -> tuple[int, int]:
    leaf, regions = part.leaf, part.regions
    if isinstance(leaf, DerivedArray):
        leaf, regions = next(iter(regions_read(leaf.expression, regions[:1])), (leaf, regions))
    pieces = leaf.pieces
    if not pieces:
        return -1, 0
    # A process whose devices hold nothing of the array has no regions.
    met = (piece for piece, _ in pieces_meeting(pieces, regions[:1]) if piece.region.intersect(regions[0]) is not None)
    first = next(met, pieces[0])
    return first.file, first.offset


def _nbytes(group: Sequence[LeafRegions]) -> int:
    return sum(part.nbytes for part in group)
