"""When a run saves: every so many steps, after a certain time, or both."""

import operator
from datetime import timedelta
from typing import Any, SupportsIndex, TypeAlias, cast

from shardkeep.errors import counted
from shardkeep.model.summaries import duration
from shardkeep.runs.durations import parse_duration

_FORMS = (
    'save_every takes a number of steps (1000), a time ("90 s", "15 min", "2 h" or a datetime.timedelta), '
    'or a tuple of both (1000, "15 min")'
)

Interval: TypeAlias = SupportsIndex | str | timedelta
"""How often to save: a number of steps, or a time as a string ("90 s", "15 min", "2 h", "1 d") or a `timedelta`."""


class Schedule:
    """When the next save is due.

    "Every N steps" means the first step at or past each multiple of N, whatever the increment of the step number is.
    Step 0 is never due.

    Args:
        save_every: A number of steps, a time (`"90 s"`, `"15 min"`, `"2 h"` or a `timedelta`), or a tuple of both:
            then a save is due when either of the two is. None: nothing is ever due.

    >>> schedule = Schedule((100, "15 min"))
    >>> schedule.steps, schedule.seconds
    (100, 900.0)
    >>> [step for step in range(0, 330, 8) if schedule.passed(step)]
    [104, 200, 304]
    >>> schedule.is_due(104), schedule.is_due(112), schedule.is_due(400)
    (True, False, True)
    """

    def __init__(self, save_every: Interval | tuple[Interval, Interval] | None) -> None:
        self.steps, self.seconds = _parse(save_every)
        self.last = 0  # the last step that was passed, or that the run was resumed at
        self._next = self._multiple_after(0)
        self._due: set[int] = set()
        self._since: float | None = None

    def __str__(self) -> str:
        """When it saves, in words."""
        due = [f"every {counted(self.steps, 'step')}"] if self.steps is not None else []
        due += [f"every {duration(self.seconds)}"] if self.seconds is not None else []
        return " or ".join(due) or "only when asked"

    def due_by_steps(self, step: int, previous: int) -> bool:
        """Whether a multiple of the number of steps lies after `previous` and not after `step`.

        Args:
            step: The step to judge.
            previous: The step before it, or the one that the run was resumed at.

        >>> Schedule(100).due_by_steps(104, 96), Schedule(100).due_by_steps(112, 104)
        (True, False)
        """
        return self.steps is not None and step > 0 and step // self.steps > max(previous, 0) // self.steps

    def resumed(self, step: int) -> None:
        """Start after a step: all multiples up to it are done."""
        self.last, self._next = step, self._multiple_after(step)
        self._due.clear()

    def passed(self, step: int) -> bool:
        """Note that every process has come to this step, and tell whether it is due. It may be passed twice."""
        if self.last < step < self._next:  # nearly always, so this is all that a step costs
            self.last = step
            return False
        due = self.is_due(step)
        if due:
            self._due.add(step)
        self.last = max(self.last, step)
        self._next = self._multiple_after(self.last)
        return due

    def _multiple_after(self, step: int) -> float:
        return float("inf") if self.steps is None else (max(step, 0) // self.steps + 1) * self.steps

    def is_due(self, step: int) -> bool:
        """Whether a step is due by its number. It depends only on the steps that were passed, and changes nothing."""
        return step in self._due or self.due_by_steps(step, self.last)

    def restart_time(self, now: float) -> None:
        """Count the time from now on: a save has begun."""
        self._since = now

    def due_by_time(self, now: float) -> bool:
        """Whether the time since the last save is over. The first call starts to count. Only process 0 asks.

        Args:
            now: A time in seconds that never goes back, as from `time.monotonic`.

        >>> schedule = Schedule("15 min")
        >>> schedule.due_by_time(50.0), schedule.due_by_time(949.0), schedule.due_by_time(950.0)
        (False, False, True)
        """
        if self.seconds is None:
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.seconds


def _parse(save_every: Any) -> tuple[int | None, float | None]:
    """The number of steps and the number of seconds; None for what was not given."""
    if save_every is None:
        return None, None
    if not isinstance(save_every, tuple):
        return _parse_one(save_every)
    both = [_parse_one(one) for one in cast("tuple[Any, ...]", save_every)]
    steps, seconds = ([pair[i] for pair in both if pair[i] is not None] for i in range(2))
    if len(steps) != 1 or len(seconds) != 1:
        raise ValueError(f"{_FORMS}, not {save_every!r}")
    return cast(int, steps[0]), cast(float, seconds[0])


def _parse_one(given: Any) -> tuple[int | None, float | None]:
    if isinstance(given, str | timedelta):
        try:
            return None, parse_duration(given, "save_every")
        except ValueError:
            raise ValueError(f"{_FORMS}, each greater than 0, not {given!r}") from None
    try:
        steps = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        steps = None
    if steps is None:
        raise TypeError(f"{_FORMS}, not {given!r}")
    if steps <= 0:
        raise ValueError(f"{_FORMS}, each greater than 0, not {given!r}")
    return steps, None
