"""Commit callbacks: those of one manager start in the order in which the saves were called.

A callback runs on the thread of its own save, after the commit, once the callbacks of all earlier saves have run. Only
callbacks wait for each other, commits never do. A save that fails, or whose call is interrupted, gives up its place.

A callback may call the manager again. If it has to wait there for a callback that comes after it, it lets that one go
first: they start in order all the same, and nobody waits for itself.
"""

import os
from collections.abc import Callable
from contextlib import suppress

from shardkeep.errors import CallbackError
from shardkeep.runtime.scopes import LOOK, Latch, Scope, sweep


class Callback:
    """The callback of one save, and its place among those with the same `order`, from `enter` until it is released."""

    def __init__(self, call: Callable[[], object], order: object, path: str, scope: Scope) -> None:
        self._call, self._order, self._path, self._scope = call, order, path, scope
        self._passed = Latch()  # the next one may start
        self._is_running = False

    def enter(self) -> None:
        _entered.append(self)

    def run(self, catch: type[BaseException] = Exception) -> CallbackError | None:
        """Call it when it is its turn. What it raises is returned as a `CallbackError`."""
        self._wait()
        self._is_running = True
        try:
            self._call()
        except catch as raised:
            return callback_error(self._path, raised)
        finally:
            self.release()
        return None

    def _wait(self) -> None:
        while ahead := self._ahead():
            for other in tuple(_entered):
                if other is not self and other._scope.is_below:  # it cannot end before this one does
                    other._passed.set()
            if not ahead[-1]._passed.wait(LOOK):
                sweep()  # the call it belongs to may have been interrupted

    def _ahead(self) -> "list[Callback]":
        entered = list(_entered)
        mine = entered.index(self) if self in entered else 0
        return [other for other in entered[:mine] if other._order is self._order and not other._passed.is_set]

    @property
    def is_running_here(self) -> bool:
        """Whether this function was called, directly or not, by the callback."""
        return self._is_running and self._scope.is_below

    def release(self) -> None:
        self._passed.set()
        with suppress(ValueError):
            _entered.remove(self)


def is_inside_callback() -> bool:
    """Whether a callback is running on this thread, and has called this."""
    return any(callback.is_running_here for callback in tuple(_entered))


def callback_error(path: str, raised: BaseException) -> CallbackError:
    """The error for a save that is committed and whose callback raised something."""
    error = CallbackError(f"{path} was saved, but the callback raised {type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


_entered: list[Callback] = []
os.register_at_fork(after_in_child=_entered.clear)
