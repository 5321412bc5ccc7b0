"""shardkeep: checkpoints for JAX that are whole or not there, checked, fast, and in open formats."""

from shardkeep._version import __version__
from shardkeep.errors import (
    AccessError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    ConflictError,
    IncompleteCheckpointError,
    IntegrityError,
    KeyCollisionError,
    MetadataError,
    MissingDataError,
    MissingLeafError,
    NewerFormatError,
    NotADirectoryPathError,
    NotEnoughSpaceError,
    PrefixError,
    ProcessError,
    ShardingError,
    ShardkeepError,
    StorageError,
    TemplateMismatchError,
    TreeError,
    UnsupportedLeafError,
)
from shardkeep.loading import load
from shardkeep.manifest import Manifest
from shardkeep.memory import set_memory_budget
from shardkeep.nodes import StandIn
from shardkeep.opening import delete, exists, inspect
from shardkeep.pending import PendingSave
from shardkeep.reports import Problem, SaveReport, VerifyReport
from shardkeep.saving import save, save_async
from shardkeep.verifying import verify

__all__ = [
    "AccessError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CommitUnknownError",
    "ConflictError",
    "IncompleteCheckpointError",
    "IntegrityError",
    "KeyCollisionError",
    "Manifest",
    "MetadataError",
    "MissingDataError",
    "MissingLeafError",
    "NewerFormatError",
    "NotADirectoryPathError",
    "NotEnoughSpaceError",
    "PendingSave",
    "PrefixError",
    "Problem",
    "ProcessError",
    "SaveReport",
    "ShardingError",
    "ShardkeepError",
    "StandIn",
    "StorageError",
    "TemplateMismatchError",
    "TreeError",
    "UnsupportedLeafError",
    "VerifyReport",
    "__version__",
    "delete",
    "exists",
    "inspect",
    "load",
    "save",
    "save_async",
    "set_memory_budget",
    "verify",
]
