"""Disks that are full: before a save, in the middle of it, and where only the sync tells."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardkeep
from faults.disks import disk, make_disk, memory_disk, missing
from faults.pool import each, room
from faults.result import Result
from faults.spawner import Fault, Outcome, Pause, Spawner
from faults.states import make, same
from faults.sweep import Violation, left_overs
from shardkeep.stores.local.descriptors import sync_file_system

_SIZE = 32 << 20
_SLACK = 128 << 10  # directories that grew, a journal's leavings
_NEEDS = (5 << 20) + (1 << 20)  # the state, and what a save wants to have beside it


@dataclass(frozen=True)
class _Point:
    """A save on a small disk. `free`: what is left before it. `call`: the disk is filled at that write, to `left`."""

    system: str
    target: str
    overwrite: bool
    arguments: tuple[tuple[str, Any], ...] = ()
    free: int | None = None
    call: int = 0
    left: int = 0

    @property
    def name(self) -> str:
        over = "over another" if self.overwrite else "first"
        moment = (
            f"{self.free:,} bytes free"
            if self.free is not None
            else f"filled at write {self.call}, {self.left:,} bytes left"
        )
        return f"{self.system}, {self.target} {dict(self.arguments)}, {over}, {moment}"


_WAYS: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("run", ()),
    ("run", (("format", "tensorstore"),)),
    ("run", (("format", "tensorstore"), ("compression", "zstd"))),
    ("model.safetensors", ()),
    ("model.safetensors", (("max_shard_size", 1 << 20),)),
)


def run(quick: bool) -> list[Result]:
    fault = "the disk is full"
    if why := missing("mkfs.ext4"):
        return [Result(fault, "small file systems", 0, (), f"left out: {why}")]
    ways = _WAYS[:1] if quick else _WAYS
    kinds = [(system, *way, over) for system in ("ext4", "tmpfs") for way in ways for over in (False, True)]
    before = [
        _Point(system, target, over, arguments, free=free)
        for system, target, arguments, over in kinds
        for free in range(0, _NEEDS + (1 << 20), (1 << 20) if not quick else 3 << 20)
    ]
    during = [
        _Point(system, target, over, arguments, call=call, left=left)
        for system, target, arguments, over in kinds
        for call in ((3,) if quick else range(1, 8))
        for left in ((0, 100_000, 3 << 20) if call == 2 else (0,))
    ]
    late = [
        _Point("ext4 on tmpfs", target, over, arguments, left=left)
        for target, arguments in ways
        for over in (True, False)
        for left in (0, 1 << 20, 3 << 20)
    ]
    return [
        each(fault, "a small real ext4 or tmpfs with 0 to 7 MiB free, for a save of 5 MiB", _check_before, before),
        each(
            "the disk fills up during the save",
            "other files fill it while the save is paused before its k-th write",
            _check_during,
            during,
        ),
        each(
            f"{fault}, and only fsync reports it",
            "a sparse ext4 image on a smaller tmpfs",
            _check_late,
            late[:2] if quick else late,
        ),
    ]


@contextmanager
def _small(system: str) -> Iterator[Path]:
    with ExitStack() as stack:
        place = stack.enter_context(room(memory=False))
        if system == "tmpfs":
            yield stack.enter_context(memory_disk(place / "disk", _SIZE))
        else:
            image = make_disk(place / "disk.img", _SIZE)
            yield stack.enter_context(disk(image, place / "disk"))


def _free(place: Path) -> int:
    sync_file_system(str(place))
    stats = os.statvfs(place)
    return stats.f_bavail * stats.f_frsize


def _fill(place: Path, left: int) -> None:
    """Someone else's file, so large that about `left` bytes remain."""
    with open(place / "ballast", "wb", buffering=0) as file:
        try:
            if (size := _free(place) - left) > 0:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            pass
        while left == 0:
            file.seek(0, os.SEEK_END)
            try:
                file.write(b"x" * 4096)
            except OSError:
                return


def _save(spawner: Spawner, point: _Point, place: Path, fault: Fault | None = None):
    arguments = {"kind": "wide", "number": 2, "overwrite": True, **dict(point.arguments)}
    return spawner.start("save", fault, path=str(place / point.target), **arguments)


def _prepare(point: _Point, place: Path) -> None:
    if point.overwrite:
        shardkeep.save(place / point.target, make("wide", 1), **dict(point.arguments))


def _check_before(spawner: Spawner, point: _Point) -> None:
    assert point.free is not None
    with _small(point.system) as place:
        _prepare(point, place)
        _fill(place, point.free)
        before = _free(place)
        outcome = _save(spawner, point, place).wait()
        if outcome.ok and before < 5 << 20:
            raise Violation(f"5 MiB were saved where {before:,} bytes were free")
        if not outcome.ok:
            _check_refused(point, place, outcome, before)
        _check_after(point, place, outcome)


def _check_during(spawner: Spawner, point: _Point) -> None:
    with _small(point.system) as place, room() as beside:
        _prepare(point, place)
        before = _free(place)
        pause = Pause(beside / "pause")
        fault = Fault(str(place), "pause", point.call, calls="write", pause=str(pause.path))
        child = _save(spawner, point, place, fault)
        while not child.ended(0.01) and not pause.path.with_name("pause.reached").exists():
            pass
        _fill(place, point.left)
        pause.go()
        outcome = child.wait()
        if not outcome.ok:
            _check_refused(point, place, outcome, before - (place / "ballast").stat().st_blocks * 512)
        _check_after(point, place, outcome)


def _check_refused(point: _Point, place: Path, outcome: Outcome, before: int) -> None:
    """The error says how much is needed and how much is free; the space is given back."""
    if outcome.error != "NotEnoughSpaceError":
        raise Violation(f"{outcome.error}: {outcome.message}")
    if not re.search(r"needs [\d,]+ bytes and [\d,]+ are free", outcome.message):
        raise Violation(f"the error does not say what is needed and free: {outcome.message}")
    if (now := _free(place)) < before - _SLACK:
        raise Violation(f"{before:,} bytes were free before the save that failed and {now:,} are now")


def _check_after(point: _Point, place: Path, outcome: Outcome) -> None:
    """The old state, or the new one if the save went well; with space again the next save works, and leaves nothing."""
    path = place / point.target
    wanted = 2 if outcome.ok else 1 if point.overwrite else None
    if wanted is None:
        if shardkeep.exists(path):
            raise Violation("the save failed, and there is something now")
    elif not same(shardkeep.load(path, mmap=False), make("wide", wanted)) or not shardkeep.verify(path).ok:
        raise Violation("what is there is not what it should be")
    (place / "ballast").unlink()
    shardkeep.save(path, make("wide", 3), overwrite=True, **dict(point.arguments))
    if not same(shardkeep.load(path, mmap=False), make("wide", 3)):
        raise Violation("the next save did not load back")
    if extra := left_overs(path):
        raise Violation(f"left over after the next save: {sorted(extra)}")


def _check_late(spawner: Spawner, point: _Point) -> None:
    """Writes go well and the sync fails; then there is space again, and the disk is mounted anew."""
    with room() as place, ExitStack() as stack:
        backing = stack.enter_context(memory_disk(place / "backing", _SIZE))
        image = make_disk(backing / "disk.img", 2 * _SIZE)
        with disk(image, place / "disk") as here:
            _prepare(point, here)
            _fill(backing, point.left)
            outcome = _save(spawner, point, here).wait()
        (backing / "ballast").unlink()
        if outcome.ok:
            raise Violation("saved, where there was no space")
        if "StorageError" not in outcome.bases:
            raise Violation(f"{outcome.error}: {outcome.message}")
        shutil.copyfile(image, place / "again.img")
        with disk(place / "again.img", place / "again") as here:
            path = here / point.target
            now = shardkeep.load(path, mmap=False)["step"] if shardkeep.exists(path) else None
            if now == 2 and "ommitted" not in outcome.message.replace("Nothing was committed", ""):
                raise Violation(f"the new state is there, and the error was: {outcome.message}")
            if now != (1 if point.overwrite else None) and now != 2:
                raise Violation(f"neither the old state nor the new one is there, but {now}: {outcome.message}")
            if now is not None and not same(shardkeep.load(path, mmap=False), make("wide", now)):
                raise Violation("a mix")
            shardkeep.save(path, make("wide", 3), overwrite=True, **dict(point.arguments))
            if not same(shardkeep.load(path, mmap=False), make("wide", 3)) or (extra := left_overs(path)):
                raise Violation(f"the next save did not load back, or left {extra}")
