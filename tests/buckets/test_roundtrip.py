"""What is saved to a bucket comes back, bit by bit, in every format and by every call that takes a path."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

import shardkeep
from buckets.fixtures import Place
from shardkeep.stores.bucket import store as cloud
from shardkeep.stores.bucket.store import BucketStore
from shardkeep.targets import exchange
from support import FORMATS, Dense, Point, assert_same, mesh_of, pattern

KINDS = sorted(FORMATS)


def state(seed: int = 0) -> dict[str, Any]:
    """A tree of many kinds of leaves, one of them sharded."""
    mesh = mesh_of(4, 2)
    kernel = jax.device_put(pattern(np.float32, (16, 8), seed), NamedSharding(mesh, P("a", "b")))
    return {
        "layers": [{"kernel": kernel, "bias": jnp.asarray(pattern(np.float32, (8,), seed + 1))}],
        "dense": Dense(jnp.full((2, 3), 1.5, jnp.bfloat16), pattern(np.int16, (5,), seed)),
        "point": Point(pattern(np.uint8, (70_000,), seed), None),
        "empty": np.zeros((0, 3), np.float32),
        "key": jax.random.key(seed),
        "step": 10**30 + seed,
        "rate": math.pi,
        "name": "übung",
    }


def where(kind: str, place: Place) -> tuple[str, dict[str, Any]]:
    ending, arguments = FORMATS[kind]
    return f"{place.url}/run{ending}", arguments


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_comes_back_and_goes_away(kind: str, place: Place) -> None:
    path, arguments = where(kind, place)
    assert not shardkeep.exists(path)
    tree = state(1)
    report = shardkeep.save(path, tree, metadata={"step": 1}, **arguments)
    assert report.path == path
    assert shardkeep.exists(path)
    assert_same(shardkeep.load(path), tree)
    found = shardkeep.inspect(path)
    assert found.metadata == {"step": 1}
    assert found.path.startswith(path)
    assert shardkeep.verify(path).ok
    with pytest.raises(shardkeep.CheckpointExistsError, match="overwrite=True"):
        shardkeep.save(path, tree, **arguments)

    other = {**state(2), "layers": [{"kernel": np.ones(3)}]}
    shardkeep.save_async(path, other, overwrite=True, metadata={"step": 2}, **arguments).wait()
    assert_same(shardkeep.load(path), other)
    assert shardkeep.inspect(path).metadata == {"step": 2}
    # Of the first save nothing is left, nor of the saving itself.
    files = [name for tree in shardkeep.inspect(path).trees.values() for name in [file.name for file in tree.files]]
    rest = set(place.names()) - {
        f"run/{name}" if kind in ("safetensors", "tensorstore", "zstd") else name for name in files
    }
    assert {name for name in rest if "/claims/" not in name} <= {
        "run/manifest.json",
        "run.safetensors.index.json",
        "run/tensorstore_index.json",
        "run/checkpoint_metadata.json",
    }
    shardkeep.delete(path)
    assert not shardkeep.exists(path)
    assert place.names() == {}
    with pytest.raises(FileNotFoundError, match="there is nothing there"):
        shardkeep.load(path)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_are_laid_out_anew(kind: str, place: Place) -> None:
    path, arguments = where(kind, place)
    mesh = mesh_of(8)
    values = pattern(np.float32, (64, 32))
    shardkeep.save(path, {"w": jax.device_put(values, NamedSharding(mesh, P("a")))}, **arguments)
    for spec in (P(None, "a"), P("a", "b"), P("b"), P()):
        loaded = shardkeep.load(path, mesh=mesh_of(2, 4), partition_rules=[("w", spec)] if "b" in spec else None,
                                shardings=None if "b" in spec else {"w": NamedSharding(mesh, spec)})["w"]  # fmt: skip
        assert_same(np.asarray(loaded), values)
        assert loaded.sharding.spec == PartitionSpec(*spec)
    template = {"w": jax.ShapeDtypeStruct((64, 32), np.float32, sharding=NamedSharding(mesh, P(None, "a")))}
    assert_same(np.asarray(shardkeep.load(path, template=template)["w"]), values)


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "zstd"])
def test_several_trees_share_a_place(kind: str, place: Place) -> None:
    path, arguments = where(kind, place)
    trees = {
        prefix: {"w": pattern(np.float32, (50,), seed)} for seed, prefix in enumerate(("model", "opt.state", "ema"))
    }
    for prefix, tree in trees.items():
        shardkeep.save(path, tree, prefix=prefix, metadata={"of": prefix}, **arguments)
    trees["model"] = {"w": pattern(np.float32, (60,), 9)}
    shardkeep.save(path, trees["model"], prefix="model", overwrite=True, **arguments)
    for prefix, tree in trees.items():
        assert_same(shardkeep.load(path, prefix=prefix), tree)
    assert shardkeep.inspect(path).trees["opt.state"].metadata == {"of": "opt.state"}
    with pytest.raises(ValueError, match=r"model.*opt\.state"):
        shardkeep.load(path)


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "zstd"])
def test_several_trees_are_committed_together_and_go_away(kind: str, place: Place) -> None:
    path, arguments = where(kind, place)
    shardkeep.save(path, {"kept": 1}, prefix="other", **arguments)
    for number in (1, 2, 3):
        # A prefix that is a key of the main tree, too: in the zarr format only one of them can have the clean names.
        trees = {"ema": {"w": pattern(np.float32, (50 + number,), number)}, "data.train": {"at": number}}
        main = {"w": pattern(np.float32, (4, number), number), "ema": {"w": np.full(3, number)}}
        shardkeep.save(path, main, trees=trees, overwrite=number > 1, metadata={"number": number}, **arguments)
        for prefix, tree in {None: main, **trees}.items():
            assert_same(shardkeep.load(path, prefix=prefix or ""), tree)
        found = shardkeep.inspect(path)
        assert {p: tree.save_id == found.save_id for p, tree in found.trees.items()} == {
            "other": False, "": True, "data.train": True, "ema": True
        }  # fmt: skip
        assert shardkeep.verify(path).ok
    with pytest.raises(shardkeep.CheckpointExistsError, match="already holds a tree with prefix 'ema'"):
        shardkeep.save(path, {"a": 1}, prefix="new", trees={"ema": {"a": 2}}, **arguments)
    assert "new" not in shardkeep.inspect(path).prefixes
    shardkeep.delete(path)
    assert place.names() == {}


def test_formats_replace_each_other(place: Place) -> None:
    path = f"{place.url}/run"
    for number, kind in enumerate(("tensorstore", "safetensors", "zstd", "tensorstore")):
        tree = {"w": pattern(np.float32, (100,), number)}
        shardkeep.save(path, tree, overwrite=True, **FORMATS[kind][1])
        assert_same(shardkeep.load(path), tree)
    assert shardkeep.verify(path).ok


def test_exchange_files_go_from_several_to_one(place: Place) -> None:
    """The index stays, as Hugging Face would write it for the one file, since nothing of a fixed name is removed."""
    path = f"{place.url}/hub/model.safetensors"
    shards: set[str] = set()
    for number, size in enumerate([4000, 4000, 8000, None, None]):
        tree = {name: pattern(np.float32, (1000,), number + seed) for seed, name in enumerate("abc")}
        shardkeep.save(path, tree, overwrite=True, max_shard_size=size)
        for name in ("model.safetensors", "model", "model.safetensors.index.json"):
            assert_same(shardkeep.load(f"{place.url}/hub/{name}"), tree)
        assert_same(shardkeep.load(f"{place.url}/hub"), tree)  # as a folder
        assert shardkeep.verify(path).ok
        names = {name.removeprefix("hub/") for name in place.names("hub")}
        files = names - {"model.safetensors.index.json"}
        assert not files & shards, "a name was used twice"
        if size:
            shards |= files
            assert all(re.fullmatch(r"model-[0-9a-f]{32}-0000\d-of-0000\d\.safetensors", name) for name in files)
        else:
            assert files == {"model.safetensors"}
            index = json.loads(place.get("hub/model.safetensors.index.json"))
            assert index["weight_map"] == dict.fromkeys("abc", "model.safetensors")
            assert index["metadata"] == {"total_size": 12_000}


def test_several_exchange_files_do_not_take_the_place_of_one(place: Place) -> None:
    path = f"{place.url}/model.safetensors"
    tree = {name: pattern(np.float32, (1000,), seed) for seed, name in enumerate("abc")}
    shardkeep.save(path, tree)
    before = place.names()
    with pytest.raises(
        shardkeep.CheckpointExistsError, match=r"shardkeep\.delete.*another path.*max_shard_size.*Nothing was written"
    ):
        shardkeep.save(path, {"a": tree["a"], "b": tree["b"]}, overwrite=True, max_shard_size=4000)
    assert place.names() == before
    assert_same(shardkeep.load(path), tree)
    shardkeep.delete(path)
    shardkeep.save(path, tree, max_shard_size=4000)
    assert_same(shardkeep.load(path), tree)


def test_a_file_too_large_for_one_request_gets_an_index(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SINGLE_LIMIT", 10_000)
    path = f"{place.url}/model.safetensors"
    tree = {"a": pattern(np.float32, (5000,))}
    shardkeep.save(path, tree)
    (shard,) = set(place.names()) - {"model.safetensors.index.json"}
    assert re.fullmatch(r"model-[0-9a-f]{32}-00001-of-00001\.safetensors", shard)
    assert_same(shardkeep.load(path), tree)
    shardkeep.save(path, {"a": tree["a"][:10]}, overwrite=True)
    assert_same(shardkeep.load(path), {"a": tree["a"][:10]})


def test_a_single_exchange_file_is_one_request(watched: Place) -> None:
    """Put once, under its own name: there is no second object that is copied into its place."""
    path = f"{watched.url}/model.safetensors"
    shardkeep.save(path, {"w": pattern(np.uint8, (70 << 20,))})
    watched.forget()
    shardkeep.save(path, {"w": pattern(np.uint8, (70 << 20,), 1)}, overwrite=True)
    large = [request for request in watched.requests if request.received > 1 << 20]
    assert [(request.method, unquote(request.target).endswith("model.safetensors")) for request in large] == [
        ("PUT", True)
    ]
    assert_same(shardkeep.load(path), {"w": pattern(np.uint8, (70 << 20,), 1)})
    assert set(watched.names()) == {"model.safetensors"}


def test_any_shard_names_them_all(place: Place) -> None:
    tree = {name: pattern(np.float32, (1000,), seed) for seed, name in enumerate("abc")}
    shardkeep.save(f"{place.url}/model.safetensors", tree, max_shard_size=4000)
    shard = next(name for name in place.names() if name.endswith("-00002-of-00003.safetensors"))
    assert_same(shardkeep.load(f"{place.url}/{shard}"), tree)
    with pytest.raises(ValueError, match=r"is a shard of .*; save to .*model\.safetensors"):
        shardkeep.save(f"{place.url}/{shard}", tree)


def test_arrays_above_the_size_of_an_object(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are cut into objects; shards of exchange files, which are not, go up in parts."""
    monkeypatch.setattr(BucketStore, "traits", replace(BucketStore.traits, object_limit=4 << 20))
    monkeypatch.setattr(cloud, "LARGE", 8 << 20)
    monkeypatch.setattr(cloud, "_PART", 5 << 20)
    tree = {"big": pattern(np.uint8, (11 << 20,)), "small": np.arange(5)}
    shardkeep.save(f"{place.url}/run", tree)
    sizes = [size for name, size in place.names("run").items() if name.endswith(".safetensors")]
    assert len(sizes) >= 3
    assert max(sizes) < 5 << 20
    assert_same(shardkeep.load(f"{place.url}/run"), tree)
    shardkeep.save(f"{place.url}/model.safetensors", tree, max_shard_size=11 << 20)
    assert_same(shardkeep.load(f"{place.url}/model.safetensors"), tree)


def test_a_series_of_objects(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record of the manifest names them all: they are found, checked, replaced and removed one by one."""
    monkeypatch.setattr(BucketStore, "traits", replace(BucketStore.traits, object_limit=40_000))
    path = f"{place.url}/run"

    def tree(number: int) -> dict[str, Any]:
        return {f"layer {i}": pattern(np.float32, (9000 + i,), number) for i in range(12)}

    def objects() -> list[str]:
        return sorted(name for name in place.names("run") if name.endswith(".safetensors"))

    for number in range(2):
        shardkeep.save(path, tree(number), overwrite=True)
        record, *others = json.loads(place.get("run/manifest.json"))["trees"][""]["files"]
        assert (record["names"][32:], record["first"], len(record["sizes"]), others) == ("-*.safetensors", 0, 12, [])
        assert objects() == [f"run/{record['names'].replace('*', f'{i:05d}')}" for i in range(12)]
        assert_same(shardkeep.load(path), tree(number))
        report = shardkeep.verify(path)
        assert (report.ok, report.files, report.unchecked) == (True, 12, 0)
    assert [file.name for file in shardkeep.inspect(path).tree().files] == [name[4:] for name in objects()]
    assert shardkeep.latest(place.url) == path
    damaged = objects()[7]
    shardkeep.save(path, {"w": np.ones(3)}, prefix="ema")
    assert_same(shardkeep.load(path, prefix=""), tree(1))
    header = bytearray(place.get(damaged))
    header[20] ^= 1
    place.put(damaged, bytes(header))
    (problem,) = shardkeep.verify(path).problems
    assert "-00007.safetensors" in str(problem)
    place.put(damaged, bytes(header[:-1]))
    with pytest.raises(shardkeep.IntegrityError, match=r"-00007\.safetensors"):
        shardkeep.load(path, prefix="")
    shardkeep.delete(path)
    assert place.names() == {}


class Rendered:
    """Some library's path: not `os.PathLike`, but its text is one."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


class PathLike(Rendered):
    def __fspath__(self) -> str:
        return self.text


@pytest.mark.parametrize("made", [str, Rendered, PathLike, PurePosixPath, lambda text: text + "/"])
def test_paths_of_every_kind(made: Any, place: Place) -> None:
    tree = {"w": np.arange(5)}
    path = made(f"{place.url}/run")
    shardkeep.save(path, tree)
    shardkeep.save_async(path, tree, overwrite=True).wait()
    assert shardkeep.exists(path)
    assert shardkeep.verify(path).ok
    assert shardkeep.inspect(path).path == f"{place.url}/run"
    assert_same(shardkeep.load(path), tree)
    shardkeep.delete(path)
    assert place.names() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_file_urls_are_local_paths(kind: str, tmp_path: Path) -> None:
    ending, arguments = FORMATS[kind]
    tree = {"w": np.arange(5.0), "v": np.arange(50.0)}
    url = f"file://{tmp_path}/a%20run{ending}"
    shardkeep.save(url, tree, **arguments)
    assert_same(shardkeep.load(tmp_path / f"a run{ending}"), tree)
    assert_same(shardkeep.load(url), tree)
    assert shardkeep.exists(url)
    shardkeep.delete(url)
    assert not shardkeep.exists(tmp_path / f"a run{ending}")


def test_keys_of_any_characters(place: Place) -> None:
    """Names are escaped for the file system, and by the client for the request: they must not be escaped twice."""
    names = [
        "a b",
        "a%20b",
        "x/y",
        "ü",
        "…",
        "#?&=+",
        "*",
        "a.b",
        "~",
        "con",
        "A",
        "a",
        ".zarray",
        "0.0",
        "%",
        "\\",
        "'\"<>",
        "",
    ]
    tree = {name: {"w": pattern(np.float32, (3,), seed)} for seed, name in enumerate(names)}
    for kind in ("tensorstore", "zstd", "safetensors"):
        path = f"{place.url}/{kind}"
        shardkeep.save(path, tree, prefix="a b/ü%", **FORMATS[kind][1])
        assert_same(shardkeep.load(path, prefix="a b/ü%"), tree)
        assert shardkeep.verify(path).ok


def test_a_prefix_of_any_characters(place: Place) -> None:
    path = f"{place.url}/a b/ü%20/x+y=z/#1?"
    shardkeep.save(path, {"w": np.arange(3)})
    assert_same(shardkeep.load(path), {"w": np.arange(3)})
    assert set(place.names()) >= {"a b/ü%20/x+y=z/#1?/manifest.json"}


def test_a_whole_bucket_is_a_place(gcs: Place) -> None:
    shardkeep.save("gs://bucket", {"w": np.arange(3)}, format="zarr")
    shardkeep.save("gs://bucket/model.safetensors", {"v": np.arange(4)})
    assert_same(shardkeep.load("gs://bucket/"), {"w": np.arange(3)})
    assert_same(shardkeep.load("gs://bucket/model"), {"v": np.arange(4)})
    shardkeep.delete("gs://bucket")
    assert set(gcs.server.objects["bucket"]) == {"model.safetensors"}


def test_an_empty_bucket_holds_nothing(gcs: Place) -> None:
    assert not shardkeep.exists("gs://bucket")
    with pytest.raises(FileNotFoundError, match="there is nothing there"):
        shardkeep.load("gs://bucket")


def test_neighbours_are_left_alone(place: Place) -> None:
    """A name that only begins the same is another place; a placeholder for a folder is nothing."""
    place.put("run2/manifest.json", b"not yours")
    place.put("run.txt", b"not yours")
    shardkeep.save(f"{place.url}/run", {"w": np.arange(3)}, format="zarr")
    shardkeep.save(f"{place.url}/run", {"w": np.arange(4)}, overwrite=True)
    place.put("run/notes.txt", b"not yours")
    shardkeep.delete(f"{place.url}/run")
    assert place.names() == {"run2/manifest.json": 9, "run.txt": 9, "run/notes.txt": 9}
    assert not shardkeep.exists(f"{place.url}/ru")


def test_damage_is_found(place: Place) -> None:
    for kind in KINDS:
        path, arguments = where(kind, place)
        shardkeep.save(
            path, {"w": pattern(np.uint8, (5000,)), "v": pattern(np.uint8, (5000,))}, overwrite=True, **arguments
        )
        data = [n for n, size in place.names().items() if size > 1000 and not n.endswith(".json")]
        damaged = bytearray(place.get(data[0]))
        damaged[-10] ^= 1
        place.put(data[0], bytes(damaged))
        with pytest.raises(shardkeep.IntegrityError, match="digest|damaged"):
            shardkeep.load(path)
        assert not shardkeep.verify(path).ok
        place.put(data[0], bytes(damaged[:-1]))
        with pytest.raises(shardkeep.IntegrityError, match="bytes|damaged"):
            shardkeep.load(path)
        place.client.delete(data[0])
        with pytest.raises(FileNotFoundError, match="missing|nothing there"):
            shardkeep.load(path)
        for name in place.names():
            place.client.delete(name)


def test_a_copy_of_the_objects_is_a_checkpoint(place: Place, tmp_path: Path) -> None:
    """From the bucket to a disk, and to another place in a bucket."""
    tree = state(3)
    for kind in ("safetensors", "tensorstore", "exchange", "shards"):
        path, arguments = where(kind, place)
        shardkeep.save(path, tree, overwrite=True, **arguments)
        copy = tmp_path / kind
        place.download(copy)
        name = "run.safetensors" if kind in ("exchange", "shards") else "run"
        assert_same(shardkeep.load(copy / name), tree)
        place.upload(copy, f"copies/{kind}")
        assert_same(shardkeep.load(f"{place.url}/copies/{kind}/{name}"), tree)
        shardkeep.delete(path)
