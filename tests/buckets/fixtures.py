"""Buckets for tests: one SeaweedFS and one GCS server for each test process, a prefix of its own for each test.

Nothing leaves the machine: no credentials of the person who runs the tests are used, no metadata server is asked.
"""

import atexit
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import obstore
import pytest
from obstore.store import GCSStore, S3Store

from servers.gcs import GCSServer
from servers.loopback import Request
from servers.proxy import Fault, Proxy
from servers.s3 import S3Server

Scheme = Literal["gs", "s3"]
EFORMER = Path(__file__).parents[1] / "fixtures" / "eformer"


class PublicS3(S3Server):
    """SeaweedFS whose reader is also who does not sign: its buckets are public."""

    reader_key = "anonymous"


@cache
def s3_server() -> PublicS3:
    server = PublicS3().__enter__()
    atexit.register(server.__exit__)
    return server


@cache
def gcs_server() -> GCSServer:
    return GCSServer().__enter__()


@dataclass
class Place:
    """A prefix of a bucket nobody else uses, and the way other programs get there."""

    scheme: Scheme
    server: Any
    prefix: str
    endpoint: str  # what shardkeep is told: the server, or the proxy before it
    proxy: Proxy | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://bucket/{self.prefix}"

    def environment(self) -> dict[str, str]:
        if self.scheme == "gs":
            return {"STORAGE_EMULATOR_HOST": self.endpoint}
        keys = {"AWS_ACCESS_KEY_ID": self.server.access_key, "AWS_SECRET_ACCESS_KEY": self.server.secret_key}
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": self.server.region, **keys}

    @cached_property
    def client(self) -> Any:
        """Another program's: straight to the server, at this prefix."""
        options: Any = {"prefix": self.prefix, "client_options": {"allow_http": True}}
        if self.scheme == "gs":
            return GCSStore("bucket", base_url=self.server.url, bearer_token="any", **options)
        keys = {"access_key_id": self.server.access_key, "secret_access_key": self.server.secret_key}
        return S3Store("bucket", endpoint=self.server.url, region=self.server.region, **keys, **options)

    def names(self, below: str = "") -> dict[str, int]:
        """Every object below the prefix and its size."""
        found = obstore.list(self.client, below or None).collect()
        return {each["path"]: each["size"] for each in found}

    def get(self, name: str) -> bytes:
        return bytes(obstore.get(self.client, name).bytes())

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self.client, name, data, use_multipart=False)

    def upload(self, directory: Path, below: str = "") -> None:
        """Copy a local directory into the bucket, as `gsutil cp -r` and `aws s3 cp --recursive` do."""
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.put("/".join(filter(None, (below, path.relative_to(directory).as_posix()))), path.read_bytes())

    def download(self, directory: Path) -> None:
        for name in self.names():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.get(name))

    def inject(self, *arguments: Any, **options: Any) -> Fault:
        assert self.proxy is not None
        return self.proxy.inject(Fault(*arguments, **options))

    def forget(self) -> None:
        assert self.proxy is not None
        self.proxy.reset()

    @property
    def requests(self) -> list[Request]:
        assert self.proxy is not None
        return list(self.proxy.requests)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty environment, and nothing written to the disk: a URL must not become a local folder."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "STORAGE_", "TENSORSTORE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    empty = tmp_path / "nothing comes here"
    empty.mkdir()
    monkeypatch.chdir(empty)
    yield
    assert list(empty.iterdir()) == []


def make_place(scheme: Scheme, proxy: Proxy | None = None) -> Place:
    server = gcs_server() if scheme == "gs" else s3_server()
    return Place(scheme, server, uuid.uuid4().hex, proxy.url if proxy else server.url, proxy)


@pytest.fixture(params=["gs", "s3"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A prefix on each of the servers in turn."""
    made = make_place(request.param)
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture(params=["gs", "s3"])
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The same through a proxy that counts requests and makes them fail."""
    server = gcs_server() if request.param == "gs" else s3_server()
    with Proxy(server.url) as proxy:
        made = make_place(request.param, proxy)
        for name, value in made.environment().items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator["Both"]:
    """Places on both servers, for tests that mostly wait."""
    with Proxy(gcs_server().url) as gs, Proxy(s3_server().url) as s3:
        places = [make_place("gs", gs), make_place("s3", s3)]
        for made in places:
            for name, value in made.environment().items():
                monkeypatch.setenv(name, value)
        yield Both(places)


class Both:
    """Runs a scenario on both servers at the same time."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places

    def run(self, scenario: Callable[[Place], None]) -> None:
        with ThreadPoolExecutor(len(self.places)) as pool:
            done = [pool.submit(scenario, made) for made in self.places]
        for made, one in zip(self.places, done, strict=True):
            try:
                one.result()
            except BaseException as error:
                error.add_note(f"on {made.scheme}")
                raise


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A GCS server of the test's own, whose objects and log it may look at."""
    with GCSServer() as server:
        made = Place("gs", server, uuid.uuid4().hex, server.url)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield made
