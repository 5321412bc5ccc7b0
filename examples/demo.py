"""Training that is killed in the middle of a save, and resumes on another mesh as if nothing had happened.

    python examples/demo.py

A small transformer learns the characters of this file, on eight virtual CPU devices. Everything is written to a
temporary directory. Ends with an error if anything does not hold. `training_program` is what a program of one's own
would look like; the rest tells the story around it.
"""

import contextlib
import gc
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
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
from shardkeep.cli.main import main as shardkeep_command

STEPS, EVERY = 40, 10
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 256, 2, 4, 32, 8
TOLERANCE = 1e-5  # of the loss, on another mesh: sums are made in another order there
ENOUGH_TO_KILL = 1 << 20  # bytes of a checkpoint

# Which part of an array each device holds. The moments of Adam have the names of their parameters, and so their layout.
RULES = [
    ("(query|key|value)/kernel", P("fsdp", "tp")),
    ("attention/out/kernel", P("tp", None, "fsdp")),
    ("(up|head)/kernel", P("fsdp", "tp")),
    ("down/kernel", P("tp", "fsdp")),
    (".*", P()),
]

State = dict[str, Any]


class Block(nn.Module):
    """Attention and two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name="down")(nn.Dropout(0.1, deterministic=False)(hidden))


class Transformer(nn.Module):
    """What character comes next."""

    @nn.compact
    def __call__(self, characters: jax.Array) -> jax.Array:
        x = nn.Embed(128, WIDTH)(characters) + nn.Embed(CONTEXT, WIDTH)(jnp.arange(CONTEXT))
        for number in range(LAYERS):
            x = Block(name=f"block_{number}")(x, nn.make_causal_mask(characters))
        return nn.Dense(128, name="head")(nn.LayerNorm()(x))


def new_state() -> State:
    """All that has to be saved: parameters, optimizer, step (which is where the data stands) and the PRNG key."""
    model = Transformer()
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((1, CONTEXT), int))
    return {
        "train": TrainState.create(apply_fn=model.apply, params=params["params"], tx=optax.adam(1e-3)),
        "key": jax.random.key(2),
    }


def layout(mesh: Mesh) -> State:
    """The state's structure, shapes, dtypes and places on a mesh, without any data."""

    def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next(spec for pattern, spec in RULES if re.search(pattern, name))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(new_state))


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, text: jax.Array) -> tuple[State, jax.Array]:
    key, dropout = jax.random.split(state["key"])
    train = state["train"]

    def loss_of(params: Any) -> jax.Array:
        logits = train.apply_fn({"params": params}, text[:, :-1], rngs={"dropout": dropout})
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(train.params)
    return {"train": train.apply_gradients(grads=gradients), "key": key}, loss


def batch(step: int, mesh: Mesh) -> jax.Array:
    """The data of a step: the same for everyone who asks."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8) % 128
    starts = np.random.default_rng(step).integers(0, len(text) - CONTEXT, BATCH)
    lines = np.stack([text[start : start + CONTEXT + 1] for start in starts])
    return jax.device_put(lines, NamedSharding(mesh, P("fsdp")))


def training_program(path: Path, mesh: Mesh) -> tuple[State, list[float]]:
    """Train to the end, from the newest step if there is one, saving in the background."""
    make = jax.jit(new_state, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, layout(mesh)))
    losses, seconds, saves = [], [], []
    with shardkeep.Run(path, save_every=EVERY, keep=None) as run:
        state, step = run.resume(make)
        while step < STEPS and not run.stopping:
            began = time.perf_counter()
            state, loss = train_step(state, batch(step, mesh))
            step += 1
            losses.append(float(loss))
            seconds.append(time.perf_counter() - began)
            if len(seconds) == 1:  # what compiling left stays; a garbage collection that goes through it takes 100 ms
                gc.collect()
                gc.freeze()
            before = time.perf_counter()
            saving = run.step(step, state, metrics={"loss": loss})
            if saving is not None:
                saves.append((saving, time.perf_counter() - before))
        run.save(step, state)
    for saving, blocked in saves:
        tell_of(saving.wait(), blocked, seconds)
    return state, losses


def tell_of(report: shardkeep.SaveReport, blocked: float, steps: list[float]) -> None:
    name, step, took = Path(report.path).name, np.median(steps) * 1e3, report.seconds * 1e3
    text = f"training waited {blocked * 1e3:.1f} ms (a step takes {step:.0f}), the save took {took:.0f} ms"
    print(f"     {name}: {text}", flush=True)


def make_mesh(rows: int, columns: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(rows, columns), ("fsdp", "tp"))


def kill_in_the_middle_of_a_save(run: Path) -> tuple[Path, int]:
    """Run the program in another process, and kill it when part of its third checkpoint is on disk."""
    for _ in range(5):
        child = subprocess.Popen([sys.executable, __file__, "--train", str(run)])
        try:
            deadline = time.monotonic() + 100
            while child.poll() is None and time.monotonic() < deadline:
                victim = run / f"step_{3 * EVERY}"
                if bytes_of_data(victim) >= ENOUGH_TO_KILL and not (victim / "manifest.json").exists():
                    child.kill()
                time.sleep(0.0005)
        finally:
            child.kill()
            child.wait()
        if bytes_of_data(victim) and not shardkeep.exists(victim):
            return victim, bytes_of_data(victim)
        if child.returncode not in (0, -9):
            sys.exit(f"demo: the second process ended with {child.returncode}")
        print("     (the disk was faster than the kill: once more)")
        shutil.rmtree(run)
    sys.exit("demo: the second process could not be killed in the middle of a save")


def bytes_of_data(directory: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return 0


def same_bits(a: State, b: State) -> bool:
    def bits(leaf: Any) -> bytes:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return all(bits(x) == bits(y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def hold(fact: bool, told: str) -> None:
    """Tell a fact, or end with an error if it is none."""
    print(f"  {'ok' if fact else 'NO'} {told}")
    if not fact:
        sys.exit(f"demo: this does not hold: {told}")


def show(*words: str) -> int:
    """Run `shardkeep …` and show it as on a terminal."""
    print(f"     $ shardkeep {' '.join(words)}")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = shardkeep_command(words)
    print("".join(f"       {line}\n" for line in said.getvalue().splitlines()), end="", flush=True)
    return code


def main() -> None:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shardkeep-demo-") as directory, contextlib.chdir(directory):
        tell()
    print(f"\nEverything held, in {time.perf_counter() - started:.0f} s.")


def tell() -> None:
    first, other = make_mesh(2, 4), make_mesh(4, 2)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layout(first)["train"]))
    print(f"A transformer with Adam, {size / 1e6:.0f} MB of state, on 8 virtual devices: mesh fsdp=2, tp=4.")

    print(f"\n1. {STEPS} steps without a disturbance, saving in the background every {EVERY}")
    undisturbed, losses = training_program(Path("undisturbed"), first)
    print(f"     loss {losses[0]:.4f} -> {losses[-1]:.6f}")

    print("\n2. The same in a second process, killed in the middle of its third save")
    run = Path("run")
    victim, written = kill_in_the_middle_of_a_save(run)
    print(f"     killed (SIGKILL) while {victim.name} was being saved, {written / 1e6:.1f} MB of it written")
    show("ls", "run")
    try:
        shardkeep.load(victim)
        hold(False, f"{victim.name} is refused")
    except shardkeep.IncompleteCheckpointError:
        hold(True, f"{victim.name} is refused: IncompleteCheckpointError")

    print("\n3. Started again, on the same mesh and on another one")
    last = shardkeep.latest(run)
    hold(last == os.path.abspath(run / f"step_{2 * EVERY}"), f"the last whole checkpoint is step_{2 * EVERY}")
    shutil.copytree(run, "elsewhere")
    again, _ = training_program(run, first)
    hold(same_bits(again, undisturbed), "same mesh: every bit equals the undisturbed run")
    hold(not list(victim.glob(".shardkeep/saves/*")), f"{victim.name} was saved again, and what the crash left is gone")
    resumed, resumed_losses = training_program(Path("elsewhere"), other)
    kernel = resumed["train"].params["block_0"]["up"]["kernel"]
    shard = kernel.sharding.shard_shape(kernel.shape)
    hold(shard == (64, 512), f"mesh fsdp=4, tp=2: each device holds {shard} of a {kernel.shape} kernel, not (128, 256)")
    gap = abs(resumed_losses[-1] - losses[-1])
    hold(gap < TOLERANCE, f"it ends at loss {resumed_losses[-1]:.6f}, {gap:.1e} from the undisturbed run")

    print("\n4. The weights as plain safetensors")
    weights = resumed["train"].params
    shardkeep.save("export/model.safetensors", weights)
    loaded = shardkeep.load("export/model.safetensors")
    hold(same_bits(loaded, weights), "model.safetensors loads on one device and equals the trained weights")
    with contextlib.suppress(ImportError):
        from safetensors.numpy import load_file

        paths = jax.tree_util.tree_leaves_with_path(weights)
        named = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in paths}
        found = load_file("export/model.safetensors")
        same = found.keys() == named.keys() and all((found[name] == named[name]).all() for name in named)
        hold(same, "the safetensors package reads the same")

    print("\n5. Every byte of everything against its digest")
    show("ls", "run")
    saved = [*Path().glob("*/step_*"), Path("export")]
    hold(all(shardkeep.verify(path).ok for path in saved), f"these and {len(saved) - 4} more are as they were saved")


if __name__ == "__main__":
    if "--train" in sys.argv:
        training_program(Path(sys.argv[-1]), make_mesh(2, 4))
    else:
        main()
