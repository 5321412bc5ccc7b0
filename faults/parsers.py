"""`python -m faults.parsers`: hostile input for one parser of other programs' files after the other.

PYTHONPATH is that of `python -m faults`. `--only NAME` takes some parsers, `--inputs` so many changed files for each,
`--seconds` so long at most. The row of each that was run is written anew into the table in docs/reliability.md, as soon
as it is done, unless `--dry` is given. The exit code is 1 if something was found, or if there was not enough time.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}  # before jax is imported

from faults.fuzz import SEED, Tally, work
from faults.parallel import CORES, spread

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- parsers -->", "<!-- /parsers -->"
# The cases of each, by a pattern of their names.
PARSERS = {
    "torch pickles": "^torch: pickle$",
    "torch archives (zip)": "^torch: (compressed )?archive$",
    "torch shard indexes": "^torch: (index|place)$",
    "DCP metadata": "^torch: metadata$",
    "DCP shards": "^torch: distributed part$",
    "npz archives": "^numpy: an archive",
    "npy headers": "^numpy: an array",
    "Flax msgpack": "^flax: ",
    "HDF5": "^keras: weights",
    "Keras archives": "^keras: an archive",
    "OCDBT": "^orbax: (node|manifest|a whole manifest)",
    "zarr 2 metadata": "^zarr description|/[.]zarray$",
    "zarr 3 metadata": "/zarr[.]json$",
    "zarr 3 shard indexes": "^orbax: shard$",
    "Orbax metadata": "^orbax: .*(METADATA|_sharding|_strings[.]json|process_0|metadata|metrics)$",
    "Orbax msgpack": "^orbax: early ",
    "JAX pytreedef": "^jax: ",
}
LOAD_EVERY = 30


def hunt(name: str, inputs: int, seconds: float) -> Tally:
    """So many inputs for one parser, in one process for each core."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    total = Tally()
    with tempfile.TemporaryDirectory(dir=memory, prefix="shardkeep-parser-") as room:
        jobs = [(room, SEED + n, -(-inputs // CORES), LOAD_EVERY, seconds, PARSERS[name]) for n in range(CORES)]
        for found in spread(work, jobs, seconds + 100):
            total.add(found if isinstance(found, Tally) else Tally(violations=[f"{name}: {found}"]))
    return total


def write_row(name: str, tally: Tally) -> None:
    """Put a row into the table of the page; the others stay."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    inside, after = rest.split(END)
    rows = {line.split(" | ")[0][2:]: line for line in inside.splitlines() if line.startswith("| ")}
    header = ["| parser | inputs | findings | complete loads | valid inputs |", "|---|---:|---:|---:|---:|"]
    counts = (tally.inputs, len(tally.violations), tally.loads, tally.accepted)
    rows[name] = f"| {name} | {' | '.join(f'{count:,}' for count in counts)} |"
    table = "\n".join([*header, *(rows[parser] for parser in PARSERS if parser in rows)])
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.parsers", description="Hostile input for each parser.")
    parser.add_argument("--only", action="append", choices=PARSERS, metavar="NAME", help=f"of {', '.join(PARSERS)}")
    parser.add_argument("--inputs", type=int, default=200_000, help="for each parser (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4 * 3600, help="for each parser (default: %(default)s)")
    parser.add_argument("--dry", action="store_true", help="leave the page as it is")
    options = parser.parse_args()
    broken = False
    for name in options.only or PARSERS:
        started = time.monotonic()
        tally = hunt(name, options.inputs, options.seconds)
        broken |= bool(tally.violations) or tally.inputs < options.inputs
        print(
            f"{name}: {tally.inputs:,} inputs, {len(tally.violations)} findings, {tally.loads:,} loads, "
            f"{tally.accepted:,} valid inputs, {time.monotonic() - started:.0f} s",
            flush=True,
        )
        if tally.inputs < options.inputs:
            print(f"  STOPPED after {options.seconds:g} s; on a busy machine, give more with --seconds", flush=True)
        for case, count in sorted(tally.by_case.items()):
            print(f"  {case}: {count:,}")
        for violation in tally.violations:
            print(f"  FINDING {violation}", flush=True)
        if not options.dry:
            write_row(name, tally)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
