"""A crew of threads: every task once, the first error raised, nothing left running."""

import threading
import time

import pytest

from shardkeep.runtime.crew import Crew, run_tasks
from support import crew_of, run_python


def _ours() -> int:
    return sum(thread.name.startswith("shardkeep") for thread in threading.enumerate())


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_every_task_runs_once(size: int, count: int) -> None:
    done: list[int] = []
    with crew_of(size) as crew:
        for _ in range(3):
            crew.run([lambda i=i: done.append(i) for i in range(count)])
    assert sorted(done) == sorted(list(range(count)) * 3)


def test_tasks_run_at_the_same_time() -> None:
    """Two tasks that wait for each other both end: the calling thread works too."""
    meet = threading.Barrier(2, timeout=10)
    with crew_of(2) as crew:
        crew.run([lambda: meet.wait() and None, lambda: meet.wait() and None])


def test_the_first_error_is_raised_and_ends_the_others_turn() -> None:
    done: list[int] = []

    def work(i: int) -> None:
        if i == 10:
            raise ValueError("the tenth")
        done.append(i)

    with crew_of(2) as crew, pytest.raises(ValueError, match="the tenth"):
        crew.run([lambda i=i: work(i) for i in range(10_000)])
    assert len(done) < 9_999


def test_no_task_runs_after_the_error_was_raised() -> None:
    """Whoever catches the error may close files: nobody writes to them any more."""
    running = threading.Semaphore(0)
    ended = threading.Event()

    def slow() -> None:
        running.release()
        time.sleep(0.2)
        ended.set()

    def fail() -> None:
        running.acquire(timeout=10)
        raise ValueError("now")

    with crew_of(2) as crew:
        with pytest.raises(ValueError, match="now"):
            crew.run([slow, fail])
        assert ended.is_set()


def test_a_crew_is_usable_after_an_error() -> None:
    def fail() -> None:
        raise KeyError("x")

    done: list[int] = []
    with crew_of(3) as crew:
        for _ in range(5):
            with pytest.raises(KeyError, match="x"):
                crew.run([fail] * 5)
            crew.run([lambda: done.append(1)] * 4)
    assert len(done) == 20


def test_an_error_that_is_no_exception_is_raised_too() -> None:
    def leave() -> None:
        raise SystemExit("bye")

    with crew_of(2) as crew, pytest.raises(SystemExit, match="bye"):
        crew.run([leave, leave])


def test_tasks_may_be_made_while_they_run() -> None:
    done: list[int] = []
    with crew_of(2) as crew:
        crew.run((lambda i=i: done.append(i)) for i in range(10))
    assert sorted(done) == list(range(10))


def test_closing_ends_the_threads() -> None:
    before = _ours()
    crew = Crew(4)
    crew.start()
    assert _ours() == before + 3
    crew.release()
    assert _ours() == before
    crew.release()


def test_threads_are_started_only_for_work_that_needs_them() -> None:
    before = _ours()
    with crew_of(4) as crew:
        crew.run([lambda: None])
        assert _ours() == before
        crew.run([lambda: None] * 2)
        assert before < _ours() <= before + 3
    assert _ours() == before


def test_the_size_is_that_of_the_machine_within_bounds() -> None:
    before = _ours()
    with crew_of() as crew:
        crew.start()
        assert 1 <= _ours() - before <= 7  # and the calling thread


def test_ctrl_c_waits_for_the_helpers() -> None:
    """An interrupt while others write is raised only when they have stopped."""
    printed = run_python(
        """
import signal, threading, time, _thread
from shardkeep.runtime.scopes import Scope
from shardkeep.runtime.crew import Crew, run_tasks
ended = []
def slow():
    time.sleep(0.6)
    ended.append(1)
def interrupt():
    threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
    time.sleep(0.05)
with Scope("a test") as scope:
    try:
        scope.add(Crew(3)).run([interrupt, slow, slow])
    except KeyboardInterrupt:
        print("interrupted", len(ended))
"""
    )
    assert printed in ("interrupted 2\n", "interrupted 1\n")


def test_the_program_ends_although_a_crew_was_never_closed_by_an_error() -> None:
    """`with` closes it on every way out, so no thread keeps the program alive."""
    run_python(
        """
from shardkeep.runtime.scopes import Scope
from shardkeep.runtime.crew import Crew, run_tasks
try:
    with Scope("a test") as scope:
        scope.add(Crew(3)).run([lambda: 1 / 0])
except ZeroDivisionError:
    pass
""",
        timeout=20,
    )


def test_a_few_tasks_start_only_as_many_threads() -> None:
    """A store may allow hundreds of requests at a time, and most saves need two or three."""
    before, seen = _ours(), list[int]()
    meet = threading.Barrier(3, timeout=10)

    def work() -> None:
        meet.wait()
        seen.append(_ours() - before)

    run_tasks([work] * 3, 100)
    assert max(seen) == 2
