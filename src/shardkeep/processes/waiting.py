"""Waiting for other processes: for what they send, as long as they are alive.

The coordination service answers when a key is set, so nobody asks it again and again. A helper thread waits for a key,
and the thread that needs the value looks once in a while whether the processes it waits for still send heartbeats.
"""

import json
import queue
import time
from collections.abc import Callable, Iterable

from shardkeep.config import PROCESS_DEADLINE, PROCESS_SILENCE
from shardkeep.errors import IntegrityError, ProcessError, ShardkeepError, error_named
from shardkeep.processes.group import ENDED, IDLE, LEADER, NUDGE, Arrived, Group, Record, doing, explained

_LOOK = 2.5  # seconds between two looks at heartbeats: with its own, a process makes at most 2 requests a second
_ASK = 0.5  # seconds between two requests for a key, if no thread can be started to wait for it
_ONE_BY_ONE = 16  # keys to await one by one before all are listed: 1,000 are listed in the time of so many requests


class Arrivals:
    """The keys that one operation waits for, and their values in the order of arrival."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._arrived: Arrived = queue.SimpleQueue()
        self._expected: set[str] = set()
        self._unattended: set[str] = set()  # expected, but no thread waits for them

    def expect(self, key: str) -> None:
        """Wait for a key in the background."""
        if key not in self._expected:
            self._expected.add(key)
            if not self._group.expect(key, self._arrived):
                self._unattended.add(key)

    def next(self, seconds: float) -> tuple[str, str] | None:
        """The next key that has arrived, and its value; None if there is none within that time."""
        try:
            key, value = self._arrived.get(timeout=min(seconds, _ASK) if self._unattended else seconds)
        except queue.Empty:
            return self._ask()
        with explained():
            if isinstance(value, Exception):
                raise value
        return key, value

    def _ask(self) -> tuple[str, str] | None:
        for key in tuple(self._unattended):
            if (value := self._group.get(key)) is not None:
                self._unattended.discard(key)
                return key, value
        return None

    def wake(self) -> None:
        """Let the thread that waits return: a key without a name arrives."""
        self._arrived.put(("", NUDGE))

    def release(self) -> None:
        """End the waits. Only for keys that no other process waits for."""
        self._group.release(self._expected)


class Watch:
    """Looks once in a while whether other processes are alive.

    Args:
        group: This process's group.
        what: What it waits for, for messages.
        silence: After how many seconds without a heartbeat a process is given up.
        deadline: After how many seconds one that takes part in nothing is given up.
        begun: Which processes have joined what this one waits for.
    """

    def __init__(
        self, group: Group, what: str, silence: float, deadline: float, begun: Callable[[], Iterable[int]]
    ) -> None:
        self.what = what
        self._group, self._silence, self._deadline, self._ask_begun = group, silence, deadline, begun
        self._begun: set[int] = set()
        self._looked = time.monotonic()
        self._waited = 0.0
        self._seen: dict[int, tuple[str | None, float]] = {}

    @property
    def due(self) -> float:
        """The seconds until the next look."""
        return max(self._looked + min(_LOOK, self._silence / 4) - time.monotonic(), 0)

    def look(self, missing: Iterable[int]) -> ProcessError | None:
        """The error to raise if there is no point in waiting for these processes."""
        now = time.monotonic()
        # Time in which this process itself was stopped does not count: the others may have been stopped too.
        self._waited += min(now - self._looked, self._silence / 4)
        self._looked = now
        missing = list(missing)
        with doing(self.what):
            beats = self._group.beats(missing)
            # Others are known to be at work, whether they have joined or not.
            idle = {i for i in missing if beats.get(i, IDLE) == IDLE}
            if not self._begun.issuperset(missing if self._waited > self._deadline else idle):
                self._begun.update(self._ask_begun())
        for process in missing:
            beat = beats.get(process)
            if process in idle and process not in self._begun:
                continue
            if process not in self._seen or self._seen[process][0] != beat:
                self._seen[process] = (beat, self._waited)
            if beat == ENDED:
                return _lost(process, self.what, f"process {process} has exited")
            if self._waited - self._seen[process][1] > self._silence:
                return _lost(process, self.what, _silent(process, self._silence))
        absent = [i for i in missing if i not in self._begun]
        return _absent(absent, self.what, self._deadline) if absent and self._waited > self._deadline else None


def collect(group: Group, arrivals: Arrivals, directory: str, watch: Watch, alarm: str = "") -> dict[int, str]:
    """What all other processes have set in a directory, each under its index. Done by the leader.

    Args:
        group: This process's group.
        arrivals: What it waits for. If it is woken, what is there by then is returned.
        directory: The start of the keys.
        watch: Looks whether the others are alive.
        alarm: The key under which any of them reports an error, which is raised.
    """
    missing = dict.fromkeys(i for i in range(group.size) if i != group.index)
    found: dict[int, str] = {}

    def take(keys: Iterable[tuple[str, str]]) -> None:
        for key, text in keys:
            if (process := int(key.rpartition("/")[2])) in missing:
                found[process] = text
                del missing[process]

    singly = _ONE_BY_ONE
    if alarm:
        with doing(watch.what):
            arrivals.expect(alarm)
    while missing:
        if len(missing) > 1 and singly >= _ONE_BY_ONE:
            take(_listed(group, directory, watch))
            singly = 0
        else:
            with doing(watch.what):
                arrivals.expect(f"{directory}{next(iter(missing))}")
                arrived = arrivals.next(watch.due)
            if arrived is None:
                if len(missing) > 1:
                    take(_listed(group, directory, watch))
                if (lost := watch.look(missing)) is not None:
                    take(_listed(group, directory, watch))  # its last value may have just arrived
                    if not missing.keys().isdisjoint(_processes_of(lost)):
                        raise lost
            elif not arrived[0]:
                return found
            elif arrived[0] != alarm:
                take([arrived])
                singly += 1
            elif arrived[1] != NUDGE:
                raise as_error(json.loads(arrived[1]))
    return found


def _listed(group: Group, directory: str, watch: Watch) -> list[tuple[str, str]]:
    with doing(watch.what):
        return group.list(directory)


def hear(group: Group, arrivals: Arrivals, key: str, watch: Watch) -> str | None:
    """What the leader has posted under a key. None if `arrivals` is woken."""
    number = 0
    while True:
        name = f"{key}/{number}"
        with doing(watch.what):
            arrivals.expect(name)
            arrived = arrivals.next(watch.due)
        if arrived is None:
            lost = watch.look([LEADER])
            if lost is None:
                continue
            with doing(watch.what):
                text = group.get(name)  # it may have just arrived
            if not text:
                raise lost
            return text
        if not arrived[0]:
            return None
        if arrived[0] == name:
            if arrived[1] != NUDGE:
                return arrived[1]
            number += 1


def as_error(record: Record) -> ShardkeepError:
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


def _processes_of(lost: ProcessError) -> list[int]:
    """The processes that an error is about."""
    record = lost.record or {}
    return record.get("absent", [record.get("process")])


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
