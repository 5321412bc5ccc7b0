"""Decoded values as trees: what is a container, a leaf, or a stand-in."""

from typing import Any

import numpy as np
import pytest

import shardkeep
from foreign.torchfiles import Call, Global, Pickle
from shardkeep.foreign.standins import Placed, take_apart
from shardkeep.foreign.torchpickles import Tensor, decode_torch


def keys_of(value: Any) -> list[str]:
    """The keys of the leaves of a value that goes through a pickle."""
    document = Pickle().dumps(value)
    return ["/".join(path) for path, _ in take_apart(decode_torch(document, "x"), len(document), "x").leaves]


def test_names_with_dots_make_levels_where_there_are_tensors() -> None:
    w = np.ones(1, np.float32)
    assert keys_of({"a.b": w, "a.c": w}) == ["a/b", "a/c"]
    assert keys_of({"a": w, "a.b": w}) == ["a", "a.b"]
    assert keys_of({"lr_0.1": 1, "m": {"a.b": w}}) == ["lr_0.1", "m/a/b"]
    assert keys_of({"a.b": w, 3: w}) == ["a.b", "3"]


def test_none_is_no_leaf_and_containers_keep_their_kind() -> None:
    taken = take_apart({"a": None, "b": (1, [2.5]), 3: "x"}, 0, "x")
    assert [(path, value) for path, value in taken.leaves] == [(("b", "0"), 1), (("b", "1", "0"), 2.5), (("3",), "x")]
    assert taken.skeleton.rebuild([1, 2.5, "x"]) == {"a": None, "b": (1, [2.5]), 3: "x"}


def test_a_class_is_its_name() -> None:
    document = Pickle().dumps([Global("torch", "float16"), Global("a.b", "C")])
    taken = take_apart(decode_torch(document, "x"), 0, "x")
    assert [value for _, value in taken.leaves] == ["torch.float16", "a.b.C"]


def test_the_state_of_an_object_is_inside_its_stand_in() -> None:
    assert keys_of(Call(Global("m", "C"), (1,), {"args": 2, "w": np.ones(1)})) == ["args", "w", "_args/0"]
    found = take_apart(decode_torch(Pickle().dumps(Call(Global("m", "C"), (1,), (2, 3))), "x"), 0, "x")
    assert found.skeleton.rebuild([1, 2, 3]) == shardkeep.OpaqueNode("m:C", {"args": (1,), "state": (2, 3)})


def test_what_another_parser_placed_is_a_leaf() -> None:
    placed = Placed()
    taken = take_apart({"a.b": placed}, 0, "x")
    assert taken.leaves == ((("a", "b"), placed),)


def test_a_storage_is_an_array_of_its_elements() -> None:
    document = Pickle().dumps(np.ones(3, np.float32))
    (_, tensor), *_ = take_apart(decode_torch(document, "x"), len(document), "x").leaves
    assert isinstance(tensor, Tensor)
    (_, whole), *_ = take_apart(tensor.storage, 0, "x").leaves
    assert isinstance(whole, Tensor)
    assert (whole.shape, whole.strides) == ((3,), (1,))


def test_more_values_than_the_pickle_justifies_are_refused() -> None:
    shared = [0] * 500
    with pytest.raises(shardkeep.IntegrityError, match="repeats itself too often"):
        take_apart([shared] * 5, 100, "x")
