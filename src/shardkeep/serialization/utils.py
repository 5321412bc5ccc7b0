"""eFormer's `utils` path: names, sizes, grouping, gathering."""

import re
from typing import Any

import jax
from jax.sharding import Sharding

from shardkeep.arrays import parse_dtype
from shardkeep.formats.safetensors import group_by_size
from shardkeep.gathering import (
    apply_gather_functions,
    broadcast_tensor,
    chunk_tensor_by_memory,
    estimate_array_nbytes,
    reshard,
    to_host,
)
from shardkeep.memory import available_memory
from shardkeep.metadata import dotted_names
from shardkeep.naming import base_of_shard, index_filename, shard_filename
from shardkeep.placing import apply_function, cast_array
from shardkeep.tree import flatten

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
    """The common start of a model's file names.

    >>> derive_base_prefix_from_path("/x/model-00001-of-00004.safetensors")
    '/x/model'
    """
    return base_of_shard(str(path_str))


def estimate_available_memory() -> int:
    """Bytes that may still be used: the host's (or container's) memory, or a device's if one has less."""
    found = [available_memory()]
    for device in jax.local_devices():
        stats: Any = device.memory_stats() or {}
        if "bytes_limit" in stats:
            found.append(int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)))
    return max(min(found), 0)


def flatten_for_broadcast(state: Any) -> dict[str, Any]:
    """The leaves by dotted key.

    >>> flatten_for_broadcast({"a": {"b": 1}})
    {'a.b': 1}
    """
    leaves = flatten(state)[1]
    return dict(zip(dotted_names([leaf.path for leaf in leaves]), (leaf.value for leaf in leaves), strict=True))


def group_keys_by_shard_size(flat_state: dict[str, Any], max_shard_size_bytes: int) -> list[list[str]]:
    """Keys in order, in groups within the limit; an array above it stands alone."""
    _refuse_no_limit(max_shard_size_bytes)
    sizes = [estimate_array_nbytes(array) for array in flat_state.values()]
    return group_by_size(sizes, list(flat_state), max_shard_size_bytes)


def optimize_shard_layout(state: Any, max_shard_size_bytes: int) -> list[list[str]]:
    """Groups within the limit, in load order: tensors of one parent together, numbers sorted as numbers."""
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
    """Keys in natural order, those of one parent together."""
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
    """Whether a path (or an object that stands for one) lies in Google Cloud Storage.

    >>> is_gcs_path("gs://bucket/x"), is_gcs_path("/x")
    (True, False)
    """
    return str(path).startswith("gs://")


def parse_gcs_path(gcs_path: Any) -> tuple[str, str]:
    """Bucket and name in it; `ValueError` for anything else.

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
    """One tensor read through `manager` (anything with `get_tensor`), then its shard function, callback and cast.

    The last value counts keys without a shard function; with `mismatch_allowed=False` such a key is a `KeyError`.
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
            raise KeyError(f"no shard function for {key!r}; there are functions for {', '.join(functions)}")
        if function is None:
            missing = 1
        else:
            array = (
                jax.device_put(array, function) if isinstance(function, Sharding) else apply_function(function, array)
            )
    if callback is not None:
        array = callback(array, key)
    if dtype is not None:
        array = cast_array(array, parse_dtype(dtype), key)
    return key, array, missing
