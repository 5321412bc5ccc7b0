"""What each process brings to a save is described line by line, and the parts of a save come together."""

import jax.numpy as jnp
import numpy as np
import pytest

from multiprocess.service import everywhere
from shardkeep.errors import StorageError
from shardkeep.model.perprocess import PerProcess, decode_value
from shardkeep.model.tree import flatten
from shardkeep.processes.agreement import compare
from shardkeep.processes.group import Group
from shardkeep.processes.operation import Operation
from shardkeep.saving.multiprocess import agreement_lines, outline, settle, unshared
from shardkeep.saving.snapshot import Snapshot, examine, take_snapshot


def compared(three: list[Group], lines: list[list[str]]) -> list[object]:
    return everywhere(three, lambda operation: compare(operation, lines[operation.index]))


def lines_of(tree: object) -> list[str]:
    return agreement_lines(take_snapshot(examine(flatten(tree)[1], size=2), index=1, size=2))


def test_a_line_for_each_leaf_tells_what_it_is() -> None:
    tree = {"n": np.arange(3, dtype=">i4"), "j": jnp.ones((2, 2)), "s": "text", "f": float("nan"), "t": {"u": 1}}
    lines = lines_of(tree)
    starts = ["leaf n: int32[3], numpy", "leaf j: float32[2, 2], jax; must be", "leaf s: 'text'", "leaf f: nan"]
    for line, start in zip(lines, [*starts, "leaf t/u: 1"], strict=True):
        assert line.startswith(start)
    assert '{"order": ">"}' in lines[0]
    assert lines == lines_of(tree)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros(3), -np.zeros(3)),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(3, ">f4"), np.zeros(3, "<f4")),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("x" * 100 + "a", "x" * 100 + "b"),
    ],
)
def test_what_is_not_the_same_has_another_line(a: object, b: object) -> None:
    assert lines_of({"x": a}) != lines_of({"x": b})
    assert lines_of({"x": a}) == lines_of({"x": a})


def test_the_tree_itself_may_be_a_leaf() -> None:
    assert lines_of(np.zeros(2))[0].startswith("leaf (the tree itself): float64[2]")


def test_an_outline_names_arrays_only() -> None:
    lines = outline(flatten({"a": np.zeros((2, 3)), "b": 4, "c": jnp.zeros(2, jnp.bfloat16)})[1])
    assert lines == [
        "leaf a: float64[2, 3]; must be the same on every process",
        "leaf c: bfloat16[2]; must be the same on every process",
    ]


def test_values_that_differ_between_processes_have_the_same_line() -> None:
    lines = lines_of({"data": PerProcess({"position": 1}), "n": 1})
    assert lines == lines_of({"data": PerProcess([np.arange(99)]), "n": 1})
    assert lines[0] == "leaf data: a PerProcess value"
    leaves = flatten({"data": PerProcess(1), "n": 1})[1]
    assert outline(leaves) == ["leaf data: a PerProcess value"]


@pytest.mark.parametrize(
    ("ours", "theirs", "advised"),
    [
        ({"x": 1}, {"x": 2}, True),
        ({"x": np.arange(3)}, {"x": np.zeros(3)}, True),
        ({"x": 1, "y": 2}, {"x": 1}, True),
        ({"x": 1}, {"x": PerProcess(1)}, False),
    ],
)
def test_a_leaf_that_differs_leads_to_perprocess(
    three: list[Group], ours: object, theirs: object, advised: bool
) -> None:
    lines = [lines_of(ours), lines_of(ours), lines_of(theirs)]
    for error in compared(three, lines):
        assert ("is saved as shardkeep.PerProcess(value)" in str(error)) == advised, str(error)
    for error in compared(three, [["path x"], ["path x"], ["path y"]]):
        assert "PerProcess" not in str(error)


def test_processes_learn_the_rows_of_all(three: list[Group]) -> None:
    values = [{"position": i, "buffer": np.full(i * 100, i, np.uint8)} for i in range(3)]

    def work(operation: Operation) -> Snapshot:
        tree = {"a": PerProcess(values[operation.index]), "n": 1, "b": PerProcess(operation.index)}
        return settle(operation, take_snapshot(examine(flatten(tree)[1]), index=operation.index, size=3))

    settled: list[Snapshot] = everywhere(three, work)
    assert len({repr((leaf.spec, leaf.origin, leaf.shares)) for leaf in (one.leaves[0] for one in settled)}) == 1
    for index, snapshot in enumerate(settled):
        leaf = snapshot.leaves[0]
        raw = snapshot.shards[leaf.first_held].data.reshape(-1)[: leaf.origin.lengths[index]]
        assert decode_value(raw)["position"] == index
        assert leaf.held == tuple(region for region, writer in leaf.shares if writer == index)


def test_storage_that_is_not_shared_is_explained() -> None:
    error = unshared("/x (prefix 'm')", 3, "no record")
    assert isinstance(error, StorageError)
    assert "processes 0 and 3 do not see the same files (no record)" in str(error)
    assert "Nothing was committed" in str(error)
