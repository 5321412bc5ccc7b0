"""Hostile files give errors of ours; and the fuzzer that says so would notice if they did more."""

import logging
import pickle
import random
from collections import namedtuple
from pathlib import Path

import pytest

import shardkeep.targets.shards
from faults.fuzz import Fuzzer, Tally
from faults.guard import Guard
from faults.hostile import cases
from faults.mutate import mutate_bytes, mutate_json, scan
from shardkeep.foreign import pickles


def _fuzz(fuzzer: Fuzzer, count: int, load_every: int) -> Tally:
    logging.getLogger("shardkeep").setLevel(logging.CRITICAL)
    for number in range(1, count + 1):
        fuzzer.step(number, load_every)
    logging.getLogger("shardkeep").setLevel(logging.NOTSET)
    return fuzzer.tally


def test_hostile_files_give_our_errors_and_nothing_else(tmp_path: Path) -> None:
    """A sample: `make faults` takes a million."""
    tally = _fuzz(Fuzzer(tmp_path, 3), 2000, 20)
    assert tally.violations == []
    assert tally.kept > 100
    assert tally.loads == 100


def test_the_fuzzer_notices_names_that_leave_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzzer = Fuzzer(tmp_path, 3, "safetensors index")
    monkeypatch.setattr(shardkeep.targets.shards, "check_name", lambda name: name)
    told = _fuzz(fuzzer, 1000, 1).violations
    assert any("Escape" in text for text in told), told
    assert any("open outside" in text for text in told), told


def test_the_fuzzer_notices_pickles_that_find_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzzer = Fuzzer(tmp_path, 3, "a pickled value")
    monkeypatch.setattr(pickles.InertUnpickler, "find_class", pickle._Unpickler.find_class)  # type: ignore[attr-defined]
    told = _fuzz(fuzzer, 200, 0).violations
    assert any("pickle.find_class" in text for text in told), told


def test_the_guard_sees_files_outside_and_code_that_is_made(tmp_path: Path) -> None:
    guard = Guard(str(tmp_path))
    with guard.watching():
        (tmp_path / "inside").write_bytes(b"")
        namedtuple("Fine", "a b")
    assert [text.split(":")[0] for text in guard.seen] == ["opened to write"]
    guard.seen.clear()
    with guard.watching():
        Path("/etc/hostname").exists() and Path("/etc/hostname").read_bytes()
        list(Path("/usr").iterdir())
        eval("1")
    assert len(guard.seen) >= 3, guard.seen


def test_every_case_is_good_as_it_is_and_closes_to_what_it_was() -> None:
    found = cases()
    assert len({case.name for case in found}) == len(found) > 20
    for case in found:
        case.read(case.start)
        if case.is_json:
            assert case.files.items() >= case.close(case.start).items(), case.name


def test_changes_differ_and_mostly_keep_the_structure() -> None:
    rng = random.Random(1)
    seed = scan(b'{"a": [1, {"b": "x"}], "c": {"d": -2.5, "e": null}}')
    inner = [b'"d": -2.5', b'"e": null', b'"c": {"d": -2.5, "e": null}']
    assert [seed.text[a:b] for a, b in seed.members] == [b'"b": "x"', b'"a": [1, {"b": "x"}]', *inner]
    assert seed.values[-1] == (0, len(seed.text))
    assert len({mutate_json(seed, rng, seed) for _ in range(300)}) > 200
    assert len({mutate_bytes(seed.text, rng, [b"x"]) for _ in range(300)}) > 200
