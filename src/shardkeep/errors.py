"""Every error that shardkeep raises.

ShardkeepError
├── CheckpointNotFoundError   (FileNotFoundError)  there is no checkpoint at the path
├── CheckpointExistsError     (FileExistsError)    a checkpoint already exists, and overwrite=False
├── IntegrityError            (ValueError)         the stored data is not the data that was saved
│   ├── MissingDataError      (FileNotFoundError)  a file of the checkpoint is missing
│   └── IncompleteCheckpointError                  a save was never committed, or is still running
├── NewerFormatError          (ValueError)         written by a later version, or in an unknown layout
├── PathError                 (ValueError)         not a usable path or URL
│   └── PathTypeError         (TypeError)          not a path at all: None, a dict, an array, ...
├── PrefixError               (ValueError)         an unknown or invalid prefix
├── TreeError                 (ValueError)         the tree cannot be saved
│   ├── UnsupportedLeafError  (TypeError)          a leaf that is neither an array nor a plain value
│   └── KeyCollisionError                          two leaves would get the same name
├── MetadataError             (ValueError, TypeError)  metadata that cannot be stored as JSON
├── TemplateMismatchError     (ValueError)         saved leaves do not match the template
├── MissingLeafError          (KeyError)           requested leaves are not in the checkpoint
├── RemapError                (ValueError)         a rule cannot be applied to the tree of the checkpoint
├── ShardingError             (ValueError)         a sharding does not fit the array or the mesh
├── HostMemoryError           (MemoryError)        pinned host memory was exhausted after the arrays were donated
├── CallbackError             (RuntimeError)       committed, but the commit callback raised an exception
├── ProcessError              (RuntimeError)       another JAX process failed, died or made a different call
└── StorageError              (OSError)            an operation on the file system or bucket failed
    ├── AccessError           (PermissionError)    no permission to read or write
    ├── NotADirectoryPathError (NotADirectoryError)  a file where a directory is needed
    ├── NotEnoughSpaceError                        not enough free space for the checkpoint
    ├── ConflictError                              another writer changed the same data, or holds its lock
    └── CommitUnknownError                         the outcome of the commit cannot be determined

Each error also inherits from the builtin in parentheses, so code that catches only the builtin works too.
"""

import errno
from typing import Any


class ShardkeepError(Exception):
    """The base class of shardkeep's errors: `except shardkeep.ShardkeepError` catches all of them."""

    record: dict[str, Any] | None = None  # for an error that involves another JAX process: what all processes are sent
    told: bool = False  # whether the error came from another process


class CheckpointNotFoundError(ShardkeepError, FileNotFoundError):
    """There is no checkpoint at the path."""


class CheckpointExistsError(ShardkeepError, FileExistsError):
    """A tree is already saved at the path and `overwrite=False`. Nothing was written."""


class IntegrityError(ShardkeepError, ValueError):
    """The stored data is not the data that was saved. Attributes say where the damage is, as far as it is known.

    Attributes:
        leaf: The key of the damaged leaf; None if the damage is not in the data of a single leaf.
        file: The path or URL of the damaged file, or the directory of an array that another program wrote. None if the
            error does not concern a single file.
        span: The damaged byte range of the file, (start, end); None if it is not known.
        problem: A description of the problem that does not name the leaf.
    """

    leaf: str | None = None
    file: str | None = None
    span: tuple[int, int] | None = None
    problem: str = ""

    def __init__(
        self,
        problem: str = "",
        *,
        leaf: str | None = None,
        file: str | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        """The message names the leaf first, then the file, each unless `problem` does so itself."""
        named = problem if file is None or file in problem else f"{file}: {problem}"
        subject = f"leaf {leaf!r}"
        super().__init__(named if leaf is None or problem.startswith(subject) else f"{subject}: {named}")
        self.leaf, self.file, self.span = leaf, file, span
        self.problem = problem


class MissingDataError(IntegrityError, FileNotFoundError):
    """A file listed in the manifest is missing. `file` names it, and `leaf` is a leaf with data in it."""


class IncompleteCheckpointError(IntegrityError):
    """A save to the path was never committed: it failed, or it is still running (the message says which)."""


class NewerFormatError(ShardkeepError, ValueError):
    """The checkpoint has a format version, layout or compression that this version of shardkeep cannot read."""


class PathError(ShardkeepError, ValueError):
    """The path or URL is not valid. Nothing was read or written."""


class PathTypeError(PathError, TypeError):
    """The argument is not a path, for example because arguments were swapped. Nothing was read or written."""


class PrefixError(ShardkeepError, ValueError):
    """The prefix is unknown, ambiguous or not a valid name."""


class TreeError(ShardkeepError, ValueError):
    """The tree cannot be saved. Nothing was written."""


class UnsupportedLeafError(TreeError, TypeError):
    """A leaf is neither an array nor a plain value. Nothing was written."""


class KeyCollisionError(TreeError):
    """Two leaves would have the same name in a file that needs distinct names. Nothing was written."""


class MetadataError(ShardkeepError, ValueError, TypeError):
    """The metadata cannot be stored as JSON. Nothing was written."""


class TemplateMismatchError(ShardkeepError, ValueError):
    """Saved leaves do not match the template. The message shows the first ones; `problems` has a line for each."""

    problems: tuple[str, ...] = ()


class MissingLeafError(ShardkeepError, KeyError):
    """Requested leaves are not in the checkpoint. The message shows the first ones; `problems` has all of them."""

    problems: tuple[str, ...] = ()

    def __str__(self) -> str:  # KeyError shows the repr, with escaped line breaks
        return str(self.args[0]) if self.args else ""


class RemapError(ShardkeepError, ValueError):
    """A rule of `remap=` cannot be applied. The message names the rule and the leaf. No array was read."""


class ShardingError(ShardkeepError, ValueError):
    """A sharding, spec or partition rule does not fit the array or the mesh."""


class HostMemoryError(ShardkeepError, MemoryError):
    """Pinned host memory was exhausted after `save_async` returned, when the arrays had already been donated.

    Nothing was committed.
    """


class CallbackError(ShardkeepError, RuntimeError):
    """The checkpoint is committed, but the commit callback raised an exception, available as `__cause__`."""


class ProcessError(ShardkeepError, RuntimeError):
    """Another JAX process failed, died, never made the call, or made a different one."""


class StorageError(ShardkeepError, OSError):
    """An operation on the file system or bucket failed. The message says which, and what state it left behind."""


class AccessError(StorageError, PermissionError):
    """Permission to read or write was denied."""


class NotADirectoryPathError(StorageError, NotADirectoryError):
    """The path or one of its parents is a file, but must be a directory."""


class NotEnoughSpaceError(StorageError):
    """The checkpoint needs more space than is free on the file system."""


class ConflictError(StorageError):
    """Another writer changed the same tree, or holds the lock. Its data was not touched."""


class CommitUnknownError(StorageError):
    """A commit was attempted, but its outcome cannot be determined. Nothing was deleted."""


def error_named(name: str) -> type[ShardkeepError] | None:
    """The class in the tree above with this name, or None."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, ShardkeepError) else None


def damage_of(error: Exception, leaf: str | None, file: str) -> IntegrityError:
    """An error met while data was read, as an `IntegrityError` that names the leaf and the file, each once."""
    if not isinstance(error, IntegrityError):
        return IntegrityError(str(error), leaf=leaf, file=file)
    leaf = leaf if error.leaf is None else error.leaf
    return type(error)(error.problem, leaf=leaf, file=error.file or file, span=error.span)


def storage_error(error: OSError, doing: str, then: str) -> StorageError:
    """An operating system error as a `StorageError`: what was being done, why it failed, and what follows."""
    kind = _BY_ERRNO.get(error.errno or 0, StorageError)
    reason = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    typed = kind(f"{doing}: {reason}{where}. {then}")
    typed.errno = error.errno
    return typed


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, for messages.

    >>> counted(1, "leaf", "leaves"), counted(1200, "file")
    ('1 leaf', '1,200 files')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def missing_of(number: int, count: int) -> str:
    """How many chunks of an array are missing, for messages.

    >>> missing_of(1, 1), missing_of(1, 6), missing_of(2, 2)
    ('its only chunk is missing', '1 of 6 chunks is missing', 'all 2 chunks are missing')
    """
    if number == count:
        return "its only chunk is missing" if count == 1 else f"all {count:,} chunks are missing"
    return f"{number:,} of {count:,} chunks {'is' if number == 1 else 'are'} missing"


def an(noun: str) -> str:
    """A noun with its article, for messages.

    >>> an("object"), an("set"), an("uint8"), an("ndarray"), an("bytes")
    ('an object', 'a set', 'a uint8', 'an ndarray', 'bytes')
    """
    if noun == "bytes":
        return noun
    return f"{'an' if noun.startswith((*'aeioAEIO', 'nd')) else 'a'} {noun}"


_BY_ERRNO: dict[int, type[StorageError]] = {
    errno.EACCES: AccessError,
    errno.EPERM: AccessError,
    errno.EROFS: AccessError,
    errno.ENOTDIR: NotADirectoryPathError,
    errno.EEXIST: NotADirectoryPathError,
    errno.ENOSPC: NotEnoughSpaceError,
    errno.EDQUOT: NotEnoughSpaceError,
}
