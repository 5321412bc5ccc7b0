"""The progress bar: what it shows, where it shows it, and that showing it harms nothing."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.progress import Bar
from shardkeep.serialization import AsyncCheckpointManager


@contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """A terminal in the place of stderr; gives what has been written to it since the last time."""
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream, redirect_stderr(stream):
        yield lambda: os.read(ours, 1 << 16).decode()
    os.close(ours)


@contextmanager
def file(path: Path) -> Iterator[Callable[[], str]]:
    """A file in the place of stderr; gives its content."""
    with open(path, "w") as stream, redirect_stderr(stream):
        yield path.read_text


@pytest.mark.parametrize(
    ("done", "total", "share", "filled"),
    [(0, 100, "0%", 0), (50, 100, "50%", 15), (99, 100, "99%", 29), (100, 100, "100%", 30), (150, 100, "100%", 30)]
    + [(0, 0, "0%", 0), (8, 0, "100%", 30)],
)
def test_the_bar_shows_the_share_and_never_more_than_all(done: int, total: int, share: str, filled: int) -> None:
    bar = Bar("saving run", total)
    bar(done)
    text = bar.text()
    assert text.startswith("saving run " + "█" * filled + "·" * (30 - filled) + f" {share:>4} ")
    assert re.search(r" MB \d+\.\d\d GB/s \d+\.\d s left$", text)


@pytest.mark.parametrize("columns", [1, 20, 40, 60, 79, 100, 200])
def test_the_bar_fits_a_narrow_terminal(columns: int) -> None:
    bar = Bar("checking runs/experiment/step_100", 10**9)
    bar(5 * 10**8)
    text = bar.text(columns)
    assert len(text) <= columns
    if columns >= 60:
        assert "/step_100 " in text
        assert "█" in text
        assert re.search(r" 50% 500\.0 MB \d+\.\d\d GB/s \d+\.\d s left$", text)
    if columns == 200:
        assert text.startswith("checking runs/experiment/step_100 " + "█" * 15 + "·" * 15)


def test_a_shorter_line_covers_a_longer_one() -> None:
    with terminal() as seen:
        bar = Bar("x", 10**9)
        bar(1)  # takes very long, at that rate
        first = seen()
        bar(10**9 - 1)
        with bar:
            pass
        last = seen().rstrip("\r\n")
    assert len(last.lstrip("\r")) >= len(first.lstrip("\r"))


def test_bytes_are_shown_in_megabytes() -> None:
    bar = Bar("x", 10**10)
    bar(1_234_500_000)
    assert " 1,234.5 MB " in bar.text()


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
        with Bar("saving", 100) as bar:
            for _ in range(100):
                bar(1)
            assert content() == ""
        assert re.fullmatch(r"saving █{30} 100% [^\r\n]*\n", content())


def test_a_terminal_gets_one_line_drawn_over_and_over_but_not_for_every_call() -> None:
    with terminal() as written:
        with Bar("saving", 40) as bar:
            for _ in range(40):
                bar(1)
            drawn = written().split("\r")[1:]
        assert 1 <= len(drawn) < 20
        assert all(text.startswith("saving ") and "\n" not in text for text in drawn)
        assert re.fullmatch(r"\rsaving █{30} 100% [^\r\n]*\r\n", written())


def test_a_bar_that_is_left_by_an_error_shows_how_far_it_came_and_lets_the_error_through(tmp_path: Path) -> None:
    with file(tmp_path / "log") as content:
        with pytest.raises(ZeroDivisionError, match="division"), Bar("saving", 100) as bar:  # noqa: PT012
            bar(50)
            _ = 1 // 0
        assert " 50% " in content()


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
def test_a_bar_that_cannot_be_shown_fails_nothing(how: str, action: str, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(verbose=True)
    shardkeep.save(tmp_path / "old", {"w": np.ones(3)})
    with broken(how):
        if action == "load":
            assert manager.load(tmp_path / "old", None)[0]["w"].shape == (3,)
        else:
            getattr(manager, action)({"w": np.ones(3)}, tmp_path / "new")
            manager.close()
    assert action == "load" or shardkeep.load(tmp_path / "new")["w"].shape == (3,)


def test_a_terminal_that_goes_away_while_the_bar_is_drawn_fails_nothing() -> None:
    ours, theirs = os.openpty()
    stream = open(theirs, "w")  # noqa: SIM115
    with redirect_stderr(stream), Bar("saving", 40) as bar:
        bar(1)
        stream.close()
        bar._drawn = 0.0
        bar(20)
    assert " 52% " in bar.text()
    os.close(ours)
