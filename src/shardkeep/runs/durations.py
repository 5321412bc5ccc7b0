"""Durations as users write them: "15 min", "2 h", or a `datetime.timedelta`."""

import datetime
import math
import re
from typing import Any

_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*\Z")


def parse_duration(value: Any, name: str) -> float:
    """A duration in seconds. Raises `ValueError` for what is none, or not positive.

    Args:
        value: A number with its unit (s, min, h or d) as text, or a `timedelta`.
        name: What it was passed as, for the message.

    >>> parse_duration("15 min", "within"), parse_duration(datetime.timedelta(days=1), "within")
    (900.0, 86400.0)
    """
    seconds = math.nan
    if isinstance(value, datetime.timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        found = _DURATION.match(value.lower())
        if found and found[2] in _SECONDS:
            seconds = float(found[1]) * _SECONDS[found[2]]
    if not 0 < seconds < math.inf:
        raise ValueError(
            f'{name}={value!r} is not a duration; pass text such as "30 s", "15 min", "2 h" or "7 d", or a '
            "datetime.timedelta, greater than 0"
        )
    return seconds
