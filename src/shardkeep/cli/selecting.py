"""`RUN@latest`, `RUN@best` and `RUN@1000`: a step of a run, wherever a command takes the path of a checkpoint."""

import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from shardkeep.catalog import latest
from shardkeep.converting.usage import UsageError
from shardkeep.errors import CheckpointNotFoundError, ConflictError, IntegrityError, PathError
from shardkeep.runs.keep import Keep
from shardkeep.runs.steps import Step
from shardkeep.runs.viewing import RunView, is_run
from shardkeep.stores.location import exists, is_directory, location
from shardkeep.targets.resolve import look

_TRIES = 2  # how often a step is looked for again if it is deleted before it is held
_SELECTOR = re.compile(r"latest|best|[0-9]+")


@dataclass(frozen=True)
class Selection:
    """How steps of runs are chosen: `--metric` and `--mode`, for `@best`."""

    metric: str | None = None
    mode: Literal["min", "max"] | None = None

    def path_of(self, given: str) -> str:
        """The path of the checkpoint that is meant: of a step of a run, or the path as it is."""
        found = self._split(given)
        if found is None:
            return given
        view, which = found
        if which == "best":
            return self._best(view).path
        if which != "latest":
            return view.path_of(int(which))
        step = view.open().latest()
        path = latest(str(view.place)) if step is None else step.path  # checkpoints may have other names
        if path is None:
            raise CheckpointNotFoundError(f"{given}: there is no usable step in {view.place}")
        return path

    @contextmanager
    def held(self, given: str) -> Generator[str]:
        """The same as `path_of`; no retention deletes the step meanwhile, if it is possible to write to the run."""
        with ExitStack() as stack:
            yield self._hold(given, stack)

    def _hold(self, given: str, stack: ExitStack) -> str:
        for _ in range(_TRIES):
            found, path = self._split(given), self.path_of(given)
            step = None if found is None else found[0].number_of(path)
            if found is None or step is None or not is_run(found[0].place):
                return path
            try:
                stack.enter_context(found[0].open().hold(step))
                return path
            except (CheckpointNotFoundError, ConflictError):
                continue  # it was deleted meanwhile: there may be another latest or best one
            except OSError:
                return path  # there is no permission to write
        return self.path_of(given)  # one that was never finished, or whose deletion was interrupted

    def step_of(self, given: str) -> tuple[RunView, int]:
        """The run and the number of the step that are meant, for commands that need a step of a run."""
        found = self._split(given)
        if found is None:
            raise UsageError(f"{given} does not name a step of a run; write RUN@1000, RUN@latest or RUN@best")
        view, which = found
        if which == "best":
            return view, self._best(view).number
        if which != "latest":
            return view, int(which)
        step = view.open().latest()
        if step is None:
            raise CheckpointNotFoundError(f"{given}: there is no usable step in {view.place}")
        return view, step.number

    @staticmethod
    def _split(given: str) -> tuple[RunView, str] | None:
        """The run and which of its steps is meant; None for a path. A path that exists is one, whatever its name."""
        before, at, which = given.rpartition("@")
        if not at or not before or "/" in which or _is_path(given):
            return None
        place = location(before)
        if not _SELECTOR.fullmatch(which):
            if is_directory(place) and is_run(place):
                raise UsageError(f"{given}: {which!r} is not a step; write @latest, @best or the number of a step")
            return None
        return RunView(place), which

    def _best(self, view: RunView) -> Step:
        noted = view.keep
        metric = self.metric or (noted.metric if noted else None)
        mode = self.mode or (noted.mode if noted and noted.metric == metric else None)
        seen = sorted({name for step in view.listing.usable for name in step.metrics})
        known = f"the metrics of its steps are {', '.join(seen)}" if seen else "its steps have no metrics"
        if metric is None or mode is None:
            lacks = f"whether a smaller or a larger {metric} is better" if metric else "which metric to use"
            raise UsageError(f"{view.place}@best: the run does not specify {lacks}; pass --metric and --mode ({known})")
        found = view.open(Keep(best=1, metric=metric, mode=mode)).best()
        if found is None:
            raise CheckpointNotFoundError(f"{view.place}@best: no usable step has the metric {metric!r}; {known}")
        return found


def _is_path(given: str) -> bool:
    """Whether there is anything at a path."""
    place = location(given)
    if exists(place):
        return True
    try:
        look(place, search=False)
    except (CheckpointNotFoundError, PathError):
        return False
    except IntegrityError:
        pass  # a checkpoint that is damaged or was never finished
    return True
