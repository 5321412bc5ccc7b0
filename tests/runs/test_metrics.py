"""Metrics: checked when they are passed, read later, as floats."""

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardkeep.errors import MetadataError
from shardkeep.runs.metrics import Metrics


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (0.25, 0.25),
        (np.float16(0.5), 0.5),
        (np.array(7, np.uint8), 7.0),
        (jnp.float32(1.5), 1.5),
        (jnp.bfloat16(-2), -2.0),
        (jnp.int8(4), 4.0),
        (jnp.float8_e4m3fn(0.5), 0.5),
        (jnp.float32(math.inf), math.inf),
        (10**400, math.inf),
        (-(10**400), -math.inf),
    ],
)
def test_every_kind_of_real_number_becomes_a_float(value: Any, number: float) -> None:
    found = Metrics({"x": value}).read()["x"]
    assert type(found) is float
    assert found == number


@pytest.mark.parametrize("value", [math.nan, np.float32("nan"), jnp.float32(math.nan), jnp.bfloat16(math.nan)])
def test_nan_stays_nan(value: Any) -> None:
    assert math.isnan(Metrics({"x": value}).read()["x"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("loss", 1)], "metrics must be a dict of names and numbers, as .*, not a list"),
        ({3: 1.0}, "the name of a metric must be a string, not 3"),
        ({"": 1.0}, "the name of a metric must be a string, not ''"),
        ({"x": np.array("low")}, "metric 'x' has dtype <U3"),
        ({"x": np.bool_(True)}, "metric 'x' has dtype bool"),
        ({"x": jax.random.key(0)}, r"metric 'x' has dtype key<fry>"),
        ({"x": np.array(None)}, "metric 'x' has dtype object"),
    ],
)
def test_what_is_no_real_number_is_refused_before_anything_is_read(given: Any, message: str) -> None:
    with pytest.raises(MetadataError, match=message):
        Metrics(given)


def test_a_value_that_is_gone_is_left_out_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """It was donated to the next step: the other metrics and the checkpoint are worth more."""
    gone = jnp.float32(1)
    metrics = Metrics({"gone": gone, "there": 2})
    gone.delete()
    with caplog.at_level(logging.ERROR):
        assert metrics.read() == {"there": 2.0}
    assert "metric 'gone' could not be read" in caplog.text


def test_what_is_changed_after_the_call_does_not_count() -> None:
    given = {"x": 1}
    metrics = Metrics(given)
    given["x"] = 2
    assert metrics.read() == {"x": 1.0}
    assert Metrics(None).read() == {}
