"""A few points of the part `interrupts`: exceptions, handlers and forks at lines of every kind of call."""

import contextlib
import sys

import pytest

from faults import interrupts, runs
from faults.interrupts import CALLS
from faults.tracing import Point, cannot_raise


@pytest.mark.parametrize("call", CALLS)
def test_an_exception_at_any_line_leaves_nothing_behind(call: str) -> None:
    points = interrupts._points(call)
    assert len(points) > 300
    result = interrupts._sweep("", "", points[:: len(points) // 24])
    assert result.violations == ()
    assert result.points >= 24


def test_an_exception_at_any_line_of_a_run_leaves_it_in_order() -> None:
    points = [point for call in runs.CALLS for point in interrupts._points(call)]
    assert len(points) > 1000
    result = interrupts._sweep("", "", points[:: len(points) // 60])
    assert result.violations == ()
    assert result.points >= 60


@pytest.mark.parametrize("does", ["other", "same", "fork"])
def test_a_save_or_a_fork_at_any_line_of_a_save(does: str) -> None:
    points = [Point(p.call, p.file, p.line, p.thread, p.nth, does) for p in interrupts._callers()]
    result = interrupts._sweep("", "", points[:: len(points) // 16])
    assert result.violations == ()


def test_storms_of_ctrl_c() -> None:
    assert interrupts._storm(2).violations == ()


def test_the_lines_where_python_cannot_raise_are_left_out() -> None:
    """The end of a `with` block and a `try` are none of the points, what is inside them is."""
    seen: list[bool] = []

    def traced() -> None:
        with contextlib.suppress(KeyError):
            seen.copy()
        try:
            seen.copy()
        finally:
            seen.copy()

    def trace(frame, event, _):  # type: ignore[no-untyped-def]
        if frame.f_code is traced.__code__ and event == "line":
            seen.append(cannot_raise(frame))
        return trace

    sys.settrace(trace)
    try:
        traced()
    finally:
        sys.settrace(None)
    assert seen == [False, False, True, True, False, False]
