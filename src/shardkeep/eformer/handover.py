"""Saves that one of JAX's own checkpoint managers waits for."""

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from shardkeep.jaxapi import finish_on_thread
from shardkeep.saving.callbacks import callback_error
from shardkeep.saving.pending import BackgroundSave

log = logging.getLogger("shardkeep")


class HandedSave(NamedTuple):
    """A save that a JAX manager waits for, and the callback to run when it is committed."""

    save: BackgroundSave
    callback: Callable[[], None] | None

    def finish(self) -> None:
        """Wait for the commit, then run the callback, on process 0 only."""
        self.save.wait()
        if self.callback is None or jax.process_index() != 0:
            return
        try:
            self.callback()
        except BaseException as raised:  # this is not the main thread: `sys.exit` would only end the waiting
            error = callback_error(self.save.path, raised)
            log.error("%s", error)
            raise error from raised


class HandOver:
    """Makes a JAX manager wait for our saves: a serialization of nothing whose commit step ends when they do.

    A save that comes while that step is running joins it, so that no call waits for an earlier save. Callbacks run in
    that step too, on the manager's thread as JAX does it, in the order of the calls. What failed is kept for the
    manager's next wait, not raised by the next save.
    """

    def __init__(self) -> None:
        self._starting = threading.RLock()
        self._lock = threading.RLock()
        self._handed: list[HandedSave] = []
        self._failure: Exception | None = None
        self._under_way = False

    def add(self, manager: Any, handed: HandedSave) -> None:
        with self._starting:
            with self._lock:
                self._handed.append(handed)
                if self._under_way:
                    return
                self._under_way = True
            # On a new thread: JAX's manager starts an event loop, and there may be a running one here.
            thread = threading.Thread(target=self._start, args=(manager,), name="shardkeep-hand-over")
            thread.start()
            thread.join()

    def _start(self, manager: Any) -> None:
        try:
            manager.wait_until_finished()
        except Exception as error:  # noqa: BLE001  (raised by the commit step)
            self._failure = error
        finish_on_thread(manager, self._commit)

    def _commit(self) -> None:
        failure, self._failure = self._failure, None
        while True:
            with self._lock:
                if not self._handed:
                    self._under_way = False
                    break
                handed = self._handed.pop(0)
            try:
                handed.finish()
            except Exception as error:  # noqa: BLE001  (raised below; the others were logged)
                failure = failure or error
        if failure is not None:
            raise failure


hand_overs: weakref.WeakKeyDictionary[Any, HandOver] = weakref.WeakKeyDictionary()
