"""Readers beside writers, writers beside writers, and programs whose arrays lie in files that are replaced.

A load gives exactly one committed state; no prefix gets lost; of two that save to one place, each wins whole or is
told; mapped arrays stay what they were.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import shardkeep
from faults import parallel
from faults.result import Result
from faults.states import make, same

_ZARR = {"format": "zarr"}
_FILE = "model.safetensors"
# What is overwritten: (target, the arguments of each save in turn).
TARGETS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "safetensors": ("run", [{}]),
    "tensorstore": ("run", [_ZARR]),
    "zstd": ("run", [{**_ZARR, "compression": "zstd"}]),
    "both formats in turn": ("run", [{}, _ZARR]),
    "exchange, single": (_FILE, [{}]),
    "exchange, single and several in turn": (_FILE, [{}, {"max_shard_size": 400}]),
}
_LOSES = (shardkeep.ConflictError, shardkeep.CheckpointExistsError)


def write(room: str, names: list[str], count: int) -> int:
    """Overwrite each target with one state after another, when the readers are ready; tells how many saves it were."""
    for name in names:
        path, variants = _path(room, name), TARGETS[name][1]
        _wait_for(f"{path}.reader-0", f"{path}.reader-1")
        for number in range(1, count + 1):
            arguments = variants[number % len(variants)]
            shardkeep.save(path, make("plain", number), overwrite=True, **arguments)
    return count * len(names)


def read(room: str, names: list[str], count: int, reader: int) -> tuple[int, list[str]]:
    """Load each target until the last state is there; (loads, what was not exactly one state, in the saved order)."""
    loads, found = 0, []
    for name in names:
        path = _path(room, name)
        newest = 0
        Path(f"{path}.reader-{reader}").touch()
        deadline = time.monotonic() + 300
        while newest < count:
            try:
                tree = shardkeep.load(path, mmap=loads % 3 != 0)
                number = int(tree["step"])
                if number < newest or not same(tree, make("plain", number)):
                    found.append(f"{name}, load {loads}: a mix or an older one; it says {number} after {newest}")
                newest = max(newest, number)
            except Exception as error:  # noqa: BLE001  (a reader gets a state, and nothing else)
                found.append(f"{name}, load {loads}: {type(error).__name__}: {error}")
            loads += 1
            if time.monotonic() > deadline:
                return loads, [*found, f"{name}: {count} never came: {newest} was the last"]
    return loads, found


def _path(room: str, name: str) -> str:
    return os.path.join(room, name, TARGETS[name][0])


def _wait_for(*paths: str) -> None:
    deadline = time.monotonic() + 60
    while not all(map(os.path.exists, paths)) and time.monotonic() < deadline:
        time.sleep(0.01)


def readers_beside(room: Path, count: int) -> tuple[int, int, list[str]]:
    """Two readers and a writer, each in a process; (saves, loads, violations)."""
    names = list(TARGETS)
    for name in names:
        (room / name).mkdir(parents=True)
        shardkeep.save(_path(str(room), name), make("plain", 0), **TARGETS[name][1][0])
    shared = (str(room), names, count)
    jobs = [(write, shared), (read, (*shared, 0)), (read, (*shared, 1))]
    saves, *loads = parallel.spread(_call, jobs, seconds=600, at_once=3)
    violations = [str(answer) for answer in (saves, *loads) if isinstance(answer, Exception)]
    lists = [answer for answer in loads if isinstance(answer, tuple)]
    return count * len(names), sum(one[0] for one in lists), [*violations, *(text for one in lists for text in one[1])]


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def prefixes(room: Path, rounds: int) -> list[str]:
    """Four threads save four prefixes of one checkpoint, round after round: after each all four are there."""
    violations: list[str] = []
    for format in ("safetensors", "tensorstore"):
        path = room / f"prefixes {format}"
        for number in range(rounds):
            errors: list[BaseException] = []

            def save(index: int, number: int = number, format: Any = format, errors: list[Any] = errors) -> None:
                try:
                    tree = make("fewer", 10 * number + index)
                    shardkeep.save(path, tree, prefix=f"p{index}", format=format, overwrite=True)  # noqa: B023
                except BaseException as error:  # noqa: BLE001  (writers of different prefixes do not meet)
                    errors.append(error)

            threads = [threading.Thread(target=save, args=(index,)) for index in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found = [same(_loaded(path, f"p{i}"), make("fewer", 10 * number + i)) for i in range(4)]
            if errors or not all(found):
                violations.append(f"{format}, round {number}: {found} {errors}")
        if not shardkeep.verify(path).ok:
            violations.append(f"{format}: {shardkeep.verify(path)}")
    return violations


def _loaded(path: Path, prefix: str) -> Any:
    try:
        return shardkeep.load(path, prefix=prefix)
    except shardkeep.ShardkeepError as error:
        return error


def save_when_told(path: str, rounds: int, mine: int, barrier: Any) -> list[str]:
    """Save to `<path>-<round>` at the same moment as somebody else; gives for each round how it ended."""
    told: list[str] = []
    for number in range(rounds):
        tree = make("plain", 2 * number + mine)
        overwrite = number % 2 == 1
        name = f"{path}-{number}" + (".safetensors" if number % 3 == 2 else "")
        barrier.wait(60)
        try:
            shardkeep.save(name, tree, overwrite=overwrite)
            told.append("")
        except shardkeep.ShardkeepError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def two_writers(room: Path, rounds: int) -> list[str]:
    """Two processes save to one place: what is there is whole and a winner's, and the loser was told why."""
    context = get_context("spawn")
    barrier = context.Barrier(2)
    ends = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=_tell, args=(ends[mine][1], str(room / "both"), rounds, mine, barrier))
        for mine in (0, 1)
    ]
    with parallel.environment():
        for process in processes:
            process.start()
    told = [ours.recv() if ours.poll(300) else ["it never answered"] * rounds for ours, _ in ends]
    for process in processes:
        process.join(30)
    violations: list[str] = []
    for number, outcomes in enumerate(zip(*told, strict=True)):
        name = room / (f"both-{number}" + (".safetensors" if number % 3 == 2 else ""))
        won = [mine for mine, text in enumerate(outcomes) if not text]
        lost = [text for text in outcomes if text]
        allowed = {error.__name__ for error in _LOSES}
        one = number % 2 == 0  # without overwrite, there is one winner and no more
        if (
            not won
            or (one and len(won) > 1)
            or any(text.split(":")[0] not in allowed or str(name) not in text for text in lost)
        ):
            violations.append(f"round {number}: {outcomes}")
        elif not any(same(shardkeep.load(name), make("plain", 2 * number + mine)) for mine in won):
            violations.append(f"round {number}: what is there is no winner's")
    return violations


def _tell(pipe: Any, *arguments: Any) -> None:
    pipe.send(save_when_told(*arguments))


def hold(path: str, rounds: int, arguments: dict[str, Any]) -> list[str]:
    """Load arrays in place, replace and delete the checkpoint again and again, look at all arrays ever loaded."""
    violations: list[str] = []
    held: list[tuple[int, Any]] = []
    for number in range(rounds):
        shardkeep.save(path, _large(number), overwrite=True, **arguments)
        held.append((number, shardkeep.load(path)))
        if number == 0 and not _is_mapped(held[0][1]["w"], os.path.dirname(path)):
            violations.append("the array is not mapped: this proves nothing")
        if number % 4 == 3:
            shardkeep.delete(path)
        for old, tree in held[-6:]:
            if not np.array_equal(np.asarray(tree["w"]), _large(old)["w"]):
                violations.append(f"round {number}: the array of round {old} changed")
    return violations


def _large(number: int) -> Any:
    """Whole pages, above the size from which files are mapped."""
    return {"w": jnp.arange(1 << 19, dtype=jnp.float32) + number, "step": number}


def _is_mapped(array: Any, directory: str) -> bool:
    address = array.unsafe_buffer_pointer()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= address < high:
            return name.startswith(os.path.realpath(directory))
    return False


def mapped(room: Path, rounds: int) -> list[str]:
    """Arrays in place while their files are replaced, in a process of its own: a SIGBUS would end it."""
    targets = {"safetensors": ("run", {}), "tensorstore": ("zarr", _ZARR), "exchange": (_FILE, {})}
    jobs = [(str(room / name), rounds, arguments) for name, arguments in targets.values()]
    violations: list[str] = []
    for name, answer in zip(targets, parallel.spread(hold, jobs), strict=True):
        violations += [f"{name}: {text}" for text in ([str(answer)] if isinstance(answer, Exception) else answer)]
    return violations


def run(quick: bool = False) -> list[Result]:
    """Everything that can be at work at the same time."""
    rounds = 5 if quick else 60
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as place:
        room = Path(place)
        saves, loads, violations = readers_beside(room, 20 if quick else 200)
        lost = prefixes(room, rounds)
        two = two_writers(room, rounds)
        moved = mapped(room, 8 if quick else 40)
    count = 8 if quick else 40
    return [
        Result(
            "a checkpoint is read while it is overwritten",
            "two readers and one writer; both formats, zstd and exchange files",
            saves,
            tuple(violations),
            f"{loads:,} loads",
        ),
        Result("four prefixes are saved at the same time", "four threads; both formats", 8 * rounds, tuple(lost)),
        Result("one checkpoint is saved twice at the same time", "two processes", rounds, tuple(two)),
        Result(
            "the files of mapped arrays are replaced or deleted",
            "a program overwrites and deletes a checkpoint whose arrays it still uses",
            3 * count,
            tuple(moved),
        ),
    ]
