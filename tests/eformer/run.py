"""Real eFormer and shardkeep in one process: each reads what the other writes. Run it by `make test-eformer`.

Every function named `check_…` is called with an empty directory. eFormer needs its own environment, so this is no
part of the other tests.
"""

import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import eformer.serialization as theirs
import jax
import jax.numpy as jnp
import numpy as np
from eformer.paths import GCSPath, ePath
from eformer.serialization import checkpointer as their_runs
from eformer.serialization import serialization as their_leaves
from eformer.serialization import sharding_utils as their_sharding
from eformer.serialization import utils as their_utils
from google.cloud import storage
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardkeep
import shardkeep.serialization as ours
from checks import run_checks
from dtypes import JAX, NO_ZARR_NAME
from servers.gcs import GCSServer
from shardkeep.serialization import checkpointer as our_runs
from shardkeep.serialization import serialization as our_leaves
from shardkeep.serialization import sharding_utils as our_sharding
from shardkeep.serialization import utils as our_utils
from support import Dense, Keyed, OrderedDict, Unkeyed, assert_same, bits

P = PartitionSpec
LINE = Mesh(np.array(jax.devices()), ("x",))
GRID = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
LARGE = (16, 40_000)  # beyond what we store whole whatever its sharding

DTYPES = [name for name in JAX if name not in NO_ZARR_NAME]  # what zarr, and so eFormer, has a name for


class Pair(NamedTuple):
    left: Any
    right: Any


def on(array: Any, mesh: Mesh, *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def model(seed: int = 0) -> dict[str, Any]:
    """Nested dicts of strings, so that both libraries give back the same tree."""
    random = np.random.default_rng(seed)
    return {
        "bias": jnp.asarray(random.normal(size=7), jnp.bfloat16),
        "layers": {str(i): {"kernel": jnp.asarray(random.normal(size=(4, 3)), jnp.float32)} for i in range(3)},
        "scale": jnp.float32(random.normal()),
        "step": jnp.arange(seed, seed + 5),
    }


def sharded(seed: int = 0) -> dict[str, Any]:
    big = np.random.default_rng(seed).normal(size=LARGE).astype(np.float32)
    return {
        "both": on(big, GRID, "x", "y"),
        "columns": on(big, GRID, None, ("x", "y")),
        "line": on(big, LINE, "x"),
        "replicated": on(big[:4, :5], GRID),
        "small": on(np.arange(8.0, dtype=np.float32), LINE, "x"),
    }


def same(found: Any, expected: Any, where: str = "") -> None:
    """Same keys and bits, wherever the arrays are."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), f"{where}: {sorted(found)} is not {sorted(expected)}"
        for key, value in expected.items():
            same(found[key], value, f"{where}.{key}")
        return
    assert found.dtype == expected.dtype, f"{where}: {found.dtype} is not {expected.dtype}"
    assert found.shape == expected.shape, f"{where}: {found.shape} is not {expected.shape}"
    assert bits(found) == bits(expected), f"{where}: bits differ"


def read_by_eformer(path: Path, expected: Any, prefix: str | None = None) -> None:
    """By both of its ways, replicated and laid out by rules."""
    manager = theirs.AsyncCheckpointManager()
    same(manager.load(str(path), LINE, prefix=prefix)[0], expected)
    same(theirs.tree_deserialize_leaves(str(path), LINE, prefix=prefix), expected)


def read_by_us(path: Path, expected: Any, prefix: str | None = None) -> None:
    manager = ours.AsyncCheckpointManager()
    for mesh in (None, LINE):
        same(manager.load(path, mesh, prefix=prefix)[0], expected)
        same(ours.tree_deserialize_leaves(path, mesh, prefix=prefix), expected)
    same(shardkeep.load(path, prefix=prefix), expected)


WRITERS: dict[str, Callable[[Any, Path, str | None], Any]] = {
    "save": lambda tree, path, prefix: ours.AsyncCheckpointManager().save(tree, path, LINE, prefix=prefix),
    "compressed save": lambda tree, path, prefix: ours.AsyncCheckpointManager(enable_compression=True).save(
        tree, path, LINE, prefix=prefix
    ),
    "save_async": lambda tree, path, prefix: (
        ours.AsyncCheckpointManager().save_async(tree, path, LINE, prefix=prefix).wait()
    ),
    "tree_serialize_leaves": lambda tree, path, prefix: ours.tree_serialize_leaves(path, tree, prefix=prefix),
    "shardkeep.save": lambda tree, path, prefix: shardkeep.save(path, tree, format="zarr", prefix=prefix),
}


def check_eformer_reads_a_plain_tree_of_ours(path: Path) -> None:
    for name, write in WRITERS.items():
        write(model(), path / name, None)
        read_by_eformer(path / name, model())


def check_eformer_reads_prefixed_trees_of_ours(path: Path) -> None:
    for name, write in WRITERS.items():
        write(model(1), path / name, "model")
        read_by_eformer(path / name, model(1), "model")
        write(model(2), path / name, "optimizer")
        read_by_eformer(path / name, model(1), "model")
        read_by_eformer(path / name, model(2), "optimizer")
        write(model(3), path / name, None)
        read_by_eformer(path / name, model(3))
        read_by_eformer(path / name, model(2), "optimizer")


def check_eformer_reads_trees_of_ours_from_eight_devices(path: Path) -> None:
    for name, write in WRITERS.items():
        write(sharded(), path / name, "model")
        read_by_eformer(path / name, sharded(), "model")
        chunks = [p for p in (path / name / "model" / "both").iterdir() if p.name != ".zarray"]
        assert len(chunks) == (8 if "compressed" in name else 4), name  # shards in a row share a chunk
        rules = ((".*", P("y")),)
        loaded, _ = theirs.AsyncCheckpointManager().load(str(path / name), GRID, prefix="model", partition_rules=rules)
        same(loaded, sharded())
        assert loaded["both"].sharding == NamedSharding(GRID, P("y"))


def check_eformer_reads_every_dtype_it_has_a_name_for(path: Path) -> None:
    tree = {name: jnp.asarray(np.arange(6).reshape(2, 3) % 2).astype(name) for name in DTYPES}
    for name in ("save", "compressed save"):
        WRITERS[name](tree, path / name, None)
        read_by_eformer(path / name, tree)


def check_what_eformer_has_no_name_for_is_left_out_of_its_index(path: Path) -> None:
    tree = {"w": jnp.ones(2), "u": jnp.ones(2, jnp.uint4), "f": jnp.ones(2, jnp.float8_e4m3), "k": jax.random.key(0)}
    ours.AsyncCheckpointManager().save({**tree, "n": 3, "s": "text"}, path / "c", LINE)
    read_by_eformer(path / "c", {"w": tree["w"]})
    loaded, _ = ours.AsyncCheckpointManager().load(path / "c", None)
    assert_same(loaded, {**tree, "n": 3, "s": "text"})


def check_eformer_reads_sequences_and_empty_arrays_of_ours(path: Path) -> None:
    tree = {"l": [jnp.ones(2), (jnp.zeros(3),)], "p": Pair(jnp.ones(1), jnp.zeros(1)), "e": jnp.zeros((0, 3))}
    ours.AsyncCheckpointManager().save(tree, path / "c", LINE)
    expected = {"l": {"0": tree["l"][0], "1": {"0": tree["l"][1][0]}}, "p": tree["p"]._asdict(), "e": tree["e"]}
    read_by_eformer(path / "c", expected)


def check_eformer_reads_our_metadata(path: Path) -> None:
    ours.AsyncCheckpointManager().save(model(), path / "c", LINE, metadata={"epoch": 3})
    _, metadata = theirs.AsyncCheckpointManager().load(str(path / "c"), LINE)
    assert metadata["custom_metadata"] == {"epoch": 3}
    assert metadata["array_metadata"]["scale"] == {"shape": [], "dtype": "float32"}


OVERWRITERS: dict[str, Callable[[Any, Path, str | None], Any]] = {
    **WRITERS,
    "shardkeep.save": lambda tree, path, prefix: shardkeep.save(
        path, tree, format="zarr", prefix=prefix, overwrite=True
    ),
}


def smaller(seed: int) -> dict[str, Any]:
    """Fewer arrays than `model`, one of them where that has several."""
    return {"layers": jnp.arange(seed, seed + 6), "scale": jnp.bfloat16(seed)}


def check_eformer_reads_the_newest_of_trees_saved_over_each_other(path: Path) -> None:
    """Twice, three times, with fewer arrays, with more again, with other shapes and shardings."""
    for name, write in OVERWRITERS.items():
        for prefix in (None, "model", "a.b"):
            place = path / name / str(prefix)
            trees = (model(1), model(2), model(3), smaller(4), model(5), sharded(6), sharded(7), model(8))
            for tree in trees:
                write(tree, place, prefix)
                read_by_eformer(place, tree, prefix)
                read_by_us(place, tree, prefix)


def check_eformer_reads_the_newest_of_each_prefix(path: Path) -> None:
    for name, write in OVERWRITERS.items():
        place = path / name
        write(model(1), place, "a")
        write(model(2), place, "b")
        write(model(3), place, "a")
        read_by_eformer(place, model(2), "b")
        read_by_eformer(place, model(3), "a")
        write(smaller(4), place, "b")
        write(model(5), place, None)
        write(model(6), place, "a")
        write(smaller(7), place, None)
        for prefix, tree in (("a", model(6)), ("b", smaller(4)), (None, smaller(7))):
            read_by_eformer(place, tree, prefix)
            read_by_us(place, tree, prefix)


def check_eformer_reads_what_we_save_over_its_directory(path: Path) -> None:
    for name, write in OVERWRITERS.items():
        for prefix in (None, "model"):
            place = path / name / str(prefix)
            theirs.AsyncCheckpointManager().save(model(1), str(place), LINE, prefix=prefix)
            theirs.AsyncCheckpointManager().save(model(2), str(place), LINE, prefix="kept")
            for tree in (model(3), smaller(4), sharded(5)):
                write(tree, place, prefix)
                read_by_eformer(place, tree, prefix)
                read_by_us(place, tree, prefix)
                read_by_eformer(place, model(2), "kept")


def check_eformer_reads_what_we_save_over_its_structures(path: Path) -> None:
    theirs.AsyncCheckpointManager().save_pytree([model(1), (2, None)], str(path / "c"), LINE, prefix="state")
    for seed in (2, 3):
        ours.AsyncCheckpointManager().save_pytree([model(seed), (2, None)], path / "c", LINE, prefix="state")
        read_by_eformer(path / "c", {"0": model(seed)}, "state")
        assert not (path / "c" / "state_structure.json").exists(), "it describes the tree that was replaced"


def check_eformer_reads_what_lies_in_copies_where_links_are_impossible(path: Path) -> None:
    link = os.link

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    os.link = refuse
    try:
        for tree in (model(1), model(2), smaller(3), sharded(4)):
            OVERWRITERS["save"](tree, path / "c", "model")
            read_by_eformer(path / "c", tree, "model")
            read_by_us(path / "c", tree, "model")
    finally:
        os.link = link


def check_prefixes_that_share_names_are_never_mixed_up(path: Path) -> None:
    """`model` with a key `head`, and `model.head`: only one of them can have the names that eFormer would look for."""
    manager = ours.AsyncCheckpointManager()
    for seed in (1, 2, 3):
        manager.save({"head": model(seed), "w": jnp.ones(2)}, path / "c", LINE, prefix="model")
        manager.save(model(seed + 10), path / "c", LINE, prefix="model.head")
        read_by_eformer(path / "c", {"head": model(seed), "w": jnp.ones(2)}, "model")
        read_by_us(path / "c", {"head": model(seed), "w": jnp.ones(2)}, "model")
        read_by_us(path / "c", model(seed + 10), "model.head")
        refused(lambda: theirs.tree_deserialize_leaves(str(path / "c"), LINE, prefix="model.head"), "not found")


def check_eformer_does_not_see_a_tree_that_was_overwritten_in_a_bucket(path: Path) -> None:
    """Its index stays, and leaves the tree out."""
    with GCSServer() as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        try:
            manager = ours.AsyncCheckpointManager()
            for seed, prefix in ((1, "a"), (2, "b"), (3, "a")):
                manager.save(model(seed), "gs://bucket/c", LINE, prefix=prefix)
            index = json.loads(server.objects["bucket"]["c/tensorstore_index.json"].data)
            assert list(index["prefixes"]) == ["b"]
            same(manager.load("gs://bucket/c", None, prefix="a")[0], model(3))
        finally:
            del os.environ["STORAGE_EMULATOR_HOST"]


class Adam(NamedTuple):
    count: Any
    mu: Any
    nu: Any


def check_what_eformer_makes_of_an_optimizer_state_of_ours(path: Path) -> None:
    """As docs/migrating-from-eformer.md says: `load_pytree` finds no structure file, `load` gives dicts."""
    optimizer = (Adam(jnp.int32(3), model(1), model(2)), ())
    ours.AsyncCheckpointManager().save(model(0), path / "c", LINE, prefix="model")
    ours.AsyncCheckpointManager().save_pytree(optimizer, path / "c", LINE, prefix="tx", extras={"step": 3})
    manager = theirs.AsyncCheckpointManager()
    for more in ({}, {"template": optimizer}):
        refused(lambda more=more: manager.load_pytree(str(path / "c"), LINE, prefix="tx", **more), "Missing pytree_str")
    read_by_eformer(path / "c", {"0": {"count": jnp.int32(3), "mu": model(1), "nu": model(2)}}, "tx")
    state, extras = ours.AsyncCheckpointManager().load_pytree(path / "c", LINE, prefix="tx")
    manager.save(
        ours.AsyncCheckpointManager().load(path / "c", LINE, prefix="model")[0], str(path / "d"), LINE, prefix="model"
    )
    manager.save_pytree(state, str(path / "d"), LINE, prefix="tx", extras=extras)
    restored, again = manager.load_pytree(str(path / "d"), LINE, prefix="tx")
    assert jax.tree.structure(restored) == jax.tree.structure(optimizer)
    assert again == extras == {"step": 3}
    same(restored[0].nu, model(2))


def check_eformer_reads_a_tree_we_added_to_its_directory(path: Path) -> None:
    theirs.AsyncCheckpointManager().save(model(1), str(path / "c"), LINE, prefix="model")
    theirs.AsyncCheckpointManager().save_pytree({"pair": Pair(jnp.ones(2), 3)}, str(path / "c"), LINE, prefix="tree")
    ours.AsyncCheckpointManager().save(model(2), path / "c", LINE, prefix="more")
    for seed, prefix in ((1, "model"), (2, "more")):
        read_by_eformer(path / "c", model(seed), prefix)
        read_by_us(path / "c", model(seed), prefix)
    for manager in (theirs.AsyncCheckpointManager(), ours.AsyncCheckpointManager()):
        tree, _ = manager.load_pytree(str(path / "c"), LINE, prefix="tree")
        assert type(tree["pair"]) is Pair
        assert tree["pair"].right == 3
        same(tree["pair"].left, jnp.ones(2))


def check_what_eformer_writes_into_our_directory_is_not_mistaken_for_ours(path: Path) -> None:
    """Our manifest is the truth: a prefix it does not know is refused, and arrays written over fail their digest.

    Over uncompressed arrays eFormer refuses to write, because it wants zstd.
    """
    manager = ours.AsyncCheckpointManager(enable_compression=True)
    manager.save(model(1), path / "c", LINE, prefix="model")
    theirs.AsyncCheckpointManager().save(model(2), str(path / "c"), LINE, prefix="more")
    read_by_us(path / "c", model(1), "model")
    refused(lambda: manager.load(path / "c", None, prefix="more"), "no tree with prefix 'more'")
    theirs.AsyncCheckpointManager().save(model(2), str(path / "c"), LINE, prefix="model")
    refused(lambda: manager.load(path / "c", None, prefix="model"), "leaf")


def check_eformer_reads_our_safetensors_file(path: Path) -> None:
    manager = ours.AsyncCheckpointManager(use_tensorstore=False)
    manager.save(model(), path / "model.safetensors", LINE)
    loaded, _ = theirs.AsyncCheckpointManager(use_tensorstore=False).load(str(path / "model.safetensors"), LINE)
    same(loaded, model())


def check_we_read_a_plain_tree_of_eformers(path: Path) -> None:
    theirs.AsyncCheckpointManager().save(model(), str(path / "c"), LINE, metadata={"epoch": 3})
    read_by_us(path / "c", model())
    assert ours.AsyncCheckpointManager().load(path / "c", None)[1]["custom_metadata"] == {"epoch": 3}


def check_we_read_prefixed_trees_of_eformers(path: Path) -> None:
    for seed, prefix in ((1, "model"), (2, "optimizer"), (3, None)):
        theirs.AsyncCheckpointManager().save(model(seed), str(path / "c"), LINE, prefix=prefix)
    for seed, prefix in ((1, "model"), (2, "optimizer"), (3, None)):
        read_by_us(path / "c", model(seed), prefix)


def check_we_read_trees_of_eformers_from_eight_devices(path: Path) -> None:
    theirs.AsyncCheckpointManager().save(sharded(), str(path / "c"), GRID, prefix="model")
    read_by_us(path / "c", sharded(), "model")
    loaded, _ = ours.AsyncCheckpointManager().load(path / "c", GRID, partition_rules=[(".*", P("y"))])
    same(loaded, sharded())
    assert loaded["both"].sharding == NamedSharding(GRID, P("y"))


def check_we_read_every_dtype_of_eformers(path: Path) -> None:
    tree = {name: jnp.asarray(np.arange(6).reshape(2, 3) % 2).astype(name) for name in DTYPES}
    theirs.AsyncCheckpointManager().save(tree, str(path / "c"), LINE)
    read_by_us(path / "c", tree)


def check_we_read_leaves_of_eformers(path: Path) -> None:
    theirs.tree_serialize_leaves(str(path / "c"), sharded(), prefix="p")
    read_by_us(path / "c", sharded(), "p")


def check_we_validate_against_eformers_checksums(path: Path) -> None:
    theirs.AsyncCheckpointManager(enable_validation=True).save(model(), str(path / "c"), LINE)
    manager = ours.AsyncCheckpointManager()
    same(manager.load(path / "c", None, validate=True)[0], model())
    chunk = next(p for p in (path / "c" / "step").iterdir() if p.name == "0")
    other = next(p for p in (path / "c" / "layers/0/kernel").iterdir() if p.name == "0.0")
    other.write_bytes((path / "c" / "layers/1/kernel/0.0").read_bytes())
    refused(lambda: manager.load(path / "c", None, validate=True), "does not match the checksum")
    chunk.unlink()
    refused(lambda: manager.load(path / "c", None), "missing")


def check_we_read_structures_of_eformers(path: Path) -> None:
    tree = {
        "pair": Pair(on(np.arange(8.0, dtype=np.float32), LINE, "x"), None),
        "list": [jnp.ones(2), 3, ("text", 0.5, True)],
        "ints": {10: jnp.ones(1), 2: jnp.zeros(1)},
        "empty": {},
        "dense": Dense(jnp.ones(3), [None]),
        "keyed": Keyed(jnp.ones(3), 3, tag="plain"),
        "unkeyed": Unkeyed([jnp.ones(3), {"x": jnp.zeros(1)}], tag={"n": 1}),
        "ordered": OrderedDict(b=jnp.ones(3), a=1),
    }
    theirs.AsyncCheckpointManager().save_pytree(tree, str(path / "c"), LINE, prefix="p", extras={"step": 1})
    loaded, extras = ours.AsyncCheckpointManager().load_pytree(path / "c", None, prefix="p")
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    assert extras == {"step": 1}
    for found, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree), strict=True):
        if hasattr(expected, "dtype"):
            same(found, expected)
        else:
            assert (type(found), found) == (type(expected), expected)


def check_we_read_nested_prefixes_of_eformers(path: Path) -> None:
    """Its `save_pytree` takes dots only."""
    prefixes = ("a/b", "a.c", "a")
    for seed, prefix in enumerate(prefixes):
        theirs.AsyncCheckpointManager().save(model(seed), str(path / "c"), LINE, prefix=prefix)
        if "/" not in prefix:
            theirs.AsyncCheckpointManager().save_pytree([model(seed), (seed,)], str(path / "t"), LINE, prefix=prefix)
    for seed, prefix in enumerate(prefixes):
        read_by_us(path / "c", model(seed), prefix)
        if "/" not in prefix:
            tree, _ = ours.AsyncCheckpointManager().load_pytree(path / "t", None, prefix=prefix)
            same(tree[0], model(seed))
            assert tree[1] == (seed,)


def check_what_eformer_would_misread_is_not_in_its_index(path: Path) -> None:
    """Keys that it takes for one, and a prefix whose directory has another name."""
    manager = ours.AsyncCheckpointManager()
    manager.save({"a.b": jnp.ones(2), "a": {"b": jnp.zeros(3)}, "c.d": jnp.ones(1)}, path / "c", LINE)
    read_by_eformer(path / "c", {"c": {"d": jnp.ones(1)}})
    manager.save(model(), path / "p", LINE, prefix="odd:name")
    manager.save(model(), path / "p", LINE, prefix="plain")
    read_by_eformer(path / "p", model(), "plain")
    refused(lambda: theirs.tree_deserialize_leaves(str(path / "p"), LINE, prefix="odd:name"), "not found")


def check_we_read_safetensors_of_eformers(path: Path) -> None:
    tree = {**model(), "fp8": jnp.ones(3, jnp.float8_e4m3fn)}
    theirs.AsyncCheckpointManager(use_tensorstore=False).save(
        tree, str(path / "m.safetensors"), LINE, metadata={"n": 1}
    )
    loaded, metadata = ours.AsyncCheckpointManager().load(path / "m.safetensors", None)
    same(loaded, tree)
    assert metadata["custom_metadata"] == {"n": 1}


def check_we_take_eformers_paths(path: Path) -> None:
    manager = ours.AsyncCheckpointManager()
    manager.save(model(), ePath(str(path)) / "c", LINE)
    same(manager.load(ePath(str(path)) / "c", None)[0], model())
    ours.tree_serialize_leaves(ePath(str(path)) / "d", model())
    same(ours.tree_deserialize_leaves(ePath(str(path)) / "d", None), model())
    in_bucket = GCSPath("gs://bucket/x/y", storage.Client.create_anonymous_client())  # looks for no credentials
    assert our_utils.is_gcs_path(in_bucket)
    assert our_utils.parse_gcs_path(in_bucket) == ("bucket", "x/y")
    with GCSServer() as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        try:
            manager.save(model(), in_bucket, LINE)
            same(manager.load(in_bucket, None)[0], model())
        finally:
            del os.environ["STORAGE_EMULATOR_HOST"]
    assert not our_utils.is_gcs_path(ePath("/x"))


def train(kind: Any, base: Path, steps: Any) -> Any:
    """A loop with a Checkpointer of one of the two, as EasyDeL uses it: permanent checkpoints at even steps."""
    checkpointer = kind.Checkpointer(str(base), None, [kind.CheckpointInterval(every=2)])

    def save(destination: str, mesh: Any, metadata: dict[str, Any]) -> None:
        checkpointer.save_pytree(model(metadata["step"]), "model", destination=str(base / destination), mesh=mesh)

    for step in steps:
        checkpointer.on_step(LINE, step=step, true_callbacks=[save])
    checkpointer.wait_until_finished()
    return checkpointer


def check_each_checkpointer_finds_and_loads_the_runs_of_the_other(path: Path) -> None:
    for name, writer, reader in (("theirs", theirs, ours), ("ours", ours, theirs)):
        base = path / name
        train(writer, base, range(1, 6))
        assert sorted(each.name for each in base.iterdir()) == ["run-2", "run-4"]
        newest = str(base / "run-4")
        assert their_runs.find_latest_checkpoint(str(base)) == our_runs.find_latest_checkpoint(base) == newest
        assert their_runs._read_checkpoint_metadata(newest) == our_runs.read_checkpoint_metadata(newest)
        assert our_runs.read_checkpoint_metadata(newest)["step"] == 4
        checkpointer = reader.Checkpointer(str(base), None, [])
        same(checkpointer.load_checkpoint(LINE, prefix="model")[0], model(4))
        tree, metadata = checkpointer.load_pytree(LINE, prefix="model", discover_latest=True, load_treedef=False)
        same(tree, model(4))
        assert (metadata["step"], metadata["is_temporary"]) == (4, False)


def check_eformer_reads_the_trees_of_our_on_step(path: Path) -> None:
    """Its own `on_step` raises `TypeError` if it is given a tree (0.0.101)."""
    checkpointer = ours.Checkpointer(path, None, [ours.CheckpointInterval(every=1)])
    checkpointer.on_step(LINE, model(7), step=7)
    checkpointer.wait_until_finished()
    same(theirs.Checkpointer(str(path), None, []).load_checkpoint(LINE)[0], model(7))


def check_a_run_goes_on_with_either_checkpointer(path: Path) -> None:
    """There and back again, in one directory: each finds what the other saved last."""
    for number, kind in enumerate((theirs, ours, theirs, ours)):
        steps = range(4 * number + 1, 4 * number + 5)
        train(kind, path, steps)
        for each in (theirs, ours):
            tree, _ = each.Checkpointer(str(path), None, []).load_checkpoint(LINE, prefix="model")
            same(tree, model(steps[-1]))


def check_structures_of_eformers_checkpointer_are_loaded(path: Path) -> None:
    optimizer = (Adam(jnp.int32(3), model(1), model(2)), ())
    writer = theirs.Checkpointer(str(path), None, [])
    where = writer.save_pytree(optimizer, "tx", step=3, mesh=LINE, extras={"note": "x"})
    writer.save_pytree(model(0), "model", step=3, mesh=LINE)
    reader = ours.Checkpointer(path, None, [])
    for arguments in ({"path": where}, {"discover_latest": True}, {"path": where, "template": optimizer}):
        tree, metadata = reader.load_pytree(LINE, prefix="tx", **arguments)
        assert jax.tree.structure(tree) == jax.tree.structure(optimizer)
        same(tree[0].nu, model(2))
        assert metadata["step"] == 3
    same(reader.load_pytree(LINE, prefix="model", discover_latest=True, load_treedef=False)[0], model(0))


def check_temporary_runs_of_eformers_are_removed_by_our_checkpointer(path: Path) -> None:
    theirs.Checkpointer(str(path), None, []).save_pytree(model(1), "model", step=1, mesh=LINE, temporary=True)
    checkpointer = train(ours, path, [2])
    assert [each.name for each in path.iterdir()] == ["run-2"]
    checkpointer._queue_checkpoint_removal(path / "run-2")
    checkpointer.wait_until_finished()
    assert list(path.iterdir()) == []


def check_every_parameter_of_eformers_checkpointer_is_taken(path: Path) -> None:
    """With its default; but for those that the documentation names."""
    differing = {("on_step", "mesh"), ("load_pytree", "discover_latest"), ("load_pytree", "load_treedef")}
    for name in ("__init__", "on_step", "save_checkpoint", "load_checkpoint", "save_pytree", "load_pytree"):
        mine = inspect.signature(getattr(ours.Checkpointer, name)).parameters
        for parameter in inspect.signature(getattr(theirs.Checkpointer, name)).parameters.values():
            found = mine[parameter.name]
            assert found.kind == parameter.kind, (name, parameter.name)
            assert (found.default == parameter.default) != ((name, parameter.name) in differing), (name, parameter.name)


def check_every_name_of_eformers_has_its_parameters(path: Path) -> None:
    """In the same order with the same defaults; ours may have more at the end."""
    pairs = [
        (getattr(mine, name), getattr(other, name))
        for mine, other in ((our_leaves, their_leaves), (our_sharding, their_sharding), (our_utils, their_utils))
        for name, function in vars(other).items()
        if inspect.isfunction(function) and function.__module__ == other.__name__ and not name.startswith("_")
    ]
    for name in ("save", "save_tree", "save_pytree", "load", "load_pytree", "load_tree_parallel", "compute_checksum",
                 "is_tensorstore", "safe_loadpath", "__init__"):  # fmt: skip
        pairs.append((getattr(ours.AsyncCheckpointManager, name), getattr(theirs.AsyncCheckpointManager, name)))
    for mine, other in pairs:
        wanted = [(p.name, p.default, p.kind) for p in inspect.signature(other).parameters.values()]
        found = [(p.name, p.default, p.kind) for p in inspect.signature(mine).parameters.values()]
        assert found[: len(wanted)] == wanted, f"{mine.__name__}: {found} is not {wanted}"
    assert len(pairs) > 30


def check_key_paths_are_those_of_eformer(path: Path) -> None:
    trees = [model(), {"l": [1, (2, {"x": 3})], "p": Pair(1, {"y": 2})}, 3, {"a": None}, [], {5: 1, 10: 2}]
    for tree in trees:
        for prefix in ("", None, "m"):
            for is_leaf in (None, lambda x: x is None):
                mine = our_leaves.leaf_key_paths(tree, prefix, is_leaf=is_leaf)
                assert mine == their_leaves.leaf_key_paths(tree, prefix, is_leaf=is_leaf)


def check_file_names_are_those_of_eformer(path: Path) -> None:
    for name in ("/x/m.safetensors", "m.safetensors.index.json", "gs://b/m-00001-of-00004.safetensors", "m", "a.b"):
        assert our_utils.derive_base_prefix_from_path(name) == their_utils.derive_base_prefix_from_path(name)
    assert our_utils.shard_filename("m", 3, 12) == their_utils.shard_filename("m", 3, 12)
    assert our_utils.index_filename("m") == their_utils.index_filename("m")
    array = on(np.arange(8.0, dtype=np.float32), LINE, "x")
    checksum = theirs.AsyncCheckpointManager.compute_checksum(array)
    assert ours.AsyncCheckpointManager.compute_checksum(array) == checksum


def check_our_index_says_what_eformers_does(path: Path) -> None:
    """The same entries for the same tree."""
    theirs.AsyncCheckpointManager().save(model(), str(path / "theirs"), LINE, prefix="m")
    ours.AsyncCheckpointManager().save(model(), path / "ours", LINE, prefix="m")
    read = [json.loads((path / who / "tensorstore_index.json").read_text()) for who in ("theirs", "ours")]
    entries = [sorted(index["prefixes"]["m"], key=lambda entry: entry["path"]) for index in read]
    assert entries[0] == entries[1]


def refused(call: Callable[[], Any], text: str) -> None:
    """The call raises one of the errors a caller expects, and says this."""
    said = None
    try:
        call()
    except (ValueError, OSError, KeyError) as error:
        said = str(error)
    assert said is not None, f"not refused, though it should be with: {text}"
    assert text in said, f"refused, but with: {said}"


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return run_checks(globals())


if __name__ == "__main__":
    sys.exit(main())
