"""From a location to its store, and what is there."""

import os
from typing import TYPE_CHECKING

from shardkeep.stores.base import CONTROL, Store
from shardkeep.stores.local.store import LocalStore
from shardkeep.stores.location import Location

if TYPE_CHECKING:
    from shardkeep.stores.bucket.store import BucketStore


def store_at(place: Location, control: str = CONTROL, confined: bool = True) -> Store:
    """The store for a directory or a bucket prefix.

    Args:
        place: The directory or the prefix.
        control: The name of the control directory in it.
        confined: Whether everything below it belongs to the checkpoint.
    """
    return _in_bucket(place, control, confined) if place.is_url else LocalStore(place.text, control, confined)


def _in_bucket(place: Location, control: str = CONTROL, whole: bool = True) -> "BucketStore":
    # Imported here because the client for buckets takes a tenth of a second to import.
    from shardkeep.stores.bucket.credentials import Bucket
    from shardkeep.stores.bucket.store import BucketStore

    scheme, _, rest = place.text.partition("://")
    bucket, _, prefix = rest.partition("/")
    return BucketStore(Bucket(scheme, bucket, place.key_file), prefix, control, whole)


def is_directory(place: Location) -> bool:
    """Whether there is a directory, or objects below a bucket prefix."""
    return not _in_bucket(place).is_empty() if place.is_url else os.path.isdir(place.text)


def exists(place: Location) -> bool:
    """Whether there is anything: a file, an object, a directory, or objects below a bucket prefix."""
    return is_file(place) or is_directory(place) if place.is_url else os.path.lexists(place.text)


def is_file(place: Location) -> bool:
    """Whether there is a file or an object of exactly this name."""
    if not place.is_url:
        return os.path.isfile(place.text)
    return not place.is_bucket and store_at(place.parent, confined=False).size(place.name) is not None
