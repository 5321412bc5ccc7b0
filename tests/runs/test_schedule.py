"""When a run saves: what `save_every` takes, and which steps are due."""

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.runs.schedule import Schedule

FORMS = r'save_every takes a number of steps \(1000\), a time \("90 s", "15 min", "2 h" or a datetime.timedelta\), or a'


@pytest.mark.parametrize(
    ("save_every", "steps", "seconds"),
    [
        (None, None, None),
        (1, 1, None),
        (np.int64(1000), 1000, None),
        ("90 s", None, 90.0),
        ("15 min", None, 900.0),
        ("15min", None, 900.0),
        ("1.5 hours", None, 5400.0),
        (timedelta(minutes=2), None, 120.0),
        ((1000, "15 min"), 1000, 900.0),
        (("2 h", 10), 10, 7200.0),
    ],
)
def test_steps_times_and_tuples_of_both_are_taken(save_every: Any, steps: int | None, seconds: float | None) -> None:
    schedule = Schedule(save_every)
    assert (schedule.steps, schedule.seconds) == (steps, seconds)


@pytest.mark.parametrize(
    "save_every",
    [0, -5, "", "15", "min", "15 lightyears", "-1 s", "0 s", "1:30:00", timedelta(0), (1, 2), ("1 s", "2 s"), (), (5,)],
)
def test_what_cannot_be_meant_is_an_error_that_shows_the_forms(save_every: Any) -> None:
    with pytest.raises(ValueError, match=FORMS):
        Schedule(save_every)


@pytest.mark.parametrize("save_every", [True, 1000.0, [1000], {"steps": 5}, (1000, None), (1000, 2.5)])
def test_other_types_are_an_error_that_shows_the_forms(save_every: Any) -> None:
    with pytest.raises(TypeError, match=FORMS):
        Schedule(save_every)


@given(
    every=st.integers(1, 50),
    start=st.integers(0, 200),
    increments=st.lists(st.integers(1, 120), max_size=40),
    asked=st.lists(st.integers(0, 5000), max_size=10),
)
def test_the_first_step_at_or_past_each_multiple_is_due(
    every: int, start: int, increments: list[int], asked: list[int]
) -> None:
    """For any increments, and whatever else a process asks; asking again gives the same answer."""
    schedule = Schedule(every)
    schedule.resumed(start)
    steps = [start + sum(increments[: n + 1]) for n in range(len(increments))]
    expected = {
        next((step for step in steps if step >= multiple), None)
        for multiple in range(every, steps[-1] + 1 if steps else 0, every)
        if multiple > start
    }
    due: list[int] = []
    for step in steps:
        before = schedule.is_due(step)
        for other in asked:
            schedule.is_due(other)
        assert schedule.is_due(step) == before
        assert schedule.passed(step) == before
        due += [step] if before else []
    assert set(due) == expected - {None}
    assert [step for step in steps if schedule.is_due(step)] == due
    assert [step for step in steps if schedule.passed(step)] == due


def test_step_0_and_steps_up_to_the_resumed_one_are_never_due() -> None:
    schedule = Schedule(100)
    assert not schedule.passed(0)
    schedule.resumed(250)
    assert [step for step in (0, 100, 200, 250, 299) if schedule.is_due(step)] == []
    assert schedule.is_due(300)


def test_a_roll_back_makes_later_multiples_due_again() -> None:
    schedule = Schedule(10)
    assert schedule.passed(10)
    assert schedule.passed(20)
    schedule.resumed(10)
    assert [step for step in range(31) if schedule.passed(step)] == [20, 30]


def test_time_counts_from_the_first_question_and_from_every_save() -> None:
    schedule = Schedule(("1 min", 7))
    assert not schedule.due_by_time(1000.0)
    assert not schedule.due_by_time(1059.9)
    assert schedule.due_by_time(1060.0)
    assert schedule.due_by_time(1061.0), "until it was saved"
    schedule.restart_time(1061.0)
    assert not schedule.due_by_time(1120.0)
    assert schedule.due_by_time(1121.0)


def test_without_a_time_none_is_ever_over() -> None:
    assert not any(Schedule(5).due_by_time(now) for now in (0.0, 1e9))


def test_without_a_number_no_step_is_due() -> None:
    assert not any(Schedule(every).passed(step) for every in (None, "1 s") for step in range(100))
