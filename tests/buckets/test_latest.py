"""The newest checkpoint in a bucket, and the hint that names it."""

from urllib.parse import unquote

import numpy as np
import obstore
import pytest

import shardkeep
from buckets.fixtures import EFORMER, Place
from servers.loopback import Request
from support import FORMATS


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
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"for example the newest, .*/run/step_9$"):
        shardkeep.load(f"{place.url}/run")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"The newest checkpoint in .*/run is .*/run/step_9$"):
        shardkeep.load(f"{place.url}/run/step_8")


def _lists(requests: list[Request]) -> int:
    return sum("list-type" in request.target for request in requests)


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "exchange", "shards"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_checkpoint_does_not_exist_is_skipped_and_can_be_replaced(
    kind: str, damage: str, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    ending, arguments = FORMATS[kind]
    tree = {"w": np.arange(1000.0), "b": np.ones(1000)}
    paths = [f"{place.url}/run/step_{step}{ending}" for step in (1, 2)]
    for path in paths:
        shardkeep.save(path, tree, **arguments)
    with pytest.raises(shardkeep.CheckpointExistsError, match="already holds a checkpoint"):
        shardkeep.save(paths[1], tree, **arguments)
    data = [n for n in place.names() if "step_2" in n and not n.endswith((".json", ".zarray")) and "/." not in n]
    if damage == "missing":
        obstore.delete(place.client, data[-1])
    else:
        place.put(data[-1], place.get(data[-1])[:-1])
    assert [shardkeep.exists(path) for path in paths] == [True, False]
    assert shardkeep.latest(f"{place.url}/run") == paths[0]
    if kind != "exchange" or damage != "missing":
        assert f"skipping {paths[1]}" in caplog.text
    shardkeep.save(paths[1], {"w": np.zeros(3)}, **arguments)
    assert shardkeep.latest(f"{place.url}/run") == paths[1]
    assert shardkeep.verify(paths[1]).ok


def test_exists_lists_a_thousand_objects_in_one_request(gcs: Place) -> None:
    """And asks for the manifest, and for nothing else."""
    path = f"{gcs.url}/run"
    shardkeep.save(path, {f"{i:04}": np.full(2, i) for i in range(1100)}, format="zarr")
    objects = len(gcs.names("run"))
    assert objects > 2200
    for call in (shardkeep.exists, shardkeep.latest):
        gcs.server.reset()
        assert call(path)
        root = 2 if call is shardkeep.latest else 0  # a listing of the directory, which may hold checkpoints
        assert gcs.server.count("GET", "list-type") <= -(-objects // 1000) + root
        assert gcs.server.count() <= -(-objects // 1000) + root + 1
    obstore.delete(gcs.client, "run/0777/0")
    gcs.server.reset()
    assert not shardkeep.exists(path)
    assert gcs.server.count("GET", "list-type") <= 2 * -(-objects // 1000), "a writer may have replaced it: once more"


def test_exists_of_a_small_checkpoint_makes_two_requests(watched: Place) -> None:
    path = f"{watched.url}/run"
    shardkeep.save(path, {"w": np.arange(10), "b": np.arange(3)}, format="zarr")
    watched.forget()
    assert shardkeep.exists(path)
    assert (len(watched.requests), _lists(watched.requests)) == (2, 1)


@pytest.mark.parametrize("steps", [True, False])
def test_the_newest_of_a_long_run_is_found_with_few_requests(watched: Place, steps: bool) -> None:
    """Three manifests are read, and the objects of the newest are listed; the older ones are not looked at."""
    shardkeep.save(f"{watched.url}/run/step_0", {"w": np.arange(10)}, step=0 if steps else None)
    for step in (17, 18, 19):
        shardkeep.save(f"{watched.url}/run/step_{step}", {"w": np.arange(10)}, step=step if steps else None)
    names = [name.removeprefix("run/step_0/") for name in watched.names("run/step_0")]
    copies = {name: watched.get(f"run/step_0/{name}") for name in names}
    for step in range(1, 17):
        for name, data in copies.items():
            watched.put(f"run/step_{step}/{name}", data)
    watched.forget()
    assert shardkeep.latest(f"{watched.url}/run") == f"{watched.url}/run/step_19"
    requests = watched.requests
    assert sum("manifest.json" in unquote(request.target) for request in requests) == 3
    assert _lists(requests) <= 3  # the run (on S3 also whether it is an empty directory), and the newest checkpoint
    assert len(requests) <= 6


def test_the_newest_of_names_that_say_nothing_is_found_by_time(place: Place) -> None:
    for name in ("ckpt-0.25-step10", "ckpt-0.19-step20", "2026-11-17_eval_3", "best"):
        shardkeep.save(f"{place.url}/run/{name}", {"x": 1})
        assert shardkeep.latest(f"{place.url}/run") == f"{place.url}/run/{name}"
    for name, step in (("good", 7), ("other", 6)):
        shardkeep.save(f"{place.url}/run/{name}", {"x": 1}, step=step)
        assert shardkeep.latest(f"{place.url}/run") == f"{place.url}/run/good"


def test_a_file_and_a_directory_with_numbers_for_names_are_one_family(place: Place) -> None:
    shardkeep.save(f"{place.url}/run/2.safetensors", {"x": 1})
    shardkeep.save(f"{place.url}/run/1", {"x": 1})
    assert shardkeep.latest(f"{place.url}/run") == f"{place.url}/run/2.safetensors"
    shardkeep.save(f"{place.url}/run/3", {"x": 1})
    assert shardkeep.latest(f"{place.url}/run") == f"{place.url}/run/3"


def test_files_beside_checkpoints_cost_no_request(watched: Place) -> None:
    shardkeep.save(f"{watched.url}/run/step_1", {"x": 1})
    for number in range(10):
        watched.put(f"run/events.{number}.log", b"x")
    watched.forget()
    assert shardkeep.latest(f"{watched.url}/run") == f"{watched.url}/run/step_1"
    assert len(watched.requests) <= 3


def test_missing_chunks_of_another_programs_checkpoint_are_noticed(place: Place) -> None:
    place.upload(EFORMER / "ts_plain" / "ckpt", "run/1")
    assert shardkeep.exists(f"{place.url}/run/1")
    assert shardkeep.latest(f"{place.url}/run") == f"{place.url}/run/1"
    chunk = next(name for name in sorted(place.names("run")) if not name.endswith((".json", ".zarray")))
    obstore.delete(place.client, chunk)
    assert not shardkeep.exists(f"{place.url}/run/1")
    assert shardkeep.latest(f"{place.url}/run") is None
