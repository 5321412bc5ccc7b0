"""Commit callbacks: their order, what they may do, and what becomes of a save whose callback raises."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

import shardkeep
from shardkeep.eformer.manager import AsyncCheckpointManager
from shardkeep.runtime.budget import budget
from shardkeep.runtime.save_queue import QueueEntry
from shardkeep.runtime.scopes import Scope, frame_above
from shardkeep.saving.callbacks import Callback, is_inside_callback
from shardkeep.serialization import tree_serialize_leaves
from support import assert_same, mesh_of

MESH = mesh_of(8)
STATE = {"w": jnp.ones(2)}


@pytest.fixture
def manager() -> AsyncCheckpointManager:
    return AsyncCheckpointManager()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Generator[None]:
    before = threading.enumerate()  # other tests of this process have groups of processes, which have threads
    yield
    assert Callback.line == []
    for thread in threading.enumerate():
        if thread.name.startswith("shardkeep-") and thread not in before:
            thread.join(60)  # it may be on its last lines
            assert not thread.is_alive(), thread.name


@contextmanager
def held(path: Path) -> Generator[Callable[[], None]]:
    """Saves to a path do not commit before this is left, or the function it gives is called."""
    with Scope("a test", frame_above(2)) as scope:
        entry = scope.add(QueueEntry(os.path.realpath(path), scope))
        entry.enter()
        yield entry.release


def until(happened: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < limit
        time.sleep(0.001)


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


class TestOrder:
    @pytest.mark.parametrize("how", ["save_async", "ours", "JAX's"])
    def test_callbacks_run_in_the_order_of_the_calls_also_if_a_later_save_commits_first(
        self, how: str, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        called: list[str] = []
        waits: Any = GlobalAsyncCheckpointManager() if how == "JAX's" else manager

        def save(name: str) -> None:
            if how == "save_async":
                manager.save_async(STATE, tmp_path / name, MESH, callback=lambda path: called.append(Path(path).name))
            else:
                tree_serialize_leaves(tmp_path / name, STATE, waits, commit_callback=lambda: called.append(name))

        with held(tmp_path / "1"):
            for name in "123":
                save(name)
            until(lambda: shardkeep.exists(tmp_path / "2") and shardkeep.exists(tmp_path / "3"))
            assert not shardkeep.exists(tmp_path / "1")
            assert called == []
        waits.wait_until_finished()
        assert called == ["1", "2", "3"]

    def test_a_save_in_the_foreground_calls_back_after_those_called_before_it(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        called: list[str] = []
        with held(tmp_path / "1"):
            manager.save_async(STATE, tmp_path / "1", MESH, callback=called.append)
            second = in_thread(lambda: manager.save(STATE, tmp_path / "2", MESH, callback=called.append))
            until(lambda: shardkeep.exists(tmp_path / "2"))
            assert called == []
        second.join()
        assert called == [str(tmp_path / "1"), str(tmp_path / "2")]
        manager.close()

    def test_saves_without_a_callback_and_other_managers_wait_for_nothing(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        called: list[str] = []
        with held(tmp_path / "1"):
            manager.save_async(STATE, tmp_path / "1", MESH, callback=called.append)
            manager.save(STATE, tmp_path / "2", MESH)
            manager.save_async(STATE, tmp_path / "3", MESH).wait()
            AsyncCheckpointManager().save(STATE, tmp_path / "4", MESH, callback=called.append)
            tree_serialize_leaves(tmp_path / "5", STATE, commit_callback=lambda: called.append("5"))
            assert called == [str(tmp_path / "4"), "5"]
        manager.close()

    def test_a_save_that_fails_gives_up_its_place(self, manager: AsyncCheckpointManager, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        called: list[str] = []
        failing = tmp_path / "file" / "run"
        with held(failing):
            manager.save_async(STATE, failing, MESH, callback=called.append)
            second = manager.save_async(STATE, tmp_path / "2", MESH, callback=called.append)
            until(lambda: shardkeep.exists(tmp_path / "2"))
            assert called == []
        second.wait()
        assert called == [str(tmp_path / "2")]
        with pytest.raises(NotADirectoryError, match="file"):
            manager.close()

    def test_handles_may_be_dropped(self, manager: AsyncCheckpointManager, tmp_path: Path) -> None:
        called: list[str] = []
        for number in range(5):
            manager.save_async({"n": number}, tmp_path / str(number), MESH, callback=called.append)
        manager.close()
        assert called == [str(tmp_path / str(number)) for number in range(5)]

    def test_a_save_that_waits_for_its_turn_holds_no_memory(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        with held(tmp_path / "1"):
            manager.save_async(STATE, tmp_path / "1", MESH, callback=str)
            first = budget.used
            assert first > 0
            manager.save_async({"w": jnp.ones(1000)}, tmp_path / "2", MESH, callback=str)
            until(lambda: budget.used == first)
        manager.close()

    def test_an_interrupted_call_does_not_hold_up_the_others(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        """Ctrl-C while a save in the foreground waits for its turn: it is committed, and the next one goes on."""
        called: list[str] = []

        def interrupt() -> None:
            until(lambda: shardkeep.exists(tmp_path / "2"))
            os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with held(tmp_path / "1"):
                manager.save_async(STATE, tmp_path / "1", MESH, callback=called.append)
                strikes = in_thread(interrupt)
                with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                    manager.save(STATE, tmp_path / "2", MESH, callback=called.append)
                    until(lambda: False)  # if it struck a little earlier or later
                strikes.join()
                manager.save_async(STATE, tmp_path / "3", MESH, callback=called.append)
        finally:
            signal.signal(signal.SIGINT, before)
        manager.close()
        assert called == [str(tmp_path / "1"), str(tmp_path / "3")]

    def test_a_signal_handler_may_save_while_a_callback_runs(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        called: list[str] = []

        def handle(number: int, frame: object) -> None:
            manager.save(STATE, tmp_path / "handler", MESH, callback=called.append)

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            manager.save(STATE, tmp_path / "1", MESH, callback=lambda _: signal.raise_signal(signal.SIGUSR1))
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert called == [str(tmp_path / "handler")]


class TestCallingTheManager:
    """A callback that calls its own manager ends, whatever else is pending."""

    @pytest.mark.parametrize("what", ["save", "save_async", "save with callback", "wait_until_finished", "handles"])
    def test_a_callback_may_call_its_manager(self, what: str, manager: AsyncCheckpointManager, tmp_path: Path) -> None:
        called: list[str] = []
        handles: list[shardkeep.PendingSave] = []

        def first(path: str) -> None:
            assert is_inside_callback()
            called.append("1")
            if what == "save":
                manager.save(STATE, tmp_path / "nested", MESH)
            elif what == "save_async":
                manager.save_async(STATE, tmp_path / "nested", MESH, callback=lambda _: called.append("nested"))
            elif what == "save with callback":
                manager.save(STATE, tmp_path / "nested", MESH, callback=lambda _: called.append("nested"))
            elif what == "wait_until_finished":
                manager.wait_until_finished()
                assert shardkeep.exists(tmp_path / "2")
            else:
                assert [handle.wait().path for handle in handles] == [str(tmp_path / "1"), str(tmp_path / "2")]
                assert not handles[0].done()

        with held(tmp_path / "1") as let_go, held(tmp_path / "2") as let_second_go:
            handles.append(manager.save_async(STATE, tmp_path / "1", MESH, callback=first))
            handles.append(manager.save_async(STATE, tmp_path / "2", MESH, callback=lambda _: called.append("2")))
            let_go()
            until(lambda: called == ["1"])
            let_second_go()
            handles[0].wait(60)
        manager.close()
        assert called == ["1", "2"] + (["nested"] if what in ("save_async", "save with callback") else [])
        assert not is_inside_callback()

    def test_callbacks_may_wait_for_each_others_saves(self, manager: AsyncCheckpointManager, tmp_path: Path) -> None:
        handles: list[shardkeep.PendingSave] = []
        seen: list[list[str]] = []

        def everyone(path: str) -> None:
            until(lambda: len(handles) == 3)
            seen.append([handle.wait().path for handle in handles])
            manager.wait_until_finished()

        for number in range(3):
            handles.append(manager.save_async(STATE, tmp_path / str(number), MESH, callback=everyone))
        for handle in handles:
            handle.wait(60)
        manager.close()
        assert seen == [[str(tmp_path / str(number)) for number in range(3)]] * 3

    def test_a_callback_of_each_of_two_managers_may_call_the_other(self, tmp_path: Path) -> None:
        one, two = AsyncCheckpointManager(), AsyncCheckpointManager()
        called: list[str] = []

        def calls(other: AsyncCheckpointManager, name: str) -> Callable[[str], None]:
            return lambda _: called.append(
                other.save(STATE, tmp_path / name, MESH, callback=lambda _: called.append(name))
            )

        with held(tmp_path / "1") as let_first, held(tmp_path / "2") as let_second:
            one.save_async(STATE, tmp_path / "1", MESH, callback=calls(two, "nested in 1"))
            two.save_async(STATE, tmp_path / "2", MESH, callback=calls(one, "nested in 2"))
            let_first()
            let_second()
            one.close()
            two.close()
        assert {"nested in 1", "nested in 2"} <= set(called)

    def test_the_memory_budget_is_free_for_a_save_in_a_callback(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        shardkeep.set_memory_budget(3000)
        state = {"w": jnp.ones(500)}
        try:
            again = lambda _: manager.save_async(state, tmp_path / "again", MESH)  # noqa: E731
            manager.save_async(state, tmp_path / "1", MESH, callback=again).wait(60)
            manager.close()
        finally:
            shardkeep.set_memory_budget(None)
        assert shardkeep.exists(tmp_path / "again")

    def test_the_callback_of_a_jax_manager_may_save_with_it(self, tmp_path: Path) -> None:
        manager, called = GlobalAsyncCheckpointManager(), list[str]()

        def first() -> None:
            called.append("1")
            tree_serialize_leaves(tmp_path / "3", STATE, manager, commit_callback=lambda: called.append("3"))

        with held(tmp_path / "2"):
            tree_serialize_leaves(tmp_path / "1", STATE, manager, commit_callback=first)
            tree_serialize_leaves(tmp_path / "2", STATE, manager, commit_callback=lambda: called.append("2"))
            until(lambda: shardkeep.exists(tmp_path / "3"))
        manager.wait_until_finished()
        assert called == ["1", "2", "3"]

    def test_waiting_for_a_jax_manager_in_its_own_callback_is_an_error_and_no_deadlock(self, tmp_path: Path) -> None:
        manager = GlobalAsyncCheckpointManager()
        tree_serialize_leaves(tmp_path / "1", STATE, manager, commit_callback=manager.wait_until_finished)
        with pytest.raises(shardkeep.CallbackError, match="cannot join current thread"):
            manager.wait_until_finished()


def fail(*_: Any) -> None:
    raise ZeroDivisionError("mine")


SAVED_BUT = r"was saved, but the callback raised ZeroDivisionError: mine"


class TestExceptions:
    def test_the_handle_knows_that_the_save_succeeded_and_that_the_callback_failed(
        self, manager: AsyncCheckpointManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        pending = manager.save_async(STATE, tmp_path / "1", MESH, callback=fail)
        with pytest.raises(shardkeep.CallbackError, match=f"{tmp_path}/1 {SAVED_BUT}") as caught:
            pending.wait()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert isinstance(caught.value, RuntimeError)
        assert pending.done()
        assert pending.succeeded()
        assert pending.report is not None
        assert "done" in repr(pending)
        assert pending.wait() is pending.report  # told once
        manager.close()
        assert_same(shardkeep.load(tmp_path / "1"), STATE)
        assert [m for m in caplog.messages if "failed" in m] == []
        assert len([m for m in caplog.messages if "the callback raised" in m]) == 1

    def test_what_the_manager_has_raised_the_handle_does_not_raise_again(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        pending = manager.save_async(STATE, tmp_path / "1", MESH, callback=fail)
        with pytest.raises(shardkeep.CallbackError, match=SAVED_BUT):
            manager.wait_until_finished()
        manager.wait_until_finished()
        assert pending.wait() is pending.report

    def test_it_is_raised_by_the_managers_next_wait_also_after_later_saves(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        manager.save_async(STATE, tmp_path / "1", MESH, callback=fail)
        for number in (2, 3):
            manager.save_async(STATE, tmp_path / str(number), MESH, callback=str).wait()
        with pytest.raises(shardkeep.CallbackError, match=f"{tmp_path}/1 {SAVED_BUT}"):
            manager.close()

    def test_a_save_in_the_foreground_raises_after_the_commit(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        with pytest.raises(shardkeep.CallbackError, match=SAVED_BUT):
            manager.save(STATE, tmp_path / "1", MESH, callback=fail)
        with pytest.raises(shardkeep.CallbackError, match=SAVED_BUT):
            tree_serialize_leaves(tmp_path / "2", STATE, commit_callback=fail)
        manager.close()
        for name in "12":
            assert_same(shardkeep.load(tmp_path / name), STATE)

    @pytest.mark.parametrize("ours", [True, False])
    def test_a_managers_wait_raises_it_once(self, ours: bool, tmp_path: Path) -> None:
        manager: Any = AsyncCheckpointManager() if ours else GlobalAsyncCheckpointManager()
        called: list[int] = []
        tree_serialize_leaves(tmp_path / "1", STATE, manager, commit_callback=fail)
        tree_serialize_leaves(tmp_path / "2", STATE, manager, commit_callback=lambda: called.append(2))
        with pytest.raises(shardkeep.CallbackError, match=f"{tmp_path}/1 {SAVED_BUT}"):
            manager.wait_until_finished()
        manager.wait_until_finished()
        assert called == [2]
        assert_same(shardkeep.load(tmp_path / "1"), STATE)

    def test_a_failed_save_is_raised_before_a_callback_that_raised(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        manager.save_async(STATE, tmp_path / "1", MESH, callback=fail)
        manager.save_async(STATE, tmp_path / "file" / "run", MESH)
        with pytest.raises(NotADirectoryError, match="file"):
            manager.close()
        manager.close()

    def test_sys_exit_in_a_callback_in_the_background_is_reported_too(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        pending = manager.save_async(STATE, tmp_path / "1", MESH, callback=lambda _: sys.exit(3))
        with pytest.raises(shardkeep.CallbackError, match="raised SystemExit: 3"):
            pending.wait()
        with pytest.raises(SystemExit, match="3"):
            manager.save(STATE, tmp_path / "2", MESH, callback=lambda _: sys.exit(3))
        manager.close()

    def test_sys_exit_in_the_callback_of_a_jax_manager_does_not_end_its_waiting(self, tmp_path: Path) -> None:
        manager, called = GlobalAsyncCheckpointManager(), list[int]()
        tree_serialize_leaves(tmp_path / "1", STATE, manager, commit_callback=lambda: sys.exit(3))
        tree_serialize_leaves(tmp_path / "2", STATE, manager, commit_callback=lambda: called.append(2))
        with pytest.raises(shardkeep.CallbackError, match="raised SystemExit: 3"):
            manager.wait_until_finished()
        tree_serialize_leaves(tmp_path / "3", STATE, manager, commit_callback=lambda: called.append(3))
        manager.wait_until_finished()
        assert called == [2, 3]

    def test_the_next_callback_runs_also_after_one_that_raised(
        self, manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        called: list[str] = []
        manager.save_async(STATE, tmp_path / "1", MESH, callback=fail)
        manager.save(STATE, tmp_path / "2", MESH, callback=called.append)
        assert called == [str(tmp_path / "2")]
        with suppress(shardkeep.CallbackError):
            manager.close()


def run_program(code: str, path: Path) -> tuple[int, str, str]:
    start = f"""
    import os, sys, threading, time
    import jax.numpy as jnp, shardkeep
    from shardkeep.serialization import AsyncCheckpointManager, tree_serialize_leaves
    path = {str(path)!r}
    manager = AsyncCheckpointManager()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


class TestEndOfProgram:
    def test_callbacks_still_run_in_order_when_the_program_ends_first(self, tmp_path: Path) -> None:
        code, out, err = run_program(
            """
            for number, size in enumerate([4_000_000, 10, 10]):
                tell = lambda _, number=number: print(number, flush=True)
                manager.save_async({"w": jnp.ones(size)}, f"{path}/{number}", callback=tell)
            """,
            tmp_path,
        )
        assert (code, out.split()) == (0, ["0", "1", "2"]), err

    def test_an_exception_in_a_callback_nobody_waited_for_is_reported_at_the_end(self, tmp_path: Path) -> None:
        code, _, err = run_program(
            """
            pending = manager.save_async({"w": jnp.ones(2)}, path + "/1", callback=lambda _: 1 / 0)
            while not pending.done():
                time.sleep(0.01)
            print("--- the program goes on", file=sys.stderr)
            """,
            tmp_path,
        )
        _, _, at_the_end = err.partition("--- the program goes on")
        assert code == 0
        assert f"{tmp_path}/1 was saved, but the callback raised ZeroDivisionError" in at_the_end
        assert "FAILED" not in err

    def test_one_that_was_raised_is_not_reported_again(self, tmp_path: Path) -> None:
        _, _, err = run_program(
            """
            try:
                manager.save_async({"w": jnp.ones(2)}, path + "/1", callback=lambda _: 1 / 0).wait()
            except shardkeep.CallbackError as error:
                print("caught", error, file=sys.stderr)
                print("--- the program goes on", file=sys.stderr)
            """,
            tmp_path,
        )
        assert "caught" in err
        assert err.partition("--- the program goes on")[2].strip() == ""
