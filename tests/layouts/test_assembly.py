"""Pieces in tables: in the manifest or in files, which belong to the tree, and are read only where they are needed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from shardkeep.cli.main import main
from shardkeep.layouts import plan as planning
from shardkeep.layouts.assembly import assemble, part_of
from shardkeep.layouts.plan import Draft, StagedArray, WrittenFile, plan_save
from shardkeep.layouts.safetensors import SafetensorsLayout
from shardkeep.model import pieces as lazy
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.digests import block_count
from shardkeep.model.document import decode_manifest, encode_manifest
from shardkeep.model.leaves import UNSHARDED
from shardkeep.model.manifest import Manifest
from shardkeep.model.tables import PieceTable
from shardkeep.model.tree import flatten
from support import FORMATS, assert_same, mesh_of, save_as

DIRECTORIES = [kind for kind in FORMATS if kind not in ("exchange", "shards")]


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table is a file."""
    monkeypatch.setattr(planning, "_INLINE", 0)


class Counted:
    """How many tables were decoded, and how many pieces."""

    tables = pieces = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    count = Counted()
    decode, piece = PieceTable.__init__, lazy._Decoder.piece

    def counting_tables(self: PieceTable, data: bytes) -> None:
        count.tables += 1
        decode(self, data)

    def counting_pieces(self: Any, cell: int) -> Any:
        count.pieces += 1
        return piece(self, cell)

    monkeypatch.setattr(PieceTable, "__init__", counting_tables)
    monkeypatch.setattr(lazy._Decoder, "piece", counting_pieces)
    return count


def tree_of(number: int = 0) -> dict[str, Any]:
    spread = NamedSharding(mesh_of(2, 4), PartitionSpec("a", "b"))
    return {
        "spread": jax.device_put(jnp.arange(1 << 19, dtype=jnp.float32).reshape(512, 1024) + number, spread),
        "host": np.arange(5) + number,
        "empty": np.zeros((0, 3)),
        "step": number,
    }


def tables_in(path: Path) -> list[Path]:
    return sorted(path.glob("*.pieces"))


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_file_with_a_table_lives_and_goes_with_its_tree(in_files: None, tmp_path: Path, kind: str) -> None:
    path = save_as(kind, tmp_path / "run", tree_of())
    (table,) = tables_in(path)
    assert_same(shardkeep.load(path, mesh=mesh_of(2, 4)), tree_of())
    report = shardkeep.verify(path)
    assert (report.ok, report.unchecked) == (True, 0)
    assert report.files == len(shardkeep.inspect(path).tree().files)
    assert shardkeep.exists(path)
    save_as(kind, path, {"w": np.ones(3)}, prefix="ema")
    assert len(tables_in(path)) == 2
    assert_same(shardkeep.load(path, prefix=""), tree_of())
    save_as(kind, path, tree_of(1), prefix="", overwrite=True)
    assert table not in tables_in(path)
    assert len(tables_in(path)) == 2
    assert_same(shardkeep.load(path, prefix=""), tree_of(1))
    assert_same(shardkeep.load(path, prefix="ema"), {"w": np.ones(3)})
    assert shardkeep.verify(path).ok
    shardkeep.delete(path)
    assert not path.exists()


def test_trees_that_are_saved_together_have_tables_of_their_own(in_files: None, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", tree_of(), trees={"ema": tree_of(1), "a.b": tree_of(2)})
    assert len(tables_in(tmp_path / "run")) == 3
    for number, prefix in enumerate(("", "ema", "a.b")):
        assert_same(shardkeep.load(tmp_path / "run", prefix=prefix), tree_of(number))


def test_a_report_counts_the_files_with_tables(in_files: None, tmp_path: Path) -> None:
    report = shardkeep.save(tmp_path / "run", {"w": np.ones(3)})
    files = [file for file in (tmp_path / "run").iterdir() if file.is_file() and file.name != "manifest.json"]
    assert (report.files, report.nbytes) == (2, sum(file.stat().st_size for file in files))


def test_small_tables_are_in_the_manifest_and_large_ones_in_a_file(tmp_path: Path) -> None:
    tree = {str(i): np.full(1, i) for i in range(6200)}  # 44 bytes for each
    shardkeep.save(tmp_path / "large", tree)
    assert len(tables_in(tmp_path / "large")) == 1
    assert_same(shardkeep.load(tmp_path / "large"), tree)
    del tree["0"], tree["1"], tree["2"]
    del tree["3"]
    small = dict(list(tree.items())[:5900])
    shardkeep.save(tmp_path / "small", small)
    assert tables_in(tmp_path / "small") == []
    assert_same(shardkeep.load(tmp_path / "small"), small)


@pytest.mark.parametrize("kind", FORMATS)
def test_what_looks_at_a_checkpoint_decodes_no_table(
    in_files: None, counted: Counted, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_as(kind, tmp_path / f"run{FORMATS[kind][0]}", tree_of())
    counted.tables = counted.pieces = 0
    manifest = shardkeep.inspect(path)
    assert str(manifest)
    assert "in 1 piece" in str(manifest.leaves["host"])
    assert shardkeep.exists(path)
    assert shardkeep.latest(tmp_path)
    for command in (["inspect", str(path)], ["inspect", str(path), "--json"], ["ls", str(tmp_path)]):
        assert main(command) == 0
    assert "spread" in capsys.readouterr().out
    shardkeep.abstract(path)
    assert (counted.tables, counted.pieces) == (0, 0)


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_a_load_decodes_only_the_pieces_that_it_needs(
    counted: Counted, tmp_path: Path, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_INLINE", inline)
    spread = NamedSharding(mesh_of(8), PartitionSpec("a"))
    arrays = {str(i): jax.device_put(jnp.full((1 << 19,), i, jnp.float32), spread) for i in range(10)}
    shardkeep.save(tmp_path / "run", arrays)
    counted.tables = counted.pieces = 0
    assert shardkeep.load(tmp_path / "run", include="^3$")["3"].sum() == 3 * (1 << 19)
    assert (counted.tables, counted.pieces) == (1, 8)
    host = shardkeep.load(tmp_path / "run", include="^(3|5)$", mesh=mesh_of(8))
    assert host["5"].sum() == 5 * (1 << 19)
    assert (counted.tables, counted.pieces) == (2, 8 + 16)


def test_a_save_of_another_prefix_decodes_no_table_of_this_one(counted: Counted, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shardkeep.save(path, tree_of())
    counted.tables = counted.pieces = 0
    shardkeep.save(path, {"w": np.ones(3)}, prefix="ema")
    assert (counted.tables, counted.pieces) == (0, 0)


def part_for(plan: Any, writer: int) -> Any:
    files = [
        WrittenFile(1 << 40, "0" * 32, tuple(("0" * 32,) * block_count(piece.nbytes) for piece in file.pieces))
        for file in plan.files_of(writer)
    ]
    return part_of(plan, writer, files)


@pytest.mark.parametrize("processes", [1, 7, 1000])
def test_a_piece_takes_less_than_60_bytes_however_many_processes_save(processes: int) -> None:
    """Tables, patterns and grids; the names of files are for each process, not for each piece."""
    rows, leaves = 2000, 20
    shape = (rows, 1 << 10)
    shares = tuple((Region((i, 0), (1, 1 << 10)), i % processes) for i in range(rows))
    spec = ArraySpec(shape, np.dtype(np.float32))
    skeleton, _ = flatten([0] * leaves)
    staged = [StagedArray(path, spec, UNSHARDED, shares=shares) for path in skeleton.paths()]
    draft = Draft("0" * 32, "", skeleton, {}, "")
    (plan,) = plan_save(SafetensorsLayout(), staged, [draft]).trees
    parts = {writer: part_for(plan, writer) for writer in range(processes)}
    sent = {  # a table in a file is not sent to the leader
        writer: part if writer == 0 or not plan.tables[writer].name else replace(part, table=b"")
        for writer, part in parts.items()
    }
    tree = assemble(plan, sent)
    document = encode_manifest(Manifest("", "0" * 32, {"": tree}))
    body = json.loads(document)["trees"][""]
    del body["files"]
    tables = sum(table.size for table in plan.tables if table.name)
    assert tables + len(json.dumps(body)) < 60 * rows * leaves
    data = {table.name: parts[table.writer].table for table in plan.tables}
    again = decode_manifest(document, "", "x", lambda file: data[file.name]).tree()
    found = again.arrays[3].pieces.meeting([Region((5, 0), (3, 7))])  # type: ignore[attr-defined]
    assert [(piece.region.start, again.files[piece.file].name) for piece, _ in found] == [
        ((i, 0), f"{'0' * 32}-{i % processes:05d}.safetensors") for i in (5, 6, 7)
    ]
