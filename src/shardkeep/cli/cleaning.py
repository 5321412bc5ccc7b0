"""`shardkeep clean`: show files that dead saves left behind, then remove them as the next save would."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardkeep.cli.output import Output, ask, counted, human, plain
from shardkeep.cli.parser import FINDINGS
from shardkeep.converting.survey import SurveyEntry, survey
from shardkeep.converting.usage import UsageError
from shardkeep.errors import ShardkeepError
from shardkeep.runs.viewing import RunView, is_run
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.location import Location, location
from shardkeep.targets.base import Target
from shardkeep.targets.cleanup import clean_up, leave, left_overs
from shardkeep.targets.directory import Directory
from shardkeep.targets.files import ForeignFile

_LOCK_SECONDS = 20.0  # a person waits for the command, and a commit takes seconds
_SHOWN = 20  # files that are listed
_PROTECTED = {
    "pinned": "the step is pinned; unpin it first",
    "held": "a reader holds the step; try again when it has finished",
}


@dataclass
class _LeftOver:
    """The files that dead saves left at one path."""

    name: str
    target: Target
    files: dict[str, int] = field(default_factory=dict[str, int])  # sizes by name
    saves: int = 0  # dead ones
    running: int = 0
    problem: str | None = None
    removed: bool = False

    @property
    def size(self) -> int:
        return sum(self.files.values())


def clean(path: str, output: Output, yes: bool, dry_run: bool) -> int:
    """Show what dead saves left at and below a path, and remove it; 1 if something remains."""
    runs = _Runs()
    # Nothing is saved to another program's file, so nothing is left of saves to it.
    places = [(found, found.target) for found in survey(path)]
    looked = [_look(found, at, runs) for found, at in places if at is not None and not isinstance(at, ForeignFile)]
    found = [one for one in looked if one.saves or one.files or one.problem]
    removable = [one for one in found if one.problem is None]
    if not output.as_json:
        _show(found, path, output)
    if removable and not dry_run and (yes or _confirm(removable)):
        for one in removable:
            _remove(one)
    remains = any(not one.removed for one in found)
    if output.as_json:
        output.document(_document(path, found, dry_run))
    elif any(one.removed for one in found):
        gone = [one for one in found if one.removed]
        files = sum(len(one.files) for one in gone)
        output.line(f"removed {counted(files, 'file')}, {human(sum(one.size for one in gone))}")
    return FINDINGS if remains else 0


def _confirm(found: Sequence[_LeftOver]) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("stdin is not a terminal, so clean cannot ask: pass --yes to remove these files, or --dry-run")
    files = sum(len(one.files) for one in found)
    return ask(f"Remove {counted(files, 'file')} ({human(sum(one.size for one in found))})?")


def _look(found: SurveyEntry, target: Target, runs: "_Runs") -> _LeftOver:
    """What the next save would remove there. Changes nothing."""
    store = target.store
    left = _LeftOver(found.name, target)
    if not store.children(store.control):
        return left
    try:
        protection = runs.protection(found.path)
        # The lock keeps saves from starting or ending while we check which of them are alive.
        with store.lock(_LOCK_SECONDS), Scope(f"examining {found.name}") as scope:
            over = left_overs(target, target.read_if_any(), scope)
            left.saves, left.running = len(over.records), over.running
            sizes = store.sizes(sorted(set(over.names)))
            left.files = {name: size for name, size in sizes.items() if size is not None}
        if protection is not None and (left.saves or left.files):
            left.problem = _PROTECTED[protection]
    except (ShardkeepError, OSError) as error:
        left.problem = str(error)
    return left


class _Runs:
    """The runs that were come across, each looked at once."""

    def __init__(self) -> None:
        self._views: dict[Location, RunView | None] = {}

    def protection(self, path: str) -> str | None:
        """Whether a checkpoint is a step of a run that is pinned or held."""
        step = location(path)
        place = step.parent
        if step == place:
            return None
        if place not in self._views:
            self._views[place] = RunView(place) if is_run(place) else None
        view = self._views[place]
        return None if view is None else view.protection(step.name)


def _remove(left: _LeftOver) -> None:
    """The clean-up that every save starts with: it checks again, under the lock, before it removes anything."""
    target = left.target
    try:
        with target.store.lock(_LOCK_SECONDS):
            clean_up(target, target.read_if_any())
        leave(target)
        if isinstance(target, Directory):
            target.store.remove_if_empty()
        left.removed = True
    except (ShardkeepError, OSError) as error:
        left.problem = str(error)


def _show(found: Sequence[_LeftOver], path: str, output: Output) -> None:
    if not found:
        output.line(f"nothing to clean up in {plain(path)} or below")
        return
    for one in found:
        if one.problem:
            output.line(output.paint(f"{plain(one.name)}: not cleaned up: {plain(one.problem)}", "red"))
            continue
        running = f" ({counted(one.running, 'running save')} not touched)" if one.running else ""
        output.line(
            f"{output.paint(plain(one.name), 'bold')}: {counted(one.saves, 'dead save')}, "
            f"{counted(len(one.files), 'file')}, {human(one.size)}{running}"
        )
        rows = [[f"{size:,}", plain(name)] for name, size in one.files.items()]
        output.table(rows[:_SHOWN], right=(0,), indent="  ")
        if len(rows) > _SHOWN:
            output.line(f"  … and {counted(len(rows) - _SHOWN, 'more file')}")


def _document(path: str, found: Sequence[_LeftOver], dry_run: bool) -> dict[str, object]:
    return {
        "path": path,
        "dry_run": dry_run,
        "left_over": [
            {
                "name": one.name,
                "path": one.target.where,
                "dead_saves": one.saves,
                "running_saves": one.running,
                "files": [{"name": name, "size": size} for name, size in one.files.items()],
                "bytes": one.size,
                "removed": one.removed,
                "problem": one.problem,
            }
            for one in found
        ],
    }
