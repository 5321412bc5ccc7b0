"""What processes must have in common is compared, and the difference named; parts of a save come together."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from multiprocess.service import everywhere, groups
from shardkeep.errors import ProcessError, StorageError
from shardkeep.model.perprocess import PerProcess, decode_value
from shardkeep.model.tree import flatten
from shardkeep.processes.agreement import compare
from shardkeep.processes.group import Group
from shardkeep.processes.operation import ALONE, Operation
from shardkeep.saving.parts import describe, outline, settle, unshared
from shardkeep.saving.snapshot import Snapshot, take_snapshot


@pytest.fixture(scope="module")
def three() -> Iterator[list[Group]]:
    with groups(3) as made:
        yield made


def compared(three: list[Group], lines: list[list[str]]) -> list[object]:
    return everywhere(three, lambda operation: compare(operation, lines[operation.index]))


def lines_of(tree: object) -> list[str]:
    return describe(take_snapshot(flatten(tree)[1], index=1, size=2))


def test_alone_everything_agrees() -> None:
    compare(ALONE, ["path x", "leaf a: float32[3]"])


def test_the_same_lines_pass(three: list[Group]) -> None:
    assert compared(three, [["path x", "leaf a: 1"]] * 3) == [None] * 3


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"),
    [
        (["path x", "leaf a: 1"], ["path y", "leaf a: 2"], ("path x", "path y")),
        (["path x", "leaf a: 1"], ["path x", "leaf a: 2"], ("leaf a: 1", "leaf a: 2")),
        (["structure 1", "leaf a: 1"], ["structure 2", "leaf a: 1", "leaf b: 2"], ("(nothing)", "leaf b: 2")),
        (["structure 1", "leaf a: 1"], ["structure 2", "leaf b: 1"], ("leaf a: 1", "(nothing)")),
        (["structure 1", "leaf a: 1"], ["structure 2", "leaf a: 1"], ("structure 1", "structure 2")),
        (["metadata 1", "leaf a: x: 1"], ["metadata 2", "leaf a: y: 1"], ("leaf a: x: 1", "leaf a: y: 1")),
        (["leaf \ud800: 1"], ["leaf \ud800: 2"], ("leaf \ud800: 1", "leaf \ud800: 2")),
    ],
)
def test_the_first_difference_is_named_on_all(
    three: list[Group], ours: list[str], theirs: list[str], shown: tuple[str, str]
) -> None:
    for different in (1, 2):
        lines = [theirs if i == different else ours for i in range(3)]
        for error in compared(three, lines):
            assert isinstance(error, ProcessError)
            assert f"  process 0: {shown[0]}\n  process {different}: {shown[1]}" in str(error)


def test_long_lines_are_shown_where_they_part(three: list[Group]) -> None:
    start, end = "structure " + "x" * 5000, "y" * 5000
    errors = compared(three, [[f"{start}A{end}"], [f"{start}A{end}"], [f"{start}B{end}"]])
    for error in errors:
        assert len(str(error)) < 1500
        assert "process 0: structure …xx" in str(error)
        assert "xAyy" in str(error)
        assert "xByy" in str(error)


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


def test_the_error_says_what_was_not_done(three: list[Group]) -> None:
    lines = [["path x"], ["path x"], ["path y"]]
    for what, said in (("saving to x", "nothing was written"), ("loading x", "nothing was loaded")):
        for error in everywhere(three, lambda operation: compare(operation, lines[operation.index]), what):
            assert f"processes passed different arguments; {said}\n" in str(error)


def test_processes_learn_the_rows_of_all(three: list[Group]) -> None:
    values = [{"position": i, "buffer": np.full(i * 100, i, np.uint8)} for i in range(3)]

    def work(operation: Operation) -> Snapshot:
        tree = {"a": PerProcess(values[operation.index]), "n": 1, "b": PerProcess(operation.index)}
        return settle(operation, take_snapshot(flatten(tree)[1], index=operation.index, size=3))

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


def test_members_who_fail_while_others_compare_are_told(three: list[Group]) -> None:
    def work(operation: Operation) -> None:
        if operation.index == 1:
            raise StorageError("cannot write")
        compare(operation, ["path x"])

    leader, culprit, other = everywhere(three, work)
    assert str(leader) == str(other) == "process 1: cannot write"
    assert str(culprit) == "cannot write"
