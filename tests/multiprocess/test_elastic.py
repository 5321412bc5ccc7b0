"""Jobs that restart with another number of processes: what some have saved others load, bit by bit, time and again."""

from pathlib import Path

import pytest

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import all_well, run_cluster
from multiprocess.inside import differences, pattern

# What process counts have in common is 24: each of 1, 2, 3, 4 and 8 divides the axes that are sharded.
STATE = """
def values_at(step):
    return {
        "params": {
            "rows": pattern("float32", (240, 96), seed=step), "columns": pattern("bfloat16", (96, 240), seed=step),
        },
        "moments": [pattern("float32", (240, 1200), seed=step + 1), pattern("float8_e4m3fn", (24, 24), seed=step)],
        "whole": pattern("float16", (31, 5), seed=step), "count": np.array(step, np.int32),
    }
SPECS = {
    "params": {"rows": P("x"), "columns": P(None, "x")}, "moments": [P("x"), P(None, "x")], "whole": P(), "count": P(),
}
mesh = Mesh(np.array(jax.devices()), ("x",))
shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS, is_leaf=lambda x: isinstance(x, P))
def state_at(step):
    return jax.tree.map(put, values_at(step), shardings)
def new_state():
    return jax.tree.map(lambda value: jnp.zeros(value.shape, value.dtype), values_at(0))
class Data:
    def __init__(self): self.position = 0
    def get_state(self): return {"position": self.position, "of": size}
    def set_state(self, state): self.position = state["position"]
"""

RESTART = (
    STATE
    + """
wrong, data = [], Data()
if BEFORE is not None:
    expected = {**values_at(BEFORE), "host": np.arange(BEFORE), "name": f"state {BEFORE}"}
    ways = [{"shardings": shardings}, {"mesh": mesh}, {"broadcast": True}, {"shardings": shardings, "broadcast": True}]
    for path in ("few", "zarr", "file/x.safetensors"):
        for how in ways:
            loaded = shardkeep.load(root / path, **how)
            wrong += [f"{path} {list(how)}: {one}" for one in differences(loaded, expected)]
with shardkeep.Run(root / "run", keep=None) as run:
    state, step = run.resume(
        new_state, shardings=shardings, iterators={"data": data},
        redistribute=lambda states, count: [{"position": min(state["position"] for state in states)}] * count,
        broadcast=NOW % 2 == 0,
    )
    if BEFORE is None:
        wrong += [] if step == 0 else [f"begun at {step}"]
    else:
        wrong += [f"run: {one}" for one in differences(state, values_at(BEFORE))]
        wrong += [] if (step, data.position) == (BEFORE, 7 * BEFORE) else [f"run: step {step}, {data.position}"]
        loaded = run.load(BEFORE, shardings=shardings, broadcast=True)
        wrong += [f"run.load: {one}" for one in differences(loaded, values_at(BEFORE))]
    data.position = 7 * NOW + index
    run.save(NOW, state_at(NOW), iterators={"data": data}).wait()
for path, how in (("few", {}), ("zarr", {"format": "zarr"}), ("file/x.safetensors", {})):
    tree = {**state_at(NOW), "host": np.arange(NOW), "name": f"state {NOW}"}
    shardkeep.save(root / path, tree, overwrite=True, **how)
say(wrong=wrong)
"""
)


def restart(root: Path, sizes: list[int]) -> None:
    """Each cluster loads what the one before has saved, and saves the next state."""
    before = None
    for now, size in enumerate(sizes, 1):
        script = f"BEFORE, NOW = {before}, {now}\n" + RESTART
        said = all_well(run_cluster(script, root, size=size, devices=1, timeout=120))
        assert [process["wrong"] for process in said] == [[]] * size, f"{size} processes after {sizes[: now - 1]}"
        before = now
    for path in ("few", "zarr", "file/x.safetensors"):
        loaded = shardkeep.load(root / path, include="rows|whole")
        assert differences(loaded["params"]["rows"], pattern("float32", (240, 96), seed=len(sizes))) == []
        assert shardkeep.verify(root / path).ok
        assert left_overs(root / path) == set()
    with shardkeep.Run(root / "run") as run:
        assert [(step.number, step.state) for step in run.steps()] == [(n + 1, "usable") for n in range(len(sizes))]


def test_two_then_one_then_three_processes(tmp_path: Path) -> None:
    restart(tmp_path / "room", [2, 1, 3])


@pytest.mark.processes4
def test_four_then_three_then_eight_processes_and_back(tmp_path: Path) -> None:
    restart(tmp_path / "room", [4, 3, 8, 3, 4])
