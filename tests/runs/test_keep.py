"""Which steps stay: facts of each rule, and properties of all of them together."""

import datetime
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.runs.keep import Keep, choose_steps, rank_steps
from shardkeep.runs.steps import Step

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def made(number: int, state: Any = "usable", minutes: float = 0, **metrics: float) -> Step:
    return Step(number, f"run/step_{number}", metrics, {}, NOW - datetime.timedelta(minutes=minutes), 1, state=state)


def kept(keep: Keep, steps: list[Step]) -> list[int]:
    return sorted(choose_steps(keep, steps, NOW))


def test_last_keeps_the_highest_numbers() -> None:
    assert kept(Keep(last=2), [made(n) for n in (5, 30, 10, 20)]) == [20, 30]


def test_every_keeps_the_first_step_at_or_past_each_multiple() -> None:
    steps = [made(n) for n in (0, 8, 96, 104, 112, 200, 208, 304)]
    assert kept(Keep(every=100), steps) == [104, 200, 304]


def test_every_never_keeps_what_comes_before_the_first_multiple() -> None:
    assert kept(Keep(every=100), [made(0), made(8), made(120), made(130)]) == [120, 130]  # 130 is the newest


def test_best_keeps_the_smallest_or_the_largest() -> None:
    steps = [made(n, loss=value) for n, value in enumerate([3.0, 1.0, 2.0, 5.0, 4.0])]
    assert kept(Keep(best=2, metric="loss", mode="min"), steps) == [1, 2, 4]
    assert kept(Keep(best=2, metric="loss", mode="max"), steps) == [3, 4]


def test_nan_is_never_best_and_infinity_may_be() -> None:
    steps = [made(1, loss=math.nan), made(2, loss=math.inf), made(3, loss=math.nan)]
    assert choose_steps(Keep(best=1, metric="loss", mode="min"), steps, NOW) == {2: ("best",), 3: ("newest",)}


def test_steps_await_their_metric_until_enough_newer_ones_have_it() -> None:
    keep = Keep(best=1, metric="loss", mode="min")
    assert kept(keep, [made(1), made(2), made(3)]) == [1, 2, 3]
    assert choose_steps(keep, [made(1), made(2, loss=1.0), made(3)], NOW) == {
        2: ("best",),
        3: ("newest", "awaiting metric"),
    }


def test_steps_that_await_their_metric_are_not_given_up_for_newer_ones_that_are_nan() -> None:
    keep = Keep(best=1, metric="loss", mode="min")
    assert kept(keep, [made(1), made(2, loss=math.nan), made(3, loss=math.nan)]) == [1, 3]


def test_within_keeps_young_steps() -> None:
    steps = [made(n, minutes=minutes) for n, minutes in ((1, 200), (2, 119), (3, 10), (4, 0))]
    assert kept(Keep(within="2 h"), steps) == [2, 3, 4]
    assert kept(Keep(within=datetime.timedelta(minutes=30)), steps) == [3, 4]


def test_damaged_and_abandoned_steps_neither_count_nor_stay() -> None:
    steps = [made(1), made(2), made(3, "damaged"), made(4, "abandoned"), made(5, "deleting")]
    assert kept(Keep(last=1), steps) == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no rule"),
        ({"metric": "loss", "mode": "min"}, "no rule"),
        ({"last": 0}, "last=0 must be greater than 0"),
        ({"every": -1}, "every=-1 must be greater than 0"),
        ({"best": -2, "metric": "a", "mode": "min"}, "best=-2 must be greater than 0"),
        ({"last": 1.5}, "last=1.5 is not a number of steps"),
        ({"last": True}, "last=True is not a number of steps"),
        ({"best": 1}, "best needs metric= and mode="),
        ({"best": 1, "metric": "a"}, "best needs metric= and mode="),
        ({"last": 1, "metric": "a"}, "belong together"),
        ({"best": 1, "metric": "a", "mode": "lowest"}, "mode='lowest' is unknown"),
        ({"best": 1, "metric": 3, "mode": "min"}, "not the name of a metric"),
        ({"within": "soon"}, "within='soon' is not a duration"),
        ({"within": datetime.timedelta(0)}, "greater than 0"),
    ],
)
def test_bad_rules_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Keep(**arguments)


VALUES = st.none() | st.floats()
STEPS = st.lists(
    st.tuples(
        st.integers(0, 300), VALUES, st.integers(0, 500), st.sampled_from(["usable"] * 4 + ["damaged", "abandoned"])
    ),
    unique_by=lambda row: row[0],
    max_size=25,
).map(
    lambda rows: [
        made(number, state, minutes, **({} if loss is None else {"loss": loss}))
        for number, loss, minutes, state in rows
    ]
)
COUNT = st.none() | st.integers(1, 6)


@st.composite
def rules(draw: st.DrawFn) -> Keep:
    arguments: dict[str, Any] = {"last": draw(COUNT), "every": draw(st.none() | st.integers(1, 120))}
    arguments["within"] = draw(st.none() | st.just("3 h"))
    if draw(st.booleans()):
        arguments |= {"best": draw(st.integers(1, 5)), "metric": "loss", "mode": draw(st.sampled_from(["min", "max"]))}
    if all(value is None for value in arguments.values()):
        arguments["last"] = 1
    return Keep(**arguments)


@given(rules(), STEPS)
def test_the_newest_usable_step_is_always_kept_and_only_usable_ones_are(keep: Keep, steps: list[Step]) -> None:
    why = choose_steps(keep, steps, NOW)
    usable = {step.number for step in steps if step.is_usable}
    assert set(why) <= usable
    assert not usable or max(usable) in why
    assert all(why.values())


@given(rules(), STEPS, st.randoms())
def test_the_order_of_the_steps_does_not_matter(keep: Keep, steps: list[Step], random: Any) -> None:
    shuffled = steps[:]
    random.shuffle(shuffled)
    assert choose_steps(keep, shuffled, NOW) == choose_steps(keep, steps, NOW)


@given(rules(), STEPS)
def test_once_what_is_not_kept_is_deleted_nothing_more_is(keep: Keep, steps: list[Step]) -> None:
    why = choose_steps(keep, steps, NOW)
    rest = [step for step in steps if step.number in why or not step.is_usable]
    assert choose_steps(keep, rest, NOW).keys() == why.keys()


@given(rules(), rules(), STEPS)
def test_a_step_is_kept_by_two_sets_of_rules_if_one_of_them_keeps_it(a: Keep, b: Keep, steps: list[Step]) -> None:
    """Rules only add: joining those of `b` that do not speak of the same thing never loses a step of `a`."""
    joined = Keep(
        last=max(a.last or 0, b.last or 0) or None,
        every=a.every or b.every,
        best=a.best,
        metric=a.metric,
        mode=a.mode,
        within=a.within or b.within,
    )
    assert set(choose_steps(a, steps, NOW)) <= set(choose_steps(joined, steps, NOW))


@given(STEPS, st.integers(1, 5), st.sampled_from(["min", "max"]))
def test_no_step_that_is_not_kept_is_better_than_one_that_is(steps: list[Step], best: int, mode: Any) -> None:
    keep = Keep(best=best, metric="loss", mode=mode)
    why = choose_steps(keep, steps, NOW)
    chosen = [step.metrics["loss"] for step in steps if "best" in why.get(step.number, ())]
    others = [s.metrics["loss"] for s in steps if s.is_usable and "loss" in s.metrics and s.number not in why]
    others = [value for value in others if not math.isnan(value)]
    assert len(chosen) == min(best, len(rank_steps(keep, steps)))
    for value in others:
        assert all(good <= value if mode == "min" else good >= value for good in chosen)


def is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


@given(STEPS, st.integers(1, 5))
def test_a_step_that_awaits_its_metric_is_kept_while_it_could_still_be_among_the_best(
    steps: list[Step], best: int
) -> None:
    why = choose_steps(Keep(best=best, metric="loss", mode="min"), steps, NOW)
    for step in steps:
        if step.is_usable and "loss" not in step.metrics:
            newer = sum(s.is_usable and s.number > step.number and is_number(s.metrics.get("loss")) for s in steps)
            assert ("awaiting metric" in why.get(step.number, ())) == (newer < best)
