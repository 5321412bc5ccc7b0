"""Bit rot: bits, pages, lengths and whole files of a checkpoint that change on the disk.

After each change a load gives exactly what was saved or an error of ours that names what is damaged, and `verify`
reports it, unless the change is provably no part of the state.
"""

import contextlib
import io
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardkeep
from faults.parallel import Hang, spread, within
from faults.result import Result
from faults.states import same
from shardkeep.cli.main import main as command
from shardkeep.layouts import plan
from shardkeep.model.manifest import Manifest

SEED = 20261116
PAGE = 4096
_ZARR = {"format": "zarr"}
# How a checkpoint is saved: (target, prefixes, arguments of save).
SUBJECTS: dict[str, tuple[str, tuple[str | None, ...], dict[str, Any]]] = {
    "safetensors": ("run", (None,), {}),
    "tensorstore": ("run", (None,), _ZARR),
    "zstd": ("run", (None,), {**_ZARR, "compression": "zstd"}),
    "prefixes, safetensors": ("run", ("model", "optimizer.mu"), {}),
    "prefixes, zstd": ("run", ("model", "optimizer.mu"), {**_ZARR, "compression": "zstd"}),
    "exchange, single": ("model.safetensors", (None,), {}),
    "exchange, several": ("model.safetensors", (None,), {"max_shard_size": 1000}),
    "large, safetensors": ("run", (None,), {}),
    "large, tensorstore": ("run", (None,), _ZARR),
    "tables, safetensors": ("run", (None, "ema"), {}),
    "tables, zstd": ("run", (None,), {**_ZARR, "compression": "zstd"}),
}
# How it is loaded: as anyone would, and now and then otherwise.
LOADS: list[dict[str, Any]] = [{}, {}, {}, {"mmap": False}, {"mesh": True}, {"verify": False}]


def state(subject: str, number: int) -> Any:
    """What is saved: every kind of leaf; for the large ones, arrays that are mapped and lie in several pieces."""
    rng = np.random.default_rng(number)
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    tree: dict[str, Any] = {
        "w": jnp.asarray(rng.standard_normal((33, 17)).astype(np.float32)),
        "layers": [
            {"k": rng.standard_normal((16, 8)).astype(ml_dtypes.bfloat16), "b": rng.integers(0, 99, 5, np.int32)}
            for _ in range(2)
        ],
        "bits": rng.integers(-8, 7, 21).astype(ml_dtypes.int4),
        "key": jax.random.key_data(jax.random.key(number)),
        "empty": np.zeros((0, 3), np.float32),
        "zero": np.array(number, np.int16),
        "values": (number, 0.1 * number, f"state {number}", None, b"\x00\xff", True, 2**70),
    }
    if subject.startswith("large"):
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        tree["spread"] = jax.device_put(rng.standard_normal((512, 1030)).astype(np.float32), sharding)
        tree["whole"] = jnp.asarray(rng.integers(0, 255, (5 << 20) + 3).astype(np.uint8))
    return tree


@dataclass
class Subject:
    """A saved checkpoint that is going to be damaged, and all that is needed to tell what damage means."""

    name: str
    room: Path  # holds nothing else
    path: Path
    expected: dict[str | None, Any]
    files: list[str]  # all of them, relative to the room
    manifest: Manifest
    root: str  # where names in the manifest begin, relative to the room
    contents: dict[str, bytes] = field(default_factory=dict)

    @property
    def documents(self) -> set[str]:
        """The files that say what the checkpoint holds."""
        names = ("manifest.json", "model.safetensors.index.json", "model.safetensors")
        return {name for name in self.files if os.path.basename(name) in names}

    def owners(self, name: str, offset: int | None) -> set[str] | None:
        """The leaves with data at a byte of a file (or anywhere in it); None if no tree names the file."""
        found: set[str] | None = None
        for tree in self.manifest.trees.values():
            for number, file in enumerate(tree.files):
                if os.path.normpath(os.path.join(self.root, file.name)) != name:
                    continue
                found = found or set()
                for leaf in tree.arrays:
                    for piece in leaf.pieces:
                        end = piece.offset + (piece.length if piece.stored is None else piece.stored)
                        inside = offset is None or piece.offset <= offset < end
                        if piece.file == number and inside and piece.length:
                            found.add(leaf.key)
        return found


def prepare(name: str, room: Path, number: int = 1) -> Subject:
    """Save a subject in an empty room."""
    target, prefixes, arguments = SUBJECTS[name]
    room.mkdir(parents=True)
    path = room / target
    expected = {prefix: state(name, number + i) for i, prefix in enumerate(prefixes)}
    inline = plan._INLINE
    try:
        plan._INLINE = 0 if name.startswith("tables") else inline  # then tables of pieces are files
        for prefix, tree in expected.items():
            shardkeep.save(path, tree, prefix=prefix, metadata={"number": number}, **arguments)
    finally:
        plan._INLINE = inline
    files = sorted(str(p.relative_to(room)) for p in room.rglob("*") if p.is_file())
    subject = Subject(name, room, path, expected, files, shardkeep.inspect(path), "run" if target == "run" else "")
    for tree in subject.manifest.trees.values():
        assert all(list(leaf.pieces) for leaf in tree.arrays), "decoded now: later their tables may be damaged"
    subject.contents = {file: (room / file).read_bytes() for file in files}
    return subject


@dataclass(frozen=True)
class Damage:
    """A change to the files of a subject: which file, what happens to it, and at which byte if at one."""

    file: str
    what: str
    change: Callable[[Subject, Path], None]
    offset: int | None = None

    @contextlib.contextmanager
    def done(self, subject: Subject) -> Iterator[None]:
        """The damage, as long as the block lasts; then everything is as it was."""
        try:
            self.change(subject, subject.room / self.file)
            yield
        finally:
            for name in {self.file, *(n for n in subject.files if self.what == "swapped")}:
                _restore(subject.room / name, subject.contents[name])


def _restore(path: Path, content: bytes) -> None:
    if path.is_dir():
        path.rmdir()
    # Not cut to nothing first: arrays that were loaded may still be mapped.
    with open(os.open(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        file.write(content)
        file.truncate()


def flips(subject: Subject, count: int, rng: random.Random) -> Iterator[Damage]:
    """Single bits, every file in its turn: small ones are hit as often as large ones."""
    files = [name for name in subject.files if subject.contents[name]]
    for number in range(count):
        name = files[number % len(files)]
        at, bit = rng.randrange(len(subject.contents[name])), rng.randrange(8)
        yield Damage(name, f"bit {bit} of byte {at} flipped", partial(_flip, at=at, bit=bit), at)


def _flip(subject: Subject, path: Path, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes([subject.contents[str(path.relative_to(subject.room))][at] ^ (1 << bit)]))


def coarse(subject: Subject, other: Subject, rng: random.Random) -> Iterator[Damage]:
    """Zeroed pages, other lengths, missing, swapped and foreign files: each file in each way."""
    for name in subject.files:
        size = len(subject.contents[name])
        for page in sorted({0, size // PAGE // 2, (size - 1) // PAGE}) if size else []:
            if any(subject.contents[name][page * PAGE : (page + 1) * PAGE]):
                yield Damage(name, f"page {page} zeroed", partial(_zero, page=page))
        for length in sorted({0, 1, 7, 8, 9, size // 2, size - PAGE, size - 1} & set(range(size))):
            yield Damage(name, f"cut to {length} bytes", lambda s, p, n=length: os.truncate(p, n))
        for more in (b"\0", b"}", rng.randbytes(PAGE)):
            yield Damage(name, f"{len(more)} bytes longer", partial(_append, more=more))
        yield Damage(name, "deleted", lambda s, p: p.unlink())
        yield Damage(name, "made a directory", lambda s, p: (p.unlink(), p.mkdir()))
        for donor in rng.sample(subject.files, min(3, len(subject.files))):
            if subject.contents[donor] != subject.contents[name]:
                yield Damage(name, "swapped", partial(_swap, donor=donor))
        for donor in _counterparts(subject, other, name):
            if other.contents[donor] != subject.contents[name] and name != "model.safetensors":  # all there is
                yield Damage(name, "that of another checkpoint", partial(_put, content=other.contents[donor]))


def _counterparts(subject: Subject, other: Subject, name: str) -> list[str]:
    """The file of the same place in another checkpoint: same name, or (save ids differ) same number in the list."""
    if name in other.contents:
        return [name]
    place = subject.files.index(name)
    return [other.files[place]] if place < len(other.files) else []


def _zero(subject: Subject, path: Path, page: int) -> None:
    with open(path, "r+b") as file:
        file.seek(page * PAGE)
        file.write(bytes(min(PAGE, path.stat().st_size - page * PAGE)))


def _append(subject: Subject, path: Path, more: bytes) -> None:
    with open(path, "ab") as file:
        file.write(more)


def _swap(subject: Subject, path: Path, donor: str) -> None:
    path.write_bytes(subject.contents[donor])
    (subject.room / donor).write_bytes(subject.contents[str(path.relative_to(subject.room))])


def _put(subject: Subject, path: Path, content: bytes) -> None:
    path.write_bytes(content)


def strike(subject: Subject, damage: Damage, arguments: dict[str, Any], prefix: str | None) -> list[str]:
    """Do the damage, look from all sides, undo it. Tells what did not hold."""
    where = f"{subject.name}: {damage.file}: {damage.what}, load({arguments}, prefix={prefix})"
    with damage.done(subject):
        try:
            with within(20):
                loaded, found = _try_load(subject, damage, arguments, prefix)
                found += _try_verify(subject, damage, loaded)
                return [f"{where}: {text}" for text in found]
        except Hang as error:
            return [f"{where}: {error}"]


def _try_load(
    subject: Subject, damage: Damage, arguments: dict[str, Any], prefix: str | None
) -> tuple[bool, list[str]]:
    """Whether it loaded, and what is wrong with how."""
    mesh = {"mesh": Mesh(np.array(jax.devices()[:8]), ("x",))} if "mesh" in arguments else {}
    try:
        tree = shardkeep.load(subject.path, prefix=prefix, **{**arguments, **mesh})
    except shardkeep.ShardkeepError as error:
        return False, _check_message(subject, damage, str(error))
    except Exception as error:  # noqa: BLE001  (that it is not ours is the finding)
        return False, [f"a foreign error: {type(error).__name__}: {error}"]
    if arguments.get("verify") is False:
        return True, []  # nobody asked for a check: that it ends, and not in a foreign error, is all
    return True, [] if same(tree, subject.expected[prefix]) else ["WRONG NUMBERS were loaded"]


def _check_message(subject: Subject, damage: Damage, message: str) -> list[str]:
    """An error names the file, and where data are damaged the leaf. Which file is wrong of two, nobody can tell."""
    mixed = damage.what in ("swapped", "that of another checkpoint")
    gone = damage.file in subject.documents and damage.what == "deleted"
    name = os.path.dirname(subject.path) if mixed or gone else os.path.basename(damage.file)
    if name not in message:
        return [f"the error does not name the file: {message}"]
    owners = subject.owners(damage.file, damage.offset) if damage.offset is not None else None
    if owners and not any(repr(key) in message for key in owners):
        return [f"the error names none of the leaves {owners}: {message}"]
    return []


def _try_verify(subject: Subject, damage: Damage, loaded: bool) -> list[str]:
    try:
        report = shardkeep.verify(subject.path)
    except shardkeep.ShardkeepError as error:
        return _check_message(subject, damage, str(error))
    except Exception as error:  # noqa: BLE001  (that it is not ours is the finding)
        return [f"verify: a foreign error: {type(error).__name__}: {error}"]
    if report.ok:
        part_of_it = damage.file in subject.documents or subject.owners(damage.file, None) is not None
        return ["verify does not notice"] if part_of_it else [] if loaded else ["verify calls sound what does not load"]
    return _check_message(subject, damage, "\n".join(problem.message for problem in report.problems))


def sweep(name: str, count: int, seed: int, part: tuple[int, int] = (0, 1)) -> tuple[int, list[str]]:
    """Flip `count` bits of one subject and damage it in every coarse way; (points, violations).

    `part`: (number, of how many) of the coarse ways to take.
    """
    rng = random.Random(f"{name} {seed}")
    points, violations = 0, []
    with tempfile.TemporaryDirectory(dir=_memory(), prefix="shardkeep-rot-") as room:
        subject, other = (prepare(name, Path(room) / f"{number}", 10 * number) for number in (1, 2))
        shuffled = list(coarse(subject, other, rng))
        random.Random(seed).shuffle(shuffled)
        for damage in [*flips(subject, count, rng), *shuffled[part[0] :: part[1]]]:
            prefix = rng.choice(list(subject.expected))
            violations += strike(subject, damage, rng.choice(LOADS), prefix)
            points += 1
        violations += _is_whole(subject)
    return points, violations


def _is_whole(subject: Subject) -> list[str]:
    """The sweep itself must have put everything back: else it proved nothing."""
    sound = all(same(shardkeep.load(subject.path, prefix=p), tree) for p, tree in subject.expected.items())
    return [] if sound and shardkeep.verify(subject.path).ok else [f"{subject.name}: not as it was after the sweep"]


def damaged_latest(room: Path) -> list[str]:
    """A good checkpoint beside a damaged later one: it is told which, everywhere, and the good one loads."""
    violations: list[str] = []
    for name in ("safetensors", "zstd", "exchange, single"):
        for kind in ("data", "document"):
            home = room / f"{name} {kind}"
            good, bad = (prepare(name, home / step, i) for i, step in enumerate(("step_1", "step_2")))
            data = [f for f in bad.files if (f in bad.documents) == (kind == "document") and bad.owners(f, None)]
            file = (data or sorted(bad.documents))[-1]
            at = len(bad.contents[file]) - 1 if kind == "data" or file not in bad.documents else 20
            _flip(bad, bad.room / file, at, 0)
            violations += [f"{name}, {kind}: {text}" for text in _look(good, bad, home, kind == "document")]
    return violations


def _look(good: Subject, bad: Subject, home: Path, listed: bool) -> Iterator[str]:
    """What does not hold; `listed`: the damage is in a document, so that a listing, which reads no data, shows it."""
    try:
        shardkeep.load(bad.path)
        yield "the damaged one loads"
    except shardkeep.IntegrityError as error:
        if str(bad.path) not in str(error):
            yield f"the error does not say which one is damaged: {error}"
    if not same(shardkeep.load(good.path), good.expected[None]):
        yield "the good one does not load"
    for path, code in ((good.path, 0), (bad.path, 1)):
        given, said = _command("verify", str(path))
        if given != code or (code and bad.path.name not in said):
            yield f"the command verify gives {given} for {path}: {said}"
    given, said = _command("ls", str(home))
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith("step_")}
    shown = {name.split("/")[0]: "complete" in line for name, line in rows.items()}
    if given or shown.get("step_1") is not True or (listed and shown.get("step_2", True)):
        yield f"the command ls shows: {said}"


def _command(*arguments: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command(list(arguments))
    return code, said.getvalue()


@cache
def _memory() -> str | None:
    """Where files cost no disk."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def run(quick: bool = False) -> list[Result]:
    """All subjects on both cores."""
    count = 60 if quick else 1200
    jobs = [(name, count if "large" not in name else count // 4, SEED) for name in SUBJECTS]
    points, violations = 0, []
    for job, answer in zip(jobs, spread(sweep, jobs), strict=True):
        if isinstance(answer, Exception):
            violations.append(f"{job[0]}: {answer}")
            continue
        points += answer[0]
        violations += answer[1]
    how = (
        "in eleven checkpoints, each file has bits flipped and pages zeroed, and is truncated, extended, removed or "
        "swapped with another"
    )
    with tempfile.TemporaryDirectory(dir=_memory()) as room:
        latest = damaged_latest(Path(room))
    return [
        Result("bit rot, lost and swapped files", how, points, tuple(violations)),
        Result(
            "the newest checkpoint is damaged",
            "an intact older one is next to it; both formats and exchange files",
            6,
            tuple(latest),
        ),
    ]
