"""Agreement on one call: alone, and of three processes' worth of groups in this one. Real processes are in
multiprocess/test_run_agreement.py.
"""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from multiprocess.service import pausable
from shardkeep.errors import ProcessError
from shardkeep.processes.group import Group
from shardkeep.runs import agreement as module
from shardkeep.runs.agreement import Agreed, Agreement


def made_for(group: Group, run_id: str, monkeypatch: pytest.MonkeyPatch) -> Agreement:
    monkeypatch.setattr(module, "present_group", lambda _: group)
    return Agreement(run_id)


@contextmanager
def agreements(groups: list[Group], run_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Agreement]]:
    made = [made_for(group, run_id, monkeypatch) for group in groups]
    try:
        yield made
    finally:
        for one in made:
            one.close()
        assert not [t.name for t in threading.enumerate() if t.name in ("shardkeep-agreement", "shardkeep-announcer")]


class TestAlone:
    def test_there_is_no_thread_and_the_next_call_saves(self) -> None:
        before = threading.active_count()
        agreement = Agreement("alone")
        assert [agreement.enter() for _ in range(3)] == [None] * 3
        agreement.request("the time is over", stop=False)
        assert threading.active_count() == before
        assert agreement.enter() == Agreed("the time is over", False)
        assert agreement.enter() is None
        agreement.close()

    def test_requests_before_one_call_lead_to_one_save(self) -> None:
        agreement = Agreement("alone")
        for why, stop in [("a", False), ("b", True), ("a", False)]:
            agreement.request(why, stop=stop)
        assert agreement.enter() == Agreed("a, b", True)
        assert agreement.enter() is None

    def test_after_the_close_nothing_is_pending(self) -> None:
        agreement = Agreement("alone")
        agreement.request("a", stop=False)
        agreement.close()
        agreement.close()
        assert agreement.enter() is None


@pytest.mark.parametrize("seed", range(8))
def test_every_request_is_met_once_at_the_same_call_by_all(
    seed: int, three: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Different speeds, several requests, also at the same time and from other threads than that of the loop."""
    dice = random.Random(seed)
    plans = [(dice.randrange(3), dice.randrange(5, 60), dice.random() < 0.3) for _ in range(6)]
    pauses = [[dice.choice((0, 0, 0.0005, 0.004)) for _ in range(400)] for _ in range(3)]
    requested: dict[str, tuple[int, int]] = {}

    def loop(index: int, agreement: Agreement) -> list[tuple[int, Agreed]]:
        found = []
        for call in range(1, 401):
            time.sleep(pauses[index][call - 1])
            for number, (process, at, stop) in enumerate(plans):
                if (process, at) == (index, call):
                    requested[str(number)] = (index, call)
                    agreement.request(str(number), stop=stop)
            if (agreed := agreement.enter()) is not None:
                found.append((call, agreed))
        return found

    with agreements(three, f"random {seed}", monkeypatch) as made, ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(loop, range(3), made)
    assert others == [first, first]
    assert len({call for call, _ in first}) == len(first)
    for number, (_, call) in requested.items():
        stop = plans[int(number)][2]
        assert [c for c, agreed in first if c >= call and agreed.stop >= stop], f"request {number} was missed"
    whys = [agreed.why for _, agreed in first]
    assert len(set(whys)) == len(whys), "met twice"


def test_no_process_waits_for_the_loop_of_another(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them are inside a training step that lasts as long as the third one's call."""
    with agreements(three, "no wait", monkeypatch) as (first, second, third):
        for one in (first, second, third):
            assert one.enter() is None
        assert second.enter() is None
        first.request("x", stop=True)
        while not first._rounds:
            time.sleep(0.001)
        assert first.enter() is None, "the second is a call ahead"  # and this does not wait for its next call
        assert third.enter() is None
        met = [one.enter() for one in (third, first, second)]
    assert met == [Agreed("x", True)] * 3


def test_requests_that_one_announcement_covers_are_one_save(
    three: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a launcher sends SIGTERM to every process."""
    with agreements(three, "covered", monkeypatch) as made:
        for one in made:
            one.request("signal SIGTERM", stop=True)
        for one in made:
            while not one._rounds:
                time.sleep(0.001)
        met = [[one.enter() for one in made] for _ in range(30)]
    assert met == [[Agreed("signal SIGTERM", True)] * 3] + [[None] * 3] * 29


def test_a_request_to_stop_is_not_covered_by_one_to_save(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    with agreements(three, "stop", monkeypatch) as made:
        made[0].request("timed", stop=False)
        while not made[1]._rounds:
            time.sleep(0.001)
        made[1].request("preempted", stop=True)
        met: list[list[Any]] = [[] for _ in made]
        until = time.monotonic() + 20
        while len(met[0]) < 2 and time.monotonic() < until:
            for one, found in zip(made, met, strict=True):
                found += [(one.count, agreed)] if (agreed := one.enter()) else []
            time.sleep(0.001)
    assert met[1:] == [met[0]] * 2
    assert [agreed for _, agreed in met[0]] == [Agreed("timed", False), Agreed("preempted", True)]


@pytest.mark.parametrize("first", [0, 2])
def test_whoever_closes_ends_the_threads_of_all(
    first: int, three: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an announcement that nobody has met: further calls of the others do not wait for it."""
    with agreements(three, f"close {first}", monkeypatch) as made:
        made[1].request("too late", stop=True)
        while not made[1]._rounds:
            time.sleep(0.001)
        made[first].close()
        for one in made:
            one._several._listener.join(10)
            assert not one._several.is_listening
        made[1].request("much too late", stop=True)
        left = [one for one in made if one is not made[first]]
        met = [[one.enter() for one in left] for _ in range(5)]
    assert [row for row in met if any(row)] in ([], [[Agreed("too late", True)] * 2])


def test_close_does_not_wait_for_a_process_that_never_reports(
    three: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, member = (made_for(group, "never", monkeypatch) for group in three[:2])
    leader.request("x", stop=False)
    while not member._rounds or not leader._rounds:
        time.sleep(0.001)
    for one in (leader, member):
        one.close()
        assert not one._several.is_listening
        assert one.enter() is None


def test_a_process_that_is_gone_is_an_error_of_all(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """The third one gives no sign of life, and never reports."""
    monkeypatch.setenv("SHARDKEEP_PROCESS_SILENCE", "1")
    monkeypatch.setattr(Group, "beats", lambda self, of: {i: "1" if i == 2 else str(time.monotonic()) for i in of})
    made = [made_for(group, "gone", monkeypatch) for group in three[:2]]
    made[1].request("timed", stop=False)
    for one in made:
        while not one._rounds:
            time.sleep(0.001)
        for _ in range(2):  # and at every later call
            with pytest.raises(ProcessError, match=r"a step to save \(timed\): process 2 has sent no heartbeat for 1"):
                one.enter()
    for one in made:
        one.close()


def test_a_service_that_stops_for_a_while_only_delays_the_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    with pausable() as (group, stop, go):
        group.size = 1
        agreement = made_for(group, "paused", monkeypatch)
        stop()
        agreement.request("x", stop=True)
        assert [agreement.enter() for _ in range(100)] == [None] * 100, "no call waits for the service"
        time.sleep(1)
        go()
        while not agreement._rounds:
            time.sleep(0.01)
        assert agreement.enter() == Agreed("x", True)
        agreement.close()
        assert not agreement._several.is_listening


def test_close_ends_while_the_service_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_END", 0.2)
    with pausable() as (group, stop, go):
        agreement = made_for(group, "stopped", monkeypatch)
        stop()
        agreement.close()
        assert agreement.enter() is None
        go()
        agreement._several._listener.join(20)
        assert not agreement._several.is_listening
