"""The states of data iterators: saved and put back, with real grain iterators among them."""

import sys
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

import shardkeep
from shardkeep.errors import MissingLeafError, ProcessError, UnsupportedLeafError
from shardkeep.model.perprocess import PerProcess
from shardkeep.runs.iterators import Global, put_back, take


class Numbers:
    """An iterator with the methods of torch's data loaders."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "weights": np.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Source:
    """Data for a grain loader, which compares the repr of its source with the saved one."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return np.array([index, index * index], np.int32)

    def __repr__(self) -> str:
        return "Source()"


def loader() -> Any:
    sampler = grain.samplers.IndexSampler(23, shuffle=True, num_epochs=2, seed=5)
    batch = [grain.transforms.Batch(4, drop_remainder=False)]
    return iter(grain.DataLoader(data_source=Source(), sampler=sampler, operations=batch, worker_count=0))


def dataset() -> Any:
    return iter(grain.MapDataset.source(Source()).shuffle(5).repeat(2).map(lambda pair: pair * 3).batch(4))


def stream() -> Any:
    """It prefetches on threads: its state is that of what was taken out, not of what was read."""
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(grain.MapDataset.source(Source()).shuffle(5).repeat(2).to_iter_dataset(options).batch(4))


def save(path: Path, iterators: dict[str, Any]) -> Any:
    taken = take(iterators)
    shardkeep.save(path, taken.tree, overwrite=True)
    return taken.kinds


def resume(path: Path, iterators: dict[str, Any], kinds: Any, processes: int | None = 1, **more: Any) -> Any:
    return put_back(iterators, kinds, processes, lambda mode: shardkeep.load(path, per_process=mode), **more)


@pytest.mark.parametrize("make", [loader, dataset, stream])
@pytest.mark.parametrize("at", [0, 3, 8])
@pytest.mark.parametrize("wrap", [lambda one: one, Global], ids=["per process", "global"])
def test_grain_goes_on_with_the_same_batches(make: Any, at: int, wrap: Any, tmp_path: Path) -> None:
    """From any position, also in the second epoch, bit by bit."""
    data = make()
    for _ in range(at):
        next(data)
    kinds = save(tmp_path / "x", {"train": wrap(data)})
    rest = [batch.tobytes() for batch in data]
    assert len(rest) in (12 - at, 13 - at), "46 elements in batches of 4; those of a loader end with the epoch"
    again = make()
    resume(tmp_path / "x", {"train": wrap(again)}, kinds)
    assert [batch.tobytes() for batch in again] == rest


def test_iterators_with_a_state_dict_and_plain_states_go_on_too(tmp_path: Path) -> None:
    data = Numbers()
    data.seen = 77
    given = {"train": data, "eval": {"position": 5, "name": b"\0x"}, "key": PerProcess((1, None))}
    kinds = save(tmp_path / "x", given)
    assert kinds == {"train": "process", "eval": "process", "key": "process"}
    again = Numbers()
    states = resume(tmp_path / "x", {"train": again, "eval": None}, kinds)
    assert again.seen == 77
    assert states["train"]["weights"].tolist() == [0, 1, 2]
    assert states["eval"] == {"position": 5, "name": b"\0x"}
    assert set(states) == {"train", "eval"}, "only what was asked for"
    assert resume(tmp_path / "x", {"key": ()}, kinds) == {"key": (1, None)}


def test_a_global_state_is_a_plain_value_of_the_tree() -> None:
    taken = take({"a": Global({"seen": 3}), "b": Global(Numbers()), "c": 4})
    assert taken.tree["a"] == {"seen": 3}
    assert taken.tree["b"]["seen"] == 0
    assert taken.tree["c"] == PerProcess(4)
    assert taken.kinds == {"a": "global", "b": "global", "c": "process"}


def test_a_global_state_fits_any_number_of_processes(tmp_path: Path) -> None:
    kinds = save(tmp_path / "x", {"train": Global({"seen": 3})})
    for processes in (None, 1, 16):
        assert resume(tmp_path / "x", {"train": None}, kinds, processes) == {"train": {"seen": 3}}


def test_nothing_is_loaded_if_no_iterator_is_given() -> None:
    assert put_back({}, {"train": "process"}, 4, lambda _: sys.exit("not needed")) == {}


def test_another_number_of_processes_is_an_error_that_says_what_to_pass() -> None:
    data = Numbers()
    data.seen = 5
    message = (
        r"resuming x: the state of iterator 'train' was saved by 4 processes, each its own, but now there is 1. Pass "
        r"redistribute=function, where function\(states, count\) takes the list of the 4 saved states and returns a "
        r"list of 1"
    )
    with pytest.raises(ProcessError, match=message):
        put_back({"train": data}, {"train": "process"}, 4, lambda _: {}, what="resuming x")
    assert data.seen == 5


def test_redistribute_gets_all_states_and_gives_each_process_its_own() -> None:
    asked: list[Any] = []

    def fold(states: list[Any], count: int) -> list[Any]:
        asked.append((states, count))
        return [{"seen": sum(state["seen"] for state in states)}]

    def load(mode: str) -> dict[str, Any]:
        assert mode == "all"
        return {"train": [{"seen": 1}, {"seen": 2}], "same": {"seen": 9}}

    data = Numbers()
    states = put_back({"train": data, "same": 0}, {"train": "process", "same": "global"}, 2, load, fold)
    assert data.seen == 3
    assert states["same"] == {"seen": 9}
    assert asked == [([{"seen": 1}, {"seen": 2}], 1)], "a global state is not its business"


@pytest.mark.parametrize(
    ("made", "got"), [([], "0 states"), ([1, 2], "2 states"), ({"a": 1}, "a dict"), (None, "a NoneType")]
)
def test_redistribute_must_give_a_state_for_each_process(made: Any, got: str) -> None:
    message = rf"redistribute\(states, 1\) must return a list of 1 state for iterator 'train', not {got}"
    with pytest.raises(ProcessError, match=message):
        put_back({"train": Numbers()}, {"train": "process"}, 2, lambda _: {"train": [1, 2]}, lambda *_: made)


def test_with_the_same_number_of_processes_redistribute_is_not_called(tmp_path: Path) -> None:
    kinds = save(tmp_path / "x", {"train": 3})
    redistribute: Any = lambda *_: pytest.fail("called")  # noqa: E731
    assert resume(tmp_path / "x", {"train": None}, kinds, redistribute=redistribute) == {"train": 3}


@pytest.mark.parametrize(
    ("kinds", "has"), [({}, "it has none"), ({"eval": "process", "b": "global"}, "it has only that of 'eval', 'b'")]
)
def test_a_state_that_was_not_saved_is_an_error(kinds: Any, has: str) -> None:
    """Before any iterator is changed."""
    data = Numbers()
    with pytest.raises(MissingLeafError, match=rf"resuming: the checkpoint has no state of iterator 'train'; {has}"):
        put_back({"eval": data, "train": data} if kinds else {"train": data}, kinds, 1, lambda _: {"eval": {"seen": 9}})
    assert data.seen == 0


class Half:
    def get_state(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (iter([1]), "a list_iterator has neither get_state and set_state, nor state_dict and load_state_dict"),
        (Half(), "a Half has only get_state of get_state and set_state, or state_dict and load_state_dict, and is"),
        (Global({1}), "a set has neither"),
    ],
)
def test_an_object_without_a_state_is_an_error_that_names_it(given: Any, found: str) -> None:
    for call in (
        lambda: take({"ok": 1, "train": given}),
        lambda: put_back({"train": given}, {"train": "process"}, 1, lambda _: {}),
    ):
        with pytest.raises(UnsupportedLeafError, match=f"iterator 'train': {found}"):
            call()


@pytest.mark.parametrize("iterators", [[Numbers()], {1: 2}, {"": 2}, "train"])
def test_iterators_are_given_by_name(iterators: Any) -> None:
    with pytest.raises(TypeError, match=r'iterators must be a dict of names and iterators, as \{"train": data\}'):
        take(iterators)


def test_a_state_that_cannot_be_saved_is_refused_by_the_save(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"train: PerProcess value\['f'\]: "):
        shardkeep.save(tmp_path / "x", take({"train": {"f": print}}).tree)
