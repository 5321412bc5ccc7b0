"""The `serialization` module of eFormer's API: trees to and from directories."""

from shardkeep.eformer.leaves import (
    is_array_like,
    join_key,
    leaf_key_paths,
    tree_deserialize_leaves,
    tree_serialize_leaves,
)

__all__ = ["is_array_like", "join_key", "leaf_key_paths", "tree_deserialize_leaves", "tree_serialize_leaves"]
