"""The same single bits flipped in checkpoints of other libraries: how many load as if nothing had happened.

It imports nothing of shardkeep unless that is what is asked for, and needs an environment with what it is to try:
`python faults/peers_rot.py orbax eformer safetensors shardkeep`.
"""

import logging
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

SEED = 20261116
Saved = Callable[[], Any]  # loads what was saved, as a dict of arrays


def state() -> dict[str, Any]:
    """Random numbers, as weights are; more of them than of headers."""
    rng = np.random.default_rng(1)
    shapes = {"w": (64, 48), "v": (33, 17), "b": (48,)}
    return {name: jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}


def orbax(place: Path) -> Saved:
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(place / "checkpoint", state())
    checkpointer.wait_until_finished()
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state())
    return lambda: ocp.StandardCheckpointer().restore(place / "checkpoint", target)


def eformer(place: Path) -> Saved:
    from eformer.serialization import AsyncCheckpointManager
    from jax.sharding import Mesh

    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    AsyncCheckpointManager().save(state(), str(place / "checkpoint"), mesh, prefix="model")
    return lambda: AsyncCheckpointManager().load(str(place / "checkpoint"), mesh, prefix="model")[0]


def safetensors(place: Path) -> Saved:
    from safetensors.flax import load_file, save_file

    save_file(state(), str(place / "model.safetensors"))
    return lambda: load_file(str(place / "model.safetensors"))


def shardkeep(place: Path) -> Saved:
    import shardkeep as library

    library.save(place / "checkpoint", state())
    return lambda: library.load(place / "checkpoint")


PEERS: dict[str, Callable[[Path], Saved]] = {
    "orbax": orbax,
    "eformer": eformer,
    "safetensors": safetensors,
    "shardkeep": shardkeep,
}


def flip_all(name: str, count: int) -> Counter[str]:
    """Flip single bits anywhere in the files, each bit of the checkpoint as likely as any other; how the loads end."""
    rng = random.Random(SEED)
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as room:
        load = PEERS[name](Path(room))
        assert _ending(load) == "same", f"{name} does not load what it saved"
        files = sorted(path for path in Path(room).rglob("*") if path.is_file() and path.stat().st_size)
        sizes = [path.stat().st_size for path in files]
        for _ in range(count):
            (file,) = rng.choices(files, sizes)
            good = file.read_bytes()
            at = rng.randrange(len(good))
            file.write_bytes(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
            ends[_ending(load)] += 1
            file.write_bytes(good)
    return ends


def _ending(load: Saved) -> str:
    """How a load ends: refused, hangs, same (as saved), or wrong."""
    signal.alarm(20)
    try:
        loaded = load()
        expected = state()
        alike = set(loaded) == set(expected) and all(
            np.asarray(loaded[key]).dtype == value.dtype
            and np.asarray(loaded[key]).tobytes() == np.asarray(value).tobytes()
            for key, value in expected.items()
        )
    except _HangError:
        return "hangs"
    except Exception:  # noqa: BLE001  (how it refuses is its own affair)
        return "refused"
    finally:
        signal.alarm(0)
    return "same" if alike else "wrong"


class _HangError(BaseException):
    """Twenty seconds are over."""


def _ring(*_: object) -> None:
    raise _HangError


def row(name: str, count: int = 1000) -> str:
    """A line of a markdown table: flips, loaded wrong without a word, refused, loaded as saved."""
    ends = flip_all(name, count)
    hangs = f", {ends['hangs']} hang" if ends["hangs"] else ""
    return f"| {name} | {count:,} | {ends['wrong']:,} | {ends['refused']:,}{hangs} | {ends['same']:,} |"


def main(names: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _ring)
    print("| library | bits flipped | wrong without an error | refused | loaded as saved |\n|---|---:|---:|---:|---:|")
    for name in names or list(PEERS):
        print(row(name), flush=True)


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent]  # our neighbours
    main(sys.argv[1:])
