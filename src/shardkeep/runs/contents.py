"""What one step of a run consists of: the state, named trees, iterators, metrics and metadata, saved in one commit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardkeep.catalog import new_target
from shardkeep.errors import MetadataError
from shardkeep.model.metadata import RUN_KEY, check_metadata
from shardkeep.runs.iterators import take
from shardkeep.runs.metrics import Metrics
from shardkeep.saving.save import FormatName, SaveRequest
from shardkeep.stores.location import Location

ITERATORS = "iterators"  # the prefix of the iterators' states


@dataclass(frozen=True)
class Contents:
    """What is passed to `Run.step` and `Run.save`.

    `pin`: whether the step is pinned from its commit on.
    """

    state: object
    metrics: Mapping[str, object] | None = None
    iterators: Mapping[str, object] | None = None
    trees: Mapping[str, object] | None = None
    metadata: Mapping[str, object] | None = None
    pin: bool = False

    def checked(self, metadata: Mapping[str, object]) -> "Checked":
        """The same, checked. Metrics are copied from their devices from now on, and the positions of iterators taken.

        Args:
            metadata: That of the run, to which the step's own is added.
        """
        noted: dict[str, object] = {"version": 1, **({"pinned": True} if self.pin else {})}
        own = {**metadata, **checked_metadata(self.metadata)}
        trees, metrics = _checked_trees(self.trees), Metrics(self.metrics)
        if self.iterators:
            taken = take(self.iterators)
            noted["iterators"], trees[ITERATORS] = taken.kinds, taken.tree
        return Checked(self.state, trees, own, noted, metrics)


@dataclass(frozen=True)
class Checked:
    """The contents of a step that can be saved.

    `noted`: what the run notes about the step itself, in its metadata.
    """

    state: object
    trees: Mapping[str, object]
    metadata: Mapping[str, object]
    noted: Mapping[str, object]
    metrics: Metrics

    def request(
        self,
        place: Location,
        format: FormatName,
        number: int,
        *,
        replaces: bool,
        before: Callable[[], None],
        after: Callable[[], None],
        order: object,
    ) -> SaveRequest:
        """The save of this step.

        Args:
            place: Where it goes.
            format: How arrays are stored.
            number: The number of the step.
            replaces: Whether it replaces a damaged or abandoned one.
            before: Called by one process before anything is written, and again right before the commit; what it raises
                prevents the commit.
            after: Called by one process after the commit.
            order: Saves of the same order call `after` in the order in which they began.
        """

        def late() -> dict[str, object]:
            before()
            return {RUN_KEY: {**self.noted, "metrics": self.metrics.read()}}

        return SaveRequest(
            new_target(place, format, None, None, directory=True),
            self.state,
            metadata=self.metadata,
            overwrite=replaces,
            replaces_all=replaces,
            on_commit=after,
            order=order,
            step=number,
            trees=self.trees or None,
            late=late,
            check=lambda _: before(),
        )


def checked_metadata(metadata: Mapping[str, object] | None) -> Mapping[str, object]:
    """Metadata that can be stored, and does not use the key of the run itself."""
    checked = {} if metadata is None else check_metadata(metadata)
    if RUN_KEY in checked:
        raise MetadataError(f"metadata[{RUN_KEY!r}] is reserved for the Run; choose another key")
    return checked


def _checked_trees(trees: Mapping[str, object] | None) -> dict[str, object]:
    if trees is not None and not isinstance(trees, Mapping):
        raise TypeError(f'trees must be a dict of names and trees, as {{"ema": ema}}, not {type(trees).__name__}')
    if trees and ITERATORS in trees:
        raise ValueError(f"trees[{ITERATORS!r}]: this name is reserved for iterators; choose another one")
    return dict(trees or {})
