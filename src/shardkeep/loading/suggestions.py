"""Rules that may make a checkpoint fit a template: each is tried on the shapes before it is suggested."""

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from shardkeep.errors import RemapError
from shardkeep.model.leaves import StoredLeaf
from shardkeep.model.tree import Path
from shardkeep.remap.changes import Changes
from shardkeep.remap.expressions import Shape
from shardkeep.remap.functions import fuse, rename, reshape, resize, split, stack, transpose, unstack
from shardkeep.remap.patterns import INDEX, literal, plain
from shardkeep.remap.rules import Rule
from shardkeep.remap.steps import Entry, form_of

_MOST = 4  # rules that are suggested together
_SAMPLES = 6  # leaves that rules are looked for
_NEAREST = 3  # saved leaves that are compared with each
_LARGEST = 20_000  # leaves: trying rules on more takes too long for an error message
_RANK = 5  # of arrays whose axes are tried in every order

Wanted = Mapping[Path, Shape]


def rules_to_try(leaves: Sequence[StoredLeaf], wanted: Wanted, template: Sequence[Path]) -> list[Rule]:
    """Rules after which more of a template can be loaded.

    Args:
        leaves: The leaves of the checkpoint.
        wanted: The arrays of the template that cannot be loaded, and their shapes.
        template: The paths of all leaves of the template.
    """
    entries: dict[Path, Entry] = {leaf.path: leaf for leaf in leaves}
    fitting = {path for path in template if path in entries and path not in wanted}
    found: list[Rule] = []
    if len(entries) > _LARGEST:
        return found
    lacking: dict[Path, Shape] = dict(wanted)
    while lacking and len(found) < _MOST:
        best: tuple[int, Rule, dict[Path, Entry]] | None = None
        free = {path: entry for path, entry in entries.items() if path not in fitting}
        for rule in dict.fromkeys(_candidates(free, lacking)):
            after = _after(rule, entries)
            if after is None or not fitting <= after.keys():
                continue
            solved = sum(_fits(after.get(path), shape) for path, shape in lacking.items())
            if solved and (best is None or solved > best[0]):
                best = solved, rule, after
        if best is None:
            break
        _, rule, entries = best
        found.append(rule)
        solved_now = {path for path, shape in lacking.items() if _fits(entries.get(path), shape)}
        fitting |= solved_now
        lacking = {path: shape for path, shape in lacking.items() if path not in solved_now}
    return found


def _after(rule: Rule, entries: Mapping[Path, Entry]) -> dict[Path, Entry] | None:
    changes = Changes(dict(entries))
    try:
        changes.apply(rule)
        changes.settle(lambda _: None)
    except RemapError:
        return None
    return changes.entries


def _fits(entry: Entry | None, shape: Shape) -> bool:
    return entry is not None and form_of(entry) != ((), "") and form_of(entry)[0] == shape


def _candidates(free: Mapping[Path, Entry], wanted: Wanted) -> Iterator[Rule]:
    """Rules that could help. `free` are the saved leaves that the template does not use as they are."""
    shapes = {path: form_of(entry)[0] for path, entry in free.items()}
    keys = {"/".join(path): path for path in free}
    for path in _sample(list(wanted)):
        shape = wanted[path]
        if path in shapes:
            yield from _other_shape(path, shapes[path], shape)
            continue
        near = difflib.get_close_matches("/".join(path), keys, _NEAREST, cutoff=0.2)
        same = [key for key in keys if keys[key][-1:] == path[-1:]][:_NEAREST]
        for key in dict.fromkeys([*near, *same]):
            yield from _other_name(keys[key], path)
            yield from _stacked(keys[key], path)
        yield from _parts(path, shapes, wanted)


def _sample(paths: Sequence[Path]) -> Sequence[Path]:
    return paths[:: max(len(paths) // _SAMPLES, 1)][: _SAMPLES + 1]


def _other_shape(path: Path, saved: Shape, wanted: Shape) -> Iterator[Rule]:
    """An array with another shape: for all arrays of its name, or for it alone."""
    for pattern in (literal(path), f".*/{literal(path[-1:])}") if len(path) > 1 else (literal(path),):
        if len(saved) == len(wanted) <= _RANK:
            for axes in sorted(itertools.permutations(range(len(saved))), reverse=True):
                if tuple(saved[axis] for axis in axes) == wanted != saved:
                    yield transpose(pattern, axes)
                    break
        yield reshape(pattern, wanted)
        other = [axis for axis, (a, b) in enumerate(zip(saved, wanted, strict=False)) if a != b]
        if len(saved) == len(wanted) and len(other) == 1:
            (axis,) = other
            fill = "keep" if wanted[axis] > saved[axis] else "zeros"  # nothing is filled where it is cut
            yield resize(pattern, axis=axis, size=wanted[axis], fill=fill)


def _other_name(saved: Path, wanted: Path) -> Iterator[Rule]:
    """The names that differ, whatever is before and after them."""
    start = next(
        (i for i, (a, b) in enumerate(zip(saved, wanted, strict=False)) if a != b), min(len(saved), len(wanted))
    )
    end = 0
    while end < min(len(saved), len(wanted)) - start and saved[-1 - end] == wanted[-1 - end]:
        end += 1
    old, new = saved[start : len(saved) - end], wanted[start : len(wanted) - end]
    middles = [(literal(old), plain(new)), *_numbered(literal(old), plain(new))]
    around = ((True, True), (False, True), (True, False), (False, False))
    for (before, after), (middle, replacement) in itertools.product(around, middles):
        head = "(.*)/" if before and start else f"{literal(saved[:start])}/" if start else ""
        tail = "/(.*)" if after and end else f"/{literal(saved[len(saved) - end :])}" if end else ""
        first = r"\1/" if head == "(.*)/" else f"{plain(saved[:start])}/" if start else ""
        number = 2 if head == "(.*)/" else 1
        last = rf"/\{number}" if tail == "/(.*)" else f"/{plain(wanted[len(wanted) - end :])}" if end else ""
        pattern, key = f"{head}{middle}{tail}", f"{first}{replacement}{last}"
        if not old:
            pattern, key = pattern.replace("//", "/").strip("/"), key
        if not new:
            key = key.replace("//", "/").strip("/")
        yield rename(pattern.replace("//", "/"), key)


def _numbered(old: str, new: str) -> list[tuple[str, str]]:
    """A pattern and a key that have a number in common, with the index in its place."""
    for there in re.finditer("[0-9]+", old):
        here = re.search(f"(?<![0-9]){there[0]}(?![0-9])", new)
        if here:
            return [(_with_index(old, there), _with_index(new, here))]
    return []


def _with_index(text: str, number: re.Match[str]) -> str:
    return f"{text[: number.start()]}{INDEX}{text[number.end() :]}"


def _stacked(saved: Path, wanted: Path) -> Iterator[Rule]:
    """Numbered layers where the other side has stacked arrays, perhaps with another name."""
    for at in range(len(saved)):
        stem, rest = _stem(saved[at]), saved[at + 1 :]
        place = wanted[: len(wanted) - len(rest)]
        if stem is not None and wanted[len(place) :] == rest:
            head, key = literal((*saved[:at], stem)) + INDEX, plain(place)
            yield stack(f"{head}/(.*)", f"{key}/\\1" if key else r"\1") if rest else stack(head, key)
    for at in range(len(wanted)):
        stem, rest = _stem(wanted[at]), wanted[at + 1 :]
        place = saved[: len(saved) - len(rest)]
        if stem is not None and saved[len(place) :] == rest:
            head, key = literal(place), plain((*wanted[:at], stem)) + INDEX
            yield unstack(f"{head}/(.*)" if head else "(.*)", f"{key}/\\1") if rest else unstack(head, key)


def _stem(name: str) -> str | None:
    """What a name has before the number at its end; None if there is no number."""
    found = re.fullmatch(r"(.*?)[0-9]+", name, re.DOTALL)
    return found[1] if found else None


def _parts(path: Path, shapes: Mapping[Path, Shape], wanted: Wanted) -> Iterator[Rule]:
    """Arrays that are one in the checkpoint and several in the template, or the reverse.

    Only where the names tell in which order: shapes fit in any order, and a wrong one would be wrong silently.
    """
    for at in range(len(path)):
        lacking = [p for p in wanted if _alike(p, path, at) and p not in shapes]
        there = [p for p in shapes if _alike(p, path, at)]
        for whole in there:
            parts = _in_order(whole[at], lacking, at)
            axis = _axis_of_sum(shapes[whole], [wanted[part] for part in parts])
            if axis is not None:
                sizes = [wanted[part][axis] for part in parts]
                pattern, keys = _around(whole, parts, at)
                yield split(pattern, keys, axis - len(shapes[whole]), None if len(set(sizes)) == 1 else sizes)
        parts = _in_order(path[at], there, at)
        axis = _axis_of_sum(wanted[path], [shapes[part] for part in parts])
        if axis is not None:
            patterns = [_around(part, [], at)[0] for part in parts]
            _, (key,) = _around(path, [path], at)
            yield fuse(patterns, key, axis - len(wanted[path]))


def _in_order(whole: str, parts: Sequence[Path], at: int) -> list[Path]:
    """Parts in the order in which the name of the whole has theirs, as `qkv_proj` has `q_proj`; none if it does not."""
    names = [part[at] for part in parts]
    before, after = _in_common(names), _in_common([name[::-1] for name in names])
    short = [name[before : len(name) - after] for name in names]
    places = [whole.find(name) if name else -1 for name in short]
    if -1 in places or len(set(places)) < len(places):
        return []
    return [part for _, part in sorted(zip(places, parts, strict=True))]


def _in_common(names: Sequence[str]) -> int:
    """How many characters names have in common at their beginnings."""
    return next((i for i, some in enumerate(zip(*names, strict=False)) if len(set(some)) > 1), 0)


def _alike(one: Path, other: Path, at: int) -> bool:
    return len(one) == len(other) and one[:at] == other[:at] and one[at + 1 :] == other[at + 1 :]


def _axis_of_sum(whole: Shape, parts: Sequence[Shape]) -> int | None:
    """The axis along which arrays of these shapes make one of the other shape."""
    if len(parts) < 2 or any(len(part) != len(whole) for part in parts):
        return None
    for axis in range(len(whole) - 1, -1, -1):
        same = all(p[:axis] + p[axis + 1 :] == whole[:axis] + whole[axis + 1 :] for p in parts)
        if same and sum(part[axis] for part in parts) == whole[axis]:
            return axis
    return None


def _around(path: Path, keys: Sequence[Path], at: int) -> tuple[str, list[str]]:
    """A pattern for names like that of `path` at `at`, whatever is around, and `keys` with the same around them."""
    head, tail = bool(path[:at]), bool(path[at + 1 :])
    pattern = f"{'(.*)/' if head else ''}{literal((path[at],))}{'/(.*)' if tail else ''}"
    first, last = r"\1/" if head else "", (rf"/\{1 + head}" if tail else "")
    return pattern, [f"{first}{plain((key[at],))}{last}" for key in keys]
