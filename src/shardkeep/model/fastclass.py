"""Dataclasses of which thousands are made: frozen for the type checker, but not at run time, where that is slow."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def fast_dataclass(cls: type[_Class]) -> type[_Class]:
    """Make a class a dataclass that the type checker treats as frozen. A truly frozen one takes five times as long.

    It keeps a `__repr__` that it has or inherits.

    >>> @fast_dataclass
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> Point(1) == Point(1, 0), len({Point(1), Point(1)})
    (True, 1)
    """
    return dataclass(slots=True, unsafe_hash=True, repr=cls.__repr__ is object.__repr__)(cls)
