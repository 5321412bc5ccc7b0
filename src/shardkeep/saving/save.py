"""Saving: flatten → take_snapshot (the only blocking step) → store the snapshot (`store.py`)."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from shardkeep.catalog import new_target
from shardkeep.errors import CheckpointNotFoundError, PrefixError, TreeError, an
from shardkeep.layouts.plan import Draft
from shardkeep.model.arrays import is_prng_dtype
from shardkeep.model.document import check_bools, check_step
from shardkeep.model.manifest import Tree, check_prefix
from shardkeep.model.metadata import check_metadata
from shardkeep.model.perprocess import PerProcess
from shardkeep.model.reports import SaveReport
from shardkeep.model.tree import Leaf, flatten
from shardkeep.processes.agreement import compare
from shardkeep.processes.assignment import share_out
from shardkeep.processes.operation import Operation, join
from shardkeep.runtime.budget import Claim, budget
from shardkeep.runtime.collector import collector
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.priority import priority
from shardkeep.runtime.progress import NO_BAR, Bar
from shardkeep.runtime.scopes import Resource, Scope
from shardkeep.saving.callbacks import Callback
from shardkeep.saving.donation import Staging, donations
from shardkeep.saving.multiprocess import outline
from shardkeep.saving.pending import BackgroundSave, PendingSave
from shardkeep.saving.snapshot import (
    Assignment,
    Examined,
    examine,
    staged_sizes,
    take_snapshot,
)
from shardkeep.saving.store import SaveJob
from shardkeep.saving.transfer import Transfers
from shardkeep.stores.location import location, name_path
from shardkeep.targets.base import Target
from shardkeep.targets.running import now
from shardkeep.targets.transaction import refuse_existing

_LEAST = 4  # the part of the budget that transfers get, if other arrays of the tree take more than the rest

FormatName = Literal["safetensors", "zarr", "tensorstore"]
"""How to store arrays: as "safetensors" (a few packed files) or "zarr" (an array per leaf, alias "tensorstore")."""

_HEAD_START = 0.0005  # seconds: without it, planning keeps the interpreter, and `save_async` returns 5 ms later


def save(
    path: object,
    tree: Any,
    *,
    format: FormatName = "safetensors",
    prefix: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    compression: Literal["zstd"] | None = None,
    max_shard_size: int | str | None = None,
    progress: bool = False,
    step: int | None = None,
    trees: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Save a PyTree and return once the checkpoint is committed and durable.

    If this raises an error, a previous checkpoint at `path` is unchanged, unless the message says otherwise. In a job
    with several JAX processes, all of them must call `save` with the same arguments.

    Args:
        path: Where to save: a local path, or a URL such as "gs://bucket/run/step_100" or "s3://…". A path that ends in
            `.safetensors` writes plain safetensors files with Hugging Face names; any other path becomes a checkpoint
            directory. A new path with the extension of another file format, such as `.npz` or `.pt`, is refused.
        tree: Any PyTree of JAX arrays, NumPy arrays and plain Python values.
        format: How to store arrays in a checkpoint directory: "safetensors" (a few packed files) or "zarr" (a zarr v2
            array for each leaf). "tensorstore" is an alias for "zarr".
        prefix: The name of this tree, if several trees share one directory. Saving one prefix does not affect the
            others.
        metadata: A dict to store with the tree; `inspect(path).metadata` returns it. NumPy and JAX scalars are stored
            as Python numbers, tuples as lists, paths as strings, enums as their values, and dates as ISO strings. NaN
            and infinities are kept. Anything else without an obvious JSON form raises a `MetadataError`.
        overwrite: Whether to replace an existing tree. If False, saving over a complete tree raises a
            `CheckpointExistsError`; a tree with missing files, or files of the wrong size (see `exists`), is replaced
            anyway. The old tree is removed only after the new one is committed.
        compression: "zstd" compresses arrays in the zarr format. None stores them uncompressed.
        max_shard_size: For a path that ends in `.safetensors`, the maximum size of the arrays in one file: a number of
            bytes, or a string such as "5GB" (the default). Larger trees are split into several files with an index.
        progress: Whether to show a progress bar.
        step: The training step to record with the tree. `latest` orders checkpoints by it.
        trees: Further trees to save in the same commit, as a dict from prefixes to PyTrees: either all trees are saved
            or none. Each is stored as if it was saved with `prefix=`, and is loaded with `load(path, prefix=…)`.
            `metadata` is stored with `tree` only. Existing trees with other prefixes are kept. With `overwrite=False`,
            the save is refused if any of the trees exists. A path that ends in `.safetensors` holds a single tree, so
            `trees` raises a `ValueError` there.

    Returns:
        A `SaveReport` with the bytes and files written and the time taken.

    >>> import jax.numpy as jnp, shardkeep
    >>> report = shardkeep.save(tmp / "step_100", {"w": jnp.ones((4, 4)), "step": 100})
    >>> shardkeep.load(tmp / "step_100")["step"]
    100

    State, averaged weights and the data iterator's position, in one commit:

    >>> trees = {"ema": {"w": jnp.zeros((4, 4))}, "data": {"position": 6400}}
    >>> report = shardkeep.save(tmp / "step_200", {"w": jnp.ones((4, 4))}, step=200, trees=trees)
    >>> shardkeep.load(tmp / "step_200", prefix="data")
    {'position': 6400}
    """
    with join(f"saving to {name_path(path)}") as operation:
        target = new_target(location(path, "save(path, tree)"), format, compression, max_shard_size)
        overwrite, progress = check_bools(overwrite=overwrite, progress=progress)
        request = SaveRequest(target, tree, prefix, metadata, overwrite, verbose=progress, step=step, trees=trees)
        return run_save(request, operation)


def save_async(
    path: object,
    tree: Any,
    *,
    format: FormatName = "safetensors",
    prefix: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    compression: Literal["zstd"] | None = None,
    max_shard_size: int | str | None = None,
    progress: bool = False,
    copy: bool = False,
    step: int | None = None,
    trees: Mapping[str, Any] | None = None,
) -> PendingSave:
    """Like `save`, but return after the snapshot and write in the background.

    The tree can be donated, deleted or modified as soon as this returns. The exception is host memory that a JAX array
    on CPU aliases: it must not change before `wait()` returns. shardkeep detects the usual ways to create such arrays
    (`device_put`, dlpack) and copies them.

    Errors in the arguments or the tree are raised immediately. Later errors are logged as they occur and raised by
    `wait()`; if `wait()` is never called, they are reported when the program exits. Saves to the same path are
    committed in the order of the calls.

    Args:
        path: See `save`.
        tree: See `save`.
        format: See `save`.
        prefix: See `save`.
        metadata: See `save`. A JAX scalar is fetched from its device before this returns.
        overwrite: See `save`.
        compression: See `save`.
        max_shard_size: See `save`.
        progress: See `save`.
        step: See `save`.
        copy: Whether to copy every array before this returns, even where shardkeep considers it unnecessary. This costs
            time and memory, and is only needed for aliased memory that shardkeep cannot detect.
        trees: See `save`. They are part of the snapshot, so they can be donated, deleted or modified as well.

    Returns:
        A `PendingSave`. Call its `wait()` to get the report, or the error if the save failed.

    >>> import jax.numpy as jnp, shardkeep
    >>> pending = shardkeep.save_async(tmp / "step_300", {"w": jnp.ones((4, 4))}, trees={"ema": {"w": jnp.ones(4)}})
    >>> pending.wait().files
    2
    """
    with join(f"saving to {name_path(path)}") as operation:
        target = new_target(location(path, "save_async(path, tree)"), format, compression, max_shard_size)
        overwrite, progress, copy = check_bools(overwrite=overwrite, progress=progress, copy=copy)
        request = SaveRequest(
            target, tree, prefix, metadata, overwrite, verbose=progress, copy=copy, step=step, trees=trees
        )
        return PendingSave(start_save(request, operation))


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of a save.

    `indexed`: indexes for other programs may list the tree. `on_commit` is called after the commit; calls of saves with
    the same `order` start in the order in which the saves were called. `checksums`: those of this process, to be added
    to those in the metadata. `copy`: copy every array. `trees`: further trees by prefix,
    committed together with `tree`. `late` is called once, on the leader, before anything is written; in the background
    if the save is. What it returns is added to the metadata of `tree`, and what it raises prevents the commit. `check`:
    see `store_snapshot`. `replaces_all`: see `Transaction`; needs `overwrite`.
    """

    target: Target
    tree: Any
    prefix: str | None = None
    metadata: Mapping[str, Any] | None = None
    overwrite: bool = False
    indexed: bool = True
    on_commit: Callable[[], None] | None = None
    order: object = None
    verbose: bool = False
    checksums: Mapping[str, str] = field(default_factory=dict[str, str])
    copy: bool = False
    step: int | None = None
    trees: Mapping[str, Any] | None = None
    late: Callable[[], Mapping[str, Any]] | None = None
    check: Callable[[Tree], None] = lambda _: None
    replaces_all: bool = False


def run_save(request: SaveRequest, operation: Operation) -> SaveReport:
    """Save a tree in the foreground. `CallbackError` after the commit if the callback raises something."""
    what = f"saving to {request.target.where}"
    operation.what = what
    with Scope(what) as outer:
        with Scope(what) as scope:
            # Nothing is being trained meanwhile: one more thread keeps the disk busier.
            crew = Crew(request.target.store.traits.concurrency, more=1)
            claim = Claim(budget, scope)
            job, examined = _prepare(request, operation, scope, crew, claim)
            shares = _share(job, examined) if operation.size > 1 else None
            moved = [size for size, _, where in staged_sizes(examined, shares, operation.index) if where == "device"]
            if moved:
                claim.take(_make_room(job, sum(moved), 0), f"the save to {request.target.where}")
            _take_snapshot(job, examined, shares)
            callback = _queue_callback(request, outer) if request.on_commit and operation.leads else None
            job.entry.enter()
            report = job.run_with_bar(request.verbose)
        # All that the save has taken is given back by now: the callback is the user's own time.
        operation.close()
        failure = None if callback is None else callback.run()
    if failure is not None:
        raise failure
    return report


def start_save(request: SaveRequest, operation: Operation) -> BackgroundSave:
    """Save a tree in the background: returns after the snapshot."""
    target = request.target
    what = f"saving to {target.where}"
    operation.what = what
    with Scope(what) as outer, Scope(what) as scope:
        crew = Crew(target.store.traits.concurrency, background=True)
        claim, staging = Claim(budget, scope), Staging(crew, request.copy)
        job, examined = _prepare(request, operation, scope, crew, claim, staging)
        if operation.size == 1 and not request.overwrite:  # otherwise one process may see what another does not see
            with suppress(CheckpointNotFoundError):  # a directory of checkpoints is not a checkpoint
                refuse_existing(target, [draft.prefix for draft in job.drafts])
        job.outlives_call = True
        shares = _share(job, examined) if operation.size > 1 else None
        sized = staged_sizes(examined, shares, operation.index)
        nbytes = sum(nbytes for nbytes, _, _ in sized)
        moved = [size for size, _, where in sized if where == "device"]
        if moved:
            nbytes = _make_room(job, sum(moved), nbytes - sum(moved))
        claim.take(nbytes, f"the save to {target.where}", uses_idle=True)
        if operation.size == 1:  # several processes each have their own loop, but save as one
            arrays = [(n, array) for n, array, where in sized if where == "cpu" and isinstance(array, jax.Array)]
            staging.watched = donations.watch(pair for pair in arrays if not is_prng_dtype(pair[1].dtype))
        crew.start()  # now: at the end of the program no thread can be started
        _take_snapshot(job, examined, shares, staging)
        callback = _queue_callback(request, outer) if request.on_commit and operation.leads else None
        job.entry.enter()
        save = BackgroundSave(target.where)
        save.start(outer, scope, partial(_work, job, save, request.verbose), callback, donations.prepare)
        operation.over = True  # from here on, its thread takes part: it tells the other processes what goes wrong
        if job.transfers is not None and job.transfers.in_batches:
            _await_batches(job.transfers)
        return save


def _await_batches(transfers: Transfers) -> None:
    """Wait until the thread of the save has taken the last batch from the accelerators."""
    try:
        transfers.wait(until_safe=True)
    except BaseException:
        transfers.cancel()  # its thread fails then, instead of reading arrays that the caller may donate
        raise


def _make_room(job: SaveJob, moved: int, beside: int) -> int:
    """The host memory to claim for `moved` bytes from accelerators, which go in batches if there is not enough."""
    job.transfers = Transfers()
    room = max(budget.limit - beside, budget.limit // _LEAST)
    if moved > room:
        job.transfers.room = room
    return beside + min(moved, room)


def _work(job: SaveJob, save: BackgroundSave, verbose: bool) -> SaveReport:
    """A save in the background, once it has a thread."""

    def progress(nbytes: int) -> None:
        show(nbytes)
        save.mention_exit()

    time.sleep(_HEAD_START)
    priority.enable_pauses()
    priority.lower()  # and the crew's with it: the snapshot is taken, so nothing waits for these threads
    bar = Bar(f"saving {save.path}", job.snapshot.nbytes) if verbose else NO_BAR
    try:
        with bar as show:
            return job.run(progress)
    except BaseException as error:
        job.operation.fail(error)
        raise
    finally:
        job.operation.close()


def _prepare(
    request: SaveRequest, operation: Operation, scope: Scope, crew: Crew, *memory: Resource
) -> tuple[SaveJob, Examined]:
    """Check the arguments, flatten the trees and look at their leaves. Nothing is written."""
    started = time.perf_counter()
    target = request.target
    trees = {"" if request.prefix is None else check_prefix(request.prefix): request.tree}
    if request.trees:
        trees |= _further_trees(request, *trees)
    metadata = {} if request.metadata is None else check_metadata(request.metadata)
    step, save_id, created = check_step(request.step), os.urandom(16).hex(), now()
    drafts: list[Draft] = []
    leaves: list[Leaf] = []
    for prefix, tree in trees.items():
        first = len(leaves)
        try:
            skeleton, found = flatten(tree, serialize=True)
        except TreeError as error:
            if not prefix or len(trees) == 1:
                raise
            raise type(error)(f"{error} (in the tree with prefix {prefix!r})") from error
        skeleton.mention_factories()
        leaves += found if len(trees) == 1 else [Leaf(leaf.path, leaf.value, prefix) for leaf in found]
        own = slice(first, len(leaves))
        drafts.append(Draft(save_id, prefix, skeleton, metadata, created, request.indexed, step, own))
        metadata = {}  # only the main tree, which is the first one, has it
    if target.layout.gathers:
        arrays = [leaf.path for leaf in leaves if isinstance(leaf.value, jax.Array | np.ndarray | PerProcess)]
        target.layout.check(arrays)
    job = SaveJob.prepare(
        target,
        drafts,
        operation,
        scope,
        crew,
        started,
        memory=memory,
        overwrite=request.overwrite,
        replaces_all=request.replaces_all,
        checksums=request.checksums,
        check=request.check,
        late=request.late,
    )
    return job, examine(leaves, operation.size)


def _further_trees(request: SaveRequest, main: str) -> dict[str, Any]:
    """The trees to commit together with the one of prefix `main`, in an order that is the same on every process."""
    if not isinstance(request.trees, Mapping):
        raise TypeError(f"trees must be a dict from prefixes to trees, not {an(type(request.trees).__name__)}")
    if request.target.layout.gathers:
        raise ValueError(
            f"{request.target.where}: exchange files hold a single tree, so `trees` cannot be saved with it; save to a "
            "directory, or each tree to a path of its own. Nothing was written"
        )
    trees: dict[str, Any] = {}
    for given, tree in request.trees.items():
        prefix = check_prefix(given)
        if prefix == main or prefix in trees:
            what = f"prefix {prefix!r}" if prefix else "no prefix"
            raise PrefixError(f"two of the trees to save have {what}; each needs its own. Nothing was written")
        trees[prefix] = tree
    return dict(sorted(trees.items()))


def _share(job: SaveJob, examined: Examined) -> Assignment:
    """Which of several processes writes what: from the shardings alone, so all come to the same result."""
    operation, gathers = job.operation, job.target.layout.gathers
    if gathers:  # first: in a collective they would wait forever
        compare(operation, [f"path {job.target.where}", *outline(examined.leaves)])
    return share_out(examined.arrays, operation.size, gathered=gathers)


def _take_snapshot(
    job: SaveJob, examined: Examined, shares: Assignment | None = None, staging: Staging | None = None
) -> None:
    """Take the part of the tree that this process writes to host memory."""
    operation, gathers = job.operation, job.target.layout.gathers
    with collector.paused():
        job.snapshot = take_snapshot(
            examined,
            staging,
            job.transfers,
            index=operation.index,
            size=operation.size,
            gathered=gathers,
            shares=shares,
        )
    examined.release()  # do not keep the caller's arrays longer than the snapshot needs
    if staging is not None and job.transfers is not None and not job.transfers.in_batches:
        job.transfers.wait(until_safe=True)
    job.snapshot_seconds = time.perf_counter() - job.started


def _queue_callback(request: SaveRequest, outer: Scope) -> Callback:
    """The callback in its place among those of the same order. Only process 0 calls it."""
    assert request.on_commit is not None
    callback = outer.add(Callback(request.on_commit, request.order or object(), request.target.where, outer))
    callback.enter()
    return callback
