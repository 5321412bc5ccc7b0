"""A step of a run as a value, and the names of the directories that steps are saved in."""

import datetime
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardkeep.model.manifest import OURS
from shardkeep.model.markup import Cell, Code, facts, panel
from shardkeep.model.summaries import brief, cut, human

State = Literal["usable", "damaged", "abandoned", "deleting"]


@dataclass(frozen=True, repr=False)
class Step:
    """A committed step of a run, as returned by `run.steps()`, `run.latest()` and `run.best()`.

    Attributes:
        number: The training step.
        path: The path or URL of the checkpoint, to pass to `shardkeep.load`.
        metrics: The metrics that were saved or recorded for the step, as floats.
        metadata: The metadata it was saved with.
        time: When it was saved, in UTC.
        nbytes: The size of the arrays in all its trees.
        stored_bytes: The size of all data files.
        kept: Why the step is kept: any of "newest", "last", "every", "best", "awaiting metric", "within", "pinned",
            "resumed from" and "not saved by a Run". Empty if the step would be deleted, and for steps that are not
            usable, which retention ignores.
        state: "usable"; "damaged" if `resume` found damage, or the manifest cannot be read; "abandoned" if
            `resume(step=...)` went back to an earlier step; "deleting" while the step is being deleted.
        reason: The problem with a damaged step.
        save_id: The id of the save that wrote it. It changes if the step is saved again.
        source: What wrote it: "shardkeep", or the format of another program, such as "orbax".
    """

    number: int
    path: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    time: datetime.datetime | None = None
    nbytes: int = 0
    stored_bytes: int = 0
    kept: tuple[str, ...] = ()
    state: State = "usable"
    reason: str = ""
    save_id: str = ""
    source: str = OURS

    @property
    def is_usable(self) -> bool:
        """Whether the step can be resumed from, as far as is known without reading its data."""
        return self.state == "usable"

    def __repr__(self) -> str:
        state = "" if self.is_usable else f", {self.state}"
        return f"<Step {self.number}{state}{''.join(f', {text}' for text in self._measured(4))}: {self.path}>"

    def _measured(self, most: int) -> list[str]:
        return [f"{cut(name, 40)}={value:.6g}" for name, value in list(self.metrics.items())[:most]]

    def _repr_html_(self) -> str:
        metadata = [f"{cut(str(name), 40)}={brief(value)}" for name, value in list(self.metadata.items())[:8]]
        rows: list[tuple[str, Cell | None]] = [
            ("state", self.state if self.is_usable else f"{self.state}: {self.reason}".removesuffix(": ")),
            ("metrics", ", ".join(self._measured(8))),
            ("metadata", ", ".join(metadata)),
            ("saved", None if self.time is None else self.time.isoformat(" ", "seconds")),
            ("size", human(self.nbytes)),
            ("kept", ", ".join(self.kept)),
            ("source", None if self.source == OURS else self.source),
            ("path", Code(self.path)),
        ]
        return panel("Step", f"{self.number:,}", [facts(rows)])


_NUMBERED = re.compile(r"(?P<before>|[^.].*?)(?P<number>[0-9]{1,18})")  # the name of what may be a step


class StepName:
    """The name of a step's directory: text with one `{}` for the number.

    Args:
        pattern: For example "step_{}", or "step_{:08d}" for numbers of equal width.

    >>> name = StepName("step_{}")
    >>> name.of(1000), name.parse("step_1000"), name.parse("step_01"), name.parse("best")
    ('step_1000', 1000, None, None)
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        try:
            parts = list(string.Formatter().parse(pattern))
            fields = [part for part in parts if part[1] is not None]
            if len(fields) != 1 or fields[0][1] not in ("", "0") or fields[0][3]:
                raise ValueError
            text = "".join(re.escape(part[0]) + (r"([0-9]+)" if part[1] is not None else "") for part in parts)
            self._expression = re.compile(text)
            usable = self.parse(self.of(0)) == 0 and self.parse(self.of(1234567)) == 1234567
        except (ValueError, TypeError, IndexError, KeyError):
            usable = False
        if not usable:
            raise ValueError(
                f"name={pattern!r} does not give each step a name of its own; pass text with one {{}} for the number, "
                'such as "step_{}" or "step_{:08d}"'
            )
        if "/" in pattern or "\\" in pattern or pattern.startswith(".") or not pattern.isprintable():
            raise ValueError(f"name={pattern!r} must be the name of a directory: no slashes, no dot at the start")

    def of(self, number: int) -> str:
        """The name of the directory of a step."""
        return self.pattern.format(number)

    def parse(self, text: str) -> int | None:
        """The step that a directory is for; None if the name is not one of a step."""
        found = self._expression.fullmatch(text)
        if found is None:
            return None
        number = int(found[1])
        return number if self.of(number) == text else None


def number_in(text: str) -> int | None:
    """The number at the end of the name of a directory that may be a step, whatever the run calls its steps.

    >>> number_in("ckpt_0100"), number_in("best")
    (100, None)
    """
    found = _NUMBERED.fullmatch(text)
    return int(found["number"]) if found else None


def pattern_of(text: str) -> str | None:
    """What `name=` would give a step the name of a directory; None if it does not end in a number.

    >>> pattern_of("ckpt_0100"), pattern_of("100"), pattern_of("best")
    ('ckpt_{:04d}', '{}', None)
    """
    found = _NUMBERED.fullmatch(text)
    if found is None:
        return None
    digits = found["number"]
    width = f":0{len(digits)}d" if digits[0] == "0" and len(digits) > 1 else ""
    return found["before"].replace("{", "{{").replace("}", "}}") + "{" + width + "}"
