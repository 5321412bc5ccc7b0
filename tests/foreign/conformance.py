"""What every kind of checkpoint that another program writes must keep. A new reader subclasses `ReaderTests`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from shardkeep.cli.main import main
from support import assert_same, mesh_of, pattern

P = PartitionSpec
SHAPE = (8, 6)
RUBBISH: dict[str, bytes] = {
    "nothing": b"",
    "zeros": bytes(64),
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "nested deeply": b"[" * 100_000,
    "not UTF-8": b"\xff\xfe" * 40,
    "a number": b"1e999",
}


def arrays() -> dict[str, np.ndarray]:
    """Arrays by dotted key, of several ranks, one of them without elements."""
    return {
        "b": pattern("int32", (5,), 1),
        "empty": np.zeros((0, 3), np.float32),
        "layers.0.w": pattern("float32", SHAPE, 2),
        "layers.1.w": pattern("float32", SHAPE, 3),
        "scalar": np.array(2.5, np.float32),
    }


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in flat.items():
        *above, name = key.split(".")
        inside = root
        for part in above:
            inside = inside.setdefault(part, {})
        inside[name] = value
    return root


def ordered(tree: Any) -> Any:
    """Dicts in the order of their keys, which programs write in any order."""
    return {key: ordered(tree[key]) for key in sorted(tree)} if isinstance(tree, dict) else tree


class ReaderTests:
    """Checkpoints of one kind, written as the other program writes them, through everything that reads one."""

    name: str  # what `shardkeep ls --json` calls its kind
    dtypes: Sequence[str]
    knows_sizes: bool = True  # whether something says how large the files with elements are

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        """Write arrays, by dotted key, into a new directory; returns what to load."""
        raise NotImplementedError

    def data_files(self, path: Path) -> list[Path]:
        """The files that hold elements of arrays."""
        raise NotImplementedError

    def documents(self, path: Path) -> list[Path]:
        """The files that describe the checkpoint and its arrays."""
        raise NotImplementedError

    def point_outside(self, path: Path, outside: Path) -> None:
        """Change the checkpoint so that it names, or links to, a file outside."""
        raise NotImplementedError

    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        (tmp_path / "run" / "made").mkdir(parents=True)
        return self.write(tmp_path / "run" / "made", arrays())

    def test_it_is_found_and_described(self, made: Path) -> None:
        manifest = shardkeep.inspect(made)
        (tree,) = manifest.trees.values()
        assert tree.format == "foreign"
        assert manifest.source == tree.source == self.name
        found = {leaf.key.replace("/", "."): (leaf.dtype, leaf.shape) for leaf in tree.leaves}
        assert found == {key: (array.dtype.name, array.shape) for key, array in arrays().items()}
        assert manifest.nbytes == sum(array.nbytes for array in arrays().values())
        assert shardkeep.exists(made)
        assert shardkeep.inspect(made).save_id == manifest.save_id

    def test_it_is_listed_by_its_name(self, made: Path, capsys: Any) -> None:
        assert main(["ls", "--json", str(made.parent if made.is_file() else made)]) == 0
        (listed,) = json.loads(capsys.readouterr().out)["checkpoints"]
        assert (listed["kind"], listed["state"], listed["leaves"]) == (self.name, "complete", len(arrays()))

    def test_nothing_is_found_where_nothing_is(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("of someone")
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint at"):
            shardkeep.load(tmp_path)
        assert not shardkeep.exists(tmp_path)

    def test_it_is_loaded_as_nested_dicts_and_into_a_template(self, made: Path) -> None:
        expected = jax.tree.map(jax.numpy.asarray, nested(arrays()))
        assert_same(ordered(shardkeep.load(made)), ordered(expected))
        template = {"layers": {"1": {"w": jax.ShapeDtypeStruct(SHAPE, "float32")}}}
        assert_same(shardkeep.load(made, template=template), {"layers": {"1": expected["layers"]["1"]}})
        assert_same(shardkeep.load(made, include="^b$"), {"b": expected["b"]})

    def test_every_dtype_keeps_its_bits(self, tmp_path: Path) -> None:
        data = {name: pattern(getattr(ml_dtypes, name, name), (3, 5)) for name in self.dtypes}
        (tmp_path / "dtypes").mkdir()
        found = shardkeep.load(self.write(tmp_path / "dtypes", data))
        assert_same(ordered(found), ordered(jax.tree.map(jax.numpy.asarray, data)))

    @pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P("x", "y"), P("y"), P()], ids=str)
    def test_each_device_gets_its_own_region(self, spec: P, made: Path) -> None:
        sharding = NamedSharding(mesh_of(4, 2), P(*({"x": "a", "y": "b", None: None}[axis] for axis in spec)))
        found = shardkeep.load(made, include="layers/0", shardings=sharding)["layers"]["0"]["w"]
        assert found.sharding == sharding
        assert_same(np.asarray(found), arrays()["layers.0.w"])

    def test_it_verifies_and_says_that_there_are_no_digests(self, made: Path) -> None:
        report = shardkeep.verify(made)
        assert report.ok, report
        assert report.unchecked == len(arrays())

    @pytest.mark.parametrize("format", ["safetensors", "zarr"])
    def test_it_is_converted(self, format: str, made: Path, tmp_path: Path) -> None:
        assert main(["convert", "--format", format, str(made), str(tmp_path / "converted")]) == 0
        assert_same(shardkeep.load(tmp_path / "converted"), shardkeep.load(made))
        assert shardkeep.verify(tmp_path / "converted").unchecked == 0

    @pytest.mark.parametrize("damage", ["missing", "truncated"])
    def test_damage_is_an_error_that_names_the_file_or_the_leaf(self, damage: str, made: Path) -> None:
        file = next(f for f in self.data_files(made) if f.stat().st_size > 64)
        file.unlink() if damage == "missing" else os.truncate(file, file.stat().st_size - 1)
        with pytest.raises((shardkeep.IntegrityError, shardkeep.CheckpointNotFoundError)) as raised:
            shardkeep.load(made)
        assert file.name in str(raised.value) or "leaf" in str(raised.value) or damage == "missing"
        assert not shardkeep.exists(made) or (damage == "truncated" and not self.knows_sizes)
        try:
            assert not shardkeep.verify(made).ok
        except shardkeep.CheckpointNotFoundError:
            assert damage == "missing"

    @pytest.mark.parametrize("rubbish", RUBBISH)
    def test_rubbish_for_a_description_is_an_error_of_ours(self, rubbish: str, made: Path) -> None:
        for document in self.documents(made):
            before = document.read_bytes()
            document.write_bytes(RUBBISH[rubbish])
            for read in (shardkeep.inspect, shardkeep.load):
                with pytest.raises(shardkeep.ShardkeepError):
                    read(made)
            document.write_bytes(before)
        assert shardkeep.verify(made).ok

    def test_a_description_cut_anywhere_is_an_error_of_ours(self, made: Path) -> None:
        for document in self.documents(made):
            before = document.read_bytes()
            for end in range(0, len(before), max(len(before) // 20, 1)):
                document.write_bytes(before[:end])
                with pytest.raises(shardkeep.ShardkeepError):
                    shardkeep.load(made)
            document.write_bytes(before)

    def test_nothing_outside_is_read(self, made: Path, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"s3cret" * 100)
        self.point_outside(made, secret)
        with pytest.raises(shardkeep.ShardkeepError) as raised:
            shardkeep.load(made)
        assert "s3cret" not in str(raised.value)


class FileReaderTests(ReaderTests):
    """A kind that is one file, which may lie beside others. `write` returns the path of the file."""

    def data_files(self, path: Path) -> list[Path]:
        return [path]

    def documents(self, path: Path) -> list[Path]:
        return [path]

    def point_outside(self, path: Path, outside: Path) -> None:
        raise AssertionError

    def test_nothing_outside_is_read(self, made: Path, tmp_path: Path) -> None:
        """A single file may be a link to anywhere, as in a Hugging Face cache; a broken one is an error."""
        moved = made.rename(tmp_path / "blob")
        made.symlink_to(moved)
        assert shardkeep.verify(made).ok
        moved.unlink()
        with pytest.raises(shardkeep.ShardkeepError):
            shardkeep.load(made)

    def test_its_folder_is_loaded_as_the_file_if_there_is_no_other(self, made: Path) -> None:
        expected = shardkeep.load(made)
        (made.parent / "notes.txt").write_text("of someone")
        assert_same(shardkeep.load(made.parent), expected)
        assert shardkeep.verify(made.parent).ok
        assert shardkeep.latest(made.parent) == str(made.parent)
        assert shardkeep.latest(made) == str(made)
        (made.parent / f"other-{made.name}").write_bytes(made.read_bytes())
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint at|holds several checkpoints"):
            shardkeep.load(made.parent)
        assert_same(shardkeep.load(made), expected)
        newest = shardkeep.latest(made.parent)
        assert newest is not None
        assert_same(shardkeep.load(newest), expected)

    def test_checkpoints_of_ours_beside_it_come_first(self, made: Path) -> None:
        """It may be notes of a program that saves with shardkeep."""
        (made.parent / "deeper").mkdir()
        made = made.rename(made.parent / "deeper" / made.name)
        run = made.parents[1]
        shardkeep.save(run / "step_1", {"x": 1}, step=1)
        os.utime(made)
        assert shardkeep.latest(run) == str(run / "step_1")
        made = made.rename(run / made.name)
        os.utime(made)
        assert shardkeep.latest(run) == str(run / "step_1")
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="the newest, .*step_1"):
            shardkeep.load(run)

    def test_it_is_only_read(self, made: Path) -> None:
        before = made.read_bytes()
        with pytest.raises(shardkeep.NotADirectoryPathError, match="is a file"):
            shardkeep.save(made, {"x": 1}, overwrite=True)
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="another program; nothing was deleted"):
            shardkeep.delete(made)
        assert main(["clean", "--yes", str(made.parent)]) == 0
        shardkeep.save(made.parent, {"x": 1})
        assert shardkeep.load(made.parent) == {"x": 1}
        assert made.read_bytes() == before
        assert_same(shardkeep.load(made, include="^b$"), {"b": jax.numpy.asarray(arrays()["b"])})

    def test_commands_and_runs_take_it(self, made: Path, tmp_path: Path) -> None:
        assert main(["convert", str(made), str(tmp_path / "ours")]) == 0
        assert main(["diff", str(made), str(tmp_path / "ours")]) == 0
        assert main(["stats", str(made)]) == 0
        assert main(["inspect", str(made)]) == 0
        assert main(["verify", str(made)]) == 0
        with shardkeep.Run(tmp_path / "new") as run:
            state, step = run.resume(jax.tree.map(np.zeros_like, nested(arrays())), init_from=made)
        assert step == 0
        assert_same(jax.tree.map(np.asarray, ordered(state)), ordered(nested(arrays())))


class DirectoryReaderTests(ReaderTests):
    """A kind that fills a directory, in which trees of ours can be saved too."""

    def test_a_tree_of_ours_beside_it_leaves_it_as_it_is(self, made: Path) -> None:
        before = shardkeep.load(made)
        shardkeep.save(made, {"x": np.arange(3)}, prefix="ours")
        assert_same(shardkeep.load(made, prefix="ours"), {"x": np.arange(3)})
        assert_same(shardkeep.load(made, prefix=""), before)
        assert shardkeep.verify(made).unchecked == len(arrays())
        assert shardkeep.inspect(made).tree("").source == self.name
        assert shardkeep.inspect(made).source == f"{self.name}, shardkeep"

    def test_overwriting_it_removes_its_files(self, made: Path) -> None:
        files = self.data_files(made)
        with pytest.raises(shardkeep.CheckpointExistsError):
            shardkeep.save(made, {"x": np.arange(3)})
        shardkeep.save(made, {"x": np.arange(3)}, overwrite=True)
        assert_same(shardkeep.load(made), {"x": np.arange(3)})
        assert not any(file.exists() for file in files)
