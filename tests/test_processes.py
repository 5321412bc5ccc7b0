"""Processes agree through a real coordination service; here they are threads, each with a client of its own."""

import json
import os
import threading
import time
from collections.abc import Iterator

import pytest

from multiprocess.service import everywhere, groups
from shardkeep import processes
from shardkeep.errors import CheckpointExistsError, ProcessError
from shardkeep.processes import ALONE, Operation, _Group, announced, join


@pytest.fixture(scope="module")
def three() -> Iterator[list[_Group]]:
    with groups(3) as made:
        yield made


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_BEAT", 0.05)
    monkeypatch.setattr(processes, "SILENCE", 20.0)
    monkeypatch.setenv(processes.DEADLINE, "20")


def raise_in(index: int, error: BaseException):
    def work(operation: Operation) -> str:
        if operation.index == index:
            raise error
        operation.gather(1)
        return operation.share("done")

    return work


def test_alone_there_is_nobody_to_ask() -> None:
    assert join("x") is ALONE
    assert (ALONE.index, ALONE.size, ALONE.leads) == (0, 1, True)
    assert ALONE.gather({"a": 1}) == [{"a": 1}]
    assert ALONE.share([1]) == [1]
    assert ALONE.heard() is None


def test_what_is_wrong_before_a_call_begins_belongs_to_it() -> None:
    with announced("saving to x") as operation:
        assert join("something else") is operation
    with pytest.raises(ValueError, match="no"), announced("saving to x"):
        raise ValueError("no")


def test_the_leader_gets_what_all_bring_and_all_get_what_it_says(three: list[_Group]) -> None:
    def work(operation: Operation) -> object:
        first = operation.gather({"from": operation.index})
        said = operation.share([len(first), "é\ud800"] if operation.leads else None)
        second = operation.gather(operation.index * 2)
        return [first, said, second, operation.share(sum(second))]

    leader, *others = everywhere(three, work)
    assert leader == [[{"from": 0}, {"from": 1}, {"from": 2}], [3, "é\ud800"], [0, 2, 4], 6]
    assert others == [[[], [3, "é\ud800"], [], 6]] * 2


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_error_of_one_is_raised_by_all_with_its_index(three: list[_Group], index: int) -> None:
    started = time.monotonic()
    raised = everywhere(three, raise_in(index, CheckpointExistsError("there is one")))
    assert time.monotonic() - started < 2
    for number, error in enumerate(raised):
        assert isinstance(error, CheckpointExistsError)
        assert isinstance(error, FileExistsError)
        assert str(error) == ("there is one" if number == index else f"process {index}: there is one")


def test_an_error_that_is_not_ours_keeps_its_name(three: list[_Group]) -> None:
    leader, culprit, other = everywhere(three, raise_in(1, ZeroDivisionError("by zero")))
    assert isinstance(culprit, ZeroDivisionError)
    for error in (leader, other):
        assert isinstance(error, ProcessError)
        assert str(error) == "process 1: ZeroDivisionError: by zero"


def test_what_others_met_is_heard_without_waiting(three: list[_Group]) -> None:
    failed = threading.Event()

    def work(operation: Operation) -> object:
        if operation.index == 2:
            operation.fail(OSError("no space"))
            failed.set()
            return None
        failed.wait(10)
        return str(operation.heard())

    assert everywhere(three, work)[:2] == ["process 2: OSError: no space"] * 2


def test_those_who_never_call_are_named(three: list[_Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processes.DEADLINE, "0.3")
    (error,) = everywhere(three[:1], lambda o: o.gather(1), "saving to lonely")
    assert isinstance(error, ProcessError)
    assert "processes 1, 2 never made this call within 0.3 s" in str(error)
    # The others, who never made that call, skip it.
    assert everywhere(three, lambda o: o.share("together"), "saving to other") == ["together"] * 3


def test_a_late_one_is_told_that_it_was_given_up(three: list[_Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processes.DEADLINE, "0.3")

    def work(operation: Operation) -> object:
        operation.gather(1)
        return operation.share("done")

    def come(group: _Group) -> object:
        if group.index == 2:
            time.sleep(1.5)
        return everywhere([group], work, "saving to late")[0]

    found: list[object] = [None] * 3
    threads = [threading.Thread(target=lambda i=i: found.__setitem__(i, come(three[i]))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, ProcessError) for error in found)
    assert all("process 2 never made this call within 0.3 s" in str(error) for error in found)
    assert everywhere(three, lambda o: o.share("in step"), "saving to late") == ["in step"] * 3


def test_silence_is_death_and_slowness_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with groups(2) as two:
        monkeypatch.setattr(processes, "SILENCE", 0.6)

        def slow(operation: Operation) -> object:
            if operation.index == 1:
                time.sleep(1.5)
            operation.gather(1)
            return operation.share("done")

        assert everywhere(two, slow) == ["done", "done"]
        two[1].close()
        leader, _ = everywhere(two, lambda o: o.gather(1) if o.leads else time.sleep(2.5))
        assert isinstance(leader, ProcessError)
        assert "process 1 has given no sign of life" in str(leader)
        two[1].end()
        started = time.monotonic()
        leader, _ = everywhere(two, lambda o: o.gather(1) if o.leads else time.sleep(1))
        assert "process 1 has ended" in str(leader)
        assert time.monotonic() - started < 2


def test_keys_go_when_operations_are_over_but_not_before(three: list[_Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_KEPT", 3)
    monkeypatch.setattr(processes, "_KEPT_SECONDS", 0.0)

    def numbers() -> set[str]:
        return {key.split("/")[1] for key, _ in three[0].list("shardkeep/")} - {"alive"}

    held = [Operation("saving to held", group) for group in three]
    number = held[0]._keys.split("/")[1]
    for _ in range(12):
        everywhere(three, lambda o: o.share(1))
    assert number in numbers()
    assert len(numbers()) <= 3 + 1 + 1 + 3
    held[1].gather("late")
    held[2].gather("later")
    assert held[0].gather("first") == ["first", "late", "later"]
    held.clear()
    for _ in range(6):
        everywhere(three, lambda o: o.share(1))
    assert number not in numbers()


def test_a_child_does_not_speak_for_its_parent(three: list[_Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_group", three[1])
    monkeypatch.setattr(processes.distributed.global_state, "client", three[1].client)
    processes._end(os.getpid() + 1)
    assert three[0].beats([1])[1] != "ended"


def test_records_of_errors_are_json(three: list[_Group]) -> None:
    operation = Operation("saving to x", three[1])
    operation.fail(ProcessError("lost"))
    key = f"{operation._keys}/member/1/error"
    told = json.loads(dict(three[0].list(f"{operation._keys}/"))[key])
    assert told == {"process": 1, "kind": "ProcessError", "message": "lost", "what": "saving to x"}
    everywhere([three[0], three[2]], lambda o: None)
