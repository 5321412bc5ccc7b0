"""Loading: read the manifest → choose leaves and shardings → plan → read and check → place on devices → rebuild."""

import difflib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from shardkeep.arrays import Region, kind_of, parse_dtype
from shardkeep.errors import IntegrityError, MissingLeafError, TemplateMismatchError
from shardkeep.manifest import Manifest, StoredLeaf, Tree
from shardkeep.opening import open_checkpoint
from shardkeep.planning import Fetch, plan_read
from shardkeep.reading import Source, Target, read_targets
from shardkeep.sharding import Place, Rules, ShapedLeaf, check_sharding, resolve_shardings
from shardkeep.staging import Array, budget, is_prng_dtype
from shardkeep.stores.base import Store
from shardkeep.tree import Leaf, Path, Skeleton, flatten
from shardkeep.workers import Crew

log = logging.getLogger("shardkeep")

_SHOWN = 20
_TRIES = 20  # how often a load starts over because writers keep replacing the checkpoint under it


@dataclass(slots=True)
class Wanted:
    """A leaf to be loaded: what is stored, where it goes, and what the caller wants it to be."""

    stored: StoredLeaf
    place: Place = field(default_factory=Place)
    as_numpy: bool = False
    dtype: np.dtype[Any] | None = None
    like: Any = None  # a template's plain value or 0-d array, where the other was saved


def load(
    path: object,
    *,
    template: Any = None,
    prefix: str | None = None,
    include: str | re.Pattern[str] | None = None,
    mesh: Mesh | None = None,
    partition_rules: Rules | None = None,
    shardings: Any = None,
    dtype: Any = None,
    verify: bool = True,
    mapped: Literal["auto", False] = "auto",
) -> Any:
    """Load a checkpoint as the tree that was saved, on any number of devices, every byte checked.

    Without `template`, `mesh` or `shardings`, JAX arrays come back on the default device. A `template` (arrays or
    `jax.ShapeDtypeStruct`s) gives structure, dtypes and shardings, and may name part of the tree: the rest is not read.
    With a `mesh`, `partition_rules` ((regex, PartitionSpec), first match on the `/`-joined key) or `shardings` say how
    arrays are laid out; with neither, they keep the layout they were saved with as far as the mesh has those axes.
    `include` (a regex on `/`-joined keys) loads only some leaves. `dtype` casts arrays of its own kind.

    On a local disk arrays are mapped from the file where that needs no copy (`mapped=False` reads them instead): then
    the file must not be changed in place while they live; replacing or deleting the checkpoint is safe.

    >>> import jax.numpy as jnp, shardkeep
    >>> _ = shardkeep.save(tmp / "state", {"layers": [{"w": jnp.ones(3)}, {"w": jnp.zeros(3)}], "step": 7})
    >>> shardkeep.load(tmp / "state", include="layers/1")
    {'layers': [None, {'w': Array([0., 0., 0.], dtype=float32)}]}
    """
    if mapped not in ("auto", False):
        raise ValueError(f"mapped must be 'auto' or False, not {mapped!r}")
    request = Request(
        template=template,
        prefix=prefix,
        include=re.compile(include) if isinstance(include, str) else include,
        mesh=mesh,
        rules=partition_rules,
        shardings=shardings,
        dtype=None if dtype is None else parse_dtype(dtype),
        verify=verify,
        mapped=mapped == "auto",
    )
    return load_request(path, request)[0]


@dataclass(frozen=True)
class Request:
    """What a caller asks of a load, every argument already understood."""

    template: Any = None
    prefix: str | None = None
    include: re.Pattern[str] | None = None
    mesh: Mesh | None = None
    rules: Rules | None = None
    shardings: Any = None
    dtype: np.dtype[Any] | None = None
    verify: bool = True
    mapped: bool = True


def load_request(path: object, request: Request) -> tuple[Any, Tree]:
    """The tree asked for, and its record. Starts over if a writer replaced the checkpoint meanwhile."""
    for _ in range(_TRIES):
        store, manifest = open_checkpoint(path)
        try:
            return _load(store, manifest, request)
        except (IntegrityError, FileNotFoundError):
            # Names are never written twice: if the manifest is still the same, the damage is real.
            if open_checkpoint(path)[1].save_id == manifest.save_id:
                raise
    raise IntegrityError(
        f"{path} was replaced {_TRIES} times while it was being loaded; try again when writers are calmer"
    )


def _load(store: Store, manifest: Manifest, request: Request) -> tuple[Any, Tree]:
    tree = manifest.tree(request.prefix)
    skeleton, wanted, kept = _choose(tree, request)
    _place(wanted, request, tree, manifest)
    values = read_leaves(store, tree, [w for w in wanted if w is not None], request.verify, request.mapped)
    remaining = iter(values)
    leaves = [kept[i] if w is None else next(remaining) for i, w in enumerate(wanted)]
    stand_ins = skeleton.stand_ins()
    if stand_ins:
        log.warning(
            "shardkeep: %s: stand-ins take the place of %s; import (and register) them first, or pass template=",
            manifest.path,
            ", ".join(stand_ins),
        )
    return skeleton.rebuild(leaves), tree


def _choose(tree: Tree, request: Request) -> tuple[Skeleton, list[Wanted | None], dict[int, Any]]:
    """Which leaves are read, into what structure. None marks a leaf the template keeps."""
    if request.template is not None:
        return _choose_by_template(tree, request)
    if request.include is None:
        return (
            tree.skeleton,
            [Wanted(leaf, as_numpy=leaf.kind == "numpy", dtype=request.dtype) for leaf in tree.leaves],
            {},
        )
    keep = [request.include.search("/".join(leaf.path)) is not None for leaf in tree.leaves]
    if not any(keep):
        some = ", ".join("/".join(leaf.path) for leaf in tree.leaves[:5])
        raise MissingLeafError(f"include={request.include.pattern!r} matches no leaf; keys are like {some or '(none)'}")
    wanted = [
        Wanted(leaf, as_numpy=leaf.kind == "numpy", dtype=request.dtype)
        for leaf, kept in zip(tree.leaves, keep, strict=True)
        if kept
    ]
    return tree.skeleton.prune(keep), list(wanted), {}


def _choose_by_template(tree: Tree, request: Request) -> tuple[Skeleton, list[Wanted | None], dict[int, Any]]:
    skeleton, leaves = flatten(request.template)
    find = _Finder(tree.leaves)
    wanted: list[Wanted | None] = []
    kept: dict[int, Any] = {}
    missing: list[str] = []
    wrong: list[str] = []
    for number, leaf in enumerate(leaves):
        if request.include is not None and not request.include.search("/".join(leaf.path)):
            wanted.append(None)
            kept[number] = leaf.value
            continue
        stored = find(leaf.path)
        if stored is None:
            missing.append(leaf.key)
            continue
        try:
            wanted.append(_as_template(stored, leaf, request))
        except TemplateMismatchError as error:
            wrong.append(str(error))
    if missing or wrong:
        raise _mismatch(tree, missing, wrong)
    return skeleton, wanted, kept


class _Finder:
    """Saved leaves by path; a flat dotted template finds nested leaves too, where that is unambiguous."""

    def __init__(self, leaves: Sequence[StoredLeaf]) -> None:
        self._exact = {leaf.path: leaf for leaf in leaves}
        self._dotted: dict[str, StoredLeaf | None] = {}
        for leaf in leaves:
            name = ".".join(leaf.path)
            self._dotted[name] = None if name in self._dotted else leaf

    def __call__(self, path: Path) -> StoredLeaf | None:
        return self._exact.get(path) or self._dotted.get(".".join(path))


def _mismatch(tree: Tree, missing: list[str], wrong: list[str]) -> MissingLeafError | TemplateMismatchError:
    lines = [f"{len(missing) + len(wrong)} leaves of the template do not fit the checkpoint:"]
    known = [leaf.key for leaf in tree.leaves]
    for key in missing:
        near = difflib.get_close_matches(key, known, 1) if len(missing) <= _SHOWN and len(known) < 5000 else []
        lines.append(
            f"  {key or '(the tree itself)'}: not in the checkpoint" + (f"; it has {near[0]!r}" if near else "")
        )
    lines += [f"  {text}" for text in wrong]
    return (MissingLeafError if missing else TemplateMismatchError)("\n".join(lines))


def _as_template(stored: StoredLeaf, leaf: Leaf, request: Request) -> Wanted:
    """A saved leaf as the template wants it; `TemplateMismatchError` where it cannot be had."""
    like = leaf.value
    is_array = hasattr(like, "shape") and hasattr(like, "dtype") and not isinstance(like, np.generic)
    if not is_array or stored.spec is None:
        return _plain_as_template(stored, leaf, is_array)
    is_key = is_prng_dtype(like.dtype)
    shape, saved_shape = tuple(like.shape), _logical_shape(stored)
    if is_key != (stored.kind == "prng"):
        raise TemplateMismatchError(
            f"{leaf.key}: saved {_described(stored)}, the template has {like.dtype}{list(shape)}"
        )
    if shape != saved_shape:
        raise TemplateMismatchError(f"{leaf.key}: saved shape {saved_shape}, the template has {shape}")
    dtype = None if is_key else np.dtype(like.dtype)
    if dtype is not None and dtype != stored.spec.dtype and kind_of(dtype) != kind_of(stored.spec.dtype):
        raise TemplateMismatchError(f"{leaf.key}: saved as {stored.dtype}, the template has {dtype.name}")
    sharding = getattr(like, "sharding", None)
    explicit = isinstance(sharding, Sharding) and getattr(like, "committed", True)
    place = Place(check_sharding(sharding, leaf.key, saved_shape)) if explicit and sharding is not None else Place()
    return Wanted(stored, place, as_numpy=isinstance(like, np.ndarray), dtype=dtype)


def _plain_as_template(stored: StoredLeaf, leaf: Leaf, is_array: bool) -> Wanted:
    """Where the template or the checkpoint has a plain value: the saved value, as the template's kind of thing."""
    if stored.spec is None:
        if is_array and (
            tuple(leaf.value.shape) != () or not isinstance(stored.value, bool | int | float | complex | np.generic)
        ):
            raise TemplateMismatchError(f"{leaf.key}: saved the value {stored.value!r}, the template has an array")
        return Wanted(stored, like=leaf.value if is_array else None)
    if stored.spec.shape != () or not isinstance(leaf.value, bool | int | float | complex | np.generic):
        raise TemplateMismatchError(f"{leaf.key}: saved {_described(stored)}, the template has {leaf.value!r:.60}")
    return Wanted(stored, as_numpy=True, like=leaf.value)


def _described(stored: StoredLeaf) -> str:
    return "PRNG keys" if stored.kind == "prng" else f"{stored.dtype}{list(stored.shape or ())}"


def _logical_shape(stored: StoredLeaf) -> tuple[int, ...]:
    assert stored.spec is not None
    return stored.spec.shape[:-1] if stored.kind == "prng" else stored.spec.shape


def _place(wanted: Sequence[Wanted | None], request: Request, tree: Tree, manifest: Manifest) -> None:
    """Give each array that has no place yet the one that rules, shardings or the mesh say."""
    open_ = [w for w in wanted if w is not None and w.stored.spec is not None and w.place == Place() and not w.as_numpy]
    asked = request.mesh is not None or request.rules or request.shardings is not None
    if not asked:
        return
    if not open_ and request.shardings is None:
        open_ = []
    shaped = [ShapedLeaf(w.stored.path, _logical_shape(w.stored), w.stored.extra.get("sharding")) for w in open_]
    prefix = next(name for name, candidate in manifest.trees.items() if candidate is tree)
    places = resolve_shardings(
        shaped, mesh=request.mesh, rules=request.rules, shardings=request.shardings, prefix=prefix
    )
    for w, place in zip(open_, places, strict=True):
        w.place = place


def read_leaves(store: Store, tree: Tree, wanted: Sequence[Wanted], verify: bool, mapped: bool) -> list[Any]:
    """The values of the leaves, arrays on their devices."""
    source = Source(store, tree.files, tree.compression, verify, mapped)
    targets: list[Target] = []
    fetches: list[Fetch] = []
    slots: list[int | None] = []
    for w in wanted:
        if w.stored.spec is None:
            slots.append(None)
            continue
        regions = _regions(w)
        fetches += plan_read(len(targets), w.stored, regions)
        slots.append(len(targets))
        targets.append(Target(w.stored, regions, _must_own(w), [None] * len(regions)))
    with Crew() as crew:
        read_targets(source, targets, fetches, budget.limit, crew, lambda _: None)
    return _finish(wanted, [None if slot is None else targets[slot] for slot in slots])


def _must_own(w: Wanted) -> bool:
    """Whether the caller gets NumPy arrays to write to, which must not be a mapped file."""
    assert w.stored.spec is not None
    return w.as_numpy or _needs_x64(w.stored.spec.dtype)


def _regions(w: Wanted) -> list[Region]:
    """The regions of a leaf that this process needs, each once."""
    assert w.stored.spec is not None
    shape = w.stored.spec.shape
    if w.place.sharding is None or _must_own(w):
        return [Region.whole(shape)]
    indices = w.place.sharding.addressable_devices_indices_map(shape)
    return list(dict.fromkeys(Region.from_index(index, shape) for index in indices.values() if index is not None))


def _finish(wanted: Sequence[Wanted], targets: Sequence[Target | None]) -> list[Any]:
    """Arrays onto devices (those of one device in one call), then functions, casts and plain values."""
    values: list[Any] = [None] * len(wanted)
    grouped: dict[Any, list[int]] = {}
    for number, (w, target) in enumerate(zip(wanted, targets, strict=True)):
        if target is None:
            values[number] = w.stored.value
        elif _must_own(w):
            values[number] = target.arrays[0]
        elif w.place.sharding is None or isinstance(w.place.sharding, SingleDeviceSharding):
            grouped.setdefault(w.place.sharding, []).append(number)
        else:
            values[number] = _assemble(target, w.place.sharding)
    for sharding, numbers in grouped.items():
        arrays = [_array(targets[n]) for n in numbers]
        for number, array in zip(numbers, jax.device_put(arrays, sharding), strict=True):
            values[number] = array
    jax.block_until_ready([v for v in values if isinstance(v, jax.Array)])
    _warn_64_bit(wanted)
    return [_adapt(w, value) for w, value in zip(wanted, values, strict=True)]


def _array(target: Target | None) -> Array:
    assert target is not None
    array = target.arrays[0]
    assert array is not None
    return array


def _assemble(target: Target, sharding: Sharding) -> jax.Array:
    assert target.leaf.spec is not None
    shape = target.leaf.spec.shape
    by_region: dict[Region, Any] = dict(zip(target.regions, target.arrays, strict=True))

    def data(index: Any) -> Any:
        return by_region[Region.from_index(index, shape)]

    return jax.make_array_from_callback(shape, sharding, data)


def _adapt(w: Wanted, value: Any) -> Any:
    """The last steps of one leaf: key data to keys, byte order, the user's function, casts, the template's kind."""
    if w.stored.kind == "prng":
        value = jax.random.wrap_key_data(value, impl=w.stored.extra["impl"])
    if w.stored.extra.get("order"):
        value = value.astype(value.dtype.newbyteorder(w.stored.extra["order"]))
    if w.place.function is not None:
        value = apply_function(w.place.function, value)
    if w.dtype is not None and isinstance(value, jax.Array | np.ndarray) and w.stored.kind != "prng":
        value = cast_array(value, w.dtype, w.stored.key)
    if w.like is not None:
        value = _like(w.like, value)
    return value


def apply_function(function: Callable[[Any], Any], array: Any) -> Any:
    """A callable sharding: a returned `Sharding` is applied, anything else is the result."""
    result = function(array)
    return jax.device_put(array, result) if isinstance(result, Sharding) else result


def cast_array(array: Any, dtype: np.dtype[Any], key: str) -> Any:
    """Cast within one kind (float to float, integer to integer); an integer that does not fit is a `ValueError`."""
    if array.dtype == dtype or kind_of(np.dtype(array.dtype)) != kind_of(dtype):
        return array
    if kind_of(dtype) == "int" and array.size:
        low, high = int(array.min()), int(array.max())
        limits = jax.numpy.iinfo(dtype)
        if low < int(limits.min) or high > int(limits.max):
            raise ValueError(f"leaf {key!r} holds {low} to {high}, which does not fit {dtype.name}")
    if isinstance(array, jax.Array) and _needs_x64(dtype):
        log.warning("shardkeep: leaf %r as %s is NumPy: set jax_enable_x64 to have it on devices", key, dtype.name)
        return np.asarray(array).astype(dtype)
    return array.astype(dtype)


def _like(like: Any, value: Any) -> Any:
    """A plain value as a 0-d array like the template's, or the other way round."""
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return jax.device_put(np.asarray(value).astype(like.dtype), getattr(like, "sharding", None))
    if isinstance(like, np.ndarray):
        return np.asarray(value).astype(like.dtype)
    return type(like)(value.item()) if not isinstance(like, np.generic) else value[()]


def _needs_x64(dtype: np.dtype[Any]) -> bool:
    wide = dtype.name in ("int64", "uint64", "float64", "complex128") or dtype.kind in "mM"
    return wide and (dtype.kind in "mM" or not cast(Any, jax.config).jax_enable_x64)


def _warn_64_bit(wanted: Sequence[Wanted]) -> None:
    keys = [
        w.stored.key for w in wanted if w.stored.spec is not None and not w.as_numpy and _needs_x64(w.stored.spec.dtype)
    ]
    if keys:
        log.warning(
            "shardkeep: %d 64-bit arrays (%s%s) are NumPy, unchanged: set jax_enable_x64 to have them on devices",
            len(keys),
            ", ".join(keys[:5]),
            ", …" if len(keys) > 5 else "",
        )
