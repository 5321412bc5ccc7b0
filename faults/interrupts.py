"""Exceptions at every line, storms of SIGINT, saves in signal handlers, forks: what a call leaves behind.

The points are made by worker processes (`python -m faults.interrupts`), many in one process, in which a trace function
raises before a chosen line, calls shardkeep, or forks. A worker that hangs ends itself, and the point is a violation.
"""

import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faults import runs
from faults.result import Result
from faults.tracing import Injected, Point, Tracer, leaks
from signals import usual_signals

HANG = 40  # seconds
LEASE = 2.0
CALLS = ("save", "save_async", "zarr", "exchange", "bucket", "callback", "load", "verify", "delete")
_STEPS = {
    "bucket": 4,
    "callback": 2,
}  # where a clean-up is interrupted, the lease must end before the next one is complete


def run(quick: bool) -> Iterator[Result]:
    step = 40 if quick else 1
    yield _sweep(
        "an exception is raised anywhere in a call",
        "a trace function raises before each line of `save`, `save_async` (including its threads, callbacks and saves "
        "to buckets), `load`, `verify` and `delete`, the first time that the line runs and in some calls also the "
        "last time; then the next save runs",
        [point for call in CALLS for point in _points(call)[:: _STEPS.get(call, 1)]][::step],
    )
    yield _sweep(
        "an exception is raised anywhere in a method of `Run`",
        "a trace function raises before each line of `resume`, `step`, `save`, `close`, `hold` and `pin`, including "
        "retention and agreement between processes; then the run is closed, and another `Run` resumes, saves and "
        "deletes steps",
        [point for call in runs.CALLS for point in _points(call)][::step],
    )
    yield _sweep(
        "a signal handler saves during a save",
        "a trace function calls `save`, to the same path or another one, before every eighth line of `save` and "
        "`save_async`",
        [Point(p.call, p.file, p.line, p.thread, p.nth, how) for how in ("other", "same") for p in _callers()][
            :: 8 * step
        ],
    )
    yield _sweep(
        "the process forks during a save",
        "a trace function forks before every twelfth line of `save_async`, on the calling thread or while a background "
        "thread is paused at that line; the child waits for the save of its parent, then saves and loads NumPy arrays",
        [Point(p.call, p.file, p.line, p.thread, 1, "fork") for p in _points("save_async")][:: 12 * step],
    )
    yield _storm(4 if quick else 30)


def _callers() -> list[Point]:
    return [p for call in ("save", "save_async") for p in _points(call) if p.thread == "caller"]


def _points(call: str) -> list[Point]:
    """Where a call goes, found by making it once."""
    told = _worker({"find": call})
    lines = [line for line in told if line.get("point")]
    assert lines, told
    return [Point(**line["point"]) for line in lines]


def _sweep(fault: str, how: str, points: Sequence[Point], workers: int = 2) -> Result:
    found: list[str] = []
    hits: list[bool] = []

    def work(mine: Sequence[Point]) -> None:
        left = list(mine)
        while left:
            told = _worker({"make": [asdict(point) for point in left]})
            done = [line for line in told if "made" in line]
            found.extend(f"{left[n].name}: {problem}" for n, line in enumerate(done) for problem in line["made"])
            hits.extend(line["hit"] for line in done)
            if len(done) < len(left):
                log = next((line["log"] for line in told if "log" in line), "")
                found.append(f"{left[len(done)].name}: it hung, or the program ended: {log[-1500:]}")
            left = left[len(done) + 1 :]

    threads = [threading.Thread(target=work, args=(points[n::workers],)) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    missed = hits.count(False)
    note = f"lines not reached again: {missed}" if missed else ""
    if missed > len(points) // 4:
        found.append(f"{missed} of {len(points)} points were not reached")
    return Result(fault, how, len(points), tuple(found), note)


def _worker(order: dict[str, Any]) -> list[dict[str, Any]]:
    """What a worker process tells, line by line."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    environment["SHARDKEEP_LEASE"] = str(LEASE)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "faults.interrupts"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        out, _ = process.communicate(json.dumps(order))
        log.seek(0)
        told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return [*told, {"log": log.read()}] if process.returncode else told


def _storm(rounds: int) -> Result:
    """Real signals at random moments, one or several, in programs that save in the background and then end."""
    found: list[str] = []
    for seed in range(rounds):
        try:
            done = subprocess.run(
                [sys.executable, "-c", _STORM, str(seed)],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                capture_output=True,
                text=True,
                timeout=120,
            )
            if done.returncode or "left" in done.stdout:
                found.append(f"seed {seed}: {done.stdout[-300:]} {done.stderr[-600:]}")
        except subprocess.TimeoutExpired as error:
            found.append(f"seed {seed}: the program did not end: {error.stderr!s:.600}")
    how = f"{rounds} programs with 25 saves or loads each, and one to four SIGINTs at random moments of each of them"
    return Result("Ctrl-C at random moments", how, rounds * 25, tuple(found))


_STORM = """
from signals import usual_signals
usual_signals()
import os, random, signal, sys, tempfile, threading, time
import numpy as np, shardkeep
from faults.tracing import leaks
root = os.path.dirname(shardkeep.__file__)
def interrupt(number, frame):  # as Ctrl-C does, but only where it strikes a call of shardkeep
    while frame is not None:
        if frame.f_code.co_filename.startswith(root):
            raise KeyboardInterrupt
        frame = frame.f_back
signal.signal(signal.SIGINT, interrupt)
chance = random.Random(int(sys.argv[1]))
room = tempfile.mkdtemp(prefix="shardkeep-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
path = room + "/run"
shardkeep.save(path, {"a": np.ones(9)})
tree = {"a": np.ones(9), "b": np.ones(1 << 20)}
def strike():
    for _ in range(chance.choice([1, 1, 2, 4])):
        time.sleep(chance.random() * 0.004)
        os.kill(os.getpid(), signal.SIGINT)
for _ in range(25):
    striking = threading.Thread(target=strike)
    striking.start()
    try:
        kind = chance.choice(["async", "async", "save", "load"])
        if kind == "load":
            shardkeep.load(path)
        elif kind == "save":
            shardkeep.save(path, tree, overwrite=True)
        else:
            shardkeep.save_async(path, tree, overwrite=True).wait()
    except KeyboardInterrupt:
        pass
    except shardkeep.ShardkeepError as error:
        print("left: an error", repr(error))
    striking.join()
shardkeep.save_async(path, {"a": np.zeros(9)}, overwrite=True).wait(60)
if found := leaks():
    print("left:", found)
assert shardkeep.load(path)["a"][0] == 0 and shardkeep.verify(path).ok
import shutil
shutil.rmtree(room)
"""


class Worker:
    """Makes points, one after another."""

    def __init__(self, room: Path) -> None:
        import jax.numpy as jnp
        import numpy as np

        self.room = room
        self.was_hit = False
        self._children: list[int] = []
        self._server: Any = None
        self._manager: Any = None
        self._jnp_array = jnp.ones(3)
        self._np, self._jnp = np, jnp

    def tree(self, number: int) -> Any:
        """Two arrays large enough for several threads, and small leaves."""
        return {
            "w": self._jnp.full((5 << 18,), number, self._jnp.float32),
            "host": self._np.full(5 << 18, number, self._np.float32),
            "small": self._np.full(10, number),
            "step": number,
        }

    def path(self, call: str) -> Any:
        if call == "bucket":
            return self._bucket()
        return self.room / ("exchange/model.safetensors" if call == "exchange" else call)

    def _bucket(self) -> str:
        if self._server is None:
            from servers.gcs import GCSServer

            self._server = GCSServer().__enter__()
            os.environ["STORAGE_EMULATOR_HOST"] = self._server.url
        return "gs://bucket/run"

    def _extra(self, path: Any) -> set[str]:
        """Files that nothing explains."""
        import shardkeep
        from faults.sweep import left_overs

        if self._server is None or not str(path).startswith("gs://"):
            return left_overs(path)
        known = {file.name for tree in shardkeep.inspect(path).trees.values() for file in tree.files}
        return {key.removeprefix("run/") for key in self._server.objects["bucket"]} - known - {"manifest.json"}

    def begin(self, call: str, number: int, path: Any) -> Any:
        """Make the call, and wait until it is done; a save in the background is the same with its handle."""
        import shardkeep

        options: dict[str, Any] = {"format": "zarr"} if call == "zarr" else {}
        if call == "load":
            return shardkeep.load(path)
        if call == "verify":
            return shardkeep.verify(path)
        if call == "delete":
            return shardkeep.delete(path)
        if call == "callback":
            return self._with_callbacks(number, path)
        if call in ("save_async", "zarr", "bucket"):
            return shardkeep.save_async(path, self.tree(number), overwrite=True, **options).wait(HANG)
        return shardkeep.save(path, self.tree(number), overwrite=True, **options)

    def _with_callbacks(self, number: int, path: Any) -> None:
        """A save in the background and one in the foreground, of a manager that all points share."""
        from shardkeep.serialization import AsyncCheckpointManager

        self._manager = self._manager or AsyncCheckpointManager()
        with contextlib.suppress(BaseException):
            self._manager.wait_until_finished()  # what was made to fail before
        pending = self._manager.save_async(self.tree(number), self.room / "earlier", callback=str)
        self._manager.save(self.tree(number), path, callback=str)
        pending.wait(HANG)
        self._manager.wait_until_finished()

    def find(self, call: str) -> None:
        path = self.path(call)
        first = "save" if call in ("load", "verify", "delete") else call
        self.begin(first, 1, path)
        for _ in range(2):  # what happens once in a program comes first
            self.begin(first, 1, path)
            self.begin(call, 1, path)
            if call == "delete":
                self.begin(first, 1, path)
        with Tracer(None) as tracer:
            self.begin(call, 2, path)
            leaks()
        for (file, line, kind), times in sorted(tracer.seen.items()):
            for nth in sorted({1, times}) if call in ("save", "save_async") else (1,):
                print(json.dumps({"point": asdict(Point(call, file, line, kind, nth))}), flush=True)

    def make(self, point: Point) -> list[str]:
        import shardkeep

        path = self.path(point.call)
        call = point.call
        first = "save" if call in ("load", "verify", "delete") else call
        self.begin(first, 1, path)
        problems: list[str] = []
        before = len(os.listdir("/proc/self/fd"))
        action = {"raise": self._raise, "fork": lambda: self._fork(path, problems)}.get(
            point.does, lambda: self._save_within(point, path, problems)
        )
        tracer = Tracer(point, action)
        raised = ""
        try:
            with tracer:
                self.begin(call, 2, path)
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is looked at)
            raised = type(error).__name__
            expected = {"raise": (Injected, shardkeep.ShardkeepError, RuntimeError), "fork": shardkeep.ConflictError}
            if not isinstance(error, expected.get(point.does, ())):
                problems.append(f"raised {raised}: {error}: {traceback.format_exc()[-600:]}")
            del error
        if not tracer.in_clean_up and point.does == "raise" and (found := leaks(1.0)):
            problems.append(f"left behind: {found}")
        if point.does == "fork":
            leaks(HANG)  # until the thread of the save is over: it may fork after the save has returned
        self._wait_for_children(problems)
        if raised and point.does == "raise" and call not in ("load", "verify", "delete", "exchange"):
            with contextlib.suppress(shardkeep.CheckpointNotFoundError):
                state = shardkeep.load(path)["step"]
                if state not in (1, 2) or not shardkeep.verify(path).ok:
                    problems.append(f"the state is {state}")
        self.begin(first, 3, path)
        if found := leaks():
            problems.append(f"still there after the next save: {found}")
        if shardkeep.load(path)["step"] != 3 or not shardkeep.verify(path).ok:
            problems.append("the next save did not load back")
        if self._server is not None and self._extra(path):  # a record counts as alive until its lease is over
            time.sleep(LEASE + 1.5)  # the server counts seconds
            self.begin(first, 3, path)
        if extra := self._extra(path):
            problems.append(f"left over files: {sorted(extra)}")
        self.was_hit = tracer.hit
        gc.collect()
        if (now := len(os.listdir("/proc/self/fd"))) > before and self._server is None:  # connections are kept
            problems.append(f"{now - before} more open files")
        return problems

    def _raise(self) -> None:
        raise Injected

    def _save_within(self, point: Point, path: Path, problems: list[str]) -> None:
        """What a signal handler does."""
        import shardkeep

        try:
            place = path if point.does == "same" else self.room / "other"
            shardkeep.save(place, {"from": "the handler"}, overwrite=True)
        except shardkeep.ConflictError as error:
            if point.does != "same" or "signal handler" not in str(error):
                problems.append(f"the save in the handler: {error}")
        except BaseException as error:  # noqa: BLE001
            problems.append(f"the save in the handler: {type(error).__name__}: {error}")

    def _fork(self, path: Path, problems: list[str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            os._exit(self._in_child(path))
        self._children.append(child)

    def _wait_for_children(self, problems: list[str]) -> None:
        until = time.monotonic() + HANG
        for child in self._children:
            while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
                if time.monotonic() > until:
                    os.kill(child, signal.SIGKILL)
                    ended = os.waitpid(child, 0)
                    problems.append("the child hung")
                    break
                time.sleep(0.005)
            if code := os.waitstatus_to_exitcode(ended[1]):
                problems.append(f"the child ended with {code}")
        self._children = []

    def _in_child(self, path: Path) -> int:
        """0 if all is as it should be in a forked child; each kind of failure has its number."""
        import shardkeep

        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        signal.alarm(HANG)
        try:
            mine = {"child": self._np.arange(5)}
            shardkeep.save_async(self.room / "child", mine, overwrite=True).wait()
            if shardkeep.load(self.room / "child")["child"][4] != 4:
                return 2
            try:
                shardkeep.save(self.room / "child", {"w": self._jnp_array}, overwrite=True)
                return 3
            except shardkeep.ProcessError:
                pass
            with contextlib.suppress(shardkeep.ConflictError):  # if the parent was faster
                shardkeep.save(path, mine, overwrite=True)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            return 4
        return 0


def main() -> None:
    usual_signals()
    order = json.loads(sys.stdin.read())
    threading.excepthook = lambda _: None  # exceptions in threads are made on purpose
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    import logging

    logging.getLogger("shardkeep").setLevel(logging.CRITICAL)
    random.seed(0)
    with tempfile.TemporaryDirectory(prefix="shardkeep-", dir=place) as room:
        call = order["find"] if "find" in order else order["make"][0]["call"]
        worker = runs.RunWorker(Path(room)) if call in runs.CALLS else Worker(Path(room))
        if "find" in order:
            worker.find(call)
        for point in order.get("make", ()):
            faulthandler.dump_traceback_later(HANG + 20, exit=True)
            problems = worker.make(Point(**point))
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps({"made": problems, "hit": worker.was_hit}), flush=True)


if __name__ == "__main__":
    main()
