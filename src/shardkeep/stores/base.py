"""What shardkeep asks of the place where bytes live. A name is a relative path with `/`."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from shardkeep.scopes import Scope


class StoredFile(AbstractContextManager["StoredFile"], Protocol):
    """An open file of a checkpoint."""

    size: int

    def close(self) -> None: ...

    def read_into(self, offset: int, buffer: "np.ndarray[Any, Any]") -> None:
        """Fill `buffer` with the bytes at `offset`; `EOFError` or `IntegrityError` if there are not enough."""
        ...

    def map(self, offset: int, length: int, needed: Sequence[tuple[int, int]] = ()) -> "Mapping":
        """The bytes in place: backed by the file where the store is `mappable`, else fetched as they are brought in.

        `needed`: the (offset, length) ranges that will be.
        """
        ...


class Mapping(Protocol):
    """A part of a file as read-only memory; valid as long as its `data` is referred to."""

    data: "np.ndarray[Any, Any]"

    def bring_in(self, start: int, end: int) -> None:
        """Read a range into memory; `OSError` where touching it would end the program."""
        ...


class NewFile(AbstractContextManager["NewFile"], Protocol):
    """A file being written, under a name nothing else uses."""

    def write(self, offset: int, buffers: Sequence["memoryview"]) -> None:
        """Put `buffers` one after another at `offset`. May be called from several threads."""
        ...

    def write_aligned(self, offset: int, memory: "np.ndarray[Any, Any]") -> None:
        """Put `memory` at `offset`; both lie equally far from the start of a page."""
        ...

    def sync(self) -> None:
        """What was written survives a power cut; an error that it met on its way to the disk is raised here."""
        ...

    def close(self) -> None: ...


class Held(Protocol):
    """A record that tells others its save is alive, from `take` until it is removed or released."""

    def take(self, line: bytes) -> None:
        """Create the record with a first line, durably, and hold it."""
        ...

    def append(self, line: bytes) -> None:
        """Add a line to the record, durably."""
        ...

    def remove(self) -> None:
        """Remove the record and stop telling."""
        ...

    def release(self) -> None:
        """Stop telling but leave the record, so that a later save cleans up after this one."""
        ...


class Store(Protocol):
    """A directory or a bucket prefix that holds one checkpoint."""

    url: str
    control: str  # the directory, inside, of the lock, the claims and the records of running saves
    saves: str  # the directory of those records

    @property
    def mappable(self) -> bool:
        """Whether files may be mapped: nobody else can change them in place unseen."""
        ...

    @property
    def remote(self) -> bool:
        """Whether files are objects: put whole, never changed, each request far away."""
        ...

    @property
    def concurrency(self) -> int | None:
        """How many requests at a time are worth while; None: as many as there are processors."""
        ...

    @property
    def object_limit(self) -> int | None:
        """How large a file should be at most; None: any size."""
        ...

    def locate(self, name: str) -> str:
        """`name` as a person would look for it."""
        ...

    def read(self, name: str) -> bytes:
        """A small file whole; `FileNotFoundError` if there is none."""
        ...

    def size(self, name: str) -> int | None:
        """The size of a file, or None if there is none."""
        ...

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        """The sizes of many files."""
        ...

    def identity(self, name: str) -> object:
        """Something that changes when the file does; None if there is none."""
        ...

    def open(self, name: str) -> StoredFile: ...

    def create(self, name: str, size: int, aligned: bool = False) -> NewFile:
        """Begin a file of `size` bytes that must not exist yet. `aligned`: some of it comes by `write_aligned`."""
        ...

    def write_new(self, name: str, total: int, buffers: Iterable["memoryview"]) -> NewFile | None:
        """A whole file of `total` bytes that must not exist yet; if it is given back, it is to be closed later."""
        ...

    def sync(self, names: Sequence[str]) -> None:
        """When this returns, the files and their names survive a power cut."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Put `data` in the place of `name`: readers see the old or the new, and it is durable on return."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and directories that become empty. What is gone already is no error."""
        ...

    def write_into(self, name: str, offset: int, data: bytes) -> None:
        """Change bytes of a file that is not yet part of a checkpoint."""
        ...

    def rename(self, name: str, new: str) -> None:
        """Give a finished file its final name, replacing what was there, durably."""
        ...

    def sync_directory(self, name: str) -> None:
        """Make names that were removed from a directory stay removed after a power cut."""
        ...

    def remove_control(self) -> None:
        """Remove the control directory; call it with the lock held and no save running."""
        ...

    def remove_if_empty(self) -> None:
        """Remove the place itself if nothing is left in it."""
        ...

    def children(self, name: str) -> list[str]:
        """The names in a directory; empty if there is none."""
        ...

    def find_directories_with(self, name: str) -> list[str]:
        """The directories below that hold a file of this name."""
        ...

    def is_taken(self, names: Iterable[str]) -> bool:
        """Whether one of the names is in use, or a file stands where one of them needs a directory."""
        ...

    def lock(self, seconds: float) -> AbstractContextManager[None]:
        """Exclude every other writer, making the place if need be; `ConflictError` if it cannot be had in time."""
        ...

    def hold(self, name: str) -> Held:
        """A record that is to be taken."""
        ...

    def try_hold(self, name: str, scope: Scope) -> Held | None:
        """Take over a record nobody holds, as a resource of `scope`; None if its save is alive or it is gone."""
        ...

    def claim(self, name: str) -> bool:
        """Create `name` exclusively: True for the one who did, for ever."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that can still be written, or None if that is unknown."""
        ...
