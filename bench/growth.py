"""How the cost of our saves and loads grows with the number of arrays and with bytes, and what a rotation costs.

python bench/growth.py leaves|bytes|rotation|import CONTENDER DIRECTORY
"""

import gc
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

LEAVES = (10, 1_000, 5_000, 20_000)
MEBIBYTES = (1, 64, 512, 2048, 4096)


def grow(by: str, name: str, where: Path) -> dict[str, Any]:
    """(arrays, bytes, seconds to save, seconds to load from the page cache), each the best of four, loads of 25."""
    import jax
    import jax.numpy as jnp
    from contenders import CONTENDERS, clocked

    contender = CONTENDERS[name]()
    contender.save(where / "first", {"w": jnp.ones(8)})
    sizes = LEAVES if by == "leaves" else MEBIBYTES
    # In whole KiB, as the arrays of models are: what lies askew in a file cannot be used there, and is copied.
    shapes = [(size, 256) if by == "leaves" else (10, (size << 20) // 40 // 256 * 256) for size in sizes]
    points = [[count, count * elements * 4, math.inf, math.inf] for count, elements in shapes]
    wanted: list[dict[str, Any]] = [{}] * len(sizes)
    for number in range(4):  # in turns: a slow second hits all sizes alike
        for i, (count, elements) in enumerate(shapes):

            def build(count: int = count, elements: int = elements) -> dict[str, Any]:
                return {f"w{i}": jnp.full((elements,), i, jnp.float32) for i in range(count)}

            tree = jax.block_until_ready((jax.jit(build) if count <= 10 else build)())
            wanted[i] = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for k, v in tree.items()}
            os.sync()
            gc.collect()
            path = where / f"{by}-{sizes[i]}-{number}"
            seconds, _ = clocked(lambda path=path, tree=tree: contender.save(path, tree))
            points[i][2] = min(points[i][2], seconds)
            del tree
    for _ in range(25):  # the first load of each is from the disk
        for size, point, like in zip(sizes, points, wanted, strict=True):
            gc.collect()
            path = where / f"{by}-{size}-0"
            seconds, _ = clocked(lambda path=path, like=like: jax.block_until_ready(contender.load(path, like)))
            point[3] = min(point[3], seconds)
    return {"points": points}


def rotate(name: str, where: Path) -> dict[str, Any]:
    """A save, the one before deleted, a save, …: median and largest of twenty."""
    import jax.numpy as jnp
    from contenders import CONTENDERS, clocked

    contender = CONTENDERS[name]()
    tree = {f"w{i}": jnp.full((64, 1024), i, jnp.float32) for i in range(200)}
    seconds: list[float] = []
    for number in range(21):
        path = where / f"step_{number}"
        seconds.append(clocked(lambda path=path: contender.save(path, tree))[0])
        if number:
            contender.delete(where / f"step_{number - 1}")
    return {"median": statistics.median(seconds[1:]), "largest": max(seconds[1:])}


def imported(name: str) -> dict[str, Any]:
    """Seconds that an import takes on top of JAX."""
    import jax

    jax.devices()
    module = {"shardkeep": "shardkeep", "Orbax": "orbax.checkpoint"}[name]
    started = time.perf_counter()
    __import__(module)
    return {"import": time.perf_counter() - started}


def main() -> None:
    what, name, where = sys.argv[1:]
    if what in ("leaves", "bytes"):
        found = grow(what, name, Path(where))
    else:
        found = rotate(name, Path(where)) if what == "rotation" else imported(name)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
