"""Storing a snapshot: queue → plan → begin → write → sync → hand in → commit → report.

The snapshot may be of a tree in memory (`save`) or of another checkpoint's arrays (`convert`). Whatever fails, the
checkpoint is either the old one or the new one.
"""

import errno
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardkeep.config import WARM, read
from shardkeep.errors import AccessError, ProcessError, ShardkeepError, storage_error
from shardkeep.layouts.assembly import assemble
from shardkeep.layouts.plan import Draft, SavePlan, plan_save
from shardkeep.model.manifest import DataFile, Tree
from shardkeep.model.metadata import check_metadata, encode_metadata
from shardkeep.model.reports import SaveReport, with_warmth
from shardkeep.model.tree import to_json
from shardkeep.processes.agreement import compare
from shardkeep.processes.operation import ALONE, Operation
from shardkeep.runtime.collector import collector
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.priority import priority
from shardkeep.runtime.progress import Bar, Progress
from shardkeep.runtime.save_queue import QueueEntry
from shardkeep.runtime.scopes import Resource, Scope
from shardkeep.saving.multiprocess import agreement_lines, hand_in, names_of_others, settle
from shardkeep.saving.snapshot import NOTHING, Snapshot
from shardkeep.saving.transfer import Transfers
from shardkeep.saving.warming import LEAST_WARMED, keep_warm
from shardkeep.saving.write import NewFiles, write_files, write_tables
from shardkeep.stores.location import Location
from shardkeep.targets.base import Target
from shardkeep.targets.cleanup import leave
from shardkeep.targets.transaction import Transaction


def store_snapshot(
    target: Target,
    snapshot: Snapshot,
    draft: Draft,
    *,
    overwrite: bool,
    verbose: bool = False,
    check: Callable[[Tree], None] = lambda _: None,
) -> SaveReport:
    """Store a snapshot as this process alone, in the foreground.

    Args:
        target: Where it goes.
        snapshot: The leaves and their data.
        draft: What else is known of the new tree.
        overwrite: Whether to replace the tree that is already there.
        verbose: Whether to show a progress bar.
        check: Called with the tree before it is committed; what it raises prevents the commit.
    """
    started = time.perf_counter()
    with Scope(f"saving to {target.where}") as scope:
        crew = Crew(target.store.traits.concurrency, more=1)
        job = SaveJob.prepare(target, [draft], ALONE, scope, crew, started, overwrite=overwrite, check=check)
        job.snapshot = snapshot
        job.entry.enter()
        return job.run_with_bar(verbose)


@dataclass(eq=False)
class SaveJob:
    """One save, from the call to the commit. Its resources are released in the reverse order of `prepare`.

    `drafts`: of the trees to commit together. The first is the main tree: it has the metadata. `checksums`: those of
    this process, to be added to those in the metadata. `late`: called on the leader before anything is written; it
    returns more metadata, in which processes may differ. `check`: see `store_snapshot`.
    """

    target: Target
    drafts: Sequence[Draft]
    operation: Operation
    entry: QueueEntry
    transaction: Transaction
    opened: NewFiles
    crew: Crew
    started: float
    overwrite: bool = False
    checksums: Mapping[str, str] = field(default_factory=dict[str, str])
    late: Callable[[], Mapping[str, Any]] | None = None
    check: Callable[[Tree], None] = lambda _: None
    snapshot: Snapshot = NOTHING
    snapshot_seconds: float = 0.0
    transfers: Transfers | None = None  # of the snapshot, from accelerators
    outlives_call: bool = False
    waits: bool = True  # for the lock, when cleaning up
    is_tidy: bool = True  # there is nothing to clean up, or this process may not

    @classmethod
    def prepare(
        cls,
        target: Target,
        drafts: Sequence[Draft],
        operation: Operation,
        scope: Scope,
        crew: Crew,
        started: float,
        *,
        memory: tuple[Resource, ...] = (),
        overwrite: bool = False,
        replaces_all: bool = False,
        checksums: Mapping[str, str] | None = None,
        late: Callable[[], Mapping[str, Any]] | None = None,
        check: Callable[[Tree], None] = lambda _: None,
    ) -> "SaveJob":
        """The job with its resources in a scope, `memory` among them: what holds the memory of the snapshot."""
        job = cls(
            target=target,
            drafts=drafts,
            operation=operation,
            entry=QueueEntry(Location(target.where).resolve().text, scope),
            transaction=Transaction(target, operation.index, replaces_all),
            opened=NewFiles(),
            crew=crew,
            started=started,
            overwrite=overwrite,
            checksums=checksums or {},
            late=late,
            check=check,
        )
        # Threads end first: after that nothing uses the files, the memory or the names.
        for resource in (job.entry, *memory, job, job.transaction, job.opened, job.crew):
            scope.add(resource)
        return job

    def release(self) -> None:
        """Forget the snapshot, and remove the control directory if need be."""
        if self.transfers is not None:
            self.transfers.release()
        self.snapshot = NOTHING  # an error's traceback keeps this object alive; it must not keep the arrays
        if not self.is_tidy:
            leave(self.target, self.waits)
            self.is_tidy = True

    def run_with_bar(self, verbose: bool) -> SaveReport:
        """The same as `run`, with a progress bar if `verbose`."""
        if not verbose:
            return self.run(lambda _: None)
        with Bar(f"saving {self.target.where}", self.snapshot.nbytes) as progress:
            return self.run(progress)

    def run(self, progress: Progress) -> SaveReport:
        """Write and commit, as soon as earlier saves to the target have ended."""
        target, operation, transaction = self.target, self.operation, self.transaction
        try:
            waited = 0.0 if self.transfers is None else self._await_transfers(self.transfers)
            self.entry.wait()
            clock = [time.perf_counter()]
            if operation.size > 1 or target.layout.gathers:
                self._agree()
            if operation.leads and self.late is not None:
                self.drafts[0].metadata.update(check_metadata(self.late()))
            plan = self._reserve()
            warms = plan.nbytes >= LEAST_WARMED and read(WARM) != "never"
            priority.yield_to_training()
            written = write_files(target.store, plan, self.snapshot, self.crew, self.opened, progress)
            clock.append(time.perf_counter())
            priority.yield_to_training()
            with collector.paused():
                parts = write_tables(target.store, plan, written, self.opened)
            target.store.sync(plan.names)
            clock.append(time.perf_counter())
            gathered = target.layout.gathers  # then the checksums are in the metadata already
            everyones, checksums = hand_in(operation, transaction, parts, {} if gathered else self.checksums)
            if checksums:
                self.drafts[0].metadata["checksum"].update(checksums)
            files: list[DataFile] = []
            if operation.leads:
                with collector.paused():
                    trees = {
                        each.draft.prefix: assemble(each, {writer: own[number] for writer, own in everyones.items()})
                        for number, each in enumerate(plan.trees)
                    }
                    others = names_of_others(everyones) if operation.size > 1 else {}
                files = [file for tree in trees.values() for file in tree.files]
                for tree in trees.values():
                    self.check(tree)
                transaction.commit(trees, others)
            # Now all processes know that it is committed, and how many bytes and files it has.
            total = operation.share([sum(file.size for file in files), len(files)])
            if not operation.leads:
                transaction.close()
            if not target.keeps_control:
                leave(target)  # the last one to get here finds no other save running
            self.is_tidy = True
            clock.append(time.perf_counter())
        except BaseException as error:
            self._give_up(error)
            raise
        phases = {"snapshot": self.snapshot_seconds}
        if self.transfers is not None:  # those that arrived while others were written
            clock.insert(1, min(max(self.transfers.arrived(), clock[0]), clock[1]))
            phases["transfer"] = waited
        names = ("transfer", "write", "sync", "commit")[-len(clock) + 1 :]
        for name, (begin, end) in zip(names, itertools.pairwise(clock), strict=True):
            phases[name] = phases.get(name, 0.0) + end - begin
        seconds = sum(phases.values())
        share = sum(file.size for file in written)
        report = SaveReport(target.where, total[0], total[1], seconds, phases, share)
        if share < LEAST_WARMED or not warms:
            return report
        return with_warmth(report, keep_warm(target.where, target.store, plan.final_names, total[0]))

    def _await_transfers(self, transfers: Transfers) -> float:
        """Wait for the data from accelerators if the call does not; returns for how many seconds.

        Until it has arrived the arrays' memory on the devices is in use, so this does not wait for other saves first.
        """
        if not self.outlives_call or transfers.in_batches:
            return 0.0
        started = time.perf_counter()
        transfers.wait()
        return time.perf_counter() - started

    def _agree(self) -> None:
        """Make sure that all processes save the same, and tell each other what they need to plan it."""
        operation = self.operation
        compare(operation, self._asked())
        if self.target.layout.gathers:  # files that reserve room for their manifest need the checksums first
            for some in filter(None, operation.gather(dict(self.checksums))):
                self.drafts[0].metadata["checksum"].update(some)
        self.snapshot = settle(operation, self.snapshot)

    def _asked(self) -> Iterator[str]:
        """The arguments that must be the same on every process, line by line."""
        main, *more = self.drafts
        yield f"path {self.target.where}"
        yield f"prefix {main.prefix!r}"
        if more:
            yield f"trees {', '.join(repr(draft.prefix) for draft in more)}"
        yield f"format {self.target.layout.describe()}"
        yield f"overwrite {self.overwrite}"
        yield f"step {main.step}"
        yield f"metadata {json.dumps(encode_metadata(main.metadata), sort_keys=True)}"
        for draft in self.drafts:
            prefix = draft.prefix if more else ""
            yield f"structure {f'of {prefix!r} ' if prefix else ''}{json.dumps(to_json(draft.skeleton.root))}"
            yield from agreement_lines(self.snapshot, prefix, draft.leaves)

    def _reserve(self) -> SavePlan:
        """The plan of what this process writes, below names that the leader has reserved."""
        layout, leaves, operation = self.target.layout, self.snapshot.leaves, self.operation
        drafts = [replace(each, process=operation.index, processes=operation.size) for each in self.drafts]
        self.is_tidy = False
        if operation.leads:
            with collector.paused():
                plan = plan_save(layout, leaves, drafts)
            plan = self.transaction.begin(plan, self.overwrite)
            operation.share([plan.save_id, plan.created, [tree.start for tree in plan.trees]])
            return plan
        save_id, created, starts = operation.share()
        drafts = [replace(each, save_id=save_id, created=created) for each in drafts]
        with collector.paused():
            plan = plan_save(layout, leaves, drafts)
            trees = [tree.named(start) for tree, start in zip(plan.trees, starts, strict=True)]
            plan = replace(plan, trees=tuple(trees))
        self.transaction.follow(plan)
        return plan

    def _give_up(self, error: BaseException) -> None:
        """Tell the other processes before removing what was written, and raise the error as one of ours."""
        said = self._in_our_words(error)
        self.operation.fail(said)
        told = isinstance(said, ShardkeepError) and said.told  # by the leader, unless this is the leader
        self.transaction.leader_gave_up = told
        self.is_tidy = isinstance(said, AccessError)  # without permission to write, nothing was written
        # A lost leader may hold the lock; and a user who interrupts a save does not want to wait for it.
        self.waits = self.operation.leads or told or isinstance(said, OSError)
        if said is not error:
            raise said from error

    def _in_our_words(self, error: BaseException) -> BaseException:
        """An error of another process, or of the operating system, or about a lost process, as one of ours."""
        attempted = self.transaction.attempted  # then the error says whether it is committed
        if isinstance(error, OSError) and not attempted and (elsewhere := self.operation.heard()) is not None:
            return elsewhere
        if isinstance(error, OSError) and not isinstance(error, ShardkeepError):
            then = "Nothing was committed; what was there before is intact"
            if error.errno == errno.ENOSPC:
                free = self.target.store.free_bytes()
                then = f"The save needs {self.snapshot.nbytes:,} bytes and {free:,} are free. {then}"
            return storage_error(error, f"saving to {self.target.where}", then)
        if isinstance(error, ProcessError) and not error.told:
            told = ProcessError(f"{error}. {self.transaction.outcome()}")
            told.record = error.record and {**error.record, "message": str(told)}
            return told
        return error
