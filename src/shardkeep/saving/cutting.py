"""Cuts on accelerators: a process that writes a part of a shard has only that part transferred."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from shardkeep.jaxapi import local_parts, transfers_allowed
from shardkeep.model.arrays import WIDE, DType, Region, carrier_of, is_integer

_FARTHEST = np.iinfo(np.int32).max  # where a cut can begin

_cutting: dict[str, bool] = {}  # by platform: whether its devices can compile it


def can_cut(array: jax.Array) -> bool:
    """Whether the devices of an array can cut parts out of it. Tried once for each platform."""
    dtype = np.dtype(array.dtype)
    if not (is_integer(dtype) or carrier_of(dtype)) or max(array.shape, default=0) > _FARTHEST:
        return False
    platform = next(iter(array.sharding.device_set)).platform
    if platform not in _cutting:
        part = local_parts(array, 1)[0]
        _cutting[platform] = cut_on_device(part, Region((0,) * part.ndim, (1,) * part.ndim)) is not None
    return _cutting[platform]


def cut_on_device(part: jax.Array, region: Region) -> jax.Array | None:
    """The bits of a region of an array, on the same device; None if it cannot compile, or has no memory for it.

    Floats become unsigned integers of their width, which no kernel changes.

    Args:
        part: The array, on one device. `can_cut` has said that its dtype can be cut.
        region: The region.
    """
    dtype, starts = np.dtype(part.dtype), np.array(region.start, np.int32)
    with ExitStack() as contexts:
        contexts.enter_context(transfers_allowed())
        # A mesh of the program's spans other devices, with which JAX refuses to compute on this one alone.
        contexts.enter_context(jax.set_mesh(Mesh(np.array(list(part.devices())), ("device",))))
        if dtype in WIDE:
            contexts.enter_context(jax.enable_x64(True))
        try:
            return _cut(part, starts, region.shape, carrier_of(dtype))
        except JaxRuntimeError as error:
            if str(error).startswith("UNIMPLEMENTED") or is_exhausted(error):
                return None
            raise


def _dynamic_slice(part: jax.Array, starts: Any, shape: tuple[int, ...], carrier: DType | None) -> jax.Array:
    bits: Any = part if carrier is None else jax.lax.bitcast_convert_type(part, carrier)
    return jax.lax.dynamic_slice(bits, starts, shape)


_cut: Callable[..., jax.Array] = jax.jit(  # pyright: ignore[reportUnknownMemberType]  (its parameter)
    _dynamic_slice, static_argnums=(2, 3)
)


def is_exhausted(error: Exception) -> bool:
    """Whether JAX says that some memory is full."""
    return "RESOURCE_EXHAUSTED" in str(error)
