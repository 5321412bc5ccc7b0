"""At which steps permanent checkpoints are due."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class CheckpointInterval:
    """How often a Checkpointer saves permanent checkpoints, and up to which step.

    Attributes:
        every: A checkpoint is due at each step that is a multiple of this.
        until: The last step that this interval is for. None: all steps after the previous interval.

    >>> [CheckpointInterval(every=100, until=1000), CheckpointInterval(every=1000)][-1].until is None
    True
    """

    every: int
    until: int | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"CheckpointInterval(every={self.every!r}): every must be at least 1")


def check_policies(policies: Sequence[CheckpointInterval]) -> None:
    """Raise a `ValueError` unless the policies are sorted by `until`, and only the last has none."""
    untils = [each.until for each in policies]
    if None in untils[:-1]:
        raise ValueError("only the last of step_policies may have an 'until' of None")
    ends = [until for until in untils if until is not None]
    if any(later <= earlier for earlier, later in pairwise(ends)):
        raise ValueError(f"step_policies must be sorted by 'until', each later than the one before, not {ends}")


def is_due(policies: Sequence[CheckpointInterval], step: int) -> bool:
    """Whether the policy that a step falls under makes a checkpoint due.

    >>> policies = [CheckpointInterval(10, until=20), CheckpointInterval(50)]
    >>> [step for step in range(1, 101) if is_due(policies, step)]
    [10, 20, 50, 100]
    """
    every = next((each.every for each in policies if each.until is None or each.until >= step), None)
    return every is not None and step % every == 0
