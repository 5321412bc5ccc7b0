"""Paths in eFormer's API: path objects, names of files in them, Google Cloud Storage."""

import re
from dataclasses import dataclass

from shardkeep.foreign.eformer import TENSORSTORE_INDEX
from shardkeep.model.naming import base_of_shard
from shardkeep.stores.location import Location, any_path_text, anywhere, exists


@dataclass(frozen=True, repr=False)
class LoadPath:
    """A path or URL, as it was given, with `/`, `str()` and `exists()`."""

    text: str

    def __truediv__(self, name: object) -> "LoadPath":
        # Numbers are fine as names: directories of steps are called 100, 200, ...
        below = str(name) if isinstance(name, int) else any_path_text(name, "LoadPath / name")
        return LoadPath(str(Location(self.text) / below.lstrip("/")))

    def __str__(self) -> str:
        return self.text

    __fspath__ = __str__

    def __repr__(self) -> str:
        return f"LoadPath({self.text!r})"

    def exists(self) -> bool:
        """Whether there is a file or directory at the path."""
        return exists(anywhere(self.text))


def without_index(path: str) -> str:
    """The path of a checkpoint, given its own or that of the index in it.

    >>> without_index(f"run/step_1/{TENSORSTORE_INDEX}"), without_index(TENSORSTORE_INDEX), without_index("run/step_1")
    ('run/step_1', '.', 'run/step_1')
    """
    if path == TENSORSTORE_INDEX:
        return "."
    return path[: -len(TENSORSTORE_INDEX)].rstrip("/") or "/" if path.endswith("/" + TENSORSTORE_INDEX) else path


def derive_base_prefix_from_path(path_str: object) -> str:
    """What the file names of a model begin with.

    Args:
        path_str: A safetensors file, its index, or one of its shards.

    >>> derive_base_prefix_from_path("/x/model-00001-of-00004.safetensors")
    '/x/model'
    """
    return base_of_shard(any_path_text(path_str, "derive_base_prefix_from_path(path_str)"))


def is_gcs_path(path: object) -> bool:
    """Whether a path is in Google Cloud Storage.

    Args:
        path: A string or path object.

    >>> is_gcs_path("gs://bucket/x"), is_gcs_path("/x")
    (True, False)
    """
    return str(path).startswith("gs://")


def parse_gcs_path(gcs_path: object) -> tuple[str, str]:
    """The bucket and the name in it. Anything but a `gs://` path is a `ValueError`.

    Args:
        gcs_path: A string or path object.

    >>> parse_gcs_path("gs://bucket/a/b")
    ('bucket', 'a/b')
    """
    match = re.fullmatch(r"gs://([^/]+)(?:/(.*))?", str(gcs_path), re.DOTALL)
    if match is None:
        raise ValueError(f"not a Google Cloud Storage path (gs://bucket/name): {str(gcs_path)!r}")
    return match[1], match[2] or ""
