"""From a path to a target or a checkpoint; inspect, exists, latest, delete."""

import errno
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager

from shardkeep.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    IntegrityError,
    NewerFormatError,
    NotADirectoryPathError,
    PathError,
    ProcessError,
    ShardkeepError,
    StorageError,
    storage_error,
)
from shardkeep.layouts.exchange import DEFAULT_SHARD_SIZE
from shardkeep.layouts.registry import layout_named
from shardkeep.model.manifest import Manifest
from shardkeep.model.naming import base_of_shard
from shardkeep.runtime.save_queue import running_since
from shardkeep.stores.base import Store
from shardkeep.stores.location import Location, is_directory, location, store_at
from shardkeep.stores.location import exists as exists_at
from shardkeep.targets.base import Target
from shardkeep.targets.cleanup import delete as delete_target
from shardkeep.targets.directory import Directory
from shardkeep.targets.exchange import INDEX_SUFFIX, SUFFIX, exchange_at, parse_size
from shardkeep.targets.resolve import TooManyError, find, find_complete, find_newest, look

log = logging.getLogger("shardkeep")

# Extensions of files that other programs write. `.zarr` and `.ckpt` are left out, as directories have them too.
_FILE_ENDINGS = (
    *(".npz", ".npy", ".pt", ".pth", ".bin", ".pkl", ".pickle", ".msgpack"),
    *(".h5", ".hdf5", ".keras", ".gguf", ".onnx", ".json"),
)

# For a hint about a wrong path
_MOST_LOOKED_INTO = 50  # directories
_MOST_LOOKED_AT = 100  # names in one of them


def new_target(
    place: Location, format: str, compression: str | None, max_shard_size: int | str | None, directory: bool = False
) -> Target:
    """Where a save goes: exchange files if it ends in .safetensors, else a checkpoint directory.

    Raises a `PathError` for a new directory that has the extension of another program's files.

    Args:
        place: The directory or file.
        format: The name of a layout (`layouts.registry`).
        compression: None or `zstd`.
        max_shard_size: For exchange files, the size above which they are split.
        directory: Whether it is a directory, whatever its name.
    """
    if place.text.endswith(SUFFIX) and not directory and not place.is_bucket and not is_directory(place):
        if layout_named(format, compression).name != "safetensors":
            raise ValueError("a path that ends in .safetensors needs format='safetensors', not 'zarr'")
        whole = base_of_shard(place.name)
        if whole + SUFFIX != place.name and exists_at(place.with_name(whole + INDEX_SUFFIX)):
            whole = place.with_name(whole)
            raise ValueError(
                f"{place} is a shard of {whole}{INDEX_SUFFIX}; save to {whole}{SUFFIX} to replace all shards"
            )
        return exchange_at(place, parse_size(DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size))
    if max_shard_size is not None:
        raise ValueError("max_shard_size is only for exchange files; pass a path that ends in .safetensors")
    if not place.is_url and os.path.lexists(place.text) and not os.path.isdir(place.text):
        raise NotADirectoryPathError(f"{place} is a file; pass a directory, or a path that ends in {SUFFIX}")
    is_file_name = place.text.lower().endswith(_FILE_ENDINGS) and not directory and not place.is_bucket
    if is_file_name and not is_directory(place):
        ending = os.path.splitext(place.name)[1]
        raise PathError(
            f"{place.name!r} ends in {ending}, but shardkeep does not write {ending} files. For a checkpoint "
            f"directory, pass a path without {ending}; for a file that other programs can read, pass one that ends in "
            f"{SUFFIX}"
        )
    store = store_at(place)
    return Directory(store, layout_named(format, compression, store.traits))


def open_checkpoint(place: Location) -> tuple[Store, Manifest]:
    """The store and the manifest of the checkpoint at a place. If there is none, the error names the nearest one."""
    # Asked before reading: a save that has ended until then is found.
    since = running_since(place.resolve().text)
    try:
        with _explained(place):
            target = find(place)
            return target.store, target.read()
    except CheckpointNotFoundError as error:
        if since is not None:  # it has not created the directory yet
            raise IncompleteCheckpointError(
                f"{place} holds no committed checkpoint yet: a save by this process, started {since:%F %T} UTC, is "
                "running. Call wait() on it first"
            ) from None
        raise CheckpointNotFoundError(_with_hint(place, str(error))) from None


@contextmanager
def _explained(place: Location) -> Generator[None]:
    """What the operating system refuses becomes a `StorageError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ShardkeepError):
            raise
        raise storage_error(error, f"reading {place}", "Check the path and its permissions") from error


@contextmanager
def missing_first(place: Location) -> Generator[None]:
    """Whatever is wrong with the arguments of a load: if there is no checkpoint, that is what is raised."""
    try:
        yield
    except (OSError, IntegrityError, ProcessError):
        raise
    except Exception:
        try:
            open_checkpoint(place)
        except CheckpointNotFoundError as missing:
            raise missing from None
        except (ShardkeepError, OSError):
            pass  # there is something, and the caller's error is about that
        raise


def _with_hint(place: Location, message: str) -> str:
    """The message, and which checkpoint may have been meant. If finding one fails or takes long, just the message."""
    try:
        if is_directory(place):
            newest = find_newest(place, log.debug, _MOST_LOOKED_AT)
            if newest is not None:
                return (
                    f"no checkpoint at {place}: this is a directory of checkpoints; pass one of them, for example the "
                    f"newest, {newest}"
                )
            deeper = None if place.is_url else _deeper(place)
            return f"{message}. There is a checkpoint below it: {deeper}" if deeper else message
        parent = place.parent
        beside = (
            find_newest(parent, log.debug, _MOST_LOOKED_AT) if not exists_at(place) and is_directory(parent) else None
        )
        return f"{message}. The newest checkpoint in {parent} is {beside}" if beside not in (None, parent) else message
    except (OSError, ValueError, TooManyError):
        return message


def _deeper(place: Location) -> Location | None:
    """A checkpoint two levels below a local directory. Only some of its directories are searched."""
    names = (name for name in os.listdir(place.text) if not name.startswith("."))
    below = [inside for inside in (place / name for name in sorted(names)) if is_directory(inside)]
    return next(
        (
            found
            for inside in below[:_MOST_LOOKED_INTO]
            if (found := find_newest(inside, log.debug, _MOST_LOOKED_AT)) is not None
        ),
        None,
    )


def inspect(path: object) -> Manifest:
    """Read what a checkpoint contains, without its arrays: leaves, shapes, dtypes, sizes, metadata and step.

    Args:
        path: The checkpoint, as for `load`.

    Returns:
        A `Manifest`. Its `leaves` maps keys to `StoredLeaf`s, and its `trees` maps prefixes to `Tree`s.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        IntegrityError: The manifest is damaged, or no save to the path has been committed.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "step_1", {"w": np.zeros((2, 3), np.float32)}, step=1, metadata={"loss": 0.5})
    >>> manifest = shardkeep.inspect(tmp / "step_1")
    >>> manifest.leaves["w"].shape, manifest.leaves["w"].dtype, manifest.step, manifest.metadata["loss"]
    ((2, 3), 'float32', 1, 0.5)
    """
    return open_checkpoint(location(path, "inspect(path)"))[1]


def exists(path: object) -> bool:
    """Whether there is a complete checkpoint: it is committed, and all its files are present with the recorded sizes.

    The contents of files are not checked; `verify` and `load` do that. The cost is one read of the manifest and one
    `stat` per file; in a bucket, one LIST request per 1,000 objects. For checkpoints of other programs, sizes are
    checked only where they are known. A checkpoint in a newer format version exists as well; `load` raises an error
    that says to upgrade.

    Args:
        path: The checkpoint, as for `load`.

    Returns:
        False if there is no checkpoint, if no save was committed (or the first one is still running), if the manifest
        is damaged, or if a file is missing or has a different size.

    Raises:
        PathError: It cannot be the path of a checkpoint.
        StorageError: The file system or bucket refused to answer.

    >>> import numpy as np, shardkeep
    >>> shardkeep.exists(tmp / "step_1")
    False
    >>> _ = shardkeep.save(tmp / "step_1", {"w": np.zeros(3)})
    >>> shardkeep.exists(tmp / "step_1")
    True
    """
    place = location(path, "exists(path)")
    try:
        with _explained(place):
            return find_complete(lambda: look(place))[1] is None
    except NewerFormatError:
        return True
    except StorageError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise
    except (FileNotFoundError, IntegrityError):
        return False


def latest(path: object) -> str | None:
    """Return the newest complete checkpoint in a directory or bucket, or None.

    A checkpoint is complete if `exists` returns True. Others are skipped, with a warning if they are damaged. The order
    is:

    1. Checkpoints with a recorded step (`save(..., step=...)`) are ordered by step. If the step is also the last number
       in the name, then names that differ only in numbers are taken to contain their step as well.
    2. Checkpoints without a step whose names differ only in their last number (`step_90`, `step_100`) are ordered by
       that number.
    3. All others, and these groups relative to each other, are ordered by the time of the save.

    Only checkpoints directly in the directory are considered. If there are none and `path` is a complete checkpoint
    itself, it is returned.

    Cost: among names that differ only in numbers, the manifests of the three with the highest last number are read. All
    manifests are read only if a recorded step is not the last number in its name, or if the names differ in more than
    the last number and no step is recorded. File sizes are checked from the newest checkpoint backwards, until one is
    complete.

    Args:
        path: A directory of checkpoints, or its `gs://` or `s3://` URL.

    Returns:
        The path of the checkpoint, to pass to `load`, or None if there is none.

    >>> import numpy as np, shardkeep
    >>> for step in (9, 10):
    ...     _ = shardkeep.save(tmp / f"run/step_{step}", {"w": np.zeros(3)}, step=step)
    >>> shardkeep.latest(tmp / "run") == str(tmp / "run" / "step_10")
    True
    >>> print(shardkeep.latest(tmp / "elsewhere"))
    None
    """
    place = location(path, "latest(path)")
    with _explained(place):
        newest = find_newest(place, log.warning)
    return None if newest is None else str(newest)


def delete(path: object) -> None:
    """Delete a checkpoint. The manifest is deleted first, so readers never see a partial checkpoint.

    Leftovers of unfinished saves are deleted as well; other files in the directory are kept. Arrays that a running
    program has memory-mapped from the files stay valid.

    Args:
        path: The path or URL of the checkpoint.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or another program wrote it. Nothing was deleted.
        ConflictError: A save to the path is running. Nothing was deleted.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "old", {"w": np.zeros(3)})
    >>> shardkeep.delete(tmp / "old")
    >>> shardkeep.exists(tmp / "old")
    False
    """
    target = find(location(path, "delete(path)"))
    try:
        delete_target(target)
        if isinstance(target, Directory):
            target.store.remove_if_empty()
    except OSError as error:
        if isinstance(error, ShardkeepError):
            raise
        left = any(target.store.size(name) is not None for name in target.documents)
        then = "The checkpoint is still there" if left else "It is no longer a checkpoint, but some of its files remain"
        raise storage_error(error, f"deleting {target.where}", then) from error
