"""Points of a sweep on both cores: two threads, each with a spawner of its own."""

import queue
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from faults.result import Result
from faults.spawner import Spawner
from faults.sweep import Violation

WORKERS = 2
Item = TypeVar("Item")
Check = Callable[[Spawner, Item], int | None]  # how many points it made, one if it does not say; raises what broke


def each(
    fault: str,
    how: str,
    check: Check[Item],
    items: Iterable[Item],
    workers: int = WORKERS,
    actions: str = "faults.states",
) -> Result:
    """Check every item, and tell what was found as one result. An error of any kind is a violation.

    `actions`: the module whose functions the spawned processes run.
    """
    todo: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in items:
        todo.put(item)
    found: list[str] = []
    points: list[int] = []
    with ThreadPoolExecutor(workers) as pool:
        for worker in [pool.submit(_work, actions, check, todo, points, found) for _ in range(workers)]:
            worker.result()
    return Result(fault, how, sum(points), tuple(found))


def _work(
    actions: str, check: Check[Item], todo: "queue.SimpleQueue[Item]", points: list[int], found: list[str]
) -> None:
    with Spawner(actions) as spawner:
        while True:
            try:
                item = todo.get_nowait()
            except queue.Empty:
                return
            try:
                made = check(spawner, item)
                points.append(1 if made is None else made)
            except Violation as violation:
                points.append(violation.points)
                found.extend(f"{_name(item)}: {line}" for line in violation.found)
            except Exception as error:  # noqa: BLE001  (whatever goes wrong is the finding)
                points.append(1)
                found.append(f"{_name(item)}: {type(error).__name__}: {error}")


def _name(item: object) -> str:
    return str(getattr(item, "name", item))


@contextmanager
def room(memory: bool = True) -> Iterator[Path]:
    """A directory for one point: in memory where order is what counts, on the disk otherwise."""
    in_memory = memory and Path("/dev/shm").is_dir()
    with tempfile.TemporaryDirectory(prefix="shardkeep-", dir="/dev/shm" if in_memory else None) as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)
