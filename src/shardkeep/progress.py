"""A progress bar for one save or load: bytes, GB/s and the time that remains."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

Progress = Callable[[int], None]

_WIDTH = 30
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
                self._draw("\r" + self.text())

    def text(self) -> str:
        """The bar as it stands."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        share = min(self._done / self._total, 1.0)
        filled = int(share * _WIDTH)
        left = (seconds / share - seconds) if share else 0.0
        bar = "█" * filled + "·" * (_WIDTH - filled)
        rate = self._done / seconds / 1e9
        return f"{self._label} {bar} {share:4.0%} {self._done / 1e6:,.1f} MB {rate:.2f} GB/s {left:.1f} s left"

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._draw(("\r" if self._live else "") + self.text() + "\n")

    def _draw(self, text: str) -> None:
        with suppress(*_NOT_SHOWN):
            sys.stderr.write(text)
            sys.stderr.flush()
