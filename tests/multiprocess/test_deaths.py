"""Processes killed, stopped or slow in the middle of it: the others learn of it, and the checkpoint is whole.

JAX ends all other processes when the first one dies; when another dies they live on until its own heartbeat is missed.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import Kept, Outcome, run_cluster
from multiprocess.inside import differences, pattern, values_of

SAVE = """
def load_alone(path):
    # After a process died nothing can be done together any more: the others look for themselves what is there.
    place, request = shardkeep.stores.location.location(path), shardkeep.loading.request.LoadRequest()
    skeleton, leaves, _ = shardkeep.loading.load.load_request(place, request, shardkeep.processes.operation.ALONE)
    return skeleton.rebuild(leaves)

path = root / "x"
values = [values_of(n) for n in range(2)]
trees = [arrays_of(v, mesh_over((2, size)), 1) for v in values]
shardkeep.save(path, trees[0], format=FORMAT)
meet(root, "saved", index, size)
os.environ["SHARDKEEP_PROCESS_SILENCE"] = str(SILENCE)
if index == VICTIM:
    exec(HOW)
error = caught(lambda: CALL(path, trees[1]))
say(error=error, wrong=differences(load_alone(path), values[0 if error["kind"] or "load" in CALL_NAME else 1]))
meet(root, "end", index, size, but=VICTIM if DIES else -1)
os._exit(0)
"""

# What a process does to itself, before or while it saves.
TOLD = """
gather = shardkeep.processes.operation.Operation.gather
def gather_and_die(self, value):
    brought = gather(self, value)
    if self._gathers == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return brought
shardkeep.processes.operation.Operation.gather = gather_and_die
"""
STOPPED = """
import subprocess
subprocess.Popen(["sh", "-c", f"sleep 10; kill -CONT {os.getpid()}"])
signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
fault(path, "interrupt", 2, "write", again=0)
"""
SLOW = """
fault(path, "pause", 2, "write")
threading.Timer(8, lambda: Path(f"{path}.pause.go").touch()).start()
"""


@dataclass(frozen=True)
class Scenario:
    """A victim, what it does to itself (and whether it dies of it), and what is there afterwards."""

    victim: int
    how: str
    state: str
    format: str = "safetensors"
    call: str = "save"
    silence: float = 3.0
    dies: bool = True


CALLS = {
    "save": "lambda path, tree: shardkeep.save(path, tree, format=FORMAT, overwrite=True)",
    "save_async": "lambda path, tree: shardkeep.save_async(path, tree, format=FORMAT, overwrite=True).wait()",
    "load": "lambda path, tree: shardkeep.load(path, mmap=False)",
    "load for all": "lambda path, tree: shardkeep.load(path, mmap=False, broadcast=True)",
}

SCENARIOS = {
    "before its record": Scenario(1, "fault(path, 'kill', 1, 'create')", "old"),
    "in the middle of writing": Scenario(1, "fault(path, 'torn', 2, 'write')", "old", silence=20.0),
    "in the middle of many files": Scenario(1, "fault(path, 'kill', 9, 'create')", "old", "tensorstore", "save_async"),
    "before it tells what it wrote": Scenario(1, "fault(path / '.shardkeep/saves', 'kill', 3, 'fsync')", "old"),
    "after it told what it wrote": Scenario(1, TOLD, "new"),
    "in the middle of a load": Scenario(1, "fault(path, 'kill', 3, 'read')", "old", call="load"),
    "in the middle of reading for all": Scenario(1, "fault(path, 'kill', 3, 'read')", "old", call="load for all"),
    "the first, at the beginning": Scenario(0, "fault(path, 'kill', 2, 'create')", "old"),
    "the first, in the middle of writing": Scenario(0, "fault(path, 'torn', 2, 'write')", "old", "tensorstore"),
    "the first, just before the commit": Scenario(0, "fault(path, 'kill', 1, 'rename')", "old"),
    "the first, just after the commit": Scenario(0, "fault(path, 'kill', 1, 'unlink')", "new"),
    "stopped for ten seconds": Scenario(1, STOPPED, "new", silence=20.0, dies=False),
    "slow for longer than silence": Scenario(1, SLOW, "new", dies=False),
}


def run(name: str, root: Path, size: int = 2) -> list[Outcome]:
    scenario = SCENARIOS[name]
    start = f"FORMAT, SILENCE, VICTIM = {scenario.format!r}, {scenario.silence}, {scenario.victim}\n"
    start += f"HOW, DIES = {scenario.how!r}, {scenario.dies}\n"
    start += f"CALL_NAME, CALL = {scenario.call!r}, {CALLS[scenario.call]}\n"
    return run_cluster(start + SAVE, root, size=size, timeout=60)


def check(name: str, root: Path, outcomes: list[Outcome]) -> float:
    """What the survivors said; gives the seconds until they knew."""
    scenario = SCENARIOS[name]
    if scenario.victim == 0:
        # The coordination service is gone with it: JAX ends the others at once, whatever they do.
        assert outcomes[0].code == -9
        seconds = max(outcome.seconds for outcome in outcomes) - outcomes[0].seconds
        assert seconds < 10
        return seconds
    seconds = 0.0
    for number, outcome in enumerate(outcomes):
        if number == scenario.victim and scenario.dies:
            assert outcome.code == -9, f"{name}: {outcome.output[-3000:]}"
            continue
        assert "error" in outcome.said, f"{name}, process {number}: {outcome.code}\n{outcome.output[-3000:]}"
        error = outcome.said["error"]
        seconds = max(seconds, error["seconds"])
        assert outcome.said["wrong"] == []
        if scenario.state == "new":
            assert error["kind"] is None, f"{name}: {error}"
            continue
        assert error["kind"] == "ProcessError", f"{name}: {error}"
        assert f"process {scenario.victim} has sent no heartbeat" in error["message"], f"{name}: {error}"
        if "load" not in scenario.call:
            assert "Nothing was committed; what was there before is intact" in error["message"], f"{name}: {error}"
        assert error["seconds"] < scenario.silence + 8, f"{name}: {error}"
    return seconds


def check_state(name: str, path: Path) -> None:
    expected = values_of(1 if SCENARIOS[name].state == "new" else 0)
    assert differences(shardkeep.load(path), expected) == [], name
    assert shardkeep.verify(path).ok


AFTER = """
wrong = []
for name, (number, kind) in STATES.items():
    path = Path(name)
    wrong += differences(shardkeep.load(path, mesh=mesh_over((4, 1))), values_of(number))
    shardkeep.save(path, arrays_of(values_of(5), mesh_over((2, 2))), format=kind, overwrite=True)
    wrong += differences(shardkeep.load(path, mesh=mesh_over((4, 1))), values_of(5))
say(wrong=wrong)
"""


def test_the_checkpoint_is_whole_whoever_dies_whenever(pair: Kept, tmp_path: Path) -> None:
    """Survivors raise in time; a new cluster finds the old state or the new one, saves again, and nothing is left."""
    roots = {name: tmp_path / str(number) for number, name in enumerate(SCENARIOS)}
    order = sorted(SCENARIOS, key=lambda name: -SCENARIOS[name].silence)  # those that take long begin first
    with ThreadPoolExecutor(3) as pool:
        running = {name: pool.submit(run, name, roots[name]) for name in order}
    for name, outcomes in running.items():
        print(f"{name}: {check(name, roots[name], outcomes.result()):.1f} s")
        check_state(name, roots[name] / "x")
    states: dict[str, Any] = {
        str(roots[name] / "x"): (1 if scenario.state == "new" else 0, scenario.format)
        for name, scenario in SCENARIOS.items()
    }
    said = pair.run(f"STATES = {states!r}\n" + AFTER, tmp_path)
    assert [process["wrong"] for process in said] == [[], []]
    for name, root in roots.items():
        assert left_overs(root / "x") == set(), name


def test_a_death_while_arrays_are_gathered_is_told(tmp_path: Path) -> None:
    """Exchange files are gathered with a collective of JAX's: the others fail there, at once."""
    script = """
from shardkeep.processes import collectives
values = pattern("float32", (512, 512))
tree = {"w": spread(values, P("a"))}
shardkeep.save(root / "x.safetensors", tree)
shardkeep.load(root / "x.safetensors", broadcast=True)
meet(root, "saved", index, size)
if index == 1:
    collectives._as_row = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
save = lambda: shardkeep.save(root / "x.safetensors", tree, overwrite=True)
load = lambda: shardkeep.load(root / "x.safetensors", broadcast=True)
say(error=caught(CALL))
os._exit(0)
"""
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(run_cluster, script.replace("CALL", call), tmp_path / call, timeout=40)
            for call in ("save", "load")
        ]
    for call, outcomes in zip(("save", "load"), running, strict=True):
        survivor = outcomes.result()[0]
        assert "error" in survivor.said, survivor.output[-3000:]
        assert survivor.said["error"]["kind"] == "ProcessError"
        assert "another process" in survivor.said["error"]["message"]
        assert survivor.said["error"]["seconds"] < 10
        loaded = shardkeep.load(tmp_path / call / "x.safetensors")
        assert differences(loaded, {"w": pattern("float32", (512, 512))}) == []


@pytest.mark.processes4
def test_three_survive_the_fourth(tmp_path: Path) -> None:
    for name in ("in the middle of writing", "in the middle of many files"):
        root = tmp_path / name
        outcomes = run(name, root, size=4)
        print(f"{name}: {check(name, root, outcomes):.1f} s")
        check_state(name, root / "x")
