"""Checkpoints of torch.distributed.checkpoint, as torch wrote them (tests/fixtures/torch/dcp) and as anyone may."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from buckets.fixtures import Place, _alone, place  # noqa: F401
from foreign.conformance import DirectoryReaderTests
from foreign.torchfiles import Pickle, encode_dcp
from shardkeep.foreign import dcp
from shardkeep.model.tree import flatten
from support import assert_same, mesh_of, pattern

P = PartitionSpec
FIXTURE = Path(__file__).parents[1] / "fixtures" / "torch" / "dcp"
EXPECTED: dict[str, list[Any]] = json.loads((FIXTURE.parent / "expected.json").read_text())["dcp"]


def put(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(exist_ok=True)
    for name, document in files.items():
        (path / name).write_bytes(document)
    return path


class TestDcp(DirectoryReaderTests):
    name = "torch-dcp"
    dtypes = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64")
    dtypes += ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        return put(path, encode_dcp(arrays))

    def data_files(self, path: Path) -> list[Path]:
        return sorted(path.glob("*.distcp"))

    def documents(self, path: Path) -> list[Path]:
        return [path / ".metadata"]

    def point_outside(self, path: Path, outside: Path) -> None:
        document = (path / ".metadata").read_bytes()
        (path / ".metadata").write_bytes(document.replace(b"__1_0.distcp", b"../../secret"))


def bits_of(tree: Any) -> dict[str, list[Any]]:
    leaves = {leaf.key: leaf.value for leaf in flatten(tree)[1]}
    arrays = {key: np.asarray(leaf) for key, leaf in leaves.items() if isinstance(leaf, jax.Array | np.ndarray)}
    return {key: [array.dtype.name, list(array.shape), array.tobytes().hex()] for key, array in arrays.items()}


def test_a_checkpoint_that_has_lost_all_its_parts_is_damaged(tmp_path: Path) -> None:
    path = shutil.copytree(FIXTURE, tmp_path / "lost")
    for part in path.glob("*.distcp"):
        part.unlink()
    with pytest.raises(shardkeep.MissingDataError, match=r"lost has \.metadata of .*, but none of its files"):
        shardkeep.load(path)
    assert not shardkeep.verify(path).ok
    (path / ".metadata").write_text("of another program")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="something else"):
        shardkeep.load(path)


def test_what_four_processes_wrote_is_loaded_bit_for_bit() -> None:
    found = shardkeep.load(FIXTURE)
    assert bits_of(found) == EXPECTED
    assert (found["step"], found["note"], found["shape"]) == (7, "ü", (1, 2))
    assert found["optimizer"]["lr"] == 0.1
    assert isinstance(found["list"], list)
    assert found["states"]["rng"][1] == 1
    report = shardkeep.verify(FIXTURE)
    assert (report.ok, report.unchecked) == (True, len(EXPECTED))
    assert shardkeep.exists(FIXTURE)
    assert shardkeep.inspect(FIXTURE).source == "torch-dcp"


@pytest.mark.parametrize("spec", [P("a", "b"), P("b", "a"), P(None, "a"), P(("a", "b"))], ids=str)
def test_each_device_gets_its_region_whatever_parts_it_is_in(spec: P) -> None:
    sharding = NamedSharding(mesh_of(2, 2), spec)
    key = "model/layer/0/weight"
    found = shardkeep.load(FIXTURE, include=f"^{key}$", shardings=sharding)["model"]["layer"]["0"]["weight"]
    assert found.sharding == sharding
    assert np.asarray(found).tobytes().hex() == EXPECTED[key][2]


def test_only_the_files_with_what_is_needed_are_read(tmp_path: Path) -> None:
    """A file that is damaged does not matter to an array that is not in it."""
    files = encode_dcp({"a": np.arange(1, dtype=np.int32), "b": np.arange(2, dtype=np.int32)})
    path = put(tmp_path / "made", files)
    (path / "__1_0.distcp").write_bytes(bytes(len(files["__1_0.distcp"])))
    assert_same(shardkeep.load(path, include="^a$"), {"a": jnp.arange(1)})
    with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'b': .*__1_0\.distcp: there is no tensor at byte 0"):
        shardkeep.load(path)
    (problem,) = shardkeep.verify(path).problems
    assert problem.leaf == "b"


def test_a_missing_file_is_damage(tmp_path: Path) -> None:
    path = Path(shutil.copytree(FIXTURE, tmp_path / "made"))
    (path / "__0_0.distcp").unlink()
    assert not shardkeep.exists(path)
    assert "transposed" in shardkeep.inspect(path).leaves
    with pytest.raises(shardkeep.MissingDataError, match=r"leaf 'model/layer/0/weight': .*__0_0\.distcp is missing"):
        shardkeep.load(path)
    assert any("__0_0.distcp" in problem.file for problem in shardkeep.verify(path).problems)


def test_without_its_metadata_it_is_unfinished(tmp_path: Path) -> None:
    path = put(tmp_path / "made", {"__0_0.distcp": b"x"})
    with pytest.raises(shardkeep.IncompleteCheckpointError, match=r"not \.metadata, which is written last"):
        shardkeep.load(path)
    assert not shardkeep.exists(path)


def test_a_changed_byte_is_found_by_the_crc_of_its_part(tmp_path: Path) -> None:
    array = np.arange(64, dtype=np.int32)
    path = put(tmp_path / "made", encode_dcp({"a": array, "b": array + 7}))
    document = bytearray((path / "__1_0.distcp").read_bytes())
    document[document.index((array[32:] + 7).tobytes()) + 5] ^= 4
    (path / "__1_0.distcp").write_bytes(document)
    (problem,) = shardkeep.verify(path).problems
    assert problem.leaf == "b"
    assert "does not match its CRC" in problem.message


def changed(files: dict[str, bytes], before: bytes, after: bytes) -> dict[str, bytes]:
    assert before in files[".metadata"]
    return {**files, ".metadata": files[".metadata"].replace(before, after)}


def test_parts_that_do_not_fill_a_tensor_are_damage(tmp_path: Path) -> None:
    files = encode_dcp({"a": np.arange(6, dtype=np.int32)})
    size = Pickle().dumps((6,))[2:-1]
    assert files[".metadata"].count(size) == 1
    with pytest.raises(shardkeep.IntegrityError, match="do not cover it exactly once"):
        shardkeep.load(put(tmp_path / "made", changed(files, size, size.replace(b"\x06", b"\x07"))))


def test_a_part_that_is_another_tensor_is_damage(tmp_path: Path) -> None:
    files = encode_dcp({"a": np.arange(6, dtype=np.int32)})
    path = put(tmp_path / "made", changed(files, b"int32", b"uint8"))
    with pytest.raises(shardkeep.IntegrityError, match=r"is int32\[3\], but \.metadata describes another one"):
        shardkeep.load(path)


def test_paths_tell_dicts_from_lists(tmp_path: Path) -> None:
    arrays = {"l.0": np.ones(1, np.float32), "l.1": np.zeros(1, np.float32), "d.0": np.ones(1, np.float32)}
    paths = {"l.0": ("l", 0), "l.1": ("l", 1), "d.0": ("d", "0"), "v": ("d", "v")}
    found = shardkeep.load(put(tmp_path / "made", encode_dcp(arrays, {"v": 5}, paths)))
    assert_same(found, {"l": [jnp.ones(1), jnp.zeros(1)], "d": {"0": jnp.ones(1), "v": 5}})


@pytest.mark.parametrize("paths", [{"a": ("x",), "b": ("x",)}, {"a": ("x",), "b": ("x", "y")}])
def test_two_values_in_one_place_are_damage(paths: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    files = encode_dcp({"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)}, paths=paths)
    with pytest.raises(shardkeep.IntegrityError, match="the same key in the tree"):
        shardkeep.load(put(tmp_path / "made", files))


def test_large_values_that_are_no_tensors_are_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp, "_LARGEST_VALUE", 10)
    found = shardkeep.load(put(tmp_path / "made", encode_dcp({}, {"v": 5})))["v"]
    assert isinstance(found, shardkeep.OpaqueNode)
    assert found["file"] == "__0_0.distcp"


def test_it_is_read_from_a_bucket(place: Place) -> None:
    place.upload(FIXTURE, "made")
    assert bits_of(shardkeep.load(f"{place.url}/made")) == EXPECTED
    assert shardkeep.verify(f"{place.url}/made").ok
    large = pattern("float32", (64, 3))
    for name, document in encode_dcp({"w": large}).items():
        place.put(f"other/{name}", document)
    sharding = NamedSharding(mesh_of(4), P("a"))
    assert_same(np.asarray(shardkeep.load(f"{place.url}/other", shardings=sharding)["w"]), large)


def test_descriptions_are_kept_for_a_load_and_never_taken_for_another(tmp_path: Path) -> None:
    path = tmp_path / "made"
    for number in range(8):
        assert_same(
            shardkeep.load(put(path, encode_dcp({"a": np.full(3, number, np.int32)}))), {"a": jnp.full(3, number)}
        )
        shutil.rmtree(path)
    assert len(dcp._known) <= dcp._MOST_KNOWN
