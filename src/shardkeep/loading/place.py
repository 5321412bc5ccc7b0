"""Arrays from host memory onto their devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from shardkeep.jaxapi import block_until_ready, device_put, put_like, refuse_without_jax, transfers_allowed
from shardkeep.loading.matching import Wanted
from shardkeep.loading.plan import Destination
from shardkeep.model.arrays import Array, Region


def place(wanted: Sequence[Wanted], destinations: Mapping[int, Destination]) -> list[Any]:
    """The values of the leaves, with arrays on their devices. Those with the same form are placed together."""
    values: list[Any] = [None] * len(wanted)
    leaves: dict[int, tuple[Wanted, Destination]] = {}
    for number, w in enumerate(wanted):
        destination = destinations.get(number)
        if destination is None:
            values[number] = w.stored.value
        elif w.stays_on_host(destination.leaf):
            values[number] = _reshaped(destination.whole, w)
        else:
            leaves[number] = w, destination
    if leaves:
        placed = put_leaves(leaves)
        for number, array in placed.items():
            values[number] = array
        block_until_ready(list(placed.values()))
    return values


def put_leaves(leaves: Mapping[int, tuple[Wanted, Destination]]) -> dict[int, jax.Array]:
    """The arrays of leaves, by number. Where a device copies, the transfers have been started and are under way."""
    refuse_without_jax()
    whole: dict[Any, list[int]] = {}
    alike: dict[Any, list[int]] = {}
    for number, (w, destination) in leaves.items():
        if w.shape is not None:
            whole.setdefault(w.place.sharding, []).append(number)
        else:
            key = (w.place.sharding, destination.leaf.spec, destination.cast, len(destination.regions))
            alike.setdefault(key, []).append(number)
    placed: dict[int, jax.Array] = {}
    with transfers_allowed():
        for sharding, numbers in whole.items():
            arrays = [_reshaped(leaves[n][1].whole, leaves[n][0]) for n in numbers]
            placed |= zip(numbers, put_all(arrays, sharding), strict=True)
        for (sharding, *_), numbers in alike.items():
            placed |= zip(numbers, _place_alike([leaves[n][1] for n in numbers], sharding), strict=True)
    return placed


def _place_alike(destinations: Sequence[Destination], sharding: Sharding | None) -> Sequence[jax.Array]:
    """Put arrays of one shape and dtype on the devices of one sharding.

    JAX's public functions place the first. The others use the internal function behind them with what is known from
    the first, which takes a quarter of the time; if this JAX does not have it, they are placed like the first.
    """
    one = sharding is None or isinstance(sharding, SingleDeviceSharding)

    def publicly(some: Sequence[Destination]) -> Sequence[jax.Array]:
        if one:
            return put_all([destination.whole for destination in some], sharding)
        return [_assemble(destination, cast(Any, sharding)) for destination in some]

    (first,) = publicly(destinations[:1])
    rest = destinations[1:]
    if not rest:
        return [first]
    devices, pick = _parts(destinations[0], first.sharding)
    more = put_like(first, devices, [pick(destination) for destination in rest])
    return [first, *(publicly(rest) if more is None else more)]


def _parts(like: Destination, sharding: Sharding) -> tuple[list[Any], Callable[[Destination], list[Any]]]:
    """The local devices of a sharding, and a function that gives their parts of a destination with the same form."""
    shape = like.leaf.spec.shape
    indices: Any = sharding.addressable_devices_indices_map(shape)
    devices = list(indices)
    if len(like.regions) == 1 and like.regions[0].shape == shape:
        return devices, lambda destination: [destination.whole[index] for index in indices.values()]
    numbers = [list(like.regions).index(Region.from_index(index, shape)) for index in indices.values()]
    return devices, lambda destination: [destination.arrays[number] for number in numbers]


def put_all(arrays: Sequence[Array], sharding: Sharding | None) -> Sequence[jax.Array]:
    """Put host arrays on their devices. Each process fills its own devices, without communication."""
    with transfers_allowed():
        if sharding is None or sharding.is_fully_addressable:
            return device_put(list(arrays), sharding)
        return [jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i], dtype=a.dtype) for a in arrays]


def _reshaped(array: Array, w: Wanted) -> Array:
    return array if w.shape is None else array.reshape(w.shape)


def _assemble(destination: Destination, sharding: Sharding) -> jax.Array:
    shape = destination.leaf.spec.shape
    if len(destination.regions) == 1 and destination.regions[0].shape == shape:
        whole = destination.whole
        return jax.make_array_from_callback(shape, sharding, whole.__getitem__, dtype=whole.dtype)
    if not destination.regions:  # this process holds nothing of it
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=destination.dtype)
    by_region: dict[Region, Any] = dict(zip(destination.regions, destination.arrays, strict=True))

    def data(index: Any) -> Any:
        return by_region[Region.from_index(index, shape)]

    return jax.make_array_from_callback(shape, sharding, data, dtype=destination.dtype)
