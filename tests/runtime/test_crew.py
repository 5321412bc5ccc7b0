"""A crew of threads: every task once, the first error raised, nothing left running."""

import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardkeep
from shardkeep.runtime import priority as priorities
from shardkeep.runtime.collector import collector
from shardkeep.runtime.crew import Crew, default_size
from shardkeep.runtime.priority import priority
from shardkeep.serialization import AsyncCheckpointManager
from support import crew_of, run_python


class _Thing:
    other: Any = None


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
    assert 2 <= default_size() <= 8


def test_ctrl_c_waits_for_the_helpers() -> None:
    """An interrupt while others write is raised only when they have stopped."""
    printed = run_python(
        """
import signal, threading, time, _thread
from shardkeep.runtime.scopes import Scope
from shardkeep.runtime.crew import Crew
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
from shardkeep.runtime.crew import Crew
try:
    with Scope("a test") as scope:
        scope.add(Crew(3)).run([lambda: 1 / 0])
except ZeroDivisionError:
    pass
""",
        timeout=20,
    )


def collects() -> bool:
    """Whether garbage is collected now."""
    return gc.isenabled() and gc.get_threshold()[0] > 0


class TestCollector:
    def test_it_is_off_inside_and_on_again_after(self) -> None:
        before = gc.get_threshold()
        assert collects()
        with collector.paused():
            assert not collects()
            with collector.paused():
                assert not collects()
            assert not collects()
        assert collects()
        assert gc.get_threshold() == before

    def test_it_stays_off_where_the_program_has_none(self) -> None:
        gc.disable()
        try:
            with collector.paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
        finally:
            gc.enable()

    def test_it_stays_off_if_the_program_disables_it_meanwhile(self) -> None:
        try:
            with collector.paused():
                gc.disable()
            assert not gc.isenabled()
        finally:
            gc.enable()
        assert collects()

    def test_thresholds_that_the_program_sets_meanwhile_are_kept(self) -> None:
        before = gc.get_threshold()
        try:
            with collector.paused():
                gc.set_threshold(1234, 5, 6)
            assert gc.get_threshold() == (1234, 5, 6)
            gc.set_threshold(0)
            with collector.paused():
                pass
            assert gc.get_threshold()[0] == 0
        finally:
            gc.set_threshold(*before)

    def test_no_user_code_runs_in_a_pause(self, tmp_path: Path) -> None:
        """Neither functions of a PyTree, nor callbacks, nor shardings that are functions."""
        ran: list[str] = []

        def note(what: str) -> None:
            assert collects(), f"{what} runs while the collector is paused"
            ran.append(what)

        @jax.tree_util.register_pytree_node_class
        class Node:
            def __init__(self, x: object) -> None:
                self.x = x

            def tree_flatten(self) -> tuple[tuple[object], None]:
                note("flatten")
                return (self.x,), None

            @classmethod
            def tree_unflatten(cls, _: None, children: tuple[object]) -> "Node":
                note("unflatten")
                return cls(*children)

        state = Node(jnp.ones(3))
        shardkeep.save(tmp_path / "a", state)
        shardkeep.save_async(tmp_path / "b", state).wait()
        shardkeep.load(tmp_path / "a", template=state)
        with AsyncCheckpointManager() as manager:
            manager.save({"w": jnp.ones(3)}, str(tmp_path / "c"), callback=lambda _: note("commit callback"))
            move = lambda array: (note("sharding"), array)[1]  # noqa: E731
            keep = lambda array, _: (note("load callback"), array)[1]  # noqa: E731
            manager.load(str(tmp_path / "c"), None, shardings={"w": move}, callback=keep)
        assert set(ran) == {"flatten", "unflatten", "commit callback", "sharding", "load callback"}

    def test_an_error_ends_the_pause(self) -> None:
        with pytest.raises(KeyError), collector.paused():
            raise KeyError
        assert collects()

    def test_the_last_of_several_threads_ends_it(self) -> None:
        inside, leave = threading.Event(), threading.Event()

        def pause() -> None:
            with collector.paused():
                inside.set()
                leave.wait(30)

        thread = threading.Thread(target=pause)
        thread.start()
        assert inside.wait(30)
        with collector.paused():
            pass
        assert not collects()  # the other one still has its pause
        leave.set()
        thread.join()
        assert collects()

    @pytest.mark.parametrize(("count", "searches"), [(50_000, False), (3_000, True)])
    def test_thousands_of_objects_are_not_searched_as_soon_as_it_is_over(self, count: int, searches: bool) -> None:
        seen: list[str] = []

        def watch(phase: str, info: dict[str, int]) -> None:
            seen.append(phase)

        gc.collect()
        with collector.paused():
            made = [[number] for number in range(count)]
            gc.callbacks.append(watch)
        try:
            made.append([0])
        finally:
            gc.callbacks.remove(watch)
        assert bool(seen) == searches

    def test_garbage_among_them_is_found_later(self) -> None:
        with collector.paused():
            thing = _Thing()
            thing.other = [thing, *([number] for number in range(50_000))]
            gone = weakref.ref(thing)
            del thing
        assert gone() is not None
        gc.collect()
        assert gone() is None

    def test_what_someone_froze_stays_frozen(self) -> None:
        gc.freeze()
        try:
            frozen = gc.get_freeze_count()
            with collector.paused():
                made = [[number] for number in range(50_000)]
            assert gc.get_freeze_count() > frozen // 2 > 0  # some may be gone, by themselves
            assert len(made) == 50_000
        finally:
            gc.unfreeze()


class TestPriority:
    """How background threads leave the processors and the interpreter to the training loop."""

    @staticmethod
    def _worked(pauses: bool) -> tuple[float, float]:
        """(seconds on the clock, seconds of the processor) of a thread that does 60 ms of small work."""
        found: list[float] = []

        def work() -> None:
            if pauses:
                priority.enable_pauses()
            began, used = time.perf_counter(), time.thread_time()
            while time.thread_time() - used < 0.06:
                priority.yield_to_training()
            found.extend((time.perf_counter() - began, time.thread_time() - used))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found[0], found[1]

    def test_a_background_thread_sleeps_twice_as_long_as_it_works(self) -> None:
        elapsed, used = self._worked(pauses=True)
        assert elapsed > 2.5 * used

    def test_others_do_not_sleep(self) -> None:
        naps: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(priorities.time, "sleep", naps.append)
            self._worked(pauses=False)
        assert not naps

    @pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
    @pytest.mark.parametrize(("lowered", "expected"), [(True, 10), (False, 0)])
    def test_a_lowered_priority_is_shared_by_the_threads_that_work_for_it(self, lowered: bool, expected: int) -> None:
        before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        found: dict[int, int] = {}
        meeting = threading.Barrier(3)

        def note() -> None:
            found[threading.get_native_id()] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            meeting.wait(30)

        def work() -> None:
            if lowered:
                priority.lower()
                priority.lower()
            crew.run([note] * 3)

        with crew_of(3, background=True) as crew:
            crew.run([note] * 3)  # the snapshot, say: somebody waits for it
            assert list(found.values()) == [before] * 3
            found.clear()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert list(found.values()) == [max(before, expected)] * 3
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before

    def test_the_threads_of_a_background_crew_pause(self) -> None:
        """All but the calling one, which says so itself."""
        pausing: list[bool] = []
        meet = threading.Barrier(3, timeout=10)

        def look() -> None:
            meet.wait()
            pausing.append(hasattr(priority._mine, "since"))

        for given, expected in ((True, [False, True, True]), (False, [False] * 3)):
            pausing.clear()
            with crew_of(3, background=given) as crew:
                crew.run([look] * 3)
            assert sorted(pausing) == expected
