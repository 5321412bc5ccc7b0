"""`shardkeep diff`: compare two checkpoints leaf by leaf, in bounded memory."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardkeep.cli.output import (
    Cell,
    Output,
    bar,
    counted,
    json_number,
    json_value,
    layout,
    name_prefix,
    plain,
    short,
)
from shardkeep.cli.parser import FINDINGS
from shardkeep.converting.arithmetic import Difference, difference_of
from shardkeep.converting.blocks import (
    Opened,
    choose_trees,
    compile_include,
    matches,
    no_match,
    open_at,
    read_region,
    regions_of,
    steady,
)
from shardkeep.loading.blocks import BlockReader
from shardkeep.model.arrays import Array, Region
from shardkeep.model.leaves import ForeignArray, Origin, PrngKeys, StoredArray, StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.perprocess import PerProcessRows
from shardkeep.model.pieces import have_digests, packed_in
from shardkeep.model.tree import name_leaf
from shardkeep.model.values import encode
from shardkeep.runtime.crew import Task, run_tasks
from shardkeep.runtime.progress import Progress

# How a leaf was compared: by digests, by reading both arrays, as plain values, or not at all.
How = Literal["digests", "read", "value", "not_compared"]
_SHOWN = 50  # the most leaves that are listed; --json lists all


@dataclass
class _Pair:
    """A leaf that both checkpoints have, and how it differs."""

    prefix: str
    a: StoredLeaf
    b: StoredLeaf
    how: How = "not_compared"
    reasons: list[str] = field(default_factory=list[str])  # kind, shape, dtype, values
    difference: Difference | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        return plain(name_leaf(self.a.path))


@dataclass
class _Comparison:
    """Two trees, leaf by leaf."""

    prefix_a: str
    prefix_b: str
    pairs: list[_Pair]
    only_a: list[StoredLeaf]
    only_b: list[StoredLeaf]
    containers_differ: bool

    @property
    def different(self) -> bool:
        return bool(self.only_a or self.only_b or self.containers_differ or any(p.reasons for p in self.pairs))


@dataclass(frozen=True)
class _Side:
    """One of two arrays that are compared by reading them."""

    opened: Opened
    reader: BlockReader
    leaf: StoredArray

    def regions(self) -> list[Region]:
        return regions_of(self.opened, self.leaf)

    def read(self, region: Region, progress: Progress) -> Array:
        return read_region(self.reader, self.leaf, region, progress)


def diff(
    path_a: str,
    path_b: str,
    output: Output,
    prefixes: tuple[str | None, str | None],
    include: str | None,
    values: bool | None,
) -> int:
    """Compare two checkpoints: 0 if they are equal, 1 if not.

    Args:
        path_a: The first checkpoint.
        path_b: The second checkpoint.
        output: Where to print the result.
        prefixes: The prefix to compare in each; None for all trees.
        include: Compare only leaves whose key this regular expression matches.
        values: Whether to read all arrays or none; None reads those whose digests do not show that they are equal.
    """
    a, b = open_at(path_a), open_at(path_b)
    wanted = _matching(include)
    trees_a, trees_b = choose_trees(a.manifest, prefixes[0]), choose_trees(b.manifest, prefixes[1])
    names = _pair_prefixes(trees_a, trees_b)
    paired = [_side_by_side(x, trees_a[x], y, trees_b[y], wanted) for x, y in names]
    if include is not None and not any(c.pairs or c.only_a or c.only_b for c in paired):
        raise no_match(include, (*trees_a.values(), *trees_b.values()), f"{path_a} or {path_b}")
    with steady(a, b):
        _compare(a, b, [(c, trees_a[c.prefix_a], trees_b[c.prefix_b]) for c in paired], values)
    lone_a = [name for name in trees_a if name not in {x for x, _ in names}]
    lone_b = [name for name in trees_b if name not in {y for _, y in names}]
    different = bool(lone_a or lone_b or any(c.different for c in paired))
    if output.as_json:
        output.document(_document(path_a, path_b, paired, lone_a, lone_b, different))
    else:
        _show(paired, lone_a, lone_b, different, output)
    return FINDINGS if different else 0


def _matching(include: str | None) -> Callable[[StoredLeaf], bool]:
    pattern = compile_include(include)
    return lambda leaf: matches(leaf, pattern)


def _pair_prefixes(a: dict[str, Tree], b: dict[str, Tree]) -> list[tuple[str, str]]:
    """The trees to compare: those with the same prefix, or the only tree of each."""
    if len(a) == len(b) == 1:
        return [(next(iter(a)), next(iter(b)))]
    return [(name, name) for name in a if name in b]


def _side_by_side(prefix_a: str, a: Tree, prefix_b: str, b: Tree, wanted: Callable[[StoredLeaf], bool]) -> _Comparison:
    """Pair leaves by path, and the remaining ones by dotted name, which is what other programs store."""
    left = {leaf.path: leaf for leaf in a.leaves if wanted(leaf)}
    right = {leaf.path: leaf for leaf in b.leaves if wanted(leaf)}
    pairs = [(leaf, right.pop(path)) for path, leaf in left.items() if path in right]
    for leaf, _ in pairs:
        del left[leaf.path]
    dotted = _by_dotted_name(right.values())
    for name, leaf in _by_dotted_name(left.values()).items():
        if name in dotted:
            pairs.append((leaf, dotted[name]))
            del left[leaf.path], right[dotted[name].path]
    order = {leaf.path: i for i, leaf in enumerate(a.leaves)}
    pairs.sort(key=lambda pair: order[pair[0].path])
    # Files of other programs do not record whether a container was a list or a dict.
    ours = "foreign" not in (a.format, b.format)
    containers = ours and not left and not right and _containers(a, wanted) != _containers(b, wanted)
    found = [_Pair(prefix_a, one, other) for one, other in pairs]
    return _Comparison(prefix_a, prefix_b, found, list(left.values()), list(right.values()), containers)


def _containers(tree: Tree, wanted: Callable[[StoredLeaf], bool]) -> object:
    """The containers of the leaves that are compared."""
    keep = [wanted(leaf) for leaf in tree.leaves]
    return (tree.skeleton if all(keep) else tree.skeleton.prune(keep)).to_json()


def _by_dotted_name(leaves: Any) -> dict[str, StoredLeaf]:
    names: dict[str, list[StoredLeaf]] = {}
    for leaf in leaves:
        names.setdefault(".".join(leaf.path), []).append(leaf)
    return {name: same[0] for name, same in names.items() if len(same) == 1}


def _compare(a: Opened, b: Opened, paired: Sequence[tuple[_Comparison, Tree, Tree]], values: bool | None) -> None:
    """Compare every pair; read the arrays that must be read, in parallel."""
    work: list[tuple[_Pair, Difference, _Side, _Side]] = []
    for comparison, tree_a, tree_b in paired:
        for pair in comparison.pairs:
            if arrays := _unread_arrays(pair, values):
                pair.how, pair.difference = "read", Difference()
                sides = _Side(a, a.source(tree_a), arrays[0]), _Side(b, b.source(tree_b), arrays[1])
                work.append((pair, pair.difference, *sides))
    total = sum(x.leaf.nbytes + y.leaf.nbytes for _, _, x, y in work)
    with bar("comparing", total) as progress:
        run_tasks(task for pair, found, x, y in work for task in _tasks(pair.lock, found, x, y, progress))
    for pair, found, _, _ in work:
        if found.changed:
            pair.reasons.append("values")


def _unread_arrays(pair: _Pair, values: bool | None) -> tuple[StoredArray, StoredArray] | None:
    """Compare what the manifests record. The arrays, if they must be read to know more."""
    a, b = pair.a, pair.b
    if not isinstance(a, StoredArray) or not isinstance(b, StoredArray):
        pair.how = "value"
        if isinstance(a, StoredArray) or isinstance(b, StoredArray):
            pair.reasons.append("kind")
        elif encode(a.value) != encode(b.value):
            pair.reasons.append("values")
        return None
    if not _same_kind(a.was, b.was):
        pair.reasons.append("kind")
        return None
    if _lengths(a) != _lengths(b):  # of the values of processes: their number, or what they saved
        pair.reasons.append("shape" if a.processes != b.processes else "values")
        return None
    if a.spec.shape != b.spec.shape:
        pair.reasons.append("shape")
    if a.spec.dtype != b.spec.dtype:
        pair.reasons.append("dtype")
    if "shape" in pair.reasons:
        return None
    known = None if values else _equal_digests(a, b)
    if known is not None and (known or values is False):
        pair.how = "digests"
        if not known:
            pair.reasons.append("values")
        return None
    return None if values is False else (a, b)


def _same_kind(a: Origin, b: Origin) -> bool:
    """Whether both are keys of one implementation, or values of processes, or ordinary arrays."""
    if isinstance(a, PrngKeys) or isinstance(b, PrngKeys):
        return a == b
    return isinstance(a, PerProcessRows) == isinstance(b, PerProcessRows)


def _lengths(leaf: StoredArray) -> tuple[int, ...]:
    return leaf.origin.lengths if isinstance(leaf.origin, PerProcessRows) else ()


def _equal_digests(a: StoredArray, b: StoredArray) -> bool | None:
    """Whether the digests of both are equal; None if they cannot be compared: missing, or of other pieces or dtypes."""
    if a.spec != b.spec or not have_digests(a.pieces) or not have_digests(b.pieces):
        return None
    left = {piece.region: piece.digests for piece in a.pieces}
    right = {piece.region: piece.digests for piece in b.pieces}
    return left == right if left.keys() == right.keys() else None


def _tasks(lock: threading.Lock, total: Difference, a: _Side, b: _Side, progress: Progress) -> list[Task]:
    def compare(region: Region) -> None:
        found = difference_of(a.read(region, progress), b.read(region, progress))
        with lock:
            total.merge(found)

    # Compressed pieces are decompressed as a whole, so the side that has them decides on the regions.
    packed = bool(packed_in(b.leaf.pieces)) or isinstance(b.leaf.origin, ForeignArray)
    regions = b.regions() if packed else a.regions()
    return [lambda r=region: compare(r) for region in regions]


def _show(paired: Sequence[_Comparison], lone_a: list[str], lone_b: list[str], different: bool, output: Output) -> None:
    for side, names, style in (("A", lone_a, "red"), ("B", lone_b, "green")):
        for name in names:
            output.line(output.paint(f"tree only in {side}: {name_prefix(name)}", style))
    for comparison in paired:
        _show_tree(comparison, len(paired) > 1, output)
    pairs = [pair for c in paired for pair in c.pairs]
    equal = [pair for pair in pairs if not pair.reasons]
    by = {how: sum(pair.how == how for pair in equal) for how in ("digests", "read", "value", "not_compared")}
    said = [f"{by['digests']:,} by digest, not read"] if by["digests"] else []
    said += [f"{by['read']:,} read"] if by["read"] else []
    said += [counted(by["value"], "plain value")] if by["value"] else []
    note = f" ({', '.join(said)})" if said else ""
    output.line(f"{counted(len(equal) - by['not_compared'], 'leaf', 'leaves')} equal{note}")
    if by["not_compared"]:
        arrays = counted(by["not_compared"], "array")
        output.line(f"{arrays} not compared: their pieces differ, so their digests do too (pass --values to read them)")
    verdict = ("different", "red") if different else ("no differences found", "green")
    output.line(output.paint(*verdict))


def _show_tree(comparison: _Comparison, several: bool, output: Output) -> None:
    if several or comparison.prefix_a != comparison.prefix_b:
        names = dict.fromkeys(map(name_prefix, (comparison.prefix_a, comparison.prefix_b)))
        output.line(output.paint(" and ".join(names), "cyan"))
    for side, leaves, style in (("A", comparison.only_a, "red"), ("B", comparison.only_b, "green")):
        for leaf in leaves[:_SHOWN]:
            output.line(output.paint(f"only in {side}: {plain(name_leaf(leaf.path))}  {_what(leaf)}", style))
        if len(leaves) > _SHOWN:
            output.line(f"only in {side}: {len(leaves) - _SHOWN:,} more")
    if comparison.containers_differ:
        output.line("the leaves are the same, but their containers differ (for example, a list and a dict)")
    changed = [pair for pair in comparison.pairs if pair.reasons]
    output.table([_row(pair, output) for pair in changed[:_SHOWN]])
    if len(changed) > _SHOWN:
        output.line(f"{len(changed) - _SHOWN:,} more leaves differ (--json lists all)")
    for pair in comparison.pairs:
        if pair.difference is not None and not pair.reasons and not pair.difference.same_bits:
            output.line(
                f"{pair.name}: the values are equal, but not bit-identical (signs of zeros or NaN payloads differ)"
            )


def _row(pair: _Pair, output: Output) -> list[Cell]:
    a, b = _what(pair.a), _what(pair.b)
    what: Cell = a if a == b else (f"{a} → {b}", "yellow")
    values = _values(pair) or ("values differ" if a == b else "")  # of long ones only the start is shown
    return [pair.name, what, values] if values else [pair.name, what]


def _values(pair: _Pair) -> str:
    found = pair.difference
    if pair.a.processes is not None and "values" in pair.reasons:
        return "values differ"
    if found is None:
        return "values differ (by digest)" if pair.how == "digests" else ""
    nans = f", NaN {found.nan_a:,} → {found.nan_b:,}" if found.nan_a or found.nan_b else ""
    if not found.changed:
        return f"values equal{nans}"
    maximum = found.maximum if isinstance(found.maximum, int) else f"{found.maximum:.4g}"
    return f"{found.changed:,} of {found.count:,} changed ({_share(found):.2%}), max |Δ| {maximum}{nans}"


def _share(found: Difference) -> float:
    return found.changed / found.count if found.count else 0.0


def _what(leaf: StoredLeaf) -> str:
    return layout(leaf) if isinstance(leaf, StoredArray) else short(leaf.value)


def _document(
    a: str, b: str, paired: Sequence[_Comparison], lone_a: list[str], lone_b: list[str], different: bool
) -> dict[str, object]:
    return {
        "a": a,
        "b": b,
        "equal": not different,
        "trees_only_in_a": lone_a,
        "trees_only_in_b": lone_b,
        "trees": [
            {
                "prefix_a": c.prefix_a,
                "prefix_b": c.prefix_b,
                "equal": not c.different,
                "containers_differ": c.containers_differ,
                "only_in_a": [leaf.key for leaf in c.only_a],
                "only_in_b": [leaf.key for leaf in c.only_b],
                "leaves": [_pair_document(pair) for pair in c.pairs],
            }
            for c in paired
        ],
    }


def _pair_document(pair: _Pair) -> dict[str, object]:
    body: dict[str, object] = {
        "key": pair.a.key,
        "path": list(pair.a.path),
        "equal": None if pair.how == "not_compared" and not pair.reasons else not pair.reasons,
        "differs_in": pair.reasons,
        "compared_by": pair.how,
        "a": _side(pair.a),
        "b": _side(pair.b),
    }
    found = pair.difference
    if found is not None:
        body |= {
            "max_abs_difference": json_number(found.maximum),
            "changed": found.changed,
            "changed_fraction": _share(found),
            "nan_a": found.nan_a,
            "nan_b": found.nan_b,
            "same_bits": found.same_bits,
        }
    return body


def _side(leaf: StoredLeaf) -> dict[str, object]:
    if not isinstance(leaf, StoredArray):
        return {"type": type(leaf.value).__name__, "value": json_value(leaf.value)}
    return {"dtype": leaf.logical_dtype, "shape": list(leaf.logical_shape)}
