"""Real processes of a run agree on one call: different speeds, blocked processes, deaths, the end of the program."""

from pathlib import Path
from typing import Any

import pytest

from multiprocess.cluster import Kept, all_well, run_cluster

START = """
from shardkeep.runs.agreement import Agreement
agreement = Agreement(str(root))
seen = []
def call():
    agreed = agreement.enter()
    if agreed is not None:
        seen.append([agreement.count, *agreed])
"""

# One process is up to ten calls ahead of the others; the step number grows by 8, and has no part in it.
SPEEDS = (
    START
    + """
for n in range(1, 151):
    step = 8 * n
    if n % 10 == 0:
        meet(root, f"call {n}", index, size)
    time.sleep(0.0002 if index == size - 1 else 0.003)
    if step in (8 * 20, 8 * 21) and index == 0:
        agreement.request(f"at {step}", stop=False)
    if step == 8 * 60 and index == 1:
        agreement.request(f"at {step}", stop=True)
    call()
meet(root, "end", index, size)
agreement.close()
ours = ("shardkeep-agreement", "shardkeep-announcer")
say(seen=seen, threads=[t.name for t in threading.enumerate() if t.name in ours])
"""
)

# Each training step ends only when all processes have made it, and a request may arrive at any point of it.
LOCKSTEP = (
    START
    + """
from jax.experimental import multihost_utils
for n in range(1, 41):
    total = int(multihost_utils.process_allgather(np.int32(n)).sum())
    assert total == n * size
    if n % 3 == 1 and index == n % size:
        threading.Timer(0.0005 * (n % 7), agreement.request, (f"at {n}",), {"stop": False}).start()
    call()
meet(root, "end", index, size)
agreement.close()
say(seen=seen)
"""
)

# The first process waits inside a call until another one, that has more calls to make, has agreed.
INSIDE = (
    START
    + """
call()
meet(root, "one", index, size)
if index == 1:
    agreement.request("x", stop=True)
if index == 0:  # a blocking save
    while not (root / "agreed").exists():
        time.sleep(0.001)
else:
    while not agreement._rounds:
        time.sleep(0.001)
    agreement._rounds[0].decided.wait()
    (root / "agreed").touch()
for _ in range(5):
    call()
meet(root, "end", index, size)
agreement.close()
say(seen=seen)
"""
)

# One process is sent SIGTERM; `jax.distributed.initialize` has installed a handler of its own.
PREEMPTED = (
    START
    + """
from shardkeep.runs.preemption import Signals, _action_of
# The handler and the mask; glibc leaves the rest of the mask undefined.
before = _action_of(signal.SIGTERM)[:16]
signals = Signals(("SIGTERM",), agreement.request)
step, stopped_at = 0, None
while stopped_at is None and step < 8 * 5000:
    step += 8
    time.sleep(0.002 if index == 0 else 0.0005)
    if step % 80 == 0:
        meet(root, f"step {step}", index, size)
    if index == size - 1 and step == 8 * 15:
        os.kill(os.getpid(), signal.SIGTERM)
    call()
    stopped_at = step if seen else None
signals.close()
agreement.close()
say(seen=seen, stopped_at=stopped_at, back=_action_of(signal.SIGTERM)[:16] == before)
"""
)


def same_calls(said: list[dict[str, Any]]) -> list[Any]:
    """What all processes have agreed on: at the same calls, each once."""
    first = said[0]["seen"]
    for process in said:
        assert process["seen"] == first
    assert len({call for call, *_ in first}) == len(first)
    return first


def check_speeds(said: list[dict[str, Any]]) -> None:
    seen = same_calls(said)
    assert all(process["threads"] == [] for process in said)
    for requested, must_stop in ((20, False), (21, False), (60, True)):
        assert [call for call, _, stop in seen if call >= requested and stop >= must_stop], f"{requested} was missed"
    whys = [why for _, why, _ in seen]
    assert len(set(whys)) == len(whys)


def check_lockstep(said: list[dict[str, Any]]) -> None:
    seen = same_calls(said)
    assert len(seen) >= 5
    assert all(call >= int(why.removeprefix("at ")) for call, why, _ in seen)


def test_all_save_at_the_same_call_whatever_their_speed(pair: Kept, tmp_path: Path) -> None:
    check_speeds(pair.run(SPEEDS, tmp_path))


def test_a_request_never_blocks_processes_that_wait_for_each_other(pair: Kept, tmp_path: Path) -> None:
    check_lockstep(pair.run(LOCKSTEP, tmp_path))


def test_a_process_inside_a_call_does_not_hold_up_the_others(pair: Kept, tmp_path: Path) -> None:
    assert same_calls(pair.run(INSIDE, tmp_path)) == [[2, "x", True]]


def check_preempted(said: list[dict[str, Any]]) -> None:
    ((call, why, stop),) = same_calls(said)
    assert (why, stop) == ("signal SIGTERM", True)
    assert call >= 15
    assert {process["stopped_at"] for process in said} == {8 * call}
    assert all(process["back"] for process in said)


def test_a_signal_to_one_process_stops_all_at_the_same_step(pair: Kept, tmp_path: Path) -> None:
    check_preempted(pair.run(PREEMPTED, tmp_path))


@pytest.mark.processes4
def test_a_signal_to_one_of_four_processes(four: Kept, tmp_path: Path) -> None:
    check_preempted(four.run(PREEMPTED, tmp_path))


@pytest.mark.processes4
def test_four_processes_of_different_speed(four: Kept, tmp_path: Path) -> None:
    check_speeds(four.run(SPEEDS, tmp_path))


@pytest.mark.processes4
def test_four_processes_that_wait_for_each_other(four: Kept, tmp_path: Path) -> None:
    check_lockstep(four.run(LOCKSTEP, tmp_path))


def test_a_process_that_dies_before_it_reports_is_an_error_and_no_hang(tmp_path: Path) -> None:
    outcomes = run_cluster(
        START
        + """
call()
meet(root, "one", index, size)
if index == 1:
    # Between the announcement and its report: it never gets to report.
    shardkeep.runs.agreement._Several._take_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    (root / "ready").touch()
    time.sleep(60)
while not (root / "ready").exists():
    time.sleep(0.01)
agreement._several._silence = 2.0
agreement.request("timed", stop=False)
def go_on():
    while True:
        call()
        time.sleep(0.01)
say(error=caught(go_on))
os._exit(0)
""",
        tmp_path,
        timeout=40,
    )
    error = outcomes[0].said["error"]
    assert error["kind"] == "ProcessError"
    assert "agreeing on a step to save (timed): process 1 has sent no heartbeat for 2 s" in error["message"]
    assert error["seconds"] < 20


@pytest.mark.parametrize(("first", "closes"), [(0, True), (0, False), (1, False)])
def test_a_program_ends_well_whoever_ends_first(first: int, closes: bool, tmp_path: Path) -> None:
    """Also with its agreement open, and with a request that was never met: no abort, no error message."""
    outcomes = run_cluster(
        START
        + f"""
for _ in range(3):
    call()
meet(root, "all", index, size)
agreement.request("too late", stop=True)
if index != {first}:
    time.sleep(1.5)
if {closes}:
    agreement.close()
say(seen=seen)
""",
        tmp_path,
        timeout=40,
    )
    for process in all_well(outcomes):
        assert process["seen"] == []
    for outcome in outcomes:
        assert "Traceback" not in outcome.output
        assert "terminate called" not in outcome.output


def test_jax_may_be_shut_down_while_a_run_is_open(tmp_path: Path) -> None:
    """Calls go on until it is certain that the service is gone; then they raise."""
    outcomes = run_cluster(
        START
        + """
agreement._several._silence = 2.0
call()
meet(root, "all", index, size)
jax.distributed.shutdown()
call()
def go_on():
    while True:
        call()
        time.sleep(0.01)
say(error=caught(go_on))
agreement.close()
""",
        tmp_path,
        timeout=40,
    )
    for process in all_well(outcomes):
        assert process["error"]["kind"] == "ProcessError"
        assert "coordination service does not answer" in process["error"]["message"]


def test_a_forked_child_takes_no_part(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        START
        + """
call()
child = os.fork()
if child == 0:
    try:
        agreement.close()
        (root / f"child.{index}").write_text(json.dumps(caught(agreement.enter)))
    finally:
        os._exit(0)
os.waitpid(child, 0)
meet(root, "forked", index, size)
if index == 1:
    agreement.request("x", stop=False)
while not agreement._rounds:
    time.sleep(0.001)
for _ in range(5):
    call()
meet(root, "end", index, size)
agreement.close()
say(seen=seen, child=json.loads((root / f"child.{index}").read_text()))
""",
        tmp_path,
    )
    assert same_calls(said) == [[2, "x", False]]
    assert [process["child"]["kind"] for process in said] == [None, None]
