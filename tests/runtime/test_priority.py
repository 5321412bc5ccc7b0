"""Threads that save give way to the training."""

import os
import sys
import threading
import time

import pytest

from shardkeep.runtime import priority as priorities
from shardkeep.runtime.priority import priority
from support import crew_of


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
