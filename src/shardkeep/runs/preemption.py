"""Signals that announce the end of a job, such as SIGTERM, turned into requests to save and stop."""

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

from shardkeep.system import c_function

log = logging.getLogger("shardkeep")

REPEATS = 10.0  # seconds after the first signal in which further ones are ignored: launchers often send several
_FINAL = frozenset[str](("SIGKILL", "SIGSTOP"))  # by name, because not every system has them
_ROOM = 1024  # bytes, more than the `struct sigaction` of any platform


class Request(Protocol):
    """What a signal calls: must return at once, and take no lock that the interrupted code may hold."""

    def __call__(self, why: str, *, stop: bool) -> None: ...


class Signals:
    """Handlers that turn the first signal into a request to save and stop.

    A Python handler that was there before is called too. Further signals are ignored for 10 seconds. A later one is
    handled as if there were no run: SIGTERM then ends the program.

    Python delivers signals to the main thread only, and lets only that thread install handlers. On any other thread
    nothing is installed, and a warning says so.

    Args:
        signals: Names such as "SIGTERM", or numbers.
        request: Called with a reason and `stop=True`, inside the handler.

    Attributes:
        installed: Whether the handlers are there.

    >>> signals = Signals(["SIGUSR1"], lambda why, stop: print(why, stop))
    >>> signal.raise_signal(signal.SIGUSR1)
    signal SIGUSR1 True
    >>> signals.close()
    """

    def __init__(self, signals: Sequence[str | int], request: Request) -> None:
        numbers = parse_signals(signals)
        self._request = request
        self._process = os.getpid()
        self._first: float | None = None
        self._active = True
        self._earlier: dict[signal.Signals, Any] = {}
        self._actions: dict[signal.Signals, ctypes.Array[ctypes.c_char] | None] = {}
        self.installed = False
        if not numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "the run was not created on the main thread, so %s cannot be handled: save and stop with run.stop()",
                " and ".join(number.name for number in numbers),
            )
            return
        try:
            for number in numbers:
                self._actions[number] = _action_of(number)
                self._earlier[number] = signal.getsignal(number)
                signal.signal(number, self._handle)
            self.installed = True
        except BaseException:  # an interrupt: nobody has this object yet to close it
            self.close()
            raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        known = signal.Signals(number)
        if not self._active or os.getpid() != self._process:
            return self._pass_on(known, frame)
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._request(f"signal {known.name}", stop=True)
            earlier = self._earlier.get(known)
            if callable(earlier) and earlier is not signal.default_int_handler:
                earlier(number, frame)
        elif now - self._first >= REPEATS:
            self._pass_on(known, frame, ends=True)

    def _pass_on(self, number: signal.Signals, frame: FrameType | None, ends: bool = False) -> None:
        """Handle a signal as if there were no run. `ends`: one that was ignored then ends the program."""
        earlier = self._earlier.get(number)
        if callable(earlier):
            earlier(number, frame)
        elif ends or earlier != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Put back what handled the signals before, unless another handler was installed meanwhile.

        Off the main thread that is impossible: the handlers stay, and only pass signals on.
        """
        self._active = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number, earlier in tuple(self._earlier.items()):
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
                _restore_action(number, self._actions[number])
        self.installed = False


def parse_signals(signals: Any) -> list[signal.Signals]:
    """Signals by their names or numbers. Raises ValueError or TypeError for what is none, or cannot be handled.

    >>> parse_signals(["SIGTERM", 10])
    [<Signals.SIGTERM: 15>, <Signals.SIGUSR1: 10>]
    """
    if isinstance(signals, str) or not isinstance(signals, Sequence):
        raise TypeError(f'signals must be a tuple of names, as ("SIGTERM",), not {signals!r}')
    found: list[signal.Signals] = []
    for given in signals:
        try:
            number = signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
        except (KeyError, ValueError):
            raise ValueError(f'signals: {given!r} is not a signal; use names such as "SIGTERM" or "SIGUSR1"') from None
        if number.name in _FINAL:
            raise ValueError(f"signals: no program can handle {number.name}")
        found.append(number)
    return list(dict.fromkeys(found))


def _action_of(number: int) -> ctypes.Array[ctypes.c_char] | None:
    """What the system does on a signal. A handler in C, such as JAX's own, is unknown to Python."""
    sigaction, action = c_function("sigaction"), ctypes.create_string_buffer(_ROOM)
    return action if sigaction is not None and sigaction(number, None, action) == 0 else None


def _restore_action(number: int, action: ctypes.Array[ctypes.c_char] | None) -> None:
    if action is not None and (sigaction := c_function("sigaction")) is not None:
        sigaction(number, action, None)
