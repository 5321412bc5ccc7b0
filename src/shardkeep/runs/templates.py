"""What `resume` is given to describe a state, as a template to load with and a way to make the state anew.

Both give arrays the same shardings: those of the template's arrays, of `jit(out_shardings=...)`, of `shardings=`, or of
`mesh=` with `partition_rules=`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import Partial

from shardkeep.errors import ShardingError, counted
from shardkeep.jaxapi import device_put, eval_shape, jit
from shardkeep.loading.adapt import check_fits
from shardkeep.loading.matching import NumpyStruct
from shardkeep.loading.request import Filler
from shardkeep.loading.shardings import Place, ShapedLeaf, check_sharding, resolve_shardings
from shardkeep.model.arrays import DType, kind_of, parse_dtype
from shardkeep.model.tree import Leaf, flatten, name_leaf

_PLACING = ("mesh", "partition_rules", "shardings", "dtype")  # the arguments of load that are used up here

_HOW = (
    "Pass shardings= (one sharding for all arrays, or a tree of them), mesh= with partition_rules=, or a function "
    "jitted with out_shardings=. For a single device: shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])"
)


@dataclass(frozen=True)
class Template:
    """How to load a state, and how to make a new one.

    Attributes:
        like: The template to load with.
        make: Makes a new state; None if the template has only shapes.
        arguments: The arguments of `load` that are left.
    """

    like: Any
    make: Callable[[], Any] | None
    arguments: Mapping[str, Any]
    make_some: Filler | None = None  # makes new values of some leaves only; None if the template has only shapes


def read_template(template: Any, arguments: Mapping[str, Any]) -> Template:
    """The template that a caller of `resume` means.

    Args:
        template: A function that makes a new state, a tree of arrays, or a tree of abstract arrays.
        arguments: Arguments for `load`. Those that place arrays are applied here, to loaded and new states alike.
    """
    placing = {name: arguments.get(name) for name in _PLACING}
    rest = {name: value for name, value in arguments.items() if name not in _PLACING}
    if not _is_function(template):
        return _from_tree(template, placing, rest)
    read = _from_jitted if hasattr(template, "eval_shape") and hasattr(template, "lower") else _from_function
    made = read(template, placing, rest)
    if rest.get("include") is None:
        return made
    assert made.make is not None
    return Template(
        made.make(), made.make, rest, made.make_some
    )  # what is not included keeps the value that the function makes


def _is_function(template: object) -> bool:
    """Whether it is a function, and not a module that can be called and is a tree."""
    return callable(template) and (isinstance(template, Partial) or jax.tree_util.all_leaves([template]))


def _from_jitted(function: Any, placing: Mapping[str, Any], rest: Mapping[str, Any]) -> Template:
    """A function that is jitted: it knows the shardings that were passed as `out_shardings`."""
    like = _placed(eval_shape(function), placing)

    def make() -> Any:
        return _moved(function(), like)

    return Template(like, make, rest, _some_of(function))


def _from_function(function: Callable[[], Any], placing: Mapping[str, Any], rest: Mapping[str, Any]) -> Template:
    """A plain function: it is traced for its shapes, and compiled to make a new state on the devices it belongs on.

    What it returns beside arrays (numbers, strings, functions) does not pass through JAX.
    """
    seen: list[tuple[Any, list[Any]]] = []  # the structure, and the leaves that are no arrays

    def arrays_of() -> list[Any]:
        state = function()
        for leaf in flatten(state)[1]:
            _refuse_truncation(leaf)
        leaves, structure = jax.tree_util.tree_flatten(state)
        seen[:] = [(structure, [_NOTHING if _is_array(leaf) else leaf for leaf in leaves])]
        return [_strongly_typed(leaf) for leaf in leaves if _is_array(leaf)]

    def filled(arrays: Sequence[Any]) -> Any:
        structure, others = seen[0]
        found = iter(arrays)
        return jax.tree_util.tree_unflatten(structure, [next(found) if o is _NOTHING else o for o in others])

    try:
        shapes: list[Any] = eval_shape(arrays_of)
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            "resume: the function that makes the state cannot be traced by JAX, because it uses the values of arrays. "
            "Pass the state itself (a tree of arrays) instead of the function, or change the function"
        ) from error
    like = _placed(filled(shapes), placing)
    leaves = [leaf for leaf in jax.tree_util.tree_leaves(like) if isinstance(leaf, jax.ShapeDtypeStruct)]

    def make() -> Any:
        def cast_arrays() -> list[Any]:
            return [_as_dtype(a, leaf.dtype) for a, leaf in zip(arrays_of(), leaves, strict=True)]

        made = jit(cast_arrays, [_wanted(leaf) for leaf in leaves])()
        return filled(made)

    return Template(like, make, rest, _some_of(function))


def _some_of(function: Callable[[], object]) -> Filler:
    """Makes some leaves of what a function makes: compiled, so that nothing is computed for the other leaves."""

    def make_some(wanted: Sequence[Leaf]) -> Sequence[object]:
        def some() -> list[object]:
            made = {leaf.path: leaf.value for leaf in flatten(function())[1]}
            return [_as_dtype(_strongly_typed(made[leaf.path]), leaf.value.dtype) for leaf in wanted]

        return jit(some, [_wanted(leaf.value) for leaf in wanted])()

    return make_some


def _from_tree(tree: Any, placing: Mapping[str, Any], rest: Mapping[str, Any]) -> Template:
    like = _placed(tree, placing)
    _, leaves = flatten(tree)
    if any(isinstance(leaf.value, jax.ShapeDtypeStruct) for leaf in leaves):
        return Template(like, None, rest)
    values = {leaf.path: leaf.value for leaf in leaves}

    def make_some(wanted: Sequence[Leaf]) -> Sequence[object]:
        return [_move(values[leaf.path], leaf.value) for leaf in wanted]

    return Template(like, lambda: _moved(tree, like), rest, make_some)


class _Nothing:
    """The place of an array among leaves that are none."""


_NOTHING = _Nothing()


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _strongly_typed(leaf: Any) -> Any:
    """A checkpoint does not keep weak types; then a new state has none either, and nothing is compiled twice."""
    return leaf if _is_key(leaf.dtype) else jnp.asarray(leaf, dtype=_canonical(leaf.dtype))


def _refuse_truncation(leaf: Leaf) -> None:
    """Raise an error if JAX would cut the integers of a NumPy array to 32 bits, which changes their values."""
    value = leaf.value
    if not isinstance(value, np.ndarray) or value.size == 0 or kind_of(value.dtype) != "int":
        return
    dtype = _canonical(value.dtype)
    if dtype != value.dtype:
        check_fits(int(value.min()), int(value.max()), dtype, name_leaf(leaf.path))


def _canonical(dtype: DType) -> DType:
    """The dtype that an array has in JAX."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _without_weak_type(value: object) -> object:
    """The same for what may be no array."""
    if not isinstance(value, jax.Array) or _is_key(value.dtype) or not value.weak_type:
        return value
    array: jax.Array = _strongly_typed(value)
    return array if array.sharding == value.sharding or not value.committed else device_put(array, value.sharding)


def _as_dtype(array: Any, dtype: Any) -> Any:
    return array if array.dtype == dtype else array.astype(dtype)


def _wanted(leaf: Any) -> Any:
    """The sharding, with a layout if there is one, that an abstract array has."""
    found = getattr(leaf, "format", None)
    return found if isinstance(found, Format) and found.layout is not None else leaf.sharding


def _placed(tree: Any, placing: Mapping[str, Any]) -> Any:
    """A template with a sharding for each JAX array, and the dtype that was asked for."""
    dtype = None if placing["dtype"] is None else parse_dtype(placing["dtype"])
    skeleton, leaves = flatten(tree)
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf.value, jax.Array | jax.ShapeDtypeStruct)]
    arrays = [i for i in arrays if not isinstance(leaves[i].value, NumpyStruct)]
    places = _places([leaves[i] for i in arrays], placing)
    values = [leaf.value for leaf in leaves]
    for i, place in zip(arrays, places, strict=True):
        values[i] = _abstract(values[i], place, dtype)
    return skeleton.rebuild(values)


def _abstract(value: Any, place: Any, dtype: np.dtype[Any] | None) -> Any:
    """An array of the template as it is loaded: itself if nothing is to be changed about it."""
    own = value.dtype
    new = dtype if dtype is not None and not _is_key(own) and kind_of(np.dtype(own)) == kind_of(dtype) else own
    if new == own and (place is None or (isinstance(value, jax.Array) and _has(value, place))):
        return value
    return jax.ShapeDtypeStruct(value.shape, new, sharding=place)


def _has(value: jax.Array, place: Any) -> bool:
    wanted = place.sharding if isinstance(place, Format) else place
    return not isinstance(place, Format) and value.committed and value.sharding == wanted


def _places(leaves: Sequence[Leaf], placing: Mapping[str, Any]) -> list[Any]:
    """A sharding or format for each array; None for one that goes where JAX puts it."""
    mesh = placing["mesh"]
    given = [placing[name] for name in ("partition_rules", "shardings")]
    known: list[Any] = [_own_sharding(leaf, mesh) for leaf in leaves]
    shaped = [ShapedLeaf(leaf.path, tuple(leaf.value.shape)) for leaf in leaves]
    if any(one is not None for one in given):
        open_ = [i for i, sharding in enumerate(known) if sharding is None]
        found = resolve_shardings([shaped[i] for i in open_], mesh=mesh, rules=given[0], shardings=given[1])
        for i, place in zip(open_, found, strict=True):
            known[i] = _as_sharding(place, shaped[i])
    elif mesh is not None and mesh.size == 1:
        known = [NamedSharding(mesh, PartitionSpec()) if one is None else one for one in known]
    missing = [i for i, one in enumerate(known) if one is None and not isinstance(leaves[i].value, jax.Array)]
    if missing:
        rest = _for_the_rest(known, [shaped[i] for i in missing], has_mesh=mesh is not None)
        for i in missing:
            known[i] = rest
    return known


def _own_sharding(leaf: Leaf, mesh: Any) -> Any:
    """The sharding that an array of the template has itself, unless JAX only put it on the default device."""
    value = leaf.value
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, Sharding) or not getattr(value, "committed", True):
        return None
    checked = check_sharding(sharding, leaf.path, tuple(value.shape), mesh)
    found = getattr(value, "format", None)
    if isinstance(value, jax.ShapeDtypeStruct) and isinstance(found, Format) and found.layout is not None:
        return Format(found.layout, checked)
    return checked


def _as_sharding(place: Place, leaf: ShapedLeaf) -> Any:
    if place.function is not None:
        raise ShardingError(
            f"leaf {leaf.name!r}: resume takes no functions in shardings, because a new state gets the same ones; pass "
            "a Sharding or a PartitionSpec"
        )
    return place.sharding if place.layout is None else Format(place.layout, place.sharding)


def _for_the_rest(known: Sequence[Any], missing: Sequence[ShapedLeaf], has_mesh: bool) -> Any:
    """The sharding of arrays that nothing says one for: where the other arrays are; None on a single device."""
    if jax.device_count() == 1:
        return None
    said = [one.sharding if isinstance(one, Format) else one for one in known if one is not None]
    meshes = [one.mesh for one in said if isinstance(one, NamedSharding)]
    if meshes:
        return NamedSharding(meshes[0], PartitionSpec())
    if said and all(isinstance(one, SingleDeviceSharding) and one == said[0] for one in said):
        return said[0]
    names = ", ".join(repr(name_leaf(leaf.path)) for leaf in missing[:3]) + (", …" if len(missing) > 3 else "")
    alone = "mesh= alone does not say how arrays are split. " if has_mesh else ""
    raise ShardingError(
        f"resume: there are {jax.device_count()} devices, but no sharding for {counted(len(missing), 'array')} "
        f"({names}). {alone}{_HOW}"
    )


def _moved(tree: Any, like: Any) -> Any:
    """A tree with the shardings and dtypes of a template, and no weak types."""
    skeleton, leaves = flatten(tree)
    _, wanted = flatten(like)
    moved = (_move(leaf.value, to.value) for leaf, to in zip(leaves, wanted, strict=True))
    values = [_without_weak_type(value) for value in moved]
    return skeleton.rebuild(values)


def _move(value: Any, like: Any) -> Any:
    if value is like or not isinstance(like, jax.ShapeDtypeStruct) or not isinstance(value, jax.Array):
        return value
    array: jax.Array = _as_dtype(value, like.dtype)
    wanted = _wanted(like)
    same = wanted is None or (isinstance(wanted, Sharding) and array.committed and array.sharding == wanted)
    return array if same else device_put(array, wanted)
