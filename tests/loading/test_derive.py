"""Derived arrays are read by regions: no block twice, none that is not needed, in bounded memory, every one checked."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import zarr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardkeep
from device.runner import run_on_device
from shardkeep import remap
from shardkeep.catalog import open_checkpoint
from shardkeep.loading.blocks import BlockReader
from shardkeep.loading.derive import read_derived
from shardkeep.loading.plan import Destination
from shardkeep.model.arrays import Region
from shardkeep.model.digests import BLOCK
from shardkeep.remap.changes import remap_tree
from shardkeep.remap.expressions import DerivedArray
from shardkeep.runtime.crew import Crew
from shardkeep.stores.local.store import LocalFile
from shardkeep.stores.location import location
from support import run_python

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
LAYERS = 3


def on(*spec: Any) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*spec))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of data."""
    found: list[int] = []
    real = LocalFile.read_into

    def read_into(self: Any, offset: int, buffer: Any) -> None:
        if not self.path.endswith("manifest.json"):
            found.append(buffer.nbytes)
        real(self, offset, buffer)

    monkeypatch.setattr(LocalFile, "read_into", read_into)
    return found


def numbered(*shape: int, first: int = 0) -> np.ndarray:
    """An array whose elements say where they come from."""
    return np.arange(first, first + np.prod(shape), dtype=np.int32).reshape(shape)


def blocks_of(values: Any, size: int) -> int:
    """The bytes of the blocks that elements come from, if arrays of this size were numbered one after another."""
    assert size * 4 % BLOCK == 0
    needed = np.zeros(LAYERS * size * 4 // BLOCK, bool)
    for value in values:
        needed[np.asarray(value).reshape(-1) // (BLOCK // 4)] = True
    return int(needed.sum()) * BLOCK


QKV = (1024, 3 * 1024)  # 12 MiB: three blocks
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "stack": ([remap.stack("{i}", "x")], {"x": on(None, "a", "b")}),
    "stack by columns": ([remap.stack("{i}", "x", axis=2)], {"x": on("b", "a", None)}),
    "split": ([remap.split("0", ["q", "k", "v"])], {"q": on("a", "b"), "k": on(None, "a"), "v": on("b")}),
    "one of a split": ([remap.split("0", ["q", "k", "v"], axis=0, sizes=[16, 512, 496])], {"k": on("a", "b")}),
    "fuse": ([remap.fuse(["0", "2"], "x")], {"x": on("a", "b")}),
    "transpose": ([remap.transpose("1", (1, 0))], {"1": on("a", "b")}),
    "reshape": ([remap.reshape("1", (2, 512, 96, 32))], {"1": on(None, "a", "b")}),
    "two of a stack": (
        [remap.stack("{i}", "x"), remap.split("x", ["x", "y"], axis=0, sizes=[1, 2])],
        {"y": on(None, "b", "a")},
    ),
    "all of it": (
        [remap.stack("{i}", "x"), remap.split("x", ["q", "k", "v"]), remap.transpose("q", (0, 2, 1))],
        {"q": on(None, "a", "b"), "k": on(None, "b", "a"), "v": on(None, "a")},
    ),
    "copy": ([remap.copy("0", "x"), remap.copy("0", "y"), remap.transpose("x", (1, 0))], {"0": on("a"), "x": on("b")}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("derive") / "saved"
    size = QKV[0] * QKV[1]
    shardkeep.save(path, {str(i): jax.device_put(numbered(*QKV, first=i * size)) for i in range(LAYERS)})
    return path


@pytest.mark.parametrize("case", CASES)
def test_each_block_that_a_sharded_result_needs_is_read_once(case: str, saved: Path, read: list[int]) -> None:
    rules, shardings = CASES[case]
    plan = shardkeep.plan_load(saved, remap=rules, mmap=False)
    forms = {leaf.key: leaf for leaf in plan.leaves}
    tree = remap_tree(open_checkpoint(location(str(saved)))[1].tree(), rules)
    shapes = {leaf.key: leaf.shape for leaf in tree.tree.leaves}
    template = {k: jax.ShapeDtypeStruct(shapes[k], np.int32, sharding=s) for k, s in shardings.items()}
    plan = shardkeep.plan_load(saved, remap=rules, template=template, mmap=False)
    assert read == [], "a plan reads no data"
    loaded = plan.load()
    assert forms.keys() >= loaded.keys()
    needed = blocks_of(loaded.values(), QKV[0] * QKV[1])
    assert sum(read) <= 1.05 * needed
    assert plan.nbytes == sum(read), "what the plan says is what is read"


def one_region(saved: Path, rules: list[Any], key: str, region: Region) -> np.ndarray:
    """A region of a derived array, as a device would get it that needs nothing else."""
    store, manifest = open_checkpoint(location(str(saved)))
    tree = remap_tree(manifest.tree(), rules).tree
    leaf = next(leaf for leaf in tree.leaves if leaf.key == key)
    assert isinstance(leaf, DerivedArray)
    destination = Destination(leaf, [region], True, [None])
    reader = BlockReader(store, tree.files, tree.compression, mapped=False)
    read_derived(reader, [(destination, None)], {0: destination}, [], 1 << 30, Crew(1), lambda _: None)
    return destination.whole


@pytest.mark.parametrize(
    ("rules", "region", "expected"),
    [
        ([remap.stack("{i}", "x")], Region((1, 0, 0), (1, *QKV)), 12),  # one layer of three
        ([remap.stack("{i}", "x")], Region((0, 0, 0), (2, 10, 10)), 8),  # a corner of two layers: a block of each
        ([remap.transpose("0", (1, 0)), remap.rename("0", "x")], Region((0, 0), (3072, 8)), 4),  # rows, as columns
        ([remap.split("0", ["q", "x"], axis=0)], Region((500, 0), (12, 3072)), 4),
        ([remap.reshape("0", (-1,)), remap.rename("0", "x")], Region((3 << 20,), (10,)), 0),
    ],
)
def test_a_device_reads_what_it_needs(rules: Any, region: Region, expected: int, saved: Path, read: list[int]) -> None:
    if region.start == (3 << 20,):
        region, expected = Region((2 << 20,), (10,)), 4
    found = one_region(saved, rules, "x", region)
    whole = np.asarray(shardkeep.load(saved, remap=rules, include="^x$")["x"])
    assert np.array_equal(found, whole[region.slices])
    assert sum(read[: len(read)]) >= expected << 20
    del read[:]
    one_region(saved, rules, "x", region)
    assert sum(read) == expected << 20


def test_damage_in_a_source_is_found_and_named(tmp_path: Path) -> None:
    """The message has the leaf as it is stored, and the file."""
    shardkeep.save(tmp_path / "c", {str(i): numbered(64, 64, first=i) for i in range(3)})
    file = next(tmp_path.glob("c/*.safetensors"))
    data = bytearray(file.read_bytes())
    at = data.index(numbered(64, 64, first=1).tobytes())
    data[at + 100] ^= 1
    file.write_bytes(bytes(data))
    for mmap in (True, False):
        with pytest.raises(shardkeep.IntegrityError, match="leaf '1': .*damaged"):
            shardkeep.load(tmp_path / "c", remap=[remap.stack("{i}", "x")], mmap=mmap)
        loaded = shardkeep.load(tmp_path / "c", remap=[remap.stack("{i}", "x")], mmap=mmap, verify=False)
        assert loaded["x"].shape == (3, 64, 64)


def test_arrays_of_other_programs_are_changed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zarr arrays that eFormer wrote: chunks are read once, whatever is made of them."""
    values = {f"layers/{i}/w": numbered(64, 48, first=i * 10_000) for i in range(3)}
    for key, value in values.items():
        array = zarr.open_array(
            tmp_path / "c" / key, mode="w", shape=value.shape, chunks=(16, 48), dtype="<i4", zarr_format=2
        )
        array[:] = value
    index = {"format": "tensorstore", "version": "2", "prefix": "", "array_metadata": {}}
    arrays = [{"path": key, "shape": [64, 48], "dtype": "int32"} for key in values]
    (tmp_path / "c" / "tensorstore_index.json").write_text(json.dumps({**index, "arrays": arrays}))
    rules = [remap.stack("layers/{i}/w", "w"), remap.split("w", ["q", "k"]), remap.transpose("q", (2, 1, 0))]
    loaded = shardkeep.load(tmp_path / "c", remap=rules, shardings={"q": on(None, "a"), "k": on(None, "a", "b")})
    q, k = np.split(np.stack(list(values.values())), 2, -1)
    assert np.array_equal(loaded["q"], q.transpose(2, 1, 0))
    assert np.array_equal(loaded["k"], k)


PEAK = """
import threading
from shardkeep import remap
MIB = 1 << 20

def held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

class Peak:
    def __enter__(self):
        self.start = self.most = held()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.over.wait(0.002):
            self.most = max(self.most, held())
    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

shardkeep.set_memory_budget(32 * MIB)
found = {{}}
for name, rules in {{
    "stack": [remap.stack("{{i}}", "x")],
    "split": [remap.split(".", [r"\\g<0>/q", r"\\g<0>/k"])],
    "fuse and transpose": [remap.fuse(["0", "1"], "x", axis=0), remap.transpose("x", (1, 0)), remap.drop("[23]")],
    "apply": [remap.apply(".*", lambda x: x + 1, elementwise=True)],
}}.items():
    shardkeep.load({path!r}, include="nothing|3", mmap=False, remap=[])
    with Peak() as peak:
        tree = shardkeep.load({path!r}, remap=rules, mmap=False)
    leaves = []
    def sizes(node):
        return sum(map(sizes, node.values())) if isinstance(node, dict) else node.nbytes
    found[name] = peak.most - peak.start - sizes(tree)
    del tree
import json
print(json.dumps(found))
"""


def test_what_is_read_beside_the_result_stays_within_the_budget(tmp_path: Path) -> None:
    """For a state four times as large as the budget."""
    shardkeep.save(tmp_path / "c", {str(i): numbered(2048, 4096, first=i) for i in range(4)})  # 128 MiB
    said = json.loads(run_python(PEAK.format(path=str(tmp_path / "c"))))
    slack = 12 << 20  # what Python, NumPy and the functions' own steps take beside
    assert {name: beside for name, beside in said.items() if beside > (32 << 20) + slack} == {}


DEVICE = """
import sys
import jax, numpy as np, shardkeep
from jax.sharding import NamedSharding, PartitionSpec as P
from device.loads import *
from shardkeep import remap

root = sys.argv[1]
memory = HostMemory()
host = {f"layers/{i}": np.random.default_rng(i).random((256, 1024), np.float32) for i in range(24)}  # 1 MB each
shardkeep.save(root + "/x", {"layers": [host[f"layers/{i}"] for i in range(24)]})
shardkeep.save(root + "/zstd", {"layers": [host[f"layers/{i}"] for i in range(24)]}, format="zarr", compression="zstd")
stack = np.stack(list(host.values()))
q, k = np.split(stack, 2, -1)
rules = [remap.stack("layers/{i}", "x"), remap.split("x", ["q", "k"]), remap.transpose("q", (1, 0, 2)),
         remap.apply("k", lambda x: x * 2, elementwise=True)]
expected = {"q": q.transpose(1, 0, 2), "k": k * 2}
shardkeep.set_memory_budget(8 << 20)
settle()
device.set_rate(0.5)
found = {}
for kind, spec in {"one": None, "rows": P("a"), "middle": P(None, "a"), "columns": P(None, None, "a")}.items():
    place = sharding_of("single") if spec is None else NamedSharding(mesh_of_devices(), spec)
    for way, name, options in (("mapped", "x", {}), ("read", "x", {"mmap": False}), ("zstd", "zstd", {})):
        for dtype in ("float32", "bfloat16"):
            memory.most = memory.most_claimed = memory.live
            template = {key: jax.ShapeDtypeStruct(a.shape, dtype, sharding=place) for key, a in expected.items()}
            loaded = shardkeep.load(root + "/" + name, template=template, remap=rules, **options)
            with jax.default_device(jax.devices("cpu")[0]):
                cast = {key: np.asarray(jax.numpy.asarray(a).astype(dtype)) for key, a in expected.items()}
            right = is_same(loaded, cast)
            del loaded
            left = left_behind(memory)
            found[f"{kind} {way} {dtype}"] = [right, memory.most, memory.most_claimed, left]
say(found=found)
"""


def test_devices_that_copy_get_derived_arrays_through_bounded_memory(tmp_path: Path) -> None:
    """48 MB go through 8 MB, whatever the sharding; casts are made before the transfer."""
    said = run_on_device(DEVICE, str(tmp_path))["found"]
    for case, (right, most, claimed, left) in said.items():
        assert right, case
        assert set(left.values()) == {0}, (case, left)
        if not case.startswith("one"):  # a region that is larger than the budget is alone in it
            assert most <= claimed * 1.01, (case, most, claimed)
