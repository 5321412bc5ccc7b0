"""Each process writes the table of its own pieces; the process that commits neither reads nor decodes it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import Kept
from support import FORMATS, mesh_of

DIRECTORIES = [kind for kind in FORMATS if kind not in ("exchange", "shards")]

SAVE = """
from shardkeep.layouts import plan
from shardkeep.model import tables
from support import save_as

decoded, decode = [], tables.PieceTable.__init__

def counting(self, data):
    decoded.append(len(data))
    decode(self, data)

plan._INLINE, tables.PieceTable.__init__ = {inline}, counting
try:
    for number in range({saves}):
        tree = {{
            "rows": spread(pattern("float32", (512, 512), number), P("a")),
            "columns": spread(pattern("float32", (512, 1024), number), P(None, "a")),
            "copies": spread(pattern("float32", (1 << 19,), number), P()),
            "host": np.arange(5) + number,
        }}
        save_as({kind!r}, root / "run", tree, overwrite=True)
finally:
    plan._INLINE, tables.PieceTable.__init__ = 256 << 10, decode
found = shardkeep.load(root / "run", mesh=mesh_over())
wrong = differences(found, {{
    "rows": pattern("float32", (512, 512), number),
    "columns": pattern("float32", (512, 1024), number),
    "copies": pattern("float32", (1 << 19,), number),
    "host": np.arange(5) + number,
}})
say(decoded=decoded, wrong=wrong)
"""


def saved(pair: Kept, path: Path, kind: str, inline: int, saves: int = 1) -> list[dict[str, Any]]:
    return pair.run(SAVE.format(kind=kind, inline=inline, saves=saves), path)


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_each_process_writes_a_table_and_none_decodes_any(pair: Kept, tmp_path: Path, kind: str) -> None:
    """Also when a tree is replaced: the tables of the old one go."""
    for said in saved(pair, tmp_path, kind, inline=0, saves=2):
        assert said == {**said, "decoded": [], "wrong": []}
    path = tmp_path / "run"
    tree = shardkeep.inspect(path).tree()
    tables = sorted(file.name for file in tree.files if file.name.endswith(".pieces"))
    assert tables == [f"{tree.save_id}-0-0000{process}.pieces" for process in range(2)]
    assert sorted(file.name for file in path.glob("*.pieces")) == tables
    assert left_overs(path) == set()
    assert shardkeep.verify(path).ok
    loaded = shardkeep.load(path, mesh=mesh_of(8))
    assert np.array_equal(loaded["host"], np.arange(5) + 1)
    body = json.loads((path / "manifest.json").read_bytes())["trees"][""]
    assert {leaf["key"] for leaf in body["leaves"] if "pattern" in leaf} >= {"rows", "columns"}
    (path / tables[1]).unlink()
    assert not shardkeep.exists(path)
    with pytest.raises(shardkeep.IntegrityError, match="missing"):
        shardkeep.load(path)


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_small_tables_of_all_processes_are_in_the_manifest(pair: Kept, tmp_path: Path, kind: str) -> None:
    for said in saved(pair, tmp_path, kind, inline=256 << 10):
        assert said == {**said, "decoded": [], "wrong": []}
    path = tmp_path / "run"
    assert list(path.glob("*.pieces")) == []
    assert len(json.loads((path / "manifest.json").read_bytes())["trees"][""]["tables"]) == 2
    assert shardkeep.verify(path).ok


SERIES = """
from dataclasses import replace
from shardkeep.stores.local.store import LocalStore

usual = LocalStore.traits
LocalStore.traits = replace(usual, object_limit=128 << 10)
try:
    for number in range(2):
        values = {str(i): pattern("float32", (512, 512), number + i) for i in range(3)}
        shardkeep.save(root / "run", {key: spread(value, P("a")) for key, value in values.items()}, overwrite=True)
finally:
    LocalStore.traits = usual
say(wrong=differences(shardkeep.load(root / "run", mesh=mesh_over()), values))
"""


def test_many_files_of_a_process_are_a_series(pair: Kept, tmp_path: Path) -> None:
    """In the record that it hands in, and in the manifest; those of a replaced tree go one by one."""
    assert [said["wrong"] for said in pair.run(SERIES, tmp_path)] == [[], []]
    path = tmp_path / "run"
    tree = shardkeep.inspect(path).tree()
    records = json.loads((path / "manifest.json").read_bytes())["trees"][""]["files"]
    assert [(record["names"], len(record["sizes"])) for record in records] == [
        (f"{tree.save_id}-{process:05d}-*.safetensors", 12) for process in range(2)
    ]
    assert sorted(file.name for file in path.glob("*.safetensors")) == [file.name for file in tree.files]
    assert left_overs(path) == set()
    report = shardkeep.verify(path)
    assert (report.ok, report.files) == (True, 24)
    shardkeep.delete(path)
    assert not path.exists()
