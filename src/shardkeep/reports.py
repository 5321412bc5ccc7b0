"""What a save, a load or a check tells when it is done."""

from dataclasses import dataclass, field

from shardkeep.errors import counted


@dataclass(frozen=True)
class SaveReport:
    """Where a save went and what it took: bytes and files written, seconds for each phase."""

    path: str
    nbytes: int
    files: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict[str, float])  # snapshot, write, sync, commit
    share: int = 0  # bytes that this process wrote, of several that saved together

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        steps = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        return (
            f"{self.path}: {self.nbytes:,} bytes in {counted(self.files, 'file')}, "
            f"{self.seconds:.3f} s ({self.gb_per_second:.2f} GB/s; {steps})"
        )


@dataclass(frozen=True)
class Problem:
    """One thing `verify` found: the leaf (None for what belongs to all), the file, and what is wrong."""

    leaf: str | None
    file: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found. `ok` is True (and the report itself is true) if every byte is as it was saved."""

    path: str
    nbytes: int
    files: int
    seconds: float
    unchecked: int  # leaves that carry no digests, because another program wrote them
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            note = f"; no digests for {counted(self.unchecked, 'leaf', 'leaves')}" if self.unchecked else ""
            whole = f"{self.nbytes:,} bytes in {counted(self.files, 'file')} are as they were saved"
            return f"{self.path}: {whole}{note}"
        found = counted(len(self.problems), "problem")
        return "\n".join([f"{self.path}: {found}", *(f"  {p}" for p in self.problems)])
