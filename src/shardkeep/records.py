"""Values that are made by the thousand: frozen for the type checker, without what that costs when the program runs."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True)
def record(cls: type[_Class]) -> type[_Class]:
    """A dataclass nobody changes. One that refuses to be changed takes five times as long to make.

    >>> @record
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> Point(1) == Point(1, 0), len({Point(1), Point(1)})
    (True, 1)
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
