"""`shardkeep verify`: every stored byte against its digest."""

from typing import Any

from shardkeep.cli.output import Output, counted, human, plain, shows_progress
from shardkeep.reports import Problem, VerifyReport
from shardkeep.verifying import verify as verify_checkpoint


def verify(path: str, output: Output, prefix: str | None) -> int:
    """Check a checkpoint; 1 if anything is wrong with it."""
    report = verify_checkpoint(path, prefix=prefix, progress=shows_progress())
    if output.as_json:
        output.document(_document(report))
    else:
        _show(report, output)
    return 0 if report.ok else 1


def _show(report: VerifyReport, output: Output) -> None:
    rate = report.nbytes / report.seconds / 1e9 if report.seconds else 0.0
    took = f"{human(report.nbytes)} in {counted(report.files, 'file')}, {report.seconds:.2f} s, {rate:.2f} GB/s"
    note = f"; {counted(report.unchecked, 'leaf', 'leaves')} of another program carry no digests"
    if report.ok:
        output.line(f"{output.paint('ok', 'green')}  {plain(report.path)}: {took}{note if report.unchecked else ''}")
        return
    output.line(
        f"{output.paint('DAMAGED', 'red')}  {plain(report.path)}: {counted(len(report.problems), 'problem')} ({took})"
    )
    for problem in report.problems:
        output.line(f"  {plain(_described(problem))}")


def _described(problem: Problem) -> str:
    """What is wrong, with the leaf and the file named once each."""
    start = f"leaf {problem.leaf!r}: " if problem.leaf is not None else ""
    reason = problem.message
    while start and reason.startswith(start):
        reason = reason.removeprefix(start)
    return f"{start}{reason}" + ("" if problem.file in reason else f" ({problem.file})")


def _document(report: VerifyReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "ok": report.ok,
        "stored_bytes": report.nbytes,
        "files": report.files,
        "seconds": report.seconds,
        "gb_per_second": report.nbytes / report.seconds / 1e9 if report.seconds else 0.0,
        "unchecked": report.unchecked,
        "problems": [{"leaf": p.leaf, "file": p.file, "message": p.message} for p in report.problems],
    }
