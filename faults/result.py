"""What one part of the sweep found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One row of the table in docs/reliability.md: a fault, how it was made, and what it broke."""

    fault: str  # what happens, as a user would say it
    how: str  # how it was made
    points: int  # at how many different moments, places or files
    violations: tuple[str, ...]  # each promise that was broken, with the point where; none is the aim
    note: str = ""
