"""Several trees in one commit of several processes."""

from pathlib import Path

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import Kept
from support import FORMATS

KINDS = {kind: arguments for kind, (ending, arguments) in FORMATS.items() if not ending}

TREES = """
def state(number):
    return {"w": spread(np.full((8, 8), number, np.float32), P("a")), "step": number}

def further(number):
    trees = {
        "ema": {"w": spread(np.full((16, 4), -number, np.float32), P(None, "a")), "host": np.arange(3) + number},
        "data": {"train": shardkeep.PerProcess({"process": index, "seen": list(range(index * number))})},
    }
    return trees if index % 2 else dict(reversed(trees.items()))  # in any order

def wrong(path, number):
    found = []
    if not holds(shardkeep.load(path, mesh=mesh_over())["w"], np.full((8, 8), number, np.float32)):
        found.append("state")
    ema = shardkeep.load(path, prefix="ema", mesh=mesh_over())
    if not holds(ema["w"], np.full((16, 4), -number, np.float32)) or (ema["host"] != np.arange(3) + number).any():
        found.append("ema")
    mine = {"train": {"process": index, "seen": list(range(index * number))}}
    if shardkeep.load(path, prefix="data") != mine:
        found.append("data")
    return found
"""


def test_processes_commit_several_trees_together_and_each_gets_its_own_values_back(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        f"KINDS = {KINDS!r}\n{TREES}"
        """
found = {}
for kind, arguments in KINDS.items():
    first = shardkeep.save(root / kind, state(1), trees=further(1), **arguments)
    found[kind] = wrong(root / kind, 1)
    pending = shardkeep.save_async(root / kind, state(2), trees=further(2), overwrite=True, **arguments)
    second = pending.wait()
    found[kind] += wrong(root / kind, 2)
    found[kind] += [] if (first.files, first.nbytes > 0) == (second.files, True) else ["report"]
say(found=found)
""",
        tmp_path,
        timeout=120,
    )
    assert [process["found"] for process in said] == [{kind: [] for kind in KINDS}] * 2
    for kind in KINDS:
        manifest = shardkeep.inspect(tmp_path / kind)
        assert {tree.save_id for tree in manifest.trees.values()} == {manifest.save_id}
        assert manifest.leaves["data/train"].processes == 2
        assert shardkeep.verify(tmp_path / kind).ok
        assert left_overs(tmp_path / kind) == set()


def test_a_difference_is_named_with_its_tree_and_nothing_is_committed(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        TREES
        + """
shardkeep.save(root / "x", state(1), trees=further(1))
last = index == size - 1
found = []
for change in ("host", "missing", "kind", "container", "unsupported"):
    trees = further(2)
    if last and change == "host":
        trees["ema"]["host"] = np.arange(3)
    if last and change == "missing":
        del trees["data"]
    if last and change == "kind":
        trees["data"] = {"train": 3}
    if last and change == "container":
        trees["ema"] = {"host": trees["ema"]["host"], "w": trees["ema"]["w"], "more": []}
    if last and change == "unsupported":
        trees["data"] = {"train": object()}
    error = caught(shardkeep.save, root / "x", state(2), trees=trees, overwrite=True)
    found.append([error["kind"], error["message"]])
say(found=found, wrong=wrong(root / "x", 1))
""",
        tmp_path,
    )
    words = [
        ("ProcessError", "leaf host (prefix 'ema'): int64[3]"),
        ("ProcessError", "trees 'data', 'ema'"),
        ("ProcessError", "leaf train (prefix 'data'): a PerProcess value"),
        ("ProcessError", "structure of 'ema' "),
        ("UnsupportedLeafError", "train (prefix 'data'): an object is neither"),
    ]
    for process in said:
        for (kind, message), (expected, text) in zip(process["found"], words, strict=True):
            assert kind == expected, message
            assert text in message
        assert process["wrong"] == []
    assert left_overs(tmp_path / "x") == set()


def test_late_metadata_is_asked_of_the_leader_only(pair: Kept, tmp_path: Path) -> None:
    """The processes would answer differently. What the leader's raises is raised by all, and nothing is committed."""
    said = pair.run(
        TREES
        + """
from shardkeep.catalog import new_target
from shardkeep.processes.operation import join
from shardkeep.saving.save import SaveRequest, start_save
from shardkeep.stores.location import location

asked = []
def late():
    asked.append(index)
    return {"loss": 0.5 + index, "epoch": index}

def fail():
    raise ValueError(f"no metrics on {index}")

def save(number, late):
    with join("saving") as operation:
        target = new_target(location(root / "x"), "safetensors", None, None)
        request = SaveRequest(
            target, state(number), metadata={"epoch": 7}, overwrite=True, trees=further(number), late=late
        )
        pending = start_save(request, operation)
    pending.wait()

save(1, late)
say(asked=asked, failed=caught(save, 2, fail), wrong=wrong(root / "x", 1))
""",
        tmp_path,
    )
    assert [process["asked"] for process in said] == [[0], []]
    for process in said:
        assert "no metrics on 0" in process["failed"]["message"]
        assert process["wrong"] == []
    assert shardkeep.inspect(tmp_path / "x").metadata == {"loss": 0.5, "epoch": 0}
    assert left_overs(tmp_path / "x") == set()
