"""Several processes with accelerators: each transfers what it writes, and nothing else."""

from pathlib import Path

import pytest

from device.runner import run_on_devices

PROGRAM = """
import jax, numpy as np, shardkeep
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from multiprocess.inside import spread
from support import pattern

KINDS = {"replicated": (P(), None), "half": (P("b"), (2, 2)), "sharded": (P("a"), None)}
found = {}
for kind, (spec, shape) in KINDS.items():
    tree = {str(i): spread(pattern("float32", (1 << 10, 512)), spec, shape) for i in range(16)}
    jax.block_until_ready(tree)
    for how in ("save", "save_async"):
        device.wait_for("finished", device.counters()["enqueued"])
        device.reset()
        done = getattr(shardkeep, how)(root / f"{kind} {how}", tree)
        report = done if how == "save" else done.wait()
        counted = device.counters()
        moved = counted["device_to_host_bytes"] + counted["device_to_pinned_bytes"]
        found[f"{kind} {how}"] = {"moved": moved, "share": report.share, "total": report.nbytes}
say(found=found)
"""


@pytest.mark.parametrize("platform", ["simulated", "rocm"])
def test_what_a_process_transfers_is_what_it_writes(tmp_path: Path, platform: str) -> None:
    said = run_on_devices(PROGRAM, tmp_path, platform=platform)
    for name in said[0]["found"]:
        shares = [process["found"][name] for process in said]
        for process in shares:
            # A file has a header, of which nothing was transferred.
            assert process["moved"] <= process["share"] <= process["moved"] * 1.001 + 10_000, f"{name}: {shares}"
            assert process["moved"] == 16 * (1 << 11) * (1 << 10) // 2, f"{name}: {shares}"
