"""`shardkeep verify`: check every stored byte of one checkpoint, or of several, against its digest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardkeep.catalog import find
from shardkeep.cli.output import Output, counted, human, message_of, plain, shows_progress
from shardkeep.cli.parser import ERROR, FINDINGS
from shardkeep.converting.survey import CheckpointState, SurveyEntry, look, survey
from shardkeep.errors import ShardkeepError
from shardkeep.loading.verify import verify as verify_checkpoint
from shardkeep.model.reports import Problem, VerifyReport
from shardkeep.stores.location import Location, location

_LABELS: dict[CheckpointState | None, str] = {"unfinished": "UNFINISHED", "saving": "SAVING", "deleting": "DELETING"}


@dataclass(frozen=True)
class _Verdict:
    """The result for one checkpoint: a report, an error, or neither if it is being saved or deleted (see `state`)."""

    path: str
    report: VerifyReport | None = None
    error: Exception | None = None
    label: str = "DAMAGED"  # if there are problems
    alone: bool = False  # the checkpoint is the path that was given, not one found below it
    state: CheckpointState = "saving"

    @property
    def code(self) -> int:
        if self.report is None:
            return 0 if self.error is None else ERROR
        return 0 if self.report.ok else FINDINGS


def verify(paths: Sequence[str], output: Output, prefix: str | None) -> int:
    """Check the checkpoints at and below some paths.

    Returns:
        0 if all is well, 1 if something is damaged, 2 if a checkpoint could not be opened.
    """
    verdicts: list[_Verdict] = []
    for path in paths:
        for verdict in _verdicts(path, prefix):
            if len(paths) == 1 and verdict.alone and verdict.error is not None:
                raise verdict.error
            verdicts.append(verdict)
            if not output.as_json:
                _show(verdict, output)
    one = len(verdicts) == 1 and verdicts[0].alone
    if output.as_json:
        documents = [_document(verdict) for verdict in verdicts]
        output.document(documents[0] if one else documents)
    elif not one:
        checked = [verdict for verdict in verdicts if verdict.report is not None or verdict.error is not None]
        fine = sum(verdict.code == 0 for verdict in checked)
        output.line(f"{fine} of {counted(len(checked), 'checkpoint')} ok")
    return max(verdict.code for verdict in verdicts)


def _verdicts(path: str, prefix: str | None) -> Iterator[_Verdict]:
    """Every checkpoint that `ls` lists at and below a path, each once, even if several links lead to it."""
    try:
        listed = survey(path)
    except (ShardkeepError, OSError):
        listed = []  # what is wrong with the path is found below
    if not listed or (len(listed) == 1 and _is_at(listed[0], path)):
        yield _check(path, prefix, alone=True)
        return
    seen: set[Location] = set()
    for found in listed:
        place = location(found.path).resolve()
        if place in seen:
            continue
        seen.add(place)
        # A save that is running has committed nothing yet: there is nothing to check, and nothing is wrong.
        running = found.state in ("saving", "deleting")
        yield _Verdict(found.path, state=found.state) if running else _check(found.path, prefix)


def _is_at(found: SurveyEntry, path: str) -> bool:
    """Whether a checkpoint is the one at a path, not one below it."""
    try:
        return found.target is not None and find(location(path)).where == found.target.where
    except (ShardkeepError, OSError):
        return False


def _check(path: str, prefix: str | None, alone: bool = False) -> _Verdict:
    try:
        report = verify_checkpoint(path, prefix=prefix, progress=shows_progress())
    except (ShardkeepError, OSError) as error:  # one that cannot be opened must not keep the others from being checked
        return _Verdict(path, error=error, alone=alone)
    # If no file could be checked: why not?
    state = None if report.ok or report.files else look(location(path), path).state
    return _Verdict(path, report, label=_LABELS.get(state, "DAMAGED"), alone=alone)


def _show(verdict: _Verdict, output: Output) -> None:
    report = verdict.report
    if report is None:
        if verdict.error is None:
            what = "save" if verdict.state == "saving" else "delete"
            label = output.paint(verdict.state, "cyan")
            output.line(f"{label}  {plain(verdict.path)}: not checked, a {what} is running")
        else:
            output.line(f"{output.paint('ERROR', 'red')}  {message_of(verdict.error)}")
        return
    rate = human(int(report.nbytes / report.seconds)) if report.seconds else human(0)
    took = f"{human(report.nbytes)} in {counted(report.files, 'file')}, {report.seconds:.2f} s, {rate}/s"
    verb = "has" if report.unchecked == 1 else "have"
    note = f"; {counted(report.unchecked, 'leaf', 'leaves')} written by another program {verb} no digests"
    if report.ok:
        output.line(f"{output.paint('ok', 'green')}  {plain(report.path)}: {took}{note if report.unchecked else ''}")
        return
    found = counted(len(report.problems), "problem") + (f" ({took})" if report.files else "")
    output.line(f"{output.paint(verdict.label, 'red')}  {plain(report.path)}: {found}")
    for problem in report.problems:
        output.line(f"  {plain(_described(problem))}")


def _described(problem: Problem) -> str:
    """What is wrong. The message names the leaf; the file is added if it is not named."""
    return problem.message + ("" if problem.file in problem.message else f" ({problem.file})")


def _document(verdict: _Verdict) -> dict[str, object]:
    report = verdict.report
    if report is None:
        if verdict.error is None:
            return {"path": verdict.path, "ok": None, verdict.state: True}
        said = {"type": type(verdict.error).__name__, "message": message_of(verdict.error)}
        return {"path": verdict.path, "ok": False, "error": said}
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
