"""The memory budget: how much host memory pending saves and running loads may hold in total."""

import logging
import threading
from dataclasses import dataclass
from typing import Protocol

from shardkeep.config import MEMORY_BUDGET, read
from shardkeep.runtime.hostmemory import available_memory
from shardkeep.runtime.scopes import LOOK, Bell, Scope, is_nested, sweep
from shardkeep.system import after_fork_in_child

log = logging.getLogger("shardkeep")


class IdleMemory(Protocol):
    """Memory that nobody needs now, but that would be faster to use again than new memory."""

    @property
    def nbytes(self) -> int: ...

    def drop(self) -> None:
        """Release it."""
        ...


class MemoryBudget:
    """The number of bytes that pending snapshots and running loads may hold in total.

    Idle memory may fill what is left of it. It goes when something else is claimed that does not use it.
    """

    def __init__(self) -> None:
        self._idle: list[IdleMemory] = []
        self._limit: int | None = None  # None means the default
        self._default: int | None = None
        self.claims: dict[Claim, int] = {}
        self.lock = threading.RLock()
        self.changed = Bell()

    @property
    def limit(self) -> int:
        if self._limit is not None:
            return self._limit
        nbytes = read(MEMORY_BUDGET)
        if nbytes is not None:
            return nbytes
        if self._default is None:
            self._default = available_memory() // 2
        return self._default

    @property
    def used(self) -> int:
        return sum(tuple(self.claims.values()))

    def set(self, nbytes: int | None) -> None:
        if nbytes is not None and nbytes <= 0:
            raise ValueError(f"the memory budget must be positive, got {nbytes}")
        self._limit, self._default = nbytes, None
        self.drop_idle()
        self.changed.ring()

    def add_idle(self, idle: IdleMemory) -> None:
        """Count what a holder of idle memory has."""
        self._idle.append(idle)

    def drop_idle(self) -> None:
        """Drop the idle memory that does not fit beside what is claimed."""
        for idle in self._idle:
            if idle.nbytes and self.used + idle.nbytes > self.limit:
                idle.drop()

    def start_over(self) -> None:
        """Reset in a forked child, which holds nothing."""
        self.claims, self.lock, self.changed = {}, threading.RLock(), Bell()


@dataclass(frozen=True, eq=False)
class Claim:
    """The share of a budget that the call of a scope holds."""

    budget: MemoryBudget
    scope: Scope

    def take(self, nbytes: int, what: str, uses_idle: bool = False) -> None:
        """Wait until `nbytes` fit. A claim larger than the whole budget waits until nothing else is held.

        Args:
            nbytes: How much to take.
            what: Who takes it, for messages.
            uses_idle: Whether idle memory will be used for it.
        """
        budget = self.budget
        nested = is_nested(self.scope)  # then the interrupted call cannot release memory before this one returns
        said = False
        with budget.changed.waiting() as wait:
            while True:
                with budget.lock:
                    used = budget.used
                    if nested or used == 0 or used + nbytes <= budget.limit:
                        budget.claims[self] = nbytes
                        if not uses_idle:
                            budget.drop_idle()
                        return
                if not said:
                    said = True
                    log.warning(
                        "%s is waiting for memory: earlier saves hold %s of the budget of %s bytes",
                        what,
                        f"{budget.used:,}",
                        f"{budget.limit:,}",
                    )
                wait(LOOK)
                sweep()

    def change(self, nbytes: int, what: str) -> None:
        """Give back what it holds, and wait until `nbytes` fit. In between it holds nothing that others wait for."""
        self.release()
        if nbytes:
            self.take(nbytes, what)

    def release(self) -> None:
        self.budget.claims.pop(self, None)
        self.budget.changed.ring()


budget = MemoryBudget()
after_fork_in_child(budget.start_over)


def set_memory_budget(nbytes: int | None) -> None:
    """Limit the total host memory of pending saves and running loads.

    A `save_async` that would exceed the limit waits for earlier saves and logs a warning. A single save larger than the
    limit runs alone.

    Args:
        nbytes: The limit in bytes. None restores the default: `SHARDKEEP_MEMORY_BUDGET` bytes if that environment
            variable is set, else half of the memory available to the machine or container when the limit is first
            needed.

    Raises:
        ValueError: `nbytes` is zero or negative.

    >>> set_memory_budget(8 << 30)
    >>> set_memory_budget(None)
    """
    budget.set(nbytes)
