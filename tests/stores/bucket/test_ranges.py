"""Which ranges of an object are fetched together."""

from shardkeep.stores.bucket.ranges import merged


def test_ranges_that_lie_close_are_fetched_together() -> None:
    kib = 1 << 10
    assert merged([(0, 10), (20, 10), (1 << 30, 5)]) == [(0, 30), (1 << 30, (1 << 30) + 5)]
    assert merged([(100 * kib, 10), (0, 10)]) == [(0, 10), (100 * kib, 100 * kib + 10)]
    assert merged([(0, 50), (10, 20)]) == [(0, 50)]
    assert merged([(5, 40 << 20)]) == [
        (5, 5 + (16 << 20)),
        (5 + (16 << 20), 5 + (32 << 20)),
        (5 + (32 << 20), 5 + (40 << 20)),
    ]
    assert merged([]) == []
