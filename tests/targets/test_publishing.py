"""What other programs find in a checkpoint: the newest tree under its clean names, groups for zarr, a true index."""

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
import zarr
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from faults import disks
from faults.spawner import Fault, Spawner
from faults.states import make
from faults.sweep import left_overs
from shardkeep import system
from shardkeep.cli.main import main
from shardkeep.converting.survey import survey
from shardkeep.loading import load as loading
from shardkeep.loading.request import LoadRequest
from shardkeep.model.digests import seal
from shardkeep.processes.operation import ALONE
from shardkeep.serialization import tree_serialize_leaves
from shardkeep.stores.local.store import LocalStore
from shardkeep.stores.location import location
from shardkeep.targets import directory
from shardkeep.targets.directory import Directory
from support import assert_same, mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:Object at .* is not recognized as a component of a Zarr hierarchy")

INDEX, METADATA = "tensorstore_index.json", "checkpoint_metadata.json"
needs_mounts = pytest.mark.skipif(bool(disks.missing()), reason=disks.missing())


def save(path: Path, tree: Any, prefix: str | None = None, **more: Any) -> None:
    shardkeep.save(path, tree, prefix=prefix, overwrite=True, **{"format": "zarr", **more})


def full(number: int, *layers: str) -> dict[str, Any]:
    return {"w": np.full((2, 3), number, np.float32), "layers": {name: {"k": np.full(4, number)} for name in layers}}


def listed(path: Path) -> dict[str, list[str]] | None:
    """The arrays in the index of each prefix, or None without an index; it belongs to the manifest."""
    if not (path / INDEX).exists():
        return None
    index = json.loads((path / INDEX).read_text())
    assert index["shardkeep"] == shardkeep.inspect(path).save_id
    prefixes = {"": index["arrays"]} if "arrays" in index else {}
    return {p: sorted(e["path"] for e in entries) for p, entries in (prefixes | index["prefixes"]).items()}


def read(path: Path, name: str) -> np.ndarray[Any, Any]:
    """An array as TensorStore finds it under a name."""
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path / name)}}
    return np.asarray(tensorstore.open(spec, read=True, context=tensorstore.Context()).result().read().result())


def check(path: Path, tree: Any, prefix: str | None = None) -> None:
    """We and others find this tree and nothing older; nothing is left over."""
    start = f"{prefix.replace('.', '/')}/" if prefix else ""
    arrays = {"/".join(str(k.key if hasattr(k, "key") else k.idx) for k in keys): value
              for keys, value in jax.tree_util.tree_flatten_with_path(tree)[0]}  # fmt: skip
    assert_same(shardkeep.load(path, prefix=prefix), tree)
    assert shardkeep.verify(path).ok
    assert listed(path)[prefix or ""] == sorted(start + key for key in arrays)
    group = zarr.open_group(path / start, mode="r")
    for key, value in arrays.items():
        assert np.array_equal(read(path, start + key), np.asarray(value))
        assert np.array_equal(group[key][...], np.asarray(value))
    assert left_overs(path) == set()


def members(path: Path) -> set[str]:
    return {name for name, found in zarr.open_group(path, mode="r").members(max_depth=None) if hasattr(found, "shape")}


def disk_usage(path: Path) -> int:
    """Bytes on the disk, a file with several names counted once."""
    inodes = {(s := file.stat()).st_ino: s.st_size for file in path.rglob("*") if file.is_file()}
    return sum(inodes.values())


class TestCleanNames:
    @pytest.mark.parametrize("prefix", [None, "model", "a.b"])
    def test_every_save_of_a_prefix_is_found_under_them(self, prefix: str | None, tmp_path: Path) -> None:
        for number, layers in enumerate([("a", "b"), ("a", "b"), ("a", "b"), ("a",), (), ("b", "c", "d")]):
            save(tmp_path, full(number, *layers), prefix)
            check(tmp_path, full(number, *layers), prefix)

    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_whatever_the_chunks_are(self, compression: Any, tmp_path: Path) -> None:
        """Sharded over devices, in one piece, compressed, with other dtypes and shapes, without elements."""
        rows, columns = PartitionSpec("a"), PartitionSpec("b", "a")
        wide = np.arange(1 << 20, dtype=np.float32).reshape(2048, 512)
        for tree in (
            {"w": jax.device_put(wide, NamedSharding(mesh_of(8), rows))},
            {"w": jax.device_put(wide + 1, NamedSharding(mesh_of(2, 4), columns))},
            {"w": jnp.asarray(wide[:7]).astype(jnp.int8), "v": np.zeros((0, 4))},
            {"w": np.float64(wide[0, :5])},
        ):
            save(tmp_path, tree, compression=compression)
            check(tmp_path, tree)

    def test_files_take_the_place_of_directories_and_the_other_way_round(self, tmp_path: Path) -> None:
        """The chunk of a one-dimensional array is called 0, and so is the first element of a list."""
        for tree in ({"a": [np.ones(3)]}, {"a": np.zeros(3)}, {"a": [np.ones(4)]}, {"a": np.ones((1, 2))}):
            for _ in range(2):
                save(tmp_path, tree)
                check(tmp_path, tree)

    def test_they_are_second_names_and_take_no_space(self, tmp_path: Path) -> None:
        usage = []
        for number in range(3):
            save(tmp_path, {"w": np.full(100_000, number)})
            usage.append(disk_usage(tmp_path))
        (tree,) = shardkeep.inspect(tmp_path).trees.values()
        assert tree.published
        for clean, name in tree.clean_names.items():
            assert (tmp_path / clean).samefile(tmp_path / name)
        assert max(usage) - min(usage) < 2000

    def test_a_prefix_saved_between_two_saves_changes_nothing(self, tmp_path: Path) -> None:
        save(tmp_path, full(1, "x"), "a")
        save(tmp_path, full(2, "x"), "a")
        for number in (3, 4):
            save(tmp_path, full(number), "b")
            check(tmp_path, full(2, "x"), "a")
            check(tmp_path, full(number), "b")
        save(tmp_path, {"n": 1}, "c", format="safetensors")
        check(tmp_path, full(2, "x"), "a")
        assert set(listed(tmp_path)) == {"a", "b"}

    @pytest.mark.parametrize("first", ["model", "model.head"])
    def test_two_prefixes_never_share_one(self, first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        trees = {"model": {"head": {"w": np.ones(2)}}, "model.head": {"w": np.zeros(3), "v": np.ones(1)}}
        order = sorted(trees, key=lambda prefix: prefix != first)
        for _ in range(3):
            for prefix in order:
                save(tmp_path, trees[prefix], prefix)
                for saved in shardkeep.inspect(tmp_path).prefixes:
                    assert_same(shardkeep.load(tmp_path, prefix=saved), trees[saved])
                assert np.array_equal(read(tmp_path, "model/head/w"), np.ones(2) if first == "model" else np.zeros(3))
        assert list(listed(tmp_path)) == [first]
        assert f"at {tmp_path} (prefix {order[1]!r}), and {INDEX} leaves it out: it needs the name " in caplog.text
        assert caplog.text.count("leaves it out") == 1, "once is enough"
        shardkeep.delete(tmp_path)
        assert not tmp_path.exists()

    def test_a_tree_that_is_not_to_be_listed_has_none(self, tmp_path: Path) -> None:
        tree_serialize_leaves(tmp_path, full(1), prefix="m")
        tree_serialize_leaves(tmp_path, full(2), prefix="m", write_index=False)
        assert listed(tmp_path) is None
        assert not (tmp_path / "m").exists()
        assert left_overs(tmp_path) == set()
        tree_serialize_leaves(tmp_path, full(3), prefix="m")
        check(tmp_path, full(3), "m")

    def test_a_tree_of_another_format_takes_them_away(self, tmp_path: Path) -> None:
        save(tmp_path, full(1, "a"), "m")
        save(tmp_path, full(2, "a"), "m")
        save(tmp_path, full(3, "a"), "m", format="safetensors")
        assert listed(tmp_path) is None
        assert not (tmp_path / METADATA).exists()
        assert sorted(os.listdir(tmp_path)) == [".shardkeep", "m", "manifest.json"]
        assert [name.partition("-")[2] for name in os.listdir(tmp_path / "m")] == ["00000.safetensors"]
        save(tmp_path, full(4, "b"), "m")
        check(tmp_path, full(4, "b"), "m")

    def test_saves_in_the_background_give_them_too(self, tmp_path: Path) -> None:
        for number in range(4):
            pending = shardkeep.save_async(tmp_path, full(number, "a"), format="zarr", overwrite=True)
        assert pending.wait().phases["commit"] > 0
        check(tmp_path, full(3, "a"))


class TestOthersFiles:
    @pytest.mark.parametrize("name", ["w/0.0", "w", "layers/c/k/.zarray", "w/0.0/x"])
    def test_a_file_that_is_not_ours_is_never_replaced(
        self, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(tmp_path, {"v": np.ones(2)})
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
        for number in (1, 2):
            save(tmp_path, full(number, "c"))
            assert (tmp_path / name).read_text() == "mine"
            assert_same(shardkeep.load(tmp_path), full(number, "c"))
            assert listed(tmp_path) is None
        assert "which is in use for something else" in caplog.text
        (tmp_path / name).unlink()
        shutil.rmtree(tmp_path / name.partition("/")[0], ignore_errors=True)
        save(tmp_path, full(3, "c"))
        check(tmp_path, full(3, "c"))

    def test_files_beside_ours_stay(self, tmp_path: Path) -> None:
        for number, layers in ((1, ("a", "b")), (2, ("a", "b"))):
            save(tmp_path, full(number, *layers))
        (tmp_path / "layers" / "b" / "notes.txt").write_text("mine")
        save(tmp_path, full(3, "a"))
        assert (tmp_path / "layers" / "b" / "notes.txt").read_text() == "mine"
        assert not (tmp_path / "layers" / "b" / "k").exists()
        shardkeep.delete(tmp_path)
        assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / "layers" / "b" / "notes.txt"]

    def test_a_link_in_the_place_of_a_directory_leads_nothing_outside(self, tmp_path: Path) -> None:
        path, outside = tmp_path / "run", tmp_path / "outside"
        save(path, full(1, "a"))
        save(path, full(2, "a"))
        shutil.move(path / "w", outside)
        (path / "w").symlink_to(outside)
        before = sorted((file.name, file.read_bytes()) for file in outside.iterdir())
        for number in (3, 4):
            save(path, full(number, "a"))
            assert_same(shardkeep.load(path), full(number, "a"))
        shardkeep.delete(path)
        assert sorted((file.name, file.read_bytes()) for file in outside.iterdir()) == before

    @pytest.mark.parametrize("prefix", [None, "model"])
    def test_another_programs_directory_is_taken_over(self, prefix: str | None, tmp_path: Path) -> None:
        """As eFormer leaves it: arrays under their clean names and an index, no manifest."""
        save(tmp_path, {**full(1, "a"), "gone": np.ones(2)}, prefix)
        index = json.loads((tmp_path / INDEX).read_text())
        del index["shardkeep"]
        (tmp_path / INDEX).write_text(json.dumps(index))
        for file in ("manifest.json", ".zgroup"):
            (tmp_path / file).unlink()
        shutil.rmtree(tmp_path / ".shardkeep")
        assert shardkeep.inspect(tmp_path).tree(prefix).format == "foreign"
        for number in (2, 3):
            save(tmp_path, full(number, "a"), prefix)
            check(tmp_path, full(number, "a"), prefix)

    def test_a_save_that_dies_in_another_programs_directory_leaves_its_index_alone(
        self, tmp_path: Path, spawner: Spawner
    ) -> None:
        save(tmp_path / "run", make("plain", 1))
        index = json.loads((tmp_path / "run" / INDEX).read_text())
        del index["shardkeep"]
        (tmp_path / "run" / INDEX).write_text(json.dumps(index))
        (tmp_path / "run" / "manifest.json").unlink()
        shutil.rmtree(tmp_path / "run" / ".shardkeep")
        fault = Fault(str(tmp_path), "kill", 30)
        more = {"kind": "plain", "number": 2, "format": "zarr", "overwrite": True}
        assert spawner.run("save", fault, path=str(tmp_path / "run"), **more).signal
        assert (tmp_path / "run" / ".shardkeep" / "saves").exists()
        assert main(["clean", "--yes", str(tmp_path)]) == 0
        assert json.loads((tmp_path / "run" / INDEX).read_text()) == index
        assert np.array_equal(shardkeep.load(tmp_path / "run")["w"], make("plain", 1)["w"])


class TestWithoutLinks:
    @pytest.fixture(params=[errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK], ids=errno.errorcode.get)
    def linkless(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(request.param, os.strerror(request.param))

        monkeypatch.setattr(system, "link", refuse)

    @pytest.mark.usefixtures("linkless")
    def test_there_are_copies(self, tmp_path: Path) -> None:
        for number, layers in enumerate([("a", "b"), ("a", "b"), ("a",), ("a", "c")]):
            save(tmp_path, full(number, *layers), "m")
            check(tmp_path, full(number, *layers), "m")
        (tree,) = shardkeep.inspect(tmp_path).trees.values()
        assert not any((tmp_path / clean).samefile(tmp_path / name) for clean, name in tree.clean_names.items())
        shardkeep.delete(tmp_path)
        assert not tmp_path.exists()

    @needs_mounts
    def test_where_a_directory_is_another_mount(self, tmp_path: Path) -> None:
        """No link leads from one mount to another, be they of the same disk."""
        save(tmp_path, full(1, "a"))
        with disks.mounted(tmp_path / "layers", tmp_path / "layers", "--bind"):
            for number in (2, 3):
                save(tmp_path, full(number, "a"))
                check(tmp_path, full(number, "a"))
            clean = shardkeep.inspect(tmp_path).tree().clean_names
            linked = {name for name in clean if (tmp_path / name).samefile(tmp_path / clean[name])}
            assert linked == {"w/.zarray", "w/0.0"}
        save(tmp_path, full(4, "a"))
        check(tmp_path, full(4, "a"))

    def test_no_space_for_copies_is_warned_of_and_takes_none(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(tmp_path, full(1, "a"))
        with monkeypatch.context() as patched:
            patched.setattr(system, "link", _no_space_after(3))
            save(tmp_path, full(2, "a"))
        assert "the names it lists are not up to date ([Errno 28] No space left on device)" in caplog.text
        assert_same(shardkeep.load(tmp_path), full(2, "a"))
        assert listed(tmp_path) is None
        assert not (tmp_path / "w").exists()
        assert main(["clean", "--yes", str(tmp_path)]) == 0
        check(tmp_path, full(2, "a"))


def _no_space_after(count: int) -> Any:
    link, calls = system.link, []

    def fail(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) > count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        link(*arguments)

    return fail


class TestInterrupted:
    @pytest.mark.parametrize("then", ["save", "other prefix", "clean"])
    @pytest.mark.parametrize("call", [1, 4])
    def test_what_was_left_is_completed_by_the_next_who_comes(
        self, call: int, then: str, tmp_path: Path, spawner: Spawner
    ) -> None:
        """Killed while it links: there is no index, and after that a true one."""
        path = tmp_path / "run"
        save(path, make("plain", 1))
        fault = Fault(str(tmp_path), "kill", call, calls="link")
        more = {"kind": "plain", "number": 2, "format": "zarr", "overwrite": True}
        assert spawner.run("save", fault, path=str(path), **more).signal
        assert not (path / INDEX).exists()
        assert shardkeep.load(path)["step"] == 2
        assert shardkeep.verify(path).ok
        if then == "clean":
            assert main(["clean", "--yes", str(tmp_path)]) == 0
        elif then == "save":
            save(path, make("plain", 3))
        else:
            save(path, make("fewer", 3), "m")
        newest = make("plain", 3 if then == "save" else 2)
        assert "w" in listed(path)[""]
        assert np.array_equal(read(path, "w"), newest["w"])
        assert np.array_equal(read(path, "layers/1/b"), newest["layers"][1]["b"])
        assert left_overs(path) == set()

    def test_a_delete_that_is_killed_leaves_no_index_of_arrays_that_are_gone(
        self, tmp_path: Path, spawner: Spawner
    ) -> None:
        save(tmp_path / "run", make("plain", 1))
        save(tmp_path / "run", make("plain", 2))
        fault = Fault(str(tmp_path), "kill", 8, calls="unlink")
        assert spawner.run("delete", fault, path=str(tmp_path / "run")).signal
        assert (tmp_path / "run").exists()
        assert not (tmp_path / "run" / INDEX).exists()
        assert main(["clean", "--yes", str(tmp_path)]) == 0
        assert not (tmp_path / "run").exists()


class TestReaders:
    def test_mapped_arrays_never_change(self, tmp_path: Path) -> None:
        loaded = []
        for number in range(4):
            save(tmp_path, {"w": np.full(100_000, number), "j": jnp.full(100_000, number)})
            loaded.append(shardkeep.load(tmp_path))
        shardkeep.delete(tmp_path)
        for number, tree in enumerate(loaded):
            assert (tree["w"] == number).all()
            assert (tree["j"] == number).all()

    @pytest.mark.parametrize("foreign", [False, True])
    def test_a_reader_of_the_replaced_tree_starts_over(self, foreign: bool, tmp_path: Path) -> None:
        """The names of the first tree have new content: without digests only the manifest tells that."""
        tree = {"w": jnp.arange(3.0)}
        save(tmp_path, tree)
        if foreign:
            (tmp_path / "manifest.json").unlink()
            index = json.loads((tmp_path / INDEX).read_text())
            del index["shardkeep"]
            (tmp_path / INDEX).write_text(json.dumps(index))
        store, manifest = LocalStore(str(tmp_path)), shardkeep.inspect(tmp_path)
        request = LoadRequest(verify=foreign)
        assert loading._try_load(location(tmp_path), store, manifest, request, ALONE, None) is not None
        save(tmp_path, {"w": jnp.arange(3.0) + 1})
        assert (tmp_path / "w" / "0").exists()
        assert loading._try_load(location(tmp_path), store, manifest, request, ALONE, None) is None
        assert_same(shardkeep.load(tmp_path, verify=False), {"w": jnp.arange(3.0) + 1})

    def test_lists_and_searches_see_one_checkpoint(self, tmp_path: Path) -> None:
        for step in (1, 2):
            for number in (1, 2):
                save(tmp_path / f"step_{step}", full(number, "a"))
                save(tmp_path / f"step_{step}", full(number, "a"), "m")
        assert [found.name for found in survey(str(tmp_path))] == ["step_1", "step_2"]
        assert [found.name for found in survey(str(tmp_path / "step_1"))] == ["."]
        assert shardkeep.latest(tmp_path) == str(tmp_path / "step_2")
        assert shardkeep.latest(tmp_path / "step_1") == str(tmp_path / "step_1")
        assert shardkeep.exists(tmp_path / "step_1")
        files = sum(len(tree.files) for tree in shardkeep.inspect(tmp_path / "step_1").trees.values())
        assert shardkeep.verify(tmp_path / "step_1").files == files

    @pytest.mark.parametrize("visible", [False, True])
    def test_a_copy_without_hidden_files_is_whole_and_can_be_saved_to(self, visible: bool, tmp_path: Path) -> None:
        """`cp -r run/* copy`: no control directory, and every name is a file of its own."""
        for number in (1, 2):
            save(tmp_path / "run", full(number, "a", "b"))
        shutil.copytree(tmp_path / "run", tmp_path / "copy", ignore=shutil.ignore_patterns(".shardkeep"))
        (tmp_path / "copy" / ".zgroup").unlink() if visible else None
        (tmp_path / "copy" / "layers" / "notes.txt").write_text("mine")
        assert shardkeep.verify(tmp_path / "copy").ok
        assert_same(shardkeep.load(tmp_path / "copy"), full(2, "a", "b"))
        save(tmp_path / "copy", full(3, "a"))
        assert (tmp_path / "copy" / "layers" / "notes.txt").read_text() == "mine"
        (tmp_path / "copy" / "layers" / "notes.txt").unlink()
        check(tmp_path / "copy", full(3, "a"))
        check(tmp_path / "run", full(2, "a", "b"))

    def test_a_copy_of_what_the_manifest_names_is_enough(self, tmp_path: Path) -> None:
        for number in (1, 2):
            save(tmp_path / "run", full(number, "a"))
        for file in shardkeep.inspect(tmp_path / "run").tree().files:
            (tmp_path / "copy" / file.name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "run" / file.name, tmp_path / "copy" / file.name)
        shutil.copy(tmp_path / "run" / "manifest.json", tmp_path / "copy" / "manifest.json")
        assert shardkeep.verify(tmp_path / "copy").ok
        save(tmp_path / "copy", full(3), "m")
        check(tmp_path / "copy", full(2, "a"))
        check(tmp_path / "copy", full(3), "m")


class TestGroups:
    def test_zarr_lists_and_reads_every_tree_once(self, tmp_path: Path) -> None:
        for number in (1, 2, 3):
            save(tmp_path, full(number, "a", "b"))
            save(tmp_path, full(number, "a"), "x.y")
            assert members(tmp_path) == {"w", "layers/a/k", "layers/b/k", "x/y/w", "x/y/layers/a/k"}
            assert members(tmp_path / "x" / "y") == {"w", "layers/a/k"}
            assert (zarr.open_group(tmp_path, mode="r")["x/y/layers/a/k"][...] == number).all()
        save(tmp_path, full(4))
        assert members(tmp_path) == {"w", "x/y/w", "x/y/layers/a/k"}
        assert not (tmp_path / "layers").exists()

    def test_each_directory_above_an_array_is_one(self, tmp_path: Path) -> None:
        save(tmp_path, full(1, "a"))
        found = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob(".zgroup")}
        assert found == {".zgroup", "layers/.zgroup", "layers/a/.zgroup"}
        assert (tmp_path / "layers" / ".zgroup").read_bytes() == b'{"zarr_format": 2}'
        assert shardkeep.verify(tmp_path).files == 4, "they are no part of the checkpoint"

    def test_a_tree_without_clean_names_has_them_where_it_is(self, tmp_path: Path) -> None:
        for number in (1, 2):
            tree_serialize_leaves(tmp_path, full(number), prefix="m", write_index=False)
        (name,) = {array.partition("/")[0] for array in members(tmp_path)}
        assert name.startswith("m~")
        assert (zarr.open_group(tmp_path, mode="r")[f"{name}/w"][...] == 2).all()

    def test_an_array_that_is_above_another_prefix_is_no_group(self, tmp_path: Path) -> None:
        save(tmp_path, {"m": np.ones(3)})
        save(tmp_path, {"w": np.ones(3)}, "m")
        assert not (tmp_path / "m" / ".zgroup").exists()
        assert (zarr.open_group(tmp_path, mode="r")["m"][...] == 1).all()
        shardkeep.delete(tmp_path)
        assert not tmp_path.exists()

    def test_one_that_another_program_wrote_stays(self, tmp_path: Path) -> None:
        group = zarr.open_group(tmp_path, mode="w", zarr_format=2)
        before = (tmp_path / ".zgroup").read_bytes()
        save(tmp_path, full(1, "a"), "m")
        group.create_array("theirs", data=np.arange(3))
        save(tmp_path, full(2), "m")
        assert members(tmp_path) == {"theirs", "m/w"}
        shardkeep.delete(tmp_path)
        assert (tmp_path / ".zgroup").read_bytes() == before
        assert members(tmp_path) == {"theirs"}

    def test_an_empty_one_is_made_again(self, tmp_path: Path) -> None:
        """As a power cut can leave it."""
        save(tmp_path, full(1, "a"))
        for name in (".zgroup", "layers/.zgroup"):
            (tmp_path / name).unlink()
            (tmp_path / name).touch()
        save(tmp_path, full(2, "a"))
        check(tmp_path, full(2, "a"))
        assert members(tmp_path) == {"w", "layers/a/k"}
        (tmp_path / "layers" / ".zgroup").unlink()
        (tmp_path / "layers" / ".zgroup").touch()
        shardkeep.delete(tmp_path)
        assert not tmp_path.exists()

    def test_they_go_when_the_last_array_goes(self, tmp_path: Path) -> None:
        save(tmp_path, full(1, "a"), "m")
        save(tmp_path, full(2, "a"))
        save(tmp_path, full(3), format="safetensors")
        assert members(tmp_path) == {"m/w", "m/layers/a/k"}
        save(tmp_path, full(4), "m", format="safetensors")
        assert not list(tmp_path.rglob(".zgroup"))

    def test_a_safetensors_tree_has_none(self, tmp_path: Path) -> None:
        save(tmp_path, full(1), format="safetensors")
        assert not list(tmp_path.rglob(".zgroup"))


def test_an_index_that_another_program_rewrote_is_left_alone_by_a_clean_up(tmp_path: Path, spawner: Spawner) -> None:
    path = tmp_path / "run"
    save(path, make("plain", 1))
    save(path, make("plain", 2))
    index = json.loads((path / INDEX).read_text())
    del index["shardkeep"]
    (path / INDEX).write_text(json.dumps(index))
    fault = Fault(str(tmp_path), "kill", 12)
    assert spawner.run("save", fault, path=str(path), kind="plain", number=3, overwrite=True).signal
    assert main(["clean", "--yes", str(tmp_path)]) == 0
    assert json.loads((path / INDEX).read_text()) == index


def test_an_index_that_lists_nothing_of_ours_is_not_ours_to_remove(tmp_path: Path) -> None:
    save(tmp_path, full(1), format="safetensors")
    (tmp_path / INDEX).write_text('{"format": "tensorstore", "arrays": [{"path": "theirs"}]}')
    (tmp_path / METADATA).write_text("{}")
    save(tmp_path, full(2), format="safetensors")
    shardkeep.save(tmp_path, full(2), prefix="m")
    assert "theirs" in (tmp_path / INDEX).read_text()
    assert (tmp_path / METADATA).exists()


def test_names_of_a_running_save_are_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has recorded them, and may not have made the files yet."""
    save(tmp_path, full(1))
    target = Directory(LocalStore(str(tmp_path)))
    held = target.store.hold(f"{target.store.saves}/{'3' * 32}")
    held.take(json.dumps(["layers/c/k/0", "v/.zarray"]).encode())
    directory._warned.clear()
    with caplog.at_level(logging.WARNING, "shardkeep"):
        save(tmp_path, full(2, "c"))
    assert f"it needs the name {tmp_path}/layers/c/k/0, which is in use for something else" in caplog.text
    assert_same(shardkeep.load(tmp_path), full(2, "c"))
    held.remove()
    save(tmp_path, full(3, "c"))
    check(tmp_path, full(3, "c"))


@pytest.mark.parametrize("name", ["w/0", "x~{}/w", "~{}/manifest.json", "~{}/.shardkeep/lock", "~{}/../x", ".~{}./x"])
def test_a_manifest_that_publishes_other_names_is_refused(name: str, tmp_path: Path) -> None:
    """Names are removed and linked because a manifest says so: it cannot say that of what is not its own."""
    save(tmp_path, full(1))
    save(tmp_path, full(2))
    document = json.loads((tmp_path / "manifest.json").read_text())
    tree = document["trees"][""]
    tree["files"][0][0] = name.format(tree["save"]) if name != "x~{}/w" else f"x~{'0' * 32}/w"
    document["digest"] = "0" * 32
    text = json.dumps(document, separators=(",", ":")).encode()
    (tmp_path / "manifest.json").write_bytes(seal(text))
    with pytest.raises(shardkeep.IntegrityError, match=r"manifest\.json is malformed"):
        shardkeep.inspect(tmp_path)
