"""Places that refuse: no permission, read-only, gone, out of files, unreadable. As root and as another user."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardkeep
from faults.disks import disk, make_disk, memory_disk, missing, pull_out
from faults.pool import each, room
from faults.result import Result
from faults.spawner import CHANGES, Fault, Outcome, Pause, Spawner
from faults.states import make, same
from faults.sweep import Violation, left_overs

NOBODY = 65534
_TARGETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("run", {}),
    ("run", {"format": "zarr"}),
    ("model.safetensors", {}),
    ("model.safetensors", {"max_shard_size": 400}),
)


@dataclass(frozen=True)
class _Point:
    """One refusal: `call` is the call at which it happens, or the limit."""

    what: str
    target: int
    call: int = 0
    overwrite: bool = True

    @property
    def name(self) -> str:
        target, arguments = _TARGETS[self.target]
        return f"{self.what}, {target} {arguments}, {'over another' if self.overwrite else 'first'}, {self.call}"

    def path(self, place: Path) -> Path:
        return place / _TARGETS[self.target][0]

    @property
    def arguments(self) -> dict[str, Any]:
        return _TARGETS[self.target][1]


def run(quick: bool) -> list[Result]:
    targets = (0,) if quick else range(len(_TARGETS))
    step = 8 if quick else 1
    both = [(t, over) for t in targets for over in (True, False)]
    results = [
        each(
            "the directory is removed or renamed during the save",
            "while the save, running as root, is paused before its k-th call",
            _check_vanishing,
            [_Point(w, t, k, o) for w in ("removed", "renamed") for t, o in both for k in range(1, 40, 2 * step)],
        ),
        each(
            "too many open files",
            "RLIMIT_NOFILE leaves 0 to 14 file descriptors for a save and a load",
            _check_few_files,
            [_Point("few files", t, spare, o) for t, o in both for spare in range(0, 15, step)],
        ),
        each(
            "a read fails",
            "EIO at the k-th read or open of a load, with and without mmap",
            _check_reading,
            [_Point(how, t, k) for t in targets for how in ("mmap", "read") for k in range(1, 25, step)],
        ),
    ]
    if os.geteuid() == 0:
        cases = [_Point(what, t) for what in _FORBIDDEN for t in targets]
        how = f"files and directories of another user, in {len(_FORBIDDEN)} variants; as an ordinary user"
        results.append(each("no permission", how, _check_forbidden, cases))
    if why := missing("mkfs.ext4"):
        results.append(Result("the disk is read-only or fails", "small file systems", 0, (), f"left out: {why}"))
        return results
    return [
        *results,
        each(
            "the disk is read-only",
            "a real file system mounted read-only; as root and as an ordinary user",
            _check_read_only,
            [_Point(who, t) for t in targets for who in ("root", "nobody")],
        ),
        each(
            "the disk disappears during the save",
            "ext4 is shut down before the k-th call (every call fails, nothing more is written), then mounted again",
            _check_pulled_out,
            [_Point("pulled out", t, k, o) for t, o in both for k in range(1, 30, 2 * step)],
        ),
        each(
            "parts of the disk cannot be read",
            "the image of an ext4 is truncated right after mounting; with and without mmap",
            _check_medium,
            [_Point(how, t, part) for t in targets for how in ("mmap", "read") for part in range(0, 4, step)],
        ),
    ]


def _mapped(point: _Point) -> str | bool:
    return point.what == "mmap"


def _clear(outcome: Outcome, *kinds: str) -> None:
    """An error of ours that is also the operating system's kind."""
    if outcome.signal:
        raise Violation(f"the process died of signal {outcome.signal}: {outcome.log[-300:]}")
    if (
        outcome.error
        and not {"ShardkeepError", "OSError"} <= {*outcome.bases}
        and not outcome.error == "IntegrityError"
    ):
        raise Violation(f"{outcome.error}: {outcome.message}")
    if kinds and outcome.error not in kinds:
        raise Violation(f"{outcome.error or 'success'} is none of {kinds}: {outcome.message}")


def _holds(path: Path, *numbers: int) -> int:
    """The number of the state that is there, which must be one of these."""
    tree = shardkeep.load(path, mmap=False)
    if tree["step"] not in numbers or not same(tree, make("plain", tree["step"])) or not shardkeep.verify(path).ok:
        raise Violation(f"none of the states {numbers} is there")
    return tree["step"]


def _save_again(point: _Point, path: Path, tidy: bool = True) -> None:
    shardkeep.save(path, make("plain", 9), overwrite=True, **point.arguments)
    _holds(path, 9)
    if tidy and (extra := left_overs(path)):
        raise Violation(f"left over after the next save: {sorted(extra)}")


def _start(spawner: Spawner, point: _Point, path: Path, fault: Fault | None = None, uid: int | None = None):
    arguments = {"kind": "plain", "number": 2, "overwrite": True, **point.arguments}
    return spawner.start("save", fault, uid, path=str(path), **arguments)


def _prepare(point: _Point, place: Path) -> Path:
    path = point.path(place)
    if point.overwrite:
        shardkeep.save(path, make("plain", 1), **point.arguments)
    return path


def _at_call(spawner: Spawner, point: _Point, path: Path, root: Path, act: Callable[[], object]) -> Outcome:
    """A save in which something happens while it stops before its k-th call."""
    with room() as beside:
        pause = Pause(beside / "pause")
        fault = Fault(str(root), "pause", point.call, calls=CHANGES, pause=str(pause.path))
        child = _start(spawner, point, path, fault)
        while not (ended := child.ended(0.005)) and not pause.path.with_name("pause.reached").exists():
            pass
        if not ended:
            act()
        pause.go()
        return child.wait()


def _check_vanishing(spawner: Spawner, point: _Point) -> None:
    """An error of ours and no hang; elsewhere nothing changes, and saving to the place works again."""
    with room() as place:
        (place / "in").mkdir()
        (place / "in" / "mine").write_text("x")
        path = _prepare(point, place / "in" / "dir")
        away = place / "away"

        def vanish() -> None:
            if point.what == "removed":
                shutil.rmtree(place / "in" / "dir", ignore_errors=True)
            elif (place / "in" / "dir").exists():
                (place / "in" / "dir").rename(away)

        outcome = _at_call(spawner, point, path, place / "in", vanish)
        _clear(outcome)
        if shardkeep.exists(path) or list((place / "in").rglob("*.json")):  # then it is whole, and the save went well
            _holds(path, 2)
            if not outcome.ok:
                raise Violation(f"the new state is there, and the error was: {outcome.message}")
        if away.exists() and point.overwrite:
            _holds(point.path(away), 1, 2)
        if (place / "in" / "mine").read_text() != "x":
            raise Violation("a file that is not ours changed")
        if point.what == "renamed" and point.overwrite and away.exists():
            _save_again(point, point.path(away))
        _save_again(point, path, tidy=False)


def _check_few_files(spawner: Spawner, point: _Point) -> None:
    with room() as place:
        path = _prepare(point, place)
        arguments = {"path": str(path), "kind": "plain", "overwrite": True, **point.arguments}
        outcome = spawner.run("with_few_files", spare=point.call, act="save", number=2, **arguments)
        _clear(outcome)
        if outcome.ok:
            _holds(path, 2)
        elif point.overwrite:
            _holds(path, 1)
        elif shardkeep.exists(path):
            raise Violation("the save failed, and there is something now")
        if outcome.ok or point.overwrite:
            more = {"path": str(path), "kind": "plain", "number": 2 if outcome.ok else 1}
            _clear(spawner.run("with_few_files", spare=point.call, act="load", **more))
        _save_again(point, path)


def _check_reading(spawner: Spawner, point: _Point) -> None:
    with room(memory=point.what == "read") as place:
        path = _prepare(point, place)
        fault = Fault(str(place), "fail", point.call, errno.EIO, calls="read,open")
        load = {"path": str(path), "kind": "plain", "number": 1, "mmap": _mapped(point)}
        _clear(spawner.run("load", fault, **load))
        _clear(spawner.run("load", Fault(str(place), "fail", point.call, errno.EIO, True, "read,open"), **load))
        _holds(path, 1)


# What an ordinary user meets: what is done to a checkpoint of root's, and whether it can still be read.
_FORBIDDEN: dict[str, tuple[Callable[[Path], None], bool]] = {
    "a directory of root's": (lambda root: None, True),
    "a control directory of root's": (lambda root: os.chmod(root, 0o777), True),
    "files that may not be read": (lambda root: _chmod(root, 0o600), False),
    "a directory that may not be entered": (lambda root: os.chmod(root, 0o700), False),
    "a directory that may not be written": (lambda root: (_give(root), os.chmod(root, 0o555))[0], True),
    "everything may be written but the files": (lambda root: _chmod(root, 0o444, 0o777), True),
}


def _chmod(root: Path, files: int, directories: int = 0o755) -> None:
    for directory, _, names in os.walk(root):
        os.chmod(directory, directories)
        for name in names:
            os.chmod(os.path.join(directory, name), files)


def _give(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in (".", *names):
            os.chown(os.path.join(directory, name), NOBODY, NOBODY)


def _check_forbidden(spawner: Spawner, point: _Point) -> None:
    """Refused with a reason, or done; never half, and root finds what was there."""
    forbid, readable = _FORBIDDEN[point.what]
    with room() as place:
        (place / "in").mkdir()
        path = _prepare(point, place / "in")
        forbid(path if path.is_dir() else path.parent)
        outcome = _start(spawner, point, path, uid=NOBODY).wait()
        _clear(outcome, *(() if "everything" in point.what or "control" in point.what else ("AccessError",)))
        now = 2 if outcome.ok else 1
        loaded = spawner.run("load", uid=NOBODY, path=str(path), kind="plain", number=now)
        _clear(loaded)
        if loaded.ok != readable and not (outcome.ok and loaded.ok):
            raise Violation(f"loading it: {loaded.error or 'success'}: {loaded.message}")
        _clear(spawner.run("check", uid=NOBODY, path=str(path)))
        _holds(path, now)
        os.chmod(path if path.is_dir() else path.parent, 0o755)
        _save_again(point, path)


def _check_read_only(spawner: Spawner, point: _Point) -> None:
    with room(memory=False) as place, memory_disk(place / "disk", 32 << 20) as here:
        path = _prepare(point, here)
        os.chmod(here, 0o777)
        subprocess.run(["mount", "-o", "remount,ro", str(here)], check=True, timeout=20)
        uid = NOBODY if point.what == "nobody" else None
        _clear(_start(spawner, point, path, uid=uid).wait(), "AccessError")
        _clear(_start(spawner, point, path.with_name(f"other-{path.name}"), uid=uid).wait(), "AccessError")
        _clear(spawner.run("delete", uid=uid, path=str(path)), "AccessError")
        for outcome in (
            spawner.run("load", uid=uid, path=str(path), kind="plain", number=1),
            spawner.run("check", uid=uid, path=str(path)),
        ):
            if not outcome.ok:
                raise Violation(f"reading it: {outcome.error}: {outcome.message}")
        subprocess.run(["mount", "-o", "remount,rw", str(here)], check=True, timeout=20)
        _holds(path, 1)
        _save_again(point, path)


def _check_pulled_out(spawner: Spawner, point: _Point) -> None:
    with ExitStack() as stack:
        place = stack.enter_context(room())
        image = make_disk(place / "disk.img", 16 << 20)
        with disk(image, place / "disk") as here:
            path = _prepare(point, here)
            outcome = _at_call(spawner, point, path, here, lambda: pull_out(here))
            _clear(outcome)
        with disk(image, place / "disk") as here:
            if outcome.ok:
                _holds(path, 2)
            elif point.overwrite:
                _holds(path, 1, 2)
            elif shardkeep.exists(path):
                _holds(path, 2)
            _save_again(point, path)


def _check_medium(spawner: Spawner, point: _Point) -> None:
    """No wrong data, and no SIGBUS: an error of ours, or what was saved."""
    with room() as place:
        image = make_disk(place / "disk.img", 32 << 20)
        with disk(image, place / "disk") as here:
            path = point.path(here)
            shardkeep.save(path, make("wide", 1), **point.arguments)
        with disk(image, place / "disk") as here:
            os.truncate(image, (32 << 20) * point.call // 4 + 4096)
            outcome = spawner.run("load", path=str(path), kind="wide", number=1, mmap=_mapped(point))
            _clear(outcome)
            _clear(spawner.run("check", path=str(path)))
