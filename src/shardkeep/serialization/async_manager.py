"""eFormer's `async_manager` path: the manager and its metadata."""

from shardkeep.manager import AsyncCheckpointManager
from shardkeep.metadata import CheckpointMetadata

__all__ = ["AsyncCheckpointManager", "CheckpointMetadata"]
