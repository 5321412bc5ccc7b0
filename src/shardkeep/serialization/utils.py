"""The `utils` module of eFormer's API: names, sizes, grouping, gathering."""

from shardkeep.eformer.gathering import (
    apply_gather_functions,
    broadcast_tensor,
    chunk_tensor_by_memory,
    estimate_array_nbytes,
    estimate_available_memory,
    read_process_array,
    reshard,
    to_host,
)
from shardkeep.eformer.grouping import flatten_for_broadcast, group_keys_by_shard_size, optimize_shard_layout
from shardkeep.eformer.paths import derive_base_prefix_from_path, is_gcs_path, parse_gcs_path
from shardkeep.model.naming import index_filename, shard_filename

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
