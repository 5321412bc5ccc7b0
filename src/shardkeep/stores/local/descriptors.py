"""File descriptors that are never leaked, not even if an exception is raised while one is opened."""

import os


class Descriptor:
    """An open file, closed at the end of a `with` block, by `release`, or when it is garbage-collected.

    Args:
        path: The file to open.
        flags: Flags of `os.open`.

    >>> with Descriptor("/", os.O_RDONLY) as directory:
    ...     os.fstat(directory.number).st_nlink > 0
    True
    """

    __slots__ = ("__weakref__", "_numbers")

    def __init__(self, path: str, flags: int) -> None:
        self._numbers: list[int] = []
        # A single call, so that no signal handler can raise between opening the file and storing its descriptor.
        self._numbers.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,), (0o666,)))

    @property
    def number(self) -> int:
        """The file descriptor. Raises `ValueError` if the file is closed."""
        if not self._numbers:
            raise ValueError("the file is closed")
        return self._numbers[0]

    @property
    def is_open(self) -> bool:
        return bool(self._numbers)

    def close(self) -> None:
        if self._numbers:
            list(map(os.close, map(self._numbers.pop, (0,))))  # a single call, too: no descriptor is closed twice

    release = __del__ = close

    def __enter__(self) -> "Descriptor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
