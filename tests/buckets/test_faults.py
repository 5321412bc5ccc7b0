"""Requests that fail: what may pass is tried again, what will not is told at once, and nothing is ever half done."""

import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Both, Place
from buckets.writers import Keeper, number_at, tree
from servers.gcs import GCSServer
from servers.proxy import Fault
from shardkeep.stores.bucket import credentials, leases, objects
from shardkeep.stores.bucket import store as cloud
from shardkeep.stores.location import location, store_at
from support import assert_same, pattern

# Kinds of requests: method and a part of the path and query. S3 deletes by POST.
SAVING = {
    "lock": ("PUT", "/lock"),
    "record": ("PUT", "/saves/"),
    "data": ("PUT", "leaf1/0|safetensors$"),
    "manifest": ("PUT", "manifest.json"),
    "manifest read": ("GET", "manifest.json"),
    "list": ("GET", "list-type.*saves"),
    "delete on gs": ("DELETE", "leaf1/0"),
    "unlock on gs": ("DELETE", "/lock"),
}
LOADING = {
    "list": ("GET", "list-type"),
    "manifest": ("GET", "manifest.json"),
    "data": ("GET", "leaf1/0|safetensors$"),
}
EXCHANGE = {
    "file": ("PUT", r"model\.safetensors$"),
    "size": ("HEAD", r"model\.safetensors$"),
    "header": ("GET", r"model\.safetensors$"),
}
FAULTS: dict[str, dict[str, Any]] = {
    "429": {"action": "status", "status": 429},
    "500": {"action": "status", "status": 500},
    "503-twice": {"action": "status", "status": 503, "times": 2},
    "503-after-the-work": {"action": "status", "status": 503, "served": True},
    "reset": {"action": "reset"},
    "reset-after-the-work": {"action": "reset", "served": True},
    "closed-after-the-work": {"action": "close", "served": True},
    "late": {"action": "delay", "seconds": 0.3},
}


def inject(place: Place, below: str, kinds: dict[str, tuple[str, str]], **fault: Any) -> dict[str, Fault]:
    """One fault for each kind of request below a path."""
    return {
        kind: place.inject(method=method, pattern=f"(?=.*{re.escape(below)})(?=.*({pattern}))", **fault)
        for kind, (method, pattern) in kinds.items()
    }


def all_hit(faults: dict[str, Fault], scheme: str) -> None:
    for kind, fault in faults.items():
        assert fault.hits or (scheme == "s3" and kind.endswith("on gs")), f"no request was a {kind}"


def at_once(place: Place, one: Callable[[Place, str], None], names: Iterable[str]) -> None:
    """Run something for each of the names at the same time: it mostly waits."""
    with ThreadPoolExecutor(16) as pool:
        done = {name: pool.submit(one, place, name) for name in names}
    for name, ended in done.items():
        try:
            ended.result()
        except BaseException as error:
            error.add_note(f"with {name}")
            raise


def test_every_request_of_a_save_and_a_load_may_fail_and_is_tried_again(both: Both) -> None:
    """All kinds of requests, each with every fault; the faults at the same time, each at a place of its own."""

    def one(place: Place, name: str) -> None:
        below = f"{place.prefix}/{name}/"
        path = f"{place.url}/{name}/run"
        shardkeep.save(path, tree(1), format="zarr")
        faults = inject(place, below, SAVING, **FAULTS[name])
        shardkeep.save(path, tree(2), format="zarr", overwrite=True)
        assert set(place.names(f"{name}/run/.shardkeep")) <= {n for n in place.names(name) if "/claims/" in n}
        assert not [n for n in place.names(name) if "leaf" in n and "~" not in n]  # the replaced tree is gone
        all_hit(faults, place.scheme)
        faults = inject(place, below, LOADING, **FAULTS[name])
        assert number_at(path) == 2
        all_hit(faults, place.scheme)

        path = f"{place.url}/{name}/model.safetensors"
        shardkeep.save(path, tree(3))
        faults = inject(place, below, EXCHANGE, **FAULTS[name])
        shardkeep.save(path, tree(4), overwrite=True)
        assert number_at(path) == 4
        all_hit(faults, place.scheme)

    both.run(lambda place: at_once(place, one, FAULTS))


def test_answers_that_end_in_the_middle_are_asked_for_again(watched: Place) -> None:
    path = f"{watched.url}/run"
    shardkeep.save(path, {"w": pattern(np.uint8, (200_000,))})
    faults = inject(watched, watched.prefix, LOADING, action="cut", size=60)
    shardkeep.load(path)
    all_hit(faults, "gs")
    watched.forget()
    watched.inject("cut", "GET", "safetensors$", size=100_000, times=3)
    assert_same(shardkeep.load(path), {"w": pattern(np.uint8, (200_000,))})
    faults = inject(watched, watched.prefix, {k: SAVING[k] for k in ("manifest read", "list")}, action="cut", size=60)
    shardkeep.save(path, tree(1), overwrite=True)
    all_hit(faults, "gs")
    assert number_at(path) == 1


def test_slow_answers_are_waited_for(watched: Place) -> None:
    path = f"{watched.url}/run"
    values = {"w": pattern(np.uint8, (300_000,))}
    shardkeep.save(path, values)
    watched.inject("slow", "GET", "safetensors$", size=200_000)
    started = time.monotonic()
    assert_same(shardkeep.load(path), values)
    assert time.monotonic() - started > 1


def test_uploads_in_parts_go_on_after_a_fault(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are smaller here; the last request, whose answer may get lost, is the one that makes an object of them."""
    monkeypatch.setattr(cloud, "LARGE", 1 << 20)
    monkeypatch.setattr(cloud, "_PART", 5 << 20)
    monkeypatch.setattr(cloud.BucketStore, "traits", replace(cloud.BucketStore.traits, object_limit=1 << 20))
    values = {name: pattern(np.uint8, (6 << 20,), seed) for seed, name in enumerate("ab")}

    parts = {"begin": "uploads", "part": "partNumber=2", "end": "uploadId"}
    actions = {"closed": ("close", True), "reset": ("reset", False), "reset-after-the-work": ("reset", True)}

    def one(place: Place, name: str) -> None:
        part, how = name.split("/")
        action, served = actions[how]
        fault = place.inject(action, pattern=f"{place.prefix}/{name}/.*{parts[part]}", served=served)
        path = f"{place.url}/{name}/model.safetensors"
        shardkeep.save(path, values, max_shard_size=6 << 20)
        assert fault.hits == 1
        assert_same(shardkeep.load(path), values)

    names = [f"{part}/{how}" for part in parts for how in actions]
    both.run(lambda place: at_once(place, one, names))


def test_what_will_not_pass_is_not_tried_again(both: Both) -> None:
    def one(place: Place, name: str) -> None:
        kind, status = name.split("/")
        path = f"{place.url}/{name}/run"
        shardkeep.save(path, tree(1), format="zarr")
        faults = inject(
            place, f"{place.prefix}/{name}/", {kind: SAVING[kind]}, action="status", times=100, status=int(status)
        )
        started = time.monotonic()
        expected = shardkeep.AccessError if status == "403" else shardkeep.StorageError
        with pytest.raises(expected, match="access denied by" if status == "403" else f"status code: {status}"):
            shardkeep.save(path, tree(2), format="zarr", overwrite=True)
        assert time.monotonic() - started < 8  # sixteen of them are at work
        # To tidy up the lock is tried once more, and of the data each thread had a part under way.
        assert faults[kind].hits <= {"lock": 3, "data": 2}.get(kind, 1)
        faults[kind].times = 0
        assert number_at(path) == 1
        assert not [each for each in place.names(name) if "~" in each]
        shardkeep.save(path, tree(3), overwrite=True)
        assert number_at(path) == 3

    names = [f"{kind}/{status}" for kind in ("lock", "record", "data", "manifest") for status in (403, 400)]
    both.run(lambda place: at_once(place, one, names))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "PATIENCE", 1.0)
    monkeypatch.setattr(objects, "PATIENCE", 1.0)


@pytest.mark.usefixtures("impatient")
def test_what_does_not_pass_in_time_fails_and_leaves_the_old_one(both: Both) -> None:
    def one(place: Place, kind: str) -> None:
        below = kind.replace(" ", "-")
        path = f"{place.url}/{below}/run"
        shardkeep.save(path, tree(1), format="zarr")
        faults = inject(place, f"{place.prefix}/{below}/", {kind: SAVING[kind]}, action="status", times=1000)
        started = time.monotonic()
        with pytest.raises(shardkeep.StorageError, match="503"):
            shardkeep.save(path, tree(2), format="zarr", overwrite=True)
        assert time.monotonic() - started < 15
        faults[kind].times = 0
        assert number_at(path) == 1
        shardkeep.save(path, tree(3), overwrite=True)
        assert number_at(path) == 3

    both.run(lambda place: at_once(place, one, ["lock", "record", "data", "list", "manifest read"]))


@pytest.mark.usefixtures("impatient")
def test_a_manifest_that_is_put_though_every_answer_gets_lost_counts(watched: Place) -> None:
    path = f"{watched.url}/run"
    shardkeep.save(path, tree(1))
    watched.inject("reset", *SAVING["manifest"], times=1000, served=True)
    shardkeep.save(path, tree(2), overwrite=True)
    assert number_at(path) == 2


@pytest.mark.usefixtures("impatient")
def test_a_manifest_in_doubt_keeps_its_data_until_the_lease_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request got lost, it seems, so the save fails; then it arrives after all, and must find its data."""
    monkeypatch.setattr(leases, "LEASE", 2.0)
    with GCSServer() as server, Keeper(server.url) as keeper:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", keeper.url)
        path = "gs://bucket/run"
        shardkeep.save(path, tree(1), format="zarr")
        make = credentials._make

        def hasty(bucket: Any, settings: Any, options: Any, **patience: Any) -> Any:
            return make(bucket, settings, {**options, "timeout": "500ms"}, **patience)

        monkeypatch.setattr(credentials, "_make", hasty)
        credentials._reached.cache_clear()
        keeper.keeps = lambda method, target: method == "PUT" and "manifest" in target
        with pytest.raises(shardkeep.StorageError, match=r"manifest\.json.*does not respond"):
            shardkeep.save(path, tree(2), format="zarr", overwrite=True)
        assert "may remain" in caplog.text
        assert number_at(path) == 1
        # Nothing that the late manifest speaks of has gone.
        assert sum("~" in name and "leaf" in name for name in server.objects["bucket"]) == 12
        keeper.keeps = lambda method, target: False
        keeper.let_through.set()
        time.sleep(1)
        assert number_at(path) == 2
        assert shardkeep.verify(path).ok
        time.sleep(3)
        shardkeep.save(path, tree(3), overwrite=True)
        assert number_at(path) == 3
        assert not [name for name in server.objects["bucket"] if "leaf" in name]
        credentials._reached.cache_clear()


def test_a_lock_is_not_removed_twice(watched: Place) -> None:
    """The answer to its removal got lost; by the time it is tried again, it is another's lock."""
    store = store_at(location(watched.url))
    with store.lock(10):
        if watched.scheme == "gs":
            watched.inject("close", "DELETE", "/lock", served=True)
        else:
            watched.inject("close", "POST", "delete", served=True)
        other = ThreadPoolExecutor(1)

        def take() -> None:
            with store_at(location(watched.url)).lock(20):
                time.sleep(1.5)
                assert watched.names() == {".shardkeep/lock": watched.names()[".shardkeep/lock"]}

        taken = other.submit(take)
        time.sleep(0.3)
    taken.result()
    assert watched.names() == {}


def test_a_conflict_at_the_same_moment_is_tried_again(watched: Place) -> None:
    """S3 answers 409 where a delete is under way, and wants the put tried again."""
    path = f"{watched.url}/run"
    for kind in ("lock", "record", "manifest"):
        watched.inject("status", *SAVING[kind], status=409)
    shardkeep.save(path, tree(1))
    for kind in ("lock", "record", "manifest"):
        watched.inject("status", *SAVING[kind], status=409)
    shardkeep.save(path, tree(2), overwrite=True)
    assert number_at(path) == 2


def test_a_manifest_that_vanished_is_a_conflict(watched: Place) -> None:
    path = f"{watched.url}/run"
    shardkeep.save(path, tree(1))
    fault = watched.inject("status", *SAVING["manifest"], times=1000, status=404)
    with pytest.raises(shardkeep.ConflictError, match="changed by another program"):
        shardkeep.save(path, tree(2), overwrite=True)
    assert 1 < fault.hits < 20  # what is there is read again each time, and is what it was
    assert number_at(path) == 1
    fault.times = fault.hits + 1
    shardkeep.save(path, tree(3), overwrite=True)
    assert number_at(path) == 3


def test_a_server_that_goes_away_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save goes on when the server is there again."""
    with GCSServer() as server:
        port = server.server_port
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        shardkeep.save("gs://bucket/run", tree(1))
        objects = server.objects
    pool = ThreadPoolExecutor(1)
    pending = pool.submit(shardkeep.save, "gs://bucket/run", tree(2), overwrite=True)
    time.sleep(1)
    assert not pending.done()
    with GCSServer(port=port) as server:
        server.objects["bucket"].update(objects["bucket"])
        pending.result()
        assert number_at("gs://bucket/run") == 2
