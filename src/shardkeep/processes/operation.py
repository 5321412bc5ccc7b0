"""The JAX processes that save or load together, and how they communicate.

They exchange keys and values through the coordination service that JAX already runs. No device is involved, so a save
in the background never interferes with the collectives of training. Process 0 is the leader: the others send it their
part, it decides, and they hear its answer. Each waits for one key, which the service reports as soon as it is set:

- if a process fails, it sets the key of the alarm. The leader raises the error, and answers with it; so all others
  raise it immediately, with the index of that process;
- if it dies or is stopped, it sends no more heartbeats and is given up (`SHARDKEEP_PROCESS_SILENCE`, 20 seconds);
- if it is slow, it keeps sending heartbeats, and the others wait;
- if it never makes the call, the others wait until a deadline (`SHARDKEEP_PROCESS_DEADLINE`, 300 seconds).

A process sends heartbeats only during an operation or while a `Run` is open. While one waits, it makes at most two
requests a second. Calls to the service have the same time limit as heartbeats, since the process that runs it may be
stopped too. Operations are numbered by the order of calls, so every process must make the same calls in the same order.

The keys of an operation begin with its number: `here/<process>` (it has joined), `brought/<n>/<process>` (the n-th
value of a process for the leader), `said/<n>/…` (the n-th answer of the leader), `alarm` (the first error of another
process) and `abort` (the error of the leader).
"""

import atexit
import json
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from shardkeep.config import PROCESS_DEADLINE, PROCESS_SILENCE, read
from shardkeep.errors import IntegrityError, ProcessError, ShardkeepError
from shardkeep.jaxapi import Membership, membership, present_client, set_key, set_new_key
from shardkeep.processes.group import LEADER, Group, Record, doing, post
from shardkeep.processes.waiting import Arrivals, Watch, as_error, collect, hear
from shardkeep.system import after_fork_in_child

_PLACE = ("leaf", "file", "span", "problem")  # what an IntegrityError says beside its message


class Operation(AbstractContextManager["Operation", None]):
    """One save or load that every process of the group takes part in. The group may be a single process.

    Use it as a context manager: an error raised inside is also raised by the other processes, as soon as they wait.

    >>> with join("save to x") as operation:
    ...     operation.gather(7), operation.share(8)
    ([7], 8)
    """

    over: bool = True  # what the caller raises concerns this process only; a thread may still take part
    ended: bool = True  # no other process waits for this one, and it waits for none
    _keys: str = ""

    def __init__(self, what: str, group: "Group | None" = None) -> None:
        self.what = self._called = what
        self.index, self.size = (group.index, group.size) if group else (LEADER, 1)
        self.leads = self.index == LEADER
        self._group = group
        self._gathers = self._shares = 0
        self._has_failed = False
        if group is not None:
            self._arrivals = Arrivals(group)
            try:
                with doing(what):
                    self._begin(group)
            except BaseException as error:
                self.fail(error)
                raise

    def _begin(self, group: "Group") -> None:
        """Take the next number and tell the other processes that this one takes part."""
        self._keys, self.over, self.ended = group.next_keys(), False, False
        while not self.leads and group.was_given_up(self._keys, self.index, self.what):
            self._keys = group.next_keys()
        self._silence, self._deadline = read(PROCESS_SILENCE), read(PROCESS_DEADLINE)
        group.patience = self._silence
        group.enter(self, self.what, self._keys)

    def gather(self, value: object) -> list[Any]:
        """Collect a JSON value from every process: a list by process index on the leader, empty on the others."""
        if self._group is None:
            return [value]
        self._gathers += 1
        brought = f"{self._keys}/brought/{self._gathers}/"
        if not self.leads:
            with doing(self.what):
                self._group.set(f"{brought}{self.index}", json.dumps(value))
            return []
        found = collect(self._group, self._arrivals, brought, self._watch(), f"{self._keys}/alarm")
        return [value, *(json.loads(found[i]) for i in range(1, self.size))]

    def share(self, value: object = None) -> Any:
        """Send a JSON value from the leader to all processes, and return it."""
        if self._group is None:
            return value
        self._shares += 1
        said = f"{self._keys}/said/{self._shares}"
        if self.leads:
            with doing(self.what):
                self._group.post(said, json.dumps({"value": value}))
            return value
        heard = hear(self._group, self._arrivals, said, self._watch())
        assert heard is not None  # nothing wakes it
        answer = json.loads(heard)
        if "error" in answer:
            raise as_error(answer["error"])
        return answer["value"]

    def _watch(self) -> Watch:
        assert self._group is not None
        return Watch(self._group, self.what, self._silence, self._deadline, self._joined)

    def _joined(self) -> Iterable[int]:
        """The processes that have joined; on others than the leader, whether that one has."""
        assert self._group is not None
        here = f"{self._keys}/here/"
        if self.leads:
            return [int(key.removeprefix(here)) for key, _ in self._group.list(here)]
        return [] if self._group.get(f"{here}{LEADER}") is None else [LEADER]

    def heard(self) -> ShardkeepError | None:
        """The error that another process reported, if any; an error here may only be its consequence."""
        if self._group is None:
            return None
        with suppress(ProcessError):
            for key in ("alarm", "abort"):
                if text := self._group.get(f"{self._keys}/{key}"):
                    return as_error(json.loads(text))
        return None

    def close(self) -> None:
        """Take part no longer: what is raised from now on concerns this process only."""
        self.over = self.ended = True
        if self.leads and self._group is not None:
            self._arrivals.release()  # what others than the leader wait for, it sets

    def fail(self, error: BaseException) -> None:
        """Report an error to the other processes: now, or as soon as the service answers again."""
        self.over = True
        self._tell(error)
        self.close()

    def _tell(self, error: BaseException) -> None:
        if self._group is None or not self._keys or self._has_failed:
            return
        self._has_failed = True  # the first error is the cause of those that follow
        record = getattr(error, "record", None) or {
            "process": self.index,
            "kind": type(error).__name__,
            "message": str(error),
            **({name: getattr(error, name) for name in _PLACE} if isinstance(error, IntegrityError) else {}),
        }
        self._group.tell(self._report_of(record))

    def _report_of(self, record: Record) -> partial[None]:
        """The request that tells the other processes of an error."""
        assert self._group is not None
        client, text = self._group.client, json.dumps({**record, "what": self._called})
        if self.leads:
            return partial(_answer_with_error, client, self._keys, self._shares, text)
        return partial(_raise_alarm, client, self._keys, text)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self.over:
            self.close() if error is None else self.fail(error)

    def __del__(self) -> None:
        # Interrupted before it was entered as a context: the other processes must not wait for it.
        if not self.over and self._keys and self._group is not None:
            message = f"{self.what}: the call was interrupted"
            self._group.say_later(self._report_of({"process": self.index, "kind": "ProcessError", "message": message}))
            self.close()


def _raise_alarm(client: Any, keys: str, text: str) -> None:
    set_new_key(client, f"{keys}/alarm", text)


def _answer_with_error(client: Any, keys: str, shares: int, text: str) -> None:
    """Answer with the leader's error. Its last answer may not have been sent, if the leader was interrupted then."""
    _raise_alarm(client, keys, text)  # another thread of this process may still take part
    for number in range(max(shares, 1), shares + 2):
        post(client, f"{keys}/said/{number}", f'{{"error": {text}}}')
    set_key(client, f"{keys}/abort", text)


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
        (_groups.get(id(member.client)) or Group(*member)).end()
    for group in tuple(_groups.values()):
        group.settle()


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
after_fork_in_child(_leave_parent)
_tells_end = False
tell_end_at_exit()
