"""Structures that JAX exports: decoded as JAX decodes them, and refused if malformed."""

import base64
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep.foreign.pytreedef import decode_pytreedef
from shardkeep.model.tree import Skeleton

FIXTURE = Path(__file__).parents[1] / "fixtures" / "jax" / "pytree" / "pytreedef.json"
DATA = base64.b64decode(json.loads(FIXTURE.read_text())["__jax_pytreedef_repr"])


def test_the_structure_of_a_fixture() -> None:
    assert Skeleton(decode_pytreedef(DATA, "x")).rebuild([1, 2]) == {"a": 1, "b": [2]}


TREES: list[Any] = [
    0,
    None,
    {},
    [],
    (),
    {"a": 0, "b": (0, [None, 0]), "c": {"d": {}}},
    [[[0]], (0,)],
    {"": 0, "a/b": 0},
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_structure_is_the_one_that_jax_exported(tree: Any) -> None:
    utils = pytest.importorskip("jax.experimental.array_serialization.pytree_serialization_utils", exc_type=ImportError)
    exported = utils.serialize_pytreedef(jax.tree.structure(tree))
    found = Skeleton(decode_pytreedef(base64.b64decode(exported["__jax_pytreedef_repr"]), "x"))
    assert found.rebuild([0] * len(found.paths())) == tree


@given(st.integers(0, len(DATA) - 1), st.integers(0, 255))
def test_a_changed_byte_is_decoded_or_refused(at: int, byte: int) -> None:
    for data in (DATA[:at] + bytes([byte]) + DATA[at + 1 :], DATA[:at]):
        try:
            decode_pytreedef(data, "x")
        except shardkeep.IntegrityError:
            pass


def test_a_structure_in_itself_is_refused() -> None:
    """A list whose only child is the list."""
    table = 12
    data = (
        table.to_bytes(4, "little")
        + (8).to_bytes(2, "little") + (12).to_bytes(2, "little") + (4).to_bytes(2, "little") + (8).to_bytes(2, "little")
        + (8).to_bytes(4, "little", signed=True) + bytes([3, 0, 0, 0]) + (4).to_bytes(4, "little")
        + (1).to_bytes(4, "little") + (2**32 - 16).to_bytes(4, "little")
    )  # fmt: skip
    with pytest.raises(shardkeep.IntegrityError, match="x is malformed"):
        decode_pytreedef(data, "x")
