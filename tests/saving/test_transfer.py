"""Saves from accelerators: what is transferred, from where, when, and what stays behind.

The programs run on the simulated device. They look at counters and at the order of events, never at times.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from device.runner import run_on_device

BEGIN = """
import os, sys
from contextlib import nullcontext
import jax, numpy as np
import shardkeep
from jax.sharding import SingleDeviceSharding
from device.loads import settle, sharding_of
from support import bits, pattern

root = sys.argv[1]
devices = jax.devices()

def state(kind, leaves=16, rows=64):
    host = {str(i): pattern("float32", (rows, 256 + i)) for i in range(leaves)}
    made = jax.block_until_ready({name: jax.device_put(array, sharding_of(kind)) for name, array in host.items()})
    settle()
    return host, made

def is_saved(path, host):
    found = shardkeep.load(path, template={key: np.zeros_like(array) for key, array in host.items()})
    return all(bits(found[key]) == bits(array) for key, array in host.items())
"""


def run(program: str, root: Path, **more: Any) -> dict[str, Any]:
    return run_on_device(BEGIN + program, str(root), **more)


@pytest.mark.parametrize("how", ["save", "async", "pinned"])
@pytest.mark.parametrize(("devices", "kinds"), [(1, ["single"]), (4, ["single", "replicated", "sharded", "half"])])
def test_every_byte_leaves_one_device_once(tmp_path: Path, how: str, devices: int, kinds: list[str]) -> None:
    """All devices that hold the data send about the same, and all transfers are enqueued before the first is over."""
    said = run(
        f"HOW, WHICH = {how!r}, {kinds!r}\n"
        + """
found = {}
for kind in WHICH:
    host, tree = state(kind)
    device.hold("out")
    if HOW == "pinned":
        pending = shardkeep.save_async(root + "/" + kind, tree)
        early = device.counters()["finished"]
    else:
        import threading
        go = threading.Thread(target=lambda: (device.wait_for("enqueued", expected), device.release("out")))
        expected = 16 * {"single": 1, "replicated": 1, "sharded": len(devices), "half": 2}[kind]
        go.start()
        pending = (shardkeep.save if HOW == "save" else shardkeep.save_async)(root + "/" + kind, tree)
        go.join()
        early = 0
    device.release("out")
    if HOW != "save":
        pending.wait()
    counted = device.counters()
    records = device.log()
    moved = [record for record in records if record.what == "enqueued"]
    first_end = next(n for n, record in enumerate(records) if record.what == "finished")
    found[kind] = {
        "nbytes": sum(array.nbytes for array in host.values()),
        "moved": sum(record.bytes for record in moved),
        "by device": [sum(r.bytes for r in moved if r.device == d.id) for d in devices],
        "late": sum(record.what == "enqueued" for record in records[first_end:]),
        "early": early,
        "phases": list((pending if HOW == "save" else pending.report).phases),
        "right": is_saved(root + "/" + kind, host),
    }
say(found=found)
""",
        tmp_path,
        devices=devices,
        SHARDKEEP_PINNED_HOST="always" if how == "pinned" else "never",
    )["found"]
    for kind, facts in said.items():
        assert facts["right"], kind
        assert facts["moved"] == facts["nbytes"], kind
        assert facts["late"] == facts["early"] == 0, kind
        assert facts["phases"] == ["snapshot", "transfer", "write", "sync", "commit"]
        links = 1 if kind == "single" else devices
        assert max(facts["by device"]) <= 1.1 * facts["nbytes"] / links, f"{kind}: {facts['by device']}"


def test_nothing_stays_with_the_callers_arrays(tmp_path: Path) -> None:
    """Reading the arrays afterwards transfers all of them again, and no pinned memory is in use."""
    said = run(
        """
found = {}
for kind in ("single", "replicated", "sharded", "half"):
    for how, setting in (("save", "never"), ("save_async", "never"), ("save", "always"), ("save_async", "always")):
        os.environ["SHARDKEEP_PINNED_HOST"] = setting
        host, tree = state(kind)
        pending = getattr(shardkeep, how)(root + "/x", tree, overwrite=True)
        if how == "save_async":
            pending.wait()
        kept = device.counters()["pinned_live_bytes"]
        device.reset()
        for array in tree.values():
            np.asarray(array)
        again = device.counters()["device_to_host_bytes"]
        found[f"{kind} {how} {setting}"] = [again / sum(array.nbytes for array in host.values()), kept]
say(found=found)
""",
        tmp_path,
    )["found"]
    assert said == {name: [1, 0] for name in said}
    assert len(said) == 16


def test_pinned_memory_is_for_gpus_unless_the_setting_says_otherwise(tmp_path: Path) -> None:
    program = """
host, tree = state("sharded")
shardkeep.save(root + "/x", tree, overwrite=True)
say(**{name: device.counters()[name] for name in ("device_to_pinned", "device_to_host")})
"""
    used, unused = {"device_to_pinned": 64, "device_to_host": 0}, {"device_to_pinned": 0, "device_to_host": 64}
    assert run(program, tmp_path, platform="rocm") == used
    assert run(program, tmp_path) == unused
    assert run(program, tmp_path, platform="rocm", SHARDKEEP_PINNED_HOST="never") == unused


@pytest.mark.parametrize("setting", ["always", "never"])
def test_arrays_may_be_deleted_as_soon_as_save_async_returns(tmp_path: Path, setting: str) -> None:
    said = run(
        """
host, tree = state("half")
pinned = os.environ["SHARDKEEP_PINNED_HOST"] == "always"
if pinned:
    device.hold("out")
pending = shardkeep.save_async(root + "/x", tree)
for array in tree.values():
    array.delete()
device.release("out")
pending.wait()
say(right=is_saved(root + "/x", host))
""",
        tmp_path,
        SHARDKEEP_PINNED_HOST=setting,
    )
    assert said == {"right": True}


@pytest.mark.parametrize("room", [0, 100_000, 600_000])
def test_exhausted_pinned_memory_is_no_obstacle(tmp_path: Path, room: int) -> None:
    """What does not fit is copied to ordinary memory, before save_async returns."""
    said = run(
        f"ROOM = {room}\n"
        + """
from shardkeep.saving import transfer
transfer._ENQUEUED_AT_ONCE = 100_000  # so that some fit
host, tree = state("sharded")
device.set_capacity("pinned_host", ROOM)
pending = shardkeep.save_async(root + "/x", tree)
refused = device.counters()["allocation_failures"]
for array in tree.values():
    array.delete()
pending.wait()
shares = device.counters()
say(right=is_saved(root + "/x", host), refused=refused, pinned=shares["device_to_pinned_bytes"])
""",
        tmp_path,
        SHARDKEEP_PINNED_HOST="always",
    )
    assert said["right"]
    assert said["refused"]
    assert said["pinned"] <= room


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
@pytest.mark.parametrize("setting", ["always", "never"])
def test_the_programs_transfer_guard_does_not_concern_saves(tmp_path: Path, guard: str, setting: str) -> None:
    """Set for the thread, and for all threads; arrays in pinned memory, keys and metadata too."""
    said = run(
        f"GUARD = {guard!r}\n"
        + """
host, tree = state("half")
with jax.default_device(jax.devices("cpu")[0]):
    key = jax.random.key(7)
data = np.asarray(jax.random.key_data(key))
tree["key"] = jax.device_put(key, devices[0])
tree["mine"] = shardkeep.PerProcess({"at": jax.device_put(np.arange(3), devices[0])})
host["pinned"] = pattern("float32", (64, 256))
tree["pinned"] = jax.device_put(host["pinned"], SingleDeviceSharding(devices[1], memory_kind="pinned_host"))
loss = jax.device_put(np.float32(0.5), devices[0])
for everywhere in (False, True):
    if everywhere:
        jax.config.update("jax_transfer_guard", GUARD)
    with nullcontext() if everywhere else jax.transfer_guard(GUARD):
        shardkeep.save(root + "/x", tree, overwrite=True, metadata={"loss": loss})
        shardkeep.save_async(root + "/y", tree, overwrite=True, metadata={"loss": loss}).wait()
jax.config.update("jax_transfer_guard", "allow")
found = {}
for name in "xy":
    with jax.default_device(jax.devices("cpu")[0]):
        saved = shardkeep.load(root + "/" + name, include="key|mine")
    assert bits(jax.random.key_data(saved["key"])) == bits(data) and saved["mine"]["at"].tolist() == [0, 1, 2]
    found[name] = shardkeep.inspect(root + "/" + name).metadata["loss"]
say(found=found, right=is_saved(root + "/x", host) and is_saved(root + "/y", host))
""",
        tmp_path,
        SHARDKEEP_PINNED_HOST=setting,
    )
    assert said == {"found": {"x": 0.5, "y": 0.5}, "right": True}


def test_arrays_in_the_host_memory_of_a_device_are_copied_before_save_async_returns(tmp_path: Path) -> None:
    """A step that donates them may use their memory again at once; no view of it may be left."""
    said = run(
        """
host = {str(i): pattern("float32", (64, 256 + i)) for i in range(8)}
place = SingleDeviceSharding(devices[0], memory_kind="pinned_host")
tree = jax.block_until_ready({name: jax.device_put(array, place) for name, array in host.items()})
pending = shardkeep.save_async(root + "/x", tree)
views = device.counters()["views"]
for array in tree.values():
    array.delete()
pending.wait()
again = jax.block_until_ready({name: jax.device_put(array, place) for name, array in host.items()})
shardkeep.save(root + "/y", again)
say(views=views, right=[is_saved(root + "/x", host), is_saved(root + "/y", host)], left=device.counters()["views"])
""",
        tmp_path,
    )
    assert said == {"views": 0, "right": [True, True], "left": 0}


def test_data_that_has_arrived_is_not_copied_again(tmp_path: Path) -> None:
    """Neither because the loop donates its arrays, nor with copy=True."""
    said = run(
        """
from shardkeep.saving import donation
host, tree = state("sharded")
donation.donations.expected = True
donation._COPY_FROM = 1
taken = []
take = donation.Donations._take
donation.Donations._take = lambda self, total: (taken.append(total), take(self, total))[1]
shardkeep.save_async(root + "/x", tree, copy=True).wait()
shardkeep.save_async(root + "/y", tree).wait()
say(taken=taken, right=is_saved(root + "/x", host) and is_saved(root + "/y", host))
""",
        tmp_path,
    )
    assert said == {"taken": [], "right": True}


@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize("setting", ["always", "never"])
def test_a_state_larger_than_the_budget_goes_in_batches(tmp_path: Path, how: str, setting: str) -> None:
    """Never more than the budget is in host memory, and save_async returns with every array safe."""
    said = run(
        f"HOW = {how!r}\n"
        + """
from shardkeep.saving import transfer
shardkeep.set_memory_budget(64 << 20)
host, tree = state("half", leaves=32, rows=4096)
live, most = 0, 0
start, release = transfer.Transfers.start, transfer.Arriving.release
def started(self, some=None):
    global live, most
    live += sum(each.nbytes for each in (self._all if some is None else some) if not each.is_started)
    most = max(most, live)
    start(self, some)
def released(self):
    global live
    if not self.is_over:
        live -= self.nbytes
    release(self)
transfer.Transfers.start, transfer.Arriving.release = started, released
pending = getattr(shardkeep, HOW)(root + "/x", tree)
for array in tree.values():
    array.delete()
if HOW == "save_async":
    pending.wait()
moved = device.counters()["device_to_host_bytes"] + device.counters()["device_to_pinned_bytes"]
nbytes = sum(array.nbytes for array in host.values())
pinned = device.counters()["pinned_peak_bytes"]
say(right=is_saved(root + "/x", host), most=most, live=live, moved=moved / nbytes, pinned=pinned)
""",
        tmp_path,
        SHARDKEEP_PINNED_HOST=setting,
    )
    assert said["right"]
    assert said["moved"] == 1
    assert said["live"] == 0
    assert 32 << 20 < said["most"] <= 64 << 20
    assert said["pinned"] <= 64 << 20


@pytest.mark.parametrize("setting", ["always", "never"])
def test_a_tree_of_empty_arrays(tmp_path: Path, setting: str) -> None:
    said = run(
        """
host, tree = state("replicated", leaves=2, rows=0)
shardkeep.save(root + "/x", tree)
shardkeep.save_async(root + "/y", tree).wait()
say(right=[is_saved(root + "/x", host), is_saved(root + "/y", host)])
""",
        tmp_path,
        SHARDKEEP_PINNED_HOST=setting,
    )
    assert said == {"right": [True, True]}


@pytest.mark.parametrize("setting", ["always", "never"])
def test_trees_that_mix_everything(tmp_path: Path, setting: str) -> None:
    said = run(
        """
host, tree = state("half", leaves=3)
cpu = jax.devices("cpu")[0]
with jax.default_device(cpu):
    key = jax.random.key(7)
data = np.asarray(jax.random.key_data(key))
extra = {name: pattern("float32", (16, 8)) for name in ("cpu", "pinned", "numpy", "empty")}
extra["empty"] = extra["empty"][:0]
tree |= {
    "cpu": jax.device_put(extra["cpu"], cpu),
    "pinned": jax.device_put(extra["pinned"], SingleDeviceSharding(devices[1], memory_kind="pinned_host")),
    "numpy": extra["numpy"],
    "empty": jax.device_put(extra["empty"], devices[0]),
    "key": jax.device_put(key, devices[0]),
    "four": 4,
}
shardkeep.save(root + "/x", tree)
shardkeep.save_async(root + "/y", tree).wait()
found = []
for name in "xy":
    with jax.default_device(cpu):
        saved = shardkeep.load(root + "/" + name)
    found.append(all(bits(saved[key]) == bits(array) for key, array in (host | extra).items()))
    found.append(bits(jax.random.key_data(saved["key"])) == bits(data) and saved["four"] == 4)
say(found=found)
""",
        tmp_path,
        SHARDKEEP_PINNED_HOST=setting,
    )
    assert said["found"] == [True] * 4


@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize("setting", ["always", "never"])
def test_a_transfer_that_fails_fails_the_save(tmp_path: Path, how: str, setting: str) -> None:
    """Nothing is committed, nothing stays in memory, and the next save is as good as the first."""
    said = run(
        f"HOW = {how!r}\n"
        + """
from shardkeep.runtime.budget import budget
def save(path):
    pending = getattr(shardkeep, HOW)(path, tree)
    return pending if HOW == "save" else pending.wait()
found = []
for number, first in enumerate((0, 7, 63)):
    host, tree = state("sharded")
    device.fail_after(first)
    try:
        save(f"{root}/{number}")
    except jax.errors.JaxRuntimeError as error:
        found.append([*error.__notes__, shardkeep.exists(f"{root}/{number}"), budget.used])
        del error
    counted = device.counters()
    found[-1] += [counted["pinned_live_bytes"], counted["views"]]
    save(f"{root}/{number}")
    found[-1].append(is_saved(f"{root}/{number}", host))
say(found=found)
""",
        tmp_path,
        SHARDKEEP_PINNED_HOST=setting,
    )
    for note, *facts in said["found"]:
        assert re.fullmatch(r"shardkeep was transferring 1\d,\d{3} bytes of an array that is being saved", note)
        assert facts == [False, 0, 0, 0, True]
    assert len(said["found"]) == 3


@pytest.mark.parametrize("setting", ["always", "never"])
def test_an_interrupt_while_transfers_are_started_leaves_nothing_behind(tmp_path: Path, setting: str) -> None:
    """Before and after any of them is enqueued: no memory, no thread, and the arrays are the caller's alone."""
    said = run(
        """
import gc, threading
from shardkeep.runtime.budget import budget
from shardkeep.saving import transfer
name = "note_pinned" if os.environ["SHARDKEEP_PINNED_HOST"] == "always" else "start"
usual = getattr(transfer.Arriving, name)
host, tree = state("half")
found = []
for late in (False, True):
    for at in (1, 20, 32):
        count = 0
        def interrupted(self, *arguments):
            global count
            count += 1
            if count == at and not late:
                raise KeyboardInterrupt
            usual(self, *arguments)
            if count == at:
                raise KeyboardInterrupt
        setattr(transfer.Arriving, name, interrupted)
        try:
            shardkeep.save_async(root + "/x", tree)
        except KeyboardInterrupt:
            found.append([count])
        setattr(transfer.Arriving, name, usual)
        gc.collect()
        device.wait_for("finished", device.counters()["enqueued"])
        found[-1] += [device.counters()["pinned_live_bytes"], budget.used, threading.active_count(), os.listdir(root)]
shardkeep.save_async(root + "/x", tree).wait()
say(found=found, right=is_saved(root + "/x", host))
""",
        tmp_path,
        SHARDKEEP_PINNED_HOST=setting,
    )
    assert said["right"]
    assert said["found"] == [[at, 0, 0, 1, []] for _ in range(2) for at in (1, 20, 32)]


def test_an_interrupt_between_batches_ends_the_save(tmp_path: Path) -> None:
    """The call that was interrupted leaves its arrays to the caller: its thread takes no more of them."""
    said = run(
        """
import threading
from shardkeep.runtime.budget import budget
from shardkeep.saving import save, transfer
shardkeep.set_memory_budget(64 << 20)
host, tree = state("half", leaves=32, rows=4096)
device.hold("out")  # the first batch does not arrive before the interrupt
def interrupted(self, until_safe=False):
    raise KeyboardInterrupt
usual, transfer.Transfers.wait = transfer.Transfers.wait, interrupted
try:
    shardkeep.save_async(root + "/x", tree)
    raised = False
except KeyboardInterrupt:
    raised = True
transfer.Transfers.wait = usual
device.release("out")
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
moved = device.counters()["device_to_host_bytes"] / sum(array.nbytes for array in host.values())
exists = shardkeep.exists(root + "/x")
shardkeep.save_async(root + "/x", tree).wait()
say(raised=raised, moved=moved, exists=exists, used=budget.used, right=is_saved(root + "/x", host))
""",
        tmp_path,
        SHARDKEEP_PINNED_HOST="never",
    )
    assert said.pop("moved") < 0.7
    assert said == {"raised": True, "exists": False, "used": 0, "right": True}


def test_exchange_files_and_zarr_arrays_transfer_every_byte_once(tmp_path: Path) -> None:
    """In batches too, and a leaf of many pieces included."""
    said = run(
        """
found = {}
for name, more in (("x.safetensors", {}), ("y.safetensors", {"max_shard_size": "1MB"}), ("z", {"format": "zarr"})):
    for limit in (None, 1 << 20):
        shardkeep.set_memory_budget(limit)
        host, tree = state("half")
        shardkeep.save_async(root + "/" + name, tree, overwrite=True, **more).wait()
        moved = device.counters()["device_to_host_bytes"] / sum(array.nbytes for array in host.values())
        found[f"{name} {limit}"] = [moved, is_saved(root + "/" + name, host)]
say(found=found)
""",
        tmp_path,
    )["found"]
    assert said == {name: [1, True] for name in said}
    assert len(said) == 6


def test_the_documented_manager_leaves_nothing_with_the_arrays(tmp_path: Path) -> None:
    """With checksums too, and under a transfer guard."""
    said = run(
        """
from shardkeep.serialization.async_manager import AsyncCheckpointManager
host, tree = state("half", leaves=3)
manager = AsyncCheckpointManager(float_dtype="float32", enable_validation=True)
with jax.transfer_guard("disallow"):
    manager.save(tree, root + "/x")
device.reset()
for array in tree.values():
    np.asarray(array)
again = device.counters()["device_to_host_bytes"] / sum(array.nbytes for array in host.values())
say(again=again)
""",
        tmp_path,
    )
    assert said == {"again": 1}


@pytest.mark.parametrize("setting", ["always", "never"])
def test_no_host_memory_is_kept_by_a_program_that_does_nothing_else(tmp_path: Path, setting: str) -> None:
    """Neither by us nor by JAX, which drops what its threads used when it is next called."""
    said = run(
        """
import weakref
from shardkeep.saving import transfer
form, seen = transfer.Arriving._form, []
def formed(self, data):
    seen.append(weakref.ref(data))
    return form(self, data)
transfer.Arriving._form = formed
left = []
for how in ("save_async", "save"):
    host, tree = state("sharded")
    seen.clear()
    pending = getattr(shardkeep, how)(root + "/" + how, tree)
    if how == "save_async":
        pending.wait()
    left.append([len(seen), sum(each() is not None for each in seen)])
say(left=left)
""",
        tmp_path,
        SHARDKEEP_PINNED_HOST=setting,
    )
    assert said == {"left": [[64, 0], [64, 0]]}
