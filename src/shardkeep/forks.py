"""Forked children: what they inherit of their parent that cannot be used there.

The threads of JAX, and of the client for buckets, do not exist in a forked child; calls that need them hang. What a
child can do is save and load NumPy arrays and plain values on a local disk.
"""

import os
import sys

from shardkeep.errors import ProcessError

_used: set[str] = set()  # what this process has started, and its children would have without its threads
_lost: set[str] = set()

JAX = "JAX"
BUCKETS = "the client for buckets"


def is_lost(what: str) -> bool:
    """Whether `what` was started by the process that this one was forked from."""
    return what in _lost


def use(what: str) -> None:
    """Note that `what` is being used; `ProcessError` if it cannot be in this process."""
    if what in _lost:
        raise ProcessError(
            f"this process was forked after its parent began to use {what}, whose threads do not survive a fork. In a "
            "forked child, save and load only NumPy arrays and plain values on a local disk; or start the child with "
            "multiprocessing's 'spawn' or 'forkserver' method"
        )
    _used.add(what)


def _lose() -> None:
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "backends_are_initialized", lambda: True)():
        _used.add(JAX)
    _lost.update(_used)


os.register_at_fork(after_in_child=_lose)
