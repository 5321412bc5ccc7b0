"""Describing the checkpoints of a Checkpointer in the order of their commits, and removing temporary ones."""

import datetime
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.eformer.committing import StepCommits
from shardkeep.foreign.rundirs import parse_time, read_metadata
from shardkeep.stores.location import Location, location


class Clock:
    """Shows what a test says."""

    def __init__(self, now: datetime.datetime) -> None:
        self.now = now

    def __call__(self) -> datetime.datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))


def saved(base: Path, step: int) -> Location:
    shardkeep.save(base / f"run-{step}", {"w": np.full(3, step)})
    return location(base / f"run-{step}")


def names(base: Path) -> list[str]:
    return sorted(path.name for path in base.iterdir())


def test_a_commit_removes_the_temporary_ones_before_it_and_nothing_else(tmp_path: Path, clock: Clock) -> None:
    commits = StepCommits(clock)
    for step, temporary in ((1, False), (2, True), (3, True), (4, False), (5, True)):
        commits.commit(saved(tmp_path, step), step, temporary)
        commits.removals.wait()
    assert names(tmp_path) == ["run-1", "run-4", "run-5"]
    assert read_metadata(location(tmp_path / "run-5"))["is_temporary"] is True


def test_the_same_place_committed_again_is_not_removed(tmp_path: Path, clock: Clock) -> None:
    commits, place = StepCommits(clock), saved(tmp_path, 1)
    for _ in range(2):
        commits.commit(place, 1, True)
        commits.removals.wait()
    assert names(tmp_path) == ["run-1"]


@pytest.mark.parametrize("back", [datetime.timedelta(0), datetime.timedelta(hours=3)])
def test_timestamps_grow_even_if_the_clock_does_not(tmp_path: Path, clock: Clock, back: datetime.timedelta) -> None:
    earlier, commits = StepCommits(clock), StepCommits(clock)
    earlier.commit(saved(tmp_path, 1), 1, False)
    commits.look_for_old(location(tmp_path), removes=True)
    clock.now -= back
    commits.commit(saved(tmp_path, 2), 2, False)
    times = [parse_time(read_metadata(location(tmp_path / f"run-{step}"))["timestamp"]) for step in (1, 2)]
    assert times[0] < times[1]


@pytest.mark.parametrize("removes", [True, False])
def test_what_earlier_programs_have_left_goes_after_the_first_commit_if_asked(
    tmp_path: Path, clock: Clock, removes: bool
) -> None:
    StepCommits(clock).commit(saved(tmp_path, 1), 1, True)
    commits = StepCommits(clock)
    commits.look_for_old(location(tmp_path), removes)
    assert names(tmp_path) == ["run-1"]
    commits.commit(saved(tmp_path, 2), 2, False)
    commits.removals.wait()
    assert names(tmp_path) == (["run-2"] if removes else ["run-1", "run-2"])


def test_describing_alone_removes_nothing(tmp_path: Path, clock: Clock) -> None:
    commits = StepCommits(clock)
    commits.commit(saved(tmp_path, 1), 1, True)
    commits.describe(saved(tmp_path, 2), 2, False)
    commits.removals.wait()
    assert names(tmp_path) == ["run-1", "run-2"]
