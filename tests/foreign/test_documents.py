"""Documents of other programs: read as JSON objects, or refused; names below a step, and not below anything else."""

from pathlib import Path

import pytest

import shardkeep
from shardkeep.foreign.documents import files_below, names_below, parse_json, read_json
from shardkeep.stores.local.store import LocalStore


def test_a_document_is_an_object_or_is_refused(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    assert read_json(store, "a") is None
    (tmp_path / "a").write_text('{"b": 1}')
    assert read_json(store, "a") == {"b": 1}
    for text in (
        "[]",
        "",
        '{"b": 1, "b": 2}',
        "[" * 100_000,
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ):
        (tmp_path / "a").write_text(text)
        with pytest.raises(shardkeep.IntegrityError, match=r"a (is damaged|does not contain a JSON object)"):
            read_json(store, "a")
    assert parse_json(store, "a", b"[1]") == [1]


def test_names_are_looked_for_below_a_step_only(tmp_path: Path) -> None:
    for name in ("10", "run"):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "_METADATA").touch()
        (tmp_path / name / "5").mkdir()
    assert names_below(LocalStore(str(tmp_path / "10")), ["state", "5", "a.txt"]) == ["state/_METADATA"]
    assert names_below(LocalStore(str(tmp_path / "run")), ["state", "5"]) == []
    assert names_below(LocalStore(str(tmp_path / "10")), [f"x{i}y" for i in range(100)]) == []


def test_files_in_directories_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "c").touch()
    (tmp_path / "a" / "b" / "d").touch()
    assert sorted(files_below(LocalStore(str(tmp_path)), "a")) == ["a/b/d", "a/c"]
