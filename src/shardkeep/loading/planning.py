"""What a load would do, before it does it: a value that can be looked at, executed and undone."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shardkeep.catalog import open_checkpoint
from shardkeep.errors import IntegrityError, counted
from shardkeep.jaxapi import process_count, process_index
from shardkeep.loading.blocks import parts_of
from shardkeep.loading.leftovers import not_named
from shardkeep.loading.load import load, make_request
from shardkeep.loading.matching import Needed, Wanted
from shardkeep.loading.mismatches import Mismatch
from shardkeep.loading.plan import plan_overlapping
from shardkeep.loading.read import needed_blocks
from shardkeep.loading.remapping import remapped
from shardkeep.loading.request import LoadRequest
from shardkeep.loading.select import choose, choose_places, choose_process
from shardkeep.loading.suggestions import rules_to_try
from shardkeep.model.arrays import Region
from shardkeep.model.digests import BLOCK
from shardkeep.model.leaves import StoredArray
from shardkeep.model.manifest import Manifest
from shardkeep.model.markup import Cell, Code, Gauge, facts, line, panel, table
from shardkeep.model.summaries import cut, human
from shardkeep.model.tree import Path, flatten, name_leaf
from shardkeep.remap.changes import Changes, Remapped, remap_tree
from shardkeep.remap.inverse import inverse_of
from shardkeep.remap.rules import Rule
from shardkeep.stores.location import location, path_text
from shardkeep.targets.steady import TRIES, Attempt

_SHOWN = 40  # leaves in a table
_SHOWN_BRIEFLY = 12  # leaves at the prompt
_WIDEST = 60  # characters of a column


@dataclass(frozen=True)
class PlannedLeaf:
    """A leaf of a `LoadPlan`.

    Attributes:
        key: Its key in the result.
        form: Its dtype and shape; for a plain value, the value.
        sources: The stored leaves it is built from, each with the ranges that this process needs.
        rules: The rules that were applied to it, in order.
        nbytes: The bytes that this process needs for it, counted in whole blocks, as they are stored and verified.
            Data that several leaves share is counted for each of them.
    """

    key: str
    form: str
    sources: tuple[str, ...]
    rules: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, repr=False)
class LoadPlan:
    """What `load` would do, as returned by `plan_load`. Prints as a table, and as an HTML table in notebooks.

    Attributes:
        path: The checkpoint.
        leaves: A `PlannedLeaf` for each leaf that is loaded: `key`, `form`, `sources`, `rules`, `nbytes`.
        missing: Keys of the template that are not in the checkpoint.
        extra: Keys of the checkpoint that are not in the template.
        problems: Other mismatches with the template. If there are any, `load` raises an error.
        suggestions: Rules that would resolve mismatches, as code to paste.
        nbytes: The bytes that this process needs, with each block counted once. With `broadcast`, another process may
            read some of them and send them.

    >>> import numpy as np, shardkeep
    >>> from shardkeep import remap
    >>> _ = shardkeep.save(tmp / "old", {"layers": [{"w": np.ones((2, 3))}, {"w": np.zeros((2, 3))}]})
    >>> plan = shardkeep.plan_load(tmp / "old", remap=[remap.stack("layers/{i}/w", "layers/w")])
    >>> [(leaf.key, leaf.form, leaf.nbytes) for leaf in plan.leaves]
    [('layers/w', 'float64[2, 2, 3]', 96)]
    >>> plan.load()["layers"]["w"].shape, plan.inverse()
    ((2, 2, 3), [remap.unstack('layers/w', 'layers/{i}/w')])
    """

    path: str
    leaves: tuple[PlannedLeaf, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    problems: tuple[str, ...]
    suggestions: tuple[str, ...]
    nbytes: int
    _execute: Callable[[], object] = field(compare=False)
    _changes: Changes = field(compare=False)
    _present: tuple[Path, ...] = field(compare=False)
    _others: tuple[Path, ...] = field(compare=False)  # leaves of the result that are not loaded

    def load(self) -> Any:
        """Execute the plan. If the checkpoint has been replaced since, the new one is planned again and loaded."""
        return self._execute()

    def inverse(self) -> list[Rule]:
        """Return the rules that turn the loaded tree back into that of the checkpoint, for the leaves that are loaded.

        They do not affect other leaves of the template, such as those that `missing=` provides.

        Raises:
            RemapError: A rule lost data, for example by dropping a leaf, or it cannot be undone.
        """
        return list(inverse_of(self._changes, self._present, self._others))

    def __str__(self) -> str:
        return self._text(_SHOWN)

    def __repr__(self) -> str:
        return self._text(_SHOWN_BRIEFLY)

    def _text(self, most: int) -> str:
        rows = [["leaf", "is", "from", "rules", "bytes read"], *(_row(leaf) for leaf in self.leaves[:most])]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [f"load {self.path}: {counted(len(self.leaves), 'leaf', 'leaves')}, {self.nbytes:,} bytes to read"]
        lines += ["  ".join(text.ljust(n) for text, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self._rest(most)])

    def _repr_html_(self) -> str:
        largest = max((leaf.nbytes for leaf in self.leaves), default=0) or 1
        head = ["leaf", "is", "read", "from", "rules"][: 5 if any(leaf.rules for leaf in self.leaves) else 4]
        rows: list[list[Cell]] = []
        for leaf in self.leaves[:_SHOWN]:
            key, form, *others = map(Code, _row(leaf)[:-1])
            read = Gauge(human(leaf.nbytes), leaf.nbytes / largest) if leaf.nbytes else ""
            rows.append([key, form, read, *others][: len(head)])
        size = f"{human(self.nbytes)} for {counted(len(self.leaves), 'leaf', 'leaves')}"
        parts = [facts([("to read", size)]), *([table(head, rows)] if rows else [])]
        return panel("LoadPlan", Code(self.path), [*parts, *map(line, self._rest(_SHOWN))])

    def _rest(self, most: int) -> list[str]:
        more = len(self.leaves) - most
        lines = [f"… and {counted(more, 'more leaf', 'more leaves')}"] if more > 0 else []
        for what, keys in (("not in the checkpoint", self.missing), ("not in the template", self.extra)):
            if keys:
                lines.append(f"{what}: {cut(', '.join(keys), 400)}")
        lines += [cut(problem, 400) for problem in self.problems[:most]]
        if len(self.problems) > most:
            lines.append(f"… and {counted(len(self.problems) - most, 'more problem')}")
        return [*lines, *(f"to try: {text}" for text in self.suggestions[:most])]


def _row(leaf: PlannedLeaf) -> list[str]:
    first, more = leaf.sources[:1], len(leaf.sources) - 1
    sources = "".join(first) + (f" and {more:,} more" if more > 0 else "")
    return [*(cut(text, _WIDEST) for text in (leaf.key, leaf.form, sources, ", ".join(leaf.rules))), f"{leaf.nbytes:,}"]


def plan_load(path: object, **arguments: Any) -> LoadPlan:
    """Plan a load without executing it: how each leaf is built, what is missing, and what is left over.

    No array is read, and nothing is put on a device.

    Args:
        path: The checkpoint, as for `load`.
        arguments: The other arguments of `load`.

    Returns:
        A `LoadPlan`, which prints as a table. `plan.load()` executes it, and `plan.inverse()` returns rules that undo
        its rules.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at `path`.
        RemapError: A rule cannot be applied.
        ShardingError: A sharding does not fit its array or the mesh.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "step_1", {"w": np.ones(3)})
    >>> plan = shardkeep.plan_load(tmp / "step_1", template={"w": np.zeros(3), "b": np.zeros(2)})
    >>> plan.missing
    ('b',)
    """
    parameters = dict(inspect.signature(load).parameters)
    del parameters["path"]
    for name in arguments:
        if name not in parameters:
            raise TypeError(f"plan_load() has no argument {name!r}; it takes those of load: {', '.join(parameters)}")
    known = {name: arguments.get(name, parameter.default) for name, parameter in parameters.items()}
    mapped = known.pop("mapped")
    request = make_request(**known if mapped is None else {**known, "mmap": mapped})
    place = location(path, "plan_load(path)")
    for _ in range(TRIES):
        _, manifest = open_checkpoint(place)
        plan = None
        with Attempt(manifest, lambda: open_checkpoint(place)[1]) as attempt:
            plan = _plan(path_text(path), manifest, request, partial(load, path, **arguments))
            attempt.sure = True  # what it reads beside the manifest has digests there
        if plan is not None:
            return plan
    raise IntegrityError(
        f"{place} was replaced {TRIES} times while the load was planned; try again when no save is running"
    )


def _plan(path: str, manifest: Manifest, request: LoadRequest, execute: Callable[[], object]) -> LoadPlan:
    tree = manifest.tree(request.prefix)
    prefix = next((name for name, candidate in manifest.trees.items() if candidate is tree), request.prefix or "")
    found = remapped(tree, request) if request.remap else remap_tree(tree, ())
    problems: list[Mismatch] = []
    choice = choose(found.tree, replace(request, missing="keep", extra="ignore"), problems)
    wanted = [w for w in choice.wanted if w is not None]
    choose_places(wanted, prefix, request)
    choose_process(choice, request, manifest.path, process_index(), process_count())
    used = {w.stored.path for w in wanted}
    template = [] if request.template is None else flatten(request.template)[1]
    refused = [*(leaf.path for leaf in template if leaf.value is ...), *(one.path for one in problems)]
    extra = [] if request.template is None else not_named(found.tree, used, refused)
    lacking = {leaf.path: tuple(leaf.value.shape) for leaf in choice.lacking.values() if hasattr(leaf.value, "shape")}
    differing = {one.path: one.wanted for one in problems if one.wanted is not None}
    needed = {**differing, **(lacking if request.missing == "error" else {})}
    rules = rules_to_try(found.tree.leaves, needed, [leaf.path for leaf in template]) if needed else []
    read = [w.needed for w in wanted]
    return LoadPlan(
        path=path,
        leaves=tuple(_planned(w, some, found) for w, some in zip(wanted, read, strict=True)),
        missing=tuple(leaf.key for leaf in choice.lacking.values()),
        extra=tuple(leaf.key for leaf in extra),
        problems=tuple(one.text for one in problems),
        suggestions=tuple(map(repr, rules)),
        nbytes=_nbytes([each for some in read for each in some]),
        _execute=execute,
        _changes=found.changes,
        _present=tuple(used),
        _others=tuple(path for path, w in zip(choice.skeleton.paths(), choice.wanted, strict=True) if w is None),
    )


def _nbytes(needed: Needed) -> int:
    """The bytes that are read for regions, each block once."""
    together: dict[Path, tuple[StoredArray, list[Region]]] = {}
    for leaf, regions in needed:
        if not leaf.nbytes:
            continue  # it begins where the next array does
        source = (leaf.pieces[0].file, leaf.pieces[0].offset) if leaf.pieces else leaf.path
        together.setdefault(tuple(map(str, source)), (leaf, []))[1].extend(regions)
    total = 0
    for leaf, regions in together.values():
        if not leaf.pieces:
            total += sum(region.size for region in dict.fromkeys(regions)) * leaf.spec.dtype.itemsize
        for fetch in plan_overlapping(0, leaf, regions):
            piece = fetch.piece
            for first, last in parts_of(piece, needed_blocks(fetch, leaf)):
                total += piece.stored or min(last * BLOCK, piece.length) - first * BLOCK
    return total


def _planned(w: Wanted, needed: Needed, found: Remapped) -> PlannedLeaf:
    leaf = w.stored
    form = (
        f"{leaf.logical_dtype}{list(leaf.logical_shape)}"
        if isinstance(leaf, StoredArray)
        else cut(repr(leaf.value), 40)
    )
    origin = found.origin_of(leaf.path)
    sources = tuple(_ranges(stored, regions, origin) for stored, regions in needed) or (name_leaf(origin or leaf.path),)
    return PlannedLeaf(leaf.key, form, sources, tuple(map(repr, found.rules_of(leaf.path))), _nbytes(needed))


def _ranges(leaf: StoredArray, regions: Sequence[Region], origin: Path | None) -> str:
    """A stored array with the ranges that are needed of it."""
    key = name_leaf(origin or leaf.path)
    different = list(dict.fromkeys(regions))
    if not different or (whole := Region.whole(leaf.spec.shape)) in different or not leaf.spec.shape:
        return key
    shown = [", ".join(f"{a}:{a + n}" for a, n in zip(r.start, r.shape, strict=True)) for r in different[:3]]
    more = f" and {len(different) - 3:,} more" if len(different) > 3 else ""
    if sum(region.size for region in different) == whole.size:
        return key  # all of it, in parts
    return f"{key}[{'], ['.join(shown)}]{more}"
