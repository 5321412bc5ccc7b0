"""The leaves that a load reads: all, those that match, or those of a template; and where each goes."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
from jax.experimental.layout import Format

from shardkeep.errors import IntegrityError, MissingLeafError, ProcessError, ShardingError, counted
from shardkeep.loading.leftovers import not_named, refuse_extra
from shardkeep.loading.matching import NumpyStruct, Wanted, as_template, key_dtype
from shardkeep.loading.mismatches import Mismatch, mismatch_error, missing_leaf, summarize
from shardkeep.loading.request import LoadRequest
from shardkeep.loading.shardings import ShapedLeaf, resolve_shardings
from shardkeep.model.arrays import kind_of
from shardkeep.model.keys import ByLooseKey, loose_key
from shardkeep.model.lazy import cached_property
from shardkeep.model.leaves import NumpyArray, PrngKeys, StoredArray, StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.perprocess import PerProcess, fold_containers
from shardkeep.model.tree import Leaf, Path, Skeleton, flatten, name_leaf
from shardkeep.model.values import is_data, is_plain
from shardkeep.remap.expressions import DerivedArray, keeps_values

log = logging.getLogger("shardkeep")

_SHOWN = 5  # keys that a message lists


@dataclass(frozen=True, slots=True)
class Choice:
    """The structure to rebuild and its leaves: to load, or (by number) kept from the template, or made for it."""

    skeleton: Skeleton
    wanted: list[Wanted | None]
    kept: dict[int, object]
    lacking: dict[int, Leaf] = field(default_factory=dict[int, Leaf])  # not in the checkpoint, and not an error
    keeping: dict[int, Leaf] = field(default_factory=dict[int, Leaf])  # in the checkpoint, but for a part


def choose(tree: Tree, request: LoadRequest, problems: list[Mismatch] | None = None) -> Choice:
    """The leaves to load, those of a template with its shardings.

    Args:
        tree: The tree of the checkpoint.
        request: What is asked of it.
        problems: Where to put what does not match the template. By default it is an error.
    """
    if request.template is not None:
        return _choose_by_template(tree, request, problems)

    def want(leaf: StoredLeaf) -> Wanted:
        if leaf.processes is not None:
            return Wanted(leaf, as_numpy=True)
        numpy = isinstance(leaf, StoredArray) and isinstance(leaf.was, NumpyArray)
        return Wanted(leaf, as_numpy=numpy and not request.policy.all_jax, dtype=request.dtype)

    if request.include is None:
        return Choice(tree.skeleton, [want(leaf) for leaf in tree.leaves], {})
    keep = [request.include.search("/".join(leaf.path)) is not None for leaf in tree.leaves]
    if not any(keep):
        raise _no_match(request.include, "", [leaf.path for leaf in tree.leaves])
    wanted = [want(leaf) for leaf, kept in zip(tree.leaves, keep, strict=True) if kept]
    return Choice(tree.skeleton.prune(keep), list(wanted), {})


def _no_match(include: re.Pattern[str], where: str, paths: Sequence[Path]) -> MissingLeafError:
    """The error for an `include` that matches nothing, with some of the keys that it was matched against."""
    some = ", ".join("/".join(path) for path in paths[:_SHOWN])
    more = ", …" if len(paths) > _SHOWN else ""
    found = f"the keys are {some}{more}" if some else "the tree has none"
    return MissingLeafError(f"include={include.pattern!r} matches no leaf{where}; {found}")


def _choose_by_template(tree: Tree, request: LoadRequest, collected: list[Mismatch] | None) -> Choice:
    skeleton, leaves = flatten(request.template)
    if request.include is not None and not any(_is_included(leaf.path, request) for leaf in leaves):
        # Nothing would be loaded, and the program would go on with the values it has made for the template.
        raise _no_match(request.include, " of the template", [leaf.path for leaf in leaves])
    per_process = {leaf.path for leaf in tree.leaves if leaf.processes is not None and _is_included(leaf.path, request)}
    if per_process:
        skeleton, leaves = fold_containers(skeleton, leaves, per_process)
    saved = ByLooseKey((leaf.path, leaf) for leaf in tree.leaves)
    fitting = _Fitting(tree, saved, request, Choice(skeleton, [], {}))
    for leaf in leaves:
        if _is_asked_for(leaf, request, leaf.path in per_process):
            fitting.add(leaf)
        else:
            fitting.keep(leaf)
    if collected is not None:
        collected += fitting.problems
    elif fitting.problems:
        raise mismatch_error(tree, skeleton, fitting.problems, fitting.total)
    if request.extra == "error":
        refuse_extra(_not_loaded(tree, fitting.choice, leaves, request))
    if fitting.unloaded or fitting.never_saved:
        _log_kept(fitting.unloaded, fitting.never_saved)
    _log_not_loaded(tree, fitting.choice, leaves, request)
    return fitting.choice


@dataclass
class _Fitting:
    """The leaves of a template, one after another, with what a tree has for each."""

    tree: Tree
    saved: ByLooseKey[StoredLeaf]
    request: LoadRequest
    choice: Choice
    problems: list[Mismatch] = field(default_factory=list[Mismatch])
    unloaded: list[Mismatch] = field(default_factory=list[Mismatch])  # the template's values are used
    never_saved: list[str] = field(default_factory=list[str])
    total: int = 0

    @cached_property
    def _empty(self) -> set[str]:
        """Where the tree has no leaf, as `eqx.filter(model, eqx.is_array)` leaves it."""
        return {loose_key(path) for path in self.tree.skeleton.empty_paths()}

    def keep(self, leaf: Leaf) -> None:
        """Keep the template's value."""
        self.choice.kept[len(self.choice.wanted)] = leaf.value
        self.choice.wanted.append(None)

    def add(self, leaf: Leaf) -> None:
        """Load what is saved for a leaf, keep the template's value, or note why neither can be."""
        self.total += 1
        stored = self.saved.get(leaf.path)
        if stored is None and self._may_be_missing(leaf):
            self.keep(leaf)
            return
        if stored is None:
            is_array = not is_plain(leaf.value) and not isinstance(leaf.value, PerProcess)
            found = missing_leaf(leaf.path, is_array, getattr(leaf.value, "shape", None))
        else:
            found = as_template(stored, leaf, self.request)
        if isinstance(found, Wanted):
            if self.request.remap and isinstance(stored, DerivedArray) and keeps_values(stored.expression):
                self.choice.keeping[len(self.choice.wanted)] = leaf
            self.choice.wanted.append(found)
            return
        is_error = self.request.policy.strict_shapes or _is_abstract(leaf.value)
        (self.problems if is_error else self.unloaded).append(found)
        self.keep(leaf)

    def _may_be_missing(self, leaf: Leaf) -> bool:
        """Whether a leaf that the tree does not have is no error."""
        if is_plain(leaf.value) and loose_key(leaf.path) in self._empty:
            self.never_saved.append(leaf.key)
            return True
        if self.request.missing != "error":
            self.choice.lacking[len(self.choice.wanted)] = leaf
            return True
        return False


def _is_asked_for(leaf: Leaf, request: LoadRequest, is_per_process: bool) -> bool:
    """Whether a leaf of the template is to be loaded: it is data (`...` and functions are not) and is included.

    Anything but `...` marks the place of a PerProcess value, also a container.
    """
    asked = is_data(leaf.value) or isinstance(leaf.value, PerProcess) or (is_per_process and leaf.value is not ...)
    return asked and _is_included(leaf.path, request)


def _is_included(path: Path, request: LoadRequest) -> bool:
    return request.include is None or request.include.search("/".join(path)) is not None


def choose_process(choice: Choice, request: LoadRequest, path: str, index: int, size: int) -> None:
    """Let each `PerProcess` leaf be the value of this process, or all of them if that was asked for.

    Raises `ProcessError` for a leaf that another number of processes has saved.
    """
    found = [w for w in choice.wanted if w is not None and w.stored.processes is not None]
    if request.per_process == "all":
        return
    other = [w.stored for w in found if w.stored.processes != size]
    if other:
        first = other[0]
        more = f" (and {counted(len(other) - 1, 'more leaf', 'more leaves')})" if len(other) > 1 else ""
        raise ProcessError(
            f"loading {path}: leaf {name_leaf(first.path)}{more} is a PerProcess value of "
            f"{counted(first.processes or 0, 'process', 'processes')}, and {counted(size, 'process', 'processes')} "
            f'{"is" if size == 1 else "are"} loading it. Pass per_process="all" to shardkeep.load to get the list of '
            "all values, or leave the leaf out with include= or with ... in a template"
        )
    for w in found:
        w.process = index


def _is_abstract(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "__array__")


def _log_kept(unloaded: Sequence[Mismatch], never_saved: Sequence[str]) -> None:
    """Say which data is the template's own."""
    if unloaded:
        log.warning(
            "%s of the template %s not match the checkpoint; the template's value is used:\n%s",
            counted(len(unloaded), "leaf", "leaves"),
            "does" if len(unloaded) == 1 else "do",
            summarize([one.text for one in unloaded]),
        )
    if never_saved:
        log.info(
            "%s saved as None; the template's value is used: %s",
            "1 plain value was" if len(never_saved) == 1 else f"{len(never_saved):,} plain values were",
            _some(never_saved),
        )


def _log_not_loaded(tree: Tree, choice: Choice, leaves: Sequence[Leaf], request: LoadRequest) -> None:
    """Say which leaves of the checkpoint the template does not name. Those below a `...` are left out on purpose."""
    if not log.isEnabledFor(logging.INFO):
        return
    rest = _not_loaded(tree, choice, leaves, request)
    if rest:
        log.info(
            "%s of the checkpoint (%s bytes) %s not in the template and %s not loaded: %s",
            counted(len(rest), "leaf", "leaves"),
            f"{sum(leaf.nbytes for leaf in rest):,}",
            "is" if len(rest) == 1 else "are",
            "was" if len(rest) == 1 else "were",
            _some([leaf.key for leaf in rest]),
        )


def _not_loaded(tree: Tree, choice: Choice, leaves: Sequence[Leaf], request: LoadRequest) -> list[StoredLeaf]:
    used = {w.stored.path for w in choice.wanted if w is not None}
    refused = [leaf.path for leaf in leaves if leaf.value is ...]
    return [leaf for leaf in not_named(tree, used, refused) if _is_included(leaf.path, request)]


def _some(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:_SHOWN])) + (", …" if len(keys) > _SHOWN else "")


def choose_places(wanted: Sequence[Wanted], prefix: str, request: LoadRequest) -> None:
    """Place each array by rules, shardings or the mesh, unless the template has placed it.

    A NumPy array becomes a JAX array only if a rule or a sharding names it.
    """
    if request.mesh is None and not request.rules and request.shardings is None:
        return
    open_ = [
        (w, w.stored)
        for w in wanted
        if isinstance(w.stored, StoredArray) and w.stored.processes is None and not w.place.explicit and w.like is None
    ]
    shaped = [
        ShapedLeaf(stored.path, w.shape or stored.logical_shape, stored.sharding, w.as_numpy, stored.nbytes)
        for w, stored in open_
    ]
    places = resolve_shardings(
        shaped,
        mesh=request.mesh,
        rules=request.rules,
        shardings=request.shardings,
        strict=request.policy.strict_rules,
        prefix=prefix,
        prefix_first=request.policy.prefix_first,
    )
    for (w, _), place in zip(open_, places, strict=True):
        if not w.as_numpy:
            w.place = place
        elif place.explicit and request.template is None:
            w.place, w.as_numpy = place, False


def abstract_leaf(w: Wanted) -> object:
    """A leaf without its data: plain values as they are, arrays as `jax.ShapeDtypeStruct`s.

    The place of a value that differs between processes is marked with `PerProcess(None)`.
    """
    stored = w.stored
    if stored.processes is not None:
        return PerProcess(None)
    if not isinstance(stored, StoredArray):
        return stored.value
    if w.place.function is not None:
        raise ShardingError(f"leaf {stored.key!r}: abstract() takes no functions in shardings; pass them to load()")
    shape, dtype, origin = stored.logical_shape, stored.spec.dtype, stored.was
    if isinstance(origin, PrngKeys):
        dtype = key_dtype(origin.impl)
        if dtype is None:
            impl = origin.impl
            problem = f"leaf {stored.key!r} holds PRNG keys of {impl!r}, an implementation JAX does not have"
            raise IntegrityError(problem, leaf=stored.key)
    elif w.dtype is not None and kind_of(w.dtype) == kind_of(dtype):
        dtype = w.dtype
    elif w.as_numpy and isinstance(origin, NumpyArray) and origin.order is not None:
        dtype = dtype.newbyteorder(origin.order)
    if w.as_numpy:
        return NumpyStruct(shape, dtype)
    if w.place.layout is not None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=Format(w.place.layout, w.place.sharding))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=w.place.sharding)
