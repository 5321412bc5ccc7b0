"""Trees to and from directories of zarr arrays, for eFormer's API."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from shardkeep.catalog import missing_first, new_target
from shardkeep.eformer.handover import HandedSave, HandOver, hand_overs
from shardkeep.eformer.loader import as_dict, checked_chunk_size, refuse_unsaid_layout, rules_for, treatment
from shardkeep.eformer.manager import AsyncCheckpointManager, follow_save
from shardkeep.errors import an
from shardkeep.loading.load import load_request
from shardkeep.loading.request import LoadRequest, Policy
from shardkeep.loading.shardings import Rules
from shardkeep.model.tree import flatten
from shardkeep.processes.operation import join
from shardkeep.saving.save import SaveRequest, run_save, start_save
from shardkeep.stores.location import any_path_text, location, name_path


def is_array_like(x: object) -> bool:
    """Whether `x` has a shape and a dtype.

    Args:
        x: Any object.

    >>> is_array_like(3)
    False
    """
    return hasattr(x, "shape") and hasattr(x, "dtype")


def join_key(prefix: str | None, k: object) -> str:
    """Join a prefix and a key with a dot.

    Args:
        prefix: The prefix; may be empty or None.
        k: The key; may be empty or None.

    >>> join_key("model", "w"), join_key("", "w"), join_key("model", None)
    ('model.w', 'w', 'model')
    """
    return ".".join(str(part) for part in (prefix, k) if part is not None and part != "")


def leaf_key_paths(pytree: Any, prefix: str | None = "", *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Replace each leaf of a tree by its dotted path.

    Args:
        pytree: A PyTree.
        prefix: What every path begins with.
        is_leaf: A function that says which nodes to treat as leaves, as in `jax.tree.map`.

    Returns:
        A PyTree of strings with the structure of `pytree`.

    >>> leaf_key_paths({"a": [1, None]}, "m")
    {'a': ['m.a.0', None]}
    """
    skeleton, leaves = flatten(pytree, is_leaf)
    return skeleton.rebuild([join_key(prefix, ".".join(leaf.path)) for leaf in leaves])


def tree_serialize_leaves(
    checkpoint_dir: object,
    pytree: Any,
    manager: Any = None,
    *,
    prefix: str | None = None,
    commit_callback: Callable[[], None] | None = None,
    write_index: bool = True,
) -> None:
    """Save a tree in the TensorStore format, one zarr array for each leaf. An older tree there is replaced.

    Args:
        checkpoint_dir: The directory.
        pytree: The PyTree to save.
        manager: JAX's `GlobalAsyncCheckpointManager`, or an `AsyncCheckpointManager`. With a manager, this returns
            after the snapshot, and the manager's `wait_until_finished` waits for the save and raises its error. None
            returns when the checkpoint is committed.
        prefix: The name of this tree, if several trees share the directory.
        commit_callback: Called without arguments after the commit, on process 0. The callbacks of one manager start in
            the order of the calls. If it raises an exception, this becomes a `CallbackError`; the save stays committed.
        write_index: Whether eFormer may find the tree, through `tensorstore_index.json`.

    >>> import jax.numpy as jnp
    >>> tree_serialize_leaves(tmp / "leaves", {"w": jnp.ones(2)})
    >>> sorted(tree_deserialize_leaves(tmp / "leaves", None))
    ['w']
    """
    with join(f"saving to {name_path(checkpoint_dir)}") as operation:
        path = any_path_text(checkpoint_dir, "tree_serialize_leaves(checkpoint_dir, pytree)")
        target = new_target(location(path), "zarr", None, None, directory=True)
        request = SaveRequest(target, pytree, prefix, None, True, write_index)
        if manager is None:
            run_save(replace(request, on_commit=commit_callback), operation)
        elif isinstance(manager, AsyncCheckpointManager):
            follow_save(manager, replace(request, on_commit=commit_callback), operation)
        elif hasattr(manager, "serialize"):
            handed = HandedSave(start_save(request, operation), commit_callback)
            hand_overs.setdefault(manager, HandOver()).add(manager, handed)
        else:
            raise TypeError(
                "manager must be an AsyncCheckpointManager or JAX's own GlobalAsyncCheckpointManager, "
                f"not {an(type(manager).__name__)}"
            )


def tree_deserialize_leaves(
    checkpoint_dir: object,
    mesh: Mesh | None,
    manager: Any = None,
    *,
    prefix: str | None = None,
    partition_rules: Rules | None = None,
    shardings: Any = None,
    callback: Callable[[Any, str], Any] | None = None,
    chunk_size: int | None = None,
) -> dict[str, Any]:
    """Load a tree as nested dicts with string keys, from checkpoints of shardkeep or eFormer.

    Args:
        checkpoint_dir: The directory.
        mesh: The mesh to place arrays on. None: the default device. A mesh with several axes needs `partition_rules` or
            `shardings`.
        manager: A manager whose pending saves to wait for first.
        prefix: The tree to load, if the directory has several.
        partition_rules: Pairs of a regular expression and a `PartitionSpec`; the first that matches the key, joined
            with `/`, wins. Rules come before `shardings`.
        shardings: A PyTree, or a dict with dotted keys, of shardings, `PartitionSpec`s or functions.
        callback: Called as `callback(array, key)` for each array, with its dotted key; its result is returned.
        chunk_size: The most arrays to read at once. None: no limit but the memory budget.

    >>> import jax.numpy as jnp
    >>> tree_serialize_leaves(tmp / "leaves", {"layers": [jnp.ones(2)]})
    >>> tree_deserialize_leaves(tmp / "leaves", None)["layers"]["0"].shape
    (2,)
    """
    with join(f"loading {name_path(checkpoint_dir)}") as operation:
        place = location(any_path_text(checkpoint_dir, "tree_deserialize_leaves(checkpoint_dir, mesh)"))
        if manager is not None:
            manager.wait_until_finished()
        with missing_first(place):
            refuse_unsaid_layout(mesh, partition_rules, shardings)
            request = LoadRequest(
                prefix=prefix,
                mesh=mesh,
                rules=rules_for(mesh, partition_rules, shardings),
                shardings=shardings,
                policy=Policy(all_jax=True, in_flight=checked_chunk_size(chunk_size), treat=treatment(None, callback)),
            )
            skeleton, leaves, _ = load_request(place, request, operation)
    return as_dict(skeleton, leaves)
