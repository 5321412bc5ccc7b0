"""Who writes what of an array, by the cells of a grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.model.arrays import Region, cut, is_partition
from shardkeep.model.shares import Shares, Writers


@st.composite
def shared(draw: st.DrawFn) -> tuple[Shares, list[int]]:
    counts = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    shape = tuple(count * draw(st.integers(1, 5)) for count in counts)
    numbers = draw(st.lists(st.integers(0, 5), min_size=int(np.prod(counts)), max_size=int(np.prod(counts))))
    return Shares(shape, counts, Writers(np.array(numbers))), numbers


@given(shared())
def test_cells_are_numbered_in_c_order(given_: tuple[Shares, list[int]]) -> None:
    shares, numbers = given_
    regions = cut(Region.whole(shares.shape), shares.counts)
    assert is_partition(shares.shape, regions)
    assert list(shares) == list(zip(regions, numbers, strict=True))
    for process in range(6):
        own = [region for region, writer in zip(regions, numbers, strict=True) if writer == process]
        assert list(shares.of(process)) == own
        assert shares.size_of(process) == sum(region.size for region in own)


@given(shared(), st.data())
def test_blocks_by_one_process(given_: tuple[Shares, list[int]], data: st.DataObject) -> None:
    """As if every part and its writer was listed."""
    shares, _ = given_
    split = [data.draw(st.sampled_from([1, 2])) for _ in shares.counts]
    times = [
        data.draw(st.sampled_from([n for n in range(1, count * parts + 1) if count * parts % n == 0]))
        for count, parts in zip(shares.counts, split, strict=True)
    ]
    numbers = shares.writers.numbers.reshape(shares.counts)
    for axis, parts in enumerate(split):
        numbers = np.repeat(numbers, parts, axis=axis)
    blocks: dict[tuple[int, ...], set[int]] = {}
    for index in np.ndindex(*numbers.shape):
        blocks.setdefault(tuple(i // n for i, n in zip(index, times, strict=True)), set()).add(int(numbers[index]))
    assert shares.is_by_one(split, times) == all(len(writers) == 1 for writers in blocks.values())


def test_digests_tell_writers_apart() -> None:
    one, same, other = (Writers(np.array(numbers)) for numbers in ([0, 1, 1], [0, 1, 1], [1, 0, 1]))
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)])
def test_one_process_writes_it_whole(shape: tuple[int, ...]) -> None:
    shares = Shares.whole(shape, 3)
    assert shares.of(3) == (Region.whole(shape),)
    assert shares.of(0) == ()
