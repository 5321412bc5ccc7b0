"""Gathering, casting and moving arrays between devices, hosts and processes, for eFormer's API."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardkeep.jaxapi import transfers_allowed
from shardkeep.loading.adapt import apply_function, cast_array
from shardkeep.loading.moving import move, on_host, stays_numpy, take_rows
from shardkeep.model.arrays import Array, DType, is_prng_dtype, kind_of, parse_dtype
from shardkeep.model.tree import flatten
from shardkeep.processes.collectives import gather_array, send_from_leader
from shardkeep.runtime.budget import Claim, budget
from shardkeep.runtime.hostmemory import available_memory
from shardkeep.runtime.progress import NO_BAR, Bar
from shardkeep.runtime.scopes import Scope

log = logging.getLogger("shardkeep")


def cpu_device() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def move_tree(tree: Any, float_dtype: object, mesh: Mesh | None, gather: bool, cpu_offload: bool) -> Any:
    """A tree as a save stores it: floats cast, arrays gathered or moved to the host."""
    if float_dtype is not None:
        parse_float_dtype(float_dtype)
    skeleton, leaves = flatten(tree)
    values: list[Any] = []
    for leaf in leaves:
        value = cast_floats(leaf.value, float_dtype)
        # Arrays that span processes go to the hosts shard by shard, when the snapshot is taken.
        moves = gather or (cpu_offload and isinstance(value, jax.Array) and value.is_fully_addressable)
        if isinstance(value, jax.Array) and not is_prng_dtype(value.dtype) and moves:
            value = offload(value, leaf.key, mesh, cpu_offload or mesh is None)
        values.append(value)
    return skeleton.rebuild(values)


def to_host(x: Any, float_dtype: object, mesh: Mesh | None, cpu_offload: bool) -> Any:
    """Gather an array.

    Args:
        x: The array. Other values are returned unchanged.
        float_dtype: The dtype to cast floats to. None keeps them.
        mesh: The mesh to replicate the array on. None: one device.
        cpu_offload: Whether the result goes to the CPU instead, so that no gathered copy stays on the accelerators.

    Returns:
        A JAX array; a NumPy array for 64-bit types without `jax_enable_x64`, which JAX would truncate.
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
    """The first device of an array that is on several; None: leave it, or put it where JAX puts new arrays."""
    devices = x.devices() if isinstance(x, jax.Array) else ()
    return SingleDeviceSharding(min(devices, key=lambda device: device.id)) if len(devices) > 1 else None


def offload(array: jax.Array, key: str, mesh: Mesh | None, cpu_offload: bool) -> Any:
    """One array, gathered. If it goes to the host, wait until the memory budget has room for it."""
    if not cpu_offload:
        return to_host(array, None, mesh, False)
    with Scope(f"moving {key} to the host") as scope:
        scope.add(Claim(budget, scope)).take(array.nbytes, scope.what)
        return to_host(array, None, mesh, True)


def cast_floats(x: Any, float_dtype: object) -> Any:
    """A float array cast to `float_dtype`; anything else unchanged, and everything if it is None."""
    if float_dtype is None or not isinstance(x, jax.Array | np.ndarray):
        return x
    dtype = parse_float_dtype(float_dtype)
    if is_prng_dtype(x.dtype) or kind_of(np.dtype(x.dtype)) != "float" or x.dtype == dtype:
        return x
    with transfers_allowed():
        return on_host(x).astype(dtype) if stays_numpy(dtype) else x.astype(dtype)


def parse_float_dtype(dtype: object) -> DType:
    """A dtype that floats can be cast to; `ValueError` for any other."""
    parsed = parse_dtype(dtype)
    if kind_of(parsed) != "float":
        raise ValueError(f"floats cannot be cast to {parsed.name}; pass a float dtype")
    return parsed


def reshard(x: Any, target_sharding: Sharding | None) -> Any:
    """Put an array on a sharding.

    Args:
        x: The array.
        target_sharding: Any `Sharding`, replicated ones too. None: the default device.

    Returns:
        A JAX array; a NumPy array for 64-bit types without `jax_enable_x64`, which JAX would truncate.
    """
    if isinstance(x, np.ndarray) and stays_numpy(x.dtype):
        log.warning("a %s array is kept as a NumPy array: set jax_enable_x64 to put it on devices", x.dtype.name)
        return x
    return move(x, target_sharding)


def apply_gather_functions(
    state: Any, gather_fns: bool | Mapping[str, Any] | None, mismatch_allowed: bool, verbose: bool
) -> Any:
    """Apply a gather function to each leaf.

    Args:
        state: A PyTree.
        gather_fns: True takes every array to the host, False or None none. A dict, nested or with dotted keys, has a
            function for each key.
        mismatch_allowed: Whether leaves without a function are left as they are. If False, they are a `KeyError`.
        verbose: Whether to show a progress bar.

    Returns:
        A PyTree with the structure of `state`.
    """
    if gather_fns is None or gather_fns is False:
        return state
    skeleton, leaves = flatten(state)
    functions = None if gather_fns is True else _functions(gather_fns)
    total = sum(int(getattr(leaf.value, "nbytes", 0)) for leaf in leaves)
    values: list[Any] = []
    with Bar("gathering", total) if verbose else NO_BAR as progress:
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
        raise KeyError(f"no gather function for {key!r}; gather_fns has {', '.join(functions) or 'none'}")
    return function(value)


def _on_host(array: jax.Array) -> Array:
    """The whole array as NumPy. If it spans processes, all of them must call this."""
    return on_host(array) if array.is_fully_addressable else gather_array(array)


def chunk_tensor_by_memory(tensor: Any, memory_limit: int) -> list[Any]:
    """Split an array along its first axis.

    Args:
        tensor: The array.
        memory_limit: The most bytes in one piece, unless a single row is larger.

    Returns:
        The pieces, in order.

    >>> [len(piece) for piece in chunk_tensor_by_memory(np.zeros((5, 2), np.int8), 4)]
    [2, 2, 1]
    """
    if memory_limit <= 0:
        raise ValueError(f"memory_limit must be positive, not {memory_limit}")
    if tensor.ndim == 0 or tensor.shape[0] == 0:
        return [tensor]
    row = max(estimate_array_nbytes(tensor) // tensor.shape[0], 1)
    step = max(memory_limit // row, 1)
    return [take_rows(tensor, start, start + step) for start in range(0, tensor.shape[0], step)]


def estimate_array_nbytes(array: Any) -> int:
    """The size of an array in bytes, without moving it. Sub-byte types take one byte for each element.

    Args:
        array: An array, a `jax.ShapeDtypeStruct`, or a plain value, which counts as the NumPy array it would become.

    >>> estimate_array_nbytes(jax.ShapeDtypeStruct((2, 3), "float32"))
    24
    """
    if not hasattr(array, "dtype"):
        return int(np.asarray(array).nbytes)
    if is_prng_dtype(array.dtype):
        return int(array.nbytes)
    return int(np.prod(array.shape, dtype=object)) * np.dtype(array.dtype).itemsize


def broadcast_tensor(tensor: Any, memory_limit_bytes: int, target_sharding: Sharding | None = None) -> Any:
    """Send an array of process 0 to all processes. All of them must call this, with an array of the same shape.

    Args:
        tensor: The array; its values count on process 0 only.
        memory_limit_bytes: The most bytes to send at once, unless a single row is larger.
        target_sharding: The sharding of the result. None: replicated over all devices.

    Returns:
        A JAX array; a NumPy array for 64-bit types without `jax_enable_x64`, which JAX would truncate.
    """
    if memory_limit_bytes <= 0:
        raise ValueError(f"memory_limit must be positive, not {memory_limit_bytes}")
    whole = on_host(tensor)
    if jax.process_count() > 1:
        row = whole.nbytes // max(whole.shape[0], 1) if whole.ndim else whole.nbytes
        whole = send_from_leader(whole, max(memory_limit_bytes, row))
    if stays_numpy(whole.dtype):
        return reshard(whole, target_sharding)
    sharding = target_sharding or _everywhere()
    with transfers_allowed():
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype)


def _everywhere() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec())


def estimate_available_memory() -> int:
    """The bytes of memory that are free: on the host, in its container, or on the device with the least."""
    found = [available_memory()]
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            found.append(int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)))
    return max(min(found), 0)


def read_process_array(
    key: str,
    shard_fns: Any,
    mismatch_allowed: bool,
    manager: Any,
    callback: Any = None,
    dtype: object = None,
) -> tuple[str, Any, int]:
    """Read one array and apply its shard function, a callback and a cast, in that order.

    Args:
        key: The name of the array.
        shard_fns: Functions or shardings by dotted key. None or empty: none.
        mismatch_allowed: Whether an array may have no function. If False, that is a `KeyError`.
        manager: Anything with `get_tensor(key)`, such as a safetensors file handle.
        callback: Called as `callback(array, key)`; its result is used.
        dtype: The dtype to cast to; see `AsyncCheckpointManager.load`.

    Returns:
        The key, the array, and 1 if there was no function for it, else 0.
    """
    array = manager.get_tensor(key)
    missing = 0
    if shard_fns:
        functions = {
            ".".join(leaf.path): leaf.value
            for leaf in flatten(shard_fns, is_leaf=lambda x: callable(x) or isinstance(x, Sharding))[1]
        }
        function = functions.get(key)
        if function is None and not mismatch_allowed:
            raise KeyError(f"no shard function for {key!r}; shard_fns has {', '.join(functions)}")
        if function is None:
            missing = 1
        else:
            array = reshard(array, function) if isinstance(function, Sharding) else apply_function(function, array)
    if callback is not None:
        array = callback(array, key)
    if dtype is not None:
        array = cast_array(array, parse_dtype(dtype), key)
    return key, array, missing
