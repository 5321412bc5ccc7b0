"""Texts for people and numbers for programs."""

import datetime
import math

import numpy as np
import pytest

from shardkeep.cli.output import Output, age, counted, human, json_number, json_value, message_of, plain, short
from shardkeep.converting.survey import moment_of, natural


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (5 * 10**9, "5.0 GB")],
)
def test_sizes_are_decimal(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


def test_names_sort_by_their_numbers() -> None:
    names = ["step_10", "step_9", "a", "step_9/x", "10", "9"]
    assert sorted(names, key=natural) == ["9", "10", "a", "step_9", "step_9/x", "step_10"]


def test_ages_have_one_unit() -> None:
    now = datetime.datetime(2026, 11, 16, tzinfo=datetime.UTC)
    spans = {0: "now", 59: "59 s", 3600 * 5: "5 h", 86400 * 400: "1 y"}
    for seconds, text in spans.items():
        assert age(now - datetime.timedelta(seconds=seconds), now) == text
    assert age(None) == "-"


def test_a_recorded_time_without_a_zone_is_utc() -> None:
    assert moment_of("2026-11-15T21:22:19.525343") == datetime.datetime(
        2026, 11, 15, 21, 22, 19, 525343, tzinfo=datetime.UTC
    )
    assert moment_of("yesterday") is None
    assert moment_of(None) is None


def test_numbers_and_values_are_strict_json() -> None:
    assert [json_number(x) for x in (1.5, math.inf, -math.inf, math.nan, None)] == [1.5, "inf", "-inf", "nan", None]
    assert [json_value(x) for x in (True, 3, "a", 0.5)] == [True, 3, "a", 0.5]
    assert json_value(2**60) == str(2**60)
    assert json_value(b"x") == "b'x'"
    assert json_value(np.float32(1)) == repr(np.float32(1))


def test_texts_are_made_safe_and_short() -> None:
    assert plain("ok é") == "ok é"
    assert plain("a\nb\x07\ud800") == "a\\nb\\x07\\ud800"
    assert short("x" * 100) == f"{repr('x' * 31)[:-1]}… (100 characters)"
    assert counted(1, "leaf", "leaves") == "1 leaf"


def test_columns_are_aligned_and_lines_have_no_blanks_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table([["a", "1", ""], ["bbb", "22", "x"]], right=(1,))
    assert capsys.readouterr().out == "a     1\nbbb  22  x\n"


def test_a_cell_without_cells_after_it_spans_the_other_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table([["a", "1", "x"], ["b", "a long text"], ["ccc", "22", "y"]], indent=" ")
    assert capsys.readouterr().out == " a    1   x\n b    a long text\n ccc  22  y\n"
    Output().table([["a", "long"], ["bb", "x"]])
    assert capsys.readouterr().out == "a   long\nbb  x\n"
    Output().table([])
    assert capsys.readouterr().out == ""


def test_long_texts_and_bytes_tell_their_length() -> None:
    assert short("x" * 58) == repr("x" * 58)
    assert short("x" * 2_000_000).endswith("x… (2,000,000 characters)")
    assert short(b"\x80" * 20) == r"b'\x80\x80\x80\x80\x80\x80\x80\x… (20 bytes)"
    assert len(short(10**80)) == 60
    for value in ("x" * 61, b"\xff" * 60, 10**4000, "\x1b" * 100):
        assert len(short(value)) <= 60


def test_arguments_of_python_are_options_in_messages_but_paths_stay() -> None:
    error = ValueError("/data/prefix=a/x holds two trees: pass prefix='a' (or include='b'), or overwrite=True")
    told = "/data/prefix=a/x holds two trees: pass --prefix 'a' (or --include 'b'), or --overwrite"
    assert message_of(error) == told
