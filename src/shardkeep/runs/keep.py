"""Which steps of a run stay: a pure function of the steps and the time."""

import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from shardkeep.errors import counted
from shardkeep.model.markup import facts, panel
from shardkeep.model.summaries import duration
from shardkeep.runs.durations import parse_duration
from shardkeep.runs.steps import Step


@dataclass(frozen=True, repr=False)
class Keep:
    """Which steps of a run to keep. A step is kept if any of the rules keeps it; at least one rule is required.

    Rules apply to usable steps only, not to damaged or abandoned ones. Regardless of the rules, a `Run` never deletes
    the newest usable step, pinned steps, steps that a reader holds, checkpoints that were not saved by a `Run`, and,
    until a newer step is committed, the step it resumed from.

    Args:
        last: Keep this many of the newest steps.
        every: Keep the first step at or past each multiple of this number.
        best: Keep this many steps with the best `metric`. NaN is never best. A step without the metric is kept until
            it has been recorded, other than as NaN, for `best` newer steps.
        metric: The name of the metric for `best` and `run.best()`.
        mode: Whether smaller ("min") or larger ("max") values of the metric are better.
        within: Keep steps that were saved within this time: "12 h", "7 d", or a `datetime.timedelta`.

    >>> keep = Keep(last=3, every=10_000, best=2, metric="eval/loss", mode="min")
    >>> Keep(best=2)
    Traceback (most recent call last):
    ValueError: Keep(best=2): best needs metric= and mode=, for example metric="eval/loss", mode="min"
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] | None = None
    within: str | datetime.timedelta | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            _check_count(name, getattr(self, name))
        if self.within is not None:
            parse_duration(self.within, "within")
        if self.mode not in (None, "min", "max"):
            raise ValueError(f'mode={self.mode!r} is unknown; pass "min" if a smaller metric is better, or "max"')
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise ValueError(f"metric={self.metric!r} is not the name of a metric; pass a string")
        if self.best is not None and (self.metric is None or self.mode is None):
            raise ValueError(
                f'Keep(best={self.best}): best needs metric= and mode=, for example metric="eval/loss", mode="min"'
            )
        if (self.metric is None) != (self.mode is None):
            raise ValueError('metric= and mode= belong together, for example metric="eval/loss", mode="min"')
        if self.last is None and self.every is None and self.best is None and self.within is None:
            raise ValueError(
                "Keep() has no rule, so it would keep the newest step only; pass last=1 for that, or keep=None to the "
                "Run to keep every step"
            )

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return f"Keep({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"

    def _repr_html_(self) -> str:
        newest, best = counted(self.last or 0, "newest step"), counted(self.best or 0, "step")
        better = "smallest" if self.mode == "min" else "largest"
        rows = [
            ("last", None if self.last is None else f"the {newest}"),
            ("every", None if self.every is None else f"the first step at or past each multiple of {self.every:,}"),
            ("best", None if self.best is None else f"the {best} with the {better} {self.metric}"),
            ("within", None if self.within is None else f"steps of the last {_span(self.within)}"),
        ]
        return panel("Keep", "these steps stay", [facts(rows)])


def choose_steps(rules: Keep, steps: Iterable[Step], now: datetime.datetime) -> dict[int, tuple[str, ...]]:
    """The steps to keep, by number, with the reasons. Steps that are not in the result may be deleted.

    Args:
        rules: Which steps to keep.
        steps: The steps, in any order. Steps that are not usable are ignored.
        now: The current time, for `within`.
    """
    usable = sorted((step for step in steps if step.is_usable), key=lambda step: step.number, reverse=True)
    why: dict[int, tuple[str, ...]] = {}

    def keep(some: Iterable[Step], reason: str) -> None:
        for step in some:
            why[step.number] = (*why.get(step.number, ()), reason)

    keep(usable[:1], "newest")
    keep(usable[: rules.last or 0], "last")
    if rules.every is not None:
        # From the newest on, so that the lowest number past each multiple is what remains.
        first = {step.number // rules.every: step for step in usable if step.number >= rules.every}
        keep(first.values(), "every")
    if rules.best is not None and rules.metric is not None:
        keep(rank_steps(rules, usable)[: rules.best], "best")
        keep(_awaiting(usable, rules.best, rules.metric), "awaiting metric")
    if rules.within is not None:
        age = datetime.timedelta(seconds=parse_duration(rules.within, "within"))
        keep((step for step in usable if step.time is not None and now - step.time <= age), "within")
    return why


def rank_steps(rules: Keep, steps: Iterable[Step]) -> list[Step]:
    """The usable steps that have the metric of the rules, best first. On ties, the newer step is first."""
    metric, sign = rules.metric, -1.0 if rules.mode == "max" else 1.0
    if metric is None:
        return []
    known = [s for s in steps if s.is_usable and metric in s.metrics and not math.isnan(s.metrics[metric])]
    return sorted(known, key=lambda step: (sign * step.metrics[metric], -step.number))


def _awaiting(newest_first: Sequence[Step], best: int, metric: str) -> list[Step]:
    """The steps without the metric that fewer than `best` newer steps have. NaN is as if they never had one."""
    awaiting: list[Step] = []
    have = 0
    for step in newest_first:
        if metric in step.metrics:
            have += not math.isnan(step.metrics[metric])
        elif have < best:
            awaiting.append(step)
    return awaiting


def _span(within: str | datetime.timedelta) -> str:
    return duration(parse_duration(within, "within"))


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} is not a number of steps; pass an int greater than 0")
    if value <= 0:
        raise ValueError(f"{name}={value} must be greater than 0; leave it out to have no such rule")
