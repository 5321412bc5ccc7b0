"""What the three loops train."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@partial(jax.jit, out_shardings=ONE)
def new_state() -> dict[str, Any]:
    return {"w": jnp.zeros(8), "key": jax.random.key_data(jax.random.key(0))}


@jax.jit
def train_step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    key, noise = jax.random.split(jax.random.wrap_key_data(state["key"]))
    w = state["w"] - 0.1 * (state["w"] - x + 0.01 * jax.random.normal(noise, (8,)))
    return {"w": w, "key": jax.random.key_data(key)}, jnp.mean((w - x) ** 2)


class Batches:
    """A data iterator that can be positioned."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> np.ndarray[Any, Any]:
        self.position += 1
        return np.random.default_rng(self.position).normal(size=8).astype(np.float32)

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]
