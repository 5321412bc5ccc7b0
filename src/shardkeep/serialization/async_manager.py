"""The `async_manager` module of eFormer's API: the manager and its metadata."""

from shardkeep.eformer.manager import AsyncCheckpointManager
from shardkeep.eformer.metadata import CheckpointMetadata

__all__ = ["AsyncCheckpointManager", "CheckpointMetadata"]
