"""shardkeep: checkpoints for JAX that are whole or not there, checked, fast, and in open formats.

JAX takes a second to import, which `shardkeep --help` need not wait for: so where it is not there yet, names are
imported when they are first used.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

from shardkeep._version import __version__

if _typing.TYPE_CHECKING:
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
        PathError,
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
    from shardkeep.opening import delete, exists, inspect, latest
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
    "PathError",
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
    "latest",
    "load",
    "save",
    "save_async",
    "set_memory_budget",
    "verify",
]

_HOMES = {
    "AccessError": "errors",
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
    "PendingSave": "pending",
    "PrefixError": "errors",
    "Problem": "reports",
    "ProcessError": "errors",
    "SaveReport": "reports",
    "ShardingError": "errors",
    "ShardkeepError": "errors",
    "StandIn": "nodes",
    "StorageError": "errors",
    "TemplateMismatchError": "errors",
    "TreeError": "errors",
    "UnsupportedLeafError": "errors",
    "VerifyReport": "reports",
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


if "jax" in _sys.modules:  # then now, not within the first save
    for _name in _HOMES:
        __getattr__(_name)
