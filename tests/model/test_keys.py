"""Keys may be typed with `/` or `.`; a leaf is found under either spelling where only one can be meant."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from shardkeep.model.keys import ByLooseKey, KeyTable, loose_key
from shardkeep.model.tree import join_key, show_key


@pytest.mark.parametrize("path", [("a",), ("a", "b"), ("a.b", "c"), ("a/b", "c"), ("", "b"), ("a\\", "b")])
def test_what_is_shown_and_what_is_stored_have_one_spelling(path: tuple[str, ...]) -> None:
    assert loose_key((show_key(path),)) == loose_key((join_key(path),)).replace("\\\\", "\\") == loose_key(path)


def test_a_path_is_found_exactly_before_it_is_found_loosely() -> None:
    found = ByLooseKey([(("a", "b"), 1), (("a.b",), 2), (("x.y", "z"), 3)])
    assert found.get(("a", "b")) == 1
    assert found.get(("a.b",)) == 2
    assert found.get(("a/b",)) is None
    assert found.get(("x", "y", "z")) == found.get(("x/y/z",)) == 3
    assert found.get(("x",)) is None


def test_a_table_is_a_dict_whose_keys_may_have_dots() -> None:
    table = KeyTable({"params/w": 1, "a.b": 2, "a/b": 3})
    assert table["params.w"] == table["params/w"] == table.get("params.w") == 1
    assert table["a.b"] == 2
    assert table["a/b"] == 3
    assert "params.w" in table
    assert "params.x" not in table
    assert 3 not in table
    assert table.get("params.x", 7) == 7
    assert dict(table) == {"params/w": 1, "a.b": 2, "a/b": 3}
    with pytest.raises(KeyError, match="nothing"):
        table["nothing"]


def test_a_spelling_that_two_keys_share_is_not_guessed() -> None:
    with pytest.raises(KeyError, match="a/b/c"):
        KeyTable({"a.b/c": 1, "a/b.c": 2})["a/b/c"]


def test_inspect_shows_keys_with_slashes_and_finds_them_with_dots(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"params": {"w": jnp.ones(2)}, "a.b": np.ones(1)})
    leaves = shardkeep.inspect(tmp_path / "c").leaves
    assert list(leaves) == ["params/w", "a.b"]
    assert leaves["params/w"] is leaves["params.w"]
    assert leaves["a/b"] is leaves["a.b"]
