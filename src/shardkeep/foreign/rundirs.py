"""Run directories of eFormer's Checkpointer: checkpoints in `<base>/run-<step>/`, each with a `metadata.json`.

`metadata.json` is written last, so a directory that has one holds a complete checkpoint:

    {"step": 100, "timestamp": "2026-01-31T12:00:00.000000", "is_temporary": false}

A timestamp without a time zone is in local time, as eFormer writes it. While a directory is being removed, its
`metadata.json` also has `"being_deleted": true` and goes last, so that an interrupted removal can be completed later.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardkeep.errors import IntegrityError, ShardkeepError, storage_error
from shardkeep.model.values import Json, JsonObject
from shardkeep.runtime.crew import run_tasks
from shardkeep.stores.base import Store
from shardkeep.stores.local.descriptors import make_durable_directories
from shardkeep.stores.location import Location, location, store_at

METADATA = "metadata.json"
IS_TEMPORARY, BEING_DELETED = "is_temporary", "being_deleted"  # in the metadata
_NO_TIME = "1970-01-01T00:00:00"  # what eFormer takes for a timestamp that is missing


@dataclass(frozen=True)
class RunDirectory:
    """A checkpoint of a Checkpointer, as its `metadata.json` describes it. The checkpoint itself was not looked at.

    Attributes:
        place: The directory of the checkpoint.
        step: The training step; None if `problem` is set.
        time: When it was committed, in UTC; None if `problem` is set.
        is_temporary: Whether it is to be removed once a newer one is committed.
        being_deleted: Whether its removal has begun.
        problem: Why `metadata.json` cannot be read; None if it can.
    """

    place: Location
    step: int | None = None
    time: datetime.datetime | None = None
    is_temporary: bool = False
    being_deleted: bool = False
    problem: str | None = None

    @property
    def path(self) -> str:
        """The path or URL of the checkpoint."""
        return str(self.place)

    @property
    def age(self) -> tuple[bool, float, int, str]:
        """What orders checkpoints: those with unreadable metadata first, then by time, then by step."""
        time = float("-inf") if self.time is None else self.time.timestamp()
        return (self.problem is None, time, -1 if self.step is None else self.step, self.path)


def run_directories(base: object) -> list[RunDirectory]:
    """The checkpoints of a Checkpointer directly in a directory, and the directory itself if it is one; oldest first.

    Only the `metadata.json` of each is read. One that cannot be understood gives a `RunDirectory` with a `problem`. In
    a bucket this costs one delimited listing, and a request for each directory, several at a time.

    Args:
        base: The directory, or the `gs://` or `s3://` URL. It need not exist.

    >>> import pathlib
    >>> for step, text in (5, '{"step": 5, "timestamp": "2026-01-31T12:00:00", "is_temporary": true}'), (6, "{"):
    ...     (tmp / f"base/run-{step}").mkdir(parents=True)
    ...     _ = (tmp / f"base/run-{step}/metadata.json").write_text(text)
    >>> [(found.place.name, found.step, found.is_temporary) for found in run_directories(tmp / "base")]
    [('run-6', None, False), ('run-5', 5, True)]
    """
    place = base if isinstance(base, Location) else location(base, "run_directories(base)")
    store = store_at(place, confined=False)
    names = ["", *(name for name in store.entries()[0] if not name.startswith("."))]
    found: dict[str, RunDirectory] = {}

    def read(name: str) -> None:
        described = describe(store, place, name)
        if described is not None:
            found[name] = described

    if store.traits.costly_requests:
        run_tasks([lambda name=name: read(name) for name in names], store.traits.concurrency)
    else:
        for name in names:
            read(name)
    return sorted(found.values(), key=lambda each: each.age)


def newest_of(directories: Sequence[RunDirectory]) -> RunDirectory | None:
    """The newest checkpoint: the latest timestamp, then the highest step. Those being removed are left out."""
    return max((each for each in directories if not each.being_deleted), key=lambda each: each.age, default=None)


def describe(store: Store, base: Location, name: str) -> RunDirectory | None:
    """The checkpoint in a directory of a store that is at `base`; None if it has no metadata."""
    place = base / name if name else base
    try:
        metadata = _parsed(store, f"{name}/{METADATA}" if name else METADATA)
        return RunDirectory(
            place,
            _as_step(metadata.get("step", -1)),
            parse_time(metadata.get("timestamp", _NO_TIME)),
            bool(metadata.get(IS_TEMPORARY, False)),
            bool(metadata.get(BEING_DELETED, False)),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, OverflowError, PermissionError) as error:
        return RunDirectory(place, problem=str(error))


def _as_step(step: Json) -> int:
    if not isinstance(step, int | float | str):
        raise TypeError(f"the step is {step!r}, not a number")
    return int(step)


def is_described_later(metadata: Mapping[str, object]) -> bool:
    """Whether the metadata of a checkpoint says that `on_step` saved it, which writes `metadata.json` when all is done.

    >>> is_described_later({"custom_metadata": {"step": 3, "is_temporary": True}}), is_described_later({"step": 3})
    (True, False)
    """
    own = metadata.get("custom_metadata")
    return isinstance(own, Mapping) and IS_TEMPORARY in own


def parse_time(text: Json) -> datetime.datetime:
    """A timestamp in UTC. One without a time zone is in local time."""
    if not isinstance(text, str):
        raise TypeError(f"the timestamp is {text!r}, not a string")
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)


def read_metadata(place: Location) -> JsonObject:
    """The `metadata.json` of a checkpoint. `FileNotFoundError` if it has none, `IntegrityError` if it is damaged."""
    try:
        return _parsed(store_at(place, confined=False), METADATA)
    except NotADirectoryError as error:
        raise FileNotFoundError(f"{place} is not a directory") from error


def _parsed(store: Store, name: str) -> JsonObject:
    where = store.locate(name)
    try:
        found: Json = json.loads(store.read(name))
    except (ValueError, RecursionError) as error:
        if isinstance(error, IntegrityError):
            raise
        raise IntegrityError(f"{where} is not JSON: {error}", file=where) from error
    if not isinstance(found, dict):
        raise IntegrityError(f"{where} is not a JSON object", file=where)
    return found


def write_metadata(place: Location, metadata: Mapping[str, object]) -> None:
    """Write the `metadata.json` of a checkpoint, durably and in one step."""
    try:
        if not place.is_url:
            make_durable_directories(place.text)
        store_at(place, confined=False).replace(METADATA, json.dumps(dict(metadata)).encode())
    except OSError as error:
        if isinstance(error, ShardkeepError):
            raise
        then = "The checkpoint cannot be discovered without it"
        raise storage_error(error, f"writing {place / METADATA}", then) from error
