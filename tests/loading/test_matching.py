"""One saved leaf and what a template has in its place: how it is loaded, or why it cannot be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardkeep.loading.matching import NumpyStruct, Wanted, as_template
from shardkeep.loading.mismatches import Mismatch
from shardkeep.loading.request import LoadRequest, Policy
from shardkeep.loading.shardings import Place
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import NATIVE, UNSHARDED, Origin, StoredArray, StoredValue
from shardkeep.model.perprocess import PerProcess
from shardkeep.model.tree import Leaf
from support import mesh_of

P = PartitionSpec
MESH = mesh_of(4, 2)
Abstract = jax.ShapeDtypeStruct


def stored(*shape: int, dtype: str = "float32", origin: Origin = UNSHARDED) -> StoredArray:
    return StoredArray(("x",), ArraySpec(shape, np.dtype(dtype)), (), origin)


def match(saved: Any, like: Any, **asked: Any) -> Wanted | Mismatch:
    return as_template(saved, Leaf(("x",), like), LoadRequest(**asked))


@pytest.mark.parametrize(
    ("like", "as_numpy", "dtype"),
    [
        (np.zeros((8, 2), np.float16), True, "float16"),
        (NumpyStruct((8, 2), np.dtype("float64")), True, "float64"),
        (jnp.zeros((8, 2)), False, "float32"),
        (Abstract((8, 2), jnp.bfloat16), False, "bfloat16"),
    ],
)
def test_an_array_is_loaded_as_the_template_has_it(like: Any, as_numpy: bool, dtype: str) -> None:
    found = match(stored(8, 2), like)
    assert isinstance(found, Wanted)
    assert (found.as_numpy, found.dtype, found.shape, found.place.sharding) == (as_numpy, dtype, None, None)


def test_only_a_committed_array_says_where() -> None:
    there = NamedSharding(MESH, P("a"))
    for like in (Abstract((8, 2), jnp.float32, sharding=there), jax.device_put(jnp.zeros((8, 2)), there)):
        found = match(stored(8, 2), like)
        assert isinstance(found, Wanted)
        assert found.place.sharding == there
        assert found.place.explicit


@pytest.mark.parametrize(
    ("saved", "like", "problem"),
    [
        (
            stored(8, 2),
            Abstract((2, 8), "float32"),
            "mismatch for key 'x': saved (8, 2), the template has (2, 8)",
        ),
        (stored(8, 2), Abstract((8, 2), "int32"), "saved float32, the template has int32"),
        (stored(8, 2), 3, "saved float32[8, 2], the template has 3"),
        (stored(dtype="float32"), 3, "saved float32[], the template has 3"),
        (stored(8, 2), jax.random.key(0), "saved float32[8, 2], the template has key"),
        (StoredValue(("x",), "text"), jnp.zeros(()), "saved the value 'text', the template has float32[]"),
        (StoredValue(("x",), 3), jnp.zeros(3), "saved the value 3, the template has float32[3]"),
        (stored(8, 2), PerProcess(1), "saved float32[8, 2], the template has PerProcess(1)"),
    ],
)
def test_what_does_not_fit_is_said(saved: Any, like: Any, problem: str) -> None:
    found = match(saved, like)
    assert isinstance(found, Mismatch)
    assert problem in found.text


def test_an_array_of_as_many_elements_is_reshaped_if_shapes_are_not_strict() -> None:
    found = match(stored(8, 2), Abstract((4, 4), "float32"), policy=Policy(strict_shapes=False))
    assert isinstance(found, Wanted)
    assert found.shape == (4, 4)
    assert isinstance(match(stored(8, 2), Abstract((4, 5), "float32"), policy=Policy(strict_shapes=False)), Mismatch)


@pytest.mark.parametrize(
    ("saved", "like"), [(stored(dtype="int32"), 3), (StoredValue(("x",), 3), jnp.zeros((), "int8"))]
)
def test_a_number_and_a_0d_array_of_its_kind_stand_for_each_other(saved: Any, like: Any) -> None:
    found = match(saved, like)
    assert isinstance(found, Wanted)
    assert found.like is like


def test_a_process_needs_the_regions_of_its_devices() -> None:
    large = stored(1024, 1024)
    wanted = Wanted(large, Place(NamedSharding(MESH, P("a"))))
    assert sum(region.size for region in wanted.regions(large)) == 1024 * 1024
    assert wanted.needed == [(large, wanted.regions(large))]
    assert Wanted(StoredValue(("x",), 3)).needed == []


@pytest.mark.parametrize(
    "change",
    [
        {"place": Place(SingleDeviceSharding(jax.devices()[0]))},
        {"shape": (1024 * 1024,)},
        {"as_numpy": True},
    ],
)
def test_what_is_not_cut_by_a_sharding_is_needed_whole(change: dict[str, Any]) -> None:
    large = stored(1024, 1024, origin=NATIVE)
    wanted = Wanted(large, **{"place": Place(NamedSharding(MESH, P("a"))), **change})
    assert wanted.regions(large) == [Region.whole((1024, 1024))]
