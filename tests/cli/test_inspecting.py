"""`inspect`: the tree as it is stored."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from cli.commands import FIXTURES, GOLDEN, Run
from cli.trees import HF_TENSORS, rich_tree, save_like_hugging_face
from shardkeep.cli.output import short
from support import FORMATS, save_as


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shardkeep.save(tmp_path / "c", rich_tree(), metadata={"loss": 0.5, "who": "é"})
    return tmp_path / "c"


def leaves(document: Any) -> dict[str, Any]:
    return {leaf["key"]: leaf for tree in document["trees"] for leaf in tree["leaves"]}


def test_the_tree_is_shown_with_shapes_bytes_pieces_and_metadata(run: Run, checkpoint: Path) -> None:
    lines = run("inspect", checkpoint).out.splitlines()
    assert lines[0].startswith(f"{checkpoint}: 26 leaves, ")
    assert "  metadata:" in lines
    assert '    who: "é"' in lines
    assert "  layers" in lines
    kernel = next(line for line in lines if line.strip().startswith("kernel"))
    assert " ".join(kernel.split()) == "kernel float32[512,640] 1.3 MB 8 pieces, P(a, b) on a=4 b=2"
    assert any(re.fullmatch(r"  keys +key<\w+>\[3\] +24 B", line) for line in lines)
    assert any(line.split()[:2] == ["step", "100"] for line in lines)


@pytest.mark.parametrize("kind", FORMATS)
def test_json_tells_every_leaf(run: Run, tmp_path: Path, kind: str) -> None:
    path = save_as(kind, tmp_path / "c", rich_tree())
    found = leaves(run.document("inspect", path))
    manifest = shardkeep.inspect(path)
    assert list(found) == list(manifest.leaves)
    kernel = found["layers/0/kernel"]
    assert (kernel["dtype"], kernel["shape"], kernel["bytes"]) == ("float32", [512, 640], 512 * 640 * 4)
    assert kernel["sharding"] == {"spec": ["a", "b"], "mesh": {"a": 4, "b": 2}}
    assert len(kernel["pieces"]) == len(manifest.leaves["layers/0/kernel"].pieces)
    assert found["keys"]["dtype"].startswith("key<")
    assert found["keys"]["shape"] == [3]
    assert found["step"] == {"key": "step", "path": ["step"], "kind": "value", "type": "int", "value": 100}
    assert found["ordered/a"]["value"] == "b'x'"


def test_depth_folds_what_lies_deeper(run: Run, checkpoint: Path) -> None:
    out = run("inspect", checkpoint, "--depth", "1").out
    line = next(line for line in out.splitlines() if line.strip().startswith("layers"))
    assert line.split() == ["layers/…", "4", "leaves", "2.6", "MB"]
    (tree,) = run.document("inspect", checkpoint, "--depth", "2")["trees"]
    folded = {"/".join(one["path"]): one["leaves"] for one in tree["folded"]}
    assert folded == {"layers/0": 2, "layers/1": 2, "pair/1": 2}
    assert sum(folded.values()) + len(tree["leaves"]) == 26


def test_sort_orders_siblings(run: Run, checkpoint: Path) -> None:
    by_size = list(leaves(run.document("inspect", checkpoint, "--sort", "size")))
    assert by_size[:2] == ["layers/0/kernel", "layers/0/bias"]
    by_name = list(leaves(run.document("inspect", checkpoint, "--sort", "name")))
    assert by_name[0] == "big_endian"
    assert next(iter(leaves(run.document("inspect", checkpoint)))) == "layers/0/kernel"


def test_include_and_prefix_choose(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path, {"a": {"w": np.ones(2)}, "b": 1}, prefix="x")
    shardkeep.save(tmp_path, {"c": 1}, prefix="y")
    document = run.document("inspect", tmp_path, "--prefix", "x", "--include", "a/w")
    assert [tree["prefix"] for tree in document["trees"]] == ["x"]
    assert list(leaves(document)) == ["a/w"]
    assert list(leaves(run.document("inspect", tmp_path))) == ["a/w", "b", "c"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--include", "zzz"], "matches no leaf"),
        (["--include", "("], "not a valid regular expression"),
        (["--prefix", "zzz"], "has no tree with prefix 'zzz'"),
    ],
)
def test_what_is_not_there_is_an_error(run: Run, checkpoint: Path, words: list[str], message: str) -> None:
    result = run("inspect", checkpoint, *words)
    assert result.code == 2
    assert message in result.err


def test_a_bare_leaf_has_no_name(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", np.ones(3))
    assert "(the tree itself)  float64[3]" in run("inspect", tmp_path / "c").out


def test_other_programs_files(run: Run, tmp_path: Path) -> None:
    directory = save_like_hugging_face(tmp_path / "hf", HF_TENSORS)
    found = leaves(run.document("inspect", directory))
    assert {key: leaf["shape"] for key, leaf in found.items()} == {
        k.replace(".", "/"): list(v.shape) for k, v in HF_TENSORS.items()
    }
    assert not any(leaf["digests"] for leaf in found.values())
    eformer = leaves(run.document("inspect", FIXTURES / "ts_dtypes" / "ckpt"))
    assert eformer["bfloat16"]["kind"] == "zarr"
    assert eformer["bfloat16"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["bare", "safetensors", "sharded", "single", "tensorstore", "zstd"])
def test_golden_checkpoints_can_be_inspected(run: Run, name: str) -> None:
    assert run("inspect", GOLDEN / name).code == 0
    assert leaves(run.document("inspect", GOLDEN / name))


def test_a_long_plain_value_does_not_move_the_columns_of_arrays(run: Run, tmp_path: Path) -> None:
    """The state of a data iterator is often bytes, and they may be many."""
    tree = {"w": np.ones((2, 3)), "iterator": b"\x80\x04" * 50_000, "note": "n" * 59, "deep": {"bias": np.ones(3)}}
    shardkeep.save(tmp_path / "c", tree)
    lines = run("inspect", tmp_path / "c").out.splitlines()
    assert lines[3:] == [
        "  w         float64[2,3]  48 B  numpy",
        r"  iterator  b'\x80\x04\x80\x04\x80\x04\x80\x… (100,000 bytes)",
        f"  note      {short('n' * 59)}",
        "  deep",
        "    bias    float64[3]    24 B  numpy",
    ]


def test_an_empty_key_is_shown_as_such(run: Run, tmp_path: Path) -> None:
    """Only a tree that is a single leaf is called "(the tree itself)"."""
    shardkeep.save(tmp_path / "c", {"": np.ones(3), "a": {"": 1, "b/c": 2}})
    lines = run("inspect", tmp_path / "c").out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["''", "a", "''", r"b\/c"]
    found = leaves(run.document("inspect", tmp_path / "c"))
    assert [leaf["path"] for leaf in found.values()] == [[""], ["a", ""], ["a", "b/c"]]


def test_metadata_that_json_lacks_becomes_text(run: Run, tmp_path: Path) -> None:
    """What another program wrote into its files may say NaN."""
    shutil.copytree(FIXTURES / "ts_plain" / "ckpt", tmp_path / "c")
    document = json.loads((tmp_path / "c" / "checkpoint_metadata.json").read_text())
    document["custom_metadata"] = {"loss": float("nan"), "all": [float("-inf"), 1.5]}
    (tmp_path / "c" / "checkpoint_metadata.json").write_text(json.dumps(document))
    (tree,) = run.document("inspect", tmp_path / "c")["trees"]
    assert tree["metadata"]["custom_metadata"] == {"loss": "nan", "all": ["-inf", 1.5]}
