"""Arrays gathered, cast and moved between devices, hosts and processes, for the documented API."""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardkeep.arrays import kind_of, parse_dtype
from shardkeep.memory import Claim, budget
from shardkeep.placing import stays_numpy
from shardkeep.progress import Bar
from shardkeep.scopes import Scope
from shardkeep.staging import gather_whole, is_prng_dtype
from shardkeep.tree import flatten

log = logging.getLogger("shardkeep")


def cpu_device() -> Any:
    return jax.local_devices(backend="cpu")[0]


def to_host(x: Any, float_dtype: Any, mesh: Mesh | None, cpu_offload: bool) -> Any:
    """`x` gathered: replicated on `mesh` (None: on one device), or on the CPU so that no copy stays on accelerators.

    Floats are cast to `float_dtype`; None keeps them. What is no array is given back unchanged, and what JAX would
    truncate (64-bit types without jax_enable_x64) stays NumPy.
    """
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return x
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
    x = cast_floats(x, float_dtype)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = _on_host(x)
    if cpu_offload:
        return reshard(x, SingleDeviceSharding(cpu_device()))
    return reshard(x, NamedSharding(mesh, PartitionSpec()) if mesh is not None else _one_device(x))


def _one_device(x: Any) -> Sharding | None:
    """The first device of an array that is spread over several; None: it stays, or goes where JAX puts new arrays."""
    devices: Any = x.devices() if isinstance(x, jax.Array) else ()
    return SingleDeviceSharding(min(devices, key=lambda device: device.id)) if len(devices) > 1 else None


def offload(array: jax.Array, key: str, mesh: Mesh | None, cpu_offload: bool) -> Any:
    """One array gathered; on its way to the host it waits until pending saves leave room in the memory budget."""
    if not cpu_offload:
        return to_host(array, None, mesh, False)
    with Scope(f"moving {key} to the host") as scope:
        scope.add(Claim(budget, scope)).take(array.nbytes, scope.what)
        return to_host(array, None, mesh, True)


def cast_floats(x: Any, float_dtype: Any) -> Any:
    """A float array as `float_dtype`; anything else, and everything if that is None, unchanged."""
    if float_dtype is None or not isinstance(x, jax.Array | np.ndarray):
        return x
    dtype = parse_float_dtype(float_dtype)
    if is_prng_dtype(x.dtype) or kind_of(np.dtype(x.dtype)) != "float" or x.dtype == dtype:
        return x
    return np.asarray(x).astype(dtype) if stays_numpy(dtype) else x.astype(dtype)


def parse_float_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype that floats can be cast to; `ValueError` for any other."""
    parsed = parse_dtype(dtype)
    if kind_of(parsed) != "float":
        raise ValueError(f"floats cannot be cast to {parsed.name}: name a float dtype")
    return parsed


def reshard(x: Any, target_sharding: Sharding | None) -> Any:
    """`x` laid out as `target_sharding` says, replicated ones included; never truncated (see `to_host`)."""
    if isinstance(x, np.ndarray) and stays_numpy(x.dtype):
        log.warning("shardkeep: a %s array stays NumPy: set jax_enable_x64 to have it on devices", x.dtype.name)
        return x
    here = not isinstance(x, jax.Array) or x.is_fully_addressable
    if here and target_sharding is not None and not target_sharding.is_fully_addressable:
        # device_put would compare what the processes have, number by number: NaNs are never the same.
        data = np.asarray(x)
        return jax.make_array_from_callback(data.shape, target_sharding, lambda index: data[index], dtype=data.dtype)
    return jax.device_put(x, target_sharding)


def apply_gather_functions(
    state: Any, gather_fns: bool | Mapping[str, Any] | None, mismatch_allowed: bool, verbose: bool
) -> Any:
    """Each leaf through its gather function, the structure kept.

    `True` takes every array to the host, `False` or None none; a dict (nested or dotted) names a function per key.
    A key without one is left as it is if `mismatch_allowed`, else it is a `KeyError`.
    """
    if gather_fns is None or gather_fns is False:
        return state
    skeleton, leaves = flatten(state)
    functions = None if gather_fns is True else _functions(gather_fns)
    total = sum(int(getattr(leaf.value, "nbytes", 0)) for leaf in leaves)
    values: list[Any] = []
    with Bar("gathering", total) if verbose else nullcontext(lambda _: None) as progress:
        for leaf in leaves:
            values.append(_gathered(leaf.value, ".".join(leaf.path), functions, mismatch_allowed))
            progress(int(getattr(leaf.value, "nbytes", 0)))
    return skeleton.rebuild(values)


def _functions(gather_fns: Any) -> dict[str, Any]:
    _, leaves = flatten(gather_fns, is_leaf=callable)
    return {".".join(leaf.path): leaf.value for leaf in leaves}


def _gathered(value: Any, key: str, functions: dict[str, Any] | None, mismatch_allowed: bool) -> Any:
    if functions is None:
        return _on_host(value) if isinstance(value, jax.Array) and not is_prng_dtype(value.dtype) else value
    function: Callable[[Any], Any] | None = functions.get(key)
    if function is None:
        if mismatch_allowed:
            return value
        raise KeyError(f"no gather function for {key!r}; there are functions for {', '.join(functions) or 'nothing'}")
    return function(value)


def _on_host(array: jax.Array) -> Any:
    """All of an array as NumPy, also where it is spread over processes; all of them call this."""
    return jax.device_get(array) if array.is_fully_addressable else gather_whole(array)


def chunk_tensor_by_memory(tensor: Any, memory_limit: int) -> list[Any]:
    """Pieces along the first axis, none above the limit unless one row already is.

    >>> [len(piece) for piece in chunk_tensor_by_memory(np.zeros((5, 2), np.int8), 4)]
    [2, 2, 1]
    """
    if memory_limit <= 0:
        raise ValueError(f"the memory limit must be positive, not {memory_limit}")
    if tensor.ndim == 0 or tensor.shape[0] == 0:
        return [tensor]
    row = max(estimate_array_nbytes(tensor) // tensor.shape[0], 1)
    step = max(memory_limit // row, 1)
    return [tensor[start : start + step] for start in range(0, tensor.shape[0], step)]


def estimate_array_nbytes(array: Any) -> int:
    """Bytes of an array, without moving it; sub-byte types count one byte per element. A plain value counts as NumPy's.

    >>> estimate_array_nbytes(jax.ShapeDtypeStruct((2, 3), "float32"))
    24
    """
    if not hasattr(array, "dtype"):
        return int(np.asarray(array).nbytes)
    if is_prng_dtype(array.dtype):
        return int(array.nbytes)
    return int(np.prod(array.shape, dtype=object)) * np.dtype(array.dtype).itemsize


def broadcast_tensor(tensor: Any, memory_limit_bytes: int, target_sharding: Sharding | None = None) -> Any:
    """Process 0's tensor on every process, sent in pieces no larger than the limit.

    Laid out as `target_sharding` says, else replicated over all devices; never truncated (see `to_host`).
    """
    pieces = chunk_tensor_by_memory(tensor, memory_limit_bytes)
    if jax.process_count() > 1:
        pieces = [_from_first(np.asarray(piece)) for piece in pieces]
    whole = np.asarray(pieces[0]) if len(pieces) == 1 else np.concatenate([np.asarray(p) for p in pieces])
    if stays_numpy(whole.dtype):
        return reshard(whole, target_sharding)
    sharding = target_sharding or _everywhere()
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype)


def _from_first(piece: Any) -> Any:
    """Process 0's piece, sent as plain bytes: as numbers they would be added up, which loses -0.0 and NaNs."""
    raw = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(raw)) if raw.size else raw
    return sent.view(piece.dtype).reshape(piece.shape)


def _everywhere() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec())
