"""The error for a template that does not match a checkpoint: bounded in length, with the likely cause first."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardkeep.errors import MissingLeafError, TemplateMismatchError, counted
from shardkeep.loading.suggestions import rules_to_try
from shardkeep.model.keys import loose_key
from shardkeep.model.manifest import Tree
from shardkeep.model.nodes import Child, Node
from shardkeep.model.summaries import cut
from shardkeep.model.tree import Path, Skeleton, name_leaf

_SHOWN = 12  # leaves listed in the message
_LONGEST = 500  # characters of a line
_COMPARED = 500  # saved keys that a missing one is compared with, to suggest the nearest
_SAMPLES = 64  # missing leaves that suggest a cause
_HEADS = 8  # places in the checkpoint that are remembered for the end of a path

_NAMES = "Use the checkpoint's names in the template."

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A leaf of the template that cannot be loaded, with the shape it has there; `saved` if only the shape differs."""

    path: Path
    text: str
    missing: bool = False
    is_array: bool = True
    saved: Shape | None = None
    wanted: Shape | None = None


@dataclass(frozen=True, slots=True)
class _Cause:
    """What explains most of what does not match, and what to do about it if no rules are found."""

    text: str
    advice: str = ""


def missing_leaf(path: Path, is_array: bool, shape: Shape | None = None) -> Mismatch:
    """A leaf of the template that the checkpoint does not have."""
    # Programs of others look for these words, and for those about shapes.
    text = f"Missing {'array' if is_array else 'value'} for key {name_leaf(path)!r}"
    return Mismatch(path, text, missing=True, is_array=is_array, wanted=None if shape is None else tuple(shape))


def wrong_shape(path: Path, saved: Shape, wanted: Shape) -> Mismatch:
    """An array of the template that has another shape in the checkpoint."""
    text = f"Array shape mismatch for key {name_leaf(path)!r}: saved {saved}, the template has {wanted}"
    return Mismatch(path, text, saved=saved, wanted=wanted)


def wrong_kind(path: Path, saved: str, wanted: str) -> Mismatch:
    """A leaf of the template that is something else in the checkpoint."""
    return Mismatch(path, f"Type mismatch for key {name_leaf(path)!r}: saved {saved}, the template has {wanted}")


def mismatch_error(
    tree: Tree, skeleton: Skeleton, found: Sequence[Mismatch], total: int
) -> MissingLeafError | TemplateMismatchError:
    """The error that lists what does not match. `total` is how many leaves of the template were looked up."""
    missing = sorted((one for one in found if one.missing), key=lambda one: not one.is_array)
    stored = [leaf.path for leaf in tree.leaves]
    every = [*missing, *(one for one in found if not one.missing)]
    of = "leaf of the template does" if len(every) == 1 else f"of the template's {counted(total, 'leaf', 'leaves')} do"
    lines = [f"{len(every):,} {of} not match the checkpoint:"]
    wanted = {one.path: one.wanted for one in every if one.wanted is not None}
    rules = rules_to_try(tree.leaves, wanted, skeleton.paths())
    cause = _cause(stored, skeleton, missing, total - len(found)) or _cause_of_shapes(found)
    if cause:
        advice = f" {cause.advice}" if cause.advice and not rules else ""
        lines[0] = f"{lines[0][:-1]}. {cause.text}{advice}"
    lines += [f"  {text}" for text in _listed(every, stored)]
    if rules:
        lines.append(cut(f"To change the checkpoint's tree to the template's, try remap={rules}", _LONGEST))
    keep = ', or pass missing="keep" to keep the template\'s own values' if missing else ""
    lines.append(f"shardkeep.abstract(path) gives a template that matches; put ... where a leaf is not wanted{keep}.")
    error = (MissingLeafError if missing else TemplateMismatchError)("\n".join(lines))
    error.problems = tuple(one.text for one in every)
    return error


def summarize(texts: Sequence[str]) -> str:
    """Some of many lines, and how many there are more."""
    shown = list(texts[:_SHOWN])
    return "\n".join(f"  {text}" for text in shown + _more(len(texts) - len(shown)))


def _more(number: int) -> list[str]:
    return [f"… and {number:,} more"] if number > 0 else []


def _listed(every: Sequence[Mismatch], stored: Sequence[Path]) -> list[str]:
    """Some of the leaves, of each kind at least a few."""
    missing = [one for one in every if one.missing]
    others = [one for one in every if not one.missing]
    few = max(_SHOWN - len(others), _SHOWN // 2)
    shown = missing[:few]
    shown += others[: _SHOWN - len(shown)]
    nearest = _Nearest(stored)
    lines = [one.text + (nearest(one.path) if one.missing else "") for one in shown]
    lines = [line if len(line) <= _LONGEST else cut(line, _LONGEST) for line in lines]
    return lines + _more(len(every) - len(lines))


class _Nearest:
    """Suggests a saved key for a missing one, among those with the same parent or the same last name."""

    def __init__(self, stored: Sequence[Path]) -> None:
        self._near: dict[Any, list[str]] = {}
        for path in stored:
            for end in {path[:-1], path[-1:] and path[-1]}:
                some = self._near.setdefault(end, [])
                if len(some) < _COMPARED:
                    some.append(name_leaf(path))

    def __call__(self, path: Path) -> str:
        candidates = [*self._near.get(path[:-1], ()), *self._near.get(path[-1:] and path[-1], ())]
        near = difflib.get_close_matches(name_leaf(path), dict.fromkeys(candidates), 1)
        return f"; the checkpoint has {near[0]!r}" if near else ""


def _cause(stored: Sequence[Path], skeleton: Skeleton, missing: Sequence[Mismatch], matched: int) -> _Cause | None:
    """The one thing that explains most of the missing leaves, if there is one."""
    if not missing or not stored:
        return None
    if missing[0].path == ():
        return _Cause(
            f"The template is a single leaf, and the checkpoint has {counted(len(stored), 'leaf', 'leaves')}."
        )
    if stored[0] == ():
        return _Cause("The checkpoint is a single leaf, and the template is not.")
    lacking = [_split(one.path) for one in missing]
    saved = [_split(path) for path in stored]
    root = _other_root(saved, lacking, matched)
    if root is not None and () in root:
        return _explain_root(*root, skeleton)
    found = _other_numbers(saved, lacking, matched) or _other_stacking(saved, lacking, matched)
    return found or (root and _explain_root(*root, skeleton))


def _split(path: Path) -> Path:
    return tuple(loose_key(path).split("/"))


def _other_root(saved: Sequence[Path], lacking: Sequence[Path], matched: int) -> tuple[Path, Path] | None:
    """What the template and the checkpoint have before a rest that they have in common, if that explains most of it."""
    known = set(saved)
    for ours, theirs in _roots(saved, lacking):
        explained = sum(path[: len(ours)] == ours and (*theirs, *path[len(ours) :]) in known for path in lacking)
        enough = explained * 2 >= len(lacking) or (not theirs and explained * 2 >= len(saved))
        if enough and explained >= matched:
            return ours, theirs
    return None


def _explain_root(ours: Path, theirs: Path, skeleton: Skeleton) -> _Cause:
    if not ours:
        inside = "".join(f"{{{json.dumps(name)}: " for name in theirs) + "template" + "}" * len(theirs)
        result = "".join(f"[{json.dumps(name)}]" for name in theirs)
        return _Cause(
            f"The template looks like the subtree {'/'.join(theirs)!r} of the checkpoint: "
            f"pass template={inside} and take {result} of the result."
        )
    if not theirs:
        return _Cause(
            f"The checkpoint looks like the subtree {'/'.join(ours)!r} of the template: "
            f"pass template=template{_access(skeleton.root, ours)}."
        )
    return _Cause(f"The checkpoint has {'/'.join(theirs)!r} where the template has {'/'.join(ours)!r}.", _NAMES)


def _roots(saved: Sequence[Path], lacking: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Candidates for what the template and the checkpoint have before a common rest, the most likely first."""
    heads: dict[Path, list[Path]] = {}
    for path in saved:
        for start in range(len(path)):
            some = heads.setdefault(path[start:], [])
            if len(some) < _HEADS:
                some.append(path[:start])
    votes: Counter[tuple[Path, Path]] = Counter()
    for path in _sample(lacking):
        start = next((i for i in range(len(path)) if path[i:] in heads), None)
        if start is not None:
            votes.update((path[:start], head) for head in heads[path[start:]])
    return sorted(votes, key=lambda pair: (-votes[pair], len(pair[0]) + len(pair[1])))[:4]


def _sample(paths: Sequence[Path]) -> Iterable[Path]:
    return paths[:: max(len(paths) // _SAMPLES, 1)]


def _access(node: Child, names: Path) -> str:
    """The Python expression for a subtree of a live tree."""
    text = ""
    for number, name in enumerate(names):
        if not isinstance(node, Node) or name not in node.names:  # a name with dots was split
            return text + "".join(f"[{json.dumps(rest)}]" for rest in names[number:])
        at = node.names.index(name)
        if node.kind in ("namedtuple", "custom"):
            text += f".{name}"
        else:
            key = node.keys[at] if node.keys else at
            text += f"[{json.dumps(key) if isinstance(key, str) else repr(key)}]"
        node = node.children[at]
    return text


def _other_numbers(saved: Sequence[Path], lacking: Sequence[Path], matched: int) -> _Cause | None:
    """Whether the two trees agree once names such as `layer_0` and `0` are taken for the same."""
    pair = _first_pair(saved, lacking, _numbered, matched)
    at = pair and next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None)
    if pair is None or at is None:
        return None
    theirs, ours = pair[0][at], pair[1][at]
    what = "The checkpoint uses different names than the template"
    if theirs.isdecimal() or ours.isdecimal():
        one, other = ("lists", "dicts") if theirs.isdecimal() else ("dicts", "lists")
        what = f"The checkpoint has {one} where the template has {other}"
    names = f"{'/'.join(pair[0][: at + 1])!r} in the checkpoint is {'/'.join(pair[1][: at + 1])!r} in the template"
    return _Cause(f"{what}: {names}.", _NAMES)


def _numbered(path: Path) -> Path:
    return tuple(found.group() if (found := re.search(r"\d+\Z", name)) else name for name in path)


def _other_stacking(saved: Sequence[Path], lacking: Sequence[Path], matched: int) -> _Cause | None:
    """Whether one of the trees has numbered layers where the other has stacked arrays."""
    pair = _first_pair(saved, lacking, _unnumbered, matched)
    if pair is None or len(pair[0]) == len(pair[1]):
        return None
    longer, separately = (pair[0], saved) if len(pair[0]) > len(pair[1]) else (pair[1], lacking)
    if sum(_unnumbered(path) == _unnumbered(longer) for path in separately) < 2:
        return None  # one layer is not many
    theirs, ours = ("/".join(path) for path in pair)
    stacked, separate = ("template", "checkpoint") if len(pair[0]) > len(pair[1]) else ("checkpoint", "template")
    return _Cause(
        f"The {separate} has numbered layers where the {stacked} has stacked arrays: saved {theirs!r}, the template "
        f"has {ours!r}.",
        f"Pass remap= with shardkeep.remap.{'stack' if stacked == 'template' else 'unstack'}.",
    )


def _unnumbered(path: Path) -> Path:
    """Without layer numbers: `0`, and above a leaf also names such as `layer_0`."""
    above = tuple(name for name in path[:-1] if not re.search(r"\d\Z", name))
    return above if path[-1].isdecimal() else (*above, path[-1])


def _first_pair(
    saved: Sequence[Path], lacking: Sequence[Path], form: Callable[[Path], Path], matched: int
) -> tuple[Path, Path] | None:
    """A saved and a missing path that agree in this form, if most of the missing ones have such a partner."""
    known: dict[Path, Path] = {}
    for path in saved:
        known.setdefault(form(path), path)
    partners = [(known[formed], path) for path in lacking if (formed := form(path)) in known]
    return partners[0] if len(partners) * 2 >= len(lacking) and len(partners) >= matched else None


def _cause_of_shapes(found: Sequence[Mismatch]) -> _Cause | None:
    """What all the differing shapes have in common."""
    pairs = [(one.saved, one.wanted) for one in found if one.saved is not None and one.wanted is not None]
    if len(pairs) < 2 or len(pairs) < len(found):
        return None
    if all(a[1:] == b[1:] and len(a) == len(b) for a, b in pairs):
        sizes = {(a[0], b[0]) for a, b in pairs}
        one = f" (saved {min(sizes)[0]}, the template has {min(sizes)[1]})" if len(sizes) == 1 else ""
        return _Cause(f"All of them differ in the first dimension only{one}.")
    if all(a == b[::-1] for a, b in pairs):
        return _Cause("All of them are transposed.")
    if all(a[1:] == b for a, b in pairs):
        return _Cause("All of them were saved with an additional leading dimension.")
    if all(a == b[1:] for a, b in pairs):
        return _Cause("All of them have an additional leading dimension in the template.")
    return None
