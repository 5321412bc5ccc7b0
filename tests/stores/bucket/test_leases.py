"""Dead, slow and stopped saves: a checkpoint is the old or the new one, whole, and what died is cleaned up after.

The scenarios mostly wait, so all of them run together, each on both servers; a test for each tells what became of it.
"""

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

import shardkeep
from buckets.fixtures import Place, gcs_server, make_place, s3_server
from buckets.writers import Keeper, Writer, number_at, tree, until
from shardkeep.stores.bucket import store as cloud
from support import hold

FORM: dict[str, Any] = {"format": "zarr"}  # an object for each leaf

Ended = dict[str, dict[str, "Future[None]"]]


def keeper_of(place: Place) -> Keeper:
    assert isinstance(place.proxy, Keeper)
    return place.proxy


def data(place: Place) -> set[str]:
    """Objects of leaves in the tensorstore format."""
    return {name for name in place.names("run") if "leaf" in name}


def killed_in_the_middle(place: Place, old: bool) -> None:
    """The old checkpoint loads, nothing is mistaken for one; after the lease the next save removes what was left."""
    path = f"{place.url}/run"
    if old:
        shardkeep.save(path, tree(1), prefix="model", **FORM)
    before = set(place.names("run"))
    place.inject("delay", "PUT", "leaf3", times=10, seconds=30)
    with Writer.hire().save(path, 2, place.environment(), prefix="model", overwrite=True, **FORM):
        until(lambda: len(data(place) - before) > 4)
    killed = time.monotonic()
    left = data(place) - before
    assert shardkeep.exists(path) is old
    if old:
        assert number_at(path, "model") == 1
        assert shardkeep.verify(path).ok
    else:
        with pytest.raises(shardkeep.IncompleteCheckpointError, match="is running, or died a moment ago"):
            shardkeep.load(path)
    shardkeep.save(path, tree(3), prefix="early")
    if time.monotonic() - killed < 1.5:  # it might still be alive
        assert left <= set(place.names("run"))
    time.sleep(max(0, killed + 4 - time.monotonic()))
    shardkeep.save(path, tree(4), prefix="late")
    assert not left & set(place.names("run"))
    assert place.names("run/.shardkeep/saves") == {}
    assert (number_at(path, "early"), number_at(path, "late")) == (3, 4)
    if old:
        assert number_at(path, "model") == 1
        assert before <= set(place.names("run"))


def an_exchange_file_killed_before_it_is_in_place(place: Place) -> None:
    path = f"{place.url}/model.safetensors"
    shardkeep.save(path, tree(1))
    keeper = keeper_of(place)
    keeper.keeps = lambda method, target: method == "PUT" and target.endswith("model.safetensors")
    with Writer.hire().save(path, 2, place.environment(), overwrite=True):
        assert keeper.kept.wait(20)
    assert number_at(path) == 1
    time.sleep(4)
    shardkeep.save(path, tree(3), overwrite=True)
    keeper.let_through.set()
    time.sleep(1)
    assert number_at(path) == 3
    assert set(place.names()) == {"model.safetensors"}


def the_lock_of_a_dead_program_is_taken_over(place: Place) -> None:
    path = f"{place.url}/run"
    shardkeep.save(path, tree(1))
    place.inject("delay", "PUT", r"\.shardkeep/lock", times=1, seconds=30)
    with Writer.hire().save(path, 2, place.environment(), overwrite=True):
        until(lambda: place.names("run/.shardkeep"))
    assert number_at(path) == 1
    started = time.monotonic()
    shardkeep.save(path, tree(3), overwrite=True)
    assert 1.5 < time.monotonic() - started < 12
    assert number_at(path) == 3
    assert place.names("run/.shardkeep") == {}


def a_delete_killed_in_the_middle_is_completed(place: Place) -> None:
    path = f"{place.url}/run"
    shardkeep.save(path, tree(1), **FORM)
    # As a delete leaves it that died after the manifest went: its record names what has to go.
    names = [file.name for file in shardkeep.inspect(path).tree().files]
    store = cloud.BucketStore(cloud.Bucket(place.scheme, "bucket"), f"{place.prefix}/run", ".shardkeep")
    hold(store, f".shardkeep/saves/{'0' * 32}", json.dumps(names).encode()).release()
    place.client.delete("run/manifest.json")
    assert not shardkeep.exists(path)
    with pytest.raises(shardkeep.ConflictError, match="is running; nothing was deleted"):
        shardkeep.delete(path)
    time.sleep(4)
    shardkeep.delete(path)
    assert place.names() == {}


def a_slow_save_is_not_taken_for_dead(place: Place) -> None:
    """Its record is renewed while its data goes up, however long that takes."""
    path = f"{place.url}/run"
    place.inject("delay", "PUT", "leaf3/0", times=1, seconds=7)
    with Writer.hire().save(path, 2, place.environment(), prefix="slow", **FORM) as writer:
        until(lambda: data(place))
        for number in range(3):
            time.sleep(1.7)
            shardkeep.save(path, tree(number), prefix=f"quick{number}")
        assert writer.outcome() == "committed"
    assert number_at(path, "slow") == 2
    assert [number_at(path, f"quick{number}") for number in range(3)] == [0, 1, 2]


def one_that_was_stopped_for_long_does_not_commit_with_holes(place: Place) -> None:
    path = f"{place.url}/run"
    shardkeep.save(path, tree(1), prefix="model")
    keeper = keeper_of(place)
    keeper.keeps = lambda method, target: method == "PUT" and "leaf3" in target
    with Writer.hire().save(path, 2, place.environment(), prefix="model", overwrite=True, **FORM) as writer:
        assert keeper.kept.wait(20)
        until(lambda: data(place))
        writer.process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        shardkeep.save(path, tree(3), prefix="other")  # which cleans up
        assert not data(place)
        keeper.let_through.set()
        writer.process.send_signal(signal.SIGCONT)
        outcome = writer.outcome()
    assert outcome.startswith("ConflictError"), outcome
    assert "assumed that it had died" in outcome
    assert (number_at(path, "model"), number_at(path, "other")) == (1, 3)
    assert shardkeep.verify(path).ok


def a_manifest_that_comes_too_late_is_refused(place: Place) -> None:
    """Stopped while the manifest is on its way, taken for dead, cleaned up after: then it arrives."""
    path = f"{place.url}/run"
    shardkeep.save(path, tree(1), prefix="model")
    keeper = keeper_of(place)
    keeper.keeps = lambda method, target: method == "PUT" and "manifest" in target
    with Writer.hire().save(path, 2, place.environment(), prefix="model", overwrite=True, **FORM) as writer:
        assert keeper.kept.wait(20)
        writer.process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        with pytest.raises(shardkeep.CheckpointExistsError, match="model"):
            shardkeep.save(path, tree(3), prefix="model")  # takes the lock and cleans up, but commits nothing
        assert not data(place)
        fenced = place.get("run/manifest.json")
        keeper.let_through.set()
        time.sleep(1)
        assert place.get("run/manifest.json") == fenced
        writer.process.send_signal(signal.SIGCONT)
        outcome = writer.outcome()
    assert outcome.startswith("ConflictError"), outcome
    assert number_at(path, "model") == 1
    assert shardkeep.verify(path).ok


SCENARIOS: dict[str, Callable[[Place], None]] = {
    "a save is killed in the middle": partial(killed_in_the_middle, old=True),
    "the first save is killed in the middle": partial(killed_in_the_middle, old=False),
    **{
        function.__name__.replace("_", " "): function
        for function in (
            a_slow_save_is_not_taken_for_dead,
            a_manifest_that_comes_too_late_is_refused,
            one_that_was_stopped_for_long_does_not_commit_with_holes,
            an_exchange_file_killed_before_it_is_in_place,
            the_lock_of_a_dead_program_is_taken_over,
            a_delete_killed_in_the_middle_is_completed,
        )
    },
}


@pytest.fixture(scope="module")
def ended() -> Ended:
    """What became of the scenarios. The lease is two seconds, here as in the writers.

    Writers go through a proxy of their own, which keeps requests back or makes them late; this process does not.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("SHARDKEEP_LEASE", "2.0")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for made in (make_place("gs"), make_place("s3")):
            for name, value in made.environment().items():
                patch.setenv(name, value)
        done: Ended = {}
        with ThreadPoolExecutor(6) as pool:
            for name, scenario in SCENARIOS.items():
                gs, s3 = (stack.enter_context(Keeper(server.url)) for server in (gcs_server(), s3_server()))
                places = {"gs": make_place("gs", gs), "s3": make_place("s3", s3)}
                done[name] = {scheme: pool.submit(scenario, place) for scheme, place in places.items()}
        return done


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, scheme: str, ended: Ended) -> None:
    ended[name][scheme].result()
