"""The sharding of each leaf: from rules, from a tree of shardings, from the layout it was saved with, or none."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import Partial

from shardkeep.errors import ShardingError, counted
from shardkeep.jaxapi import current_mesh, partitions_of
from shardkeep.model.arrays import Region
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.keys import loose_key
from shardkeep.model.leaves import Axes, SavedSharding
from shardkeep.model.tree import Path, flatten, name_leaf

log = logging.getLogger("shardkeep")

_REMEMBERED = 4096  # shardings and shapes, for programs that make new ones all the time
_fitted: dict[tuple[Sharding, tuple[int, ...], Mesh | None], Sharding] = {}  # shardings that were checked before

Rules = Sequence[tuple[str, Any]]
_SHOWN = 8  # keys that a message lists
_ENTRIES = Sharding | PartitionSpec | Partial | Format  # what a tree of shardings has as leaves, beside functions


@fast_dataclass
class Place:
    """Where a leaf goes: a sharding (None is the default device), then a function of the user's to apply."""

    sharding: Sharding | None = None
    function: Callable[[Any], Any] | None = None
    explicit: bool = False  # a rule or a sharding names this leaf
    layout: Layout | None = None  # the order of its dimensions in the device's memory; None is the device's own


@fast_dataclass
class ShapedLeaf:
    """What is needed of a leaf to choose its sharding."""

    path: Path
    shape: tuple[int, ...]
    saved: SavedSharding | None = None  # the sharding it had when it was saved
    optional: bool = False  # may stay without a sharding
    nbytes: int = 0

    @property
    def name(self) -> str:
        return name_leaf(self.path)


def as_mesh(mesh: object) -> Mesh:
    """The argument `mesh` of a load."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ShardingError(f"mesh must be a jax.sharding.Mesh, not {mesh!r:.80}; jax.make_mesh makes one")
    return cast(Mesh, mesh)


def as_partition_rules(rules: object) -> Rules:
    """The argument `partition_rules` of a load."""
    if isinstance(rules, Sequence) and not isinstance(rules, str):
        pairs = cast("Sequence[Sequence[object]]", rules)
        if all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            return cast(Rules, pairs)
    raise ShardingError(
        'partition_rules must be a list of pairs of a pattern and a PartitionSpec, such as [(".*kernel", '
        f'P("fsdp", "tp")), (".*", P())], not {rules!r:.80}'
    )


def resolve_shardings(
    leaves: Sequence[ShapedLeaf],
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    shardings: Any = None,
    strict: bool = False,
    prefix: str = "",
    prefix_first: bool = False,
) -> list[Place]:
    """A Place for each array: by rules, then by `shardings`, then (on a mesh) by the layout it was saved with.

    With `strict`, a leaf that neither a rule nor a sharding names is an error instead of a warning. Rules are matched
    against keys without the prefix (with `prefix_first`: with it). The other form is tried if no rule matches any key.

    Specs without a mesh are for the mesh of `jax.set_mesh`. A mesh that was set says nothing about arrays otherwise:
    it is there for computations, and a load that does not mention it is not changed by it.
    """
    named = _Named(shardings) if shardings is not None else None
    if mesh is None and (_has_specs(spec for _, spec in rules or ()) or (named is not None and named.has_specs)):
        mesh = current_mesh()
    by_rule = _match_rules(leaves, rules, mesh, prefix, prefix_first)
    replicated = _Replicated(mesh)
    places: list[Place] = []
    unmatched: list[str] = []
    for number, leaf in enumerate(leaves):
        asked = by_rule.get(number, _ABSENT)
        if asked is _ABSENT and named is not None:
            asked = named.find(leaf)
        if asked is not _ABSENT:
            places.append(_place(asked, leaf, mesh))
            continue
        if (rules or (strict and named is not None)) and not leaf.optional:
            unmatched.append(leaf.name)
        if mesh is None:
            places.append(Place())
            continue
        spec = PartitionSpec()
        if not rules and named is None:
            spec = _saved_spec(leaf, mesh)
            if not leaf.optional:
                replicated.compare(leaf, spec)
        places.append(Place(NamedSharding(mesh, spec)))
    if unmatched:
        text = f"no partition rule and no sharding matches {_some(unmatched)}"
        if strict:
            raise ShardingError(f"{text}; add a rule such as ('.*', PartitionSpec())")
        log.warning("%s: replicated", text)
    if named is not None:
        named.warn_unused()
    replicated.warn()
    return places


def _has_specs(asked: Iterable[Any]) -> bool:
    return any(isinstance(one, PartitionSpec) for one in asked)


@lru_cache(maxsize=1024)
def device_regions(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[jax.Device, Region]:
    """The region of an array of this shape that each device of this process holds."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: Region.from_index(index, shape) for device, index in indices.items() if index is not None}


@lru_cache(maxsize=1024)
def needed_regions(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Region, ...]:
    """The regions this process needs of an array of this shape. If they are all of its rows: one region."""
    regions = tuple(dict.fromkeys(device_regions(sharding, shape).values()))
    rows = all(region.shape[1:] == shape[1:] for region in regions)
    return (Region.whole(shape),) if rows and sum(region.size for region in regions) == math.prod(shape) else regions


def named_sharding(mesh: Mesh | None, spec: PartitionSpec, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """A spec on a mesh for one array: cut to the rank of the array, and checked."""
    if mesh is None:
        raise ShardingError(f"leaf {name!r}: {spec} needs a mesh; pass mesh=, or set one with jax.set_mesh")
    if spec.unreduced:
        raise ShardingError(
            f"leaf {name!r} of shape {shape}: {spec} is unreduced, and checkpoints hold reduced arrays; "
            "leave out unreduced="
        )
    entries: list[Axes] = list(partitions_of(spec)[: len(shape)])
    for axis, (extent, entry) in enumerate(zip(shape, entries, strict=False)):
        axes = _axes(entry)
        unknown = [a for a in axes if a not in mesh.shape]
        if unknown:
            raise ShardingError(
                f"leaf {name!r} of shape {shape}: {spec} has the axis {unknown[0]!r}, which is not an axis of the mesh "
                f"{dict(mesh.shape)}"
            )
        parts = math.prod(mesh.shape[a] for a in axes)
        if extent % parts:
            raise ShardingError(
                f"leaf {name!r} of shape {shape}: {spec} splits dimension {axis} ({extent}) into {parts} parts, "
                f"which does not divide it; the mesh is {dict(mesh.shape)}"
            )
    used = [a for entry in entries if entry for a in _axes(entry)]
    if len(set(used)) < len(used):
        raise ShardingError(f"leaf {name!r} of shape {shape}: {spec} uses an axis of the mesh {dict(mesh.shape)} twice")
    return NamedSharding(mesh, PartitionSpec(*entries, reduced=spec.reduced))


def check_sharding(sharding: Sharding, path: Path, shape: tuple[int, ...], mesh: Mesh | None = None) -> Sharding:
    """The sharding for an array of `shape`: a named one is cut to its rank, one on an abstract mesh moves to `mesh`.

    If that is None, it moves to the mesh of `jax.set_mesh`. `path`: of the leaf, for errors.
    """
    if mesh is None and isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        mesh = current_mesh()
    known = _fitted.get((sharding, shape, mesh))
    if known is None:
        known = _check_sharding(sharding, name_leaf(path), shape, mesh)
        if len(_fitted) >= _REMEMBERED:
            _fitted.clear()
        _fitted[sharding, shape, mesh] = known
    return known


def _check_sharding(sharding: Sharding, name: str, shape: tuple[int, ...], mesh: Mesh | None) -> Sharding:
    if isinstance(sharding, NamedSharding):
        if not isinstance(sharding.mesh, Mesh):
            if mesh is None:
                raise ShardingError(
                    f"leaf {name!r}: {sharding.spec} is on an abstract mesh, which has no devices; pass mesh=, or set "
                    "one with jax.set_mesh"
                )
            return _with_memory_kind(named_sharding(mesh, sharding.spec, name, shape), sharding)
        fitted = named_sharding(sharding.mesh, sharding.spec, name, shape)
        return sharding if fitted.spec == sharding.spec else _with_memory_kind(fitted, sharding)
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ShardingError(f"leaf {name!r} of shape {shape}: {sharding} does not fit: {error}") from error
    return sharding


def _with_memory_kind(sharding: NamedSharding, like: NamedSharding) -> NamedSharding:
    return sharding if like.memory_kind is None else sharding.with_memory_kind(like.memory_kind)


class _Absent:
    """Nothing is said about a leaf. (None means the default.)"""


_ABSENT = _Absent()


class _Named:
    """A tree of shardings, or a flat dict by key with `/` or `.`. An entry covers everything below it."""

    def __init__(self, shardings: Any) -> None:
        _, leaves = flatten(shardings, is_leaf=lambda x: x is None or isinstance(x, _ENTRIES))
        self.has_specs = _has_specs(leaf.value for leaf in leaves)
        self._entries: dict[str, list[tuple[Path, Any]]] = {}
        for leaf in leaves:
            self._entries.setdefault(loose_key(leaf.path), []).append((leaf.path, leaf.value))
        self._used: set[Path] = set()

    def find(self, leaf: ShapedLeaf) -> Any:
        """The entry for a leaf, or for the nearest subtree that it is in."""
        place = loose_key(leaf.path)
        while True:
            found = self._entries.get(place)
            if found is not None:
                path, value = self._chosen(found, leaf)
                self._used.add(path)
                return value
            if not place:
                return _ABSENT
            place = place.rpartition("/")[0]

    def _chosen(self, found: list[tuple[Path, Any]], leaf: ShapedLeaf) -> tuple[Path, Any]:
        """Of several entries with one spelling, the one that spells it like the leaf."""
        exact = [entry for entry in found if entry[0] == leaf.path[: len(entry[0])]]
        chosen = (exact or found)[0]
        if len(found) > 1 and not exact and any(value != chosen[1] for _, value in found):
            keys = " and ".join(repr(name_leaf(path)) for path, _ in found)
            raise ShardingError(f"shardings has several entries for the leaf {leaf.name!r}: {keys}; keep one of them")
        return chosen

    def warn_unused(self) -> None:
        entries = [entry for found in self._entries.values() for entry in found]  # None: perhaps a None of the state
        unused = [name_leaf(path) for path, value in entries if value is not None and path not in self._used]
        if unused:
            log.warning("shardings for %s match no array", _some(unused))


class _Replicated:
    """Collects arrays that a mesh makes less sharded than they were, which may not fit into memory."""

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh
        self._keys: list[str] = []
        self._nbytes = 0
        self._missing: dict[str, None] = {}
        self._indivisible = False

    def compare(self, leaf: ShapedLeaf, spec: PartitionSpec) -> None:
        if leaf.saved is None or self._mesh is None or self._mesh.size == 1:
            return
        sizes = dict(leaf.saved.mesh)
        lost: list[str] = []
        for entry, kept in zip(leaf.saved.spec, cast(Any, spec), strict=False):
            if kept is None:
                lost += [axis for axis in _axes(entry) if sizes.get(axis) != 1]
        if not lost:
            return
        parts = math.prod(self._mesh.shape[axis] for entry in cast(Any, spec) for axis in _axes(entry))
        self._keys.append(leaf.name)
        self._nbytes += leaf.nbytes // parts
        missing = [axis for axis in lost if axis not in self._mesh.shape]
        self._missing.update(dict.fromkeys(missing))
        self._indivisible = self._indivisible or len(missing) < len(lost)

    def warn(self) -> None:
        if not self._keys or self._mesh is None:
            return
        reasons: list[str] = []
        if self._missing:
            axes = ", ".join(map(repr, self._missing))
            reasons.append(f"the mesh does not have the {'axis' if len(self._missing) == 1 else 'axes'} {axes}")
        if self._indivisible:
            reasons.append("axes of the mesh do not divide the dimensions")
        one = len(self._keys) == 1
        log.warning(
            "%s that %s sharded when saved %s replicated on the mesh %s, completely or along some dimensions, and %s "
            "%s bytes on each device: %s. The reason: %s. Pass partition_rules= or shardings= to shard %s",
            counted(len(self._keys), "array"),
            "was" if one else "were",
            "is" if one else "are",
            dict(self._mesh.shape),
            "takes" if one else "take",
            f"{self._nbytes:,}",
            _some(self._keys),
            " and ".join(reasons),
            "it" if one else "them",
        )


def _place(asked: Any, leaf: ShapedLeaf, mesh: Mesh | None) -> Place:
    if asked is None:
        return Place(NamedSharding(mesh, PartitionSpec()) if mesh is not None else None)
    if isinstance(asked, Format):
        placed = _place(asked.sharding, leaf, mesh)
        return replace(placed, explicit=True, layout=check_layout(asked.layout, leaf.name))
    if isinstance(asked, Sharding):
        return Place(check_sharding(asked, leaf.path, leaf.shape, mesh), explicit=True)
    if isinstance(asked, PartitionSpec):
        return Place(named_sharding(mesh, asked, leaf.name, leaf.shape), explicit=True)
    if callable(asked):
        return Place(None, asked, explicit=True)
    raise ShardingError(
        f"leaf {leaf.name!r}: a sharding must be a Sharding, a PartitionSpec, a Format, a function or None, not "
        f"{asked!r}"
    )


def check_layout(layout: Any, name: str) -> Layout | None:
    """A layout that says what it is. `Layout.AUTO` leaves that to a compiler, and nothing is compiled here."""
    if layout is None or isinstance(layout, Layout):
        return layout
    where = f"leaf {name!r}: " if name else ""
    raise ShardingError(f"{where}the layout must be a jax.experimental.layout.Layout, not {layout!r}")


def _match_rules(
    leaves: Sequence[ShapedLeaf], rules: Rules | None, mesh: Mesh | None, prefix: str, prefix_first: bool
) -> dict[int, Any]:
    """By number of the leaf, the spec of the first rule that matches."""
    if not rules:
        return {}
    if mesh is None and any(isinstance(spec, PartitionSpec) for _, spec in rules):
        raise ShardingError("partition_rules need a mesh; pass mesh=, or set one with jax.set_mesh")
    patterns = [(_compiled(pattern), spec) for pattern, spec in rules]
    starts = [(), tuple(prefix.split("."))] if prefix else [()]
    for start in reversed(starts) if prefix_first else starts:
        found = _hits(["/".join((*start, *leaf.path)) for leaf in leaves], patterns)
        if found:
            return found
    return {}


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ShardingError(
            f"the pattern {pattern!r} in partition_rules is not a valid regular expression: {error}"
        ) from None


def _hits(names: Sequence[str], patterns: Sequence[tuple[re.Pattern[str], Any]]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for number, name in enumerate(names):
        for pattern, spec in patterns:
            if pattern.search(name):
                found[number] = spec
                break
    return found


def _saved_spec(leaf: ShapedLeaf, mesh: Mesh) -> PartitionSpec:
    """The layout a leaf was saved with: the axes that this mesh has, where they divide the array."""
    kept: list[Any] = []
    free = dict(mesh.shape)  # a damaged manifest may name an axis twice
    for extent, entry in zip(leaf.shape, leaf.saved.spec if leaf.saved else (), strict=False):
        axes = tuple(axis for axis in dict.fromkeys(_axes(entry)) if axis in free)
        fits = axes and extent % math.prod(free[axis] for axis in axes) == 0
        kept.append(axes if fits else None)
        free = {axis: size for axis, size in free.items() if not fits or axis not in axes}
    return PartitionSpec(*kept)


def _axes(entry: Axes) -> tuple[str, ...]:
    """The axes in one entry of a spec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
