"""Exchange files: Hugging Face names, whole arrays under plain keys, one or several files, replaced as a whole."""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from faults.hostile import reseal
from shardkeep.stores.local.store import LocalStore
from shardkeep.targets.exchange import parse_size
from support import Dense, Point, assert_same, bits, mesh_of, pattern

P = PartitionSpec


def _tree(count: int, fill: int = 0, size: int = 100) -> dict[str, Any]:
    return {"layers": [{"w": np.full(size, i + fill, np.float32)} for i in range(count)], "step": fill}


def _names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def _metadata(file: Path) -> dict[str, str]:
    with safetensors.safe_open(file, framework="numpy") as handle:
        return handle.metadata()


def _package_reads(directory: Path, base: str = "model") -> dict[str, np.ndarray]:
    """As Hugging Face would: by the index if there is one, else the single file."""
    index = directory / f"{base}.safetensors.index.json"
    if not index.exists():
        return safetensors.numpy.load_file(directory / f"{base}.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    found: dict[str, np.ndarray] = {}
    for name in set(weight_map.values()):
        found |= safetensors.numpy.load_file(directory / name)
    assert set(found) == set(weight_map)
    assert all(name in safetensors.numpy.load_file(directory / file) for name, file in weight_map.items())
    return found


def test_a_single_file_is_what_others_expect(tmp_path: Path) -> None:
    tree = {"model": {"w": np.arange(6.0).reshape(2, 3), "layers": [np.ones(2, np.float16)]}, "step": 3}
    shardkeep.save(tmp_path / "model.safetensors", tree, metadata={"note": "é"})
    assert _names(tmp_path) == ["model.safetensors"]
    found = _package_reads(tmp_path)
    assert sorted(found) == ["model.layers.0", "model.w"]
    assert bits(found["model.w"]) == bits(tree["model"]["w"])
    assert _metadata(tmp_path / "model.safetensors")["format"] == "pt"


def test_data_begins_on_a_page(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "one.safetensors", _tree(50))
    shardkeep.save(tmp_path / "many.safetensors", _tree(5), max_shard_size=400)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 6
    for file in files:
        (length,) = struct.unpack("<Q", file.read_bytes()[:8])
        assert (8 + length) % 4096 == 0


def test_several_files_and_an_index(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "model.safetensors", _tree(5), max_shard_size=800)
    shards = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert _names(tmp_path) == [*shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 400
    assert index["weight_map"] == {f"layers.{i}.w": shards[i // 2] for i in range(5)}
    assert all(_metadata(tmp_path / name)["format"] == "pt" for name in shards)
    for name in shards:
        assert sum(a.nbytes for a in safetensors.numpy.load_file(tmp_path / name).values()) <= 800
    assert len(_package_reads(tmp_path)) == 5
    assert_same(shardkeep.load(tmp_path / "model.safetensors"), _tree(5))


def test_one_tensor_above_the_limit_stands_alone(tmp_path: Path) -> None:
    tree = {"a": np.ones(10), "b": np.ones(1000), "c": np.ones(10)}
    shardkeep.save(tmp_path / "m.safetensors", tree, max_shard_size=200)
    sizes = [len(safetensors.numpy.load_file(p)) for p in sorted(tmp_path.glob("m-*.safetensors"))]
    assert sizes == [1, 1, 1]
    assert_same(shardkeep.load(tmp_path / "m.safetensors"), tree)


@pytest.mark.parametrize("size", [1200, "1200", "1200B", "1.2KB", "1.2 kb", "0.0012MB"])
def test_the_limit_may_be_said_in_many_ways(tmp_path: Path, size: int | str) -> None:
    shardkeep.save(tmp_path / "m.safetensors", _tree(6), max_shard_size=size)
    assert len(list(tmp_path.glob("m-*-of-00002.safetensors"))) == 2


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("512MiB", 512 << 20), ("1GiB", 1 << 30), ("2TB", 2 * 10**12), (7, 7)]
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("size", [0, -1, "", "0", "5XB", "GB", "-1GB", "nan", "1e3"])
def test_what_is_no_size_is_a_value_error_before_any_write(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        shardkeep.save(tmp_path / "m.safetensors", _tree(1), max_shard_size=size)
    assert _names(tmp_path) == []


def test_a_directory_has_no_shard_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size is only for exchange files"):
        shardkeep.save(tmp_path / "c", _tree(1), max_shard_size=100)


@pytest.mark.parametrize(
    "arguments", [{"format": "zarr"}, {"compression": "zstd"}, {"format": "tensorstore"}, {"format": "hdf5"}]
)
def test_other_formats_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="format"):
        shardkeep.save(tmp_path / "m.safetensors", _tree(1), **arguments)
    assert _names(tmp_path) == []


@pytest.mark.parametrize(
    "path", ["model.safetensors", "model", "model.safetensors.index.json", "model-00001-of-00003.safetensors", ""]
)
def test_several_files_are_found_under_any_of_their_names(tmp_path: Path, path: str) -> None:
    shardkeep.save(tmp_path / "model.safetensors", _tree(5), max_shard_size=800)
    assert_same(shardkeep.load(tmp_path / path), _tree(5))
    assert shardkeep.exists(tmp_path / path)


SIZES = {"one": None, "three": 800, "five": 400}


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("second", SIZES)
@pytest.mark.parametrize("third", ["one", "three"])
def test_each_arrangement_replaces_each_other_whole(tmp_path: Path, first: str, second: str, third: str) -> None:
    """After every overwrite: the new tree, for us and for others, and no file of the old one."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-of-mine.txt").write_text("mine")
    for number, kind in enumerate((first, second, third)):
        tree = _tree(5, fill=10 * number)
        shardkeep.save(tmp_path / "model.safetensors", tree, overwrite=True, max_shard_size=SIZES[kind])
        assert_same(shardkeep.load(tmp_path / "model.safetensors"), tree)
        assert_same(shardkeep.load(tmp_path / "model"), tree)
        assert_same(shardkeep.load(tmp_path), tree)
        assert shardkeep.verify(tmp_path / "model.safetensors").ok
        found = _package_reads(tmp_path)
        assert {k: v[0] for k, v in found.items()} == {f"layers.{i}.w": i + 10 * number for i in range(5)}
        count = {"one": 1, "three": 3 + 1, "five": 5 + 1}[kind]
        ours = [n for n in _names(tmp_path) if n not in ("config.json", "model-of-mine.txt")]
        assert len(ours) == count, ours
        assert ("model.safetensors" in ours) == (kind == "one")
        assert ("model.safetensors.index.json" in ours) == (kind != "one")
    assert (tmp_path / "model-of-mine.txt").read_text() == "mine"


def test_an_existing_tree_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    for size in (None, 400):
        target = tmp_path / f"m{size}.safetensors"
        shardkeep.save(target, _tree(3), max_shard_size=size)
        before = _names(tmp_path)
        for other in (None, 400):
            with pytest.raises(FileExistsError, match="overwrite=True"):
                shardkeep.save(target, _tree(3, fill=5), max_shard_size=other)
        assert _names(tmp_path) == before
        assert_same(shardkeep.load(target), _tree(3))


COLLISIONS: dict[str, Any] = {
    "dotted": {"a.b": np.ones(1), "a": {"b": np.zeros(1)}},
    "deep": {"a": {"b.c": np.ones(1)}, "a.b": {"c": np.zeros(1)}},
    "reserved": {"__metadata__": np.ones(1)},
}


@pytest.mark.parametrize("name", COLLISIONS)
def test_two_leaves_of_one_name_are_refused_before_writing(tmp_path: Path, name: str) -> None:
    with pytest.raises(shardkeep.KeyCollisionError, match=r"a\.b|__metadata__"):
        shardkeep.save(tmp_path / "m.safetensors", COLLISIONS[name])
    assert _names(tmp_path) == []
    shardkeep.save(tmp_path / "m.safetensors", _tree(1))
    with pytest.raises(ValueError, match="directory"):
        shardkeep.save(tmp_path / "m.safetensors", COLLISIONS[name], overwrite=True)
    assert_same(shardkeep.load(tmp_path / "m.safetensors"), _tree(1))
    assert _names(tmp_path) == ["m.safetensors"]
    shardkeep.save(tmp_path / "c", COLLISIONS[name])
    assert_same(shardkeep.load(tmp_path / "c"), COLLISIONS[name])


def test_a_collision_is_told_before_the_background(tmp_path: Path) -> None:
    """What is wrong with the tree is raised by the call, not by wait()."""
    with pytest.raises(shardkeep.KeyCollisionError, match=r"a\.b"):
        shardkeep.save_async(tmp_path / "m.safetensors", COLLISIONS["dotted"])


def test_plain_values_do_not_collide_with_arrays(tmp_path: Path) -> None:
    tree = {"a.b": np.ones(1), "a": {"b": 3}}
    shardkeep.save(tmp_path / "m.safetensors", tree)
    assert_same(shardkeep.load(tmp_path / "m.safetensors"), tree)


@pytest.mark.parametrize("key", ["\udc80", "a\ud83d", "\ud83d\ude00"])
@pytest.mark.parametrize("size", [None, 8])
def test_a_key_others_could_not_read_is_refused_before_writing(tmp_path: Path, key: str, size: Any) -> None:
    """JSON has no lone surrogates: with such a name in its header no other program would read the file at all."""
    with pytest.raises(shardkeep.TreeError, match=r"name|key"):
        shardkeep.save(tmp_path / "m.safetensors", {key: np.ones(2), "b": np.ones(2)}, max_shard_size=size)
    assert _names(tmp_path) == []


@pytest.mark.parametrize("key", ["", "é", "😀", "a/b", "..", "\n", '"', "\\", "k" * 1000])
@pytest.mark.parametrize("size", [None, 8])
def test_other_programs_read_any_other_key(tmp_path: Path, key: str, size: Any) -> None:
    tree = {key: np.arange(3.0), "other": np.ones(2)}
    shardkeep.save(tmp_path / "model.safetensors", tree, max_shard_size=size)
    found = _package_reads(tmp_path)
    assert set(found) == set(tree)
    assert bits(found[key]) == bits(tree[key])
    assert_same(shardkeep.load(tmp_path / "model.safetensors"), tree)


@pytest.mark.parametrize("size", [None, 400])
def test_a_prefix_is_recorded_and_another_refused(tmp_path: Path, size: Any) -> None:
    target = tmp_path / "m.safetensors"
    shardkeep.save(target, _tree(2), prefix="model", max_shard_size=size)
    assert shardkeep.inspect(target).prefixes == ["model"]
    assert_same(shardkeep.load(target), _tree(2))
    assert_same(shardkeep.load(target, prefix="model"), _tree(2))
    before = _names(tmp_path)
    for overwrite in (False, True):
        for prefix in ("ema", None):
            with pytest.raises(shardkeep.PrefixError, match=r"'model'.*one tree"):
                shardkeep.save(target, _tree(1), prefix=prefix, overwrite=overwrite)
    with pytest.raises(ValueError, match=r"no tree with prefix 'ema'.*'model'"):
        shardkeep.load(target, prefix="ema")
    assert _names(tmp_path) == before
    shardkeep.save(target, _tree(1), prefix="model", overwrite=True)
    assert_same(shardkeep.load(target), _tree(1))


def test_an_older_shard_in_the_place_of_a_newer_is_detected(tmp_path: Path) -> None:
    """Same name, same size: what differs is the data and the save's id."""
    for name, fill in (("old", 0), ("new", 7)):
        (tmp_path / name).mkdir()
        shardkeep.save(tmp_path / name / "model.safetensors", _tree(4, fill), max_shard_size=800)
    shard = "model-00002-of-00002.safetensors"
    assert (tmp_path / "old" / shard).stat().st_size == (tmp_path / "new" / shard).stat().st_size
    shutil.copy(tmp_path / "old" / shard, tmp_path / "new" / shard)
    with pytest.raises(shardkeep.IntegrityError, match=re.escape(shard)):
        shardkeep.load(tmp_path / "new" / "model.safetensors")
    assert not shardkeep.verify(tmp_path / "new" / "model.safetensors").ok


def test_a_mix_is_detected_even_where_the_data_is_not_checked(tmp_path: Path) -> None:
    """`verify=False` skips the digests; index and headers carry the save's id all the same."""
    for name, fill in (("old", 0), ("new", 7)):
        (tmp_path / name).mkdir()
        shardkeep.save(tmp_path / name / "model.safetensors", _tree(4, fill), max_shard_size=800)
    shutil.copy(tmp_path / "old" / "model-00002-of-00002.safetensors", tmp_path / "new")
    with pytest.raises(shardkeep.IntegrityError, match=r"model-00002-of-00002\.safetensors"):
        shardkeep.load(tmp_path / "new" / "model.safetensors", verify=False)


def test_an_older_index_over_newer_shards_is_detected(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    shardkeep.save(target, _tree(4), max_shard_size=800)
    old = (tmp_path / "model.safetensors.index.json").read_bytes()
    shardkeep.save(target, _tree(4, 7), max_shard_size=800, overwrite=True)
    (tmp_path / "model.safetensors.index.json").write_bytes(old)
    with pytest.raises((shardkeep.IntegrityError, FileNotFoundError), match="model"):
        shardkeep.load(target)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "model.safetensors", _tree(4), max_shard_size=800)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(shardkeep.MissingDataError, match=r"model-00001-of-00002\.safetensors"):
        shardkeep.load(tmp_path / "model.safetensors")


def test_a_shard_without_its_index_is_not_taken_for_a_model(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "model.safetensors", _tree(4), max_shard_size=800)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(shardkeep.IncompleteCheckpointError, match="index or manifest is missing"):
        shardkeep.load(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises((FileNotFoundError, shardkeep.IntegrityError), match=r"model|checkpoint"):
        shardkeep.load(tmp_path)


@pytest.mark.parametrize("size", [None, 400])
def test_every_flipped_bit_of_the_documents_is_noticed(tmp_path: Path, size: Any) -> None:
    """Header and index: all of the start, where the names stand that say whose file it is, and places after."""
    target = tmp_path / "model.safetensors"
    shardkeep.save(target, {"w": np.ones(3), "v": np.arange(150.0), "s": 5}, max_shard_size=size)
    document = target if size is None else tmp_path / "model.safetensors.index.json"
    good = document.read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0] if size is None else len(good)
    unnoticed = []
    for at in [*range(320), *range(320, end, 41)]:
        bad = bytearray(good)
        bad[at] ^= 1 << at % 7
        document.write_bytes(bytes(bad))
        try:
            shardkeep.load(target)
        except ValueError:
            continue
        unnoticed.append((at, good[max(at - 12, 0) : at + 12]))
    assert unnoticed == []
    document.write_bytes(good)
    assert shardkeep.load(target)["s"] == 5


def test_sharded_arrays_are_stored_whole(tmp_path: Path) -> None:
    host = pattern("float32", (1024, 1024))
    tree = {
        "rows": jax.device_put(host, NamedSharding(mesh_of(8), P("a"))),
        "both": jax.device_put(host, NamedSharding(mesh_of(2, 4), P("b", "a"))),
    }
    shardkeep.save(tmp_path / "model.safetensors", tree)
    found = _package_reads(tmp_path)
    assert all(bits(array) == bits(host) for array in found.values())
    assert_same(shardkeep.load(tmp_path / "model.safetensors"), tree)


def test_structure_and_values_ride_along(tmp_path: Path) -> None:
    tree = {"p": Point(np.ones(2), None), "d": Dense(jnp.ones(2), "x", "name"), "e": [], "n": {"deep": ({},)}, 3: 4}
    for size in (None, 8):
        target = tmp_path / f"m{size}.safetensors"
        shardkeep.save(target, tree, max_shard_size=size, metadata={"step": 1})
        assert_same(shardkeep.load(target), tree)
        assert shardkeep.inspect(target).metadata == {"step": 1}


@pytest.mark.parametrize("tree", [{}, {"a": 1}, None, [None, "x"]])
def test_a_tree_without_arrays_is_a_file_others_can_open(tmp_path: Path, tree: Any) -> None:
    shardkeep.save(tmp_path / "model.safetensors", tree, max_shard_size=10)
    assert _names(tmp_path) == ["model.safetensors"]
    assert _package_reads(tmp_path) == {}
    assert_same(shardkeep.load(tmp_path / "model.safetensors"), tree)


def test_models_side_by_side_do_not_disturb_each_other(tmp_path: Path) -> None:
    names = ["model", "model-ema", "model.v2", "a-00001-of-00002", ".hidden"]
    for _ in range(2):
        for number, name in enumerate(names):
            target = tmp_path / f"{name}.safetensors"
            shardkeep.save(target, _tree(4, number), overwrite=True, max_shard_size=800 if number % 2 else None)
            for other, expected in enumerate(names[: number + 1]):
                assert_same(shardkeep.load(tmp_path / f"{expected}.safetensors"), _tree(4, other))
    shardkeep.delete(tmp_path / "model.safetensors")
    for number, name in enumerate(names[1:], 1):
        assert_same(shardkeep.load(tmp_path / f"{name}.safetensors"), _tree(4, number))


@pytest.mark.parametrize("size", [None, 400])
def test_delete_removes_every_file_of_it_and_no_other(tmp_path: Path, size: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    shardkeep.save(tmp_path / "model.safetensors", _tree(3), max_shard_size=size)
    shardkeep.delete(tmp_path / "model.safetensors")
    assert _names(tmp_path) == ["config.json"]
    assert not shardkeep.exists(tmp_path / "model.safetensors")


def test_an_exchange_file_can_be_moved_and_renamed(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "model.safetensors", _tree(2))
    (tmp_path / "there").mkdir()
    shutil.move(tmp_path / "model.safetensors", tmp_path / "there" / "model.safetensors")
    assert_same(shardkeep.load(tmp_path / "there" / "model.safetensors"), _tree(2))
    (tmp_path / "there" / "model.safetensors").rename(tmp_path / "renamed.safetensors")
    assert_same(shardkeep.load(tmp_path / "renamed.safetensors"), _tree(2))


def test_a_file_saved_again_by_the_package_is_a_plain_foreign_file(tmp_path: Path) -> None:
    """Tools that rewrite tensors but keep our metadata must not make us refuse or misread the file."""
    shardkeep.save(tmp_path / "m.safetensors", {"a": {"w": np.ones(3, np.float32)}})
    tensors = safetensors.numpy.load_file(tmp_path / "m.safetensors")
    safetensors.numpy.save_file({k: v + 1 for k, v in tensors.items()}, tmp_path / "n.safetensors", {"format": "pt"})
    assert_same(shardkeep.load(tmp_path / "n.safetensors"), {"a": {"w": jnp.full(3, 2.0)}})


@pytest.mark.parametrize("size", [None, 2000])
def test_a_header_others_could_not_read_is_never_committed(
    tmp_path: Path, size: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers have a limit (100 MB, lowered here): the save is arranged so that it holds, or refused."""
    monkeypatch.setattr("shardkeep.layouts.safetensors.HEADER_LIMIT", 60_000)
    tree = {f"{i:04}" + "k" * 200: np.full(2, i) for i in range(300)}
    target = tmp_path / "model.safetensors"
    shardkeep.save(target, {"old": 1})
    try:
        shardkeep.save(target, tree, max_shard_size=size, overwrite=True)
    except shardkeep.TreeError:
        tree = {"old": 1}
    assert_same(shardkeep.load(target), tree)


def test_files_honour_the_umask(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    shardkeep.save(tmp_path / "a.safetensors", _tree(1))
    shardkeep.save(tmp_path / "b.safetensors", _tree(2), max_shard_size=400)
    modes = {p.name: oct(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert set(modes.values()) == {modes["plain"]}


@pytest.mark.parametrize("size", [None, 16])
def test_a_manifest_that_is_no_text_is_damage(tmp_path: Path, size: Any) -> None:
    """A sealed document whose manifest begins with half a character."""
    target = tmp_path / "model.safetensors"
    shardkeep.save(target, {"w": np.ones(3), "v": np.arange(3.0)}, max_shard_size=size)
    document = target if size is None else tmp_path / "model.safetensors.index.json"
    good = document.read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0] if size is None else len(good)
    start = good[:end].replace(b'"shardkeep":"{', b'"shardkeep":"\\ud800{', 1)
    document.write_bytes(reseal(start[:end] if size is None else start) + good[end:])
    with pytest.raises(shardkeep.IntegrityError, match=r"model\.safetensors.* is damaged"):
        shardkeep.load(target)


def test_one_name_that_goes_while_the_other_comes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader looks for the single file, then for the index: between the two looks several files become one."""
    path = tmp_path / "model.safetensors"
    shardkeep.save(path, _tree(4), max_shard_size=900)
    assert not path.exists()
    plain = LocalStore.identity
    switched: list[str] = []

    def identity(store: LocalStore, name: str) -> Any:
        found = plain(store, name)
        if not switched and name == "model.safetensors":
            switched.append(name)
            shardkeep.save(path, _tree(4, 7), overwrite=True)
        return found

    monkeypatch.setattr(LocalStore, "identity", identity)
    assert_same(shardkeep.load(path), _tree(4, 7))
    assert switched
