"""Servers that send less than they say: a typed error that names the object, never a raw one, and never wrong data."""

import re
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Place, gcs_server, make_place, s3_server
from servers.proxy import Fault, Proxy, ProxyHandler
from support import FORMATS, pattern


class Liar(Proxy):
    """Changes the bodies of answers whose path matches a pattern, and tells their new length."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.RequestHandlerClass = LyingHandler
        self.pattern = "nothing"
        self.change: Callable[[bytes], bytes] = lambda body: body
        self.lies = 0

    def tell(self, pattern: str, change: Callable[[bytes], bytes]) -> None:
        self.pattern, self.change, self.lies = pattern, change, 0


class LyingHandler(ProxyHandler):
    server: Liar

    def answer(self, response: HTTPResponse, fault: Fault) -> None:
        if self.command != "GET" or not re.search(self.server.pattern, unquote(self.path)):
            return super().answer(response, fault)
        self.server.lies += 1
        body = self.server.change(response.read())
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None


@pytest.fixture(params=["gs", "s3"])
def lying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    server = gcs_server() if request.param == "gs" else s3_server()
    with Liar(server.url) as proxy:
        made = make_place(request.param, proxy)
        for name, value in made.environment().items():
            monkeypatch.setenv(name, value)
        yield made


def liar_of(place: Place) -> Liar:
    assert isinstance(place.proxy, Liar)
    return place.proxy


def cut(body: bytes) -> bytes:
    return body[:-5]


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_an_answer_shorter_than_what_was_asked_for(kind: str, lying: Place) -> None:
    ending, arguments = FORMATS[kind]
    path = f"{lying.url}/run{ending}"
    tree: dict[str, Any] = {"w": pattern(np.float32, (3000,)), "v": np.arange(10)}
    shardkeep.save(path, tree, **arguments)
    liar_of(lying).tell(r"\.safetensors$|/[wv]/0", cut)
    with pytest.raises((shardkeep.StorageError, shardkeep.IntegrityError), match=r"run.* sent "):
        shardkeep.load(path)
    assert liar_of(lying).lies
    if ending:  # what says what is there cannot be read, either
        with pytest.raises(shardkeep.StorageError, match=r"run.* sent "):
            shardkeep.inspect(path)
        with pytest.raises(shardkeep.StorageError, match=r"run.* sent "):
            shardkeep.verify(path)
    else:
        report = shardkeep.verify(path)
        assert not report.ok
        assert all(" sent " in problem.message for problem in report.problems)
    liar_of(lying).tell("nothing", cut)
    assert shardkeep.verify(path).ok


def test_a_document_shorter_than_it_should_be(lying: Place) -> None:
    """Here nothing but the length in the answer says how long it is: the seal notices."""
    path = f"{lying.url}/run"
    shardkeep.save(path, {"w": np.arange(10)})
    liar_of(lying).tell(r"manifest\.json$", cut)
    with pytest.raises(shardkeep.IntegrityError, match=r"manifest\.json is damaged"):
        shardkeep.load(path)
    assert not shardkeep.verify(path).ok


@pytest.mark.parametrize("wrong", [b"1", b"99999999"])
def test_a_listing_with_a_wrong_size(wrong: bytes, lying: Place) -> None:
    path = f"{lying.url}/run"
    shardkeep.save(path, {"w": pattern(np.float32, (3000,))})
    liar_of(lying).tell("list-type", lambda body: re.sub(rb"<Size>\d+</Size>", b"<Size>%b</Size>" % wrong, body))
    with pytest.raises((shardkeep.StorageError, shardkeep.IntegrityError), match=r"\.safetensors"):
        shardkeep.load(path)
    report = shardkeep.verify(path)
    assert not report.ok
    assert all(".safetensors" in problem.file for problem in report.problems)
