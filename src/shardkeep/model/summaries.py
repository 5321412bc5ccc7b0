"""What is printed of a checkpoint: bounded texts, however many leaves it has and whatever is in them."""

from collections.abc import Sequence
from typing import Protocol

from shardkeep.errors import counted

MOST_SHOWN = 15  # leaves


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
