"""What process 0 does once a checkpoint of a Checkpointer is saved: describe it, remove temporary ones before it."""

import datetime
import threading
from collections.abc import Callable

from shardkeep.eformer.removal import Removal, Removals
from shardkeep.foreign.rundirs import newest_of, parse_time, run_directories, write_metadata
from shardkeep.stores.location import Location

_TICK = datetime.timedelta(microseconds=1)


class StepCommits:
    """The checkpoints of one Checkpointer in the order of their commits. Used by process 0 only.

    Args:
        clock: Returns the current time, for timestamps.
    """

    def __init__(self, clock: Callable[[], datetime.datetime]) -> None:
        self.removals = Removals()
        self._clock = clock
        self._lock = threading.RLock()
        self._temporary: list[Location] = []  # to be removed after the next commit
        self._newest: datetime.datetime | None = None  # the time of the newest checkpoint that is known

    def look_for_old(self, base: Location, removes: bool) -> None:
        """Find the temporary checkpoints that earlier runs have left. Call this once, before the first commit.

        Args:
            base: The directory of the checkpoints.
            removes: Whether they are removed after the next commit.
        """
        with self._lock:
            found = run_directories(base) if removes else []
            newest = newest_of(found)
            if newest is not None and newest.time is not None and (self._newest is None or newest.time > self._newest):
                self._newest = newest.time
            self._temporary = [each.place for each in found if each.is_temporary and each.place != base]

    def describe(self, place: Location, step: int, is_temporary: bool) -> None:
        """Write `metadata.json`, by which a checkpoint is discovered. Call it when everything else is saved."""
        with self._lock:
            timestamp = self._timestamp()
        write_metadata(place, {"step": step, "timestamp": timestamp, "is_temporary": is_temporary})

    def commit(self, place: Location, step: int, is_temporary: bool) -> None:
        """Describe the checkpoint of a step, then begin to remove the temporary ones before it."""
        self.describe(place, step, is_temporary)
        with self._lock:
            old, self._temporary = self._temporary, [place] if is_temporary else []
        for each in old:
            if each != place:
                self.removals.add(Removal(each, if_temporary=True))

    def _timestamp(self) -> str:
        """The time, but later than that of the checkpoint before: clocks are set back, and local time in autumn."""
        now = self._clock()
        read = parse_time(now.isoformat())
        if self._newest is not None and read <= self._newest:
            read = self._newest + _TICK
            # A time without a zone is local, and is read as such.
            now = read.astimezone(now.tzinfo) if now.tzinfo else read.astimezone().replace(tzinfo=None)
        self._newest = read
        return now.isoformat()
