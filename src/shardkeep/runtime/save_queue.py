"""The order of saves: saves to one target run one after another, in the order of the calls."""

import datetime
from collections.abc import Sequence

from shardkeep.errors import ConflictError
from shardkeep.runtime.turns import Turn


class QueueEntry(Turn):
    """The place of a save in the queue for a target, from `enter` to `release`.

    Its key identifies the target: a URL, or a path without symbolic links.
    """

    def _look(self, ahead: Sequence[Turn]) -> None:
        for other in ahead:
            if other.scope.is_below:
                raise ConflictError(
                    f"{self.scope.what}: a signal handler made this call while the same thread was "
                    f"{other.scope.what}, so waiting for that would never end. Nothing was written. In a signal "
                    "handler, save to another path, or set a flag and save from the training loop"
                )


def running_since(target: str) -> datetime.datetime | None:
    """When the first save of this process to a target that has not ended was called; None if there is none."""
    return next((entry.since for entry in list(QueueEntry.line) if entry.is_for(target)), None)
