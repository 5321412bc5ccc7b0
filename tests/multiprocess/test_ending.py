"""How programs end: saves in the background are finished, whoever comes to the end first."""

from pathlib import Path

import pytest

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import Kept, all_well, run_cluster
from multiprocess.inside import differences, values_of

TREE = """
values = values_of(1)
tree = arrays_of(values, mesh_over((2, 2)))
"""


@pytest.mark.parametrize("slow", [0, 1])
def test_saves_in_the_background_outlive_the_main_program(tmp_path: Path, slow: int) -> None:
    outcomes = run_cluster(
        TREE
        + f"""
if index == {slow}:
    fault(root / "x", "pause", 2, "write")
    threading.Timer(2, lambda: Path(str(root / "x") + ".pause.go").touch()).start()
shardkeep.save_async(root / "x", tree)
shardkeep.save_async(root / "y", tree, format="zarr")
""",
        tmp_path,
        timeout=40,
    )
    all_well(outcomes)
    for name in ("x", "y"):
        assert differences(shardkeep.load(tmp_path / name), values_of(1)) == []
        assert left_overs(tmp_path / name) == set()


def test_jax_may_be_shut_down_and_set_up_again(tmp_path: Path) -> None:
    outcomes = run_cluster(
        TREE
        + """
import socket
import jax.extend.backend
shardkeep.save(root / "x", tree)
pending = shardkeep.save_async(root / "y", tree)
pending.wait()
del tree
if index == 0:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (root / "port.new").write_text(str(probe.getsockname()[1]))
    (root / "port.new").rename(root / "port")
while not (root / "port").exists():
    time.sleep(0.01)
meet(root, "before", index, size)
jax.distributed.shutdown()
alone = shardkeep.save(root / f"alone{index}", {"n": np.arange(3)}).files
jax.clear_caches()
jax.extend.backend.clear_backends()
address = "127.0.0.1:" + (root / "port").read_text()
jax.distributed.initialize(address, size, index, coordinator_bind_address=address)
tree = arrays_of(values, mesh_over((2, 2)))
for number in range(3):
    shardkeep.save(root / f"z{number}", tree)
say(wrong=differences(shardkeep.load(root / "z2"), values), alone=alone)
meet(root, "end", index, size)
jax.distributed.shutdown()
""",
        tmp_path,
        timeout=40,
    )
    for process in all_well(outcomes):
        assert process == {"wrong": [], "alone": 1}
    for number in range(3):
        assert differences(shardkeep.load(tmp_path / f"z{number}"), values_of(1)) == []


def test_a_forked_child_says_nothing_for_its_parent(pair: Kept, tmp_path: Path) -> None:
    """Its end is not the end of the process the others know. And it is told that it cannot save or load."""
    said = pair.run(
        """
tree = {"n": np.arange(3)}
shardkeep.save(root / "x", tree)
child = os.fork()
if child == 0:
    try:
        calls = [lambda: shardkeep.save(root / "z", tree), lambda: shardkeep.save_async(root / "z", tree),
                 lambda: shardkeep.load(root / "x")]
        (root / f"said.{index}").write_text(json.dumps([caught(call) for call in calls]))
        shardkeep.processes.operation._end()
    finally:
        os._exit(0)
os.waitpid(child, 0)
time.sleep(1.2)
shardkeep.save(root / "y", tree)
say(child=json.loads((root / f"said.{index}").read_text()))
""",
        tmp_path,
    )
    assert shardkeep.exists(tmp_path / "y")
    assert not shardkeep.exists(tmp_path / "z")
    for process in said:
        for error in process["child"]:
            assert error["kind"] == "ProcessError"
            assert "this process was forked from one of 2 JAX processes" in error["message"]
            assert error["seconds"] < 5
