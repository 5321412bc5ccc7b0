"""Metrics that a training loop passes: checked at once, copied from the device and read in the background."""

import logging
import numbers
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from shardkeep.errors import MetadataError, an
from shardkeep.jaxapi import transfers_allowed
from shardkeep.model.arrays import kind_of

log = logging.getLogger("shardkeep")


class Metrics:
    """The metrics of one step. Values on devices are copied asynchronously from now on, and read by `read`.

    Args:
        given: Names and numbers: Python or NumPy numbers, or JAX scalars.

    >>> Metrics({"loss": np.float32(0.5), "tokens": 1024}).read()
    {'loss': 0.5, 'tokens': 1024.0}
    """

    def __init__(self, given: Mapping[str, Any] | None) -> None:
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise MetadataError(f'metrics must be a dict of names and numbers, as {{"loss": loss}}, not {_kind(given)}')
        for name, value in given.items():
            _check(name, value)
        self._values = dict(given)
        with transfers_allowed():
            for value in self._values.values():
                if hasattr(value, "copy_to_host_async"):
                    value.copy_to_host_async()

    def read(self) -> dict[str, float]:
        """The numbers. Waits for values that are still being computed or copied."""
        found: dict[str, float] = {}
        for name, value in self._values.items():
            try:
                with transfers_allowed():
                    found[name] = float(value)
            except OverflowError:
                found[name] = float("inf") if value > 0 else float("-inf")
            except RuntimeError as error:  # donated or deleted before it was read; the checkpoint is worth more
                log.error("metric %r could not be read and is not recorded: %s", name, error)
        return found


def _check(name: Any, value: Any) -> None:
    if not isinstance(name, str) or not name:
        raise MetadataError(f"the name of a metric must be a string, not {name!r}")
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        shape, dtype = tuple(value.shape), value.dtype
        if shape != ():
            raise MetadataError(
                f"metric {name!r} is an array of shape {shape}, not a number; pass a scalar, for example its mean"
            )
        if not isinstance(dtype, np.dtype) or kind_of(cast("np.dtype[Any]", dtype)) not in ("float", "int"):
            raise MetadataError(f"metric {name!r} has dtype {dtype}, which is not a real number")
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise MetadataError(f"metric {name!r} is {_kind(value)}, not a number; pass a Python, NumPy or JAX scalar")


def _kind(value: Any) -> str:
    return "None" if value is None else an(type(value).__name__)
