"""What processes must have in common is compared, and the first difference named on all."""

import pytest

from multiprocess.service import everywhere
from shardkeep.errors import ProcessError, StorageError
from shardkeep.processes.agreement import compare
from shardkeep.processes.group import Group
from shardkeep.processes.operation import ALONE, Operation


def compared(three: list[Group], lines: list[list[str]]) -> list[object]:
    return everywhere(three, lambda operation: compare(operation, lines[operation.index]))


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


def test_the_error_says_what_was_not_done(three: list[Group]) -> None:
    lines = [["path x"], ["path x"], ["path y"]]
    for what, said in (("saving to x", "nothing was written"), ("loading x", "nothing was loaded")):
        for error in everywhere(three, lambda operation: compare(operation, lines[operation.index]), what):
            assert f"processes passed different arguments; {said}\n" in str(error)


def test_members_who_fail_while_others_compare_are_told(three: list[Group]) -> None:
    def work(operation: Operation) -> None:
        if operation.index == 1:
            raise StorageError("cannot write")
        compare(operation, ["path x"])

    leader, culprit, other = everywhere(three, work)
    assert str(leader) == str(other) == "process 1: cannot write"
    assert str(culprit) == "cannot write"
