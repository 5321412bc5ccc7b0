"""What is printed of a checkpoint: bounded texts, however many leaves it has and whatever is in them."""

from collections.abc import Sequence
from typing import Any, Protocol

from shardkeep.errors import counted
from shardkeep.model.tree import Path, name_leaf
from shardkeep.model.values import show

MOST_SHOWN = 15  # leaves


class ShownLeaf(Protocol):
    """What is shown of a leaf."""

    @property
    def path(self) -> Path: ...
    @property
    def shape(self) -> tuple[int, ...] | None: ...
    @property
    def dtype(self) -> str | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pieces(self) -> Sequence[Any]: ...
    @property
    def value(self) -> Any: ...
    @property
    def processes(self) -> int | None: ...


def rows_of(leaves: Sequence[ShownLeaf], most: int = MOST_SHOWN) -> list[str]:
    """A line for each of the first leaves, and how many more there are."""
    rows = [f"    {row_of(leaf)}" for leaf in leaves[:most]]
    more = len(leaves) - len(rows)
    return [*rows, f"    … and {counted(more, 'more leaf', 'more leaves')}"] if more else rows


def row_of(leaf: ShownLeaf) -> str:
    """A leaf in one line."""
    name = cut(name_leaf(leaf.path), 48)
    if leaf.shape is None:
        value = leaf.value
        start = value[:40] if isinstance(value, str | bytes) else value  # the `repr` of all of it may be gigabytes
        return f"{name}: {cut(show(start), 30)}"
    if leaf.processes is not None:
        return f"{name}: PerProcess of {counted(leaf.processes, 'process', 'processes')}, {leaf.nbytes:,} bytes"
    pieces = f" in {counted(len(leaf.pieces), 'piece')}" if leaf.pieces else ""
    return f"{name}: {cut(f'{leaf.dtype}{list(leaf.shape)}', 40)}, {leaf.nbytes:,} bytes{pieces}"


def cut(text: str, most: int) -> str:
    """A text of at most so many characters, safe to print; the middle of a longer one is left out.

    >>> cut("abcdefghij", 6), cut("a\\nb", 6)
    ('abc…ij', 'a\\\\nb')
    """
    short = text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"
    return short if short.isprintable() else short.encode("unicode_escape").decode()
