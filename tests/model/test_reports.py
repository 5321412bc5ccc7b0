"""Reports: what they hold, when they are true, how they read."""

import dataclasses
import pickle

import pytest

from shardkeep import Problem, SaveReport, VerifyReport


def test_a_save_report_reads_as_one_line() -> None:
    report = SaveReport("/x/run", 3_000_000_000, 4, 2.0, {"snapshot": 0.5, "write": 1.5})
    assert str(report) == "/x/run: 3,000,000,000 bytes in 4 files, 2.000 s (1.50 GB/s; snapshot 0.500 s, write 1.500 s)"
    assert report.gb_per_second == 1.5


def test_one_file_and_one_problem_are_not_plural() -> None:
    assert "10 bytes in 1 file, " in str(SaveReport("/x", 10, 1, 1.0))
    assert str(VerifyReport("/x", 10, 1, 0.1, 1, ())) == "/x: no problems in 10 bytes in 1 file; 1 leaf has no digests"
    assert str(VerifyReport("/x", 10, 1, 0.1, 0, (Problem(None, "/x/b", "gone"),))).startswith("/x: 1 problem\n")


def test_a_save_report_of_no_time_has_no_speed() -> None:
    assert SaveReport("/x", 10, 1, 0.0).gb_per_second == 0.0
    assert str(SaveReport("/x", 10, 1, 0.0)) == "/x: 10 bytes in 1 file, 0.000 s"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(16_000, "160.0 kB/s"), (1_000_000, "10.0 MB/s"), (2_000_000_000, "20.00 GB/s"), (40, "0.4 kB/s")],
)
def test_the_speed_of_a_small_save_is_not_zero(nbytes: int, text: str) -> None:
    assert str(SaveReport("/x", nbytes, 1, 0.1)).endswith(f"0.100 s ({text})")


def test_the_repr_of_each_is_one_short_line() -> None:
    problem = Problem("w", "/x/a", "leaf 'w': /x/a is damaged")
    many = VerifyReport("/x", 1000, 2, 0.1, 0, (problem,) * 20_000)
    assert repr(problem) == "<Problem: leaf 'w': /x/a is damaged>"
    assert repr(SaveReport("/x", 1000, 2, 0.1, {"write": 0.1})) == "<SaveReport /x: 1,000 bytes in 2 files, 0.100 s>"
    assert repr(VerifyReport("/x", 1000, 2, 0.1, 0, ())) == "<VerifyReport /x: no problems in 1,000 bytes in 2 files>"
    assert repr(many) == "<VerifyReport /x: 20,000 problems>"


def test_of_very_many_problems_the_first_are_shown() -> None:
    problems = tuple(Problem("w", "/x/a", f"leaf {number}") for number in range(20_000))
    lines = str(VerifyReport("/x", 1000, 2, 0.1, 0, problems)).splitlines()
    assert (len(lines), lines[-1]) == (22, "  … and 19,980 more problems")


def test_a_verify_report_is_true_if_nothing_is_wrong() -> None:
    good = VerifyReport("/x", 1000, 2, 0.1, 0, ())
    assert good.ok
    assert bool(good)
    assert str(good) == "/x: no problems in 1,000 bytes in 2 files"
    partly = VerifyReport("/x", 1000, 2, 0.1, 3, ())
    assert "3 leaves have no digests" in str(partly)


def test_a_verify_report_is_false_and_lists_problems() -> None:
    problems = (Problem("w", "/x/a", "leaf 'w': /x/a is damaged"), Problem(None, "/x/b", "/x/b: the file is missing"))
    bad = VerifyReport("/x", 1000, 2, 0.1, 0, problems)
    assert not bad.ok
    assert not bad
    assert str(bad).splitlines() == ["/x: 2 problems", "  leaf 'w': /x/a is damaged", "  /x/b: the file is missing"]


def test_reports_cannot_be_changed() -> None:
    for report in (SaveReport("/x", 1, 1, 1.0), VerifyReport("/x", 1, 1, 1.0, 0, ()), Problem(None, "f", "m")):
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
            report.path = "other"  # type: ignore[misc, union-attr]


def test_a_report_of_nothing_warm_says_so_at_once() -> None:
    report = SaveReport("/x", 1, 1, 1.0)
    assert report.warm.wait() is False
    assert pickle.loads(pickle.dumps(report)) == report
