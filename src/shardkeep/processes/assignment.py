"""Which process writes what: every byte once, balanced over the processes that hold it, without communication.

Every process computes this for all processes, from the shardings alone, and gets the same result.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkeep.model.arrays import Region, cut, split_counts
from shardkeep.processes.operation import LEADER

if TYPE_CHECKING:
    from jax.sharding import Sharding

SMALL = 1 << 20  # an array up to this size that one process holds completely is stored as one piece
_EVEN = 1.125  # the load is unbalanced if a process has more than this times its fair share
_FINENESS = (1, 2, 4)  # then arrays larger than this fraction of a fair share are cut, tried in this order

Holding = tuple[Region, tuple[int, ...]]  # a region and the processes that hold it
Share = tuple[Region, int]  # a region and the process that writes it


def share_out(arrays: Sequence[Any], size: int, *, gathered: bool) -> list[tuple[Share, ...]]:
    """For each array (None stands for a leaf that is not one), which process writes which region.

    Arrays and their shards are assigned whole. Only if that leaves the processes uneven are those cut that are larger
    than a process's fair share, because a part of a shard has to be cut out on its device first.

    Args:
        arrays: The arrays of a tree.
        size: The number of processes.
        gathered: The leader writes every array, in one piece.
    """
    if gathered:
        return [() if array is None else ((Region.whole(array.shape), LEADER),) for array in arrays]
    itemsizes = [0 if array is None else array.nbytes // max(math.prod(array.shape), 1) for array in arrays]
    holdings: list[Sequence[Holding]] = [[] if array is None else _holdings(array, size) for array in arrays]
    shares, load = _assign(holdings, itemsizes, size)
    fair = sum(load) / size
    for fineness in _FINENESS:
        if max(load) <= _EVEN * fair + SMALL:
            break
        limit = max(math.ceil(fair / fineness), SMALL)
        parts = [_cut(found, itemsize, limit) for found, itemsize in zip(holdings, itemsizes, strict=True)]
        shares, load = _assign(parts, itemsizes, size)
    return shares


def _assign(
    holdings: Sequence[Sequence[Holding]], itemsizes: Sequence[int], size: int
) -> tuple[list[tuple[Share, ...]], list[int]]:
    """A writer for every region, and the resulting load of each process in bytes.

    Regions that only one process holds come first, then the largest. Of processes with the same load, the one writes
    the n-th region of an array that has written the least of n-th regions: they are on the same devices in most arrays,
    and so it takes data from all of its devices, and not from one.
    """
    nbytes = {(i, n): found[n][0].size * itemsizes[i] for i, found in enumerate(holdings) for n in range(len(found))}
    load = [0] * size
    nth: Counter[tuple[int, int]] = Counter()
    writers: dict[tuple[int, int], int] = {}
    for i, n in sorted(nbytes, key=lambda at: (len(holdings[at[0]][at[1]][1]) > 1, -nbytes[at], at)):
        holders = holdings[i][n][1]
        writer = min(holders, key=lambda process, n=n: (load[process], nth[process, n], process))
        writers[i, n] = writer
        load[writer] += nbytes[i, n]
        nth[writer, n] += nbytes[i, n]
    shares = [tuple((region, writers[i, n]) for n, (region, _) in enumerate(found)) for i, found in enumerate(holdings)]
    return shares, load


def _holdings(array: Any, size: int) -> Sequence[Holding]:
    """The regions of an array and the processes that hold them. All hold an array that is not sharded over them."""
    everyone = tuple(range(size))
    shape: tuple[int, ...] = array.shape
    if isinstance(array, np.ndarray) or (array.is_fully_addressable and array.is_fully_replicated) or 0 in shape:
        return [(Region.whole(shape), everyone)]  # an empty array too: there is nothing to hold
    held = held_by(array.sharding, shape)
    if array.is_fully_addressable:
        held = [(region, everyone) for region, _ in held]
    complete = set(held[0][1]).intersection(*(holders for _, holders in held))
    if complete and array.nbytes <= SMALL:
        return [(Region.whole(shape), tuple(sorted(complete)))]
    return held


@lru_cache(maxsize=1024)  # thousands of leaves share a few layouts, each of which may have thousands of devices
def held_by(sharding: "Sharding", shape: tuple[int, ...]) -> Sequence[Holding]:
    """The distinct regions of an array of this shape, and the processes that hold each."""
    held: dict[Region, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        held.setdefault(Region.from_index(index, shape), set()).add(device.process_index)
    return [(region, tuple(sorted(holders))) for region, holders in held.items()]


def _cut(found: Sequence[Holding], itemsize: int, limit: int) -> Sequence[Holding]:
    """Regions of at most `limit` bytes, if several processes hold larger ones: all of an array cut in the same way."""
    if all(len(holders) == 1 for _, holders in found) or found[0][0].size * itemsize <= limit:
        return found
    counts = split_counts(found[0][0].shape, itemsize, limit)
    return [(part, holders) for region, holders in found for part in cut(region, counts)]
