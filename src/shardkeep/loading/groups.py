"""The order in which arrays go to devices that copy them: in groups, so that they pass through bounded host memory."""

from collections.abc import Mapping, Sequence

from jax.sharding import SingleDeviceSharding

from shardkeep.loading.select import Wanted
from shardkeep.loading.shardings import device_regions, needed_regions
from shardkeep.model.arrays import Region
from shardkeep.model.leaves import StoredArray
from shardkeep.model.records import record

STEP = 256 << 20  # the most bytes that are read at once
_LEAST = 32 << 20  # a group with fewer bytes keeps several threads and devices less busy than it could
_GROUPS = 16  # the first group is read, and the last one sent, while nothing else happens: 1/16 of the time each


@record
class Part:
    """Regions of one leaf that are read and sent together. `whole`: all that this process needs of the leaf."""

    number: int
    leaf: StoredArray
    regions: tuple[Region, ...]
    whole: bool

    @property
    def nbytes(self) -> int:
        return sum(region.size for region in self.regions) * self.leaf.spec.dtype.itemsize


@record
class Room:
    """The host memory of a load.

    Attributes:
        total: All of it.
        group: The most bytes in a group. As much again is for what reading it takes beside: pieces that are cut, and
            results of casts.
    """

    total: int
    group: int

    @property
    def sent(self) -> int:
        """The bytes that may be on their way to devices or be read for them."""
        return self.total - self.group


def plan_room(nbytes: int, limit: int) -> Room:
    """The memory to load `nbytes`, if at most `limit` bytes may be used. A single larger region takes what it needs.

    A quarter is filled while half is being sent, and the last quarter is what reading takes beside it.

    >>> plan_room(nbytes=100 << 30, limit=400 << 20)
    Room(total=419430400, group=104857600)
    """
    most = min(limit, 4 * STEP)
    group = max(min(STEP, most // 4, max(nbytes // _GROUPS, _LEAST)), 1)
    return Room(min(most, nbytes + min(group, nbytes)), min(group, max(nbytes, 1)))


def plan_parts(wanted: Mapping[int, Wanted], limit: int) -> list[Part]:
    """What is sent of each leaf, in the order of the files: leaves larger than `limit` region by region."""
    parts: list[Part] = []
    for number, w in wanted.items():
        leaf = w.stored
        assert isinstance(leaf, StoredArray)
        sharding, shape = w.place.sharding, leaf.spec.shape
        if sharding is None or isinstance(sharding, SingleDeviceSharding) or w.shape is not None:
            parts.append(Part(number, leaf, (Region.whole(shape),), True))
            continue
        part = Part(number, leaf, needed_regions(sharding, shape), True)
        regions = dict.fromkeys(device_regions(sharding, shape).values())
        if part.nbytes <= limit or len(regions) == 1:
            parts.append(part)
        else:
            parts += [Part(number, leaf, (region,), False) for region in regions]
    return sorted(parts, key=_position)


def _position(part: Part) -> tuple[int, int]:
    pieces = part.leaf.pieces
    if not pieces:
        return -1, 0
    first = next((piece for piece in pieces if piece.region.intersect(part.regions[0]) is not None), pieces[0])
    return first.file, first.offset


def plan_groups(parts: Sequence[Part], limit: int) -> list[list[Part]]:
    """Parts in order, in groups of at most `limit` bytes (or of a single part)."""
    groups: list[list[Part]] = []
    filled = 0
    for part in parts:
        if not groups or filled + part.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += part.nbytes
    return groups
