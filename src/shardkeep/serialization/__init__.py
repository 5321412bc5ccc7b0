"""The serialization API that eFormer documents. To use it, replace `eformer.serialization` in imports."""

from shardkeep.serialization.async_manager import AsyncCheckpointManager, CheckpointMetadata
from shardkeep.serialization.checkpointer import Checkpointer, CheckpointInterval
from shardkeep.serialization.serialization import tree_deserialize_leaves, tree_serialize_leaves

__all__ = [
    "AsyncCheckpointManager",
    "CheckpointInterval",
    "CheckpointMetadata",
    "Checkpointer",
    "tree_deserialize_leaves",
    "tree_serialize_leaves",
]
