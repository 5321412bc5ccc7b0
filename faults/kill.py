"""Saves and deletes that are killed, interrupted or refused at every file system call they make."""

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import shardkeep
from faults import runs, together
from faults.pool import each, room
from faults.result import Result
from faults.spawner import CHANGES, Fault, Spawner
from faults.states import make, same
from faults.sweep import SCENARIOS, Violation, sweep

# One error at every second call; the others at every eighth, together at every second.
_OTHER_ERRORS = (errno.ENOSPC, errno.EACCES, errno.EMFILE, errno.EROFS)
_SAVES = [name for name in SCENARIOS if "delete" not in name]
_COMMITS = [name for name in _SAVES if name.startswith(("overwrite", "first,", "exchange", "one prefix", "several"))]


@dataclass(frozen=True)
class _Sweep:
    """A scenario and what is done to its calls."""

    scenario: str
    mode: str
    every: int = 1
    first: int = 1
    code: int = errno.EIO
    calls: str = CHANGES
    again: bool = False

    @property
    def name(self) -> str:
        return f"{self.scenario}, {errno.errorcode[self.code]}" if self.mode == "fail" else self.scenario


def run(quick: bool) -> Iterator[Result]:
    names = _SAVES[::6] if quick else list(SCENARIOS)
    step = 6 if quick else 1
    yield each(
        "the process is killed",
        f"SIGKILL at every system call that changes files, halfway through if it is a write; {len(names)} scenarios",
        _check,
        [_Sweep(name, "torn", step) for name in names],
    )
    yield together.run(quick)
    yield each(
        "a program that uses `Run` is killed, or a system call fails",
        "SIGKILL at every system call that changes files: of a `Run` that resumes, saves, deletes old steps and "
        "closes, and of one that goes back and replaces a step; EIO at every second call, or at every sixth call and "
        "all later ones",
        _check_run,
        [_RunSweep(action, *how) for action in ("train", "go_back") for how in _run_faults(step)],
        actions="faults.runs",
    )
    yield each(
        "Ctrl-C",
        "SIGINT at every second call, or at every eighth call and all later ones",
        _check,
        _interrupts(names, step),
    )
    yield each(
        "a system call fails",
        "EIO at every second call; ENOSPC, EACCES, EMFILE and EROFS each at every eighth call",
        _check,
        _errors(names, step),
    )
    yield each(
        "the disk fails permanently",
        "EIO at every sixth call and all later ones, including those of the clean-up",
        _check,
        [_Sweep(name, "fail", 6 * step, again=True) for name in names],
    )
    yield each(
        "the outcome of a commit is unknown",
        "EIO at every fsync and rename, including the fsync of the directory after the rename, once or from that "
        "call on; in some cases reads fail too, so that the outcome cannot be checked",
        _check_doubt,
        [*_doubts(names), *(_Unreadable(kind) for kind in ("safetensors", "tensorstore"))],
    )


@dataclass(frozen=True)
class _RunSweep:
    """What happens to the calls of a program that writes a run."""

    action: str
    mode: str
    every: int
    again: bool = False


def _run_faults(step: int) -> list[tuple[str, int, bool]]:
    return [("torn", step, False), ("fail", 2 * step, False), ("fail", 6 * step, True)]


def _check_run(spawner: Spawner, item: _RunSweep) -> int:
    with room() as place:
        return runs.sweep(spawner, place, item.action, item.mode, item.every, item.again)


def _interrupts(names: Iterable[str], step: int) -> Iterator[_Sweep]:
    for number, name in enumerate(names):
        if name in _SAVES:
            yield _Sweep(name, "interrupt", 2 * step, 1 + number % 2)
            yield _Sweep(name, "interrupt", 8 * step, 1 + number % 8, again=True)


def _errors(names: Iterable[str], step: int) -> Iterator[_Sweep]:
    for number, name in enumerate(names):
        yield _Sweep(name, "fail", 2 * step, 1 + number % 2)
        for turn, code in enumerate(_OTHER_ERRORS):
            yield _Sweep(name, "fail", 8 * step, 1 + (number + 2 * turn) % 8, code)


def _doubts(names: Iterable[str]) -> Iterator[_Sweep]:
    for name in names:
        if name in _COMMITS:
            yield _Sweep(name, "fail", calls="fsync,rename")
            yield _Sweep(name, "fail", calls="fsync,rename", again=True)


@dataclass(frozen=True)
class _Unreadable:
    """An overwrite whose last calls all fail, those that read back what is there included."""

    name: str


def _check(spawner: Spawner, item: _Sweep) -> int:
    with room() as place:
        return sweep(
            SCENARIOS[item.scenario],
            item.every,
            mode=item.mode,
            first=item.first,
            code=item.code,
            again=item.again,
            calls=item.calls,
            room=place / "room",
            spawner=spawner,
        )


def _check_doubt(spawner: Spawner, item: _Sweep | _Unreadable) -> int:
    if isinstance(item, _Sweep):
        return _check(spawner, item)
    with room() as place:
        return _check_unreadable(spawner, place / "run", item.name)


def _check_unreadable(spawner: Spawner, path: Path, format: str) -> int:
    """Whatever the error says must be true, and what is there must be whole: so nothing needed was deleted."""
    shardkeep.save(path, make("plain", 0), format=format)  # type: ignore[arg-type]
    calls, root = "fsync,rename,open,read", str(path.parent)

    def save(fault: Fault, number: int):
        arguments = {"kind": "plain", "number": number, "overwrite": True, "format": format}
        return spawner.run("save", fault, path=str(path), **arguments)

    total = save(Fault(root, calls=calls), 1).calls
    broken: list[str] = []
    unknown, now = 0, 1
    first = max(1, total - 60)
    for number, at in enumerate(range(first, total + 1), 2):
        outcome = save(Fault(root, "fail", at, again=True, calls=calls), number)
        tree = shardkeep.load(path)
        unknown += outcome.error == "CommitUnknownError"
        text = outcome.message.lower()
        if not (same(tree, make("plain", now)) or same(tree, make("plain", number))) or not shardkeep.verify(path).ok:
            broken.append(f"at call {at}: neither the old state nor the new one is there ({outcome.error})")
        elif outcome.ok and tree["step"] != number:
            broken.append(f"at call {at}: it reported success, and the old state is there")
        elif tree["step"] == number and ("nothing was committed" in text or "not committed" in text):
            broken.append(f"at call {at}: committed, and the error says it is not: {outcome.message}")
        elif tree["step"] != number and "is committed and in place" in text:
            broken.append(f"at call {at}: not committed, and the error says it is: {outcome.message}")
        elif not outcome.ok and "ShardkeepError" not in outcome.bases:
            broken.append(f"at call {at}: {outcome.error}: {outcome.message}")
        now = tree["step"]
    if not unknown:
        broken.append("no call made the outcome unknown: the test does not test what it should")
    if os.path.isdir(path) and not broken:
        shardkeep.save(path, make("plain", 99), overwrite=True)
        if not same(shardkeep.load(path), make("plain", 99)):
            broken.append("the next save did not load back")
    if broken:
        raise Violation(f"{format}: {len(broken)} promises broken", tuple(broken), total + 1 - first)
    return total + 1 - first
