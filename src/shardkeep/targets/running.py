"""The records of saves that are not committed: what they will write, who makes them, since when, and whether they run.

A record is a file of JSON lines (docs/format.md). Records of older versions do not say who made them.
"""

import datetime
import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from shardkeep.model.naming import check_name
from shardkeep.model.values import Json, JsonObject
from shardkeep.stores.base import Store

DELETE = "0" * 32  # the id under which a delete is recorded
_LONGEST = 100  # characters of a host name that are shown


def record_lines(names: list[str], since: str) -> bytes:
    """The first lines of a record: the names that will be written, and who writes them since when."""
    who = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    return b"\n".join(json.dumps(line).encode() for line in (names, who))


def now() -> str:
    """The time as manifests and records have it: ISO 8601, UTC, with microseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def recorded_names(store: Store, save_id: str) -> list[str]:
    """The names that a save recorded. A last line that was cut short is ignored."""
    names: list[str] = []
    try:
        for line in _lines(store, f"{store.saves}/{save_id}"):
            if isinstance(line, list):
                names += [check_name(name) for name in line]
    except (ValueError, TypeError):
        pass
    return names


def _lines(store: Store, name: str) -> Iterator[Json]:
    """The lines of a record up to one that is not JSON; none if there is no record."""
    try:
        lines = store.read(name).splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            return


@dataclass(frozen=True)
class Unfinished:
    """A save (or a delete) that has a record, so is not finished. Who makes it is None in records of old versions."""

    save_id: str
    is_running: bool
    host: str | None = None
    pid: int | None = None
    since: datetime.datetime | None = None

    @property
    def is_delete(self) -> bool:
        return self.save_id == DELETE

    def __str__(self) -> str:
        what = "a delete" if self.is_delete else "a save"
        if self.pid is None or self.since is None:
            return what
        return f"{what} by process {self.pid} on {self.host}, started {self.since.astimezone(datetime.UTC):%F %T} UTC,"


def unfinished_saves(store: Store) -> list[Unfinished]:
    """The saves that have a record; those that are running come first. Changes nothing, and takes no lock."""
    # Further processes of a save have records of their own, <save id>.<process>. The first one speaks for all.
    names = {name.partition(".")[0]: name for name in sorted(store.children(store.saves), reverse=True)}
    found = [_look_at(store, save_id, name) for save_id, name in names.items()]
    return sorted(found, key=lambda save: (not save.is_running, save.save_id))


def _look_at(store: Store, save_id: str, name: str) -> Unfinished:
    is_running = store.is_held(f"{store.saves}/{name}")
    maker = maker_of(store, f"{store.saves}/{name}")
    return Unfinished(save_id, is_running, *maker) if maker else Unfinished(save_id, is_running)


def maker_of(store: Store, name: str) -> tuple[str, int, datetime.datetime] | None:
    """Who made a record: host, process and since when. None if it does not say, or there is no record."""
    try:
        makers = (line for line in _lines(store, name) if isinstance(line, dict) and "pid" in line)
        who = next(makers, JsonObject())
        host, pid = str(who["host"])[:_LONGEST], int(cast(int, who["pid"]))
        since = datetime.datetime.fromisoformat(cast(str, who["since"]))
    except (KeyError, TypeError, ValueError, OSError):
        return None
    return None if not host.isprintable() or since.tzinfo is None else (host, pid, since)


def explain_unfinished(store: Store, where: str, saves: Sequence[Unfinished] | None = None) -> str:
    """For an error: why there is no committed checkpoint where there is a control directory.

    Args:
        store: That of the checkpoint.
        where: Its path.
        saves: What `unfinished_saves` found. None: look now.
    """
    saves = unfinished_saves(store) if saves is None else saves
    if not saves:
        return (
            f"{where} holds no committed checkpoint: a save to it never finished, or a delete was interrupted. "
            "Save to the same path again, or remove the remains with shardkeep clean or shardkeep.delete"
        )
    first = saves[0]
    perhaps = ", or died a moment ago" if store.has_leases else ""  # until its lease ends, nobody can tell
    if first.is_running and first.is_delete:
        return f"{where} is being deleted: {first} is running{perhaps}"
    if first.is_running:
        return f"{where} holds no committed checkpoint yet: {first} is running{perhaps}. Wait until it has finished"
    elsewhere = first.host is not None and first.host != socket.gethostname()
    still = f" If that process is still running on {first.host}, wait for it." if elsewhere else ""
    return (
        f"{where} holds no committed checkpoint: {first} never finished.{still} "
        "Save to the same path again, or remove the remains with shardkeep clean or shardkeep.delete"
    )
