"""A real training loop and an evaluator, for the soak: actions of a `Spawner`."""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardkeep

EVERY = 5  # steps between two saves
KEEP = shardkeep.Keep(last=3, best=1, metric="eval", mode="min")


class Batches:
    """A data iterator with a position, from which each batch follows."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> Any:
        self.position += 1
        return np.random.default_rng([7, self.position]).normal(size=(4, 32)).astype(np.float32)

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def new_state() -> dict[str, Any]:
    weights = jax.random.normal(jax.random.key(3), (32, 32)) / 8
    return {"w": weights, "momentum": jnp.zeros((32, 32)), "key": jax.random.key(5)}


@jax.jit
def _loss_and_update(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
    key, own = jax.random.split(state["key"])

    def loss_of(w: Any) -> Any:
        noise = jax.random.normal(own, (4, 32))
        return jnp.mean((jnp.tanh((batch + 0.1 * noise) @ w) - batch) ** 2)

    loss, slope = jax.value_and_grad(loss_of)(state["w"])
    momentum = 0.9 * state["momentum"] + slope
    return {"w": state["w"] - 0.05 * momentum, "momentum": momentum, "key": key}, loss


update = jax.jit(_loss_and_update, donate_argnums=0)


def losses(total: int) -> list[str]:
    """The losses of an undisturbed training, bit for bit."""
    state, data = jax.jit(new_state)(), Batches()
    found: list[str] = []
    for _ in range(total):
        state, loss = update(state, next(data))
        found.append(float(loss).hex())
    return found


def train(path: str, log: str, pause: float) -> None:
    """Train until a signal says to stop. Tell each step and its loss, and which steps are being saved and are saved."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    data = Batches()
    with shardkeep.Run(path, save_every=EVERY, keep=KEEP) as run, Path(log).open("a", buffering=1) as told:
        state, step = run.resume(new_state, iterators={"train": data}, shardings=one)
        assert run.resumed is not None
        told.write(f"resumed {step} {','.join(str(number) for number, _ in run.resumed.skipped)}\n")
        saving = None
        while not run.stopping:
            state, loss = update(state, next(data))
            step += 1
            told.write(f"step {step} {float(loss).hex()}\n")
            begun = run.step(step, state, metrics={"loss": loss}, iterators={"train": data})
            if begun is not None:
                saving = begun
                told.write(f"saving {step}\n")
            if saving is not None and saving.done():
                saving.wait()  # raises what went wrong
                told.write(f"saved {step}\n")
                saving = None
            time.sleep(pause)
        told.write(f"stopped {step}\n")


def evaluate(path: str, log: str, seconds: float) -> None:
    """Load every step that is committed while training goes on, and record a metric."""
    run = shardkeep.Run(path, keep=KEEP)
    until = time.monotonic() + seconds
    with Path(log).open("a", buffering=1) as told:
        while time.monotonic() < until:
            for step in run.watch(timeout=1):
                try:
                    weights = np.asarray(run.load(step, include="^w$")["w"])
                    run.record(step, {"eval": float(np.abs(weights).sum())})
                    told.write(f"evaluated {step.number}\n")
                except (shardkeep.ShardkeepError, OSError) as error:
                    told.write(f"failed {step.number} {type(error).__name__} {str(error)!r}\n")
                if time.monotonic() > until:
                    return
