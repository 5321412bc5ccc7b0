"""Processes agree through a real coordination service; here they are threads, each with a client of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from jax._src import distributed

from multiprocess.service import everywhere, groups, pausable
from shardkeep.config import PROCESS_DEADLINE, PROCESS_SILENCE
from shardkeep.errors import CheckpointExistsError, ProcessError
from shardkeep.processes import group, waiting
from shardkeep.processes import operation as processes
from shardkeep.processes.group import Group
from shardkeep.processes.operation import ALONE, Operation, join


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_BEAT", 0.05)
    monkeypatch.setattr(waiting, "_LOOK", 0.05)
    monkeypatch.setenv(PROCESS_DEADLINE.variable, "20")


def member(monkeypatch: pytest.MonkeyPatch, one: Group) -> None:
    """Let this process be the one that a group is of."""
    monkeypatch.setattr(processes, "_groups", {id(one.client): one})
    state = distributed.global_state
    monkeypatch.setattr(state, "client", one.client)
    monkeypatch.setattr(state, "num_processes", one.size)
    monkeypatch.setattr(state, "process_id", one.index)


def raise_in(index: int, error: BaseException):
    def work(operation: Operation) -> str:
        if operation.index == index:
            raise error
        operation.gather(1)
        return operation.share("done")

    return work


def test_alone_there_is_nobody_to_ask() -> None:
    for alone in (ALONE, join("x")):
        assert (alone.index, alone.size, alone.leads) == (0, 1, True)
        assert alone.gather({"a": 1}) == [{"a": 1}]
        assert alone.share([1]) == [1]
        assert alone.heard() is None
    with pytest.raises(ValueError, match="no"), join("saving to x"):
        raise ValueError("no")


def test_an_error_after_the_end_concerns_one_process_only(three: list[Group]) -> None:
    """As one in a callback, which runs after the commit."""

    def work(operation: Operation) -> object:
        said = operation.share("done")
        operation.close()
        if operation.leads:
            raise ZeroDivisionError("in a callback")
        time.sleep(0.2)
        return said, operation.heard()

    leader, *others = everywhere(three, work)
    assert isinstance(leader, ZeroDivisionError)
    assert others == [("done", None)] * 2


def test_the_first_error_of_a_process_is_the_one_that_others_hear(three: list[Group]) -> None:
    def work(operation: Operation) -> object:
        if operation.index == 1:
            operation.fail(OSError("the disk is full"))
            raise ValueError("what followed from it")
        operation.gather(1)
        return operation.share("done")

    leader, _, other = everywhere(three, work)
    assert str(leader) == str(other) == "process 1: OSError: the disk is full"


def test_an_operation_may_say_later_what_it_does(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS_DEADLINE.variable, "0.3")

    def work(operation: Operation) -> object:
        operation.what = "saving to /here/lonely"
        return operation.gather(1)

    (error,) = everywhere(three[:1], work, "saving to lonely")
    assert str(error).startswith("saving to /here/lonely: processes 1, 2 did not make this call")
    assert everywhere(three, lambda o: o.share("together"), "saving to other") == ["together"] * 3


def test_the_leader_gets_what_all_bring_and_all_get_what_it_says(three: list[Group]) -> None:
    def work(operation: Operation) -> object:
        first = operation.gather({"from": operation.index})
        said = operation.share([len(first), "é\ud800"] if operation.leads else None)
        second = operation.gather(operation.index * 2)
        return [first, said, second, operation.share(sum(second))]

    leader, *others = everywhere(three, work)
    assert leader == [[{"from": 0}, {"from": 1}, {"from": 2}], [3, "é\ud800"], [0, 2, 4], 6]
    assert others == [[[], [3, "é\ud800"], [], 6]] * 2


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_error_of_one_is_raised_by_all_with_its_index(three: list[Group], index: int) -> None:
    started = time.monotonic()
    raised = everywhere(three, raise_in(index, CheckpointExistsError("there is one")))
    assert time.monotonic() - started < 2
    for number, error in enumerate(raised):
        assert isinstance(error, CheckpointExistsError)
        assert isinstance(error, FileExistsError)
        assert str(error) == ("there is one" if number == index else f"process {index}: there is one")


def test_an_error_that_is_not_ours_keeps_its_name(three: list[Group]) -> None:
    leader, culprit, other = everywhere(three, raise_in(1, ZeroDivisionError("by zero")))
    assert isinstance(culprit, ZeroDivisionError)
    for error in (leader, other):
        assert isinstance(error, ProcessError)
        assert str(error) == "process 1: ZeroDivisionError: by zero"


def test_what_others_met_is_heard_without_waiting(three: list[Group]) -> None:
    failed = threading.Event()

    def work(operation: Operation) -> object:
        if operation.index == 2:
            operation.fail(OSError("no space"))
            failed.set()
            return None
        failed.wait(10)
        return str(operation.heard())

    assert everywhere(three, work)[:2] == ["process 2: OSError: no space"] * 2


def test_those_who_never_call_are_named(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS_DEADLINE.variable, "0.3")
    (error,) = everywhere(three[:1], lambda o: o.gather(1), "saving to lonely")
    assert isinstance(error, ProcessError)
    assert "processes 1, 2 did not make this call within 0.3 s" in str(error)
    # The others, who never made that call, skip it.
    assert everywhere(three, lambda o: o.share("together"), "saving to other") == ["together"] * 3


def test_a_late_one_is_told_that_it_was_given_up(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS_DEADLINE.variable, "0.3")

    def work(operation: Operation) -> object:
        operation.gather(1)
        return operation.share("done")

    def come(group: Group) -> object:
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
    assert all("process 2 did not make this call within 0.3 s" in str(error) for error in found)
    assert everywhere(three, lambda o: o.share("in step"), "saving to late") == ["in step"] * 3


def test_silence_is_death_and_slowness_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with groups(2) as two:
        monkeypatch.setenv(PROCESS_SILENCE.variable, "0.6")

        def slow(operation: Operation) -> object:
            if operation.index == 1:
                time.sleep(1.5)
            operation.gather(1)
            return operation.share("done")

        assert everywhere(two, slow) == ["done", "done"]
        two[1].fall_silent()
        leader, _ = everywhere(two, lambda o: o.gather(1) if o.leads else time.sleep(2.5))
        assert isinstance(leader, ProcessError)
        assert "process 1 has sent no heartbeat" in str(leader)
        two[1].end()
        started = time.monotonic()
        leader, _ = everywhere(two, lambda o: o.gather(1) if o.leads else time.sleep(1))
        assert "process 1 has exited" in str(leader)
        assert time.monotonic() - started < 2


def test_keys_go_when_operations_are_over_but_not_before(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_KEPT", 3)
    monkeypatch.setattr(group, "_KEPT_SECONDS", 0.0)

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
    for operation in held:
        operation.over = True
    del operation
    held.clear()
    for _ in range(6):
        everywhere(three, lambda o: o.share(1))
    assert number not in numbers()


def test_a_child_does_not_speak_for_its_parent(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    member(monkeypatch, three[1])
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            processes._end()
        os._exit(0)
    os.waitpid(child, 0)
    assert three[0].beats([1])[1] != "ended"


def test_records_of_errors_are_json(three: list[Group]) -> None:
    operation = Operation("saving to x", three[1])
    operation.fail(ProcessError("lost"))
    key = f"{operation._keys}/alarm"
    told = json.loads(dict(three[0].list(f"{operation._keys}/"))[key])
    assert told == {"process": 1, "kind": "ProcessError", "message": "lost", "what": "saving to x"}
    everywhere([three[0], three[2]], lambda o: None)


@pytest.mark.parametrize("variable", [PROCESS_SILENCE.variable, PROCESS_DEADLINE.variable])
@pytest.mark.parametrize("text", ["soon", "", "0", "-1", "nan"])
def test_a_limit_that_is_no_time_is_refused_by_all(
    three: list[Group], monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    for error in everywhere(three, lambda o: o.gather(1)):
        assert isinstance(error, ValueError)
        assert str(error) == f"{variable} must be a number of seconds greater than 0, not {text!r}"


def test_a_process_is_given_up_after_the_silence_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what the limit means, and how it is set."""
    with groups(2) as two:
        two[1].fall_silent()
        two[1]._alive.join()
        for silence in ("0.4", "1.5"):
            monkeypatch.setenv(PROCESS_SILENCE.variable, silence)
            started = time.monotonic()
            leader, _ = everywhere(two, lambda o: o.gather(1) if o.leads else None)
            assert isinstance(leader, ProcessError)
            assert f"process 1 has sent no heartbeat for {silence} s" in str(leader)
            assert "has not released the GIL" in str(leader)
            assert PROCESS_SILENCE.variable in str(leader)
            assert float(silence) < time.monotonic() - started < float(silence) + 5


def test_one_that_takes_part_and_never_gives_a_sign_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that dies at its very first call."""
    monkeypatch.setenv(PROCESS_SILENCE.variable, "0.4")
    with groups(2) as two:
        silent = Group(two[1].client, 1, 2)
        two[1].fall_silent()
        two[1]._alive.join()
        two[0].client.key_value_delete("shardkeep/alive/1")
        leader, _ = everywhere([two[0], silent], lambda o: o.gather(1) if o.leads else None)
        silent.close()
        assert "process 1 has sent no heartbeat" in str(leader)


def test_time_in_which_this_process_was_stopped_is_nobodys_silence(
    three: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of a job may be stopped and continued together."""
    monkeypatch.setenv(PROCESS_SILENCE.variable, "2")
    everywhere(three, lambda o: o.share(1))  # so that there are heartbeats
    begun = {1}
    watch = waiting.Watch(three[0], "saving to x", silence=2.0, deadline=2.0, begun=lambda: begun)
    began = time.monotonic()
    while time.monotonic() - began < 1:
        assert watch.look([1]) is None
    watch._looked -= 60
    watch._seen[1] = ("before it was stopped", watch._waited)
    begun.clear()
    assert watch.look([1]) is None


def test_a_stopped_service_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call waits as long as was set, the next ones do not; what could not be said is said later."""
    monkeypatch.setenv(PROCESS_SILENCE.variable, "1.5")
    before = threading.active_count()
    with pausable() as (one, stop, go_on):
        with Operation("saving to x", one) as operation:
            operation.share(1)
        lost = Operation("saving to y", one)
        stop()
        calls: list[Callable[[], object]] = [
            lambda: operation.share(2),
            lambda: Operation("saving to z", one),
            lambda: one.beats([1]),
            lambda: lost.gather(1),
        ]
        for number, call in enumerate(calls):
            started = time.monotonic()
            with pytest.raises(ProcessError, match="has not answered for . s.*SHARDKEEP_PROCESS_SILENCE"):
                call()
            assert time.monotonic() - started < (15 if number == 0 else 1)
        started = time.monotonic()
        lost.fail(ValueError("no"))
        assert lost.heard() is None
        assert time.monotonic() - started < 1
        go_on()
        told: list[tuple[str, str]] = []
        while not told:
            assert time.monotonic() - started < 20
            with suppress(ProcessError):
                told = [(key, text) for key, text in one.list(f"{lost._keys}/") if key.endswith("abort")]
        assert "ValueError" in told[0][1]
        assert threading.active_count() - before < 10


def test_a_program_ends_although_the_service_is_stopped() -> None:
    with pausable() as (one, stop, _):
        one.set("shardkeep/x", "1")
        stop()
        started = time.monotonic()
        one.end()
        assert time.monotonic() - started < 10


def test_a_forked_child_is_told_that_it_cannot_take_part(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    member(monkeypatch, three[1])
    inherited = Operation("saving to inherited", three[1])
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        said: list[str] = []
        for call in (lambda: join("saving to y"), inherited.share):
            try:
                call()
            except BaseException as error:  # noqa: BLE001  (the child must not go on with the tests)
                said.append(f"{type(error).__name__}: {error}")
        os.write(theirs, json.dumps(said).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        told = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert told[0].startswith("ProcessError: saving to y: this process was forked from one of 3 JAX processes")
    assert told[1].startswith("ProcessError: saving to inherited: this process was forked")
    everywhere([three[0], three[2]], lambda o: None)  # in step again


@pytest.mark.parametrize("known", [True, False], ids=["in a group", "in the first call"])
def test_a_signal_handler_may_take_part_at_any_line(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Whatever line it interrupts, both operations have numbers of their own, and no lock is waited for."""
    found: list[tuple[str, str]] = []

    def take_part(what: str) -> None:
        with join(what) as one:
            found.append((one.what, one._keys))

    with pausable() as (first, *_):
        member(monkeypatch, first)
        for line in range(1, 400):
            if not known:
                processes._groups.clear()
            found.clear()
            interrupt = partial(os.kill, os.getpid(), signal.SIGUSR1)
            if not at_line(line, partial(take_part, "outer"), interrupt, lambda *_: take_part("inner")):
                break
            assert sorted(what for what, _ in found) == ["inner", "outer"], line
            assert len({keys for _, keys in found}) == 2, line
            (group,) = processes._groups.values()
            if not known:
                group.close()
        for group in processes._groups.values():
            group.close()
        assert line > 20


def test_an_exception_at_any_line_leaves_nothing_behind(three: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others do not wait for the process it was raised in."""
    leader = three[0]
    member(monkeypatch, leader)

    def call() -> None:
        with join("saving to x"):
            pass

    def interrupt() -> None:
        raise KeyboardInterrupt

    for line in range(1, 400):
        first = int(leader.next_keys().rpartition("/")[2])
        try:
            reached = at_line(line, call, interrupt)
        except KeyboardInterrupt:
            reached = True
        if not reached:
            break
        assert not leader._signing._is_owned()
        last = int(leader.next_keys().rpartition("/")[2])
        for number in range(first + 1, last):
            keys = f"shardkeep/{number}"
            deadline = time.monotonic() + 10
            while not any(key.endswith("abort") for key, _ in leader.list(f"{keys}/")):
                assert time.monotonic() < deadline, f"line {line}: nobody is told of {keys}"
                time.sleep(0.02)
        with join("saving to y") as operation:
            assert operation.size == 3
    assert line > 20


def at_line(
    number: int, call: Callable[[], None], then: Callable[[], None], handler: Callable[..., None] | None = None
) -> bool:
    """Make a call and do something before its n-th line in these modules; whether it came so far."""
    count = 0

    def trace(frame: object, event: str, _: object) -> object:
        nonlocal count
        if not frame.f_code.co_filename.endswith(("/operation.py", "/group.py", "/waiting.py")):  # type: ignore[attr-defined]
            return None
        if event == "line":
            count += 1
            if count == number:
                sys.settrace(None)
                then()
        return trace

    before = signal.signal(signal.SIGUSR1, handler) if handler else None
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    finally:
        sys.settrace(None)
        if handler:
            signal.signal(signal.SIGUSR1, before)
    return count >= number


ENDING = """
import sys
{first}
assert "jax" not in sys.modules
{then}
from jax._src import distributed

class Client:
    def key_value_set(self, key, value, allow_overwrite): print(key, value, flush=True)
    def shutdown(self): print("shutdown", flush=True)

state = distributed.global_state
state.client, state.num_processes, state.process_id = Client(), 2, 1
"""


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("import shardkeep", "import jax; shardkeep.exists('nothing')"),
        ("import shardkeep; shardkeep.exists('nothing')", "shardkeep.load"),
        ("from shardkeep import latest", "from shardkeep import load, save"),
    ],
)
def test_a_process_says_that_it_has_ended_before_jax_shuts_down(first: str, then: str) -> None:
    """Also if JAX was imported later than this library, and so would be the first to shut down."""
    code = ENDING.format(first=first, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "shardkeep/alive/1 ended\nshutdown\n", done.stderr
