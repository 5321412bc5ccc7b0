"""Cuts on devices. The simulated device compiles nothing, so these run on CPU devices: they compile what GPUs do."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dtypes import JAX, WIDE, dtype_of
from shardkeep.model.arrays import Region
from shardkeep.saving.cutting import can_cut, cut_on_device
from shardkeep.saving.transfer import Arriving, Transfers
from support import bits, pattern

REGION = Region((1, 3), (2, 4))  # of a part
UNCUT = {"complex64", "complex128", "float64", "int2", "int4", "uint2", "uint4", "float4_e2m1fn"}


def spread(array: np.ndarray, kind: AxisType = AxisType.Auto) -> jax.Array:
    """The array on four devices, each of which has four rows of it."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",), axis_types=(kind,))
    with jax.enable_x64(True):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec("a")))


def cut(array: jax.Array) -> np.ndarray:
    """The region of the third part, as a save takes it."""
    transfers = Transfers()
    copies = [(2, jax.devices()[2])]
    arriving = transfers.add(Arriving(array, copies, REGION.size * array.dtype.itemsize, REGION))
    transfers.start()
    return arriving.data


@pytest.mark.parametrize("name", [*JAX, *WIDE])
def test_a_cut_has_the_bits_of_the_array(name: str) -> None:
    """With every dtype, NaNs included; what a kernel could change is cut in host memory instead."""
    array = pattern(dtype_of(name), (16, 9))
    found = spread(array)
    assert can_cut(found) == (name not in UNCUT)
    if can_cut(found):
        piece = cut_on_device(found.addressable_data(2), REGION)
        assert piece is not None
        assert piece.shape == REGION.shape
        assert piece.devices() == {jax.devices()[2]}
        data: Any = cut(found)
        assert data.dtype == array.dtype
        assert bits(data) == bits(array[9:11, 3:7])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_programs_mesh_and_guard_do_not_concern_a_cut(kind: AxisType) -> None:
    array = pattern("float32", (16, 9))
    found = spread(array, kind)
    with jax.set_mesh(found.sharding.mesh), jax.transfer_guard("disallow_explicit"):
        assert can_cut(found)
        assert bits(cut(found)) == bits(array[9:11, 3:7])
        assert jax.sharding.get_abstract_mesh().shape == {"a": 4}


def test_cuts_of_one_shape_are_compiled_once() -> None:
    found = spread(pattern("float32", (16, 1000)))
    part = found.addressable_data(1)
    from shardkeep.saving.cutting import _cut

    before = _cut._cache_size()
    for column in range(5):
        cut_on_device(part, Region((0, 100 * column), (4, 100)))
    assert _cut._cache_size() == before + 1
