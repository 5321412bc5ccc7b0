"""`shardkeep.serialization.sharding_utils`: trees of shardings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardkeep.serialization import AsyncCheckpointManager, tree_serialize_leaves
from shardkeep.serialization.sharding_utils import (
    apply_sharding_tree,
    create_sharding_tree_from_index,
    make_itsharded,
    validate_sharding_tree,
)
from support import Dense, Point, assert_same, mesh_of

P = PartitionSpec
Log = Callable[[], list[str]]


def test_each_kind_of_leaf_places_its_array() -> None:
    mesh = mesh_of(2, 4)
    named = NamedSharding(mesh, P("a", "b"))
    one = SingleDeviceSharding(jax.devices()[3])
    arrays = {name: jnp.arange(32.0).reshape(8, 4) for name in ("named", "one", "spec", "function", "result", "none")}
    placed = apply_sharding_tree(
        arrays,
        {
            "named": named,
            "one": one,
            "spec": P("b"),
            "function": lambda x: NamedSharding(mesh, P(None, "b")),
            "result": lambda x: x * 2,
            "none": None,
        },
        mesh,
    )
    assert placed["named"].sharding == named
    assert placed["one"].sharding == one
    assert placed["spec"].sharding == NamedSharding(mesh, P("b"))
    assert placed["function"].sharding == NamedSharding(mesh, P(None, "b"))
    assert_same(placed["result"], arrays["result"] * 2)
    assert placed["none"].sharding == NamedSharding(mesh, P())
    for name in ("named", "one", "spec", "function", "none"):
        assert_same(placed[name], arrays[name])


def test_none_is_replicated_on_the_mesh_or_on_one_device() -> None:
    mesh = mesh_of(8)
    array = jax.device_put(jnp.arange(8), NamedSharding(mesh, P("a")))
    assert apply_sharding_tree({"a": array}, {"a": None}, mesh)["a"].sharding == NamedSharding(mesh, P())
    alone = apply_sharding_tree({"a": array}, {"a": None})["a"]
    assert len(alone.sharding.device_set) == 1
    assert_same(alone, jnp.arange(8))


def test_a_spec_without_a_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leaf 'a'.*needs a mesh"):
        apply_sharding_tree({"a": jnp.ones(8)}, {"a": P("a")})


def test_no_tree_leaves_everything_as_it_is() -> None:
    arrays = {"a": jnp.ones(2)}
    assert apply_sharding_tree(arrays, None, mesh_of(8)) is arrays


@pytest.mark.parametrize(
    ("tree", "difference"),
    [
        ({"a": None}, "missing b"),
        ({"a": None, "b": None, "c": None}, "not expected c"),
        ({"a": None, "b": {"x": None}}, "missing b; not expected b.x"),
    ],
)
def test_a_structure_that_differs_is_one_warning_and_changes_nothing(tree: Any, difference: str, logged: Log) -> None:
    arrays = {"a": jnp.ones(2), "b": jnp.ones(2)}
    assert apply_sharding_tree(arrays, tree, mesh_of(8)) is arrays
    (message,) = logged()
    assert difference in message


def test_leaves_that_are_no_arrays_stay(logged: Log) -> None:
    mesh = mesh_of(8)
    arrays = {"w": jnp.ones(8), "n": 3, "s": "x", "none": None, "f": 0.5}
    placed = apply_sharding_tree(arrays, {"w": P("a"), "n": P("a"), "s": None, "none": None, "f": None}, mesh)
    assert placed["w"].sharding == NamedSharding(mesh, P("a"))
    assert {k: v for k, v in placed.items() if k != "w"} == {"n": 3, "s": "x", "none": None, "f": 0.5}
    assert logged() == []


def test_numpy_arrays_are_placed_too() -> None:
    mesh = mesh_of(8)
    placed = apply_sharding_tree([np.arange(8, dtype=np.int32)], [P("a")], mesh)
    assert placed[0].sharding == NamedSharding(mesh, P("a"))


FORMS = {
    "nested": {"l": {"0": P("a"), "1": P()}, "p": {"x": P("a"), "y": None}},
    "flat": {"l.0": P("a"), "l.1": P(), "p.x": P("a"), "p.y": None},
    "sequences": {"l": [P("a"), P()], "p": Point(P("a"), None)},
    "tuples": {"l": (P("a"), P()), "p.x": P("a"), "p.y": None},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flat", [True, False])
def test_flat_nested_list_and_namedtuple_forms_all_fit(form: str, flat: bool, logged: Log) -> None:
    mesh = mesh_of(8)
    x = jnp.arange(8)
    arrays: Any = {"l.0": x, "l.1": x, "p.x": x, "p.y": x} if flat else {"l": [x, x], "p": Point(x, x)}
    placed = apply_sharding_tree(arrays, FORMS[form], mesh)
    assert logged() == []
    assert jax.tree.structure(placed) == jax.tree.structure(arrays)
    specs = [array.sharding.spec for array in jax.tree.leaves(placed)]
    assert specs == [P("a"), P(), P("a"), P()]


def test_a_bare_array_and_a_dataclass_fit() -> None:
    mesh = mesh_of(8)
    assert apply_sharding_tree(jnp.arange(8), P("a"), mesh).sharding == NamedSharding(mesh, P("a"))
    dense = apply_sharding_tree(Dense(jnp.ones(8), jnp.ones(8)), {"kernel": P("a"), "bias": P()}, mesh)
    assert isinstance(dense, Dense)
    assert dense.kernel.sharding == NamedSharding(mesh, P("a"))


def test_a_partial_is_a_function_not_a_container() -> None:
    """`jax.tree_util.Partial` is both callable and a PyTree node."""
    double = jax.tree_util.Partial(lambda factor, x: x * factor, 2)
    assert_same(apply_sharding_tree({"a": jnp.ones(2)}, {"a": double})["a"], jnp.full(2, 2.0))


def test_specs_are_cut_to_the_arrays_rank() -> None:
    mesh = mesh_of(2, 4)
    placed = apply_sharding_tree({"v": jnp.ones(8), "s": jnp.float32(1)}, {"v": P("a", "b"), "s": P("a")}, mesh)
    assert placed["v"].sharding == NamedSharding(mesh, P("a"))
    assert placed["s"].sharding == NamedSharding(mesh, P())


@pytest.mark.parametrize(
    ("spec", "match"),
    [(P("z"), r"leaf 'w' of shape \(6,\).*axis 'z'.*'a': 2"), (P("b"), r"leaf 'w' of shape \(6,\).*6.*into 4")],
)
def test_a_spec_that_does_not_fit_is_named_with_key_shape_and_mesh(spec: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        apply_sharding_tree({"w": jnp.ones(6)}, {"w": spec}, mesh_of(2, 4))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tree_serialize_leaves(tmp_path / "c", {"layers": [{"w": jnp.ones((8, 4))}], "b": jnp.ones(8), "s": jnp.int32(1)})
    return tmp_path / "c"


def test_without_a_default_arrays_are_replicated(saved: Path) -> None:
    """On the mesh, or over all devices."""
    mesh = mesh_of(2, 4)
    tree = create_sharding_tree_from_index(saved, mesh)
    replicated = NamedSharding(mesh, P())
    assert tree == {"layers": {"0": {"w": replicated}}, "b": replicated, "s": replicated}
    everywhere = create_sharding_tree_from_index(saved)["b"]
    assert everywhere.device_set == set(jax.devices())
    assert everywhere.is_fully_replicated


def test_a_default_may_be_a_sharding_a_spec_or_a_function(saved: Path) -> None:
    mesh = mesh_of(2, 4)
    one = SingleDeviceSharding(jax.devices()[1])
    assert create_sharding_tree_from_index(saved, default_sharding=one)["b"] is one
    by_spec = create_sharding_tree_from_index(saved, mesh, default_sharding=P("a", "b"))
    assert by_spec["layers"]["0"]["w"] == NamedSharding(mesh, P("a", "b"))
    assert by_spec["b"] == NamedSharding(mesh, P("a"))
    assert by_spec["s"] == NamedSharding(mesh, P())
    seen: list[Any] = []

    def choose(info: dict[str, Any]) -> Any:
        seen.append(info)
        return one

    assert create_sharding_tree_from_index(saved, default_sharding=choose)["s"] is one
    assert seen == [
        {"path": "layers/0/w", "shape": (8, 4), "dtype": "float32"},
        {"path": "b", "shape": (8,), "dtype": "float32"},
        {"path": "s", "shape": (), "dtype": "int32"},
    ]


def test_a_spec_as_default_needs_a_mesh(saved: Path) -> None:
    with pytest.raises(ValueError, match="needs a mesh"):
        create_sharding_tree_from_index(saved, default_sharding=P("a"))
    with pytest.raises(ValueError, match="must be a Sharding, a PartitionSpec, a function or None"):
        create_sharding_tree_from_index(saved, default_sharding="a")  # type: ignore[arg-type]


def test_the_tree_of_a_prefix_has_its_shape(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(8)}, prefix="model")
    assert list(create_sharding_tree_from_index(tmp_path)) == ["w"]
    tree_serialize_leaves(tmp_path, {"mu": jnp.ones(8)}, prefix="opt.state")
    assert list(create_sharding_tree_from_index(tmp_path, prefix="model")) == ["w"]
    assert list(create_sharding_tree_from_index(tmp_path, prefix="opt/state")) == ["mu"]
    with pytest.raises(ValueError, match=r"'model', 'opt\.state'"):
        create_sharding_tree_from_index(tmp_path)
    with pytest.raises(ValueError, match="no tree with prefix 'x'; it has 'model'"):
        create_sharding_tree_from_index(tmp_path, prefix="x")


def test_no_checkpoint_is_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        create_sharding_tree_from_index(tmp_path / "absent")


def test_prng_keys_are_described_by_their_own_shape(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    tree_serialize_leaves(tmp_path, {"k": keys})
    mesh = mesh_of(8)
    seen: list[Any] = []
    create_sharding_tree_from_index(tmp_path, default_sharding=lambda info: seen.append(info["shape"]))
    assert seen == [(8,)]
    tree = create_sharding_tree_from_index(tmp_path, mesh, default_sharding=P("a", "a"))
    loaded, _ = AsyncCheckpointManager().load(tmp_path, mesh, shardings=tree)
    assert loaded["k"].sharding.spec == P("a")
    assert_same(loaded["k"], keys)


@pytest.mark.parametrize("default", [None, P("a", "b"), lambda info: SingleDeviceSharding(jax.devices()[2])])
def test_what_it_returns_can_be_passed_to_load(saved: Path, default: Any, logged: Log) -> None:
    mesh = mesh_of(2, 4)
    tree = create_sharding_tree_from_index(saved, mesh, default_sharding=default)
    loaded, _ = AsyncCheckpointManager().load(saved, mesh, shardings=tree)
    jax.tree.map(lambda array, sharding: _assert_on(array, sharding), loaded, tree)
    assert logged() == []


def _assert_on(array: Any, sharding: Any) -> None:
    assert array.sharding == sharding


def test_addressable_arrays_become_replicated() -> None:
    for mesh in (mesh_of(8), mesh_of(2, 2)):
        tree = {"a": jnp.arange(8), "n": np.arange(8), "i": 3, "none": None, "l": [jnp.ones(())]}
        result = make_itsharded(tree, mesh)
        assert result["a"].sharding == result["l"][0].sharding == NamedSharding(mesh, P())
        assert_same(result["a"], jnp.arange(8))
        assert result["n"] is tree["n"]
        assert (result["i"], result["none"]) == (3, None)


def test_sharded_arrays_become_replicated_too() -> None:
    mesh = mesh_of(8)
    array = jax.device_put(jnp.arange(8), NamedSharding(mesh, P("a")))
    assert make_itsharded(Point(array, 1), mesh).x.sharding == NamedSharding(mesh, P())


@pytest.mark.parametrize(
    ("tree", "expected", "same"),
    [
        ({"a": None, "b": P()}, {"a": 1, "b": 2}, True),
        ({"a": None}, {"a": None}, True),
        ({"a": None}, {"a": 1, "b": None}, False),
        ({"a": P()}, {}, False),
        ({"l": [P(), P()]}, {"l.0": 1, "l": {"1": 2}}, True),
        ({"p": Point(None, None)}, {"p": {"x": 1, "y": 2}}, True),
        (P(), jnp.ones(2), True),
        ({}, {}, True),
        ({"a": {"b": P()}}, {"a": 1}, False),
    ],
)
def test_structures_are_compared_by_their_leaves(tree: Any, expected: Any, same: bool, logged: Log) -> None:
    """Dotted paths on both sides, and None is a leaf; what differs is warned about."""
    assert validate_sharding_tree(tree, expected) is same
    assert bool(logged()) is not same


def test_what_cannot_be_compared_is_a_warning_not_an_error(logged: Log) -> None:
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    assert validate_sharding_tree(cyclic, {"a": 1}) is False
    assert validate_sharding_tree({"a": 1}, {frozenset([1]): 1}) is False
    assert len(logged()) == 2
