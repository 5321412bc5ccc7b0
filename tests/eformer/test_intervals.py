"""At which steps permanent checkpoints are due."""

import pytest

from shardkeep.eformer.intervals import CheckpointInterval, check_policies, is_due


def due(policies: list[CheckpointInterval], last: int) -> list[int]:
    return [step for step in range(last + 1) if is_due(policies, step)]


def test_each_interval_ends_with_its_until_and_the_next_one_begins() -> None:
    policies = [CheckpointInterval(3, until=9), CheckpointInterval(5, until=20), CheckpointInterval(50)]
    assert due(policies, 100)[1:] == [3, 6, 9, 10, 15, 20, 50, 100]


def test_after_the_last_until_nothing_is_due_and_without_policies_nothing_ever() -> None:
    assert due([CheckpointInterval(2, until=4)], 20)[1:] == [2, 4]
    assert due([], 20) == []


@pytest.mark.parametrize("every", [0, -1])
def test_an_interval_is_at_least_one_step(every: int) -> None:
    with pytest.raises(ValueError, match="every must be at least 1"):
        CheckpointInterval(every)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([CheckpointInterval(1), CheckpointInterval(1, until=5)], "only the last .* an 'until' of None"),
        ([CheckpointInterval(1, until=5), CheckpointInterval(1, until=5)], r"sorted by 'until'.*\[5, 5\]"),
        ([CheckpointInterval(1, until=9), CheckpointInterval(1, until=5)], r"sorted by 'until'.*\[9, 5\]"),
    ],
)
def test_policies_out_of_order_are_refused(policies: list[CheckpointInterval], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_policies(policies)


def test_policies_in_order_and_none_at_all_are_accepted() -> None:
    check_policies([])
    check_policies([CheckpointInterval(1, until=5), CheckpointInterval(2)])
