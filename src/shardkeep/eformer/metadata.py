"""CheckpointMetadata: what eFormer's API records with every tree, and how older and foreign forms of it are read."""

import datetime
import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from shardkeep._version import __version__
from shardkeep.errors import IntegrityError
from shardkeep.loading.moving import on_host
from shardkeep.model.arrays import Region, is_prng_dtype
from shardkeep.model.leaves import StoredLeaf
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.model.naming import dotted_names
from shardkeep.model.tree import Path

log = logging.getLogger("shardkeep")

_PART_NAME = re.compile(r"(?P<key>.*)\[(?P<region>\d+:\d+(,\d+:\d+)*)\]", re.DOTALL)


@dataclass(eq=False)
class CheckpointMetadata:
    """The metadata that eFormer's API records with a checkpoint. Two are equal if their `to_dict()` is.

    Attributes:
        version: The version of the package that wrote the checkpoint.
        timestamp: When the checkpoint was created, in ISO format; the current time in UTC if None is given.
        checksum: The SHA-256 of each array, by dotted key, if validation is enabled.
        array_metadata: The shape and dtype of each array, by dotted key.
        framework_version: The version of JAX.
        custom_metadata: The user's own metadata.

    >>> CheckpointMetadata(custom_metadata={"step": 3}).to_dict()["custom_metadata"]
    {'step': 3}
    """

    version: str = __version__
    timestamp: datetime.datetime | str | None = None
    checksum: dict[str, str] | None = None
    array_metadata: dict[str, Any] | None = None
    framework_version: str | None = None
    custom_metadata: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.timestamp is None:
            self.timestamp = datetime.datetime.now(datetime.UTC).isoformat()

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, CheckpointMetadata) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (it can be changed)

    def to_dict(self) -> dict[str, Any]:
        """The six fields as JSON values: a dict that is None becomes empty, the time is in ISO format (UTC)."""
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
        """The metadata that `to_dict` turned into `data`.

        Args:
            data: The fields by name. Unknown names are ignored. Without a timestamp the time is unknown: it stays None.
        """
        known = {field.name for field in fields(cls)}
        found = cls(**{key: value for key, value in data.items() if key in known})
        found.timestamp = data.get("timestamp")
        return found


def _iso(moment: datetime.datetime | str | None) -> str | None:
    if not isinstance(moment, datetime.datetime):
        return moment
    return (moment.astimezone(datetime.UTC) if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).isoformat()


def describe_arrays(arrays: Mapping[str, Any], custom: Mapping[str, object] | None, checksums: bool) -> dict[str, Any]:
    """The metadata that a save records for arrays by name; with `checksums`, the SHA-256 of each as it is stored.

    Arrays that are not fully addressable from this process are left to `checksums_of_parts`.
    """
    whole = {key: array for key, array in arrays.items() if not _is_spread(array)}
    return CheckpointMetadata(
        checksum={key: compute_checksum(_stored(array)) for key, array in whole.items()} if checksums else None,
        array_metadata={key: {"shape": list(a.shape), "dtype": str(a.dtype)} for key, a in arrays.items()},
        framework_version=jax.__version__,
        custom_metadata=dict(custom or {}),
    ).to_dict()


def checksums_of_parts(arrays: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of this process's shards of arrays that span processes; each shard is one process's to hash."""
    found: dict[str, str] = {}
    for key, array in arrays.items():
        if _is_spread(array):
            data = _stored(array)
            for shard in data.addressable_shards:
                if shard.replica_id == 0:
                    region = Region.from_index(shard.index, data.shape)
                    found[_part_name(key, region)] = compute_checksum(shard.data)
    return found


def _is_spread(array: Any) -> bool:
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def _part_name(key: str, region: Region) -> str:
    """The name of a part's checksum.

    >>> _part_name("w", Region((0, 4), (2, 4)))
    'w[0:2,4:8]'
    """
    return f"{key}[{','.join(f'{a}:{a + n}' for a, n in zip(region.start, region.shape, strict=True))}]"


def _parts_of(recorded: Mapping[str, str]) -> dict[str, list[tuple[Region, str]]]:
    """Recorded checksums of parts, by the array they belong to."""
    found: dict[str, list[tuple[Region, str]]] = {}
    for name, checksum in recorded.items():
        match = _PART_NAME.fullmatch(name)
        if match:
            bounds = [tuple(map(int, part.split(":"))) for part in match["region"].split(",")]
            region = Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
            found.setdefault(match["key"], []).append((region, checksum))
    return found


def _part(value: Any, region: Region) -> Any:
    """A part of an array in host memory; None if not all of it is addressable from this process."""
    if not _is_spread(value):
        return on_host(value)[region.slices]
    found = np.empty(region.shape, value.dtype)
    shards = {Region.from_index(shard.index, value.shape): shard.data for shard in value.addressable_shards}
    seen = 0
    for there, data in shards.items():
        common = there.intersect(region)
        if common is not None:
            found[common.within(region).slices] = on_host(data)[common.within(there).slices]
            seen += common.size
    return found if seen == region.size else None


def _stored(array: Any) -> Any:
    """An array as its bytes are stored: the data of PRNG keys, and no foreign byte order."""
    if is_prng_dtype(array.dtype):
        return jax.random.key_data(array)
    return array.astype(array.dtype.newbyteorder("=")) if isinstance(array, np.ndarray) else array


def compute_checksum(array: Any) -> str:
    """SHA-256 of an array's C-order bytes, in hex."""
    return hashlib.sha256(on_host(array).tobytes()).hexdigest()


def metadata_of(tree: Tree) -> dict[str, Any]:
    """The CheckpointMetadata of a saved tree, whichever API saved it; else the metadata of another program's file."""
    found = dict(tree.metadata)
    known = {field.name for field in fields(CheckpointMetadata)}
    if known <= found.keys():
        return {key: _decoded(key, value) for key, value in found.items() if key in known}
    if tree.format == "foreign":
        return found
    leaves = tree.arrays
    names = dotted_names([leaf.path for leaf in leaves])
    arrays = {n: {"shape": list(x.shape), "dtype": x.dtype} for n, x in zip(names, leaves, strict=True)}
    return CheckpointMetadata(timestamp=tree.created, array_metadata=arrays, custom_metadata=found).to_dict()


def _decoded(key: str, value: Any) -> Any:
    """eFormer puts JSON strings into safetensors headers, which hold strings only."""
    if not isinstance(value, str):
        return value
    if key in ("version", "timestamp", "framework_version"):  # plain strings
        return None if value == "null" else value
    try:
        return json.loads(value)
    except ValueError:
        return value


def checker(manifest: Manifest, tree: Tree, required: bool) -> Callable[[StoredLeaf, Any], None]:
    """A function that compares arrays with their recorded SHA-256. `required`: there must be something to compare."""
    arrays = tree.arrays
    recorded: Mapping[str, str] = metadata_of(tree).get("checksum") or {}
    names = dotted_names([leaf.path for leaf in arrays])
    by_part = _parts_of(recorded)
    checksums: dict[Path, list[tuple[Region | None, str]]] = {}
    for leaf, name in zip(arrays, names, strict=True):
        if name in recorded:
            checksums[leaf.path] = [(None, recorded[name])]
        elif name in by_part:
            checksums[leaf.path] = list(by_part[name])
    foreign = tree.format == "foreign"
    unchecked = [leaf.key for leaf in arrays if leaf.path not in checksums] if foreign else []
    if required and unchecked and not checksums:
        raise ValueError(
            f"{manifest.path} has neither digests nor checksums, so there is nothing to validate against; "
            "load it without validate=True"
        )
    if required and unchecked:
        log.warning("%s: no checksum is recorded for %s", manifest.path, ", ".join(unchecked[:8]))

    def check(leaf: StoredLeaf, value: Any) -> None:
        if leaf.path not in checksums:
            return
        data = jax.random.key_data(value) if is_prng_dtype(value.dtype) else value
        # Another process may see what this one does not; the digests of what was read have been checked anyway.
        parts = [(_part(data, region or Region.whole(data.shape)), sha) for region, sha in checksums[leaf.path]]
        if all(part is None or compute_checksum(part) == checksum for part, checksum in parts):
            return
        text = f"leaf {leaf.key!r} does not match the checksum recorded for it"
        if not foreign or len(manifest.trees) == 1:
            raise IntegrityError(text, leaf=leaf.key)
        log.warning("%s (eFormer keeps one record for all prefixes; it may belong to another prefix)", text)

    return check
