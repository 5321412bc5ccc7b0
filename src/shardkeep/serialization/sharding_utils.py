"""The `sharding_utils` module of eFormer's API: trees of shardings."""

from shardkeep.eformer.shardings import (
    apply_sharding_tree,
    create_sharding_tree_from_index,
    make_itsharded,
    validate_sharding_tree,
)

__all__ = ["apply_sharding_tree", "create_sharding_tree_from_index", "make_itsharded", "validate_sharding_tree"]
