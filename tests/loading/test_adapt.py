"""The last steps for each leaf: casts, functions, and what JAX cannot hold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from shardkeep.loading.adapt import apply_function, cast_array, check_fits
from shardkeep.loading.moving import stays_numpy
from shardkeep.model.arrays import dtype_from_name
from support import assert_same, mesh_of, pattern

P = PartitionSpec
MESH = mesh_of(8)


class TestCasting:
    @pytest.mark.parametrize("make", [jnp.asarray, np.asarray])
    @pytest.mark.parametrize(
        ("source", "target", "result"),
        [
            ("float32", "bfloat16", "bfloat16"),
            ("float8_e4m3fn", "float32", "float32"),
            ("int32", "int8", "int8"),
            ("int4", "uint8", "uint8"),
            ("uint8", "int4", "int4"),
            ("float32", "int32", "float32"),
            ("int32", "float32", "int32"),
            ("bool", "int8", "bool"),
            ("int8", "bool", "int8"),
            ("complex64", "float32", "complex64"),
        ],
    )
    def test_a_cast_stays_within_one_kind(self, make: Any, source: str, target: str, result: str) -> None:
        array = make(np.array([0, 1, 2]).astype(dtype_from_name(source)))
        cast = cast_array(array, dtype_from_name(target), "w")
        assert type(cast) is type(array)
        assert cast.dtype == dtype_from_name(result)
        assert_same(np.asarray(cast), np.asarray(array).astype(dtype_from_name(result)))
        assert (cast is array) == (source == result)

    @pytest.mark.parametrize("make", [jnp.asarray, np.asarray])
    def test_an_integer_that_does_not_fit_is_refused_with_its_leaf_and_range(self, make: Any) -> None:
        array = make(np.array([-3, 200], np.int32))
        with pytest.raises(ValueError, match=r"leaf 'a\.w' holds -3 to 200, which does not fit int8"):
            cast_array(array, np.dtype("int8"), "a.w")
        with pytest.raises(ValueError, match="does not fit uint32"):
            cast_array(array, np.dtype("uint32"), "w")
        assert cast_array(make(np.zeros((0, 2), np.int32)), np.dtype("uint8"), "w").dtype == np.uint8

    def test_a_type_jax_cannot_hold_makes_a_jax_array_numpy_with_a_word(self, caplog: pytest.LogCaptureFixture) -> None:
        cast = cast_array(jnp.float32([0.1]), np.dtype("float64"), "w")
        assert_same(cast, np.float32([0.1]).astype(np.float64))
        assert "leaf 'w' is a NumPy array because JAX cannot hold float64" in caplog.text
        with jax.enable_x64(True):
            assert isinstance(cast_array(jnp.float32([0.1]), np.dtype("float64"), "w"), jax.Array)

    @given(st.sampled_from(["int2", "uint4", "int8", "uint8", "int32", "uint32", "int64", "uint64"]), st.data())
    def test_a_number_fits_if_the_type_gives_it_back(self, name: str, data: st.DataObject) -> None:
        dtype = dtype_from_name(name)
        low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        number = data.draw(st.sampled_from([low - 1, low, high, high + 1]) | st.integers(-(2**70), 2**70))
        if low <= number <= high:
            check_fits(number, number, dtype, "w")
            assert int(np.array(number).astype(dtype) if abs(number) < 2**31 else np.array(number, dtype)) == number
        else:
            for bounds in ((min(number, 0), max(number, 0)), (number, number)):
                with pytest.raises(ValueError, match=f"leaf 'w' holds .* which does not fit {name}"):
                    check_fits(*bounds, dtype, "w")


class TestStaysNumpy:
    @pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128"])
    def test_64_bits_depend_on_how_jax_is_set_up(self, name: str) -> None:
        dtype = np.dtype(name)
        assert stays_numpy(dtype)
        with jax.enable_x64(True):
            assert not stays_numpy(dtype)
        assert stays_numpy(dtype)

    @pytest.mark.parametrize("name", ["bool", "int8", "uint32", "float16", "bfloat16", "float8_e4m3fn", "uint4"])
    def test_what_jax_holds_comes_back_from_it_unchanged(self, name: str) -> None:
        dtype = dtype_from_name(name)
        assert not stays_numpy(dtype)
        data = pattern(dtype, (16,))
        assert_same(np.asarray(jax.device_put(data)), data)

    @pytest.mark.parametrize("name", ["datetime64[s]", "timedelta64[ns]"])
    def test_times_are_never_for_jax(self, name: str) -> None:
        with jax.enable_x64(True):
            assert stays_numpy(np.dtype(name))


class TestFunctions:
    def test_a_sharding_that_a_function_returns_is_applied(self) -> None:
        where = NamedSharding(MESH, P("a"))
        assert apply_function(lambda array: where, jnp.arange(8)).sharding == where

    @pytest.mark.parametrize("result", [None, 3, "text", np.ones(2)], ids=str)
    def test_anything_else_is_the_result(self, result: Any) -> None:
        assert apply_function(lambda array: result, jnp.arange(8)) is result
