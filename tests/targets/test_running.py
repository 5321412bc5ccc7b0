"""Saves that are not committed: who makes them, since when, and whether they are running."""

import datetime
import json
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Place, _alone, watched  # noqa: F401
from buckets.writers import Writer, until
from faults.spawner import Fault, Pause, Spawner
from faults.states import make, same
from shardkeep.catalog import find
from shardkeep.stores.base import Store
from shardkeep.stores.location import location, store_at
from shardkeep.targets.running import explain_unfinished, now, record_lines, recorded_names, unfinished_saves
from support import FORMATS, hold

ID = "ab" * 16


def hold_record(store: Store, name: str, line: bytes) -> Any:
    return hold(store, f"{store.saves}/{name}", line)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_load_during_the_first_save_says_who_saves_and_since_when(
    kind: str, tmp_path: Path, spawner: Spawner
) -> None:
    """And once it is committed, everything works."""
    ending, arguments = FORMATS[kind]
    path = tmp_path / f"run{ending}"
    pause = Pause(tmp_path / "pause")
    fault = Fault(str(tmp_path), "pause", 2, calls="write", pause=str(pause.path))
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    saving = spawner.start("save", fault, path=str(path), kind="plain", number=1, **arguments)
    pause.reached()
    told = re.compile(
        rf"{re.escape(str(path))} holds no committed checkpoint yet: a save by process {saving.pid} on "
        rf"{re.escape(socket.gethostname())}, started (\S+ \S+) UTC, is running\. Wait until it has finished$"
    )
    for action in (shardkeep.load, shardkeep.inspect):
        with pytest.raises(shardkeep.IncompleteCheckpointError, match=told) as raised:
            action(path)
    found = told.search(str(raised.value))
    assert found is not None
    since = datetime.datetime.fromisoformat(found[1] + "+00:00")
    assert before <= since <= datetime.datetime.now(datetime.UTC)
    (problem,) = shardkeep.verify(path).problems
    assert told.search(problem.message)
    assert not shardkeep.exists(path)
    assert shardkeep.latest(tmp_path) is None
    pause.go()
    assert saving.wait().ok
    assert same(shardkeep.load(path), make("plain", 1))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_save_that_died_is_said_to_be_dead_and_by_whom_it_was(kind: str, tmp_path: Path, spawner: Spawner) -> None:
    ending, arguments = FORMATS[kind]
    path = tmp_path / f"run{ending}"
    pause = Pause(tmp_path / "pause")
    fault = Fault(str(tmp_path), "pause", 2, calls="write", pause=str(pause.path))
    saving = spawner.start("save", fault, path=str(path), kind="plain", number=1, **arguments)
    pause.reached()
    saving.kill()
    saving.wait()
    told = (
        rf"a save by process {saving.pid} on {re.escape(socket.gethostname())}, started 20\S+ \S+ UTC, never "
        r"finished\. Save to the same path again, or remove the remains with shardkeep clean or shardkeep.delete$"
    )
    with pytest.raises(shardkeep.IncompleteCheckpointError, match=told):
        shardkeep.load(path)
    shardkeep.delete(path)
    assert not path.exists()


def test_a_save_that_died_on_another_host_may_still_be_running(tmp_path: Path) -> None:
    """Where locks do not reach other hosts, a free lock proves nothing."""
    store = store_at(location(str(tmp_path)))
    line = json.dumps({"host": "elsewhere", "pid": 7, "since": now()}).encode()
    hold_record(store, ID, b"[]\n" + line).release()
    with pytest.raises(
        shardkeep.IncompleteCheckpointError, match=r"If that process is still running on elsewhere, wait"
    ):
        shardkeep.load(tmp_path)


def test_a_running_delete_is_told_apart(tmp_path: Path) -> None:
    store = store_at(location(str(tmp_path)))
    held = hold_record(store, "0" * 32, record_lines(["w"], now()))
    with pytest.raises(
        shardkeep.IncompleteCheckpointError,
        match=rf"is being deleted: a delete by process {os.getpid()} on .* is running",
    ):
        shardkeep.load(tmp_path)
    held.release()
    with pytest.raises(shardkeep.IncompleteCheckpointError, match="a delete by process .* never finished"):
        shardkeep.load(tmp_path)


def test_a_running_save_counts_before_dead_ones(tmp_path: Path) -> None:
    store = store_at(location(str(tmp_path)))
    hold_record(store, "00" * 16, record_lines([], now())).release()
    held = hold_record(store, ID, record_lines([], now()))
    assert [(save.save_id, save.is_running) for save in unfinished_saves(store)] == [(ID, True), ("00" * 16, False)]
    held.remove()


def test_the_first_process_of_several_speaks_for_a_save(tmp_path: Path) -> None:
    store = store_at(location(str(tmp_path)))
    held = [hold_record(store, name, record_lines([], now())) for name in (ID, f"{ID}.1", f"{ID}.10")]
    assert [(save.save_id, save.is_running) for save in unfinished_saves(store)] == [(ID, True)]
    held[0].release()
    assert [save.is_running for save in unfinished_saves(store)] == [False]
    for one in held[1:]:
        one.release()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'["a", "b"]',
        b'["a"]\n{"host": "h"}',
        b'["a"]\n{"host": "h", "pid": "x", "since": "now"}',
        b'["a"]\n{"host": "h\\n\\u001b[31m", "pid": 1, "since": "2026-01-01T00:00:00+00:00"}',
        b'["a"]\n{"host": 5, "pid": 1, "since": 7}',
        b'["a"]\n{"host": "h", "pid": 1, "since": "2026-01-01T00:00:00"}',
        b'["a"]\n[[[["pid"',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_records_of_old_versions_and_damaged_ones_name_nobody(line: bytes, tmp_path: Path) -> None:
    store = store_at(location(str(tmp_path)))
    held = hold_record(store, ID, line)
    (save,) = unfinished_saves(store)
    assert (save.is_running, save.pid, save.host, save.since) == (True, None, None, None)
    assert "a save is running" in explain_unfinished(store, "run")
    assert explain_unfinished(store, "run").isprintable()
    held.release()
    assert "never finished" in explain_unfinished(store, "run")


def test_older_readers_find_the_names_in_a_record(tmp_path: Path) -> None:
    """Names are the first line, and a line that is no list is skipped: it was so before records named anybody."""
    store = store_at(location(str(tmp_path)))
    held = hold_record(store, ID, record_lines(["a", "b/c"], now()))
    held.append(json.dumps(["old"]).encode())
    assert recorded_names(store, ID) == ["a", "b/c", "old"]
    lines = (tmp_path / ".shardkeep" / "saves" / ID).read_text().splitlines()
    assert json.loads(lines[0]) == ["a", "b/c"]
    assert json.loads(lines[1]).keys() == {"host", "pid", "since"}
    held.remove()


def test_a_probe_changes_nothing_and_needs_no_right_to_write(spawner: Spawner) -> None:
    with tempfile.TemporaryDirectory() as directory:  # which another user may enter
        Path(directory).chmod(0o755)
        path = Path(directory) / "run"
        shardkeep.save(path, {"w": np.ones(3)})
        (path / "manifest.json").unlink()
        store = find(location(path)).store
        held = hold_record(store, ID, record_lines([], now()))
        outcome = spawner.run("load", uid=65534, path=str(path), kind="plain", number=1)
        assert outcome.error == "IncompleteCheckpointError"
        assert f"process {os.getpid()}" in outcome.message
        assert "is running" in outcome.message
        assert [save.is_running for save in unfinished_saves(store)] == [True]
        held.remove()
        outcome = spawner.run("load", uid=65534, path=str(path), kind="plain", number=1)
        assert "never finished" in outcome.message


def test_in_a_bucket_too(watched: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a save that died cannot be told from one that is running until its lease is over."""
    monkeypatch.setenv("SHARDKEEP_LEASE", "2.0")
    path = f"{watched.url}/run"
    watched.inject("delay", "PUT", "leaf3", times=10, seconds=60)
    with Writer.hire() as writer:
        writer.save(path, 2, watched.environment(), format="zarr")
        until(lambda: any("leaf1" in name for name in watched.names("run")))
        told = (
            rf"yet: a save by process {writer.process.pid} on \S+, started .* UTC, is running, or died a moment ago\."
        )
        with pytest.raises(shardkeep.IncompleteCheckpointError, match=told):
            shardkeep.load(path)
        assert not shardkeep.exists(path)
        before = watched.names("run/.shardkeep")
    assert before.keys() == watched.names("run/.shardkeep").keys(), "a reader puts nothing there"

    def says() -> bool:
        with pytest.raises(shardkeep.IncompleteCheckpointError, match=f"process {writer.process.pid} on") as raised:
            shardkeep.load(path)
        return "never finished" in str(raised.value)

    until(says)
