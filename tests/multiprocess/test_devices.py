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
        out = [record for record in device.log() if record.what == "enqueued"]
        links = [sum(r.bytes for r in out if r.device == d.id) for d in jax.local_devices()]
        found[f"{kind} {how}"] = {"moved": moved, "share": report.share, "total": report.nbytes, "links": links}
say(found=found)
"""


@pytest.mark.parametrize("platform", ["simulated", "rocm"])
def test_what_a_process_transfers_is_what_it_writes(tmp_path: Path, platform: str) -> None:
    """And its devices send the same amount each."""
    said = run_on_devices(PROGRAM, tmp_path, platform=platform)
    for name in said[0]["found"]:
        shares = [process["found"][name] for process in said]
        for process in shares:
            # A file has a header, of which nothing was transferred.
            assert process["moved"] <= process["share"] <= process["moved"] * 1.001 + 10_000, f"{name}: {shares}"
            assert process["moved"] == 16 * (1 << 11) * (1 << 10) // 2, f"{name}: {shares}"
            assert process["links"] == [process["moved"] // 2] * 2, f"{name}: {shares}"


OWN = """
import jax, numpy as np, shardkeep
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from multiprocess.inside import caught, put, spread
from support import bits, pattern

shardkeep.set_memory_budget(1 << 20)
values = {str(i): pattern("float32", (258, 512 + i)) for i in range(6)}
everywhere = {key: spread(array, P("a")) for key, array in values.items()}
own = {"own " + key: jax.device_put(array, jax.local_devices()[0]) for key, array in values.items()}
two = Mesh(np.array([device for device in jax.devices() if device.process_index < 2]), ("a",))
some = {name: put(values["0"], NamedSharding(two, spec)) for name, spec in (("whole", P()), ("cut", P("a")))}
tree = {**everywhere, **own, **some}
shardkeep.save(root / "now", tree)
shardkeep.save_async(root / "later", tree).wait()
device.wait_for("finished", device.counters()["enqueued"])
right = []
for name in ("now", "later"):
    template = {key: np.zeros(array.shape, array.dtype) for key, array in tree.items()}
    found = shardkeep.load(root / name, template=template)
    right.append(all(bits(found[key]) == bits(values[key.removeprefix("own ")]) for key in [*values, *own]))
    right.append(all(bits(found[key]) == bits(values["0"]) for key in some))
differs = {"own": jax.device_put(values["0"] if index else values["0"] + 1, jax.local_devices()[0]), **everywhere}
say(right=right, error=caught(shardkeep.save, root / "differing", differs)["message"])
"""


def test_arrays_of_one_process_go_in_batches_too(tmp_path: Path) -> None:
    """What every process has on its own is compared first, and some processes have nothing of an array."""
    for process in run_on_devices(OWN, tmp_path, processes=3, devices=1):
        assert process["right"] == [True] * 4
        assert "leaf own: float32[258, 512]" in process["error"]


NOTHING = """
import jax, numpy as np, shardkeep
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support import bits, pattern

host = {str(i): pattern("float32", (8, 1 << 14)) for i in range(3)}
shardkeep.save(root / "alike", host)
shardkeep.save(root / "alone", {"0": host["0"]})
two = Mesh(np.array([device for device in jax.devices() if device.process_index < 2]), ("a",))
right = []
for name, spec in [(name, spec) for name in ("alike", "alone") for spec in (P("a"), P())]:
    place = NamedSharding(two, spec)
    keys = shardkeep.abstract(root / name)
    template = {k: jax.ShapeDtypeStruct((8, 1 << 14), "float32", sharding=place) for k in keys}
    found = shardkeep.load(root / name, template=template)
    shards = [(bits(np.asarray(s.data)), bits(host[k][s.index])) for k in found for s in found[k].addressable_shards]
    right.append(len(found) == len(keys) and all(np.array_equal(a, b) for a, b in shards))
say(right=right, shards=len(shards))
"""


def test_a_process_whose_devices_hold_nothing_of_an_array_takes_part_in_its_load(tmp_path: Path) -> None:
    """As in a pipeline, whose stages are on different processes."""
    said = run_on_devices(NOTHING, tmp_path, processes=3, devices=1)
    assert [process["right"] for process in said] == [[True] * 4] * 3
    assert [process["shards"] for process in said] == [1, 1, 0]
