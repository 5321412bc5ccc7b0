"""From a path or URL to a Store: which objects are paths, what they mean, and what is there."""

import numbers
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote_to_bytes

from shardkeep.errors import PathError, PathTypeError, an
from shardkeep.stores.base import Store
from shardkeep.stores.local.store import CONTROL, LocalStore

if TYPE_CHECKING:
    from shardkeep.stores.bucket.store import CloudStore

URLS = ("gs://", "s3://")
_ONE_SLASH = re.compile(r"\A(gs:|s3:|file:)/(?!/)")
_SCHEME = re.compile(r"\A(gs|s3|file):/")
_READERS = ("load", "abstract", "inspect", "verify", "delete", "tree_deserialize_leaves")  # of what `latest` may return
_NEVER_PATHS = (numbers.Number, bytes, bytearray, memoryview, Mapping, Set, Sequence, Iterator)


class BucketPath(str):
    """A bucket URL with credentials of its own: `key_file` is the path of a service-account file."""

    __slots__ = ("key_file",)

    def __new__(cls, url: str, key_file: str | None = None) -> "BucketPath":
        made = super().__new__(cls, url)
        made.key_file = key_file
        return made


def path_text(path: object, call: str = "") -> str:
    """A path that was passed to the native API, as text; `PathTypeError` if it is not a path.

    Accepts a `str`, an `os.PathLike`, and path objects of other libraries: those with `as_posix()`, or whose `str()` is
    a `gs://`, `s3://` or `file://` URL.

    Args:
        path: What the caller passed.
        call: The call, for the message: for example `save(path, tree)`.

    >>> path_text(os.path, "load(path)")
    Traceback (most recent call last):
    shardkeep.errors.PathTypeError: load(path): expected a path (a str or os.PathLike), got a module
    """
    if isinstance(path, str | os.PathLike):
        return os.fsdecode(cast(Any, path))
    text = any_path_text(path, call)
    if hasattr(path, "as_posix") or _SCHEME.match(text):
        return text
    raise _not_a_path(path, call)


def any_path_text(path: object, call: str = "") -> str:
    """A path that was passed to `shardkeep.serialization`, as text: any object whose `str()` is a path or URL.

    `PathTypeError` for what cannot be one: None, numbers, bytes, containers, PyTrees, arrays, and objects that do not
    define `__str__`.

    Args:
        path: What the caller passed.
        call: The call, for the message: for example `save(tree, path)`.
    """
    if isinstance(path, str | os.PathLike):
        return os.fsdecode(cast(Any, path))
    if (
        path is None
        or isinstance(path, _NEVER_PATHS)
        or _is_array(path)
        or type(path).__str__ is object.__str__
        or _is_tree(path)
    ):
        raise _not_a_path(path, call)
    return str(path)


def name_path(path: object) -> str:
    """A path as messages name it before it is known to be one; never the text of a dict of arrays."""
    return str(path) if isinstance(path, str | os.PathLike) else an(type(path).__name__)


def _is_array(thing: object) -> bool:
    return hasattr(thing, "shape") and hasattr(thing, "dtype")


def _is_tree(thing: object) -> bool:
    """Whether JAX, if it is imported, knows how to take `thing` apart: a model or a training state."""
    jax = sys.modules.get("jax")
    return jax is not None and not jax.tree_util.all_leaves([thing])


def _not_a_path(path: object, call: str) -> PathTypeError:
    start = f"{call}: " if call else ""
    if path is None:
        hint = "; latest() returns None when there is no checkpoint" if call.startswith(_READERS) else ""
        return PathTypeError(f"{start}None is not a path{hint}")
    kind = "an array" if _is_array(path) else an(type(path).__name__)
    if isinstance(path, bytes | bytearray | memoryview):
        return PathTypeError(
            f"{start}the path must be a str or os.PathLike, not {kind} ({path!r:.60}); use os.fsdecode"
        )
    names = call.partition("(")[2].rstrip(")").split(", ")
    if len(names) < 2:
        return PathTypeError(f"{start}expected a path (a str or os.PathLike), got {kind}")
    order = "first" if re.search("path|dir", names[0]) else "second"
    return PathTypeError(f"{start}the path comes {order}; got {kind} as path (did you swap the arguments?)")


def location(path: object) -> str:
    """The place that a path or URL names, as text: an absolute path, or a bucket URL. `PathError` if it cannot be used.

    `file://` URLs become paths. The root directory is refused: it is never meant, and searching it for checkpoints
    would walk the whole disk.

    >>> location("file:///tmp/run%201"), location("gs://bucket/run/")
    ('/tmp/run 1', 'gs://bucket/run')
    """
    place = anywhere(path)
    if _is_root(place):
        raise PathError(f"{path_text(path)!r} is the root directory; pass another directory for the checkpoint")
    return place


def anywhere(path: object) -> str:
    """Like `location`, but the root directory is allowed."""
    text = path_text(path)
    if not text or "\0" in text:
        raise PathError(f"not a path: {text!r} {'contains a NUL character' if text else 'is empty'}")
    # `pathlib` turns two slashes into one. Nobody means a directory called "gs:".
    text = _ONE_SLASH.sub(lambda found: found[1] + ("///" if found[1] == "file:" else "//"), text)
    if text.startswith("file://"):
        return os.path.abspath(_path_in(text))
    if text.startswith(URLS):
        return _bucket_location(text, getattr(path, "key_file", None))
    if "://" in text:
        raise PathError(f"{text!r}: unknown URL scheme; use a local path, file://, gs:// or s3://")
    try:
        return os.path.abspath(os.path.expanduser(text))
    except FileNotFoundError as error:
        raise PathError(
            f"{text!r} is a relative path, and the working directory no longer exists; pass an absolute path"
        ) from error


def _is_root(place: str) -> bool:
    """Whether a local path is the root directory, also through a symbolic link or as `//`."""
    if place.startswith(URLS):
        return False
    try:
        return not place.strip(os.sep) or os.path.samefile(place, os.sep)
    except OSError:  # it does not exist or is not accessible, which shows when it is used
        return False


def _path_in(url: str) -> str:
    """The path in a `file://` URL, byte for byte."""
    host, slash, rest = url.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise PathError(f"{url!r} names the host {host!r}; write file:///path for a local path")
    if "?" in rest or "#" in rest:
        raise PathError(f"{url!r} has a query or a fragment; write ? as %3F and # as %23 in a path")
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
        raise PathError(f"{url!r} contains an empty part, '.' or '..'")
    return BucketPath(f"{scheme}://{bucket}/{name}".rstrip("/"), key_file)


def store_at(place: str, control: str = CONTROL, confined: bool = True) -> Store:
    """The store for a directory or a bucket prefix.

    Args:
        place: A path or URL as `location` returns it.
        control: The name of the control directory in it.
        confined: Whether everything below it belongs to the checkpoint.
    """
    return _in_bucket(place, control, confined) if place.startswith(URLS) else LocalStore(place, control, confined)


def _in_bucket(place: str, control: str = CONTROL, whole: bool = True) -> "CloudStore":
    # Imported here because the client for buckets takes a tenth of a second to import.
    from shardkeep.stores.bucket.credentials import Bucket
    from shardkeep.stores.bucket.store import CloudStore

    scheme, _, rest = place.partition("://")
    bucket, _, prefix = rest.partition("/")
    return CloudStore(Bucket(scheme, bucket, getattr(place, "key_file", None)), prefix, control, whole)


def parent_and_name(place: str) -> tuple[str, str]:
    """The directory of a place, and its name there."""
    return sibling(place, os.path.dirname(place)), os.path.basename(place)


def sibling(place: str, text: str) -> str:
    """Another place, with the credentials of `place`."""
    return BucketPath(text, place.key_file) if isinstance(place, BucketPath) else text


def is_directory(place: str) -> bool:
    """Whether there is a directory, or objects below a bucket prefix."""
    return not _in_bucket(place).is_empty() if place.startswith(URLS) else os.path.isdir(place)


def exists(place: str) -> bool:
    """Whether there is anything: a file, an object, a directory, or objects below a bucket prefix."""
    if not place.startswith(URLS):
        return os.path.lexists(place)
    return is_file(place) or is_directory(place)


def is_file(place: str) -> bool:
    """Whether there is a file or an object of exactly this name."""
    if not place.startswith(URLS):
        return os.path.isfile(place)
    parent, name = parent_and_name(place)
    if not parent.startswith(URLS):  # a bucket is not a file
        return False
    return store_at(parent, confined=False).size(name) is not None
