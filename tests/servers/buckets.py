"""Objects in memory with the guarantees of Google Cloud Storage: generations, preconditions, uploads in parts."""

import hashlib
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from email.utils import formatdate

SMALLEST_PART = 5 << 20  # of an upload in parts, except its last


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, code: str, details: str) -> None:
        super().__init__(details)
        self.status, self.code, self.details = status, code, details


@dataclass(frozen=True)
class Blob:
    """One generation of an object."""

    data: bytes
    generation: int
    modified: float = field(default_factory=time.time)

    @property
    def etag(self) -> str:
        """As Google's XML API has it: the same for the same bytes, unless they came in parts (here: are large)."""
        if len(self.data) > SMALLEST_PART:
            return f'"-{self.generation:x}"'
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'

    @property
    def headers(self) -> dict[str, str]:
        stored = {"x-goog-generation": str(self.generation), "x-goog-stored-content-length": str(len(self.data))}
        return {"ETag": self.etag, "Last-Modified": formatdate(self.modified, usegmt=True), **stored}


class Buckets:
    """Every write makes a new generation; of any number of writers that expect the same one, exactly one succeeds."""

    def __init__(self, names: Sequence[str]) -> None:
        self.objects: dict[str, dict[str, Blob]] = {name: {} for name in names}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self._lock = threading.Lock()
        self._generations = itertools.count(time.time_ns() // 1000)

    def bucket(self, name: str) -> dict[str, Blob]:
        if name not in self.objects:
            raise Refused(404, "NoSuchBucket", f"The specified bucket does not exist: {name}")
        return self.objects[name]

    def find(self, bucket: str, key: str, generation: str = "") -> Blob:
        blob = self.bucket(bucket).get(key)
        if blob is None or generation not in ("", str(blob.generation)):
            raise Refused(404, "NoSuchKey", f"No such object: {bucket}/{key}")
        return blob

    def put(self, bucket: str, key: str, data: bytes, match: str = "") -> Blob:
        """Store a new generation, if the present one is `match` ("0": there is none)."""
        with self._lock:
            check(self.bucket(bucket).get(key), match)
            blob = self.objects[bucket][key] = Blob(data, next(self._generations))
            return blob

    def remove(self, bucket: str, key: str, match: str = "") -> None:
        with self._lock:
            check(self.bucket(bucket).get(key), match)
            self.find(bucket, key)
            del self.objects[bucket][key]

    def names(self, bucket: str, prefix: str, delimiter: str, after: str, most: int) -> tuple[list[str], bool]:
        """The next names, a directory once and with its delimiter, and whether there are more."""
        found: dict[str, None] = {}
        for key in sorted(self.bucket(bucket)):
            if key.startswith(prefix):
                end = key.find(delimiter, len(prefix)) if delimiter else -1
                name = key if end < 0 else key[: end + len(delimiter)]
                if name > after:
                    found[name] = None
        return list(found)[:most], len(found) > most

    def begin(self, bucket: str) -> str:
        """Begin an upload in parts; returns its id."""
        self.bucket(bucket)
        upload = f"upload-{next(self._generations)}"
        self.uploads[upload] = {}
        return upload

    def parts(self, upload: str) -> dict[int, bytes]:
        if upload not in self.uploads:
            raise Refused(404, "NoSuchUpload", "The requested upload was not found.")
        return self.uploads[upload]

    def complete(self, bucket: str, key: str, upload: str, numbers: Sequence[int]) -> Blob:
        """Make an object of the parts with these numbers and forget the upload."""
        parts = self.parts(upload)
        if not numbers or any(number not in parts for number in numbers):
            raise Refused(400, "InvalidPart", "One or more of the specified parts could not be found.")
        if any(len(parts[number]) < SMALLEST_PART for number in numbers[:-1]):
            raise Refused(400, "EntityTooSmall", "A part other than the last is smaller than 5 MiB.")
        blob = self.put(bucket, key, b"".join(parts[number] for number in numbers))
        del self.uploads[upload]
        return blob


def check(blob: Blob | None, match: str) -> None:
    """Refuse unless the generation is the expected one; anything goes if none is."""
    if match and match != str(blob.generation if blob else 0):
        raise Refused(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")
