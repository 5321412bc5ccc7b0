"""A run under fault: what is there before, the calls that are disturbed, and what must hold whatever became of them."""

import contextlib
import gc
import json
import os
import shutil
import signal
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import shardkeep
from faults.spawner import Fault, Spawner
from faults.sweep import Violation, clean, left_overs
from faults.tracing import Injected, Point, Tracer, leaks
from shardkeep.runs.control import Control
from shardkeep.stores.location import location

CALLS = ("run.resume", "run.step", "run.save", "run.close", "run.hold", "run.pin")
KEEP = shardkeep.Keep(last=2)
NEWEST = 3  # the step that is there before
NEXT = 4  # the step that is saved when the fault comes
_LATER = 50  # the step that is saved when all is over


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(1024, step, np.float32), "n": step}


def opened(path: str | Path, signals: tuple[str, ...] = ()) -> shardkeep.Run:
    return shardkeep.Run(path, save_every=1, keep=KEEP, signals=signals)


def prepare(path: str | Path) -> None:
    """A run with two steps, after one that retention has deleted."""
    with opened(path) as run:
        run.resume(state_of(0))
        for step in range(1, NEWEST + 1):
            run.step(step, state_of(step), metrics={"loss": 1 / step}, iterators={"data": step})


def train(path: str) -> None:
    """Resume, save one more step, delete what is old, and close."""
    with opened(path, ("SIGTERM",)) as run:
        _, step = run.resume(state_of(0), iterators={"data": 0})
        assert step == NEWEST
        run.step(NEXT, state_of(NEXT), metrics={"loss": 0.1}, iterators={"data": NEXT})


def go_back(path: str) -> None:
    """Abandon the newest step and replace it by another save, with a tree more."""
    with opened(path) as run:
        run.resume(state_of(0), step=NEWEST - 1)
        run.save(NEWEST, state_of(NEWEST), trees={"ema": state_of(NEWEST)}, iterators={"data": NEWEST})


def check(path: Path, most: int = NEXT, least: int = NEWEST) -> list[str]:
    """What is wrong with a run whose writer has ended somehow: one that resumes it and saves must find all in order."""
    found: list[str] = []
    with opened(path) as run:
        state, step = run.resume(state_of(0), iterators={"data": 0})
        assert run.resumed is not None
        if not least <= step <= most or run.resumed.skipped:
            found.append(f"resumed at step {step}, skipped {run.resumed.skipped}")
        if state["n"] != step or not (state["w"] == step).all() or run.resumed.iterators != {"data": step}:
            found.append(f"step {step} is a mix")
        run.save(_LATER, state_of(_LATER), iterators={"data": _LATER}).wait()
        run.wait()
        steps = run.steps()
    kept = {each.number for each in steps if "pinned" in each.kept or each.state == "abandoned"} | {step, _LATER}
    if {each.number for each in steps} != kept:
        found.append(f"the steps are {steps}, and should be {sorted(kept)}")
    for each in steps:
        clean(Path(each.path))  # what is in a complete step goes with `shardkeep clean`, or with the step
        if not shardkeep.verify(each.path).ok or (extra := left_overs(Path(each.path))):
            found.append(f"{each}: {shardkeep.verify(each.path)}; left over: {extra}")
    names = {Path(each.path).name for each in steps} | {".shardkeep-run"}
    control = Control(location(path))
    left = {
        "files": [str(each) for each in path.rglob("*") if _is_left(each.relative_to(path), each, names)],
        "marks": [mark for mark in control.marks() if mark.kind not in ("pinned", "abandoned")],
        "holds": control.held_steps(),
        "requests": control.requests(),
        "a writer": control.writer(),
    }
    return found + [f"left over: {kind}: {what}" for kind, what in left.items() if what]


def sweep(spawner: Spawner, room: Path, action: str, mode: str, every: int = 1, again: bool = False) -> int:
    """Disturb every `every`-th changing call of a program that writes a run. Tells how many struck, or all that broke.

    `mode`, `again`: see `faults.sweep.sweep`.
    """
    prepare(room / "prepared")
    least = NEWEST if action == "train" else NEWEST - 1

    def run(name: str, how: str, at: int = 0) -> Any:
        shutil.copytree(room / "prepared", path := room / name)
        return spawner.run(action, Fault(str(path), how, at, again=again), path=str(path))

    counted = run("counted", "count")
    assert counted.ok, counted
    assert counted.calls, "the shim counts nothing: is it preloaded?"
    broken: list[str] = []
    struck = 0
    for at in range(1, counted.calls + 2, every):  # one beyond the last: nothing happens
        outcome = run(f"at-{at}", mode, at)
        struck += not outcome.ok
        try:
            problems = check(room / f"at-{at}", least=least)
        except Exception as error:  # noqa: BLE001  (whatever goes wrong is the finding)
            problems = [f"{type(error).__name__}: {error}"]
        if outcome.error and "ShardkeepError" not in outcome.bases:
            problems.append(f"an error that is not shardkeep's: {outcome.error}: {outcome.message}")
        broken += [f"{mode} at call {at} of {counted.calls}: {problem}" for problem in problems]
        shutil.rmtree(room / f"at-{at}")
    if broken:
        raise Violation(f"{action}: {len(broken)} promises broken", tuple(broken), struck)
    return struck


def _is_left(name: Path, path: Path, known: set[str]) -> bool:
    """Whether a file is in no step. Empty directories may stay, and the locks of saves that were never committed."""
    return path.is_file() and name.parts[0] not in known and name.parts[1:] != (".shardkeep", "lock")


class RunWorker:
    """Makes points of the calls of a run, one after another, like `faults.interrupts.Worker`."""

    def __init__(self, room: Path) -> None:
        self._prepared, self._path = room / "prepared", room / "run"
        self.was_hit = False
        prepare(self._prepared)

    def _begin(self, call: str) -> shardkeep.Run:
        """A run as it is before the call."""
        shutil.rmtree(self._path, ignore_errors=True)
        shutil.copytree(self._prepared, self._path)
        run = opened(self._path, ("SIGTERM",))
        if call not in ("run.resume", "run.hold", "run.pin"):
            run.resume(state_of(0))
        if call == "run.close":
            run.step(NEXT, state_of(NEXT), iterators={"data": NEXT})
        return run

    def _make(self, call: str, run: shardkeep.Run) -> None:
        contents: dict[str, Any] = {"metrics": {"loss": np.float32(0)}, "iterators": {"data": NEXT}}
        match call:
            case "run.resume":
                run.resume(state_of(0), iterators={"data": 0})
            case "run.step":
                run.step(NEXT, state_of(NEXT), **contents)
                run.wait()
            case "run.save":
                run.save(NEXT, state_of(NEXT), trees={"ema": state_of(NEXT)}, pin=True, **contents).wait()
            case "run.close":
                run.close()
            case "run.hold":
                with run.hold(NEWEST):
                    pass
            case _:
                run.pin(NEWEST)
                run.unpin(NEWEST)

    def find(self, call: str) -> None:
        for _ in range(2):  # what happens once in a program comes first
            run = self._begin(call)
            self._make(call, run)
            run.close()
        run = self._begin(call)
        with Tracer(None) as tracer:
            self._make(call, run)
        run.close()
        for file, line, kind in sorted(tracer.seen):
            print(json.dumps({"point": asdict(Point(call, file, line, kind))}), flush=True)

    def make(self, point: Point) -> list[str]:
        handler, files = signal.getsignal(signal.SIGTERM), len(os.listdir("/proc/self/fd"))
        problems: list[str] = []
        run = self._begin(point.call)
        tracer = Tracer(point, _raise)
        try:
            with tracer:
                self._make(point.call, run)
        except (Injected, shardkeep.ShardkeepError, RuntimeError):
            pass
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is looked at)
            problems.append(f"raised {type(error).__name__}: {error}: {traceback.format_exc()[-600:]}")
        for _ in range(2):
            with contextlib.suppress(Injected, shardkeep.ShardkeepError, RuntimeError):
                run.close()
        if not tracer.in_clean_up and (found := leaks(1.0)):
            problems.append(f"left behind: {found}")
        if signal.getsignal(signal.SIGTERM) is not handler:
            problems.append("the handler of SIGTERM is not back")
            signal.signal(signal.SIGTERM, handler)
        problems += check(self._path)
        if found := leaks():
            problems.append(f"still there after the next run: {found}")
        self.was_hit = tracer.hit
        del run
        gc.collect()
        if (now := len(os.listdir("/proc/self/fd"))) > files:
            problems.append(f"{now - files} more open files")
        return problems


def _raise() -> None:
    raise Injected
