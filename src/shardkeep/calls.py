"""Calls that end in time, whatever becomes of the one who is asked.

jaxlib waits for the coordination service for as long as it takes, which is for ever if the process that runs it is
stopped. So other threads make the calls, and a thread that gets no answer in time is left waiting for it.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_STEP = 0.5  # seconds: if this process itself was stopped meanwhile, that much of it counts as waiting

Value = TypeVar("Value")
_Answer = queue.SimpleQueue[tuple[Any, BaseException | None]]


class Unanswered(Exception):
    """No answer came in time; `seconds`: for how long there has been none."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:.0f} s")
        self.seconds = seconds


class Calls:
    """Makes calls on threads of its own, and waits for each only so long.

    After one that was given up, further calls fail at once, until it gets its answer after all. There are no locks: a
    signal handler may make calls while the thread it interrupted makes one.

    >>> calls = Calls("example")
    >>> calls(lambda: 1 + 1, 5)
    2
    >>> calls.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = queue.SimpleQueue()
        self._free: list[bool] = []  # an entry for each thread that waits for work
        self._has_threads = False
        self._late: dict[_Answer, float] = {}  # given up, and since when they have been waiting

    def __call__(self, call: Callable[[], Value], seconds: float, gives_up: bool = True) -> Value:
        """What the call returns or raises; `Unanswered` after `seconds`.

        `gives_up`: take that as a sign that nothing else will be answered either.
        """
        for late, since in list(self._late.items()):
            if late.empty():
                raise Unanswered(time.monotonic() - since)
        if not self._find_thread():
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

    def _wait(self, answer: _Answer, seconds: float, gives_up: bool) -> tuple[Any, BaseException | None] | None:
        began, waited = time.monotonic(), 0.0
        while waited < seconds:
            step = min(_STEP, seconds - waited)
            with suppress(queue.Empty):
                return answer.get(timeout=step)
            waited += step
        if gives_up:
            self._late[answer] = began
        with suppress(queue.Empty):  # it may have come just now, and its thread not have seen that it was late
            answered = answer.get_nowait()
            self._late.pop(answer, None)
            return answered
        return None

    def _find_thread(self) -> bool:
        """See to it that a thread is there for one call more; at the end of the program one of the others must do."""
        try:
            self._free.pop()
        except IndexError:
            with suppress(RuntimeError):
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._has_threads = True
        return self._has_threads

    def _work(self) -> None:
        while True:
            order = self._todo.get()
            if order is None:
                self._todo.put(None)  # for the other threads
                return
            call, answer = order
            try:
                result: tuple[Any, BaseException | None] = (call(), None)
            except BaseException as error:  # noqa: BLE001  (it is raised by the one who waits)
                result = (None, error)
            self._free.append(True)  # before the answer: the next call may come at once
            answer.put(result)
            self._late.pop(answer, None)
            del order, call, answer, result

    def close(self) -> None:
        """Let the threads end; no call may be made any more."""
        self._todo.put(None)
