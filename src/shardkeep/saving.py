"""Saving: flatten → take_snapshot (the only blocking step) → plan → write → sync → commit."""

import datetime
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from shardkeep.commit import Target, Turn, abandon, begin, commit, leave
from shardkeep.errors import CheckpointExistsError, ShardkeepError, storage_error
from shardkeep.manifest import check_metadata, check_prefix
from shardkeep.opening import new_target
from shardkeep.pending import PendingSave, turns
from shardkeep.planning import Draft
from shardkeep.progress import Bar, Progress
from shardkeep.reports import SaveReport
from shardkeep.staging import Snapshot, budget, staged_bytes, take_snapshot
from shardkeep.tree import Leaf, flatten
from shardkeep.workers import Crew
from shardkeep.writing import write_files

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
) -> SaveReport:
    """Save a PyTree. When this returns the checkpoint is complete and durable; if it raises, the old one is intact.

    A path ending in `.safetensors` gives plain files under Hugging Face names (split above `max_shard_size`, 5 GB by
    default), any other path a checkpoint directory. Several trees share a directory under different `prefix`es.

    >>> import jax.numpy as jnp, shardkeep
    >>> report = shardkeep.save(tmp / "step_100", {"w": jnp.ones((4, 4)), "step": 100})
    >>> shardkeep.load(tmp / "step_100")["step"]
    100
    """
    target = new_target(path, format, compression, max_shard_size)
    return run_save(SaveRequest(target, tree, prefix, metadata, overwrite))


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
) -> PendingSave:
    """Like `save`, but returns after the snapshot: the tree may be donated, deleted or changed at once.

    What is wrong with the arguments or the tree is raised here; what goes wrong later is raised by `wait()`, logged at
    once, and reported when the program ends if nobody waited. Saves to one target are committed in the order of calls.

    >>> import jax.numpy as jnp, shardkeep
    >>> pending = shardkeep.save_async(tmp / "step_200", {"w": jnp.ones((4, 4))})
    >>> pending.wait().files
    1
    """
    target = new_target(path, format, compression, max_shard_size)
    return start_save(SaveRequest(target, tree, prefix, metadata, overwrite))


@dataclass(frozen=True)
class SaveRequest:
    """What a caller asks of a save. `indexed`: eFormer's index may list the tree."""

    target: Target
    tree: Any
    prefix: str | None = None
    metadata: Mapping[str, Any] | None = None
    overwrite: bool = False
    indexed: bool = True
    on_commit: Callable[[], None] | None = None
    verbose: bool = False


def run_save(request: SaveRequest) -> SaveReport:
    """The one way a tree is saved in the foreground."""
    job = _Job.prepare(request)
    job.take_snapshot(keep=False)
    job.before, job.finished = turns.queue(os.path.realpath(job.path))
    with Crew() as crew:
        if not request.verbose:
            return job.run(crew, _quiet)
        with Bar(f"saving {job.path}", job.snapshot.nbytes) as progress:
            return job.run(crew, progress)


def start_save(request: SaveRequest) -> PendingSave:
    """The one way a tree is saved in the background: returns after the snapshot."""
    job = _Job.prepare(request)
    job.refuse_existing()
    held = staged_bytes(job.leaves)
    budget.take(held, f"the save to {job.path}")
    try:
        job.take_snapshot(keep=True)
        crew = Crew().start()  # at the end of the program no thread can be started any more
    except BaseException:
        budget.give_back(held)
        raise
    job.before, job.finished = turns.queue(os.path.realpath(job.path))
    pending = PendingSave(job.path)

    def work() -> SaveReport:
        try:
            with crew:
                return job.run(crew, lambda _: pending.mention_exit())
        finally:
            job.snapshot = _NOTHING  # an error's traceback keeps the job alive, and must not keep the arrays
            budget.give_back(held)

    try:
        pending.start(work)
    except BaseException:  # no thread to be had: the save did not begin, and later ones must not wait for it
        crew.close()
        job.finished()
        budget.give_back(held)
        raise
    return pending


def _quiet(_: int) -> None:
    """No progress is shown."""


@dataclass
class _Job:
    """One save, from the call to the commit."""

    target: Target
    path: str
    draft: Draft
    overwrite: bool
    leaves: list[Leaf]
    started: float
    on_commit: Callable[[], None] | None = None
    verbose: bool = False
    snapshot: Snapshot = _NOTHING
    snapshot_seconds: float = 0.0
    before: threading.Event | None = None
    finished: Callable[[], None] = lambda: None

    @classmethod
    def prepare(cls, request: SaveRequest) -> "_Job":
        """Check what was asked and take the tree apart. Nothing is written."""
        started = time.perf_counter()
        name = "" if request.prefix is None else check_prefix(request.prefix)
        checked = {} if request.metadata is None else check_metadata(request.metadata)
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        skeleton, leaves = flatten(request.tree)
        request.target.check([leaf.path for leaf in leaves if isinstance(leaf.value, jax.Array | np.ndarray)])
        draft = Draft(os.urandom(16).hex(), name, skeleton, checked, created, request.indexed)
        return cls(
            request.target,
            request.target.where,
            draft,
            request.overwrite,
            leaves,
            started,
            request.on_commit,
            request.verbose,
        )

    def refuse_existing(self) -> None:
        """Raise before the snapshot what the commit would refuse anyway."""
        found = None if self.overwrite else self.target.read_if_any()
        if found is not None and self.draft.prefix in found.trees:
            raise CheckpointExistsError(f"{self.path} already exists; pass overwrite=True to replace it")

    def take_snapshot(self, keep: bool) -> None:
        self.snapshot = take_snapshot(self.leaves, keep=keep)
        self.leaves = []  # the caller's arrays are not held any longer than the snapshot needs
        self.snapshot_seconds = time.perf_counter() - self.started

    def run(self, crew: Crew, progress: Progress) -> SaveReport:
        """Write and commit. Whatever fails, the checkpoint is the old one or the new one."""
        target, snapshot, turn = self.target, self.snapshot, None
        try:
            if self.before is not None:
                self.before.wait()
            clock = [time.perf_counter()]
            turn = begin(target, snapshot.leaves, self.draft, self.overwrite)
            written = write_files(target.store, turn.plan, snapshot.shards, crew, progress)
            tree = target.finish(turn, turn.plan.tree(written, self.draft))
            clock.append(time.perf_counter())
            target.store.sync(turn.plan.names)
            clock.append(time.perf_counter())
            commit(turn, tree)
            clock.append(time.perf_counter())
            if not target.keeps_control:
                leave(target)
        except BaseException as error:
            self._give_up(turn, error)
            raise
        finally:
            self.finished()
        if self.on_commit is not None:
            self.on_commit()
        phases = dict(zip(("write", "sync", "commit"), (b - a for a, b in itertools.pairwise(clock)), strict=True))
        seconds = self.snapshot_seconds + clock[-1] - clock[0]
        nbytes = sum(file.size for file in written)
        return SaveReport(self.path, nbytes, len(written), seconds, {"snapshot": self.snapshot_seconds, **phases})

    def _give_up(self, turn: Turn | None, error: BaseException) -> None:
        """Remove what was written, and say in our words what the operating system refused."""
        if turn is not None:
            abandon(turn)
        leave(self.target)
        if isinstance(error, OSError) and not isinstance(error, ShardkeepError):
            then = "Nothing was committed; what was there before is intact"
            if error.errno == errno.ENOSPC:
                free = self.target.store.free_bytes()
                then = f"It needs {self.snapshot.nbytes:,} bytes and {free:,} are free. {then}"
            raise storage_error(error, f"saving to {self.path}", then) from error
