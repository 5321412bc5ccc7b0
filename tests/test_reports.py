"""Reports: what they hold, when they are true, how they read."""

import dataclasses

import pytest

from shardkeep import Problem, SaveReport, VerifyReport


def test_a_save_report_reads_as_one_line() -> None:
    report = SaveReport("/x/run", 3_000_000_000, 4, 2.0, {"snapshot": 0.5, "write": 1.5})
    assert str(report) == "/x/run: 3,000,000,000 bytes in 4 files, 2.000 s (1.50 GB/s; snapshot 0.500 s, write 1.500 s)"
    assert report.gb_per_second == 1.5


def test_one_file_and_one_problem_are_not_plural() -> None:
    assert "10 bytes in 1 file, " in str(SaveReport("/x", 10, 1, 1.0))
    assert (
        str(VerifyReport("/x", 10, 1, 0.1, 1, ()))
        == "/x: 10 bytes in 1 file are as they were saved; no digests for 1 leaf"
    )
    assert str(VerifyReport("/x", 10, 1, 0.1, 0, (Problem(None, "/x/b", "gone"),))).startswith("/x: 1 problem\n")


def test_a_save_report_of_no_time_has_no_speed() -> None:
    assert SaveReport("/x", 10, 1, 0.0).gb_per_second == 0.0
    assert "0.00 GB/s" in str(SaveReport("/x", 10, 1, 0.0))


def test_a_verify_report_is_true_if_nothing_is_wrong() -> None:
    good = VerifyReport("/x", 1000, 2, 0.1, 0, ())
    assert good.ok
    assert bool(good)
    assert str(good) == "/x: 1,000 bytes in 2 files are as they were saved"
    partly = VerifyReport("/x", 1000, 2, 0.1, 3, ())
    assert "no digests for 3 leaves" in str(partly)


def test_a_verify_report_is_false_and_lists_every_problem() -> None:
    problems = (Problem("w", "/x/a", "leaf 'w': /x/a is damaged"), Problem(None, "/x/b", "/x/b: the file is missing"))
    bad = VerifyReport("/x", 1000, 2, 0.1, 0, problems)
    assert not bad.ok
    assert not bad
    assert str(bad).splitlines() == ["/x: 2 problems", "  leaf 'w': /x/a is damaged", "  /x/b: the file is missing"]


def test_reports_cannot_be_changed() -> None:
    for report in (SaveReport("/x", 1, 1, 1.0), VerifyReport("/x", 1, 1, 1.0, 0, ()), Problem(None, "f", "m")):
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
            report.path = "other"  # type: ignore[misc, union-attr]
