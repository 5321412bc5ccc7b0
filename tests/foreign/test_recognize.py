"""Our files and those of other programs: told apart, and other programs called by their names."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from buckets.fixtures import Place, _alone, place  # noqa: F401
from shardkeep.cli.main import main
from shardkeep.eformer.manager import AsyncCheckpointManager
from shardkeep.foreign.recognize import are_our_data, has_our_data, name_foreign
from shardkeep.model.document import is_foreign_manifest
from support import FORMATS, save_as

FIXTURES = Path(__file__).parents[1] / "fixtures"

OURS = b'{"shardkeep":1,"digest":"0123456789abcdef0123456789abcdef","algorithm":"xxh3-128","block":4194304,"save":"ab"}'
FOREIGN = {
    "web app": b'{"name": "my app", "short_name": "app", "icons": [{"src": "a.png"}], "display": "standalone"}',
    "extension": b'{"manifest_version": 3, "name": "x", "version": "1"}',
    "about us": b'{"name": "shardkeep demo", "description": "a demo of shardkeep"}',
    "list": b"[1, 2, 3]",
    "text": b"CACHE MANIFEST\n# v1\nindex.html\n",
    "binary": bytes(range(1, 256)),
    "other keys": b'{"save": "yes"}',
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_another_programs_manifest_is_recognised(kind: str) -> None:
    assert is_foreign_manifest(FOREIGN[kind])


@given(st.integers(0, len(OURS) - 1), st.integers(0, 255))
def test_a_changed_byte_does_not_make_our_manifest_another_programs(at: int, byte: int) -> None:
    assert not is_foreign_manifest(OURS[:at] + bytes([byte]) + OURS[at + 1 :])


@given(st.integers(0, len(OURS)), st.integers(0, len(OURS)))
def test_a_cut_or_erased_part_does_not_make_our_manifest_another_programs(start: int, end: int) -> None:
    assert not is_foreign_manifest(OURS[:end])
    assert not is_foreign_manifest(OURS[:start] + b"\0" * max(end - start, 0) + OURS[max(start, end) :])


@pytest.mark.parametrize("kind", FOREIGN)
class TestForeignManifest:
    """A directory with a manifest.json that is not ours is no damaged checkpoint."""

    def test_it_is_no_checkpoint(self, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "app").mkdir()
        (tmp_path / "app" / "manifest.json").write_bytes(FOREIGN[kind])
        shardkeep.save(tmp_path / "step_1", {"x": 1})
        assert not shardkeep.exists(tmp_path / "app")
        assert shardkeep.latest(tmp_path) == str(tmp_path / "step_1")
        for action in (shardkeep.load, shardkeep.inspect, shardkeep.verify, shardkeep.delete):
            with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"manifest\.json was not written by shardkeep"):
                action(tmp_path / "app")
        assert main(["ls", str(tmp_path), "--json"]) == 0
        assert [one["name"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == ["step_1"]
        assert [path.name for path in (tmp_path / "app").iterdir()] == ["manifest.json"]

    @pytest.mark.parametrize("overwrite", [True, False])
    def test_no_save_replaces_it(self, kind: str, overwrite: bool, tmp_path: Path) -> None:
        app = tmp_path / "app"
        app.mkdir()
        (app / "manifest.json").write_bytes(FOREIGN[kind])
        calls: list[Callable[[], Any]] = [
            lambda: shardkeep.save(app, {"x": 1}, overwrite=overwrite),
            lambda: shardkeep.save(app, {"x": 1}, overwrite=overwrite, prefix="model", format="zarr"),
            lambda: shardkeep.save_async(app, {"x": 1}, overwrite=overwrite).wait(),
            lambda: AsyncCheckpointManager().save({"x": 1}, app),
        ]
        for call in calls:
            with pytest.raises(FileExistsError, match=r"manifest\.json was not written by shardkeep, and a save"):
                call()
            assert [path.name for path in app.iterdir()] == ["manifest.json"]
        assert (app / "manifest.json").read_bytes() == FOREIGN[kind]

    def test_a_model_beside_it_loads(self, kind: str, tmp_path: Path) -> None:
        """A model that is published with a web page, say."""
        (tmp_path / "manifest.json").write_bytes(FOREIGN[kind])
        safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
        assert shardkeep.load(tmp_path)["w"].shape == (3,)
        assert shardkeep.exists(tmp_path)
        shutil.copytree(FIXTURES / "eformer" / "ts_plain" / "ckpt", tmp_path / "run")
        (tmp_path / "run" / "manifest.json").write_bytes(FOREIGN[kind])
        assert shardkeep.exists(tmp_path / "run")
        shardkeep.load(tmp_path / "run")

    def test_beside_our_files_it_is_damage(self, kind: str, tmp_path: Path) -> None:
        """Something overwrote our manifest: that is not the same as no checkpoint."""
        for name, forget in (("a", False), ("b", True)):
            shardkeep.save(tmp_path / name, {"w": np.ones(3)})
            (tmp_path / name / "manifest.json").write_bytes(FOREIGN[kind])
            if forget:
                shutil.rmtree(tmp_path / name / ".shardkeep")
            with pytest.raises(shardkeep.IntegrityError, match=r"manifest\.json"):
                shardkeep.load(tmp_path / name)
            shardkeep.save(tmp_path / name, {"w": np.zeros(3)})
            (aside,) = (tmp_path / name).glob("manifest.json.damaged-*")
            assert aside.read_bytes() == FOREIGN[kind]
            assert not shardkeep.load(tmp_path / name)["w"].any()


def test_arrays_without_an_index_beside_another_programs_manifest_are_not_taken_for_a_checkpoint(
    tmp_path: Path,
) -> None:
    """They may be ours: without their manifest nothing would be checked."""
    shardkeep.save(tmp_path, {"w": np.ones(3)}, format="zarr")
    shutil.rmtree(tmp_path / ".shardkeep")
    (tmp_path / "tensorstore_index.json").unlink()
    (tmp_path / "manifest.json").write_bytes(FOREIGN["web app"])
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="was not written by shardkeep"):
        shardkeep.load(tmp_path)


def test_a_foreign_manifest_in_a_bucket_is_left_alone(place: Place) -> None:
    place.put("run/manifest.json", FOREIGN["web app"])
    assert not shardkeep.exists(f"{place.url}/run")
    assert shardkeep.latest(place.url) is None
    for action in (shardkeep.load, shardkeep.delete):
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="was not written by shardkeep"):
            action(f"{place.url}/run")
    with pytest.raises(shardkeep.CheckpointExistsError, match="was not written by shardkeep"):
        shardkeep.save(f"{place.url}/run", {"x": 1}, overwrite=True)
    assert place.names() == {"run/manifest.json": len(FOREIGN["web app"])}


def test_an_unfinished_orbax_checkpoint_is_called_so(tmp_path: Path) -> None:
    for name in ("7.orbax-checkpoint-tmp-1731800000", "7.orbax-checkpoint-tmp"):
        shutil.copytree(FIXTURES / "orbax" / "std_default" / "ckpt", tmp_path / "run" / name)
        with pytest.raises(shardkeep.errors.IncompleteCheckpointError, match="is an unfinished Orbax checkpoint"):
            shardkeep.load(tmp_path / "run" / name)
    with pytest.raises(
        shardkeep.CheckpointNotFoundError, match="the directory holds only unfinished Orbax checkpoints"
    ):
        shardkeep.load(tmp_path / "run")
    assert shardkeep.latest(tmp_path / "run") is None


def test_a_manager_without_a_complete_step_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "_ROOT_METADATA").write_text("{}")
    with pytest.raises(
        shardkeep.CheckpointNotFoundError, match="holds no complete step of its Orbax CheckpointManager"
    ):
        shardkeep.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "write", "called"),
    [
        ("model.eqx", Path.touch, "an Equinox checkpoint (.eqx)"),
    ],
)
def test_files_of_other_libraries_are_called_by_their_names(
    name: str, write: Callable[[Path], None], called: str, tmp_path: Path
) -> None:
    """Given the file, or its directory."""
    write(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(shardkeep.CheckpointNotFoundError, match=re.escape(f"{called}, which this version of")):
            shardkeep.load(path)


def test_other_names_say_nothing() -> None:
    for names in (
        [],
        ["model.pt", "notes.txt", "config.json"],
        ["data.bin"],
        ["pytreedef.json"],
        ["array_store"],
        ["d"],
    ):
        assert name_foreign(names) is None


@pytest.mark.parametrize("kind", FORMATS)
def test_our_own_checkpoints_have_no_other_name(kind: str, tmp_path: Path) -> None:
    path = save_as(kind, tmp_path / "run", {"w": np.ones(3), "model": {"b": np.ones(2)}})
    names = [str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*")]
    assert name_foreign(names) is None
    assert shardkeep.exists(path)


def test_data_of_ours_is_told_from_what_other_programs_write() -> None:
    ours = [f"{'0' * 32}-00000.safetensors", f"{'a' * 32}-00003-00000.safetensors", f"{'f' * 32}-00012.safetensors"]
    assert has_our_data([*ours, "model.safetensors"])
    assert not has_our_data(["model.safetensors", "w"])
    assert are_our_data(ours)
    assert not are_our_data([*ours, "w"])
