"""`shardkeep.serialization.serialization`: leaves to and from directories."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import shardkeep
from shardkeep.serialization import AsyncCheckpointManager, tree_deserialize_leaves, tree_serialize_leaves
from shardkeep.serialization.serialization import is_array_like, join_key, leaf_key_paths
from support import Dense, Keyed, Point, Unkeyed, assert_same, mesh_of

P = PartitionSpec
Log = Callable[[], list[str]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.ones(2), True),
        (np.ones(2), True),
        (np.float32(1), True),
        (jax.ShapeDtypeStruct((2,), jnp.float32), True),
        (3, False),
        (None, False),
        ([1.0], False),
        (SimpleNamespace(shape=()), False),
        (SimpleNamespace(dtype=None), False),
    ],
)
def test_array_like_is_what_has_a_shape_and_a_dtype(value: Any, expected: bool) -> None:
    assert is_array_like(value) is expected


def test_keys_are_joined_by_a_dot() -> None:
    assert join_key("a", "b") == "a.b"
    assert join_key("", "b") == join_key(None, "b") == "b"
    assert join_key("a", "") == join_key("a", None) == "a"
    assert join_key("a", 0) == "a.0"
    assert join_key(None, None) == ""


def test_each_leaf_is_replaced_by_its_dotted_path() -> None:
    """Dict keys by str, sequences by index, namedtuples, dataclasses and attributes by name, custom nodes by JAX's."""
    tree = {
        "dict": {7: 0, "b": 0, None: 0, (1, "x"): 0, 2.5: 0, True: 0},
        "list": [0, (0, {"c": 0})],
        "point": Point(0, 0),
        "dense": Dense(0, 0),
        "keyed": Keyed(0, 0),
        "unkeyed": Unkeyed([0, 0]),
        "empty": [{}, ()],
    }
    paths = leaf_key_paths(tree)
    assert list(paths["dict"].values()) == [f"dict.{key}" for key in tree["dict"]]
    assert list(paths["dict"]) == list(tree["dict"])
    assert paths["list"] == ["list.0", ("list.1.0", {"c": "list.1.1.c"})]
    assert paths["point"] == Point("point.x", "point.y")
    assert paths["dense"] == Dense("dense.kernel", "dense.bias")
    assert (paths["keyed"].left, paths["keyed"].right) == ("keyed.left", "keyed.right")
    assert paths["unkeyed"].items == ("unkeyed.0", "unkeyed.1")
    assert paths["empty"] == [{}, ()]


def test_the_prefix_stands_in_front() -> None:
    assert leaf_key_paths({"a": 1}, "m") == {"a": "m.a"}
    assert leaf_key_paths({"a": 1}, None) == leaf_key_paths({"a": 1}) == {"a": "a"}
    assert leaf_key_paths({"a": 1}, prefix="m.n") == {"a": "m.n.a"}


@pytest.mark.parametrize(("prefix", "expected"), [("", ""), (None, ""), ("m", "m")])
def test_a_bare_leaf_gives_the_prefix(prefix: Any, expected: str) -> None:
    assert leaf_key_paths(jnp.ones(2), prefix) == expected


def test_none_stays_none_unless_is_leaf_says_otherwise() -> None:
    assert leaf_key_paths({"a": None, "b": 1}) == {"a": None, "b": "b"}
    assert leaf_key_paths({"a": None, "b": 1}, is_leaf=lambda x: x is None) == {"a": "a", "b": "b"}
    assert leaf_key_paths({"a": [1, 2]}, is_leaf=lambda x: isinstance(x, list)) == {"a": "a"}


def test_paths_are_those_of_jax() -> None:
    """For a tree of every kind of node, in JAX's own order."""
    tree = {"b": [1, Point(2, Keyed(3, 4))], "a": Dense(5, {"z": 6}), "c": {10: 7, 2: 8}}
    expected = [
        ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    assert jax.tree.leaves(leaf_key_paths(tree)) == expected


TREE = {"layers": [{"w": jnp.arange(6.0).reshape(2, 3)}, {"w": jnp.ones((2, 3))}], "step": jnp.int32(3)}
NESTED = {"layers": {"0": TREE["layers"][0], "1": TREE["layers"][1]}, "step": TREE["step"]}


def test_leaves_come_back_as_nested_dicts_of_strings(tmp_path: Path, any_path: Callable[[Any], Any]) -> None:
    assert tree_serialize_leaves(any_path(tmp_path / "c"), TREE) is None
    assert_same(tree_deserialize_leaves(any_path(tmp_path / "c"), None), NESTED)


def test_leaves_are_written_in_the_tensorstore_format(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, TREE)
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    assert (index["format"], index["version"]) == ("tensorstore", "2.0")
    assert [entry["path"] for entry in index["arrays"]] == ["layers/0/w", "layers/1/w", "step"]
    assert (tmp_path / "layers/0/w/0.0").read_bytes() == np.asarray(TREE["layers"][0]["w"]).tobytes()


def test_several_trees_share_a_directory_under_prefixes(tmp_path: Path) -> None:
    model, optimizer = {"w": jnp.ones(2)}, {"w": jnp.zeros(3)}
    tree_serialize_leaves(tmp_path, model, prefix="model")
    tree_serialize_leaves(tmp_path, optimizer, prefix="optimizer")
    assert_same(tree_deserialize_leaves(tmp_path, None, prefix="model"), model)
    assert_same(tree_deserialize_leaves(tmp_path, None, prefix="optimizer"), optimizer)
    with pytest.raises(ValueError, match=r"pass prefix= one of 'model', 'optimizer'"):
        tree_deserialize_leaves(tmp_path, None)
    with pytest.raises(ValueError, match=r"no tree with prefix 'x'; it has 'model', 'optimizer'"):
        tree_deserialize_leaves(tmp_path, None, prefix="x")


def test_the_commit_callback_runs_once_after_the_commit(tmp_path: Path) -> None:
    seen: list[Any] = []
    tree_serialize_leaves(tmp_path, TREE, commit_callback=lambda: seen.append(shardkeep.exists(tmp_path)))
    assert seen == [True]


def test_no_commit_callback_when_the_save_fails(tmp_path: Path) -> None:
    seen: list[int] = []
    with pytest.raises(TypeError, match="cannot be saved"):
        tree_serialize_leaves(tmp_path, {"f": print}, commit_callback=lambda: seen.append(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file"):
        tree_serialize_leaves(tmp_path / "file", TREE, commit_callback=lambda: seen.append(1))
    assert seen == []


def test_write_index_false_leaves_no_entry_but_a_manifest(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, TREE, prefix="a")
    tree_serialize_leaves(tmp_path, TREE, prefix="b", write_index=False)
    assert list(json.loads((tmp_path / "tensorstore_index.json").read_text())["prefixes"]) == ["a"]
    assert_same(tree_deserialize_leaves(tmp_path, None, prefix="b"), NESTED)


def test_write_index_false_drops_an_old_entry_of_that_prefix(tmp_path: Path) -> None:
    for prefix in ("a", "b"):
        tree_serialize_leaves(tmp_path, TREE, prefix=prefix)
    tree_serialize_leaves(tmp_path, TREE, prefix="a", write_index=False)
    assert list(json.loads((tmp_path / "tensorstore_index.json").read_text())["prefixes"]) == ["b"]
    tree_serialize_leaves(tmp_path, TREE, prefix="b", write_index=False)
    assert not (tmp_path / "tensorstore_index.json").exists()
    assert_same(tree_deserialize_leaves(tmp_path, None, prefix="a"), NESTED)


class Gate:
    """A commit callback that holds a save at its end until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.passed = False

    def __call__(self) -> None:
        assert self._opened.wait(60)
        self.passed = True

    def open(self) -> None:
        self._opened.set()


@pytest.mark.parametrize("make", [GlobalAsyncCheckpointManager, AsyncCheckpointManager])
def test_with_a_manager_it_returns_before_the_commit(make: Callable[[], Any], tmp_path: Path) -> None:
    """And that manager's wait covers the save."""
    manager, gate = make(), Gate()
    tree_serialize_leaves(tmp_path, TREE, manager, commit_callback=gate)
    assert not gate.passed
    gate.open()
    manager.wait_until_finished()
    assert gate.passed
    assert_same(tree_deserialize_leaves(tmp_path, None), NESTED)


@pytest.mark.parametrize("make", [GlobalAsyncCheckpointManager, AsyncCheckpointManager])
def test_with_a_manager_the_arrays_may_change_after_it_returns(make: Callable[[], Any], tmp_path: Path) -> None:
    manager, array = make(), np.arange(5)
    donated = jnp.arange(7.0)
    tree_serialize_leaves(tmp_path, {"a": array, "b": donated}, manager)
    array[:] = 0
    donated.delete()
    manager.wait_until_finished()
    assert_same(shardkeep.load(tmp_path), {"a": np.arange(5), "b": jnp.arange(7.0)})


@pytest.mark.parametrize("make", [GlobalAsyncCheckpointManager, AsyncCheckpointManager])
def test_a_second_save_does_not_wait_for_the_first(make: Callable[[], Any], tmp_path: Path) -> None:
    manager, first, second = make(), Gate(), Gate()
    tree_serialize_leaves(tmp_path / "1", TREE, manager, commit_callback=first)
    tree_serialize_leaves(tmp_path / "2", TREE, manager, commit_callback=second)
    assert not first.passed
    assert not second.passed
    first.open()
    second.open()
    manager.wait_until_finished()
    assert first.passed
    assert second.passed


@pytest.mark.parametrize("make", [GlobalAsyncCheckpointManager, AsyncCheckpointManager])
@pytest.mark.parametrize("ask", ["wait_until_finished", "check_for_errors"])
def test_the_manager_raises_what_failed_and_only_once(make: Callable[[], Any], ask: str, tmp_path: Path) -> None:
    manager = make()
    (tmp_path / "file").write_text("")
    tree_serialize_leaves(tmp_path / "file" / "below", TREE, manager)
    if ask == "check_for_errors" and isinstance(manager, GlobalAsyncCheckpointManager):
        manager._thread.join()  # JAX's own does not wait
    with pytest.raises(NotADirectoryError, match="file"):
        getattr(manager, ask)()
    manager.wait_until_finished()


@pytest.mark.parametrize("make", [GlobalAsyncCheckpointManager, AsyncCheckpointManager])
def test_a_failure_is_raised_by_the_wait_not_by_the_next_save(make: Callable[[], Any], tmp_path: Path) -> None:
    manager = make()
    (tmp_path / "file").write_text("")
    tree_serialize_leaves(tmp_path / "file" / "below", TREE, manager)
    for number in range(3):
        tree_serialize_leaves(tmp_path / f"good{number}", TREE, manager)
    with pytest.raises(NotADirectoryError, match="file"):
        manager.wait_until_finished()
    for number in range(3):
        assert_same(tree_deserialize_leaves(tmp_path / f"good{number}", None), NESTED)


def test_threads_may_share_jaxs_manager(tmp_path: Path) -> None:
    manager = GlobalAsyncCheckpointManager()

    def save(number: int) -> None:
        tree_serialize_leaves(tmp_path / str(number), TREE, manager)
        manager.wait_until_finished()
        assert shardkeep.exists(tmp_path / str(number))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(save, range(4)))


@pytest.mark.parametrize("make", [GlobalAsyncCheckpointManager, AsyncCheckpointManager])
def test_it_works_inside_a_running_event_loop(make: Callable[[], Any], tmp_path: Path) -> None:
    async def main() -> Any:
        manager = make()
        tree_serialize_leaves(tmp_path, TREE, manager)
        manager.wait_until_finished()
        return tree_deserialize_leaves(tmp_path, None, manager)

    assert_same(asyncio.run(main()), NESTED)


def test_what_is_no_manager_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="AsyncCheckpointManager or JAX's own GlobalAsyncCheckpointManager, not a str"):
        tree_serialize_leaves(tmp_path / "c", TREE, "manager")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("make", [GlobalAsyncCheckpointManager, AsyncCheckpointManager])
def test_pending_saves_of_the_manager_are_waited_for(make: Callable[[], Any], tmp_path: Path) -> None:
    manager, gate = make(), Gate()
    tree_serialize_leaves(tmp_path / "other", TREE, manager, commit_callback=gate)
    tree_serialize_leaves(tmp_path / "c", TREE, manager)
    threading.Timer(0.2, gate.open).start()
    assert_same(tree_deserialize_leaves(tmp_path / "c", None, manager), NESTED)
    assert gate.passed


def test_arrays_go_to_the_mesh_or_to_the_default_device(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones((8, 2))})
    assert tree_deserialize_leaves(tmp_path, None)["w"].sharding == SingleDeviceSharding(jax.devices()[0])
    mesh = mesh_of(8)
    assert tree_deserialize_leaves(tmp_path, mesh)["w"].sharding == NamedSharding(mesh, P())


def test_a_mesh_of_several_axes_wants_rules_or_shardings(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones((8, 2))})
    with pytest.raises(ValueError, match="pass partition_rules= or shardings="):
        tree_deserialize_leaves(tmp_path, mesh_of(2, 4))
    with pytest.raises(ValueError, match="pass partition_rules= or shardings="):
        tree_deserialize_leaves(tmp_path, mesh_of(2, 4), partition_rules=[])


def test_rules_lay_arrays_out(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones((8, 4)), "b": jnp.ones(8)}, prefix="m")
    mesh = mesh_of(2, 4)
    loaded = tree_deserialize_leaves(tmp_path, mesh, partition_rules=[("w$", P("a", "b")), (".*", P("b"))])
    assert loaded["w"].sharding == NamedSharding(mesh, P("a", "b"))
    assert loaded["b"].sharding == NamedSharding(mesh, P("b"))


def test_shardings_lay_arrays_out(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones((8, 4)), "b": jnp.ones(8)})
    mesh = mesh_of(2, 4)
    loaded = tree_deserialize_leaves(tmp_path, mesh, shardings={"w": P("a", "b"), "b": NamedSharding(mesh, P("b"))})
    assert loaded["w"].sharding == NamedSharding(mesh, P("a", "b"))
    assert loaded["b"].sharding == NamedSharding(mesh, P("b"))


def test_without_a_mesh_rules_and_specs_are_refused(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(8)})
    with pytest.raises(ValueError, match="need a mesh"):
        tree_deserialize_leaves(tmp_path, None, partition_rules=[(".*", P("a"))])
    with pytest.raises(ValueError, match="needs a mesh"):
        tree_deserialize_leaves(tmp_path, None, shardings={"w": P("a")})


def test_the_callback_gets_array_and_key_and_its_result_counts(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"b": {"x": jnp.ones(2)}, "a": jnp.zeros(2), "n": 3}, prefix="p")
    seen: list[Any] = []

    def callback(array: Any, key: str) -> Any:
        seen.append((key, type(array).__name__, threading.current_thread() is threading.main_thread()))
        return array + 1

    loaded = tree_deserialize_leaves(tmp_path, None, callback=callback)
    assert seen == [("b.x", "ArrayImpl", True), ("a", "ArrayImpl", True)]
    assert_same(loaded, {"b": {"x": jnp.full(2, 2.0)}, "a": jnp.ones(2), "n": 3})


def test_chunk_size_bounds_the_arrays_in_flight(tmp_path: Path) -> None:
    """With 1, the second array is not read before the first has been handed over."""
    for chunk_size, survives in ((None, True), (2, True), (1, False)):
        path = tmp_path / str(chunk_size)
        tree_serialize_leaves(path, {"a": jnp.ones(4), "b": jnp.ones(4)})

        def damage(array: Any, key: str, path: Path = path) -> Any:
            if key == "a":
                (path / "b" / "0").write_bytes(b"\xff" * 16)
            return array

        if survives:
            assert_same(tree_deserialize_leaves(path, None, callback=damage, chunk_size=chunk_size)["b"], jnp.ones(4))
        else:
            with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'b'.*does not match its digest"):
                tree_deserialize_leaves(path, None, callback=damage, chunk_size=chunk_size)


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_size_below_one_is_refused(size: int, tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, TREE)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        tree_deserialize_leaves(tmp_path, None, chunk_size=size)


def test_nothing_there_is_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nothing there"):
        tree_deserialize_leaves(tmp_path / "absent", None)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        tree_deserialize_leaves(tmp_path, None)


def test_an_index_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tensorstore_index.json").write_text('{"format": "parquet", "arrays": []}')
    with pytest.raises(ValueError, match="format 'parquet'; only 'tensorstore'"):
        tree_deserialize_leaves(tmp_path, None)


def test_plain_values_and_none_leaves_are_kept(tmp_path: Path) -> None:
    tree = {"a": jnp.ones(2), "n": 3, "f": 0.5, "s": "x", "none": None, "empty": {}}
    tree_serialize_leaves(tmp_path, tree)
    assert_same(tree_deserialize_leaves(tmp_path, None), {"a": jnp.ones(2), "n": 3, "f": 0.5, "s": "x"})
    assert_same(shardkeep.load(tmp_path), tree)


def test_colliding_dotted_keys_stay_literal(tmp_path: Path) -> None:
    tree = {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(3)}, "c.d": jnp.ones(1)}
    tree_serialize_leaves(tmp_path, tree)
    loaded = tree_deserialize_leaves(tmp_path, None)
    assert_same(loaded, {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(3)}, "c": {"d": jnp.ones(1)}})
