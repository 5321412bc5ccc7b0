"""Calls that end in time: answers, errors, time-outs, and what comes after one."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkeep.runtime.calls import Calls, Unanswered


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls("shardkeep-test")
    yield made
    made.close()


def threads() -> int:
    return sum(thread.name == "shardkeep-test" for thread in threading.enumerate())


def test_what_a_call_returns_or_raises_comes_back(calls: Calls) -> None:
    assert calls(lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError, match="division"):
        calls(lambda: 1 // 0, 5)


def test_one_caller_needs_one_thread(calls: Calls) -> None:
    assert [calls(lambda i=i: i, 5) for i in range(500)] == list(range(500))
    assert threads() == 1


def test_callers_do_not_wait_for_each_other(calls: Calls) -> None:
    barrier = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        assert len({one.result() for one in [pool.submit(calls, lambda: barrier.wait(20), 20) for _ in range(4)]}) == 4
    assert threads() == 4


def test_after_a_call_without_an_answer_the_next_fail_at_once_until_it_comes(calls: Calls) -> None:
    answered = threading.Event()
    with pytest.raises(Unanswered, match="no answer for"):
        calls(answered.wait, 0.3)
    made: list[int] = []
    for _ in range(50):
        with pytest.raises(Unanswered, match="no answer for"):
            calls(lambda: made.append(1), 60)
    assert made == []
    assert threads() == 1
    answered.set()
    deadline = time.monotonic() + 20
    while not made:
        assert time.monotonic() < deadline
        try:
            calls(lambda: made.append(1), 20)
        except Unanswered:
            time.sleep(0.01)
    assert made == [1]


def test_last_words_are_not_waited_for_and_prove_nothing(calls: Calls) -> None:
    answered = threading.Event()
    with pytest.raises(Unanswered, match="no answer for"):
        calls(answered.wait, 0.2, gives_up=False)
    assert calls(lambda: 7, 5) == 7
    answered.set()


def test_a_closed_one_leaves_no_thread() -> None:
    calls = Calls("shardkeep-test")
    barrier = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: calls(lambda: barrier.wait(20), 20), range(3)))
    calls.close()
    deadline = time.monotonic() + 20
    while threads():
        assert time.monotonic() < deadline
        time.sleep(0.01)
