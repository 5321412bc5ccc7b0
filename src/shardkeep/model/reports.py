"""What `save` and `verify` return."""

from dataclasses import dataclass, field

from shardkeep.errors import counted
from shardkeep.model.markup import Code, Gauge, Html, facts, line, panel, table
from shardkeep.model.summaries import duration, human

_MOST_SHOWN = 20  # problems


class Warmth:
    """Tracks the reading of saved files into the page cache, so that the next load does not need the disk."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the files that this process wrote are in the page cache.

        Args:
            timeout: The maximum number of seconds to wait. None waits indefinitely.

        Returns:
            Whether all of them were read, and no newer checkpoint has replaced them in the cache since. Files are not
            read if they have less than 16 MiB in total, if they are not on a local disk, if the available memory is
            less than four times the size of the checkpoint, if `SHARDKEEP_WARM=never`, or if they are deleted first.
            The kernel may still evict them later when memory is short.

        >>> import numpy as np, shardkeep
        >>> report = shardkeep.save(tmp / "step_2", {"w": np.zeros(1000)})
        >>> report.warm.wait()  # it is too small
        False
        """
        return False


NOT_WARMED = Warmth()


@dataclass(frozen=True, repr=False)
class SaveReport:
    """What a save wrote, and how long it took.

    Attributes:
        path: Where the checkpoint was saved.
        nbytes: Bytes written to the checkpoint's data files.
        files: The number of these files.
        seconds: How long the save took, excluding the time it waited for earlier saves.
        phases: Seconds per phase: snapshot (which blocks the caller of `save_async`), transfer (until the last array
            has arrived from an accelerator; absent without accelerators), write, sync and commit.
        share: Bytes that this process wrote, if several processes saved together.

    >>> import numpy as np, shardkeep
    >>> report = shardkeep.save(tmp / "step_1", {"w": np.zeros(1000)})
    >>> report.files, report.nbytes >= 8000, list(report.phases)
    (1, True, ['snapshot', 'write', 'sync', 'commit'])
    """

    path: str
    nbytes: int
    files: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict[str, float])
    share: int = 0

    @property
    def gb_per_second(self) -> float:
        """Gigabytes written per second, over all phases."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def warm(self) -> Warmth:
        """After the commit, the files that this process wrote are read into the page cache in the background.

        `warm.wait(timeout)` waits until that is done, and returns whether they are all in the cache.
        """
        return self.__dict__.get("_warm", NOT_WARMED)

    def __str__(self) -> str:
        steps = [f"{name} {seconds:.3f} s" for name, seconds in self.phases.items()]
        details = "; ".join(part for part in (rate_of(self.nbytes, self.seconds), ", ".join(steps)) if part)
        written = f"{self.path}: {self.nbytes:,} bytes in {counted(self.files, 'file')}, {self.seconds:.3f} s"
        return f"{written} ({details})" if details else written

    def __repr__(self) -> str:
        return f"<SaveReport {self.path}: {self.nbytes:,} bytes in {counted(self.files, 'file')}, {self.seconds:.3f} s>"

    def _repr_html_(self) -> str:
        return panel("SaveReport", Code(self.path), parts_of(self))


def parts_of(report: SaveReport) -> list[Html]:
    """What a save wrote and how long it took, for a notebook."""
    rate = rate_of(report.nbytes, report.seconds)
    about = [
        ("written", f"{human(report.nbytes)} in {counted(report.files, 'file')}"),
        ("by this process", human(report.share) if 0 < report.share < report.nbytes else None),
        ("time", f"{duration(report.seconds)} ({rate})" if rate else duration(report.seconds)),
    ]
    whole = sum(report.phases.values()) or 1.0
    rows = [[name, Gauge(duration(seconds), seconds / whole)] for name, seconds in report.phases.items()]
    return [facts(about), *([table(("phase", "time"), rows)] if rows else [])]


def with_warmth(report: SaveReport, warm: Warmth) -> SaveReport:
    """The report, which then knows about the page cache. That is no field: `dataclasses.asdict` gives plain values."""
    object.__setattr__(report, "_warm", warm)
    return report


@dataclass(frozen=True, repr=False)
class Problem:
    """A problem found by `verify`.

    Attributes:
        leaf: The key of the damaged leaf; None if the damage is not in a leaf's data.
        file: The damaged or missing file.
        message: A description of the problem.
    """

    leaf: str | None
    file: str
    message: str

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"<Problem: {self.message}>"


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """The result of `verify`. A report is truthy if no problems were found.

    Attributes:
        path: The checkpoint that was verified.
        nbytes: Bytes read.
        files: The number of files read.
        seconds: How long it took.
        unchecked: The number of leaves without digests, because another program wrote them.
        problems: The problems found, a tuple of `Problem`.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "step_1", {"w": np.zeros(1000)})
    >>> report = shardkeep.verify(tmp / "step_1")
    >>> report.ok, report.problems
    (True, ())
    """

    path: str
    nbytes: int
    files: int
    seconds: float
    unchecked: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether no problems were found: every stored byte matches its digest."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"{self.path}: {self._found()}"
        shown = [f"  {problem}" for problem in self.problems[:_MOST_SHOWN]]
        more = len(self.problems) - len(shown)
        if more:
            shown.append(f"  … and {counted(more, 'more problem')}")
        return "\n".join([f"{self.path}: {self._found()}", *shown])

    def __repr__(self) -> str:
        return f"<VerifyReport {self.path}: {self._found()}>"

    def _repr_html_(self) -> str:
        about = [
            ("read", f"{human(self.nbytes)} in {counted(self.files, 'file')}"),
            ("time", duration(self.seconds)),
            ("without digests", counted(self.unchecked, "leaf", "leaves") if self.unchecked else None),
        ]
        found = "✓ no problems" if self.ok else f"✗ {counted(len(self.problems), 'problem')}"
        parts = [line(found, heading=True), facts(about)]
        if self.problems:
            rows = [[Code(problem.leaf or "-"), problem.message] for problem in self.problems[:_MOST_SHOWN]]
            parts.append(table(("leaf", "problem"), rows, wraps=(1,)))
        more = len(self.problems) - _MOST_SHOWN
        if more > 0:
            parts.append(line(f"… and {counted(more, 'more problem')}"))
        return panel("VerifyReport", Code(self.path), parts)

    def _found(self) -> str:
        if not self.ok:
            return counted(len(self.problems), "problem")
        note = f"; {counted(self.unchecked, 'leaf has', 'leaves have')} no digests" if self.unchecked else ""
        return f"no problems in {self.nbytes:,} bytes in {counted(self.files, 'file')}{note}"


def rate_of(nbytes: int, seconds: float) -> str:
    """Bytes per second in the unit that suits them; nothing if no time has passed.

    >>> rate_of(3_000_000_000, 2.0), rate_of(16_000, 0.01), rate_of(300, 0.1), rate_of(1, 0.0)
    ('1.50 GB/s', '1.6 MB/s', '3.0 kB/s', '')
    """
    if not seconds:
        return ""
    rate = nbytes / seconds
    if rate >= 1e9:
        return f"{rate / 1e9:.2f} GB/s"
    return f"{rate / 1e6:.1f} MB/s" if rate >= 1e6 else f"{rate / 1e3:.1f} kB/s"
