"""A tree with every kind of leaf, for the tests of the command."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from support import Dense, Keyed, Point, mesh_of


def rich_tree(seed: int = 0) -> dict[str, Any]:
    """Arrays of many dtypes, sharded and not, keys, plain values, several containers."""
    dice = np.random.default_rng(seed)
    spread = NamedSharding(mesh_of(4, 2), PartitionSpec("a", "b"))
    return {
        "layers": [
            {
                "kernel": jax.device_put(dice.normal(size=(512, 640)).astype(np.float32), spread),
                "bias": jnp.asarray(dice.normal(size=640), jnp.bfloat16),
            }
            for _ in range(2)
        ],
        "int4": jnp.arange(-8, 8).astype(jnp.int4),
        "fp8": jnp.linspace(-2, 2, 12).astype(jnp.float8_e4m3fn).reshape(3, 4),
        "complex": jnp.asarray([1 + 2j, 3j], jnp.complex64),
        "flags": jnp.asarray([True, False]),
        "wide": dice.normal(size=(5, 3)),
        "long": np.array([2**62, -(2**62)]),
        "big_endian": np.arange(6, dtype=">i4"),
        "times": np.array(["2026-11-16"], dtype="M8[ns]"),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": jnp.float32(1.5),
        "keys": jax.random.split(jax.random.key(seed), 3),
        "step": 100 + seed,
        "rate": 0.1,
        "name": "adam",
        "nothing": None,
        "pair": (jnp.ones(3), Point(np.int8(1), 2.5)),
        "ordered": OrderedDict(b=1, a=b"x"),
        "dense": Dense(jnp.ones((2, 2)), None, name="first"),
        "keyed": Keyed(jnp.zeros(4), 3, tag="t"),
    }


def save_like_hugging_face(directory: Path, tensors: dict[str, np.ndarray[Any, Any]], shards: int = 2) -> Path:
    """Tensors as `transformers` saves them: shards written by the safetensors package, and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weights: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        safetensors.numpy.save_file({n: tensors[n] for n in mine}, directory / file, metadata={"format": "pt"})
        weights |= dict.fromkeys(mine, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


HF_TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "model.embed.weight": np.arange(33, dtype=np.float32).reshape(11, 3),
    "model.layers.0.weight": np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7),
    "model.layers.0.bias": np.zeros(7, np.float16),
    "lm_head.weight": np.ones((3, 3), np.float64),
}
