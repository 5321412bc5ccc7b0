"""Where a checkpoint is: which objects are paths, which place they mean, and what is there."""

import numbers
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote_to_bytes

from shardkeep.errors import PathError, PathTypeError, an
from shardkeep.stores.base import CONTROL, Store
from shardkeep.stores.local.store import LocalStore

if TYPE_CHECKING:
    from shardkeep.stores.bucket.store import BucketStore

_ONE_SLASH = re.compile(r"\A(gs:|s3:|file:)/(?!/)")
_SCHEME = re.compile(r"\A(gs|s3|file):/")
_READERS = ("load", "abstract", "inspect", "verify", "delete", "tree_deserialize_leaves")  # of what `latest` may return
_NEVER_PATHS: tuple[type[object], ...] = (
    numbers.Number,
    bytes,
    bytearray,
    memoryview,
    Mapping,
    Set,
    Sequence,
    Iterator,
)


@dataclass(frozen=True)
class Location:
    """A place for files: an absolute path, or the URL of a bucket or of a place in one. `location` makes them.

    Args:
        text: The path or URL, without a `/` at the end.
        key_file: The service-account file to use for a bucket, in place of the usual credentials.

    >>> run = Location("gs://bucket/run")
    >>> str(run / "step_1"), run.name, run.parent
    ('gs://bucket/run/step_1', 'run', Location(text='gs://bucket', key_file=None))
    """

    text: str
    key_file: str | None = None

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> "Location":
        return replace(self, text=f"{self.text.rstrip('/')}/{name}")

    @property
    def is_url(self) -> bool:
        """Whether it is in a bucket."""
        return self.text.startswith(("gs://", "s3://"))

    @property
    def scheme(self) -> str:
        """`gs` or `s3`; empty for a local path."""
        return self.text[:2] if self.is_url else ""

    @property
    def is_bucket(self) -> bool:
        """Whether it is a whole bucket."""
        return self.is_url and self.text.count("/") == 2

    @property
    def name(self) -> str:
        """The part after the last `/`."""
        return os.path.basename(self.text)

    @property
    def parent(self) -> "Location":
        """What contains it. A bucket and the root directory are their own parents."""
        return self if self.is_bucket else replace(self, text=os.path.dirname(self.text))

    def with_name(self, name: str) -> "Location":
        """Another place in the same parent."""
        return self.parent / name

    def resolve(self) -> "Location":
        """The same place by the path that no symbolic link is part of; a URL as it is."""
        return self if self.is_url else Location(os.path.realpath(self.text))


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
        return os.fsdecode(cast("str | os.PathLike[str]", path))
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
        return os.fsdecode(cast("str | os.PathLike[str]", path))
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


def location(path: object, call: str = "") -> Location:
    """The place that a path or URL names. `PathError` if it cannot be used, `PathTypeError` if it is no path.

    `file://` URLs become paths. The root directory is refused: it is never meant, and searching it for checkpoints
    would walk the whole disk.

    Args:
        path: What the caller passed, as `path_text` takes it.
        call: The call, for the message.

    >>> str(location("file:///tmp/run%201")), str(location("gs://bucket/run/"))
    ('/tmp/run 1', 'gs://bucket/run')
    """
    place = anywhere(path, call)
    try:
        # Also as `//`, or through a symbolic link.
        is_root = not place.is_url and (not place.text.strip(os.sep) or os.path.samefile(place.text, os.sep))
    except OSError:  # it does not exist or is not accessible, which shows when it is used
        is_root = False
    if is_root:
        raise PathError(f"{path_text(path)!r} is the root directory; pass another directory for the checkpoint")
    return place


def anywhere(path: object, call: str = "") -> Location:
    """Like `location`, but the root directory is allowed."""
    text = path_text(path, call)
    if not text or "\0" in text:
        raise PathError(f"not a path: {text!r} {'contains a NUL character' if text else 'is empty'}")
    # `pathlib` turns two slashes into one. Nobody means a directory called "gs:".
    text = _ONE_SLASH.sub(lambda found: found[1] + ("///" if found[1] == "file:" else "//"), text)
    if Location(text).is_url:
        return _in_bucket(text)
    if text.startswith("file://"):
        path = _path_in(text)
    elif "://" in text:
        raise PathError(f"{text!r}: unknown URL scheme; use a local path, file://, gs:// or s3://")
    else:
        path = os.path.expanduser(text)
    try:
        return Location(os.path.abspath(path).replace(os.path.sep, "/"))  # Windows has another separator
    except FileNotFoundError as error:
        raise PathError(
            f"{text!r} is a relative path, and the working directory no longer exists; pass an absolute path"
        ) from error


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
    text = os.fsdecode(path)
    return text if os.path.splitdrive(text)[0] else slash + text  # on Windows, /C:/x is C:/x


def _in_bucket(url: str) -> Location:
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.rstrip("/").partition("/")
    if not bucket:
        raise PathError(f"{url!r} names no bucket; write {scheme}://bucket/path")
    if name and any(part in ("", ".", "..") for part in name.split("/")):
        raise PathError(f"{url!r} contains an empty part, '.' or '..'")
    return Location(f"{scheme}://{bucket}/{name}".rstrip("/"))


def store_at(place: Location, control: str = CONTROL, confined: bool = True) -> Store:
    """The store for a directory or a bucket prefix.

    Args:
        place: The directory or the prefix.
        control: The name of the control directory in it.
        confined: Whether everything below it belongs to the checkpoint.
    """
    return _bucket_store(place, control, confined) if place.is_url else LocalStore(place.text, control, confined)


def _bucket_store(place: Location, control: str = CONTROL, whole: bool = True) -> "BucketStore":
    # Imported here because the client for buckets takes a tenth of a second to import.
    from shardkeep.stores.bucket.credentials import Bucket
    from shardkeep.stores.bucket.store import BucketStore

    scheme, _, rest = place.text.partition("://")
    bucket, _, prefix = rest.partition("/")
    return BucketStore(Bucket(scheme, bucket, place.key_file), prefix, control, whole)


def is_directory(place: Location) -> bool:
    """Whether there is a directory, or objects below a bucket prefix."""
    return not _bucket_store(place).is_empty() if place.is_url else os.path.isdir(place.text)


def exists(place: Location) -> bool:
    """Whether there is anything: a file, an object, a directory, or objects below a bucket prefix."""
    return is_file(place) or is_directory(place) if place.is_url else os.path.lexists(place.text)


def is_file(place: Location) -> bool:
    """Whether there is a file or an object of exactly this name."""
    if not place.is_url:
        return os.path.isfile(place.text)
    return not place.is_bucket and store_at(place.parent, confined=False).size(place.name) is not None
