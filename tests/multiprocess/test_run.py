"""A run of two processes: one lock, one commit, one step to stop at, errors at the same call."""

import sys
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from multiprocess.cluster import Kept, all_well, run_cluster

START = """
mesh = Mesh(np.array(jax.devices()), ("data",))
split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
def new_state():
    return {"w": jnp.zeros(8), "b": jnp.ones(3)}
SHARDINGS = {"w": split, "b": whole}
@jax.jit
def update(state):
    return {"w": state["w"] + 1, "b": state["b"] * 2}
class Data:
    position = 0
    def get_state(self): return {"position": self.position, "process": index}
    def set_state(self, state): self.position = state["position"]; assert state["process"] == index
"""

TRAIN = (
    START
    + """
data = Data()
with shardkeep.Run(root / "run", save_every=8, keep=shardkeep.Keep(last=2)) as run:
    state, step = run.resume(new_state, shardings=SHARDINGS, iterators={"train": data})
    begun = step
    assert state["w"].sharding == split and state["b"].sharding == whole
    while step < begun + 20:
        state, step = update(state), step + 1
        data.position += 2
        run.step(step, state, metrics={"loss": 10.0 * index + step}, iterators={"train": data})
        assert run.due(step) == (step % 8 == 0)
say(begun=begun, data=data.position, resumed=run.resumed.step, steps=[s.number for s in run.steps()],
    metrics=[s.metrics["loss"] for s in run.steps()])
"""
)


def test_two_processes_train_and_resume_one_run(pair: Kept, tmp_path: Path) -> None:
    """Metrics are those of process 0; each process gets back the position of its own iterator."""
    first = pair.run(TRAIN, tmp_path)
    assert [one["begun"] for one in first] == [0, 0]
    assert first[0]["steps"] == [8, 16]
    assert first[0]["metrics"] == [8.0, 16.0]
    second = pair.run(TRAIN, tmp_path)
    assert [one["begun"] for one in second] == [16, 16]
    assert [one["data"] for one in second] == [32 + 40] * 2
    assert second[0]["steps"] == [24, 32]
    path = tmp_path / "run" / "step_32"
    assert np.asarray(shardkeep.load(path)["w"]).tolist() == [32.0] * 8
    assert len(shardkeep.load(path, prefix="iterators", per_process="all")["train"]) == 2
    assert not (tmp_path / "run" / ".shardkeep-run" / "writer").exists()


def test_a_damaged_step_is_skipped_by_all_and_marked_once(pair: Kept, tmp_path: Path) -> None:
    pair.run(TRAIN, tmp_path)
    for path in (tmp_path / "run" / "step_16").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    told = pair.run(
        START
        + """
with shardkeep.Run(root / "run", keep=None) as run:
    state, step = run.resume(new_state, shardings=SHARDINGS)
    say(step=step, skipped=[n for n, _ in run.resumed.skipped], states=[s.state for s in run.steps()])
    again, back = run.resume(new_state, shardings=SHARDINGS, step=8)
    run.save(16, update(again)).wait()
    say(after=[(s.number, s.state) for s in run.steps()])
""",
        tmp_path,
    )
    for one in told:
        assert (one["step"], one["skipped"], one["states"]) == (8, [16], ["usable", "damaged"])
        assert one["after"] == [[8, "usable"], [16, "usable"]]
    marks = tmp_path / "run" / ".shardkeep-run" / "marks"
    assert not marks.exists() or len(list(marks.iterdir())) <= 1


def test_errors_reach_all_processes_at_the_same_call(pair: Kept, tmp_path: Path) -> None:
    """Of a save that failed in the background, at the next call that saves; of bad arguments, at once."""
    told = pair.run(
        START
        + """
from shardkeep.errors import ShardkeepError
(root / "run").mkdir(exist_ok=True)
with shardkeep.Run(root / "run", save_every=4, keep=None) as run:
    state, step = run.resume(new_state, shardings=SHARDINGS)
    if index == 0:
        (root / "run" / "step_4" / ".shardkeep" / "lock").mkdir(parents=True)
    raised = []
    for step in range(1, 13):
        state = update(state)
        try:
            run.step(step, state, metrics={"loss": "high"} if step == 12 and index == 1 else None)
        except ShardkeepError as error:
            raised.append((step, type(error).__name__))
    say(raised=raised)
say(steps=[s.number for s in run.steps()])
""",
        tmp_path,
    )
    assert told[0]["raised"] == told[1]["raised"]
    assert [step for step, _ in told[0]["raised"]] == [8, 12]
    assert told[0]["raised"][1][1] == "MetadataError"
    assert told[0]["steps"] == []


def test_a_stop_is_not_lost_on_any_process_if_its_save_cannot_be_made(pair: Kept, tmp_path: Path) -> None:
    """Bad metrics of one process are raised by both in the call that was agreed on; the next one saves and stops."""
    told = pair.run(
        START
        + """
from shardkeep.errors import MetadataError
with shardkeep.Run(root / "run", save_every=10_000) as run:
    state, step = run.resume(new_state, shardings=SHARDINGS)
    raised, calls = [], 0
    while not run.stopping and calls < 5000:
        step, calls = step + 8, calls + 1
        if calls == 20 and index == 1:
            run.stop()
        try:
            run.step(step, state, metrics={"loss": "high" if index == 1 and not raised else 1.0})
        except MetadataError:
            raised.append(step)
        time.sleep(0.001)
    say(step=step, raised=raised, stopping=run.stopping, latest=run.latest().number)
""",
        tmp_path,
    )
    assert told[0] == told[1]
    assert told[0]["stopping"]
    assert told[0]["raised"] == [told[0]["step"] - 8]
    assert told[0]["latest"] == told[0]["step"]


def test_what_the_iterator_of_one_process_raises_reaches_all(pair: Kept, tmp_path: Path) -> None:
    pair.run(TRAIN, tmp_path)
    told = pair.run(
        START
        + """
class Broken(Data):
    def set_state(self, state):
        if index == 1:
            raise RuntimeError("cannot go there")
with shardkeep.Run(root / "run") as run:
    say(**caught(run.resume, new_state, shardings=SHARDINGS, iterators={"train": Broken()}))
    say(step=run.resume(new_state, shardings=SHARDINGS, iterators={"train": Data()})[1])
""",
        tmp_path,
    )
    assert [one["step"] for one in told] == [16, 16]
    assert all("cannot go there" in one["message"] for one in told)


def test_what_redistribute_raises_on_one_process_reaches_all(pair: Kept, tmp_path: Path) -> None:
    with shardkeep.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.zeros(8, np.float32), "b": np.ones(3, np.float32)}, iterators={"train": {"position": 7}})
    told = pair.run(
        START
        + """
def twice(states, count):
    return [{**states[0], "process": n} for n in range(count)]
def broken(states, count):
    if index == 1:
        raise RuntimeError("no idea")
    return twice(states, count)
with shardkeep.Run(root / "run") as run:
    first = caught(run.resume, new_state, shardings=SHARDINGS, iterators={"train": Data()}, redistribute=broken)
    data = Data()
    step = run.resume(new_state, shardings=SHARDINGS, iterators={"train": data}, redistribute=twice)[1]
    say(message=first["message"], step=step, position=data.position)
""",
        tmp_path,
    )
    assert ["no idea" in one["message"] for one in told] == [True] * 2, told
    assert [(one["step"], one["position"]) for one in told] == [(1, 7)] * 2


def test_a_second_job_is_refused_on_all_its_processes(pair: Kept, tmp_path: Path) -> None:
    with shardkeep.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.zeros(2)}).wait()
        told = pair.run(
            START
            + """
from shardkeep.errors import ConflictError
run = shardkeep.Run(root / "run")
try:
    run.resume({"w": np.zeros(2)})
except ConflictError as error:
    say(error=str(error))
say(loaded=run.load()["w"].tolist())
""",
            tmp_path,
        )
    assert all("another program writes to the run" in one["error"] for one in told)
    assert told[0]["loaded"] == [0, 0]


STOP = (
    START
    + """
with shardkeep.Run(root / "run", save_every=10_000) as run:
    state, step = run.resume(new_state, shardings=SHARDINGS)
    calls = 0
    while not run.stopping and calls < 5000:
        state, step = update(state), step + 8
        calls += 1
        if calls == 20 and index == 1:
            HOW
        run.step(step, state)
        time.sleep(0.001 * index)
    say(step=step, stopping=run.stopping, latest=run.latest().number)
"""
)


@pytest.mark.parametrize("how", ["run.stop()", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_stop_of_one_process_ends_all_at_one_saved_step(tmp_path: Path, how: str) -> None:
    """With increments of 8, and processes of different speed."""
    told = all_well(run_cluster(STOP.replace("HOW", how), tmp_path / "room", 2))
    assert told[0] == told[1]
    assert told[0]["stopping"]
    assert told[0]["latest"] == told[0]["step"] >= 160


@pytest.mark.processes4
@pytest.mark.parametrize("how", ["run.stop()", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_stop_of_one_of_four_processes_ends_all_at_one_saved_step(tmp_path: Path, how: str) -> None:
    told = all_well(run_cluster(STOP.replace("HOW", how), tmp_path / "room", 4))
    assert all(one == told[0] for one in told)
    assert told[0]["stopping"]
    assert told[0]["latest"] == told[0]["step"] >= 160


@pytest.mark.processes4
def test_four_processes_train_and_resume_one_run(four: Kept, pair: Kept, tmp_path: Path) -> None:
    for begun in (0, 16):
        told = four.run(TRAIN, tmp_path)
        assert {one["begun"] for one in told} == {begun}
        assert told[0]["steps"] == [begun + 8, begun + 16]
        assert told[0]["metrics"] == [begun + 8.0, begun + 16.0], "those of process 0"
    refused = pair.run(
        START
        + """
with shardkeep.Run(root / "run") as run:
    say(**caught(run.resume, new_state, shardings=SHARDINGS, iterators={"train": Data()}))
""",
        tmp_path,
    )
    assert all("4 processes" in one["message"] and "redistribute=" in one["message"] for one in refused)


UNTIL_SAVED = (
    START
    + """
import subprocess
with shardkeep.Run(root / "run", save_every=WHEN, keep=None) as run:
    state, step = run.resume(new_state, shardings=SHARDINGS)
    pending = None
    while pending is None and step < 8 * 100_000:
        step += 8
        if step == 80 and index == 1:
            ASK
        pending = run.step(step, state)
        time.sleep(0.001 * (index + 1))
say(saved=step, steps=[s.number for s in run.steps()])
"""
)


@pytest.mark.parametrize("what", ["time", "request"])
def test_a_timed_save_and_a_requested_one_happen_at_one_step(pair: Kept, tmp_path: Path, what: str) -> None:
    ask = f"subprocess.run([{sys.executable!r}, '-m', 'shardkeep', 'save-now', str(root / 'run')], check=True)"
    when, ask = ("'0.2 s'", "pass") if what == "time" else ("None", ask)
    told = pair.run(UNTIL_SAVED.replace("WHEN", when).replace("ASK", ask), tmp_path)
    assert told[0] == told[1]
    assert told[0]["steps"] == [told[0]["saved"]]
    assert not list((tmp_path / "run/.shardkeep-run").glob("requests/*"))
