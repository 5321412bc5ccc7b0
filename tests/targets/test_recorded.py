"""Files that a manifest records, tables among them: what is missing or damaged is named, and never read as data."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.layouts import plan as planning
from shardkeep.model.digests import digest
from shardkeep.model.manifest import DataFile
from shardkeep.stores.location import location, store_at
from shardkeep.targets.recorded import open_file, read_table
from support import assert_same

TREE = {"w": np.arange(1000.0), "v": np.ones(3)}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(planning, "_INLINE", 0)
    shardkeep.save(tmp_path / "run", TREE)
    return tmp_path / "run"


def table_in(path: Path) -> Path:
    (table,) = path.glob("*.pieces")
    return table


def flip(table: Path) -> None:
    data = bytearray(table.read_bytes())
    data[40] ^= 1
    table.write_bytes(data)


DAMAGE = {
    "missing": (lambda table: table.unlink(), "is missing"),
    "truncated": (lambda table: table.write_bytes(table.read_bytes()[:-1]), "truncated"),
    "longer": (lambda table: table.write_bytes(table.read_bytes() + b"\0"), "bytes instead of"),
    "flipped": (flip, "does not match its digest"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_table_is_an_error_that_names_the_leaf_and_the_file(path: Path, what: str) -> None:
    change, problem = DAMAGE[what]
    table = table_in(path)
    change(table)
    for verify in (True, False):
        with pytest.raises(shardkeep.IntegrityError, match=problem) as raised:
            shardkeep.load(path, verify=verify)
        assert (raised.value.leaf, raised.value.file) == ("w", str(table))
    report = shardkeep.verify(path)
    (found,) = report.problems
    assert found.file == str(table)
    assert "2 leaves are affected: 'w', 'v'" in found.message
    assert shardkeep.inspect(path).leaves["w"].shape == (1000,)
    assert shardkeep.exists(path) == (what == "flipped")
    shardkeep.save(path, TREE, overwrite=what == "flipped")
    assert_same(shardkeep.load(path), TREE)


def test_a_table_of_another_save_is_refused(path: Path, tmp_path: Path) -> None:
    """It has the same size and is whole."""
    shardkeep.save(tmp_path / "other", {"w": np.zeros(1000), "v": np.ones(3)})
    shutil.copy(table_in(tmp_path / "other"), table_in(path))
    with pytest.raises(shardkeep.IntegrityError, match="digest"):
        shardkeep.load(path)


def test_a_copy_of_the_directory_is_complete(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy", ignore=shutil.ignore_patterns(".shardkeep"))
    shutil.rmtree(path)
    assert_same(shardkeep.load(tmp_path / "copy"), TREE)


def test_files_are_opened_only_with_their_size(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    store = store_at(location(str(tmp_path)))
    with open_file(store, DataFile("x", 5)) as file:
        assert file.size == 5
    assert read_table(store, DataFile("x", 5, 5, digest(b"12345"))) == b"12345"
    for record, problem in [
        (DataFile("x", 6), "truncated: it has 5 of 6 bytes"),
        (DataFile("x", 4), "5 bytes instead of 4"),
        (DataFile("y", 4), "missing"),
    ]:
        with pytest.raises(shardkeep.IntegrityError, match=problem) as raised:
            open_file(store, record, "a leaf")
        assert raised.value.leaf == "a leaf"
