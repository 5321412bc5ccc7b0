"""What real processes ask of the coordination service while they save, wait for each other, and do neither."""

from pathlib import Path
from typing import Any

import pytest

import shardkeep
from multiprocess.cluster import Kept, all_well, run_cluster
from multiprocess.inside import differences, values_of

SECONDS = 8.0  # that all processes wait for the last one

COUNTED = """
from collections import Counter
from multiprocess.service import Counted
values = values_of(1)
mesh = mesh_over((len(jax.devices()) // 2, 2))
tree = arrays_of(values, mesh)
shardkeep.save(root / "x", tree)
(group,) = shardkeep.processes.operation._groups.values()
client = group.client = Counted(group.client)

def requests(call):
    meet(root, f"before {call.__name__}", index, size)
    start = len(client.requests)
    call()
    return client.requests[start:]

def save():
    shardkeep.save(root / "x", tree, overwrite=True)

def load():
    assert differences(shardkeep.load(root / "x", mesh=mesh), values) == []

def wait():
    global seconds
    started = time.monotonic()
    if index == size - 1:
        time.sleep(SECONDS)
    load()
    seconds = time.monotonic() - started

def rest():
    time.sleep(SECONDS)

saved, loaded, waited = requests(save), requests(load), requests(wait)
meet(root, "resting", index, size)
deadline = time.monotonic() + 30
while group.beats([index])[index] != "idle":
    assert time.monotonic() < deadline
    time.sleep(0.1)
rested = requests(rest)
say(saved=Counter(saved), loaded=Counter(loaded), waited=Counter(waited), seconds=seconds, rested=rested)
"""


def check(said: list[dict[str, Any]]) -> None:
    leader, *others = said
    for process in said:
        print(process)
        assert process["rested"] == []
        # To join takes two requests and a load takes a few more: those are made whether it waits or not. The leader
        # asks for what others have not said yet, one by one: which these are is chance.
        once = {**process["loaded"], "blocking_key_value_get": 3 * (len(said) if process is leader else 1)}
        assert sum(process["waited"].values()) - sum(once.values()) <= 2 * process["seconds"]
    for process in others:
        for kind in ("saved", "loaded"):
            assert "key_value_dir_get" not in process[kind]
            assert sum(process[kind].values()) <= 14
            assert process[kind]["blocking_key_value_get"] <= 3
    for kind in ("saved", "loaded"):
        assert leader[kind]["blocking_key_value_get"] <= 3 * len(said)
        assert leader[kind].get("key_value_dir_get", 0) <= 2 + len(said)


def test_a_process_makes_few_requests(pair: Kept, tmp_path: Path) -> None:
    check(pair.run(f"SECONDS = {SECONDS}\n" + COUNTED, tmp_path))


@pytest.mark.processes4
def test_sixteen_processes_make_few_requests(tmp_path: Path) -> None:
    outcomes = run_cluster(f"SECONDS = {SECONDS}\n" + COUNTED, tmp_path / "room", size=16, devices=1, timeout=300)
    check(all_well(outcomes))
    assert differences(shardkeep.load(tmp_path / "room" / "x"), values_of(1)) == []


# The first process answers only once the other one was interrupted; its call then ends, and so does its program.
INTERRUPTED = """
from shardkeep.processes.operation import join
shardkeep.save(root / "x", {"n": np.arange(3)})
group = next(iter(shardkeep.processes.operation._groups.values()))
if index == 1:
    def strike():
        while not any(key.endswith("said/1/0") for key in group._awaited):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=strike, daemon=True).start()
try:
    with join("saving to y") as operation:
        if index == 0:
            while not (root / "interrupted").exists():
                time.sleep(0.01)
            time.sleep(2)
        operation.share(1)
    say(raised=None)
except KeyboardInterrupt:
    say(raised="KeyboardInterrupt", inside=len(group._awaited))
    (root / "interrupted").touch()
"""


def test_a_program_ends_well_although_its_wait_was_interrupted(tmp_path: Path) -> None:
    """A thread that returns from the client into an interpreter that is gone would abort the process."""
    first, second = all_well(run_cluster(INTERRUPTED, tmp_path / "room", timeout=60))
    assert first == {"raised": None}
    assert second == {"raised": "KeyboardInterrupt", "inside": 1}
