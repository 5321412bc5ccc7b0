"""Saves in the background: their order, their errors, the memory they hold, and what happens when the program ends."""

import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from faults.spawner import MODES, Pause, shim
from shardkeep.runtime.budget import budget
from shardkeep.runtime.scopes import Scope
from shardkeep.saving.pending import BackgroundSave, PendingSave
from signals import START
from support import assert_same


@pytest.fixture(autouse=True)
def _default_budget() -> Iterator[None]:
    yield
    shardkeep.set_memory_budget(None)


class Program:
    """A Python program of its own, with the shim at hand: `pause()` arms it, `pause.go` lets it go on."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path
        self.pause = Pause(tmp_path / "pause")

    def start(self, code: str, at: int = 2) -> "subprocess.Popen[str]":
        """Saves stop at their `at`-th write; the program knows `path`, `arm` and `wait_for_pause`."""
        start = f"""
        import ctypes, os, sys, time, signal, threading
        import jax, jax.numpy as jnp, numpy as np, shardkeep
        path = {str(self.path)!r}
        FAIL = {MODES["fail"]}
        def arm(mode={MODES["pause"]}, at={at}):
            shim = ctypes.CDLL({str(shim())!r})
            shim.shim_arm(path.encode(), b"write", mode, at, {errno.ENOSPC}, 1, {os.fsencode(self.pause.path)!r})
        def wait_for_pause():
            while not os.path.exists({str(self.pause.path)!r} + ".reached"):
                time.sleep(0.001)
        """
        env = {**os.environ, "LD_PRELOAD": str(shim()), "JAX_NUM_CPU_DEVICES": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", START + textwrap.dedent(start) + textwrap.dedent(code)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, code: str, at: int = 2, go_after: float | None = 0.3) -> tuple[int, str, str]:
        """(exit code, output, errors) of a program that is let go a while after it paused."""
        process = self.start(code, at)
        if go_after is not None:
            self.pause.reached()
            time.sleep(go_after)
            self.pause.go()
        out, err = process.communicate(timeout=40)
        return process.returncode, out, err


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


class TestEndOfProgram:
    def test_leaving_without_waiting_finishes_the_save_and_says_so(self, program: Program) -> None:
        code, _, err = program.run('arm(); shardkeep.save_async(path + "/run", {"w": np.ones(3)})')
        assert code == 0
        assert "the program has ended; finishing the save" in err
        assert "is finished" in err
        assert_same(shardkeep.load(program.path / "run"), {"w": np.ones(3)})

    def test_several_pending_saves_are_all_finished(self, program: Program) -> None:
        code, _, err = program.run(
            """
            arm()
            for i in range(4):
                shardkeep.save_async(path + "/run", {"w": np.full(3, i)}, overwrite=True)
                shardkeep.save_async(path + f"/other{i}", {"w": jnp.full(3, i)})
            """
        )
        assert code == 0, err
        assert shardkeep.load(program.path / "run")["w"].tolist() == [3, 3, 3]
        for i in range(4):
            assert shardkeep.load(program.path / f"other{i}")["w"].tolist() == [i] * 3

    @pytest.mark.parametrize(
        ("end", "expected"), [("sys.exit(3)", 3), ("raise SystemExit", 0), ("raise RuntimeError('mine')", 1)]
    )
    def test_an_exit_or_an_exception_does_not_lose_the_save(self, program: Program, end: str, expected: int) -> None:
        code, _, err = program.run(f'arm(); shardkeep.save_async(path + "/run", {{"w": np.ones(3)}}); {end}')
        assert code == expected
        assert_same(shardkeep.load(program.path / "run"), {"w": np.ones(3)})
        assert ("RuntimeError: mine" in err) == (expected == 1)

    def test_ctrl_c_while_waiting_does_not_lose_the_save(self, program: Program) -> None:
        process = program.start(
            """
            arm()
            pending = shardkeep.save_async(path + "/run", {"w": np.ones(3)})
            print("waiting", flush=True)
            pending.wait()
            """
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        program.pause.reached()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        program.pause.go()
        _, err = process.communicate(timeout=40)
        assert process.returncode not in (0, -signal.SIGKILL)
        assert "KeyboardInterrupt" in err
        assert_same(shardkeep.load(program.path / "run"), {"w": np.ones(3)})

    def test_a_failure_nobody_waited_for_is_reported_at_the_end(self, program: Program) -> None:
        code, _, err = program.run(
            """
            arm(mode=FAIL)
            pending = shardkeep.save_async(path + "/run", {"w": np.ones(3)})
            while not pending.done():
                time.sleep(0.01)
            print("--- the program goes on", file=sys.stderr)
            """,
            go_after=None,
        )
        at_once, _, at_the_end = err.partition("--- the program goes on")
        assert code == 0
        assert "the save to" in at_once
        assert "failed" in at_once
        assert "No space left" in at_once
        assert "FAILED and wait() was never called" in at_the_end
        assert str(program.path / "run") in at_the_end

    def test_a_failure_after_the_end_of_the_program_is_reported(self, program: Program) -> None:
        code, _, err = program.run(
            """
            arm(mode=FAIL, at=3)
            shardkeep.save_async(path + "/run", {"w": np.ones(3)})
            """,
            go_after=None,
        )
        assert code == 0
        assert "FAILED and wait() was never called" in err
        assert "is finished" not in err

    def test_a_failure_that_was_waited_for_is_not_reported_again(self, program: Program) -> None:
        _, out, err = program.run(
            """
            arm(mode=FAIL)
            try:
                shardkeep.save_async(path + "/run", {"w": np.ones(3)}).wait()
            except shardkeep.NotEnoughSpaceError as error:
                print("caught", error)
            """,
            go_after=None,
        )
        assert "caught" in out
        assert "never called" not in err

    def test_a_quiet_program_stays_quiet(self, program: Program) -> None:
        """A save that is waited for writes nothing to the terminal."""
        _, out, err = program.run('shardkeep.save_async(path + "/run", {"w": np.ones(3)}).wait()', go_after=None)
        assert (out, err) == ("", "")


class TestErrors:
    def test_an_error_is_raised_by_every_wait_and_logged_at_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").touch()
        pending = shardkeep.save_async(tmp_path / "file" / "run", {"w": np.ones(3)})
        for _ in range(2):
            with pytest.raises(shardkeep.NotADirectoryPathError, match="file"):
                pending.wait()
        assert pending.done()
        assert pending.report is None
        assert "failed" in repr(pending)
        logged = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert len(logged) == 1
        assert "failed" in logged[0].getMessage()

    def test_a_later_save_is_neither_refused_nor_blamed(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        bad = shardkeep.save_async(tmp_path / "file" / "run", {"w": np.ones(3)})
        good = shardkeep.save_async(tmp_path / "run", {"w": np.ones(3)})
        assert good.wait().nbytes > 0
        shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, overwrite=True)
        with pytest.raises(shardkeep.NotADirectoryPathError, match="file"):
            bad.wait()

    def test_a_failed_save_does_not_stop_the_next_to_the_same_target(self, tmp_path: Path) -> None:
        """The second comes to a tree that exists; the third may overwrite it."""
        first = shardkeep.save_async(tmp_path / "run", {"w": np.ones(1 << 18)})
        try:
            second = shardkeep.save_async(tmp_path / "run", {"w": np.ones(4)})
        except shardkeep.CheckpointExistsError:
            second = None
        third = shardkeep.save_async(tmp_path / "run", {"w": np.ones(5)}, overwrite=True)
        first.wait()
        if second is not None:
            with pytest.raises(shardkeep.CheckpointExistsError, match="overwrite=True"):
                second.wait()
        third.wait()
        assert shardkeep.load(tmp_path / "run")["w"].shape == (5,)


class TestHandle:
    def test_wait_with_a_timeout_raises_and_the_save_goes_on(self) -> None:
        save = BackgroundSave("somewhere")
        pending = PendingSave(save)
        go = threading.Event()
        report = shardkeep.SaveReport("somewhere", 1, 1, 1.0)

        def work() -> shardkeep.SaveReport:
            go.wait()
            return report

        with Scope("a test") as outer, Scope("a test") as scope:
            save.start(outer, scope, work)
        assert not pending.done()
        assert "running" in repr(pending)
        with pytest.raises(TimeoutError, match=r"somewhere is still running after 0\.05 s"):
            pending.wait(0.05)
        with pytest.raises(TimeoutError, match="still running"):
            pending.wait(0)
        go.set()
        assert pending.wait(10) is report
        assert pending.report is report
        assert pending.done()
        assert "done" in repr(pending)

    def test_it_shows_what_users_need_and_nothing_else(self) -> None:
        shown = {name for name in dir(PendingSave) if not name.startswith("_")}
        assert shown == {"wait", "done", "succeeded", "path", "report"}

    def test_the_report_is_that_of_the_save(self, tmp_path: Path) -> None:
        pending = shardkeep.save_async(tmp_path / "run", {"w": jnp.ones(1000)})
        report = pending.wait()
        assert pending.path == report.path == str(tmp_path / "run")
        assert report.nbytes >= 4000
        assert report.files == 1
        assert report.seconds > 0

    def test_many_may_wait_for_one_save(self, tmp_path: Path) -> None:
        pending = shardkeep.save_async(tmp_path / "run", {"w": np.ones(1 << 16)})
        reports: list[Any] = []
        threads = [threading.Thread(target=lambda: reports.append(pending.wait())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert reports == [pending.report] * 4


class TestOrder:
    @pytest.mark.parametrize("name", ["run", "model.safetensors"])
    def test_saves_to_one_target_are_committed_in_order_of_the_calls(self, tmp_path: Path, name: str) -> None:
        """A large one first, so that those after it would overtake it if they could."""
        path = tmp_path / name
        sizes = [2 << 20, 1000, 10, 1 << 18, 5]
        pending = [
            shardkeep.save_async(path, {"w": np.full(size, i, np.float32), "step": i}, overwrite=True)
            for i, size in enumerate(sizes)
        ]
        seen = []
        for handle in pending:
            handle.wait()
            seen.append(shardkeep.load(path)["step"])
        assert seen == sorted(seen)
        assert seen[-1] == len(sizes) - 1

    def test_a_blocking_save_comes_after_those_in_the_background(self, tmp_path: Path) -> None:
        for i in range(5):
            shardkeep.save_async(tmp_path / "run", {"w": np.full(1 << 18, i)}, overwrite=True)
        shardkeep.save(tmp_path / "run", {"w": np.full(3, 99)}, overwrite=True)
        assert shardkeep.load(tmp_path / "run")["w"].tolist() == [99] * 3

    def test_two_names_of_one_directory_are_one_target(self, tmp_path: Path) -> None:
        """A link, a relative path, a URL: they queue for each other, they do not collide."""
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        names = [tmp_path / "real" / "run", tmp_path / "link" / "run", f"file://{tmp_path}/real/run/"]
        for _ in range(3):
            pending = [
                shardkeep.save_async(name, {"w": np.full(1 << 18, i)}, overwrite=True) for i, name in enumerate(names)
            ]
            for handle in pending:
                handle.wait()
            assert shardkeep.load(tmp_path / "real" / "run")["w"][0] == len(names) - 1


class TestMemoryBudget:
    def test_a_save_beyond_the_budget_waits_and_says_so(
        self, program: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        code, out, err = program.run(
            """
            shardkeep.set_memory_budget(1 << 20)
            arm()
            shardkeep.save_async(path + "/a", {"w": np.ones(100_000)})
            wait_for_pause()
            threading.Timer(0.4, lambda: open(path + "/pause.go", "w")).start()
            begun = time.monotonic()
            shardkeep.save_async(path + "/b", {"w": np.ones(100_000)}).wait()
            print(time.monotonic() - begun)
            """,
            go_after=None,
        )
        assert code == 0, err
        assert float(out) > 0.3
        assert "is waiting for memory: earlier saves hold 800,000 of the budget of 1,048,576 bytes" in err
        assert shardkeep.exists(tmp_path / "b")

    def test_a_save_larger_than_the_budget_goes_alone(self, tmp_path: Path) -> None:
        shardkeep.set_memory_budget(1000)
        pending = [shardkeep.save_async(tmp_path / str(i), {"w": np.ones(10_000)}) for i in range(4)]
        for handle in pending:
            handle.wait(30)

    def test_the_budget_is_given_back_however_a_save_ends(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        shardkeep.set_memory_budget(1 << 20)
        for i in range(5):
            pending = shardkeep.save_async(tmp_path / "file" / "x", {"w": np.ones(100_000)})
            with pytest.raises(shardkeep.NotADirectoryPathError, match="file"):
                pending.wait()
            with pytest.raises(shardkeep.UnsupportedLeafError, match="bad"):
                shardkeep.save_async(tmp_path / "x", {"w": np.ones(100_000), "bad": object()})
            shardkeep.save_async(tmp_path / f"good{i}", {"w": np.ones(100_000)}).wait(20)
        assert budget.used == 0

    def test_the_budget_comes_from_the_environment(self, program: Program) -> None:
        process = program.start("from shardkeep.runtime.budget import budget; print(budget.limit)")
        assert int(process.communicate(timeout=40)[0]) > 1 << 20
        os.environ["SHARDKEEP_MEMORY_BUDGET"] = "12345"
        try:
            process = program.start("from shardkeep.runtime.budget import budget; print(budget.limit)")
            assert process.communicate(timeout=40)[0] == "12345\n"
        finally:
            del os.environ["SHARDKEEP_MEMORY_BUDGET"]
