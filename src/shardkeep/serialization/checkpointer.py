"""Checkpoints of a training loop by steps and by time, and finding them again."""

from shardkeep.eformer.checkpointer import Checkpointer
from shardkeep.eformer.discovery import find_latest_checkpoint, read_checkpoint_metadata
from shardkeep.eformer.intervals import CheckpointInterval

_read_checkpoint_metadata = read_checkpoint_metadata  # EasyDeL imports it by this name

__all__ = ["CheckpointInterval", "Checkpointer", "find_latest_checkpoint", "read_checkpoint_metadata"]
