"""Small runs for tests."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shardkeep import Run

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def state_of(step: int) -> dict[str, Any]:
    return {"w": jnp.full((64,), float(step)), "n": step}


def new_state() -> dict[str, Any]:
    return state_of(0)


def trained(path: Any, steps: Any, **arguments: Any) -> Run:
    """A run that was resumed, trained and closed."""
    with Run(path, **{"save_every": 1, "keep": None, **arguments}) as run:
        run.resume(new_state, shardings=ONE)
        for step in steps:
            run.step(step, state_of(step), metrics={"loss": 1.0 / step})
    return run


def numbers(run: Run) -> list[int]:
    return [step.number for step in run.steps()]


def data_file(run: Path, step: int) -> Path:
    """A data file of a step."""
    return next(p for p in sorted((run / f"step_{step}").rglob("*.safetensors")))


def damage(run: Path, step: int) -> None:
    """Change one byte of the data of a step, and nothing that its size or header shows."""
    path = data_file(run, step)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
