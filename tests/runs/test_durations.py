"""Durations as users write them."""

import datetime
from typing import Any

import pytest

from shardkeep.runs.durations import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30 s", 30), ("15min", 900), ("1.5 h", 5400), ("2 Days", 172800), (datetime.timedelta(minutes=2), 120)],
)
def test_durations_are_seconds(text: Any, seconds: float) -> None:
    assert parse_duration(text, "within") == seconds


@pytest.mark.parametrize("text", ["", "15", "min", "-3 min", "0 s", "3 fortnights", 15, None, datetime.timedelta(-1)])
def test_what_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="within=.* is not a duration; pass text such as"):
        parse_duration(text, "within")
