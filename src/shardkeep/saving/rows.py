"""`PerProcess` leaves in a snapshot: plain bytes, until it is known how many the other processes have."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np

from shardkeep.layouts.plan import StagedArray, StagedLeaf
from shardkeep.model.arrays import Array, ArraySpec, Region
from shardkeep.model.perprocess import UNSETTLED, PerProcessRows, encode_value
from shardkeep.model.shares import Shares
from shardkeep.model.tree import Leaf
from shardkeep.processes.collectives import gather_bytes, gather_lengths
from shardkeep.processes.operation import LEADER
from shardkeep.runtime.hostmemory import Shard
from shardkeep.saving.transfer import AnyShard


def stage_value(leaf: Leaf, shards: list[AnyShard]) -> StagedArray:
    """A `PerProcess` leaf as plain bytes: where they go depends on how many the other processes have."""
    raw = encode_value(leaf.value.value)
    shards.append(Shard(raw, stable=True, private=True))
    whole = Region.whole(raw.shape)
    spec = ArraySpec(raw.shape, raw.dtype)
    return StagedArray(leaf.path, spec, UNSETTLED, held=(whole,), first_held=len(shards) - 1, common=True)


def in_rows(leaf: StagedArray, shards: list[AnyShard], rows: PerProcessRows, index: int) -> StagedArray:
    """A staged `PerProcess` leaf among the rows of all processes."""
    shards[leaf.first_held] = Shard(rows.fill(index, shards[leaf.first_held].data), stable=True, private=True)
    shares = rows.shares if len(rows.lengths) > 1 else None
    return replace(leaf, spec=rows.spec, origin=rows, held=(rows.region(index),), shares=shares)


def unsettled_lengths(leaves: Sequence[StagedLeaf]) -> list[int]:
    """How many bytes this process has of each `PerProcess` leaf that still needs those of the others."""
    return [leaf.spec.nbytes for leaf in leaves if _is_unsettled(leaf)]


def settle_rows(
    leaves: Sequence[StagedLeaf], shards: list[AnyShard], lengths: Sequence[Sequence[int]], index: int
) -> list[StagedLeaf]:
    """The leaves, and in `shards` their data, with every `PerProcess` leaf in its place.

    Args:
        leaves: The leaves of a snapshot.
        shards: Its shards.
        lengths: For each process, how many bytes it has of each `PerProcess` leaf.
        index: The index of this process.
    """
    by_leaf = iter(zip(*lengths, strict=True))
    return [
        in_rows(leaf, shards, PerProcessRows.of(next(by_leaf)), index) if _is_unsettled(leaf) else leaf
        for leaf in leaves
    ]


def _is_unsettled(leaf: StagedLeaf) -> TypeGuard[StagedArray]:
    return isinstance(leaf, StagedArray) and leaf.origin is UNSETTLED


def gather_value(leaf: Leaf, shards: list[AnyShard], index: int) -> StagedArray:
    """The values of a `PerProcess` leaf of all processes, in the memory of the leader; all of them call this."""
    raw = encode_value(leaf.value.value)
    rows = PerProcessRows.of(gather_lengths(raw.size))
    filled: Array = np.zeros(rows.shape if index == LEADER else (0, 0), np.uint8)
    for process, value in enumerate(gather_bytes(raw, rows.lengths, leader_only=True)):
        filled[rows.region(process).slices].reshape(-1)[: value.size] = value
    whole = Region.whole(rows.shape)
    held: tuple[Region, ...] = ()
    if index == LEADER:
        shards.append(Shard(filled, stable=True, private=True))
        held = (whole,)
    first = max(len(shards) - 1, 0)
    return StagedArray(leaf.path, rows.spec, rows, held, first, shares=Shares.whole(rows.shape, LEADER), common=True)
