"""Checkpoints of Orbax before version 0.6, whose file `checkpoint` holds the structure and some or all values."""

import shutil
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from buckets.fixtures import Place, _alone, place  # noqa: F401
from shardkeep.cli.main import main
from support import assert_same, mesh_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "orbax_early"
VERSIONS = ["0.2.7", "0.5.5"]  # without and with a `_METADATA` beside it
ARRAYS = {"params/kernel", "params/bias", "params/sharded", "layers/1/1"}


def made() -> dict[str, Any]:
    """What `make_fixtures.py` saved."""
    return {
        "layers": [1, [2.5, np.arange(3)]],
        "params": {
            "kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
            "bias": np.ones(4, ml_dtypes.bfloat16),
            "sharded": np.arange(16, dtype=np.float32),
        },
        "name": "abc",
        "step": 7,
        "done": True,
        "rate": np.float32(0.5),
        "empty": {},
    }


def ordered(tree: Any) -> Any:
    """The tree with its keys in order, and arrays as NumPy's."""
    if isinstance(tree, list):
        return [ordered(value) for value in tree]
    if isinstance(tree, dict):
        return {key: ordered(tree[key]) for key in sorted(tree)}
    return np.asarray(tree) if isinstance(tree, jax.Array) else tree


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", ["together", "few"])
@pytest.mark.parametrize("version", VERSIONS)
def test_values_in_the_file_and_arrays_beside_it_are_one_tree(version: str, name: str, mmap: bool) -> None:
    path = FIXTURES / version / name
    manifest = shardkeep.inspect(path)
    assert manifest.source == "orbax"
    assert {key for key, leaf in manifest.leaves.items() if leaf.kind != "value"} == ARRAYS
    assert_same(ordered(shardkeep.load(path, mmap=mmap)), ordered(made()))
    assert shardkeep.exists(path)
    report = shardkeep.verify(path)
    assert (report.ok, report.unchecked) == (True, len(ARRAYS))


@pytest.mark.parametrize("version", VERSIONS)
def test_arrays_in_the_file_are_loaded_in_part_and_onto_a_mesh(version: str) -> None:
    sharding = NamedSharding(mesh_of(4), PartitionSpec(None, "a"))
    found = shardkeep.load(FIXTURES / version / "together", include="^params/kernel$", shardings=sharding)
    assert found["params"]["kernel"].sharding == sharding
    assert_same(np.asarray(found["params"]["kernel"]), made()["params"]["kernel"])
    assert found.keys() == {"params"}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_directory_of_its_manager_is_a_run(version: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(FIXTURES / version / "run", tmp_path / "run"))
    assert shardkeep.latest(root) == str(root / "20")
    assert_same(ordered(shardkeep.load(root / "20", prefix="state")), ordered(made()))
    assert [(step.number, step.metrics) for step in shardkeep.Run(root, name="{}").steps()] == [(20, {"loss": 0.5})]
    assert main(["convert", str(root / "20"), str(tmp_path / "ours")]) == 0
    assert_same(ordered(shardkeep.load(tmp_path / "ours", prefix="state")), ordered(made()))
    assert shardkeep.verify(tmp_path / "ours").unchecked == 0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "content", [b"", b"\x00", b"\x81", b"\x81\xa1a\x01\x01", b"\x91" * 5000, b"\x81\xa1a\xc7\x05\x04abcde"]
)
def test_a_damaged_file_is_named(content: bytes, version: str, tmp_path: Path) -> None:
    """The arrays beside it are never taken for the whole tree."""
    path = Path(shutil.copytree(FIXTURES / version / "together", tmp_path / "c"))
    (path / "checkpoint").write_bytes(content)
    with pytest.raises(shardkeep.IntegrityError, match="checkpoint( is damaged|, but it is not there)"):
        shardkeep.load(path)
    assert not shardkeep.exists(path)


def test_values_that_were_in_a_lost_file_are_missing(tmp_path: Path) -> None:
    """They were loaded as None."""
    path = Path(shutil.copytree(FIXTURES / "0.5.5" / "together", tmp_path / "c"))
    (path / "checkpoint").unlink()
    with pytest.raises(shardkeep.MissingDataError, match="is in the file checkpoint, but it is not there"):
        shardkeep.load(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "", "..", "x" * 5000, "params.lost"])
def test_names_of_arrays_stay_inside(name: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(FIXTURES / "0.2.7" / "together", tmp_path / "in" / "c"))
    shutil.copytree(path / "params.sharded", tmp_path / "in" / "outside")
    document = flax.serialization.msgpack_serialize({"w": f"PLACEHOLDER://{name}"})
    (path / "checkpoint").write_bytes(document)
    with pytest.raises((shardkeep.IntegrityError, shardkeep.MissingDataError)):
        shardkeep.load(path)


def test_large_arrays_in_chunks_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 40)
    tree = {"w": np.arange(60, dtype=np.float32).reshape(6, 10), "b": np.ones(3)}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    assert_same(ordered(shardkeep.load(tmp_path / "c")), ordered(tree))
    sharding = NamedSharding(mesh_of(2), PartitionSpec("a"))
    assert_same(np.asarray(shardkeep.load(tmp_path / "c", include="w", shardings=sharding)["w"]), tree["w"])
    assert shardkeep.verify(tmp_path / "c").ok


@pytest.mark.parametrize("tensorflow", [True, False])
def test_files_of_other_programs_with_that_name_are_left_alone(tensorflow: bool, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model-10"\n')
    if tensorflow:
        (tmp_path / "model-10.index").write_bytes(b"x")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="holds something else"):
        shardkeep.load(tmp_path)


def test_an_array_and_json_by_themselves(tmp_path: Path) -> None:
    """Single checkpoints of these handlers are the array and the values, and not dicts of them."""
    fixture = FIXTURES.parent / "orbax" / "manager_composite" / "ckpt" / "ckpt_000003"
    for item, handler in ("arr", "ArrayCheckpointHandler"), ("cfg", "JsonCheckpointHandler"):
        shutil.copytree(fixture / item, tmp_path / item)
        (tmp_path / item / "_CHECKPOINT_METADATA").write_text(f'{{"item_handlers": "orbax.checkpoint.{handler}"}}')
    assert_same(np.asarray(shardkeep.load(tmp_path / "arr")), np.arange(4))
    assert shardkeep.load(tmp_path / "cfg") == {"lr": 0.1, "name": "x"}
    assert isinstance(shardkeep.load(tmp_path / "arr"), jax.Array | np.ndarray)


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_read_from_a_bucket(version: str, place: Place) -> None:
    place.upload(FIXTURES / version / "together", "c")
    with pytest.raises(shardkeep.IncompleteCheckpointError, match=r"commit_success\.txt"):
        shardkeep.load(f"{place.url}/c")
    place.put("c/commit_success.txt", b"")
    assert_same(ordered(shardkeep.load(f"{place.url}/c")), ordered(made()))
    assert shardkeep.verify(f"{place.url}/c").ok
