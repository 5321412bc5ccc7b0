"""Forked children: what JAX's threads were needed for cannot be done there.

The threads of JAX do not exist in a forked child, and calls that need them hang. What a child can do is save and load
NumPy arrays and plain values. (The client for buckets has the same limit, and says so itself.)
"""

import os
import sys

from shardkeep.errors import ProcessError

_has_lost_jax = False


def refuse_without_jax() -> None:
    """`ProcessError` if JAX was started by the process that this one was forked from."""
    if _has_lost_jax:
        raise ProcessError(
            "this process was forked after its parent began to use JAX, whose threads do not survive a fork. In a "
            "forked child, save and load only NumPy arrays and plain values; or start the child with "
            "multiprocessing's 'spawn' or 'forkserver' method"
        )


def _lose() -> None:
    global _has_lost_jax
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "backends_are_initialized", lambda: True)():
        _has_lost_jax = True


os.register_at_fork(after_in_child=_lose)
