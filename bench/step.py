"""What `run.step` costs when nothing is due, and how many lines a training loop takes with a run and without.

    .venv-bench/bin/python bench/step.py

The loops in `bench/loops/` are run here first: stopped after 25 steps and resumed, each ends like one that was not.
Writes `bench/results/step.md`. Needs Orbax; without it, that loop is left out.
"""

import importlib
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")

import jax
import jax.numpy as jnp
import numpy as np

import shardkeep

LOOPS = {"`shardkeep.Run`": "with_run", "Orbax `CheckpointManager`": "with_orbax", "neither": "with_neither"}
CALLS, ROUNDS = 100_000, 7
ABOUT = (
    "Medians of {rounds} rounds of {calls:,} calls, Python {python}, jax {jax}, one process. The loops are in "
    "`bench/loops/`: each resumes state and data, saves every 10 steps in the background, keeps some, and saves on "
    "SIGTERM. Lines of code, without comments and empty lines."
)
RESULT = Path(__file__).parent / "results" / "step.md"


def cost(path: Path, interval: Any) -> float:
    """Microseconds of one call of `step` that saves nothing, in the loop of a program: the median of several rounds."""
    rounds: list[float] = []
    with shardkeep.Run(path, save_every=interval) as run:
        state, step = run.resume(lambda: {"w": jnp.zeros(8)})
        loss, data = jnp.ones(()), {"train": 3}
        for _ in range(ROUNDS):
            empty = time.perf_counter()
            for _ in range(CALLS):
                step += 1
            began = time.perf_counter()
            for _ in range(CALLS):
                step += 1
                run.step(step, state, metrics={"loss": loss}, iterators=data)
            ended = time.perf_counter()
            rounds.append(((ended - began) - (began - empty)) / CALLS * 1e6)
    return statistics.median(rounds)


def lines(module: str) -> int:
    """Lines of code between the marks: no comments, no empty lines."""
    text = (Path(__file__).parent / "loops" / f"{module}.py").read_text()
    inside = text.partition("# begin\n")[2].partition("# end")[0].splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in inside)


def check(module: str, directory: Path) -> None:
    """`AssertionError` unless a loop that was stopped and resumed ends like one that was not."""
    train = importlib.import_module(f"loops.{module}").train
    undisturbed = train(str(directory / "undisturbed"), 40)
    train(str(directory / "stopped"), 25)
    resumed = train(str(directory / "stopped"), 40)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), undisturbed, resumed)), module


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    rows = [
        "# The cost of `run.step`, and the length of a training loop",
        "",
        "| `run.step` when nothing is due | µs |",
        "|---|---|",
    ]
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        for name, interval in (("in steps", 10**12), ("as a time", "1000 h"), ("with both", (10**12, "1000 h"))):
            rows.append(f"| `save_every` {name} | {cost(where / name, interval):.2f} |")
        rows += ["", "| loop with | lines of code |", "|---|---|"]
        for title, module in LOOPS.items():
            if module == "with_orbax" and importlib.util.find_spec("orbax.checkpoint") is None:
                continue
            check(module, where / module)
            rows.append(f"| {title} | {lines(module)} |")
    rows += ["", ABOUT.format(rounds=ROUNDS, calls=CALLS, python=sys.version.split()[0], jax=jax.__version__)]
    text = "\n".join(rows) + "\n"
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
