"""Checkpointer: eFormer's class that saves a training loop by steps and by time, on shardkeep's one save path."""

import datetime
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import jax
from jax.sharding import Mesh

from shardkeep.eformer.committing import StepCommits
from shardkeep.eformer.discovery import RunLoader, require_prefix
from shardkeep.eformer.intervals import CheckpointInterval, check_policies, is_due
from shardkeep.eformer.manager import AsyncCheckpointManager, follow_save, locate, request_save
from shardkeep.eformer.removal import Removal
from shardkeep.model.document import check_step
from shardkeep.processes.agreement import compare
from shardkeep.processes.operation import join
from shardkeep.runs.agreement import Agreement
from shardkeep.saving.save import run_save
from shardkeep.stores.location import Location, any_path_text

log = logging.getLogger("shardkeep")

Due = Literal["permanent", "temporary"]
TrueCallback = Callable[[str, Mesh | None, dict[str, object]], None]


class Checkpointer(RunLoader):
    """Saves a training loop to `<base_path>/run-<step>/`: permanent checkpoints by step, temporary ones by time.

    A checkpoint is discovered by its `metadata.json`, which is written last. A temporary checkpoint is removed, in the
    background, once a newer one is committed. Several Checkpointers may use one directory; none of them locks it.

    With several processes, each makes the same calls. The clock of process 0 decides when a temporary checkpoint is
    due; it is then saved at one of the next calls, the same on every process. Process 0 writes `metadata.json` and
    removes old checkpoints. Pinned checkpoints are kept, and so are those that a reader holds with
    `shardkeep.Run(base_path, name="run-{}").hold(step)`, until they are released.

    Args:
        base_path: The directory, or a `gs://` or `s3://` URL. Also an attribute.
        save_interval: The time after which a temporary checkpoint is due. None saves no temporary checkpoints.
        step_policies: The intervals at which permanent checkpoints are due, sorted by `until`; only the last may have
            an `until` of None. Steps after the last `until` are due by time only.
        manager: The `AsyncCheckpointManager` that saves and loads. None creates one with default settings.
        dt_now_injection: The clock: a function that returns the current `datetime`. The default is
            `datetime.datetime.now`.
        delete_old_temp_checkpoints: Whether temporary checkpoints that exist at the first `on_step` are removed as
            well, once `on_step` has committed a newer one. Pass False if several jobs save to one directory.

    Raises:
        ValueError: The policies are not sorted, or one other than the last has an `until` of None.

    >>> import jax.numpy as jnp
    >>> checkpointer = Checkpointer(tmp / "run", None, [CheckpointInterval(every=2)])
    >>> for step in range(1, 6):
    ...     checkpointer.on_step(pytree={"w": jnp.full(3, step)}, step=step)
    >>> checkpointer.wait_until_finished()
    >>> tree, metadata = checkpointer.load_checkpoint(None)
    >>> int(tree["w"][0]), metadata["step"], metadata["is_temporary"]
    (4, 4, False)
    """

    def __init__(
        self,
        base_path: object,
        save_interval: datetime.timedelta | None,
        step_policies: Sequence[CheckpointInterval],
        *,
        manager: AsyncCheckpointManager | None = None,
        dt_now_injection: Callable[[], datetime.datetime] | None = None,
        delete_old_temp_checkpoints: bool = True,
    ) -> None:
        check_policies(step_policies)
        super().__init__(base_path, manager)
        self.save_interval = save_interval
        self.step_policies = list(step_policies)
        self._dt_now_injection = datetime.datetime.now if dt_now_injection is None else dt_now_injection
        self._delete_old_temp_checkpoints = delete_old_temp_checkpoints
        self._last_save_step = 0
        self._last_save_time = self._dt_now_injection()
        self._commits = StepCommits(lambda: self._dt_now_injection())  # the attribute may be replaced
        self._agreement: Agreement | None = None  # from the first step on
        self._leads = self._announced = False  # whether this is process 0; whether it has announced a temporary save

    def on_step(
        self,
        mesh: Mesh | None = None,
        pytree: object = None,
        force: bool = False,
        *,
        step: int,
        true_callbacks: Sequence[TrueCallback] | None = None,
        extras: Mapping[str, object] | None = None,
    ) -> None:
        """Save a checkpoint to `<base_path>/run-<step>` if one is due. Call this once for each step.

        A permanent checkpoint is due at each multiple of the current interval. Otherwise, a temporary one is due when
        `save_interval` has passed. Step 0 and the last saved step are never due unless forced. After the commit, the
        temporary checkpoint before this one is removed, if its metadata still says that it is temporary.

        The tree is saved in the background, and can be modified or donated when this returns. Later errors are logged,
        and raised by `wait_until_finished`. With callbacks, this returns when the checkpoint is complete.

        Args:
            mesh: Passed to the callbacks.
            pytree: The PyTree to save. None if the callbacks do the saving.
            force: Whether to save a permanent checkpoint even if none is due.
            step: The training step.
            true_callbacks: Functions to call if a save is due, after the tree is saved and before the checkpoint can be
                discovered, on every process: `callback("run-<step>", mesh, metadata)`.
            extras: A dict to store with the tree; also a part of the `metadata` that callbacks get.
        """
        step = _checked_step(step)
        agreed = (self._agreement or self._open()).enter()
        due = self._due(step, force, agreed is not None)
        if due is None:
            return
        with join(f"saving step {step} to {self.base_path}") as operation:
            place = self._place(destination := f"run-{step}")
            compare(operation, [f"path {place}", f"a {due} checkpoint"])
            if pytree is None and not true_callbacks:
                raise ValueError(f"a save is due at step {step}, but on_step got neither a pytree nor true_callbacks")
        if self._is_off(place):
            return
        is_temporary = due == "temporary"
        metadata = {"step": step, "is_temporary": is_temporary, **(extras or {})}
        commit = partial(self._commits.commit, place, step, is_temporary)
        if true_callbacks:
            if pytree is not None:
                self._save(pytree, place, metadata, step)
            calls = [partial(call, destination, mesh, dict(metadata)) for call in true_callbacks]
            self._complete(place, commit, calls)
        else:
            self._start(pytree, place, metadata, step, commit)
        self._last_save_step, self._last_save_time = step, self._dt_now_injection()

    def save_checkpoint(
        self,
        tree: object,
        destination: str,
        *,
        commit_callback: Callable[[], None] | None = None,
        is_temporary: bool = False,
        mesh: Mesh | None = None,
        step: int = -1,
        shardings: object = None,
        partition_rules: object = None,
        prefix: str | None = None,
        structured: bool = False,
        dtype: object = None,
        extras: Mapping[str, object] | None = None,
    ) -> None:
        """Save a tree to `<base_path>/<destination>` in the background, whether or not it is due.

        The tree can be modified or donated when this returns. `wait_until_finished` raises later errors.

        Args:
            tree: The PyTree to save.
            destination: The name of the directory in `base_path`.
            commit_callback: Called without arguments, on process 0, when the checkpoint is complete.
            is_temporary: Whether `metadata.json` says that the checkpoint is temporary.
            mesh: Accepted for compatibility: arrays are saved with the sharding that they have.
            step: The training step, for `metadata.json`.
            shardings: Accepted for compatibility, see `mesh`.
            partition_rules: Accepted for compatibility, see `mesh`.
            prefix: The name of this tree, if several trees share the directory.
            structured: Whether to store `extras` and the step alone as metadata, as `save_pytree` does. Needs a prefix.
            dtype: The dtype to cast floats to. None keeps them.
            extras: A dict to store with the tree.
        """
        step = int(step)
        place = self._place(destination)
        if self._is_off(place):
            return
        if structured:
            require_prefix(prefix, "structured=True")
        own = {"step": step} if structured else {"step": step, "is_temporary": is_temporary}

        def describe() -> None:
            self._commits.describe(place, step, is_temporary)
            if commit_callback is not None:
                commit_callback()

        self._start(tree, place, {**own, **(extras or {})}, step if step >= 0 else None, describe, prefix, dtype)
        self._last_save_step, self._last_save_time = step, self._dt_now_injection()

    def save_pytree(
        self,
        tree: object,
        prefix: str,
        *,
        step: int | None = None,
        destination: str | None = None,
        mesh: Mesh | None = None,
        dtype: object = None,
        extras: Mapping[str, object] | None = None,
        temporary: bool = False,
        write_index: bool = True,
    ) -> str:
        """Save a tree with its exact structure and return its path once the checkpoint is committed.

        Args:
            tree: The PyTree to save.
            prefix: The name of this tree in the directory; must not be empty.
            step: The training step. With a step, `metadata.json` is written. None: only the tree is saved.
            destination: The directory in `base_path`, or an absolute path or URL. None: `run-<step>`, or `base_path`
                itself without a step.
            mesh: Accepted for compatibility: arrays are saved with the sharding that they have.
            dtype: The dtype to cast floats to. None keeps them.
            extras: A dict to store with the tree; `load_pytree` returns it. The step is added to it.
            temporary: Whether `metadata.json` says that the checkpoint is temporary.
            write_index: Whether eFormer may find the tree, through `tensorstore_index.json`.

        Returns:
            The path of the directory.
        """
        require_prefix(prefix, "save_pytree")
        if step is not None:
            step = _checked_step(step)
            destination = destination or f"run-{step}"
        place = self._place(destination)
        if self._is_off(place):
            return str(place)
        metadata = dict(extras or {}) if step is None else {**(extras or {}), "step": step}
        self._save(tree, place, metadata, step, prefix, dtype, write_index)
        if step is not None:
            self._complete(place, partial(self._commits.describe, place, step, temporary))
        return str(place)

    def wait_until_finished(self) -> None:
        """Wait for pending saves and removals, then raise the first save that failed."""
        try:
            self._manager.wait_until_finished()
        finally:
            self._commits.removals.wait()

    def _queue_checkpoint_removal(self, checkpoint_dir: object) -> None:  # pyright: ignore[reportUnusedFunction]  (EasyDeL)
        """Remove a directory with everything in it, in the background, on process 0."""
        place, base = self._place(checkpoint_dir), self._place(None)
        if f"{base}/".startswith(f"{place}/"):
            raise ValueError(f"{place} is not removed: it contains the checkpoints of this Checkpointer")
        if jax.process_index() == 0:
            self._commits.removals.add(Removal(place, if_temporary=False))

    def _open(self) -> Agreement:
        """At the first step: find what earlier runs have left, and connect with the other processes."""
        with join(f"saving to {self.base_path}") as operation:
            self._leads = operation.leads
            if operation.leads:
                self._commits.look_for_old(self._place(None), self._delete_old_temp_checkpoints)
            agreement = Agreement(operation.share(os.urandom(8).hex() if operation.leads else None))
        weakref.finalize(self, agreement.close).atexit = False  # at the exit of the program it closes itself
        self._agreement = agreement
        return agreement

    def _due(self, step: int, force: bool, agreed: bool) -> Due | None:
        """Whether a save is due at a step, the same on every process.

        Args:
            step: The training step.
            force: Whether one is due in any case.
            agreed: Whether the processes have agreed on this call for what process 0 has announced.
        """
        if agreed:
            self._announced = False
        if force:
            return "permanent"
        now = self._dt_now_injection()
        if step == 0:
            self._last_save_time = now
            return None
        if step == self._last_save_step:
            return None
        if is_due(self.step_policies, step):
            return "permanent"
        if agreed:
            return "temporary"
        elapsed = self.save_interval and now - self._last_save_time >= self.save_interval
        if elapsed and self._leads and not self._announced:
            return self._announce()
        return None

    def _announce(self) -> Due | None:
        """A temporary checkpoint is due by the clock of process 0: save now, or at a call that all agree on."""
        assert self._agreement is not None
        if self._agreement.is_alone:
            return "temporary"
        self._announced = True
        self._agreement.request("save_interval", stop=False)
        return None

    def _place(self, destination: object) -> Location:
        """The directory of a checkpoint, given its name in `base_path` or a whole path; `base_path` itself for None."""
        base = locate(self._manager, self.base_path)
        if not destination:
            return base
        name = any_path_text(destination)
        return locate(self._manager, name if "://" in name or os.path.isabs(name) else f"{base}/{name}")

    def _is_off(self, place: Location) -> bool:
        if self._manager.enable is False:
            log.warning("saving is disabled (enable=False): nothing was written to %s", place)
        return self._manager.enable is False

    def _start(
        self,
        tree: object,
        place: Location,
        metadata: Mapping[str, object],
        step: int | None,
        on_commit: Callable[[], None],
        prefix: str | None = None,
        dtype: object = None,
    ) -> None:
        """Save a tree in the background, then call `on_commit` on process 0."""
        with join(f"saving to {place}") as operation:
            self._commits.removals.wait(place)
            request = request_save(self._manager, tree, str(place), prefix, dtype, metadata, step)
            follow_save(self._manager, replace(request, on_commit=on_commit), operation)

    def _save(
        self,
        tree: object,
        place: Location,
        metadata: Mapping[str, object],
        step: int | None,
        prefix: str | None = None,
        dtype: object = None,
        indexed: bool = True,
    ) -> None:
        """Save a tree in the foreground."""
        with join(f"saving to {place}") as operation:
            self._commits.removals.wait(place)
            request = request_save(self._manager, tree, str(place), prefix, dtype, metadata, step, indexed)
            run_save(request, operation)

    def _complete(self, place: Location, commit: Callable[[], None], calls: Sequence[Callable[[], None]] = ()) -> None:
        """Make the calls on every process; once all have succeeded, call `commit` on process 0."""
        what = f"completing {place}"
        try:
            for call in calls:
                call()
        except BaseException:
            with join(what):  # the other processes raise it too, and nothing is committed
                raise
        with join(what) as operation:
            operation.gather(None)
            if operation.leads:
                commit()
            operation.share()


def _checked_step(step: object) -> int:
    checked = check_step(step)
    if checked is None:
        raise TypeError("step must be an integer, not None")
    return checked
