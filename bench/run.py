"""How fast saves and loads are here, beside the machine's own limits and other libraries, all in one run.

    make bench          # everything; writes bench/results/bench.json, and the tables and plots made from it (report.py)
    make bench-quick    # under five minutes; prints a line for each target

Every measurement is made in a fresh process that has saved and loaded a tiny tree before. The rounds are interleaved:
every contender once, then all again, so that a slow minute of the machine hits all alike; medians are shown. Saves and
loads of many small arrays on one device, which take milliseconds, are repeated in each process: up to five times, until
three seconds are over. Trees are outputs of a jitted function that nothing has looked at. Before a save everything
earlier is synced. Before a save or a load free memory and the interpreter's objects are touched, as in a program that
runs. Warm loads read files that were read just before, cold ones files whose pages were dropped. Resumed loads are the
first ones of new processes, two seconds after the save; nothing is touched before them (`resume.py`). Nothing is
deleted between the rounds (creating files soon after deleting many is slow on ext4): what a process has written is
emptied when it is done, and all goes at the end.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Results = dict[tuple[str, str, str], list[float]]

OURS = ("shardkeep", "shardkeep, tensorstore")
FULL = {
    "a512": (*OURS, "Orbax", "safetensors.flax", "torch DCP"),
    "b512": (*OURS, "Orbax", "safetensors.flax", "eFormer"),
    "f": (*OURS, "Orbax", "safetensors.flax"),
    "c": (*OURS, "Orbax", "safetensors.flax", "eFormer"),
    "c-mesh": (*OURS, "Orbax", "safetensors.flax"),
    "a2048": (*OURS, "Orbax", "safetensors.flax"),
    "b2048": (*OURS, "Orbax", "safetensors.flax"),
}
QUICK = {
    "a512": ("shardkeep", "Orbax", "safetensors.flax"),
    "b512": ("shardkeep", "Orbax", "safetensors.flax"),
    "c": ("shardkeep", "Orbax", "safetensors.flax"),
}
MEMORY = ("a512", "b512", "f")
RESUMED = ("a512", "b512")
LIMITS = {"a512": 512, "b512": 512, "f": 512, "a2048": 2048, "b2048": 2048}


def run_program(name: str, *arguments: str, timeout: float = 900) -> dict[str, Any]:
    environment = {
        # Packages that pip has installed have bytecode. This one, which is installed from its sources, gets it at the
        # first import, unless the environment forbids that.
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_COMPILATION_CACHE_DIR": str(
            Path(tempfile.gettempdir()) / "shardkeep-bench-compiled"
        ),  # of trees and steps
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, str(HERE / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Run:
    """Collects what the programs tell, and shows how far it is."""

    def __init__(self, where: Path) -> None:
        self.found: Results = {}
        self._where, self._started = where, time.monotonic()

    def add(self, workload: str, contender: str, program: str, *arguments: str) -> None:
        place = Path(tempfile.mkdtemp(dir=self._where))
        try:
            told = run_program(program, *[str(place) if a == "HERE" else a for a in arguments])
        except SystemExit as failure:
            if contender in (*OURS, "limits"):
                raise
            print(failure, file=sys.stderr)  # another library's failure leaves its figures out, not everyone's
            return
        for metric, value in told.items():
            self.found.setdefault((workload, contender, metric), []).append(value)
        elapsed = time.monotonic() - self._started
        print(f"{elapsed / 60:5.1f} min  {workload:7} {contender}", file=sys.stderr, flush=True)
        empty(place)


def empty(place: Path) -> None:
    """Room on the disk, without deleting a file."""
    for file in place.rglob("*"):
        if file.is_file() and file.stat().st_size > 64 << 10:
            os.truncate(file, 0)


def measure(run: Run, plan: dict[str, tuple[str, ...]], rounds: int, done: Callable[[int], None]) -> None:
    for number in range(1, rounds + 1):
        for workload, contenders in plan.items():
            if workload in LIMITS:
                run.add(workload, "limits", "limits.py", str(LIMITS[workload]), "HERE")
            for contender in contenders:
                run.add(workload, contender, "worker.py", contender, workload, "HERE", "times")
                if workload in RESUMED:
                    run.add(workload, contender, "resume.py", contender, workload, "HERE")
        done(number)


def measure_memory(run: Run, plan: dict[str, tuple[str, ...]]) -> None:
    for workload in MEMORY:
        for contender in plan.get(workload, ())[:4]:  # those in every table
            run.add(workload, contender, "worker.py", contender, workload, "HERE", "memory")


def measure_growth(run: Run) -> None:
    for by in ("leaves", "bytes"):
        run.add("growth", by, "growth.py", by, "shardkeep", "HERE")
    for contender in ("shardkeep", "Orbax"):
        run.add("rotation", contender, "growth.py", "rotation", contender, "HERE")


def measure_imports(run: Run) -> None:
    for _ in range(5):
        for contender in ("shardkeep", "Orbax"):
            run.add("import", contender, "growth.py", "import", contender, "HERE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 MiB and many small arrays, one round, no files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="only these workloads; import: the time that imports take")
    parser.add_argument("--write", action="store_true", help="with --only: write these results over the last ones")
    parser.add_argument("--contenders", nargs="*", help="only these contenders")
    given = parser.parse_args()
    if given.write and (given.quick or given.contenders or not given.only):
        parser.error("--write needs --only, and full rounds with all contenders")
    plan = QUICK if given.quick else FULL
    plan = {
        name: tuple(c for c in contenders if not given.contenders or c in given.contenders)
        for name, contenders in plan.items()
        if not given.only or name in given.only
    }
    where = Path(tempfile.mkdtemp(prefix="shardkeep-bench-"))
    run = Run(where)
    load = os.getloadavg()[0]
    import report

    def done(rounds: int) -> None:
        if given.write and given.only and rounds == given.rounds:
            report.write(run.found, rounds, load, partly=True)
        elif not given.quick and not given.only:
            report.write(run.found, rounds, load)

    try:
        if not given.quick:
            measure_memory(run, plan)
        if not given.quick and not given.only:
            measure_growth(run)
        if not given.quick and (not given.only or "import" in given.only):
            measure_imports(run)
        measure(run, plan, 1 if given.quick else given.rounds, done)
    finally:
        shutil.rmtree(where)
    report.print_rows(report.medians_of(run.found), run.found)


if __name__ == "__main__":
    main()
