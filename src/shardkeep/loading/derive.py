"""Derived arrays: the memory of their regions, and what is read of stored arrays to fill it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import numpy as np

from shardkeep.errors import RemapError
from shardkeep.jaxapi import private_part, transfers_allowed
from shardkeep.loading.blocks import BlockReader
from shardkeep.loading.plan import Destination, Fetch, plan_overlapping
from shardkeep.loading.read import allocate, read_into
from shardkeep.model.arrays import Array, ArraySpec, Region
from shardkeep.model.leaves import NATIVE, StoredArray
from shardkeep.remap.expressions import Called, DerivedArray, result_of, sources_of
from shardkeep.remap.moving import change_into, changed, window_of
from shardkeep.remap.regions import Gap, Part, assembly
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.progress import Progress

Own: TypeAlias = object  # the template's array, of which a derived one may keep a part


@dataclass
class Feeds:
    """What fills derived arrays: parts of stored arrays, and of what functions make of whole arrays."""

    parts: dict[tuple[str, ...], list[tuple[Part, Array]]] = field(
        default_factory=dict[tuple[str, ...], list[tuple[Part, Array]]]
    )
    calls: dict[Called, list[tuple[Part, Array]]] = field(default_factory=dict[Called, list[tuple[Part, Array]]])

    def add(self, destination: Destination, own: Own) -> None:
        """Take in what a derived array is made of. Its memory is there already."""
        assert isinstance(destination.leaf, DerivedArray)
        for region, memory in zip(destination.regions, destination.arrays, strict=True):
            assert memory is not None
            for part in assembly(destination.leaf.expression, region):
                shape = part.shape if isinstance(part, Gap) else part.region.shape
                window = window_of(memory, part.window.offset, shape, part.window.strides)
                if isinstance(part, Gap):
                    _fill(part, window, destination.leaf, region, own)
                elif isinstance(part.source, Called):
                    self.calls.setdefault(part.source, []).append((part, window))
                else:
                    self.parts.setdefault(part.source.path, []).append((part, window))

    def destinations(self, first: int) -> tuple[dict[int, Destination], list[Fetch]]:
        """The stored arrays as what is read, numbered from `first`: each once, whatever it is needed for."""
        destinations: dict[int, Destination] = {}
        fetches: list[Fetch] = []
        for number, parts in enumerate(self.parts.values(), first):
            leaf = parts[0][0].source
            assert isinstance(leaf, StoredArray)
            regions = [part.region for part, _ in parts]
            functions = [part.functions for part, _ in parts] if any(part.functions for part, _ in parts) else ()
            destinations[number] = Destination(
                leaf, regions, True, [window for _, window in parts], functions=functions
            )
            fetches += plan_overlapping(number, leaf, regions)
        return destinations, fetches


def read_derived(
    reader: BlockReader,
    derived: Sequence[tuple[Destination, Own]],
    destinations: Mapping[int, Destination],
    fetches: Sequence[Fetch],
    budget: int,
    crew: Crew,
    progress: Progress,
    claim: Callable[[int], None] | None = None,
) -> None:
    """`read_into`, if some of the destinations are derived arrays. What functions need whole is read last, one by one.

    Args:
        reader: See `read_into`.
        derived: The destinations that are derived arrays, each with the template's own array.
        destinations: All destinations.
        fetches: What is read for those that are not derived.
        budget: See `read_into`.
        crew: See `read_into`.
        progress: See `read_into`.
        claim: See `read_into`.
    """
    allocate([(destination, n) for destination, _ in derived for n in range(len(destination.regions))])
    feeds = Feeds()
    for destination, own in derived:
        feeds.add(destination, own)
    stored, more = feeds.destinations(max(destinations, default=-1) + 1)
    read_into(reader, {**destinations, **stored}, [*fetches, *more], budget, crew, progress, claim)
    for call, places in feeds.calls.items():
        spec = ArraySpec(call.of.shape, call.of.dtype)
        leaf = DerivedArray(sources_of(call.of)[0].path, spec, (), NATIVE, call.of)
        argument = Destination(leaf, [Region.whole(spec.shape)], True, [None])
        read_derived(reader, [(argument, None)], {}, [], budget, crew, progress, claim)
        try:
            result = result_of(call.function, argument.whole, call.shape, call.dtype, call.rule)
        except ValueError as error:
            raise RemapError(str(error)) from error
        del argument
        for part, window in places:
            change_into(window, result[(*part.region.slices, ...)], part.functions)


def _fill(gap: Gap, window: Array, leaf: DerivedArray, region: Region, own: Own) -> None:
    """Fill what no stored array fills."""
    if gap.value is not None:
        window[...] = changed(np.full((1,) * window.ndim, gap.value, gap.dtype), gap.functions, window.dtype)
        return
    kept = np.ascontiguousarray(_region_of(own, region, leaf), leaf.spec.dtype)
    window[...] = window_of(kept, gap.window.offset, gap.shape, gap.window.strides)


def _region_of(own: Own, region: Region, leaf: DerivedArray) -> Array:
    """A region of the template's array, as far as it is on devices of this process."""
    if not isinstance(own, jax.Array):
        return np.asarray(own)[(*region.slices, ...)]
    found: Array = np.empty(region.shape, own.dtype)
    filled: dict[Region, int] = {}  # replicas count once
    with transfers_allowed():
        for shard in own.addressable_shards:
            there = Region.from_index(shard.index, own.shape)
            common = there.intersect(region)
            if common is not None:
                data = np.asarray(private_part(shard.data))
                found[(*common.within(region).slices, ...)] = data[(*common.within(there).slices, ...)]
                filled[common] = common.size
    if sum(filled.values()) < region.size:
        raise RemapError(f"leaf {leaf.key!r}: what the template keeps is not on the devices that load it")
    return found
