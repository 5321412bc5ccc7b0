"""Calls with a time limit, also where the callee never answers.

jaxlib waits for the coordination service without a time limit, which is forever if the process that runs it is
stopped. So helper threads make the calls, and a thread that gets no answer in time is abandoned.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_STEP = 0.5  # seconds: of the time in which this process itself was stopped, only this much counts as waiting

Value = TypeVar("Value")
_Answer = queue.SimpleQueue[tuple[Any, BaseException | None]]


class Unanswered(Exception):
    """No answer within the time limit. `seconds` is how long the call has been waiting."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:.0f} s")
        self.seconds = seconds


class Calls:
    """Makes calls on helper threads, each with a time limit.

    After a call has timed out, further calls fail immediately until that call is answered. There are no locks, so a
    signal handler may make calls while the thread it interrupted is making one.

    >>> calls = Calls("example")
    >>> calls(lambda: 1 + 1, 5)
    2
    >>> calls.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = queue.SimpleQueue()
        self._free: list[bool] = []  # one entry for each idle thread
        self._has_threads = False
        self._late: dict[_Answer, float] = {}  # calls that timed out, and when they began

    def __call__(self, call: Callable[[], Value], seconds: float, gives_up: bool = True) -> Value:
        """Return or raise what the call does; raise `Unanswered` after `seconds`.

        Args:
            call: What to run.
            seconds: The time limit.
            gives_up: After a timeout, let further calls fail immediately until this one is answered.
        """
        for late, since in list(self._late.items()):
            if late.empty():
                raise Unanswered(time.monotonic() - since)
        if not self._find_thread() and not self._has_threads:
            return call()
        answer: _Answer = queue.SimpleQueue()
        self._todo.put((call, answer))
        answered = self._wait(answer, seconds, gives_up)
        if answered is None:
            raise Unanswered(seconds)
        value, error = answered
        if error is not None:
            raise error
        return value

    def begin(self, call: Callable[[], object]) -> bool:
        """Make a call without waiting for it. Returns False if no thread can be started for it any more."""
        if not self._find_thread():
            return False
        self._todo.put((call, queue.SimpleQueue()))
        return True

    def _wait(self, answer: _Answer, seconds: float, gives_up: bool) -> tuple[Any, BaseException | None] | None:
        began, waited = time.monotonic(), 0.0
        while waited < seconds:
            step = min(_STEP, seconds - waited)
            with suppress(queue.Empty):
                return answer.get(timeout=step)
            waited += step
        if gives_up:
            self._late[answer] = began
        with suppress(queue.Empty):  # it may have arrived just now, before its thread could see that it was late
            answered = answer.get_nowait()
            self._late.pop(answer, None)
            return answered
        return None

    def _find_thread(self) -> bool:
        """Start a thread unless one is idle. While the interpreter exits none can be started: a busy one must do."""
        try:
            self._free.pop()
        except IndexError:
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except RuntimeError:
                return False
            self._has_threads = True
        return True

    def _work(self) -> None:
        while True:
            order = self._todo.get()
            if order is None:
                self._todo.put(None)  # so that the other threads end too
                return
            call, answer = order
            try:
                result: tuple[Any, BaseException | None] = (call(), None)
            except BaseException as error:  # noqa: BLE001  (raised again by the waiting caller)
                result = (None, error)
            self._free.append(True)  # before the answer: the next call may come immediately
            answer.put(result)
            self._late.pop(answer, None)
            del order, call, answer, result

    def close(self) -> None:
        """Let the threads end. No calls may be made afterwards."""
        self._todo.put(None)
