"""A plan says what a load would do, without reading an array, and does it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from shardkeep import remap
from shardkeep.loading import load as loading
from support import assert_same

RULES = [remap.stack("layers/{i}/(.*)", r"layers/\1"), remap.split("layers/qkv", ["layers/q", "layers/k", "layers/v"])]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    layers = [{"qkv": np.full((4, 6), i, np.float32)} for i in range(2)]
    shardkeep.save(tmp_path / "c", {"layers": layers, "head": jnp.ones((4, 3)), "step": 5})
    return tmp_path / "c"


def test_a_plan_reads_no_array_and_says_where_each_leaf_is_from(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loading, "read_leaves", lambda *_: pytest.fail("something was read"))
        plan = shardkeep.plan_load(saved, remap=RULES)
    found = {leaf.key: leaf for leaf in plan.leaves}
    assert list(found) == ["layers/q", "layers/k", "layers/v", "head", "step"]
    assert found["layers/k"].form == "float32[2, 4, 2]"
    assert found["layers/k"].sources == ("layers/0/qkv[0:4, 2:4]", "layers/1/qkv[0:4, 2:4]")
    assert found["layers/k"].rules == tuple(map(repr, RULES))
    assert found["layers/k"].nbytes == 2 * 96
    assert found["step"].form == "5"
    assert found["head"].sources == ("head",)
    assert plan.nbytes == 2 * 96 + 48, "each block once"
    assert (plan.missing, plan.extra, plan.problems) == ((), (), ())


def test_a_plan_shows_a_table_as_text_and_as_html(saved: Path) -> None:
    plan = shardkeep.plan_load(saved, remap=RULES)
    lines = str(plan).splitlines()
    assert lines[0] == f"load {saved}: 5 leaves, 240 bytes to read"
    assert lines[1].split() == ["leaf", "is", "from", "rules", "bytes", "read"]
    assert lines[3].startswith("layers/k  float32[2, 4, 2]  layers/0/qkv[0:4, 2:4] and 1 more")
    assert repr(plan) == str(plan)
    shown = plan._repr_html_()
    assert shown.startswith("<div")
    assert shown.count("<tr>") == 7
    assert "&#x27;layers/{i}/(.*)&#x27;" in shown


def test_a_plan_is_executed_and_undone(saved: Path, tmp_path: Path) -> None:
    plan = shardkeep.plan_load(saved, remap=RULES)
    loaded = plan.load()
    assert_same(loaded, shardkeep.load(saved, remap=RULES))
    shardkeep.save(tmp_path / "changed", loaded)
    original = shardkeep.load(saved)
    assert_same(shardkeep.load(tmp_path / "changed", remap=plan.inverse(), template=original), original)
    assert shardkeep.plan_load(saved).inverse() == []


def test_a_plan_says_what_is_missing_left_over_and_different_and_what_would_help(saved: Path) -> None:
    template = {
        "layers": {"qkv": jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)},
        "head": jnp.ones((3, 4)),
        "new": jnp.ones(3),
    }
    plan = shardkeep.plan_load(saved, template=template)
    assert plan.missing == ("layers/qkv", "new")
    assert plan.extra == ("layers/0/qkv", "layers/1/qkv", "step")
    assert plan.problems == ("Array shape mismatch for key 'head': saved (4, 3), the template has (3, 4)",)
    assert "remap.transpose('head', (1, 0))" in plan.suggestions
    assert repr(remap.stack("layers/{i}/(.*)", r"layers/\1")) in plan.suggestions
    assert "not in the checkpoint: layers/qkv, new" in str(plan)
    with pytest.raises(shardkeep.MissingLeafError, match="try remap="):
        plan.load()
    fixed = shardkeep.plan_load(
        saved, template=template, missing="keep", remap=[eval(s, {"remap": remap}) for s in plan.suggestions]
    )
    assert (fixed.missing, fixed.problems) == (("new",), ())


def test_an_empty_array_lies_where_another_one_begins(tmp_path: Path) -> None:
    """The bytes of arrays at one place are counted once, and it may have none."""
    shardkeep.save(tmp_path / "c", {"a": np.ones((0, 3, 2), np.int8), "b": np.ones((4, 2), np.int8), "c": 7})
    plan = shardkeep.plan_load(tmp_path / "c", remap=remap.copy("b", "d"))
    assert [leaf.nbytes for leaf in plan.leaves] == [0, 8, 8, 0]
    assert plan.nbytes == 8


def test_arguments_are_those_of_load(saved: Path) -> None:
    with pytest.raises(TypeError, match=r"plan_load\(\) has no argument 'shards'; it takes those of load: template, "):
        shardkeep.plan_load(saved, shards=3)
    with pytest.raises(TypeError, match="mmap must be True or False"):
        shardkeep.plan_load(saved, mapped="yes")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint at"):
        shardkeep.plan_load(saved / "nothing")
