"""One process in its group: access to the coordination service, and this process's own heartbeat."""

import itertools
import json
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from shardkeep.config import PROCESS_SILENCE
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
_BEAT = 2.0  # seconds between two heartbeats: `PROCESS_SILENCE` is ten of them, and 1,000 processes send 500 a second
_LAST_WORDS = 2.0  # seconds: the time limit for final messages
_KEPT, _KEPT_SECONDS = 64, 5.0  # how many finished operations keep their keys, and how long, for late processes
_DAY = 86_400.0  # seconds of one wait for a key: each that times out costs memory until the key is set
ENDED, IDLE = "ended", "idle"  # the last heartbeats of a process that has exited, and of one that takes part in nothing
NUDGE = ""  # the value of a key that was set only to end a wait for it

Value = TypeVar("Value")
Record = dict[str, Any]  # an error as it is sent to other processes
Arrived = queue.SimpleQueue[tuple[str, str | Exception]]


class Participant(Protocol):
    """What a process takes part in together with others, until it has ended."""

    @property
    def ended(self) -> bool: ...


class Group:
    """This process as a member of its group: access to the service, the count of operations, the heartbeat."""

    def __init__(self, client: Any, index: int, size: int) -> None:
        self.client, self.index, self.size = client, index, size
        self.patience = PROCESS_SILENCE.default
        self.forked = False
        self._unsaid: deque[Callable[[], object]] = deque()  # requests to be made as soon as the service answers again
        self._calls, self._waits = Calls("shardkeep-calls"), Calls("shardkeep-waits")
        self._awaited: set[str] = set()  # keys that threads wait for inside the client
        self._numbers, self._signs = itertools.count(1), itertools.count(1)
        self._entered: dict[str, weakref.ref[Any]] = {}
        self._left: dict[str, float] = {}  # the keys of finished operations, and when they were seen to be finished
        self._takes_part: dict[str, weakref.ref[Participant]] = {}
        self._signing = threading.RLock()
        self._over = threading.Event()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._alive: threading.Thread | None = None

    def live(self) -> None:
        """Have the thread that sends heartbeats while this process takes part in anything, and pending requests."""
        if self._alive is None or not self._alive.is_alive():
            alive = threading.Thread(target=self._beat, name="shardkeep-alive", daemon=True)
            alive.start()  # a signal handler may have started one too; two are harmless
            self._alive = alive

    def next_keys(self) -> str:
        """The start of the keys of a new operation."""
        return f"{ROOT}/{next(self._numbers)}"

    def take_part(self, participant: Participant, keys: str) -> None:
        """Send heartbeats from now on until this has ended, or is garbage-collected."""
        self._takes_part[keys] = weakref.ref(participant)
        self._wake.put(None)
        self.live()

    def enter(self, operation: Participant, what: str, keys: str) -> None:
        """Tell the other processes that this one takes part in an operation."""
        self.take_part(operation, keys)
        if self.index == LEADER:
            self._entered[keys] = weakref.ref(operation)
        self.set(f"{keys}/here/{self.index}", json.dumps(what))
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
        record = json.loads(self.get(f"{keys}/abort") or "{}")
        return process in record.get("absent", ()) and record["what"] != what

    def _ask(self, call: Callable[[], Value], seconds: float | None = None) -> Value:
        """The answer of the service; `ProcessError` if there is none within the time limit."""
        self._refuse_in_child()
        try:
            with explained():
                return self._calls(call, seconds or self.patience, gives_up=seconds is None)
        except Unanswered as error:
            raise ProcessError(
                f"JAX's coordination service has not answered for {error.seconds:.0f} s: process {LEADER}, which "
                f"usually runs it, has died or is stopped ({PROCESS_SILENCE.variable} sets the time limit)"
            ) from error

    def _refuse_in_child(self) -> None:
        if self.forked:
            raise ProcessError("this process was forked from a member of the group")

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: set_key(self.client, key, value))

    def set_new(self, key: str, value: str, *, last: bool = False) -> bool:
        """Set a key unless it is set already; tells whether it was set now. `last`: do not wait long for an answer."""
        return self._ask(lambda: set_new_key(self.client, key, value), _LAST_WORDS if last else None)

    def post(self, key: str, value: str) -> None:
        """Answer those who `hear` a key, unless it was answered before."""
        self._ask(lambda: post(self.client, key, value))

    def get(self, key: str) -> str | None:
        return self._ask(lambda: get_key(self.client, key))

    def delete(self, directory: str) -> None:
        self._ask(lambda: delete_keys(self.client, directory))

    def list(self, directory: str) -> list[tuple[str, str]]:
        return self._ask(lambda: list_keys(self.client, directory))

    def wait_for(self, key: str) -> str | None:
        """The value of a key as soon as it is set; None after a day. Only for threads that have nothing to do."""
        with explained():
            return wait_for_key(self.client, key, _DAY)

    def expect(self, key: str, arrived: Arrived) -> bool:
        """Have a thread wait for a key, and put it into a queue with its value, or with the error.

        Nothing but the key ends the wait: see `release`. False if no thread can be started any more.
        """
        self._refuse_in_child()

        def wait() -> None:
            value: str | Exception | None = None
            try:
                while value is None:
                    value = wait_for_key(self.client, key, _DAY)
            except service_error() as error:
                value = error
            self._awaited.discard(key)
            arrived.put((key, value))

        self._awaited.add(key)
        if self._waits.begin(wait):
            return True
        self._awaited.discard(key)
        return False

    def release(self, keys: Iterable[str]) -> None:
        """End this process's waits for keys that no other process waits for."""
        if awaited := self._awaited.intersection(keys):
            self.say_later(partial(self._nudge, awaited))

    def _nudge(self, keys: Iterable[str]) -> None:
        for key in keys:
            set_new_key(self.client, key, NUDGE)

    def tell(self, request: Callable[[], object]) -> None:
        """Make a request that must be made, later if the service does not answer now. It may be made twice."""
        try:
            self._ask(request, _LAST_WORDS)
        except ProcessError:
            self.say_later(request)

    def say_later(self, request: Callable[[], object]) -> None:
        """Make a request in the background. This never waits, so a finalizer may call it."""
        self._unsaid.append(request)
        self._wake.put(None)

    def beats(self, of: Iterable[int]) -> dict[int, str]:
        """The last heartbeats of these processes, for those that have sent one."""
        wanted = list(of)
        if len(wanted) > 1:
            found = {int(key.rpartition("/")[2]): text for key, text in self.list(f"{ROOT}/alive/")}
            return {i: found[i] for i in wanted if i in found}
        signs = {i: self.get(f"{ROOT}/alive/{i}") for i in wanted}
        return {i: sign for i, sign in signs.items() if sign is not None}

    def _beat(self) -> None:
        """Send heartbeats and pending requests. Nothing waits for this thread, so its requests need no time limit.

        It sleeps, and sends nothing, while this process takes part in nothing.
        """
        rests, signed = True, 0.0
        while not self._over.is_set():
            interval = min(_BEAT, self.patience / 4)
            with suppress(service_error()):  # the other processes notice the missing heartbeat
                busy = self._is_busy()
                if busy if rests else time.monotonic() >= signed + interval:
                    signed, rests = time.monotonic(), False
                    self._sign(str(next(self._signs)) if busy else IDLE)
                    rests = not busy
                while self._unsaid:
                    self._unsaid[0]()
                    self._unsaid.popleft()
            due = interval if rests else max(signed + interval - time.monotonic(), 0)
            with suppress(queue.Empty):
                self._wake.get(timeout=None if rests and not self._unsaid else due)

    def _is_busy(self) -> bool:
        """Whether this process takes part in anything."""
        for keys, participant in list(self._takes_part.items()):
            one = participant()
            if one is not None and not one.ended:
                return True
            self._takes_part.pop(keys, None)
        return False

    def _sign(self, sign: str) -> None:
        with self._signing:
            if not self._over.is_set():
                set_key(self.client, f"{ROOT}/alive/{self.index}", sign)

    def close(self) -> None:
        """Stop the heartbeat and all calls."""
        self.fall_silent()
        self._calls.close()
        self._waits.close()

    def fall_silent(self) -> None:
        """Stop the heartbeat."""
        self._over.set()
        self._wake.put(None)

    def end(self) -> None:
        """Tell the other processes that this one has exited, and end its waits."""
        self.fall_silent()
        if self._signing.acquire(timeout=_LAST_WORDS):  # else the service does not answer
            try:
                self.tell(lambda: set_key(self.client, f"{ROOT}/alive/{self.index}", ENDED))
            finally:
                self._signing.release()
        with suppress(ProcessError):
            if awaited := tuple(self._awaited):
                self._ask(partial(self._nudge, awaited), _LAST_WORDS)
        self.settle()

    def settle(self) -> None:
        """Wait, not for long, until no thread is inside the client: none may return once the interpreter is gone."""
        until = time.monotonic() + _LAST_WORDS
        while self._awaited and time.monotonic() < until:
            time.sleep(0.005)


def post(client: Any, key: str, value: str) -> None:
    """Set the first of `key/0`, `key/1` … that is not set, unless one of them has a value: others are nudges."""
    number = 0
    while not set_new_key(client, f"{key}/{number}", value):
        if get_key(client, f"{key}/{number}") != NUDGE:
            return
        number += 1


@contextmanager
def explained() -> Generator[None]:
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
