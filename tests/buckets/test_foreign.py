"""Other programs' checkpoints load from a bucket, and other programs read there what shardkeep saved."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import obstore
import pytest
import safetensors.numpy
import tensorstore as ts
import zarr
import zarr.storage
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkeep
from buckets.fixtures import EFORMER, Place
from shardkeep.serialization import AsyncCheckpointManager
from shardkeep.targets import directory
from support import assert_same, mesh_of, pattern

WHOLE = [
    "index_v1_0",
    "index_v2_0",
    "pytree_builtins",
    "pytree_sharded_2x4",
    "ts_dtypes",
    "ts_plain",
    "ts_two_prefixes",
]
WHOLE += ["ts_validation_checksums", "safetensors_fp8", "safetensors_sharded", "safetensors_single"]


def copied(name: str, place: Place) -> tuple[Path, str]:
    """A fixture of eFormer's, and its copy in the bucket."""
    directory = EFORMER / name / "ckpt" if (EFORMER / name / "ckpt").is_dir() else EFORMER / name
    place.upload(directory, name)
    return directory, f"{place.url}/{name}"


@pytest.mark.filterwarnings("ignore:.*jax_enable_x64")
@pytest.mark.parametrize("name", WHOLE)
def test_eformers_checkpoints_load_as_they_do_from_a_disk(name: str, place: Place) -> None:
    local, remote = copied(name, place)
    manager = AsyncCheckpointManager()
    expected = shardkeep.inspect(local)
    assert list(shardkeep.inspect(remote).trees) == list(expected.trees)
    for prefix in expected.trees:
        assert_same(shardkeep.load(remote, prefix=prefix), shardkeep.load(local, prefix=prefix))
        ours, theirs = manager.load(remote, None, prefix=prefix), manager.load(local, None, prefix=prefix)
        assert_same(ours[0], theirs[0])
        assert ours[1] == theirs[1]
    assert manager.is_tensorstore(remote) == manager.is_tensorstore(local)
    found = shardkeep.verify(remote)
    assert (found.ok, found.unchecked) == (True, shardkeep.verify(local).unchecked)


@pytest.mark.parametrize("name", ["broken_killed_mid_save", "broken_truncated_chunk"])
def test_eformers_broken_ones_are_refused(name: str, place: Place) -> None:
    local, remote = copied(name, place)
    for path in (local, remote):
        with pytest.raises(shardkeep.IntegrityError, match="missing|does not have exactly"):
            shardkeep.load(path)
        assert not shardkeep.verify(path).ok


def test_a_save_into_an_eformer_place_keeps_its_trees(place: Place) -> None:
    local, remote = copied("ts_two_prefixes", place)
    prefixes = list(shardkeep.inspect(local).trees)
    shardkeep.save(remote, {"w": np.arange(4)}, prefix="mine", format="zarr")
    for prefix in prefixes:
        assert_same(shardkeep.load(remote, prefix=prefix), shardkeep.load(local, prefix=prefix))
    assert_same(shardkeep.load(remote, prefix="mine"), {"w": np.arange(4)})


def test_a_hugging_face_folder(place: Place, tmp_path: Path) -> None:
    parts = [
        {"model.embed.weight": pattern(np.float32, (50, 8), 1)},
        {"model.norm.weight": pattern(np.float16, (8,), 2)},
    ]
    index: dict[str, Any] = {"metadata": {"total_size": 1616}, "weight_map": {}}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-00002.safetensors"
        safetensors.numpy.save_file(part, tmp_path / name, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    place.upload(tmp_path, "hub")
    for name in ("hub", "hub/model", "hub/model.safetensors.index.json", "hub/model-00001-of-00002.safetensors"):
        loaded = shardkeep.load(f"{place.url}/{name}")
        assert_same(np.asarray(loaded["model"]["embed"]["weight"]), parts[0]["model.embed.weight"])
        assert_same(np.asarray(loaded["model"]["norm"]["weight"]), parts[1]["model.norm.weight"])
    assert AsyncCheckpointManager().load(f"{place.url}/hub", None)[1] == {"format": "pt"}
    place.client.delete("hub/model-00002-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors is missing"):
        shardkeep.load(f"{place.url}/hub")


@pytest.mark.parametrize(
    "compressor",
    [
        None,
        {"id": "zstd", "level": 3},
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
        {"id": "gzip", "level": 1},
    ],
)
@pytest.mark.parametrize("separator", [".", "/"])
def test_zarr_arrays_another_program_wrote(compressor: Any, separator: str, place: Place, tmp_path: Path) -> None:
    values = pattern(np.int32, (30, 20))
    metadata = {"shape": [30, 20], "chunks": [16, 7], "dtype": "<i4", "compressor": compressor, "order": "F"}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(tmp_path / "zarr" / "layer" / "w")}}
    opened = ts.open({**spec, "metadata": {**metadata, "dimension_separator": separator}}, create=True).result()
    opened.write(values).result()
    place.upload(tmp_path / "zarr", "zarr")
    mesh = mesh_of(2, 4)
    path = f"{place.url}/zarr"
    assert_same(np.asarray(shardkeep.load(path)["layer"]["w"]), values)
    loaded = shardkeep.load(path, shardings={"layer.w": NamedSharding(mesh, P("a", "b"))})["layer"]["w"]
    assert_same(np.asarray(loaded), values)
    assert shardkeep.verify(path).ok
    place.client.delete(next(name for name in place.names("zarr") if not name.endswith(".zarray")))
    with pytest.raises(shardkeep.IntegrityError, match="1 of 6 chunks is missing"):
        shardkeep.load(path)


def kvstore(place: Place, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """TensorStore's own client for the place."""
    if place.scheme == "gs":
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", place.server.url)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        return {"driver": "gcs", "bucket": "bucket"}
    spec = {"driver": "s3", "bucket": "bucket", "endpoint": place.server.url, "aws_region": place.server.region}
    return {**spec, "aws_credentials": {"type": "environment"}}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_tensorstore_reads_what_was_saved(compression: Any, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "a b": pattern(np.float32, (16, 8)),
        "ü%#": {"x": np.asarray(jnp.arange(10, dtype=jnp.bfloat16))},
        "scalar": np.asarray(3.5),
    }
    sharded = jax.device_put(values["a b"], NamedSharding(mesh_of(4, 2), P("a", "b")))
    shardkeep.save(
        f"{place.url}/run", {**values, "a b": sharded}, prefix="model", format="zarr", compression=compression
    )
    index = json.loads(place.get("run/tensorstore_index.json"))["prefixes"]["model"]
    base = kvstore(place, monkeypatch)
    found = []
    for name in [entry["path"] for entry in index] + ["model/%C3%BC%25%23/x", "model/ü%25%23/x"]:
        if f"run/{name}/.zarray" in place.names():
            opened = ts.open({"driver": "zarr", "kvstore": {**base, "path": f"{place.prefix}/run/{name}/"}}).result()
            found.append(np.asarray(opened.read().result()))
    for expected in (values["a b"], values["ü%#"]["x"], values["scalar"]):
        assert any(each.dtype == expected.dtype and each.tobytes() == expected.tobytes() for each in found)


@pytest.mark.filterwarnings("ignore:Object at .* is not recognized as a component of a Zarr hierarchy")
def test_zarr_opens_each_tree_as_a_group(place: Place) -> None:
    """In its own directory: a name in a bucket has one owner, so only a tree without a prefix has the root as group."""

    def members(path: str) -> set[str]:
        group = zarr.open_group(zarr.storage.ObjectStore(place.client, read_only=True), path=path, mode="r")
        return {name for name, found in group.members(max_depth=None) if hasattr(found, "shape")}

    tree = {"layers": [{"w": np.arange(4)}], "b": np.ones(3)}
    for number in (1, 2):
        shardkeep.save(place.url, tree, prefix="model.ema", format="zarr", overwrite=True)
        (found,) = shardkeep.inspect(place.url).trees.values()
        top = found.files[-1].name.rpartition("/")[0].partition("/layers")[0]
        assert (top == "model/ema") == (number == 1)
        assert members(top) == {"layers/0/w", "b"}
        assert {name for name in place.names() if name.endswith(".zgroup")} == {
            f"{top}/.zgroup", f"{top}/layers/.zgroup", f"{top}/layers/0/.zgroup"
        }  # fmt: skip
        assert shardkeep.verify(place.url).ok
    shardkeep.save(f"{place.url}/plain", tree, format="zarr")
    assert members("plain") == {"layers/0/w", "b"}
    shardkeep.delete(place.url)
    shardkeep.delete(f"{place.url}/plain")
    assert not [name for name in place.names() if name.endswith(".zgroup")]


def test_eformers_index_stays_and_leaves_out_a_tree_that_was_overwritten(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects have one name, and a name is never used again. That is said once."""
    monkeypatch.setattr(directory, "_warned", set())

    def listed() -> list[str]:
        return list(json.loads(bytes(obstore.get(place.client, "tensorstore_index.json").bytes()))["prefixes"])

    for prefix in ("a", "b"):
        shardkeep.save(place.url, {"w": np.arange(4)}, prefix=prefix, format="zarr")
    assert listed() == ["a", "b"]
    assert "eFormer" not in caplog.text
    for _ in range(2):
        shardkeep.save(place.url, {"w": np.arange(5)}, prefix="a", format="zarr", overwrite=True)
        assert listed() == ["b"]
    shardkeep.save(place.url, {"w": np.arange(5)}, prefix="b", format="zarr", overwrite=True)
    assert listed() == []
    said = [
        message
        for message in caplog.messages
        if f"eFormer will not see the new tree at {place.url} (prefix 'a')" in message
    ]
    assert len(said) == 1
    assert "Save each step to its own path" in said[0]


def test_safetensors_reads_what_was_saved(place: Place, tmp_path: Path) -> None:
    tree = {"layers": [{"w": pattern(np.float32, (16, 8))}, {"w": pattern(np.int8, (5,))}]}
    shardkeep.save(f"{place.url}/model.safetensors", tree)
    flat = {"layers.0.w": tree["layers"][0]["w"], "layers.1.w": tree["layers"][1]["w"]}
    assert_same(dict(sorted(safetensors.numpy.load(place.get("model.safetensors")).items())), flat)
    shardkeep.save(f"{place.url}/shards.safetensors", tree, max_shard_size=100)
    index = json.loads(place.get("shards.safetensors.index.json"))
    for key, name in index["weight_map"].items():
        assert_same(safetensors.numpy.load(place.get(name))[key], flat[key])
    shardkeep.save(f"{place.url}/run", tree)
    (data,) = [name for name in place.names("run") if name.endswith(".safetensors")]
    assert_same(safetensors.numpy.load(place.get(data))["layers.0.w"], flat["layers.0.w"])
