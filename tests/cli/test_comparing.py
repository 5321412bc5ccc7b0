"""`diff`: what two checkpoints do not have in common."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from cli.commands import FIXTURES, Run, data_file, flip
from cli.trees import HF_TENSORS, rich_tree, save_like_hugging_face
from support import FORMATS, mesh_of, save_as


def save_two(tmp_path: Path, a: Any, b: Any) -> tuple[Path, Path]:
    shardkeep.save(tmp_path / "a", a)
    shardkeep.save(tmp_path / "b", b)
    return tmp_path / "a", tmp_path / "b"


def compared(run: Run, *words: object) -> dict[str, Any]:
    (tree,) = run.document("diff", *words)["trees"]
    return {leaf["key"]: leaf for leaf in tree["leaves"]}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("values", [[], ["--values"], ["--no-values"]])
def test_the_same_tree_in_any_format_is_equal(run: Run, tmp_path: Path, kind: str, values: list[str]) -> None:
    shardkeep.save(tmp_path / "a", rich_tree())
    b = save_as(kind, tmp_path / "b", rich_tree())
    result = run("diff", tmp_path / "a", b, *values)
    assert result.code == 0, result.out
    assert result.out.endswith("no differences found\n")
    found = compared(run, tmp_path / "a", b, *values)
    how = {leaf["compared_by"] for leaf in found.values()}
    assert how <= {"digests", "read", "value", "not_compared"}
    if values == ["--values"]:
        assert how == {"read", "value"}
    if values == ["--no-values"]:
        assert "read" not in how
        # Pieces that were put together have other digests: nothing can be said, and that is said.
        apart = kind != "safetensors"
        assert found["layers/0/kernel"]["equal"] is (None if apart else True)
        assert ("not compared" in result.out) == apart


def test_equal_digests_are_not_read_and_that_is_said(run: Run, tmp_path: Path) -> None:
    a, b = save_two(tmp_path, {"w": np.ones(64), "n": 1}, {"w": np.ones(64), "n": 1})
    flip(data_file(b))  # nobody looks at it
    result = run("diff", a, b)
    assert result.code == 0
    assert "1 by digest, not read" in result.out
    damaged = run("diff", a, b, "--values")
    assert damaged.code == 2
    assert "damaged" in damaged.err


def test_changes_are_measured(run: Run, tmp_path: Path) -> None:
    w = np.zeros(100, np.float32)
    changed = w.copy()
    changed[:25] = 0.5
    changed[0] = -2
    changed[1] = np.nan
    a, b = save_two(tmp_path, {"w": w, "same": w, "s": 1, "t": "x"}, {"w": changed, "same": w, "s": 2, "t": "x"})
    result = run("diff", a, b)
    assert result.code == 1
    assert "25 of 100 changed (25.00%), max |Δ| 2, NaN 0 → 1" in result.out
    assert "1 → 2" in result.out
    found = compared(run, a, b)
    assert found["w"]["differs_in"] == ["values"]
    assert found["w"]["changed_fraction"] == 0.25
    assert found["w"]["max_abs_difference"] == 2.0
    assert (found["w"]["nan_a"], found["w"]["nan_b"]) == (0, 1)
    assert found["same"]["equal"] is True
    assert found["s"]["differs_in"] == ["values"]
    by_digest = run("diff", a, b, "--no-values")
    assert by_digest.code == 1
    assert "values differ (by digest)" in by_digest.out


def test_structure_shapes_and_dtypes(run: Run, tmp_path: Path) -> None:
    a, b = save_two(
        tmp_path,
        {"shape": np.ones((2, 3)), "dtype": np.ones(3, np.float32), "kind": 1, "mine": 1, "key": jax.random.key(0)},
        {"shape": np.ones((3, 2)), "dtype": np.ones(3), "kind": np.ones(()), "yours": 1, "key": np.zeros(2, np.uint32)},
    )
    document = run.document("diff", a, b)
    (tree,) = document["trees"]
    assert document["equal"] is False
    assert (tree["only_in_a"], tree["only_in_b"]) == (["mine"], ["yours"])
    reasons = {leaf["key"]: leaf["differs_in"] for leaf in tree["leaves"]}
    assert reasons == {"shape": ["shape"], "dtype": ["dtype"], "kind": ["kind"], "key": ["kind"]}
    text = run("diff", a, b).out
    assert "only in A: mine" in text
    assert "only in B: yours" in text
    assert "float64[2,3] → float64[3,2]" in text
    assert "values equal" in text  # float32 and float64 ones


def test_other_containers_are_a_difference(run: Run, tmp_path: Path) -> None:
    a, b = save_two(tmp_path, {"x": [1, 2], "y": 1}, {"x": {"0": 1, "1": 2}, "y": 1})
    result = run("diff", a, b)
    assert result.code == 1
    assert "their containers differ" in result.out
    assert run("diff", a, b, "--include", "y").code == 0


def test_the_sign_of_zero_is_mentioned_but_equal(run: Run, tmp_path: Path) -> None:
    a, b = save_two(tmp_path, {"w": np.array([0.0])}, {"w": np.array([-0.0])})
    result = run("diff", a, b)
    assert result.code == 0
    assert "but not bit-identical" in result.out
    assert compared(run, a, b)["w"]["same_bits"] is False


def test_the_same_array_in_other_pieces_is_read_and_equal(run: Run, tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(2304, 1024)).astype(np.float32)
    for name, spec in (("a", PartitionSpec("a", None)), ("b", PartitionSpec(None, "b"))):
        spread = jax.device_put(array, NamedSharding(mesh_of(4, 2), spec))
        shardkeep.save(tmp_path / name, {"w": spread}, format="zarr", compression="zstd")
    found = compared(run, tmp_path / "a", tmp_path / "b")
    assert found["w"]["compared_by"] == "read"
    assert found["w"]["equal"] is True


def test_prefixes(run: Run, tmp_path: Path) -> None:
    for path, prefixes in ((tmp_path / "a", ("x", "y")), (tmp_path / "b", ("x", "z"))):
        for prefix in prefixes:
            shardkeep.save(path, {"w": jnp.ones(3), "p": "v"}, prefix=prefix)
    document = run("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert document.code == 1
    assert document.document["trees_only_in_a"] == ["y"]
    assert document.document["trees_only_in_b"] == ["z"]
    assert run("diff", tmp_path / "a", tmp_path / "b", "--prefix", "x").code == 0
    assert run("diff", tmp_path / "a", tmp_path / "b", "--prefix", "y", "--prefix-b", "z").code == 0
    shardkeep.save(tmp_path / "m.safetensors", {"w": jnp.ones(3), "p": "v"})
    assert run("diff", tmp_path / "a", tmp_path / "m.safetensors", "--prefix", "x", "--prefix-b", "").code == 0


def test_other_programs_files(run: Run, tmp_path: Path) -> None:
    directory = save_like_hugging_face(tmp_path / "hf", HF_TENSORS)
    safetensors.numpy.save_file(HF_TENSORS, tmp_path / "one.safetensors")
    assert run("diff", directory, tmp_path / "one.safetensors").code == 0
    shardkeep.save(tmp_path / "ours", dict(HF_TENSORS))  # flat names with dots
    assert run("diff", directory, tmp_path / "ours").code == 0
    plain, other = FIXTURES / "ts_plain" / "ckpt", FIXTURES / "ts_dtypes" / "ckpt"
    assert run("diff", plain, plain).code == 0
    assert run("diff", plain, other).code == 1


def test_errors_end_with_2(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "a", {"w": 1})
    assert run("diff", tmp_path / "a", tmp_path / "none").code == 2
    assert run("diff", tmp_path / "a", tmp_path / "a", "--include", "zzz").code == 2


def test_long_lists_are_cut_for_people_and_whole_for_programs(run: Run, tmp_path: Path) -> None:
    a, b = save_two(tmp_path, {f"k{i}": i for i in range(200)}, {f"k{i}": i + 1 for i in range(100)})
    text = run("diff", a, b).out
    assert "50 more" in text
    (tree,) = run.document("diff", a, b)["trees"]
    assert len(tree["only_in_a"]) == 100
    assert len(tree["leaves"]) == 100


def test_an_empty_key_is_shown_as_such(run: Run, tmp_path: Path) -> None:
    a, b = save_two(tmp_path, {"": np.ones(2), "x": {"": -0.0 * np.ones(1)}}, {"": np.zeros(2), "x": {"": np.zeros(1)}})
    lines = run("diff", a, b).out.splitlines()
    assert lines[0].startswith("''  float64[2]  2 of 2 changed")
    assert lines[1].startswith("x/: the values are equal, but not bit-identical")
    shardkeep.save(tmp_path / "c", {"x": {"": np.zeros(1)}})
    assert run("diff", a, tmp_path / "c").out.startswith("only in A: ''  float64[2]\n")
    found = compared(run, a, b)
    assert [leaf["path"] for leaf in found.values()] == [[""], ["x", ""]]


def test_long_values_that_begin_alike_are_told_apart(run: Run, tmp_path: Path) -> None:
    a, b = save_two(tmp_path, {"s": b"x" * 900 + b"1", "w": np.ones(3)}, {"s": b"x" * 900 + b"2", "w": np.zeros(3)})
    lines = run("diff", a, b).out.splitlines()
    assert lines[0].endswith("(901 bytes)  values differ")
    assert "3 of 3 changed" in lines[1]
