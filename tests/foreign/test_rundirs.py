"""Run directories of a Checkpointer, listed by their metadata alone."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardkeep.errors import IntegrityError
from shardkeep.foreign.rundirs import newest_of, parse_time, read_metadata, run_directories, write_metadata
from shardkeep.stores.location import location


def describe(path: Path, text: Any = None, **metadata: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "metadata.json").write_text(json.dumps(metadata) if text is None else text)


def names(base: Path) -> list[str]:
    return [found.place.name for found in run_directories(base)]


def test_the_time_decides_then_the_step(tmp_path: Path) -> None:
    describe(tmp_path / "b/run-9", step=9, timestamp="2026-01-01T00:00:01", is_temporary=True)
    describe(tmp_path / "b/run-10", step=10, timestamp="2026-01-01T00:00:00")
    describe(tmp_path / "b/run-2", step=2, timestamp="2026-01-01T00:00:00")
    assert names(tmp_path / "b") == ["run-2", "run-10", "run-9"]
    newest = newest_of(run_directories(tmp_path / "b"))
    assert newest is not None
    assert (newest.path, newest.step, newest.is_temporary) == (str(tmp_path / "b/run-9"), 9, True)


def test_the_base_itself_counts_and_what_has_no_metadata_does_not(tmp_path: Path) -> None:
    describe(tmp_path / "b", step=3, timestamp="2026-01-01T00:00:00")
    (tmp_path / "b/run-4").mkdir()
    (tmp_path / "b/file").write_text("")
    describe(tmp_path / "b/.hidden", step=5, timestamp="2027-01-01T00:00:00")
    assert [found.path for found in run_directories(tmp_path / "b")] == [str(tmp_path / "b")]
    assert run_directories(tmp_path / "absent") == []
    assert run_directories(tmp_path / "b/file") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ('{"step": 1, "timestamp": "yesterday"}', "Invalid isoformat"),
        ('{"step": 1, "timestamp": 7}', "not a string"),
        ('{"step": [1]}', "not a number"),
        ('{"step": "many"}', "invalid literal"),
        ('{"step": 1e999}', "infinity"),
        ('{"step": 1, "timestamp": "0001-01-01T00:00:00+14:00"}', "out of range"),
    ],
)
def test_unreadable_metadata_comes_first_and_says_why(tmp_path: Path, text: str, problem: str) -> None:
    describe(tmp_path / "run-1", step=1, timestamp="1971-01-01T00:00:00")
    describe(tmp_path / "run-2", text)
    first, second = run_directories(tmp_path)
    assert (first.place.name, first.step, first.time) == ("run-2", None, None)
    assert problem in str(first.problem)
    assert (second.place.name, second.problem) == ("run-1", None)


def test_unreadable_metadata_is_still_a_candidate_if_there_is_no_other(tmp_path: Path) -> None:
    describe(tmp_path / "run-2", "{")
    newest = newest_of(run_directories(tmp_path))
    assert newest is not None
    assert newest.place.name == "run-2"


def test_times_with_and_without_a_zone_are_compared(tmp_path: Path) -> None:
    """eFormer writes local time without a zone; EasyDeL writes UTC with one."""
    noon = datetime.datetime.fromisoformat("2026-01-01T12:00:00+00:00")
    for name, moment in {"run-1": noon, "run-2": noon.astimezone().replace(tzinfo=None)}.items():
        describe(tmp_path / name, step=int(name[-1]), timestamp=moment.isoformat())
    later = noon + datetime.timedelta(seconds=1)
    describe(
        tmp_path / "run-0",
        step=0,
        timestamp=later.astimezone(datetime.timezone(datetime.timedelta(hours=-9))).isoformat(),
    )
    assert names(tmp_path) == ["run-1", "run-2", "run-0"]
    assert parse_time(noon.isoformat()) == noon


def test_metadata_without_a_timestamp_is_older_than_any_with_one(tmp_path: Path) -> None:
    describe(tmp_path / "run-1", step=1, timestamp="2001-01-01T00:00:00")
    describe(tmp_path / "run-2", step=2)
    assert names(tmp_path) == ["run-2", "run-1"]


def test_what_is_being_deleted_is_listed_but_never_the_newest(tmp_path: Path) -> None:
    describe(tmp_path / "run-1", step=1, timestamp="2026-01-01T00:00:00")
    describe(tmp_path / "run-2", step=2, timestamp="2026-01-02T00:00:00", is_temporary=True, being_deleted=True)
    assert [found.being_deleted for found in run_directories(tmp_path)] == [False, True]
    newest = newest_of(run_directories(tmp_path))
    assert newest is not None
    assert newest.place.name == "run-1"
    assert newest_of([]) is None


def test_a_directory_that_is_a_link_counts(tmp_path: Path) -> None:
    describe(tmp_path / "elsewhere", step=1, timestamp="2026-01-01T00:00:00")
    (tmp_path / "base").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "base/run-1")
    assert names(tmp_path / "base") == ["run-1"]


def test_metadata_is_written_in_one_step_and_read_again(tmp_path: Path) -> None:
    place = location(tmp_path / "new/run-1")
    with pytest.raises(FileNotFoundError, match=r"metadata\.json"):
        read_metadata(place)
    for step in (1, 2):
        write_metadata(place, {"step": step})
        assert read_metadata(place) == {"step": step}
    assert os.listdir(place.text) == ["metadata.json"]
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        read_metadata(place / "metadata.json")
    (tmp_path / "new/run-1/metadata.json").write_text("{")
    with pytest.raises(IntegrityError, match=r"metadata\.json is not JSON"):
        read_metadata(place)


def test_metadata_that_cannot_be_written_is_an_error_that_says_what_follows(tmp_path: Path) -> None:
    (tmp_path / "run-1").write_text("a file")
    with pytest.raises(NotADirectoryError, match=r"writing .*metadata\.json.*cannot be discovered without it"):
        write_metadata(location(tmp_path / "run-1"), {"step": 1})
