"""How fast saves and loads are here, beside the raw disk and, if they are installed, other libraries.

    python bench/run.py            # about ten minutes; writes a table to bench/results/
    python bench/run.py --quick    # small trees, one round: shows that it runs, the numbers mean little

Each measurement is a fresh process that has saved and loaded one tiny tree before. The rounds are interleaved: every
contender once, then all again, so that a slow minute of the machine hits all alike. What is shown is the median, with
the smallest and largest in brackets. Nothing is deleted between the rounds (creating files right after deleting many
is slow on ext4 and would hit whoever comes next); all goes at the end: about 20 GB until then. Before a save everything
earlier is synced to the disk. Loads read files that are in the page cache.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

RESULTS = Path(__file__).parent / "results"
ROUNDS = 5
METRICS = {
    "blocking": "async save: the call blocks",
    "durable": "save until durable",
    "load": "load",
}
BUSY = (
    "**The machine was busy with other work during this run: times vary several-fold, and differences below that "
    "mean nothing.**"
)
TREES = {
    "llama": "bf16 in a Llama's shapes, one device",
    "llama-mesh": "bf16 in a Llama's shapes, on a (2, 4) mesh",
    "many": "arrays of 16 KiB, one device",
}


# --- the trees


def make_tree(name: str, scale: int) -> Any:
    """The tree to save; `scale` divides its size."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    if name == "many":
        keys = jax.random.split(jax.random.key(0), 2000 // scale)
        return {f"layer_{i}": jax.random.normal(key, (4096,), jnp.float32) for i, key in enumerate(keys)}
    width, inner, vocabulary = 1024, 2816, 9088 // scale
    layers = max(9 // scale, 1)
    shapes = {"embed": (vocabulary, width), "head": (vocabulary, width)}
    for number in range(layers):
        for part in ("q", "k", "v", "o"):
            shapes[f"layers.{number}.{part}"] = (width, width)
        shapes |= {f"layers.{number}.gate": (inner, width), f"layers.{number}.up": (inner, width)}
        shapes |= {f"layers.{number}.down": (width, inner), f"layers.{number}.norm": (width,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    tree = {
        name: jax.random.normal(key, shape, jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    if name == "llama-mesh":
        mesh = mesh_of_eight()
        spec = {1: PartitionSpec(), 2: PartitionSpec("fsdp", "tp")}
        tree = {k: jax.device_put(v, NamedSharding(mesh, spec[v.ndim])) for k, v in tree.items()}
    return jax.block_until_ready(tree)


def mesh_of_eight() -> Any:
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tp"))


def tree_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree.values())


def abstract(tree: Any) -> Any:
    import jax

    return {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for k, v in tree.items()}


# --- the contenders: each measures one metric in a process of its own and gives seconds


def clocked(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def shardkeep_with(format: str) -> Callable[[str, Path, Any], float]:
    def measure(metric: str, path: Path, tree: Any) -> float:
        import jax

        import shardkeep

        if metric == "durable":
            return clocked(lambda: shardkeep.save(path, tree, format=format))[0]
        if metric == "blocking":
            seconds, pending = clocked(lambda: shardkeep.save_async(path, tree, format=format))
            pending.wait()
            return seconds
        template = abstract(tree)
        return clocked(lambda: jax.block_until_ready(shardkeep.load(path, template=template)))[0]

    return measure


def orbax(metric: str, path: Path, tree: Any) -> float:
    import logging

    logging.disable(logging.WARNING)
    import jax
    import orbax.checkpoint as ocp

    if metric == "load":
        with ocp.StandardCheckpointer() as checkpointer:
            template = abstract(tree)
            return clocked(lambda: jax.block_until_ready(checkpointer.restore(path, template)))[0]
    with ocp.StandardCheckpointer() as checkpointer:
        started = time.perf_counter()
        checkpointer.save(path, tree)
        blocked = time.perf_counter() - started
        checkpointer.wait_until_finished()
        return blocked if metric == "blocking" else time.perf_counter() - started


def safetensors(metric: str, path: Path, tree: Any) -> float:
    """One file. It has no async save and does not sync: the sync is added, so that it does what the others do."""
    import jax
    from safetensors.flax import load_file, save_file

    file = path.with_suffix(".safetensors")
    if metric == "load":
        place = {k: v.sharding for k, v in tree.items()}
        return clocked(lambda: jax.block_until_ready(jax.device_put(load_file(file), place)))[0]

    def save() -> None:
        save_file(dict(tree), file)  # it replaces the arrays of the dict it is given
        sync(file)
        sync(file.parent)

    return clocked(save)[0]


def raw(metric: str, path: Path, tree: Any) -> float:
    """The same number of bytes as one file, written or read by two threads in parts of 16 MiB: what the disk allows."""
    import numpy as np

    total, part = tree_bytes(tree), 16 << 20
    starts = range(0, total, part)
    if metric == "load":
        memory = np.empty(total + 64, np.uint8)
        memory[:] = 1  # so that the pages are there
        skip = -memory.ctypes.data % 64
        descriptor = os.open(path, os.O_RDONLY)
        view = memoryview(memory)[skip : skip + total]

        def read(start: int) -> None:
            os.preadv(descriptor, [view[start : start + part]], start)

        return clocked(lambda: on_two_threads(read, starts))[0]
    data = memoryview(np.random.default_rng(0).integers(0, 255, total, np.uint8))

    def write_all() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        on_two_threads(lambda start: os.pwrite(descriptor, data[start : start + part], start), starts)
        os.fsync(descriptor)

    return clocked(write_all)[0]


def on_two_threads(work: Callable[[int], Any], items: Any) -> None:
    remaining = iter(list(items))
    lock = threading.Lock()

    def serve() -> None:
        while True:
            with lock:
                item = next(remaining, None)
            if item is None:
                return
            work(item)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


CONTENDERS: dict[str, Callable[[str, Path, Any], float]] = {
    "shardkeep, safetensors": shardkeep_with("safetensors"),
    "shardkeep, tensorstore": shardkeep_with("tensorstore"),
    "orbax-checkpoint": orbax,
    "safetensors.flax": safetensors,
    "raw writes and reads": raw,
}
NEEDS = {"orbax-checkpoint": "orbax.checkpoint", "safetensors.flax": "safetensors.flax"}
HAS_NO_ASYNC = {"safetensors.flax", "raw writes and reads"}


# --- running


def worker(contender: str, metric: str, tree_name: str, scale: int, path: Path) -> None:
    """One measurement, after a tiny tree was saved and loaded, so that it is not the first use of the library."""
    tree = make_tree(tree_name, scale)
    tiny = {"tiny": next(iter(tree.values()))[:8]}
    for first_use in ("durable", "load"):
        CONTENDERS[contender](first_use, path.parent / "tiny" / f"{metric}-{path.name}", tiny)
    if metric == "load":
        for file in [*path.rglob("*"), *path.parent.glob(path.name + "*")]:
            if file.is_file():
                file.read_bytes()  # into the page cache
    else:
        os.sync()
    seconds = CONTENDERS[contender](metric, path, tree)
    print(json.dumps({"seconds": seconds, "bytes": tree_bytes(tree), "arrays": len(tree)}), flush=True)


def measure(contender: str, metric: str, tree: str, scale: int, path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", contender, metric, tree, str(scale), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{contender}, {metric}, {tree} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def available() -> list[str]:
    found: list[str] = []
    for name in CONTENDERS:
        module = NEEDS.get(name)
        try:
            present = module is None or importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            present = False
        if present:
            found.append(name)
        else:
            print(f"skipped: {name} is not installed")
    return found


def run(rounds: int, scale: int, where: Path) -> dict[tuple[str, str, str], list[dict[str, float]]]:
    """Every measurement of every round, by (tree, metric, contender)."""
    contenders = available()
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        for tree in TREES:
            for contender in contenders:
                slug = f"{tree}-{contender.replace(', ', '-').replace(' ', '_')}-{number}"
                for metric in METRICS:
                    if metric == "blocking" and contender in HAS_NO_ASYNC:
                        continue
                    # A load reads what the durable save of the same round wrote.
                    path = where / (slug + ("-async" if metric == "blocking" else ""))
                    result = measure(contender, metric, tree, scale, path)
                    found.setdefault((tree, metric, contender), []).append(result)
            print(f"round {number + 1} of {rounds}: {tree} done", flush=True)
    return found


def table(
    found: dict[tuple[str, str, str], list[dict[str, float]]], rounds: int, quick: bool, load: tuple[float, float]
) -> str:
    import jax
    import numpy

    lines = ["# Benchmark", ""]
    if quick:
        lines += ["**A quick run on small trees, to show that it runs. The numbers mean little.**", ""]
    lines += [
        f"Medians of {rounds} rounds (smallest – largest), interleaved, each measurement in a fresh process that has "
        "saved and loaded one tiny tree before. "
        "Nothing is deleted between rounds, everything is synced before a save, loads read from the page cache. "
        "shardkeep loads check every digest; the others have none to check or do not check them by default.",
        "",
        f"{os.cpu_count()} cores, {memory_gib():.0f} GiB of memory, {file_system()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, jax {jax.__version__}, numpy {numpy.__version__}{peer_versions()}. "
        f"Load average {load[0]:.1f} before, {load[1]:.1f} after; what the run itself adds is about 1 to 2.",
    ]
    if load[0] > (os.cpu_count() or 1) / 2:
        lines += ["", BUSY]
    for tree, described in TREES.items():
        first = next(r[0] for (t, _, _), r in found.items() if t == tree)
        lines += ["", f"## {described}", "", f"{first['arrays']:,.0f} arrays, {first['bytes'] / 2**20:.0f} MiB.", ""]
        lines += ["| | " + " | ".join(f"{text}, ms" for text in METRICS.values()) + " | save GB/s | load GB/s |"]
        lines += ["|---" * (len(METRICS) + 3) + "|"]
        for contender in CONTENDERS:
            if (tree, "durable", contender) not in found:
                continue
            cells = [cell(found.get((tree, metric, contender))) for metric in METRICS]
            rates = [rate(found[tree, metric, contender]) for metric in ("durable", "load")]
            lines.append(f"| {contender} | " + " | ".join(cells + rates) + " |")
    return "\n".join(lines) + "\n"


def cell(results: list[dict[str, float]] | None) -> str:
    if results is None:
        return "–"
    times = [r["seconds"] * 1e3 for r in results]
    return f"{statistics.median(times):.1f} ({min(times):.1f} – {max(times):.1f})"


def rate(results: list[dict[str, float]]) -> str:
    return f"{results[0]['bytes'] / statistics.median(r['seconds'] for r in results) / 1e9:.2f}"


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def file_system() -> str:
    done = subprocess.run(["df", "--output=fstype", tempfile.gettempdir()], capture_output=True, text=True, check=False)
    return (done.stdout.split() or [""])[-1] or "an unknown file system"


def peer_versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    text = ""
    for package in ("orbax-checkpoint", "safetensors"):
        try:
            text += f", {package} {version(package)}"
        except PackageNotFoundError:
            continue
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure saves and loads.")
    parser.add_argument("--quick", action="store_true", help="small trees, one round, table not written")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        contender, metric, tree, scale, path = arguments.worker
        worker(contender, metric, tree, int(scale), Path(path))
        return
    rounds, scale = (1, 8) if arguments.quick else (arguments.rounds, 1)
    where = Path(tempfile.mkdtemp(prefix="shardkeep-bench-"))
    (where / "tiny").mkdir()
    try:
        before = os.getloadavg()[0]
        found = run(rounds, scale, where)
        text = table(found, rounds, arguments.quick, (before, os.getloadavg()[0]))
    finally:
        shutil.rmtree(where)
    print("\n" + text)
    if not arguments.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "table.md").write_text(text)


if __name__ == "__main__":
    main()
