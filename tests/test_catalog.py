"""From a path to a checkpoint: what counts as one, what moves with it, and how it goes away."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import shardkeep
from faults.spawner import Fault, Spawner
from faults.states import make, same
from faults.sweep import left_overs
from support import FORMATS, save_as


@pytest.mark.parametrize("kind", FORMATS)
class TestCopies:
    """A checkpoint is its files: wherever they go, it goes."""

    def test_it_can_be_moved(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "old" / "run", make("plain", 1))
        (tmp_path / "old").rename(tmp_path / "new")
        moved = tmp_path / "new" / path.name
        assert same(shardkeep.load(moved), make("plain", 1))
        assert shardkeep.verify(moved).ok
        shardkeep.save(moved, make("plain", 2), overwrite=True, **FORMATS[kind][1])
        assert same(shardkeep.load(moved), make("plain", 2))

    def test_it_can_be_copied_and_each_copy_goes_its_own_way(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "old" / "run", make("plain", 1))
        subprocess.run(["cp", "-r", str(tmp_path / "old"), str(tmp_path / "new")], check=True)
        copied = tmp_path / "new" / path.name
        shardkeep.save(path, make("plain", 2), overwrite=True, **FORMATS[kind][1])
        assert same(shardkeep.load(copied), make("plain", 1))
        shardkeep.delete(copied)
        assert same(shardkeep.load(path), make("plain", 2))

    def test_it_survives_a_tar_round_trip(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "old" / "run", make("plain", 1))
        subprocess.run(["tar", "-C", str(tmp_path / "old"), "-cf", str(tmp_path / "x.tar"), "."], check=True)
        shutil.rmtree(tmp_path / "old")
        (tmp_path / "new").mkdir()
        subprocess.run(["tar", "-C", str(tmp_path / "new"), "-xf", str(tmp_path / "x.tar")], check=True)
        assert same(shardkeep.load(tmp_path / "new" / path.name), make("plain", 1))
        assert shardkeep.verify(tmp_path / "new" / path.name).ok

    def test_it_needs_no_control_directory_to_be_loaded_or_overwritten(self, tmp_path: Path, kind: str) -> None:
        """Copies by tools that leave out dot files are whole all the same."""
        path = save_as(kind, tmp_path / "run", make("plain", 1))
        shutil.rmtree(tmp_path / "run" / ".shardkeep", ignore_errors=True)
        assert same(shardkeep.load(path), make("plain", 1))
        shardkeep.save(path, make("plain", 2), overwrite=True, **FORMATS[kind][1])
        assert same(shardkeep.load(path), make("plain", 2))
        assert left_overs(path) == set()

    def test_it_can_be_reached_through_a_link(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "real" / "run", make("plain", 1))
        (tmp_path / "link").symlink_to(tmp_path / "real")
        linked = tmp_path / "link" / path.name
        assert same(shardkeep.load(linked), make("plain", 1))
        shardkeep.save(linked, make("plain", 2), overwrite=True, **FORMATS[kind][1])
        assert same(shardkeep.load(path), make("plain", 2))

    def test_a_copy_without_its_manifest_is_no_checkpoint(self, tmp_path: Path, kind: str) -> None:
        """Data of ours whose document is gone is refused, never read as another program's."""
        path = save_as(kind, tmp_path / "run", make("plain", 1))
        document = {"shards": path.with_name(path.name + ".index.json"), "exchange": path}.get(
            kind, path / "manifest.json"
        )
        document.unlink()
        with pytest.raises(
            (shardkeep.CheckpointNotFoundError, shardkeep.IncompleteCheckpointError), match=str(tmp_path)
        ):
            shardkeep.load(path)
        assert not shardkeep.exists(path)
        if path.is_dir():
            shutil.rmtree(path / ".shardkeep")
            with pytest.raises(
                (shardkeep.CheckpointNotFoundError, shardkeep.IncompleteCheckpointError), match=str(tmp_path)
            ):
                shardkeep.load(path)


@pytest.mark.parametrize("kind", FORMATS)
class TestDelete:
    def test_it_removes_everything_of_ours(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "room" / "run", make("plain", 1))
        for number in range(2, 4):
            shardkeep.save(path, make("plain", number), overwrite=True, **FORMATS[kind][1])
        shardkeep.delete(path)
        assert not shardkeep.exists(path)
        assert [p for p in (tmp_path / "room").rglob("*") if p.is_file()] == []
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint"):
            shardkeep.load(path)
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint"):
            shardkeep.delete(path)

    def test_a_new_save_takes_its_place(self, tmp_path: Path, kind: str) -> None:
        for number in range(3):
            path = save_as(kind, tmp_path / "run", make("plain", number))
            assert same(shardkeep.load(path), make("plain", number))
            shardkeep.delete(path)

    def test_other_files_stay(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "run", make("plain", 1))
        room = path if path.is_dir() else tmp_path
        (room / "notes.txt").write_text("mine")
        (room / "other.safetensors").write_bytes(b"mine")
        shardkeep.delete(path)
        assert sorted(p.name for p in room.iterdir()) == ["notes.txt", "other.safetensors"]


def test_delete_removes_every_prefix(tmp_path: Path) -> None:
    for prefix in ("a", "b", None):
        shardkeep.save(tmp_path / "run", make("plain", 1), prefix=prefix, format="zarr")
    shardkeep.delete(tmp_path / "run")
    assert not (tmp_path / "run").exists() or os.listdir(tmp_path / "run") == []


def test_delete_while_others_save_and_load_never_shows_half(tmp_path: Path, spawner: Spawner) -> None:
    """Saves, deletes and loads in three processes: each gives a state, or says that nothing is there."""
    path = str(tmp_path / "run")
    saving = spawner.start("save_whatever", path=path, kind="plain", count=25)
    deleting = spawner.start("delete_whatever", path=path, count=25)
    loading = spawner.start("load_whatever", path=path, kind="plain", count=60)
    for child in (saving, deleting, loading):
        outcome = child.wait()
        assert outcome.ok, outcome
    shardkeep.save(path, make("plain", 5), overwrite=True)
    assert same(shardkeep.load(path), make("plain", 5))
    assert left_overs(Path(path)) == set()


def test_delete_leaves_another_programs_files_alone(tmp_path: Path) -> None:
    """A folder of someone else's model is not ours to remove."""
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(shardkeep.ShardkeepError, match=str(tmp_path)):
        shardkeep.delete(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_exists_means_committed(tmp_path: Path, spawner: Spawner, kind: str) -> None:
    ending, arguments = FORMATS[kind]
    path = tmp_path / ("run" + ending)
    assert not shardkeep.exists(path)
    assert spawner.run(
        "save", Fault(str(tmp_path), "kill", 12), path=str(path), kind="plain", number=1, **arguments
    ).signal
    assert not shardkeep.exists(path)
    shardkeep.save(path, make("plain", 1), **arguments)
    assert shardkeep.exists(path)


def test_a_save_that_never_finished_is_called_incomplete(tmp_path: Path, spawner: Spawner) -> None:
    for name, arguments in (("run", {}), ("zarr", {"format": "zarr"}), ("m.safetensors", {})):
        path = tmp_path / name
        assert spawner.run(
            "save", Fault(str(tmp_path), "kill", 14), path=str(path), kind="plain", number=1, **arguments
        ).signal
        for action in (shardkeep.load, shardkeep.inspect):
            with pytest.raises(shardkeep.IncompleteCheckpointError, match="never finished"):
                action(path)
        shardkeep.delete(path)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "model.safetensors.index.json",
            '"weight_map": {',
            '"weight_map": {"a": "x.safetensors", "a": "y.safetensors", ',
        ),
        ("tensorstore_index.json", '"format"', '"arrays": [], "arrays": [], "format"'),
        ("w/.zarray", '"shape"', '"shape":[1],"shape"'),
    ],
)
def test_a_name_that_appears_twice_is_refused_in_another_programs_files(
    tmp_path: Path, name: str, old: str, new: str
) -> None:
    """It means one thing to one reader and another to the next."""
    fixtures = Path(__file__).parent / "fixtures" / "eformer"
    source = fixtures / ("safetensors_sharded" if name.startswith("model") else "ts_plain/ckpt")
    shutil.copytree(source, tmp_path / "run")
    shardkeep.load(tmp_path / "run")
    document = tmp_path / "run" / name
    text = document.read_text()
    assert old in text
    document.write_text(text.replace(old, new, 1))
    with pytest.raises(shardkeep.IntegrityError, match="an object has a repeated key"):
        shardkeep.load(tmp_path / "run")


def test_a_delete_that_failed_can_be_repeated(tmp_path: Path) -> None:
    """The record of the first one is not taken for a running save."""
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)})
    (data,) = (tmp_path / "run").glob("*.safetensors")
    data.unlink()
    (data / "in the way").mkdir(parents=True)
    with pytest.raises(shardkeep.StorageError, match="no longer a checkpoint, but some of its files remain"):
        shardkeep.delete(tmp_path / "run")
    (data / "in the way").rmdir()
    data.rmdir()
    shardkeep.delete(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name", ["f.npz", "w.npy", "model.pt", "model.PTH", "pytorch_model.bin", "s.msgpack", "m.weights.h5", "a.b.pkl"]
)
def test_a_name_of_another_programs_file_is_refused_before_a_directory_is_made(tmp_path: Path, name: str) -> None:
    ending = os.path.splitext(name)[1]
    for save in (shardkeep.save, shardkeep.save_async):
        with pytest.raises(
            shardkeep.PathError, match=rf"'{name}' ends in {ending}, but .* a path without {ending}; .*safetensors"
        ):
            save(tmp_path / name, {"w": np.zeros(3)})
    assert os.listdir(tmp_path) == []


def test_the_index_of_exchange_files_is_not_where_they_are_saved(tmp_path: Path) -> None:
    with pytest.raises(shardkeep.PathError, match="one that ends in .safetensors"):
        shardkeep.save(tmp_path / "model.safetensors.index.json", {"w": np.zeros(3)})


@pytest.mark.parametrize("name", ["step.10", "v1.0", "run.zarr", "epoch=3.ckpt", "npz", "model.pt.d", "bin"])
def test_other_dots_in_names_are_harmless(tmp_path: Path, name: str) -> None:
    shardkeep.save(tmp_path / name, {"w": np.ones(3)})
    assert (tmp_path / name / "manifest.json").is_file()


def test_a_checkpoint_that_has_such_a_name_already_stays_usable(tmp_path: Path) -> None:
    """Version 0.1.0 made them."""
    shardkeep.save(tmp_path / "f", {"w": np.ones(3)})
    (tmp_path / "f").rename(tmp_path / "f.npz")
    shardkeep.save(tmp_path / "f.npz", {"w": np.zeros(3)}, prefix="ema")
    shardkeep.save(tmp_path / "f.npz", {"w": np.zeros(3)}, overwrite=True)
    assert shardkeep.load(tmp_path / "f.npz", prefix="ema")["w"].sum() == 0
    shardkeep.delete(tmp_path / "f.npz")
