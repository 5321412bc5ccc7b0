"""Whether the memory of a JAX array on CPU is its own, or the program's, which can change it at any time.

`jax.device_put`, dlpack imports and the like alias aligned host memory instead of copying it, and JAX has no public way
to tell. But jaxlib records where each array was made (`Array.traceback`): the innermost frame is a function of JAX that
places memory, one that runs a computation, or, if a compiled function was called on its fast path, whatever called
it. Copies that share the buffer, such as `x[:]`, share the record too. Whatever is not known here is taken
for the program's memory: that costs a copy, never correctness. Canary tests watch all of this.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax

from shardkeep.memory import PAGE, Array, Shard, address_of

_LARGE = 1 << 20  # from here on XLA's own memory hardly ever starts on a page; smaller pieces of the heap do at times
_HERE = os.path.dirname(__file__) + os.sep
_JAX = os.path.dirname(jax.__file__) + os.sep

# What runs compiled code and nothing else. Several are fast paths within JAX, of what is computed outside of jit.
_COMPUTES = frozenset(
    (
        ("interpreters/pxla.py", "ExecuteReplicated.__call__"),
        ("dispatch.py", "apply_primitive"),
        ("pjit.py", "_pjit_call_impl"),
        ("pmap.py", "pmap.<locals>.wrapped"),
        ("shard_map.py", "pmap.<locals>.wrapped"),  # where it was in JAX 0.8
        ("numpy/ufunc_api.py", "ufunc.__call__"),
    )
)
_LOADS = ("placing.py", "_onto_devices")  # what places memory that a load of ours has read or mapped


# Where an array comes from. Not an Enum: thousands of arrays are asked, and its names take time to look up.
_UNKNOWN = 0  # it may be the program's memory
_CALLED = 1  # made by code outside of JAX: that called a compiled function, unless it went to jaxlib itself
_CERTAIN = 2  # a result of XLA in its own memory, or memory of a load, which nobody else has

_last: tuple[Any, int] = (None, _UNKNOWN)


def owns_its_buffer(array: jax.Array) -> bool:
    """Whether nobody but XLA can change the memory of this CPU array, as far as its traceback tells."""
    traceback: Any = getattr(array, "traceback", None)
    return traceback is not None and _origin(traceback) != _UNKNOWN


def shards_of(array: jax.Array, parts: Sequence[Array]) -> list[Shard]:
    """The parts of a CPU array, which lie in its memory, as shards; stable are those that nobody but XLA can change."""
    global _last
    traceback: Any = getattr(array, "traceback", None)
    if traceback is None:
        return [Shard(part, False) for part in parts]
    last, origin = _last
    if traceback is not last:  # results of one call share one, and looking it up by its value takes longer
        origin = _origin(traceback)
        _last = (traceback, origin)
    if origin == _CALLED and parts and parts[0].nbytes >= _LARGE:
        # A second net: XLA allocates with malloc, which puts large memory behind a header and never on a page itself.
        return [Shard(part, address_of(part) % PAGE != 0) for part in parts]
    return [Shard(part, origin != _UNKNOWN) for part in parts]


@lru_cache(maxsize=1024)
def _origin(traceback: Any) -> int:
    places = [_place(frame.file_name, frame.function_name) for frame in traceback.frames]
    if not places:
        return _UNKNOWN
    package, *innermost = places[0]
    if package == "jax" and tuple(innermost) in _COMPUTES:
        return _CERTAIN
    if package == "":
        return _CALLED
    outside = [place for place in places if place[0] != "jax"]
    for package, file, function in outside:
        if package != "shardkeep" or file != _LOADS[0]:  # a function or callback that the program gave to the load
            return _UNKNOWN
        if function == _LOADS[1]:
            return _CERTAIN
    return _UNKNOWN


def _place(file: str, function: str) -> tuple[str, str, str]:
    """A frame as package ("jax", "shardkeep" or "" for any other), file within it, and function."""
    if file.startswith(_HERE):
        return "shardkeep", file.removeprefix(_HERE), function
    _, found, within = file.rpartition("/jax/_src/")  # wherever it was compiled: code keeps the path it had then
    if found:
        return "jax", within, function
    if file.startswith(_JAX) or "/jaxlib/" in file:
        return "jax", "", function
    return "", file, function
