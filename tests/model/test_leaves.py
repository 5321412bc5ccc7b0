"""Saved leaves: what users see of each kind, and that the record of what it was survives the document."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from shardkeep.model.arrays import ArraySpec
from shardkeep.model.leafrecords import encode_origin
from shardkeep.model.leaves import (
    ForeignArray,
    JaxArray,
    NumpyArray,
    Origin,
    PrngKeys,
    SavedSharding,
    StoredArray,
    StoredLeaf,
    StoredValue,
)
from shardkeep.model.perprocess import PerProcessRows
from support import mesh_of

U4 = np.dtype("u4")
SHARDING = SavedSharding(("a", None, ("b", "c")), (("a", 2), ("b", 2), ("c", 2)))
ORIGINS: dict[str, tuple[Origin, dict[str, Any]]] = {
    "jax": (JaxArray(), {}),
    "numpy": (NumpyArray(">"), {"order": ">"}),
    "prng": (PrngKeys("rbg"), {"impl": "rbg"}),
    "per_process": (PerProcessRows((3, 5), 64), {"lengths": [3, 5]}),
    "zarr": (ForeignArray("m/w"), {"directory": "m/w"}),
}


@pytest.mark.parametrize("kind", ORIGINS)
def test_each_origin_has_its_kind_and_its_fields_on_disk(kind: str) -> None:
    origin, fields = ORIGINS[kind]
    assert (origin.kind, encode_origin(origin)) == (kind, fields)
    assert StoredArray(("w",), ArraySpec((2, 3), U4), (), origin).kind == kind


def test_a_sharding_is_recorded_as_lists_and_a_mesh_by_name() -> None:
    written = {"spec": ["a", None, ["b", "c"]], "mesh": {"a": 2, "b": 2, "c": 2}}
    assert encode_origin(JaxArray(SHARDING)) == {"sharding": written}


def test_the_logical_form_is_not_that_of_the_data() -> None:
    forms = {
        kind: (leaf.logical_dtype, leaf.logical_shape, leaf.holds_numbers)
        for kind, (origin, _) in ORIGINS.items()
        for leaf in [StoredArray(("w",), ArraySpec((2, 3), U4), (), origin)]
    }
    assert forms.pop("prng") == ("key<rbg>", (2,), False)
    assert forms.pop("per_process") == ("PerProcess", (2,), False)
    assert set(forms.values()) == {("uint32", (2, 3), True)}


def test_both_kinds_of_leaf_are_stored_leaves_with_all_attributes() -> None:
    array = StoredArray(("a", "b"), ArraySpec((2, 3), U4), (), JaxArray())
    value = StoredValue(("a", "n"), 5)
    for leaf, facts in (
        (array, ("a/b", "jax", (2, 3), "uint32", 24, None, None)),
        (value, ("a/n", "value", None, None, 0, 5, None)),
    ):
        assert isinstance(leaf, StoredLeaf)
        assert repr(leaf).startswith("<StoredLeaf a/")
        assert (leaf.key, leaf.kind, leaf.shape, leaf.dtype, leaf.nbytes, leaf.value, leaf.processes) == facts


def test_what_a_leaf_was_survives_the_document(tmp_path: Path) -> None:
    spread = NamedSharding(mesh_of(2, 4), PartitionSpec(("a", "b")))
    tree = {
        "spread": jax.device_put(jnp.zeros(8), spread),
        "one": jnp.zeros(2),
        "swapped": np.zeros(2, ">i4"),
        "host": np.zeros(2),
        "key": jax.random.key(1, impl="rbg"),
        "each": shardkeep.PerProcess(7),
    }
    shardkeep.save(tmp_path / "run", tree)
    found = {leaf.key: leaf.origin for leaf in shardkeep.inspect(tmp_path / "run").tree().arrays}
    rows = found.pop("each")
    assert isinstance(rows, PerProcessRows)
    assert len(rows.lengths) == 1
    assert found == {
        "spread": JaxArray(SavedSharding((("a", "b"),), (("a", 2), ("b", 4)))),
        "one": JaxArray(),
        "swapped": NumpyArray(">"),
        "host": NumpyArray(),
        "key": PrngKeys("rbg"),
    }
