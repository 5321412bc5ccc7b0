"""`python tests/walk.py save` or `load`: every function of shardkeep that one call enters, as a reader meets them.

`save` is `save_async` of a dict of two sharded arrays and the `wait()` for it; `load` is `load` with a template onto
another mesh. Each function stands where it is entered first, below the thread that does so, indented by how deeply it
is nested there. `test_project.py` holds the sizes of both walks.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}  # before jax is imported

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardkeep

SOURCE = Path(shardkeep.__file__).parent


@dataclass(frozen=True)
class Step:
    """A function, where it is entered first; `depth` counts those of ours around it."""

    thread: str
    depth: int
    file: str
    function: str


@dataclass
class Walk:
    """Which of our functions a call enters, in order, over all threads.

    Comprehensions and lambdas are read where they stand, so they count as part of the function around them.
    """

    steps: dict[tuple[str, str], Step] = field(default_factory=dict)
    deepest: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        return sorted({file for file, _ in self.steps})

    @property
    def size(self) -> tuple[int, int, int]:
        """Functions, files, and how many functions are nested in each other at most."""
        return len(self.steps), len(self.files), len(self.deepest)

    def __str__(self) -> str:
        lines: list[str] = []
        for thread in dict.fromkeys(step.thread for step in self.steps.values()):
            lines.append(f"{thread}:")
            for step in self.steps.values():
                if step.thread == thread:
                    lines.append(f"{'  ' * step.depth}{step.function}  ({step.file})")
        functions, files, depth = self.size
        return "\n".join([*lines, f"{functions} functions in {files} files, {depth} deep", *self.deepest])

    @contextmanager
    def following(self) -> Iterator[None]:
        """Record what this thread and those started meanwhile enter, to their ends."""
        before = threading.enumerate()
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            for thread in set(threading.enumerate()) - set(before):
                thread.join(60)

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not _counts(frame):
            return
        stack = [frame.f_code.co_qualname]
        caller = frame.f_back
        while caller is not None:
            if _counts(caller):
                stack.append(caller.f_code.co_qualname)
            caller = caller.f_back
        file = str(Path(frame.f_code.co_filename).relative_to(SOURCE))
        step = Step(_role(threading.current_thread()), len(stack), file, stack[0])
        self.steps.setdefault((file, stack[0]), step)
        if len(stack) > len(self.deepest):
            self.deepest = stack[::-1]


def _counts(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename.startswith(f"{SOURCE}{os.sep}") and not code.co_name.startswith("<")


def _role(thread: threading.Thread) -> str:
    """The name of a thread without its number: helpers share their work as it comes."""
    return thread.name.rstrip("0123456789-")


def _tree(mesh: Mesh) -> dict[str, jax.Array]:
    kernel = jax.device_put(np.ones((64, 32), np.float32), NamedSharding(mesh, PartitionSpec("a", "b")))
    return {"kernel": kernel, "bias": jax.device_put(np.ones(32, np.float32), NamedSharding(mesh, PartitionSpec("b")))}


def _mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("a", "b"))


def walk_save(room: Path) -> Walk:
    tree = _tree(_mesh(4, 2))
    return _second(lambda n: shardkeep.save_async(room / f"saved {n}", tree).wait())


def walk_load(room: Path) -> Walk:
    shardkeep.save(room / "loaded", _tree(_mesh(4, 2)))
    template = _tree(_mesh(2, 4))
    return _second(lambda _: shardkeep.load(room / "loaded", template=template))


def _second(call: Callable[[int], object]) -> Walk:
    """The walk of a call that is not the first of its kind in the process."""
    call(1)
    walk = Walk()
    with walk.following():
        call(2)
    return walk


WALKS = {"save": walk_save, "load": walk_load}


def main() -> int:
    if sys.argv[1:] not in [[name] for name in WALKS]:
        print(f"usage: python {sys.argv[0]} {'|'.join(WALKS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as room:
        print(WALKS[sys.argv[1]](Path(room)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
