"""Which process writes what: every byte once, spread evenly over the processes that hold it, nothing sent around.

Every process works this out for all of them, from the shardings alone, and comes to the same result.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardkeep.arrays import Region, cut, split_counts
from shardkeep.processes import LEADER

SMALL = 1 << 20  # an array up to this size is stored whole where one process holds all of it: fewer, larger pieces
_EVEN = 1.125  # with more than this times its fair share, a process has too much
_FINENESS = (1, 4)  # parts for each process that an array is cut into then: as few as will do

Holding = tuple[Region, tuple[int, ...]]  # a region and the processes that hold it
Share = tuple[Region, int]  # a region and the process that writes it


def share_out(arrays: Sequence[Any], size: int, *, gathered: bool) -> list[tuple[Share, ...]]:
    """For each array what is written by whom. None stays for no array; `gathered`: the leader gets every one whole."""
    if gathered:
        return [() if array is None else ((Region.whole(array.shape), LEADER),) for array in arrays]
    itemsizes = [0 if array is None else array.nbytes // max(math.prod(array.shape), 1) for array in arrays]
    holdings = [[] if array is None else _holdings(array, size) for array in arrays]
    shares, load = _assign(holdings, itemsizes, size)
    for fineness in _FINENESS:
        if max(load) <= _EVEN * sum(load) / size + SMALL:
            break
        parts = [_cut(found, itemsize, fineness) for found, itemsize in zip(holdings, itemsizes, strict=True)]
        shares, load = _assign(parts, itemsizes, size)
    return shares


def _assign(
    holdings: Sequence[Sequence[Holding]], itemsizes: Sequence[int], size: int
) -> tuple[list[tuple[Share, ...]], list[int]]:
    """A writer for every region, and the bytes each process has then: what only one holds first, then the largest."""
    nbytes = {(i, n): found[n][0].size * itemsizes[i] for i, found in enumerate(holdings) for n in range(len(found))}
    load = [0] * size
    writers: dict[tuple[int, int], int] = {}
    for i, n in sorted(nbytes, key=lambda at: (len(holdings[at[0]][at[1]][1]) > 1, -nbytes[at], at)):
        holders = holdings[i][n][1]
        writers[i, n] = min(holders, key=lambda process: (load[process], process))
        load[writers[i, n]] += nbytes[i, n]
    shares = [tuple((region, writers[i, n]) for n, (region, _) in enumerate(found)) for i, found in enumerate(holdings)]
    return shares, load


def _holdings(array: Any, size: int) -> Sequence[Holding]:
    """The regions of an array and who holds them. What is not spread over processes every process has, equal."""
    everyone = tuple(range(size))
    if isinstance(array, np.ndarray) or (array.is_fully_addressable and array.is_fully_replicated) or 0 in array.shape:
        return [(Region.whole(array.shape), everyone)]  # of what is empty too: there is nothing to be held
    held = _held_by(array.sharding, array.shape)
    if array.is_fully_addressable:
        held = [(region, everyone) for region, _ in held]
    complete = set(held[0][1]).intersection(*(holders for _, holders in held))
    if complete and array.nbytes <= SMALL:
        return [(Region.whole(array.shape), tuple(sorted(complete)))]
    return held


@lru_cache(maxsize=1024)  # thousands of leaves have a few layouts, each of which may name thousands of devices
def _held_by(sharding: Any, shape: tuple[int, ...]) -> Sequence[Holding]:
    held: dict[Region, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        held.setdefault(Region.from_index(index, shape), set()).add(device.process_index)
    return [(region, tuple(sorted(holders))) for region, holders in held.items()]


def _cut(found: Sequence[Holding], itemsize: int, fineness: int = 1) -> Sequence[Holding]:
    """Regions that several processes hold, all cut alike, so many parts for each: their writing can be spread."""
    most = max((len(holders) for _, holders in found), default=1)
    if most == 1:
        return found
    nbytes = found[0][0].size * itemsize
    counts = split_counts(found[0][0].shape, itemsize, max(-(-nbytes // (most * fineness)), SMALL))
    return [(part, holders) for region, holders in found for part in cut(region, counts)]
