"""Random trees and rules, and the same changes made on whole NumPy arrays, by code of its own."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from shardkeep import remap
from shardkeep.remap.rules import Rule

Tree = dict[str, np.ndarray]
NAMES = ["float32", "bfloat16", "int8", "float16", "int4", "bool", "complex64"]
DTYPES = [np.dtype(getattr(ml_dtypes, name, None) or name) for name in NAMES]


@dataclass
class Change:
    """A tree as it is, the rules so far, and whether they can be undone."""

    tree: Tree
    rules: list[Rule] = field(default_factory=list)
    undoable: bool = True
    fresh: int = 0

    def name(self) -> str:
        self.fresh += 1
        return f"new{self.fresh}"


def filled(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(-100, 100, shape).astype(np.int8).astype(dtype)


@st.composite
def trees(draw: Any) -> Tree:
    """Keys as models have them: layers with numbers, a head, and moments that look like the parameters."""
    tree: Tree = {}
    layers = draw(st.integers(1, 4))
    for name in draw(st.lists(st.sampled_from(["w", "qkv", "b/scale"]), min_size=1, max_size=3, unique=True)):
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        for place in draw(st.sampled_from([["enc"], ["enc", "mu/enc"], ["enc", "mu/enc", "nu/enc"]])):
            for i in range(layers):
                tree[f"{place}/{i}/{name}"] = filled(shape, dtype, len(tree))
    tree["head"] = filled((draw(st.sampled_from([4, 8])), 6), draw(st.sampled_from(DTYPES)), 99)
    return tree


def literal(key: str) -> str:
    return re.escape(key)


def _rename(change: Change, draw: Any) -> None:
    if draw(st.booleans()) and any(key.startswith("enc/") for key in change.tree):
        name = change.name()
        change.rules.append(
            remap.rename(r"enc/(\d+)/(.*)", rf"{name}/\1/\2")
            if _numbered(change)
            else remap.rename("enc/(.*)", rf"{name}/\1")
        )
        pattern = r"enc/(\d+)/(.*)" if _numbered(change) else "enc/(.*)"
        change.tree = {
            re.sub(r"^enc/", f"{name}/", key) if re.fullmatch(pattern, key) else key: value
            for key, value in change.tree.items()
        }
        return
    key, new = draw(st.sampled_from(sorted(change.tree))), f"{change.name()}/x"
    change.rules.append(remap.rename(literal(key), new))
    change.tree[new] = change.tree.pop(key)


def _numbered(change: Change) -> bool:
    return all(re.match(r"enc/\d+/", key) for key in change.tree if key.startswith("enc/"))


def _stack(change: Change, draw: Any) -> None:
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for key in change.tree:
        found = re.fullmatch(r"(.*?)/(\d+)/(.*)", key)
        if found:
            groups.setdefault((found[1], found[3]), {})[int(found[2])] = key
    groups = {at: g for at, g in groups.items() if sorted(g) == list(range(len(g)))}
    groups = {
        at: g
        for at, g in groups.items()
        if len({(change.tree[k].shape, change.tree[k].dtype) for k in g.values()}) == 1
    }
    if not groups:
        return
    (before, after), group = draw(st.sampled_from(sorted(groups.items(), key=lambda item: item[0])))
    arrays = [change.tree[group[i]] for i in range(len(group))]
    axis = draw(st.integers(-arrays[0].ndim - 1, arrays[0].ndim))
    new = change.name()
    change.rules.append(remap.stack(f"{literal(before)}/{{i}}/{literal(after)}", new, axis))
    for key in group.values():
        del change.tree[key]
    change.tree[new] = np.stack(arrays, axis)


def _array(change: Change, draw: Any, fits: Callable[[np.ndarray], bool] = lambda _: True) -> str | None:
    keys = sorted(key for key, value in change.tree.items() if fits(value))
    return draw(st.sampled_from(keys)) if keys else None


def _unstack(change: Change, draw: Any) -> None:
    key = _array(change, draw, lambda a: a.ndim > 0 and 0 < min(a.shape) <= 4)
    if key is None:
        return
    array = change.tree.pop(key)
    axis = draw(st.sampled_from([i for i, n in enumerate(array.shape) if 0 < n <= 4]))
    new = change.name()
    change.rules.append(remap.unstack(literal(key), f"{new}/{{i}}/y", axis))
    for i in range(array.shape[axis]):
        change.tree[f"{new}/{i}/y"] = np.take(array, i, axis)


def _split(change: Change, draw: Any) -> None:
    key = _array(change, draw, lambda a: a.ndim > 0 and max(a.shape) > 1)
    if key is None:
        return
    array = change.tree.pop(key)
    axis = draw(st.sampled_from([i for i, n in enumerate(array.shape) if n > 1]))
    cut = draw(st.integers(0, array.shape[axis]))
    names = [f"{change.name()}/q", f"{change.name()}/k"]
    change.rules.append(remap.split(literal(key), names, axis, [cut, array.shape[axis] - cut]))
    change.tree[names[0]], change.tree[names[1]] = np.split(array, [cut], axis)


def _fuse(change: Change, draw: Any) -> None:
    key = _array(change, draw, lambda a: a.ndim > 0)
    if key is None:
        return
    first = change.tree[key]
    axis = draw(st.integers(0, first.ndim - 1))
    rest = lambda a: (*a.shape[:axis], *a.shape[axis + 1 :])  # noqa: E731
    others = [k for k, a in change.tree.items() if k != key and a.ndim == first.ndim and a.dtype == first.dtype]
    others = [k for k in others if rest(change.tree[k]) == rest(first)]
    if not others:
        return
    keys = [key, *draw(st.lists(st.sampled_from(sorted(others)), min_size=1, max_size=3, unique=True))]
    new = change.name()
    change.rules.append(remap.fuse([literal(k) for k in keys], new, axis - first.ndim))
    change.tree[new] = np.concatenate([change.tree.pop(k) for k in keys], axis)


def _transpose(change: Change, draw: Any) -> None:
    name = draw(st.sampled_from(["w", "qkv", "y"]))
    alike = [key for key in change.tree if key.endswith(f"/{name}")]
    if len({change.tree[key].ndim for key in alike}) == 1:
        keys, pattern = alike, f".*/{name}"
    else:
        keys = [draw(st.sampled_from(sorted(change.tree)))]
        pattern = literal(keys[0])
    axes = draw(st.permutations(range(change.tree[keys[0]].ndim)))
    change.rules.append(remap.transpose(pattern, axes))
    for key in keys:
        change.tree[key] = change.tree[key].transpose(axes)


def _reshape(change: Change, draw: Any) -> None:
    key = draw(st.sampled_from(sorted(change.tree)))
    size, shape = change.tree[key].size, []
    while size > 1 and len(shape) < 3:
        factor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        shape.append(factor)
        size //= factor
    shape += [size] * draw(st.integers(size > 1, 1)) if change.tree[key].size else [0, 3]
    said = list(shape)
    if shape and 0 not in shape and draw(st.booleans()):
        said[draw(st.integers(0, len(shape) - 1))] = -1
    change.rules.append(remap.reshape(literal(key), said))
    change.tree[key] = change.tree[key].reshape(shape)


def _copy(change: Change, draw: Any) -> None:
    key, new = draw(st.sampled_from(sorted(change.tree))), change.name()
    change.rules.append(remap.copy(literal(key), new))
    change.tree[new] = change.tree[key]


def _resize(change: Change, draw: Any) -> None:
    key = _array(change, draw, lambda a: a.ndim > 0)
    if key is None:
        return
    array = change.tree[key]
    axis = draw(st.integers(-array.ndim, array.ndim - 1))
    size, fill = draw(st.integers(0, array.shape[axis] + 3)), draw(st.sampled_from(["zeros", 7]))
    fill = min(fill, 1) if fill != "zeros" and array.dtype == bool else fill
    change.undoable &= size >= array.shape[axis]
    change.rules.append(remap.resize(literal(key), axis, fill, size))
    grown = [(0, max(size - n, 0)) if i == axis % array.ndim else (0, 0) for i, n in enumerate(array.shape)]
    padded = np.pad(array, grown, constant_values=0 if fill == "zeros" else fill)
    change.tree[key] = np.take(padded, range(size), axis)


def _drop(change: Change, draw: Any) -> None:
    if len(change.tree) > 1:
        key = draw(st.sampled_from(sorted(change.tree)))
        change.rules.append(remap.drop(literal(key)))
        del change.tree[key]
        change.undoable = False


def negate(array: np.ndarray) -> np.ndarray:
    return np.asarray(np.logical_not(array) if array.dtype == bool else np.negative(array), array.dtype)


def _apply(change: Change, draw: Any) -> None:
    key = draw(st.sampled_from(sorted(change.tree)))
    elementwise = draw(st.booleans())
    change.rules.append(remap.apply(literal(key), negate, elementwise=elementwise, inverse=negate))
    change.tree[key] = negate(change.tree[key])


def _within(change: Change, draw: Any) -> None:
    """Rules with patterns that would match leaves outside of their places, too."""
    places = draw(st.sampled_from([["mu"], ["nu"], ["mu", "nu"], ["enc"], ["enc/0", "mu/enc/0"]]))
    heads = tuple(f"{place}/" for place in places)
    keys = [key for key in change.tree if key.startswith(heads)]
    if not keys:
        return
    kind, name = draw(st.sampled_from(["apply", "transpose", "rename"])), change.name()
    made: dict[str, Callable[[np.ndarray], np.ndarray]] = {"apply": negate, "transpose": np.transpose}
    rule = {
        "apply": lambda: remap.apply(".*", negate, elementwise=True, inverse=negate),
        "transpose": lambda: remap.transpose(".*", range(change.tree[keys[0]].ndim)[::-1]),
        "rename": lambda: remap.rename("(.*)", rf"{name}/\1"),
    }[kind]()
    if kind == "transpose" and len({change.tree[key].ndim for key in keys}) > 1:
        return
    change.rules.append(remap.within("|".join(places), [rule]))
    for key in keys:
        value = change.tree.pop(key)
        place = next(head for head in heads if key.startswith(head))
        new = f"{place}{name}/{key.removeprefix(place)}" if kind == "rename" else key
        change.tree[new] = made.get(kind, np.asarray)(value)


def _swap(change: Change, draw: Any) -> None:
    """The first two names of keys take each other's places."""
    new = {
        key: "/".join([b, a, *rest])
        for key in change.tree
        for a, _, c in [key.partition("/")]
        if c
        for b, *rest in [c.split("/")]
    }
    tree = {new.get(key, key): value for key, value in change.tree.items()}
    branches = {"/".join(key.split("/")[:end]) for key in tree for end in range(1, key.count("/") + 1)}
    if new and len(tree) == len(change.tree) and not branches & set(tree):
        change.rules.append(remap.rename("([^/]+)/([^/]+)(.*)", r"\2/\1\3"))
        change.tree = tree


KINDS = [
    _rename,
    _stack,
    _stack,
    _unstack,
    _split,
    _fuse,
    _transpose,
    _reshape,
    _copy,
    _resize,
    _drop,
    _apply,
    _within,
    _within,
    _swap,
]


@st.composite
def changes(draw: Any) -> tuple[Tree, Change]:
    """A tree, and what some rules make of it."""
    tree = draw(trees())
    change = Change(dict(tree))
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6)):
        kind(change, draw)
    return tree, change


def nested(tree: Tree) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in tree.items():
        *above, last = key.split("/")
        holder = root
        for name in above:
            holder = holder.setdefault(name, {})
        holder[last] = value
    return root


def flat(tree: Any, prefix: str = "") -> Tree:
    """The leaves of nested dicts by key."""
    found: Tree = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
