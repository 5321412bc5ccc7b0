"""The trees that are saved and loaded: how they are built, laid out, and updated by a training step."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = dict[str, Any]
MIB = 1 << 20


@dataclass(frozen=True)
class Workload:
    """A kind of tree. `mesh`: spread over eight devices, two by four."""

    title: str
    kind: str
    mib: int
    mesh: bool = False


WORKLOADS = {
    "a512": Workload("(a) Llama-like bf16, 512 MiB, one device", "llama", 512),
    "a2048": Workload("(a) Llama-like bf16, 2 GiB, one device", "llama", 2048),
    "b512": Workload("(b) Llama-like bf16, 512 MiB, mesh (2, 4)", "llama", 512, mesh=True),
    "b2048": Workload("(b) Llama-like bf16, 2 GiB, mesh (2, 4)", "llama", 2048, mesh=True),
    "c": Workload("(c) 2,000 arrays of 16 KiB, one device", "many", 31),
    "c-mesh": Workload("(c) 2,000 arrays of 16 KiB, mesh (2, 4)", "many", 31, mesh=True),
    "f": Workload("(f) Adam in f32 with bf16 weights, 512 MiB, mesh (2, 4)", "adam", 512, mesh=True),
}


def mesh_of(rows: int, columns: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("fsdp", "tp"))


def llama(nbytes: int, itemsize: int) -> dict[str, tuple[int, ...]]:
    """Shapes as a Llama has them, of about so many bytes."""
    width, inner = 1024, 2816
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(("q", "k", "v", "o"), (width, width))
    layer |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner), "norm": (width,)}
    size = sum(int(np.prod(shape)) for shape in layer.values()) * itemsize
    layers = max(round(nbytes * 0.93 / size), 1)
    rows = max((nbytes - layers * size) // (2 * width * itemsize) // 8 * 8, 8)
    shapes: dict[str, tuple[int, ...]] = {"embed": (rows, width), "head": (rows, width)}
    for number in range(layers):
        shapes |= {f"layers.{number}.{part}": shape for part, shape in layer.items()}
    return shapes


def shapes_of(workload: Workload) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each array."""
    nbytes = workload.mib * MIB
    if workload.kind == "many":
        return {f"layer_{i}": ((64, 64), jnp.float32) for i in range(nbytes // (16 << 10) // 8 * 8)}
    if workload.kind == "llama":
        return {name: (shape, jnp.bfloat16) for name, shape in llama(nbytes, 2).items()}
    shapes = llama(nbytes // 5, 2)  # two bytes of each weight, and two times four of its moments
    tree: dict[str, tuple[tuple[int, ...], Any]] = {}
    for part, dtype in (("params", jnp.bfloat16), ("mu", jnp.float32), ("nu", jnp.float32)):
        tree |= {f"{part}.{name}": (shape, dtype) for name, shape in shapes.items()}
    return tree


def layout(shape: tuple[int, ...], mesh: Mesh, swapped: bool = False) -> NamedSharding:
    axes = ("tp", "fsdp") if swapped else ("fsdp", "tp")
    return NamedSharding(mesh, PartitionSpec(*axes) if len(shape) == 2 else PartitionSpec())


def template(workload: Workload, mesh: Mesh | None = None, swapped: bool = False, match: str = "") -> Tree:
    """What a load is asked for: shapes, dtypes and where the arrays shall be."""
    mesh = mesh or (mesh_of(2, 4) if workload.mesh else None)
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=layout(shape, mesh, swapped) if mesh else single)
        for name, (shape, dtype) in shapes_of(workload).items()
        if name.startswith(match)
    }


def builder(workload: Workload) -> Callable[[int], Tree]:
    """Makes the tree as the output of a jitted function, new every time: nothing of it is cached by JAX."""
    wanted = template(workload)
    if workload.kind == "many":  # so many outputs compile fast only if there is nothing to do
        noise = np.random.default_rng(0).standard_normal(1 << 13, np.float32)
        base = {
            name: jax.device_put(np.roll(noise, number)[:4096].reshape(64, 64), each.sharding)
            for number, (name, each) in enumerate(wanted.items())
        }
        add = jax.jit(lambda tree, seed: {name: value + seed for name, value in tree.items()})
        return lambda seed: jax.block_until_ready(add(base, jnp.float32(seed)))

    def build(seed: Any) -> Tree:
        return {
            name: (_noise(each.shape) * (seed + number)).astype(each.dtype)
            for number, (name, each) in enumerate(wanted.items())
        }

    jitted = jax.jit(build, out_shardings={name: each.sharding for name, each in wanted.items()})
    return lambda seed: jax.block_until_ready(jitted(jnp.float32(seed)))


def _noise(shape: tuple[int, ...]) -> Any:
    """As hard to compress as weights, and made on each device alone: the places of the elements, well mixed."""
    places: Any = sum(
        jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(factor)
        for axis, factor in zip(range(len(shape)), (0x9E3779B1, 0x85157AF5), strict=False)
    )
    mixed = places ^ (places >> 15)
    mixed = mixed * np.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE3D)
    mixed = mixed ^ (mixed >> 16)
    uniform = jax.lax.bitcast_convert_type(mixed >> 9 | np.uint32(0x3F800000), jnp.float32) - 1.5
    return uniform * jnp.abs(uniform)


def stepper() -> Callable[[Tree, Any], tuple[Tree, Any]]:
    """A training step that gives its state away: all of it is read and written, and there is some arithmetic."""

    def step(tree: Tree, work: Any) -> tuple[Tree, Any]:
        for _ in range(2):
            work = jnp.tanh(work @ work)
        return {name: value * 0.999 + work[0, 0].astype(value.dtype) for name, value in tree.items()}, work

    return jax.jit(step, donate_argnums=(0, 1))


def nbytes_of(workload: Workload) -> int:
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes_of(workload).values())
