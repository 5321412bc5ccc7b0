"""`shardkeep verify`: every stored byte against its digest."""

from collections.abc import Sequence
from typing import Any

from shardkeep.cli.output import Output, counted, human, message_of, plain, shows_progress
from shardkeep.cli.parser import ERROR
from shardkeep.errors import ShardkeepError
from shardkeep.reports import Problem, VerifyReport
from shardkeep.verifying import verify as verify_checkpoint


def verify(paths: Sequence[str], output: Output, prefix: str | None) -> int:
    """Check checkpoints; 1 if anything is wrong with one of them, and 2 if one of several could not be checked."""
    if len(paths) == 1:
        report = verify_checkpoint(paths[0], prefix=prefix, progress=shows_progress())
        if output.as_json:
            output.document(_document(report))
        else:
            _show(report, output)
        return 0 if report.ok else 1
    codes = [0]
    documents: list[dict[str, Any]] = []
    for path in paths:
        try:
            report = verify_checkpoint(path, prefix=prefix, progress=shows_progress())
            documents.append(_document(report))
            codes.append(0 if report.ok else 1)
            if not output.as_json:
                _show(report, output)
        except (ShardkeepError, OSError) as error:  # one that cannot be opened must not hide the others
            said = {"type": type(error).__name__, "message": message_of(error)}
            documents.append({"path": path, "ok": False, "error": said})
            codes.append(ERROR)
            if not output.as_json:
                output.line(f"{output.paint('ERROR', 'red')}  {said['message']}")
    if output.as_json:
        output.document(documents)
    else:
        output.line(f"{sum(document['ok'] for document in documents)} of {len(paths)} are ok")
    return max(codes)


def _show(report: VerifyReport, output: Output) -> None:
    rate = human(int(report.nbytes / report.seconds)) if report.seconds else human(0)
    took = f"{human(report.nbytes)} in {counted(report.files, 'file')}, {report.seconds:.2f} s, {rate}/s"
    note = f"; no digests for {counted(report.unchecked, 'leaf', 'leaves')} of another program"
    if report.ok:
        output.line(f"{output.paint('ok', 'green')}  {plain(report.path)}: {took}{note if report.unchecked else ''}")
        return
    found = counted(len(report.problems), "problem") + (f" ({took})" if report.files else "")
    output.line(f"{output.paint('DAMAGED', 'red')}  {plain(report.path)}: {found}")
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
