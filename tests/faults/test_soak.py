"""A training that is killed, stopped and damaged resumes bit for bit: a short form of `make soak`."""

import random
from pathlib import Path

from faults.soak import Disturbance, Saves, disturbances, soak
from faults.spawner import Spawner
from faults.training import EVERY

_SHORT = (
    Disturbance(steps=22),
    Disturbance(steps=8, pause=0.02, damages=True),
    Disturbance(steps=7, stops=True),
    Disturbance(early=0.3, evaluator_dies=True),
    Disturbance(steps=13, stops=True, damages=True),
    Disturbance(steps=9, pause=0.02),
    Disturbance(steps=1),
)


def test_a_training_that_is_disturbed_again_and_again_loses_nothing_but_the_last_interval(tmp_path: Path) -> None:
    with Spawner("faults.training") as spawner:
        counts = soak(tmp_path, spawner, _SHORT, 1000)
    assert counts.problems == []
    assert (counts.killed, counts.killed_early, counts.stopped, counts.damaged) == (5, 1, 2, 2)
    assert counts.skipped == 2
    assert counts.evaluated > 0
    assert counts.most_lost["after SIGTERM"] == 0


def test_what_must_be_resumed_from_follows_from_what_was_told() -> None:
    saves = Saves()
    assert (saves.newest, saves.missing) == (0, set())
    saves.begun(5)
    assert (saves.newest, saves.missing) == (0, {5})
    saves.begun(10)
    assert (saves.newest, saves.missing) == (5, {10})
    saves.committed()
    saves.damaged.add(10)
    assert (saves.newest, saves.missing) == (5, {10})
    saves.resumed(5)
    saves.begun(10)
    saves.committed()
    assert (saves.newest, saves.missing) == (10, set())


def test_the_dice_choose_all_kinds_of_disturbances() -> None:
    chosen = [how for how, _ in zip(disturbances(random.Random(3), 60), range(200), strict=False)]
    assert any(how.early for how in chosen)
    assert any(how.stops and how.damages for how in chosen)
    assert {how.steps for how in chosen} == set(range(1, 6 * EVERY))
