"""Trees of shardings, for eFormer's API."""

import logging
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import Partial

from shardkeep.catalog import open_checkpoint
from shardkeep.eformer.gathering import reshard
from shardkeep.errors import ShardingError, TreeError
from shardkeep.jaxapi import current_mesh
from shardkeep.loading.adapt import apply_function
from shardkeep.loading.moving import with_layout
from shardkeep.loading.shardings import ShapedLeaf, resolve_shardings
from shardkeep.model.leaves import StoredArray
from shardkeep.model.tree import flatten, nest
from shardkeep.stores.location import any_path_text, location

log = logging.getLogger("shardkeep")


def apply_sharding_tree(arrays: Any, sharding_tree: Any, mesh: Mesh | None = None) -> Any:
    """Put each array on its sharding. Leaves are matched by their dotted paths.

    Args:
        arrays: A PyTree of arrays. Other leaves are left as they are.
        sharding_tree: For each array a `Sharding`, a `PartitionSpec` (for `mesh`), a function of the array, or None
            (replicated on `mesh`, or one device). If the whole tree is None, arrays are left as they are.
        mesh: The mesh for `PartitionSpec`s and None. By default, specs are for the mesh of `jax.set_mesh`.

    Returns:
        A PyTree with the structure of `arrays`. If the two trees do not have the same leaves, a warning is logged and
        `arrays` is returned unchanged.

    >>> import jax.numpy as jnp
    >>> apply_sharding_tree({"w": jnp.ones(2)}, None)["w"].shape
    (2,)
    """
    if sharding_tree is None:
        return arrays
    skeleton, leaves = flatten(arrays, is_leaf=_is_none)
    names = [".".join(leaf.path) for leaf in leaves]
    asked = _by_name(sharding_tree)
    difference = _difference(set(asked), set(names))
    if difference:
        log.warning("the sharding tree does not match the arrays (%s); they are left as they are", difference)
        return arrays
    values: list[Any] = []
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf.value, jax.Array | np.ndarray):
            values.append(leaf.value)
            continue
        if callable(asked[name]):
            values.append(apply_function(asked[name], leaf.value))
            continue
        (place,) = resolve_shardings(
            [ShapedLeaf(leaf.path, leaf.value.shape)], mesh=mesh, shardings={name: asked[name]}
        )
        moved = reshard(leaf.value, place.sharding or SingleDeviceSharding(jax.local_devices()[0]))
        values.append(with_layout(moved, place.layout) if isinstance(moved, jax.Array) else moved)
    return skeleton.rebuild(values)


def create_sharding_tree_from_index(
    checkpoint_dir: object, mesh: Mesh | None = None, prefix: str | None = None, default_sharding: Any = None
) -> dict[str, Any]:
    """A nested dict with the keys of a checkpoint and a sharding for each array, to pass as `shardings`.

    Args:
        checkpoint_dir: The checkpoint.
        mesh: The mesh for a `PartitionSpec` or None. By default, a spec is for the mesh of `jax.set_mesh`.
        prefix: The tree, if the directory has several.
        default_sharding: A `Sharding`, a `PartitionSpec` (for `mesh`), a function of a dict with `path` (joined with
            `/`), `shape` and `dtype`, or None (replicated on `mesh`, or over all devices).
    """
    call = "create_sharding_tree_from_index(checkpoint_dir, mesh)"
    _, manifest = open_checkpoint(location(any_path_text(checkpoint_dir, call)))
    arrays = manifest.tree(prefix).arrays
    return nest([(leaf.path, _sharding_for(leaf, mesh, default_sharding)) for leaf in arrays])


def _sharding_for(leaf: StoredArray, mesh: Mesh | None, default: Any) -> Any:
    if default is None:
        everywhere = mesh if mesh is not None else Mesh(np.array(jax.devices()), ("all",))
        return NamedSharding(everywhere, PartitionSpec())
    if isinstance(default, Sharding):
        return default
    if isinstance(default, PartitionSpec):
        mesh = current_mesh() if mesh is None else mesh
        if mesh is None:
            raise ShardingError(f"default_sharding {default} needs a mesh; pass mesh=, or set one with jax.set_mesh")
        return NamedSharding(mesh, PartitionSpec(*list(default)[: len(leaf.logical_shape)]))
    if callable(default):
        return default({"path": "/".join(leaf.path), "shape": leaf.logical_shape, "dtype": leaf.dtype})
    raise ShardingError(f"default_sharding must be a Sharding, a PartitionSpec, a function or None, not {default!r}")


def make_itsharded(xs: Any, mesh: Mesh) -> Any:
    """Replicate fully addressable JAX arrays on a mesh. Everything else is left as it is.

    Args:
        xs: A PyTree.
        mesh: The mesh.
    """

    def place(x: Any) -> Any:
        if isinstance(x, jax.Array) and x.is_fully_addressable:
            return reshard(x, NamedSharding(mesh, PartitionSpec()))
        return x

    skeleton, leaves = flatten(xs)
    return skeleton.rebuild([place(leaf.value) for leaf in leaves])


def validate_sharding_tree(sharding_tree: Any, expected_structure: Any) -> bool:
    """Whether two trees have the same leaves. Logs a warning if not; never raises.

    Args:
        sharding_tree: A PyTree of shardings. None is a leaf.
        expected_structure: A PyTree with the leaves it should have. None is a leaf.

    >>> validate_sharding_tree({"w": None}, {"w": 1})
    True
    """
    try:
        difference = _difference(set(_by_name(sharding_tree)), set(_by_name(expected_structure)))
    except (TreeError, TypeError, ValueError) as error:
        difference = str(error)
    if difference:
        log.warning("the sharding tree does not have the expected structure: %s", difference)
    return not difference


def _by_name(tree: Any) -> dict[str, Any]:
    _, leaves = flatten(tree, is_leaf=lambda x: _is_none(x) or isinstance(x, Sharding | PartitionSpec | Partial))
    return {".".join(leaf.path): leaf.value for leaf in leaves}


def _is_none(x: object) -> bool:
    return x is None


def _difference(found: set[str], expected: set[str]) -> str:
    parts = [
        f"{what} {', '.join(sorted(names)[:8])}"
        for what, names in (("missing", expected - found), ("not expected", found - expected))
        if names
    ]
    return "; ".join(parts)
