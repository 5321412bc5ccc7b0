"""The checkpoint directory: what lies there, the names a save gets, and the files kept true for eFormer."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from shardkeep.layouts.plan import Draft, Layout, StagedArray, StagedValue, plan_save
from shardkeep.layouts.safetensors import SafetensorsLayout
from shardkeep.layouts.zarr import ZarrLayout
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import NATIVE
from shardkeep.model.manifest import DataFile, Manifest, Tree
from shardkeep.model.tree import flatten
from shardkeep.stores.local.store import LocalStore
from shardkeep.targets.directory import Directory
from support import assert_same, record

TREE = {"w": np.ones((2, 3), np.float32)}
INDEX, METADATA = "tensorstore_index.json", "checkpoint_metadata.json"


def at(path: Path, format: Layout | None = None) -> Directory:
    return Directory(LocalStore(str(path)), format or ZarrLayout())


class TestReading:
    def test_nothing_there_is_not_found_and_stays_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_text("x")
        for name in ("absent", "absent/below", "empty", "file", "file/below"):
            target = at(tmp_path / name)
            assert target.read_if_any() is None
            with pytest.raises(FileNotFoundError, match=f"no checkpoint at {tmp_path}/{name}: there is nothing there"):
                target.read()
        assert sorted(os.listdir(tmp_path)) == ["empty", "file"]

    def test_something_else_is_not_found_either(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("x")
        assert at(tmp_path).read_if_any() is None
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="the directory holds something else"):
            at(tmp_path).read()

    @pytest.mark.parametrize("left", ["nothing", "arrays", "an index of ours"])
    def test_a_control_directory_without_a_manifest_is_a_save_that_never_finished(
        self, left: str, tmp_path: Path
    ) -> None:
        if left != "nothing":
            shardkeep.save(tmp_path, TREE, format="zarr")
            (tmp_path / "manifest.json").unlink()
            (tmp_path / INDEX).unlink() if left == "arrays" else None
        (tmp_path / ".shardkeep").mkdir(exist_ok=True)
        assert at(tmp_path).read_if_any() is None
        with pytest.raises(shardkeep.IncompleteCheckpointError, match=f"{tmp_path} holds no committed checkpoint: "):
            at(tmp_path).read()

    def test_an_index_of_ours_alone_is_a_checkpoint_that_lost_its_manifest(self, tmp_path: Path) -> None:
        """A copy without hidden files and without the manifest, say."""
        shardkeep.save(tmp_path / "a", TREE, format="zarr")
        (tmp_path / "b").mkdir()
        for name in (INDEX, METADATA, "w"):
            (tmp_path / "a" / name).rename(tmp_path / "b" / name)
        with pytest.raises(
            shardkeep.IncompleteCheckpointError, match="but manifest.json is missing from that directory"
        ):
            at(tmp_path / "b").read()

    def test_another_programs_index_counts_also_beside_a_control_directory(self, tmp_path: Path) -> None:
        """A save of ours into its directory that never finished takes nothing away."""
        shardkeep.save(tmp_path, TREE, format="zarr")
        (tmp_path / "manifest.json").unlink()
        index = json.loads((tmp_path / INDEX).read_text())
        del index["shardkeep"]
        (tmp_path / INDEX).write_text(json.dumps(index))
        assert [leaf.key for leaf in at(tmp_path).read().tree().leaves] == ["w"]

    @pytest.mark.parametrize("what", ["a directory", "empty", "cut", "zeros", "another document beside our files"])
    def test_a_damaged_manifest_is_named(self, what: str, tmp_path: Path) -> None:
        document = tmp_path / "manifest.json"
        content = {"empty": "", "cut": "{", "zeros": "\0" * 100}
        document.mkdir() if what == "a directory" else document.write_text(content.get(what, '{"name": "app"}'))
        if what.startswith("another"):
            (tmp_path / ".shardkeep").mkdir()
        for read in (at(tmp_path).read, at(tmp_path).read_if_any):
            with pytest.raises(shardkeep.IntegrityError, match=f"{document} "):
                read()


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., list[str]]:
    """The names that a save would get there."""

    def plan(tree: Any, prefix: str = "", save_id: str = "1" * 32, format: Layout | None = None) -> list[str]:
        skeleton, leaves = flatten(tree)
        plans: list[Any] = [StagedValue(leaf.path, leaf.value) for leaf in leaves if not hasattr(leaf.value, "shape")]
        for leaf in leaves:
            if hasattr(leaf.value, "shape"):
                spec = ArraySpec(leaf.value.shape, leaf.value.dtype)
                plans.append(StagedArray(leaf.path, spec, NATIVE, (Region.whole(spec.shape),)))
        target = at(tmp_path, format)
        made = plan_save(target.layout, plans, [Draft(save_id, prefix, skeleton, {}, "")])
        assert (made.save_id, made.trees[0].draft.skeleton) == (save_id, skeleton)
        return target.reserve(made, None).trees[0].names

    return plan


Planned = Callable[..., list[str]]


class TestNames:
    def test_the_first_has_clean_names_and_whoever_comes_later_its_own(self, planned: Planned) -> None:
        assert planned(TREE) == ["w/.zarray", "w/0.0"]
        assert planned(TREE, save_id="2" * 32) == [f"~{'2' * 32}/w/.zarray", f"~{'2' * 32}/w/0.0"]

    def test_each_prefix_has_a_first(self, planned: Planned) -> None:
        assert planned(TREE, "m.n") == ["m/n/w/.zarray", "m/n/w/0.0"]
        assert planned(TREE, "m.o") == ["m/o/w/.zarray", "m/o/w/0.0"]
        assert planned(TREE, "m.n", "2" * 32)[0] == f"m/n~{'2' * 32}/w/.zarray"

    def test_a_claim_outlives_the_files(self, tmp_path: Path, planned: Planned) -> None:
        """No file of a manifest is ever written twice: a reader may still have the old one."""
        shardkeep.save(tmp_path, TREE, format="zarr")
        shardkeep.save(tmp_path, TREE, overwrite=True)
        assert not (tmp_path / "w").exists()
        assert planned(TREE)[0].startswith("~")

    @pytest.mark.parametrize("name", ["w/0.0", "w", "w/0.0/x"])
    def test_nor_does_a_save_claim_what_a_tree_is_published_under(self, name: str, tmp_path: Path) -> None:
        """Also while that name does not exist, because publishing was interrupted."""
        save_id = "2" * 32
        tree = Tree(save_id, "zarr", flatten({})[0], (), (DataFile(f"~{save_id}/{name}", 3),), {}, "", published=True)
        current = Manifest("", save_id, {"": tree})
        assert at(tmp_path)._is_free(["x", "v/0"], current, [])
        assert not at(tmp_path)._is_free(["x", "w/0.0"], current, [])

    def test_names_that_carry_the_save_need_no_claim(self, tmp_path: Path, planned: Planned) -> None:
        for _ in range(2):
            assert planned(TREE, "m", format=SafetensorsLayout()) == [f"m/{'1' * 32}-00000.safetensors"]
        assert planned({"n": 3}) == []
        assert not (tmp_path / ".shardkeep").exists()

    @pytest.mark.parametrize("taken", ["w/.zarray", "w/0.0", "w"])
    def test_a_file_that_is_there_is_never_a_name(self, taken: str, tmp_path: Path, planned: Planned) -> None:
        (tmp_path / taken).parent.mkdir(exist_ok=True)
        (tmp_path / taken).write_text("mine")
        assert planned(TREE)[0].startswith("~")
        assert (tmp_path / taken).read_text() == "mine"

    @pytest.mark.parametrize("name", ["w/0.0", "w", "w/0.0/x"])
    def test_nor_is_one_that_a_running_save_will_use(self, name: str, tmp_path: Path, planned: Planned) -> None:
        """As a file, or as a directory where the other needs a file."""
        held = record(LocalStore(str(tmp_path)), "3" * 32, [name])
        assert planned(TREE)[0].startswith("~")
        held.remove()
        assert planned(TREE) == ["w/.zarray", "w/0.0"]

    def test_others_names_are_no_hindrance(self, tmp_path: Path, planned: Planned) -> None:
        record(LocalStore(str(tmp_path)), "3" * 32, ["w/1.0", "ww", "m/w"]).release()
        assert planned(TREE) == ["w/.zarray", "w/0.0"]


class TestCommitting:
    def test_trees_of_other_prefixes_stay_as_they_are(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path, TREE)
        shardkeep.save(tmp_path, TREE, prefix="m", format="zarr")
        before = dict(shardkeep.inspect(tmp_path).trees)
        shardkeep.save(tmp_path, {"x": 1}, prefix="o")
        now = shardkeep.inspect(tmp_path)
        assert {p: now.trees[p] for p in ("", "m")} == before
        assert now.prefixes == ["", "m", "o"]
        assert now.save_id == now.trees["o"].save_id

    def test_the_index_is_there_as_long_as_a_tree_for_eformer_is(self, tmp_path: Path) -> None:
        def index() -> Any:
            return json.loads((tmp_path / INDEX).read_text()) if (tmp_path / INDEX).exists() else None

        shardkeep.save(tmp_path, TREE)
        assert index() is None
        shardkeep.save(tmp_path, TREE, prefix="m", format="zarr", metadata={"step": 1})
        assert list(index()["prefixes"]) == ["m"]
        assert json.loads((tmp_path / METADATA).read_text()) == {"step": 1}
        shardkeep.save(tmp_path, TREE, prefix="o")
        assert list(index()["prefixes"]) == ["m"]
        assert index()["shardkeep"] == shardkeep.inspect(tmp_path).save_id
        shardkeep.save(tmp_path, TREE, prefix="m", overwrite=True)
        assert index() is None
        assert not (tmp_path / METADATA).exists()

    def test_an_index_that_cannot_be_written_undoes_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        shardkeep.save(tmp_path, TREE, prefix="m")
        (tmp_path / INDEX).mkdir()
        with caplog.at_level(logging.WARNING, "shardkeep"):
            shardkeep.save(tmp_path, TREE, prefix="o", format="zarr")
        assert (
            f"{tmp_path} is saved, but tensorstore_index.json and the names it lists are not up to date" in caplog.text
        )
        assert_same(shardkeep.load(tmp_path, prefix="o"), TREE)
        assert (tmp_path / INDEX).is_dir()
        (tmp_path / INDEX).rmdir()
        shardkeep.save(tmp_path, TREE, prefix="m", overwrite=True)
        assert list(json.loads((tmp_path / INDEX).read_text())["prefixes"]) == ["o"]


def save_async(*arguments: Any, **more: Any) -> None:
    shardkeep.save_async(*arguments, **more).wait()


@pytest.mark.parametrize("save", [shardkeep.save, save_async], ids=["save", "save_async"])
class TestOtherProgramsArrays:
    @pytest.fixture
    def unlisted(self, tmp_path: Path) -> Path:
        """Arrays without an index: `load` finds them by searching."""
        shardkeep.save(tmp_path / "a", {"w": jnp.arange(3.0)}, format="zarr")
        (tmp_path / "b").mkdir()
        (tmp_path / "a" / "w").rename(tmp_path / "b" / "w")
        return tmp_path / "b"

    @pytest.mark.parametrize(("prefix", "overwrite"), [(None, False), ("m", False), ("m", True)])
    def test_what_no_index_lists_is_not_lost_from_sight(
        self, save: Any, prefix: str | None, overwrite: bool, unlisted: Path
    ) -> None:
        before = shardkeep.load(unlisted)
        with pytest.raises(shardkeep.CheckpointExistsError, match=f"{unlisted} "):
            save(unlisted, TREE, prefix=prefix, overwrite=overwrite)
        assert os.listdir(unlisted) == ["w"]
        assert_same(shardkeep.load(unlisted), before)

    def test_it_is_replaced_by_who_asks_for_that(self, save: Any, unlisted: Path) -> None:
        save(unlisted, TREE, overwrite=True)
        assert_same(shardkeep.load(unlisted), TREE)

    def test_checkpoints_below_a_directory_do_not_stand_in_its_way(self, save: Any, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "step_1", {"w": jnp.arange(3.0)}, format="zarr")
        save(tmp_path, TREE)
        assert_same(shardkeep.load(tmp_path), TREE)
        assert_same(shardkeep.load(tmp_path / "step_1"), {"w": jnp.arange(3.0)})


def test_any_names_of_leaves_will_do(tmp_path: Path) -> None:
    for layout in (SafetensorsLayout(), ZarrLayout()):
        layout.check([(), ("a", "a"), ("a.a",), ("\ud800", "/")])
    assert at(tmp_path).where == str(tmp_path)
