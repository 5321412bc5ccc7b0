"""Training that is killed in the middle of a save, and resumes on another mesh as if nothing had happened.

    python examples/demo.py

Uses eight virtual CPU devices and a temporary directory. Ends with an error if anything does not hold.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkeep

WIDTH, INPUTS, BATCH = 1536, 64, 256
STEPS, SAVE_AT, KILL_AT = 40, 20, 30
TOLERANCE = 1e-5
ENOUGH_TO_KILL = 1 << 20  # bytes of the new checkpoint

Rules = list[tuple[str, P]]
# One rule serves parameters and both moments of Adam, which have the same names below.
RULES: Rules = [("hidden.*/kernel", P("fsdp", "tp")), ("out/kernel", P("fsdp", None)), (".*", P())]


class Regressor(nn.Module):
    """Three dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(2):
            x = nn.gelu(nn.Dense(WIDTH, name=f"hidden_{number}")(x))
        return nn.Dense(1, name="out")(x)


def make_mesh(rows: int, columns: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(rows, columns), ("fsdp", "tp"))


def initial_state() -> TrainState:
    model = Regressor()
    params = model.init(jax.random.key(0), jnp.zeros((1, INPUTS)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


def place(state: TrainState, mesh: Mesh) -> TrainState:
    """The state on a mesh, laid out by the rules."""

    def sharding(path: Any, leaf: Any) -> Any:
        name = "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
        spec = next(spec for pattern, spec in RULES if re.search(pattern, name))
        return NamedSharding(mesh, P(*spec[: np.ndim(leaf)]))

    return jax.device_put(state, jax.tree_util.tree_map_with_path(sharding, state))


def batch(step: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """The data of a step: the same for everyone who asks."""
    x = jax.random.normal(jax.random.key(1000 + step), (BATCH, INPUTS))
    y = jnp.sin(x[:, :4]).sum(axis=1, keepdims=True) + 0.5 * x[:, 4:5] * x[:, 5:6]
    return jax.device_put((x, y), NamedSharding(mesh, P("fsdp")))


@jax.jit
def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn(params, x) - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(state: TrainState, mesh: Mesh, steps: range) -> tuple[TrainState, list[float]]:
    losses: list[float] = []
    for step in steps:
        state, loss = train_step(state, *batch(step, mesh))
        losses.append(float(loss))
    return state, losses


def whole(state: TrainState) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def same_bits(a: TrainState, b: TrainState) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(whole(a), whole(b), strict=True))


def hold(fact: bool, told: str) -> None:
    """Tell a fact, or end with an error if it is none."""
    print(f"  {'yes' if fact else 'NO '}  {told}")
    if not fact:
        sys.exit(f"demo: this does not hold: {told}")


def killed_run(run: Path) -> None:
    """The child: trains on and saves the next checkpoint, over and over, until it is killed."""
    mesh = make_mesh(2, 4)
    state = shardkeep.load(run / f"step_{SAVE_AT}", template=place(initial_state(), mesh))
    state, _ = train(state, mesh, range(SAVE_AT, KILL_AT))
    print("saving", flush=True)
    shardkeep.save(run / f"step_{KILL_AT}", state)
    print("saved", flush=True)


def kill_in_the_middle_of_a_save(run: Path) -> int:
    """Start the child and kill it when part of the new checkpoint is on disk; gives how many bytes that was."""
    target = run / f"step_{KILL_AT}"
    for _ in range(5):
        child = subprocess.Popen([sys.executable, __file__, "--killed", str(run)], stdout=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 90
            while child.poll() is None and time.monotonic() < deadline:
                if bytes_of_data(target) >= ENOUGH_TO_KILL:
                    os.kill(child.pid, signal.SIGKILL)
                    break
                time.sleep(0.0005)
            said, _ = child.communicate(timeout=60)
        finally:
            if child.poll() is None:
                child.kill()
        if child.returncode == -signal.SIGKILL and said.split() == ["saving"] and not shardkeep.exists(target):
            return bytes_of_data(target)
        if child.returncode not in (0, -signal.SIGKILL):
            sys.exit(f"demo: the second process ended with {child.returncode}")
        print("       (the disk was faster than the kill: once more)")
        shardkeep.delete(target)
    sys.exit("demo: the second process could not be killed in the middle of a save")


def bytes_of_data(directory: Path) -> int:
    try:
        return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    except FileNotFoundError:
        return 0


def main() -> None:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shardkeep-demo-") as directory:
        tell(Path(directory))
    print(f"\nEverything held, in {time.perf_counter() - started:.0f} s.")


def tell(run: Path) -> None:
    first, other = make_mesh(2, 4), make_mesh(4, 2)
    start = place(initial_state(), first)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(start))
    print(f"A model with Adam: {size / 2**20:.0f} MiB of state on {jax.device_count()} devices, a (2, 4) mesh.")

    print(f"\n1. {STEPS} steps of training without any disturbance, to know where it must end")
    undisturbed, losses = train(start, first, range(STEPS))
    print(f"  loss {losses[0]:.4f} -> {losses[-1]:.6f}")

    print(f"\n2. The same training, saving in the background after step {SAVE_AT}")
    state, _ = train(start, first, range(SAVE_AT))
    jax.block_until_ready(state)
    before = time.perf_counter()
    pending = shardkeep.save_async(run / f"step_{SAVE_AT}", state, metadata={"step": SAVE_AT})
    blocked = time.perf_counter() - before
    steps_meanwhile = 0
    while not pending.done():
        state, _ = train(state, first, range(SAVE_AT + steps_meanwhile, SAVE_AT + steps_meanwhile + 1))
        steps_meanwhile += 1
    report = pending.wait()
    print(
        f"  the call took {blocked * 1e3:.1f} ms, the save {report.seconds * 1e3:.0f} ms for {report.nbytes:,} bytes;"
    )
    print(f"  {steps_meanwhile} training steps ran meanwhile")
    hold(shardkeep.verify(run / f"step_{SAVE_AT}").ok, "every byte on disk matches its digest")

    print(f"\n3. A crash while step {KILL_AT} is being saved")
    written = kill_in_the_middle_of_a_save(run)
    hold(written > 0, "a second process trained on and was killed (SIGKILL) in the middle of its save,")
    print(f"       with {written:,} bytes of the new checkpoint written")
    hold(not shardkeep.exists(run / f"step_{KILL_AT}"), f"step_{KILL_AT} does not count: it was never committed")
    try:
        shardkeep.load(run / f"step_{KILL_AT}")
        hold(False, "loading it is refused")
    except shardkeep.IncompleteCheckpointError:
        hold(True, "loading it is refused (IncompleteCheckpointError)")
    found = sorted((p for p in run.iterdir() if shardkeep.exists(p)), key=lambda p: int(p.name.split("_")[1]))
    hold([p.name for p in found] == [f"step_{SAVE_AT}"], f"the last whole checkpoint is step_{SAVE_AT}")
    last = found[-1]

    print("\n4. Resuming from it")
    again = shardkeep.load(last, template=place(initial_state(), first))
    again, _ = train(again, first, range(int(again.step), STEPS))
    hold(same_bits(again, undisturbed), "on the same mesh: every bit equals the undisturbed run")
    resumed = shardkeep.load(last, template=place(initial_state(), other))
    shape = resumed.params["params"]["hidden_1"]["kernel"].sharding.shard_shape((WIDTH, WIDTH))
    hold(
        shape == (WIDTH // 4, WIDTH // 2),
        f"on a (4, 2) mesh: each device now holds {shape} of a ({WIDTH}, {WIDTH}) kernel",
    )
    resumed, resumed_losses = train(resumed, other, range(int(resumed.step), STEPS))
    gap = abs(resumed_losses[-1] - losses[-1])
    hold(gap < TOLERANCE, f"it reaches loss {resumed_losses[-1]:.6f}, {gap:.1e} from the undisturbed run")
    shardkeep.save(run / f"step_{KILL_AT}", resumed, metadata={"step": STEPS})
    left = sum(f.stat().st_size for f in (run / f"step_{KILL_AT}").glob("*.safetensors"))
    hold(
        shardkeep.verify(run / f"step_{KILL_AT}").nbytes == left,
        "saving again where the crash was removes what it left",
    )

    print("\n5. Exporting the weights as plain safetensors")
    shardkeep.save(run / "export" / "model.safetensors", resumed.params["params"])
    hold(shardkeep.verify(run / "export").ok, "model.safetensors is written and every byte checked")
    weights = shardkeep.load(run / "export" / "model.safetensors")
    equal = jax.tree.map(lambda a, b: bool((a == b).all()), weights, jax.device_get(resumed.params["params"]))
    hold(all(jax.tree.leaves(equal)), "it loads without a mesh and equals the trained weights")
    try:
        from safetensors.numpy import load_file
    except ImportError:
        print("       (the safetensors package is not installed, so it was not asked)")
        return
    found = load_file(run / "export" / "model.safetensors")
    flat = {f"{layer}.{name}": np.asarray(a) for layer, part in weights.items() for name, a in part.items()}
    same = set(found) == set(flat) and all((found[name] == flat[name]).all() for name in flat)
    hold(same, "the safetensors package reads the same")


if __name__ == "__main__":
    if "--killed" in sys.argv:
        killed_run(Path(sys.argv[-1]))
    else:
        main()
