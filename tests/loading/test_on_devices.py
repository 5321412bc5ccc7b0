"""Loads onto accelerators arrive where and how they were asked for, whatever transfers the program guards against."""

from pathlib import Path
from typing import Any

import pytest

from device.runner import run_on_device, run_on_devices

BEGIN = """
import os, sys, threading
from contextlib import nullcontext
import jax, numpy as np, shardkeep
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from device.loads import *
from support import bits, pattern

root = sys.argv[1]
cpu = jax.devices("cpu")[0]
"""


def run(program: str, root: Path, **more: Any) -> dict[str, Any]:
    return run_on_device(BEGIN + program, str(root), **more)


def test_arrays_come_back_to_the_memory_that_the_template_or_the_sharding_names(tmp_path: Path) -> None:
    """Weights that were offloaded to host memory go there directly, and never through the device's own."""
    said = run(
        """
host = save_host(root + "/x", leaves=4)
named = NamedSharding(mesh_of_devices(), P("a"), memory_kind="pinned_host")
single = SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")
cases = {
    "struct": {"template": like(host, named)},
    "one device": {"template": like(host, single)},
    "arrays": {"template": jax.device_put(host, named)},
    "sharding": {"shardings": named},
    "by key": {"shardings": {key: single for key in host}},
    "function": {"shardings": {key: lambda x: single for key in host}},
    "saved": {"template": shardkeep.abstract(root + "/x", shardings=named)},
}
found = {}
for case, asked in cases.items():
    for budget in (None, 64 << 10):
        shardkeep.set_memory_budget(budget)
        settle()
        loaded = shardkeep.load(root + "/x", **asked)
        counted = device.counters()
        kinds = {array.sharding.memory_kind for array in loaded.values()}
        found[f"{case} {budget}"] = [is_same(loaded, host), list(kinds), counted["host_to_device_bytes"]]
say(found=found)
""",
        tmp_path,
    )["found"]
    for case, (right, kinds, through_device) in said.items():
        assert right, case
        assert kinds == ["pinned_host"], case
        assert not through_device or case.startswith("function"), case


def test_layouts_of_a_template_are_honoured(tmp_path: Path) -> None:
    """On a device that stores columns, a template with that layout costs nothing, and another must be computed."""
    said = run(
        """
device.set_column_major(True)
host = save_host(root + "/x", leaves=2)
arrays = jax.device_put(host, sharding_of("sharded"))
settle()
loaded = shardkeep.load(root + "/x", template=arrays)
layouts = [str(array.format.layout.major_to_minor) for array in (*arrays.values(), *loaded.values())]
form = lambda *order: Format(Layout(order), sharding_of("sharded"))
structs = {key: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=form(1, 0)) for key, a in host.items()}
again = shardkeep.load(root + "/x", template=structs)
third = shardkeep.load(root + "/x", shardings=form(1, 0))
right = [is_same(tree, host) for tree in (loaded, again, third)]
try:
    shardkeep.load(root + "/x", shardings=form(0, 1))
    other = "it was ignored"
except Exception as error:
    other = str(error)
say(layouts=layouts, right=right, other=other, moved=sum(arrived()))
""",
        tmp_path,
    )
    assert said["layouts"] == ["(1, 0)"] * 4
    assert said["right"] == [True, True, True]
    assert "does not implement" in said["other"], "the simulated device cannot compute, and the layout is not dropped"


def test_trees_that_mix_everything(tmp_path: Path) -> None:
    """CPU arrays, device arrays, arrays in the host memory of devices, NumPy arrays, keys and plain values."""
    said = run(
        """
with jax.default_device(cpu):
    key = jax.random.key(7)
names = ("cpu", "device", "sharded", "pinned", "numpy", "empty")
host = {name: pattern("float32", (256, 256), seed=i) for i, name in enumerate(names)}
host["empty"] = host["empty"][:0]
places = {
    "cpu": SingleDeviceSharding(cpu), "device": sharding_of("single"), "sharded": sharding_of("half"),
    "pinned": SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host"), "empty": sharding_of("sharded"),
}
tree = {name: jax.device_put(host[name], place) for name, place in places.items()}
tree |= {"numpy": host["numpy"], "key": jax.device_put(key, jax.devices()[0]), "four": 4}
tree["mine"] = shardkeep.PerProcess({"at": 3})
shardkeep.save(root + "/x", tree)
settle()
loaded = shardkeep.load(root + "/x", template=tree)
moved = device.counters()
placed = {name: loaded[name].sharding == place for name, place in places.items()}
address = loaded["cpu"].unsafe_buffer_pointer()
spans = [line.split()[0].split("-") for line in open("/proc/self/maps").read().splitlines() if root in line]
aliased = any(int(a, 16) <= address < int(b, 16) for a, b in spans)
say(
    right=is_same(loaded, host), placed=placed, numpy=type(loaded["numpy"]).__name__, four=loaded["four"],
    mine=loaded["mine"], key=bits(jax.random.key_data(loaded["key"])) == bits(jax.random.key_data(key)),
    device=moved["host_to_device_bytes"], pinned=moved["host_to_pinned_bytes"], aliased=aliased, mapped=len(spans),
)
""",
        tmp_path,
    )
    leaf = 256 * 256 * 4
    assert said["right"]
    assert said["key"]
    assert all(said["placed"].values()), said["placed"]
    assert (said["numpy"], said["four"], said["mine"]) == ("ndarray", 4, {"at": 3})
    assert (said["device"], said["pinned"]) == (leaf + 2 * leaf + 8, leaf)
    assert said["aliased"], "the array on the CPU is the mapped file"
    assert said["mapped"] == 1, "and it is the only one"


GUARDED = """
from shardkeep import serialization as ser
from shardkeep.cli.main import main
from shardkeep.serialization import serialization, sharding_utils, utils

GUARD, EVERYWHERE = sys.argv[2], sys.argv[3] == "True"
with jax.default_device(cpu):
    key = jax.random.key(7)
host = {name: pattern("float32", (64, 64), seed=i) for i, name in enumerate("abc")}
arrays = jax.device_put(host, sharding_of("sharded"))
first = jax.device_put(host, jax.devices()[0])
data = np.asarray(jax.random.key_data(key))
shardkeep.save(root + "/np", host)
mesh, spec = mesh_of_devices(), P("a")
place = NamedSharding(mesh, spec)
shardkeep.save(root + "/x", first | {"key": jax.device_put(key, jax.devices()[0]), "n": host["a"], "four": 4,
                                     "mine": shardkeep.PerProcess({"at": 3})})
on_cpu = jax.device_put(host, cpu)
seen = []

def guarded(x):
    # The guard holds in functions of the program: an array that it reads here is refused.
    try:
        np.asarray(first["a"] if hasattr(first["a"], "sharding") else x)
        seen.append(False)
    except Exception as error:
        seen.append("isallow" in str(error))
    return x

def same(tree):
    return all(bits(tree[name]) == bits(host[name]) for name in host)

def stepped():
    with shardkeep.Run(root + "/run", save_every=1) as run:
        run.resume(arrays)
        for step in (1, 2):
            run.step(step, arrays, metrics={"loss": loss})
        return run.load(template=arrays)

def resumed():
    with shardkeep.Run(root + "/run", save_every=1) as run:
        state, step = run.resume(arrays)
    assert step == 2 and run.steps()[-1].metrics == {"loss": 0.5}
    return state

loss = jax.device_put(np.float32(0.5), jax.devices()[0])
manager = ser.AsyncCheckpointManager(enable_validation=True)
template = like(host, place) | {"key": key, "n": host["a"], "four": 0, "mine": shardkeep.PerProcess(None)}
calls = {
    "template": lambda: shardkeep.load(root + "/x", template=template),
    "nothing": lambda: shardkeep.load(root + "/x"),
    "mesh": lambda: shardkeep.load(root + "/x", mesh=mesh),
    "rules": lambda: shardkeep.load(root + "/x", mesh=mesh, partition_rules=[("[abc]$", spec), ("", P())]),
    "functions": lambda: shardkeep.load(root + "/x", shardings={name: guarded for name in host}),
    "function of a sharding": lambda: shardkeep.load(root + "/x", include="^[abc]$", shardings=lambda x: cpu_place),
    "dtype": lambda: shardkeep.load(root + "/x", include="^[abcn]$", dtype="bfloat16"),
    "one by one": lambda: manager.load(root + "/x", mesh, chunk_size=1, callback=lambda x, _: guarded(x))[0],
    "verify": lambda: shardkeep.verify(root + "/x"),
    "convert": lambda: main(["convert", root + "/x", root + "/c.safetensors", "--include", "^[abc]$"]),
    "converted": lambda: shardkeep.load(root + "/c.safetensors"),
    "manager.save": lambda: manager.save(arrays, root + "/m", mesh),
    "manager.load": lambda: manager.load(root + "/m", mesh, callback=lambda x, _: guarded(x), validate=True)[0],
    "manager.save_pytree": lambda: manager.save_pytree(arrays, root + "/t", prefix="p"),
    "manager.load_pytree": lambda: manager.load_pytree(root + "/t", mesh, prefix="p", template=like(host, place))[0],
    "tree_serialize_leaves": lambda: serialization.tree_serialize_leaves(root + "/l", first),
    "tree_deserialize_leaves": lambda: serialization.tree_deserialize_leaves(root + "/l", mesh),
    "apply_sharding_tree": lambda: sharding_utils.apply_sharding_tree(host, {name: place for name in host}),
    "to one device": lambda: sharding_utils.apply_sharding_tree(first, dict.fromkeys(host, cpu_place)),
    "make_itsharded": lambda: sharding_utils.make_itsharded(on_cpu, mesh1),
    "to_host": lambda: {name: utils.to_host(a, None, None, True) for name, a in arrays.items()},
    "to_host 64": lambda: {name: utils.to_host(a, "float64", None, True) for name, a in arrays.items()},
    "reshard": lambda: {name: utils.reshard(a, place) for name, a in host.items()},
    "broadcast_tensor": lambda: {name: utils.broadcast_tensor(a, 1 << 20) for name, a in arrays.items()},
    "gather": lambda: utils.apply_gather_functions(arrays, True, True, False),
    "run": lambda: stepped(),
    "resumed": lambda: resumed(),
    "checksum": lambda: ser.AsyncCheckpointManager.compute_checksum(arrays["a"]),
}
cpu_place = SingleDeviceSharding(cpu)
mesh1 = jax.sharding.Mesh(np.array([cpu]), ("a",))
found = {}
settle()
for name, call in calls.items():
    if EVERYWHERE:
        jax.config.update("jax_transfer_guard", GUARD)
    try:
        with nullcontext() if EVERYWHERE else jax.transfer_guard(GUARD):
            result = call()
            manager.wait_until_finished()
            device.wait_for("finished", device.counters()["enqueued"])
        jax.config.update("jax_transfer_guard", "allow")
        if isinstance(result, dict):
            found[name] = name in ("dtype", "to_host 64") or same(result)
            if name in ("template", "nothing", "mesh", "rules"):
                found[name] = found[name] and result["four"] == 4 and result["mine"] == {"at": 3}
                found[name] = found[name] and bits(jax.random.key_data(result["key"])) == bits(data)
        else:
            found[name] = result != 1  # a command that failed
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"[:600]
    jax.config.update("jax_transfer_guard", "allow")
say(found=found, seen=[len(seen), all(seen)], calls=len(calls))
"""


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_the_programs_transfer_guard_does_not_concern_loads(tmp_path: Path, guard: str, everywhere: bool) -> None:
    """Nor runs and eFormer's API; but it holds in the functions and callbacks that a program passes."""
    said = run_on_device(BEGIN + GUARDED, str(tmp_path), guard, str(everywhere))
    assert said["found"] == dict.fromkeys(said["found"], True)
    assert len(said["found"]) == said["calls"]
    count, refused = said["seen"]
    assert count > 6
    assert refused


PROCESSES = """
import jax, numpy as np, shardkeep
from jax.sharding import NamedSharding, PartitionSpec as P
from multiprocess.inside import holds, mesh_over, spread
from device.loads import settle
from support import pattern

SPECS = {"rows": (P("a"), None), "columns": (P(None, "a"), None), "half": (P("b"), (2, 2)), "copies": (P(), None)}
host = {str(i): pattern("float32", (64, 256), seed=i) for i in range(4)}
nbytes = sum(array.nbytes for array in host.values())
found = {}
for saved, (spec, shape) in SPECS.items():
    tree = {key: spread(array, spec, shape) for key, array in host.items()}
    shardkeep.save(root / saved, tree)
    for wanted, (spec, shape) in SPECS.items():
        place = NamedSharding(mesh_over(shape), spec)
        template = {key: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for key, a in host.items()}
        for budget in (None, 32 << 10):
            shardkeep.set_memory_budget(budget)
            settle()
            loaded = shardkeep.load(root / saved, template=template)
            moved = device.counters()["host_to_device_bytes"] / nbytes
            right = all(holds(loaded[key], array) and loaded[key].sharding == place for key, array in host.items())
            found[f"{saved} {wanted} {budget}"] = [right, moved]
say(found=found)
"""


def test_processes_load_what_they_saved_onto_other_shardings(tmp_path: Path) -> None:
    """Each of two processes, with two devices, sends what these hold and nothing else."""
    moved = {"rows": 0.5, "columns": 0.5, "half": 1, "copies": 2}
    for said in run_on_devices(PROCESSES, tmp_path):
        assert len(said["found"]) == 32
        for name, facts in said["found"].items():
            assert facts == [True, moved[name.split()[1]]], name
