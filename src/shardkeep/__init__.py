"""shardkeep: atomic, verified and fast checkpoints for JAX in open formats.

Importing JAX takes a second, which `shardkeep --help` should not wait for. So unless JAX is already imported, names are
imported when they are first used.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

from shardkeep._version import __version__

if _typing.TYPE_CHECKING:
    from shardkeep.errors import (
        AccessError,
        CallbackError,
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
        PathError,
        PathTypeError,
        PrefixError,
        ProcessError,
        ShardingError,
        ShardkeepError,
        StorageError,
        TemplateMismatchError,
        TreeError,
        UnsupportedLeafError,
    )
    from shardkeep.loading import abstract, load
    from shardkeep.manifest import Manifest, StoredLeaf, Tree
    from shardkeep.memory import set_memory_budget
    from shardkeep.nodes import OpaqueNode
    from shardkeep.opening import delete, exists, inspect, latest
    from shardkeep.pending import PendingSave
    from shardkeep.perprocess import PerProcess
    from shardkeep.reports import Problem, SaveReport, VerifyReport
    from shardkeep.saving import save, save_async
    from shardkeep.verifying import verify

__all__ = [
    "AccessError",
    "CallbackError",
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
    "OpaqueNode",
    "PathError",
    "PathTypeError",
    "PendingSave",
    "PerProcess",
    "PrefixError",
    "Problem",
    "ProcessError",
    "SaveReport",
    "ShardingError",
    "ShardkeepError",
    "StorageError",
    "StoredLeaf",
    "TemplateMismatchError",
    "Tree",
    "TreeError",
    "UnsupportedLeafError",
    "VerifyReport",
    "__version__",
    "abstract",
    "delete",
    "exists",
    "inspect",
    "latest",
    "load",
    "save",
    "save_async",
    "set_memory_budget",
    "verify",
]

_HOMES = {
    "AccessError": "errors",
    "CallbackError": "errors",
    "CheckpointExistsError": "errors",
    "CheckpointNotFoundError": "errors",
    "CommitUnknownError": "errors",
    "ConflictError": "errors",
    "IncompleteCheckpointError": "errors",
    "IntegrityError": "errors",
    "KeyCollisionError": "errors",
    "Manifest": "manifest",
    "MetadataError": "errors",
    "MissingDataError": "errors",
    "MissingLeafError": "errors",
    "NewerFormatError": "errors",
    "NotADirectoryPathError": "errors",
    "NotEnoughSpaceError": "errors",
    "PathError": "errors",
    "PathTypeError": "errors",
    "PendingSave": "pending",
    "PerProcess": "perprocess",
    "PrefixError": "errors",
    "Problem": "reports",
    "ProcessError": "errors",
    "SaveReport": "reports",
    "ShardingError": "errors",
    "ShardkeepError": "errors",
    "OpaqueNode": "nodes",
    "StorageError": "errors",
    "StoredLeaf": "manifest",
    "TemplateMismatchError": "errors",
    "Tree": "manifest",
    "TreeError": "errors",
    "UnsupportedLeafError": "errors",
    "VerifyReport": "reports",
    "abstract": "loading",
    "delete": "opening",
    "exists": "opening",
    "inspect": "opening",
    "latest": "opening",
    "load": "loading",
    "save": "saving",
    "save_async": "saving",
    "set_memory_budget": "memory",
    "verify": "verifying",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardkeep' has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(f"shardkeep.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "jax" in _sys.modules:  # then now, not during the first save
    for _name in _HOMES:
        __getattr__(_name)
