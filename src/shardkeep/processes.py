"""The JAX processes that save or load together, and how they agree.

All of it is keys and values on the coordination service that JAX already runs: no device takes part, so a save in the
background never meddles with the collectives of training. Process 0 is the leader: the others tell it their part,
it decides, and they read its answer. Whoever waits also looks for errors of others and for their signs of life:

- a process that fails says so, and all others raise its error, with its index, at once;
- one that dies gives no sign of life any more, and is given up after `SILENCE` seconds;
- one that is slow goes on giving signs, and is waited for;
- one that never made the call is waited for until a deadline (`SHARDKEEP_PROCESS_DEADLINE`, 300 seconds).

The order of calls gives an operation its number, so every process must make the same calls in the same order.
"""

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

from jax._src import distributed
from jax.errors import JaxRuntimeError

from shardkeep.errors import ProcessError, ShardkeepError, error_named

LEADER = 0
SILENCE = 20.0
DEADLINE = "SHARDKEEP_PROCESS_DEADLINE"
_BEAT = 1.0
_ROOT = "shardkeep"
_KEPT, _KEPT_SECONDS = 64, 5.0  # so many operations that are over keep their keys, for processes that come late
_ENDED = "ended"


class Operation:
    """One save or load, made by every process of the group; of one process where there are no others.

    Use it as a context: whatever is raised inside is raised by the other processes too, as soon as they wait.

    >>> with join("save to x") as operation:
    ...     operation.gather(7), operation.share(8)
    ([7], 8)
    """

    def __init__(self, what: str, group: "_Group | None" = None) -> None:
        self.what = self._called = what
        self.index, self.size = (group.index, group.size) if group else (LEADER, 1)
        self.leads = self.index == LEADER
        self._group = group
        self._round = 0
        self._keys = f"{_ROOT}/{group.enter(self)}" if group else ""

    def gather(self, value: Any) -> list[Any]:
        """What every process brings (JSON), in their order, for the leader; nothing for the others."""
        if self._group is None:
            return [value]
        self._round += 1
        if self.leads:
            return self._collect(self._group, value)
        self._group.set(f"{self._keys}/member/{self.index}/{self._round}", json.dumps(value))
        return []

    def share(self, value: Any = None) -> Any:
        """What the leader says (JSON), for all."""
        if self._group is None:
            return value
        self._round += 1
        if not self.leads:
            return self._hear(self._group)
        self._group.set(f"{self._keys}/leader/{self._round}", json.dumps(value))
        return value

    def _collect(self, group: "_Group", value: Any) -> list[Any]:
        """What every process brought to this round, in their order."""
        found: dict[int, Any] = {LEADER: value}
        watch = _Watch(group, self.what)
        lost = None
        while True:
            begun: set[int] = set()
            for key, text in group.list(f"{self._keys}/member/"):
                member, _, name = key.removeprefix(f"{self._keys}/member/").partition("/")
                begun.add(int(member))
                if name == "error":
                    raise _as_error(json.loads(text))
                if name == str(self._round):
                    found[int(member)] = json.loads(text)
            missing = [i for i in range(self.size) if i not in found]
            if not missing:
                return [found[i] for i in range(self.size)]
            if lost is not None:
                raise lost
            lost = watch.look(missing, begun)  # what it said last may have come meanwhile

    def _hear(self, group: "_Group") -> Any:
        watch = _Watch(group, self.what)
        lost = None
        while True:
            said = {key.rpartition("/")[2]: text for key, text in group.list(f"{self._keys}/leader/")}
            if str(self._round) in said:
                return json.loads(said[str(self._round)])
            if "abort" in said:
                raise _as_error(json.loads(said["abort"]))
            if lost is not None:
                raise lost
            lost = watch.look([LEADER], {LEADER} if said else set())

    def heard(self) -> ShardkeepError | None:
        """What another process has said went wrong, if one has. What fails here may only be what follows from that."""
        if self._group is None:
            return None
        with suppress(ProcessError):
            for key, text in self._group.list(f"{self._keys}/"):
                if key.endswith(("/error", "/abort")):
                    return _as_error(json.loads(text))
        return None

    def fail(self, error: BaseException) -> None:
        """Tell the others, as far as the service still answers."""
        if self._group is None:
            return
        record = getattr(error, "record", None) or {
            "process": self.index,
            "kind": type(error).__name__,
            "message": str(error),
        }
        key = "leader/abort" if self.leads else f"member/{self.index}/error"
        with suppress(ProcessError):
            self._group.set(f"{self._keys}/{key}", json.dumps({**record, "what": self._called}))

    def __enter__(self) -> "Operation":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.fail(error)


def join(what: str) -> Operation:
    """Take part in the next operation of the group. Call it in the thread of the caller: the order of calls counts."""
    operation: Operation | None = getattr(_announced, "operation", None)
    if operation is not None:
        _announced.operation = None  # what is called next is another one
        if operation.size > 1:
            operation.what = what  # by now more is known of it
        return operation
    client = distributed.global_state.client
    size = distributed.global_state.num_processes or 1
    if client is None or size == 1:
        return ALONE
    global _group
    with _lock:
        if _group is None or _group.client is not client:
            if _group is not None:
                _group.close()  # of an earlier jax.distributed.initialize()
            _group = _Group(client, distributed.global_state.process_id, size)
    return Operation(what, _group)


@contextmanager
def announced(what: str) -> Generator[Operation]:
    """Take part from here on: what is wrong with the arguments is told to the others too. `join` gives this operation.

    >>> with announced("saving to x") as operation:
    ...     join("saving to /somewhere/x") is operation
    True
    """
    with join(what) as operation:
        _announced.operation = operation
        try:
            yield operation
        finally:
            _announced.operation = None


class _Group:
    """This process among the others: its way to the service, its count of operations, its signs of life."""

    def __init__(self, client: Any, index: int, size: int) -> None:
        self.client, self.index, self.size = client, index, size
        self._calls = 0
        self._entered: list[tuple[int, weakref.ref[Operation]]] = []
        self._over_since: list[tuple[int, float]] = []
        self._lock, self._signing = threading.Lock(), threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="shardkeep-alive", daemon=True).start()

    def enter(self, operation: Operation) -> int:
        """The number of the operation that begins now."""
        what = operation.what
        with self._lock:
            self._calls += 1
            while self.index != LEADER and self._was_given_up(what):
                self._calls += 1
            number = self._calls
        if self.index == LEADER:
            self.set(f"{_ROOT}/{number}/leader/here", json.dumps(what))
            with self._lock:
                self._entered.append((number, weakref.ref(operation)))
            self._forget()
        else:
            self.set(f"{_ROOT}/{number}/member/{self.index}/here", json.dumps(what))
        return number

    def _forget(self) -> None:
        """Delete the keys of operations that are over; of the last ones another process may still read some."""
        now = time.monotonic()
        with self._lock:
            self._over_since += [(number, now) for number, operation in self._entered if operation() is None]
            self._entered = [(number, operation) for number, operation in self._entered if operation() is not None]
            old = [number for number, since in self._over_since[:-_KEPT] if now - since > _KEPT_SECONDS]
            self._over_since = [(number, since) for number, since in self._over_since if number not in old]
        for number in old:
            with suppress(JaxRuntimeError):
                self.client.key_value_delete(f"{_ROOT}/{number}/")

    def _was_given_up(self, what: str) -> bool:
        """Whether the others made a call of this number that this process never made, and gave up on it."""
        said = dict(self.list(f"{_ROOT}/{self._calls}/leader/"))
        record = json.loads(said.get(f"{_ROOT}/{self._calls}/leader/abort", "{}"))
        return self.index in record.get("absent", ()) and record["what"] != what

    def set(self, key: str, value: str) -> None:
        try:
            self.client.key_value_set(key, value, allow_overwrite=True)
        except JaxRuntimeError as error:
            raise _unreachable(error) from error

    def list(self, directory: str) -> list[tuple[str, str]]:
        try:
            return self.client.key_value_dir_get(directory)
        except JaxRuntimeError as error:
            raise _unreachable(error) from error

    def beats(self, of: Iterable[int]) -> dict[int, str]:
        """The last sign of life of some processes; of those that gave none, none."""
        wanted = list(of)
        if len(wanted) > 1:
            found = {int(key.rpartition("/")[2]): text for key, text in self.list(f"{_ROOT}/alive/")}
            return {i: found[i] for i in wanted if i in found}
        try:
            return {i: self.client.key_value_try_get(f"{_ROOT}/alive/{i}") for i in wanted}
        except JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return {}
            raise _unreachable(error) from error

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(0 if count == 0 else _BEAT):
            count += 1
            self._give_sign(str(count))

    def _give_sign(self, sign: str) -> None:
        with self._signing:
            if sign == _ENDED or not self._over.is_set():
                with suppress(ProcessError):  # those who wait see that it is missing
                    self.set(f"{_ROOT}/alive/{self.index}", sign)

    def close(self) -> None:
        """Give no sign of life any more."""
        self._over.set()

    def end(self) -> None:
        """Say that this process is not to be waited for any more."""
        self._over.set()
        self._give_sign(_ENDED)


class _Watch:
    """Patience with those who are waited for, as long as they live."""

    def __init__(self, group: _Group, what: str) -> None:
        self._group, self._what = group, what
        self._start = self._looked = time.monotonic()
        self._deadline = float(os.environ.get(DEADLINE, "300"))
        self._seen: dict[int, tuple[str, float]] = {}
        self._pause = 0.001

    def look(self, missing: list[int], begun: set[int]) -> ProcessError | None:
        """Wait a little; the error to raise if one of the missing will not come any more."""
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, 0.05)
        now = time.monotonic()
        if now - self._looked < _BEAT:
            return None
        self._looked = now
        beats = self._group.beats(missing)
        for process, beat in beats.items():
            if self._seen.get(process, ("", 0.0))[0] != beat:
                self._seen[process] = (beat, now)
            silence = now - self._seen[process][1]
            if beat == _ENDED:
                return _lost([process], self._what, f"process {process} has ended")
            if silence > SILENCE:
                return _lost(
                    [process],
                    self._what,
                    f"process {process} has given no sign of life for {silence:.0f} s; it has died or is stuck",
                )
        absent = [i for i in missing if i not in begun]
        if absent and now - self._start > self._deadline:
            return _absent(absent, self._what, self._deadline)
        return None


def _lost(processes: list[int], what: str, why: str) -> ProcessError:
    error = ProcessError(f"{what}: {why}")
    error.record = {"process": processes[0], "kind": "ProcessError", "message": str(error), "lost": True}
    return error


def _absent(processes: list[int], what: str, deadline: float) -> ProcessError:
    names = ", ".join(map(str, processes))
    error = ProcessError(
        f"{what}: process{'es' if len(processes) > 1 else ''} {names} never made this call within {deadline:g} s. "
        f"Every process must make it, not only the first ({DEADLINE} sets how long is waited)"
    )
    error.record = {
        "process": processes[0],
        "kind": "ProcessError",
        "message": str(error),
        "absent": processes,
        "lost": True,
    }
    return error


def _unreachable(error: Exception) -> ProcessError:
    return ProcessError(f"the coordination service of JAX does not answer; process 0 may have ended ({error})")


def _as_error(record: dict[str, Any]) -> ShardkeepError:
    """What another process raised, as an error of the same kind here."""
    kind = error_named(record["kind"])
    if record.get("lost"):
        told = record["message"]
    elif kind is None:
        told = f"process {record['process']}: {record['kind']}: {record['message']}"
    else:
        told = f"process {record['process']}: {record['message']}"
    error = (kind or ProcessError)(told)
    error.record, error.told = record, True
    return error


def _end(process: int) -> None:
    """At the end of the program, also of one that never saved anything: the others need not wait for it."""
    client = distributed.global_state.client
    if process != os.getpid() or client is None:  # a forked child is not the process the others know
        return
    group = _group if _group is not None and _group.client is client else None
    if group is not None:
        group.end()
    elif (distributed.global_state.num_processes or 1) > 1:
        with suppress(JaxRuntimeError):
            client.key_value_set(f"{_ROOT}/alive/{distributed.global_state.process_id}", _ENDED, allow_overwrite=True)


ALONE = Operation("")
_group: _Group | None = None
_lock = threading.Lock()
_announced = threading.local()
atexit.register(_end, os.getpid())
