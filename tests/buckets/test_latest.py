"""The newest checkpoint in a bucket, and the hint that names it."""

import obstore
import pytest

import shardkeep
from buckets.fixtures import Place


def test_the_newest_whole_checkpoint_is_found(place: Place) -> None:
    assert shardkeep.latest(f"{place.url}/run") is None
    for step in (9, 10):
        shardkeep.save(f"{place.url}/run/step_{step}", {"x": step})
    shardkeep.save(f"{place.url}/run/step_8.safetensors", {"x": 8})
    newest = shardkeep.latest(f"{place.url}/run")
    assert newest == f"{place.url}/run/step_10"
    assert shardkeep.load(newest) == {"x": 10}
    assert shardkeep.latest(newest) == newest
    obstore.delete(place.client, "run/step_10/manifest.json")  # as if its save had never committed
    assert shardkeep.latest(f"{place.url}/run") == f"{place.url}/run/step_9"


def test_a_wrong_path_is_told_the_newest(place: Place) -> None:
    shardkeep.save(f"{place.url}/run/step_9", {"x": 9})
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"the newest is .*/run/step_9$"):
        shardkeep.load(f"{place.url}/run")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"The newest beside it is .*/run/step_9$"):
        shardkeep.load(f"{place.url}/run/step_8")
