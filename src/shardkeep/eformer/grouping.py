"""Arrays by dotted key, and in groups of a limited size, for eFormer's API."""

import re
from typing import Any

from shardkeep.eformer.gathering import estimate_array_nbytes
from shardkeep.layouts.safetensors import group_by_size
from shardkeep.model.naming import dotted_names
from shardkeep.model.tree import flatten


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
