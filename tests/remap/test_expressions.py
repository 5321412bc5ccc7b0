"""What rules make of arrays has a shape, a dtype and a sharding before anything is read."""

from typing import Any

import numpy as np
import pytest

from shardkeep.model.arrays import ArraySpec
from shardkeep.model.leaves import JaxArray, SavedSharding, StoredArray
from shardkeep.remap.expressions import (
    Called,
    Changed,
    Expression,
    Filled,
    Joined,
    Reshaped,
    Sliced,
    Stacked,
    StoredSource,
    Transposed,
    keeps_values,
    made_alike,
    resized,
    result_of,
    sharding_of,
    sources_of,
)

F16 = np.dtype("float16")
MESH = (("a", 4), ("b", 2))


def source(*shape: int, key: str = "x", spec: Any = ("a", "b")) -> StoredSource:
    sharding = SavedSharding(tuple(spec), MESH)
    return StoredSource(StoredArray((key,), ArraySpec(shape, F16), (), JaxArray(sharding)))


X = source(8, 6)
Y = source(8, 6, key="y")


@pytest.mark.parametrize(
    ("made", "shape", "spec"),
    [
        (Stacked((X, Y), 0), (2, 8, 6), (None, "a", "b")),
        (Stacked((X, Y), 2), (8, 6, 2), ("a", "b", None)),
        (Joined((X, Y), 1), (8, 12), ("a", "b")),
        (Sliced(X, 1, 2, 3), (8, 3), ("a", "b")),
        (Sliced(X, 0, 2, 1, drop=True), (6,), ("b",)),
        (Transposed(X, (1, 0)), (6, 8), ("b", "a")),
        (Transposed(source(8, 6, spec=("a",)), (1, 0)), (6, 8), (None, "a")),
        (Reshaped(X, (48,)), (48,), None),
        (Changed(X, np.abs, np.dtype("int8")), (8, 6), ("a", "b")),
        (Called(X, np.sum, (), F16), (), None),
        (Filled((3,), F16, 0), (3,), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_shapes_and_saved_shardings_follow(made: Expression, shape: tuple[int, ...], spec: Any) -> None:
    assert made.shape == shape
    sharding = sharding_of(made)
    assert (None if sharding is None else sharding.spec) == spec
    assert made.dtype == ("int8" if isinstance(made, Changed) else F16)


def test_an_array_is_cut_or_filled_to_a_size() -> None:
    assert resized(X, 0, 8, 0) is X
    cut = resized(X, 1, 4, 0)
    assert isinstance(cut, Sliced)
    assert cut.shape == (8, 4)
    grown = resized(X, 0, 11, None)
    assert grown.shape == (11, 6)
    assert grown.operands[1].shape == (3, 6)
    assert keeps_values(grown)
    assert not keeps_values(resized(X, 0, 11, 0))


def test_each_source_is_named_once() -> None:
    made = Joined((Transposed(X, (1, 0)), Transposed(Y, (1, 0)), Transposed(X, (1, 0))), 0)
    assert [leaf.key for leaf in sources_of(made)] == ["x", "y"]


def test_arrays_are_alike_if_they_are_made_of_the_same_in_the_same_way() -> None:
    assert made_alike(Stacked((X, Y), 0), Stacked((X, Y), 0))
    assert not made_alike(Stacked((X, Y), 0), Stacked((Y, X), 0))
    assert not made_alike(Stacked((X, X), 0), Stacked((X, X), 1))
    assert not made_alike(Sliced(X, 0, 0, 2), Sliced(X, 0, 2, 2))
    assert not made_alike(Transposed(X, (1, 0)), Reshaped(X, (6, 8)))
    assert not made_alike(Filled((2,), F16, 0), Filled((2,), F16, 0)), "each stands for an array of its own"


def test_a_function_makes_what_was_planned_or_it_is_an_error() -> None:
    data = np.ones((2, 3), F16)
    assert result_of(np.transpose, data, (3, 2), F16, "rule").shape == (3, 2)
    with pytest.raises(ValueError, match=r"rule: .* returned float16\[3, 2\] for float16\[2, 3\], but float16\[2"):
        result_of(np.transpose, data, (2, 3), F16, "rule")
