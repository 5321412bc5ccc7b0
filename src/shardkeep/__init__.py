"""shardkeep: atomic, verified and fast checkpoints for JAX in open formats.

Importing JAX takes a second, which `shardkeep --help` should not wait for. So unless JAX is already imported, names are
imported when they are first used.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

from shardkeep._version import __version__

if _typing.TYPE_CHECKING:
    from shardkeep import remap
    from shardkeep.catalog import delete, exists, inspect, latest
    from shardkeep.errors import (
        AccessError,
        CallbackError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        CommitUnknownError,
        ConflictError,
        HostMemoryError,
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
        RemapError,
        ShardingError,
        ShardkeepError,
        StorageError,
        TemplateMismatchError,
        TreeError,
        UnsupportedLeafError,
    )
    from shardkeep.loading.load import abstract, load
    from shardkeep.loading.planning import LoadPlan, plan_load
    from shardkeep.loading.verify import verify
    from shardkeep.model.leaves import StoredLeaf
    from shardkeep.model.manifest import Manifest, Tree
    from shardkeep.model.nodes import OpaqueNode
    from shardkeep.model.perprocess import PerProcess
    from shardkeep.model.reports import Problem, SaveReport, VerifyReport
    from shardkeep.runs.iterators import Global
    from shardkeep.runs.keep import Keep
    from shardkeep.runs.resume import Resumed
    from shardkeep.runs.run import Run
    from shardkeep.runs.steps import Step
    from shardkeep.runtime.budget import set_memory_budget
    from shardkeep.saving.pending import PendingSave
    from shardkeep.saving.save import save, save_async

__all__ = [
    "AccessError",
    "CallbackError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CommitUnknownError",
    "ConflictError",
    "Global",
    "HostMemoryError",
    "IncompleteCheckpointError",
    "IntegrityError",
    "Keep",
    "KeyCollisionError",
    "LoadPlan",
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
    "RemapError",
    "Resumed",
    "Run",
    "SaveReport",
    "ShardingError",
    "ShardkeepError",
    "Step",
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
    "plan_load",
    "remap",
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
    "Global": "runs.iterators",
    "HostMemoryError": "errors",
    "IncompleteCheckpointError": "errors",
    "IntegrityError": "errors",
    "Keep": "runs.keep",
    "KeyCollisionError": "errors",
    "LoadPlan": "loading.planning",
    "Manifest": "model.manifest",
    "MetadataError": "errors",
    "MissingDataError": "errors",
    "MissingLeafError": "errors",
    "NewerFormatError": "errors",
    "NotADirectoryPathError": "errors",
    "NotEnoughSpaceError": "errors",
    "OpaqueNode": "model.nodes",
    "PathError": "errors",
    "PathTypeError": "errors",
    "PendingSave": "saving.pending",
    "PerProcess": "model.perprocess",
    "PrefixError": "errors",
    "Problem": "model.reports",
    "ProcessError": "errors",
    "RemapError": "errors",
    "Resumed": "runs.resume",
    "Run": "runs.run",
    "SaveReport": "model.reports",
    "ShardingError": "errors",
    "ShardkeepError": "errors",
    "Step": "runs.steps",
    "StorageError": "errors",
    "StoredLeaf": "model.leaves",
    "TemplateMismatchError": "errors",
    "Tree": "model.manifest",
    "TreeError": "errors",
    "UnsupportedLeafError": "errors",
    "VerifyReport": "model.reports",
    "abstract": "loading.load",
    "delete": "catalog",
    "exists": "catalog",
    "inspect": "catalog",
    "latest": "catalog",
    "load": "loading.load",
    "plan_load": "loading.planning",
    "remap": "",
    "save": "saving.save",
    "save_async": "saving.save",
    "set_memory_budget": "runtime.budget",
    "verify": "loading.verify",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardkeep' has no attribute {name!r}")
    home = _HOMES[name]
    if not home:  # a module
        return _importlib.import_module(f"shardkeep.{name}")
    value = globals()[name] = getattr(_importlib.import_module(f"shardkeep.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "jax" in _sys.modules:  # then now, not during the first save
    for _name in _HOMES:
        __getattr__(_name)
