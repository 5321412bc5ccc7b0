"""`python -m faults`: every fault that can be made here, and what it broke.

This repository and its `tests` must be on PYTHONPATH, where the programs that are started find their modules, too.
A line for each result as it comes; at the end the rows of the parts that were run are written anew in
docs/reliability.md. The exit code is 1 if a promise was broken. `--only NAME` runs some parts; `--quick` a sample of
their points, and leaves the page as it is.
"""

import argparse
import datetime
import importlib
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}  # before jax is imported

import jax

import shardkeep
from faults.result import Result

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults -->", "<!-- /faults -->"
PARTS = {
    "kill": "faults.kill:run",
    "interrupts": "faults.interrupts:run",
    "power": "faults.power:run",
    "full": "faults.full:run",
    "denied": "faults.denied:run",
    "exit": "faults.exit:run",
    "doubt": "faults.doubt:run",
    "rot": "faults.rot:run",
    "fuzz": "faults.fuzz:run",
    "beside": "faults.beside:run",
    "life": "faults.life:run",
    "stopped": "faults.stopped:run",
    "alias": "faults.alias:run",
    "late": "faults.late:run",
}


def run_part(name: str, quick: bool) -> Iterator[Result]:
    """The results of one part as they come; a part that breaks down is a violation of its own."""
    module, _, function = PARTS[name].partition(":")
    if importlib.util.find_spec(module) is None:
        yield Result(name, "", 0, (), f"left out: there is no {module} yet")
        return
    try:
        yield from getattr(importlib.import_module(module), function)(quick)
    except Exception as error:  # noqa: BLE001  (the other parts are still to be run)
        yield Result(name, "", 0, (f"the part itself failed: {type(error).__name__}: {error}",))


def table(results: dict[str, list[Result]], page: str) -> str:
    """What goes between the marks: a row for each result, then every violation; of parts not run, what the page has."""
    rows: list[str] = []
    broken: list[str] = []
    old = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    for part in PARTS:
        if part not in results:
            rows += [line for line in old if line.startswith(f"| {part} |")]
            broken += [line for line in old if line.startswith(f"- {part}: ")]
        for r in results.get(part, ()):
            rows.append(f"| {part} | {r.fault} | {r.how} | {r.points:,} | {len(r.violations)} | {r.note} |")
            broken += [f"- {part}: {r.fault}: {violation}" for violation in r.violations]
    points = sum(int(row.split(" | ")[3].replace(",", "")) for row in rows)
    lines = [
        f"{datetime.date.today().isoformat()}, shardkeep {shardkeep.__version__}, {machine()}: "
        f"{points:,} points, {len(broken)} violations.",
        "",
        "| part | fault | how it is caused | points | violations | note |",
        "|---|---|---|---:|---:|---|",
        *rows,
    ]
    return "\n".join([*lines, *(["", *broken] if broken else [])])


def machine() -> str:
    """What the results may depend on, and nothing that names the machine."""
    told = subprocess.run(["stat", "-f", "-c", "%T", "."], capture_output=True, text=True, check=False)
    system = f"Linux {platform.release().partition('-')[0]}"
    cores = f"{len(os.sched_getaffinity(0))} cores"
    file_system = told.stdout.strip().replace("ext2/ext3", "ext4") or "unknown"
    return f"{system}, {cores}, {file_system}, Python {platform.python_version()}, jax {jax.__version__}"


def write_page(results: dict[str, list[Result]]) -> None:
    page = PAGE.read_text()
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table(results, page)}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description="Make every fault that can be made here.")
    parser.add_argument("--only", action="append", choices=PARTS, metavar="NAME", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a sample of the points")
    options = parser.parse_args()
    results: dict[str, list[Result]] = {}
    for name in options.only or PARTS:
        started = time.monotonic()
        results[name] = []
        for result in run_part(name, options.quick):
            results[name].append(result)
            note = f" ({result.note})" if result.note else ""
            found = f"{result.points} points, {len(result.violations)} violations{note}"
            print(f"{name}: {result.fault}: {found}", flush=True)
            for violation in result.violations:
                print(f"  VIOLATION {violation}", flush=True)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        if not options.quick:
            write_page(results)
    return 1 if any(result.violations for part in results.values() for result in part) else 0


if __name__ == "__main__":
    sys.exit(main())
