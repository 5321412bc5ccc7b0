"""Properties that are computed when they are first read."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

T = TypeVar("T")


class cached_property(functools.cached_property[T]):
    """`functools.cached_property` without its lock, so that two threads may both compute the value.

    In Python 3.11 all instances of a class share that lock. A child that is forked while another thread computes the
    property would wait for it forever.

    >>> class Square:
    ...     side = 3
    ...     @cached_property
    ...     def area(self):
    ...         print("computed")
    ...         return self.side**2
    >>> square = Square()
    >>> square.area + square.area
    computed
    18
    """

    def __init__(self, function: Callable[..., T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()
