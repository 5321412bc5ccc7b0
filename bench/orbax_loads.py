"""A load of a sharded Orbax checkpoint beside Orbax's own restore, cold and warm. Run it by `make bench-orbax`.

Orbax writes 512 MiB of float32, sharded over eight CPU devices, in its default layout. Then each library loads it into
the same shardings, in processes of their own that take turns, each first with nothing of the files in the page cache
and then with all of it. Memory is the peak of the process, above what it had before.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEVICES = 8
LEAVES, SHAPE = 32, (4096, 1024)  # 512 MiB in pieces of 2 MiB
ROUNDS = 5


def arrays() -> dict[str, Any]:
    """The shapes and shardings of the checkpoint."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b")), P("a", "b"))
    return {f"layer_{i}": {"w": jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding)} for i in range(LEAVES)}


def write(path: str) -> None:
    """Weights of random values: zstd makes them little smaller, as it does with real ones."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    random = np.random.default_rng(0)
    tree = jax.tree.map(lambda a: jax.device_put(random.standard_normal(a.shape, a.dtype), a.sharding), arrays())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def evict(path: str) -> None:
    """Drop the files from the page cache."""
    os.sync()
    for file in Path(path).rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak() -> int:
    """The most memory this process ever had, in KiB, file mappings left out."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0])


def load(library: str, path: str) -> None:
    """Load it cold and then warm; prints the seconds of both, and the MiB that the first added."""
    import jax

    template = arrays()
    if library == "orbax":
        import orbax.checkpoint as ocp

        def read() -> Any:
            with ocp.StandardCheckpointer() as checkpointer:
                return checkpointer.restore(path, template)
    else:
        import shardkeep

        def read() -> Any:
            return shardkeep.load(path, template=template)

    jax.block_until_ready(jax.device_put(1))
    seconds: list[float] = []
    before = most = peak()
    for cold in (True, False):
        if cold:
            evict(path)
        start = time.perf_counter()
        jax.block_until_ready(read())
        seconds.append(time.perf_counter() - start)
        most = peak() if cold else most
    print(*seconds, (most - before) >> 10)


def run(*arguments: str) -> str:
    """This program in a process of its own."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", __file__, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def main() -> None:
    room = tempfile.mkdtemp(prefix="bench-orbax-", dir=os.environ.get("BENCH_DIR"))
    try:
        path = str(Path(room) / "checkpoint")
        run("write", path)
        found: dict[str, list[list[float]]] = {"orbax": [], "shardkeep": []}
        for number in range(ROUNDS):
            for library in sorted(found, reverse=bool(number % 2)):
                found[library].append([float(part) for part in run("load", library, path).split()])
                print(library, *(f"{value:.3g}" for value in found[library][-1]), flush=True)
        median = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
        }
        print(f"\nmedian of {ROUNDS}      cold s   warm s   peak MiB")
        for name, (cold, warm, memory) in median.items():
            print(f"{name:12} {cold:11.2f} {warm:8.2f} {memory:10.0f}")
        for number, what in enumerate(("not slower cold", "not slower warm", "memory no higher")):
            reached = median["shardkeep"][number] <= median["orbax"][number]
            print(f"{what}: {'reached' if reached else 'missed'}")
    finally:
        shutil.rmtree(room)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", path]:
            write(path)
        case ["load", library, path]:
            load(library, path)
        case _:
            main()
