"""Saving: flatten → take_snapshot (the only blocking step) → plan → write → sync → commit."""

import datetime
import errno
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from shardkeep.commit import Target, Turn, begin, commit, leave, outcome
from shardkeep.donation import donations
from shardkeep.errors import (
    AccessError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ProcessError,
    ShardkeepError,
    storage_error,
)
from shardkeep.formats.eformer import INDEX
from shardkeep.manifest import check_metadata, check_prefix
from shardkeep.memory import Claim, budget
from shardkeep.opening import new_target
from shardkeep.pending import PendingSave
from shardkeep.planning import Draft
from shardkeep.processes import Operation, announced, join
from shardkeep.progress import Bar, Progress
from shardkeep.reports import SaveReport
from shardkeep.save_queue import QueueEntry
from shardkeep.scopes import Scope
from shardkeep.staging import Snapshot, is_prng_dtype, refuse_unsupported, staged_sizes, take_snapshot
from shardkeep.together import close, compare, describe, hand_in, outline
from shardkeep.tree import Leaf, flatten, to_json
from shardkeep.workers import Crew, manners
from shardkeep.writing import NewFiles, write_files

_NOTHING = Snapshot((), ())

FormatName = Literal["safetensors", "tensorstore"]


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
) -> SaveReport:
    """Save a PyTree. When this returns the checkpoint is complete and durable; if it raises, the old one is intact.

    A path ending in `.safetensors` gives plain files under Hugging Face names (split above `max_shard_size`, 5 GB by
    default), any other path a checkpoint directory. Several trees share a directory under different `prefix`es.
    `progress` shows a bar with bytes, GB/s and the time that remains.

    >>> import jax.numpy as jnp, shardkeep
    >>> report = shardkeep.save(tmp / "step_100", {"w": jnp.ones((4, 4)), "step": 100})
    >>> shardkeep.load(tmp / "step_100")["step"]
    100
    """
    with announced(f"saving to {path}"):
        target = new_target(path, format, compression, max_shard_size)
        return run_save(SaveRequest(target, tree, prefix, metadata, overwrite, verbose=progress))


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
) -> PendingSave:
    """Like `save`, but returns after the snapshot: the tree may be donated, deleted or changed at once.

    Host memory that a JAX array on CPU aliases must not change before `wait()` returns. shardkeep recognises the usual
    ways to such arrays (`device_put`, dlpack) and copies them; `copy=True` copies every array before this returns.

    What is wrong with the arguments or the tree is raised here; what goes wrong later is raised by `wait()`, logged at
    once, and reported when the program ends if nobody waited. Saves to one target are committed in the order of calls.

    >>> import jax.numpy as jnp, shardkeep
    >>> pending = shardkeep.save_async(tmp / "step_200", {"w": jnp.ones((4, 4))})
    >>> pending.wait().files
    1
    """
    with announced(f"saving to {path}"):
        target = new_target(path, format, compression, max_shard_size)
        return start_save(SaveRequest(target, tree, prefix, metadata, overwrite, verbose=progress, copy=copy))


@dataclass(frozen=True)
class SaveRequest:
    """What a caller asks of a save. `indexed`: eFormer's index may list the tree. `copy`: every array, in any case.

    `checksums`: this process's, to be added to those in the metadata.
    """

    target: Target
    tree: Any
    prefix: str | None = None
    metadata: Mapping[str, Any] | None = None
    overwrite: bool = False
    indexed: bool = True
    on_commit: Callable[[], None] | None = None
    verbose: bool = False
    checksums: Mapping[str, str] = field(default_factory=dict[str, str])
    copy: bool = False


def run_save(request: SaveRequest) -> SaveReport:
    """The one way a tree is saved in the foreground."""
    what = f"saving to {request.target.where}"
    with join(what) as operation, Scope(what) as scope:
        # Nobody trains meanwhile: one thread more keeps the disk busier.
        job = _Job.prepare(request, operation, scope, Crew(request.target.store.concurrency, more=1))
        job.take_snapshot(None)
        job.entry.enter()
        if not request.verbose:
            return job.run(lambda _: None)
        with Bar(f"saving {job.path}", job.snapshot.nbytes) as progress:
            return job.run(progress)


def start_save(request: SaveRequest) -> PendingSave:
    """The one way a tree is saved in the background: returns after the snapshot."""
    what = f"saving to {request.target.where}"
    with join(what) as operation, Scope(what) as scope:
        job = _Job.prepare(request, operation, scope, Crew(request.target.store.concurrency, polite=True))
        job.refuse_existing()
        sized = staged_sizes(job.leaves)
        job.claim.take(sum(nbytes for nbytes, _ in sized), f"the save to {job.path}")
        if operation.size == 1:  # of several processes each has its own loop, but they save as one
            job.watched = donations.watch(
                (nbytes, array)
                for nbytes, array in sized
                if isinstance(array, jax.Array) and not is_prng_dtype(array.dtype)
            )
        job.crew.start()  # now: at the end of the program no thread can be started
        job.take_snapshot(job.crew)
        job.entry.enter()
        pending = PendingSave(job.path)
        pending.start(scope, partial(_work, job, pending, request.verbose), donations.prepare)
        return pending


def _work(job: "_Job", pending: PendingSave, verbose: bool) -> SaveReport:
    """A save in the background, once it has a thread."""

    def progress(nbytes: int) -> None:
        show(nbytes)
        pending.mention_exit()

    manners.be_polite()
    manners.step_back()  # and with it those of the crew: the snapshot is taken
    bar = Bar(f"saving {job.path}", job.snapshot.nbytes) if verbose else nullcontext(lambda _: None)
    with job.operation, bar as show:
        return job.run(progress)


@dataclass(eq=False)
class _Job:
    """One save, from the call to the commit. Its resources are given back in the reverse order of `prepare`."""

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
    waits: bool = True  # for the lock, to clean up
    is_tidy: bool = True  # nothing remains of a save that failed, or it may not be touched

    @classmethod
    def prepare(cls, request: SaveRequest, operation: Operation, scope: Scope, crew: Crew) -> "_Job":
        """Check what was asked and take the tree apart. Nothing is written."""
        started = time.perf_counter()
        name = "" if request.prefix is None else check_prefix(request.prefix)
        checked = {} if request.metadata is None else check_metadata(request.metadata)
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        skeleton, leaves = flatten(request.tree)
        skeleton.mention_factories()
        target = request.target
        target.check([leaf.path for leaf in leaves if isinstance(leaf.value, jax.Array | np.ndarray)])
        draft = Draft(os.urandom(16).hex(), name, skeleton, checked, created, request.indexed)
        job = cls(
            request=replace(request, tree=None),
            path=target.where,
            operation=operation,
            draft=draft,
            leaves=leaves,
            started=started,
            entry=scope.add(QueueEntry(target.where if target.store.remote else os.path.realpath(target.where), scope)),
            turn=Turn(target, draft),
            opened=NewFiles(),
            crew=crew,
            claim=Claim(budget, scope),
        )
        # The threads end first: then nothing uses the files, the memory and the names any more.
        for resource in (job.claim, job, job.turn, job.opened, job.crew):
            scope.add(resource)
        return job

    def release(self) -> None:
        """The last things: what was learnt of the loop, the memory of the snapshot, the control directory."""
        watched, snapshot = self.watched, self.snapshot
        if watched or snapshot.memory is not None:
            donations.learn(watched, snapshot.shards)
            donations.give_back(snapshot.memory)
        # An error's traceback keeps the job alive, and must not keep the arrays.
        self.leaves, self.snapshot, self.watched = [], _NOTHING, []
        if not self.is_tidy:
            leave(self.request.target, self.waits)
            self.is_tidy = True

    def refuse_existing(self) -> None:
        """Raise before the snapshot what the commit would refuse anyway."""
        alone = self.operation.size == 1  # else an earlier save may be seen by one process and not by another
        with suppress(CheckpointNotFoundError):  # checkpoints below the directory are no checkpoint in it
            found = self.request.target.read_if_any() if alone and not self.request.overwrite else None
            if found is not None and self.draft.prefix in found.trees:
                raise CheckpointExistsError(f"{self.path} already exists; pass overwrite=True to replace it")

    def _refuse_hiding(self, inside: set[str]) -> None:
        """Another program's arrays that no index lists are searched for, but never beside our control directory."""
        target = self.request.target
        if inside & {target.store.control, *target.documents, INDEX}:
            return
        with suppress(CheckpointNotFoundError):
            if target.read_if_any() is not None and (self.draft.prefix or not self.request.overwrite):
                raise CheckpointExistsError(
                    f"{self.path} holds arrays of another program without an index, which a save would hide; save to "
                    "another directory, or with overwrite=True and without a prefix to have only the new tree there"
                )

    def take_snapshot(self, keep: Crew | None) -> None:
        operation = self.operation
        if self.request.target.gathers and operation.size > 1:  # nobody waits in a collective for one who raised
            refuse_unsupported(self.leaves, operation.size)
            compare(operation, [f"path {self.path}", *outline(self.leaves)])
        self.snapshot = take_snapshot(
            self.leaves,
            keep=keep,
            watched=self.watched,
            copy=self.request.copy,
            index=operation.index,
            size=operation.size,
            gathered=self.request.target.gathers,
        )
        self.leaves = []  # the caller's arrays are not held any longer than the snapshot needs
        self.snapshot_seconds = time.perf_counter() - self.started

    def run(self, progress: Progress) -> SaveReport:
        """Write and commit. Whatever fails, the checkpoint is the old one or the new one."""
        target, snapshot, operation, turn = self.request.target, self.snapshot, self.operation, self.turn
        parts = self.request.checksums
        try:
            self.entry.wait()
            clock = [time.perf_counter()]
            if operation.size > 1:
                compare(operation, self._asked())
                if target.gathers:  # files that leave room for their manifest must know them before
                    for some in operation.gather(dict(parts)):
                        self.draft.metadata.get("checksum", {}).update(some)
            if operation.leads and target.keeps_control and (inside := target.store.children("")):
                self._refuse_hiding(set(inside))
            self.is_tidy = False
            begin(turn, snapshot.leaves, self.request.overwrite, operation)
            manners.after_you()
            files = turn.plan.files_of(operation.index)
            complete = partial(target.complete, turn) if target.store.remote else None
            written = write_files(
                target.store,
                files,
                turn.plan.leaves,
                snapshot.shards,
                self.crew,
                self.opened,
                progress,
                complete,
                snapshot.memory,
            )
            clock.append(time.perf_counter())
            manners.after_you()
            target.store.sync([file.name for file in files])
            clock.append(time.perf_counter())
            everyones = written
            if operation.size > 1:
                everyones, checksums = hand_in(operation, turn, written, {} if target.gathers else parts)
                if checksums:
                    self.draft.metadata["checksum"].update(checksums)
            if operation.leads:
                commit(turn, target.finish(turn, turn.plan.tree(everyones, self.draft)))
            total = [sum(file.size for file in everyones), len(everyones)]
            if operation.size > 1:
                total = close(operation, turn, total)
            if not target.keeps_control:
                leave(target)  # whoever is the last to be done finds nobody at work
            self.is_tidy = True
            clock.append(time.perf_counter())
        except BaseException as error:
            self._give_up(error)
            raise
        self.entry.release()  # the next save need not wait for the callback
        if self.request.on_commit is not None and operation.leads:
            self.request.on_commit()
        phases = dict(zip(("write", "sync", "commit"), (b - a for a, b in itertools.pairwise(clock)), strict=True))
        seconds = self.snapshot_seconds + clock[-1] - clock[0]
        share = sum(file.size for file in written)
        phases = {"snapshot": self.snapshot_seconds, **phases}
        return SaveReport(self.path, total[0], total[1], seconds, phases, share)

    def _asked(self) -> list[str]:
        """What has to be the same on every process, line by line."""
        draft = self.draft
        return [
            f"path {self.path}",
            f"prefix {draft.prefix!r}",
            f"format {self.request.target.describe()}",
            f"overwrite {self.request.overwrite}",
            f"metadata {json.dumps({**draft.metadata, 'timestamp': None}, sort_keys=True)}",  # clocks differ
            f"structure {json.dumps(to_json(draft.skeleton.root))}",
            *describe(self.snapshot),
        ]

    def _give_up(self, error: BaseException) -> None:
        """Tell the others, before what was written is removed, and raise what went wrong in our words."""
        said = self._in_our_words(error)
        self.operation.fail(said)
        told = isinstance(said, ShardkeepError) and said.told  # by the leader, if this is not the leader
        self.turn.leader_gave_up = told
        self.is_tidy = isinstance(said, AccessError)  # who may not write has left nothing
        # A leader that is lost may hold the lock; and who interrupts a save does not wait for it.
        self.waits = self.operation.leads or told or isinstance(said, OSError)
        if said is not error:
            raise said from error

    def _in_our_words(self, error: BaseException) -> BaseException:
        """What another process met and told, what the operating system refused, or what became of a lost process."""
        attempted = self.turn.attempted  # then it says what became of the commit
        if isinstance(error, OSError) and not attempted and (elsewhere := self.operation.heard()) is not None:
            return elsewhere
        if isinstance(error, OSError) and not isinstance(error, ShardkeepError):
            then = "Nothing was committed; what was there before is intact"
            if error.errno == errno.ENOSPC:
                free = self.request.target.store.free_bytes()
                then = f"It needs {self.snapshot.nbytes:,} bytes and {free:,} are free. {then}"
            return storage_error(error, f"saving to {self.path}", then)
        if isinstance(error, ProcessError) and not error.told:
            return error.but(outcome(self.request.target, self.turn))
        return error
