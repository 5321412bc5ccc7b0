"""Checkpoints that the real Orbax and the real JAX write, loaded bit for bit: run by `make test-orbax`.

In a process of its own for each number of JAX processes: one with eight devices, and two with four devices each.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICES = 8
PROCESSES = 2


def made() -> dict[str, Any]:
    """A state with all that Orbax stores: sharded in several ways, replicated, of several dtypes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))

    def sharded(dtype: Any, shape: tuple[int, ...], spec: Any, seed: int) -> Any:
        host = (np.random.default_rng(seed).standard_normal(shape) * 50).astype(dtype)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, sharding, lambda index: host[index])

    return {
        "params": {
            "grid": sharded(np.float32, (64, 96), P("a", "b"), 1),
            "rows": sharded(jnp.bfloat16, (64, 33), P("a"), 2),
            "both": sharded(np.int32, (16, 3), P(("a", "b")), 3),
            "last": sharded(np.float16, (5, 7, 8), P(None, None, "b"), 4),
            "whole": sharded(np.float32, (1000,), P(), 5),
            "bool": sharded(np.bool_, (16,), P("a"), 6),
            "scalar": sharded(np.float32, (), P(), 7),
            "zeros": jax.make_array_from_callback((32, 8), NamedSharding(mesh, P("a")), lambda i: np.zeros((32, 8))[i]),
        },
        "layers": [{"w": sharded(np.float32, (8, 8), P("b", "a"), 10 + n)} for n in range(12)],
        "nothing": None,
        "empty": {},
        "step": 7,
        "rate": 0.25,
    }


def alone() -> dict[str, Any]:
    """What only one process saves: arrays of NumPy, strings."""
    import numpy as np

    return {"host": np.arange(12.0).reshape(3, 4), "name": "héllo", "int": np.arange(5)}


def same(found: Any, expected: Any, where: str) -> None:
    """`AssertionError` unless two trees have the same structure, dtypes and bits; tuples are loaded as lists."""
    import numpy as np

    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (where, found.keys(), expected.keys())
        for key in expected:
            same(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{where}/{number}")
    elif hasattr(expected, "dtype"):
        a, b = np.asarray(found), np.asarray(expected)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), where
    else:
        assert (type(found), found) == (type(expected), expected), (where, found, expected)


def writers(room: Path) -> dict[str, Callable[[Any], None]]:
    """Ways to write a tree, by the name of the directory."""
    import orbax.checkpoint as ocp

    def standard(tree: Any) -> None:
        checkpointer = ocp.StandardCheckpointer()
        checkpointer.save(room / "standard", tree)
        getattr(checkpointer, "wait_until_finished", lambda: None)()

    def handler(name: str, **options: Any) -> Callable[[Any], None]:
        return lambda tree: ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(room / name, tree)

    def manager(tree: Any) -> None:
        options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], step_prefix="ckpt")
        root = ocp.CheckpointManager(room / "manager", options=options)
        for step in (1, 20):
            root.save(step, args=ocp.args.StandardSave(tree), metrics={"loss": 1 / step})
        root.wait_until_finished()

    def composite(tree: Any) -> None:
        root = ocp.CheckpointManager(room / "composite", item_names=("state", "config"))
        items = {"state": ocp.args.StandardSave(tree), "config": ocp.args.JsonSave({"lr": 0.1, "names": ["x"]})}
        root.save(3, args=ocp.args.Composite(**items))
        root.wait_until_finished()

    def newer(tree: Any) -> None:
        from orbax.checkpoint import v1

        v1.save(room / "newer", tree)

    found = {"standard": standard, "pytree": handler("pytree"), "directories": handler("directories", use_ocdbt=False)}
    found |= {"manager": manager, "composite": composite}
    try:
        from orbax.checkpoint import v1

        found |= {"zarr3": handler("zarr3", use_zarr3=True), "newer": newer} if hasattr(v1, "save") else {}
    except ImportError:
        pass
    return found


PLACES = {"manager": ("manager/ckpt_20", ""), "composite": ("composite/3", "state"), "newer": ("newer", "state")}


def write(room: Path) -> None:
    """Write every layout; those that need one process only if there is one."""
    import jax
    from jax.experimental.array_serialization import pytree_serialization, serialization

    tree = made() | (alone() if jax.process_count() == 1 else {})
    for name, writer in writers(room).items():
        own = {key: value for key, value in tree.items() if key != "name" or name == "pytree"}
        writer(own)
        print(f"process {jax.process_index()} wrote {name}", flush=True)
    arrays = {"params": tree["params"], "layers": tuple(tree["layers"]), "nothing": None}
    pytree_serialization.save(arrays, room / "jax")
    manager = serialization.GlobalAsyncCheckpointManager()
    paths = [str(room / "arrays" / "params" / name) for name in tree["params"]]
    manager.serialize_with_paths(list(tree["params"].values()), paths)
    manager.wait_until_finished()


def check(room: Path, is_alone: bool) -> None:
    """Load what was written, as it is and onto another mesh, verify and convert it."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import shardkeep

    tree = made() | (alone() if is_alone else {})
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    for name in writers(room):
        place, prefix = PLACES.get(name, (name, ""))
        own = {key: value for key, value in tree.items() if key != "name" or name == "pytree"}
        path = room / place
        assert shardkeep.inspect(path).source == "orbax"
        same(shardkeep.load(path, prefix=prefix), own, name)
        assert shardkeep.exists(path), name
        assert shardkeep.verify(path).ok, (name, shardkeep.verify(path))
        moved = shardkeep.load(path, prefix=prefix, mesh=mesh)["params"]
        same(moved, own["params"], name)
        assert moved["grid"].sharding == NamedSharding(mesh, P("a", "b")), (name, moved["grid"].sharding)
        template = {
            "params": {"grid": jax.ShapeDtypeStruct((64, 96), np.float32, sharding=NamedSharding(mesh, P("b")))}
        }
        found = shardkeep.load(path, prefix=prefix, template=template)["params"]["grid"]
        assert found.sharding == NamedSharding(mesh, P("b"))
        same(found, own["params"]["grid"], name)
        subprocess.run([sys.executable, "-m", "shardkeep", "convert", path, room / f"{name}.converted"], check=True)
        same(shardkeep.load(room / f"{name}.converted", prefix=prefix), own, f"{name}, converted")
        print(f"  {name}: loaded, moved, verified and converted", flush=True)
    assert shardkeep.latest(room / "manager") == str(room / "manager" / "ckpt_20")
    steps = shardkeep.Run(room / "manager", name="ckpt_{}").steps()
    assert [(step.number, step.metrics) for step in steps] == [(1, {"loss": 1.0}), (20, {"loss": 0.05})], steps
    assert shardkeep.load(room / "composite/3", prefix="config") == {"lr": 0.1, "names": ["x"]}
    same(shardkeep.load(room / "jax"), {k: tree[k] for k in ("params", "layers", "nothing")}, "jax")
    same(shardkeep.load(room / "arrays"), {"params": tree["params"]}, "arrays")
    assert shardkeep.verify(room / "jax").ok
    print("  jax: loaded and verified", flush=True)


def start(what: str, room: Path, number: int = 0, processes: int = 1, port: int = 0) -> subprocess.Popen[bytes]:
    """A JAX process of its own."""
    devices = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    environment = {**os.environ, "XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0"}
    arguments = [what, str(room), str(number), str(processes), str(port)]
    return subprocess.Popen([sys.executable, "-W", "ignore", __file__, *arguments], env=environment)


def child(what: str, room: str, number: str, processes: str, port: str) -> None:
    import jax

    if int(processes) > 1 and what == "write":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(number))
    if what == "write":
        write(Path(room))
    else:
        check(Path(room), is_alone=processes == "1")


def main() -> None:
    from importlib.metadata import version

    print(f"orbax-checkpoint {version('orbax-checkpoint')}, jax {version('jax')}", flush=True)
    for processes in (1, PROCESSES):
        with tempfile.TemporaryDirectory() as place, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            room = Path(place)
            running = [start("write", room, number, processes, port) for number in range(processes)]
            codes = [process.wait(600) for process in running]
            if any(codes):
                sys.exit(f"writing with {processes} processes failed: {codes}")
            loading = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, "check", place, "0", str(processes), "0"],
                env={
                    **os.environ,
                    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
                    "JAX_PLATFORMS": "cpu",
                },
            )
            if loading.wait(600):
                sys.exit(f"what {processes} processes wrote could not be loaded")
            shutil.rmtree(room / "standard")
    print("all of it loads")


if __name__ == "__main__":
    child(*sys.argv[1:]) if len(sys.argv) > 1 else main()
