"""What is printed of a checkpoint: bounded texts, however many leaves it has and whatever is in them."""

import reprlib
from collections.abc import Sequence
from typing import Protocol

from shardkeep.errors import counted
from shardkeep.model.values import show

MOST_SHOWN = 15  # leaves
_LONGEST = 1000  # characters of a value
_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


class Shaped(Protocol):
    """An array."""

    @property
    def dtype(self) -> object: ...

    @property
    def shape(self) -> Sequence[int]: ...


class Shown(Protocol):
    """Something that is shown in one line."""

    @property
    def row(self) -> str: ...


def rows_of(leaves: Sequence[Shown], most: int = MOST_SHOWN) -> list[str]:
    """A line for each of the first leaves, and how many more there are."""
    rows = [f"    {leaf.row}" for leaf in leaves[:most]]
    more = len(leaves) - len(rows)
    return [*rows, f"    … and {counted(more, 'more leaf', 'more leaves')}"] if more else rows


def cut(text: str, most: int) -> str:
    """A text of at most so many characters, safe to print; the middle of a longer one is left out.

    >>> cut("abcdefghij", 6), cut("a\\nb", 6)
    ('abc…ij', 'a\\\\nb')
    """
    short = text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"
    return short if short.isprintable() else short.encode("unicode_escape").decode()


def human(nbytes: int) -> str:
    """A number of bytes in decimal units.

    >>> human(999), human(1_234_567)
    ('999 B', '1.2 MB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    size, unit = nbytes / 1000, 0
    while size >= 999.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """A time span in the largest unit that gives a whole number, or in milliseconds or seconds.

    >>> duration(0.0123), duration(2.5), duration(900), duration(86400)
    ('12 ms', '2.5 s', '15 min', '1 d')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length and seconds % length == 0:
            return f"{int(seconds // length)} {unit}"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


class _Brief(reprlib.Repr):
    """Values in a few words: of arrays the types, of long containers and texts how they begin."""

    def repr_ndarray(self, array: Shaped, _: int) -> str:
        return f"{array.dtype}{list(array.shape)}"

    repr_ArrayImpl = repr_ndarray

    def repr_int(self, x: int, level: int) -> str:
        return cut(show(x), self.maxlong)

    def repr_bytes(self, x: bytes, _: int) -> str:
        return cut(repr(x[: self.maxstring]), self.maxstring)


_brief = _Brief()
_brief.maxother = _brief.maxstring = 60


def brief(value: object) -> str:
    """The `repr` of a value, bounded, and safe to print. Of an array it has the type, not the elements.

    >>> import numpy as np
    >>> brief({"a": np.zeros((2, 3)), "b": list(range(100))})
    "{'a': float64[2, 3], 'b': [0, 1, 2, 3, 4, 5, ...]}"
    """
    return cut(_brief.repr(value), _LONGEST)
