"""What one step consists of, checked before anything is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.errors import MetadataError, UnsupportedLeafError
from shardkeep.model.metadata import RUN_KEY
from shardkeep.model.perprocess import PerProcess
from shardkeep.runs.contents import ITERATORS, Contents, checked_metadata
from shardkeep.runs.iterators import Global
from shardkeep.stores.location import location


def test_the_metadata_of_a_step_is_added_to_that_of_the_run_and_wins() -> None:
    checked = Contents({}, metadata={"b": 2}).checked({"a": 1, "b": 1})
    assert checked.metadata == {"a": 1, "b": 2}


def test_the_positions_of_iterators_become_a_tree_beside_the_others() -> None:
    state = {"position": 7}
    checked = Contents({}, iterators={"train": state, "eval": Global(3)}, trees={"ema": {"w": 1}}).checked({})
    assert list(checked.trees) == ["ema", ITERATORS]
    assert checked.trees[ITERATORS] == {"train": PerProcess(state), "eval": 3}
    assert checked.noted == {"version": 1, "iterators": {"train": "process", "eval": "global"}}


def test_what_a_run_notes_says_that_a_step_is_pinned() -> None:
    assert Contents({}).checked({}).noted == {"version": 1}
    assert Contents({}, pin=True).checked({}).noted == {"version": 1, "pinned": True}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"metrics": {"loss": "low"}}, MetadataError, "metric 'loss' is a str"),
        ({"metadata": {RUN_KEY: 1}}, MetadataError, "choose another key"),
        ({"metadata": {"x": object()}}, MetadataError, "no obvious JSON form"),
        ({"trees": [1]}, TypeError, "trees must be a dict of names and trees"),
        ({"trees": {ITERATORS: {}}}, ValueError, "this name is reserved for iterators"),
        ({"iterators": {"train": object()}}, UnsupportedLeafError, "iterator 'train'"),
        ({"iterators": [1]}, TypeError, "iterators must be a dict"),
    ],
)
def test_what_cannot_be_saved_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Contents({}, **given).checked({})


def test_metadata_of_a_run_is_checked_and_none_is_empty() -> None:
    assert checked_metadata(None) == {}
    assert checked_metadata({"lr": 0.1}) == {"lr": 0.1}


def test_the_request_replaces_everything_or_nothing_and_reads_metrics_late(tmp_path: Path) -> None:
    called: list[str] = []
    checked = Contents({"w": np.ones(2)}, {"loss": 2}).checked({"a": 1})
    for replaces in (False, True):
        request = checked.request(
            location(tmp_path / "step_5"),
            "safetensors",
            5,
            replaces=replaces,
            before=lambda: called.append("before"),
            after=lambda: called.append("after"),
            order=None,
        )
        assert (request.overwrite, request.replaces_all, request.step) == (replaces, replaces, 5)
        assert request.metadata == {"a": 1}
    assert called == []
    assert request.late is not None
    assert request.late() == {RUN_KEY: {"version": 1, "metrics": {"loss": 2.0}}}
    assert called == ["before"]
