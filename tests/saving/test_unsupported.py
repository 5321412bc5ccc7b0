"""What cannot be saved is named, with the reason, before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from shardkeep.model.tree import flatten
from shardkeep.saving.snapshot import examine
from shardkeep.saving.unsupported import is_jax_array


def deleted(array: jax.Array) -> jax.Array:
    array.delete()
    return array


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: deleted(jnp.ones(3)), "the array has been deleted or donated"),
        (lambda: np.ma.masked_array([1]), "a MaskedArray has more than plain data"),
        (lambda: np.array(["a", None], object), "NumPy dtype object cannot be stored"),
        (lambda: jax.ShapeDtypeStruct((2,), jnp.float32), "an abstract array"),
        (lambda: len, r"a function or class \(len\) is not data"),
        (lambda: ..., "marks a leaf that is not loaded"),
        (lambda: Path(), "is neither an array nor a plain value"),
        (lambda: deleted(jax.random.key(0)), "the array has been deleted or donated"),
        (lambda: np.zeros(2, jax.dtypes.float0), "NumPy dtype .* cannot be stored"),
    ],
)
def test_each_kind_of_leaf_that_cannot_be_saved(make: Callable[[], Any], why: str, tmp_path: Path) -> None:
    jax.block_until_ready(jnp.ones(3))
    tree = {"ok": jnp.ones(3), "wrong": make()}
    for save in (shardkeep.save, shardkeep.save_async):
        with pytest.raises(shardkeep.UnsupportedLeafError, match=rf"1 leaf cannot be saved(?s:.*)  wrong: .*{why}"):
            save(tmp_path / "run", tree)
    assert not (tmp_path / "run").exists()


def test_an_array_of_a_known_kind_is_still_looked_at(tmp_path: Path) -> None:
    """What is known of arrays of one shape, dtype and sharding does not hide that one of them was deleted."""
    shardkeep.save(tmp_path / "first", {"w": jnp.ones((3, 5))})
    with pytest.raises(shardkeep.UnsupportedLeafError, match="w: the array has been deleted or donated"):
        shardkeep.save(tmp_path / "second", {"w": deleted(jnp.ones((3, 5)))})


def test_all_leaves_that_cannot_be_saved_are_named_up_to_ten() -> None:
    with pytest.raises(shardkeep.UnsupportedLeafError, match=r"12 leaves(?s:.*)  9: (?s:.*)… and 2 more") as caught:
        examine(flatten([len] * 12 + [1])[1])
    assert str(caught.value).count("not data") == 10


def test_what_a_jax_array_is() -> None:
    values = [jnp.ones(3), jax.random.key(0), jax.device_put(np.ones(8))]
    assert all(is_jax_array(type(value)) and isinstance(value, jax.Array) for value in values)
    assert not any(is_jax_array(type(value)) for value in [np.ones(3), 1, jax.ShapeDtypeStruct((), int), len])

    def traced(x: jax.Array) -> jax.Array:
        with pytest.raises(shardkeep.UnsupportedLeafError, match="a traced value inside jit"):
            examine(flatten({"x": x})[1])
        return x

    jax.jit(traced)(1.0)
