"""What the writer of a run notes about it."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from runs.runs import ONE, new_state, numbers, state_of, trained
from shardkeep import Keep, Run
from shardkeep.errors import CheckpointExistsError, MissingLeafError
from shardkeep.runs.rules import Rules, decode_rules, encode_rules


@pytest.mark.parametrize(
    "keep",
    [
        None,
        Keep(last=3),
        Keep(last=1, every=10, best=2, metric="eval/loss", mode="min", within="12 h"),
    ],
)
def test_rules_come_back_as_they_were_noted(keep: Keep | None) -> None:
    rules = Rules("at-{:04d}", keep)
    assert decode_rules(encode_rules(rules)) == rules


def test_a_timedelta_is_noted_in_seconds() -> None:
    encoded = encode_rules(Rules("step_{}", Keep(within=datetime.timedelta(days=1, microseconds=5))))
    assert encoded["keep"] == {"within": "86400.000005 s"}
    assert decode_rules(encoded) == Rules("step_{}", Keep(within="86400.000005 s"))


@pytest.mark.parametrize(
    "found",
    [None, [], "x", {}, {"name": "step", "keep": None}, {"name": 3, "keep": None}]
    + [{"name": "step_{}", "keep": keep} for keep in ([], {}, {"last": -1}, {"later": 3}, {"last": "3"})],
)
def test_rules_that_make_no_sense_are_not_known(found: object) -> None:
    assert decode_rules(found) is None


BEST = Keep(last=1, best=1, every=20, metric="loss", mode="min")


def by_rules(path: Path) -> None:
    """Leave the steps 10 (the best), 20, 40 and 60 of a run whose rules keep them."""
    with Run(path, save_every=10, keep=BEST) as run:
        run.resume(new_state, shardings=ONE)
        for step in range(10, 61, 10):
            run.step(step, state_of(step), metrics={"loss": step})
    assert numbers(run) == [10, 20, 40, 60]


def recorded(path: Path) -> Any:
    return json.loads((path / ".shardkeep-run/index.json").read_text()).get("rules")


def go_on(path: Path, **arguments: Any) -> list[int]:
    with Run(path, save_every=10, **arguments) as run:
        _, step = run.resume(new_state, shardings=ONE)
        for number in range(step + 10, step + 41, 10):
            run.step(number, state_of(number), metrics={"loss": number})
    return numbers(run)


def test_without_keep_a_run_keeps_by_its_recorded_rules(tmp_path: Path) -> None:
    by_rules(tmp_path)
    before = recorded(tmp_path)
    assert go_on(tmp_path) == [10, 20, 40, 60, 80, 100]
    assert recorded(tmp_path) == before


@pytest.mark.parametrize(
    ("keep", "left"),
    [(Keep(last=3), [80, 90, 100]), (None, [10, 20, 40, 60, 70, 80, 90, 100])],
)
def test_keep_that_is_passed_takes_precedence_and_is_recorded(
    tmp_path: Path, keep: Keep | None, left: list[int]
) -> None:
    by_rules(tmp_path)
    assert go_on(tmp_path, keep=keep) == left
    assert recorded(tmp_path) == encode_rules(Rules("step_{}", keep))


def test_a_new_run_keeps_the_last_three_and_records_that(tmp_path: Path) -> None:
    assert go_on(tmp_path) == [20, 30, 40]
    assert recorded(tmp_path) == encode_rules(Rules("step_{}", Keep(last=3)))


def test_a_reader_goes_by_the_recorded_rules(tmp_path: Path) -> None:
    by_rules(tmp_path)
    run = Run(tmp_path)
    best = run.best()
    assert best is not None
    assert best.number == 10
    assert {step.number: step.kept for step in run.steps()} == {
        10: ("best",),
        20: ("every",),
        40: ("every",),
        60: ("newest", "last", "every"),
    }
    assert "keeps what its recorded rules say" in repr(run)
    with pytest.raises(ValueError, match="which metric"):
        Run(tmp_path, keep=Keep(last=3)).best()
    trained(tmp_path / "other", [1])
    with pytest.raises(ValueError, match="which metric"):
        Run(tmp_path / "other").best()


def test_a_call_that_fails_changes_no_recorded_rules(tmp_path: Path) -> None:
    by_rules(tmp_path)
    before = recorded(tmp_path)
    with Run(tmp_path, keep=Keep(last=1)) as run:
        with pytest.raises(MissingLeafError, match="other"):
            run.resume(lambda: {"other": new_state()["w"]}, shardings=ONE)
        with pytest.raises(CheckpointExistsError, match="without resuming"):
            run.save(5, state_of(5))
        run.delete(20)
    assert recorded(tmp_path) == before
    assert numbers(run) == [10, 40, 60]


def test_rules_that_are_lost_while_a_run_is_written_still_hold(tmp_path: Path) -> None:
    by_rules(tmp_path)
    with Run(tmp_path, save_every=10) as run:
        run.resume(new_state, shardings=ONE)
        (tmp_path / ".shardkeep-run/index.json").unlink()
        run.save(70, state_of(70), metrics={"loss": 70}).wait()
    assert numbers(run) == [10, 20, 40, 60, 70]
    assert recorded(tmp_path) == encode_rules(Rules("step_{}", BEST))


@pytest.mark.parametrize("index", ["{", '{"version": 1, "rules": {"name": "step_{}", "keep": {"later": 3}}}'])
def test_recorded_rules_that_cannot_be_understood_delete_nothing(tmp_path: Path, index: str) -> None:
    by_rules(tmp_path)
    (tmp_path / ".shardkeep-run/index.json").write_text(index)
    assert go_on(tmp_path) == [10, 20, 40, 60, 70, 80, 90, 100]


def test_a_run_without_recorded_rules_keeps_the_last_three(tmp_path: Path) -> None:
    by_rules(tmp_path)
    (tmp_path / ".shardkeep-run/index.json").unlink()
    assert go_on(tmp_path) == [80, 90, 100]
