"""eFormer's `serialization` path: trees to and from directories, without a manager of our own."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from shardkeep.choosing import Request
from shardkeep.errors import an
from shardkeep.loading import load_request
from shardkeep.manager import as_dict, checked_chunk_size, refuse_unsaid_layout
from shardkeep.opening import new_target
from shardkeep.pending import PendingSave
from shardkeep.saving import SaveRequest, run_save, start_save
from shardkeep.sharding import Rules
from shardkeep.tree import flatten


def is_array_like(x: Any) -> bool:
    """Whether `x` has a shape and a dtype.

    >>> is_array_like(3)
    False
    """
    return hasattr(x, "shape") and hasattr(x, "dtype")


def join_key(prefix: str | None, k: Any) -> str:
    """`k` below `prefix`, with a dot between them; either may be empty or None.

    >>> join_key("model", "w"), join_key("", "w"), join_key("model", None)
    ('model.w', 'w', 'model')
    """
    return ".".join(str(part) for part in (prefix, k) if part is not None and part != "")


def leaf_key_paths(pytree: Any, prefix: str | None = "", *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The tree with each leaf replaced by its dotted path, `prefix` in front.

    >>> leaf_key_paths({"a": [1, None]}, "m")
    {'a': ['m.a.0', None]}
    """
    skeleton, leaves = flatten(pytree, is_leaf)
    return skeleton.rebuild([join_key(prefix, ".".join(leaf.path)) for leaf in leaves])


def tree_serialize_leaves(
    checkpoint_dir: Any,
    pytree: Any,
    manager: Any = None,
    *,
    prefix: str | None = None,
    commit_callback: Callable[[], None] | None = None,
    write_index: bool = True,
) -> None:
    """Save the leaves in the TensorStore format; with `prefix`, several trees share one directory.

    Without a `manager` this returns when the save is committed. With one (JAX's `GlobalAsyncCheckpointManager` or
    `AsyncCheckpointManager`) it returns after the snapshot, and the manager's `wait_until_finished` covers the save.

    >>> import jax.numpy as jnp
    >>> tree_serialize_leaves(tmp / "leaves", {"w": jnp.ones(2)})
    >>> sorted(tree_deserialize_leaves(tmp / "leaves", None))
    ['w']
    """
    target = new_target(checkpoint_dir, "tensorstore", None, None, directory=True)
    request = SaveRequest(target, pytree, prefix, None, True, write_index, commit_callback)
    if manager is None:
        run_save(request)
    elif hasattr(manager, "follow"):
        manager.follow(start_save(request))
    elif hasattr(manager, "serialize"):
        _hand_overs.setdefault(manager, _HandOver()).add(manager, start_save(request))
    else:
        raise TypeError(f"manager must be an AsyncCheckpointManager or JAX's own, not {an(type(manager).__name__)}")


class _HandOver:
    """Lets a manager of JAX's wait for our saves: a serialization of nothing whose commit step ends when they do.

    A save that comes while that step is under way joins it, so nobody waits for an earlier save; and what failed is
    kept for the manager's next wait, not raised by the next save.
    """

    def __init__(self) -> None:
        self._starting = threading.RLock()
        self._lock = threading.RLock()
        self._pending: list[PendingSave] = []
        self._failure: Exception | None = None
        self._under_way = False

    def add(self, manager: Any, pending: PendingSave) -> None:
        with self._starting:
            with self._lock:
                self._pending.append(pending)
                if self._under_way:
                    return
                self._under_way = True
            # On a thread of its own: JAX's manager starts an event loop, and there may be a running one here.
            thread = threading.Thread(target=self._start, args=(manager,), name="shardkeep-hand-over")
            thread.start()
            thread.join()

    def _start(self, manager: Any) -> None:
        try:
            manager.wait_until_finished()
        except Exception as error:  # noqa: BLE001  (raised by the commit step)
            self._failure = error
        if jax.process_count() == 1:
            manager.serialize([], [], on_commit_callback=self._commit)
            return
        # Among several processes it would call the commit step on the first only, and barriers would be counted.
        manager._thread = threading.Thread(target=self._commit_for, args=(manager,), name="shardkeep-hand-over")
        manager._thread.start()

    def _commit_for(self, manager: Any) -> None:
        try:
            self._commit()
        except Exception as error:  # noqa: BLE001  (raised by the manager's next wait)
            manager._exception = error

    def _commit(self) -> None:
        failure, self._failure = self._failure, None
        while True:
            with self._lock:
                if not self._pending:
                    self._under_way = False
                    break
                pending = self._pending.pop(0)
            try:
                pending.wait()
            except Exception as error:  # noqa: BLE001  (raised below; the others were logged)
                failure = failure or error
        if failure is not None:
            raise failure


_hand_overs: weakref.WeakKeyDictionary[Any, _HandOver] = weakref.WeakKeyDictionary()


def tree_deserialize_leaves(
    checkpoint_dir: Any,
    mesh: Mesh | None,
    manager: Any = None,
    *,
    prefix: str | None = None,
    partition_rules: Rules | None = None,
    shardings: Any = None,
    callback: Callable[[Any, str], Any] | None = None,
    chunk_size: int | None = None,
) -> dict[str, Any]:
    """A tree as nested dicts of strings, from our checkpoints and eFormer's. `manager`'s pending saves come first.

    `chunk_size` is how many arrays are in flight at once.
    """
    refuse_unsaid_layout(mesh, partition_rules, shardings)
    request = Request(
        prefix=prefix,
        mesh=mesh,
        rules=partition_rules,
        shardings=shardings,
        follow_saved=False,
        all_jax=True,
        in_flight=checked_chunk_size(chunk_size),
        callback=None if callback is None else lambda array, leaf: callback(array, ".".join(leaf.path)),
    )
    if manager is not None:
        manager.wait_until_finished()
    skeleton, leaves, _ = load_request(checkpoint_dir, request)
    return as_dict(skeleton, leaves)
