"""The `async_manager` module of eFormer's API: the manager and its metadata."""

from shardkeep.manager import AsyncCheckpointManager
from shardkeep.metadata import CheckpointMetadata

__all__ = ["AsyncCheckpointManager", "CheckpointMetadata"]
