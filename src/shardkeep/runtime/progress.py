"""A progress bar for one save or load: bytes, rate and remaining time."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias

Progress: TypeAlias = Callable[[int], None]
NO_BAR: AbstractContextManager[Progress] = nullcontext(lambda _: None)

DELAY = 0.5  # seconds before anything is shown; work that takes less shows nothing
_TINY = 1_000_000  # bytes; totals below this show nothing, however long they take
_WIDTH, _NARROWEST = 30, 5  # characters of the bar: as it is by default, and the least that shows anything
_REDRAW = {"terminal": 0.1, "notebook": 0.25}  # seconds between two redraws
_NOT_SHOWN = (AttributeError, OSError, ValueError)  # stderr is missing, closed, or a pipe without a reader


class Bar:
    """A context manager that counts bytes and shows the progress on stderr.

    In a terminal or a Jupyter notebook the bar is redrawn a few times a second. Elsewhere, for example in a log file,
    there is one line at the end. Nothing is shown for totals below 1 MB or for work that takes less than half a second.
    If stderr cannot be written to, the bar only counts; it never makes a save or load fail.

    Args:
        label: The text in front of the bar.
        total: The number of bytes to expect.
        delay: How many seconds must pass before anything is shown; None means `DELAY`.
        clock: Returns the current time in seconds.
    """

    def __init__(
        self, label: str, total: int, *, delay: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._label, self._total, self._done = label, max(total, 1), 0
        self._delay = DELAY if delay is None else delay
        self._shown = total >= _TINY
        self._clock = clock
        self._started = clock()
        self._drawn: float | None = None  # when the bar was last drawn
        self._length = 0  # of the line that is on the screen
        self._lock = threading.Lock()
        self._redraw = _REDRAW.get(_kind_of(sys.stderr))

    def __call__(self, nbytes: int) -> None:
        """Count bytes; redraw the bar if it is due."""
        with self._lock:
            self._done += nbytes
            if not self._shown or self._redraw is None:
                return
            now = self._clock()
            if now - self._started >= self._delay and (self._drawn is None or now - self._drawn >= self._redraw):
                self._drawn = now
                self._write("\r" + self._line(self.text))

    def text(self, columns: int | None = None) -> str:
        """The bar while the work is running, at most `columns` wide.

        Args:
            columns: The width; None means unlimited. The bar is shortened first, then the start of the label.
        """
        seconds = max(self._clock() - self._started, 1e-9)
        share = min(self._done / self._total, 1.0)
        facts = f" {share:4.0%} {self._done / 1e6:,.1f} MB {_rate(self._done / seconds)}"
        if 0 < share < 1:
            facts += f" {max(seconds / share - seconds, 0.1):,.1f} s left"
        return self._fit(share, facts, columns)

    def final_text(self, columns: int | None = None) -> str:
        """The bar once the work has ended: the total time and the rate instead of the remaining time."""
        seconds = max(self._clock() - self._started, 1e-9)
        share = min(self._done / self._total, 1.0)
        facts = f" {share:4.0%} {self._done / 1e6:,.1f} MB in {seconds:,.1f} s ({_rate(self._done / seconds)})"
        return self._fit(share, facts, columns)

    def _fit(self, share: float, facts: str, columns: int | None) -> str:
        label, width = self._label, _WIDTH
        if columns is not None:
            width = max(min(_WIDTH, columns - len(label) - len(facts) - 1), _NARROWEST)
            room = max(columns - width - len(facts) - 1, 0)
            label = label if len(label) <= room else "…" + label[len(label) - room + 1 :]
        filled = int(share * width)
        text = f"{label} {'█' * filled}{'·' * (width - filled)}{facts}"
        return text if columns is None else text[:columns]

    def _line(self, text_for: Callable[[int | None], str]) -> str:
        """A text that fits the terminal, padded with blanks to cover the previous line."""
        columns = None
        with suppress(*_NOT_SHOWN):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        text = text_for(columns if columns and columns > 0 else None)
        blanks, self._length = max(self._length - len(text), 0), len(text)
        return text + " " * blanks

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and (self._drawn is not None or self._clock() - self._started >= self._delay):
            live = self._redraw is not None
            self._write(("\r" + self._line(self.final_text) if live else self.final_text()) + "\n")

    def _write(self, text: str) -> None:
        with suppress(*_NOT_SHOWN):
            sys.stderr.write(text)
            sys.stderr.flush()


def _rate(bytes_per_second: float) -> str:
    """
    >>> _rate(2.345e9), _rate(1.25e7)
    ('2.35 GB/s', '12.5 MB/s')
    """
    if bytes_per_second >= 1e8:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"


def _kind_of(stream: Any) -> str:
    """ "terminal", "notebook" (the stream of a Jupyter kernel) or "other"."""
    kernel = sys.modules.get("ipykernel.iostream")
    if kernel is not None and isinstance(stream, kernel.OutStream):
        return "notebook"
    with suppress(*_NOT_SHOWN):
        return "terminal" if stream.isatty() and os.environ.get("TERM") != "dumb" else "other"
    return "other"
