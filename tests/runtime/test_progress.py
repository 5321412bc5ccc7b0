"""The progress bar: what it shows, where it shows it, and that showing it harms nothing."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jupyter_client.blocking.client import BlockingKernelClient

import shardkeep
from shardkeep.runtime import progress
from shardkeep.runtime.progress import Bar
from shardkeep.serialization import AsyncCheckpointManager


@contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """A terminal in the place of stderr; gives what has been written to it since the last time."""
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream, redirect_stderr(stream):
        yield lambda: _read_all(ours, theirs)
    os.close(ours)


def _read_all(ours: int, theirs: int) -> str:
    """What has been written to a terminal until now. It arrives in pieces, so a character is sent behind it."""
    os.write(theirs, b"\0")
    data = b""
    while not data.endswith(b"\0"):
        data += os.read(ours, 1 << 16)
    return data[:-1].decode()


@contextmanager
def file(path: Path) -> Iterator[Callable[[], str]]:
    """A file in the place of stderr; gives its content."""
    with open(path, "w") as stream, redirect_stderr(stream):
        yield path.read_text


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def bar_of(total: int, label: str = "saving run") -> tuple[Bar, Clock]:
    clock = Clock()
    return Bar(label, total, clock=clock), clock


MB = 10**6


@pytest.mark.parametrize(
    ("done", "total", "share", "filled"),
    [(0, 100, "0%", 0), (50, 100, "50%", 15), (99, 100, "99%", 29), (100, 100, "100%", 30), (150, 100, "100%", 30)]
    + [(0, 0, "0%", 0), (8, 0, "100%", 30)],
)
def test_the_bar_shows_the_share_and_never_more_than_all(done: int, total: int, share: str, filled: int) -> None:
    bar, clock = bar_of(total)
    clock.now += 2
    bar(done)
    start = "saving run " + "█" * filled + "·" * (30 - filled) + f" {share:>4} "
    assert bar.text().startswith(start)
    assert bar.final_text().startswith(start)


def test_while_it_runs_the_bar_shows_the_rate_and_the_time_that_is_left() -> None:
    bar, clock = bar_of(400 * MB)
    clock.now += 2
    bar(100 * MB)
    assert bar.text().endswith(" 25% 100.0 MB 50.0 MB/s 6.0 s left")
    clock.now += 0.5
    bar(299_999_000)
    assert bar.text().endswith(" 400.0 MB 0.16 GB/s 0.1 s left")


def test_at_the_end_it_shows_the_total_time_and_the_rate_and_never_what_is_left() -> None:
    bar, clock = bar_of(3000 * MB)
    clock.now += 2
    bar(3000 * MB)
    assert bar.text().endswith(" 100% 3,000.0 MB 1.50 GB/s")
    clock.now += 1  # to make it durable
    assert bar.final_text().endswith(" 100% 3,000.0 MB in 3.0 s (1.00 GB/s)")


@pytest.mark.parametrize("columns", [1, 20, 40, 60, 79, 100, 200])
def test_the_bar_fits_a_narrow_terminal(columns: int) -> None:
    bar, clock = bar_of(10**9, "checking runs/experiment/step_100")
    clock.now += 1
    bar(5 * 10**8)
    text = bar.text(columns)
    assert len(text) <= columns
    assert len(bar.final_text(columns)) <= columns
    if columns >= 60:
        assert "/step_100 " in text
        assert "█" in text
        assert text.endswith(" 50% 500.0 MB 0.50 GB/s 1.0 s left")
    if columns == 200:
        assert text.startswith("checking runs/experiment/step_100 " + "█" * 15 + "·" * 15)


def test_a_shorter_line_covers_a_longer_one() -> None:
    with terminal() as seen:
        bar, clock = bar_of(10**9, "x")
        clock.now += 1000
        bar(1)  # takes very long, at that rate
        first = seen()
        clock.now += 1
        bar(10**9 - 1)
        last = seen()
    assert len(last.lstrip("\r")) >= len(first.lstrip("\r"))


def test_bytes_told_by_several_threads_are_all_counted() -> None:
    bar = Bar("x", 80_000)

    def tell() -> None:
        for _ in range(10_000):
            bar(1)

    threads = [threading.Thread(target=tell) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert " 100% 0.1 MB" in bar.text()


def test_a_file_gets_one_line_at_the_end(tmp_path: Path) -> None:
    with file(tmp_path / "log") as content:
        bar, clock = bar_of(200 * MB, "saving")
        with bar:
            for _ in range(200):
                clock.now += 0.005
                bar(MB)
            assert content() == ""
        assert re.fullmatch(r"saving █{30} 100% 200\.0 MB in 1\.0 s \(0\.20 GB/s\)\n", content())


def test_a_terminal_gets_one_line_that_is_redrawn_ten_times_a_second_at_most() -> None:
    with terminal() as written:
        bar, clock = bar_of(400 * MB, "saving")
        with bar:
            for _ in range(400):
                clock.now += 0.005
                bar(MB)
            drawn = written().split("\r")[1:]
        assert 10 <= len(drawn) <= 16  # of two seconds, the first half of one is not shown
        assert all(text.startswith("saving ") and "\n" not in text for text in drawn)
        assert re.fullmatch(r"\rsaving █{30} 100% 400\.0 MB in 2\.0 s \(0\.20 GB/s\) *\r\n", written())


@contextmanager
def place(where: str, path: Path) -> Iterator[Callable[[], str]]:
    if where == "file":
        with file(path) as content:
            yield content
        return
    with terminal() as seen:

        def all_of_it() -> str:
            sys.stderr.write("end")  # so that there is something to read
            sys.stderr.flush()
            return seen().removesuffix("end")

        yield all_of_it


@pytest.mark.parametrize("where", ["file", "terminal"])
def test_nothing_is_shown_for_work_under_half_a_second(where: str, tmp_path: Path) -> None:
    with place(where, tmp_path / "log") as content:
        bar, clock = bar_of(10**9)
        with bar:
            for _ in range(49):
                clock.now += 0.01
                bar(10**7)
        assert content() == ""


@pytest.mark.parametrize("where", ["file", "terminal"])
def test_nothing_is_shown_for_tiny_sizes_however_long_they_take(where: str, tmp_path: Path) -> None:
    with place(where, tmp_path / "log") as content:
        bar, clock = bar_of(16_000)
        with bar:
            clock.now += 60
            bar(16_000)
        assert content() == ""


def test_a_dumb_terminal_gets_one_line_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with place("terminal", Path()) as content:
        bar, clock = bar_of(10**9)
        with bar:
            clock.now += 2
            bar(10**9)
        assert content().count("saving") == 1


def test_a_bar_that_is_left_by_an_error_shows_how_far_it_came_and_lets_the_error_through(tmp_path: Path) -> None:
    with file(tmp_path / "log") as content:
        bar, clock = bar_of(100 * MB)
        with pytest.raises(ZeroDivisionError, match="division"), bar:  # noqa: PT012
            clock.now += 2
            bar(50 * MB)
            _ = 1 // 0
        assert content().endswith(" 50% 50.0 MB in 2.0 s (25.0 MB/s)\n")


@contextmanager
def kernel(room: Path) -> Iterator[BlockingKernelClient]:
    """A real Jupyter kernel, as a notebook has it."""
    own = {"IPYTHONDIR": str(room), "JUPYTER_PLATFORM_DIRS": "1", "JAX_PLATFORMS": "cpu"}
    connection = room / "kernel.json"
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", str(connection)]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env={**os.environ, **own}, cwd=room, **quiet) as process:
        client = BlockingKernelClient()
        try:
            while not (connection.exists() and connection.read_text().rstrip().endswith("}")):
                assert process.poll() is None
                time.sleep(0.02)
            client.load_connection_file(str(connection))
            client.start_channels()
            client.wait_for_ready(timeout=60)
            yield client
        finally:
            client.stop_channels()
            process.kill()


def shown(client: BlockingKernelClient, until: Callable[[Any], object]) -> str:
    """What a notebook shows of stderr until a message comes; an error of the cell fails the test."""
    text = ""
    while True:
        message = client.get_iopub_msg(timeout=60)
        content = message["content"]
        assert message["msg_type"] != "error", content
        if message["msg_type"] == "stream" and content["name"] == "stderr":
            text += content["text"]
        if until(message):
            return text


def ended(message: Any) -> bool:
    return message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"


def test_a_notebook_shows_the_bar_while_the_cell_is_still_running(tmp_path: Path) -> None:
    cell = """
from shardkeep.runtime.progress import Bar
now = 0.0
with Bar("saving run", 10**9, clock=lambda: now) as bar:
    bar(10**8)  # at once, so nothing is shown
    for _ in range(40):
        now += 0.0625
        bar(10**7)
    input("go on?")  # the cell cannot end before it is answered
    now += 1
    bar(5 * 10**8)
"""
    with kernel(tmp_path) as client:
        client.execute(cell, allow_stdin=True)
        question = client.get_stdin_msg(timeout=60)
        assert question["content"]["prompt"] == "go on?"
        text = shown(client, lambda message: " 50% " in str(message["content"].get("text")))
        assert text.startswith("\rsaving run ")
        assert text.count("\r") == 9  # of two seconds and a half, four times each, but not in the first half of one
        client.input("")
        last = shown(client, ended).rpartition("\r")[2]
        assert re.fullmatch(r"saving run █{30} 100% 1,000\.0 MB in 3\.5 s \(0\.29 GB/s\) *\n", last)


def test_a_save_in_the_background_shows_its_bar_in_the_notebook(tmp_path: Path) -> None:
    cell = f"""
import numpy as np, shardkeep
from shardkeep.runtime import progress
progress.DELAY = 0
tree = {{str(i): np.ones(1 << 20) for i in range(8)}}
shardkeep.save({str(tmp_path / "run")!r}, tree, progress=True)
shardkeep.save_async({str(tmp_path / "run")!r}, tree, overwrite=True, progress=True).wait()
shardkeep.load({str(tmp_path / "run")!r}, progress=True)
"""
    with kernel(tmp_path) as client:
        client.execute(cell)
        text = shown(client, ended)
    finals = [line.rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
    assert [line.split()[0] for line in finals] == ["saving", "saving", "loading"]
    assert all(re.search(r" 100% [\d.]+ MB in \d+\.\d s \(\d+\.\d+ .B/s\) *$", line) for line in finals)
    assert text.count("\r") > 3


def test_a_real_clock_is_the_default(tmp_path: Path) -> None:
    with file(tmp_path / "log") as content:
        with Bar("saving", 10**7, delay=0.05) as bar:
            time.sleep(0.06)
            bar(10**7)
        assert re.fullmatch(r"saving █{30} 100% 10\.0 MB in \d+\.\d s \([\d.]+ .B/s\)\n", content())


@contextmanager
def broken(how: str) -> Iterator[None]:
    """A stderr that cannot be written to: `… 2>&1 | head`, a log that was closed, a program without any."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w")  # noqa: SIM115
    if how == "it is closed":
        stream.close()
    try:
        with redirect_stderr(None if how == "there is none" else stream):
            yield
    finally:
        with suppress(BrokenPipeError):
            stream.close()


@pytest.mark.parametrize("action", ["save", "save_async", "load"])
@pytest.mark.parametrize("how", ["nobody reads it", "it is closed", "there is none"])
def test_a_bar_that_cannot_be_shown_fails_nothing(
    how: str, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 0)
    manager = AsyncCheckpointManager(verbose=True)
    large = 1 << 18
    shardkeep.save(tmp_path / "old", {"w": np.ones(large)})
    with broken(how):
        if action == "load":
            assert manager.load(tmp_path / "old", None)[0]["w"].shape == (large,)
        else:
            getattr(manager, action)({"w": np.ones(large)}, tmp_path / "new")
            manager.close()
    assert action == "load" or shardkeep.load(tmp_path / "new")["w"].shape == (large,)


def test_a_terminal_that_goes_away_while_the_bar_is_drawn_fails_nothing() -> None:
    ours, theirs = os.openpty()
    stream = open(theirs, "w")  # noqa: SIM115
    clock = Clock()
    with redirect_stderr(stream), Bar("saving", 40 * MB, clock=clock) as bar:
        clock.now += 1
        bar(MB)
        stream.close()
        clock.now += 1
        bar(20 * MB)
    assert " 52% " in bar.text()
    os.close(ours)
