"""The thread that tidies up after commits: tasks in order, errors logged, an end that waits for what was asked."""

import logging
import threading
import time

import pytest

from shardkeep.errors import StorageError
from shardkeep.runs.housekeeping import Housekeeping


def nothing() -> None:
    """What is done again and again."""


def test_tasks_run_one_after_another_on_a_thread_of_their_own() -> None:
    housekeeping = Housekeeping("a run", nothing, 60)
    done: list[tuple[int, str]] = []
    housekeeping.start()
    for number in range(20):
        housekeeping.put(lambda number=number: done.append((number, threading.current_thread().name)))
    housekeeping.wait()
    assert done == [(number, "shardkeep-run") for number in range(20)]
    housekeeping.close()


def test_what_a_task_raises_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    housekeeping, done = Housekeeping("the run x", nothing, 60), threading.Event()

    def refused() -> None:
        raise StorageError("the disk is gone")

    def broken() -> None:
        raise KeyError("a bug")

    housekeeping.start()
    with caplog.at_level(logging.ERROR):
        for task in (refused, broken, done.set):
            housekeeping.put(task)
        housekeeping.wait()
    assert done.is_set()
    assert "the run x: the disk is gone" in caplog.text
    assert "the run x: an unexpected error" in caplog.text
    assert "a bug" in caplog.text, "with its traceback"
    housekeeping.close()


def test_when_there_is_nothing_to_do_it_looks_around_again_and_again() -> None:
    looked = threading.Semaphore(0)
    housekeeping = Housekeeping("a run", looked.release, 0.01)
    housekeeping.start()
    for _ in range(3):
        assert looked.acquire(timeout=30)
    housekeeping.close()


def test_tasks_that_come_often_do_not_keep_it_from_looking_around() -> None:
    looked = threading.Event()
    housekeeping = Housekeeping("a run", looked.set, 0.2)
    housekeeping.start()
    until = time.monotonic() + 30
    while not looked.is_set() and time.monotonic() < until:
        housekeeping.put(nothing)
        housekeeping.wait()
        time.sleep(0.01)
    assert looked.is_set()
    housekeeping.close()


def test_close_waits_for_the_tasks_before_it_and_may_be_called_again() -> None:
    housekeeping, done = Housekeeping("a run", nothing, 60), threading.Event()

    def slow() -> None:
        time.sleep(0.2)
        done.set()

    housekeeping.start()
    housekeeping.put(slow)
    housekeeping.close()
    assert done.is_set()
    housekeeping.close()
    housekeeping.wait()


def test_close_waits_no_longer_than_it_is_told_and_not_at_all_on_its_own_thread() -> None:
    housekeeping, go = Housekeeping("a run", nothing, 60), threading.Event()
    housekeeping.start()
    housekeeping.put(go.wait)
    began = time.monotonic()
    housekeeping.close(0.05)
    assert time.monotonic() - began < 20
    go.set()
    other, closed = Housekeeping("a run", nothing, 60), threading.Event()

    def close() -> None:
        other.close()
        closed.set()

    other.start()
    other.put(close)
    assert closed.wait(30)


def test_one_that_was_never_started_can_be_closed() -> None:
    Housekeeping("a run", nothing, 60).close()
