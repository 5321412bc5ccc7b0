"""Ways to make a JAX array from host memory, and whether it is known that the array has memory of its own."""

import contextlib
import copy
import mmap
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from support import mesh_of

Make = Callable[[Any], jax.Array]


def host_memory(shape: tuple[int, ...], dtype: Any = np.float32, start: int = 0) -> Any:
    """Memory that JAX can alias: it starts on a page, or `start` bytes behind one."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.frombuffer(mmap.mmap(-1, nbytes + start), np.uint8)[start:]
    array = memory.view(dtype).reshape(shape)
    array[...] = np.ones(shape).astype(dtype)
    return array


def lies_in(array: jax.Array, memory: Any) -> bool:
    """Whether any shard of the array lies in this memory."""
    begin = memory.__array_interface__["data"][0]
    data: Any = array
    addresses = [shard.data.unsafe_buffer_pointer() for shard in data.addressable_shards]
    return any(begin <= address < begin + memory.nbytes for address in addresses)


def sharded(shape: tuple[int, ...] = ()) -> NamedSharding:
    return NamedSharding(mesh_of(8), PartitionSpec("a"))


def replicated() -> NamedSharding:
    return NamedSharding(mesh_of(8), PartitionSpec())


def one() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def from_callback(h: Any, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(h.shape, sharding, lambda index: h[index])


def from_parts(h: Any, sharding: Any) -> jax.Array:
    places = sharding.addressable_devices_indices_map(h.shape).items()
    return jax.make_array_from_single_device_arrays(
        h.shape, sharding, [jax.device_put(h[index], device) for device, index in places]
    )


def without_jit(h: Any) -> jax.Array:
    with jax.disable_jit():
        return jax.jit(lambda x: x)(jax.device_put(h))


put = jax.device_put

# Any of these may alias host memory; which do depends on the version of JAX, the dtype and the alignment.
PLACED: dict[str, Make] = {
    "device_put": lambda h: put(h),
    "device_put onto a device": lambda h: put(h, jax.devices()[0]),
    "device_put, may_alias=False": lambda h: put(h, may_alias=False),
    "device_put, sharded": lambda h: put(h, sharded()),
    "device_put, replicated": lambda h: put(h, replicated()),
    "device_put of a tree": lambda h: put([h, {"a": h}], sharded())[1]["a"],
    "device_put twice": lambda h: put(put(h)),
    "device_put, donated": lambda h: put(put(h), jax.devices()[0], donate=True),
    "device_put from one device to all": lambda h: put(put(h), replicated()),
    "device_put from one device to shards": lambda h: put(put(h), sharded()),
    "device_put from all devices to one": lambda h: put(put(h, replicated()), jax.devices()[0]),
    "device_put to pinned memory": lambda h: put(h, one().with_memory_kind("pinned_host")),
    "dlpack": lambda h: jax.dlpack.from_dlpack(h),
    "dlpack by jnp": lambda h: jnp.from_dlpack(h),
    "asarray": lambda h: jnp.asarray(h),
    "asarray, copy=False": lambda h: jnp.asarray(h, copy=False),
    "array, copy=False": lambda h: jnp.array(h, copy=False),
    "a dtype called": lambda h: jnp.float32(h),
    "callback, sharded": lambda h: from_callback(h, sharded()),
    "callback, replicated": lambda h: from_callback(h, replicated()),
    "callback, one device": lambda h: from_callback(h, one()),
    "parts, sharded": lambda h: from_parts(h, sharded()),
    "parts, replicated": lambda h: from_parts(h, replicated()),
    "process-local data": lambda h: jax.make_array_from_process_local_data(sharded(), h),
    "pickle": lambda h: pickle.loads(pickle.dumps(put(h))),
    "a shard": lambda h: put(h, sharded()).addressable_shards[3].data,
    "x[:]": lambda h: put(h)[:],
    "x[...]": lambda h: put(h)[...],
    "x.astype of the same type": lambda h: put(h).astype(h.dtype),
    "x.reshape to the same shape": lambda h: put(h).reshape(h.shape),
    "broadcast_to the same shape": lambda h: jnp.broadcast_to(put(h), h.shape),
    "concatenate of one": lambda h: jnp.concatenate([put(h)]),
    "stop_gradient": lambda h: jax.lax.stop_gradient(put(h)),
    "optimization_barrier": lambda h: jax.lax.optimization_barrier(put(h)),
    "tree.map": lambda h: jax.tree.map(jnp.asarray, {"a": put(h)})["a"],
    "block_until_ready": lambda h: jax.block_until_ready(put(h)),
    "vmap of nothing": lambda h: jax.vmap(lambda x: x)(put(h)),
    "checkpoint of nothing": lambda h: jax.checkpoint(lambda x: x)(put(h)),
    "cotangent of nothing": lambda h: jax.vjp(lambda x: x, jnp.ones(h.shape, h.dtype))[1](put(h))[0],
    "scan that carries": lambda h: jax.lax.scan(lambda c, _: (c, None), put(h), None, length=2)[0],
    "a loop that ends at once": lambda h: jax.lax.while_loop(lambda x: False, lambda x: x, put(h)),
    "cond": lambda h: jax.lax.cond(True, lambda x: x, lambda x: x, put(h)),
    "jit disabled": without_jit,
    "optax.identity": lambda h: optax.identity().update({"a": put(h)}, optax.EmptyState())[0]["a"],
}

_identity = jax.jit(lambda x: x)
_donated = jax.jit(lambda x: x, donate_argnums=0)
_twice = jax.jit(lambda x: x * 2)
_step = jax.jit(lambda x: x * 2, donate_argnums=0)


def again(function: Callable[[Any], Any], argument: Callable[[], Any]) -> jax.Array:
    """What a compiled function returns once it is called on its fast path."""
    result: Any = None
    with contextlib.suppress(StopIteration):
        for _ in range(4):
            result = function(argument())
    return result


def adam(h: Any) -> jax.Array:
    """Updates outside of jit."""
    optimizer = optax.adam(1e-3)
    params: Any = {"a": put(h)}
    state = optimizer.init(params)
    for _ in range(4):
        updates, state = optimizer.update({"a": put(h)}, state, params)
        params = optax.apply_updates(params, updates)
    return params["a"]


# Results of computations are in XLA's own memory, and saves in the background must not copy them.
COMPUTED: dict[str, Make] = {
    "jit": lambda h: _twice(put(h)),
    "jit, fast path": lambda h: again(_twice, lambda: put(h)),
    "jit of NumPy, fast path": lambda h: again(_twice, lambda: h),
    "jit of nothing": lambda h: _identity(put(h)),
    "jit of nothing, fast path": lambda h: again(_identity, lambda: put(h)),
    "jit of nothing, sharded": lambda h: again(_identity, lambda: put(h, sharded())),
    "jit of nothing, of dlpack": lambda h: again(_identity, lambda: jax.dlpack.from_dlpack(h)),
    "donated": lambda h: again(_step, lambda: put(h)),
    "donated, sharded": lambda h: again(_step, lambda: put(h, sharded())),
    "donated dlpack": lambda h: again(_step, lambda: jax.dlpack.from_dlpack(h)),
    "donated to nothing": lambda h: again(_donated, lambda: put(h)),
    "donated dlpack to nothing": lambda h: again(_donated, lambda: jax.dlpack.from_dlpack(h)),
    "donated callback to nothing": lambda h: again(_donated, lambda: from_callback(h, sharded())),
    "compiled ahead of time": lambda h: jax.jit(lambda x: x).lower(h).compile()(put(h)),
    "a constant": lambda h: jax.jit(lambda: h)(),
    "out_shardings": lambda h: jax.jit(lambda x: x, out_shardings=sharded())(h),
    "pmap": lambda h: jax.pmap(lambda x: x + x)(h.reshape(8, -1)),
    "pmap of nothing, fast path": lambda h: again(jax.pmap(lambda x: x), lambda: h.reshape(8, -1)),
    "shard_map": lambda h: jax.shard_map(
        lambda x: x, mesh=mesh_of(8), in_specs=PartitionSpec("a"), out_specs=PartitionSpec("a")
    )(put(h, sharded())),
    "vmap": lambda h: again(jax.vmap(jnp.sin), lambda: put(h)),
    "grad": lambda h: again(jax.grad(lambda x: (x**2).sum()), lambda: put(h)),
    "a shard of a result": lambda h: _twice(put(h, sharded())).addressable_shards[3].data,
    "a view of a result": lambda h: _twice(put(h))[:],
    "copy": lambda h: put(h).copy(),
    "deepcopy": lambda h: copy.deepcopy(put(h)),
    "x.T": lambda h: put(h).T,
    "a slice": lambda h: put(h)[8:16],
    "array": lambda h: jnp.array(h),
    "eager sums": lambda h: again(lambda x: x + x, lambda: put(h)),
    "eager optax": adam,
    "zeros": lambda h: jnp.zeros(h.shape),
    "random": lambda h: jax.random.normal(jax.random.key(0), h.shape).block_until_ready() + 0,
    "pure_callback": lambda h: jax.pure_callback(lambda: h, jax.ShapeDtypeStruct(h.shape, h.dtype)),
    "a reference": lambda h: jax.new_ref(put(h))[...],
}
