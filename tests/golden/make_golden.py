"""Writes the golden checkpoints: one small checkpoint per way of storing, as this version of shardkeep writes it.

    python tests/golden/make_golden.py            # replaces tests/golden/v<format version>/
    python tests/golden/make_golden.py <directory>  # writes into an empty directory instead

Every released format version keeps its directory, and `tests/test_golden.py` loads all of them. Run this only to
add a new format version, or before a version is released. What a checkpoint must give back is in
`expected.json` beside it: for each leaf its kind, dtype, shape and raw bytes, written without shardkeep's own
encoding so that the test does not trust the code it tests.
"""

import dataclasses
import enum
import json
import math
import os
import shutil
import sys
import tempfile
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "4"
    _path = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    sys.path[:0] = _path
    os.environ["PYTHONPATH"] = os.pathsep.join(_path)  # for the programs that it starts

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtypes import JAX, TIMES, WIDE, dtype_of

HERE = Path(__file__).parent
Point = namedtuple("Point", "x y")  # not importable by name when loaded: comes back as a namedtuple of the same shape


class Settings:
    """Auxiliary data that is not plain."""

    def __init__(self, text: str) -> None:
        self.text = text


class Layer:
    """A node whose auxiliary data is saved with the functions registered with `jax.export`."""

    def __init__(self, kernel: Any, settings: Settings) -> None:
        self.kernel, self.settings = kernel, settings


Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Config:
    width: int
    rate: float = 0.1
    shape: tuple[int, ...] = ()


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = "evaluate"


class Text(str):
    """A static str."""


class Number(int):
    """A static int."""


class Rate(float):
    """A static float."""


class Blob(bytes):
    """A static bytes."""


class Shape(tuple[int, ...]):
    """A static tuple."""


STATIC = (Config, Mode, Text, Number, Rate, Blob, Shape)

jax.tree_util.register_pytree_node(
    Layer, lambda layer: ((layer.kernel,), layer.settings), lambda aux, children: Layer(children[0], aux)
)
jax.export.register_pytree_node_serialization(
    Layer,
    serialized_name="golden.Layer",
    serialize_auxdata=lambda settings: b"\x00" + settings.text.encode(),
    deserialize_auxdata=lambda stored: Settings(bytes(stored[1:]).decode()),
)
jax.export.register_namedtuple_serialization(Pair, serialized_name="golden.Pair")
for static in STATIC:
    static.__module__ = "make_golden"  # also when this file runs as a program: the name that is stored
    jax.tree_util.register_static(static)
if __name__ == "__main__":
    sys.modules["make_golden"] = sys.modules[__name__]


def bit_pattern(dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    """`count` elements of any dtype from fixed bits, signs and NaNs among them."""
    if dtype.name == "bool":
        return np.arange(count) % 3 == 0
    bits = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}.get(dtype.name, 8)
    raw = (np.arange(count * dtype.itemsize) * 37 + 11) % (1 << bits)
    return raw.astype(np.uint8).view(dtype)


def arrays() -> dict[str, Any]:
    """An array of every dtype JAX has on CPU, and the NumPy ones it has not."""
    tree: dict[str, Any] = {}
    for name in JAX:
        tree[name] = jnp.asarray(bit_pattern(dtype_of(name), 6)).reshape(2, 3)
    for name in [*WIDE, *TIMES]:
        tree[f"numpy {name}"] = bit_pattern(np.dtype(name), 4)
    return tree


def containers() -> dict[Any, Any]:
    """Every container, every plain value and every kind of key."""
    return {
        "list": [1, [2], []],
        "tuple": (3, (4,), ()),
        "point": Point(jnp.float32(1.5), "y"),
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(int, {"k": 5}),
        "none": None,
        "empty": {},
        "values": {
            "int": -(2**100),
            "bool": True,
            "float": 0.1,
            "infinity": float("-inf"),
            "nan": float("nan"),
            "complex": complex(-0.0, 2.5),
            "str": "Zürich \ud800 \x00",
            "bytes": bytes(range(256)),
            "numpy": np.float16(1.5),
        },
        "keys": {1: "int", "1": "str", 2.5: "float", False: "bool", None: "None", b"k": "bytes", ("t", 1): "tuple"},
    }


def awkward_names() -> dict[str, Any]:
    """Arrays whose names cannot be file names as they are, or only one of them could."""
    names = ["a.b", "..", "", "x/y", "\\", "é", "Case", "case", ".zarray", "0.0", " spaces ", "long" * 75]
    tree: dict[str, Any] = {name: jnp.int8(number) for number, name in enumerate(names)}
    return {**tree, "a": {"b": jnp.int8(99)}}


def sharded() -> jax.Array:
    """An array on four devices, stored in four pieces where the format keeps pieces."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    rows = np.arange(512, dtype=np.uint16).reshape(16, 32)
    return jax.device_put(rows, NamedSharding(mesh, PartitionSpec("fsdp", "tp")))


def small_tree() -> dict[Any, Any]:
    key = jax.random.key(7)
    return {
        "arrays": arrays(),
        **containers(),
        "awkward": awkward_names(),
        "big endian": np.arange(3, dtype=">i4"),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "sharded": sharded(),
        "scalar": jnp.float32(3.25),
        "no elements": jnp.zeros((0, 3), jnp.bfloat16),
        "keys of jax": jax.random.split(key, 2),
        "key": key,
    }


def exchange_tree() -> dict[Any, Any]:
    """What plain files can hold: no two leaves of one dotted name."""
    tree = small_tree()
    del tree["awkward"]["a.b"]
    return tree


def expected(tree: Any) -> list[dict[str, Any]]:
    """Each leaf as kind, dtype, shape and bytes, in the order of the tree."""
    found: list[dict[str, Any]] = []

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, child in value.items():
                visit(child, f"{path}[{key!a}]")
            factory = getattr(getattr(value, "default_factory", None), "__name__", None)
            keys = [ascii(key) for key in value]
            found.append({"at": path, "type": type(value).__name__, "keys": keys, "factory": factory})
        elif isinstance(value, list | tuple):
            for number, child in enumerate(value):
                visit(child, f"{path}[{number}]")
            fields = list(getattr(value, "_fields", ()))
            found.append({"at": path, "type": type(value).__name__, "length": len(value), "fields": fields})
        elif isinstance(value, Layer):
            visit(value.kernel, f"{path}.kernel")
            found.append({"at": path, "type": "Layer", "settings": value.settings.text})
        else:
            found.append({"at": path, **described(value)})

    visit(tree, "")
    return found


def described(value: Any) -> dict[str, Any]:
    """One leaf, in plain words and bytes."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(value))
        return {
            "type": "key",
            "impl": str(jax.random.key_impl(value)),
            "shape": list(value.shape),
            "bytes": hexed(data),
        }
    if isinstance(value, jax.Array):
        return {"type": "jax", "dtype": value.dtype.name, "shape": list(value.shape), "bytes": hexed(np.asarray(value))}
    if isinstance(value, np.ndarray):
        return {"type": "numpy", "dtype": value.dtype.str, "shape": list(value.shape), "bytes": hexed(value)}
    if isinstance(value, np.generic):
        return {"type": "numpy scalar", "dtype": value.dtype.name, "bytes": value.tobytes().hex()}
    if isinstance(value, float | complex):
        return {"type": type(value).__name__, "bytes": np.asarray(value).tobytes().hex()}
    return {"type": type(value).__name__, "repr": ascii(value)}


def hexed(array: np.ndarray[Any, Any]) -> str:
    return array.tobytes().hex()


def checkpoints(root: Path) -> dict[str, Any]:
    """Write every golden checkpoint below `root`; gives the trees by path and prefix."""
    import shardkeep
    from shardkeep.layouts import plan as planning

    # From which size an array is stored in pieces is the writer's choice; readers take what the manifest says. Here
    # it is small, so that a few KB hold several pieces.
    plan_pieces = planning.plan_pieces
    planning.plan_pieces = lambda arrays, split, whole, process: plan_pieces(
        arrays, split, 64 if whole < math.inf else whole, process
    )
    small, plain = small_tree(), exchange_tree()
    metadata = {"step": 100, "note": "golden", "nested": {"list": [1, 2.5, None, True]}}
    shardkeep.save(root / "safetensors", small, metadata=metadata)
    shardkeep.save(root / "safetensors", {"nu": jnp.ones(3)}, prefix="optimizer.state")
    shardkeep.save(root / "tensorstore", small, format="zarr", metadata=metadata)
    shardkeep.save(root / "tensorstore", {"w": jnp.zeros(2)}, format="zarr", prefix="model")
    shardkeep.save(root / "tensorstore", {"w": jnp.ones(2)}, format="zarr", prefix="model", overwrite=True)
    shardkeep.save(root / "zstd", small, format="zarr", compression="zstd")
    shardkeep.save(root / "single" / "model.safetensors", plain, metadata=metadata)
    shardkeep.save(root / "sharded" / "model.safetensors", plain, metadata=metadata, max_shard_size=600)
    shardkeep.save(root / "bare", jnp.arange(3))
    return (
        fenced(root)
        | from_a_bucket(root)
        | per_process(root)
        | {
            "safetensors": small,
            "safetensors#optimizer.state": {"nu": jnp.ones(3)},
            "tensorstore": small,
            "tensorstore#model": {"w": jnp.ones(2)},
            "zstd": small,
            "single/model.safetensors": plain,
            "sharded/model.safetensors": plain,
            "bare": jnp.arange(3),
        }
        | auxiliary(root)
        | tagged_metadata(root)
        | tabled(root)
        | in_series(root)
    )


def fenced(root: Path) -> dict[str, Any]:
    """Documents with a nonce, as a clean-up in a bucket leaves them: over a checkpoint, and where nothing is."""
    import shardkeep
    from shardkeep.stores.location import location, store_at
    from shardkeep.targets.directory import Directory
    from shardkeep.targets.exchange import exchange_at

    tree = {"w": jnp.arange(6, dtype=jnp.float32), "v": jnp.ones(3)}
    shardkeep.save(root / "fenced" / "run", tree)
    shardkeep.save(root / "fenced" / "model.safetensors", tree, max_shard_size=20)
    for place in ("fenced", "nothing"):
        (root / place / "run").mkdir(parents=True, exist_ok=True)
        Directory(store_at(location(str(root / place / "run")))).fence()
        exchange_at(location(str(root / place / "model.safetensors"))).fence()
    return {"fenced/run": tree, "fenced/model.safetensors": tree}


def from_a_bucket(root: Path) -> dict[str, Any]:
    """Exchange files as they lie in a bucket: shards, and one file that took the place of others."""
    import shardkeep
    from servers.gcs import GCSServer

    trees = {"one": {"w": jnp.arange(6), "v": jnp.ones(3)}, "several": {"w": jnp.arange(7), "v": jnp.zeros(3)}}
    with GCSServer() as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        for name, tree in trees.items():
            shardkeep.save(f"gs://bucket/{name}/model.safetensors", tree, max_shard_size=20)
        shardkeep.save("gs://bucket/one/model.safetensors", trees["one"], overwrite=True)
        for name, blob in server.objects["bucket"].items():
            (root / "bucket" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "bucket" / name).write_bytes(blob.data)
    return {f"bucket/{name}/model.safetensors": tree for name, tree in trees.items()}


# Of each process another: other lengths, other containers.
VALUE = """
def value(process):
    state = {"process": process, "seen": list(range(process)), "buffer": np.arange(40 * process, dtype=np.int16)}
    rest = (b"\\x00\\xff", None, 0.5, np.float16(1.5), np.arange(3, dtype=">i4"))
    return {**state, "rest": rest} if process else state
"""


def per_process(root: Path) -> dict[str, Any]:
    """Values of one process, and those that two processes saved together, in either format."""
    import shardkeep
    from multiprocess.cluster import all_well, run_cluster

    names: dict[str, Any] = {"np": np}
    exec(VALUE, names)
    value, where = names["value"], root / "per process"
    kinds = {"safetensors": {}, "zarr": {"format": "zarr"}, "model.safetensors": {}}
    script = f"""{VALUE}
for name, more in {kinds!r}.items():
    tree = {{"data": shardkeep.PerProcess(value(index)), "step": 7}}
    shardkeep.save(Path({str(where)!r}) / "two" / name, tree, **more)
"""
    with tempfile.TemporaryDirectory() as room:
        all_well(run_cluster(script, Path(room) / "room", size=2))
    for name, more in kinds.items():
        shardkeep.save(where / "one" / name, {"data": shardkeep.PerProcess(value(1)), "step": 7}, **more)
    trees = {"one": {"data": [value(1)], "step": 7}, "two": {"data": [value(0), value(1)], "step": 7}}
    return {f"per process/{count}/{name}": tree for count, tree in trees.items() for name in kinds}


# Arrays of several pieces, in tables that are files.
SPREAD = """
from shardkeep.layouts import plan
from shardkeep.processes import assignment

plan_pieces = plan.plan_pieces
plan.plan_pieces = lambda arrays, split, whole, process: plan_pieces(arrays, split, 8, process)
plan._INLINE = 0
assignment.SMALL = 8

def spread():
    rows = NamedSharding(Mesh(np.array(jax.devices()).reshape(4), ("x",)), PartitionSpec("x"))
    columns = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y")), PartitionSpec(None, "y"))
    array = np.arange(48, dtype=np.float32).reshape(8, 6)
    arrays = {name: jax.make_array_from_callback((8, 6), where, lambda index: array[index])
              for name, where in {"rows": rows, "columns": columns}.items()}
    return {**arrays, "none": np.zeros((0, 3)), "whole": np.arange(7), "step": 7}
"""


def tabled(root: Path) -> dict[str, Any]:
    """A table in a file, and those of two processes, whose cells alternate."""
    import shardkeep
    from multiprocess.cluster import all_well, run_cluster
    from shardkeep.layouts import plan

    where = root / "tables"
    kinds: dict[str, dict[str, Any]] = {
        "safetensors": {},
        "zarr": {"format": "zarr"},
        "zstd": {"format": "zarr", "compression": "zstd"},
    }
    imports = "import numpy as np, jax, shardkeep\nfrom jax.sharding import Mesh, NamedSharding, PartitionSpec\n"
    script = f"""{imports}{SPREAD}
for name, more in {kinds!r}.items():
    shardkeep.save(Path({str(where)!r}) / "two" / name, spread(), **more)
"""
    with tempfile.TemporaryDirectory() as room:
        all_well(run_cluster(script, Path(room) / "room", size=2))
    names: dict[str, Any] = {}
    inline, pieces = plan._INLINE, plan.plan_pieces
    exec(imports + SPREAD, names)
    tree = names["spread"]()
    try:
        for name, more in kinds.items():
            shardkeep.save(where / "one" / name, tree, **more)
    finally:
        plan._INLINE, plan.plan_pieces = inline, pieces
    return {f"tables/{count}/{name}": tree for count in ("one", "two") for name in kinds}


def in_series(root: Path) -> dict[str, Any]:
    """So many files that one record in the manifest names several."""
    import shardkeep
    from shardkeep.stores.local.store import LocalStore

    tree = {"layers": [np.arange(16 + number, dtype=np.float32) for number in range(10)], "step": 7}
    traits = LocalStore.traits
    LocalStore.traits = dataclasses.replace(traits, object_limit=64)  # bytes, as objects in a bucket have 32 MiB
    try:
        shardkeep.save(root / "series", tree)
    finally:
        LocalStore.traits = traits
    return {"series": tree}


# Every way of storing a tree that has a document of its own.
KINDS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "zarr": {"format": "zarr"},
    "single/model.safetensors": {},
    "sharded/model.safetensors": {"max_shard_size": 10},
}


def auxiliary(root: Path) -> dict[str, Any]:
    """Classes whose auxiliary data is stored in the fields `registered`, `aux_bytes` and `static`."""
    import shardkeep

    tree = {
        "layer": Layer(jnp.arange(3), Settings("gelu \u00fc")),
        "pair": Pair(jnp.ones(2), [Layer(1, Settings(""))]),
        "config": Config(8, float("-inf"), (2, 3)),
        "mode": Mode.EVAL,
        "text": Text("text"),
        "number": Number(-(2**70)),
        "rate": Rate("nan"),
        "blob": Blob(b"\x00\xff"),
        "shape": Shape((2, 3)),
    }
    for name, more in KINDS.items():
        shardkeep.save(root / "auxiliary" / name, tree, **more)
    return {f"auxiliary/{name}": tree for name in KINDS}


def tagged_metadata(root: Path) -> dict[str, Any]:
    """Metadata that JSON does not carry as it is, and a recorded step."""
    import shardkeep

    tree = {"w": jnp.arange(3), "v": jnp.ones(3)}
    metadata = {
        "loss": float("nan"),
        "bounds": [float("-inf"), float("inf")],
        "long": 2**2001,
        "text": "\ud800",
        "tag": {"$shardkeep": {"float": "nan"}},
        "inside": {"$shardkeep": [{"$shardkeep": float("inf")}]},
        "no tag": {"$shardkeep": {"float": "nan"}, "more": float("nan")},
    }
    for name, more in KINDS.items():
        shardkeep.save(root / "metadata" / name, tree, metadata=metadata, step=7, **more)
    return {f"metadata/{name}": tree for name in KINDS}


def main(arguments: list[str]) -> None:
    from shardkeep.model.document import VERSION

    root = Path(arguments[0]) if arguments else HERE / f"v{VERSION}"
    if not arguments:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
    trees = checkpoints(root)
    texts = {name: expected(tree) for name, tree in trees.items()}
    (root / "expected.json").write_text(json.dumps(texts, indent=0) + "\n")
    files = [path for path in root.rglob("*") if path.is_file()]
    print(f"{root.name}: {len(files)} files, {sum(path.stat().st_size for path in files):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
