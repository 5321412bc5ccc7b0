"""CheckpointMetadata: what is recorded with a tree."""

import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from shardkeep.eformer.metadata import CheckpointMetadata, compute_checksum, describe_arrays, metadata_of
from shardkeep.model.naming import dotted_names

EAST = datetime.timezone(datetime.timedelta(hours=5))
KEYS = ["version", "timestamp", "checksum", "array_metadata", "framework_version", "custom_metadata"]


def test_a_dict_has_the_six_keys_and_no_dict_is_none() -> None:
    assert CheckpointMetadata(timestamp="2026-01-02").to_dict() == {
        "version": shardkeep.__version__,
        "timestamp": "2026-01-02",
        "checksum": {},
        "array_metadata": {},
        "framework_version": None,
        "custom_metadata": {},
    }


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC), "2026-01-02T03:04:05+00:00"),
        (datetime.datetime(2026, 1, 2, 3, tzinfo=EAST), "2026-01-01T22:00:00+00:00"),
        (datetime.datetime(2026, 1, 2, 3), "2026-01-02T03:00:00+00:00"),
        ("2026-01-02", "2026-01-02"),
    ],
)
def test_the_time_is_in_iso_form_and_utc(moment: Any, text: str) -> None:
    assert CheckpointMetadata(timestamp=moment).to_dict()["timestamp"] == text


def test_the_time_is_filled_when_it_is_created() -> None:
    before = datetime.datetime.now(datetime.UTC)
    metadata = CheckpointMetadata()
    after = datetime.datetime.now(datetime.UTC)
    text = metadata.to_dict()["timestamp"]
    assert before <= datetime.datetime.fromisoformat(text) <= after
    assert text.endswith("+00:00")
    assert metadata.timestamp == text
    assert metadata.to_dict() == metadata.to_dict()  # not the time of the call


@pytest.mark.parametrize("given", [{}, {"timestamp": None}, {"version": "1"}])
def test_a_time_that_was_not_recorded_stays_unknown(given: dict[str, Any]) -> None:
    assert CheckpointMetadata.from_dict(given).to_dict()["timestamp"] is None


@pytest.mark.parametrize(
    "given",
    [
        CheckpointMetadata(),
        CheckpointMetadata(timestamp=datetime.datetime(2026, 1, 2, tzinfo=EAST), custom_metadata={"a": 1}),
        CheckpointMetadata(timestamp="yesterday", checksum={"w": "0"}),
    ],
)
def test_a_dict_and_back_gives_the_same(given: CheckpointMetadata) -> None:
    again = CheckpointMetadata.from_dict(given.to_dict())
    assert again == given
    assert again.to_dict() == given.to_dict()
    assert again != CheckpointMetadata(timestamp="another time")
    assert again != given.to_dict()


def test_from_dict_ignores_unknown_keys_and_undoes_to_dict() -> None:
    given = CheckpointMetadata("1", "2026", {"w": "0"}, {"w": {}}, "0.10", {"a": 1})
    assert CheckpointMetadata.from_dict({**given.to_dict(), "unknown": 3}) == given
    assert list(given.to_dict()) == KEYS


def test_changing_the_dict_does_not_change_the_metadata() -> None:
    metadata = CheckpointMetadata(custom_metadata={"a": 1})
    metadata.to_dict()["custom_metadata"]["a"] = 2
    assert metadata.custom_metadata == {"a": 1}


def test_names_are_dotted_and_escaped_only_where_two_would_be_the_same() -> None:
    assert dotted_names([("a", "b"), ("c.d",)]) == ["a.b", "c.d"]
    assert dotted_names([("a", "b"), ("a.b",)]) == ["a.b", r"a\.b"]
    assert dotted_names([()]) == [""]


def test_a_description_names_shape_dtype_and_if_asked_the_checksum() -> None:
    arrays = {"w": jnp.ones((2, 3), jnp.bfloat16), "k": jax.random.key(0), "big": np.arange(3, dtype=">i2")}
    plain = describe_arrays(arrays, {"x": 1}, checksums=False)
    assert plain["array_metadata"]["w"] == {"shape": [2, 3], "dtype": "bfloat16"}
    assert plain["array_metadata"]["k"]["shape"] == []
    assert plain["checksum"] == {}
    assert plain["custom_metadata"] == {"x": 1}
    assert plain["framework_version"] == jax.__version__
    sums = describe_arrays(arrays, None, checksums=True)["checksum"]
    assert sums["w"] == compute_checksum(arrays["w"])
    assert sums["k"] == compute_checksum(jax.random.key_data(arrays["k"]))
    assert sums["big"] == compute_checksum(np.arange(3, dtype="<i2"))


def test_metadata_that_looks_like_ours_is_given_back_as_such(tmp_path: Path) -> None:
    given = CheckpointMetadata("1", "2026", {}, {}, "0", {"a": 1}).to_dict()
    shardkeep.save(tmp_path / "c", {"w": jnp.ones(1)}, metadata=given)
    assert metadata_of(shardkeep.inspect(tmp_path / "c").tree()) == given
