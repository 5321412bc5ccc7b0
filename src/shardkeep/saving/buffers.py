"""Detects whether a JAX array on CPU owns its memory or aliases memory of the program, which may change at any time.

`jax.device_put`, dlpack imports and similar functions alias aligned host memory instead of copying it, and JAX has no
public way to tell. But jaxlib records where each array was created (`Array.traceback`). The innermost frame is a
function of JAX that places memory, a function that runs a computation, or the caller of a compiled function that took
its fast path. Copies that share the buffer, such as `x[:]`, share the record too. An unknown origin is treated as
memory of the program: that costs a copy, but never correctness. Canary tests check these assumptions.
"""

import os
from functools import lru_cache
from typing import Any

import jax

from shardkeep.jaxapi import COMPUTING, file_in_jax, frames_of, traceback_of
from shardkeep.model.arrays import Array
from shardkeep.runtime.hostmemory import PAGE, Shard, address_of

_LARGE = 1 << 20  # memory of XLA this large almost never starts on a page boundary; smaller blocks sometimes do
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OURS_IN_JAX = _HERE + "jaxapi.py"  # it only calls JAX for us
_LOADS = ("loading/place.py", "place")  # the function that places memory which a load has read or mapped


# The origin of an array. Not an Enum: attribute lookups are too slow for thousands of arrays.
_UNKNOWN = 0  # it may alias memory of the program
_CALLED = 1  # created by code outside of JAX, which called a compiled function unless it used jaxlib directly
_CERTAIN = 2  # a result of XLA in its own memory, or memory of a load, which nothing else refers to

_last: tuple[Any, int] = (None, _UNKNOWN)


def owns_its_buffer(array: jax.Array) -> bool:
    """Whether only XLA can change the memory of this CPU array, judging by its traceback."""
    traceback = traceback_of(array)
    return traceback is not None and _origin(traceback) != _UNKNOWN


def shard_of(array: jax.Array, part: Array) -> Shard:
    """A part of the memory of a CPU array as a shard. It is stable if only XLA can change it."""
    global _last
    traceback = traceback_of(array)
    if traceback is None:
        return Shard(part, False)
    last, origin = _last
    if traceback is not last:  # the results of one call share a traceback, and comparing it by value is slower
        origin = _origin(traceback)
        _last = (traceback, origin)
    if origin == _CALLED and part.nbytes >= _LARGE:
        # A second check: XLA allocates with malloc, which places a header before large blocks, so they never start
        # on a page boundary.
        return Shard(part, address_of(part) % PAGE != 0)
    return Shard(part, origin != _UNKNOWN)


@lru_cache(maxsize=1024)
def _origin(traceback: Any) -> int:
    places = [_place(file, function) for file, function in frames_of(traceback)]
    if not places:
        return _UNKNOWN
    package, *innermost = places[0]
    if package == "jax" and tuple(innermost) in COMPUTING:
        return _CERTAIN
    if package == "":
        return _CALLED
    outside = [place for place in places if place[0] != "jax"]
    for package, file, function in outside:
        if package != "shardkeep" or file != _LOADS[0]:  # a function or callback that the program passed to the load
            return _UNKNOWN
        if function == _LOADS[1]:
            return _CERTAIN
    return _UNKNOWN


def _place(file: str, function: str) -> tuple[str, str, str]:
    """A frame as its package ("jax", "shardkeep" or "" for any other), the file in the package, and the function."""
    if file == _OURS_IN_JAX:
        return "jax", "", function
    if file.startswith(_HERE):
        return "shardkeep", file.removeprefix(_HERE), function
    within = file_in_jax(file)
    return ("", file, function) if within is None else ("jax", within, function)
