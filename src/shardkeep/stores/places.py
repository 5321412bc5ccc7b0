"""From a path or URL to a Store, and the few questions that are asked of a path before there is one."""

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

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
    """A path as text: a `str`, an `os.PathLike`, or any object whose `str()` is a path; `file://` becomes a path.

    >>> location("file:///tmp/run%201"), location("gs://bucket/run/")
    ('/tmp/run 1', 'gs://bucket/run')
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else str(path)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"not a path: {path!r}")
    # `pathlib` makes one slash of two, and nobody means a directory called "gs:".
    text = _ONE_SLASH.sub(lambda found: found[1] + ("///" if found[1] == "file:" else "//"), text)
    if text.startswith("file://"):
        return os.path.abspath(_path_in(text))
    if text.startswith(URLS):
        return _bucket_location(text, getattr(path, "key_file", None))
    if "://" in text:
        raise ValueError(f"{text!r}: shardkeep knows local paths, file://, gs:// and s3://")
    return os.path.abspath(os.path.expanduser(text))


def _path_in(url: str) -> str:
    """The path a `file://` URL names, to the byte."""
    host, slash, rest = url.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise ValueError(f"{url!r} names the host {host!r}; a local path is written file:///path")
    if "?" in rest or "#" in rest:
        raise ValueError(f"{url!r} has a query or a fragment; in a path, ? is written %3F and # is written %23")
    path = unquote_to_bytes(os.fsencode(rest))
    if not slash or b"\0" in path:
        raise ValueError(f"not a path: {url!r}")
    return slash + os.fsdecode(path)


def _bucket_location(url: str, key_file: str | None) -> BucketPath:
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.rstrip("/").partition("/")
    if not bucket:
        raise ValueError(f"{url!r} names no bucket; write {scheme}://bucket/path")
    if name and any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{url!r} has an empty part, '.' or '..'")
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
