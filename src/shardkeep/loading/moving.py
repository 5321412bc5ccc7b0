"""What JAX can hold, and arrays moved to another sharding, bit for bit.

XLA moves an array between layouts with computations, and those may change floats: collectives can add zeros, which
turns -0.0 into 0.0, and CPU kernels convert small floats to larger ones and back, which sets the quiet bit of NaNs.
Some types are worse off: resharding 2-bit integers corrupts memory, and 6-bit floats have no kernels at all. So floats
travel as unsigned integers of their width, and the other odd types through host memory.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from shardkeep.errors import ShardingError
from shardkeep.jaxapi import (
    can_lay_out_narrow,
    device_put,
    has_x64,
    jit,
    own_computation,
    private_part,
    refuse_without_jax,
    transfers_allowed,
)
from shardkeep.model.arrays import NARROW, NUMPY_NAMES, WIDE, Array, DType, carrier_of, is_integer, is_prng_dtype
from shardkeep.processes.collectives import gather_array


def move(x: Any, sharding: Sharding | None) -> jax.Array:
    """`x` laid out as `sharding` says, with the same bits; None leaves a JAX array where it is.

    If `x` or the sharding spans processes, all of those must call this.
    """
    with own_computation():
        return _move(x, sharding)


def _move(x: Any, sharding: Sharding | None) -> jax.Array:
    here = not isinstance(x, jax.Array) or x.is_fully_addressable
    if here and sharding is not None and not sharding.is_fully_addressable:
        # device_put would compare the values of the processes as numbers, and NaN is not equal to itself.
        return _place(on_host(x), sharding)
    if not isinstance(x, jax.Array) or sharding is None or not _needs_computation(x, sharding):
        return device_put(x, sharding)
    dtype = np.dtype(x.dtype)
    if dtype in WIDE and not has_x64():
        with jax.enable_x64(True):  # as when the array was made: JAX would truncate it now, or crash
            return _move(x, sharding)
    if here and is_on_cpu(sharding):
        return _place(on_host(x), sharding)  # nothing to compile, and host memory is where it goes
    if is_integer(dtype):
        return device_put(x, sharding)
    carrier = carrier_of(dtype)
    if carrier is None or not (_is_in_device_memory(x.sharding) and _is_in_device_memory(sharding)):
        return _place(on_host(x) if here else gather_array(x), sharding)
    moved = device_put(jax.lax.bitcast_convert_type(x, carrier), sharding)
    return _reinterpret(dtype, sharding)(moved)


def with_layout(x: jax.Array, layout: Layout | None) -> jax.Array:
    """`x` with the same bits, its dimensions ordered as `layout` says in the memory of its devices; None: as it is."""
    if layout is None:
        return x
    found = cast(Any, x).format.layout
    if found is not None and found.major_to_minor == layout.major_to_minor and layout.tiling in (None, found.tiling):
        return x
    if np.dtype(x.dtype) in NARROW and not can_lay_out_narrow():
        raise ShardingError(
            f"JAX {jax.__version__} corrupts memory when it creates an array of {x.dtype} with the layout {layout}; "
            "use JAX 0.8.2 or later, or leave out the layout"
        )
    carrier = carrier_of(np.dtype(x.dtype))
    with own_computation():
        return _lay_out(carrier, Format(layout, x.sharding))(x)


def take_rows(x: Any, start: int, stop: int) -> Any:
    """`x[start:stop]` with the same bits, as the kind of array that `x` is."""
    with own_computation():
        return _take_rows(x, start, stop)


def _take_rows(x: Any, start: int, stop: int) -> Any:
    if not isinstance(x, jax.Array) or is_prng_dtype(x.dtype):
        return x[start:stop]
    dtype = np.dtype(x.dtype)
    if dtype in WIDE and not has_x64():
        with jax.enable_x64(True):
            return _take_rows(x, start, stop)
    carrier = carrier_of(dtype)
    if carrier is not None:
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, carrier)[start:stop], dtype)
    if is_integer(dtype) or not x.is_fully_addressable:
        return x[start:stop]
    return device_put(on_host(x)[start:stop], min(x.devices(), key=lambda device: device.id))


def stays_numpy(dtype: DType) -> bool:
    """Whether JAX, as it is configured now, cannot hold arrays of this dtype without changing them."""
    if dtype in WIDE:
        return not has_x64()
    return not _is_known_to_jax(dtype)


@lru_cache(maxsize=64)
def _is_known_to_jax(dtype: DType) -> bool:
    if dtype.kind in "mM" or dtype.name in NUMPY_NAMES:
        return dtype.kind not in "mM"
    try:
        with transfers_allowed():
            device_put(np.zeros(1, dtype)).block_until_ready()
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _needs_computation(x: jax.Array, sharding: Sharding) -> bool:
    """Whether XLA might compute to get the array there; a copy of one buffer, or none, changes nothing."""
    if is_prng_dtype(x.dtype) or x.sharding == sharding:
        return False
    return len(x.sharding.device_set) > 1 or len(sharding.device_set) > 1


def on_host(x: Any) -> Array:
    """An array in host memory, if this process has all of it. Unlike `np.asarray`, this attaches no copy to it."""
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    with transfers_allowed():
        if x.is_fully_replicated:
            return np.asarray(private_part(x.addressable_data(0)))
        if not x.is_fully_addressable:
            return np.asarray(x)  # JAX says why it cannot be read
        whole: Array = np.empty(x.shape, x.dtype)
        parts = [(s.index, private_part(s.data)) for s in x.addressable_shards if s.replica_id == 0]
        for _, part in parts:
            part.copy_to_host_async()  # all at once
        for index, part in parts:
            whole[index] = np.asarray(part)
        return whole


def _place(data: Array, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index], dtype=data.dtype)


@lru_cache(maxsize=256)
def _reinterpret(dtype: DType, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    def reinterpret(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, dtype)

    return jit(reinterpret, sharding)


def is_on_cpu(sharding: Sharding | None) -> bool:
    """Whether arrays with this sharding (None: on the default device) are on CPUs, which use host memory as it is."""
    if sharding is not None:
        return _is_on_cpu(sharding)
    refuse_without_jax()
    default = cast(Any, jax.config).jax_default_device
    if isinstance(default, str):
        return default == "cpu"
    return (default or jax.local_devices()[0]).platform == "cpu"


@lru_cache(maxsize=256)
def _is_on_cpu(sharding: Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


@lru_cache(maxsize=256)
def _lay_out(carrier: DType | None, form: Format) -> Callable[[jax.Array], jax.Array]:
    def copy(x: jax.Array) -> jax.Array:
        if carrier is None:
            return jnp.copy(x)
        return jax.lax.bitcast_convert_type(jnp.copy(jax.lax.bitcast_convert_type(x, carrier)), x.dtype)

    return jit(copy, form)


def _is_in_device_memory(sharding: Sharding) -> bool:
    """Whether arrays with this sharding are where computations run, and not in pinned host memory."""
    device = min(sharding.device_set, key=lambda device: device.id)
    return sharding.memory_kind in (None, device.default_memory().kind)
