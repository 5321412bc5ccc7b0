"""The last steps for each leaf: PRNG keys, function, cast, byte order, kind of the template."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding

from shardkeep.errors import IntegrityError
from shardkeep.jaxapi import own_computation, wrap_key_data
from shardkeep.loading.matching import Wanted
from shardkeep.loading.moving import move, stays_numpy, with_layout
from shardkeep.loading.place import put_all
from shardkeep.loading.request import LoadRequest
from shardkeep.loading.shardings import check_layout
from shardkeep.model.arrays import Array, DType, kind_of
from shardkeep.model.leaves import NumpyArray, Origin, PrngKeys, StoredArray
from shardkeep.model.perprocess import PerProcessRows
from shardkeep.model.tree import name_leaf
from shardkeep.model.values import show

log = logging.getLogger("shardkeep")


def adapt(w: Wanted, value: Any, request: LoadRequest) -> Any:
    """The last steps for one leaf: PRNG keys, function, cast, byte order, kind of the template."""
    origin = w.stored.was if isinstance(w.stored, StoredArray) else None
    if isinstance(origin, PerProcessRows):
        return _decode(w, origin, value)
    if isinstance(origin, PrngKeys):
        value = _as_keys(value, origin.impl, w.stored.key)
    if origin is not None and request.policy.treat is not None:
        value = request.policy.treat(value, w.stored, partial(apply_function, w.place.function or _unchanged))
    elif w.place.function is not None:
        value = apply_function(w.place.function, value)
    if w.dtype is not None and getattr(value, "dtype", w.dtype) != w.dtype and not isinstance(origin, PrngKeys):
        value = cast_array(value, w.dtype, w.stored.key) if isinstance(value, (np.ndarray, jax.Array)) else value
    if isinstance(value, np.ndarray):
        value = _settled(w, origin, cast(Array, value))
    if w.place.layout is not None and isinstance(value, jax.Array) and not isinstance(origin, PrngKeys):
        value = with_layout(value, w.place.layout)
    return value if w.like is None else _like(w.like, value, w.stored.key)


def _unchanged(value: Any) -> Any:
    return value


def _decode(w: Wanted, rows: PerProcessRows, data: Array) -> Any:
    """What a `PerProcess` leaf holds: the value of one process, or the list of all."""
    key = name_leaf(w.stored.path)
    if w.process is not None:
        return rows.decode(w.process, data, key)
    return [rows.decode(i, data[rows.region(i).slices], key) for i in range(len(rows.lengths))]


def _as_keys(data: jax.Array | Array, impl: str, key: str) -> jax.Array:
    try:
        with own_computation():
            return wrap_key_data(data, impl)
    except (ValueError, TypeError) as error:
        problem = f"leaf {key!r} does not hold PRNG keys that this JAX can use: {error}"
        raise IntegrityError(problem, leaf=key) from error


def _settled(w: Wanted, origin: Origin | None, value: Array) -> Any:
    """A host array in its saved byte order, or on its devices if JAX can hold it after a cast."""
    if not w.as_numpy and not stays_numpy(value.dtype):
        return put_all([value], w.place.sharding)[0]
    if isinstance(origin, NumpyArray) and origin.order is not None and w.dtype is None:
        return value.astype(value.dtype.newbyteorder(origin.order))
    return value


def apply_function(function: Callable[[Any], Any], array: Any) -> Any:
    """Apply a function from `shardings`. If it returns a `Sharding` or `Format`, that is applied; else its result."""
    result = function(array)
    if not isinstance(result, Sharding | Format):
        return result
    if isinstance(array, np.ndarray) and stays_numpy(array.dtype):  # JAX would truncate it
        return array
    if isinstance(result, Sharding):
        return move(array, result)
    return with_layout(move(array, result.sharding), check_layout(result.layout, ""))


def cast_array(array: Any, dtype: DType, key: str) -> Any:
    """Cast within one kind (float to float, integer to integer). `ValueError` if an integer does not fit."""
    if array.dtype == dtype or kind_of(np.dtype(array.dtype)) != kind_of(dtype):
        return array
    with own_computation():
        return _cast_array(array, dtype, key)


def _cast_array(array: Any, dtype: DType, key: str) -> Any:
    if kind_of(dtype) == "int" and array.size:
        # Each process checks its own shards, so that a failure is an error on all of them instead of a hang.
        spread = isinstance(array, jax.Array) and not array.is_fully_addressable
        for part in [shard.data for shard in array.addressable_shards] if spread else [array]:
            check_fits(int(part.min()), int(part.max()), dtype, key)
    if isinstance(array, jax.Array) and stays_numpy(dtype):
        log.warning(
            "leaf %r is a NumPy array because JAX cannot hold %s by default; set jax_enable_x64 to get a JAX array",
            key,
            dtype.name,
        )
        return np.asarray(array).astype(dtype)
    return array.astype(dtype)


def _like(like: Any, value: Any, key: str) -> Any:
    """A plain value as a 0-d array like the template's, or the reverse. `ValueError` if an integer does not fit."""
    if isinstance(like, np.generic):
        return cast_array(value, like.dtype, key)[()]
    if not hasattr(like, "dtype"):
        return type(like)(value.item())
    dtype = np.dtype(like.dtype)
    if kind_of(dtype) == "int":
        check_fits(int(value), int(value), dtype, key)
    array = np.array(value, dtype)
    return array if isinstance(like, np.ndarray) else put_all([array], getattr(like, "sharding", None))[0]


def check_fits(low: int, high: int, dtype: DType, key: str) -> None:
    """`ValueError` unless an integer dtype can hold both numbers."""
    limits = jax.numpy.iinfo(dtype)
    if low < int(limits.min) or high > int(limits.max):
        raise ValueError(f"leaf {key!r} holds {show(low)} to {show(high)}, which does not fit {dtype.name}")


def warn_numpy(wanted: Sequence[Wanted], values: Sequence[Any]) -> None:
    """Say which arrays JAX cannot hold."""
    arrays = [(w, v) for w, v in zip(wanted, values, strict=True) if isinstance(v, np.ndarray) and not w.as_numpy]
    keys = [w.stored.key for w, v in arrays if w.like is None and stays_numpy(v.dtype)]
    if keys:
        log.warning(
            "%s loaded as NumPy, unchanged, because JAX cannot hold the dtype: %s%s. Set jax_enable_x64 for 64 bits",
            "1 array is" if len(keys) == 1 else f"{len(keys):,} arrays are",
            ", ".join(map(repr, keys[:5])),
            ", …" if len(keys) > 5 else "",
        )
