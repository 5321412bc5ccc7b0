"""What the processes of one call must have in common, and the error that names the first difference."""

from collections.abc import Iterable, Sequence

from shardkeep.errors import ProcessError
from shardkeep.model.digests import digest
from shardkeep.processes.group import LEADER
from shardkeep.processes.operation import Operation, tell_end_at_exit

SAME = "must be the same on every process"  # of a leaf that each process has by itself
_SHOWN = 200  # characters of a line around the difference
_NOTHING = "(nothing)"
tell_end_at_exit()  # of every program that can save or load, even if it never does


def compare(operation: Operation, lines: Iterable[str]) -> None:
    """Raise a `ProcessError` on every process that names the first difference, unless all pass the same lines.

    A line begins with its subject ("path …", "leaf a/b: …"). Lines with the same subject are compared. A process
    that is alone has nothing to compare, and does not even make the lines.
    """
    if operation.size == 1:
        return
    lines = list(lines)
    brought = operation.gather(_digest("\n".join(lines)))
    if operation.share(len(set(brought)) == 1):
        return
    by_subject: dict[str, str] = {}
    follows: dict[str, bool] = {}
    for line in lines:
        name = _digest(line.partition(": " if line.startswith(("leaf ", "writers of ")) else " ")[0])[:12]
        by_subject[name] = f"{by_subject[name]}\n{line}" if name in by_subject else line
        follows[name] = _follows_from_leaves(line)
    listed = operation.gather([[name, _digest(line)[:12], follows[name]] for name, line in by_subject.items()])
    name = operation.share(_first_difference(listed) if operation.leads else None)
    told = operation.gather(by_subject.get(name, _NOTHING))
    if operation.leads:
        different = next(i for i, line in enumerate(told) if line != told[LEADER])
        ours, theirs = _around_difference(told[LEADER], told[different])
        result = "loaded" if operation.what.startswith("loading") else "written"
        raise ProcessError(
            f"{operation.what}: processes passed different arguments; nothing was {result}\n"
            f"  process {LEADER}: {ours}\n  process {different}: {theirs}{_advice(told[LEADER], told[different])}"
        )
    operation.share()


def _advice(ours: str, theirs: str) -> str:
    """What to do about a leaf that each process has by itself, with another value, or that one of them lacks."""
    if not all(line == _NOTHING or (line.startswith("leaf ") and SAME in line) for line in (ours, theirs)):
        return ""
    return (
        "\nA value that is meant to differ between processes, such as the state of a data iterator, is saved as "
        "shardkeep.PerProcess(value)"
    )


def _digest(text: str) -> str:
    return digest(text.encode("utf-8", "surrogatepass"))


def _follows_from_leaves(line: str) -> bool:
    """Whether this may differ only because leaves do; then the leaves are shown."""
    return line.startswith(("metadata ", "structure ", "writers of "))


def _first_difference(listed: Sequence[Sequence[tuple[str, str, bool]]]) -> str:
    """The name whose lines differ between processes; of several, the one that comes first on any of them."""
    found = [{name: line for name, line, _ in lines} for lines in listed]
    places = [
        (follows, at, process, name)
        for process, lines in enumerate(listed)
        for at, (name, _, follows) in enumerate(lines)
    ]
    return next(name for *_, name in sorted(places) if len({lines.get(name, "") for lines in found}) > 1)


def _around_difference(a: str, b: str) -> tuple[str, str]:
    """Two lines, long ones cut to where they differ; their subject is kept."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return _cut_out(a, at), _cut_out(b, at)


def _cut_out(line: str, at: int) -> str:
    start = line[: at - _SHOWN // 4].partition(" ")[0] + " …" if at > _SHOWN else ""
    rest = line[at - _SHOWN // 4 :] if start else line
    return start + (rest if len(rest) <= 2 * _SHOWN else rest[: 2 * _SHOWN] + "…")
