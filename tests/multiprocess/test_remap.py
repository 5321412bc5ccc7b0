"""Processes that load a changed tree get their shards, read only what they need, and fail together."""

from pathlib import Path

import numpy as np

import shardkeep
from multiprocess.cluster import Kept
from support import pattern

CHANGED = """
from shardkeep import remap
from multiprocess.test_remap import values_of_layer
values = [values_of_layer(i) for i in range(4)]
stack = np.stack(values)
q, k = np.split(stack, 2, -1)
rules = [remap.stack("layers/{i}", "x"), remap.copy("x", "y"), remap.split("x", ["q", "k"]),
         remap.transpose("q", (2, 0, 1)), remap.apply("k", lambda x: x + 1, elementwise=True)]
expected = {"q": q.transpose(2, 0, 1), "k": k + 1, "y": stack}
mesh = mesh_over((len(jax.devices()),), ("a",))
wrong = []
for broadcast in (False, True):
    for specs in ((P("a"), P("a"), P("a")), (P(None, "a"), P(None, None, "a"), P())):
        places = {key: NamedSharding(mesh, spec) for key, spec in zip("qky", specs)}
        loaded = shardkeep.load(root / "saved", remap=rules, shardings=places, broadcast=broadcast)
        wrong += [f"{key} {specs} {broadcast}" for key in expected if not holds(loaded[key], expected[key])]
say(wrong=wrong)
"""

READS = """
from shardkeep import remap
from shardkeep.stores.local.store import LocalFile
real, found = LocalFile.read_into, []
def read_into(self, offset, buffer):
    if not self.path.endswith("manifest.json"):
        found.append(buffer.nbytes)
    real(self, offset, buffer)
LocalFile.read_into = read_into
place = NamedSharding(mesh_over((len(jax.devices()),), ("a",)), P("a"))
rules = [remap.stack("layers/{i}", "x")]
loaded = shardkeep.load(root / "large", remap=rules, shardings={"x": place}, mmap=False)
LocalFile.read_into = real
say(read=sum(found), right=holds(loaded["x"], np.stack([np.full((1024, 1024), i, np.float32) for i in range(4)])))
"""

KEPT = """
from multiprocess.test_remap import values_of_layer
from shardkeep import remap
place = NamedSharding(mesh_over((len(jax.devices()),), ("a",)), P("a"))
def new():
    return {"layers": jnp.zeros((4, 64, 96)), "adapter": jnp.arange(16.0).reshape(8, 2), "head": jnp.full((8, 4), 3.0)}
run = shardkeep.Run(root / "run")
rules = [remap.stack("layers/{i}", "layers"), remap.resize("head", fill="keep")]
state, step = run.resume(new, init_from=root / "saved", shardings=place, remap=rules, missing="keep")
stack = np.stack([values_of_layer(i) for i in range(4)])
head = np.concatenate([np.ones((4, 4), np.float32), np.full((4, 4), 3.0, np.float32)])
adapter = np.arange(16.0, dtype=np.float32).reshape(8, 2)
right = [holds(state["layers"], stack), holds(state["adapter"], adapter), holds(state["head"], head)]
run.save(1, state)
run.close()
say(right=right)
"""

BAD = """
from shardkeep import remap
rules = [remap.stack("layers/{i}", "x"), remap.transpose("x", (0, 3, 1))]
different = remap.rename("layers/0", f"process{index}")
found = [caught(shardkeep.load, root / "saved", remap=some) for some in (rules, different)]
say(bad=found[0], different=found[1])
"""


def values_of_layer(number: int) -> np.ndarray:
    return (pattern("int32", (64, 96), seed=number) % 1000).astype(np.float32)


def save(root: Path) -> None:
    layers = [values_of_layer(i) for i in range(4)]
    shardkeep.save(root / "saved", {"layers": layers, "head": np.ones((4, 4), np.float32)})


def test_each_process_gets_its_shards_of_a_changed_tree(pair: Kept, tmp_path: Path) -> None:
    save(tmp_path)
    assert [said["wrong"] for said in pair.run(CHANGED, tmp_path)] == [[], []]


def test_each_process_reads_only_its_layers_of_a_stack(pair: Kept, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "large", {"layers": [np.full((1024, 1024), i, np.float32) for i in range(4)]})
    for said in pair.run(READS, tmp_path):
        assert said["right"]
        assert said["read"] == 2 * 4 << 20, "two of four layers"


def test_processes_begin_a_run_with_a_changed_tree_and_keep_what_it_lacks(pair: Kept, tmp_path: Path) -> None:
    save(tmp_path)
    assert [said["right"] for said in pair.run(KEPT, tmp_path)] == [[True] * 3] * 2
    assert shardkeep.verify(tmp_path / "run" / "step_1").ok


def test_rules_that_are_bad_or_differ_are_errors_of_all_processes(pair: Kept, tmp_path: Path) -> None:
    save(tmp_path)
    said = pair.run(BAD, tmp_path)
    assert [one["bad"]["kind"] for one in said] == ["RemapError", "RemapError"]
    assert all("transpose('x', (0, 3, 1))" in one["bad"]["message"] for one in said)
    assert [one["different"]["kind"] for one in said] == ["ProcessError", "ProcessError"]
