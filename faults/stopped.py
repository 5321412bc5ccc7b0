"""Two JAX processes that save together, one of them stopped or killed: what the other says, when, and what is there.

A process that was stopped continues once the other has given it up: what it does then must agree with what was said.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import shardkeep
from faults.pool import each, room
from faults.result import Result
from faults.spawner import Spawner
from faults.sweep import Violation, left_overs
from multiprocess.cluster import Outcome, run_cluster
from servers.gcs import GCSServer

_LEASE = 2.0  # seconds, in this process, which looks after what the others left
_WORKERS = 3

BEFORE, BEGIN, WRITE, DONE, COMMIT, LOAD = (
    "before it begins",
    "while it begins",
    "while it writes",
    "after its part is written",
    "in the commit",
    "while it loads",
)

_SCRIPT = """
path, other = PATH, 1 - VICTIM

def tree(number):
    return {"w": spread(np.full((8, 1000), number, np.float32), P("a")), "n": np.arange(9) + number, "step": number}

def strike():
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    import subprocess  # it is continued when the other process has given it up
    wait = f"for i in $(seq 1200); do [ -e '{root}/over.{other}' ] && break; sleep 0.1; done; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wait], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    (root / "struck").touch()
    # To this thread: sent to the process, the signal may wake another one first, and this one would run on meanwhile.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

def strike_at(owner, name, moment="before"):
    real = getattr(owner, name)
    def struck(*args, **kwargs):
        setattr(owner, name, real)
        if moment == "before":
            strike()
        result = real(*args, **kwargs)
        if moment == "after":
            strike()
        return result
    setattr(owner, name, struck)

def until_answered():
    # Calls fail at once while an earlier one has no answer, which a busy machine may give only now.
    until = time.monotonic() + 60
    groups = shardkeep.processes.operation._groups.values()
    while any(late.empty() for group in groups for late in list(group._calls._late)) and time.monotonic() < until:
        time.sleep(0.01)

def look():
    # Alone: the other process may be dead.
    place = shardkeep.stores.location.location(path)
    request = shardkeep.loading.request.LoadRequest(include=shardkeep.loading.load._pattern("^(n|step)$"))
    skeleton, leaves, _ = shardkeep.loading.load.load_request(place, request, shardkeep.processes.operation.ALONE)
    found = skeleton.rebuild(leaves)
    return int(found["step"]) if (found["n"] == np.arange(9) + found["step"]).all() else -1

calls = {
    "save": lambda number: shardkeep.save(path, tree(number), overwrite=True),
    "save_async": lambda number: shardkeep.save_async(path, tree(number), overwrite=True).wait(),
    "load": lambda number: shardkeep.load(path, mmap=False),
}
shardkeep.save(path, tree(0))
shardkeep.load(path)
meet(root, "saved", index, size)
if index == VICTIM:
    from shardkeep.targets import directory
    from shardkeep.loading import load as loading
    from shardkeep.saving import store as saving
    from shardkeep.targets.transaction import Transaction
    strike_at(*{
        "before it begins": (saving, "plan_save"),
        "while it begins": (directory.Directory, "reserve") if index == 0 else (Transaction, "follow"),
        "while it writes": (saving, "write_files"),
        "after its part is written": (Transaction, "commit") if index == 0 else (saving, "hand_in", "after"),
        "in the commit": (directory.Directory, "put"),
        "while it loads": (loading, "read_leaves"),
    }[PHASE])
first = caught(calls[CALL], 1)
say(first=first)
(root / f"over.{index}").touch()
if HOW == "stop":
    meet(root, "over", index, size)
    say(found=look())
    meet(root, "seen", index, size)
    until_answered()
    meet(root, "answered", index, size)
    say(second=caught(calls["save"], 2), third=caught(calls["load"], 2))
meet(root, "end", index, size, but=VICTIM if HOW == "kill" else -1)
os._exit(0)
"""


@dataclass(frozen=True)
class Point:
    """What happens to which process, and where the checkpoint and the coordination service are."""

    victim: int
    how: str
    phase: str
    bucket: bool = False
    inside: bool = False  # the coordination service is in process 0
    call: str = "save"
    silence: str = "8"
    lease: str = "6"
    limit: float = 28.0  # seconds until the other process must have raised, on a machine that is busy with other points

    @property
    def name(self) -> str:
        what = "killed" if self.how == "kill" else "stopped"
        where = "bucket" if self.bucket else "disk"
        service = "inside" if self.inside else "outside"
        return f"process {self.victim} {what} {self.phase} ({self.call}, {where}, service {service}, {self.silence} s)"


# The limits that are promised, with the limits that are set by default.
_DEFAULTS = {"silence": "20", "lease": "60"}
PROMISED = [
    Point(0, "kill", COMMIT, bucket=True, limit=30.0, **_DEFAULTS),
    Point(0, "stop", COMMIT, limit=45.0, **_DEFAULTS),
    Point(0, "stop", COMMIT, inside=True, limit=45.0, **_DEFAULTS),
    Point(0, "stop", COMMIT, bucket=True, inside=True, limit=45.0, **_DEFAULTS),
]


def points(how: str) -> list[Point]:
    """Every phase of every process, on a disk and in a bucket, the service in process 0 or outside."""
    phases = [(victim, phase) for victim in (0, 1) for phase in (BEFORE, BEGIN, WRITE, DONE)] + [(0, COMMIT)]
    found = [
        Point(victim, how, phase, bucket, inside)
        for (victim, phase), bucket, inside in itertools.product(phases, (False, True), (False, True))
        if how == "stop" or victim == 1 or not inside  # JAX ends all when the one with the service dies: see "kill"
    ]
    found += [Point(victim, how, LOAD, call="load", inside=i) for victim in (0, 1) for i in (False, how == "stop")]
    found += [Point(victim, how, WRITE, call="save_async") for victim in (0, 1)]
    return list(dict.fromkeys(found))


def run(quick: bool) -> Iterator[Result]:
    how = (
        "two JAX processes; SIG{} to one of them in each phase; on a disk and in a bucket; coordination service in "
        "process 0 or elsewhere"
    )
    with scene() as check:
        chosen = points("stop")[:: 9 if quick else 1]
        yield each("one of two processes is stopped, and continued later", how.format("STOP"), check, chosen, _WORKERS)
        chosen = points("kill")[:: 9 if quick else 1]
        yield each("one of two processes is killed", how.format("KILL"), check, chosen, _WORKERS)
        chosen = PROMISED[:1] if quick else PROMISED
        how = "the same during the commit, with the default time limits; an error within 45 s, or 30 s if it was killed"
        yield each("the process that commits is stopped or killed", how, check, chosen, _WORKERS)


@contextmanager
def scene() -> Iterator[Callable[[Spawner | None, Point], None]]:
    """What checks one point: with a bucket of its own, and a short lease in this process."""
    before = dict(os.environ)
    numbers = itertools.count()
    with GCSServer() as server:
        os.environ["SHARDKEEP_LEASE"], os.environ["STORAGE_EMULATOR_HOST"] = str(_LEASE), server.url
        try:
            yield lambda _, point: _check(point, server, next(numbers))
        finally:
            os.environ.clear()
            os.environ.update(before)


def _check(point: Point, server: GCSServer, number: int) -> None:
    with room() as place:
        path = f"gs://bucket/{number}/run" if point.bucket else str(place / "here" / "run")
        start = f"PATH, VICTIM, HOW, PHASE, CALL = {(path, point.victim, point.how, point.phase, point.call)!r}\n"
        outcomes = run_cluster(
            start + _SCRIPT,
            place / "here",
            devices=1,
            timeout=200,
            environment={"SHARDKEEP_PROCESS_SILENCE": point.silence, "SHARDKEEP_LEASE": point.lease},
            outside=not point.inside,
        )
        broken = [*_check_said(point, outcomes, _look(path)), *_check_next(point, outcomes, path)]
        if point.bucket:
            broken += [f"left over: {name}" for name in _left_in_bucket(server, path)]
        else:
            broken += [f"left over: {name}" for name in left_overs(Path(path))]
    if broken:
        raise Violation("; ".join(broken), tuple(broken))


def _look(path: str) -> int:
    """The number of the state that is there, all of it checked."""
    tree = shardkeep.load(path)
    number = int(tree["step"])
    right = (tree["w"] == number).all() and (tree["n"] == np.arange(9) + number).all()
    if not right or tree["w"].shape != (8, 1000) or not shardkeep.verify(path).ok:
        raise Violation(f"what is there is no state that was saved: {tree}")
    return number


def _check_said(point: Point, outcomes: Sequence[Outcome], now: int) -> Iterator[str]:
    """What the processes said is true, and the one that lived on said it in time."""
    other = outcomes[1 - point.victim]
    if "first" not in other.said:
        yield f"the other process said nothing: {other.code} {other.output[-2000:]}"
        return
    found = other.said.get("found", now)
    if found not in (0, 1):
        yield f"neither the old state nor the new one was there, but {found}"
    for number, outcome in enumerate(outcomes):
        if number == point.victim and point.how == "kill":
            if outcome.code != -9:
                yield f"process {number} was not killed: {outcome.code} {outcome.output[-2000:]}"
            continue
        if "first" not in outcome.said:
            yield f"process {number} never came back: {outcome.code} {outcome.output[-2000:]}"
            continue
        error = outcome.said["first"]
        if number != point.victim and error["seconds"] > point.limit:
            yield f"process {number} raised after {error['seconds']:.1f} s: {error['message']}"
        if error["kind"] is not None and "ShardkeepError" not in error["bases"]:
            yield f"process {number} raised {error['kind']}: {error['message']}"
        if point.call != "load" and not _is_true(error, found, point.bucket):
            yield f"process {number} said {error['kind']}: {error['message']!r}, and state {found} was there"
    # A process is waited for only where something of it is needed.
    if (other.said["first"]["kind"] is None) != (point.victim == 1 and point.phase == DONE):
        yield f"the other process: {other.said['first']}"


def _is_true(error: dict[str, Any], found: int, in_bucket: bool) -> bool:
    """Whether what was raised (or that nothing was) agrees with the state that is there: 0 is the old one.

    In a bucket it must be said for certain, because the one that is given up is fenced off.
    """
    text = error["message"].lower()
    if error["kind"] is None or "committed nevertheless" in text:
        return found == 1
    if "may still commit" in text:
        return not in_bucket
    return found == 0 and ("nothing was committed" in text or "was not committed" in text)


def _check_next(point: Point, outcomes: Sequence[Outcome], path: str) -> Iterator[str]:
    """Once the one that was stopped is back, both save and load again; so does another program afterwards."""
    for number, outcome in enumerate(outcomes):
        for what in ("second", "third"):
            if point.how == "stop" and outcome.said.get(what, {"kind": "not made"})["kind"] is not None:
                yield f"the {what} call of process {number}: {outcome.said.get(what)}"
    if point.bucket:
        time.sleep(_LEASE + 1)  # what the dead left is theirs for so long
    shardkeep.save(path, {"w": np.full((8, 1000), 3, np.float32), "n": np.arange(9) + 3, "step": 3}, overwrite=True)
    if _look(path) != 3:
        yield "the next save did not load back"


def _left_in_bucket(server: GCSServer, path: str) -> set[str]:
    """Objects that neither the manifest names nor the lock and the claims explain."""
    start = path.removeprefix("gs://bucket/") + "/"
    names = {name.removeprefix(start) for name in server.objects["bucket"] if name.startswith(start)}
    known = {file.name for tree in shardkeep.inspect(path).trees.values() for file in tree.files}
    return {n for n in names - known - {"manifest.json", ".shardkeep/lock"} if not n.startswith(".shardkeep/claims/")}
