"""What the writer of a run notes about it."""

import datetime

import pytest

from shardkeep import Keep
from shardkeep.runs.rules import Rules, decode_rules, encode_rules


@pytest.mark.parametrize(
    "keep",
    [
        None,
        Keep(last=3),
        Keep(last=1, every=10, best=2, metric="eval/loss", mode="min", within="12 h"),
    ],
)
def test_rules_come_back_as_they_were_noted(keep: Keep | None) -> None:
    rules = Rules("at-{:04d}", keep)
    assert decode_rules(encode_rules(rules)) == rules


def test_a_timedelta_is_noted_in_seconds() -> None:
    encoded = encode_rules(Rules("step_{}", Keep(within=datetime.timedelta(days=1, microseconds=5))))
    assert encoded["keep"] == {"within": "86400.000005 s"}
    assert decode_rules(encoded) == Rules("step_{}", Keep(within="86400.000005 s"))


@pytest.mark.parametrize(
    "found",
    [None, [], "x", {}, {"name": "step", "keep": None}, {"name": 3, "keep": None}]
    + [{"name": "step_{}", "keep": keep} for keep in ([], {}, {"last": -1}, {"later": 3}, {"last": "3"})],
)
def test_rules_that_make_no_sense_are_not_known(found: object) -> None:
    assert decode_rules(found) is None
