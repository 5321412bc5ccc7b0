"""The processes of a run agree on one call of it, at which all of them save.

Every process makes the same calls of a run, but not at the same time: one may be several calls ahead. A request, such
as a signal that one of them has received, must lead to a save at the same call everywhere. So they count their calls:

1. A request is announced: its process sets the key of the next round, unless another process was faster.
2. A thread of each process waits for that key. It makes the next call wait for the agreement (`enter`), and then
   reports the first call at which this process can still save. It does so at once, wherever the process is: inside a
   call, or in a training step that cannot end before another process has left its call.
3. The leader takes the latest of the reported calls and tells it. Each process saves when it comes to that call.

Nothing waits for the main thread of another process, so an agreement takes milliseconds and cannot block. Without an
announcement a call costs one test of an attribute. The keys are those of the run, not of an operation: operations are
numbered by calls, and processes are at different calls here.

A process that closes its run announces that as a round of its own, the last one.
"""

import atexit
import json
import logging
import queue
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from shardkeep.config import PROCESS_DEADLINE, PROCESS_SILENCE, read
from shardkeep.errors import ProcessError, ShardkeepError
from shardkeep.processes.group import LEADER, ROOT, Group, post
from shardkeep.processes.operation import present_group
from shardkeep.processes.waiting import Arrivals, Watch, as_error, collect, hear
from shardkeep.runtime.scopes import LOOK, Latch
from shardkeep.system import after_fork_in_child

log = logging.getLogger("shardkeep")

_AGAIN = 1.0  # seconds until a service that did not answer is asked again
_END = 5.0  # seconds that `close` waits for each thread
_WHAT = "agreeing on a step to save"


class Agreed(NamedTuple):
    """What the processes have agreed on for this call: to save, and whether to stop afterwards."""

    why: str
    stop: bool


class _Round:
    """One request, from its announcement to the call that was agreed on."""

    def __init__(self, wanted: Agreed) -> None:
        self.wanted = wanted
        self.call: int | None = None  # None: nobody saves, because a process has closed its run
        self.error: ShardkeepError | None = None
        self.decided = Latch()

    def decide(self, call: int | None, error: ShardkeepError | None = None) -> None:
        self.call, self.error = call, error
        self.decided.set()


class Agreement:
    """Requests to save, and the one call at which all processes fulfil each of them.

    A process that is alone needs no agreement: its next call fulfils what was requested before, and there are no
    threads and no messages.

    Args:
        run_id: A name for the open run, the same on every process and never used before.

    >>> agreement = Agreement("7f3a")
    >>> agreement.enter()
    >>> agreement.request("run.stop()", stop=True)
    >>> agreement.enter()
    Agreed(why='run.stop()', stop=True)
    >>> agreement.enter()
    >>> agreement.close()
    """

    def __init__(self, run_id: str) -> None:
        self._count = 0  # the calls that have begun
        self._rounds: list[_Round] = []  # announced, and not yet fulfilled
        self._group = group = present_group(_WHAT)
        if group is None:
            return
        self._several = _Several(f"{ROOT}/run/{run_id}", group, self)
        self._several.start()

    @property
    def count(self) -> int:
        """How many calls have begun."""
        return self._count

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes to agree with."""
        return self._group is None

    def request(self, why: str, *, stop: bool) -> None:
        """Have all processes save at one of their next calls. Returns at once; a signal handler may call it too.

        Args:
            why: The reason, for messages.
            stop: Whether the run stops after that save.
        """
        if self._group is not None:
            return self._several.request(Agreed(why, stop))
        self.repeat(Agreed(why, stop))

    def repeat(self, agreed: Agreed) -> None:
        """Have the next call fulfil what this one could not. With several processes, all call this in the same call."""
        round = _Round(agreed)
        round.decide(0)  # whatever the number of the next call
        self._rounds.append(round)

    def enter(self) -> Agreed | None:
        """Begin a call. Returns what was agreed on for this call, on every process at the same one; else None.

        Waits only if a request has been announced and its call is not yet known. Raises `ProcessError` if a process
        died before it could report.
        """
        self._count += 1
        return self._meet() if self._rounds else None

    def _meet(self) -> Agreed | None:
        met: list[Agreed] = []
        for round in tuple(self._rounds):
            while not round.decided.wait(LOOK):
                if not self._several.is_listening and not round.decided.is_set:
                    raise ProcessError(f"{_WHAT}: this process no longer participates; it was forked, or is exiting")
            if round.error is not None:
                raise round.error
            if round.call is None or round.call <= self._count:
                self._rounds.remove(round)
                met += [] if round.call is None else [round.wanted]
        return Agreed(", ".join(dict.fromkeys(why for why, _ in met)), any(stop for _, stop in met)) if met else None

    def await_call(self, wanted: Agreed) -> tuple[_Round, int]:
        """Let `enter` wait for a new round from now on. Returns the round, and how many calls had begun by then.

        A call that begins before the count is read is counted; one that begins after it finds the round.
        """
        round = _Round(wanted)
        self._rounds.append(round)
        return round, self._count

    def close(self) -> None:
        """End the threads. What was requested and not yet fulfilled is dropped."""
        if self._group is not None:
            self._several.close()
        self._rounds.clear()


class _Several:
    """The part of an agreement that talks to the other processes: two threads that sleep until there is a request."""

    def __init__(self, keys: str, group: Group, agreement: Agreement) -> None:
        self._keys, self._group, self._agreement = keys, group, agreement
        self._silence, self._deadline = read(PROCESS_SILENCE), read(PROCESS_DEADLINE)
        self._number = 1  # of the next round
        self._scheduled = 0  # the last call that was agreed on
        self._wanted: list[Agreed] = []  # requests of this process that no announcement covers yet
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: announce; False: end
        self._closing = Latch()
        self._arrivals = Arrivals(group)
        self._listener = threading.Thread(target=self._listen, name="shardkeep-agreement", daemon=True)
        self._announcer = threading.Thread(target=self._announce, name="shardkeep-announcer", daemon=True)

    def start(self) -> None:
        if not _open:
            atexit.unregister(_close_all)
            atexit.register(_close_all)  # now: it must run before JAX disconnects from the service
        _open.add(self)
        self._group.take_part(self, self._keys)
        self._listener.start()
        self._announcer.start()

    @property
    def ended(self) -> bool:
        """Whether this process no longer takes part."""
        return self._closing.is_set

    @property
    def is_listening(self) -> bool:
        return self._listener.is_alive()

    def request(self, wanted: Agreed) -> None:
        self._wanted.append(wanted)
        self._orders.put(True)

    def _announce(self) -> None:
        """The thread that announces requests, so that whoever makes one does not wait for the service."""
        while self._orders.get():
            while self._wanted and not self._closing.is_set:
                number, wanted = self._number, self._wanted[0]
                try:
                    if self._group.set_new(self._key("announce", number), json.dumps(wanted._asdict())):
                        with suppress(ValueError):
                            self._wanted.remove(wanted)
                except ProcessError as error:
                    log.warning("%s (%s): %s; trying again", _WHAT, wanted.why, error)
                    self._closing.wait(_AGAIN)
                    continue
                if self._number == number:  # the listener goes on from here, and comes back if requests are left
                    break

    def _listen(self) -> None:
        """The thread that takes part in one round after another."""
        try:
            while (wanted := self._next()) is not None:
                self._take_part(wanted)
        except ShardkeepError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (raised by the next call)
            self._fail(ProcessError(f"{_WHAT}: {type(error).__name__}: {error}"))

    def _fail(self, error: ShardkeepError) -> None:
        """Let every further call raise an error."""
        self._agreement.await_call(Agreed("", False))[0].decide(None, error)

    def _next(self) -> Agreed | None:
        """What the next announcement says; None if it says that a process has closed its run."""
        key, since = self._key("announce", self._number), time.monotonic()
        while True:
            try:
                if self._closing.is_set and self._group.set_new(key, self._last_words(), last=True):
                    return None
                text = self._group.wait_for(key)
            except ProcessError:
                if self._closing.is_set:
                    return None
                if time.monotonic() - since > self._silence:
                    raise
                self._closing.wait(_AGAIN)
                continue
            since = time.monotonic()
            if text is not None:
                said = json.loads(text)
                return None if "closed" in said else Agreed(**said)

    def _last_words(self) -> str:
        return json.dumps({"closed": self._group.index})

    def _take_part(self, wanted: Agreed) -> None:
        round, count = self._agreement.await_call(wanted)
        earliest = max(count, self._scheduled) + 1
        leads = self._group.index == LEADER
        begun = () if leads else (LEADER,)
        watch = Watch(self._group, f"{_WHAT} ({wanted.why})", self._silence, self._deadline, lambda: begun)
        try:
            call = (self._lead if leads else self._follow)(earliest, watch)
        except ShardkeepError as error:
            round.decide(None, error)
            raise
        if call is not None:
            self._scheduled = call
            for other in tuple(self._wanted):  # before `enter` can pass that call: each of them was requested earlier
                if other.stop <= wanted.stop:
                    with suppress(ValueError):
                        self._wanted.remove(other)
        round.decide(call)
        self._number += 1
        if self._wanted:
            self._orders.put(True)

    def _lead(self, earliest: int, watch: Watch) -> int | None:
        """Collect what all processes report, and tell them the call."""
        group, number = self._group, self._number
        try:
            found = collect(group, self._arrivals, self._key("report", number) + "/", watch)
        except ProcessError as lost:
            if lost.record is not None:
                error = json.dumps({"error": lost.record})
                group.tell(partial(post, group.client, self._key("agreed", number), error))
            raise
        finally:
            self._arrivals.release()
        call = max([earliest, *map(int, found.values())]) if len(found) == group.size - 1 else None
        group.post(self._key("agreed", number), json.dumps({"call": call}))
        group.delete(self._key("report", number - 1) + "/")  # all have reported again, so all have heard
        return call

    def _follow(self, earliest: int, watch: Watch) -> int | None:
        """Report, and hear the call from the leader."""
        group, number = self._group, self._number
        group.set(f"{self._key('report', number)}/{group.index}", str(earliest))
        text = hear(group, self._arrivals, self._key("agreed", number), watch)
        if text is None:  # this process closes the run
            return None
        said: dict[str, Any] = json.loads(text)
        if "error" in said:
            raise as_error(said["error"])
        return said["call"]

    def _key(self, kind: str, number: int) -> str:
        return f"{self._keys}/{kind}/{number}"

    def close(self) -> None:
        """End the threads; the first process that does so ends those of the others too."""
        _open.discard(self)
        self._closing.set()
        self._orders.put(False)
        self._arrivals.wake()
        if self._group.forked:
            return
        with suppress(ProcessError):  # the listener waits for this key, or will see that the run is closing
            self._group.set_new(self._key("announce", self._number), self._last_words(), last=True)
        for thread in (self._listener, self._announcer):
            if thread is not threading.current_thread():  # what it belonged to was collected there
                thread.join(_END)


def _close_all() -> None:
    """At the end of the program: no thread may be inside a call of jaxlib when the interpreter is gone."""
    for several in tuple(_open):
        several.close()


_open: set[_Several] = set()
after_fork_in_child(_open.clear)
