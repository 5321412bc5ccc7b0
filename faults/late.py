"""Late requests to a bucket: what a writer sent before it lost its lease arrives after others have gone on.

A second program saves through a proxy that keeps one of its real, signed requests back. The program is stopped until
its lease is over, somebody else saves, cleans up or deletes, and then the request is let through.
"""

import itertools
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import shardkeep
from buckets.fixtures import Place, Scheme, gcs_server, make_place, s3_server
from buckets.writers import Keeper, Writer, number_at, tree
from faults.result import Result
from faults.sweep import Violation
from shardkeep.cli.cleaning import _look, _remove, _Runs
from shardkeep.converting.survey import survey

LEASE = 2.0
_AT_ONCE = 10  # points mostly wait
_SCHEMES: tuple[Scheme, ...] = ("gs", "s3")

_SHARDED = {"max_shard_size": 4096}
_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "safetensors": ("run", {"prefix": "model"}),
    "tensorstore": ("run", {"prefix": "model", "format": "zarr"}),
    "one file": ("model.safetensors", {}),
    "several files": ("model.safetensors", _SHARDED),
    "one file over several": ("model.safetensors", {}),
}
_DATA = r"leaf\d|-\d{5}(-of-\d{5})?\.safetensors"
# Kind of request: what it matches (S3 deletes by POST, with the names in the body), and which of them is kept back.
_REQUESTS: dict[str, tuple[str, str, int]] = {
    "put of the lock": ("PUT", r"/lock$", 1),
    "put of the lock for the commit": ("PUT", r"/lock$", 4),
    "put of the record": ("PUT", r"/saves/", 1),
    "renewal of the record": ("PUT", r"/saves/", 2),
    "put of the claim": ("PUT", r"/claims/", 1),
    "put of data": ("PUT", rf"({_DATA})", 1),
    "later put of data": ("PUT", rf"({_DATA})", 3),
    "put of the document": ("PUT", r"(manifest\.json|model\.safetensors|model\.safetensors\.index\.json)$", 1),
    "put of the index for eFormer": ("PUT", r"tensorstore_index\.json$", 1),
    "put of the index beside the file": ("PUT", r"model\.safetensors\.index\.json$", 1),
    "delete of data": ("DELETE|POST", rf"({_DATA})", 1),
    "delete of the record": ("DELETE|POST", r"/saves/", 1),
    "delete of the lock": ("DELETE|POST", r"/lock", 1),
    "delete of the lock after the commit": ("DELETE|POST", r"/lock", 2),
}
_ANY = ["put of the lock", "put of the lock for the commit", "put of the record", "renewal of the record"]
_ANY += ["put of the document", "delete of the record", "delete of the lock", "delete of the lock after the commit"]
_OF_FORM = {
    "safetensors": [*_ANY, "put of data", "delete of data"],
    "tensorstore": [*_ANY, "put of data", "later put of data", "put of the index for eFormer", "delete of data"],
    "one file": _ANY,
    "several files": [*_ANY, "put of data", "later put of data", "delete of data"],
    "one file over several": ["put of the document", "put of the index beside the file", "delete of data"],
}
_OF_FIRST = ["put of data", "later put of data", "put of the claim", "put of the document"]


@dataclass(frozen=True)
class Point:
    """One late request, what happens before it arrives, and whether its sender goes on or dies."""

    scheme: Scheme
    form: str
    request: str
    meanwhile: str  # save, other (prefix), several (files), clean, delete (and save)
    first: bool = False  # nothing was there before
    dies: bool = False
    waiting: bool = False  # the other began before the writer was stopped, and waits for its lock

    @property
    def name(self) -> str:
        fate = "killed" if self.dies else "continued"
        then = f"{self.meanwhile}{' that waited' if self.waiting else ''}"
        return f"{self.scheme}, {self.form}, first={self.first}, late {self.request}, then {then}, {fate}"


def points() -> Iterator[Point]:
    dies = itertools.cycle((False, True, True, False))
    for scheme, (form, requests) in itertools.product(_SCHEMES, _OF_FORM.items()):
        directory = form in ("safetensors", "tensorstore")
        for request, meanwhile in itertools.product(requests, ("save", "other", "clean", "delete")):
            # After a delete names are free again: that is the exception which docs/reliability.md names.
            freed = meanwhile == "delete" and form == "tensorstore" and request == "delete of data"
            if (directory or meanwhile != "other") and not freed:
                yield Point(scheme, form, request, meanwhile, dies=next(dies))
        for request, meanwhile in itertools.product(_OF_FIRST, ("save", "clean", "delete")):
            if form != "one file over several" and _is_sent(form, request):
                yield Point(scheme, form, request, meanwhile, first=True, dies=next(dies))
        for dead in (False, True):
            yield Point(scheme, form, "put of the document", "save", dies=dead, waiting=True)
            if form == "one file":  # the others are shards now
                yield Point(scheme, form, "put of the document", "several", first=True, dies=dead)
            if form == "several files":
                yield Point(scheme, form, "put of the document", "one", first=True, dies=dead)


def _is_sent(form: str, request: str) -> bool:
    return request in (*_OF_FORM[form], "put of the claim" if form == "tensorstore" else "")


def run(quick: bool) -> Iterator[Result]:
    chosen = list(points())
    yield check_all(chosen[::12] if quick else chosen)


def check_all(chosen: Iterable[Point]) -> Result:
    """Every point, several at a time."""
    chosen = list(chosen)
    found: list[str] = []
    with short_leases(), ThreadPoolExecutor(_AT_ONCE) as pool:
        for point, done in [(point, pool.submit(check, point)) for point in chosen]:
            try:
                done.result()
            except Violation as violation:
                found += [f"{point.name}: {line}" for line in violation.found]
            except Exception as error:  # noqa: BLE001  (whatever goes wrong is the finding)
                found.append(f"{point.name}: {type(error).__name__}: {error}")
    how = (
        "a proxy delays a request of a second process, which is stopped until its lease has expired; another process "
        "saves, cleans up or deletes; then the request arrives, and the second process continues or is killed; S3 "
        "(SeaweedFS) and GCS"
    )
    return Result("a bucket request arrives late", how, len(chosen), tuple(found))


@contextmanager
def short_leases() -> Iterator[None]:
    """This process goes straight to the servers, with the lease that the writers have."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "STORAGE_"))]:
        del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    for scheme in _SCHEMES:
        os.environ.update(make_place(scheme).environment())
    os.environ["SHARDKEEP_LEASE"] = str(LEASE)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def check(point: Point) -> None:
    server = gcs_server() if point.scheme == "gs" else s3_server()
    with Keeper(server.url) as keeper:
        _check(point, make_place(point.scheme, keeper), keeper)


def _check(point: Point, place: Place, keeper: Keeper) -> None:
    ending, options = _FORMS[point.form]
    path, prefix = f"{place.url}/{ending}", options.get("prefix")
    if not point.first:
        shardkeep.save(path, tree(1), **(_SHARDED if point.form == "one file over several" else options))
    keeper.keeps = _Nth(*_REQUESTS[point.request])
    with Writer.hire().save(path, 2, place.environment(), overwrite=True, **options) as writer:
        if not keeper.kept.wait(30):
            raise Violation("no such request was sent")
        with ThreadPoolExecutor(1) as other:
            acting = other.submit(_act, point, path, options) if point.waiting else None
            time.sleep(LEASE / 2 if point.waiting else 0)
            writer.process.send_signal(signal.SIGSTOP)
            time.sleep(2 * LEASE)  # the servers count whole seconds
            acting.result() if acting else _act(point, path, options)
        before = _number(path, prefix)
        keeper.let_through.set()
        keeper.passed.wait(30)
        now = _number(path, prefix)
        # What was there when the request arrived, or if nobody has saved since it was sent, what it commits.
        if now != before and (now != 2 or point.meanwhile not in ("clean", "other")):
            raise Violation(f"{before} was there, and {now} after the request arrived")
        said = "killed"
        if point.dies:
            writer.process.kill()
        else:
            writer.process.send_signal(signal.SIGCONT)
            said = writer.outcome()
    _judge(point, said, _number(path, prefix))
    if point.meanwhile == "other" and number_at(path, "other") != 3:
        raise Violation("the tree of the other prefix was replaced")
    if _number(path, prefix) is not None and not shardkeep.verify(path).ok:
        raise Violation(f"damaged: {shardkeep.verify(path)}")
    shardkeep.save(path, tree(4), overwrite=True, **({} if point.meanwhile in ("one", "several") else options))
    if number_at(path, prefix) != 4 or not shardkeep.verify(path).ok:
        raise Violation("the next save is not what is there")


def _act(point: Point, path: str, options: dict[str, Any]) -> None:
    """What somebody else does, who takes the writer for dead."""
    if point.meanwhile == "save":
        shardkeep.save(path, tree(3), overwrite=True, **options)
    elif point.meanwhile == "several":
        shardkeep.save(path, tree(3), overwrite=True, **_SHARDED)
    elif point.meanwhile == "one":
        shardkeep.save(path, tree(3), overwrite=True)
    elif point.meanwhile == "other":
        shardkeep.save(path, tree(3), **{**options, "prefix": "other"})
    elif point.meanwhile == "clean":
        for found in survey(path):
            left = _look(found, found.target, _Runs())
            _remove(left)
            if left.problem:
                raise Violation(f"it cannot be cleaned up: {left.problem}")
    else:
        try:
            shardkeep.delete(path)
        except shardkeep.CheckpointNotFoundError:
            pass  # it was the first save
        shardkeep.save(path, tree(3), **options)


def _judge(point: Point, said: str, number: int | None) -> None:
    """Whoever reported success is there, or was replaced by somebody who saw what it had saved."""
    if said not in ("killed", "committed") and not said.startswith("ConflictError"):
        raise Violation(f"the late writer said: {said}")
    old = None if point.first else 1
    if point.meanwhile in ("clean", "other"):
        allowed = {"committed": {2}, "killed": {old, 2}}.get(said, {old})
    else:
        # One that had not begun when the other was done may replace what it finds.
        began = "put of the lock" not in point.request or said != "committed"
        allowed = {3} if began else {2, 3}
    if number not in allowed:
        raise Violation(f"{number} is there, not {' or '.join(map(str, allowed))}; the late writer: {said}")


def _number(path: str, prefix: str | None) -> int | None:
    """Which tree is there, complete; None if there is none."""
    try:
        return number_at(path, prefix)
    except (shardkeep.CheckpointNotFoundError, shardkeep.IncompleteCheckpointError, shardkeep.PrefixError):
        if shardkeep.exists(path) and prefix is None:
            raise Violation("there is no checkpoint, but it is said to exist") from None
        return None


class _Nth:
    """Whether a request is the one of its kind that is kept back."""

    def __init__(self, methods: str, pattern: str, number: int) -> None:
        self._methods, self._pattern, self._left = methods.split("|"), re.compile(pattern), number

    def __call__(self, method: str, target: str) -> bool:
        bulk = method == "POST" and "delete" not in target.partition(" ")[0]
        if method not in self._methods or bulk or not self._pattern.search(target):
            return False
        self._left -= 1
        return self._left == 0
