"""The servers the other tests rely on behave like the real ones, and the proxy makes the faults it is told to make."""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import GCSStore, S3Store

from servers.gcs import GCSServer, gcs_process
from servers.proxy import Fault, Proxy
from servers.s3 import S3Server, shared_s3
from servers.service_account import write_service_account

MIB = 1 << 20
Open = Callable[..., Any]


@pytest.fixture(autouse=True)
def _nothing_leaves_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials of the person who runs the tests are used, and no metadata server is asked."""
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")


@pytest.fixture
def gcs() -> Iterator[GCSServer]:
    with GCSServer() as server:
        yield server


@pytest.fixture
def s3() -> S3Server:
    return shared_s3()


@pytest.fixture(params=["gcs", "s3"])
def server(request: pytest.FixtureRequest) -> GCSServer | S3Server:
    return request.getfixturevalue(request.param)


@pytest.fixture
def proxy(server: GCSServer | S3Server) -> Iterator[Proxy]:
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def connect(server: GCSServer | S3Server) -> Open:
    """Opens a fresh prefix of the server, directly or through the proxy at `url`."""
    prefix = uuid.uuid4().hex
    if isinstance(server, S3Server):
        return lambda url=server.url, **changes: open_s3(server, url, prefix=prefix, **changes)
    return lambda url=server.url, **changes: open_gcs(url, prefix=prefix, **{"bearer_token": "any", **changes})


def open_gcs(url: str, bucket: str = "bucket", retries: int = 3, timeout: str = "30s", **changes: Any) -> GCSStore:
    client = {"allow_http": True, "timeout": timeout}
    return GCSStore(bucket, base_url=url, client_options=client, retry_config=retry(retries), **changes)


def open_s3(
    server: S3Server, url: str = "", bucket: str = "", retries: int = 3, timeout: str = "30s", **changes: Any
) -> S3Store:
    keys = {"access_key_id": server.access_key, "secret_access_key": server.secret_key, "region": server.region}
    client = {"allow_http": True, "timeout": timeout}
    settings = {"endpoint": url or server.url, **keys, **changes}
    return S3Store(bucket or server.bucket, client_options=client, retry_config=retry(retries), **settings)


def retry(times: int) -> Any:
    backoff = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=100), "base": 2}
    return {"max_retries": times, "retry_timeout": timedelta(seconds=30), "backoff": backoff}


def race(action: Callable[[int], Any], expected: type[Exception], count: int = 16) -> list[int]:
    """Those of `count` threads whose action did not raise the expected error."""
    barrier = threading.Barrier(count)

    def run(index: int) -> bool:
        barrier.wait()
        try:
            action(index)
        except expected:
            return False
        return True

    with ThreadPoolExecutor(count) as pool:
        return [index for index, won in enumerate(pool.map(run, range(count))) if won]


def test_objects_come_back_under_any_name(connect: Open) -> None:
    store = connect()
    names = ["a", "b/c", "b/a name", "100%", "a+b", "übung/ñ", "x&y=z", "quote'", "#hash", "wild*?"]
    for name in names:
        store.put(name, name.encode())
    assert {name: bytes(store.get(name).bytes()) for name in names} == {name: name.encode() for name in names}
    assert sorted(meta["path"] for meta in store.list().collect()) == sorted(names)
    assert {meta["size"] for meta in store.list("b").collect()} == {3, 8}
    for name in names:
        store.delete(name)
    assert store.list().collect() == []


def test_ranges(connect: Open) -> None:
    store = connect()
    store.put("name", bytes(range(200)))
    assert bytes(store.get_range("name", start=10, length=5)) == bytes(range(10, 15))
    assert bytes(store.get_range("name", start=190, end=300)) == bytes(range(190, 200))
    assert bytes(store.get("name", options={"range": {"suffix": 3}}).bytes()) == bytes(range(197, 200))
    assert bytes(store.get("name", options={"range": {"offset": 198}}).bytes()) == bytes(range(198, 200))
    parts = store.get_ranges("name", starts=[0, 100, 150], lengths=[1, 2, 3], coalesce=0)
    assert [bytes(part) for part in parts] == [b"\0", b"de", bytes(range(150, 153))]
    with pytest.raises(GenericError, match="416"):
        store.get_range("name", start=200, length=1)


def test_what_is_missing_is_not_found(server: GCSServer | S3Server, connect: Open) -> None:
    store = connect()
    for ask in (store.get, store.head):
        with pytest.raises(FileNotFoundError, match="404"):
            ask("missing")
    absent = connect(bucket="absent")
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        absent.put("name", b"")
    with pytest.raises((GenericError, FileNotFoundError), match="NoSuchBucket"):
        absent.list().collect()


def test_one_of_sixteen_creators_wins(connect: Open) -> None:
    store = connect()
    winners = race(lambda index: store.put("name", b"%d" % index, mode="create"), AlreadyExistsError)
    assert [b"%d" % index for index in winners] == [bytes(store.get("name").bytes())]


def test_one_of_sixteen_updaters_wins(connect: Open) -> None:
    store = connect()
    seen = {name: value for name, value in store.put("name", b"first").items() if value is not None}
    winners = race(lambda index: store.put("name", b"%d" % index, mode=seen), PreconditionError)
    assert [b"%d" % index for index in winners] == [bytes(store.get("name").bytes())]


def test_reads_can_insist_on_a_version(connect: Open) -> None:
    store = connect()
    seen = store.put("name", b"first")["e_tag"]
    assert bytes(store.get("name", options={"if_match": seen}).bytes()) == b"first"
    store.put("name", b"second")
    with pytest.raises(PreconditionError, match="412"):
        store.get("name", options={"if_match": seen})


def test_parts_become_one_object(connect: Open) -> None:
    store, data = connect(), os.urandom(12 * MIB + 5)
    store.put("name", data, chunk_size=5 * MIB, max_concurrency=4)
    assert store.head("name")["size"] == len(data)
    assert bytes(store.get("name").bytes()) == data


def test_listings_go_over_many_pages(connect: Open) -> None:
    store = connect()
    names = [f"{index % 2}/{index:04}" for index in range(2100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))
    assert sorted(meta["path"] for meta in store.list().collect()) == sorted(names)
    assert len(store.list("1").collect()) == 1050
    assert sorted(store.list_with_delimiter()["common_prefixes"]) == ["0", "1"]
    assert len(store.list_with_delimiter("0")["objects"]) == 1050


def test_another_program_sees_the_same_objects(
    server: GCSServer | S3Server, connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect()
    if isinstance(server, S3Server):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        spec = {"driver": "s3", "bucket": server.bucket, "endpoint": server.url, "aws_region": server.region}
        spec["aws_credentials"] = {"type": "environment"}
    else:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        spec = {"driver": "gcs", "bucket": "bucket"}
    spec["path"] = store.prefix + "/"
    other = ts.KvStore.open(spec).result()
    store.put("ours", b"from obstore")
    assert other.read("ours").result().value == b"from obstore"
    other.write("theirs", b"from tensorstore").result()
    assert bytes(store.get("theirs").bytes()) == b"from tensorstore"
    assert sorted(other.list().result()) == [b"ours", b"theirs"]
    absent = other.read("absent").result().stamp.generation
    assert other.write("ours", b"new", if_equal=absent).result().generation == b""
    array = ts.open({"driver": "zarr3", "kvstore": {**spec, "path": store.prefix + "/zarr/"}}, create=True,
                    dtype=ts.int32, shape=[40], chunk_layout=ts.ChunkLayout(chunk_shape=[10])).result()  # fmt: skip
    array.write(np.arange(40, dtype=np.int32)).result()
    assert bytes(store.get("zarr/c/1").bytes())
    other.delete_range(ts.KvStore.KeyRange("", "")).result()
    assert store.list().collect() == []


def test_s3_checks_who_asks(s3: S3Server) -> None:
    for wrong, code in (("access_key_id", "InvalidAccessKeyId"), ("secret_access_key", "SignatureDoesNotMatch")):
        with pytest.raises(PermissionDeniedError, match=code):
            open_s3(s3, **{wrong: "wrong"}).get("name")
    with pytest.raises(PermissionDeniedError, match="AccessDenied"):
        open_s3(s3, skip_signature=True).get("name")
    reader = open_s3(s3, access_key_id=s3.reader_key)
    with pytest.raises(FileNotFoundError, match="404"):
        reader.get("missing")
    with pytest.raises(PermissionDeniedError, match="AccessDenied"):
        reader.put("name", b"")


def test_s3_keeps_what_it_had_when_it_was_killed() -> None:
    with S3Server() as server:
        store = open_s3(server)
        store.put("name", b"value")
        server.kill()
        with pytest.raises(GenericError, match="error sending request"):
            store.get("name")
        server.start()
        assert bytes(store.get("name").bytes()) == b"value"
        room = server.room
    assert not room.exists()


def test_gcs_checks_tokens() -> None:
    with GCSServer(tokens={"good": "write", "viewer": "read"}) as server:
        open_gcs(server.url, bearer_token="good").put("name", b"value")
        viewer = open_gcs(server.url, bearer_token="viewer")
        assert bytes(viewer.get("name").bytes()) == b"value"
        with pytest.raises(PermissionDeniedError, match=r"storage\.objects\.create"):
            viewer.put("name", b"")
        with pytest.raises(UnauthenticatedError, match="Invalid Credentials"):
            open_gcs(server.url, bearer_token="bad").get("name")
        with pytest.raises(PermissionDeniedError, match="Anonymous caller"):
            open_gcs(server.url, skip_signature=True).get("name")


def test_gcs_knows_service_accounts(tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    accounts = write_service_account(key, "http://127.0.0.1:9/token")
    with GCSServer(accounts=accounts) as server:
        open_gcs(server.url, service_account=str(key)).put("name", b"value")
        adc = open_gcs(server.url, application_credentials=str(key))
        assert bytes(adc.get("name").bytes()) == b"value"
        server.accounts = {email: (modulus + 2, exponent) for email, (modulus, exponent) in accounts.items()}
        with pytest.raises(UnauthenticatedError, match="Invalid Credentials"):
            adc.get("name")


def test_gcs_hands_out_tokens_as_a_metadata_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with GCSServer(tokens={"good": "write"}) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.url.removeprefix("http://"))
        open_gcs(server.url).put("name", b"value")
        assert server.count("GET", "/computeMetadata/") == 1


def test_gcs_in_a_process_of_its_own() -> None:
    with gcs_process("--bucket", "mine", "--token", "good") as url:
        store = open_gcs(url, "mine", bearer_token="good")
        store.put("name", b"value")
        assert bytes(store.get("name").bytes()) == b"value"


def test_gcs_generations_tell_rewrites_apart_and_etags_do_not(gcs: GCSServer) -> None:
    store = open_gcs(gcs.url, bearer_token="any")
    first, second = store.put("name", b"same"), store.put("name", b"same")
    assert first["e_tag"] == second["e_tag"]
    assert int(first["version"]) < int(second["version"])
    assert store.head("name")["version"] == second["version"]


def test_gcs_log_and_objects(gcs: GCSServer) -> None:
    store = open_gcs(gcs.url, bearer_token="any")
    store.put("name", bytes(1000))
    gcs.buckets.put("bucket", "name", b"corrupted")
    assert bytes(store.get("name").bytes()) == b"corrupted"
    assert [(request.method, request.received, request.sent) for request in gcs.requests] == [
        ("PUT", 1000, 0),
        ("GET", 0, 9),
    ]
    assert gcs.count(part="/bucket/name") == 2
    gcs.reset()
    assert gcs.count() == 0


def test_a_part_too_small_is_refused_and_an_upload_given_up_leaves_nothing(gcs: GCSServer) -> None:
    store = open_gcs(gcs.url, bearer_token="any")
    with pytest.raises(GenericError, match="EntityTooSmall"):
        store.put("name", bytes(3 * MIB), chunk_size=MIB)
    assert gcs.objects == {"bucket": {}}


def test_a_server_that_ended_answers_nobody() -> None:
    with GCSServer() as server:
        store = open_gcs(server.url, bearer_token="any", retries=0)
        store.put("name", b"")
    started = time.monotonic()
    with pytest.raises(GenericError, match="error sending request"):
        store.get("name")
    assert time.monotonic() - started < 2


def test_bodies_pass_the_proxy_whole(connect: Open, proxy: Proxy) -> None:
    store, data = connect(proxy.url, timeout="120s"), os.urandom(64 * MIB)
    store.put("name", data, use_multipart=False)
    assert bytes(store.get("name").bytes()) == data
    store.put("parts", data, chunk_size=16 * MIB)
    assert bytes(store.get_range("parts", start=MIB, length=MIB)) == data[MIB : 2 * MIB]
    assert len(store.list().collect()) == 2
    assert sum(request.received for request in proxy.requests if request.method == "PUT") == 2 * len(data)


@pytest.mark.parametrize("action", ["status", "reset", "close"])
@pytest.mark.parametrize("served", [False, True])
def test_faults_are_retried(action: Any, served: bool, connect: Open, proxy: Proxy) -> None:
    store = connect(proxy.url)
    put = proxy.inject(Fault(action, "PUT", times=2, served=served))
    store.put("name", b"value")
    get = proxy.inject(Fault(action, "GET", "name", times=3, served=served))
    assert bytes(store.get("name").bytes()) == b"value"
    assert (put.hits, get.hits) == (2, 3)
    assert (proxy.count("PUT"), proxy.count("GET")) == (3, 4)
    proxy.inject(Fault(action, "GET", times=4, served=served))
    with pytest.raises(GenericError, match="after 3 retries"):
        store.get("name")


def test_a_create_whose_answer_got_lost_looks_like_one_that_came_too_late(connect: Open, proxy: Proxy) -> None:
    store = connect(proxy.url)
    proxy.inject(Fault("close", "PUT", served=True))
    with pytest.raises(AlreadyExistsError, match="after 1 retries"):
        store.put("name", b"mine", mode="create")
    assert bytes(store.get("name").bytes()) == b"mine"


def test_faults_hit_what_they_name(connect: Open, proxy: Proxy) -> None:
    store = connect(proxy.url, retries=0)
    proxy.inject(Fault("status", "PUT", r"/chosen\b", status=500))
    store.put("other", b"")
    with pytest.raises(GenericError, match="500"):
        store.put("chosen", b"")
    store.put("chosen", b"")
    assert [request.status for request in proxy.requests] == [200, 500, 200]
    proxy.reset()
    assert proxy.count() == 0


def test_a_body_cut_short_is_noticed(connect: Open, proxy: Proxy) -> None:
    data = os.urandom(4 * MIB)
    connect().put("name", data)
    proxy.inject(Fault("cut", "GET", size=MIB))
    assert bytes(connect(proxy.url).get_range("name", start=0, length=len(data))) == data
    assert proxy.count("GET") == 2
    proxy.inject(Fault("cut", "GET", size=MIB, times=9))
    with pytest.raises(GenericError, match="body"):
        connect(proxy.url, retries=1).get_range("name", start=0, length=len(data))


def test_answers_can_be_late_or_slow(connect: Open, proxy: Proxy) -> None:
    connect().put("name", bytes(MIB))
    store = connect(proxy.url)
    for fault in (Fault("delay", seconds=0.5), Fault("slow", size=2 * MIB)):
        proxy.inject(fault)
        started = time.monotonic()
        assert len(store.get_range("name", start=0, length=MIB)) == MIB
        assert 0.4 < time.monotonic() - started < 5
    proxy.inject(Fault("delay", seconds=60, times=9))
    with pytest.raises(GenericError, match="error sending request"):
        connect(proxy.url, timeout="300ms", retries=1).get("name")
