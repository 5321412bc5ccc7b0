"""Parts of a sweep on both cores: each in a process of its own, so that one that dies is a finding and not the end."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

CORES = 2


class Hang(BaseException):
    """An action took longer than anyone would wait for it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """`Hang` in the main thread, if what is inside takes longer.

    It rings again until it is heard: an exception in a callback of the collector is only reported, and its report reads
    source files.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"still running after {seconds:g} s")

    def report(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, Hang):
            report_before(unraisable)

    report_before, sys.unraisablehook = sys.unraisablehook, report
    before = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = report_before


def spread(
    function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], seconds: float = 900, at_once: int = CORES
) -> list[Any]:
    """What the function gives for each job, each in a fresh process, so many at a time.

    A job whose process dies or does not end in time gives an `Exception` that says so.
    """
    found: dict[int, Any] = {}
    waiting = list(enumerate(jobs))
    running: dict[Any, tuple[int, Any, float]] = {}
    context = get_context("spawn")
    while waiting or running:
        while waiting and len(running) < at_once:
            number, job = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, function, job))
            with environment():
                process.start()
            theirs.close()
            running[ours] = (number, process, time.monotonic() + seconds)
        for ready in wait(list(running), timeout=1):
            number, process, _ = running.pop(ready)
            found[number] = _answer(ready, process)
        for late in [c for c, (_, _, end) in running.items() if time.monotonic() > end]:
            number, process, _ = running.pop(late)
            process.kill()
            found[number] = Exception(f"{function.__name__}{jobs[number]} was still running after {seconds:g} s")
    return [found[number] for number in range(len(jobs))]


@contextmanager
def environment() -> Iterator[None]:
    """Processes begin with eight CPU devices, like every test."""
    before = dict(os.environ)
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "OPENBLAS_NUM_THREADS": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def _answer(pipe: Any, process: Any) -> Any:
    try:
        answer = pipe.recv()
    except EOFError:
        answer = None
    process.join()
    if process.exitcode:
        return Exception(f"a process ended with {process.exitcode} (below zero: a signal)")
    return answer


def _run(pipe: Connection, function: Callable[..., Any], job: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(*job))
    except Exception as error:  # noqa: BLE001  (all of it is told)
        pipe.send(Exception(f"{type(error).__name__}: {error}"))
