"""Removing run directories of a Checkpointer in the background."""

import logging
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from shardkeep.errors import CheckpointNotFoundError, IntegrityError
from shardkeep.foreign.rundirs import BEING_DELETED, IS_TEMPORARY, METADATA, read_metadata, write_metadata
from shardkeep.model.values import JsonObject
from shardkeep.runs.control import Control
from shardkeep.stores.location import Location, exists, store_at
from shardkeep.targets.cleanup import delete
from shardkeep.targets.resolve import find

log = logging.getLogger("shardkeep")


@dataclass(frozen=True)
class Removal:
    """A directory to remove. `if_temporary`: only if its metadata still says, at that time, that it is temporary."""

    place: Location
    if_temporary: bool


class Removals:
    """Removes directories one after another, on a thread that exists while there are any.

    The thread keeps the program alive until they are removed. What cannot be removed is logged, and stays marked, so
    that a later run removes it. What a reader holds is tried again when something else is removed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[Removal] = deque()  # the first one is being removed
        self._postponed: list[Removal] = []
        self._thread: threading.Thread | None = None

    def add(self, removal: Removal) -> None:
        with self._lock:
            self._waiting.extend([*self._postponed, removal])
            self._postponed.clear()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="shardkeep-removal", daemon=False)
                self._thread.start()

    def wait(self, place: Location | None = None) -> None:
        """Wait until everything is removed; or, with a place, only if that is one of the directories."""
        while True:
            with self._lock:
                thread = self._thread
                concerned = place is None or any(each.place == place for each in self._waiting)
            if thread is None or not concerned or not thread.is_alive():
                return
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                removal = self._waiting[0]
            postponed = False
            try:
                postponed = not remove_run(removal)
            except Exception as error:  # noqa: BLE001  (nobody waits for this thread: it is told, and the rest removed)
                log.error("%s could not be removed: %s", removal.place, error)
            with self._lock:
                self._waiting.popleft()
                if postponed:
                    self._postponed.append(removal)


def remove_run(removal: Removal) -> bool:
    """Remove a run directory with everything in it. Returns False if a reader holds it, so that it has to stay for now.

    No reader finds half of it: first its metadata is marked, so that it is not discovered any more, then the manifest
    goes, then the other files, and the metadata last. `ConflictError` if a save to it is running.

    A reader who holds a step, as with `Run.hold`, writes its hold and then looks for the mark. So either the hold is
    seen here, or the mark there.
    """
    place = removal.place
    try:
        metadata = read_metadata(place)
    except FileNotFoundError:
        metadata = {}
    except IntegrityError as error:
        if removal.if_temporary:
            log.warning("%s is not removed: whether it is temporary is unknown (%s)", place, error)
            return True
        metadata = {}
    if removal.if_temporary and not metadata.get("is_temporary"):
        log.info("%s is not removed: it is no longer temporary, or gone", place)
        return True
    if not exists(place):
        return True
    write_metadata(place, {**metadata, IS_TEMPORARY: True, BEING_DELETED: True})
    protection = Control(place.parent).protection(place.name)
    if protection is not None:
        _unmark(place, metadata)
        log.info("%s is not removed: it is %s", place, protection)
        return protection == "pinned"
    with suppress(CheckpointNotFoundError, IntegrityError):  # another program's checkpoint, or a damaged one
        delete(find(place))
    store_at(place, confined=False).clear(METADATA)
    return True


def _unmark(place: Location, metadata: JsonObject) -> None:
    """Give a directory that is not removed the metadata back that it had."""
    if metadata:
        write_metadata(place, {key: value for key, value in metadata.items() if key != BEING_DELETED})
    else:
        store_at(place, confined=False).remove([METADATA])
