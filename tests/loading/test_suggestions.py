"""An error for a template names a rule that makes the checkpoint fit, and the rule does what it says."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep import MissingLeafError, remap
from shardkeep.loading.suggestions import rules_to_try
from shardkeep.model.arrays import ArraySpec
from shardkeep.model.leaves import UNSHARDED, StoredArray

F32 = np.float32


def layers(**shapes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{name: np.full(shape, i, F32) for name, shape in shapes.items()} for i in range(3)]


def abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), tree, is_leaf=lambda x: type(x) is tuple
    )


CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "stacked": (
        {"layers": layers(w=(4, 6), b=(6,))},
        {"layers": {"w": (3, 4, 6), "b": (3, 6)}},
        [r"remap.stack('layers/{i}/(.*)', 'layers/\\1')"],
    ),
    "stacked, with numbered names": (
        {f"layer_{i}": {"w": np.zeros((4, 6), F32)} for i in range(3)},
        {"w": (3, 4, 6)},
        [r"remap.stack('layer_{i}/(.*)', '\\1')"],
    ),
    "stacked, under another name": (
        {"blocks": layers(w=(4, 6), b=(6,))},
        {"layers": {"w": (3, 4, 6), "b": (3, 6)}},
        [r"remap.stack('blocks/{i}/(.*)', 'layers/\\1')"],
    ),
    "stacked alone": (
        {"w": [np.zeros(3, F32)] * 3, "b": np.zeros(2, F32)},
        {"w": (3, 3), "b": (2,)},
        ["remap.stack('w/{i}', 'w')"],
    ),
    "stacked, with slashes in names": (
        {f"mlp/~/linear_{i}": {"w": np.zeros((4, 6), F32)} for i in range(3)},
        {"mlp/~/linear": {"w": (3, 4, 6)}},
        [r"remap.stack('mlp/\\~/linear_{i}/(.*)', 'mlp\\/~\\/linear/\\1')"],
    ),
    "renamed, with slashes in names": (
        {"mlp/~/linear": {"w": np.zeros((4, 6), F32), "b": np.zeros(6, F32)}},
        {"mlp/~/linear": {"kernel": (4, 6), "b": (6,)}},
        [r"remap.rename('(.*)/w', '\\1/kernel')"],
    ),
    "unstacked": (
        {"layers": {"w": np.zeros((3, 4, 6), F32)}},
        {"layers": {"0": {"w": (4, 6)}, "1": {"w": (4, 6)}, "2": {"w": (4, 6)}}},
        [r"remap.unstack('layers/(.*)', 'layers/{i}/\\1')"],
    ),
    "renamed": (
        {"encoder": {str(i): {"attn": {"w": np.zeros((4, i + 1), F32)}} for i in range(3)}},
        {"encoder": {str(i): {"attention": {"w": (4, i + 1)}} for i in range(3)}},
        [r"remap.rename('(.*)/attn/(.*)', '\\1/attention/\\2')"],
    ),
    "renamed above and below a number": (
        {"layers": {str(i): {"attn": {"w": np.zeros((4, 2), F32)}} for i in range(12)}},
        {"blocks": {str(i): {"attention": {"w": (4, 2)}} for i in range(12)}},
        [r"remap.rename('layers/{i}/attn/(.*)', 'blocks/{i}/attention/\\1')"],
    ),
    "renamed, with numbered names": (
        {f"block_{i}": {"w": np.zeros((4, i + 1), F32)} for i in range(12)},
        {"layers": {str(i): {"w": (4, i + 1)} for i in range(12)}},
        [r"remap.rename('block_{i}/(.*)', 'layers/{i}/\\1')"],
    ),
    "another root": (
        {"model": {"a": np.zeros(3, F32), "b": np.zeros(4, F32)}},
        {"params": {"a": (3,), "b": (4,)}},
        [r"remap.rename('model/(.*)', 'params/\\1')"],
    ),
    "transposed": (
        {"a": {"kernel": np.zeros((4, 6), F32)}, "b": {"kernel": np.zeros((6, 8), F32)}},
        {"a": {"kernel": (6, 4)}, "b": {"kernel": (8, 6)}},
        ["remap.transpose('.*/kernel', (1, 0))"],
    ),
    "heads": ({"o": np.zeros((16, 8), F32)}, {"o": (4, 4, 8)}, ["remap.reshape('o', (4, 4, 8))"]),
    "vocabulary": (
        {"embed": np.zeros((10, 4), F32)},
        {"embed": (12, 4)},
        ["remap.resize('embed', size=12, fill='keep')"],
    ),
    "a smaller vocabulary": (
        {"embed": np.zeros((12, 4), F32)},
        {"embed": (10, 4)},
        ["remap.resize('embed', size=10)"],
    ),
    "split": (
        {"layers": layers(qkv=(4, 12))},
        {"layers": [{"q": (4, 4), "k": (4, 4), "v": (4, 4)}] * 3},
        [r"remap.split('(.*)/qkv', ('\\1/q', '\\1/k', '\\1/v'))"],
    ),
    "split unevenly": (
        {"qkv": np.zeros((4, 8), F32)},
        {"q": (4, 4), "k": (4, 2), "v": (4, 2)},
        ["remap.split('qkv', ('q', 'k', 'v'), sizes=(4, 2, 2))"],
    ),
    "fused, as the name says": (
        {"a": {f"{n}_proj": np.zeros((4, 5), F32) for n in "vkq"}},
        {"a": {"qkv_proj": (4, 15)}},
        [r"remap.fuse(('(.*)/q_proj', '(.*)/k_proj', '(.*)/v_proj'), '\\1/qkv_proj')"],
    ),
    "fused": (
        {"layers": layers(gate=(4, 5), up=(4, 5))},
        {"layers": [{"gate_up": (4, 10)}] * 3},
        [r"remap.fuse(('(.*)/gate', '(.*)/up'), '\\1/gate_up')"],
    ),
    "two things": (
        {"layers": layers(w=(4, 6)), "head": np.zeros((6, 9), F32)},
        {"layers": {"w": (3, 4, 6)}, "head": (9, 6)},
        [r"remap.stack('layers/{i}/(.*)', 'layers/\\1')", "remap.transpose('head', (1, 0))"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rules_that_an_error_names_can_be_pasted_and_work(case: str, tmp_path: Path) -> None:
    tree, shapes, expected = CASES[case]
    template = abstract(shapes)
    shardkeep.save(tmp_path / "c", tree)
    with pytest.raises((shardkeep.MissingLeafError, shardkeep.TemplateMismatchError), match="try remap=") as told:
        shardkeep.load(tmp_path / "c", template=template)
    (line,) = [line for line in str(told.value).splitlines() if "try remap=" in line]
    pasted = line.partition("try remap=")[2]
    assert sorted(pasted.strip("[]").replace("), remap", ")\0remap").split("\0")) == sorted(expected)
    rules = eval(pasted, {"remap": remap})
    if "keep" in pasted:
        template = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), template)
    loaded = shardkeep.load(tmp_path / "c", template=template, remap=rules)
    assert jax.tree.map(np.shape, loaded) == jax.tree.map(lambda leaf: leaf.shape, template)


def test_an_order_that_no_name_tells_is_not_suggested(tmp_path: Path) -> None:
    """The shapes would fit in any order, and the numbers be wrong in most."""
    shardkeep.save(tmp_path / "c", {"all": np.zeros((4, 12), F32)})
    template = abstract({"q": (4, 4), "k": (4, 4), "v": (4, 4)})
    with pytest.raises(shardkeep.MissingLeafError, match="Missing array for key 'q'") as told:
        shardkeep.load(tmp_path / "c", template=template)
    assert "split" not in str(told.value)


names = st.text("ab01/.\\\\{}i()*+~", min_size=1, max_size=6)


@settings(max_examples=150)
@given(saved=st.lists(st.lists(names, min_size=1, max_size=3), min_size=1, max_size=3), data=st.data())
def test_no_suggestion_takes_the_place_of_the_error(saved: list[list[str]], data: Any, tmp_path: Path) -> None:
    """Whatever the names are: they become parts of patterns and keys."""
    changed = [[data.draw(st.just(name) | names) for name in path] for path in saved]
    save, want = ({tuple(path): np.zeros(2) for path in paths} for paths in (saved, changed))
    wanted = {path: (2,) for path in want if path not in save}
    leaves = [StoredArray(path, ArraySpec((2,), np.dtype(F32)), (), UNSHARDED) for path in save]
    for rule in rules_to_try(leaves, wanted, list(want)):
        assert eval(repr(rule), {"remap": remap}) == rule


def test_a_name_with_a_number_is_no_reason_for_another_error(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"net.fc0": np.zeros(3)})
    with pytest.raises(MissingLeafError, match="Missing array for key 'net.fc1'"):
        shardkeep.load(tmp_path / "c", template={"net.fc1": np.zeros(3)})


def test_nothing_is_suggested_where_nothing_fits(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"a": np.zeros(3), "text": "x"})
    with pytest.raises(shardkeep.MissingLeafError, match="Missing array for key 'b'") as told:
        shardkeep.load(tmp_path / "c", template={"b": np.zeros(5)})
    assert "remap=" not in str(told.value)
