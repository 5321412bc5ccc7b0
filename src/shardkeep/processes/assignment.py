"""Which process writes what: every byte once, balanced over the processes that hold it, without communication.

Every process computes this for all processes, from the shardings alone, and gets the same result. It is computed once
for arrays of the same shapes and shardings. Arrays that are sharded alike share a `_Pattern`, and equal shards of them
are dealt out together, so the first time takes one step for each kind of array rather than one for each shard.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from shardkeep.model.arrays import Region, split_counts
from shardkeep.model.digests import digest
from shardkeep.model.lazy import cached_property
from shardkeep.model.shares import Numbers, Shares, Writers
from shardkeep.processes.operation import LEADER

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, Sharding

SMALL = 1 << 20  # an array up to this size that one process holds completely is stored as one piece
_EVEN = 1.125  # the load is unbalanced if a process has more than this times its fair share
_FINENESS = (1, 2, 4)  # then arrays larger than this fraction of a fair share are cut, tried in this order
_BUNDLE = 32  # small arrays go to one process up to this part of a fair share: a load then needs few tables and files
_TREES = 8  # assignments that are kept: a program saves the same few trees again and again
_PATTERNS = 1024  # thousands of leaves share a few, each of which may have thousands of devices

Holding: TypeAlias = tuple[Region, tuple[int, ...]]  # a region and the processes that hold it
# What an assignment depends on of an array: its shape, the bytes of an element, and the sharding over devices, if any.
_Kind: TypeAlias = tuple[tuple[int, ...], int, "Sharding | None"]


def share_out(arrays: Sequence[Any], size: int, *, gathered: bool) -> Sequence[Shares | None]:
    """For each array (None stands for a leaf that is not one), which process writes which region.

    Arrays and their shards are assigned whole. Only if that leaves the processes uneven are those cut that are larger
    than a process's fair share, because a part of a shard has to be cut out on its device first.

    Args:
        arrays: The arrays of a tree.
        size: The number of processes.
        gathered: The leader writes every array, in one piece.
    """
    if gathered:
        return [None if array is None else Shares.whole(array.shape, LEADER) for array in arrays]
    return _shared_out(tuple([None if array is None else _kind_of(array) for array in arrays]), size)


def _kind_of(array: Any) -> _Kind:
    shape: tuple[int, ...] = array.shape
    if isinstance(array, np.ndarray):
        return shape, array.dtype.itemsize, None
    sharding = array.sharding
    # An array of one process, complete on each device: where it is does not matter. An empty one has nothing to hold.
    alike = 0 in shape or (sharding.is_fully_addressable and sharding.is_fully_replicated)
    return shape, array.dtype.itemsize, None if alike else sharding


@lru_cache(maxsize=_TREES)
def _shared_out(kinds: tuple[_Kind | None, ...], size: int) -> Sequence[Shares | None]:
    held = [
        _Held(shape, itemsize, _pattern_of(shape, itemsize, sharding, size))
        for shape, itemsize, sharding in filter(None, kinds)
    ]
    writers, load = _assign(held, size)
    fair = load.sum() / size
    for fineness in _FINENESS:
        if load.max() <= _EVEN * fair + SMALL:
            break
        limit = max(math.ceil(fair / fineness), SMALL)
        held = [each.cut(limit) for each in held]
        writers, load = _assign(held, size)
    found = (Shares(each.shape, each.pattern.counts, own) for each, own in zip(held, writers, strict=True))
    return [None if kind is None else next(found) for kind in kinds]


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """Groups of processes that have no process in common, each of which holds as many cells as any other.

    `holders` are the processes of each group, `cells` the numbers of the cells that all of them hold.
    """

    holders: Numbers
    cells: Numbers


@dataclass(unsafe_hash=True)
class _Pattern:
    """How processes hold an array: the cells of a grid that divides it, and for each cell who holds it.

    Args:
        key: The same for the same pattern, on every process, whatever is in a cache there.
        counts: The number of cells along each axis.
        alone: The process that holds each cell, if it is the only one, otherwise -1.
        group: The number of the processes that hold each cell, if there are several, otherwise -1.
        groups: Those processes, in ascending order.
    """

    key: str
    counts: tuple[int, ...]
    alone: Numbers = field(compare=False)
    group: Numbers = field(compare=False)
    groups: Sequence[Numbers] = field(compare=False)
    _refined: "dict[tuple[int, ...], _Pattern]" = field(
        default_factory=dict[tuple[int, ...], "_Pattern"], compare=False
    )

    @cached_property
    def layers(self) -> Sequence[_Layer]:
        """The cells that several processes hold, so that those of one layer can be dealt out in one step."""
        cells = np.argsort(self.group, kind="stable")
        starts = np.searchsorted(self.group[cells], np.arange(len(self.groups) + 1, dtype=np.int64))
        occupied: dict[int, int] = defaultdict(int)  # by process: the first layer that has none of its groups yet
        layers: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        disjoint = len(self.groups) == 1 or np.bincount(np.concatenate([[0], *self.groups])[1:]).max() == 1
        for number, holders in enumerate(self.groups):
            at = 0 if disjoint else max(occupied[process] for process in holders.tolist())
            for process in () if disjoint else holders.tolist():
                occupied[process] = at + 1
            layers[at, holders.size, int(starts[number + 1] - starts[number])].append(number)
        return [
            _Layer(
                np.stack([self.groups[number] for number in numbers]),
                np.stack([cells[starts[number] : starts[number + 1]] for number in numbers]),
            )
            for _, numbers in sorted(layers.items())
        ]

    @cached_property
    def own(self) -> Writers:
        """The writers, if every cell has a single holder."""
        return Writers(self.alone)

    def refined(self, split: tuple[int, ...]) -> "_Pattern":
        """The same with every cell divided into parts, so many along each axis."""
        if split not in self._refined:
            inside = np.arange(self.alone.size, dtype=np.int64).reshape(self.counts)
            for axis, parts in enumerate(split):
                inside = np.repeat(inside, parts, axis=axis)
            parent = inside.reshape(-1)
            alone, group = self.alone[parent], self.group[parent]
            self._refined[split] = _Pattern(self.key, inside.shape, alone, group, self.groups)
        return self._refined[split]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """An array as the processes hold it."""

    shape: tuple[int, ...]
    itemsize: int
    pattern: _Pattern

    @property
    def nbytes(self) -> int:
        """The bytes of a cell."""
        return math.prod(self.shape) * self.itemsize // max(math.prod(self.pattern.counts), 1)

    def cut(self, limit: int) -> "_Held":
        """The same, with cells of at most `limit` bytes if several processes hold larger ones."""
        if not self.pattern.groups or self.nbytes <= limit:
            return self
        cell = tuple(n // count for n, count in zip(self.shape, self.pattern.counts, strict=True))
        split = tuple(split_counts(cell, self.itemsize, limit))
        return _Held(self.shape, self.itemsize, self.pattern.refined(split))


def _assign(held: Sequence[_Held], size: int) -> tuple[list[Writers], Numbers]:
    """The writers of each array, and the resulting load of each process in bytes.

    Cells that only one process holds come first, then the largest. Each goes to the holder that has the least to write.
    """
    load = np.zeros(size, np.int64)
    alike: dict[tuple[int, _Pattern], list[int]] = defaultdict(list)
    for i, each in enumerate(held):
        alike[each.nbytes, each.pattern].append(i)
    for (nbytes, pattern), numbers in alike.items():
        load += np.bincount(pattern.alone[pattern.alone >= 0], minlength=size) * (nbytes * len(numbers))
    bundle = sum(each.nbytes * each.pattern.alone.size for each in held) // (size * _BUNDLE)
    writers: dict[int, Writers] = {}
    known: dict[bytes, Writers] = {}
    dealt: dict[_Pattern, int] = defaultdict(int)
    for (nbytes, pattern), numbers in sorted(alike.items(), key=lambda item: (-item[0][0], item[1][0])):
        if not pattern.groups:
            writers |= dict.fromkeys(numbers, pattern.own)
            continue
        together = min(max(bundle // max(nbytes, 1), 1), len(numbers)) if pattern.alone.size == 1 else 1
        bundles = -(-len(numbers) // together)
        found = np.repeat(pattern.alone[None], bundles, axis=0)
        for layer in pattern.layers:
            found[:, layer.cells] = _deal(layer, nbytes * together, bundles, dealt[pattern], load)
        dealt[pattern] += bundles
        found = np.repeat(found, together, axis=0)[: len(numbers)]
        if missing := bundles * together - len(numbers):  # the last bundle is not full
            load[found[-1]] -= missing * nbytes
        for i, own in zip(numbers, found, strict=True):
            if (content := own.tobytes()) not in known:
                known[content] = Writers(own.copy())
            writers[i] = known[content]
    return [writers[i] for i in range(len(held))], load


def _deal(layer: _Layer, nbytes: int, arrays: int, before: int, load: Numbers) -> Numbers:
    """The writer of each cell of a layer, for several arrays that are alike: [array, group, cell]. Adds to `load`.

    The result is that of giving one cell after the other to the process of its group that has the least to write. Of
    processes that have the same, the first cell goes to the next one in each array. When all have had their turn, the
    cells change places: they are on the same devices in most arrays, and so a process takes data from all of its
    devices, and not from one.

    Args:
        layer: The groups of processes and their cells.
        nbytes: The bytes of each cell.
        arrays: The number of arrays.
        before: How many arrays with these groups were dealt out before.
        load: What each process writes already, in bytes.
    """
    groups, holders = layer.holders.shape
    cells = layer.cells.shape[1]
    total, weight = arrays * cells, max(nbytes, 1)  # of equal cells without bytes each process gets as many, too
    loads = load[layer.holders]
    counts = _fill(loads, total, weight)
    # Each holder's cells in the order in which it gets them, by what it has to write before each of them.
    flat = counts.reshape(-1)
    member = np.repeat(np.arange(groups * holders, dtype=np.int64), flat)
    nth = np.arange(groups * total, dtype=np.int64) - np.repeat(np.cumsum(flat) - flat, flat)
    order = np.argsort((loads.reshape(-1)[member] + nth * weight).reshape(groups, total), axis=1, kind="stable")
    turns = np.take_along_axis(layer.holders.reshape(-1)[member].reshape(groups, total), order, axis=1)
    load[layer.holders] += counts * nbytes
    numbers = before + np.arange(arrays, dtype=np.int64)
    lap = holders // math.gcd(holders, cells)  # after so many arrays the first cell is at the first holder again
    rank = (np.arange(cells, dtype=np.int64)[None, :] + (numbers // lap)[:, None]) % cells
    return turns[:, np.arange(arrays, dtype=np.int64)[:, None] * cells + rank].transpose(1, 0, 2)


def _fill(loads: Numbers, total: int, weight: int) -> Numbers:
    """How many of `total` cells of one weight each process of a group gets, so that the lowest are filled up first.

    >>> _fill(np.array([[0, 30, 10]]), 3, 10)
    array([[2, 0, 1]])
    """
    ordered = np.sort(loads, axis=1)
    sums = np.cumsum(ordered, axis=1)
    filled = np.arange(1, loads.shape[1] + 1, dtype=np.int64)
    # The level that the lowest n reach if they get everything; it holds for the largest n that is below it.
    levels = (total * weight + sums) // filled
    n = np.sum(levels >= ordered, axis=1) - 1
    level = np.take_along_axis(levels, n[:, None], axis=1)
    counts = np.maximum(level - loads, 0) // weight
    left = total - counts.sum(axis=1)
    rank = np.argsort(np.argsort(loads + counts * weight, axis=1, kind="stable"), axis=1, kind="stable")
    return counts + (rank < left[:, None])


def _pattern_of(shape: tuple[int, ...], itemsize: int, sharding: "Sharding | None", size: int) -> _Pattern:
    """How an array is held. All hold an array that is not sharded over processes."""
    if sharding is None:
        return _everyone(size, (1,) * len(shape))
    pattern, complete = _held_on_mesh(sharding, len(shape)) if _has_axes(sharding) else _held_by(sharding, shape)
    if sharding.is_fully_addressable:
        pattern, complete = _everyone(size, pattern.counts), tuple(range(size))
    if complete and math.prod(shape) * itemsize <= SMALL:
        return _by(complete, (1,) * len(shape))
    return pattern


def _has_axes(sharding: "Sharding") -> "TypeGuard[NamedSharding]":
    """Whether a sharding says for each dimension over which axes of its mesh it is split."""
    import jax  # not at the top: what only reads checkpoints does without

    if not isinstance(sharding, jax.sharding.NamedSharding):
        return False
    return all(isinstance(axes, str | tuple | None) for axes in tuple(sharding.spec))


@lru_cache(maxsize=_PATTERNS)
def held_by(sharding: "Sharding", shape: tuple[int, ...]) -> Sequence[Holding]:
    """The distinct regions of an array of this shape, and the processes that hold each."""
    pattern, _ = _held_on_mesh(sharding, len(shape)) if _has_axes(sharding) else _held_by(sharding, shape)
    grid = Shares(shape, pattern.counts, pattern.own)
    found: list[Holding] = []
    for number, (alone, group) in enumerate(zip(pattern.alone, pattern.group, strict=True)):
        holders = (int(alone),) if alone >= 0 else tuple(int(process) for process in pattern.groups[int(group)])
        found.append((grid.region(number), holders))
    return found


@lru_cache(maxsize=_PATTERNS)
def _everyone(size: int, counts: tuple[int, ...]) -> _Pattern:
    return _by(tuple(range(size)), counts)


@lru_cache(maxsize=_PATTERNS)
def _by(holders: tuple[int, ...], counts: tuple[int, ...]) -> _Pattern:
    """All of these processes hold everything."""
    return _pattern(counts, np.broadcast_to(np.array(holders), (math.prod(counts), len(holders))))


@lru_cache(maxsize=_PATTERNS)
def _held_on_mesh(sharding: "NamedSharding", ndim: int) -> tuple[_Pattern, tuple[int, ...]]:
    """How arrays with a `NamedSharding` are held, and the processes that hold all of them.

    JAX's own list of the devices' slices takes longer to make than everything else here, and depends on the shape.
    """
    mesh, devices = sharding.mesh, sharding.mesh.devices
    assert devices is not None, "arrays that have data are on the devices of a mesh"
    names = list(mesh.axis_names)
    processes = np.array([device.process_index for device in devices.flat]).reshape(devices.shape)
    split: list[list[int]] = []
    for axes in (*sharding.spec, *(None,) * (ndim - len(sharding.spec))):
        split.append([names.index(name) for name in ((axes,) if isinstance(axes, str) else axes or ())])
    used = [axis for axes in split for axis in axes]
    counts = tuple(math.prod(processes.shape[axis] for axis in axes) for axes in split)
    order = [*used, *(axis for axis in range(processes.ndim) if axis not in used)]
    pattern = _pattern(counts, processes.transpose(order).reshape(math.prod(counts), -1))
    return pattern, _complete(pattern)


@lru_cache(maxsize=_PATTERNS)
def _held_by(sharding: "Sharding", shape: tuple[int, ...]) -> tuple[_Pattern, tuple[int, ...]]:
    """The same for arrays with any other sharding."""
    held: dict[tuple[int, ...], list[int]] = defaultdict(list)
    cell = sharding.shard_shape(shape)
    for device, index in sharding.devices_indices_map(shape).items():
        start = Region.from_index(index, shape).start
        held[tuple(a // n for a, n in zip(start, cell, strict=True))].append(device.process_index)
    counts = tuple(n // m for n, m in zip(shape, cell, strict=True))
    rows = [held[index] for index in sorted(held)]
    longest = max(map(len, rows))
    pattern = _pattern(counts, np.array([row + row[:1] * (longest - len(row)) for row in rows]))
    return pattern, _complete(pattern)


def _pattern(counts: tuple[int, ...], held: Numbers) -> _Pattern:
    """The pattern of a grid whose cells are held by these processes: a row for each, in any order, repeated or not."""
    rows = np.sort(held, axis=1)
    alone = np.where(rows[:, 0] == rows[:, -1], rows[:, 0], -1)
    group = np.full(len(rows), -1)
    several = np.flatnonzero(alone < 0)
    groups: list[Numbers] = []
    if several.size:
        again = np.diff(rows[several], axis=1, prepend=-1) == 0
        found, inverse = np.unique(np.sort(np.where(again, -1, rows[several]), axis=1), axis=0, return_inverse=True)
        group[several] = inverse.reshape(-1)
        groups = [row[row >= 0] for row in found]
    return _Pattern(digest(np.ascontiguousarray(rows, np.int64).view(np.uint8).data), counts, alone, group, groups)


def _complete(pattern: _Pattern) -> tuple[int, ...]:
    """The processes that hold every cell."""
    alone = np.unique(pattern.alone[pattern.alone >= 0])
    if alone.size > 1:
        return ()
    common = set(alone.tolist()) or set(pattern.groups[0].tolist())
    for group in pattern.groups:
        common &= set(group.tolist())
    return tuple(sorted(common))
