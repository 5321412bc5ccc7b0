"""The rules that undo rules, found from what these did to a tree. Each is tried before it is used."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from shardkeep.errors import RemapError
from shardkeep.model.tree import Path, name_leaf
from shardkeep.remap.changes import Changes, Done
from shardkeep.remap.expressions import (
    Expression,
    Filled,
    Joined,
    Shape,
    Sliced,
    Stacked,
    Transposed,
    Unsized,
    made_alike,
)
from shardkeep.remap.patterns import INDEX, inverted, literal, plain
from shardkeep.remap.regions import inverse_axes
from shardkeep.remap.rules import (
    Apply,
    Copy,
    Drop,
    Fuse,
    OnEach,
    Rename,
    Reshape,
    Resize,
    Rule,
    Split,
    Stack,
    Transpose,
    Unstack,
    Within,
)
from shardkeep.remap.steps import Entry, Replacement, array_of, form_of

_ASIDE = "~"  # the end of a name that a leaf has between two renames


def inverse_of(changes: Changes, present: Iterable[Path], others: Iterable[Path] = ()) -> tuple[Rule, ...]:
    """The rules that make the tree as it was before.

    Args:
        changes: What was done to the tree.
        present: The leaves after the changes that were loaded. The rules are for these.
        others: Further leaves that are in the result, which the rules leave alone.

    Raises:
        RemapError: A rule has lost something, or cannot be undone.
    """
    now: dict[Path, Entry] = {path: Filled((), np.dtype(np.uint8), 0) for path in others}
    now |= {path: _stand_in(changes.entries[path], changes) for path in present}
    found: list[Rule] = []
    for done in reversed(changes.done):
        steps = [step for step in done.steps if _can_be_undone(done.rule, step, now)]
        if not steps:
            continue
        before = dict(now)
        for step in steps:
            for path, _ in step.gives:
                before.pop(path, None)
        for step in steps:
            before |= {path: _stand_in(entry, changes) for path, entry in step.takes if path not in before}
        found += _tried(done, steps, now, before, changes)
        now = before
    return tuple(found)


def _can_be_undone(rule: Rule, step: Replacement, now: dict[Path, Entry]) -> bool:
    """Whether there is something to undo. `RemapError` if only a part of it is there."""
    lost = [path for path, _ in step.gives if path not in now]
    if step.gives and len(lost) == len(step.gives):
        return False  # the leaves were not loaded
    if lost:
        raise RemapError(f"{rule} cannot be undone: {name_leaf(lost[0])!r} is not loaded")
    return True


def _stand_in(entry: Entry, changes: Changes) -> Entry:
    """An array of the same form, so that rules can be tried on it."""
    entry = _settled(entry, changes)
    return Filled(entry.shape, entry.dtype, 0) if isinstance(entry, Expression) else entry


def _settled(entry: Entry, changes: Changes) -> Entry:
    return changes.sizes.get(entry, entry) if isinstance(entry, Unsized) else entry


def _tried(
    done: Done, steps: Sequence[Replacement], now: dict[Path, Entry], before: dict[Path, Entry], changes: Changes
) -> list[Rule]:
    """Rules that undo steps, in the shortest form that makes each leaf of what its own step alone is undone to."""
    undoing = [_undo(done.rule, step, now, changes) for step in steps]
    single = [rule for rules in undoing for rule in rules]
    try:
        short = [_below(done.below, rule) for rule in _short(done.rule, steps, single)]
    except RemapError:  # a key that would need the index or a group that the pattern has lost
        short = []
    wanted = dict(before)
    for step, rules in zip(steps, undoing, strict=True):
        alone = _after(rules, {path: now[path] for path, _ in step.gives}) or {}
        wanted |= {path: alone[path] for path, _ in step.takes if path in alone}
    if all(form_of(wanted[path]) == form_of(entry) for path, entry in before.items()):
        for rules in (short, single, _aside(single, now)):
            found = _after(rules, now)
            if rules and found is not None and _alike(found, wanted):
                return rules
    raise RemapError(f"{done.rule} cannot be undone by rules for the leaves that are loaded")


def _after(rules: Sequence[Rule], entries: dict[Path, Entry]) -> dict[Path, Entry] | None:
    """The tree after rules; None if they cannot be applied to it."""
    changes = Changes(dict(entries))
    try:
        for rule in rules:
            changes.apply(rule)
    except RemapError:
        return None
    return changes.entries


def _alike(found: dict[Path, Entry], wanted: dict[Path, Entry]) -> bool:
    """Whether each leaf is made of what it should be made of. Shapes do not tell: many arrays have the same."""
    return found.keys() == wanted.keys() and all(_is_same(entry, wanted[path]) for path, entry in found.items())


def _is_same(one: Entry, other: Entry) -> bool:
    if isinstance(one, Expression) and isinstance(other, Expression):
        return made_alike(one, other)
    return one is other


def _below(patterns: Sequence[str], rule: Rule) -> Rule:
    """The rule, applied below places."""
    for pattern in reversed(patterns):
        rule = Within(pattern, (rule,))
    return rule


def _key(path: Path) -> str:
    return "/".join(path)


def _rename(source: Path, to: Path) -> Rename:
    return Rename(literal(source), plain(to))


def _undo(rule: Rule, step: Replacement, now: Collection[Path], changes: Changes) -> list[Rule]:
    """Rules that undo one step, each for one leaf."""
    match rule:
        case Rename():
            return [_rename(step.gave, step.took)]
        case Copy():
            return [Drop(literal(step.gave)) if step.took in now else _rename(step.gave, step.took)]
        case Drop():
            raise RemapError(f"{rule} cannot be undone: what it drops is lost")
        case Stack():
            ((path, entry),) = step.gives
            assert isinstance(entry, Stacked)
            places = [(*path, str(number)) for number in range(len(step.takes))]
            one = Unstack(literal(path), f"{plain(path)}/{INDEX}", entry.axis)
            return [one, *(_rename(place, to) for place, (to, _) in zip(places, step.takes, strict=True))]
        case Unstack():
            path = step.took
            places = [(*path, str(number)) for number in range(len(step.gives))]
            renames = [_rename(given, to) for (given, _), to in zip(step.gives, places, strict=True)]
            axis = _axis_of_first(step)
            return [*renames, Stack(f"{literal(path)}/{INDEX}", plain(path), axis)]
        case Split():
            keys = tuple(literal(path) for path, _ in step.gives)
            return [Fuse(keys, plain(step.took), _axis_of_first(step))]
        case Fuse():
            ((path, entry),) = step.gives
            assert isinstance(entry, Joined)
            sizes = tuple(part.shape[entry.axis] for part in entry.parts)
            return [Split(literal(path), tuple(plain(to) for to, _ in step.takes), entry.axis, sizes)]
        case OnEach():
            return [_undo_change(rule, literal(step.took), step, changes)]
        case _:
            raise RemapError(f"{rule} cannot be undone")


def _axis_of_first(step: Replacement) -> int:
    entry = step.gives[0][1]
    assert isinstance(entry, Sliced)
    return entry.axis


def _undo_change(rule: OnEach, pattern: str, step: Replacement, changes: Changes) -> Rule:
    (_, before), (_, after) = step.takes[0], step.gives[0]
    (shape, _), (new, _) = form_of(_settled(before, changes)), form_of(_settled(after, changes))
    match rule:
        case Transpose():
            assert isinstance(after, Transposed)
            return Transpose(pattern, inverse_axes(after.axes))
        case Reshape():
            return Reshape(pattern, shape)
        case Resize():
            return _undo_resize(rule, pattern, shape, new)
        case Apply():
            if rule.inverse is None:
                raise RemapError(f"{rule} cannot be undone: pass inverse=, a function that undoes it")
            dtype = array_of(rule, step.took, before).dtype
            keeps = rule.elementwise or rule.shape is None
            return Apply(pattern, rule.inverse, rule.elementwise, None if keeps else shape, dtype, rule.function)
        case _:
            raise RemapError(f"{rule} cannot be undone")


def _undo_resize(rule: Resize, pattern: str, old: Shape, new: Shape) -> Rule:
    axis = rule.axis % len(old)
    if new[axis] < old[axis]:
        raise RemapError(f"{rule} cannot be undone: it removes {old[axis] - new[axis]} of {old[axis]} elements")
    return Resize(pattern, axis, old[axis])


def _aside(rules: Sequence[Rule], now: Iterable[Path]) -> list[Rule]:
    """Renames with a step in between, for leaves that take each other's names."""
    names = {_key(path) for path in now}
    end = _ASIDE
    while any(name.endswith(end) for name in names):
        end += _ASIDE
    renames = [rule for rule in rules if isinstance(rule, Rename)]
    if len(renames) < len(rules):
        return []
    first = [Rename(rule.pattern, f"{rule.key}{end}") for rule in renames]
    return [*first, Rename(f"(.*){literal((end,))}", r"\1")]


def _short(rule: Rule, steps: Sequence[Replacement], single: Sequence[Rule]) -> list[Rule]:
    """One rule for all leaves, with the pattern of the rule it undoes turned around; empty if that cannot be."""
    match rule:
        case OnEach():
            wide: list[Rule] = [replace(one, pattern=rule.pattern) for one in single if isinstance(one, OnEach)]
            return wide[:1] if all(one == wide[0] for one in wide) else []
        case Rename():
            turned = inverted(rule.pattern, rule.key)
            return [] if turned is None else [Rename(*turned)]
        case Stack():
            turned = inverted(rule.pattern, rule.key)
            return [] if turned is None else [Unstack(*turned, axis=rule.axis)]
        case Unstack():
            turned = inverted(rule.pattern, rule.key)
            return [] if turned is None else [Stack(*turned, axis=rule.axis)]
        case Split():
            several = [inverted(rule.pattern, key) for key in rule.keys]
            known = [each for each in several if each is not None]
            if len(known) < len(several) or len({key for _, key in known}) > 1:
                return []
            return [Fuse(tuple(pattern for pattern, _ in known), known[0][1], rule.axis)]
        case Fuse():
            several = [inverted(pattern, rule.key) for pattern in rule.patterns]
            known = [each for each in several if each is not None]
            sizes = {one.sizes for one in single if isinstance(one, Split)}
            if len(known) < len(several) or len({pattern for pattern, _ in known}) > 1 or len(sizes) > 1:
                return []
            return [Split(known[0][0], tuple(key for _, key in known), rule.axis, sizes.pop())]
        case _:
            return []
