"""The garbage collector rests inside a pause, and is afterwards as it was before."""

import gc
import threading
import weakref
from typing import Any

import pytest

from shardkeep.runtime.collector import collector


class _Thing:
    other: Any = None


class TestCollector:
    def test_it_is_off_inside_and_on_again_after(self) -> None:
        assert gc.isenabled()
        with collector.paused():
            assert not gc.isenabled()
            with collector.paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled()

    def test_it_stays_off_where_the_program_has_none(self) -> None:
        gc.disable()
        try:
            with collector.paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
        finally:
            gc.enable()

    def test_an_error_ends_the_pause(self) -> None:
        with pytest.raises(KeyError), collector.paused():
            raise KeyError
        assert gc.isenabled()

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
        assert not gc.isenabled()  # the other one still has its pause
        leave.set()
        thread.join()
        assert gc.isenabled()

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
