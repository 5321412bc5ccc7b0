"""Loads in which processes read for each other: the same result, each byte read once, and no way to hang."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from buckets.fixtures import Place
from device.runner import run_on_devices
from multiprocess.cluster import Kept, all_well, run_cluster
from servers.gcs import GCSServer

MB = 1 << 20

SAME = """
def same(one, other):
    first, structure = jax.tree_util.tree_flatten(one)
    second, too = jax.tree_util.tree_flatten(other)
    return structure == too and all(map(same_leaf, first, second))

def same_leaf(a, b):
    if isinstance(a, jax.Array):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
        return (a.sharding == b.sharding and a.dtype == b.dtype and a.shape == b.shape
                and all(x.index == y.index and same_leaf(np.asarray(x.data), np.asarray(y.data)) for x, y in pairs))
    if isinstance(a, np.ndarray):
        return (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
                and a.flags.writeable == b.flags.writeable)
    return type(a) is type(b) and a == b

from shardkeep.processes import collectives
from shardkeep.processes.operation import Operation
sent, messages = [], []
as_row, gather = collectives._as_row, Operation.gather
def counted_row(row, mesh):
    sent.append(row.size * mesh.size)
    return as_row(row, mesh)
def counted_gather(self, value):
    messages.append(value)
    return gather(self, value)
"""
COUNTED = SAME + "collectives._as_row, Operation.gather = counted_row, counted_gather\n"
RESTORED = "\ncollectives._as_row, Operation.gather = as_row, gather\n"

ALIKE = (
    COUNTED
    + """
from contextlib import nullcontext
from shardkeep import remap
values = values_of(5)
arrays = arrays_of(values, mesh_over((size, 2)), 1)
shardkeep.save(root / "files", {**arrays, "own": shardkeep.PerProcess({"at": index})})
shardkeep.save(root / "zarr", arrays, format="zarr", compression="zstd")
shardkeep.save(root / "x.safetensors", {"w": arrays["params"]["odd"]["wide"], "b": arrays["params"]["layers"]})
kernels = [pattern("float32", (256, 512), seed=n) for n in range(4)]
layers = {"layers": [{"w": spread(kernel, P("a"))} for kernel in kernels], "qkv": spread(kernels[0], P(None, "a"))}
shardkeep.save(root / "layers", layers)
np.savez(root / f"foreign{index}.npz", w=kernels[0])
meet(root, "foreign", index, size)
everywhere, rows = NamedSharding(mesh_over((size, 2)), P()), NamedSharding(mesh_over((size, 2)), P("b"))
here = NamedSharding(Mesh(np.array(jax.local_devices()), ("x",)), P("x"))
templates = [abstract_of(values, mesh_over((2, size)), turn) for turn in range(4)]
cases = {
    **{f"template {n}": ("files", {"template": template}) for n, template in enumerate(templates)},
    **{f"template {n} zarr": ("zarr", {"template": template}) for n, template in enumerate(templates)},
    "plain": ("files", {}),
    "mesh": ("files", {"mesh": mesh_over((2, size))}),
    "all": ("files", {"per_process": "all", "mesh": mesh_over((2, size))}),
    "not verified": ("files", {"verify": False, "shardings": everywhere, "include": "wide|long|kernel"}),
    "not mapped": ("files", {"mmap": False, "shardings": everywhere, "include": "wide|long|kernel"}),
    "cast": ("files", {"dtype": "bfloat16", "shardings": everywhere, "include": "wide|kernel|host"}),
    "progress": ("files", {"progress": True, "shardings": everywhere, "include": "wide|long"}),
    "under a mesh": ("files", {"shardings": everywhere, "include": "wide|long|kernel"}),
    "own devices": ("files", {"shardings": here, "include": "wide|long|kernel"}),
    "exchange file": ("x.safetensors", {"shardings": rows}),
    "other program": ("foreign0.npz", {"shardings": everywhere}),
    "stacked": ("layers", {"remap": [remap.stack("layers/{i}/w", "w")], "shardings": {"w": everywhere, "qkv": rows}}),
    "split": ("layers", {"remap": [remap.split("qkv", ["q", "k"], axis=1), remap.transpose("layers/{i}/w", (1, 0))],
                         "shardings": everywhere}),
    "applied": ("layers", {"remap": [remap.apply("qkv", lambda x: x[::-1].copy())], "shardings": everywhere}),
}
wrong, alone = [], []
for name, (path, how) in cases.items():
    each = shardkeep.load(root / path, broadcast=False, **how)
    quiet = len(sent)
    with jax.set_mesh(everywhere.mesh) if name == "under a mesh" else nullcontext():
        once = shardkeep.load(root / path, broadcast=True, **how)
    wrong += [] if same(each, once) else [name]
    alone += [name] if len(sent) == quiet else []
messages.clear()
counts = []
for broadcast in (False, "auto", True):
    shardkeep.load(root / "files", mesh=mesh_over((2, size)), broadcast=broadcast)
    counts.append(len(messages))
    messages.clear()
quiet = len(sent)
shardkeep.load(root / "layers", shardings=NamedSharding(mesh_over(), P("a")), broadcast=True)
say(wrong=wrong, alone=alone, counts=counts, sharded=[len(messages), len(sent) - quiet])
"""
    + RESTORED
)


def test_what_is_loaded_is_the_same_whoever_reads_it(pair: Kept, tmp_path: Path) -> None:
    """And where nothing is sent, as "auto" has it on a local disk, there is no message more than without."""
    for process in pair.run(ALIKE, tmp_path, timeout=200):
        assert process["wrong"] == []
        assert process["alone"] == [], "something was sent in each of them"
        none, auto, once = process["counts"]
        assert auto == none
        assert once == none + 2, "what is alike, and that all have read"
        assert process["sharded"] == [none + 1, 0], "nothing to send: no message but that"


@pytest.mark.processes4
def test_four_processes_load_the_same_whoever_reads_it(four: Kept, tmp_path: Path) -> None:
    for process in four.run(ALIKE, tmp_path, timeout=280):
        assert (process["wrong"], process["alone"]) == ([], [])


READ = """
values = pattern("float32", (1 << 12, 1 << 12))  # 64 MiB
shardkeep.save(root / "rows", {"w": spread(values, P("a"), (size, devices := len(jax.local_devices())))})
if index == 0:
    np.savez(root / "foreign.npz", w=values)
meet(root, "saved", index, size)
traffic = Traffic()
found, wrong = {}, []
cases = {"everywhere": (P(), (size, devices)), "half": (P("a"), (2, size * devices // 2)),
         "own": (P("a"), (size, devices)), "columns": (P(None, "a"), (2, size * devices // 2))}
for name, (spec, shape) in cases.items():
    target = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=NamedSharding(mesh_over(shape), spec))}
    traffic.reset()
    loaded = shardkeep.load(root / "rows", template=target, mmap=False, broadcast=True)
    found[name] = traffic.since()["read"]
    wrong += [] if holds(loaded["w"], values) else [name]
say(found=found, wrong=wrong)
"""


@pytest.mark.processes4
def test_four_processes_read_each_byte_once(four: Kept, tmp_path: Path) -> None:
    said = four.run(READ, tmp_path, timeout=120)
    assert [process["wrong"] for process in said] == [[]] * 4
    for process in said:
        for name in ("everywhere", "half", "own"):
            assert 15 * MB < process["found"][name] < 16 * MB + 200_000, (
                f"{name}: {process['found'][name] / MB:.1f} MiB"
            )
        # Of each row two processes need one half: blocks are read by two groups, and by one process of each.
        assert process["found"]["columns"] < 32 * MB + 200_000


FETCHED = """
values = pattern("float32", (1 << 11, 1 << 11))  # 16 MiB
specs = {"everywhere": P(), "half": P("b"), "own": P(("a", "b"))}
wrong = []
for broadcast in ("auto", False, True):
    for name, spec in specs.items():
        url = f"{os.environ['TEST_URL']}/{broadcast}-{name}"
        shardkeep.save(url, {"w": spread(values, P(("a", "b")), (2, size // 2))})
        place = NamedSharding(mesh_over((2, size // 2)), spec)
        loaded = shardkeep.load(url, shardings=place, **({} if broadcast == "auto" else {"broadcast": broadcast}))
        wrong += [] if holds(loaded["w"], values) else [url]
say(wrong=wrong)
"""


@pytest.mark.processes4
def test_from_a_bucket_each_byte_is_fetched_once(tmp_path: Path) -> None:
    """By default, where four processes need it. Where only two do, each fetches it, unless told otherwise."""
    with GCSServer() as server:
        place = Place("gs", server, "replicas", server.url)
        variables = {**place.environment(), "TEST_URL": place.url}
        outcomes = run_cluster(FETCHED, tmp_path / "room", size=4, devices=1, environment=variables)
        assert [one["wrong"] for one in all_well(outcomes)] == [[]] * 4
        times = {}
        for how in [
            f"{broadcast}-{name}" for broadcast in ("auto", False, True) for name in ("everywhere", "half", "own")
        ]:
            sent = sum(
                request.sent
                for request in server.requests
                if request.method == "GET" and how in unquote(request.target)
            )
            times[how] = round(sent / (16 * MB), 1)
    assert times == {
        "auto-everywhere": 1, "auto-half": 2, "auto-own": 1,
        "False-everywhere": 4, "False-half": 2, "False-own": 1,
        "True-everywhere": 1, "True-half": 1, "True-own": 1,
    }  # fmt: skip


DAMAGED = (
    COUNTED
    + """
shardkeep.save(root / "x", {"a": {"w": spread(pattern("float32", (1024, 1024)), P("a"))}})
if index == 0:
    files = sorted(p for p in (root / "x").rglob("*") if p.stat().st_size > 100_000)
    data = bytearray(files[-1].read_bytes())
    data[-1] ^= 1
    files[-1].write_bytes(data)
meet(root, "damaged", index, size)
everywhere = NamedSharding(mesh_over(), P())
try:
    shardkeep.load(root / "x", shardings=everywhere, broadcast=True)
except shardkeep.IntegrityError as error:
    say(leaf=error.leaf, file=Path(error.file).name, name=files[-1].name if index == 0 else None, sent=len(sent))
say(unverified=shardkeep.load(root / "x", shardings=everywhere, broadcast=True, verify=False)["a"]["w"].shape)
"""
    + RESTORED
)


def test_damage_that_one_finds_is_an_error_of_all_before_anything_is_sent(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(DAMAGED, tmp_path)
    for process in said:
        assert process["leaf"] == "a/w"
        assert process["file"] == said[0]["name"]
        assert process["sent"] == 0
        assert process["unverified"] == [1024, 1024]


MISSING = (
    COUNTED
    + """
for name in ("x", "y"):
    shardkeep.save(root / name, {"w": np.arange(100)})
found = None
with environment(SHARDKEEP_PROCESS_DEADLINE="2"):
    if index == 0:
        found = caught(shardkeep.load, root / "x", broadcast=True)
    meet(root, "alone", index, size)
quiet = len(sent)
good = shardkeep.load(root / "y", broadcast=True)["w"].tolist() == list(range(100))
say(found=found, sent=[quiet, len(sent)], good=good)
"""
    + RESTORED
)


def test_a_process_that_does_not_load_is_an_error(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(MISSING, tmp_path)
    assert said[0]["found"]["kind"] == "ProcessError"
    assert "process 1 did not make this call within 2 s" in said[0]["found"]["message"]
    assert [process["good"] for process in said] == [True, True]
    assert [process["sent"] for process in said] == [[0, 1], [0, 1]], "before and after the call of both"


DIFFERENT = (
    COUNTED
    + """
wide, other = pattern("float32", (512, 512)), pattern("float32", (512, 512), 1)
shardkeep.save(root / "x", {"a": wide, "b": other, "c": wide})
first, both = Mesh(np.array(jax.devices()[:2]), ("x",)), mesh_over()
halves = NamedSharding(first, P("x"))
like = jax.ShapeDtypeStruct
# Both need all of "a", each in another way; only process 0 has devices for "b".
mine = NamedSharding(both, P()) if index else NamedSharding(Mesh(np.array(jax.local_devices()), ("x",)), P("x"))
template = {"a": like((512, 512), "float32", sharding=mine), "b": like((512, 512), "float32", sharding=halves)}
loaded = shardkeep.load(root / "x", template=template, broadcast=True)
right = [holds(loaded["a"], wide), holds(loaded["b"], other) if index == 0 else not loaded["b"].addressable_shards]
once = len(sent)
# Trees of different size: each reads for itself.
more = {"c": wide} if index else {"a": other, "b": other}
loaded = shardkeep.load(root / "x", template=more, broadcast=True)
right += [holds(loaded[k], {"a": wide, "b": other, "c": wide}[k]) for k in more]
say(right=right, once=once, then=len(sent) - once)
"""
    + RESTORED
)


def test_what_processes_load_differently_each_reads_itself(pair: Kept, tmp_path: Path) -> None:
    for process in pair.run(DIFFERENT, tmp_path):
        assert all(process["right"])
        assert process["once"] > 0
        assert process["then"] == 0


REPLACED = """
import subprocess
from shardkeep.loading import load as loading
values = [pattern("float32", (512, 512), seed=n) for n in range(2)]
shardkeep.save(root / "x", {"w": spread(values[0], P("a"))})
np.save(root / f"new{index}.npy", values[1])
meet(root, "saved", index, size)
code = (
    "import sys, numpy as np, shardkeep; "
    "shardkeep.save(sys.argv[1] + '/x', {'w': np.load(sys.argv[1] + '/new0.npy')}, overwrite=True)"
)
read, calls = loading.read_into, []
def replace_first(*arguments):
    calls.append(0)
    if len(calls) == 1 and index == WHO:
        subprocess.run([sys.executable, "-c", code, str(root)], check=True, timeout=60)
    return read(*arguments)
loading.read_into = replace_first
try:
    loaded = shardkeep.load(root / "x", shardings=NamedSharding(mesh_over(), P()), broadcast=True, mmap=False)
finally:
    loading.read_into = read
say(new=holds(loaded["w"], values[1]), calls=len(calls))
"""


@pytest.mark.parametrize("who", [0, 1])
def test_a_checkpoint_that_is_replaced_meanwhile_is_loaded_again(pair: Kept, tmp_path: Path, who: int) -> None:
    """One process has read its part by then, and another finds that the rest is gone."""
    for process in pair.run(REPLACED.replace("WHO", str(who)), tmp_path):
        assert process["new"]
        assert process["calls"] == 2


BOUNDED = (
    COUNTED
    + """
values = {f"{n}": pattern("uint8", (200_000 + n, 3)) for n in range(4)}
shardkeep.save(root / "x", values)
shardkeep.set_memory_budget((1 << 20) * (index + 1))
messages.clear()
loaded = shardkeep.load(root / "x", broadcast=True)
shardkeep.set_memory_budget(None)
say(right=differences(loaded, values), sent=sent, barriers=messages.count(True) - 1)
"""
    + RESTORED
)


def test_what_is_sent_at_once_fits_the_least_budget(pair: Kept, tmp_path: Path) -> None:
    for process in pair.run(BOUNDED, tmp_path):
        assert process["right"] == []
        assert max(process["sent"]) == (1 << 20) // 8
        assert sum(process["sent"]) >= 4 * 600_000
        assert process["barriers"] == 4, "each leaf is a step of its own, as two do not fit"


DEVICES = """
import jax, numpy as np, shardkeep
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from multiprocess.inside import Traffic, holds, pattern, put, spread
from shardkeep.processes import collectives

# The simulated devices transfer, and do not compute: what they would send each other goes through the CPUs.
collectives._mesh_of = lambda processes: Mesh(np.array([jax.devices("cpu")[i] for i in processes]), ("processes",))
sent, as_row = [], collectives._as_row
collectives._as_row = lambda row, mesh: sent.append(row.size * mesh.size) or as_row(row, mesh)

values = {str(i): pattern("float32", (1 << 10, 1 << 10), seed=i) for i in range(8)}
tree = {key: spread(array, P("a")) for key, array in values.items()}
shardkeep.save(root / "x", {**tree, "host": np.arange(7), "small": spread(np.arange(8.0, dtype=np.float32), P("a"))})
shardkeep.set_memory_budget(BUDGET)
devices = len(jax.local_devices())
wrong, found = [], {}
cases = {"everywhere": (P(), (size, devices)), "half": (P("b"), (size, devices)), "own": (P("a"), (size, devices))}
traffic = Traffic()
for name, (spec, shape) in cases.items():
    place = NamedSharding(mesh := Mesh(np.array(jax.devices()).reshape(shape), ("a", "b")), spec)
    for dtype in (None, "bfloat16"):
        traffic.reset()
        places = {**dict.fromkeys(values, place), "small": NamedSharding(mesh, P())}
        loaded = shardkeep.load(root / "x", shardings=places, dtype=dtype, broadcast=True, mmap=False)
        found[f"{name} {dtype}"] = traffic.since()["read"]
        expected = {k: v if dtype is None else v.astype(dtype) for k, v in values.items()}
        wrong += [f"{name} {dtype} {k}" for k in values if not holds(loaded[k], expected[k])]
        wrong += [] if loaded["host"].tolist() == list(range(7)) else ["host"]
say(wrong=wrong, found=found, sent=sent)
"""


@pytest.mark.parametrize("budget", [32 << 20, 1 << 30])
def test_arrays_for_accelerators_go_in_groups(tmp_path: Path, budget: int) -> None:
    """Read, sent to each other, and on to the devices, group by group; what is not shared as without."""
    for process in run_on_devices(DEVICES.replace("BUDGET", str(budget)), tmp_path):
        assert process["wrong"] == []
        for name, read in process["found"].items():
            assert 15 * MB < read < 17 * MB, f"{name}: {read / MB:.1f} MiB of 32"
        assert max(process["sent"]) <= max(budget // 8, 1)
