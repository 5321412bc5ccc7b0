"""Steps as values, and the names of their directories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.runs.steps import Step, StepName


@given(st.sampled_from(["step_{}", "{}", "ckpt-{:08d}", "a{{b}}{}c", "{}~x"]), st.integers(0, 10**12))
def test_every_number_is_found_again_in_its_name(pattern: str, number: int) -> None:
    name = StepName(pattern)
    assert name.parse(name.of(number)) == number


def test_other_names_are_no_steps() -> None:
    name = StepName("step_{}")
    others = ("step_", "step_1a", "step_01", "step_-1", "xstep_1", "step_1/", "step_1.tmp", ".shardkeep-run", "step_١")
    assert [name.parse(text) for text in others] == [None] * len(others)


@pytest.mark.parametrize(
    "pattern", ["step", "{}{}", "a/{}", ".{}", "{x}", "{!r:>5}", "{", "{:x}", "{:s}", "{:,}", "\n{}"]
)
def test_patterns_that_do_not_name_directories_of_steps_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="name="):
        StepName(pattern)


def test_the_repr_of_a_step_is_one_short_line() -> None:
    step = Step(1000, "runs/a/step_1000", {"loss": 0.123456789}, state="damaged")
    assert repr(step) == "<Step 1000, damaged, loss=0.123457: runs/a/step_1000>"
