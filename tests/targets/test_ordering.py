"""Which checkpoint is the newest, and how few manifests are read to find it out."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.targets.ordering import LOOKED_AT, Saved, newest_first


def order(checkpoints: dict[str, Saved | None]) -> tuple[list[str], list[str]]:
    """The names from the newest to the oldest, and those that were read."""
    read: list[str] = []

    def look(names: Sequence[str]) -> dict[str, Saved | None]:
        read.extend(names)
        return {name: checkpoints[name] for name in names}

    found = list(newest_first({name: name for name in checkpoints}, look))
    assert len(read) == len(set(read)), "nothing is read twice"
    return found, read


def at(*names: str, step: dict[str, int] | None = None) -> dict[str, Saved | None]:
    """Checkpoints saved one after another, some with a recorded step."""
    return {name: Saved((step or {}).get(name), float(time)) for time, name in enumerate(names)}


@pytest.mark.parametrize(
    "saved",
    [
        ("step_9", "step_10", "step_100"),
        ("step_0009", "step_0010", "step_0100"),
        ("1", "2", "10"),
        ("model-1-ema", "model-2-ema", "model-10-ema"),
        ("run.1", "run.2", "run.10"),
        ("2026-11-17_eval_3", "2026-11-17_eval_20"),
    ],
)
def test_the_last_number_orders_names_that_differ_in_nothing_else(saved: tuple[str, ...]) -> None:
    for seed in range(5):
        mixed = random.Random(seed).sample(saved, len(saved))  # whenever they were saved
        assert order(at(*mixed))[0] == list(reversed(saved))


@pytest.mark.parametrize(
    "saved",
    [
        ("ckpt-0.25-step10", "ckpt-0.19-step20"),
        ("ckpt-0.19-step20", "ckpt-0.25-step10"),
        ("2026-11-17_eval_3", "step_100"),
        ("step_100", "2026-11-17_eval_3"),
        ("epoch_2_step_5", "epoch_1_step_9"),
        ("best", "step_1"),
        ("step_1", "best"),
        ("ckpt-0.9", "ckpt-0.10"),
        ("v1.10", "v1.9"),
        ("2026.11.17", "2026.11.2"),
        ("lr1e-5", "lr1e-4"),
        ("b", "a"),
    ],
)
def test_otherwise_the_time_of_the_save_decides(saved: tuple[str, ...]) -> None:
    """Also where the last number is a part of a fraction, a version or a date."""
    assert order(at(*saved))[0] == list(reversed(saved))


def test_recorded_steps_come_before_names_and_times() -> None:
    """Slots that are overwritten in turn."""
    step = {"slot_0": 500, "slot_1": 400}
    assert order(at("slot_0", "slot_1", step=step))[0] == ["slot_0", "slot_1"]
    step = {"slot_0": 2, "slot_1": 1}  # though the name of one is its step by chance
    assert order(at("slot_0", "slot_1", step=step))[0] == ["slot_0", "slot_1"]
    step = {"good": 30, "better": 20, "best-0.1": 10}
    assert order(at("good", "better", "best-0.1", step=step))[0] == ["good", "better", "best-0.1"]


def test_a_number_that_is_the_recorded_step_is_the_step_in_all_such_names() -> None:
    """A run that begins to record steps: names of the same shape need not have one."""
    saved = at("ckpt-0.1-step30", "ckpt-0.3-step20", "ckpt-0.2-step10", step={"ckpt-0.3-step20": 20})
    assert order(saved)[0] == ["ckpt-0.1-step30", "ckpt-0.3-step20", "ckpt-0.2-step10"]


def test_between_groups_the_time_decides() -> None:
    """One group has steps, one has numbers, one has neither; within them nothing changes."""
    times = {"best": 4.5, "eval_1": 5.0, "eval_2": 4.0, "step_1": 6.0, "step_2": 3.0}
    saved = {n: Saved(int(n[-1]) if n.startswith("step") else None, time) for n, time in times.items()}
    assert order(dict(saved))[0] == ["best", "eval_2", "eval_1", "step_2", "step_1"]


def test_equal_numbers_go_by_time_and_then_by_name() -> None:
    assert order(at("step_01", "step_1"))[0] == ["step_1", "step_01"]
    assert order(at("step_1", "step_01"))[0] == ["step_01", "step_1"]
    assert order(at("a", "b", step={"a": 7, "b": 7}))[0] == ["b", "a"]
    assert order({"x9": Saved(), "y10": Saved(), "y9": Saved()})[0] == ["y10", "y9", "x9"]


def test_what_is_not_a_checkpoint_has_no_say() -> None:
    saved = {**at("step_1", "step_2"), "step_3": None, "logs_999": None, "notes": None}
    assert [name for name in order(saved)[0] if saved[name] is not None] == ["step_2", "step_1"]


class TestReads:
    """How many manifests are read."""

    def test_of_a_long_run_three(self) -> None:
        found, read = order(at(*(f"step_{i}" for i in range(1000))))
        assert (found[0], found[-1], read) == ("step_999", "step_0", ["step_999", "step_998", "step_997"])

    def test_of_a_long_run_with_recorded_steps_three(self) -> None:
        names = [f"ckpt-{i % 97 / 100}-step{i}" for i in range(1000)]
        saved = at(*names, step={name: i for i, name in enumerate(names)})
        found, read = order(saved)
        assert found == names[::-1]
        assert len(read) == LOOKED_AT

    def test_all_where_a_recorded_step_contradicts_its_name(self) -> None:
        names = [f"slot_{i}" for i in range(100)]
        found, read = order(at(*names, step={name: (i * 37) % 100 + 5000 for i, name in enumerate(names)}))
        assert (found[0], len(read)) == ("slot_27", 100)

    def test_all_where_only_times_can_decide(self) -> None:
        names = [f"loss-0.{i}" for i in range(100)]
        found, read = order(at(*names))
        assert (found, len(read)) == (names[::-1], 100)

    def test_of_each_group_three(self) -> None:
        names = [f"{family}_{i}" for i in range(100) for family in ("step", "eval")]
        count = _Count()
        assert next(newest_first({name: name for name in names}, count)) == "step_99"
        assert len(count.names) == 2 * LOOKED_AT


class _Count:
    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, names: Sequence[str]) -> dict[str, Saved | None]:
        self.names += names
        return {name: Saved() for name in names}


@given(
    st.dictionaries(
        st.from_regex(r"(a|b)(_[0-9]{1,2}){0,2}(\.[0-9])?", fullmatch=True),
        st.none() | st.builds(Saved, st.none() | st.integers(0, 20), st.integers(0, 5).map(float)),
        max_size=12,
    ),
    st.randoms(),
)
def test_the_order_is_total_and_does_not_depend_on_how_names_are_listed(
    checkpoints: dict[str, Saved | None], randomness: random.Random
) -> None:
    found, _ = order(checkpoints)
    listed = list(checkpoints)
    randomness.shuffle(listed)
    again, _ = order({name: checkpoints[name] for name in listed})
    real = {name for name, saved in checkpoints.items() if saved is not None}
    assert [name for name in found if name in real] == [name for name in again if name in real]
    assert sorted(name for name in found if name in real) == sorted(real)
    assert len(found) == len(set(found))
