"""Commit callbacks: those of one manager start in the order in which the saves were called.

A callback runs on the thread of its own save, after the commit, once the callbacks of all earlier saves have run. Only
callbacks wait for each other, commits never do. A save that fails, or whose call is interrupted, gives up its place.

A callback may call the manager again. If it has to wait there for a callback that comes after it, it lets that one go
first: they start in order all the same, and nobody waits for itself.
"""

from collections.abc import Callable, Sequence

from shardkeep.errors import CallbackError
from shardkeep.runtime.scopes import Scope
from shardkeep.runtime.turns import Turn


class Callback(Turn):
    """The callback of one save, and its place among those with the same `order`, from `enter` until it is released."""

    def __init__(self, call: Callable[[], object], order: object, path: str, scope: Scope) -> None:
        super().__init__(order, scope)
        self._call, self._path = call, path
        self._is_running = False

    def run(self, catch: type[BaseException] = Exception) -> CallbackError | None:
        """Call it when it is its turn. What it raises is returned as a `CallbackError`."""
        self.wait()
        self._is_running = True
        try:
            self._call()
        except catch as raised:
            return callback_error(self._path, raised)
        finally:
            self.release()
        return None

    def _look(self, ahead: Sequence[Turn]) -> None:
        for other in tuple(self.line):
            if other is not self and other.scope.is_below:
                other.pass_over()

    @property
    def is_running_here(self) -> bool:
        """Whether this function was called, directly or not, by the callback."""
        return self._is_running and self.scope.is_below


def is_inside_callback() -> bool:
    """Whether a callback is running on this thread, and has called this."""
    return any(isinstance(turn, Callback) and turn.is_running_here for turn in tuple(Callback.line))


def callback_error(path: str, raised: BaseException) -> CallbackError:
    """The error for a save that is committed and whose callback raised something."""
    error = CallbackError(f"{path} was saved, but the callback raised {type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error
