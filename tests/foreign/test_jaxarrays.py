"""What JAX's own serialization writes: trees with a `pytreedef.json`, databases of arrays, directories of arrays."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.array_serialization import serialization
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from foreign.conformance import DirectoryReaderTests
from foreign.test_orbax import Layout, referenced
from shardkeep.foreign.jaxarrays import TREE
from support import assert_same, every_dtype, mesh_of

P = PartitionSpec
PYTREE = Path(__file__).parents[1] / "fixtures" / "jax" / "pytree"


def test_a_tree_is_loaded_as_jax_was_given_it() -> None:
    assert shardkeep.inspect(PYTREE).source == "jax"
    assert_same(shardkeep.load(PYTREE), {"a": jnp.ones((2, 2)), "b": [jnp.arange(3)]})
    assert shardkeep.verify(PYTREE).ok


class TestPytree:
    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(PYTREE, tmp_path / "made"))

    def change(self, made: Path, **fields: Any) -> None:
        described = json.loads((made / TREE).read_text())
        (made / TREE).write_text(json.dumps(described | fields))

    def test_a_leaf_that_was_none_is_none(self, made: Path) -> None:
        self.change(made, __jax_leaf_ids=["null", "Array(int32[3])"])
        assert_same(shardkeep.load(made), {"a": None, "b": [jnp.arange(3)]})

    def test_a_pickled_leaf_is_refused_by_its_type(self, made: Path) -> None:
        self.change(made, __jax_leaf_ids=["str", "Array(int32[3])"])
        with pytest.raises(shardkeep.IntegrityError, match="leaf 0 is of the type 'str'.*pickles are not read"):
            shardkeep.load(made)

    def test_another_number_of_leaves_is_malformed(self, made: Path) -> None:
        for told in (["Array()"], ["Array()"] * 3):
            self.change(made, __jax_leaf_ids=told)
            with pytest.raises(shardkeep.IntegrityError, match="is malformed"):
                shardkeep.load(made)

    def test_one_that_was_not_merged_is_unfinished(self, made: Path) -> None:
        (made / "array_store" / "manifest.ocdbt").rename(made / "array_store" / "other")
        with pytest.raises(shardkeep.errors.IncompleteCheckpointError, match="an unfinished checkpoint of JAX"):
            shardkeep.load(made)
        assert not shardkeep.exists(made)


class TestDatabase(DirectoryReaderTests):
    """Arrays under their keys in one database, as levanter writes them."""

    name = "jax"
    dtypes = [name for name in every_dtype() if name in ("float32", "bfloat16", "int8", "bool", "float8_e4m3fn")]
    layout = Layout("zarr3", True, sharded=False, strict=False, compressed=False)

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        for key, array in arrays.items():
            self.layout.write(path, key.replace(".", "/"), array)
        (path / "metadata.json").write_text('{"step": 7, "is_temporary": false}')
        return path

    def data_files(self, path: Path) -> list[Path]:
        return [path / name for name, end in referenced(path).items() if (path / name).stat().st_size == end]

    def documents(self, path: Path) -> list[Path]:
        return [path / "manifest.ocdbt"]

    def point_outside(self, path: Path, outside: Path) -> None:
        file = self.data_files(path)[-1]
        file.unlink()
        file.symlink_to(outside)

    def test_what_is_not_stored_has_the_fill_value(self, tmp_path: Path) -> None:
        """JAX lets TensorStore leave out chunks of zeros."""
        array = np.zeros((4, 4), np.float32)
        array[0, 0] = 1
        self.layout.write(tmp_path, "a/w", array, (1, 2))
        self.layout.write(tmp_path, "z", np.zeros(6, np.float32))
        assert_same(shardkeep.load(tmp_path), {"a": {"w": jnp.asarray(array)}, "z": jnp.zeros(6)})
        report = shardkeep.verify(tmp_path)
        assert (report.ok, report.unchecked) == (True, 2)


def test_arrays_of_its_checkpoint_manager_are_loaded(tmp_path: Path) -> None:
    """As levanter's older checkpoints: a directory for each array, sharded, and zeros among them."""
    sharding = NamedSharding(mesh_of(4, 2), P("a", "b"))
    arrays = [jnp.zeros(3), jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding), jnp.float32(3)]
    manager = serialization.GlobalAsyncCheckpointManager()
    manager.serialize_with_paths(arrays, [str(tmp_path / "model" / name) for name in ("a", "w", "s")])
    manager.wait_until_finished()
    (tmp_path / "metadata.json").write_text('{"step": 7}')
    assert shardkeep.inspect(tmp_path).source == "zarr"
    found = shardkeep.load(tmp_path, shardings={"model": {"w": sharding, "a": None, "s": None}})["model"]
    assert found["w"].sharding == sharding
    assert_same(found["w"], arrays[1])
    assert_same(found["a"], arrays[0])
    assert_same(found["s"], arrays[2])


def test_databases_of_several_levels_are_one_tree(tmp_path: Path) -> None:
    """JAX puts an array into a database in the directory above its name."""
    arrays = {"step": jnp.int32(7), "model/w": jnp.arange(6.0).reshape(2, 3), "model/d/b": jnp.ones(4)}
    arrays["opt/mu/0"] = jnp.zeros((2, 2))
    manager = serialization.GlobalAsyncCheckpointManager()
    specs = [serialization.get_tensorstore_spec(str(tmp_path / "c" / key), ocdbt=True) for key in arrays]
    manager.serialize(list(arrays.values()), specs)
    manager.wait_until_finished()
    assert len(list(tmp_path.rglob("manifest.ocdbt"))) == 4
    expected = {"step": arrays["step"], "model": {"w": arrays["model/w"], "d": {"b": arrays["model/d/b"]}}}
    assert_same(shardkeep.load(tmp_path / "c"), {**expected, "opt": {"mu": {"0": arrays["opt/mu/0"]}}})
    assert shardkeep.inspect(tmp_path / "c").source == "jax"
    assert shardkeep.verify(tmp_path / "c").ok
    manifest = tmp_path / "c" / "model" / "d" / "manifest.ocdbt"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(shardkeep.IntegrityError, match="model/d/manifest.ocdbt"):
        shardkeep.load(tmp_path / "c")


def test_one_array_in_two_databases_is_refused(tmp_path: Path) -> None:
    layout = Layout("zarr3", True, sharded=False, strict=False, compressed=False)
    layout.write(tmp_path / "c", "model/w", np.ones(2, np.float32))
    layout.write(tmp_path / "c" / "model", "w", np.zeros(2, np.float32))
    with pytest.raises(shardkeep.IntegrityError, match="are arrays with the same name"):
        shardkeep.load(tmp_path / "c")


def test_links_from_a_directory_to_itself_have_an_end(tmp_path: Path) -> None:
    Layout("zarr3", True, sharded=False, strict=False, compressed=False).write(tmp_path / "c", "w", np.ones(2))
    (tmp_path / "c" / "x").mkdir()
    for name in ("a", "b"):
        (tmp_path / "c" / "x" / name).symlink_to(tmp_path / "c" / "x")
    with pytest.raises(shardkeep.IntegrityError, match="directories and files below its database"):
        shardkeep.load(tmp_path / "c")
