"""What cannot be saved, and why: leaves without data, or with more than can be stored."""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from shardkeep.errors import UnsupportedLeafError, an, counted
from shardkeep.jaxapi import refuse_without_jax
from shardkeep.model.arrays import dtype_name, is_prng_dtype
from shardkeep.model.perprocess import PerProcess, find_problem_inside
from shardkeep.model.values import is_plain

_SHOWN = 10  # leaves that an error names


def unsupported(problems: list[tuple[str, str]]) -> UnsupportedLeafError:
    """The error that names the leaves that cannot be saved, each a key and why."""
    shown = "\n".join(f"  {key}: {problem}" for key, problem in problems[:_SHOWN])
    more = f"\n  … and {len(problems) - _SHOWN:,} more" if len(problems) > _SHOWN else ""
    return UnsupportedLeafError(
        f"{counted(len(problems), 'leaf', 'leaves')} cannot be saved; nothing was written:\n{shown}{more}"
    )


@lru_cache(maxsize=256)
def is_jax_array(kind: type[object]) -> bool:
    """Whether objects of a class are JAX arrays with data. (`isinstance` takes several times as long.)"""
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


def find_problem(value: Any) -> str | None:
    """Why a value that is not a JAX array cannot be saved; None if it can."""
    if isinstance(value, PerProcess):
        return find_problem_inside(value.value, _problem_inside)
    if isinstance(value, Tracer):
        return "a traced value inside jit, grad or vmap has no data; save outside the transformed function"
    if isinstance(value, np.ndarray | np.generic):
        if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
            return f"{an(type(value).__name__)} has more than plain data; save its parts as plain arrays"
        try:
            dtype_name(value.dtype)
        except TypeError:
            return f"NumPy dtype {value.dtype} cannot be stored; convert to numbers, or to a list of str or bytes"
        return None
    if is_plain(value):
        return None
    if isinstance(value, jax.ShapeDtypeStruct):
        return "an abstract array (ShapeDtypeStruct) has no data"
    if callable(value):
        return f"a function or class ({getattr(value, '__name__', value)!s:.60}) is not data; remove it from the tree"
    if value is ...:
        return "... marks a leaf that is not loaded; it is not data"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{an(kind)} is neither an array nor a plain value; register it as a pytree node or leave it out"


def find_array_problem(array: jax.Array, size: int) -> str | None:
    """Why a JAX array cannot be saved by `size` processes; None if it can."""
    if array.is_deleted():
        return "the array has been deleted or donated; save it before you donate it"
    if size == 1 and not array.is_fully_addressable:
        return "the array spans several processes; call jax.distributed.initialize() first so that they can save it"
    if is_prng_dtype(array.dtype):
        known = isinstance(jax.random.key_impl(array), str)
        return None if known else "a PRNG key of an unregistered implementation; save its jax.random.key_data instead"
    try:
        dtype_name(np.dtype(array.dtype))
    except TypeError:
        return f"dtype {array.dtype} cannot be stored"
    return None


def _problem_inside(value: Any) -> str | None:
    """Why something cannot be in a `PerProcess` value; None if it can."""
    if is_jax_array(value.__class__):
        refuse_without_jax()
        if not value.is_deleted() and not value.is_fully_addressable:
            return "the array spans several processes; save it as a leaf of the tree itself"
        if is_prng_dtype(value.dtype):
            return "PRNG keys cannot be stored in a PerProcess value; use their jax.random.key_data instead"
        return find_array_problem(value, size=1)
    if value is None or isinstance(value, Tracer | np.ndarray | np.generic) or is_plain(value):
        return None if value is None else find_problem(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{an(kind)} cannot be stored; use dicts, lists and tuples of plain values, bytes and NumPy arrays"
