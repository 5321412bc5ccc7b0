"""CheckpointMetadata: what the documented API records with every tree, and how older and foreign forms are read."""

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from shardkeep._version import __version__
from shardkeep.manifest import Tree


@dataclass
class CheckpointMetadata:
    """Who saved a tree and when, what is in it, and the user's own part.

    >>> CheckpointMetadata(custom_metadata={"step": 3}).to_dict()["custom_metadata"]
    {'step': 3}
    """

    version: str = __version__
    timestamp: datetime.datetime | str | None = None
    checksum: dict[str, str] | None = None
    array_metadata: dict[str, Any] | None = None
    framework_version: str | None = None
    custom_metadata: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The six fields as JSON: dicts never None, the time in ISO form (UTC)."""
        return {
            "version": self.version,
            "timestamp": _iso(self.timestamp),
            "checksum": dict(self.checksum or {}),
            "array_metadata": dict(self.array_metadata or {}),
            "framework_version": self.framework_version,
            "custom_metadata": dict(self.custom_metadata or {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CheckpointMetadata":
        """The metadata in a dict; keys it does not know are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


def _iso(moment: datetime.datetime | str | None) -> str | None:
    if not isinstance(moment, datetime.datetime):
        return moment
    return (moment.astimezone(datetime.UTC) if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).isoformat()


def describe_arrays(arrays: Mapping[str, Any], custom: Mapping[str, Any] | None, checksums: bool) -> dict[str, Any]:
    """The metadata a save records for arrays by dotted key; `checksums`: with the SHA-256 of each."""
    return CheckpointMetadata(
        timestamp=datetime.datetime.now(datetime.UTC),
        checksum={key: compute_checksum(array) for key, array in arrays.items()} if checksums else None,
        array_metadata={key: {"shape": list(a.shape), "dtype": str(a.dtype)} for key, a in arrays.items()},
        framework_version=jax.__version__,
        custom_metadata=dict(custom or {}),
    ).to_dict()


def compute_checksum(array: Any) -> str:
    """SHA-256 of an array's C-order bytes, in hex."""
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def metadata_of(tree: Tree) -> dict[str, Any]:
    """The CheckpointMetadata of a saved tree, whoever saved it; a foreign file's own metadata if it has none."""
    found = dict(tree.metadata)
    known = {field.name for field in fields(CheckpointMetadata)}
    if known <= found.keys():
        return {key: _decoded(key, value) for key, value in found.items() if key in known}
    if tree.format == "foreign":
        return found
    return CheckpointMetadata(timestamp=tree.created, custom_metadata=found).to_dict()


def _decoded(key: str, value: Any) -> Any:
    """eFormer puts JSON texts into safetensors headers, which hold strings only."""
    if not isinstance(value, str) or key in ("version", "timestamp"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
