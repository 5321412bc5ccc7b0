"""Rules applied to the tree of a checkpoint, in order. What they do is recorded, to be shown and undone."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardkeep.errors import RemapError, counted
from shardkeep.model.arrays import ArraySpec, is_possible
from shardkeep.model.leaves import NATIVE, UNSHARDED, JaxArray, NumpyArray, Origin, StoredArray, StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.tree import Path, name_leaf
from shardkeep.remap.expressions import (
    Called,
    Changed,
    DerivedArray,
    Expression,
    Shape,
    StoredSource,
    Unsized,
    keeps_values,
    sharding_of,
    sources_of,
    walk,
)
from shardkeep.remap.extending import around_names, around_parts
from shardkeep.remap.rules import Rule, Within
from shardkeep.remap.skeletons import blanks_of, rebuilt
from shardkeep.remap.steps import Entry, Replacement, refuse

_SHOWN = 5  # keys that a message lists

ShapeAt = Callable[[Path], Shape | None]  # the shape that the template has at a path; None if it has no array there


@dataclass(frozen=True)
class Done:
    """A rule that was applied, what it did, and the patterns of the places (`within`) that it was applied below."""

    rule: Rule
    steps: tuple[Replacement, ...]
    below: tuple[str, ...] = ()


@dataclass
class Changes:
    """The leaves of a tree while rules are applied to it, and what was done to them."""

    entries: dict[Path, Entry]
    done: list[Done] = field(default_factory=list[Done])
    rules: dict[Path, tuple[Rule, ...]] = field(default_factory=dict[Path, tuple[Rule, ...]])
    blanks: dict[Path, Path] = field(default_factory=dict[Path, Path])  # positions without a leaf, and where they were
    sizes: dict[Expression, Expression] = field(default_factory=dict[Expression, Expression])  # of Unsized ones

    def apply(self, rule: Rule, places: Sequence[Path] = ((),), around: tuple[Within, ...] = ()) -> None:
        """Apply a rule to the subtrees at some places; by default to the tree itself."""
        shown = around[0] if around else rule
        if isinstance(rule, Within):
            inside = [(*place, *below) for place in places for below in rule.places(list(self._below(place)))]
            if not inside:
                problem = f"{shown}: no key or subtree matches {rule.pattern!r}"
                raise RemapError(problem + self._suggestion(rule, shown, places))
            for each in rule.rules:
                self.apply(each, inside, (*around, rule))
            return
        steps = [step for place in places for step in self._steps(rule, shown, place)]
        if not steps:
            raise RemapError(_no_match(rule, shown, places) + self._suggestion(rule, shown, places))
        self._commit(rule, shown, steps)
        carried = ((self._carried(rule, path, places), was) for path, was in self.blanks.items())
        self.blanks = {path: was for path, was in carried if path is not None}
        self.done.append(Done(rule, tuple(steps), tuple(each.pattern for each in around)))

    def _steps(self, rule: Rule, shown: Rule, place: Path) -> list[Replacement]:
        """What a rule does below a place. Its keys there are relative, so that an error names the place as well."""
        try:
            return [step.below(place) for step in rule.steps(self._below(place))]
        except RemapError as error:
            if not place:
                raise
            raise RemapError(f"{shown}, below {name_leaf(place)!r}: {error}") from error

    def _suggestion(self, rule: Rule, shown: Rule, places: Sequence[Path]) -> str:
        """The end of an error: some keys, and the rule that would match most of them, if there is one.

        Rules that match whole names are preferred.
        """
        paths = [path for place in places for path in self._below(place)]
        if not paths:
            return ""
        some = ", ".join(dict.fromkeys("/".join(path) for path in paths[:_SHOWN]))
        said = f"; patterns match whole keys, which are {some}{', …' if len(paths) > _SHOWN else ''}"
        for candidates in (around_names(rule), around_parts(rule)):
            found = {each: count for each in candidates if (count := self._matched_by(each, shown, places))}
            if found:
                return f"{said}; try {max(found, key=lambda each: found[each])}"
        return said

    def _matched_by(self, rule: Rule, shown: Rule, places: Sequence[Path]) -> int:
        """How many leaves or places a rule matches. 0 if it cannot be applied to all of them."""
        if isinstance(rule, Within):
            return sum(len(rule.places(list(self._below(place)))) for place in places)
        try:
            steps = [step for place in places for step in self._steps(rule, shown, place)]
            replace(self)._commit(rule, shown, steps)
        except RemapError:
            return 0
        return sum(len(step.takes) for step in steps)

    def _carried(self, rule: Rule, path: Path, places: Sequence[Path]) -> Path | None:
        for place in places:
            if path[: len(place)] == place and len(path) > len(place):
                inside = rule.carry(path[len(place) :])
                return None if inside is None else (*place, *inside)
        return path

    def _below(self, place: Path) -> dict[Path, Entry]:
        if not place:
            return self.entries
        count = len(place)
        return {path[count:]: e for path, e in self.entries.items() if path[:count] == place and len(path) > count}

    def _commit(self, rule: Rule, shown: Rule, steps: Sequence[Replacement]) -> None:
        """Replace leaves. Each new one stands where the first of those that it is made of stood."""
        taken = {path: step for step in steps if not step.keeps for path, _ in step.takes}
        places: dict[Path, list[Replacement]] = {}
        for step in steps:
            places.setdefault(step.takes[0][0], []).append(step)
        entries: dict[Path, Entry] = {}
        rules: dict[Path, tuple[Rule, ...]] = {}
        owners: dict[Path, Path] = {}
        for path, entry in self.entries.items():
            gives = [(to, made, step) for step in places.get(path, ()) for to, made in step.gives]
            if path not in taken:
                self._place(shown, path, path, entry, entries, owners)
                rules[path] = self.rules.get(path, ())
            for to, made, step in gives:
                self._place(shown, path, to, made, entries, owners)
                before = [r for source, _ in step.takes for r in self.rules.get(source, ())]
                rules[to] = (*dict.fromkeys(before), rule)
        _check_branches(shown, entries, owners)
        self.entries, self.rules = entries, rules

    def _place(
        self, rule: Rule, source: Path, to: Path, entry: Entry, entries: dict[Path, Entry], owners: dict[Path, Path]
    ) -> None:
        if to in entries:
            other = name_leaf(owners[to])
            raise refuse(rule, name_leaf(source), f"it and {other!r} would both become {name_leaf(to)!r}")
        entries[to], owners[to] = entry, source

    def settle(self, shape_at: ShapeAt | None) -> None:
        """Give arrays that are resized to the template's size that size."""
        for path, entry in self.entries.items():
            if not isinstance(entry, Unsized):
                continue
            if shape_at is None:
                rule = self.rules[path][-1]
                raise refuse(rule, name_leaf(path), "no template gives its size; pass size=")
            wanted = shape_at(path)
            fits = wanted is not None and len(wanted) == len(entry.shape)
            made = entry.sized(wanted[entry.axis]) if fits and wanted is not None else entry.of
            self.entries[path] = self.sizes[entry] = made


def _no_match(rule: Rule, shown: Rule, places: Sequence[Path]) -> str:
    """What is wrong with a rule that matches nothing."""
    if shown is rule:
        return f"{shown}: it matches no leaf"
    more = f" and {counted(len(places) - 1, 'more place')}" if len(places) > 1 else ""
    return f"{shown}: {rule} matches no leaf below {name_leaf(places[0])!r}{more}"


def _check_branches(rule: Rule, entries: dict[Path, Entry], owners: dict[Path, Path]) -> None:
    """Refuse a leaf that a rule has put below another leaf, or above one."""
    new = [path for path, owner in owners.items() if path != owner]
    if not new:
        return
    branches: dict[Path, Path] = {}
    for path in entries:
        for end in range(len(path)):
            branches.setdefault(path[:end], path)
    for path in new:
        if path in branches:
            below = name_leaf(branches[path])
            raise refuse(
                rule, name_leaf(owners[path]), f"it would become {name_leaf(path)!r}, which contains {below!r}"
            )
        above = next((path[:end] for end in range(len(path)) if path[:end] in entries), None)
        if above is not None:
            raise refuse(
                rule,
                name_leaf(owners[path]),
                f"it would become {name_leaf(path)!r}, but {name_leaf(above)!r} is a leaf, not a subtree",
            )


@dataclass(frozen=True)
class Remapped:
    """A tree after rules, and what they did."""

    tree: Tree
    changes: Changes

    def rules_of(self, path: Path) -> tuple[Rule, ...]:
        """The rules that made a leaf what it is."""
        return self.changes.rules.get(path, ())

    def refuse_kept(self) -> None:
        """`RemapError` if a leaf keeps values of a template. There is none."""
        for leaf in self.tree.leaves:
            if isinstance(leaf, DerivedArray) and keeps_values(leaf.expression):
                problem = 'fill="keep" needs a template with the values to keep'
                raise refuse(self.rules_of(leaf.path)[-1], name_leaf(leaf.path), problem)

    def origin_of(self, path: Path) -> Path | None:
        """The path of the stored leaf that a leaf is; None if it is made of stored arrays."""
        entry = self.changes.entries[path]
        return entry.path if isinstance(entry, StoredLeaf) else None


def remap_tree(tree: Tree, rules: Sequence[Rule], shape_at: ShapeAt | None = None) -> Remapped:
    """The tree that rules make of a saved one. No array is read.

    Args:
        tree: The tree as it was saved.
        rules: The rules, which are applied in order.
        shape_at: The shapes that the template has; None if there is no template.

    Raises:
        RemapError: A rule matches nothing, or cannot be applied.
    """
    blanks = blanks_of(tree.skeleton)
    changes = Changes({leaf.path: leaf for leaf in tree.leaves}, blanks={path: path for path in blanks})
    for rule in rules:
        changes.apply(rule)
    changes.settle(shape_at)
    shared = _shared(changes.entries)
    made = {path: _leaf(path, entry, shared, changes) for path, entry in changes.entries.items()}
    kept = {path: blanks[was] for path, was in changes.blanks.items()}
    skeleton = rebuilt(tree.skeleton, [leaf.path for leaf in tree.leaves], list(made), kept)
    return Remapped(replace(tree, skeleton=skeleton, leaves=tuple(made[path] for path in skeleton.paths())), changes)


def _shared(entries: Mapping[Path, Entry]) -> set[Path]:
    """The stored arrays that several leaves are made of. They are read once for all of them."""
    count: Counter[Path] = Counter()
    for entry in entries.values():
        count.update(leaf.path for leaf in (sources_of(entry) if isinstance(entry, Expression) else (entry,)))
    return {path for path, number in count.items() if number > 1}


def _leaf(path: Path, entry: Entry, shared: set[Path], changes: Changes) -> StoredLeaf:
    """A leaf of the new tree. One that is stored as it is wanted stays a stored one."""
    if isinstance(entry, StoredSource) and entry.leaf.path not in shared:
        entry = entry.leaf
    if isinstance(entry, StoredArray) and entry.holds_numbers and entry.path in shared:
        entry = StoredSource(entry)
    if not isinstance(entry, Expression):
        return entry if entry.path == path else replace(entry, path=path)
    spec = ArraySpec(entry.shape, entry.dtype)
    if not is_possible(spec.shape, spec.dtype.itemsize):
        raise refuse(changes.rules[path][-1], name_leaf(path), f"an array cannot have the shape {list(spec.shape)}")
    return DerivedArray(path, spec, (), _origin(entry), entry)


def _origin(expression: Expression) -> Origin:
    """What an array counts as that is made of others: a NumPy array if all of those were."""
    origins = {leaf.origin for leaf in sources_of(expression)}
    if all(isinstance(origin, NumpyArray) for origin in origins):
        changed = any(isinstance(each, Changed | Called) for each in walk(expression))
        return origins.pop() if len(origins) == 1 and not changed else NATIVE
    sharding = sharding_of(expression)
    return UNSHARDED if sharding is None else JaxArray(sharding)
