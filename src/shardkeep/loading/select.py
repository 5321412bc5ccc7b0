"""The leaves that a load reads (all, those that match, or those of a template), and what each becomes."""

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from shardkeep.errors import IntegrityError, MissingLeafError, ProcessError, ShardingError, counted
from shardkeep.loading.leftovers import not_named, refuse_extra
from shardkeep.loading.mismatches import Mismatch, mismatch_error, missing_leaf, summarize, wrong_kind, wrong_shape
from shardkeep.loading.moving import is_on_cpu, stays_numpy
from shardkeep.loading.shardings import (
    Place,
    Rules,
    ShapedLeaf,
    check_layout,
    check_sharding,
    needed_regions,
    resolve_shardings,
)
from shardkeep.model.arrays import DType, Region, kind_of, kind_of_value
from shardkeep.model.keys import ByLooseKey, loose_key
from shardkeep.model.leaves import UNREADABLE, NumpyArray, PrngKeys, StoredArray, StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.perprocess import PerProcess, PerProcessRows, fold_containers
from shardkeep.model.tree import Leaf, Path, Skeleton, flatten, name_leaf
from shardkeep.model.values import is_data, is_plain, show
from shardkeep.remap.expressions import DerivedArray, keeps_values
from shardkeep.remap.regions import regions_read
from shardkeep.remap.rules import Rule
from shardkeep.saving.snapshot import is_prng_dtype

log = logging.getLogger("shardkeep")

_SHOWN = 5  # keys that a message lists
_SMALL = 1 << 20  # a piece up to this size is read as a whole, and its shards are cut in memory


# Called with an array, what is stored of it, and the function that `shardings` has for it; returns what is loaded.
Treatment = Callable[[Any, StoredLeaf, Callable[[Any], Any]], Any]


# Gives leaves of the template that the checkpoint does not have their values, all at once.
Filler = Callable[[Sequence[Leaf]], Sequence[object]]


@dataclass(frozen=True)
class Policy:
    """How a load behaves where APIs differ. The defaults are those of `shardkeep.load`.

    Attributes:
        strict_shapes: Whether leaves that do not fit the template are an error. Otherwise they are reshaped, or the
            template's value is used.
        strict_rules: Whether a leaf that neither a rule nor a sharding names is an error, and not only a warning.
        prefix_first: Whether rules are first matched against keys that begin with the prefix.
        all_jax: Whether NumPy leaves are loaded as JAX arrays too.
        in_flight: How many arrays are read at once; None: as many as there are.
        treat: What to do with each placed array, in saved order.
    """

    strict_shapes: bool = True
    strict_rules: bool = False
    prefix_first: bool = False
    all_jax: bool = False
    in_flight: int | None = None
    treat: Treatment | None = None


@dataclass(frozen=True)
class LoadRequest:
    """What a caller asks of a load, with every argument checked."""

    template: Any = None
    prefix: str | None = None
    include: re.Pattern[str] | None = None
    mesh: Mesh | None = None
    rules: Rules | None = None
    shardings: Any = None
    dtype: DType | None = None
    verify: bool = True
    mmap: bool = True
    verbose: bool = False  # show a progress bar
    per_process: str = "own"  # of each PerProcess leaf: this process's value, or "all" in a list
    broadcast: Literal["auto"] | bool = False  # whether what several processes need is read by one of them
    policy: Policy = Policy()
    remap: tuple[Rule, ...] = ()  # applied to the tree of the checkpoint
    missing: Literal["error", "keep"] | Filler = "error"  # leaves that the checkpoint does not have
    extra: str = "ignore"  # leaves that the template does not have; "error" refuses them


Needed = Sequence[tuple[StoredArray, Sequence[Region]]]
_ANYWHERE = Place()


@dataclass(slots=True)
class Wanted:
    """A leaf to load: what is stored, where it goes, and what the caller gets."""

    stored: StoredLeaf
    place: Place = _ANYWHERE
    as_numpy: bool = False
    dtype: DType | None = None
    like: Any = None  # the template's plain value or 0-d array, where the other was saved
    shape: tuple[int, ...] | None = None  # the shape to reshape to
    process: int | None = None  # of a PerProcess leaf: whose value; None: all of them
    own: object = None  # the template's array, of which a derived one keeps a part

    def stays_on_host(self, leaf: StoredArray) -> bool:
        """Whether the caller gets a NumPy array, which is writable and therefore must not be a mapped file."""
        return self.as_numpy or stays_numpy(leaf.spec.dtype)

    def regions(self, leaf: StoredArray) -> Sequence[Region]:
        """The regions of the array that this process needs, each once."""
        if isinstance(leaf.origin, PerProcessRows) and self.process is not None:
            return [leaf.origin.region(self.process)]
        sharding = self.place.sharding
        if sharding is None or self.needs_whole(leaf):
            return [Region.whole(leaf.spec.shape)]
        return needed_regions(sharding, leaf.spec.shape)

    @property
    def needed(self) -> Needed:
        """The stored arrays that the leaf is made of, with the regions of them that this process needs."""
        leaf = self.stored
        if not isinstance(leaf, StoredArray):
            return []
        regions = self.regions(leaf)
        return regions_read(leaf.expression, regions) if isinstance(leaf, DerivedArray) else [(leaf, regions)]

    def needs_whole(self, leaf: StoredArray) -> bool:
        """Whether every process needs the whole array, whatever its devices hold of it."""
        if isinstance(self.place.sharding, SingleDeviceSharding) or self.shape is not None:
            return True
        # A small piece is read and checked as a whole anyway.
        return (len(leaf.pieces) == 1 and leaf.nbytes <= _SMALL) or self.stays_on_host(leaf)


@dataclass(frozen=True, slots=True)
class Choice:
    """The structure to rebuild and its leaves: to load, or (by number) kept from the template, or made for it."""

    skeleton: Skeleton
    wanted: list[Wanted | None]
    kept: dict[int, Any]
    lacking: dict[int, Leaf] = field(default_factory=dict[int, Leaf])  # not in the checkpoint, and not an error
    keeping: dict[int, Leaf] = field(default_factory=dict[int, Leaf])  # in the checkpoint, but for a part


class NumpyStruct(jax.ShapeDtypeStruct):
    """An abstract array in a template that is loaded as a NumPy array. `abstract` returns it for NumPy leaves."""

    __slots__ = ()


_NUMPY = (np.ndarray, NumpyStruct)


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
    find = ByLooseKey((leaf.path, leaf) for leaf in tree.leaves)
    empty: set[str] | None = None
    choice = Choice(skeleton, [], {})
    problems: list[Mismatch] = [] if collected is None else collected
    unloaded: list[Mismatch] = []
    never_saved: list[str] = []
    total = 0
    for leaf in leaves:
        if not _is_asked_for(leaf, request, leaf.path in per_process):
            _keep(choice, leaf)
            continue
        total += 1
        stored = find.get(leaf.path)
        if stored is None and is_plain(leaf.value):
            empty = {loose_key(path) for path in tree.skeleton.empty_paths()} if empty is None else empty
            if loose_key(leaf.path) in empty:  # as `eqx.filter(model, eqx.is_array)` leaves them
                never_saved.append(leaf.key)
                _keep(choice, leaf)
                continue
        if stored is None:
            if request.missing != "error":
                choice.lacking[len(choice.wanted)] = leaf
                _keep(choice, leaf)
                continue
            is_array = not is_plain(leaf.value) and not isinstance(leaf.value, PerProcess)
            found = missing_leaf(leaf.path, is_array, getattr(leaf.value, "shape", None))
        else:
            found = as_template(stored, leaf, request)
        if isinstance(found, Wanted):
            if request.remap and isinstance(stored, DerivedArray) and keeps_values(stored.expression):
                choice.keeping[len(choice.wanted)] = leaf
            choice.wanted.append(found)
        elif request.policy.strict_shapes or _is_abstract(leaf.value):
            problems.append(found)
            if collected is not None:
                _keep(choice, leaf)
        else:
            unloaded.append(found)
            _keep(choice, leaf)
    if problems and collected is None:
        raise mismatch_error(tree, skeleton, problems, total)
    if request.extra == "error":
        refuse_extra(_not_loaded(tree, choice, leaves, request))
    _log_kept(unloaded, never_saved)
    _log_not_loaded(tree, choice, leaves, request)
    return choice


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


def _keep(choice: Choice, leaf: Leaf) -> None:
    choice.kept[len(choice.wanted)] = leaf.value
    choice.wanted.append(None)


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
            "%s saved as None, and the template's value is used: %s",
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


def as_template(stored: StoredLeaf, leaf: Leaf, request: LoadRequest) -> Wanted | Mismatch:
    """A saved leaf as the template wants it, or why it cannot be loaded so."""
    like = leaf.value
    if stored.processes is not None or isinstance(like, PerProcess):
        return _per_process_as_template(stored, leaf)
    is_array = hasattr(like, "shape") and hasattr(like, "dtype") and not isinstance(like, np.generic)
    if not isinstance(stored, StoredArray):
        return _plain_as_template(stored, leaf, is_array)
    if stored.origin.kind == UNREADABLE:
        return wrong_kind(leaf.path, f"what cannot be read ({stored.unreadable})", f"a {type(like).__name__}")
    if not is_array:
        return _plain_as_template(stored, leaf, is_array)
    is_key = is_prng_dtype(like.dtype)
    was = stored.was
    impl = was.impl if isinstance(was, PrngKeys) else None
    shape, saved_shape = tuple(like.shape), stored.spec.shape if impl is None else stored.spec.shape[:-1]
    if is_key != (impl is not None) or (impl is not None and like.dtype != _key_dtype(impl)):
        return wrong_kind(leaf.path, _described(stored), f"{like.dtype}{list(shape)}")
    if shape != saved_shape and (request.policy.strict_shapes or is_key or math.prod(shape) != math.prod(saved_shape)):
        return wrong_shape(leaf.path, saved_shape, shape)
    dtype = None if is_key else np.dtype(like.dtype)
    if dtype is not None and dtype != stored.spec.dtype and kind_of(dtype) != kind_of(stored.spec.dtype):
        return wrong_kind(leaf.path, stored.dtype, dtype.name)
    sharding = getattr(like, "sharding", None)
    place = _ANYWHERE
    if isinstance(sharding, Sharding) and getattr(like, "committed", True):
        checked = check_sharding(sharding, leaf.path, shape, request.mesh)
        place = Place(checked, explicit=True, layout=None if is_key or len(shape) < 2 else _layout_of(leaf))
    as_numpy = isinstance(like, _NUMPY)
    return Wanted(stored, place, as_numpy, dtype, shape=None if shape == saved_shape else shape)


def _layout_of(leaf: Leaf) -> Layout | None:
    """The layout of a template's array of two axes or more; None if it has none, or that of the device."""
    like = leaf.value
    found = getattr(like, "format", None)
    if not isinstance(found, Format) or found.layout is None:
        return None
    layout = check_layout(found.layout, leaf.key)
    # Most templates are arrays with the layout that they have anyway, which is known for a CPU.
    usual = layout is not None and layout.major_to_minor == tuple(range(len(like.shape)))
    return None if usual and is_on_cpu(like.sharding) else layout


def _per_process_as_template(stored: StoredLeaf, leaf: Leaf) -> Wanted | Mismatch:
    """A value that differs between processes, or may: as it was saved. Anything but a JAX array marks its place."""
    like = leaf.value
    if stored.processes is not None and hasattr(like, "dtype") and not isinstance(like, np.ndarray | np.generic):
        found = f"{like.dtype}{list(like.shape)}; pass PerProcess(None) in its place"
        return wrong_kind(leaf.path, "a PerProcess value", found)
    if isinstance(stored, StoredArray) and not isinstance(stored.was, PerProcessRows | NumpyArray):
        return wrong_kind(leaf.path, _described(stored), repr(like))
    return Wanted(stored, as_numpy=True)


@lru_cache(maxsize=16)
def _key_dtype(impl: str) -> Any:
    """The dtype of PRNG keys; None if JAX does not have the implementation. No key is made, which would compile."""
    try:
        make = partial(jax.random.key, impl=impl)
        return jax.eval_shape(make, 0).dtype  # pyright: ignore[reportUnknownMemberType]  (its parameters)
    except ValueError:
        return None


def _plain_as_template(stored: StoredLeaf, leaf: Leaf, is_array: bool) -> Wanted | Mismatch:
    """The saved value where the template or the checkpoint has a plain value, converted to what the template has."""
    if not isinstance(stored, StoredArray):
        if is_array and (tuple(leaf.value.shape) != () or not _same_kind(stored.value, leaf.value.dtype)):
            wanted = f"{leaf.value.dtype}{list(leaf.value.shape)}"
            return wrong_kind(leaf.path, f"the value {show(stored.value):.60}", wanted)
        return Wanted(stored, like=leaf.value if is_array else None)
    if stored.spec.shape != () or isinstance(stored.was, PrngKeys) or not _same_kind(leaf.value, stored.spec.dtype):
        return wrong_kind(leaf.path, _described(stored), f"{show(leaf.value):.60}")
    return Wanted(stored, as_numpy=True, like=leaf.value)


def _same_kind(number: Any, dtype: Any) -> bool:
    return not is_prng_dtype(dtype) and kind_of_value(number) == kind_of(np.dtype(dtype)) != "other"


def _described(stored: StoredArray) -> str:
    if isinstance(stored.was, PrngKeys):
        return f"PRNG keys ({stored.was.impl})"
    return f"{stored.dtype}{list(stored.shape)}"


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


def abstract_leaf(w: Wanted) -> Any:
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
        dtype = _key_dtype(origin.impl)
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
