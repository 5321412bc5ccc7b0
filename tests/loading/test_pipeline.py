"""Loads onto accelerators: what is read and sent, when, through how much memory, and what stays behind.

The programs run on the simulated device. They look at counters and at the order of events, never at times.
"""

from pathlib import Path
from typing import Any

import pytest

from device.runner import run_on_device

BEGIN = """
import sys, threading
import jax, numpy as np, shardkeep
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from device.loads import *
from support import all_bits, bits, pattern

root = sys.argv[1]
KB = 1 << 10
"""


def run(program: str, root: Path, **more: Any) -> dict[str, Any]:
    return run_on_device(BEGIN + program, str(root), **more)


@pytest.mark.parametrize("mmap", [True, False])
def test_reading_goes_on_while_transfers_are_under_way(tmp_path: Path, mmap: bool) -> None:
    """With every transfer held, as many groups are read and sent as fit the budget, and then no more."""
    said = run(
        f"MMAP = {mmap}\n"
        + """
from shardkeep.loading.blocks import BlockReader
check = BlockReader.check
def checked(self, leaf, *more):
    check(self, leaf, *more)
    device.mark("checked " + leaf.key)
BlockReader.check = checked
host = save_host(root + "/x")  # 16 leaves of 64 KB
settle()
shardkeep.set_memory_budget(256 * KB)
device.hold("in")
found = []
load = lambda: found.append(shardkeep.load(root + "/x", template=like(host, "single"), mmap=MMAP))
thread = threading.Thread(target=load)
thread.start()
device.wait_for("enqueued", 3)
before = [(r.what, r.transfer) if r.what == "enqueued" else r.what for r in device.log()]
device.permit("in")
device.wait_for("enqueued", 4)  # its memory is used again
device.release("in")
thread.join()
after = [r.what for r in device.log()]
say(before=before, after=after, right=is_same(found[0], host), peak=device.counters()["in_most_bytes_under_way"])
""",
        tmp_path,
    )
    assert said["right"]
    enqueued = [number for number, what in enumerate(said["before"]) if isinstance(what, list)]
    checked = [number for number, what in enumerate(said["before"]) if what == f"checked {len(enqueued):02}"]
    assert len(enqueued) == 3
    assert "finished" not in said["before"]
    assert "checked 02" in said["before"][enqueued[1] :], "the third group is read after the second is on its way"
    assert not checked, "the fourth waits for memory"
    order = said["after"]
    assert order.index("finished") < order.index("checked 03") < order.index("checked 15")
    assert said["peak"] == 3 * 64 << 10


@pytest.mark.parametrize("kind", ["single", "half", "columns"])
def test_never_more_than_the_budget_is_in_host_memory(tmp_path: Path, kind: str) -> None:
    """Mapped, read, decompressed, cut into other regions and cast; also while transfers are slow."""
    said = run(
        f"KIND = {kind!r}\n"
        + """
memory = HostMemory()
host = save_host(root + "/x", leaves=24, shape=(256, 1024))  # 1 MB each
save_host(root + "/zstd", leaves=24, shape=(256, 1024), format="zarr", compression="zstd")
shards = {key: jax.device_put(a, sharding_of("sharded")) for key, a in host.items()}
shardkeep.save(root + "/shards", shards)
del shards
settle()
device.set_rate(0.5)
shardkeep.set_memory_budget(8 << 20)
ways = {
    "mapped": ("x", {}, None), "read": ("x", {"mmap": False}, None), "decompressed": ("zstd", {}, None),
    "shards": ("shards", {"mmap": False}, None), "cast": ("x", {"mmap": False}, "bfloat16"),
}
with jax.default_device(jax.devices("cpu")[0]):
    smaller = {key: np.asarray(jax.numpy.asarray(array).astype("bfloat16")) for key, array in host.items()}
found = {}
for way, (name, options, dtype) in ways.items():
    memory.most = memory.most_claimed = memory.live
    loaded = shardkeep.load(root + "/" + name, template=like(host, KIND, dtype), **options)
    right = is_same(loaded, host if dtype is None else smaller)
    del loaded
    found[way] = {"right": right, "most": memory.most, "claimed": memory.most_claimed, "left": left_behind(memory)}
say(found=found)
""",
        tmp_path,
    )["found"]
    for way, facts in said.items():
        assert facts["right"], way
        assert facts["most"] <= facts["claimed"] * 1.01, f"{way}: {facts}"
        assert facts["claimed"] <= 8 << 20, f"{way}: {facts}"
        assert set(facts["left"].values()) == {0}, f"{way}: {facts}"
    # A group of arrays takes half of the budget. How much of the next one is there already, depends on the machine.
    assert said["read"]["most"] >= 4 << 20, "the budget is used"


def test_a_region_larger_than_the_budget_is_loaded_alone(tmp_path: Path) -> None:
    """It waits until nothing else is claimed, and reading takes no more than a part of the budget beside it."""
    said = run(
        """
memory = HostMemory()
host = save_host(root + "/x", leaves=3, shape=(1024, 1024))  # 4 MB each
settle()
shardkeep.set_memory_budget(1 << 20)
loaded = shardkeep.load(root + "/x", template=like(host, "single"), mmap=False)
right = is_same(loaded, host)
del loaded
say(right=right, most=memory.most, claimed=memory.most_claimed, left=left_behind(memory), moved=arrived())
""",
        tmp_path,
    )
    assert said["right"]
    assert 4 << 20 <= said["most"] <= said["claimed"] == (4 << 20) + (256 << 10)
    assert set(said["left"].values()) == {0}


@pytest.mark.parametrize("mmap", [True, False])
def test_nothing_is_left_of_a_load_that_fails(tmp_path: Path, mmap: bool) -> None:
    """Whether a transfer fails, the device has no memory, or a block is damaged: early, in the middle, late."""
    said = run(
        f"MMAP = {mmap}\n"
        + """
from pathlib import Path
from shardkeep.errors import IntegrityError
memory = HostMemory()
host = save_host(root + "/x")
save_host(root + "/damaged")
settle()
shardkeep.set_memory_budget(256 * KB)
found = {}

def attempt(name, path="x"):
    try:
        shardkeep.load(root + "/" + path, template=like(host, "half"), mmap=MMAP)
        found[name] = ["", {}]
    except (jax.errors.JaxRuntimeError, IntegrityError) as error:
        found[name] = [str(error), {}]
    found[name][1] = left_behind(memory)

for others in (0, 20, 63):
    device.fail_after(others)
    attempt(f"transfer {others}")
device.set_capacity("device", 300 * KB)
attempt("memory")
device.set_capacity("device", None)
data = max((p for p in Path(root + "/damaged").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
size = data.stat().st_size
for at in (size // 10, size // 2, size - 100):
    content = bytearray(data.read_bytes())
    content[at] ^= 1
    data.write_bytes(content)
    attempt(f"damage {at * 10 // size}", "damaged")
    content[at] ^= 1
    data.write_bytes(content)
attempt("none")
say(found=found)
""",
        tmp_path,
    )["found"]
    assert len(said) == 8
    for name, (message, left) in said.items():
        assert set(left.values()) == {0}, f"{name}: {left}"
        expected = {"transfer": "fail", "memory": "RESOURCE_EXHAUSTED", "damage": "does not match its digest"}
        assert expected.get(name.split()[0], "") in message, f"{name}: {message}"
        assert bool(message) == (name != "none"), name


@pytest.mark.parametrize(
    ("devices", "kinds"), [(1, ["single"]), (4, ["single", "replicated", "sharded", "half", "columns"])]
)
def test_each_region_goes_to_each_device_that_needs_it_once(tmp_path: Path, devices: int, kinds: list[str]) -> None:
    """Also with so little memory that every leaf goes region by region."""
    said = run(
        f"WHICH = {kinds!r}\n"
        + """
host = save_host(root + "/x")
found = {}
for kind in WHICH:
    for budget in (None, 64 * KB):
        shardkeep.set_memory_budget(budget)
        settle()
        loaded = shardkeep.load(root + "/x", template=like(host, kind))
        moved = [r for r in device.log() if r.what == "enqueued"]
        places = [sharding_of(kind).is_equivalent_to(array.sharding, 2) for array in loaded.values()]
        found[f"{kind} {budget}"] = [arrived(), len(moved), is_same(loaded, host) and all(places)]
say(found=found)
""",
        tmp_path,
        devices=devices,
    )["found"]
    total = 16 * 64 * 256 * 4
    each = {"single": 1, "replicated": 1, "sharded": devices, "columns": devices, "half": 2}
    for name, (moved, transfers, right) in said.items():
        kind = name.split()[0]
        assert right, name
        share = total // each[kind]
        assert moved == ([share] + [0] * (devices - 1) if kind == "single" else [share] * devices), name
        assert transfers == (16 if kind == "single" else 16 * devices), name


def test_every_dtype_arrives_bit_for_bit(tmp_path: Path) -> None:
    """Whole and region by region, on every kind of sharding; empty arrays, scalars and keys too."""
    said = run(
        """
import dtypes
host = {name: all_bits(name) for name in dtypes.JAX}
host |= {"empty": np.zeros((0, 16), np.float32), "half empty": np.zeros((16, 0), np.int32)}
wide = {name: all_bits(name) for name in dtypes.WIDE}  # JAX cannot hold them
scalar = {"scalar": np.array(3, np.float32)}
with jax.default_device(jax.devices("cpu")[0]):
    keys = {"key": jax.random.key(7), "keys": jax.random.split(jax.random.key(8), (16, 4))}
    data = {name: np.asarray(jax.random.key_data(key)) for name, key in keys.items()}
shardkeep.save(root + "/x", host | wide | scalar | keys)
wrong, count = [], 0
for kind in ("single", "replicated", "sharded", "half", "columns"):
    flat = "single" if kind == "single" else "replicated"
    template = like(host | wide | {"keys": keys["keys"]}, kind) | like(scalar | {"key": keys["key"]}, flat)
    for budget in (None, 64):
        shardkeep.set_memory_budget(budget)
        found = shardkeep.load(root + "/x", template=template)
        wrong += [(kind, name) for name, a in (host | scalar).items() if not is_same({name: found[name]}, {name: a})]
        wrong += [(kind, name) for name, a in wide.items() if type(found[name]) is not np.ndarray]
        wrong += [(kind, name) for name, a in wide.items() if bits(found[name]) != bits(a)]
        wrong += [(kind, name) for name, a in data.items() if bits(jax.random.key_data(found[name])) != bits(a)]
        for name in host | scalar | keys:
            place, asked = found[name].sharding, template[name].sharding
            count += 1
            if not place.is_equivalent_to(asked, found[name].ndim):
                wrong.append((kind, name, str(place)))
say(wrong=wrong, count=count, dtypes=len(dtypes.JAX))
""",
        tmp_path,
    )
    assert said["wrong"] == []
    assert said["count"] == 10 * (said["dtypes"] + 5)


def test_after_an_interrupt_the_claim_stays_until_no_transfer_uses_the_memory(tmp_path: Path) -> None:
    """Ctrl-C while transfers are under way: other loads must not take host memory that JAX is still reading."""
    said = run(
        """
import os, signal
from shardkeep.runtime.budget import Claim, budget
from signals import usual_signals
usual_signals()
host = save_host(root + "/x")  # 16 leaves of 64 KB
settle()
shardkeep.set_memory_budget(256 * KB)  # for three groups at a time
given_back = threading.Event()
release = Claim.release
def released(self):
    if budget.claims.get(self):
        device.mark("given back")
        given_back.set()
    release(self)
Claim.release = released
device.hold("in")

def interrupt():
    device.wait_for("enqueued", 3)
    os.kill(os.getpid(), signal.SIGINT)
    device.permit("in")  # the main thread hears of the signal when its wait for the first group is over
    given_back.wait(1)  # not before the other groups have arrived
    device.release("in")

thread = threading.Thread(target=interrupt)
thread.start()
interrupted = False
try:
    shardkeep.load(root + "/x", template=like(host, "single"), mmap=False)
except KeyboardInterrupt:
    interrupted = True
thread.join()
records = [r.what for r in device.log()]
device.wait_for("finished", device.counters()["enqueued"])
loaded = shardkeep.load(root + "/x", template=like(host, "single"))
say(interrupted=interrupted, records=records, used=budget.used, right=is_same(loaded, host))
""",
        tmp_path,
    )
    assert said["interrupted"]
    assert said["right"]
    assert said["used"] == 0
    order = said["records"]
    assert order.count("enqueued") < 16, "the load was interrupted"
    assert "finished" not in order[order.index("given back") :]
    assert order.count("finished") == order.count("enqueued")
