"""Arrays gathered, cast and moved: what changes, what stays, and what is given back when it fails."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import shardkeep
from shardkeep.eformer import gathering
from shardkeep.eformer.gathering import (
    apply_gather_functions,
    broadcast_tensor,
    cast_floats,
    chunk_tensor_by_memory,
    cpu_device,
    estimate_array_nbytes,
    offload,
    parse_float_dtype,
    reshard,
    to_host,
)
from shardkeep.runtime.budget import Claim
from shardkeep.runtime.scopes import Scope
from support import Point, assert_same, bits, mesh_of

P = PartitionSpec
MESH = mesh_of(8)


def spread(dtype: Any = jnp.float32) -> jax.Array:
    return jax.device_put(jnp.arange(16).reshape(8, 2).astype(dtype), NamedSharding(MESH, P("a")))


class TestToHost:
    @pytest.mark.parametrize("mesh", [None, MESH])
    @pytest.mark.parametrize("cpu_offload", [False, True])
    def test_prng_keys_are_moved_and_not_cast(self, mesh: Any, cpu_offload: bool) -> None:
        keys = jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(MESH, P("a")))
        moved = to_host(keys, "bf16", mesh, cpu_offload)
        assert moved.is_fully_replicated
        assert_same(jax.random.key_data(moved), jax.random.key_data(keys))

    @pytest.mark.parametrize("value", ["text", 3, 2.5, None, [1.0], {"a": np.ones(2)}], ids=str)
    def test_what_is_no_array_is_given_back(self, value: Any) -> None:
        assert to_host(value, "bf16", MESH, True) is value

    def test_a_numpy_scalar_becomes_a_0d_array(self) -> None:
        assert_same(to_host(np.float32(2.5), None, None, True), jnp.float32(2.5))
        assert_same(to_host(np.int16(3), "bf16", MESH, False), jnp.int16(3))

    def test_without_a_mesh_it_is_on_one_device(self) -> None:
        assert len(to_host(np.ones(2, np.float32), None, None, False).devices()) == 1
        assert to_host(spread(), None, None, True).sharding == SingleDeviceSharding(cpu_device())

    def test_without_a_mesh_a_spread_array_is_gathered_too(self) -> None:
        assert len(to_host(spread(), None, None, False).devices()) == 1


class TestOffload:
    @pytest.fixture(autouse=True)
    def _small_budget(self) -> Any:
        shardkeep.set_memory_budget(100)
        yield
        shardkeep.set_memory_budget(None)

    def all_is_free(self) -> bool:
        """Whether two saves that fill the budget together need not wait."""

        def fill() -> None:
            scope = Scope("a test")
            claims = [Claim(gathering.budget, scope), Claim(gathering.budget, scope)]
            claims[0].take(1, "one")
            claims[1].take(99, "another")
            for claim in claims:
                claim.release()

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        thread.join(5)
        return not thread.is_alive()

    def test_it_waits_for_room_and_leaves_it_as_it_was(self, caplog: pytest.LogCaptureFixture) -> None:
        other = Claim(gathering.budget, Scope("a test"))
        other.take(90, "another save")
        moved: list[Any] = []
        thread = threading.Thread(target=lambda: moved.append(offload(spread(), "enc.w", MESH, True)))
        thread.start()
        thread.join(0.2)
        assert moved == []
        assert "moving enc.w to the host is waiting for memory: earlier saves hold 90 of" in caplog.text
        other.release()
        thread.join(20)
        assert_same(moved[0], jnp.asarray(np.asarray(spread())))
        assert self.all_is_free()

    def test_a_gather_on_devices_needs_no_room_on_the_host(self) -> None:
        other = Claim(gathering.budget, Scope("a test"))
        other.take(100, "another save")
        assert offload(spread(), "w", MESH, False).sharding == NamedSharding(MESH, P())
        other.release()

    def test_room_is_given_back_when_the_array_cannot_be_moved(self) -> None:
        gone = spread()
        gone.delete()
        with pytest.raises(RuntimeError, match="deleted"):
            offload(gone, "w", MESH, True)
        assert self.all_is_free()


class TestCastFloats:
    @pytest.mark.parametrize(
        "value",
        [
            jnp.arange(3),
            np.ones(2, bool),
            jnp.ones(2, jnp.complex64),
            np.ones(2, "M8[s]"),
            jax.random.key(0),
            jnp.ones(2, jnp.bfloat16),
            2.5,
            np.float32(2.5),
            "text",
        ],
        ids=repr,
    )
    def test_what_is_no_float_array_of_another_type_is_the_same_object(self, value: Any) -> None:
        assert cast_floats(value, "bf16") is value

    @pytest.mark.parametrize("make", [jnp.asarray, np.asarray])
    @pytest.mark.parametrize("dtype", ["bf16", jnp.float16, np.dtype("float8_e4m3fn"), "float32"])
    def test_a_float_array_keeps_its_kind_of_array(self, make: Any, dtype: Any) -> None:
        array = make(np.array([0.5, -2], np.float16))
        cast = cast_floats(array, dtype)
        assert type(cast) is type(array)
        assert_same(np.asarray(cast), np.asarray(array).astype(parse_float_dtype(dtype)))
        assert cast_floats(array, None) is array

    def test_a_type_jax_cannot_hold_makes_numpy(self) -> None:
        assert_same(cast_floats(jnp.float32([0.1]), "fp64"), np.float32([0.1]).astype(np.float64))

    @pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", np.int32, "datetime64[s]"])
    def test_a_dtype_that_is_no_float_is_refused(self, dtype: Any) -> None:
        for cast in (parse_float_dtype, lambda d: cast_floats(jnp.ones(2), d)):
            with pytest.raises(ValueError, match=r"floats cannot be cast to .*; pass a float dtype"):
                cast(dtype)


class TestGatherFunctions:
    def test_a_function_sees_its_own_leaf_values_too(self) -> None:
        state = {"a": {"b.c": jnp.ones(2), "n": 3}, "p": Point(1, [2])}
        functions = {"a": {"b.c": lambda x: x * 2, "n": lambda x: x + 1}, "p.y.0": str}
        result = apply_gather_functions(state, functions, True, False)
        assert_same(result, {"a": {"b.c": jnp.full(2, 2.0), "n": 4}, "p": Point(1, ["2"])})

    def test_prng_keys_and_values_stay_where_everything_is_gathered(self) -> None:
        state = {"k": jax.random.key(0), "n": 3, "h": np.ones(2), "w": spread()}
        result = apply_gather_functions(state, True, False, False)
        assert (result["k"], result["n"], result["h"]) == (state["k"], 3, state["h"])
        assert_same(result["w"], np.asarray(state["w"]))

    def test_no_functions_at_all_miss_every_key(self) -> None:
        assert apply_gather_functions({"a": 1}, {}, True, False) == {"a": 1}
        with pytest.raises(KeyError, match="no gather function for 'a'; gather_fns has none"):
            apply_gather_functions({"a": 1}, {}, False, False)

    def test_what_a_function_raises_is_raised(self) -> None:
        with pytest.raises(ZeroDivisionError, match="division"):
            apply_gather_functions({"a": 1}, {"a": lambda x: x // 0}, True, False)


class TestReshard:
    def test_no_sharding_is_the_default_device(self) -> None:
        assert reshard(np.ones(2, np.float32), None).devices() == {jax.devices()[0]}

    def test_what_jax_would_truncate_is_the_same_object(self, caplog: pytest.LogCaptureFixture) -> None:
        wide = np.array([2**40])
        assert reshard(wide, NamedSharding(MESH, P())) is wide
        assert "a int64 array is kept as a NumPy array: set jax_enable_x64" in caplog.text


class TestPieces:
    @given(st.integers(0, 9), st.integers(0, 3), st.integers(1, 60), st.sampled_from(["int8", "float32", "int4"]))
    def test_pieces_in_a_row_are_the_array_and_none_could_take_another_row(
        self, rows: int, columns: int, limit: int, dtype: str
    ) -> None:
        array = np.arange(rows * columns).reshape(rows, columns).astype(jnp.dtype(dtype))
        pieces = chunk_tensor_by_memory(array, limit)
        assert_same(np.concatenate(pieces), array)
        row = max(columns * array.dtype.itemsize, 1)
        for piece in pieces[:-1]:
            assert (len(piece) + 1) * row > limit
            assert piece.nbytes <= limit or len(piece) == 1

    @pytest.mark.parametrize(
        ("value", "size"),
        [
            (jnp.ones((2, 3)), 24),
            (np.ones(5, jnp.int4), 5),
            (jax.ShapeDtypeStruct((2**40, 2**20), "float64"), 2**63),
            (jax.ShapeDtypeStruct((0, 7), "float64"), 0),
            (np.float16(1), 2),
            (True, 1),
            (1.5, 8),
        ],
        ids=str,
    )
    def test_a_size_is_told_without_making_anything(self, value: Any, size: int) -> None:
        assert estimate_array_nbytes(value) == size

    def test_the_size_of_prng_keys_is_that_of_their_data(self) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        assert estimate_array_nbytes(keys) == jax.random.key_data(keys).nbytes

    @pytest.mark.parametrize("limit", [1, 7, 64, 10**9])
    @pytest.mark.parametrize("shape", [(), (0, 3), (5,), (8, 2)])
    def test_a_broadcast_is_the_same_whatever_the_limit(self, shape: tuple[int, ...], limit: int) -> None:
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        sent = broadcast_tensor(array, limit)
        assert bits(sent) == bits(array)
        assert sent.sharding.device_set == set(jax.devices())
        assert sent.is_fully_replicated
