"""From host memory onto devices: each array where it was asked for, those that are alike together."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import shardkeep
from dtypes import SAMPLE
from shardkeep import jaxapi
from shardkeep.loading.load import read_leaves
from shardkeep.loading.matching import Wanted
from shardkeep.loading.request import LoadRequest, Policy
from shardkeep.loading.select import choose, choose_places
from shardkeep.loading.shardings import Place
from shardkeep.model.arrays import dtype_from_name
from shardkeep.model.leaves import PrngKeys
from shardkeep.model.manifest import Tree
from shardkeep.stores.local.store import LocalStore
from support import assert_same, bits, mesh_of, pattern

P = PartitionSpec
MESH = mesh_of(8)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "run"))


def saved(store: LocalStore, tree: Any) -> Tree:
    shardkeep.save(store.url, tree)
    return shardkeep.inspect(store.url).tree()


def read(store: LocalStore, tree: Tree, **asked: Any) -> dict[str, Any]:
    request = LoadRequest(**asked)
    wanted = [w for w in choose(tree, request).wanted if w is not None]
    choose_places(wanted, "", request)
    return dict(zip([w.stored.key for w in wanted], read_leaves(store, tree, wanted, request), strict=True))


class TestReading:
    @pytest.mark.parametrize("in_flight", [None, 1, 2, 100])
    def test_values_come_in_the_order_they_were_wanted(self, in_flight: int | None, store: LocalStore) -> None:
        state = {"c": jnp.arange(3), "b": 1, "a": np.arange(2.0), "e": jnp.zeros((0, 2)), "d": "text"}
        assert_same(read(store, saved(store, state), policy=Policy(in_flight=in_flight)), state)

    def test_rows_for_several_devices_are_read_as_one(self, store: LocalStore) -> None:
        """Whatever the pieces are, the devices get their rows of one array in memory: as many copies as pieces."""
        state = {"w": jax.device_put(pattern(np.float32, (512, 1024)), NamedSharding(mesh_of(2, 4), P("a", "b")))}
        tree = saved(store, state)
        assert len(tree.leaves[0].pieces) == 8
        loaded = read(store, tree, shardings={"w": NamedSharding(MESH, P("a"))})["w"]
        places = [shard.data.unsafe_buffer_pointer() for shard in loaded.addressable_shards]
        assert np.diff(places).tolist() == [512 * 1024 * 4 // 8] * 7
        assert bits(loaded) == bits(state["w"])

    def test_no_leaves_are_no_values(self, store: LocalStore) -> None:
        assert read_leaves(store, saved(store, {"a": jnp.ones(2)}), [], LoadRequest()) == []

    def test_a_leaf_may_be_wanted_more_than_once(self, store: LocalStore) -> None:
        tree = saved(store, {"a": jnp.arange(8.0)})
        half = NamedSharding(MESH, P("a"))
        wanted = [Wanted(tree.leaves[0], as_numpy=True), Wanted(tree.leaves[0], Place(half)), Wanted(tree.leaves[0])]
        host, spread, whole = read_leaves(store, tree, wanted, LoadRequest())
        assert_same(host, np.arange(8.0, dtype=np.float32))
        assert (spread.sharding, whole.sharding) == (half, SingleDeviceSharding(jax.devices()[0]))
        assert bits(spread) == bits(whole) == bits(host)

    @pytest.mark.parametrize("mmap", [True, False])
    def test_numpy_arrays_are_the_callers_own(self, mmap: bool, store: LocalStore) -> None:
        tree = saved(store, {"a": np.zeros(1 << 19, np.float32), "b": np.zeros(3, ">i2")})
        for _ in range(2):
            found = read(store, tree, mmap=mmap)
            for array in found.values():
                assert not array.any()
                array[...] = 1

    def test_each_array_lands_where_its_place_says(self, store: LocalStore) -> None:
        tree = saved(store, {"w": jnp.arange(64.0).reshape(8, 8), "v": jnp.arange(8), "one": jnp.ones(2)})
        shardings = {"w": P(None, "a"), "v": P("a"), "one": SingleDeviceSharding(jax.devices()[5])}
        found = read(store, tree, mesh=MESH, shardings=shardings)
        assert found["w"].sharding == NamedSharding(MESH, P(None, "a"))
        assert found["v"].sharding == NamedSharding(MESH, P("a"))
        assert found["one"].devices() == {jax.devices()[5]}
        for shard in found["w"].addressable_shards:
            assert_same(np.asarray(shard.data), np.arange(64, dtype=np.float32).reshape(8, 8)[shard.index].copy())

    def test_treatment_is_for_arrays_and_has_the_function_of_each(self, store: LocalStore) -> None:
        seen: list[Any] = []

        def treat(value: Any, leaf: Any, function: Any) -> Any:
            seen.append((leaf.key, value.dtype))
            return function(value) + 1 if leaf.key == "w" else function(value)

        tree = saved(store, {"k": jax.random.key(3), "n": 7, "w": jnp.ones(2)})
        found = read(store, tree, shardings={"w": lambda array: array * 5}, policy=Policy(treat=treat))
        assert seen == [("k", jax.random.key(0).dtype), ("w", jnp.float32)]
        assert_same(found, {"k": jax.random.key(3), "n": 7, "w": jnp.full(2, 6.0)})

    def test_foreign_byte_order_comes_back_unless_another_dtype_is_asked_for(self, store: LocalStore) -> None:
        tree = saved(store, {"b": np.arange(3, dtype=">i4")})
        assert_same(read(store, tree)["b"], np.arange(3, dtype=">i4"))
        assert_same(read(store, tree, dtype=np.dtype("int16"))["b"], np.arange(3, dtype=np.int16))
        assert_same(read(store, tree, policy=Policy(all_jax=True))["b"], jnp.arange(3))

    def test_prng_keys_that_jax_does_not_know_are_named(self, store: LocalStore) -> None:
        tree = saved(store, {"rng": {"k": jax.random.key(0)}})
        for impl in ("mine", "rbg"):  # rbg has keys of another length
            unknown = dataclasses.replace(tree.arrays[0], origin=PrngKeys(impl))
            with pytest.raises(
                shardkeep.IntegrityError, match=r"leaf 'rng/k' does not hold PRNG keys that this JAX can use"
            ):
                read_leaves(store, tree, [Wanted(unknown)], LoadRequest())

    def test_arrays_that_stay_numpy_are_told_once_by_name(
        self, store: LocalStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        state = {f"w{i}": np.full(2, 2.0**60) for i in range(7)} | {"x": np.ones(2, np.float32)}
        with caplog.at_level(logging.WARNING, "shardkeep"):
            found = read(store, saved(store, state), policy=Policy(all_jax=True))
        assert {type(found[f"w{i}"]) for i in range(7)} == {np.ndarray}
        (message,) = caplog.messages
        assert message.startswith("7 arrays are loaded as NumPy, unchanged")
        assert "dtype: 'w0', 'w1', 'w2', 'w3', 'w4', …. Set jax_enable_x64" in message

    def test_arrays_saved_as_numpy_stay_so_without_a_word(
        self, store: LocalStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        read(store, saved(store, {"w": np.ones(2)}))
        assert caplog.messages == []


class TestArraysThatAreAlike:
    """Of many arrays of one shape, type and sharding only the first is made by JAX's public functions."""

    SHARDINGS = {
        "default": None,
        "one device": SingleDeviceSharding(jax.devices()[3]),
        "rows": NamedSharding(MESH, P("a")),
        "replicated": NamedSharding(MESH, P()),
        "grid": NamedSharding(mesh_of(2, 4), P("a", "b")),
        "columns, replicated": NamedSharding(mesh_of(2, 4), P(None, "b")),
    }

    @pytest.mark.parametrize("dtype", SAMPLE)
    @pytest.mark.parametrize("shape", [(8, 8), (512, 2048)])
    @pytest.mark.parametrize("how", SHARDINGS)
    def test_each_is_as_the_public_functions_make_it(
        self, dtype: str, shape: tuple[int, int], how: str, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grid = self.SHARDINGS["grid"]
        state = {f"w{i}": jax.device_put(pattern(dtype_from_name(dtype), shape, i), grid) for i in range(3)}
        tree = saved(store, state)
        sharding = self.SHARDINGS[how]
        asked: dict[str, Any] = {} if sharding is None else {"shardings": dict.fromkeys(state, sharding)}
        fast = read(store, tree, **asked)
        monkeypatch.setattr(jaxapi, "batched_device_put", lambda: None)
        public = read(store, tree, **asked)
        for name, array in state.items():
            assert bits(fast[name]) == bits(public[name]) == bits(array)
            for same in ("sharding", "committed", "weak_type", "aval"):
                assert getattr(fast[name], same) == getattr(public[name], same), same
            for one, other in zip(fast[name].addressable_shards, public[name].addressable_shards, strict=True):
                assert (one.device, one.index) == (other.device, other.index)
                assert bits(one.data) == bits(other.data)

    def test_a_jax_whose_inner_function_takes_other_arguments_loads_all_the_same(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = {f"w{i}": jnp.arange(64.0) + i for i in range(3)}
        tree = saved(store, state)
        called: list[int] = []

        def other(only: Any) -> Any:
            called.append(only)

        monkeypatch.setattr(jaxapi, "batched_device_put", lambda: other)
        assert_same(read(store, tree), state)
        assert not called
