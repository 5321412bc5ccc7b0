"""From a path to a checkpoint: which kind lies there, where its bytes are, and its manifest."""

import errno
import os

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
from shardkeep.exchange import DEFAULT_SHARD_SIZE, INDEX, SUFFIX, exchange_at, exchange_in, parse_size
from shardkeep.formats.base import Format
from shardkeep.formats.safetensors import SafetensorsFormat
from shardkeep.formats.tensorstore import TensorstoreFormat
from shardkeep.manifest import MANIFEST, Manifest
from shardkeep.naming import base_of_shard
from shardkeep.stores.base import Store, location
from shardkeep.stores.local import CONTROL, LocalStore


def new_target(path: object, format: str, compression: str | None, max_shard_size: int | str | None) -> Target:
    """Where a save to `path` goes: exchange files if it ends in .safetensors, else a directory."""
    text = location(path)
    chosen = _format(format, compression)
    if text.endswith(SUFFIX) and not os.path.isdir(text):
        if chosen.name != "safetensors":
            raise ValueError("a path that ends in .safetensors holds the safetensors format, not tensorstore")
        whole = base_of_shard(text)
        if os.path.exists(whole + INDEX) and whole + SUFFIX != text:
            raise ValueError(f"{text} is a shard of {whole}{INDEX}; save to {whole}{SUFFIX} to replace all of it")
        return exchange_at(text, parse_size(DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size))
    if max_shard_size is not None:
        raise ValueError("max_shard_size is for exchange files: give a path that ends in .safetensors")
    if os.path.lexists(text) and not os.path.isdir(text):
        raise NotADirectoryPathError(f"{text} is a file; a checkpoint is a directory (or a file named *{SUFFIX})")
    return Directory(LocalStore(text), chosen)


def _format(name: str, compression: str | None) -> Format:
    if compression not in (None, "zstd"):
        raise ValueError(f"compression must be None or 'zstd', not {compression!r}")
    if name == "tensorstore":
        return TensorstoreFormat(compression)
    if name != "safetensors":
        raise ValueError(f"format must be 'safetensors' or 'tensorstore', not {name!r}")
    if compression is not None:
        raise ValueError("the safetensors format has no compression; use format='tensorstore'")
    return SafetensorsFormat()


def find(path: object) -> Target:
    """What lies at `path`: a checkpoint directory of ours, exchange files, or another program's safetensors files."""
    text = location(path)
    if os.path.isdir(text):
        ours = os.path.exists(os.path.join(text, MANIFEST)) or os.path.exists(os.path.join(text, CONTROL))
        return (None if ours else exchange_in(text)) or Directory(LocalStore(text))
    if os.path.basename(text) == MANIFEST and os.path.exists(text):
        return Directory(LocalStore(os.path.dirname(text)))
    if text.endswith((SUFFIX, INDEX)) or any(os.path.exists(text + ending) for ending in (SUFFIX, INDEX)):
        return exchange_at(text)
    if os.path.exists(text):
        raise CheckpointNotFoundError(f"no checkpoint at {text}: it is a file, but no safetensors file")
    return Directory(LocalStore(text))


def open_checkpoint(path: object) -> tuple[Store, Manifest]:
    """The store and the manifest of the checkpoint at `path`."""
    try:
        target = find(path)
        return target.store, target.read()
    except OSError as error:
        if isinstance(error, ShardkeepError):
            raise
        raise storage_error(error, f"reading {path}", "Check the path and its permissions") from error


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

    >>> import shardkeep
    >>> shardkeep.exists(tmp / "nothing")
    False
    """
    try:
        open_checkpoint(path)
    except NewerFormatError:
        return True
    except StorageError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise
    except (FileNotFoundError, IntegrityError):
        return False
    return True


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
