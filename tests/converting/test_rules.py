"""`convert --remap` writes a changed tree, in bounded memory, and refuses rules that it cannot apply."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import shardkeep
from cli.commands import Run
from shardkeep import remap
from shardkeep.eformer.manager import AsyncCheckpointManager
from support import FORMATS, assert_same, run_python, save_as

RULES = [
    remap.stack("layers/{i}/(.*)", r"layers/\1"),
    remap.split("layers/qkv", ["layers/q", "layers/k"], sizes=[2, 4]),
    remap.transpose("layers/q", (2, 0, 1)),
    remap.resize("head", 0, size=6, fill=1),
]


@pytest.fixture
def tree() -> Any:
    layers = [{"qkv": jnp.arange(24.0).reshape(4, 6) + i, "w": np.full(3, i, np.int32)} for i in range(3)]
    return {"layers": layers, "head": jnp.ones((4, 3), jnp.bfloat16), "step": 7}


def rules_file(tmp_path: Path, rules: Any = RULES) -> str:
    path = tmp_path / "rules.json"
    path.write_text(rules if isinstance(rules, str) else json.dumps(remap.to_json(rules)))
    return str(path)


@pytest.mark.parametrize("kind", ["safetensors", "zstd", "exchange"])
@pytest.mark.parametrize("to", [("--format", "zarr"), ("--format", "safetensors"), ("--dtype", "float16")])
def test_what_is_written_is_what_load_gives(
    kind: str, to: tuple[str, str], tree: Any, tmp_path: Path, run: Run
) -> None:
    source = save_as(kind, tmp_path / "source", tree)
    assert kind in FORMATS
    done = run("convert", str(source), str(tmp_path / "to"), "--remap", rules_file(tmp_path), *to)
    assert done.code == 0, done
    expected = shardkeep.load(source, remap=RULES)
    found = shardkeep.load(tmp_path / "to", template=expected if to[0] == "--format" else None)
    if to[0] == "--format":
        assert_same(found, expected)
    else:
        assert found["layers"]["q"].dtype == jnp.float16
        assert np.array_equal(found["layers"]["q"], expected["layers"]["q"])
        assert found["layers"]["w"].dtype == np.int32
    assert shardkeep.verify(tmp_path / "to").ok


def test_the_inverse_restores_the_checkpoint(tree: Any, tmp_path: Path, run: Run) -> None:
    shardkeep.save(tmp_path / "a", tree)
    plan = shardkeep.plan_load(tmp_path / "a", remap=RULES)
    assert run("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--remap", rules_file(tmp_path)).code == 0
    back = rules_file(tmp_path, plan.inverse())
    assert run("convert", str(tmp_path / "b"), str(tmp_path / "c"), "--remap", back).code == 0
    assert_same(shardkeep.load(tmp_path / "c", template=tree), tree)


def test_it_follows_the_other_choices(tree: Any, tmp_path: Path, run: Run) -> None:
    shardkeep.save(tmp_path / "a", {"model": tree})
    options = ["--subtree", "model", "--rename", "head=lm", "--include", "head|layers"]
    file = rules_file(tmp_path, [remap.rename("lm", "x"), remap.drop("layers/.*/w")])
    assert run("convert", str(tmp_path / "a"), str(tmp_path / "b"), *options, "--remap", file).code == 0
    assert set(shardkeep.inspect(tmp_path / "b").leaves) == {"x", *(f"layers/{i}/qkv" for i in range(3))}


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ("{", "Expecting property name"),
        ("[3]", "3 is not a rule"),
        ([remap.rename("nothing", "x")], "remap.rename('nothing', 'x'): it matches no leaf"),
        ([remap.resize("head", fill="keep", size=9)], 'fill="keep" needs a template'),
        ([remap.resize("head")], "no template gives its size"),
        ([remap.rename("head", "layers")], "which contains 'layers/0/"),
    ],
)
def test_rules_that_cannot_be_applied_are_said_and_nothing_is_written(
    rules: Any, problem: str, tree: Any, tmp_path: Path, run: Run
) -> None:
    shardkeep.save(tmp_path / "a", tree)
    done = run("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--remap", rules_file(tmp_path, rules))
    assert done.code == 2
    assert problem in done.err
    assert not (tmp_path / "b").exists()
    missing = run("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--remap", str(tmp_path / "none.json"))
    assert "No such file" in missing.err


def test_one_tree_is_changed_at_a_time(tree: Any, tmp_path: Path, run: Run) -> None:
    shardkeep.save(tmp_path / "a", tree, trees={"ema": tree})
    file = rules_file(tmp_path)
    done = run("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--remap", file)
    assert "--remap changes one tree, and there are several ((no prefix), ema): choose one with --prefix" in done.err
    assert run("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--prefix", "ema", "--remap", file).code == 0


def test_metadata_follows_only_if_eformers_manager_recorded_it(tmp_path: Path, run: Run) -> None:
    tree = {"a": jnp.ones(3), "b": jnp.zeros(3), "c": jnp.full(3, 2.0)}
    rules = rules_file(tmp_path, [remap.rename("a", "x"), remap.reshape("b", (3, 1))])
    own = {"checksum": {"a": 1, "other": 2}}
    shardkeep.save(tmp_path / "ours", tree, metadata=own)
    AsyncCheckpointManager(enable_validation=True).save(tree, str(tmp_path / "theirs"))
    for name in ("ours", "theirs"):
        assert run("convert", str(tmp_path / name), str(tmp_path / f"{name}-2"), "--remap", rules).code == 0
    assert shardkeep.inspect(tmp_path / "ours-2").metadata == own
    before, after = (shardkeep.inspect(tmp_path / name).metadata for name in ("theirs", "theirs-2"))
    assert after["checksum"] == {"x": before["checksum"]["a"], "c": before["checksum"]["c"]}
    assert after["array_metadata"]["b"] == {"shape": [3, 1], "dtype": "float32"}


MEMORY = """
from shardkeep.cli.main import main
def most():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))
import threading, json
seen, over = [most()], threading.Event()
def watch():
    while not over.wait(0.002):
        seen.append(most())
thread = threading.Thread(target=watch)
thread.start()
code = main(["convert", {source!r}, {to!r}, "--remap", {rules!r}])
over.set()
thread.join()
print(json.dumps([code, max(seen) - seen[0]]))
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """192 MiB are stacked and transposed, and far less is held in memory that cannot be evicted."""
    shardkeep.save(tmp_path / "a", {str(i): np.full((4096, 4096), i, ml_dtypes.bfloat16) for i in range(6)})
    file = rules_file(tmp_path, [remap.stack("{i}", "x"), remap.transpose("x", (2, 0, 1))])
    program = MEMORY.format(source=str(tmp_path / "a"), to=str(tmp_path / "b"), rules=file)
    code, held = json.loads(run_python(program).splitlines()[-1])
    assert code == 0
    assert held < 96 << 20
    x = shardkeep.load(tmp_path / "b")["x"]
    assert np.array_equal(np.asarray(x[0, :, 0], np.float32), np.arange(6))
