"""Other programs' files, opened for their parsers: small parts of large files, bounded, and with few requests."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np

from shardkeep.errors import MissingDataError, damage_of
from shardkeep.foreign.flat import ByteSource
from shardkeep.model.arrays import Array
from shardkeep.runtime.crew import run_tasks
from shardkeep.stores.base import Store, StoredFile

_NEAR = 4 << 10  # bytes between two parts on a disk that take less time than another read
_LONGEST = 1 << 20  # bytes of a read of several parts
_AHEAD = 128 << 10  # bytes read at once: in a bucket a request costs as much as a megabyte, on a disk next to nothing
_MOST_KEPT = 8  # parts that are kept, for descriptions that lead back and forth: 1 MiB


class ByteFile(ByteSource, Protocol):
    """Bytes of which it is known how many there are: a file, or a part of one."""

    @property
    def size(self) -> int: ...


class FileWindow:
    """A file, of which a few parts are in memory. What is asked for must be there before memory is taken for it.

    Attributes:
        size: The size of the file.
    """

    def __init__(self, file: ByteFile, requests: int | None = None) -> None:
        """Look at a file.

        Args:
            file: The file.
            requests: How many parts are read at the same time, where each takes a request to a bucket.
        """
        self.size = file.size
        self._requests = requests
        self._file = file
        self._kept: list[tuple[int, bytes]] = []  # offsets and bytes, the newest last

    def read(self, offset: int, count: int) -> bytes:
        """So many bytes at an offset; `ValueError` if they are not in the file."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise ValueError(f"it ends at byte {self.size:,}, but {count:,} bytes are needed from byte {offset:,}")
        for start, data in reversed(self._kept):
            if start <= offset and offset + count <= start + len(data):
                return data[offset - start : offset - start + count]
        memory = np.empty(min(max(count, _AHEAD), self.size - offset), np.uint8)
        self._file.read_into(offset, memory)
        data = memory.tobytes()
        if count <= _AHEAD:
            self._kept = [*self._kept[1 - _MOST_KEPT :], (offset, data)]
        return data[:count]

    def read_each(self, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """Parts of the file, given by offset and count in order of offsets. Those near each other are read in one."""
        near = _AHEAD if self._requests else _NEAR
        runs: list[list[tuple[int, int]]] = []
        for offset, count in parts:
            if offset < 0 or count < 0 or offset + count > self.size:
                raise ValueError(f"it ends at byte {self.size:,}, but byte {offset + count:,} is needed")
            near_enough = bool(runs) and 0 <= offset - sum(runs[-1][-1]) <= near
            if not near_enough or offset + count - runs[-1][0][0] > _LONGEST:
                runs.append([])
            runs[-1].append((offset, count))
        found: list[list[bytes]] = [[] for _ in runs]

        def read(number: int) -> None:
            run = runs[number]
            start = run[0][0]
            memory = np.empty(sum(run[-1]) - start, np.uint8)
            self._file.read_into(start, memory)
            found[number] = [memory[at - start : at - start + count].tobytes() for at, count in run]

        if self._requests:
            run_tasks([partial(read, number) for number in range(len(runs))], self._requests)
        else:
            for number in range(len(runs)):
                read(number)
        return [part for run in found for part in run]

    def read_into(self, offset: int, buffer: Array) -> None:
        """Fill `buffer` with the bytes at an offset; `ValueError` if there are not enough."""
        buffer[:] = np.frombuffer(self.read(offset, buffer.size), np.uint8)


def requests_of(store: Store) -> int | None:
    """How many requests to make to a store at the same time; None where a read is no request."""
    return store.traits.concurrency if store.traits.costly_requests else None


class FilePart:
    """A part of a file, as a file of its own."""

    def __init__(self, file: ByteFile, offset: int, length: int) -> None:
        """Take a part. `ValueError` if it is not in the file."""
        if offset < 0 or length < 0 or offset + length > file.size:
            raise ValueError(f"it ends at byte {file.size:,}, but {length:,} bytes are needed from byte {offset:,}")
        self.size = length
        self._file, self._offset = file, offset

    def read_into(self, offset: int, buffer: Array) -> None:
        if offset + buffer.size > self.size:
            raise ValueError(f"it ends at byte {self.size:,} of this part")
        self._file.read_into(self._offset + offset, buffer)


@contextmanager
def opened(store: Store, name: str, key: str) -> Generator[StoredFile]:
    """A file that is read for a leaf. What is wrong with it is an `IntegrityError` that names the file and the leaf."""
    where = store.locate(name)
    try:
        with store.open(name) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise MissingDataError(f"{where} is missing", leaf=key, file=where) from None
    except (ValueError, EOFError, MemoryError) as error:
        raise damage_of(error, key, where) from error
