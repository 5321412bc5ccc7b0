"""`convert`: any kind into either format, nothing lost, in bounded memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax as optax  # its states are in a fixture: known, they are rebuilt as what they were
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from cli.commands import FIXTURES, GOLDEN, Run, data_file, environment, flip
from cli.trees import HF_TENSORS, rich_tree, save_like_hugging_face
from shardkeep.serialization import AsyncCheckpointManager
from support import FORMATS, assert_same, mesh_of, save_as

TARGETS: dict[str, tuple[str, list[str]]] = {
    "safetensors": ("d", []),
    "tensorstore": ("d", ["--format", "zarr"]),
    "zstd": ("d", ["--format", "zarr", "--compression", "zstd"]),
    "exchange": ("d.safetensors", []),
    "shards": ("d.safetensors", ["--max-shard-size", "1MB"]),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_kind_converts_to_every_kind(run: Run, tmp_path: Path, kind: str, target: str) -> None:
    metadata = {"step": 3, "nested": {"a": [1, None]}}
    tree = rich_tree()
    spread = tree["layers"][0]["kernel"].sharding  # and more than is stored as one piece
    tree["layers"][0]["kernel"] = jax.device_put(np.arange(2304 << 10, dtype=np.float32).reshape(-1, 1024), spread)
    source = save_as(kind, tmp_path / "s", tree, metadata=metadata)
    name, words = TARGETS[target]
    result = run("convert", source, tmp_path / name, *words)
    assert result.code == 0, result.err
    before, after = shardkeep.inspect(source), shardkeep.inspect(tmp_path / name)
    assert after.metadata == metadata
    assert_same(shardkeep.load(tmp_path / name), shardkeep.load(source))
    assert shardkeep.verify(tmp_path / name)
    for key, leaf in before.leaves.items():
        assert getattr(after.leaves[key], "origin", None) == getattr(leaf, "origin", None)
    pieces = len(after.leaves["layers/0/kernel"].pieces)
    assert pieces == (1 if target in ("exchange", "shards") or kind in ("exchange", "shards") else 8)
    assert list(tmp_path.glob(".*")) == []  # nothing hidden is left


def test_exchange_files_are_what_other_programs_read(run: Run, tmp_path: Path) -> None:
    tree = {"layers": [{"w": rich_tree()["layers"][0]["kernel"]}], "bias": jnp.ones(3, jnp.bfloat16)}
    shardkeep.save(tmp_path / "c", tree)
    assert run("convert", tmp_path / "c", tmp_path / "model.safetensors").code == 0
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:  # pyright: ignore[reportUnknownVariableType]
        opened: Any = file
        assert opened.metadata()["format"] == "pt"
        assert sorted(opened.keys()) == ["bias", "layers.0.w"]
        np.testing.assert_array_equal(opened.get_tensor("layers.0.w"), np.asarray(tree["layers"][0]["w"]))


def test_dtype_casts_floats_only(run: Run, tmp_path: Path) -> None:
    tree = rich_tree()
    shardkeep.save(tmp_path / "c", tree)
    document = run.document("convert", tmp_path / "c", tmp_path / "d", "--dtype", "bfloat16")
    assert document["trees"][0]["cast"] == 9
    after = shardkeep.load(tmp_path / "d")
    expected = np.asarray(tree["layers"][0]["kernel"]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(after["layers"][0]["kernel"]), expected)
    assert after["wide"].dtype == ml_dtypes.bfloat16
    assert after["fp8"].dtype == jnp.bfloat16
    for name in ("int4", "complex", "flags", "long", "times", "big_endian"):
        assert after[name].dtype == tree[name].dtype, name
    assert_same(after["keys"], tree["keys"])
    assert after["rate"] == 0.1
    assert isinstance(after["scalar"], jax.Array)


def test_numbers_lost_to_a_cast_are_told_and_integers_must_fit(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"w": np.array([1.0, 1e6, np.inf], np.float32), "n": np.array([300])})
    result = run("convert", tmp_path / "c", tmp_path / "d", "--dtype", "float16")
    assert result.code == 0
    assert "w: 1 value became infinite or NaN as float16" in result.out
    refused = run("convert", tmp_path / "c", tmp_path / "e", "--dtype", "int8")
    assert refused.code == 2
    assert "'n' holds 300 to 300, which does not fit int8" in refused.err
    assert not shardkeep.exists(tmp_path / "e")
    assert run("convert", tmp_path / "c", tmp_path / "f", "--dtype", "int16").code == 0
    assert shardkeep.load(tmp_path / "f")["n"].dtype == np.int16


def test_narrow_and_big_endian_integers_are_cast(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"narrow": jnp.arange(-8, 8).astype(jnp.int4), "big": np.arange(3, dtype=">i4")})
    assert run("convert", tmp_path / "c", tmp_path / "d", "--dtype", "int16").code == 0
    after = shardkeep.load(tmp_path / "d")
    assert after["narrow"].tolist() == list(range(-8, 8))
    assert_same(after["big"], np.arange(3, dtype=np.int16))


def test_match_keeps_some_leaves(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", rich_tree())
    assert run("convert", tmp_path / "c", tmp_path / "d", "--include", "layers/1|step").code == 0
    expected = shardkeep.load(tmp_path / "c", include="layers/1|step")
    assert_same(shardkeep.load(tmp_path / "d"), expected)
    assert run("convert", tmp_path / "c", tmp_path / "e", "--include", "zzz").code == 2


def test_all_prefixes_or_one(run: Run, tmp_path: Path) -> None:
    for number, prefix in enumerate(("model", "ema")):
        shardkeep.save(tmp_path / "c", {"w": jnp.full(3, number), "n": number}, prefix=prefix, metadata={"p": prefix})
    assert run("convert", tmp_path / "c", tmp_path / "d", "--format", "zarr").code == 0
    manifest = shardkeep.inspect(tmp_path / "d")
    assert manifest.prefixes == ["model", "ema"]
    assert manifest.trees["ema"].metadata == {"p": "ema"}
    refused = run("convert", tmp_path / "c", tmp_path / "m.safetensors")
    assert refused.code == 2
    assert "--prefix" in refused.err
    assert run("convert", tmp_path / "c", tmp_path / "m.safetensors", "--prefix", "ema").code == 0
    assert shardkeep.load(tmp_path / "m.safetensors")["n"] == 1


def test_what_is_there_is_kept_unless_told_otherwise(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"w": np.ones(3)})
    shardkeep.save(tmp_path / "d", {"old": np.zeros(3)})
    refused = run("convert", tmp_path / "c", tmp_path / "d")
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert list(shardkeep.load(tmp_path / "d")) == ["old"]
    assert run("convert", tmp_path / "c", tmp_path / "d", "--overwrite").code == 0
    assert list(shardkeep.load(tmp_path / "d")) == ["w"]


@pytest.mark.parametrize("target", ["c", "c.safetensors"])
def test_a_checkpoint_can_be_converted_in_place(run: Run, tmp_path: Path, target: str) -> None:
    array = np.arange(1_000_000, dtype=np.float32)
    shardkeep.save(tmp_path / target, {"w": array})
    assert run("convert", tmp_path / target, tmp_path / target, "--overwrite").code == 0
    np.testing.assert_array_equal(shardkeep.load(tmp_path / target)["w"], array)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compression", "zstd"], "needs --format zarr"),
        (["--dtype", "float99"], "--dtype float99"),
        (["--max-shard-size", "1MB"], "--max-shard-size"),
        (["--include", "("], "not a valid regular expression"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path, words: list[str], message: str
) -> None:
    shardkeep.save(tmp_path / "c", {"w": np.ones(3)})
    result = run("convert", tmp_path / "c", tmp_path / "d", *words)
    assert result.code == 2
    assert message in result.err
    assert not (tmp_path / "d").exists()
    assert run("convert", tmp_path / "c", tmp_path / "d.safetensors", "--format", "zarr").code == 2


@pytest.mark.parametrize("kind", ["safetensors", "zstd"])
def test_damage_is_never_carried_over(run: Run, tmp_path: Path, kind: str) -> None:
    source = save_as(kind, tmp_path / "c", {"w": np.random.default_rng(0).normal(size=600_000)})
    flip(data_file(source) if kind == "safetensors" else source / "w" / "0")
    result = run("convert", source, tmp_path / "d")
    assert result.code == 2
    assert "leaf 'w'" in result.err
    assert not shardkeep.exists(tmp_path / "d")


def test_eformer_checkpoints_convert(run: Run, tmp_path: Path) -> None:
    for name in ("ts_dtypes", "ts_two_prefixes", "pytree_builtins", "pytree_optax", "pytree_sharded_2x4"):
        source = FIXTURES / name / "ckpt"
        assert run("convert", source, tmp_path / name).code == 0, name
        for prefix in shardkeep.inspect(source).prefixes:
            expected = shardkeep.load(source, prefix=prefix)
            assert_same(shardkeep.load(tmp_path / name, prefix=prefix), expected)
        assert run.document("verify", tmp_path / name)["unchecked"] == 0


def test_hugging_face_directories_convert_there_and_back(run: Run, tmp_path: Path) -> None:
    source = save_like_hugging_face(tmp_path / "hf", HF_TENSORS)
    assert run("convert", source, tmp_path / "ours").code == 0
    assert run("convert", tmp_path / "ours", tmp_path / "back.safetensors").code == 0
    back = safetensors.numpy.load_file(tmp_path / "back.safetensors")
    assert back.keys() == HF_TENSORS.keys()
    for name, tensor in HF_TENSORS.items():
        np.testing.assert_array_equal(back[name], tensor)
    assert run("diff", source, tmp_path / "back.safetensors").code == 0


@pytest.mark.parametrize("name", ["bare", "safetensors", "sharded", "single", "tensorstore", "zstd"])
def test_golden_checkpoints_convert(run: Run, tmp_path: Path, name: str) -> None:
    assert run("convert", GOLDEN / name, tmp_path / "d", "--format", "zarr").code == 0
    assert run("diff", GOLDEN / name, tmp_path / "d", "--values").code == 0


def test_recorded_checksums_of_changed_arrays_are_not_kept(run: Run, tmp_path: Path) -> None:
    """The eFormer API would refuse to load what does not match them."""
    manager = AsyncCheckpointManager(enable_validation=True)
    manager.save({"w": jnp.ones(3), "n": jnp.arange(3)}, str(tmp_path / "c"))
    assert run("convert", tmp_path / "c", tmp_path / "d", "--dtype", "bfloat16").code == 0
    metadata = shardkeep.inspect(tmp_path / "d").metadata
    assert list(metadata["checksum"]) == ["n"]
    assert metadata["array_metadata"]["w"]["dtype"] == "bfloat16"
    loaded, _ = manager.load(str(tmp_path / "d"), mesh_of(1), validate=True)
    assert loaded["w"].dtype == jnp.bfloat16


MEASURE = """
import json, sys, threading
import numpy as np
from shardkeep.cli import converting  # so that importing is not measured
from shardkeep.cli.main import main

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

before, most, done = anonymous(), 0, threading.Event()
def watch():
    global most
    while not done.wait(0.002):
        most = max(most, anonymous())
thread = threading.Thread(target=watch)
thread.start()
code = main(sys.argv[1:])
done.set()
thread.join()
print(json.dumps([code, most - before]), file=sys.stderr)
"""


@pytest.mark.parametrize("words", [["d"], ["d.safetensors"], ["d", "--dtype", "bfloat16"]])
def test_memory_stays_bounded(tmp_path: Path, words: list[str]) -> None:
    """192 MiB in one sharded array; pages of mapped files do not count, the system can take them back."""
    array = np.arange(48 << 20, dtype=np.float32).reshape(8192, 6144)
    spread = jax.device_put(array, NamedSharding(mesh_of(4, 2), PartitionSpec("b", "a")))
    shardkeep.save(tmp_path / "c", {"w": spread})
    words = ["convert", str(tmp_path / "c"), str(tmp_path / words[0]), *words[1:]]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    code, grown = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    assert grown < 120 << 20
