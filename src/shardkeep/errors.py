"""Every error shardkeep raises.

ShardkeepError
├── CheckpointNotFoundError   (FileNotFoundError)  nothing is there
├── CheckpointExistsError     (FileExistsError)    something is there and overwrite=False
├── IntegrityError            (ValueError)         what is stored is not what was saved
│   ├── MissingDataError      (FileNotFoundError)  a file of the checkpoint is gone
│   └── IncompleteCheckpointError                  ours, but never committed
├── NewerFormatError          (ValueError)         written by a later shardkeep
├── PathError                 (ValueError)         not a path or URL that can be used
├── PrefixError               (ValueError)         no tree, or no valid tree, of that name
├── TreeError                 (ValueError)         the tree cannot be saved as it is
│   ├── UnsupportedLeafError  (TypeError)          a leaf that is no array and no plain value
│   └── KeyCollisionError                          two leaves would get one name
├── MetadataError             (ValueError, TypeError)  metadata that is not JSON
├── TemplateMismatchError     (ValueError)         shapes or kinds differ from the template
├── MissingLeafError          (KeyError)           leaves asked for that were never saved
├── ShardingError             (ValueError)         a sharding that does not fit an array
├── ProcessError              (RuntimeError)       another process of the job failed, vanished or does something else
└── StorageError              (OSError)            the file system refused
    ├── AccessError           (PermissionError)    not allowed to read or write there
    ├── NotADirectoryPathError (NotADirectoryError)  the path, or a part of it, is a file
    ├── NotEnoughSpaceError                        more bytes needed than are free
    ├── ConflictError                              another writer was faster, or is still at work
    └── CommitUnknownError                         cannot tell whether the commit happened

Each also inherits the builtin in parentheses, so code that knows only the builtin still catches it.
"""

import errno
from typing import Any


class ShardkeepError(Exception):
    """The root: `except shardkeep.ShardkeepError` catches everything shardkeep raises on purpose."""

    record: dict[str, Any] | None = None  # for an error that has to do with another JAX process: what is told to all
    told: bool = False  # whether another process told it


class CheckpointNotFoundError(ShardkeepError, FileNotFoundError):
    """There is no checkpoint at the path."""


class CheckpointExistsError(ShardkeepError, FileExistsError):
    """A tree is already saved there and `overwrite=False`. Nothing was written."""


class IntegrityError(ShardkeepError, ValueError):
    """Stored bytes are not the bytes that were saved."""


class MissingDataError(IntegrityError, FileNotFoundError):
    """A file that the manifest names is gone."""


class IncompleteCheckpointError(IntegrityError):
    """The directory belongs to shardkeep but holds no committed checkpoint."""


class NewerFormatError(ShardkeepError, ValueError):
    """The checkpoint was written in a format version this release does not know."""


class PathError(ShardkeepError, ValueError):
    """Not a path or URL that shardkeep can use. Nothing was read or written."""


class PrefixError(ShardkeepError, ValueError):
    """The prefix is unknown, ambiguous or not a valid name."""


class TreeError(ShardkeepError, ValueError):
    """The tree cannot be saved as it is. Nothing was written."""


class UnsupportedLeafError(TreeError, TypeError):
    """A leaf is neither an array nor a plain value. Nothing was written."""


class KeyCollisionError(TreeError):
    """Two leaves would have the same name where names must differ. Nothing was written."""


class MetadataError(ShardkeepError, ValueError, TypeError):
    """The metadata cannot be written as JSON. Nothing was written."""


class TemplateMismatchError(ShardkeepError, ValueError):
    """Saved leaves do not fit the template; every one of them is listed."""


class MissingLeafError(ShardkeepError, KeyError):
    """Leaves that were asked for are not in the checkpoint; every one of them is listed."""

    def __str__(self) -> str:  # KeyError would show the repr, with its line breaks escaped
        return str(self.args[0]) if self.args else ""


class ShardingError(ShardkeepError, ValueError):
    """A sharding, spec or rule does not fit the array or the mesh."""


class ProcessError(ShardkeepError, RuntimeError):
    """Another JAX process failed, vanished, never made the call, or made another one."""

    def but(self, more: str) -> "ProcessError":
        """The same error with another sentence."""
        error = ProcessError(f"{self}. {more}")
        error.record = self.record and {**self.record, "message": str(error)}
        return error


class StorageError(ShardkeepError, OSError):
    """The file system refused an operation; the message says which and what is left behind."""


class AccessError(StorageError, PermissionError):
    """Not allowed to read or write there."""


class NotADirectoryPathError(StorageError, NotADirectoryError):
    """The path, or a part of it, is a file where a directory is needed."""


class NotEnoughSpaceError(StorageError):
    """The checkpoint needs more bytes than the file system has free."""


class ConflictError(StorageError):
    """Another writer changed the same tree, or holds the checkpoint. Nothing of theirs was touched."""


class CommitUnknownError(StorageError):
    """The commit was attempted and its outcome cannot be read back. Nothing was deleted."""


def error_named(name: str) -> type[ShardkeepError] | None:
    """The class of that name in the tree above."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, ShardkeepError) else None


def storage_error(error: OSError, doing: str, then: str) -> StorageError:
    """The typed error for what the operating system said: what was being done, why it failed, what follows."""
    kind = _BY_ERRNO.get(error.errno or 0, StorageError)
    reason = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    typed = kind(f"{doing}: {reason}{where}. {then}")
    typed.errno = error.errno
    return typed


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun, in a message.

    >>> counted(1, "leaf", "leaves"), counted(1200, "file")
    ('1 leaf', '1,200 files')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def an(noun: str) -> str:
    """A noun with its article, in a message.

    >>> an("object"), an("set"), an("uint8")
    ('an object', 'a set', 'a uint8')
    """
    return f"{'an' if noun.startswith(tuple('aeioAEIO')) else 'a'} {noun}"


_BY_ERRNO: dict[int, type[StorageError]] = {
    errno.EACCES: AccessError,
    errno.EPERM: AccessError,
    errno.EROFS: AccessError,
    errno.ENOTDIR: NotADirectoryPathError,
    errno.EEXIST: NotADirectoryPathError,
    errno.ENOSPC: NotEnoughSpaceError,
    errno.EDQUOT: NotEnoughSpaceError,
}
