"""Turns in a line: calls that wait for those before them."""

import datetime
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from shardkeep.runtime.scopes import LOOK, Latch, Scope, sweep
from shardkeep.system import after_fork_in_child


class Turn(ABC):
    """The place of a call in a line, from `enter` until it is released.

    Args:
        key: It waits only for places with the same key.
        scope: The scope of the call.

    Attributes:
        line: The places of all calls, in the order in which they entered. Each kind of place has a line of its own.
        since: When it entered.
    """

    line: "ClassVar[list[Turn]]"
    since: datetime.datetime = datetime.datetime.min

    def __init_subclass__(cls) -> None:
        cls.line = []
        after_fork_in_child(cls.line.clear)

    def __init__(self, key: object, scope: Scope) -> None:
        self._key, self.scope = key, scope
        self._passed = Latch()  # the next one may go

    def enter(self) -> None:
        """Join the end of the line."""
        self.since = datetime.datetime.now(datetime.UTC)
        self.line.append(self)

    def wait(self) -> None:
        """Wait until all places before this one were released or passed over."""
        while True:
            line = list(self.line)
            before = line[: line.index(self)] if self in line else []
            ahead = [other for other in before if other.is_for(self._key)]
            if not ahead:
                return
            self._look(ahead)
            if not ahead[-1]._passed.wait(LOOK):
                sweep()  # the cleanup of that call may have been interrupted

    @abstractmethod
    def _look(self, ahead: "Sequence[Turn]") -> None:
        """Deal with calls that cannot end before this one does, because they are below it on the same thread."""

    def is_for(self, key: object) -> bool:
        """Whether it has this key, and those behind it have to wait."""
        return self._key == key and not self._passed.is_set

    def pass_over(self) -> None:
        """Let those behind it go first."""
        self._passed.set()

    def release(self) -> None:
        self._passed.set()
        with suppress(ValueError):
            self.line.remove(self)
