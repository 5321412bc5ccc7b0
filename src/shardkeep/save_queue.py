"""The order of saves: those to one target are made one after another, in the order of the calls."""

import os
from contextlib import suppress

from shardkeep.errors import ConflictError
from shardkeep.scopes import LOOK, Latch, Scope, sweep


class QueueEntry:
    """A save's place in the queue for a target, from `enter` until it is released."""

    def __init__(self, target: str, scope: Scope) -> None:
        self._target, self._scope = target, scope
        self._done = Latch()

    def enter(self) -> None:
        _queue.append(self)

    def wait(self) -> None:
        """Until all saves to the target that were called earlier have ended."""
        while ahead := self._ahead():
            for other in ahead:
                if other._scope.is_below:
                    raise ConflictError(
                        f"{self._scope.what}: this call would wait forever for another one, {other._scope.what}, which "
                        "it interrupted: it was made by a signal handler, on the same thread. Nothing was written. In "
                        "a handler, save to another path, or set a flag and save from the training loop"
                    )
            if not ahead[-1]._done.wait(LOOK):
                sweep()  # its clean-up may have been interrupted

    def _ahead(self) -> "list[QueueEntry]":
        entries = list(_queue)
        mine = entries.index(self) if self in entries else 0
        return [other for other in entries[:mine] if other._target == self._target and not other._done.is_set]

    def release(self) -> None:
        self._done.set()
        with suppress(ValueError):
            _queue.remove(self)


_queue: list[QueueEntry] = []
os.register_at_fork(after_in_child=_queue.clear)
