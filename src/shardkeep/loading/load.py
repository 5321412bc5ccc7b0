"""Loading: read the manifest → choose leaves and shardings → plan → read and check → put on devices → rebuild."""

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from jax.sharding import Mesh

from shardkeep.catalog import missing_first, open_checkpoint
from shardkeep.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    MissingLeafError,
    ProcessError,
    ShardkeepError,
    TemplateMismatchError,
    an,
    storage_error,
)
from shardkeep.loading.adapt import adapt, warn_numpy
from shardkeep.loading.blocks import BlockReader
from shardkeep.loading.broadcast import Broadcast, StartOver, agree, fewest_replicas
from shardkeep.loading.classes import warn_classes
from shardkeep.loading.derive import read_derived
from shardkeep.loading.hostcasts import sent_to_devices
from shardkeep.loading.matching import Wanted
from shardkeep.loading.pipeline import Means, load_to_devices
from shardkeep.loading.place import place
from shardkeep.loading.plan import plan_destinations
from shardkeep.loading.read import read_into, read_tables
from shardkeep.loading.remapping import as_missing, remapped, settle
from shardkeep.loading.request import LoadRequest, refuse_function
from shardkeep.loading.select import Choice, abstract_leaf, choose, choose_places, choose_process
from shardkeep.loading.shardings import Rules, as_mesh, as_partition_rules
from shardkeep.model.arrays import parse_dtype
from shardkeep.model.document import check_bools
from shardkeep.model.manifest import MANIFEST, Manifest, Tree
from shardkeep.model.naming import is_table
from shardkeep.model.tree import Skeleton
from shardkeep.processes.agreement import compare
from shardkeep.processes.operation import LEADER, Operation, join
from shardkeep.remap.expressions import DerivedArray
from shardkeep.remap.rules import Rule, as_rules
from shardkeep.runtime.budget import Claim, budget
from shardkeep.runtime.collector import collector
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.progress import NO_BAR, Bar
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.base import CONTROL, Store
from shardkeep.stores.location import Location, location, name_path
from shardkeep.targets.steady import TRIES, Attempt


def load(
    path: object,
    *,
    template: Any = None,
    prefix: str | None = None,
    include: str | re.Pattern[str] | None = None,
    mesh: Mesh | None = None,
    partition_rules: Rules | None = None,
    shardings: Any = None,
    dtype: Any = None,
    verify: bool = True,
    mmap: bool = True,
    broadcast: Literal["auto"] | bool = "auto",
    progress: bool = False,
    per_process: Literal["own", "all"] = "own",
    mapped: bool | None = None,
    remap: Rule | Sequence[Rule] | None = None,
    missing: Literal["error", "keep"] | Callable[..., object] = "error",
    extra: Literal["ignore", "error"] = "ignore",
) -> Any:
    """Load a checkpoint onto any mesh and any number of devices, and verify every byte that is read.

    Without `template`, `mesh` and `shardings`, JAX arrays are put on the default device. NumPy arrays are loaded as
    NumPy arrays, and plain values are returned unchanged. In a job with several JAX processes, all of them must call
    `load` with the same arguments; each reads only the bytes that its devices need.

    Args:
        path: The checkpoint, as a local path or a URL (`gs://`, `s3://`): a checkpoint directory, a safetensors file
            or a Hugging Face folder. Checkpoints of Orbax, PyTorch, Flax, Keras, NumPy, JAX's own serialization and
            eFormer can be loaded as well.
        template: A tree of arrays or `jax.ShapeDtypeStruct`s. The result has its structure, dtypes and shardings,
            including memory kinds (such as `pinned_host`) and the layouts of arrays and `Format`s. The template may
            be a part of the saved tree: other leaves are not read, and are listed in a log message at level INFO. Every
            array and plain value in the template must be in the checkpoint, with the same shape. Leaves that are not
            data, such as functions, are kept. Put `...` in place of a leaf or a subtree to skip it; it stays `...` in
            the result. `shardkeep.abstract` returns a template of the whole checkpoint.
        prefix: Which tree to load, if the directory has several. The default is the one saved without a prefix, or
            the only one.
        include: A regular expression. Only leaves whose `/`-joined key matches (`re.search`) are read. Without a
            template, dict entries without a matching leaf are dropped, and other positions (in lists, tuples and
            classes) become None. With a template, other leaves keep the template's value. It is an error if no leaf
            matches.
        mesh: The mesh to put arrays on. Without rules and shardings, arrays keep the sharding they were saved with. A
            dimension is replicated, with a warning, if the mesh does not have its axes or they do not divide it. If
            `mesh` is None, `PartitionSpec`s refer to the mesh set with `jax.set_mesh`; if there are no specs, that mesh
            has no effect.
        partition_rules: Pairs of a regular expression and a `PartitionSpec` for `mesh`. The first rule that matches
            the `/`-joined key (`re.search`) wins. Specs are cut to the rank of the array.
        shardings: One sharding for all arrays, a tree of shardings with the structure of the checkpoint, or a dict by
            key (`a/b` or `a.b`). An entry applies to everything below its key. Values are `Sharding`s (memory kinds are
            kept), `PartitionSpec`s for `mesh`, `jax.experimental.layout.Format`s, functions of the loaded array, or
            None. `partition_rules` take precedence.
        dtype: The dtype to cast arrays of the same kind to: a float dtype casts floats, an integer dtype integers. A
            template's dtypes take precedence.
        verify: Whether to check the data against the stored digests.
        mmap: Whether arrays may be memory-mapped from local files where that avoids a copy. Do not modify the files
            in place while such arrays are in use; replacing or deleting the checkpoint is safe.
        broadcast: In a job with several processes, whether a part of an array that several processes need is read by
            only one of them and sent to the others with JAX's collectives. The processes share the reading about
            equally. "auto" broadcasts parts that at least four processes need, if the checkpoint is in a bucket or on a
            network file system and `load` is called on the main thread. Each process always reads by itself: leaves
            that the processes load differently, `PerProcess` values, and parts that no other process needs.
        progress: Whether to show a progress bar.
        per_process: What to return for a `PerProcess` leaf. "own" returns the value that this process saved; the
            number of processes must be the same as when it was saved. "all" returns the list of all processes' values.
        mapped: The old name of `mmap`.
        remap: Rules from `shardkeep.remap`, applied in order to the tree of the checkpoint. `template`, `include`,
            `partition_rules` and `shardings` then refer to the resulting tree, which is also what `load` returns
            without a template. Only the bytes that are needed are read, for example one layer of a stack.
        missing: How to handle leaves of the template that are not in the checkpoint. "error" raises an error, and
            "keep" keeps the template's values. A function is called with the key and the template's array or
            `jax.ShapeDtypeStruct`, and returns the array. Leaves that do not come from the checkpoint are logged.
        extra: How to handle leaves of the checkpoint that are not in the template: "ignore" or "error".

    Returns:
        The tree.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at `path`.
        IntegrityError: A file is missing, truncated or damaged.
        MissingLeafError: The template has leaves that are not in the checkpoint, or `include` matches nothing.
        TemplateMismatchError: Shapes or kinds of leaves differ from the template's, or the checkpoint has further
            leaves and `extra="error"`.
        RemapError: A rule cannot be applied. No array was read.
        ShardingError: A sharding does not fit its array or the mesh.
        ProcessError: A `PerProcess` leaf was saved by a different number of processes, or another process failed.

    >>> import jax.numpy as jnp, shardkeep
    >>> _ = shardkeep.save(tmp / "state", {"layers": [{"w": jnp.ones(3)}, {"w": jnp.zeros(3)}], "step": 7})
    >>> shardkeep.load(tmp / "state", include="layers/1")  # "step" is dropped, layers[0] becomes None
    {'layers': [None, {'w': Array([0., 0., 0.], dtype=float32)}]}
    >>> shardkeep.load(tmp / "state", template={"step": 0})
    {'step': 7}
    """
    with join(f"loading {name_path(path)}") as operation:
        place = location(path, "load(path)")
        with missing_first(place):
            request = make_request(
                template=template,
                prefix=prefix,
                include=include,
                mesh=mesh,
                partition_rules=partition_rules,
                shardings=shardings,
                dtype=dtype,
                verify=verify,
                mmap=mmap if mapped is None else mapped,
                broadcast=broadcast,
                progress=progress,
                per_process=per_process,
                remap=remap,
                missing=missing,
                extra=extra,
            )
            skeleton, leaves, _ = load_request(place, request, operation)
    return skeleton.rebuild(leaves)


def make_request(
    *,
    template: object,
    prefix: str | None,
    include: str | re.Pattern[str] | None,
    mesh: Mesh | None,
    partition_rules: Rules | None,
    shardings: object,
    dtype: object,
    verify: bool,
    mmap: bool,
    broadcast: Literal["auto"] | bool,
    progress: bool,
    per_process: Literal["own", "all"],
    remap: object,
    missing: object,
    extra: str,
) -> LoadRequest:
    """The arguments of `load`, checked."""
    verify, mmap, progress = check_bools(verify=verify, mmap=mmap, progress=progress)
    if not isinstance(broadcast, bool | np.bool_) and broadcast != "auto":
        raise ValueError(f'broadcast must be "auto", True or False, not {broadcast!r}')
    if per_process not in ("own", "all"):
        raise ValueError(f'per_process must be "own" or "all", not {per_process!r}')
    if extra not in ("ignore", "error"):
        raise ValueError(f'extra must be "ignore" or "error", not {extra!r}')
    if callable(template):
        refuse_function(template)
    return LoadRequest(
        template=template,
        prefix=prefix,
        include=None if include is None else _pattern(include),
        mesh=None if mesh is None else as_mesh(mesh),
        rules=None if partition_rules is None else as_partition_rules(partition_rules),
        shardings=shardings,
        dtype=None if dtype is None else parse_dtype(dtype),
        verify=verify,
        mmap=mmap,
        broadcast="auto" if broadcast == "auto" else bool(broadcast),
        verbose=progress,
        per_process=per_process,
        remap=() if remap is None else as_rules(remap),
        missing="error" if missing == "error" else as_missing(missing),
        extra=extra,
    )


def abstract(
    path: object,
    *,
    prefix: str | None = None,
    include: str | re.Pattern[str] | None = None,
    mesh: Mesh | None = None,
    partition_rules: Rules | None = None,
    shardings: Any = None,
    dtype: Any = None,
) -> Any:
    """Return the tree that `load` would return, with a `jax.ShapeDtypeStruct` for each array. No array is read.

    Edit the result and pass it to `load` as `template`: change dtypes and shardings, put `...` in place of leaves or
    subtrees to skip, or use its parts in another structure. Unchanged, it loads the tree as it was saved.

    Args:
        path: The checkpoint, as for `load`.
        prefix: Which tree, if the directory has several. The default is the one saved without a prefix, or the only
            one.
        include: A regular expression that selects leaves by their `/`-joined key, as for `load`.
        mesh: The mesh for the shardings of the `ShapeDtypeStruct`s. If it is None, `PartitionSpec`s refer to the mesh
            set with `jax.set_mesh`; without rules and shardings, the structs then have no shardings.
        partition_rules: Pairs of a regular expression and a `PartitionSpec`, as for `load`.
        shardings: A tree or dict of shardings, as for `load`, but without functions. Memory kinds and layouts are kept.
        dtype: The dtype for arrays of the same kind, as for `load`.

    Returns:
        The tree. PRNG keys are `ShapeDtypeStruct`s with a key dtype. NumPy arrays are `NumpyStruct`s, a subclass for
        which `load` returns NumPy arrays. Plain values are returned unchanged.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at `path`.
        MissingLeafError: `include` matches nothing.
        ShardingError: A sharding does not fit its array or the mesh.

    >>> import jax.numpy as jnp, shardkeep
    >>> _ = shardkeep.save(tmp / "trained", {"params": {"w": jnp.ones((4, 2))}, "momentum": jnp.zeros((4, 2))})
    >>> template = shardkeep.abstract(tmp / "trained")
    >>> template["params"]["w"]
    ShapeDtypeStruct(shape=(4, 2), dtype=float32)
    >>> template["momentum"] = ...
    >>> shardkeep.load(tmp / "trained", template=template)["momentum"]
    Ellipsis
    """
    _, manifest = open_checkpoint(location(path, "abstract(path)"))
    request = LoadRequest(
        prefix=prefix,
        include=_pattern(include),
        mesh=None if mesh is None else as_mesh(mesh),
        rules=None if partition_rules is None else as_partition_rules(partition_rules),
        shardings=shardings,
        dtype=None if dtype is None else parse_dtype(dtype),
    )
    _, choice = _choose(manifest, request)
    return choice.skeleton.rebuild([abstract_leaf(w) for w in choice.wanted if w is not None])


def _pattern(include: Any) -> re.Pattern[str] | None:
    if include is None or isinstance(include, re.Pattern):
        return cast("re.Pattern[str] | None", include)
    if not isinstance(include, str):
        raise TypeError(f"include must be a regular expression (str or re.Pattern), not {an(type(include).__name__)}")
    try:
        return re.compile(include)
    except re.error as error:
        raise ValueError(f"include={include!r} is not a valid regular expression: {error}") from None


def load_request(path: Location, request: LoadRequest, operation: Operation) -> tuple[Skeleton, list[Any], Tree]:
    """The structure, the leaves and the saved tree. Starts over if the checkpoint is replaced meanwhile."""
    operation.what = f"loading {path}"
    if operation.size > 1:
        asked = (f"prefix {request.prefix!r}", f"include {request.include}", f"broadcast {request.broadcast}")
        asked = (*asked, f"remap {request.remap}", f"extra {request.extra}", f"missing {request.missing}")
        compare(operation, [f"path {path}", *asked, f"per_process {request.per_process}"])
    manifest = None
    for _ in range(TRIES):
        store, manifest, replicas = _open_same(path, request, operation)
        try:
            loaded = None if manifest is None else _try_load(path, store, manifest, request, operation, replicas)
        except StartOver:  # it has taken part in the message of all
            continue
        everyone = operation.gather(loaded is not None)
        if operation.share(all(everyone)) and loaded is not None:
            return loaded
    # The leader may have seen the same checkpoint each time, and another process a different one.
    seen = operation.gather(manifest.save_id if manifest is not None else None)
    different = next((i for i, found in enumerate(seen) if found != seen[LEADER]), None)
    if operation.leads and different is not None:
        raise ProcessError(
            f"loading {path}: processes {LEADER} and {different} do not see the same checkpoint. "
            "All processes must load from the same shared directory or bucket"
        )
    operation.share()
    raise IntegrityError(
        f"{path} was replaced {TRIES} times while it was being loaded; try again when no save is running"
    )


def _open_same(path: Location, request: LoadRequest, operation: Operation) -> tuple[Store, Manifest | None, int | None]:
    """The checkpoint that the leader sees; no manifest if this process sees a different one.

    The number is that of `fewest_replicas`, which the leader decides.
    """
    if operation.leads:
        store, manifest = open_checkpoint(path)
        replicas = None if operation.size == 1 else fewest_replicas(request, store, operation.size)
        operation.share([manifest.save_id, replicas])
        return store, manifest, replicas
    expected, replicas = operation.share()
    try:
        store, manifest = open_checkpoint(path)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{error}. Process {LEADER} sees a checkpoint there: all processes must load from the same shared "
            "directory or bucket"
        ) from error
    return store, manifest if manifest.save_id == expected else None, replicas


def _try_load(
    path: Location,
    store: Store,
    manifest: Manifest,
    request: LoadRequest,
    operation: Operation,
    replicas: int | None,
) -> tuple[Skeleton, list[Any], Tree] | None:
    """What was asked for, or None if the checkpoint was replaced meanwhile."""
    loaded = None
    try:
        with Attempt(manifest, lambda: open_checkpoint(path)[1]) as attempt:
            tree, choice = _choose(manifest, request)
            choose_process(choice, request, manifest.path, operation.index, operation.size)
            if choice.lacking or choice.keeping:
                settle(choice, request)
            wanted = [w for w in choice.wanted if w is not None]
            at_once = request.policy.in_flight or max(len(wanted), 1)
            broadcast = None if replicas is None else agree(operation, wanted, request, replicas, at_once)
            values = iter(read_leaves(store, tree, wanted, request, broadcast))
            leaves = [choice.kept[i] if w is None else next(values) for i, w in enumerate(choice.wanted)]
            loaded = choice.skeleton, leaves, tree
            attempt.sure = _was_one_state(store, tree, request)
    except (MissingLeafError, TemplateMismatchError) as error:
        if not error.told:  # another process has added the path to its own error
            error.args = (f"{manifest.path}: {error}",)
        raise
    except OSError as error:
        if isinstance(error, ShardkeepError | FileNotFoundError):
            raise
        raise storage_error(error, f"loading {path}", "Nothing was loaded") from error
    return None if attempt.replaced else loaded


def _was_one_state(store: Store, tree: Tree, request: LoadRequest) -> bool:
    """Whether what was read is known to be of one state, without a look at the manifest.

    Exchange files keep their names. In a directory a save may give the names of a replaced tree to its own files, for
    other programs, once it is committed (never in a bucket); digests tell them apart, where there are any.
    """
    if os.path.basename(store.control) != CONTROL:
        return False
    return store.traits.late_requests or (request.verify and tree.format != "foreign") or store.size(MANIFEST) is None


def read_leaves(
    store: Store, tree: Tree, wanted: Sequence[Wanted], request: LoadRequest, broadcast: Broadcast | None = None
) -> list[Any]:
    """The values of the leaves, in order: plan → read → place → adapt. At most `policy.in_flight` are read at once."""
    step = request.policy.in_flight or max(len(wanted), 1)
    mapped = store.traits.costly_requests or (request.mmap and store.mappable)
    reader = BlockReader(store, tree.files, tree.compression, request.verify, mapped)
    bar = Bar(f"loading {store.url}", sum(w.stored.nbytes for w in wanted)) if request.verbose else NO_BAR
    values: list[Any] = []
    with Scope(f"loading {store.url}") as scope, bar as progress:
        claim = scope.add(Claim(budget, scope))
        crew = scope.add(Crew(store.traits.concurrency))
        means = Means(reader, request, crew, progress, claim, broadcast)
        if any(is_table(file.name) for file in tree.files):
            read_tables([each for w in wanted for each in w.needed], crew)
        steps = (
            broadcast.steps(wanted, step) if broadcast else [wanted[i : i + step] for i in range(0, len(wanted), step)]
        )
        for some in steps:
            placed = _read(some, means)
            # Nothing is claimed here, where functions of the caller's run: they may wait for another load or save.
            values += [adapt(w, value, request) for w, value in zip(some, placed, strict=True)]
    warn_numpy(wanted, values)
    return values


def _read(wanted: Sequence[Wanted], means: Means) -> list[Any]:
    """The leaves. Those for devices that copy go through a pipeline."""
    sent = sent_to_devices(wanted, means.request)
    here = [w for i, w in enumerate(wanted) if i not in sent] if sent else wanted
    owners = means.broadcast.owners(dict(enumerate(here))) if means.broadcast else None
    with collector.paused():
        destinations, fetches = plan_destinations(here, owners.reads if owners else {})
    # The destinations become the loaded arrays. What is needed beside them is claimed in steps.
    claim = partial(means.claim.change, what=means.claim.scope.what)
    if means.request.remap:
        derived = [(destinations[i], w.own) for i, w in enumerate(here) if isinstance(w.stored, DerivedArray)]
        read_derived(means.reader, derived, destinations, fetches, budget.limit, means.crew, means.progress, claim)
    else:
        read_into(means.reader, destinations, fetches, budget.limit, means.crew, means.progress, claim)
    if means.broadcast and owners:
        claim(means.broadcast.nbytes)
        means.broadcast.complete(owners, destinations, dict(enumerate(here)), means.progress)
    means.claim.release()
    placed = place(here, destinations)
    if not sent:
        return placed
    arrays, others = load_to_devices(sent, means), iter(placed)
    return [arrays[i] if i in sent else next(others) for i in range(len(wanted))]


def _choose(manifest: Manifest, request: LoadRequest) -> tuple[Tree, Choice]:
    """The saved tree and what to load of it. Classes that cannot be rebuilt are named in a warning."""
    tree = manifest.tree(request.prefix)
    prefix = next((name for name, candidate in manifest.trees.items() if candidate is tree), request.prefix or "")
    if request.remap:
        tree = remapped(tree, request).tree
    choice = choose(tree, request)
    choose_places([w for w in choice.wanted if w is not None], prefix, request)
    if replaced := choice.skeleton.replaced():
        warn_classes(manifest.path, replaced)
    return tree, choice
