"""What saves and loads cost on accelerators, on the simulated one of the tests: `make bench-devices`.

    python bench/devices.py            # about four minutes; prints a table
    python bench/devices.py --quick    # small states, one round: shows that it runs, the numbers mean little

The simulated device copies between its own memory and the host over links of a given bandwidth, in the background. So
its figures tell whether the links are kept busy, each byte crosses one once, and memory is given back; they do not tell
how fast a real GPU or TPU is. The ideal is the time that the bytes take on all links at once. Times are medians of
several rounds, because the machine does other things too; the best is in parentheses. A load is compared with the
reading right before it: both need the CPUs, which the simulated links use as well.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from device.runner import run_on_device, run_on_devices
from targets import Row

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
RATE = 0.25  # 1e9 bytes a second and link
FAST = 1.0
KINDS = ("single", "replicated", "sharded", "half")

_MEASURE = """
import json, sys
sys.path.insert(0, {bench!r})
import device_worker
device.set_poison(False)
say(**getattr(device_worker, {what!r})({root!r}, **{arguments!r}))
"""


def measure(what: str, devices: int, root: Path, processes: int = 1, pinned: str = "never", **more: Any) -> Any:
    """What a function of `device_worker` returns on so many devices: the largest of each figure, over processes."""
    program = _MEASURE.format(bench=str(ROOT / "bench"), what=what, root=str(root), arguments=more)
    if processes == 1:
        return run_on_device(program, devices=devices, timeout=600, SHARDKEEP_PINNED_HOST=pinned)
    said = run_on_devices(program, root, processes, devices // processes, timeout=600)
    return {name: max(process[name] for process in said) for name in said[0]}


def rows(root: Path, scale: int, rounds: int) -> Iterator[Row]:
    """One for each thing to reach."""
    for processes, devices, kinds in ((1, 1, KINDS[:1]), (1, 4, KINDS), (2, 4, KINDS[1:])):
        for kind in kinds:
            links = 1 if kind == "single" else devices // processes
            nbytes = 128 * MIB * links * processes // scale
            where = f"{devices} devices, {processes} processes" if processes > 1 else f"{devices} devices"
            name = f"{where}, {kind}".replace("1 devices", "1 device")
            here = root / f"{processes}-{devices}-{kind}"
            arguments = {"kind": kind, "nbytes": nbytes, "rate": RATE, "links": links, "rounds": rounds}
            found = measure("saves", devices, here, processes, **arguments)
            yield Row(f"save, {name}: bytes moved, of those written", found["moved"], 1.0, most=True)
            best = f"(best {found['best']:.2f})"
            yield Row(f"save, {name}: blocked, of the ideal {best}", found["blocked"], 1.15, most=True)
            yield Row(f"save, {name}: memory kept, % of the state", found["kept"] * 100, 2, most=True)
    for devices, kind in ((1, "single"), (4, "sharded")):
        arguments = {"kind": kind, "nbytes": 1024 * MIB // scale, "rate": FAST, "rounds": rounds}
        found = measure("calls", devices, root / f"pinned-{devices}", pinned="always", **arguments)
        size = f"{1024 // scale} MiB (best {found['best']:.1f})"
        yield Row(f"save_async, pinned_host, {kind} × {devices}, {size}: ms", found["call"], 20, most=True)
    for devices, kind, rate in ((1, "single", FAST), (4, "sharded", RATE), (4, "replicated", RATE), (4, "half", RATE)):
        arguments = {"kind": kind, "nbytes": 512 * MIB // scale, "rate": rate, "links": devices}
        budget = 128 * MIB // scale
        found = measure("loads", devices, root / f"load-{kind}", budget=budget, rounds=rounds, **arguments)
        name = f"load, {devices} devices, {kind}".replace("1 devices", "1 device")
        how = f"of {found['read']:.2f} s read, {found['transfer']:.2f} s sent (best {found['best']:.2f})"
        yield Row(f"{name}: of the slower {how}", found["load"], 1.15, most=True)
        yield Row(f"{name}: most host memory, of the budget", found["memory"], 1.10, most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small states, one round")
    chosen = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])  # for the programs on the devices
    with tempfile.TemporaryDirectory() as root:
        for row in rows(Path(root), *((32, 1) if chosen.quick else (1, 5))):
            print(row, flush=True)


if __name__ == "__main__":
    main()
