"""A Store in a bucket: objects, leases and conditional puts, asked of both servers."""

import inspect
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Both, Place, _alone, both, gcs, place, watched  # noqa: F401
from buckets.writers import Writer, number_at, until
from shardkeep.errors import ConflictError, IntegrityError, StorageError
from shardkeep.runtime.scopes import Latch, Scope
from shardkeep.stores import base
from shardkeep.stores.bucket import leases, listing, objects
from shardkeep.stores.bucket import store as cloud
from shardkeep.stores.bucket.credentials import Bucket
from shardkeep.stores.bucket.store import BucketStore
from shardkeep.stores.location import location, store_at
from support import assert_same, hold, pattern, run_python


def store_of(place: Place, whole: bool = True) -> BucketStore:
    return BucketStore(Bucket(place.scheme, "bucket"), place.prefix, ".shardkeep", whole)


def put(store: Any, name: str, *parts: bytes) -> None:
    store.write_new(name, sum(map(len, parts)), [memoryview(part) for part in parts])


def read(store: Any, name: str, start: int, length: int) -> bytes:
    buffer = np.zeros(length, np.uint8)
    with store.open(name) as file:
        file.read_into(start, buffer)
    return buffer.tobytes()


def test_it_has_what_is_asked_of_a_store(place: Place) -> None:
    store = store_of(place)
    put(store, "old", b"1")
    held = hold(store, f"{store.saves}/1", b"")
    opened = store.open("old")
    things = {base.Store: store, base.StoredFile: opened, base.Held: held, base.MappedFile: opened.map(0, 1)}
    for protocol, thing in things.items():
        for name, method in inspect.getmembers_static(protocol, inspect.isfunction):
            if not name.startswith("_"):
                ours = list(inspect.signature(getattr(type(thing), name)).parameters)
                assert ours[: len(inspect.signature(method).parameters)] == list(inspect.signature(method).parameters)
        assert all(hasattr(thing, name) for name in inspect.get_annotations(protocol))
    held.remove()


class TestObjects:
    def test_what_is_put_is_there(self, place: Place) -> None:
        store = store_of(place)
        put(store, "a/b", b"one", b"", b"two")
        put(store, "empty")
        assert (store.read("a/b"), store.read("empty")) == (b"onetwo", b"")
        assert store.sizes(["a/b", "empty", "c"]) == {"a/b": 6, "empty": 0, "c": None}
        assert (store.size("a/b"), store.size("a")) == (6, None)
        assert read(store, "a/b", 2, 3) == b"etw"
        assert read(store, "empty", 0, 0) == b""
        assert store.locate("a/b") == f"{place.url}/a/b"
        assert store.locate("") == place.url
        assert store.free_bytes() is None

    def test_what_is_not_there(self, place: Place) -> None:
        store = store_of(place)
        put(store, "file", b"1")
        for name in ("x", "a/x", "file/x"):
            assert store.size(name) is None
            assert store.identity(name) is None
            assert store.children(name) == []
            with pytest.raises(FileNotFoundError, match="not"):
                store.read(name)
            with pytest.raises(FileNotFoundError, match="does not exist"):
                store.open(name)
        store.remove(["x", "file", "file"])
        assert store.is_empty()
        store.remove([])

    def test_reading_beyond_the_end_is_an_error(self, place: Place) -> None:
        put(store_of(place), "file", b"12345")
        for start, length in ((0, 6), (5, 1), (2, 100_000)):
            with pytest.raises(IntegrityError, match=f"file is truncated: it ends before byte {start + length}"):
                read(store_of(place), "file", start, length)

    def test_names_below_and_in_it(self, place: Place) -> None:
        store = store_of(place)
        for name in ("a", "d/a", "d/e/.zarray", "f/.zarray", "d2/x"):
            put(store, name, b"1")
        assert store.children("") == ["a", "d", "d2", "f"]
        assert store.children("d") == ["a", "e"]
        assert store.find_directories_with(".zarray") == ["d/e", "f"]
        assert store.is_taken(["x", "d/a"])
        assert not store.is_taken(["d", "d/e"])
        assert not store_of(place, whole=False).is_taken(["d", "x"])
        assert store_of(place, whole=False).is_taken(["x", "d/a"])

    def test_a_placeholder_for_a_folder_is_nothing(self, gcs: Place) -> None:
        gcs.server.buckets.put("bucket", f"{gcs.prefix}/run/", b"")
        assert not shardkeep.exists(f"{gcs.url}/run")
        assert store_at(location(f"{gcs.url}/run")).children("") == []
        shardkeep.save(f"{gcs.url}/run", {"w": np.arange(3)}, format="zarr")
        shardkeep.save(f"{gcs.url}/run", {"w": np.arange(4)}, overwrite=True)
        assert_same(shardkeep.load(f"{gcs.url}/run"), {"w": np.arange(4)})

    def test_many_are_removed(self, place: Place) -> None:
        store = store_of(place)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: put(store, f"x/{i}", b"1"), range(30)))
        store.remove(f"x/{i}" for i in range(1, 2100))
        assert place.names() == {"x/0": 1}

    def test_sizes_of_many_are_listed_in_ranges(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many names in each as one response has, here five; objects of other names may lie between them."""
        monkeypatch.setattr(listing, "LISTED_AT_ONCE", 5)
        monkeypatch.setattr(objects, "LISTED_AT_ONCE", 5)
        store = store_of(place)
        names = [f"{i:02}" for i in range(23)]
        others = [f"{i:02}-{j}" for i in (0, 7, 22) for j in range(7)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: put(store, name, b"1" * (int(name[:2]) + 1)), [*names, *others]))
        wanted = [*names, "03-x", "zz", ""]
        assert store.sizes(wanted) == {**{name: int(name) + 1 for name in names}, "03-x": None, "zz": None, "": None}
        assert store.sizes(reversed(names[3:20])) == {name: int(name) + 1 for name in names[3:20]}

    def test_identities_tell_states_apart(self, place: Place) -> None:
        store = store_of(place, whole=False)
        put(store, "file", b"one")
        first = store.identity("file")
        assert first == store.identity("file")
        place.put("file", b"other")
        assert store.identity("file") != first
        assert read(store, "file", 0, 5) == b"other"  # nor is the old size remembered

    def test_a_rename_sends_what_was_kept_on_condition_of_what_was_read(self, place: Place) -> None:
        store = store_of(place, whole=False)
        put(store, "name", b"old one")
        assert store.identity("name") is not None
        assert read(store, "name", 0, 7) == b"old one"
        put(store, f"{store.control}/new.tmp", b"new")
        assert place.names() == {"name": 7}
        store.rename(f"{store.control}/new.tmp", "name")
        assert read(store, "name", 0, 3) == b"new"
        assert place.names() == {"name": 3}
        place.put("name", b"another's")
        put(store, f"{store.control}/newer.tmp", b"newer")
        with pytest.raises(ConflictError, match="changed by another program"):
            store.rename(f"{store.control}/newer.tmp", "name")
        assert place.get("name") == b"another's"
        store.remove([f"{store.control}/newer.tmp"])
        assert place.names() == {"name": 9}

    def test_a_new_name_is_never_written_over(self, place: Place) -> None:
        put(store_of(place), "name", b"one")
        with pytest.raises(ConflictError, match="written by another program"):
            put(store_of(place), "name", b"two")
        assert place.get("name") == b"one"


class TestDocuments:
    def test_a_document_is_replaced_on_condition_that_it_is_the_one_that_was_read(self, place: Place) -> None:
        one, two = store_of(place), store_of(place)
        with pytest.raises(FileNotFoundError, match="not"):
            one.read("manifest.json")
        with pytest.raises(FileNotFoundError, match="not"):
            two.read("manifest.json")
        one.replace("manifest.json", b"first")
        with pytest.raises(ConflictError, match=r"manifest\.json was changed by another program"):
            two.replace("manifest.json", b"second")
        assert two.read("manifest.json") == b"first"
        two.replace("manifest.json", b"third")
        two.replace("manifest.json", b"fourth")  # its own is the one it knows
        with pytest.raises(ConflictError, match="changed by another program"):
            one.replace("manifest.json", b"fifth")
        assert place.get("manifest.json") == b"fourth"

    def test_an_index_of_exchange_files_is_replaced_on_the_same_condition(self, place: Place) -> None:
        one, two = store_of(place, whole=False), store_of(place, whole=False)
        assert one.identity("index") is None
        assert two.identity("index") is None
        one.replace("index", b"first")
        with pytest.raises(ConflictError, match="changed by another program"):
            two.replace("index", b"second")

    def test_one_that_was_never_read_is_replaced_anyway(self, place: Place) -> None:
        place.put("index", b"old")
        store_of(place).replace("index", b"new")
        assert place.get("index") == b"new"


class TestLeases:
    def test_a_record_and_its_lines(self, place: Place) -> None:
        store = store_of(place)
        held = hold(store, ".shardkeep/saves/1", b'["a"]')
        held.append(b'["b"]')
        lines = store.read(".shardkeep/saves/1").splitlines()
        assert lines[1:] == [b'["a"]', b'["b"]']
        with pytest.raises(ConflictError, match="saves/1 already exists"):
            hold(store_of(place), ".shardkeep/saves/1", b"")
        held.remove()
        assert place.names() == {}

    def test_no_two_renewals_are_the_same(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """S3 tells states apart by their bytes: without that a renewed record could be taken over."""
        monkeypatch.setenv("SHARDKEEP_LEASE", "0.4")
        held = hold(store_of(place), "record", b"[]")
        seen: dict[bytes, float] = {}
        deadline = time.monotonic() + 5
        while len(seen) < 4 and time.monotonic() < deadline:
            seen.setdefault(place.get("record"), time.monotonic())
            time.sleep(0.02)
        assert len(seen) == 4
        held.remove()

    def test_a_held_record_is_not_taken_over_and_a_dead_one_is(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHARDKEEP_LEASE", "1.0")
        live = hold(store_of(place), "live", b'["a"]')
        dead = hold(store_of(place), "dead", b'["b"]')
        dead.release()
        store = store_of(place)
        time.sleep(2.2)
        with store.lock(10):
            assert store.try_hold("live", Scope("a test")) is None
            assert store.try_hold("gone", Scope("a test")) is None
            taken = store.try_hold("dead", Scope("a test"))
            assert taken is not None
            assert store.read("dead").splitlines()[1:] == [b'["b"]']
            # The owner was only stopped, and goes on: it is told.
            dead._over = Latch()
            for action in (lambda: dead.append(b"[]"), lambda: dead.confirm(0)):
                with pytest.raises(ConflictError, match="assumed that it had died. Nothing was committed"):
                    action()
            taken.remove()
            with pytest.raises(ConflictError, match="assumed that it had died"):
                dead.confirm(0)
        live.confirm(0)
        live.remove()
        assert place.names() == {}

    def test_who_was_taken_for_dead_replaces_nothing(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHARDKEEP_LEASE", "1.0")
        store, other = store_of(place), store_of(place)
        place.put("manifest.json", b"old")
        put(store, f"{store.control}/aside.tmp", b"new")
        store.read("manifest.json")
        hold(store, "record", b"[]").release()
        time.sleep(2.2)
        with other.lock(10):
            assert other.try_hold("record", Scope("a test")) is not None
        store._leases[0]._over = Latch()
        with pytest.raises(ConflictError, match="assumed that it had died"):
            store.replace("manifest.json", b"new")
        with pytest.raises(ConflictError, match="assumed that it had died"):
            store.rename(f"{store.control}/aside.tmp", "manifest.json")
        with pytest.raises(ConflictError, match="assumed that it had died"):
            store.remove(["manifest.json"])
        assert place.get("manifest.json") == b"old"

    def test_a_renewal_whose_answer_never_came_is_no_other_owner(self, watched: Place, monkeypatch: Any) -> None:
        """It was done, but nobody heard of it: the next one finds its own hand."""
        store = store_of(watched)
        held = hold(store, "record", b"[]")
        monkeypatch.setattr(objects, "PATIENCE", 0.0)
        watched.inject("close", "PUT", "record", served=True)
        watched.inject("status", "GET", "record", status=403)
        with pytest.raises(StorageError, match="403"):
            held.append(b'["a"]')
        held.append(b'["b"]')
        assert store.read("record").splitlines()[1:] == [b"[]", b'["b"]']
        held.remove()
        assert watched.names() == {}

    def test_the_lock_excludes_until_it_is_released(self, place: Place) -> None:
        inside: list[int] = []
        with store_of(place).lock(10):
            waiting = threading.Thread(target=lambda: _enter(place, inside))
            waiting.start()
            time.sleep(0.3)
            assert inside == []
        waiting.join(10)
        assert inside == [1]
        assert place.names() == {}

    def test_a_lock_that_is_renewed_is_not_taken_over(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHARDKEEP_LEASE", "0.8")
        with store_of(place).lock(10), ThreadPoolExecutor(1) as pool:
            entering = pool.submit(_enter, place, [], 2)
            with pytest.raises(ConflictError, match=r"timed out waiting for the lock .*\.shardkeep/lock"):
                entering.result()
        assert place.names() == {}

    def test_who_lost_the_lock_does_not_remove_it(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHARDKEEP_LEASE", "0.5")
        monkeypatch.setattr(leases.Lease, "_renew_often", lambda self: None)  # as if stopped
        first = store_of(place)
        entered, leave = threading.Event(), threading.Event()

        def enter() -> None:
            with store_of(place).lock(10):
                entered.set()
                leave.wait(30)

        with first.lock(10), ThreadPoolExecutor(1) as pool:
            entering = pool.submit(enter)
            assert entered.wait(30)
            with pytest.raises(ConflictError, match="assumed that it had died"):
                first.replace("manifest.json", b"")
            held = place.get(".shardkeep/lock")
            first._leases[0].remove()
            assert place.get(".shardkeep/lock") == held
            leave.set()
            entering.result()
        assert set(place.names()) <= {".shardkeep/lock"}

    def test_one_of_many_claims(self, place: Place) -> None:
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda _: store_of(place).claim("claims/1"), range(8)))
        assert won.count(True) == 1
        assert not store_of(place).claim("claims/1")


def _enter(place: Place, inside: list[int], seconds: float = 10) -> None:
    with store_of(place).lock(seconds):
        inside.append(1)


class TestLimits:
    def test_large_uploads_go_one_after_another(self, gcs: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each is in parts that go up at the same time: several of them would take several times the memory."""
        monkeypatch.setattr(cloud, "LARGE", 1 << 20)
        monkeypatch.setattr(cloud, "_PART", 5 << 20)
        monkeypatch.setattr(BucketStore, "traits", replace(BucketStore.traits, object_limit=1 << 20))
        tree = {name: pattern(np.uint8, (6 << 20,), seed) for seed, name in enumerate("abc")}
        shardkeep.save(f"{gcs.url}/model.safetensors", tree, max_shard_size=7 << 20)
        ends = [r.target for r in gcs.server.requests if "upload" in r.target]
        numbers = ["uploads" in target for target in ends]
        assert numbers == [True, False, False, False] * 3
        assert_same(shardkeep.load(f"{gcs.url}/model.safetensors"), tree)

    def test_few_arrays_out_of_many_do_not_hold_the_memory_of_all(self, gcs: Place) -> None:
        """What lies between the arrays that were asked for costs nothing, in huge pages neither."""
        count, each = 64, 3 << 20
        tree: dict[str, Any] = {}
        for i in range(count):
            tree[f"{i:03}.big"] = np.full(each, i, np.uint8)
            tree[f"{i:03}.norm"] = np.full(65536, i, np.uint8)
        shardkeep.save(f"{gcs.url}/model.safetensors", tree)
        del tree
        before = anonymous()
        loaded = shardkeep.load(f"{gcs.url}/model.safetensors", include="norm")
        assert loaded["005.norm"][0] == 5
        # 4 MiB of data; each in a huge page of its own would be 128 MiB.
        assert anonymous() - before < 40 << 20


def anonymous() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous"))


def test_a_mapping_fetches_each_part_once(gcs: Place) -> None:
    store = store_of(gcs)
    data = pattern(np.uint8, (300_000,)).tobytes()
    put(store, "file", data)
    with store.open("file") as file:
        mapping = file.map(100, 299_000, [(100, 50), (200_000, 50), (200_100, 50)])
    gcs.server.reset()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: mapping.bring_in(0, 299_000), range(16)))
    assert mapping.data[:50].tobytes() == data[100:150]
    assert mapping.data[199_900:199_950].tobytes() == data[200_000:200_050]
    assert (mapping.data.ctypes.data - 100) % 64 == 0
    assert [request.sent for request in gcs.server.requests if request.status == 206] == [50, 150]


def test_a_forked_child_is_told_at_once(place: Place) -> None:
    """The client's threads do not follow a fork: anything sent there would wait for ever."""
    path = f"{place.url}/run"
    code = f"""
import os, time, warnings
warnings.simplefilter("ignore")
path = {path!r}
shardkeep.save(path, {{"w": np.arange(3)}})
def calls():
    yield lambda: shardkeep.load(path)
    yield lambda: shardkeep.save(path, {{"w": np.arange(4)}}, overwrite=True)
    yield lambda: shardkeep.exists(path)
    yield lambda: shardkeep.delete(path)
child = os.fork()
if child == 0:
    started, good = time.monotonic(), 0
    for call in calls():
        try:
            call()
        except shardkeep.StorageError as error:
            good += "forked process" in str(error) and "spawn" in str(error)
    os._exit(0 if good == 4 and time.monotonic() - started < 5 else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), shardkeep.load(path)["w"].tolist())
"""
    assert run_python(code, timeout=60).split("\n")[-2] == "0 [0, 1, 2]"


def test_a_fork_in_the_middle_of_a_save_leaves_it_alone(watched: Place) -> None:
    """A data loader that forks while a checkpoint goes up."""
    watched.inject("delay", "PUT", "safetensors$", seconds=2)
    code = f"""
import os, time, warnings
warnings.simplefilter("ignore")
pending = shardkeep.save_async({watched.url!r} + "/run", {{"w": np.arange(3)}})
time.sleep(1)
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
pending.wait()
print(shardkeep.load({watched.url!r} + "/run")["w"].tolist())
"""
    assert run_python(code, timeout=60).split("\n")[-2] == "[0, 1, 2]"
    assert set(watched.names("run")) - {"run/manifest.json"} == {
        n for n in watched.names() if n.endswith("safetensors")
    }


def test_a_program_that_ends_finishes_its_save(watched: Place) -> None:
    """Nobody waits for it, and the lease can get no thread any more."""
    watched.inject("delay", "PUT", "safetensors$", seconds=1)
    run_python(f"shardkeep.save_async({watched.url!r} + '/run', {{'w': np.arange(3)}})", timeout=60)
    assert_same(shardkeep.load(f"{watched.url}/run"), {"w": np.arange(3)})
    assert "run/.shardkeep/lock" not in watched.names()


@pytest.mark.parametrize("during", ["/lock", "manifest.json"])
def test_an_interrupt_leaves_nothing_behind(during: str, both: Both) -> None:
    """Ctrl-C while a request is under way: it is raised when the request is done, whatever that was."""

    def scenario(place: Place) -> None:
        path = f"{place.url}/run"
        shardkeep.save(path, {"w": np.arange(3)})
        fault = place.inject("delay", "PUT", during, seconds=1)
        started = time.monotonic()
        with Writer.hire().save(path, 2, place.environment(), overwrite=True) as writer:
            until(lambda: fault.hits)
            writer.process.send_signal(signal.SIGINT)
            assert writer.outcome().startswith("KeyboardInterrupt")
        assert time.monotonic() - started < 20
        left = [name for name in place.names("run") if "/.shardkeep/" in name]
        if during == "/lock":
            assert shardkeep.load(path)["w"].tolist() == [0, 1, 2]
            assert left == []
        else:  # what is committed is not undone; its record stays for the next save to remove
            assert number_at(path) == 2
            assert all("/saves/" in name for name in left)
        shardkeep.save(path, {"w": np.arange(5)}, overwrite=True)

    both.run(scenario)


def test_no_more_requests_at_a_time_than_meant(gcs: Place) -> None:
    assert store_of(gcs).traits.concurrency == cloud.CONCURRENCY == 8
    assert store_of(gcs).traits.object_limit == 32 << 20
