"""Programs that end while a save runs in the background: by leaving, an exception, Ctrl-C, SIGTERM, a full disk."""

import errno
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardkeep
from faults.pool import each, room
from faults.result import Result
from faults.spawner import CHANGES, Fault, Outcome, Spawner
from faults.states import make, same
from faults.sweep import Violation, left_overs

_FORMATS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "tensorstore": {"format": "zarr"},
    "exchange": {"max_shard_size": 400},
}


@dataclass(frozen=True)
class _Point:
    """A program that ends in some way when its save has come to a call; one that fails is refused that call."""

    how: str
    format: str
    overwrite: bool
    call: int

    @property
    def name(self) -> str:
        return f"{self.how}, {self.format}, {'over another' if self.overwrite else 'first'}, call {self.call}"


def run(quick: bool) -> Iterator[Result]:
    step = 6 if quick else 1
    formats = ["safetensors"] if quick else list(_FORMATS)

    def points(*hows: str) -> list[_Point]:
        calls = {"safetensors": range(1, 22, 2), "tensorstore": range(1, 90, 9), "exchange": range(1, 36, 4)}
        return [
            _Point(how, format, overwrite, call)
            for how in hows
            for format in formats
            for overwrite in (True, False)
            for call in calls[format][::step]
        ]

    yield each(
        "the program ends during a background save",
        "it reaches its end, calls `sys.exit`, raises or gets Ctrl-C while the save is at its k-th call; the save is "
        "completed, and the log says so",
        _check,
        points("end", "exit", "raise", "interrupt"),
    )
    yield each(
        "the program ends, and its background save fails",
        "it reaches its end, and the save gets ENOSPC at its k-th call; the old state remains, and the log says so",
        _check,
        points("fail"),
    )
    yield each(
        "SIGTERM during a background save",
        "the default action of SIGTERM, at the k-th call; the old or the new state remains, and `ls` or `clean` lists "
        "leftover files",
        _check,
        points("terminate"),
    )


def _check(spawner: Spawner, point: _Point) -> None:
    with room() as place, room() as beside:
        path = place / ("model.safetensors" if point.format == "exchange" else "run")
        arguments = _FORMATS[point.format]
        if point.overwrite:
            shardkeep.save(path, make("plain", 1), **arguments)
        pause = str(beside / "pause")
        fault = Fault(str(place), "pause", point.call, calls=CHANGES, pause=pause)
        if point.how == "fail":
            fault = Fault(str(place), "fail", point.call, errno.ENOSPC, calls=CHANGES)
        more = {"kind": "plain", "number": 2, "how": point.how, "pause": pause, "overwrite": True, **arguments}
        outcome = spawner.start("end_during_save", fault, program=True, path=str(path), **more).wait()
        reached = Path(f"{pause}.reached").exists()
        now = _state(path)
        if now not in (2, 1 if point.overwrite else None):
            raise Violation(f"neither the old state nor the new one is there: {outcome.log[-300:]}")
        _CHECKS[point.how](outcome, reached, now)
        if point.how == "terminate":
            _check_told(spawner, path, now)
        shardkeep.save(path, make("plain", 3), overwrite=True, **arguments)
        if _state(path) != 3:
            raise Violation("the next save did not load back")
        # A directory that could not be removed stays, empty: nobody knows it any more.
        if extra := {name for name in left_overs(path) if point.how != "fail" or not name.endswith("/")}:
            raise Violation(f"left over after the next save: {sorted(extra)}")


def _state(path: Path) -> int | None:
    """The number of the state that is there, None if there is none; a mix is -1."""
    try:
        tree = shardkeep.load(path)
    except (shardkeep.CheckpointNotFoundError, shardkeep.IncompleteCheckpointError):
        return None
    return tree["step"] if same(tree, make("plain", tree["step"])) and shardkeep.verify(path).ok else -1


def _finished(ended: Callable[[Outcome], bool]) -> Callable[[Outcome, bool, int | None], None]:
    def check(outcome: Outcome, reached: bool, now: int | None) -> None:
        if not ended(outcome):
            raise Violation(f"ended with code {outcome.code}, signal {outcome.signal}: {outcome.log[-500:]}")
        if now != 2:
            raise Violation(f"the save was lost: {outcome.log[-500:]}")
        said = [part in outcome.log for part in ("the program has ended; finishing the save", "is finished")]
        if reached and not all(said):
            raise Violation(f"the log does not say that it was finished: {outcome.log[-500:]}")

    return check


def _failed(outcome: Outcome, reached: bool, now: int | None) -> None:
    told = "FAILED and wait() was never called" in outcome.log and "failed: " in outcome.log
    if outcome.code or outcome.signal:
        raise Violation(f"ended with code {outcome.code}, signal {outcome.signal}: {outcome.log[-500:]}")
    if now != 2 and not told:
        raise Violation(f"the save was abandoned, and the log does not say so: {outcome.log[-500:]}")
    if now == 2 and told and "committed" not in outcome.log.replace("Nothing was committed", ""):
        raise Violation(f"the new state is there, and the log says that it failed: {outcome.log[-500:]}")


def _terminated(outcome: Outcome, reached: bool, now: int | None) -> None:
    if reached and outcome.signal != signal.SIGTERM:
        raise Violation(f"ended with code {outcome.code}, signal {outcome.signal}: {outcome.log[-500:]}")


_CHECKS = {
    "end": _finished(lambda o: (o.code, o.signal) == (0, 0)),
    "exit": _finished(lambda o: (o.code, o.signal) == (3, 0)),
    "raise": _finished(lambda o: (o.code, o.signal) == (1, 0) and "RuntimeError: mine" in o.log),
    "interrupt": _finished(lambda o: (o.code == 130 or o.signal == signal.SIGINT) and "KeyboardInterrupt" in o.log),
    "fail": _failed,
    "terminate": _terminated,
}


def _check_told(spawner: Spawner, path: Path, now: int | None) -> None:
    """What is left over is told by `shardkeep ls` (nothing else is there) or by `shardkeep clean --dry-run`."""
    place = path.parent
    listed = spawner.run("command", arguments=["ls", str(place)])
    cleaned = spawner.run("command", arguments=["clean", "--dry-run", str(place)])
    if listed.value != 0 or cleaned.value not in (0, 1):
        raise Violation(f"ls or clean failed: {listed.log} {cleaned.log}")
    if now is None:
        begun = [p for p in place.rglob("*") if p.is_file() and p.name != "lock"]
        if begun and "unfinished" not in listed.log:
            raise Violation(f"{[p.name for p in begun]} are there, and ls says: {listed.log}")
        return
    if "complete" not in listed.log:
        raise Violation(f"ls does not show the checkpoint as complete: {listed.log}")
    extra = {name for name in left_overs(path) if not name.endswith("/") and "lock" not in name}
    if bool(extra) != bool(cleaned.value):
        raise Violation(f"left over are {sorted(extra)}, and clean says: {cleaned.log}")
