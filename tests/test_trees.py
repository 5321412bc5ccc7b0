"""Several trees in one commit: all of them or none, each as if it was saved on its own."""

import errno
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from faults.spawner import Fault, Pause, Spawner
from faults.states import make, same
from faults.sweep import left_overs
from shardkeep.catalog import new_target
from shardkeep.cli.main import main
from shardkeep.foreign.eformer import CHECKPOINT_METADATA as METADATA
from shardkeep.foreign.eformer import TENSORSTORE_INDEX as INDEX
from shardkeep.model.document import decode_manifest, encode_manifest
from shardkeep.model.manifest import MANIFEST
from shardkeep.processes.operation import join
from shardkeep.saving.save import SaveRequest, run_save, start_save
from shardkeep.stores.location import location
from shardkeep.targets.directory import Directory
from support import assert_same, mesh_of

KINDS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "zarr": {"format": "zarr"},
    "zstd": {"format": "zarr", "compression": "zstd"},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def state(number: int) -> dict[str, Any]:
    return {"w": np.arange(12.0).reshape(3, 4) + number, "layers": [np.full(5, number, np.int8)], "step": number}


def further(number: int) -> dict[str, Any]:
    """Trees with other prefixes and keys that the main tree has too; one without arrays, one that is empty."""
    return {
        "ema": {"w": np.full((2, number + 1), number, np.float32)},
        "data/train": {"position": shardkeep.PerProcess({"epoch": number})},
        "notes": {"text": f"number {number}"},
        "empty": {},
    }


def save_both(path: Path, number: int, **arguments: Any) -> shardkeep.SaveReport:
    return shardkeep.save(path, state(number), trees=further(number), **arguments)


def assert_there(path: Path, number: int) -> None:
    """The trees of that number are there, complete, and nothing is beside them."""
    assert_same(shardkeep.load(path), state(number))
    assert_same(shardkeep.load(path, prefix="ema"), further(number)["ema"])
    assert shardkeep.load(path, prefix="data.train") == {"position": {"epoch": number}}
    assert shardkeep.load(path, prefix="notes") == {"text": f"number {number}"}
    assert shardkeep.load(path, prefix="empty") == {}
    assert shardkeep.verify(path).ok
    assert left_overs(path) == set()


@each_kind
def test_the_trees_of_one_save_are_ordinary_trees_of_one_commit(kind: str, tmp_path: Path) -> None:
    report = save_both(tmp_path / "run", 3, metadata={"loss": 0.5}, step=3, **KINDS[kind])
    assert_there(tmp_path / "run", 3)
    found = shardkeep.inspect(tmp_path / "run")
    assert found.prefixes == ["", "data.train", "ema", "empty", "notes"]
    assert {(tree.save_id, tree.created) for tree in found.trees.values()} == {(found.save_id, found.trees[""].created)}
    assert {tree.step for tree in found.trees.values()} == {3}
    assert {prefix: dict(tree.metadata) for prefix, tree in found.trees.items() if tree.metadata} == {"": {"loss": 0.5}}
    files = [file for tree in found.trees.values() for file in tree.files]
    assert len({file.name for file in files}) == len(files) == report.files
    assert sum(file.size for file in files) == report.nbytes


@each_kind
def test_trees_that_replace_others_together_may_have_other_shapes_and_keys(kind: str, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save_both(tmp_path / "run", number, overwrite=True, **KINDS[kind])
        assert_there(tmp_path / "run", number)


def test_trees_that_are_not_mentioned_stay(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"a": 1}, prefix="mine")
    save_both(tmp_path / "run", 1)
    save_both(tmp_path / "run", 2, overwrite=True)
    assert shardkeep.load(tmp_path / "run", prefix="mine") == {"a": 1}
    assert_there(tmp_path / "run", 2)


@each_kind
def test_one_of_the_trees_can_be_saved_again_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    save_both(path, 1, **KINDS[kind])
    shardkeep.save(path, {"w": np.ones(7)}, prefix="ema", overwrite=True, **KINDS[kind])
    assert_same(shardkeep.load(path, prefix="ema"), {"w": np.ones(7)})
    assert_same(shardkeep.load(path), state(1))
    assert left_overs(path) == set()
    save_both(path, 2, overwrite=True, **KINDS[kind])
    assert_there(path, 2)


def test_a_main_tree_with_a_prefix_and_a_further_one_without(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"a": 1}, prefix="model", trees={"": {"b": 2}}, metadata={"of": "model"})
    assert shardkeep.load(tmp_path / "run") == {"b": 2}
    assert shardkeep.load(tmp_path / "run", prefix="model") == {"a": 1}
    assert shardkeep.inspect(tmp_path / "run").tree("model").metadata == {"of": "model"}


@pytest.mark.parametrize("trees", [None, {}])
def test_without_further_trees_it_is_the_save_of_one(trees: Any, tmp_path: Path) -> None:
    assert shardkeep.save(tmp_path / "run", state(1), trees=trees).files == 1
    assert shardkeep.save(tmp_path / "model.safetensors", {"w": np.ones(3)}, trees=trees).files == 1


class TestRefused:
    """Nothing was written: there is not even a directory."""

    @pytest.fixture(autouse=True)
    def _nothing_is_written(self, tmp_path: Path) -> Any:
        yield
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("save", [shardkeep.save, shardkeep.save_async])
    @pytest.mark.parametrize(
        ("prefix", "trees", "message"),
        [
            ("ema", {"ema": {}}, "two of the trees to save have prefix 'ema'"),
            ("a/b", {"a.b": {}}, r"two of the trees to save have prefix 'a\.b'"),
            (None, {"": {}}, "two of the trees to save have no prefix"),
            (None, {"a/b": {}, "a.b": {}}, r"two of the trees to save have prefix 'a\.b'"),
            (None, {"../up": {}}, "must not contain an empty part"),
            (None, {"/abs": {}}, "must be a relative name"),
            (None, {3: {}}, "a prefix must be a string, not 3"),
        ],
    )
    def test_prefixes(self, save: Any, prefix: Any, trees: Any, message: str, tmp_path: Path) -> None:
        with pytest.raises(shardkeep.PrefixError, match=message):
            save(tmp_path / "run", {"a": 1}, prefix=prefix, trees=trees)

    def test_what_is_no_mapping(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="trees must be a dict from prefixes to trees, not a list"):
            shardkeep.save(tmp_path / "run", {"a": 1}, trees=[("ema", {})])  # type: ignore[arg-type]

    def test_exchange_files(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"model.safetensors: exchange files hold a single tree"):
            shardkeep.save(tmp_path / "model.safetensors", {"w": np.ones(3)}, trees={"ema": {"w": np.ones(3)}})

    def test_a_leaf_is_named_with_its_tree(self, tmp_path: Path) -> None:
        trees = {"ema": {"f": print, "g": [object()]}}
        with pytest.raises(shardkeep.UnsupportedLeafError, match="3 leaves cannot be saved") as caught:
            shardkeep.save(tmp_path / "run", {"f": print}, trees=trees)
        said = [line.partition(":")[0].strip() for line in str(caught.value).splitlines()[1:]]
        assert said == ["f", "f (prefix 'ema')", "g/0 (prefix 'ema')"]

    def test_a_structure_is_named_with_its_tree(self, tmp_path: Path) -> None:
        with pytest.raises(shardkeep.TreeError, match=r"dict key .* \(in the tree with prefix 'ema'\)"):
            shardkeep.save(tmp_path / "run", {"a": 1}, trees={"ema": {frozenset(): 1}})


@pytest.mark.parametrize("save", [shardkeep.save, shardkeep.save_async])
@pytest.mark.parametrize("there", [None, "ema"])
def test_a_complete_tree_of_any_prefix_refuses_all_of_them(save: Any, there: str | None, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shardkeep.save(path, {"old": 1}, prefix=there)
    before = shardkeep.inspect(path).save_id
    what = "a tree with prefix 'ema'" if there else "a checkpoint"
    with pytest.raises(shardkeep.CheckpointExistsError, match=f"already holds {what}; pass overwrite=True"):
        save(path, state(1), trees={"ema": {"w": np.ones(3)}})
    assert shardkeep.inspect(path).prefixes == [there or ""]
    assert shardkeep.inspect(path).save_id == before
    assert left_overs(path) == set()


def test_a_damaged_tree_among_them_is_replaced_without_being_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    shardkeep.save(path, {"w": np.ones(3)}, prefix="ema")
    next((path / "ema").glob("*.safetensors")).unlink()
    save_both(path, 1)
    assert_there(path, 1)
    assert [r.getMessage() for r in caplog.records if "(prefix 'ema') is damaged" in r.getMessage()]


@pytest.mark.parametrize("prefix", [None, "ema"])
def test_another_save_to_one_of_the_prefixes_meanwhile_refuses_the_commit_of_all(
    prefix: str | None, tmp_path: Path, spawner: Spawner
) -> None:
    """Its tree stays, and none of ours is committed."""
    path, pause = tmp_path / "run", Pause(tmp_path / "pause")
    shardkeep.save(path, make("plain", 1), trees={"ema": make("fewer", 1)})
    fault = Fault(str(path), "pause", 2, calls="write", pause=str(pause.path))  # it has written its first data file
    arguments = {"kind": "plain", "number": 2, "trees": {"ema": "fewer"}, "overwrite": True}
    slow = spawner.start("save", fault, path=str(path), **arguments)
    pause.reached()
    shardkeep.save(path, make("other", 3), prefix=prefix, overwrite=True)
    pause.go()
    outcome = slow.wait()
    assert outcome.error == "ConflictError"
    changed = f"{path} (prefix 'ema')" if prefix else str(path)
    assert outcome.message.startswith(f"another save changed {changed} while this one was running")
    assert same(shardkeep.load(path, prefix=prefix), make("other", 3))
    other, kind = (None, "plain") if prefix else ("ema", "fewer")
    assert same(shardkeep.load(path, prefix=other), make(kind, 1))
    assert left_overs(path) == set()


def test_a_save_to_another_prefix_meanwhile_does_not_conflict(tmp_path: Path, spawner: Spawner) -> None:
    path, pause = tmp_path / "run", Pause(tmp_path / "pause")
    fault = Fault(str(path), "pause", 2, calls="write", pause=str(pause.path))
    slow = spawner.start("save", fault, path=str(path), kind="plain", number=2, trees={"ema": "fewer"}, format="zarr")
    pause.reached()
    shardkeep.save(path, make("other", 3), prefix="beside", format="zarr")
    pause.go()
    assert slow.wait().ok
    assert {p: tree.nbytes > 0 for p, tree in shardkeep.inspect(path).trees.items()} == dict.fromkeys(
        ["", "beside", "ema"], True
    )
    assert same(shardkeep.load(path, prefix="ema"), make("fewer", 2))
    assert same(shardkeep.load(path, prefix="beside"), make("other", 3))
    assert left_overs(path) == set()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "the disk"), shardkeep.ConflictError("refused")])
def test_a_commit_in_doubt_is_known_by_any_of_its_trees(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them was replaced before the save could read back what is there: it keeps the files of the others."""
    path = tmp_path / "run"
    shardkeep.save(path, state(1), trees={"ema": {"w": np.ones(3)}})
    shardkeep.save(path, {"w": np.zeros(4)}, prefix="theirs")
    real = Directory.put

    def put(target: Directory, *arguments: Any) -> str:
        monkeypatch.undo()
        real(target, *arguments)
        there = shardkeep.inspect(path)
        trees = {**there.trees, "ema": there.trees["theirs"]}  # by one who took over the lock
        target.store.replace(MANIFEST, encode_manifest(replace(there, trees=trees)))
        raise error

    monkeypatch.setattr(Directory, "put", put)
    arguments: Any = {"trees": {"ema": {"w": np.ones(5)}}, "overwrite": True}
    if isinstance(error, shardkeep.ConflictError):  # it reads again, and finds that only the answer was lost
        assert shardkeep.save(path, state(2), **arguments).files == 2
    else:
        with pytest.raises(shardkeep.StorageError, match="the new checkpoint is committed and in place"):
            shardkeep.save(path, state(2), **arguments)
    assert_same(shardkeep.load(path), state(2))
    assert_same(shardkeep.load(path, prefix="ema"), {"w": np.zeros(4)})
    assert shardkeep.verify(path).ok


@each_kind
def test_further_trees_may_be_donated_and_changed_right_after_the_call(kind: str, tmp_path: Path) -> None:
    spread = NamedSharding(mesh_of(8), PartitionSpec("a"))
    step = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    average = jax.device_put(jnp.arange(1 << 16, dtype=jnp.float32).reshape(64, 1024), spread)
    position = np.arange(4)
    pending, expected = [], []
    for number in range(3):
        expected.append((np.array(average), position.copy()))
        trees = {"ema": {"w": average}, "data": {"position": position}}
        path = tmp_path / str(number)
        pending.append((path, shardkeep.save_async(path, {"step": number}, trees=trees, **KINDS[kind])))
        average = step(average)
        position += 1
    for (path, handle), (array, there) in zip(pending, expected, strict=True):
        handle.wait()
        assert np.array_equal(np.asarray(shardkeep.load(path, prefix="ema")["w"]), array)
        assert np.array_equal(shardkeep.load(path, prefix="data")["position"], there)


def test_a_prefix_and_a_key_of_another_tree_may_have_the_same_name(tmp_path: Path) -> None:
    """In the zarr format both would be stored in the directory `ema`; one of the trees gets names of its own."""
    path = tmp_path / "run"
    for number in (1, 2):
        main = {"ema": {"w": np.full(3, number)}, "a": np.full(2, number)}
        trees = {"ema": {"w": np.full(4, -number)}, "a": {"0": np.full(5, number)}}
        shardkeep.save(path, main, trees=trees, format="zarr", overwrite=True)
        assert_same(shardkeep.load(path), main)
        for prefix, tree in trees.items():
            assert_same(shardkeep.load(path, prefix=prefix), tree)
        assert shardkeep.verify(path).ok
        assert left_overs(path) == set()


def test_the_index_for_eformer_lists_all_of_them_and_has_the_metadata_of_the_main_tree(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for number in (1, 2):  # the second one is published under the clean names of the first
        arguments: Any = {"format": "zarr", "overwrite": True, "metadata": {"number": number}}
        trees = {"ema": {"w": np.ones(number)}, "above": {"w": np.ones(2)}}
        shardkeep.save(path, {"w": np.zeros(3)}, prefix="model", trees=trees, **arguments)
        index = json.loads((path / INDEX).read_text())
        assert {p: [entry["path"] for entry in listed] for p, listed in index["prefixes"].items()} == {
            prefix: [f"{prefix}/w"] for prefix in ("model", "ema", "above")
        }
        assert index["shardkeep"] == shardkeep.inspect(path).save_id
        assert json.loads((path / METADATA).read_text()) == {"number": number}


@each_kind
def test_the_manifest_is_that_of_trees_saved_one_by_one(kind: str, tmp_path: Path) -> None:
    """Only ids and times differ, so readers need not know of this."""
    save_both(tmp_path / "together", 1, **KINDS[kind])
    shardkeep.save(tmp_path / "apart", state(1), **KINDS[kind])
    for prefix, tree in sorted(further(1).items()):
        shardkeep.save(tmp_path / "apart", tree, prefix=prefix, **KINDS[kind])
    found = []
    for name in ("together", "apart"):
        text = (tmp_path / name / "manifest.json").read_bytes()
        manifest = decode_manifest(text, name, name)
        trees = json.loads(text)["trees"]
        for prefix, tree in trees.items():
            assert tree["created"] == manifest.trees[prefix].created
            del tree["created"]
        found.append(re.sub(r"[0-9a-f]{32}", "…", json.dumps(trees)))
    assert found[0] == found[1]


def test_commands_show_check_convert_and_delete_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run" / "step_3"
    save_both(path, 3, metadata={"loss": 0.5}, step=3)
    assert main(["ls", str(tmp_path / "run"), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (listed["state"], listed["prefixes"]) == ("complete", ["", "data.train", "ema", "empty", "notes"])
    assert main(["inspect", str(path)]) == 0
    assert "\nema: safetensors, 1 leaf, " in capsys.readouterr().out
    assert main(["verify", str(path)]) == 0
    assert main(["convert", str(path), str(tmp_path / "zarr"), "--format", "zarr"]) == 0
    assert_there(tmp_path / "zarr", 3)
    assert main(["convert", str(path), str(tmp_path / "ema.safetensors"), "--prefix", "ema"]) == 0
    assert_same(shardkeep.load(tmp_path / "ema.safetensors"), further(3)["ema"])
    shardkeep.delete(path)
    assert not path.exists()


class TestLate:
    """Metadata that is known only in the background."""

    def _request(self, path: Path, late: Any, **arguments: Any) -> SaveRequest:
        target = new_target(location(path), "safetensors", None, None)
        return SaveRequest(target, {"a": 1}, metadata={"own": 1, "both": "own"}, late=late, **arguments)

    def test_it_is_asked_once_in_the_thread_of_the_save_and_its_values_win(self, tmp_path: Path) -> None:
        asked: list[str] = []

        def late() -> dict[str, Any]:
            asked.append(threading.current_thread().name)
            return {"both": "late", "loss": np.float32(0.5)}

        with join("saving") as operation:
            pending = start_save(self._request(tmp_path / "run", late, trees={"ema": {"b": 2}}), operation)
        pending.wait()
        assert len(asked) == 1
        assert asked[0] != threading.current_thread().name
        found = shardkeep.inspect(tmp_path / "run")
        assert found.metadata == {"own": 1, "both": "late", "loss": 0.5}
        assert found.trees["ema"].metadata == {}

    @pytest.mark.parametrize("name", ["run", "model.safetensors"])
    def test_a_save_in_the_foreground_asks_too(self, name: str, tmp_path: Path) -> None:
        """An exchange file has its metadata in its header, which is planned before it is written."""
        with join("saving") as operation:
            run_save(self._request(tmp_path / name, lambda: {"late": "x" * 5000}), operation)
        assert shardkeep.inspect(tmp_path / name).metadata == {"own": 1, "both": "own", "late": "x" * 5000}

    @pytest.mark.parametrize(
        ("late", "error", "message"),
        [
            (lambda: 1 / 0, ZeroDivisionError, "division by zero"),
            (lambda: {"f": print}, shardkeep.MetadataError, "metadata"),
        ],
    )
    def test_what_it_raises_prevents_the_commit(self, late: Any, error: Any, message: str, tmp_path: Path) -> None:
        path = tmp_path / "run"
        shardkeep.save(path, {"old": 1}, trees={"ema": {"old": 2}})
        with join("saving") as operation:
            request = self._request(path, late, overwrite=True, trees={"ema": {"new": 2}})
            pending = start_save(request, operation)
        with pytest.raises(error, match=message):
            pending.wait()
        assert shardkeep.load(path) == {"old": 1}
        assert shardkeep.load(path, prefix="ema") == {"old": 2}
        assert left_overs(path) == set()
