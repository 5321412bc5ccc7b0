"""The garbage collector rests inside a pause, and is afterwards as it was before."""

import gc
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardkeep
from shardkeep.runtime import collector as collector_module
from shardkeep.runtime.collector import collector
from shardkeep.serialization import AsyncCheckpointManager


class _Thing:
    other: Any = None


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

    def test_a_signal_handler_may_pause_it_before_any_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A handler that saves runs between two lines of the pause of the save that it interrupts."""
        monkeypatch.setattr(collector_module, "_MANY", -1)
        thresholds, lines = gc.get_threshold(), list[int]()

        def interrupt(at: int) -> None:
            """A pause, and another one before the line that is the `at`th to run."""
            count = 0

            def trace(frame: FrameType, event: str, _: object) -> Any:
                nonlocal count
                if frame.f_code.co_filename != collector_module.__file__ or event not in ("call", "line"):
                    return None
                count += event == "line"
                if event == "line" and count == at:
                    lines.append(frame.f_lineno)
                    sys.settrace(None)  # as for a handler: what it calls is not traced
                    with collector.paused():
                        pass
                    return None
                return trace

            sys.settrace(trace)
            try:
                with collector.paused():
                    pass
            finally:
                sys.settrace(None)

        for at in range(1, 100):
            interrupt(at)
            assert gc.get_threshold() == thresholds, f"line {lines[-1]}"
            assert (gc.get_freeze_count(), collector.pauses, collector.has_frozen) == (0, set(), False)
            if len(lines) < at:
                break
        assert 20 < len(lines) < 90

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
