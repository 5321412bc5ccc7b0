"""Several writers at one place: of two who replace the same tree one wins, and others do not meet."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

import shardkeep
from buckets.fixtures import Both, Place
from buckets.writers import Careless, Writer, number_at, tree
from shardkeep.stores.location import location, store_at

FORM: dict[str, Any] = {"format": "zarr"}  # an object for each leaf


def outcomes(place: Place, path: str, orders: dict[int, dict[str, Any]]) -> list[str]:
    """What becomes of programs that begin to save at the same time."""
    with ExitStack() as stack:
        writers = [stack.enter_context(Writer.hire()) for _ in orders]
        for writer, (number, options) in zip(writers, orders.items(), strict=True):
            writer.save(path, number, place.environment(), **options)
        return [writer.outcome() for writer in writers]


@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_of_two_programs_one_wins(ending: str, both: Both) -> None:
    def scenario(place: Place) -> None:
        path = f"{place.url}/run{ending}"
        form = {"max_shard_size": 4096} if ending else FORM
        shardkeep.save(path, tree(1), **form)
        place.inject("delay", "PUT", "leaf|-of-", times=10, seconds=2)  # none is done before the other has begun
        ended = outcomes(place, path, {2: {"overwrite": True, **form}, 3: {"overwrite": True, **form}})
        assert [one.partition(":")[0] for one in sorted(ended)] == ["ConflictError", "committed"], ended
        assert number_at(path) == 2 + ended.index("committed")
        assert shardkeep.verify(path).ok

    both.run(scenario)


def test_writers_of_different_prefixes_do_not_meet(both: Both) -> None:
    def scenario(place: Place) -> None:
        path = f"{place.url}/run"
        place.inject("delay", "PUT", "leaf", times=10, seconds=1)
        ended = outcomes(place, path, {2: {"prefix": "model", **FORM}, 3: {"prefix": "opt", **FORM}})
        assert ended == ["committed", "committed"]
        assert (number_at(path, "model"), number_at(path, "opt")) == (2, 3)

    both.run(scenario)


def test_the_lock_lets_in_one_at_a_time(place: Place) -> None:
    """Threads, each with a store of its own, count up in an object that they read and replace under the lock."""
    store_at(location(place.url)).replace("count", b"0")

    def count(_: int) -> None:
        for _ in range(2):
            store = store_at(location(place.url))
            with store.lock(60):
                store.replace("count", b"%d" % (int(store.read("count")) + 1))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(count, range(6)))
    assert place.names() == {"count": 2}
    assert place.get("count") == b"12"


def test_without_the_lock_one_of_many_replaces_a_document(place: Place) -> None:
    store_at(location(place.url)).replace("manifest.json", b"old")
    stores = [store_at(location(place.url)) for _ in range(8)]
    for store in stores:
        assert store.read("manifest.json") == b"old"

    def replace(number: int) -> bool:
        try:
            stores[number].replace("manifest.json", b"%d" % number)
        except shardkeep.ConflictError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(replace, range(8)))
    assert won.count(True) == 1
    assert place.get("manifest.json") == b"%d" % won.index(True)


def test_saves_of_one_program_go_in_order(place: Place) -> None:
    path = f"{place.url}/run"
    pending = [shardkeep.save_async(path, tree(number), overwrite=True) for number in range(4)]
    for save in pending:
        save.wait()
    assert number_at(path) == 3


@pytest.mark.parametrize("kept", [(), ("If-Match",), ("If-None-Match",), ("If-Match", "If-None-Match")])
@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_a_server_that_ignores_conditions_is_told_of_once(
    kept: tuple[str, ...], ending: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0
    with Careless() as server:
        server.kept = kept
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        path = f"s3://bucket/run{ending}"
        for number in range(3):
            shardkeep.save(path, tree(number), overwrite=True)
            assert number_at(path) == number
            asked = asked or server.count("PUT", "lock")
        assert asked <= 4  # to find out costs two requests, once
        assert server.count("PUT", "lock") == asked + 4
    warned = [r.getMessage() for r in caplog.records if "ignores conditional puts" in r.getMessage()]
    assert len(warned) == (0 if len(kept) == 2 else 1)
    assert all("s3://bucket" in message for message in warned)
