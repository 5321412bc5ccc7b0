"""Another program's file as a checkpoint: which one a path or a folder means, on a disk and in buckets."""

from pathlib import Path

import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Place, _alone, place  # noqa: F401
from foreign.lines import LinesReader, encode_lines
from shardkeep.cli.main import main
from shardkeep.foreign import registry
from shardkeep.stores.location import Location
from shardkeep.targets.files import ForeignFile, file_at
from shardkeep.targets.resolve import find
from support import assert_same

TREE = {"b": np.arange(3, dtype=np.int32), "w": np.ones((2, 2), np.float32)}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FILE_READERS", [LinesReader()])


def test_every_name_of_a_file_finds_it(tmp_path: Path) -> None:
    (tmp_path / "w.lines").write_bytes(encode_lines(TREE))
    (tmp_path / "without an ending").write_bytes(encode_lines(TREE))
    (tmp_path / "link").symlink_to("w.lines")
    for name in ("w.lines", "without an ending", "link"):
        assert_same(shardkeep.load(tmp_path / name), shardkeep.load(f"file://{tmp_path}/w.lines"))
        assert isinstance(find(Location(str(tmp_path / name))), ForeignFile)


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "x.lines").write_bytes(b"of someone")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="shardkeep cannot read this kind of file"):
        shardkeep.load(tmp_path / "x.lines")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"no checkpoint at .*x\.lines"):
        file_at(Location(str(tmp_path / "x.lines"))).read()
    assert file_at(Location(str(tmp_path / "absent"))).read_if_any() is None
    assert shardkeep.latest(tmp_path) is None
    (tmp_path / "y.eqx").write_bytes(b"of someone")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"it is an Equinox checkpoint \(\.eqx\), which this"):
        shardkeep.load(tmp_path / "y.eqx")


def test_the_newest_of_several_files_is_the_latest(tmp_path: Path) -> None:
    for name in ("step_9.lines", "step_10.lines"):
        (tmp_path / name).write_bytes(encode_lines(TREE))
    assert shardkeep.latest(tmp_path) == str(tmp_path / "step_10.lines")
    (tmp_path / "step_10.lines").write_bytes(b"lines {")
    assert shardkeep.latest(tmp_path) == str(tmp_path / "step_9.lines")


def test_a_folder_with_subdirectories_is_not_its_only_file(tmp_path: Path) -> None:
    """One of the subdirectories may be what was meant."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "w.lines").write_bytes(encode_lines(TREE))
    (folder / ".cache").mkdir()
    assert list(shardkeep.inspect(folder).leaves) == ["b", "w"]
    (folder / "step_1").mkdir()
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"pass one of them, .*w\.lines"):
        shardkeep.load(folder)
    (folder / "w.lines").rename(folder / "model.lines")
    assert list(shardkeep.inspect(folder).leaves) == ["b", "w"]


def test_the_directory_of_a_run_is_never_a_file_in_it(tmp_path: Path) -> None:
    with shardkeep.Run(tmp_path / "run") as run:
        run.resume({"x": 1})
    (tmp_path / "run" / "model.lines").write_bytes(encode_lines(TREE))
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint at"):
        shardkeep.load(tmp_path / "run")


def test_files_in_a_bucket_are_as_those_on_a_disk(place: Place, tmp_path: Path) -> None:
    place.put("folder/w.lines", encode_lines(TREE))
    expected = shardkeep.load(place.url + "/folder/w.lines")
    assert_same({key: np.asarray(value) for key, value in expected.items()}, TREE)
    assert_same(shardkeep.load(place.url + "/folder"), expected)
    assert shardkeep.exists(place.url + "/folder/w.lines")
    assert shardkeep.verify(place.url + "/folder").unchecked == 2
    assert shardkeep.latest(place.url + "/folder") == place.url + "/folder"
    assert main(["ls", place.url]) == 0
    assert main(["convert", place.url + "/folder/w.lines", str(tmp_path / "ours")]) == 0
    assert_same(shardkeep.load(tmp_path / "ours"), expected)
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="another program; nothing was deleted"):
        shardkeep.delete(place.url + "/folder/w.lines")
    place.put("folder/model.lines", encode_lines({"x": TREE["b"]}))
    assert list(shardkeep.load(place.url + "/folder")) == ["x"]
