"""The JAX processes that save or load together, and how they agree.

All of it is keys and values on the coordination service that JAX already runs: no device takes part, so a save in the
background never meddles with the collectives of training. Process 0 is the leader: the others tell it their part,
it decides, and they read its answer. Whoever waits also looks for errors of others and for their signs of life:

- a process that fails says so, and all others raise its error, with its index, at once;
- one that dies or is stopped gives no sign of life any more, and is given up (`SHARDKEEP_PROCESS_SILENCE`, 20 seconds);
- one that is slow goes on giving signs, and is waited for;
- one that never made the call is waited for until a deadline (`SHARDKEEP_PROCESS_DEADLINE`, 300 seconds).

No call to the service takes longer than a process may be silent: the one that runs it may be stopped too.
The order of calls gives an operation its number, so every process must make the same calls in the same order.
"""

import atexit
import json
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from jax._src import distributed

from shardkeep.errors import ProcessError, ShardkeepError, error_named
from shardkeep.group import DEADLINE, LEADER, SILENCE, Group, Watch, doing, seconds_of


class Operation:
    """One save or load, made by every process of the group; of one process where there are no others.

    Use it as a context: whatever is raised inside is raised by the other processes too, as soon as they wait.

    >>> with join("save to x") as operation:
    ...     operation.gather(7), operation.share(8)
    ([7], 8)
    """

    over: bool = True  # nobody waits for this process any more, or never did
    _keys: str = ""

    def __init__(self, what: str, group: "Group | None" = None) -> None:
        self.what = self._called = what
        self.index, self.size = (group.index, group.size) if group else (LEADER, 1)
        self.leads = self.index == LEADER
        self._group = group
        self._round = 0
        if group is not None:
            try:
                with doing(what):
                    self._begin(group)
            except BaseException as error:
                self.fail(error)
                raise

    def _begin(self, group: "Group") -> None:
        """Take the next number, and tell the others that this process takes part."""
        self._keys, self.over = group.next_keys(), False
        while not self.leads and group.was_given_up(self._keys, self.index, self.what):
            self._keys = group.next_keys()
        self._silence, self._deadline = seconds_of(SILENCE), seconds_of(DEADLINE)
        group.patience = self._silence
        group.enter(self, self.what, self._keys)

    def gather(self, value: Any) -> list[Any]:
        """What every process brings (JSON), in their order, for the leader; nothing for the others."""
        if self._group is None:
            return [value]
        self._round += 1
        if self.leads:
            return self._collect(Watch(self._group, self.what, self._silence, self._deadline), value)
        self._set(f"member/{self.index}/{self._round}", json.dumps(value))
        return []

    def share(self, value: Any = None) -> Any:
        """What the leader says (JSON), for all."""
        if self._group is None:
            return value
        self._round += 1
        if not self.leads:
            return self._hear(Watch(self._group, self.what, self._silence, self._deadline))
        self._set(f"leader/{self._round}", json.dumps(value))
        return value

    def _set(self, key: str, value: str) -> None:
        assert self._group is not None
        with doing(self.what):
            self._group.set(f"{self._keys}/{key}", value)

    def _list(self, directory: str) -> list[tuple[str, str]]:
        """What is there, under names that begin in that directory."""
        assert self._group is not None
        start = f"{self._keys}/{directory}"
        with doing(self.what):
            return [(key.removeprefix(start), text) for key, text in self._group.list(start)]

    def _collect(self, watch: "Watch", value: Any) -> list[Any]:
        """What every process brought to this round, in their order."""
        found: dict[int, Any] = {LEADER: value}
        lost = None
        while True:
            begun: set[int] = set()
            for key, text in self._list("member/"):
                member, _, name = key.partition("/")
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

    def _hear(self, watch: "Watch") -> Any:
        lost = None
        while True:
            said = dict(self._list("leader/"))
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
            for key, text in self._list(""):
                if key.endswith(("/error", "/abort")):
                    return _as_error(json.loads(text))
        return None

    def fail(self, error: BaseException) -> None:
        """Tell the others: now if the service answers, and otherwise as soon as it does."""
        self.over = True
        if self._group is None or not self._keys:
            return
        record = getattr(error, "record", None) or {
            "process": self.index,
            "kind": type(error).__name__,
            "message": str(error),
        }
        self._group.tell(*self._as_failed(record))

    def _as_failed(self, record: dict[str, Any]) -> tuple[str, str]:
        key = "leader/abort" if self.leads else f"member/{self.index}/error"
        return f"{self._keys}/{key}", json.dumps({**record, "what": self._called})

    def __enter__(self) -> "Operation":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.fail(error)
        self.over = True

    def __del__(self) -> None:
        # Interrupted before it was entered as a context: the others must not wait for what never comes.
        if not self.over and self._keys and self._group is not None:
            message = f"{self.what}: it was interrupted"
            self._group.unsaid.append(
                self._as_failed({"process": self.index, "kind": "ProcessError", "message": message})
            )


def join(what: str) -> Operation:
    """Take part in the next operation of the group. Call it in the thread of the caller: the order of calls counts."""
    operation: Operation | None = getattr(_announced, "operation", None)
    if operation is not None:
        _announced.operation = None  # what is called next is another one
        if operation is ALONE or not operation.over:
            if operation.size > 1:
                operation.what = what  # by now more is known of it
            return operation
    client = distributed.global_state.client
    size = distributed.global_state.num_processes or 1
    return ALONE if client is None or size == 1 else Operation(what, _group_of(client, size, what))


def _group_of(client: Any, size: int, what: str) -> Group:
    """This process among the others, of which each client has one."""
    if client is _inherited:
        raise ProcessError(
            f"{what}: this process was forked from one of {size} JAX processes that save and load together, and what "
            "connects them does not survive a fork. Save and load in the process it was forked from; for workers of "
            "its own that must, use the start method 'spawn'"
        )
    # No lock: a signal handler that saves may run at any of these lines.
    group = _groups.get(id(client)) or _groups.setdefault(
        id(client), Group(client, distributed.global_state.process_id, size)
    )
    for other in list(_groups):
        if other != id(client) and (old := _groups.pop(other, None)) is not None:
            old.close()  # of an earlier jax.distributed.initialize()
    group.live()
    return group


@contextmanager
def announced(what: str) -> Generator[Operation]:
    """Take part from here on: what is wrong with the arguments is told to the others too. `join` gives this operation.

    >>> with announced("saving to x") as operation:
    ...     join("saving to /somewhere/x") is operation
    True
    """
    before: Operation | None = getattr(_announced, "operation", None)  # if this is called by a signal handler
    try:
        _announced.operation = None
        with join(what) as operation:
            _announced.operation = operation
            yield operation
    finally:
        _announced.operation = before


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


def _end() -> None:
    """At the end of the program, also of one that never saved anything: the others need not wait for it."""
    client = distributed.global_state.client
    if client is None or client is _inherited or (distributed.global_state.num_processes or 1) == 1:
        return
    group = _groups.get(id(client)) or Group(client, distributed.global_state.process_id, 2)
    group.end()


def _leave_parent() -> None:
    """In a forked child: it is not the process that the others know, and cannot speak to them."""
    global _inherited
    _inherited = distributed.global_state.client
    for group in _groups.values():
        group.forked = True
    _groups.clear()
    _announced.operation = None


ALONE = Operation("")
_groups: dict[int, Group] = {}  # of the client that JAX has now, by its identity
_inherited: Any = None  # the client of the process this one was forked from
_announced = threading.local()
os.register_at_fork(after_in_child=_leave_parent)
atexit.register(_end)
