"""From a path to a checkpoint: which kind lies there, where its bytes are, and its manifest."""

import errno
import logging
import os
import re
from collections.abc import Callable
from itertools import groupby

from shardkeep.commit import Target
from shardkeep.commit import delete as delete_target
from shardkeep.directory import Directory
from shardkeep.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    NewerFormatError,
    NotADirectoryPathError,
    ShardkeepError,
    StorageError,
    storage_error,
)
from shardkeep.exchange import (
    DEFAULT_SHARD_SIZE,
    INDEX,
    SUFFIX,
    exchange_at,
    exchange_bases,
    exchange_in,
    parse_size,
)
from shardkeep.formats.base import Format
from shardkeep.formats.safetensors import SafetensorsFormat
from shardkeep.formats.tensorstore import TensorstoreFormat
from shardkeep.manifest import MANIFEST, Manifest
from shardkeep.naming import base_of_shard
from shardkeep.stores.base import Store
from shardkeep.stores.local import CONTROL
from shardkeep.stores.places import URLS, is_directory, location, parent_and_name, sibling, store_at
from shardkeep.stores.places import exists as exists_at

log = logging.getLogger("shardkeep")

_MOST_LOOKED_INTO = 50  # directories, for a hint about a wrong path


def new_target(
    path: object, format: str, compression: str | None, max_shard_size: int | str | None, directory: bool = False
) -> Target:
    """Where a save to `path` goes: exchange files if it ends in .safetensors (and need not be a directory)."""
    place = location(path)
    whole_bucket = place.startswith(URLS) and place.count("/") == 2
    if place.endswith(SUFFIX) and not directory and not whole_bucket and not is_directory(place):
        if _format(format, compression, None).name != "safetensors":
            raise ValueError("a path that ends in .safetensors holds the safetensors format, not tensorstore")
        whole = base_of_shard(place)
        if whole + SUFFIX != place and exists_at(sibling(place, whole + INDEX)):
            raise ValueError(f"{place} is a shard of {whole}{INDEX}; save to {whole}{SUFFIX} to replace all of it")
        return exchange_at(place, parse_size(DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size))
    if max_shard_size is not None:
        raise ValueError("max_shard_size is for exchange files: give a path that ends in .safetensors")
    if not place.startswith(URLS) and os.path.lexists(place) and not os.path.isdir(place):
        raise NotADirectoryPathError(f"{place} is a file; a checkpoint is a directory (or a file named *{SUFFIX})")
    store = store_at(place)
    return Directory(store, _format(format, compression, store.object_limit))


def _format(name: str, compression: str | None, limit: int | None) -> Format:
    if compression not in (None, "zstd"):
        raise ValueError(f"compression must be None or 'zstd', not {compression!r}")
    if name == "tensorstore":
        return TensorstoreFormat(compression, limit)
    if name != "safetensors":
        raise ValueError(f"format must be 'safetensors' or 'tensorstore', not {name!r}")
    if compression is not None:
        raise ValueError("the safetensors format has no compression; use format='tensorstore'")
    return SafetensorsFormat(limit)


def find(path: object) -> Target:
    """What lies at `path`: a checkpoint directory of ours, exchange files, or another program's safetensors files."""
    place = location(path)
    store = store_at(place)
    inside = store.children("")
    if inside or (not place.startswith(URLS) and is_directory(place)):
        return (None if {MANIFEST, CONTROL} & set(inside) else exchange_in(place, inside)) or Directory(store)
    if place.startswith(URLS) and place.count("/") == 2:  # a whole bucket, and nothing in it
        return Directory(store)
    if place.endswith(f"/{MANIFEST}") and exists_at(place):
        return Directory(store_at(parent_and_name(place)[0]))
    if place.endswith((SUFFIX, INDEX)) or any(exists_at(sibling(place, place + end)) for end in (SUFFIX, INDEX)):
        return exchange_at(place)
    if exists_at(place):
        raise CheckpointNotFoundError(f"no checkpoint at {place}: it is a file, but no safetensors file")
    return Directory(store)


def open_checkpoint(path: object) -> tuple[Store, Manifest]:
    """The store and the manifest of the checkpoint at `path`; where there is none, the error names the nearest."""
    try:
        return _open(path)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(_with_hint(location(path), str(error))) from None


def _open(path: object) -> tuple[Store, Manifest]:
    try:
        target = find(path)
        return target.store, target.read()
    except OSError as error:
        if isinstance(error, ShardkeepError):
            raise
        raise storage_error(error, f"reading {path}", "Check the path and its permissions") from error


def _with_hint(place: str, message: str) -> str:
    """What was not found, and which checkpoint may have been meant. Looking for it never fails: the message stands."""
    try:
        if is_directory(place):
            newest = _latest(place, log.debug)
            if newest is not None:
                found = f"it holds checkpoints but is none itself. Give the path of one; the newest is {newest}"
                return f"no checkpoint at {place}: {found}"
            deeper = None if place.startswith(URLS) else _deeper(place)
            return f"{message}. Further down there is {deeper}" if deeper else message
        parent, _ = parent_and_name(place)
        beside = _latest(parent, log.debug) if not exists_at(place) and is_directory(parent) else None
        return f"{message}. The newest beside it is {beside}" if beside not in (None, parent) else message
    except (OSError, ValueError):
        return message


def _deeper(place: str) -> str | None:
    """A checkpoint two levels below a local directory; only so many of its directories are looked into."""
    names = (name for name in os.listdir(place) if not name.startswith("."))
    below = [path for path in (f"{place}/{name}" for name in sorted(names)) if os.path.isdir(path)]
    return next((found for path in below[:_MOST_LOOKED_INTO] if (found := _latest(path, log.debug)) is not None), None)


def inspect(path: object) -> Manifest:
    """What a checkpoint holds, without reading any array: leaves, shapes, dtypes, bytes, pieces, metadata.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "step_1", {"w": np.zeros((2, 3), np.float32)}, metadata={"step": 1})
    >>> manifest = shardkeep.inspect(tmp / "step_1")
    >>> manifest.leaves["w"].shape, manifest.leaves["w"].dtype, manifest.metadata["step"]
    ((2, 3), 'float32', 1)
    """
    return open_checkpoint(path)[1]


def exists(path: object) -> bool:
    """Whether a committed checkpoint is there. One that never finished, or whose manifest is damaged, does not count.

    What cannot be the path of a checkpoint at all is a `PathError`, as everywhere; so is the root directory.

    >>> import shardkeep
    >>> shardkeep.exists(tmp / "nothing")
    False
    """
    try:
        _open(path)
    except NewerFormatError:
        return True
    except StorageError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise
    except (FileNotFoundError, IntegrityError):
        return False
    return True


def latest(path: object) -> str | None:
    """The newest whole checkpoint in a directory or below a URL; None if there is none, or nothing at all.

    The newest is the one with the highest number in its name: step_200 comes after step_30, epoch_2_step_5 after
    epoch_1_step_9. Names without a number come last, and of those the one saved last. What `exists` would not count (a
    save that was cut short, say) is passed over. Only what lies directly in the directory is looked at; a `path`
    that is itself a checkpoint, with none in it, is given back.

    >>> import numpy as np, shardkeep
    >>> for step in (9, 10):
    ...     _ = shardkeep.save(tmp / f"run/step_{step}", {"w": np.zeros(3)})
    >>> shardkeep.latest(tmp / "run") == str(tmp / "run" / "step_10")
    True
    >>> print(shardkeep.latest(tmp / "elsewhere"))
    None
    """
    place = location(path)
    try:
        return _latest(place, log.warning)
    except OSError as error:
        if isinstance(error, ShardkeepError):
            raise
        then = "Check the path and its permissions"
        raise storage_error(error, f"looking for checkpoints in {place}", then) from error


def _latest(place: str, tell: Callable[..., None]) -> str | None:
    """`tell` is told what looks like a checkpoint and cannot be read."""
    itself = _whole(place, tell)
    if itself is not None and not itself.trees:  # of a later version: nobody knows what in it is whose
        return place
    taken = {file.name.partition("/")[0] for tree in itself.trees.values() for file in tree.files} if itself else set()
    free = [n for n in store_at(place).children("") if n not in taken and n != MANIFEST and not n.startswith(".")]
    names = {name: name for name in free if not name.endswith((SUFFIX, INDEX))}
    names |= {base: base + SUFFIX for base in exchange_bases(free)}
    for _, equal in groupby(sorted(names, key=_numbers, reverse=True), _numbers):
        found: list[tuple[str, str]] = []
        for name in equal:
            manifest = _whole(sibling(place, f"{place}/{names[name]}"), tell)
            if manifest is not None:
                found.append((max((tree.created for tree in manifest.trees.values()), default=""), names[name]))
        if found:
            return sibling(place, f"{place}/{max(found)[1]}")
    return place if itself is not None else None


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall("[0-9]{1,4000}", name))


def _whole(place: str, tell: Callable[..., None]) -> Manifest | None:
    """The manifest of a whole checkpoint, ours or one with an index; arrays are not searched for."""
    try:
        target = find(place)
        marks = (*target.documents, *target.companions)
        return target.read() if any(target.store.size(name) is not None for name in marks) else None
    except NewerFormatError:
        return Manifest(place, "", {})  # it counts: loading it says what is needed
    except (IntegrityError, PermissionError) as error:
        tell("shardkeep: %s is passed over: %s", place, error)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return None


def delete(path: object) -> None:
    """Remove a checkpoint, its manifest first, so that a reader never sees half of it. Other files there stay.

    What a save that never finished left there goes as well. Arrays that a running program has mapped remain valid.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "old", {"w": np.zeros(3)})
    >>> shardkeep.delete(tmp / "old")
    >>> shardkeep.exists(tmp / "old")
    False
    """
    target = find(path)
    try:
        delete_target(target)
        if isinstance(target, Directory):
            target.store.remove_if_empty()
    except OSError as error:
        if isinstance(error, ShardkeepError):
            raise
        left = any(target.store.size(name) is not None for name in target.documents)
        then = "The checkpoint is still there" if left else "It is no longer a checkpoint, but files of it remain"
        raise storage_error(error, f"deleting {target.where}", then) from error
