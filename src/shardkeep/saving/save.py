"""Saving: flatten → take_snapshot (the only blocking step) → plan → write → sync → commit."""

import datetime
import errno
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from shardkeep.catalog import new_target
from shardkeep.errors import (
    AccessError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ProcessError,
    ShardkeepError,
    storage_error,
)
from shardkeep.foreign.registry import is_recognized
from shardkeep.layouts.plan import Draft
from shardkeep.model.document import check_step
from shardkeep.model.manifest import check_prefix
from shardkeep.model.metadata import check_metadata, encode_metadata
from shardkeep.model.perprocess import PerProcess
from shardkeep.model.reports import SaveReport
from shardkeep.model.tree import Leaf, flatten, to_json
from shardkeep.processes.agreement import compare
from shardkeep.processes.operation import Operation, join
from shardkeep.runtime.collector import collector
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.memory import Claim, budget
from shardkeep.runtime.priority import priority
from shardkeep.runtime.progress import Bar, Progress
from shardkeep.runtime.save_queue import QueueEntry
from shardkeep.runtime.scopes import Scope
from shardkeep.saving.callbacks import Callback
from shardkeep.saving.donation import donations
from shardkeep.saving.parts import close, describe, hand_in, outline, settle
from shardkeep.saving.pending import BackgroundSave, PendingSave
from shardkeep.saving.snapshot import Snapshot, is_prng_dtype, refuse_unsupported, staged_sizes, take_snapshot
from shardkeep.saving.write import NewFiles, write_files
from shardkeep.stores.location import location, name_path
from shardkeep.targets.transaction import Target, Turn, begin, commit, leave, outcome, refuse_existing, refuse_foreign

_NOTHING = Snapshot((), ())

FormatName = Literal["safetensors", "zarr", "tensorstore"]


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
) -> SaveReport:
    """Save a PyTree and return once the checkpoint is committed and durable.

    If this raises, whatever was at `path` before is unchanged.

    Args:
        path: Where the checkpoint goes: a local path, or a URL such as "gs://bucket/run/step_100" or "s3://…". A path
            that ends in `.safetensors` gives plain safetensors files with Hugging Face names; any other path is a
            checkpoint directory.
        tree: Any PyTree of JAX arrays, NumPy arrays and plain Python values.
        format: How arrays are stored in a checkpoint directory: "safetensors" (a few packed files) or "zarr" (a zarr v2
            array for each leaf). "tensorstore" is another name for "zarr".
        prefix: The name of this tree, if several trees share one directory. Saving to one prefix leaves the others
            alone.
        metadata: A dict to store with the tree; `inspect(path).metadata` returns it. NumPy and JAX scalars become
            Python numbers, tuples lists, paths strings, enums their values, dates ISO strings; NaN and infinities are
            kept. Anything else without an obvious JSON form is a `MetadataError`.
        overwrite: Whether to replace the tree that is already there. If False, that is a `CheckpointExistsError`,
            unless files of that tree are missing or have the wrong size (see `exists`): then it is replaced anyway.
            The old tree is removed after the new one is committed.
        compression: "zstd" compresses arrays in the zarr format. None stores them as they are.
        max_shard_size: For a path that ends in `.safetensors`: the most bytes of arrays in one file, as a number or a
            string such as "5GB", which is the default. Larger trees are split into several files with an index.
        progress: Whether to show a progress bar.
        step: The training step, which is recorded with the tree. `latest` orders checkpoints by it.

    Returns:
        A `SaveReport` with the bytes and files written and the time it took.

    >>> import jax.numpy as jnp, shardkeep
    >>> report = shardkeep.save(tmp / "step_100", {"w": jnp.ones((4, 4)), "step": 100})
    >>> shardkeep.load(tmp / "step_100")["step"]
    100
    """
    with join(f"saving to {name_path(path)}") as operation:
        target = new_target(location(path, "save(path, tree)"), format, compression, max_shard_size)
        request = SaveRequest(target, tree, prefix, metadata, overwrite, verbose=progress, step=step)
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
) -> PendingSave:
    """Like `save`, but return after the snapshot and write in the background.

    The tree may be donated, deleted or changed as soon as this returns. The exception is host memory that a JAX array
    on CPU aliases: it must not change before `wait()` returns. shardkeep detects the usual ways to create such arrays
    (`device_put`, dlpack) and copies them.

    Errors in the arguments or the tree are raised here. Later errors are raised by `wait()`, logged at once, and
    reported when the program ends if `wait()` was never called. Saves to one path are committed in the order of the
    calls.

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
        copy: Whether to copy every array before this returns, also those that shardkeep would not have to copy. This
            costs time and memory, and is only needed for aliased memory that shardkeep cannot detect.

    Returns:
        A `PendingSave`. Call `wait()` on it to find out how the save ended.

    >>> import jax.numpy as jnp, shardkeep
    >>> pending = shardkeep.save_async(tmp / "step_200", {"w": jnp.ones((4, 4))})
    >>> pending.wait().files
    1
    """
    with join(f"saving to {name_path(path)}") as operation:
        target = new_target(location(path, "save_async(path, tree)"), format, compression, max_shard_size)
        request = SaveRequest(target, tree, prefix, metadata, overwrite, verbose=progress, copy=copy, step=step)
        return PendingSave(start_save(request, operation))


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of a save.

    `indexed`: eFormer's index may list the tree. `on_commit` is called after the commit; calls of saves with the same
    `order` start in the order in which the saves were called. `checksums`: those of this process, to be added to those
    in the metadata. `copy`: copy every array.
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


def run_save(request: SaveRequest, operation: Operation) -> SaveReport:
    """Save a tree in the foreground. `CallbackError` after the commit if the callback raises something."""
    what = f"saving to {request.target.where}"
    operation.specify(what)
    with Scope(what) as outer:
        with Scope(what) as scope:
            # Nothing is being trained meanwhile: one more thread keeps the disk busier.
            job = _Job.prepare(request, operation, scope, Crew(request.target.store.concurrency, more=1))
            job.take_snapshot(None)
            callback = job.queue_callback(outer) if request.on_commit else None
            job.entry.enter()
            if request.verbose:
                with Bar(f"saving {job.path}", job.snapshot.nbytes) as progress:
                    report = job.run(progress)
            else:
                report = job.run(lambda _: None)
        # All that the save has taken is given back by now: the callback is the user's own time.
        operation.close()
        failure = None if callback is None else callback.run()
    if failure is not None:
        raise failure
    return report


def start_save(request: SaveRequest, operation: Operation) -> BackgroundSave:
    """Save a tree in the background: returns after the snapshot."""
    what = f"saving to {request.target.where}"
    operation.specify(what)
    with Scope(what) as outer, Scope(what) as scope:
        job = _Job.prepare(request, operation, scope, Crew(request.target.store.concurrency, background=True))
        job.refuse_existing()
        sized = staged_sizes(job.leaves)
        job.claim.take(sum(nbytes for nbytes, _ in sized), f"the save to {job.path}")
        if operation.size == 1:  # several processes each have their own loop, but save as one
            job.watched = donations.watch(
                (nbytes, array)
                for nbytes, array in sized
                if isinstance(array, jax.Array) and not is_prng_dtype(array.dtype)
            )
        job.crew.start()  # now: at the end of the program no thread can be started
        job.take_snapshot(job.crew)
        callback = job.queue_callback(outer) if request.on_commit else None
        job.entry.enter()
        save = BackgroundSave(job.path)
        save.start(outer, scope, partial(_work, job, save, request.verbose), callback, donations.prepare)
        operation.close()  # from here on, its thread tells the other processes what goes wrong
        return save


def _work(job: "_Job", save: BackgroundSave, verbose: bool) -> SaveReport:
    """A save in the background, once it has a thread."""

    def progress(nbytes: int) -> None:
        show(nbytes)
        save.mention_exit()

    priority.enable_pauses()
    priority.lower()  # and the crew's with it: the snapshot is taken, so nothing waits for these threads
    bar = Bar(f"saving {job.path}", job.snapshot.nbytes) if verbose else nullcontext(lambda _: None)
    try:
        with bar as show:
            return job.run(progress)
    except BaseException as error:
        job.operation.fail(error)
        raise


@dataclass(eq=False)
class _Job:
    """One save, from the call to the commit. Its resources are released in the reverse order of `prepare`."""

    request: SaveRequest
    path: str
    operation: Operation
    draft: Draft
    leaves: list[Leaf]
    started: float
    entry: QueueEntry
    turn: Turn
    opened: NewFiles
    crew: Crew
    claim: Claim
    snapshot: Snapshot = _NOTHING
    snapshot_seconds: float = 0.0
    watched: list[jax.Array] = field(default_factory=list[jax.Array])
    waits: bool = True  # for the lock, when cleaning up
    is_tidy: bool = True  # there is nothing to clean up, or this process may not

    @classmethod
    def prepare(cls, request: SaveRequest, operation: Operation, scope: Scope, crew: Crew) -> "_Job":
        """Check the arguments and flatten the tree. Nothing is written."""
        started = time.perf_counter()
        name = "" if request.prefix is None else check_prefix(request.prefix)
        checked = {} if request.metadata is None else check_metadata(request.metadata)
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        step = check_step(request.step)
        skeleton, leaves = flatten(request.tree, serialize=True)
        skeleton.mention_factories()
        target = request.target
        target.check([leaf.path for leaf in leaves if isinstance(leaf.value, jax.Array | np.ndarray | PerProcess)])
        draft = Draft(os.urandom(16).hex(), name, skeleton, checked, created, request.indexed, step)
        job = cls(
            request=replace(request, tree=None),
            path=target.where,
            operation=operation,
            draft=draft,
            leaves=leaves,
            started=started,
            entry=scope.add(QueueEntry(target.where, scope)),
            turn=Turn(target, draft),
            opened=NewFiles(),
            crew=crew,
            claim=Claim(budget, scope),
        )
        # Threads end first: after that nothing uses the files, the memory or the names.
        for resource in (job.claim, job, job.turn, job.opened, job.crew):
            scope.add(resource)
        return job

    def release(self) -> None:
        """Note whether the loop donates its arrays, free the snapshot, and remove the control directory if need be."""
        watched, snapshot = self.watched, self.snapshot
        if snapshot is not _NOTHING and (watched or snapshot.memory is not None):  # it was taken
            donations.learn(watched, snapshot.shards)
            donations.give_back(snapshot.memory)
        # An error's traceback keeps this object alive; it must not keep the arrays.
        self.leaves, self.snapshot, self.watched = [], _NOTHING, []
        if not self.is_tidy:
            leave(self.request.target, self.waits)
            self.is_tidy = True

    def queue_callback(self, outer: Scope) -> Callback | None:
        """The callback in its place among those of the same order. Only process 0 calls it."""
        call = self.request.on_commit
        if call is None or not self.operation.leads:
            return None
        callback = outer.add(Callback(call, self.request.order or object(), self.path, outer))
        callback.enter()
        return callback

    def refuse_existing(self) -> None:
        """Raise before the snapshot what the commit would refuse."""
        alone = self.operation.size == 1  # otherwise one process may see an earlier save that another does not see
        with suppress(CheckpointNotFoundError):  # a directory of checkpoints is not a checkpoint
            if alone and not self.request.overwrite:
                refuse_existing(self.request.target, self.draft.prefix)

    def _refuse_hiding(self, inside: set[str]) -> None:
        """Refuse to hide another program's arrays: without an index they are found only if nothing of ours is there."""
        target = self.request.target
        refuse_foreign(target, inside)
        if inside & {target.store.control, *target.documents} or is_recognized(inside):
            return
        with suppress(CheckpointNotFoundError):
            if target.read_if_any() is not None and (self.draft.prefix or not self.request.overwrite):
                raise CheckpointExistsError(
                    f"{self.path} contains zarr arrays of another program without an index, which could no longer be "
                    "loaded after this save; save to another directory, or pass overwrite=True and no prefix to "
                    "replace them"
                )

    def take_snapshot(self, keep: Crew | None) -> None:
        operation = self.operation
        if self.request.target.gathers and operation.size > 1:  # first: in a collective they would wait forever
            refuse_unsupported(self.leaves, operation.size)
            compare(operation, [f"path {self.path}", *outline(self.leaves)])
        with collector.paused():
            self.snapshot = take_snapshot(
                self.leaves,
                keep=keep,
                watched=self.watched,
                copy=self.request.copy,
                index=operation.index,
                size=operation.size,
                gathered=self.request.target.gathers,
            )
        self.leaves = []  # do not keep the caller's arrays longer than the snapshot needs
        self.snapshot_seconds = time.perf_counter() - self.started

    def run(self, progress: Progress) -> SaveReport:
        """Write and commit. Whatever fails, the checkpoint is either the old one or the new one."""
        target, snapshot, operation, turn = self.request.target, self.snapshot, self.operation, self.turn
        parts = self.request.checksums
        try:
            self.entry.wait()
            clock = [time.perf_counter()]
            compare(operation, self._asked())
            if target.gathers:  # files that reserve room for their manifest need the checksums first
                for some in filter(None, operation.gather(dict(parts))):
                    self.draft.metadata["checksum"].update(some)
            snapshot = self.snapshot = settle(operation, snapshot)
            if operation.leads and target.keeps_control and (inside := target.store.children("")):
                self._refuse_hiding(set(inside))
            self.is_tidy = False
            begin(turn, snapshot.leaves, self.request.overwrite, operation)
            priority.yield_to_training()
            files = turn.plan.files_of(operation.index)
            complete = partial(target.complete, turn) if target.store.remote else None
            written = write_files(
                target.store,
                files,
                snapshot.shards,
                self.crew,
                self.opened,
                progress,
                complete,
                snapshot.memory,
            )
            clock.append(time.perf_counter())
            priority.yield_to_training()
            target.store.sync([file.name for file in files])
            clock.append(time.perf_counter())
            everyones, checksums = hand_in(operation, turn, written, {} if target.gathers else parts)
            if checksums:
                self.draft.metadata["checksum"].update(checksums)
            if operation.leads:
                with collector.paused():
                    tree = turn.plan.tree(everyones, self.draft)
                commit(turn, target.finish(turn, tree))
            total = close(operation, turn, [sum(file.size for file in everyones), len(everyones)])
            if not target.keeps_control:
                leave(target)  # the last one to get here finds no other save running
            self.is_tidy = True
            clock.append(time.perf_counter())
        except BaseException as error:
            self._give_up(error)
            raise
        phases = dict(zip(("write", "sync", "commit"), (b - a for a, b in itertools.pairwise(clock)), strict=True))
        seconds = self.snapshot_seconds + clock[-1] - clock[0]
        share = sum(file.size for file in written)
        phases = {"snapshot": self.snapshot_seconds, **phases}
        return SaveReport(self.path, total[0], total[1], seconds, phases, share)

    def _asked(self) -> Iterator[str]:
        """The arguments that must be the same on every process, line by line."""
        draft = self.draft
        metadata = {key: value for key, value in draft.metadata.items() if key != "timestamp"}  # clocks differ
        yield f"path {self.path}"
        yield f"prefix {draft.prefix!r}"
        yield f"format {self.request.target.describe()}"
        yield f"overwrite {self.request.overwrite}"
        yield f"step {draft.step}"
        yield f"metadata {json.dumps(encode_metadata(metadata), sort_keys=True)}"
        yield f"structure {json.dumps(to_json(draft.skeleton.root))}"
        yield from describe(self.snapshot)

    def _give_up(self, error: BaseException) -> None:
        """Tell the other processes before removing what was written, and raise the error as one of ours."""
        said = self._in_our_words(error)
        self.operation.fail(said)
        told = isinstance(said, ShardkeepError) and said.told  # by the leader, unless this is the leader
        self.turn.leader_gave_up = told
        self.is_tidy = isinstance(said, AccessError)  # without permission to write, nothing was written
        # A lost leader may hold the lock; and a user who interrupts a save does not want to wait for it.
        self.waits = self.operation.leads or told or isinstance(said, OSError)
        if said is not error:
            raise said from error

    def _in_our_words(self, error: BaseException) -> BaseException:
        """An error of another process, or of the operating system, or about a lost process, as one of ours."""
        attempted = self.turn.attempted  # then the error says whether it is committed
        if isinstance(error, OSError) and not attempted and (elsewhere := self.operation.heard()) is not None:
            return elsewhere
        if isinstance(error, OSError) and not isinstance(error, ShardkeepError):
            then = "Nothing was committed; what was there before is intact"
            if error.errno == errno.ENOSPC:
                free = self.request.target.store.free_bytes()
                then = f"The save needs {self.snapshot.nbytes:,} bytes and {free:,} are free. {then}"
            return storage_error(error, f"saving to {self.path}", then)
        if isinstance(error, ProcessError) and not error.told:
            return _with_outcome(error, outcome(self.request.target, self.turn))
        return error


def _with_outcome(error: ProcessError, outcome: str) -> ProcessError:
    """The error that involves another process, with a sentence on what has become of the checkpoint."""
    told = ProcessError(f"{error}. {outcome}")
    told.record = error.record and {**error.record, "message": str(told)}
    return told
