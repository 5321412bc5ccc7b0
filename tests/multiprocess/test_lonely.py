"""A call that not all processes make is told to those that made it, and the next one works."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from multiprocess.cluster import Kept, run_cluster

CALLS = """
tree = {"w": spread(np.ones((8, 8), np.float32), P("a")), "n": np.arange(3)}
shardkeep.save(root / "old", tree)
"""


def test_a_call_of_the_first_process_alone(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        CALLS
        + """
found = {}
with environment(SHARDKEEP_PROCESS_DEADLINE="2"):
    for number, call in enumerate((
        lambda: shardkeep.save(root / "alone", tree), lambda: shardkeep.save_async(root / "later", tree).wait(),
        lambda: shardkeep.load(root / "old"),
    )):
        meet(root, f"alone {number}", index, size)
        found[number] = caught(call) if index == 0 else None
        meet(root, f"done {number}", index, size)
shardkeep.save(root / "all", tree)
later = shardkeep.save_async(root / "all later", tree)
later.wait()
say(found=found, loaded=sorted(shardkeep.load(root / "all")), alone=files_below(root / "alone"))
""",
        tmp_path,
    )
    for error in said[0]["found"].values():
        assert error["kind"] == "ProcessError"
        assert "process 1 did not make this call within 2 s" in error["message"]
        assert 2 <= error["seconds"] < 5
    for process in said:
        assert process["loaded"] == ["n", "w"]
        assert process["alone"] == {}


def test_a_call_of_another_process_alone(pair: Kept, tmp_path: Path) -> None:
    """The first process does not know of it: its next call fails at once, and the one after that works."""
    said = pair.run(
        CALLS
        + """
alone = None
with environment(SHARDKEEP_PROCESS_DEADLINE="2"):
    if index == 1:
        alone = caught(shardkeep.save, root / "alone", tree)
    meet(root, "alone", index, size)
first = caught(shardkeep.save, root / "all", tree)
if index == 0:
    again = caught(shardkeep.save, root / "all", tree)
shardkeep.save(root / "more", tree)
say(alone=alone, first=first, loaded=[sorted(shardkeep.load(root / name)) for name in ("all", "more")])
""",
        tmp_path,
    )
    assert said[1]["alone"]["kind"] == "ProcessError"
    assert "process 0 did not make this call within 2 s" in said[1]["alone"]["message"]
    assert said[0]["first"]["kind"] == "ProcessError"
    assert said[0]["first"]["seconds"] < 2
    assert said[1]["first"]["kind"] is None
    assert [process["loaded"] for process in said] == [[["n", "w"]] * 2] * 2


def test_processes_that_have_ended_are_not_waited_for(tmp_path: Path) -> None:
    """Whether they ever saved something or not."""
    script = """
if USED:
    shardkeep.save(root / "old", {"n": np.arange(3)})
if index == 1:
    sys.exit(0)
time.sleep(1.5)
say(error=caught(shardkeep.save, root / "x", {"n": np.arange(3)}), files=files_below(root / "x"))
os._exit(0)
"""
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(run_cluster, f"USED = {used}\n{script}", tmp_path / str(used), timeout=40)
            for used in (True, False)
        ]
    for outcomes in running:
        survivor = outcomes.result()[0]
        assert survivor.said, survivor.output[-3000:]
        error = survivor.said["error"]
        assert error["kind"] == "ProcessError"
        assert "process 1 has exited" in error["message"]
        assert "Nothing was committed" in error["message"]
        assert error["seconds"] < 4
        assert survivor.said["files"] == {}
