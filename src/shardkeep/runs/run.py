"""A training run: one object that saves when it is time, resumes, deletes old steps, and stops in an orderly way."""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from shardkeep.layouts.registry import layout_named
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

_LAST_THREE = Keep(last=3)


class Run(ReadableRun):
    """A training run: a directory of steps, each an ordinary checkpoint, and what looks after them.

    Opening a run takes no lock and writes nothing, so evaluators open it to read. The first call of `resume`, `step` or
    `save` makes this program its writer, of which there is one at a time.

    In a job with several JAX processes, all of them open the run and make the same calls of `resume`, `step`, `save`,
    `load`, `delete` and `close`.

    Args:
        path: The directory of the run, local or a `gs://` or `s3://` URL.
        save_every: When `step` saves: a number of steps, a time ("15 min", or a `timedelta`), or a tuple of both. A
            number N means the first step at or past each multiple of N. None: only `save` saves.
        keep: Which steps stay; see `Keep`. None keeps all.
        name: The names of the steps' directories, with `{}` for the number.
        format: How arrays are stored, as for `shardkeep.save`.
        metadata: A dict to store with every step.
        on_preemption: What to do on one of `signals`: "save" saves at the next call of `step` and sets `stopping`;
            "ignore" does not handle signals.
        signals: The signals that announce the end of the job.
        on_error: "raise" raises what went wrong with an earlier save at a later call of `step` or `save`; "log" only
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
        keep: Keep | None = _LAST_THREE,
        name: str = "step_{}",
        format: FormatName = "safetensors",
        metadata: Mapping[str, object] | None = None,
        on_preemption: Literal["save", "ignore"] = "save",
        signals: Sequence[str] = ("SIGTERM",),
        on_error: Literal["raise", "log"] = "raise",
    ) -> None:
        if keep is not None and not isinstance(keep, Keep):
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
        self._stopping = False
        self._resumed: Resumed | None = None
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
        """What `resume` did; None before it was called."""
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
            parts = (self._control, self._index, self._name, self._keep, self._schedule, self._in_use)
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
        """The state to train with, and its step: of the newest usable step, or a new one and 0.

        The step is loaded and verified. If it is damaged, that is logged, the step is marked, and the one before it is
        tried; `run.resumed` says what happened. Other errors are raised and change nothing. A run that has steps is
        never started anew.

        Args:
            template: A function that makes a new state, the state itself (a tree of arrays), or a tree of abstract
                arrays. A function is called under `jax.jit`, so that a new state is made where it belongs. A new and a
                loaded state have the same shardings: those of the template's arrays, of a function jitted with
                `out_shardings`, of `shardings=`, or of `mesh=` with `partition_rules=`. Leaves that are not data, such
                as functions, are kept from the template.
            iterators: Data iterators by name, whose saved positions are restored: with `set_state` or
                `load_state_dict`. For a state in place of an iterator, see `run.resumed.iterators`.
            step: Go back to this step. Later steps are marked as abandoned, and are replaced when they are saved again.
            init_from: If the run has no steps yet, load this checkpoint, or the newest one of this run, and begin at
                step 0.
            redistribute: A function of the iterators' states (a list by process) and the number of processes, which
                returns that many states. It is needed if the number of processes has changed.
            **arguments: Arguments of `shardkeep.load`: `mesh`, `partition_rules`, `shardings`, `dtype`, `include`,
                `verify` and others. `prefix` is for checkpoints that no Run saved: which of their trees is the state.
                Default: the one without a prefix, or the only one. With `init_from`, the arguments `remap`, `missing`
                and `extra` are for that checkpoint alone; `remap` needs it. With `missing="keep"`, leaves that it does
                not have are made by the template: of a function, only those leaves are computed.

        Returns:
            The state and the step that it was saved at.

        Raises:
            IntegrityError: There are steps, and none of them can be used.
            ConflictError: Another program writes to the run; or a step after `step` is pinned, which going back would
                abandon.
            ShardingError: There are several devices, and nothing says how to use them.
            RemapError: A rule cannot be applied, or there is no `init_from` to apply it to.
            MissingLeafError: The step has no state of one of the iterators.
            CheckpointExistsError: There are no steps, but numbered checkpoints of another name; see `name` of `Run`.
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
        if writer.leads:
            writer.note(self._index.read())
        writer.resumed = True
        writer.resumed_from = self._resumed_from = None if resumed.fresh else resumed.step
        self._resumed = resumed
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
        """Tell the run that a training step has ended. If a save is due, it begins, and goes on in the background.

        If none is due, this costs a microsecond: no system call, no access to a device, no message. The state may be
        donated as soon as this returns.

        Args:
            step: The number of the step, a Python int.
            state: The state, any PyTree.
            metrics: Names and numbers to record with the step, also JAX scalars, which are read in the background.
                Those of process 0 are recorded. They are looked at only if the step is saved.
            iterators: Data iterators by name, whose positions are saved with the state: with `get_state` or
                `state_dict`, or states themselves. `shardkeep.Global` wraps one that is the same on every process.
            trees: Further trees by name, such as `{"ema": ...}`, saved in the same commit. `run.load(prefix="ema")`
                loads one.
            metadata: A dict to store with the step, beside the one of the run.

        Returns:
            A `PendingSave` if a save has begun; None if none was due, or the step is committed already.

        Raises:
            MetadataError: A metric is not a number.
            ShardkeepError: An earlier save failed (unless `on_error="log"`): with one process, at the next call;
                with several, at the next call that saves, on all of them.
        """
        enter = self._enter or self._open_and_enter()
        saving, writer = self._saves.last, self._writer
        if saving is not None and saving.error is not None and writer is not None and writer.is_alone:
            self._saves.settle()
        number = step if type(step) is int and step >= 0 else check_number(step)
        agreed = enter()
        due = self._schedule.passed(number)
        if not due and self._schedule.seconds is not None and writer is not None:
            due = writer.is_time(number)
        if not due and agreed is None:
            return None
        return self._save(number, Contents(state, metrics, iterators, trees, metadata), agreed)

    def _open_and_enter(self) -> Callable[[], Agreed | None]:
        self._open()
        assert self._enter is not None
        return self._enter

    def due(self, step: int) -> bool:
        """Whether `run.step(step, ...)` will save, for example to compute metrics only then.

        The answer is the same on every process, and does not change for a step. A save for which several processes
        have to agree on a call (by time, by a signal or on request) is not foreseen.

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
        """Save a step in any case, unless it is already committed and usable. A damaged or abandoned one is replaced.

        Args:
            step: See `step`.
            state: See `step`.
            metrics: See `step`.
            iterators: See `step`.
            trees: See `step`.
            metadata: See `step`.
            pin: Whether to keep the step until `unpin`.

        Returns:
            A `PendingSave`. If the step is already committed, it is done, and its report has no files.
        """
        enter = self._enter or self._open_and_enter()
        number = check_number(step)
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
        """Record metrics of a step, for example those of an evaluation. An evaluator needs no lock for this.

        Of several values of one metric, the latest is used. In a job with several processes, process 0 records. If the
        step is just being saved, this waits for its commit.

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
        """Delete a step. This program becomes the writer of the run.

        Args:
            step: The number of the step, or a `Step`.

        Raises:
            CheckpointNotFoundError: There is no such step, or another program wrote it. Nothing was deleted.
            ConflictError: It is pinned, a reader holds it, or another program writes to the run. Nothing was deleted.
        """
        writer = self._open()
        with join(f"deleting a step of {self.path}") as operation:
            self._saves.settle()
            if operation.leads:
                writer.wait()
                writer.delete(self._entry(step, "delete"))
            operation.share()

    def stop(self) -> None:
        """Have all processes save at one of their next calls of `step` and then stop. Threads may call it."""
        self._stop_asked = True
        writer = self._writer
        if writer is not None and writer.agreement is not None:
            writer.agreement.request("run.stop()", stop=True)

    def wait(self) -> None:
        """Wait until the save in the background is committed, and deletions are done. Raises what went wrong."""
        self._saves.settle()
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Wait for the save in the background and for deletions, and give up the lock. Raises what went wrong.

        The run can still be read afterwards. Closing it twice is harmless.
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
