"""Memory that changes under a save: a sample of what `make faults` does for each way to make an array."""

from pathlib import Path

import pytest

from faults import alias


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_what_changes_after_save_async_is_saved_as_it_was(tmp_path: Path, dtype: str) -> None:
    ways = ["device_put", "device_put, sharded", "dlpack", "callback, replicated", "parts, sharded", "x[:]"]
    points = 24 if dtype == "float32" else 20  # NumPy has no dlpack of the others
    assert alias.afterwards(str(tmp_path), dtype, 2, ways) == (points, [])


def test_with_copy_nothing_that_changes_is_saved(tmp_path: Path) -> None:
    assert alias.behind_jax(str(tmp_path), ["jit, fast path", "donated, sharded"]) == (4, [])


def test_what_changes_during_a_save_has_digests_that_match(tmp_path: Path) -> None:
    assert alias.meanwhile(str(tmp_path), "float32", 6) == (6, [])
