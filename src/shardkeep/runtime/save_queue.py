"""The order of saves: saves to one target run one after another, in the order of the calls."""

import datetime
import os
from contextlib import suppress
from dataclasses import dataclass, field

from shardkeep.errors import ConflictError
from shardkeep.runtime.scopes import LOOK, Latch, Scope, sweep


@dataclass(eq=False)
class QueueEntry:
    """The place of a save in the queue for a target, from `enter` to `release`.

    Args:
        target: What identifies the target: a URL, or a path without symbolic links.
        scope: The scope of the save.
    """

    target: str
    scope: Scope
    since: datetime.datetime = datetime.datetime.min
    _done: Latch = field(default_factory=Latch)

    def enter(self) -> None:
        """Join the end of the queue."""
        self.since = datetime.datetime.now(datetime.UTC)
        _queue.append(self)

    def wait(self) -> None:
        """Wait until all earlier saves to the target have ended."""
        while ahead := self._ahead():
            for other in ahead:
                if other.scope.is_below:
                    raise ConflictError(
                        f"{self.scope.what}: a signal handler made this call while the same thread was "
                        f"{other.scope.what}, so waiting for that would never end. Nothing was written. In a signal "
                        "handler, save to another path, or set a flag and save from the training loop"
                    )
            if not ahead[-1]._done.wait(LOOK):
                sweep()  # the cleanup of that save may have been interrupted

    def _ahead(self) -> "list[QueueEntry]":
        entries = list(_queue)
        mine = entries.index(self) if self in entries else 0
        return [other for other in entries[:mine] if other.is_for(self.target)]

    def is_for(self, target: str) -> bool:
        """Whether it is a save to this target that has not ended."""
        return self.target == target and not self._done.is_set

    def release(self) -> None:
        self._done.set()
        with suppress(ValueError):
            _queue.remove(self)


def running_since(target: str) -> datetime.datetime | None:
    """When the first save of this process to a target that has not ended was called; None if there is none."""
    return next((entry.since for entry in list(_queue) if entry.is_for(target)), None)


_queue: list[QueueEntry] = []
os.register_at_fork(after_in_child=_queue.clear)
