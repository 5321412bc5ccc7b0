"""`shardkeep pin`, `unpin` and `save-now`: what others may ask of a run while it trains."""

from shardkeep.cli.output import Output, plain
from shardkeep.cli.selecting import Selection
from shardkeep.converting.usage import UsageError
from shardkeep.runs.control import POLL
from shardkeep.runs.viewing import RunView, is_run
from shardkeep.stores.location import is_directory, location


def pin(given: str, selection: Selection, output: Output, *, pinned: bool) -> int:
    """Pin a step of a run, so that no rule deletes it, or leave it to the rules again."""
    view, number = selection.step_of(given)
    run, path = view.open(), view.path_of(number)
    if pinned:
        run.pin(number)
    else:
        run.unpin(number)
    if output.as_json:
        output.document({"run": str(view.place), "step": number, "path": path, "pinned": pinned})
    else:
        done = "pinned" if pinned else "unpinned"
        then = "it is kept until it is unpinned" if pinned else "the rules of its run apply to it again"
        output.line(f"{output.paint(done, 'green')}  {plain(path)}: {then}")
    return 0


def save_now(path: str, output: Output) -> int:
    """Ask the program that writes a run for a save."""
    place = location(path)
    if not is_directory(place) or not is_run(place):
        raise UsageError(f"{place} is not a run: no shardkeep.Run has written to it")
    control = RunView(place).control
    writer = control.writer()
    if writer is None:
        raise UsageError(f"no program is writing to the run {place}; nothing was requested")
    request = control.request_save()
    if output.as_json:
        output.document({"run": str(place), "request": request, "writer": writer, "seconds": POLL})
    else:
        output.line(f"requested a save of {plain(str(place))} from {plain(writer)}")
        output.line(f"it checks for requests every {POLL:g} s and saves at one of its next steps")
    return 0
