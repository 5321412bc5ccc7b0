"""The JAX processes that save or load together, and how they communicate.

They exchange keys and values through the coordination service that JAX already runs. No device is involved, so a save
in the background never interferes with the collectives of training. Process 0 is the leader: the others send it their
part, it decides, and they read its answer. A process that waits also watches the others for errors and heartbeats:

- if a process fails, all others raise its error immediately, with its index;
- if it dies or is stopped, it sends no more heartbeats and is given up (`SHARDKEEP_PROCESS_SILENCE`, 20 seconds);
- if it is slow, it keeps sending heartbeats, and the others wait;
- if it never makes the call, the others wait until a deadline (`SHARDKEEP_PROCESS_DEADLINE`, 300 seconds).

Calls to the service have the same time limit as heartbeats, since the process that runs it may be stopped too.
Operations are numbered by the order of calls, so every process must make the same calls in the same order.
"""

import atexit
import json
import os
import sys
from contextlib import AbstractContextManager, suppress
from typing import Any

from shardkeep.config import PROCESS_DEADLINE, PROCESS_SILENCE, read
from shardkeep.errors import IntegrityError, ProcessError, ShardkeepError, error_named
from shardkeep.jaxapi import Membership, membership, present_client
from shardkeep.processes.group import LEADER, Group, Watch, doing

_PLACE = ("leaf", "file", "span", "problem")  # what an IntegrityError says beside its message


class Operation(AbstractContextManager["Operation", None]):
    """One save or load that every process of the group takes part in. The group may be a single process.

    Use it as a context manager: an error raised inside is also raised by the other processes, as soon as they wait.

    >>> with join("save to x") as operation:
    ...     operation.gather(7), operation.share(8)
    ([7], 8)
    """

    over: bool = True  # no other process waits for this one, or hears of its errors
    _keys: str = ""

    def __init__(self, what: str, group: "Group | None" = None) -> None:
        self.what = self._called = what
        self.index, self.size = (group.index, group.size) if group else (LEADER, 1)
        self.leads = self.index == LEADER
        self._group = group
        self._round = 0
        self._has_failed = False
        if group is not None:
            try:
                with doing(what):
                    self._begin(group)
            except BaseException as error:
                self.fail(error)
                raise

    def _begin(self, group: "Group") -> None:
        """Take the next number and tell the other processes that this one takes part."""
        self._keys, self.over = group.next_keys(), False
        while not self.leads and group.was_given_up(self._keys, self.index, self.what):
            self._keys = group.next_keys()
        self._silence, self._deadline = read(PROCESS_SILENCE), read(PROCESS_DEADLINE)
        group.patience = self._silence
        group.enter(self, self.what, self._keys)

    def gather(self, value: object) -> list[Any]:
        """Collect a JSON value from every process: a list by process index on the leader, empty on the others."""
        if self._group is None:
            return [value]
        self._round += 1
        if self.leads:
            return self._collect(Watch(self._group, self.what, self._silence, self._deadline), value)
        self._set(f"member/{self.index}/{self._round}", json.dumps(value))
        return []

    def share(self, value: object = None) -> Any:
        """Send a JSON value from the leader to all processes, and return it."""
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
        """The keys in a directory, relative to it, and their values."""
        assert self._group is not None
        start = f"{self._keys}/{directory}"
        with doing(self.what):
            return [(key.removeprefix(start), text) for key, text in self._group.list(start)]

    def _collect(self, watch: "Watch", value: object) -> list[Any]:
        """The values that all processes sent in this round, by process index."""
        found: dict[int, Any] = {LEADER: value}
        lost = None
        while True:
            begun: set[int] = set()
            for key, text in self._list("member/"):
                member, _, name = key.partition("/")
                begun.add(int(member))
                if name == "error":
                    raise as_error(json.loads(text))
                if name == str(self._round):
                    found[int(member)] = json.loads(text)
            missing = [i for i in range(self.size) if i not in found]
            if not missing:
                return [found[i] for i in range(self.size)]
            if lost is not None:
                raise lost
            lost = watch.look(missing, begun)  # raised after another look: its last value may have just arrived

    def _hear(self, watch: "Watch") -> Any:
        lost = None
        while True:
            said = dict(self._list("leader/"))
            if str(self._round) in said:
                return json.loads(said[str(self._round)])
            if "abort" in said:
                raise as_error(json.loads(said["abort"]))
            if lost is not None:
                raise lost
            lost = watch.look([LEADER], {LEADER} if said else set())

    def heard(self) -> ShardkeepError | None:
        """The error that another process reported, if any; an error here may only be its consequence."""
        if self._group is None:
            return None
        with suppress(ProcessError):
            for key, text in self._list(""):
                if key.endswith(("/error", "/abort")):
                    return as_error(json.loads(text))
        return None

    def close(self) -> None:
        """Take part no longer: what is raised from now on concerns this process only."""
        self.over = True

    def fail(self, error: BaseException) -> None:
        """Report an error to the other processes: now, or as soon as the service answers again."""
        self.over = True
        if self._group is None or not self._keys or self._has_failed:
            return
        self._has_failed = True  # the first error is the cause of those that follow
        record = getattr(error, "record", None) or {
            "process": self.index,
            "kind": type(error).__name__,
            "message": str(error),
            **({name: getattr(error, name) for name in _PLACE} if isinstance(error, IntegrityError) else {}),
        }
        self._group.tell(*self._as_failed(record))

    def _as_failed(self, record: dict[str, Any]) -> tuple[str, str]:
        key = "leader/abort" if self.leads else f"member/{self.index}/error"
        return f"{self._keys}/{key}", json.dumps({**record, "what": self._called})

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not self.over:
            self.fail(error)
        self.over = True

    def __del__(self) -> None:
        # Interrupted before it was entered as a context: the other processes must not wait for it.
        if not self.over and self._keys and self._group is not None:
            message = f"{self.what}: the call was interrupted"
            self._group.unsaid.append(
                self._as_failed({"process": self.index, "kind": "ProcessError", "message": message})
            )


def join(what: str) -> Operation:
    """Take part in the group's next operation.

    Call this in the user's thread, since the order of calls must be the same on every process, and before the arguments
    are checked, so that an error in them reaches the other processes.
    """
    member = membership()
    return Operation(what, None if member is None else _group_of(member, what))


def present_group(what: str) -> Group | None:
    """The group of processes that this one is a member of; None if it is alone."""
    member = membership()
    return None if member is None else _group_of(member, what)


def _group_of(member: Membership, what: str) -> Group:
    client = member.client
    if client is _inherited:
        raise ProcessError(
            f"{what}: this process was forked from one of {member.size} JAX processes that save and load together, and "
            "their connection does not survive a fork. Save and load in the parent process, or start the child with "
            "multiprocessing's 'spawn' method"
        )
    # No lock: a signal handler that saves may run between any two of these lines.
    group = _groups.get(id(client)) or _groups.setdefault(id(client), Group(*member))
    for other in list(_groups):
        if other != id(client) and (old := _groups.pop(other, None)) is not None:
            old.close()  # it belongs to an earlier jax.distributed.initialize()
    group.live()
    return group


def as_error(record: dict[str, Any]) -> ShardkeepError:
    """An error that another process reported, as an exception of the same class."""
    kind = error_named(record["kind"])
    if record.get("lost"):
        told = record["message"]
    elif kind is None:
        told = f"process {record['process']}: {record['kind']}: {record['message']}"
    else:
        told = f"process {record['process']}: {record['message']}"
    error = (kind or ProcessError)(told)
    error.record, error.told = record, True
    if isinstance(error, IntegrityError) and "problem" in record:
        error.leaf, error.file, error.problem = record["leaf"], record["file"], record["problem"]
        error.span = record["span"] and tuple(record["span"])
    return error


def tell_end_at_exit() -> None:
    """Have `_end` called at the end of the program, before JAX shuts down: so only once JAX is imported."""
    global _tells_end
    if not _tells_end and "jax" in sys.modules:
        _tells_end = True
        atexit.register(_end)


def _end() -> None:
    """When the program exits, even if it never saved anything: the other processes need not wait for it."""
    member = membership()
    if member is not None and member.client is not _inherited:
        group = _groups.get(id(member.client)) or Group(*member)
        group.end()


def _leave_parent() -> None:
    """In a forked child: it is not a member of its parent's group and cannot communicate with it."""
    global _inherited
    _inherited = present_client()
    for group in _groups.values():
        group.forked = True
    _groups.clear()


ALONE = Operation("")
_groups: dict[int, Group] = {}  # by the id of JAX's current client
_inherited: Any = None  # the client of the process this one was forked from
os.register_at_fork(after_in_child=_leave_parent)
_tells_end = False
tell_end_at_exit()
