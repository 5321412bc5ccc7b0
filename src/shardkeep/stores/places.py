"""From a path or URL to a Store, and the few questions that are asked of a path before there is one."""

import os
import re
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote_to_bytes

from shardkeep.errors import PathError, an
from shardkeep.stores.base import Store
from shardkeep.stores.local import CONTROL, LocalStore

if TYPE_CHECKING:
    from shardkeep.stores.cloud import CloudStore

URLS = ("gs://", "s3://")
_ONE_SLASH = re.compile(r"\A(gs:|s3:|file:)/(?!/)")


class BucketPath(str):
    """A URL of a bucket with its own credentials: `key_file` is a service-account file."""

    __slots__ = ("key_file",)

    def __new__(cls, url: str, key_file: str | None = None) -> "BucketPath":
        made = super().__new__(cls, url)
        made.key_file = key_file
        return made


def location(path: object) -> str:
    """Where a checkpoint, or a directory of them, can be, as text; `PathError` for anything else.

    A `str`, an `os.PathLike`, or any object whose `str()` is a path; `file://` becomes a path. The root directory is
    refused: nobody means it, and looking for checkpoints there would walk the whole disk.

    >>> location("file:///tmp/run%201"), location("gs://bucket/run/")
    ('/tmp/run 1', 'gs://bucket/run')
    """
    place = anywhere(path)
    if _is_root(place):
        raise PathError(
            f"{text_of(path)!r} is the root directory {place}; pass a directory of its own for a checkpoint"
        )
    return place


def anywhere(path: object) -> str:
    """Like `location`, for a path that may be any directory."""
    text = text_of(path)
    if not text or "\0" in text:
        raise PathError(f"not a path: {text!r} {'has a NUL character' if text else 'is empty'}")
    # `pathlib` makes one slash of two, and nobody means a directory called "gs:".
    text = _ONE_SLASH.sub(lambda found: found[1] + ("///" if found[1] == "file:" else "//"), text)
    if text.startswith("file://"):
        return os.path.abspath(_path_in(text))
    if text.startswith(URLS):
        return _bucket_location(text, getattr(path, "key_file", None))
    if "://" in text:
        raise PathError(f"{text!r}: shardkeep knows local paths, file://, gs:// and s3://")
    try:
        return os.path.abspath(os.path.expanduser(text))
    except FileNotFoundError as error:
        raise PathError(
            f"{text!r} is a relative path, and the working directory no longer exists; pass an absolute path"
        ) from error


def text_of(path: object) -> str:
    """A path or URL as text: of an `os.PathLike` what it stands for, of anything else its `str()`."""
    if isinstance(path, bytes | bytearray | memoryview):  # as text, b"run" would be a directory called b'run'
        raise PathError(f"not a path: {path!r} is {an(type(path).__name__)}; pass os.fsdecode(path), which is a str")
    return os.fsdecode(cast(Any, path)) if isinstance(path, str | os.PathLike) else str(path)


def _is_root(place: str) -> bool:
    """Whether a local path leads to the root directory, also by a symbolic link or as `//`."""
    if place.startswith(URLS):
        return False
    try:
        return not place.strip(os.sep) or os.path.samefile(place, os.sep)
    except OSError:  # it does not exist, or cannot be looked at: whoever uses it says so
        return False


def _path_in(url: str) -> str:
    """The path a `file://` URL names, to the byte."""
    host, slash, rest = url.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise PathError(f"{url!r} names the host {host!r}; a local path is written file:///path")
    if "?" in rest or "#" in rest:
        raise PathError(f"{url!r} has a query or a fragment; in a path, ? is written %3F and # is written %23")
    path = unquote_to_bytes(os.fsencode(rest))
    if not slash or b"\0" in path:
        raise PathError(f"not a path: {url!r}")
    return slash + os.fsdecode(path)


def _bucket_location(url: str, key_file: str | None) -> BucketPath:
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.rstrip("/").partition("/")
    if not bucket:
        raise PathError(f"{url!r} names no bucket; write {scheme}://bucket/path")
    if name and any(part in ("", ".", "..") for part in name.split("/")):
        raise PathError(f"{url!r} has an empty part, '.' or '..'")
    return BucketPath(f"{scheme}://{bucket}/{name}".rstrip("/"), key_file)


def store_at(place: str, control: str = CONTROL, confined: bool = True) -> Store:
    """The store of a directory or of a prefix in a bucket. `confined`: all that is below belongs to the checkpoint."""
    return _in_bucket(place, control, confined) if place.startswith(URLS) else LocalStore(place, control, confined)


def _in_bucket(place: str, control: str = CONTROL, whole: bool = True) -> "CloudStore":
    # Their client takes a tenth of a second to import, which only those pay who use buckets.
    from shardkeep.stores.cloud import CloudStore
    from shardkeep.stores.credentials import Bucket

    scheme, _, rest = place.partition("://")
    bucket, _, prefix = rest.partition("/")
    return CloudStore(Bucket(scheme, bucket, getattr(place, "key_file", None)), prefix, control, whole)


def parent_and_name(place: str) -> tuple[str, str]:
    """Where something lies, and its name there."""
    return sibling(place, os.path.dirname(place)), os.path.basename(place)


def sibling(place: str, text: str) -> str:
    """Another place, reached with the same credentials."""
    return BucketPath(text, place.key_file) if isinstance(place, BucketPath) else text


def is_directory(place: str) -> bool:
    return not _in_bucket(place).is_empty() if place.startswith(URLS) else os.path.isdir(place)


def exists(place: str) -> bool:
    """Whether there is something: a file, an object, a directory, or objects below a prefix."""
    if not place.startswith(URLS):
        return os.path.lexists(place)
    return is_file(place) or is_directory(place)


def is_file(place: str) -> bool:
    if not place.startswith(URLS):
        return os.path.isfile(place)
    parent, name = parent_and_name(place)
    if not parent.startswith(URLS):  # a bucket is no file
        return False
    return store_at(parent, confined=False).size(name) is not None
