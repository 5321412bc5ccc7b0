"""Arrays that move to another sharding keep every bit, of every dtype that JAX has."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.layout import Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import shardkeep
from shardkeep.eformer.gathering import broadcast_tensor, chunk_tensor_by_memory, reshard, to_host
from shardkeep.jaxapi import can_lay_out_narrow
from shardkeep.loading import moving
from shardkeep.loading.moving import move, take_rows, with_layout
from shardkeep.model.arrays import NARROW
from shardkeep.serialization.sharding_utils import apply_sharding_tree, make_itsharded
from shardkeep.serialization.utils import read_process_array
from support import all_bits, bits, every_dtype, mesh_of

P = PartitionSpec
MESH = mesh_of(2, 4)
TURNED = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("a", "b"))  # other devices hold other parts
SHARDINGS = {
    "replicated": NamedSharding(MESH, P()),
    "rows": NamedSharding(MESH, P("b")),
    "transposed": NamedSharding(MESH, P("b", "a")),
    "turned": NamedSharding(TURNED, P("a", "b")),
    "turned, replicated": NamedSharding(TURNED, P()),
    "fewer": NamedSharding(mesh_of(2), P("a")),
    "one": SingleDeviceSharding(jax.devices()[3]),
}
every = pytest.mark.parametrize("dtype", every_dtype())


def parts(array: Any) -> bytes:
    """What an array holds, put together from the shards of each device: `np.asarray` may ask only some of them."""
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = np.asarray(shard.data)
    return bits(_counting(whole))


def _counting(array: np.ndarray) -> np.ndarray:
    """Without the spare bits of small integers, which NumPy sets by sign and JAX clears."""
    return array.astype(np.int8) if array.dtype.name in ("int1", "int2", "int4") else array


def spread(values: np.ndarray) -> jax.Array:
    return jax.device_put(values, NamedSharding(MESH, P("a", "b")))


@every
@pytest.mark.parametrize("to", SHARDINGS)
def test_every_bit_survives_a_move(dtype: str, to: str) -> None:
    values = all_bits(dtype)
    for array in (values, jax.device_put(values), spread(values)):
        moved = move(array, SHARDINGS[to])
        assert moved.dtype == values.dtype
        assert moved.sharding == SHARDINGS[to]
        assert parts(moved) == bits(_counting(values))


@every
def test_on_devices_too_every_bit_survives(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators: as unsigned integers where there are such, never as floats."""
    monkeypatch.setattr(moving, "_is_on_cpu", lambda sharding: False)
    values = all_bits(dtype)
    for to in ("replicated", "turned", "turned, replicated"):
        moved = move(spread(values), SHARDINGS[to])
        assert moved.sharding == SHARDINGS[to]
        assert parts(moved) == bits(_counting(values))


@every
def test_every_bit_survives_the_documented_functions(dtype: str) -> None:
    values = all_bits(dtype)
    expected = bits(_counting(values))
    array, one = spread(values), jax.device_put(values)
    replicated, turned = NamedSharding(TURNED, P()), NamedSharding(TURNED, P("b"))

    class Manager:
        def get_tensor(self, key: str) -> Any:
            return array

    found = {
        "to_host": to_host(array, None, TURNED, False),
        "to_host offloaded": to_host(array, None, TURNED, True),
        "to_host without a mesh": to_host(array, None, None, False),
        "reshard": reshard(array, turned),
        "reshard from one device": reshard(one, turned),
        "broadcast": broadcast_tensor(one, 30),
        "broadcast of one that is spread": broadcast_tensor(array, 30, turned),
        "make_itsharded": make_itsharded({"x": array}, TURNED)["x"],
        "apply_sharding_tree": apply_sharding_tree({"x": array}, {"x": turned})["x"],
        "apply_sharding_tree by a function": apply_sharding_tree({"x": array}, {"x": lambda _: turned})["x"],
        "read_process_array": read_process_array("x", {"x": replicated}, False, Manager())[1],
        "read_process_array by a function": read_process_array("x", {"x": lambda _: turned}, False, Manager())[1],
    }
    assert [name for name, moved in found.items() if parts(moved) != expected] == []


@every
def test_every_bit_survives_a_save_and_a_load_onto_another_layout(dtype: str, tmp_path: Path) -> None:
    values = all_bits(dtype)
    shardkeep.save(tmp_path / "c", {"x": spread(values), "one": jax.device_put(values), "host": values})
    turned = NamedSharding(TURNED, P("b"))
    for shardings in (None, turned, lambda array: turned):
        loaded = shardkeep.load(tmp_path / "c", shardings=shardings)
        assert all(isinstance(loaded[name], jax.Array) for name in ("x", "one"))
        assert [name for name in ("x", "one") if parts(loaded[name]) != bits(_counting(values))] == []
    assert bits(shardkeep.load(tmp_path / "c")["host"]) == bits(values)


@every
@pytest.mark.parametrize("how", ["one device", "spread", "NumPy"])
def test_rows_keep_every_bit(dtype: str, how: str) -> None:
    values = all_bits(dtype)
    array: Any = {"one device": jax.device_put, "spread": spread, "NumPy": np.asarray}[how](values)
    taken = take_rows(array, 3, 12)
    assert isinstance(taken, jax.Array) == (how != "NumPy")
    assert bits(_counting(np.asarray(taken))) == bits(_counting(values[3:12]))
    pieces = [np.asarray(piece) for piece in chunk_tensor_by_memory(array, 40 * values.itemsize)]
    assert bits(_counting(np.concatenate(pieces))) == bits(_counting(values))


def test_wide_types_move_bit_for_bit_with_and_without_x64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "_is_on_cpu", lambda sharding: False)
    raw = np.random.default_rng(0).integers(0, 1 << 62, 256, dtype=np.int64)
    raw[:64] = 0x7FF0000000000001 + np.arange(64)
    with jax.enable_x64(True):
        for dtype in ("float64", "int64", "uint64", "complex128"):
            values = np.resize(raw, 512).view(dtype)[:256].reshape(16, 16)
            array = spread(values)
            assert array.dtype == dtype
            assert parts(move(array, SHARDINGS["turned"])) == bits(values)
        array = spread(raw.view("float64").reshape(16, 16))
    for to in ("one", "turned"):
        assert parts(move(array, SHARDINGS[to])) == bits(raw)
    assert bits(take_rows(array, 2, 4)) == bits(raw[32:64])


def test_prng_keys_move() -> None:
    keys = jax.random.split(jax.random.key(3), 16)
    moved = move(keys, NamedSharding(MESH, P("a")))
    assert moved.sharding.is_equivalent_to(NamedSharding(MESH, P("a")), 1)
    assert bits(jax.random.key_data(moved)) == bits(jax.random.key_data(keys))
    assert bits(jax.random.key_data(take_rows(keys, 1, 3))) == bits(jax.random.key_data(keys[1:3]))


def test_a_moved_array_leaves_no_copy_with_the_one_it_was_made_from() -> None:
    array = spread(all_bits("float32"))
    move(array, SHARDINGS["turned"])
    assert getattr(array, "_npy_value", None) is None


def test_an_array_of_a_type_that_jax_would_truncate_stays_whole_under_a_function(tmp_path: Path) -> None:
    values = np.arange(16) + 2**40
    shardkeep.save(tmp_path / "c", {"x": values})
    loaded = shardkeep.load(tmp_path / "c", shardings={"x": lambda _: NamedSharding(mesh_of(8), P("a"))})
    assert bits(loaded["x"]) == bits(values)


@pytest.mark.parametrize("dtype", [name for name in every_dtype() if name not in ("int1", "uint1")])  # no kernels
def test_every_bit_survives_another_layout(dtype: str) -> None:
    """Before 0.8.2, JAX corrupts memory when it lays out elements of less than a byte, so that is refused."""
    values = all_bits(dtype)
    if values.dtype in NARROW and not can_lay_out_narrow():
        with pytest.raises(shardkeep.ShardingError, match=r"use JAX 0\.8\.2 or later, or leave out the layout"):
            with_layout(jax.device_put(values), Layout((1, 0)))
        return
    for array in (jax.device_put(values), spread(values)):
        turned = with_layout(array, Layout((1, 0)))
        assert turned.format.layout.major_to_minor == (1, 0)
        assert turned.sharding == array.sharding
        assert parts(turned) == bits(_counting(values))
        assert with_layout(turned, Layout((1, 0))) is turned
        assert with_layout(turned, None) is turned
