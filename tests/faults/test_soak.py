"""A training that is killed, stopped and damaged resumes bit for bit: a short form of `make soak`."""

from pathlib import Path

from faults.soak import soak
from faults.spawner import Spawner


def test_a_training_that_is_disturbed_again_and_again_loses_nothing_but_the_last_interval(tmp_path: Path) -> None:
    with Spawner("faults.training") as spawner:
        counts = soak(tmp_path, spawner, rounds=20, seed=4)
    assert counts.problems == []
    assert counts.killed > 5
    assert counts.stopped > 2
    assert counts.damaged > 2
    assert counts.evaluated > 0
