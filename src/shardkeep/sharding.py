"""Which sharding each leaf gets: from rules, from a tree of shardings, from the saved layout, or none."""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import Partial

from shardkeep.errors import ShardingError
from shardkeep.tree import Path, flatten

log = logging.getLogger("shardkeep")

_REMEMBERED = 4096
_fitted: dict[tuple[Sharding, tuple[int, ...], Mesh | None], Sharding] = {}  # shardings that were looked at before

Rules = Sequence[tuple[str, Any]]
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a leaf goes: a sharding (None is the default device), and a function of the user's to apply after."""

    sharding: Sharding | None = None
    function: Callable[[Any], Any] | None = None
    explicit: bool = False  # a rule or a sharding names this very leaf


@dataclass(frozen=True, slots=True)
class ShapedLeaf:
    """What choosing a sharding needs to know of a leaf."""

    path: Path
    shape: tuple[int, ...]
    saved: Mapping[str, Any] | None = None  # the sharding it had when saved
    optional: bool = False  # may stay without a sharding

    @property
    def name(self) -> str:
        return ".".join(self.path)


def resolve_shardings(
    leaves: Sequence[ShapedLeaf],
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    shardings: Any = None,
    strict: bool = False,
    follow_saved: bool = True,
    prefix: str = "",
    prefix_first: bool = False,
) -> list[Place]:
    """A Place for each array leaf. Rules go first, then `shardings`, then (on a mesh) the layout it was saved with.

    `strict`: a leaf that neither a rule nor a sharding names is an error rather than a warning. Rules are matched with
    keys without the prefix (`prefix_first`: with it); only if no rule hits any key, the other form is tried.
    """
    by_rule = _match_rules(leaves, rules, mesh, prefix, prefix_first)
    named = _Named(shardings) if shardings is not None else None
    places: list[Place] = []
    unmatched: list[str] = []
    for number, leaf in enumerate(leaves):
        asked = by_rule.get(number, _ABSENT)
        if asked is _ABSENT and named is not None:
            asked = named.find(leaf.name)
        if asked is not _ABSENT:
            places.append(_place(asked, leaf, mesh))
            continue
        if (rules or (strict and named is not None)) and not leaf.optional:
            unmatched.append(leaf.name)
        saved = _saved_spec(leaf, mesh) if follow_saved and not rules and named is None else PartitionSpec()
        places.append(Place(NamedSharding(mesh, saved) if mesh is not None else None))
    if unmatched:
        text = f"no partition rule and no sharding matches {_some(unmatched)}"
        if strict:
            raise ShardingError(f"{text}; add a rule such as ('.*', PartitionSpec())")
        log.warning("shardkeep: %s: replicated", text)
    if named is not None:
        named.warn_unused()
    return places


def named_sharding(mesh: Mesh | None, spec: PartitionSpec, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """A spec on a mesh for one array: cut to the array's rank and checked, with an error that names everything."""
    if mesh is None:
        raise ShardingError(f"leaf {name!r}: {spec} needs a mesh; pass mesh=")
    entries = list(cast(Any, spec))[: len(shape)]
    for axis, (extent, entry) in enumerate(zip(shape, entries, strict=False)):
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        unknown = [a for a in axes if a not in mesh.shape]
        if unknown:
            raise ShardingError(
                f"leaf {name!r} of shape {shape}: {spec} names the axis {unknown[0]!r}; the mesh has {dict(mesh.shape)}"
            )
        parts = math.prod(mesh.shape[a] for a in axes)
        if extent % parts:
            raise ShardingError(
                f"leaf {name!r} of shape {shape}: {spec} cuts dimension {axis} ({extent}) into {parts} parts, "
                f"which does not divide it; the mesh is {dict(mesh.shape)}"
            )
    used = [a for entry in entries if entry for a in (entry if isinstance(entry, tuple) else (entry,))]
    if len(set(used)) < len(used):
        raise ShardingError(f"leaf {name!r} of shape {shape}: {spec} names an axis of {dict(mesh.shape)} twice")
    return NamedSharding(mesh, PartitionSpec(*entries))


def check_sharding(sharding: Sharding, name: str, shape: tuple[int, ...], mesh: Mesh | None = None) -> Sharding:
    """The sharding as it fits an array of `shape`; a named one is cut to its rank, one without devices takes `mesh`."""
    known = _fitted.get((sharding, shape, mesh))
    if known is None:
        known = _check_sharding(sharding, name, shape, mesh)
        if len(_fitted) >= _REMEMBERED:
            _fitted.clear()
        _fitted[sharding, shape, mesh] = known
    return known


def _check_sharding(sharding: Sharding, name: str, shape: tuple[int, ...], mesh: Mesh | None) -> Sharding:
    if isinstance(sharding, NamedSharding):
        if not isinstance(sharding.mesh, Mesh):
            if mesh is None:
                raise ShardingError(
                    f"leaf {name!r}: {sharding.spec} is on an abstract mesh, without devices; pass mesh="
                )
            return named_sharding(mesh, sharding.spec, name, shape)
        fitted = named_sharding(sharding.mesh, sharding.spec, name, shape)
        return sharding if fitted.spec == sharding.spec else fitted.with_memory_kind(cast(Any, sharding.memory_kind))
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ShardingError(f"leaf {name!r} of shape {shape}: {sharding} does not fit: {error}") from error
    return sharding


class _Absent:
    """Nothing was said about a leaf (None says: the default)."""


_ABSENT = _Absent()


class _Named:
    """A tree (or flat dotted dict) of shardings, looked up by dotted leaf path; an entry covers what lies below it."""

    def __init__(self, shardings: Any) -> None:
        _, leaves = flatten(shardings, is_leaf=lambda x: x is None or isinstance(x, Sharding | PartitionSpec | Partial))
        self._entries: dict[str, Any] = {".".join(leaf.path): leaf.value for leaf in leaves}
        self._used: set[str] = set()

    def find(self, name: str) -> Any:
        place = name
        while True:
            if place in self._entries:
                self._used.add(place)
                return self._entries[place]
            if not place:
                return _ABSENT
            place = place.rpartition(".")[0]

    def warn_unused(self) -> None:
        unused = [name for name in self._entries if name not in self._used]
        if unused:
            log.warning("shardkeep: shardings for %s match no array", _some(unused))


def _place(asked: Any, leaf: ShapedLeaf, mesh: Mesh | None) -> Place:
    if asked is None:
        return Place(NamedSharding(mesh, PartitionSpec()) if mesh is not None else None)
    if isinstance(asked, Sharding):
        return Place(check_sharding(asked, leaf.name, leaf.shape), explicit=True)
    if isinstance(asked, PartitionSpec):
        return Place(named_sharding(mesh, asked, leaf.name, leaf.shape), explicit=True)
    if callable(asked):
        return Place(None, asked, explicit=True)
    raise ShardingError(
        f"leaf {leaf.name!r}: a sharding must be a Sharding, a PartitionSpec, a function or None, not {asked!r}"
    )


def _match_rules(
    leaves: Sequence[ShapedLeaf], rules: Rules | None, mesh: Mesh | None, prefix: str, prefix_first: bool
) -> dict[int, Any]:
    """Leaf number → what its first matching rule says."""
    if not rules:
        return {}
    if mesh is None and any(isinstance(spec, PartitionSpec) for _, spec in rules):
        raise ShardingError("partition_rules need a mesh; pass mesh=")
    patterns = [(re.compile(pattern), spec) for pattern, spec in rules]
    starts = [(), tuple(prefix.split("."))] if prefix else [()]
    for start in reversed(starts) if prefix_first else starts:
        found = _hits(["/".join((*start, *leaf.path)) for leaf in leaves], patterns)
        if found:
            return found
    return {}


def _hits(names: Sequence[str], patterns: Sequence[tuple[re.Pattern[str], Any]]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for number, name in enumerate(names):
        for pattern, spec in patterns:
            if pattern.search(name):
                found[number] = spec
                break
    return found


def _saved_spec(leaf: ShapedLeaf, mesh: Mesh | None) -> PartitionSpec:
    """The layout the leaf was saved with, as far as this mesh has the axes and they divide the array."""
    spec = (leaf.saved or {}).get("spec") or []
    kept: list[Any] = []
    for extent, entry in zip(leaf.shape, spec, strict=False):
        axes = tuple(entry) if isinstance(entry, list) else () if entry is None else (entry,)
        sizes = [mesh.shape.get(a) for a in axes] if mesh is not None else []
        fits = sizes and None not in sizes and extent % math.prod(cast(list[int], sizes)) == 0
        kept.append(axes if fits else None)
    return PartitionSpec(*kept)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
