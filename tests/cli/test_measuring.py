"""`stats`: the numbers of every leaf."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from cli.commands import FIXTURES, Run, data_file, flip
from cli.trees import HF_TENSORS, rich_tree, save_like_hugging_face
from support import FORMATS, save_as


def measured(run: Run, path: Path, *words: str) -> dict[str, Any]:
    return {leaf["key"]: leaf for leaf in run.document("stats", path, *words)["leaves"]}


@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_of_a_saved_tree(run: Run, tmp_path: Path, kind: str) -> None:
    tree = rich_tree()
    path = save_as(kind, tmp_path / "c", tree)
    found = measured(run, path)
    kernel = np.asarray(tree["layers"][0]["kernel"], np.float64)
    one = found["layers/0/kernel"]
    assert (one["count"], one["min"], one["max"]) == (kernel.size, kernel.min(), kernel.max())
    assert one["mean"] == pytest.approx(kernel.mean())
    assert one["std"] == pytest.approx(kernel.std())
    assert (found["int4"]["min"], found["int4"]["max"]) == (-8, 7)
    assert (found["long"]["min"], found["long"]["max"]) == (-(2**62), 2**62)
    assert found["complex"]["max"] == 3.0
    assert found["times"]["min"] == "2026-11-16T00:00:00.000000000"
    assert found["times"]["mean"] is None
    assert found["empty"]["count"] == 0
    assert found["empty"]["min"] is None
    assert "count" not in found["keys"]
    assert found["pair/0"]["flags"] == ["constant"]
    assert found["keyed/left"]["flags"] == ["all_zero"]
    assert "step" not in found


def test_what_looks_wrong_is_flagged_and_the_end_is_good(run: Run, tmp_path: Path) -> None:
    tree = {
        "fine": np.array([1.0, 2.0]),
        "nan": jnp.asarray([1, np.nan], jnp.bfloat16),
        "inf": np.array([np.inf, 1.0]),
        "dead": np.zeros(5),
        "loss": float("nan"),
        "step": 3,
    }
    shardkeep.save(tmp_path / "c", tree)
    found = measured(run, tmp_path / "c")
    flags = {key: one["flags"] for key, one in found.items()}
    assert flags == {"fine": [], "nan": ["nan"], "inf": ["inf"], "dead": ["all_zero"], "loss": ["nan"]}
    assert found["loss"]["value"] == "nan"
    text = run("stats", tmp_path / "c")
    assert text.code == 0
    assert "4 leaves flagged" in text.out
    assert next(line for line in text.out.splitlines() if line.startswith("dead")).endswith("all zero")


def test_include_and_prefix_choose(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path, {"a": {"w": np.ones(2)}, "b": np.ones(2)}, prefix="x")
    shardkeep.save(tmp_path, {"a": np.ones(2)}, prefix="y")
    assert list(measured(run, tmp_path, "--prefix", "x", "--include", "a/")) == ["a/w"]
    rows = [line.split()[:2] for line in run("stats", tmp_path).out.splitlines()]
    assert rows[:4] == [["PREFIX", "KEY"], ["x", "a/w"], ["x", "b"], ["y", "a"]]
    assert run("stats", tmp_path, "--include", "zzz").code == 2


def test_large_arrays_are_read_in_blocks(run: Run, tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(3, 2_000_000))
    shardkeep.save(tmp_path / "c", {"w": jax.device_put(array.astype(np.float32)), "wide": array})
    found = measured(run, tmp_path / "c")
    assert found["wide"]["count"] == 6_000_000
    assert found["wide"]["mean"] == pytest.approx(array.mean(), abs=1e-12)
    assert found["wide"]["std"] == pytest.approx(array.std())


def test_other_programs_arrays(run: Run, tmp_path: Path) -> None:
    found = measured(run, save_like_hugging_face(tmp_path / "hf", HF_TENSORS))
    assert found["model/embed/weight"]["max"] == 32.0
    assert found["model/layers/0/bias"]["flags"] == ["all_zero"]
    eformer = measured(run, FIXTURES / "ts_dtypes" / "ckpt")
    assert eformer["all_zeros"]["flags"] == ["all_zero"]
    assert eformer["bfloat16"]["count"] == 6


def test_damage_is_an_error(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"w": np.ones(64)})
    flip(data_file(tmp_path / "c"))
    result = run("stats", tmp_path / "c")
    assert result.code == 2
    assert "leaf 'w'" in result.err


@pytest.mark.parametrize(
    ("fail_on", "code"),
    [
        (None, 0),
        ("nan", 1),
        ("NaN, Inf", 1),
        ("inf", 0),
        ("constant", 0),
        ("all-zero", 1),
        ("huge,denormal", 0),
        ("any", 1),
    ],
)
def test_the_exit_code_is_1_for_the_flags_that_were_asked_for(
    run: Run, tmp_path: Path, fail_on: str | None, code: int
) -> None:
    tree = {"fine": np.array([1.0, 2.0]), "broken": np.full(3, np.nan), "dead": np.zeros(5), "loss": float("nan")}
    shardkeep.save(tmp_path / "c", tree)
    words = [] if fail_on is None else ["--fail-on", fail_on]
    result = run("stats", tmp_path / "c", *words)
    assert result.code == code
    assert ("failed: " in result.out) == bool(code)
    if fail_on == "NaN, Inf":
        assert result.out.endswith("3 leaves flagged\nfailed: 2 leaves flagged nan or inf\n")
    assert run("stats", tmp_path / "c", *words, "--json").code == code
    document = run.document("stats", tmp_path / "c", *words)
    assert document["failed"] is bool(code)
    assert document["leaves"][1]["flags"] == ["all_nan"]
    assert run("stats", tmp_path / "c", "--include", "fine", *words).code == 0


def test_a_flag_that_does_not_exist_is_refused(run: Run, tmp_path: Path) -> None:
    result = run("stats", tmp_path, "--fail-on", "nan,nought")
    assert result.code == 2
    assert "unknown flag 'nought'; choose from nan, inf, all_zero, constant, huge, denormal, any" in result.err


def test_an_empty_key_is_not_the_tree_itself(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"": np.ones(2), "a": np.ones(2)})
    shardkeep.save(tmp_path / "bare", np.ones(2))
    assert [line.split()[0] for line in run("stats", tmp_path / "c").out.splitlines()[1:3]] == ["''", "a"]
    assert run("stats", tmp_path / "bare").out.splitlines()[1].startswith("(the tree itself)  float64[2]")
    assert [leaf["path"] for leaf in run.document("stats", tmp_path / "c")["leaves"]] == [[""], ["a"]]
