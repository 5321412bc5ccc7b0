"""The `utils` module of eFormer's API: names, sizes, grouping, gathering."""

import re
from typing import Any

import jax
from jax.sharding import Sharding

from shardkeep.eformer.gathering import (
    apply_gather_functions,
    broadcast_tensor,
    chunk_tensor_by_memory,
    estimate_array_nbytes,
    reshard,
    to_host,
)
from shardkeep.layouts.safetensors import group_by_size
from shardkeep.loading.adapt import apply_function, cast_array
from shardkeep.model.arrays import parse_dtype
from shardkeep.model.naming import base_of_shard, dotted_names, index_filename, shard_filename
from shardkeep.model.tree import flatten
from shardkeep.runtime.memory import available_memory
from shardkeep.stores.location import any_path_text

__all__ = [
    "apply_gather_functions",
    "broadcast_tensor",
    "chunk_tensor_by_memory",
    "derive_base_prefix_from_path",
    "estimate_array_nbytes",
    "estimate_available_memory",
    "flatten_for_broadcast",
    "group_keys_by_shard_size",
    "index_filename",
    "is_gcs_path",
    "optimize_shard_layout",
    "parse_gcs_path",
    "read_process_array",
    "reshard",
    "shard_filename",
    "to_host",
]


def derive_base_prefix_from_path(path_str: Any) -> str:
    """What the file names of a model begin with.

    Args:
        path_str: A safetensors file, its index, or one of its shards.

    >>> derive_base_prefix_from_path("/x/model-00001-of-00004.safetensors")
    '/x/model'
    """
    return base_of_shard(any_path_text(path_str, "derive_base_prefix_from_path(path_str)"))


def estimate_available_memory() -> int:
    """The bytes of memory that are free: on the host, in its container, or on the device with the least."""
    found = [available_memory()]
    for device in jax.local_devices():
        stats: Any = device.memory_stats() or {}
        if "bytes_limit" in stats:
            found.append(int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)))
    return max(min(found), 0)


def flatten_for_broadcast(state: Any) -> dict[str, Any]:
    """The leaves of a tree by their dotted keys.

    Args:
        state: A PyTree.

    >>> flatten_for_broadcast({"a": {"b": 1}})
    {'a.b': 1}
    """
    leaves = flatten(state)[1]
    return dict(zip(dotted_names([leaf.path for leaf in leaves]), (leaf.value for leaf in leaves), strict=True))


def group_keys_by_shard_size(flat_state: dict[str, Any], max_shard_size_bytes: int) -> list[list[str]]:
    """Group arrays so that no group is larger than a limit, in order. A larger array gets its own group.

    Args:
        flat_state: Arrays by key.
        max_shard_size_bytes: The most bytes in a group.

    Returns:
        The keys of each group.
    """
    _refuse_no_limit(max_shard_size_bytes)
    sizes = [estimate_array_nbytes(array) for array in flat_state.values()]
    return group_by_size(sizes, list(flat_state), max_shard_size_bytes)


def optimize_shard_layout(state: Any, max_shard_size_bytes: int) -> list[list[str]]:
    """Group arrays so that no group is larger than a limit, those with the same parent together if possible.

    Args:
        state: A PyTree.
        max_shard_size_bytes: The most bytes in a group, unless a single array is larger.

    Returns:
        The dotted keys of each group, in natural order: layer 2 comes before layer 10.
    """
    _refuse_no_limit(max_shard_size_bytes)
    flat = flatten_for_broadcast(state)
    groups: list[list[str]] = []
    filled = 0
    for family in _families(flat):
        sizes = [estimate_array_nbytes(flat[key]) for key in family]
        if groups and filled + sum(sizes) <= max_shard_size_bytes:
            groups[-1] += family
            filled += sum(sizes)
            continue
        parts: list[list[str]] = group_by_size(sizes, family, max_shard_size_bytes)
        groups += parts
        filled = sum(estimate_array_nbytes(flat[key]) for key in parts[-1])
    return groups


def _families(flat: dict[str, Any]) -> list[list[str]]:
    """Keys in natural order, grouped by parent."""
    families: dict[str, list[str]] = {}
    for key in sorted(flat, key=_natural):
        families.setdefault(key.rpartition(".")[0], []).append(key)
    return list(families.values())


def _natural(key: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)|\.", key) if part]


def _refuse_no_limit(limit: int) -> None:
    if limit <= 0:
        raise ValueError(f"max_shard_size_bytes must be positive, not {limit}")


def is_gcs_path(path: Any) -> bool:
    """Whether a path is in Google Cloud Storage.

    Args:
        path: A string or path object.

    >>> is_gcs_path("gs://bucket/x"), is_gcs_path("/x")
    (True, False)
    """
    return str(path).startswith("gs://")


def parse_gcs_path(gcs_path: Any) -> tuple[str, str]:
    """The bucket and the name in it. Anything but a `gs://` path is a `ValueError`.

    Args:
        gcs_path: A string or path object.

    >>> parse_gcs_path("gs://bucket/a/b")
    ('bucket', 'a/b')
    """
    match = re.fullmatch(r"gs://([^/]+)(?:/(.*))?", str(gcs_path), re.DOTALL)
    if match is None:
        raise ValueError(f"not a Google Cloud Storage path (gs://bucket/name): {str(gcs_path)!r}")
    return match[1], match[2] or ""


def read_process_array(
    key: str,
    shard_fns: Any,
    mismatch_allowed: bool,
    manager: Any,
    callback: Any = None,
    dtype: Any = None,
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
