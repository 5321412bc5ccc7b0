"""Small parts of large files, as the parsers of other programs' files read them: bounded, and with few requests."""

import numpy as np

from shardkeep.stores.base import StoredFile

_AHEAD = 128 << 10  # bytes read at once: in a bucket a request costs as much as a megabyte, on a disk next to nothing


class Window:
    """A file, of which one part at a time is in memory. What is asked for must be there before memory is taken for it.

    Attributes:
        size: The size of the file.
    """

    def __init__(self, file: StoredFile) -> None:
        self.size = file.size
        self._file = file
        self._start, self._data = 0, b""

    def read(self, offset: int, count: int) -> bytes:
        """So many bytes at an offset; `ValueError` if they are not in the file."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise ValueError(f"it ends at byte {self.size:,}, and {count:,} bytes are needed from byte {offset:,} on")
        skip = offset - self._start
        if skip < 0 or skip + count > len(self._data):
            memory = np.empty(min(max(count, _AHEAD), self.size - offset), np.uint8)
            self._file.read_into(offset, memory)
            self._start, self._data, skip = offset, memory.tobytes(), 0
        return self._data[skip : skip + count]
