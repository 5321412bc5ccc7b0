"""What describes a state: functions, arrays and shapes; new and loaded states have equal shardings."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardkeep import Run
from shardkeep.errors import ShardingError
from shardkeep.runs.templates import read_template

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
SPLIT = NamedSharding(MESH, P("data", "model"))
ALL = NamedSharding(MESH, P())
ONE = SingleDeviceSharding(jax.devices()[0])


def new_state() -> dict[str, Any]:
    key = jax.random.key(0)
    return {"w": jax.random.normal(key, (8, 16)), "b": jnp.zeros(16), "key": key, "step": 0, "name": "small"}


def shardings_of(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf.sharding for path, leaf in leaves if isinstance(leaf, jax.Array)}


def fresh_and_loaded(tmp_path: Path, template: Any, **arguments: Any) -> tuple[Any, Any]:
    """The state of a new run, and of the same run after it was saved."""
    with Run(tmp_path / "run") as run:
        fresh, step = run.resume(template, **arguments)
        assert step == 0
        run.save(1, fresh)
    with Run(tmp_path / "run") as run:
        loaded, step = run.resume(template, **arguments)
        assert step == 1
    return fresh, loaded


def check_equal(fresh: Any, loaded: Any) -> None:
    assert shardings_of(fresh) == shardings_of(loaded)
    assert jax.tree_util.tree_structure(fresh) == jax.tree_util.tree_structure(loaded)
    for a, b in zip(jax.tree_util.tree_leaves(fresh), jax.tree_util.tree_leaves(loaded), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array):
            assert (a.dtype, getattr(a, "weak_type", None)) == (b.dtype, getattr(b, "weak_type", None))
            data = jax.random.key_data if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else np.asarray
            assert np.asarray(data(a)).tobytes() == np.asarray(data(b)).tobytes()


JITTED = jax.jit(lambda: {"w": jnp.ones((8, 16)), "b": jnp.zeros(16)}, out_shardings={"w": SPLIT, "b": ALL})

WAYS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "function with rules": (
        new_state,
        {"mesh": MESH, "partition_rules": [("w", P("data", "model")), (".*", P())]},
        {"['w']": SPLIT, "['b']": ALL, "['key']": ALL},
    ),
    "function with shardings": (
        new_state,
        {"shardings": {"w": SPLIT}},
        {"['w']": SPLIT, "['b']": ALL, "['key']": ALL},
    ),
    "function with specs": (
        new_state,
        {"shardings": {"w": P(None, "model"), "b": P("model"), "key": P()}, "mesh": MESH},
        {"['w']": NamedSharding(MESH, P(None, "model")), "['b']": NamedSharding(MESH, P("model")), "['key']": ALL},
    ),
    "function on one device": (new_state, {"shardings": ONE}, {"['w']": ONE, "['b']": ONE, "['key']": ONE}),
    "jitted function": (JITTED, {}, {"['w']": SPLIT, "['b']": ALL}),
    "jitted function that says some": (
        jax.jit(lambda: {"w": jnp.ones((8, 16)), "b": jnp.zeros(16)}, out_shardings={"w": SPLIT, "b": None}),
        {},
        {"['w']": SPLIT, "['b']": ALL},
    ),
    "jitted function with weak types": (
        jax.jit(
            lambda: {"w": jnp.full((8, 16), 0.5), "rate": 0.1, "n": 0},
            out_shardings={"w": SPLIT, "rate": ALL, "n": ALL},
        ),
        {},
        {"['w']": SPLIT, "['rate']": ALL, "['n']": ALL},
    ),
    "arrays with weak types": (
        {"a": jax.device_put(jnp.asarray(0.5), ALL), "b": jnp.asarray(2), "key": jax.random.key(0)},
        {},
        {"['a']": ALL, "['b']": ONE, "['key']": ONE},
    ),
    "arrays": (
        {"w": jax.device_put(np.ones((8, 16), np.float32), SPLIT), "n": 3},
        {},
        {"['w']": SPLIT},
    ),
    "arrays that are moved": ({"w": jnp.ones((8, 16)), "n": 3}, {"shardings": SPLIT}, {"['w']": SPLIT}),
    "arrays wherever JAX puts them": ({"w": jnp.ones((8, 16))}, {}, {"['w']": ONE}),
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_new_and_loaded_states_have_equal_shardings(tmp_path: Path, way: str) -> None:
    template, arguments, expected = WAYS[way]
    fresh, loaded = fresh_and_loaded(tmp_path, template, **arguments)
    assert shardings_of(fresh) == expected
    check_equal(fresh, loaded)


def test_a_dtype_is_given_to_both(tmp_path: Path) -> None:
    fresh, loaded = fresh_and_loaded(tmp_path, new_state, shardings=ONE, dtype="bf16")
    assert fresh["w"].dtype == fresh["b"].dtype == jnp.bfloat16
    check_equal(fresh, loaded)


def test_leaves_that_are_no_data_are_kept_from_the_template(tmp_path: Path) -> None:
    """An equinox module has functions among its leaves."""

    def make() -> eqx.nn.MLP:
        return eqx.nn.MLP(4, 4, 8, 1, activation=jax.nn.relu, key=jax.random.key(1))

    with Run(tmp_path / "run") as run:
        fresh, _ = run.resume(make, shardings=ONE)
        assert fresh.activation is jax.nn.relu
        run.save(1, eqx.filter(fresh, eqx.is_array))
    for template in (make, make()):
        with Run(tmp_path / "run") as run:
            loaded, step = run.resume(template, shardings=ONE)
            assert step == 1
            assert loaded.activation is jax.nn.relu
            assert np.asarray(loaded(jnp.ones(4))).tobytes() == np.asarray(fresh(jnp.ones(4))).tobytes()


def test_what_is_not_included_keeps_the_value_that_the_function_makes(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        state, _ = run.resume(new_state, shardings=ONE)
        run.save(1, {**state, "w": state["w"] + 1, "b": state["b"] + 1})
    with Run(tmp_path / "run") as run:
        state, _ = run.resume(new_state, shardings=ONE, include="^w$")
    assert float(state["b"].sum()) == 0
    assert np.allclose(state["w"], new_state()["w"] + 1)


@pytest.mark.parametrize("template", [new_state, jax.eval_shape(lambda: {"w": jnp.ones(3)})])
def test_several_devices_and_no_sharding_is_an_error_that_says_how(tmp_path: Path, template: Any) -> None:
    with Run(tmp_path / "run") as run:
        with pytest.raises(
            ShardingError, match=r"there are 8 devices, but no sharding .* Pass shardings= .*mesh= with"
        ):
            run.resume(template)
        with pytest.raises(ShardingError, match="mesh= alone does not say how arrays are split"):
            run.resume(template, mesh=MESH)


def test_a_mesh_of_one_device_is_enough(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    fresh, loaded = fresh_and_loaded(tmp_path, new_state, mesh=mesh)
    check_equal(fresh, loaded)


def test_a_mesh_that_is_set_is_used_for_specs(tmp_path: Path) -> None:
    with jax.set_mesh(MESH):
        fresh, loaded = fresh_and_loaded(tmp_path, new_state, shardings={"w": P("data"), "b": P(), "key": P()})
    assert fresh["w"].sharding.spec == P("data")
    check_equal(fresh, loaded)


def test_a_none_in_shardings_where_the_state_has_none_is_no_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_and_loaded(tmp_path, lambda: {"w": jnp.ones(4), "ema": None}, shardings={"w": ALL, "ema": None})
    assert "match no array" not in caplog.text


def test_integers_that_jax_would_cut_to_32_bits_are_an_error_and_smaller_ones_pass_without_a_warning() -> None:
    with pytest.raises(ValueError, match="leaf 'data/seen' holds 1000000000000 to 1000000000000, which does not fit"):
        read_template(lambda: {"data": {"seen": np.array([10**12])}}, {"shardings": ONE})
    template = read_template(lambda: {"seen": np.array([10**9]), "mean": np.zeros(2)}, {"shardings": ONE})
    assert template.make is not None
    made = template.make()
    assert (int(made["seen"][0]), made["mean"].dtype) == (10**9, jnp.float32)


def test_functions_in_shardings_are_refused() -> None:
    with pytest.raises(ShardingError, match="resume takes no functions in shardings"):
        read_template(new_state, {"shardings": {"w": lambda x: x}})


def test_a_function_that_needs_values_of_arrays_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="cannot be traced by JAX.*Pass the state itself"):
        read_template(lambda: {"w": jnp.zeros(int(jnp.ones(3).sum()))}, {"shardings": ONE})
