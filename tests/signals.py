"""Signals as a program has them that was started from a terminal, whatever the test run inherited.

A job that a script starts with `&` or with `nohup` ignores SIGINT, and so do its children; a mask of blocked signals is
inherited in the same way. A program that is sent signals by a test calls `usual_signals` first.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def usual_signals() -> None:
    """Ctrl-C raises KeyboardInterrupt, SIGTERM ends the program, and no signal is blocked."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def die_at_change(number: int, path: str) -> None:
    """Let this process be killed when it opens, renames, makes or removes something below `path`, after that many."""
    left = number

    def strike(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and path in str(arguments[0]):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(strike)


@contextmanager
def usual_signals_meanwhile() -> Iterator[None]:
    """The same in the test itself; afterwards as before."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    usual_signals()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)


START = "from signals import usual_signals; usual_signals()\n"  # how such a program begins, with tests/ in its path
