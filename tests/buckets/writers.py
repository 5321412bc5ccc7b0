"""Programs that save, to be raced, stopped and killed; and a proxy that keeps a request back."""

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import numpy as np

import shardkeep
from servers.buckets import Refused
from servers.gcs import GCSHandler, GCSServer
from servers.proxy import Proxy, ProxyHandler

LEAVES = 6

# A process that saves what it is told to, one order for each line of its standard input.
_PROGRAM = """
from signals import usual_signals
usual_signals()
import json, os, sys
import numpy as np, shardkeep
from buckets.writers import tree
from shardkeep.stores.bucket import store as cloud
shardkeep.save
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    os.environ.update(order["environment"])
    trees = {prefix: tree(order["number"]) for prefix in order["options"].pop("trees", ())}
    try:
        shardkeep.save(order["path"], tree(order["number"]), trees=trees, **order["options"])
        print("committed", flush=True)
    except BaseException as error:
        print(" ".join(f"{type(error).__name__}: {error}".split()), flush=True)
"""


def tree(number: int) -> dict[str, np.ndarray]:
    """A tree that tells which save it is of, whichever leaf is looked at."""
    return {f"leaf{i}": np.full(500, number, np.int32) for i in range(LEAVES)}


def number_at(path: str, prefix: str | None = None) -> int:
    """Which of the trees is there, whole."""
    loaded = shardkeep.load(path, prefix=prefix)
    assert sorted(loaded) == [f"leaf{i}" for i in range(LEAVES)]
    (number,) = {int(value) for leaf in loaded.values() for value in np.unique(leaf)}
    return number


class Writer:
    """A program that saves `tree(number)` when it is told to. It is ended afterwards only if it has not answered.

    The option `trees` has the prefixes under which it saves the same tree in the same commit.
    """

    _idle: ClassVar[list["Writer"]] = []

    def __init__(self) -> None:
        variables = {**os.environ, "JAX_PLATFORMS": "cpu", "SHARDKEEP_LEASE": "2"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([sys.executable, "-c", _PROGRAM], env=variables, text=True, **pipes)
        self._started = False
        self._answered = True

    @classmethod
    def hire(cls) -> "Writer":
        """One that has nothing to do; importing JAX takes its time, so they are kept."""
        if not cls._idle:
            cls._idle += [cls() for _ in range(2)]
            atexit.register(cls._dismiss)
        return cls._idle.pop().ready()

    @classmethod
    def _dismiss(cls) -> None:
        for writer in cls._idle:
            writer.process.kill()
            writer.process.communicate()
        cls._idle.clear()

    def ready(self) -> "Writer":
        if not self._started:
            assert self._line() == "ready"
            self._started = True
        return self

    def save(self, path: str, number: int, environment: Mapping[str, str], **options: Any) -> "Writer":
        order = {"path": path, "number": number, "environment": dict(environment), "options": options}
        self._answered = False
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self

    def outcome(self, seconds: float = 60) -> str:
        """What became of the save."""
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            answer = self._line()
        finally:
            timer.cancel()
        assert answer, "the program did not come to an end"
        self._answered = True
        return answer

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._answered and self.process.poll() is None:
            self._idle.append(self)
        else:
            self.process.kill()
            self.process.communicate()


def until(condition: Callable[[], Any], seconds: float = 20) -> Any:
    """What the condition gives, once that is something."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


class Keeper(Proxy):
    """Keeps requests that match back, before the server sees them, until told to let them through.

    `keeps` is asked with the method and the path; of a request to delete in bulk, the names follow the path.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.RequestHandlerClass = KeepingHandler
        self.keeps: Callable[[str, str], bool] = lambda method, target: False
        self.kept = threading.Event()
        self.let_through = threading.Event()
        self.passed = threading.Event()  # the server has answered one that was kept


class KeepingHandler(ProxyHandler):
    server: Keeper
    taken: list[bytes] | None = None

    def forward(self, server: Any) -> Any:
        target = unquote(self.path)
        if self.command == "POST":
            self.taken = list(super().blocks())
            target += b" ".join([b"", *self.taken]).decode(errors="replace")
        if not self.server.keeps(self.command, target):
            return super().forward(server)
        if self.taken is None:
            self.taken = list(super().blocks())
        self.server.kept.set()
        self.server.let_through.wait(60)
        try:
            return super().forward(server)
        finally:
            self.server.passed.set()

    def blocks(self) -> Iterator[bytes]:
        taken, self.taken = self.taken, None  # the next request of the connection has another body
        return super().blocks() if taken is None else iter(taken)


class Careless(GCSServer):
    """A server that looks like S3 but takes no notice of conditions, except those of the `kept` headers.

    The API is that of S3 already, and conditions are expected in headers of Google's; deleting in bulk is added.
    """

    kept: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = CarelessHandler


class CarelessHandler(GCSHandler):
    server: Careless

    def put_xml(self, bucket: str, key: str) -> None:
        there = self.server.objects[bucket].get(key)
        wanted = self.headers.get("If-Match")
        if "If-Match" in self.server.kept and wanted and (there is None or there.etag != wanted):
            raise Refused(412, "PreconditionFailed", "not the one")
        if "If-None-Match" in self.server.kept and "If-None-Match" in self.headers and there is not None:
            raise Refused(412, "PreconditionFailed", "there is one")
        super().put_xml(bucket, key)

    def post_xml(self, bucket: str, key: str) -> None:
        if "delete" not in self.query:
            return super().post_xml(bucket, key)
        keys = [each.text or "" for each in ElementTree.fromstring(self.body).iter() if each.tag.endswith("Key")]
        for name in keys:
            self.server.objects[bucket].pop(name, None)
        gone = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in keys)
        return self.answer_xml("DeleteResult", gone)
