"""Forked child processes, in which JAX cannot be used.

JAX's threads do not exist in a forked child, and calls that need them hang. A child can still save and load NumPy
arrays and plain values. (The client for buckets has the same limitation and reports it itself.)
"""

import os

from shardkeep.errors import ProcessError
from shardkeep.jaxapi import backends_are_in_use

_has_lost_jax = False


def refuse_without_jax() -> None:
    """Raise a `ProcessError` if this process was forked from one that had already used JAX."""
    if _has_lost_jax:
        raise ProcessError(
            "this process was forked after its parent had used JAX, whose threads do not survive a fork. In a forked "
            "child, save and load only NumPy arrays and plain values, or start the child with multiprocessing's "
            "'spawn' or 'forkserver' method"
        )


def _after_fork() -> None:
    global _has_lost_jax
    _has_lost_jax = _has_lost_jax or backends_are_in_use()


os.register_at_fork(after_in_child=_after_fork)
