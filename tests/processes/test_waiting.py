"""What it costs the coordination service that processes wait for each other: requests are counted on real clients."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from multiprocess.service import Counted, everywhere, groups
from shardkeep.config import PROCESS_DEADLINE, PROCESS_SILENCE
from shardkeep.errors import ProcessError
from shardkeep.jaxapi import set_new_key
from shardkeep.processes import waiting
from shardkeep.processes.group import IDLE, NUDGE, Group
from shardkeep.processes.operation import Operation

SECONDS = 6.0  # that the processes of a test wait


def counted(made: list[Group]) -> list[Counted]:
    """Note the requests of groups from now on."""
    for group in made:
        group.client = Counted(group.client)
    return [group.client for group in made]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_LOOK", 0.05)
    monkeypatch.setenv(PROCESS_SILENCE.variable, "0.6")
    monkeypatch.setenv(PROCESS_DEADLINE.variable, "3")


@pytest.mark.parametrize("late", [0, 5])
def test_a_process_that_waits_makes_at_most_two_requests_a_second(late: int) -> None:
    """Whether it waits for the leader or the leader for another one; heartbeats are counted too."""
    with groups(6) as made:
        clients = counted(made)

        def work(operation: Operation) -> Any:
            if operation.index == late:
                time.sleep(SECONDS)
            before = [len(client.requests) for client in clients]
            if operation.index == late:
                waited.append(before)
            brought = operation.gather(operation.index)
            return operation.share(sum(brought))

        waited: list[list[int]] = []
        assert everywhere(made, work) == [15] * 6
        for number, requests in enumerate(waited[0]):
            print(number, requests, Counter(clients[number].requests))
            # To join and to bring a value takes three, and the leader lists what is there.
            assert requests <= 2 * SECONDS + 5, clients[number].requests


def test_one_that_joins_late_is_waited_for_at_the_same_cost() -> None:
    with groups(4) as made:
        everywhere(made, lambda o: o.share(1))
        clients = counted(made)

        def work(operation: Operation) -> Any:
            return operation.share(len(operation.gather(operation.index)))

        def join(group: Group) -> Any:
            if group.index == 3:
                time.sleep(SECONDS)
                waited.extend(len(client.requests) for client in clients)
            return everywhere([group], work)[0]

        waited: list[int] = []
        found: dict[int, Any] = {}
        threads = [threading.Thread(target=lambda g=g: found.update({g.index: join(g)})) for g in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == dict.fromkeys(range(4), 4)
        assert max(waited) <= 2 * SECONDS + 5, [Counter(client.requests) for client in clients]


def test_a_process_that_takes_part_in_nothing_makes_no_requests() -> None:
    with groups(3) as made:
        everywhere(made, lambda o: o.share(1))
        until(lambda: set(made[0].beats(range(3)).values()) == {IDLE})
        clients = counted(made)
        time.sleep(SECONDS)
        assert [client.requests for client in clients] == [[], [], []]
        everywhere(made, lambda o: o.share(1))
        assert IDLE not in made[0].beats(range(3)).values()


def test_what_a_gather_costs_grows_with_what_is_gathered_once() -> None:
    """The leader makes no more requests than there are values, in whatever order they arrive."""
    size = 24
    with groups(size) as made:
        clients = counted(made)

        def work(operation: Operation) -> Any:
            time.sleep(operation.index * 0.01)  # in the order in which they are awaited: as costly as it can be
            return operation.gather(operation.index)

        assert everywhere(made, work)[0] == list(range(size))
        kinds = Counter(clients[0].requests)
        assert kinds["blocking_key_value_get"] <= size  # one is the alarm
        assert kinds["key_value_dir_get"] <= 3
        for client in clients[1:]:
            kinds = Counter(client.requests)
            assert kinds["blocking_key_value_get"] == kinds["key_value_dir_get"] == 0


def test_no_thread_is_left_waiting(three: list[Group]) -> None:
    """Whatever ended the wait: a wait ends only with its key, so that is set when nobody else will."""

    def fail(index: int) -> Callable[[Operation], Any]:
        def work(operation: Operation) -> Any:
            if operation.index == index:
                raise ValueError("no")
            return operation.share(operation.gather(1))

        return work

    for index in (0, 1, 2, -1):
        everywhere(three, fail(index))
    until(lambda: not any(group._awaited for group in three))

    operation = Operation("saving to x", three[0])
    operation._arrivals.expect(f"{operation._keys}/brought/1/2")
    assert len(three[0]._awaited) == 1
    operation.fail(KeyboardInterrupt())
    until(lambda: not three[0]._awaited)
    everywhere(three[1:], lambda o: None)


def test_a_process_that_exits_leaves_no_thread_in_the_client_and_does_not_answer_for_the_leader(
    three: list[Group],
) -> None:
    """Its wait for the leader was interrupted. The others wait on, and hear what the leader says."""
    gone = threading.Event()

    def work(operation: Operation) -> Any:
        if operation.index == 1:
            operation._arrivals.expect(f"{operation._keys}/said/1/0")
            raise KeyboardInterrupt
        if operation.leads:
            assert gone.wait(20)
        return operation.share("said")

    def take_part(group: Group) -> Any:
        try:
            return everywhere([group], work)[0]
        except KeyboardInterrupt:
            assert group._awaited
            group.end()
            assert not group._awaited
            gone.set()
            return "interrupted"

    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda g=g: found.update({g.index: take_part(g)})) for g in three]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: "said", 1: "interrupted", 2: "said"}


def test_a_nudge_is_no_answer(three: list[Group]) -> None:
    def work(operation: Operation) -> Any:
        if operation.leads:
            for number in range(2):
                assert set_new_key(three[0].client, f"{operation._keys}/said/1/{number}", NUDGE)
        return operation.share("said")

    assert everywhere(three, work) == ["said"] * 3


def test_a_leader_that_was_interrupted_while_it_answered_is_heard(three: list[Group]) -> None:
    """Whether or not its answer was sent: nobody waits for another one."""
    for was_sent in (True, False):

        def work(operation: Operation, was_sent: bool = was_sent) -> Any:
            if operation.leads:
                if was_sent:
                    operation.share("first")
                else:
                    operation._shares += 1
                raise ZeroDivisionError("interrupted")
            return operation.share(), operation.share()

        for error in everywhere(three, work)[1:]:
            assert isinstance(error, ProcessError)
            assert str(error) == "process 0: ZeroDivisionError: interrupted"


@pytest.mark.usefixtures("_impatient")
def test_one_that_died_while_it_took_part_in_nothing_is_given_up_after_the_deadline() -> None:
    """It sent no heartbeats, so that there are none says nothing. A process that died in the middle of it is silent."""
    with groups(2) as two:
        everywhere(two, lambda o: o.share(1))
        until(lambda: two[0].beats([1]) == {1: IDLE})
        two[1].fall_silent()
        (error,) = everywhere(two[:1], lambda o: o.gather(1))
        assert "process 1 did not make this call within 3 s" in str(error)
        two[0].set("shardkeep/alive/1", "7")
        (error,) = everywhere(two[:1], lambda o: o.gather(1))
        assert "process 1 has sent no heartbeat for 0.6 s" in str(error)


def test_without_threads_keys_are_asked_for(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the program no thread can be started, and a save in the background may still wait."""
    monkeypatch.setattr(waiting, "_ASK", 0.01)

    def work(operation: Operation) -> Any:
        return operation.share(operation.gather(operation.index))

    for group in three:
        monkeypatch.setattr(group._waits, "begin", lambda call: False)
    counted(three)
    assert everywhere(three, work) == [[0, 1, 2]] * 3
    assert "blocking_key_value_get" not in three[1].client.requests
