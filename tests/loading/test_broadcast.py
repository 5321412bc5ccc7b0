"""What is broadcast, and how parts come together; tests/multiprocess/test_broadcast.py has several processes."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.loading.broadcast import Broadcast, _alike, _compared, _receiving, fewest_replicas
from shardkeep.loading.matching import Wanted
from shardkeep.loading.owners import OwnedPart, Owners
from shardkeep.loading.plan import Destination
from shardkeep.loading.request import LoadRequest
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import NATIVE, StoredArray
from shardkeep.processes.operation import Operation
from shardkeep.runtime.progress import NO_BAR

HERE: Any = SimpleNamespace(mappable=True)
BEHIND_A_NETWORK: Any = SimpleNamespace(mappable=False)


@pytest.mark.parametrize(
    ("asked", "store", "size", "expected"),
    [
        ("auto", BEHIND_A_NETWORK, 4, 4),
        ("auto", BEHIND_A_NETWORK, 3, None),
        ("auto", HERE, 1000, None),
        (True, HERE, 2, 2),
        (True, BEHIND_A_NETWORK, 1000, 2),
        (False, BEHIND_A_NETWORK, 1000, None),
    ],
)
def test_when_processes_read_for_each_other(asked: Any, store: Any, size: int, expected: int | None) -> None:
    assert fewest_replicas(LoadRequest(broadcast=asked), store, size) == expected


def test_not_by_itself_beside_the_main_thread() -> None:
    found: list[int | None] = []
    requests = [LoadRequest(broadcast="auto"), LoadRequest(broadcast=True)]
    thread = threading.Thread(target=lambda: found.extend(fewest_replicas(r, BEHIND_A_NETWORK, 8) for r in requests))
    thread.start()
    thread.join()
    assert found == [None, 2]


def test_bad_values_are_refused(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "x", {"w": np.zeros(3)})
    with pytest.raises(ValueError, match="broadcast must be \"auto\", True or False, not 'always'"):
        shardkeep.load(tmp_path / "x", broadcast="always")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="broadcast must be"):
        shardkeep.plan_load(tmp_path / "x", broadcast=2)
    with pytest.raises(TypeError, match="read_once"):
        shardkeep.load(tmp_path / "x", read_once=True)  # type: ignore[call-arg]
    for broadcast in ("auto", True, False):
        assert shardkeep.plan_load(tmp_path / "x", broadcast=broadcast).load()["w"].tolist() == [0, 0, 0]


def test_what_processes_bring_is_compared() -> None:
    assert _compared([("a", 9), ("a", 7)]) == (True, 7)
    assert _compared([("a", 9), ("b", 7)]) == (False, 7)
    assert _compared([("a", 9), False]) is None, "that process has to start over"
    assert _alike([["3 1", "a", "b", "c"], ["3 1", "a", "x", "c"]]) == [0, 2]
    assert _alike([["1 1", "a"], ["2 1", "a", "b"]]) == [], "they would go through them in different steps"


@pytest.mark.parametrize("parts", [[Region((0, 0), (4, 6))], [Region((0, 0), (4, 2)), Region((0, 2), (4, 4))]])
def test_parts_become_the_regions_that_are_needed(parts: list[Region]) -> None:
    """In place where a part is a region; otherwise the parts are put together."""
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    leaf = StoredArray(("x",), ArraySpec((4, 6), whole.dtype), (), NATIVE)
    read = [whole[region.slices].copy() for region in parts]
    destination = Destination(leaf, parts, False, list(read))
    broadcast = Broadcast(Operation(""), {}, 2, 1 << 20)
    owners = Owners({(0,): [OwnedPart(0, region, 0) for region in parts]}, {0: parts})
    broadcast.complete(owners, {0: destination}, {0: Wanted(leaf)}, NO_BAR.__enter__())
    assert list(destination.regions) == [Region.whole((4, 6))]
    assert np.array_equal(destination.whole, whole)
    assert (destination.whole is read[0]) == (len(parts) == 1)


@pytest.mark.parametrize("at_once", [1, 40, 1000])
@pytest.mark.parametrize(
    "region", [Region((1, 2, 1), (1, 5, 4)), Region((0, 0, 2), (3, 7, 1)), Region((2, 3, 4), (1, 1, 1))]
)
def test_parts_that_are_scattered_in_memory_arrive_a_few_rows_at_once(region: Region, at_once: int) -> None:
    whole = np.zeros((3, 7, 6), np.float32)
    leaf = StoredArray(("x",), ArraySpec(whole.shape, whole.dtype), (), NATIVE)
    destination = Destination(leaf, [Region.whole(whole.shape)], False, [whole])
    sent = np.arange(1, region.size + 1, dtype=np.float32).tobytes()
    counted: list[int] = []
    for memory in _receiving([OwnedPart(0, region, 1)], {0: destination}, at_once, counted.append):
        memory[...] = np.frombuffer(sent[: memory.size], np.uint8)
        sent = sent[memory.size :]
    assert sent == b""
    assert whole[region.slices].reshape(-1).tolist() == list(range(1, region.size + 1))
    assert np.count_nonzero(whole) == region.size
    assert sum(counted) == region.size * 4
    longest_row = max(region.size // n for n in region.shape if n > 1) * 4 if region.size > 1 else 4
    assert max(counted) <= max(at_once, longest_row)


def test_steps_are_bounded_by_what_is_read_for_others() -> None:
    """Leaves that are not sent, and those that go to devices in groups of their own, count nothing."""
    some = [Wanted(StoredArray((str(n),), ArraySpec((n,), np.dtype("f4")), (), NATIVE)) for n in range(9)]
    view: Any = SimpleNamespace(index=1, size=4)
    broadcast = Broadcast(view, {id(some[n]): 100 for n in (0, 2, 3, 5)} | {id(some[1]): 0, id(some[7]): 10**6}, 2, 200)
    numbers = [[some.index(w) for w in step] for step in broadcast.steps(some, 10)]
    assert numbers == [[0, 1, 2], [3, 4, 5, 6], [7], [8]], "at most 50 bytes for each of four processes, or one leaf"
    assert [len(step) for step in broadcast.steps(some, 2)] == [2, 2, 2, 2, 1]
