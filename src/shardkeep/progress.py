"""A progress bar for one save or load: bytes, GB/s and the time that remains."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

Progress = Callable[[int], None]

_WIDTH, _NARROWEST = 30, 5
_EVERY = 0.1  # seconds between two drawings
_NOT_SHOWN = (AttributeError, OSError, ValueError)  # there is no stderr, nobody reads it any more, or it is closed


class Bar:
    """Counts bytes and draws itself on stderr: over and over on a terminal, once at the end elsewhere.

    Where nothing can be drawn it just counts: nothing fails because nobody is looking.
    """

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, max(total, 1), 0
        self._started = time.perf_counter()
        self._drawn = 0.0
        self._length = 0  # of what is drawn
        self._lock = threading.Lock()
        self._live = False
        with suppress(*_NOT_SHOWN):
            self._live = sys.stderr.isatty()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.perf_counter()
            if self._live and now - self._drawn > _EVERY:
                self._drawn = now
                self._draw("\r" + self._line())

    def text(self, columns: int | None = None) -> str:
        """The bar as it stands, in so many columns: the bar gets shorter first, then the label loses its beginning."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        share = min(self._done / self._total, 1.0)
        left = (seconds / share - seconds) if share else 0.0
        rate = self._done / seconds / 1e9
        facts = f" {share:4.0%} {self._done / 1e6:,.1f} MB {rate:.2f} GB/s {left:.1f} s left"
        label, width = self._label, _WIDTH
        if columns is not None:
            width = max(min(_WIDTH, columns - len(label) - len(facts) - 1), _NARROWEST)
            room = max(columns - width - len(facts) - 1, 0)
            label = label if len(label) <= room else "…" + label[len(label) - room + 1 :]
        filled = int(share * width)
        text = f"{label} {'█' * filled}{'·' * (width - filled)}{facts}"
        return text if columns is None else text[:columns]

    def _line(self) -> str:
        """The bar for the terminal as wide as it is now, and blanks over what a longer one left there."""
        columns = None
        with suppress(*_NOT_SHOWN):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        text = self.text(columns if columns and columns > 0 else None)
        blanks, self._length = max(self._length - len(text), 0), len(text)
        return text + " " * blanks

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._draw(("\r" + self._line() if self._live else self.text()) + "\n")

    def _draw(self, text: str) -> None:
        with suppress(*_NOT_SHOWN):
            sys.stderr.write(text)
            sys.stderr.flush()
