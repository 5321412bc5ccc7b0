"""A training run: one object that saves when it is time, resumes, deletes old steps, and stops in an orderly way."""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from shardkeep.layouts.registry import layout_named
from shardkeep.model.document import check_bools
from shardkeep.processes.operation import join
from shardkeep.runs.agreement import Agreed
from shardkeep.runs.contents import Contents
from shardkeep.runs.iterators import Redistribute
from shardkeep.runs.keep import Keep
from shardkeep.runs.preemption import parse_signals
from shardkeep.runs.reading import ReadableRun, check_number
from shardkeep.runs.resume import Candidate, Resumed, Resumption, candidates_of, check_arguments, take_changes
from shardkeep.runs.schedule import Interval, Schedule
from shardkeep.runs.steps import Step
from shardkeep.runs.templates import read_template
from shardkeep.runs.writing import Saves, Writer
from shardkeep.saving.pending import BackgroundSave, PendingSave
from shardkeep.saving.save import FormatName

log = logging.getLogger("shardkeep")


class Run(ReadableRun):
    """A training run: saves steps in the background, deletes old ones, and resumes from the newest.

    A run is a directory with one checkpoint per saved step. Opening it takes no lock and writes nothing, so evaluators
    can read a run while it trains. The first call of `resume`, `step` or `save` makes this program the writer of the
    run. A run has one writer at a time.

    In a job with several JAX processes, all of them must open the run and make the same calls of `resume`, `step`,
    `save`, `load`, `delete` and `close`.

    Args:
        path: The directory of the run, as a local path or a `gs://` or `s3://` URL.
        save_every: When `step` saves: a number of steps, a time ("15 min", or a `timedelta`), or a tuple of both. A
            number N saves the first step at or past each multiple of N. With None, only `save` saves.
        keep: Which steps to keep; see `Keep`. None keeps all steps. By default, a new run uses `Keep(last=3)`, and a
            run that is opened again uses the rules that it was last written with, which it records.
        name: The pattern for the names of step directories, with `{}` for the step number.
        format: How to store arrays, as for `shardkeep.save`.
        metadata: A dict to store with every step.
        on_preemption: What to do when one of `signals` arrives. "save" saves at the next call of `step` and sets
            `stopping`; "ignore" installs no signal handlers.
        signals: The signals that announce a preemption.
        on_error: "raise" raises the error of a failed background save from a later call of `step` or `save`; "log" only
            logs it.

    >>> import jax, jax.numpy as jnp, shardkeep
    >>> def new_state():
    ...     return {"w": jnp.zeros(3)}
    >>> for session in range(2):
    ...     with shardkeep.Run(tmp / "exp1", save_every=10, keep=shardkeep.Keep(last=2)) as run:
    ...         shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ...         state, step = run.resume(new_state, shardings=shardings)
    ...         print("from", step)
    ...         for step in range(step + 1, step + 36):
    ...             state = {"w": state["w"] + 1}
    ...             _ = run.step(step, state, metrics={"loss": 1 / step})
    from 0
    from 30
    >>> [step.number for step in run.steps()]
    [50, 60]
    """

    def __init__(
        self,
        path: object,
        *,
        save_every: Interval | tuple[Interval, Interval] | None = None,
        keep: Keep | Literal["recorded"] | None = "recorded",
        name: str = "step_{}",
        format: FormatName = "safetensors",
        metadata: Mapping[str, object] | None = None,
        on_preemption: Literal["save", "ignore"] = "save",
        signals: Sequence[str] = ("SIGTERM",),
        on_error: Literal["raise", "log"] = "raise",
    ) -> None:
        if keep is not None and keep != "recorded" and not isinstance(keep, Keep):
            raise TypeError(f"keep must be a shardkeep.Keep or None, not {keep!r}")
        if on_preemption not in ("save", "ignore"):
            raise ValueError(f'on_preemption must be "save" or "ignore", not {on_preemption!r}')
        if on_error not in ("raise", "log"):
            raise ValueError(f'on_error must be "raise" or "log", not {on_error!r}')
        layout_named(format, None)
        self._schedule = Schedule(save_every)
        self._signals = [number.name for number in parse_signals(signals)] if on_preemption == "save" else []
        self._writer: Writer | None = None
        self._enter: Callable[[], Agreed | None] | None = None  # the agreement's `enter`, once this program writes
        self._stop_asked = self._is_closed = False
        self._stopping = self._went_back = False
        self._resumed: Resumed | None = None
        self._metrics: tuple[int, Mapping[str, object] | None] = (-1, None)  # of the last `step`, with its number
        super().__init__(path, keep=keep, name=name)
        self._saves = Saves(self._place, self._name, format, metadata, raises=on_error == "raise")

    @property
    def stopping(self) -> bool:
        """Whether the loop should end: after a signal or `stop()`, once a step that all processes agreed on is saved.

        It changes only inside `step` and `save`, on every process in the same call.
        """
        return self._stopping

    @property
    def resumed(self) -> Resumed | None:
        """How the run was resumed; None before `resume` has been called."""
        return self._resumed

    def _open(self) -> Writer:
        """Become the writer of the run."""
        if self._writer is not None and self._enter is not None:
            return self._writer
        if self._is_closed:
            raise ValueError(f"the run {self.path} is closed; open it again with shardkeep.Run")
        if self._writer is not None:
            self._writer.close()  # opening it was interrupted
        with join(f"opening the run {self.path}") as operation:
            parts = (self._control, self._index, self._name, self._schedule, self._in_use)
            writer = self._writer = Writer(*parts)
            agreement = writer.open(operation, self._signals)
        self._enter = agreement.enter
        if self._stop_asked:
            agreement.request("run.stop()", stop=True)
        return writer

    def resume(
        self,
        template: object,
        *,
        iterators: Mapping[str, object] | None = None,
        step: int | None = None,
        init_from: object = None,
        redistribute: Redistribute | None = None,
        **arguments: Any,
    ) -> tuple[Any, int]:
        """Return the state and number of the newest usable step, or a new state and 0 if the run has no steps.

        The step is loaded and verified. If it is damaged, it is marked as damaged, a warning is logged, and the
        previous step is tried; `run.resumed` has the details. Other errors are raised and change nothing. A run that
        has steps never starts over.

        Args:
            template: A function that returns a new state, the state itself (a tree of arrays), or a tree of abstract
                arrays. A function is called under `jax.jit`, so a new state is created directly on its devices. New and
                loaded states have the same shardings: those of the template's arrays, of a function jitted with
                `out_shardings`, of `shardings=`, or of `mesh=` with `partition_rules=`. Leaves that are not data, such
                as functions, are taken from the template.
            iterators: A dict of data iterators by name. Their saved positions are restored with `set_state` or
                `load_state_dict`. If a value is a plain state instead of an iterator, the saved state is in
                `run.resumed.iterators`. Without this, a warning names the iterators whose positions were saved; pass
                `{}` if their data is meant to start again.
            step: Go back to this step. Later steps are marked as abandoned, and are replaced when they are saved again.
            init_from: If the run has no steps yet, start at step 0 from this checkpoint, or from the newest step if it
                is a run.
            redistribute: Needed if the number of processes has changed: a function that takes the list of all
                processes' states of an iterator and the new number of processes, and returns that many states.
            **arguments: Arguments of `shardkeep.load`, such as `mesh`, `partition_rules`, `shardings`, `dtype`,
                `include` and `verify`. `prefix` selects the tree with the state in checkpoints that were not saved by a
                `Run`; the default is the one without a prefix, or the only one. With `init_from`, `remap`, `missing`
                and `extra` apply to that checkpoint only, not to steps of the run; `remap` requires
                `init_from`. With `missing="keep"`, leaves that the checkpoint lacks come from the template; if the
                template is a function, only those leaves are computed.

        Returns:
            The state, and the step at which it was saved.

        Raises:
            IntegrityError: The run has steps, but none of them can be used.
            ConflictError: Another program writes to the run, or a step later than `step` is pinned.
            ShardingError: There are several devices, and no sharding was given.
            RemapError: A rule cannot be applied, or `init_from` is missing.
            MissingLeafError: The step has no saved state for one of the iterators.
            CheckpointExistsError: The directory has no steps of this run, but numbered checkpoints with another name;
                see `name` of `Run`.
        """
        writer = self._open()
        check_arguments(arguments)
        number = None if step is None else check_number(step)
        prefix = arguments.pop("prefix", None)
        changes = take_changes(arguments, init_from)
        plan = read_template(template, arguments)
        with join(f"resuming the run {self.path}") as operation:
            self._saves.settle()
            found: list[list[object]] = []
            if operation.leads:
                writer.wait()
                found = candidates_of(self._index.read())
            candidates = [Candidate(*row) for row in operation.share(found)]
        resumption = Resumption(self._control, self._index, plan, iterators, redistribute, prefix)
        state, resumed = resumption.resume(number, candidates, init_from, self._name, changes)
        with join(f"recording the rules of the run {self._place}") as operation:
            if operation.leads:
                writer.adopt()
            operation.share()
        writer.resumed = True
        writer.resumed_from = self._resumed_from = None if resumed.fresh else resumed.step
        self._resumed = resumed
        self._metrics = -1, None  # those of a step that is trained again are not its own
        self._schedule.resumed(resumed.step)
        writer.restart_time()
        return state, resumed.step

    def step(
        self,
        step: int,
        state: object,
        *,
        metrics: Mapping[str, object] | None = None,
        iterators: Mapping[str, object] | None = None,
        trees: Mapping[str, object] | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> PendingSave | None:
        """Record the end of a training step. If a save is due, start it in the background.

        If no save is due, this takes about a microsecond: no system call, no device access, no communication. The state
        can be donated as soon as this returns.

        Args:
            step: The number of the step, a Python int. Numbers must grow over the whole run, also across epochs.
            state: The state, any PyTree.
            metrics: Names and numbers to record with the step, also JAX scalars, which are read in the background.
                The metrics of process 0 are recorded. They are ignored if the step is not saved.
            iterators: Data iterators by name. Their positions, from `get_state` or `state_dict`, are saved with the
                state. Values can also be plain states. Wrap those that are the same on every process in
                `shardkeep.Global`.
            trees: Further trees by name, such as `{"ema": ...}`, saved in the same commit. `run.load(prefix="ema")`
                loads one.
            metadata: A dict to store with the step, in addition to that of the run.

        Returns:
            A `PendingSave` if a save has started; None if no save was due or the step is already committed.

        Raises:
            MetadataError: A metric is not a number.
            ShardkeepError: An earlier save failed, and `on_error` is "raise". With one process, the next call raises
                this; with several processes, the next call that saves, on all of them.
        """
        enter = self._enter or self._open_and_enter()
        saving, writer = self._saves.last, self._writer
        if saving is not None and saving.error is not None and writer is not None and writer.is_alone:
            self._saves.settle()
        number = step if type(step) is int and step >= 0 else check_number(step)
        self._metrics = number, metrics
        agreed = enter()
        if number < self._schedule.last:
            self._warn_of_going_back(number)
        due = self._schedule.passed(number)
        if not due and self._schedule.seconds is not None and writer is not None:
            due = writer.is_time(number)
        if not due and agreed is None:
            return None
        return self._save(number, Contents(state, metrics, iterators, trees, metadata), agreed)

    def _warn_of_going_back(self, number: int) -> None:
        """Say once that step numbers do not grow: what is saved already is not saved again."""
        if self._went_back or self._writer is None or not self._writer.leads:
            return
        self._went_back = True
        log.warning(
            "the run %s: run.step(%d) comes after step %d. Step numbers must grow over the whole run, also over epochs "
            "and after resume(): until they exceed %d, save_every saves nothing by step number",
            self.path,
            number,
            self._schedule.last,
            self._schedule.last,
        )

    def _open_and_enter(self) -> Callable[[], Agreed | None]:
        self._open()
        assert self._enter is not None
        return self._enter

    def due(self, step: int) -> bool:
        """Whether `run.step(step, ...)` will save. Use this to compute metrics only when they are needed.

        The result is the same on every process, and does not change for a step. Saves that several processes agree on
        at run time (by time, after a signal or on request) are not predicted.

        Args:
            step: The number of the step.
        """
        number = check_number(step)
        if self._schedule.is_due(number):
            return True
        writer = self._writer
        return self._schedule.seconds is not None and writer is not None and writer.is_alone and writer.is_time(number)

    def save(
        self,
        step: int,
        state: object,
        *,
        metrics: Mapping[str, object] | None = None,
        iterators: Mapping[str, object] | None = None,
        trees: Mapping[str, object] | None = None,
        metadata: Mapping[str, object] | None = None,
        pin: bool = False,
    ) -> PendingSave:
        """Save a step now, unless it is already committed and usable. A damaged or abandoned step is replaced.

        Args:
            step: See `step`.
            state: See `step`.
            metrics: See `step`. By default, those that were passed to `step` for the same step number.
            iterators: See `step`.
            trees: See `step`.
            metadata: See `step`.
            pin: Whether to keep the step until `unpin`.

        Returns:
            A `PendingSave`. If the step was already committed, it is done, and its report lists no files.
        """
        (pin,) = check_bools(pin=pin)
        enter = self._enter or self._open_and_enter()
        number = check_number(step)
        if metrics is None and self._metrics[0] == number:
            metrics = self._metrics[1]
        agreed = enter()
        self._schedule.passed(number)
        begun = self._save(number, Contents(state, metrics, iterators, trees, metadata, pin), agreed)
        return begun or PendingSave(BackgroundSave.nothing(self._saves.path_of(number)))

    def _save(self, number: int, contents: Contents, agreed: Agreed | None) -> PendingSave | None:
        """Save a step, on all processes in the same call. None if it is committed already."""
        writer = self._open()
        try:
            background = self._saves.start(writer, number, contents)
            if background is None and contents.pin:
                self.pin(number)
            if agreed is not None and agreed.stop:
                self._stop(number, agreed)
        except BaseException:
            if agreed is not None and writer.agreement is not None:
                writer.agreement.repeat(agreed)  # all processes raise in this call, and try again in the next one
            raise
        return None if background is None else PendingSave(background)

    def _stop(self, number: int, agreed: Agreed) -> None:
        """Wait until the step is durable, and then say that the run stops."""
        if self._saves.settle():
            log.warning("the run %s stops after step %d, which is saved (%s)", self.path, number, agreed.why)
        else:  # with on_error="log"
            log.error("the run %s stops after step %d, which could not be saved (%s)", self.path, number, agreed.why)
        self._stopping = True

    def record(self, step: "int | Step", metrics: Mapping[str, object]) -> None:
        """Record metrics of a step, for example those of an evaluation. No lock is needed.

        If a metric is recorded several times, the latest value is used. In a job with several processes, process 0
        records. If the step is still being saved, this waits for the commit.

        Args:
            step: The number of the step, or a `Step`.
            metrics: Names and numbers.

        Raises:
            MetadataError: A metric is not a number.
            CheckpointNotFoundError: There is no such step.
        """
        saving = self._saves.last
        if saving is not None and saving.path == self._saves.path_of(check_number(step)):
            saving.wait()
        super().record(step, metrics)

    def delete(self, step: "int | Step") -> None:
        """Delete a step. This makes the program the writer of the run.

        Args:
            step: The number of the step, or a `Step`.

        Raises:
            CheckpointNotFoundError: There is no such step, or it was not written by shardkeep. Nothing was deleted.
            ConflictError: The step is pinned or held by a reader, or another program writes to the run. Nothing was
                deleted.
        """
        writer = self._open()
        with join(f"deleting a step of {self.path}") as operation:
            self._saves.settle()
            if operation.leads:
                writer.wait()
                writer.delete(self._entry(step, "delete"))
            operation.share()

    def stop(self) -> None:
        """Request that all processes save at one of their next calls of `step` and then stop. Thread-safe."""
        self._stop_asked = True
        writer = self._writer
        if writer is not None and writer.agreement is not None:
            writer.agreement.request("run.stop()", stop=True)

    def wait(self) -> None:
        """Wait until the background save is committed and deletions are done. Raises the error if one failed."""
        self._saves.settle()
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Wait for the background save and for deletions, and release the lock. Raises the error if one failed.

        A closed run can still be read. Closing it again has no effect.
        """
        self._is_closed, self._enter = True, None
        try:
            self._saves.settle()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _known(self) -> list[tuple[str, str | None]]:
        saving, writer = self._saves.last, self._writer
        doing = "reading" if writer is None else "writing, and about to stop" if self._stopping else "writing"
        return [
            ("open for", doing),
            ("saves", str(self._schedule)),
            *super()._known(),
            ("resumed", None if self._resumed is None else f"at step {self._resumed.step:,}"),
            ("last save", None if saving is None else f"{saving.path}: {saving.describe()}"),
        ]

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            log.error("closing the run %s: %s", self.path, late)
