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
from shardkeep.layouts.codecs import ZSTD
from shardkeep.layouts.plan import (
    Draft,
    Layout,
    SavePlan,
    StagedArray,
    TreePlan,
    WrittenFile,
    WrittenPart,
    plan_save,
)
from shardkeep.layouts.safetensors import SafetensorsLayout
from shardkeep.layouts.zarr import ZarrLayout
from shardkeep.model import pieces as lazy
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.digests import block_count
from shardkeep.model.document import decode_manifest, encode_manifest
from shardkeep.model.leaves import UNSHARDED
from shardkeep.model.manifest import Manifest
from shardkeep.model.shares import Shares, Writers
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


def part_for(plan: TreePlan) -> WrittenPart:
    """What a process has written, with digests of nothing."""
    return part_of(
        plan,
        [
            WrittenFile(1 << 40, "0" * 32, tuple(("0" * 32,) * block_count(piece.nbytes) for piece in file.pieces))
            for file in plan.files
        ],
    )


def plans_of(layout: Layout, processes: int, rows: int, leaves: int) -> list[TreePlan]:
    """What each process plans for arrays whose rows the processes write in turns."""
    shape = (rows, 1 << 10)
    shares = Shares(shape, (rows, 1), Writers(np.arange(rows) % processes))
    spec = ArraySpec(shape, np.dtype(np.float32))
    skeleton, _ = flatten([0] * leaves)
    plans: list[TreePlan] = []
    for process in range(processes):
        own = shares.of(process)
        staged = [StagedArray(path, spec, UNSHARDED, own, shares=shares) for path in skeleton.paths()]
        draft = Draft("0" * 32, "", skeleton, {}, "", process=process, processes=processes)
        plans += plan_save(layout, staged, [draft]).trees
    return plans


@pytest.mark.parametrize("processes", [1, 7, 100])
def test_a_piece_takes_less_than_60_bytes_however_many_processes_save(processes: int) -> None:
    """Tables, patterns and grids; the names of files are for each process, not for each piece."""
    rows, leaves = 2000, 20
    plans = plans_of(SafetensorsLayout(), processes, rows, leaves)
    parts = {process: part_for(plan) for process, plan in enumerate(plans)}
    sent = {  # a table in a file is not sent to the leader
        process: part if process == 0 or not part.table_file else replace(part, table=b"")
        for process, part in parts.items()
    }
    tree = assemble(plans[0], sent)
    document = encode_manifest(Manifest("", "0" * 32, {"": tree}))
    body = json.loads(document)["trees"][""]
    del body["files"]
    in_files = {part.table_file.name: part.table for part in parts.values() if part.table_file}
    assert sum(map(len, in_files.values())) + len(json.dumps(body)) < 60 * rows * leaves
    again = decode_manifest(document, "", "x", lambda file: in_files[file.name]).tree()
    found = again.arrays[3].pieces.meeting([Region((5, 0), (3, 7))])  # type: ignore[attr-defined]
    numbers = [f"-{i % processes:05d}" if processes > 1 else "" for i in (5, 6, 7)]
    assert [(piece.region.start, again.files[piece.file].name) for piece, _ in found] == [
        ((i, 0), f"{'0' * 32}{number}-00000.safetensors") for i, number in zip((5, 6, 7), numbers, strict=True)
    ]


def test_what_a_process_packs_into_many_files_takes_little_more() -> None:
    """One record for the objects of each process, and one for the tables."""
    rows, leaves, processes = 512, 20, 16
    plans = plans_of(SafetensorsLayout(16 << 10), processes, rows, leaves)  # four pieces in each
    parts = {process: part_for(plan) for process, plan in enumerate(plans)}
    tree = assemble(plans[0], parts)
    document = encode_manifest(Manifest("", "0" * 32, {"": tree}))
    tables = {part.table_file.name: part.table for part in parts.values() if part.table_file}
    assert len(tables) == processes
    series = json.loads(document)["trees"][""]["files"]
    assert [record["names"].removeprefix("0" * 32) for record in series] == [
        *[f"-{process:05d}-*.safetensors" for process in range(processes)],
        "-0-*.pieces",
    ]
    assert len(tree.files) == rows * leaves // 4 + processes
    assert len(document) + sum(map(len, tables.values())) < 50 * rows * leaves
    again = decode_manifest(document, "", "x", lambda file: tables[file.name]).tree()
    assert again.files == tree.files
    assert [list(leaf.pieces) for leaf in again.arrays] == [list(leaf.pieces) for leaf in tree.arrays]


@pytest.mark.parametrize("layout", [SafetensorsLayout(), SafetensorsLayout(1 << 20), ZarrLayout(), ZarrLayout(ZSTD)])
@pytest.mark.parametrize("processes", [2, 3, 16])
def test_each_process_plans_its_own_files_under_names_of_its_own(layout: Layout, processes: int) -> None:
    """Without a look at the others: together they are every piece, once, and no name is used twice."""
    rows, leaves = 48, 3
    plans = plans_of(layout, processes, rows, leaves)
    names = [name for plan in plans for name in SavePlan("0" * 32, "", (plan,)).names]
    assert len(set(names)) == len(names)
    for process, plan in enumerate(plans):
        assert {piece.region.start[0] % processes for file in plan.files for piece in file.pieces} == {process}
    placed = [(piece.array, piece.region.start) for plan in plans for file in plan.files for piece in file.pieces]
    assert sorted(placed) == sorted((i, (row, 0)) for i in range(leaves) for row in range(rows))
    tree = assemble(plans[0], {process: part_for(plan) for process, plan in enumerate(plans)})
    for leaf in tree.arrays:
        pieces = list(leaf.pieces)
        assert [piece.region.start for piece in pieces] == [(row, 0) for row in range(rows)]
        found = {
            (file.name, piece.region, piece.offset) for plan in plans for file in plan.files for piece in file.pieces
        }
        assert {(tree.files[piece.file].name, piece.region, piece.offset) for piece in pieces} <= found


def test_the_leader_claims_the_names_of_all_arrays() -> None:
    """It does not know the chunks of the others, so it claims the directories of the arrays; for packed files none."""
    leader, other = plans_of(ZarrLayout(), 2, 4, 2)
    assert set(leader.names) >= {"0", "0/.zarray", "1", "1/.zarray"}
    assert set(other.names) == {"0/1.0", "0/3.0", "1/1.0", "1/3.0"}
    assert [name.startswith("m/") for name in leader.named("m/").names] == [True] * len(leader.names)
    leader, _ = plans_of(SafetensorsLayout(), 2, 4, 2)
    assert leader.names == [f"{'0' * 32}-00000-00000.safetensors"]
    assert SavePlan("0" * 32, "", (leader,)).nbytes >= 2 * 4 * (1 << 10) * 4, "it checks the free space for all"
