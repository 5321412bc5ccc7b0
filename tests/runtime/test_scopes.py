"""What a call has taken is given back however the call ends, and nobody waits forever for one that was interrupted."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.runtime import scopes
from shardkeep.runtime.scopes import Bell, Latch, Scope, is_nested, sweep
from support import run_python


class Taken:
    """A resource that notes how often it was released; it can be interrupted."""

    def __init__(self, name: str, log: list[str], interrupts: int = 0) -> None:
        self._name, self._log, self._interrupts = name, log, interrupts

    def release(self) -> None:
        if self._interrupts:
            self._interrupts -= 1
            raise KeyboardInterrupt
        self._log.append(self._name)


def test_resources_are_released_in_reverse_order() -> None:
    log: list[str] = []
    with Scope("a test") as scope:
        for name in "abc":
            scope.add(Taken(name, log))
    assert log == ["c", "b", "a"]
    assert scope not in scopes._open


def test_an_error_in_one_release_keeps_no_other_from_it(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def release(self) -> None:
            raise ValueError("broken")

    log: list[str] = []
    with Scope("saving to x") as scope:
        scope.add(Taken("a", log))
        scope.add(Broken())
    assert log == ["a"]
    assert "saving to x: cleanup failed: ValueError: broken" in caplog.text


def test_an_interrupted_clean_up_is_completed_by_the_next_scope() -> None:
    log: list[str] = []

    def interrupted() -> None:
        with Scope("a test") as scope:
            scope.add(Taken("a", log))
            scope.add(Taken("b", log, interrupts=1))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert log == []  # what was added earlier may be needed by what could not be released
    with Scope("the next one"):
        assert log == ["b", "a"]


def test_a_clean_up_interrupted_again_and_again_is_completed_in_the_end() -> None:
    log: list[str] = []

    def interrupted() -> None:
        with Scope("a test") as scope:
            scope.add(Taken("a", log, interrupts=3))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sweep()
    sweep()
    assert log == ["a"]


def test_an_interrupted_clean_up_is_completed_at_the_end_of_the_program() -> None:
    printed = run_python(
        """
import sys
from shardkeep.runtime.scopes import Scope
class Taken:
    interrupted = False
    def release(self):
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        print("released")
def call():
    with Scope("a test") as scope:
        scope.add(Taken())
try:
    call()
except KeyboardInterrupt:
    print("interrupted")
"""
    )
    assert printed == "interrupted\nreleased\n"


def test_a_call_that_leaves_a_generator_while_another_thread_looks_is_running() -> None:
    """A suspended generator has no caller, so the stack that the other thread walks ends there."""
    inside, go, suspended, end = (threading.Event() for _ in range(4))
    found: list[Scope] = []
    released: list[str] = []

    class Resource:
        def release(self) -> None:
            released.append("released")

    def steps() -> Iterator[None]:
        inside.set()
        assert go.wait(60)
        yield

    def call() -> None:
        with Scope("a call") as scope:
            scope.add(Resource())
            found.append(scope)
            for _ in steps():
                suspended.set()
                assert end.wait(60)

    def look(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not scopes._Owner.is_running.__code__:
            return None
        if event == "line" and frame.f_locals.get("frame") is not None and not go.is_set():
            go.set()
            assert suspended.wait(60)
        return look

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(60)
    before = sys.gettrace()
    sys.settrace(look)
    try:
        found[0].close_if_left()
    finally:
        sys.settrace(before)
    assert suspended.is_set()
    assert released == []
    end.set()
    thread.join()
    assert released == ["released"]


def test_a_scope_of_a_running_call_is_left_alone() -> None:
    log: list[str] = []
    with Scope("a test") as scope:
        scope.add(Taken("a", log))
        other = threading.Thread(target=sweep)
        other.start()
        other.join()
        sweep()
        assert log == []
    assert log == ["a"]


class TestHandedOver:
    """A scope that is given to a thread is closed by one of the two."""

    def test_the_thread_closes_it(self) -> None:
        log: list[str] = []
        go = threading.Event()

        def work(scope: Scope) -> None:
            with scope:
                assert scope.take_over()
                go.wait(30)

        def start() -> threading.Thread:
            with Scope("a test") as scope:
                scope.add(Taken("a", log))
                thread = threading.Thread(target=work, args=(scope,))
                scope.give_to(thread)
                thread.start()
                return thread

        thread = start()
        sweep()
        assert log == []
        go.set()
        thread.join()
        assert log == ["a"]

    def test_an_exception_before_the_thread_begins_closes_it_and_the_thread_does_nothing(self) -> None:
        log: list[str] = []
        begun: list[bool] = []
        scope = Scope("a test")
        thread = threading.Thread(target=lambda: begun.append(scope.take_over()))

        def interrupted() -> None:
            with scope:
                scope.add(Taken("a", log))
                scope.give_to(thread)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert log == ["a"]
        thread.start()
        thread.join()
        assert begun == [False]
        assert log == ["a"]

    def test_a_thread_that_ended_without_closing_it_is_cleaned_up_after(self) -> None:
        log: list[str] = []

        def start() -> threading.Thread:
            with Scope("a test") as scope:
                scope.add(Taken("a", log))
                thread = threading.Thread(target=lambda: None)
                scope.give_to(thread)
                thread.start()
                return thread

        start().join()
        sweep()
        assert log == ["a"]


class TestNested:
    def test_a_call_knows_that_another_one_is_suspended_below_it(self) -> None:
        def handler() -> bool:
            with Scope("in a handler") as mine:
                return is_nested(mine)

        assert not handler()
        with Scope("below") as below:
            below.add(Taken("a", []))
            assert below.is_below
            assert handler()
            found: list[bool] = []
            other = threading.Thread(target=lambda: found.append(below.is_below))
            other.start()
            other.join()
            assert found == [False]


class TestWaiting:
    def test_a_bell_rung_before_the_wait_is_heard(self) -> None:
        bell = Bell()
        with bell.waiting() as wait:
            bell.ring()
            began = time.monotonic()
            wait(30)
        assert time.monotonic() - began < 10
        assert bell._waiting == []

    def test_a_latch_wakes_all_who_wait_and_later_ones_do_not_wait(self) -> None:
        latch = Latch()
        woken: list[bool] = []
        threads = [threading.Thread(target=lambda: woken.append(latch.wait(30))) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert not latch.wait(0.01)
        latch.set()
        for thread in threads:
            thread.join()
        assert woken == [True] * 3
        assert latch.wait(0)


def test_a_save_that_waits_for_an_interrupted_one_completes_its_clean_up(tmp_path: Path) -> None:
    """Nobody else would: the program makes no other call."""
    from shardkeep.runtime.save_queue import QueueEntry

    def interrupted() -> None:
        with Scope("saving to it") as scope:
            scope.add(QueueEntry(str(tmp_path / "run"), scope)).enter()
            scope.add(Taken("a", [], interrupts=1))

    done: list[object] = []
    with Scope("another") as held:
        first = held.add(QueueEntry(str(tmp_path / "run"), held))
        first.enter()
        waiting = threading.Thread(
            target=lambda: done.append(shardkeep.save(tmp_path / "run", {"w": np.ones(3)})), daemon=True
        )
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        waiting.start()
        time.sleep(0.1)
    waiting.join(30)
    assert done
