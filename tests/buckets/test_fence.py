"""Names that are never used again, and documents that are put again so that late puts are refused."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Place, gcs_server, make_place, s3_server
from buckets.writers import Keeper, Writer, number_at, tree, until
from servers.gcs import GCSServer
from servers.proxy import Fault, Proxy
from shardkeep.catalog import find, new_target
from shardkeep.converting.survey import survey
from shardkeep.stores.bucket import credentials, objects
from shardkeep.stores.location import location, store_at
from shardkeep.targets.cleanup import fence
from shardkeep.targets.exchange import Exchange
from support import hold

FORM: dict[str, Any] = {"format": "zarr"}  # an object for each leaf


@pytest.fixture(params=["gs", "s3"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Place, Keeper]]:
    """A place that writers reach through a keeper, and this process directly."""
    with Keeper((gcs_server() if request.param == "gs" else s3_server()).url) as keeper:
        for name, value in make_place(request.param).environment().items():
            monkeypatch.setenv(name, value)
        yield make_place(request.param, keeper), keeper


@pytest.mark.parametrize("name", ["run", "model.safetensors"])
def test_a_fence_where_nothing_is_means_nothing(name: str, place: Place) -> None:
    path = f"{place.url}/{name}"
    assert fence(new_target(location(path), "safetensors", None, None)) is None
    document = "run/manifest.json" if name == "run" else "model.safetensors.index.json"
    first = place.get(document)
    assert fence(new_target(location(path), "safetensors", None, None)) is None
    assert place.get(document) != first, "S3 could not tell the two apart"
    assert not shardkeep.exists(path)
    assert shardkeep.latest(place.url) is None
    assert survey(place.url) == []
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint at"):
        shardkeep.load(path)
    shardkeep.save(path, tree(1))
    assert number_at(path) == 1
    shardkeep.delete(path)
    assert place.names() == {}


@pytest.mark.parametrize(("name", "options"), [("run", FORM), ("model.safetensors", {"max_shard_size": 4096})])
def test_a_fence_changes_nothing_but_the_version(name: str, options: dict[str, Any], place: Place) -> None:
    path = f"{place.url}/{name}"
    shardkeep.save(path, tree(1), **options)
    before = place.names()
    save_id = shardkeep.inspect(path).save_id
    committed = fence(find(location(path)))
    assert committed is not None
    assert committed.save_id == save_id == shardkeep.inspect(path).save_id
    assert place.names().keys() == before.keys()
    assert number_at(path) == 1
    assert shardkeep.verify(path).ok


def test_a_fence_beside_another_programs_shards_leaves_them_theirs(place: Place) -> None:
    path = f"{place.url}/model.safetensors"
    shardkeep.save(path, {"w": np.arange(5.0)})
    file = place.get("model.safetensors")
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode().ljust(int.from_bytes(file[:8], "little"))
    place.put("a.safetensors", file[:8] + text + file[8 + len(text) :])
    place.client.delete("model.safetensors")
    place.put(
        "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": {"w": "a.safetensors"}}).encode()
    )
    before = shardkeep.inspect(path)
    assert fence(find(location(path))) is not None
    assert shardkeep.inspect(path).trees[""].format == before.trees[""].format == "foreign"
    assert shardkeep.load(path)["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("given_up", [False, True])
def test_a_save_of_several_trees_that_a_fence_refuses_commits_all_or_none(
    given_up: bool, kept: tuple[Place, Keeper]
) -> None:
    """It reads again and commits, unless its record was taken over."""
    place, keeper = kept
    path = f"{place.url}/run"
    shardkeep.save(path, tree(1), trees={"ema": tree(1)}, **FORM)
    keeper.keeps = lambda method, target: method == "PUT" and target.endswith("manifest.json")
    options = {"overwrite": True, "trees": ["data", "ema"], **FORM}
    with Writer.hire().save(path, 2, place.environment(), **options) as writer:
        assert keeper.kept.wait(20)
        (record,) = (each for each in place.names() if "/saves/" in each)
        assert fence(find(location(path)), record.rpartition("/")[2] if given_up else None) is not None
        assert (number_at(path), number_at(path, "ema")) == (1, 1)
        keeper.let_through.set()
        outcome = writer.outcome()
    assert outcome.startswith("ConflictError" if given_up else "committed"), outcome
    now = 1 if given_up else 2
    prefixes = shardkeep.inspect(path).prefixes
    assert {p: number_at(path, p) for p in prefixes} == dict.fromkeys(
        ["", "ema"] if given_up else ["", "ema", "data"], now
    )
    assert shardkeep.verify(path).ok
    shardkeep.save(path, tree(3), trees={"ema": tree(3)}, overwrite=True, **FORM)
    assert (number_at(path), number_at(path, "ema")) == (3, 3)
    assert not [name for name in place.names() if "/saves/" in name]


@pytest.mark.parametrize(("name", "options"), [("run", FORM), ("model.safetensors", {"max_shard_size": 4096})])
def test_a_live_save_that_a_fence_refuses_reads_again_and_commits(
    name: str, options: dict[str, Any], kept: tuple[Place, Keeper]
) -> None:
    place, keeper = kept
    path = f"{place.url}/{name}"
    shardkeep.save(path, tree(1), **options)
    document = "manifest.json" if name == "run" else "index.json"
    keeper.keeps = lambda method, target: method == "PUT" and target.endswith(document)
    with Writer.hire().save(path, 2, place.environment(), overwrite=True, **options) as writer:
        assert keeper.kept.wait(20)
        assert fence(find(location(path))) is not None
        assert number_at(path) == 1
        keeper.let_through.set()
        assert writer.outcome() == "committed"
    assert number_at(path) == 2
    assert not [name for name in place.names() if "/saves/" in name or name.endswith("lock")]


@pytest.mark.parametrize(("name", "options"), [("run", FORM), ("model.safetensors", {"max_shard_size": 4096})])
def test_a_save_that_others_gave_up_is_not_committed_after_the_fence(
    name: str, options: dict[str, Any], kept: tuple[Place, Keeper]
) -> None:
    """It is alive, and would read again and commit, if its record were still its own."""
    place, keeper = kept
    path = f"{place.url}/{name}"
    shardkeep.save(path, tree(1), **options)
    document = "manifest.json" if name == "run" else "index.json"
    keeper.keeps = lambda method, target: method == "PUT" and target.endswith(document)
    with Writer.hire().save(path, 2, place.environment(), overwrite=True, **options) as writer:
        assert keeper.kept.wait(20)
        (record,) = (each for each in place.names() if "/saves/" in each)
        committed = fence(find(location(path)), record.rpartition("/")[2])
        assert committed is not None
        assert committed.save_id == shardkeep.inspect(path).save_id
        keeper.let_through.set()
        outcome = writer.outcome()
    assert outcome.startswith("ConflictError"), outcome
    assert "assumed that it had died" in outcome
    assert number_at(path) == 1
    shardkeep.save(path, tree(3), overwrite=True, **options)
    assert number_at(path) == 3
    assert not [name for name in place.names() if "/saves/" in name]


def test_a_file_is_replaced_on_condition_of_the_version_that_was_checked(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save is recorded, so the index is fenced first; what that reads does not change the condition."""
    path = f"{place.url}/model.safetensors"
    shardkeep.save(path, tree(1))
    shardkeep.save(f"{place.url}/elsewhere.safetensors", tree(3))
    store = store_at(location(place.url), control=".model.safetensors.shardkeep", confined=False)
    held = hold(store, f"{store.saves}/{'a' * 32}", b"[]")
    real = Exchange._fence_index

    def meddle(exchange: Exchange) -> None:
        place.put("model.safetensors", place.get("elsewhere.safetensors"))  # by one who took over the lock
        real(exchange)

    monkeypatch.setattr(Exchange, "_fence_index", meddle)
    with pytest.raises(shardkeep.ConflictError, match="another save changed"):
        shardkeep.save(path, tree(2), overwrite=True)
    assert number_at(path) == 3
    held.remove()


def test_of_two_that_both_hold_the_lock_one_replaces_a_single_file(
    kept: tuple[Place, Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is alive, but its renewals of the lock do not arrive, nor does its file until the other has saved."""
    monkeypatch.setenv("SHARDKEEP_LEASE", "2.0")
    place, keeper = kept
    path = f"{place.url}/model.safetensors"
    shardkeep.save(path, tree(1))
    keeper.keeps = lambda method, target: (
        method == "PUT"
        and (target.endswith("/model.safetensors") or (keeper.kept.is_set() and target.endswith("/lock")))
    )
    with Writer.hire().save(path, 2, place.environment(), overwrite=True) as writer:
        assert keeper.kept.wait(20)
        shardkeep.save(path, tree(3), overwrite=True)
        assert number_at(path) == 3
        keeper.let_through.set()
        assert writer.outcome().startswith("ConflictError")
    assert number_at(path) == 3
    assert shardkeep.verify(path).ok


def test_a_manifest_in_doubt_keeps_its_data_though_trying_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt is still on its way when the second is told that it may not: the first may arrive."""
    make = credentials._make

    def hasty(bucket: Any, settings: Any, options: Any, **patience: Any) -> Any:
        return make(bucket, settings, {**options, "timeout": "700ms"}, **patience)

    monkeypatch.setattr(credentials, "_make", hasty)
    credentials._reached.cache_clear()
    with GCSServer() as server, Keeper(server.url) as keeper:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", keeper.url)
        path = "gs://bucket/run"
        shardkeep.save(path, tree(1), **FORM)

        def keeps(method: str, target: str) -> bool:
            if method != "PUT" or not target.endswith("manifest.json") or keeper.kept.is_set():
                return False
            keeper.inject(Fault("status", "PUT", r"manifest\.json$", status=403, times=100))
            return True

        keeper.keeps = keeps
        with pytest.raises(shardkeep.AccessError, match="403"):
            shardkeep.save(path, tree(2), overwrite=True, **FORM)
        assert number_at(path) == 1
        keeper.let_through.set()
        assert keeper.passed.wait(20)
        assert number_at(path) == 2
        assert shardkeep.verify(path).ok
    credentials._reached.cache_clear()


def test_a_commit_whose_answer_got_lost_and_that_was_fenced_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there has other bytes than what was put, and says that this save is committed."""
    monkeypatch.setattr(credentials, "PATIENCE", 3.0)
    monkeypatch.setattr(objects, "PATIENCE", 3.0)
    make = credentials._make

    def hasty(bucket: Any, settings: Any, options: Any, **patience: Any) -> Any:
        return make(bucket, settings, {**options, "timeout": "700ms"}, **patience)

    monkeypatch.setattr(credentials, "_make", hasty)
    credentials._reached.cache_clear()
    with GCSServer() as server, Proxy(server.url) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        path = "gs://bucket/run"
        shardkeep.save(path, tree(1), **FORM)
        old = server.objects["bucket"]["run/manifest.json"].generation
        fault = proxy.inject(Fault("delay", "PUT", r"manifest\.json$", seconds=2))

        def meddle() -> None:
            until(lambda: server.objects["bucket"]["run/manifest.json"].generation != old)
            fence(find(location(path)))

        meddling = threading.Thread(target=meddle)
        meddling.start()
        shardkeep.save(path, tree(2), overwrite=True, **FORM)
        meddling.join()
        assert fault.hits == 1
        assert b'"nonce"' in server.objects["bucket"]["run/manifest.json"].data
        assert number_at(path) == 2
        assert not [name for name in server.objects["bucket"] if "leaf" in name and "~" not in name]
    credentials._reached.cache_clear()


def test_clean_names_are_claimed_for_ever(watched: Place) -> None:
    """Also by a save that failed: what it sent may still arrive."""
    path = f"{watched.url}/run"
    fault = watched.inject("status", "PUT", "leaf3", times=100, status=400)
    with pytest.raises(shardkeep.StorageError, match="400"):
        shardkeep.save(path, tree(1), **FORM)
    fault.times = 0
    shardkeep.save(path, tree(2), **FORM)
    assert number_at(path) == 2
    assert all("~" in name for name in watched.names("run") if "leaf" in name)
    shardkeep.delete(path)
    assert watched.names() == {}


def test_names_of_another_programs_arrays_are_not_used_again(place: Place) -> None:
    path = f"{place.url}/run"
    shardkeep.save(path, tree(1), **FORM)
    for name in [name for name in place.names() if "/.shardkeep/" in name or name.endswith("manifest.json")]:
        place.client.delete(name)
    index = json.loads(place.get("run/tensorstore_index.json"))
    place.put("run/tensorstore_index.json", json.dumps({k: v for k, v in index.items() if k != "shardkeep"}).encode())
    foreign = {name for name in place.names() if "leaf" in name}
    for number in (2, 3):
        shardkeep.save(path, tree(number), overwrite=True, **FORM)
        assert not foreign & set(place.names())
        assert number_at(path) == number


def test_trees_of_different_prefixes_share_no_clean_names(place: Place) -> None:
    """The leaf `model.leaf0` of the one is called like the leaf `leaf0` of the other."""
    path = f"{place.url}/run"
    shardkeep.save(path, {"model": tree(1), "own": np.arange(3)}, **FORM)
    used = {name for name in place.names() if "leaf" in name}
    assert "run/model/leaf0/0" in used
    shardkeep.save(path, {"own": np.arange(3)}, overwrite=True, **FORM)
    shardkeep.save(path, tree(2), prefix="model", **FORM)
    shardkeep.save(path, tree(3), prefix="other.model", **FORM)
    assert not used & set(place.names())
    assert "run/other/model/leaf0/0" in place.names()
    assert (number_at(path, "model"), number_at(path, "other.model")) == (2, 3)


def test_the_index_for_eformer_is_emptied_not_removed(place: Place) -> None:
    path = f"{place.url}/run"
    shardkeep.save(path, tree(1), **FORM)
    assert len(json.loads(place.get("run/tensorstore_index.json"))["arrays"]) == 6
    shardkeep.save(path, tree(2), overwrite=True)
    assert json.loads(place.get("run/tensorstore_index.json"))["arrays"] == []
    assert number_at(path) == 2
    shardkeep.delete(path)
    assert place.names() == {}


def test_requests_with_large_bodies_get_more_time() -> None:
    made: list[float] = []

    def make(seconds: float) -> str:
        made.append(seconds)
        return f"{seconds:g} s"

    clients = credentials.Clients("reading", "writing", "once", make)
    assert clients.sending(1000) == "once"
    assert clients.sending(32 << 20) == clients.sending(64 << 20) == "300 s"
    assert clients.sending(5 << 30) == "5400 s"
    assert made == [300, 5400]


def test_a_large_file_whose_answer_got_lost_is_not_fetched_again(watched: Place) -> None:
    path = f"{watched.url}/model.safetensors"
    values = {"w": np.arange(3 << 20, dtype=np.int64)}
    shardkeep.save(path, {"w": np.arange(3)})
    fault = watched.inject("reset", "PUT", r"model\.safetensors$", served=True)
    started = time.monotonic()
    shardkeep.save(path, values, overwrite=True)
    assert fault.hits == 1
    fetched = sum(request.sent for request in watched.requests if request.method == "GET")
    assert fetched < 1 << 20
    sent = [request for request in watched.requests if request.received > 1 << 20]
    assert len(sent) == 1, "it was sent again"
    assert time.monotonic() - started < 20
    assert shardkeep.load(path)["w"].tobytes() == values["w"].tobytes()
