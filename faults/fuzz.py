"""Hostile files: millions of changed documents, headers, pickles and frames.

Each must end in an error of ours or be read: no crash, no hang, no foreign error, no memory beyond measure, no file
touched outside, no code run. What is new (another place of an error, another line of the readers) is kept and changed
further. Most inputs are read in memory; every so many go through the file system and a whole load.
"""

import codecs
import contextlib
import logging
import mmap
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import shardkeep
from faults.guard import Guard, limit_memory, most_memory
from faults.hostile import cases
from faults.hostile_cases import Case, Escape
from faults.mutate import Scanned, mutate_bytes, mutate_json, scan
from faults.parallel import CORES, Hang, spread, within
from faults.result import Result

SEED = 20261116
SOURCE = os.path.dirname(shardkeep.__file__)
_TRACED = 64  # one input of so many is traced line by line
_SECONDS = 10
_MOST_KEPT = 400  # inputs of one case
# What JSON may be in, and text in old pickles: found by Python when they are first met.
_ENCODINGS = (
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "utf-32-le",
    "utf-32-be",
    "raw-unicode-escape",
    "unicode-escape",
)
_MEMORY = 200 << 20  # what an input may add to the most memory there ever was


@dataclass
class Tally:
    """What a worker did and found."""

    inputs: int = 0
    loads: int = 0
    accepted: int = 0
    kept: int = 0
    lines: int = 0
    violations: list[str] = field(default_factory=list)
    by_case: dict[str, int] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Count what another worker did as well."""
        for name in ("inputs", "loads", "accepted", "kept", "violations"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lines = max(self.lines, other.lines)
        for case, count in other.by_case.items():
            self.by_case[case] = self.by_case.get(case, 0) + count


class Lines:
    """The lines of our source that were run, as far as somebody looked."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()
        self.new = False

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename.startswith(SOURCE) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        place = (id(frame.f_code), frame.f_lineno)
        if place not in self.seen:
            self.seen.add(place)
            self.new = True
        return self._line

    def run(self, action: Callable[[], None]) -> None:
        self.new = False
        sys.settrace(self._call)
        try:
            action()
        finally:
            sys.settrace(None)


class Fuzzer:
    """The inputs of one worker: chosen, changed, read, judged, kept."""

    def __init__(self, room: Path, seed: int, only: str = "") -> None:
        """Take the cases whose names have a match of `only`."""
        self._rng = random.Random(seed)
        self._room = room
        (room / "load").mkdir(parents=True)
        self._cases = [case for case in cases() if re.search(only, case.name)]
        self._kept: dict[str, list[Scanned | bytes]] = {c.name: [self._seed(c, c.start)] for c in self._cases}
        self._weights = [1 if case.is_foreign else 3 for case in self._cases]
        self._places: set[Any] = set()
        self._told: set[tuple[str, str]] = set()
        self._lines = Lines()
        self.tally = Tally()
        self._last = _black_box(room / "last", write=True)
        self._warm_up()
        self._guard = Guard(str(room / "load"))
        self._most = most_memory()

    def _seed(self, case: Case, text: bytes) -> Scanned | bytes:
        return scan(text) if case.is_json else text

    def _warm_up(self) -> None:
        """Read everything once as it is: it must be good, and what is imported late is imported now."""
        for encoding in _ENCODINGS:
            codecs.lookup(encoding)
        for case in self._cases:
            case.read(case.start)
            with self._on_disk(case, case.start) as path:
                load_every(path)
                _try_all(path, _ACTIONS)
            with (
                self._on_disk(case, b"\xff") as path,
                contextlib.suppress(ValueError),
            ):  # it will be met again, and judged
                _try_all(path, _ACTIONS)

    def changed(self, case: Case) -> bytes:
        """Something that was kept, or the start, changed."""
        kept = self._kept[case.name]
        seed = kept[0] if self._rng.random() < 0.3 else self._rng.choice(kept)
        if isinstance(seed, bytes):
            return mutate_bytes(seed, self._rng, case.words)
        donor = self._kept[self._rng.choice(self._cases).name][0]
        return mutate_json(seed, self._rng, donor if isinstance(donor, Scanned) else seed)

    def step(self, number: int, load_every: int) -> None:
        """One input."""
        (case,) = self._rng.choices(self._cases, self._weights)
        text = self.changed(case)
        self._remember(case, text)
        self.tally.inputs += 1
        self.tally.by_case[case.name] = self.tally.by_case.get(case.name, 0) + 1
        new = False
        if number % _TRACED == 0:
            place = self._judge(case, text, lambda: self._lines.run(lambda: case.read(text)))
            new = self._lines.new
        else:
            place = self._judge(case, text, lambda: case.read(text))
        if load_every and number % load_every == 0:
            self._load(case, text)
        if (new or place not in self._places) and len(self._kept[case.name]) < _MOST_KEPT and len(text) < 20_000:
            self._places.add(place)
            self._kept[case.name].append(self._seed(case, text))
            self.tally.kept += 1

    def _judge(self, case: Case, text: bytes, action: Callable[[], None]) -> Any:
        """Run it. Gives the place it ended at: where the error was raised, if there was one."""
        place: Any = (case.name, None)
        try:
            with within(_SECONDS), self._guard.watching():
                action()
            self.tally.accepted += 1
        except shardkeep.ShardkeepError as error:
            place = (case.name, type(error), _place(error))
        except OSError as error:
            if type(error) not in (FileNotFoundError, NotADirectoryError):  # in memory, `open_checkpoint` is left out
                self._report(case, text, f"{type(error).__name__}: {error}")
        except (Exception, Escape, Hang) as error:  # noqa: BLE001  (that it is not ours is the finding)
            at = traceback.extract_tb(error.__traceback__)[-1]
            self._report(case, text, f"{type(error).__name__}: {error} ({os.path.basename(at.filename)}:{at.lineno})")
        if self._guard.seen:
            self._report(case, text, "; ".join(self._guard.seen[:3]))
            self._guard.seen.clear()
        most = most_memory()
        if most > self._most + _MEMORY:
            self._report(case, text, f"memory went from {self._most >> 20} to {most >> 20} MiB")
        self._most = max(most, self._most)
        return place

    @contextlib.contextmanager
    def _on_disk(self, case: Case, text: bytes, link: str | None = None) -> Iterator[Path]:
        """The path to load; `link`: a file or directory of the checkpoint that is a link to one outside."""
        home = self._room / "load" / str(self._cases.index(case))
        changed = case.close(text) if home.exists() else {**case.files, **case.close(text)}
        for name, data in changed.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(data)
        outside = self._room / "outside"
        if link is not None:
            (home / link).replace(outside)
            (home / link).symlink_to(outside)
        try:
            yield home / case.target if case.target else home
        finally:
            if link is not None:
                (home / link).unlink()
                outside.replace(home / link)
            for name in changed:
                (home / name).unlink()
                (home / name).write_bytes(case.files[name])

    def _load(self, case: Case, text: bytes) -> None:
        """The same through the file system; now and then one of the files is a link that leads out."""
        actions = [load_every, self._rng.choice(_ACTIONS)]
        # Exchange files may be links: that is how Hugging Face keeps them.
        inside = [*case.files, *sorted({os.path.dirname(name) for name in case.files} - {""})]
        link = self._rng.choice(inside) if not case.target and self._rng.random() < 0.05 else None
        with self._on_disk(case, text, link) as path:
            self._guard.room = os.path.realpath(path.parent if case.target else path)
            self._judge(case, text, lambda: _try_all(path, actions))
        self.tally.loads += 1

    def _remember(self, case: Case, text: bytes) -> None:
        """Where the input is found if the process dies of it."""
        data = f"{case.name}\n{len(text)}\n".encode() + text
        self._last[: len(data)] = data[: len(self._last)]

    def _report(self, case: Case, text: bytes, what: str) -> None:
        """Tell it once for each case and kind."""
        kind = (case.name, what[:60])
        if kind not in self._told and len(self._told) < 200:
            self._told.add(kind)
            self.tally.violations.append(f"{case.name}: {what[:400]}; the input is {keep(text)}")


def load_every(path: Path, **arguments: Any) -> None:
    """Load the tree of each prefix."""
    for prefix in shardkeep.inspect(path).prefixes:
        shardkeep.load(path, prefix=prefix, **arguments)


_ACTIONS: list[Callable[[Any], Any]] = [
    shardkeep.verify,
    shardkeep.exists,
    lambda path: str(shardkeep.inspect(path)),
    lambda path: load_every(path, mmap=False, verify=False),
]


def _try_all(path: Path, actions: list[Callable[[Any], Any]]) -> None:
    for action in actions:
        with contextlib.suppress(shardkeep.ShardkeepError):
            action(path)


def _place(error: BaseException) -> Any:
    """The lines of ours on the way to where an error was raised."""
    found = []
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename.startswith(SOURCE):
            found.append((id(step.tb_frame.f_code), step.tb_lineno))  # to hash the code itself takes long
        step = step.tb_next
    cause = error.__cause__ or error.__context__
    return (*found, type(cause), _place(cause) if cause is not None else ())


def keep(text: bytes) -> str:
    """Put an input where it can be looked at."""
    with tempfile.NamedTemporaryFile(prefix="shardkeep-hostile-", delete=False) as file:
        file.write(text)
    return file.name


def _black_box(path: Path, write: bool = False) -> mmap.mmap:
    """A file that survives the process that writes it."""
    if write:
        path.write_bytes(bytes(256 << 10))
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def work(room: str, seed: int, count: int, load_every: int, seconds: float, only: str = "") -> Tally:
    """So many inputs, or as many as there is time for; `only` of cases with a match of this in their names."""
    logging.getLogger("shardkeep").setLevel(logging.CRITICAL)
    fuzzer = Fuzzer(Path(room) / str(seed), seed, only)
    limit_memory(4 << 30)
    end = time.monotonic() + seconds
    for number in range(1, count + 1):
        fuzzer.step(number, load_every)
        if time.monotonic() > end:
            break
    fuzzer.tally.lines = len(fuzzer._lines.seen)
    return fuzzer.tally


def run(quick: bool = False) -> list[Result]:
    """A million inputs on both cores, every thirtieth through the file system."""
    count = 20_000 if quick else 510_000
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    total = Tally()
    with tempfile.TemporaryDirectory(dir=memory, prefix="shardkeep-fuzz-") as room:
        jobs = [(room, SEED + number, count, 30, 1700.0) for number in range(CORES)]
        for job, found in zip(jobs, spread(work, jobs, 1800), strict=True):
            if isinstance(found, Exception):
                name, size, text = bytes(_black_box(Path(room) / str(job[1]) / "last")).split(b"\n", 2)
                total.violations.append(f"{name.decode()}: {found}; the input is {keep(text[: int(size)])}")
                continue
            total.add(found)
    how = "manifests, indexes, headers, structures, pickles and zstd frames, mutated by structure and by byte"
    counts = total.loads, total.accepted, total.kept
    note = "{:,} complete loads; {:,} inputs were valid; {:,} reached new code or errors".format(*counts)
    return [Result("hostile files", how, total.inputs, tuple(total.violations), note)]
