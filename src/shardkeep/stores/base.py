"""What shardkeep needs from the place where a checkpoint is stored. Names are relative paths with `/`."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from shardkeep.errors import IntegrityError
from shardkeep.model.arrays import Array
from shardkeep.runtime.scopes import Scope

CONTROL = ".shardkeep"  # the name of the control directory of a checkpoint directory
LOCK_SECONDS = 60.0  # a lock is held for a commit, not for a save: whoever holds it longer hangs


@dataclass(frozen=True)
class Traits:
    """What a save or a load has to know about a store to choose its way.

    Args:
        editable: Files are written in parts, in any order, and can have a second name: the store is an
            `EditableStore`. If not, a file is put as a whole and has one name.
        has_directories: The place is a directory, which can be moved away or removed while it is used.
        has_paths: `locate` gives paths that other libraries can open.
        costly_requests: Each access costs a round trip: accesses are few, planned beforehand, and made concurrently.
        late_requests: A request may take effect long after its sender was given up. So a name is never used again
            after it was removed, documents are replaced and not removed, and dead saves are fenced off.
        concurrency: How many concurrent requests are useful; None: as many as there are processors.
        object_limit: The size of file to aim at; None: no limit.
        documents_at_once: How many small documents to read at the same time, for which only the round trip counts;
            None: as many as there are processors.
    """

    editable: bool
    has_directories: bool
    has_paths: bool
    costly_requests: bool
    late_requests: bool
    concurrency: int | None = None
    object_limit: int | None = None
    documents_at_once: int | None = None


class StoredFile(AbstractContextManager["StoredFile"], Protocol):
    """An open file of a checkpoint."""

    size: int

    def close(self) -> None: ...

    def read_into(self, offset: int, buffer: Array) -> None:
        """Fill `buffer` with the bytes at `offset`; `EOFError` or `IntegrityError` if there are not enough."""
        ...

    def map(self, offset: int, length: int, needed: Sequence[tuple[int, int]] = ()) -> "MappedFile":
        """The bytes as memory: backed by the file where the store is `mappable`, else fetched by `bring_in`.

        Args:
            offset: Where the bytes begin.
            length: How many there are.
            needed: The (offset, length) ranges that will be brought in.
        """
        ...


class MappedFile(Protocol):
    """A part of a file as read-only memory, valid as long as its `data` is referenced."""

    data: Array

    def bring_in(self, start: int, end: int) -> None:
        """Read a range into memory; `OSError` where touching it would end the program."""
        ...


class NewFile(AbstractContextManager["NewFile"], Protocol):
    """A file that is being written, under a name that nothing else uses."""

    def write(self, offset: int, buffers: Sequence["memoryview"]) -> None:
        """Write `buffers` one after another at `offset`. May be called from several threads."""
        ...

    def write_aligned(self, offset: int, memory: Array) -> None:
        """Write `memory` at `offset`; both have the same distance from the start of a page."""
        ...

    def sync(self) -> None:
        """Make what was written survive a power cut. Errors on the way to the disk are raised here."""
        ...

    def close(self) -> None: ...


class Held(Protocol):
    """A record that shows other processes that its save is alive, from `take` until it is removed or released."""

    def take(self, line: bytes) -> None:
        """Create the record with its first lines, durably, and hold it."""
        ...

    def append(self, line: bytes) -> None:
        """Add a line to the record, durably."""
        ...

    def confirm(self, age: float) -> None:
        """Raise `ConflictError` if the record was taken over. In a bucket, ask only if `age` seconds old."""
        ...

    def remove(self) -> None:
        """Remove the record."""
        ...

    def release(self) -> None:
        """Stop holding the record but keep it, so that a later save cleans up after this one."""
        ...


class Files(Protocol):
    """The files of a store."""

    url: str

    @property
    def traits(self) -> Traits: ...

    @property
    def mappable(self) -> bool:
        """Whether files may be mapped: nobody can change them in place unnoticed."""
        ...

    def locate(self, name: str) -> str:
        """The full path or URL of `name`, for messages."""
        ...

    def read(self, name: str) -> bytes:
        """The contents of a small file; `FileNotFoundError` if there is none."""
        ...

    def size(self, name: str) -> int | None:
        """The size of a file, or None if there is none."""
        ...

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        """The sizes of many files. In a bucket, at most one LIST request per 1,000 objects."""
        ...

    def modified(self, name: str) -> float | None:
        """When a file was last written, as a timestamp; None if there is none."""
        ...

    def identity(self, name: str) -> object:
        """A value that changes when the file does; None if there is none."""
        ...

    def open(self, name: str) -> StoredFile: ...

    def write_new(self, name: str, total: int, buffers: Iterable["memoryview"]) -> NewFile | None:
        """Write a file of `total` bytes that must not exist yet. If a file is returned, the caller closes it later."""
        ...

    def sync(self, names: Sequence[str]) -> None:
        """Make files and their names survive a power cut."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Replace the contents of `name`: readers see the old or the new ones, and they are durable on return."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and directories that become empty. Missing files are not an error."""
        ...

    def clear(self, last: str) -> None:
        """Remove everything in the place, whoever wrote it, the file `last` at the end, and then the place itself."""
        ...

    def rename(self, name: str, new: str) -> None:
        """Give a finished file its final name, replacing an existing one, durably."""
        ...

    def sync_directory(self, name: str) -> None:
        """Make removals from a directory survive a power cut."""
        ...

    def remove_if_empty(self) -> None:
        """Remove the place itself if it is empty."""
        ...

    def children(self, name: str) -> list[str]:
        """The names in a directory; empty if there is none. `IntegrityError` for a link that leads out."""
        ...

    def entries(self) -> tuple[list[str], list[str]]:
        """The names of the directories, and those of the files, directly in the place."""
        ...

    def find_directories_with(self, name: str) -> list[str]:
        """The directories below that contain a file of this name."""
        ...

    def is_taken(self, names: Iterable[str]) -> bool:
        """Whether one of the names is in use, or needs a directory where there is a file."""
        ...

    def free_bytes(self) -> int | None:
        """Free space in bytes, or None if it is unknown."""
        ...


class Coordination(Protocol):
    """How the writers of a store keep out of each other's way, and what they leave for each other."""

    control: str  # the directory in it for the lock, the claims and the records of running saves
    saves: str  # the directory of those records

    @property
    def has_leases(self) -> bool:
        """Whether a process that died counts as alive until its lease has expired."""
        ...

    def lock(self, seconds: float = LOCK_SECONDS) -> AbstractContextManager[None]:
        """Exclude all other writers while a context lasts, creating the place if needed.

        `ConflictError` if the lock is not free after so many seconds.
        """
        ...

    def hold(self, name: str) -> Held:
        """A record that the caller is about to take."""
        ...

    def try_hold(self, name: str, scope: Scope) -> Held | None:
        """Take over a record that nobody holds, as a resource of `scope`; None if its save is alive or it is gone."""
        ...

    def is_held(self, name: str) -> bool:
        """Whether the process that made a record is alive, as far as a reader can tell. Changes nothing."""
        ...

    def check_locks(self, name: str) -> None:
        """Notice if the record of a save that is running on another host looks free from here."""
        ...

    def claim(self, name: str) -> bool:
        """Create `name` exclusively and permanently: True for the one caller that did."""
        ...

    def remove_control(self) -> None:
        """Remove the control directory. Call it with the lock held and no save running."""
        ...


class Store(Files, Coordination, Protocol):
    """A directory or a bucket prefix that holds one checkpoint."""


class EditableStore(Store, Protocol):
    """A store whose files can be written in parts and have several names."""

    def create(self, name: str, size: int, aligned: bool = False) -> NewFile:
        """Begin a file of `size` bytes that must not exist yet. `aligned`: parts of it come by `write_aligned`."""
        ...

    def link(self, name: str, new: str) -> None:
        """Make `new` a second name of a file, replacing any file of that name; a copy where links are impossible.

        Neither the file nor what was called `new` is ever written to.
        """
        ...


def children_inside(store: Files, name: str) -> list[str]:
    """The names in a directory; empty if it is not in the place, but behind a link that leads out."""
    try:
        return store.children(name)
    except IntegrityError:
        return []


def is_editable(store: Store) -> TypeGuard[EditableStore]:
    return store.traits.editable
