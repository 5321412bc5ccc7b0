"""Open files by number, which no exception loses."""

import os


class Descriptor:
    """An open file, closed when it is left, released or forgotten.

    >>> with Descriptor("/", os.O_RDONLY) as directory:
    ...     os.fstat(directory.number).st_nlink > 0
    True
    """

    __slots__ = ("__weakref__", "_numbers")

    def __init__(self, path: str, flags: int) -> None:
        self._numbers: list[int] = []
        # One call, so that no signal handler can raise between opening the file and noting its number.
        self._numbers.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,), (0o666,)))

    @property
    def number(self) -> int:
        """The number of the open file; `ValueError` if it is closed."""
        if not self._numbers:
            raise ValueError("the file is closed")
        return self._numbers[0]

    @property
    def is_open(self) -> bool:
        return bool(self._numbers)

    def close(self) -> None:
        if self._numbers:
            list(map(os.close, map(self._numbers.pop, (0,))))  # one call, too: a number is never closed twice

    release = close

    def __enter__(self) -> "Descriptor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
