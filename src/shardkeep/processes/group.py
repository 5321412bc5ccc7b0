"""One process in its group: access to the coordination service, its own heartbeat, and those of the others."""

import itertools
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from shardkeep.config import PROCESS_DEADLINE, PROCESS_SILENCE
from shardkeep.errors import ProcessError
from shardkeep.jaxapi import (
    delete_keys,
    get_key,
    list_keys,
    service_error,
    set_key,
    set_new_key,
    wait_for_key,
)
from shardkeep.runtime.calls import Calls, Unanswered

LEADER = 0  # the index of the process that decides and commits
ROOT = "shardkeep"  # the start of all keys
_BEAT = 1.0  # seconds between two heartbeats: `PROCESS_SILENCE` is twenty of them
_LAST_WORDS = 2.0  # seconds: the time limit for final messages
_KEPT, _KEPT_SECONDS = 64, 5.0  # how many finished operations keep their keys, and how long, for late processes
_ENDED = "ended"

Value = TypeVar("Value")


class Group:
    """This process as a member of its group: access to the service, the count of operations, the heartbeat."""

    def __init__(self, client: Any, index: int, size: int) -> None:
        self.client, self.index, self.size = client, index, size
        self.patience = PROCESS_SILENCE.default
        self.forked = False
        self.unsaid: deque[tuple[str, str]] = deque()  # messages to be sent as soon as the service answers again
        self._calls = Calls("shardkeep-calls")
        self._numbers, self._signs = itertools.count(1), itertools.count(1)
        self._entered: dict[str, weakref.ref[Any]] = {}
        self._left: dict[str, float] = {}  # the keys of finished operations, and when they were seen to be finished
        self._signing = threading.RLock()
        self._over = threading.Event()
        self._alive: threading.Thread | None = None

    def live(self) -> None:
        """Send heartbeats from now on."""
        if self._alive is None or not self._alive.is_alive():
            alive = threading.Thread(target=self._beat, name="shardkeep-alive", daemon=True)
            alive.start()  # a signal handler may have started one too; two are harmless
            self._alive = alive

    def next_keys(self) -> str:
        """The start of the keys of a new operation."""
        return f"{ROOT}/{next(self._numbers)}"

    def enter(self, operation: object, what: str, keys: str) -> None:
        """Tell the other processes that this one takes part."""
        if self.index != LEADER:
            return self.set(f"{keys}/member/{self.index}/here", json.dumps(what))
        self._entered[keys] = weakref.ref(operation)
        self.set(f"{keys}/leader/here", json.dumps(what))
        self._forget()

    def _forget(self) -> None:
        """Delete the keys of finished operations, except for the last ones: other processes may still read them."""
        now = time.monotonic()
        for keys, operation in list(self._entered.items()):
            if operation() is None:
                self._left.setdefault(keys, now)
                self._entered.pop(keys, None)
        for keys, since in list(self._left.items())[:-_KEPT]:
            if now - since > _KEPT_SECONDS:
                self._left.pop(keys, None)
                with suppress(ProcessError):
                    self.delete(f"{keys}/")

    def was_given_up(self, keys: str, process: int, what: str) -> bool:
        """Whether the others have given up on an operation of this number because this process never joined it."""
        said = dict(self.list(f"{keys}/leader/"))
        record = json.loads(said.get(f"{keys}/leader/abort", "{}"))
        return process in record.get("absent", ()) and record["what"] != what

    def _ask(self, call: Callable[[], Value], seconds: float | None = None) -> Value:
        """The answer of the service; `ProcessError` if there is none within the time limit."""
        if self.forked:
            raise ProcessError("this process was forked from a member of the group")
        try:
            with _explained():
                return self._calls(call, seconds or self.patience, gives_up=seconds is None)
        except Unanswered as error:
            raise ProcessError(
                f"JAX's coordination service has not answered for {error.seconds:.0f} s: process {LEADER}, which "
                f"usually runs it, has died or is stopped ({PROCESS_SILENCE.variable} sets the time limit)"
            ) from error

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: set_key(self.client, key, value))

    def set_new(self, key: str, value: str, *, last: bool = False) -> bool:
        """Set a key unless it is set already; tells whether it was set now. `last`: do not wait long for an answer."""
        return self._ask(lambda: set_new_key(self.client, key, value), _LAST_WORDS if last else None)

    def wait_for(self, key: str, seconds: float) -> str | None:
        """The value of a key as soon as it is set; None after that time. Only for threads that have nothing to do."""
        with _explained():
            return wait_for_key(self.client, key, seconds)

    def delete(self, directory: str) -> None:
        self._ask(lambda: delete_keys(self.client, directory))

    def list(self, directory: str) -> list[tuple[str, str]]:
        return self._ask(lambda: list_keys(self.client, directory))

    def tell(self, key: str, value: str) -> None:
        """Set a key that must be set, later if the service does not answer now."""
        try:
            self._ask(lambda: set_key(self.client, key, value), _LAST_WORDS)
        except ProcessError:
            self.unsaid.append((key, value))

    def beats(self, of: Iterable[int]) -> dict[int, str]:
        """The last heartbeats of these processes, for those that have sent one."""
        wanted = list(of)
        if len(wanted) > 1:
            found = {int(key.rpartition("/")[2]): text for key, text in self.list(f"{ROOT}/alive/")}
            return {i: found[i] for i in wanted if i in found}
        signs = {i: self._ask(lambda i=i: get_key(self.client, f"{ROOT}/alive/{i}")) for i in wanted}
        return {i: sign for i, sign in signs.items() if sign is not None}

    def _beat(self) -> None:
        """Send heartbeats and pending messages. Nothing waits for this thread, so its calls need no time limit."""
        while not self._over.is_set():
            with suppress(service_error()):  # the other processes notice the missing heartbeat
                with self._signing:
                    if not self._over.is_set():
                        self._say(f"{ROOT}/alive/{self.index}", str(next(self._signs)))
                while self.unsaid:
                    self._say(*self.unsaid[0])
                    self.unsaid.popleft()
            self._over.wait(min(_BEAT, self.patience / 4))

    def _say(self, key: str, value: str) -> None:
        set_key(self.client, key, value)

    def close(self) -> None:
        """Stop the heartbeat and all calls."""
        self._over.set()
        self._calls.close()

    def end(self) -> None:
        """Tell the other processes that this one has exited."""
        self._over.set()
        if self._signing.acquire(timeout=_LAST_WORDS):  # else the service does not answer
            try:
                self.tell(f"{ROOT}/alive/{self.index}", _ENDED)
            finally:
                self._signing.release()


class Watch:
    """Waits for other processes as long as they send heartbeats."""

    def __init__(self, group: Group, what: str, silence: float, deadline: float) -> None:
        self._group, self._what, self._silence, self._deadline = group, what, silence, deadline
        self._looked = time.monotonic()
        self._waited = 0.0
        self._seen: dict[int, tuple[str | None, float]] = {}
        self._pause = 0.001

    def look(self, missing: list[int], begun: set[int]) -> ProcessError | None:
        """Wait a little. Returns the error to raise if there is no point in waiting for the missing processes."""
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, 0.05)
        now = time.monotonic()
        if now - self._looked < min(_BEAT, self._silence / 4):
            return None
        # Time in which this process itself was stopped does not count: the others may have been stopped too.
        self._waited += min(now - self._looked, self._silence / 4)
        self._looked = now
        with doing(self._what):
            beats = self._group.beats(missing)
        for process in missing:
            beat = beats.get(process)
            if beat is None and process not in begun:
                continue
            if process not in self._seen or self._seen[process][0] != beat:
                self._seen[process] = (beat, self._waited)
            if beat == _ENDED:
                return _lost(process, self._what, f"process {process} has exited")
            if self._waited - self._seen[process][1] > self._silence:
                return _lost(process, self._what, _silent(process, self._silence))
        absent = [i for i in missing if i not in begun]
        if absent and self._waited > self._deadline:
            return _absent(absent, self._what, self._deadline)
        return None


def _silent(process: int, seconds: float) -> str:
    return (
        f"process {process} has sent no heartbeat for {seconds:g} s: it has died, is stopped, or has not released "
        f"the GIL, as in a long call into C ({PROCESS_SILENCE.variable} sets the time limit)"
    )


def _lost(process: int, what: str, why: str) -> ProcessError:
    error = ProcessError(f"{what}: {why}")
    error.record = {"process": process, "kind": "ProcessError", "message": str(error), "lost": True}
    return error


def _absent(processes: list[int], what: str, deadline: float) -> ProcessError:
    names = ", ".join(map(str, processes))
    error = ProcessError(
        f"{what}: process{'es' if len(processes) > 1 else ''} {names} did not make this call within {deadline:g} s. "
        f"Every process must make it, not only process {LEADER} ({PROCESS_DEADLINE.variable} sets the time limit)"
    )
    error.record = {
        "process": processes[0],
        "kind": "ProcessError",
        "message": str(error),
        "absent": processes,
        "lost": True,
    }
    return error


@contextmanager
def _explained() -> Generator[None]:
    """What JAX raises if the service is gone, as a `ProcessError`."""
    try:
        yield
    except service_error() as error:
        raise ProcessError(
            f"JAX's coordination service does not answer; process {LEADER} may have exited ({error})"
        ) from error


@contextmanager
def doing(what: str) -> Generator[None]:
    """Prefix errors of the coordination service with what was being done."""
    try:
        yield
    except ProcessError as error:
        raise ProcessError(f"{what}: {error}") from error.__cause__
