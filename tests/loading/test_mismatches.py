"""The error for a template that does not match is short, and names the cause first if there is one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from shardkeep.loading.mismatches import summarize
from support import Point

Abstract = jax.ShapeDtypeStruct
LAYER = {"attn": {"kernel": np.ones((4, 3), np.float32), "bias": np.ones(3, np.float32)}, "scale": np.ones(4)}


def params(layers: int = 3) -> Any:
    return {"embed": np.ones((5, 4)), "layers": [LAYER for _ in range(layers)]}


def refused(tmp_path: Path, tree: Any, template: Any) -> str:
    shardkeep.save(tmp_path / "c", tree, overwrite=True)
    with pytest.raises(
        (shardkeep.MissingLeafError, shardkeep.TemplateMismatchError), match="not match the checkpoint"
    ) as told:
        shardkeep.load(tmp_path / "c", template=template)
    start = f"{tmp_path / 'c'}: "
    assert str(told.value).startswith(start)
    return str(told.value).removeprefix(start)


class TestRoots:
    def test_a_template_that_is_a_subtree_of_the_checkpoint(self, tmp_path: Path) -> None:
        tree = {"params": params(), "opt": {"mu": params(), "count": 3}}
        text = refused(tmp_path, tree, params())
        assert "The template looks like the subtree 'params' of the checkpoint" in text.splitlines()[0]
        assert 'pass template={"params": template} and take ["params"] of the result' in text
        loaded = shardkeep.load(tmp_path / "c", template={"params": params()})["params"]  # what it says works
        assert np.array_equal(loaded["embed"], np.ones((5, 4)))

    def test_a_subtree_deeper_down(self, tmp_path: Path) -> None:
        text = refused(tmp_path, {"state": [{"model": params()}]}, params())
        assert "the subtree 'state/0/model' of the checkpoint" in text
        template = {"state": {"0": {"model": params()}}}
        assert 'template={"state": {"0": {"model": template}}} and take ["state"]["0"]["model"] of' in text
        assert shardkeep.load(tmp_path / "c", template=template)["state"]["0"]["model"]["layers"]

    def test_a_checkpoint_that_is_a_subtree_of_the_template(self, tmp_path: Path) -> None:
        template = {"state": Point(params(), [jnp.zeros(3)] * 30), "step": 0}
        text = refused(tmp_path, params(), template)
        assert "The checkpoint looks like the subtree 'state/x' of the template" in text.splitlines()[0]
        assert 'pass template=template["state"].x.' in text

    def test_another_name_at_the_root(self, tmp_path: Path) -> None:
        text = refused(tmp_path, {"model": params(), "step": 1}, {"params": params()})
        assert "The checkpoint has 'model' where the template has 'params'" in text.splitlines()[0]

    def test_one_leaf_that_is_missing_beside_others_is_not_explained_by_the_root(self, tmp_path: Path) -> None:
        text = refused(tmp_path, {"a": {"m": 1}, "b": 2, "c": 3}, {"b": 0, "c": 0, "m": 0})
        assert "looks like" not in text
        assert text.startswith("1 leaf of the template does not match the checkpoint:\n")

    def test_a_leaf_for_a_tree_and_a_tree_for_a_leaf(self, tmp_path: Path) -> None:
        assert "The template is a single leaf, and the checkpoint has 10 leaves" in refused(tmp_path, params(), 3)
        assert "The checkpoint is a single leaf" in refused(tmp_path, np.ones(3), {"w": np.ones(3)})


class TestOtherCauses:
    def test_lists_where_the_template_has_dicts(self, tmp_path: Path) -> None:
        template = {"embed": np.ones((5, 4)), "layers": {f"layer_{i}": LAYER for i in range(3)}}
        text = refused(tmp_path, params(), template)
        assert "The checkpoint has lists where the template has dicts" in text
        assert "'layers/0' in the checkpoint is 'layers/layer_0' in the template" in text
        text = refused(tmp_path, template, params())
        assert "The checkpoint has dicts where the template has lists" in text

    def test_numbered_names_that_differ(self, tmp_path: Path) -> None:
        text = refused(tmp_path, {"block_0": LAYER, "block_1": LAYER}, {"layer_0": LAYER, "layer_1": LAYER})
        assert "The checkpoint uses different names than the template: 'block_0' in the checkpoint is 'layer_0'" in text

    def test_stacked_layers(self, tmp_path: Path) -> None:
        stacked = {"layers": jax.tree.map(lambda x: np.stack([x] * 3), LAYER)}
        text = refused(tmp_path, {"layers": params()["layers"]}, stacked)
        assert "The checkpoint has numbered layers where the template has stacked arrays" in text
        text = refused(tmp_path, stacked, {"layers": params()["layers"]})
        assert "The template has numbered layers where the checkpoint has stacked arrays" in text

    def test_stacked_layers_with_names(self, tmp_path: Path) -> None:
        stacked = {"params": jax.tree.map(lambda x: np.stack([x] * 3), LAYER)}
        separate = {"params": {f"layer_{i}": LAYER for i in range(3)}}
        text = refused(tmp_path, separate, stacked)
        assert "The checkpoint has numbered layers where the template has stacked arrays" in text
        text = refused(tmp_path, stacked, separate)
        assert "The template has numbered layers where the checkpoint has stacked arrays" in text
        text = refused(tmp_path, {"params": {"layer_0": LAYER}}, {"params": LAYER})
        assert "stacked" not in text

    @pytest.mark.parametrize(
        ("change", "cause"),
        [
            (lambda shape: (shape[0] * 2, *shape[1:]), "All of them differ in the first dimension only."),
            (lambda shape: (7, *shape[1:]), "All of them differ in the first dimension only"),
            (lambda shape: shape[::-1], "All of them are transposed."),
            (lambda shape: shape[1:], "All of them were saved with an additional leading dimension."),
            (lambda shape: (8, *shape), "All of them have an additional leading dimension in the template."),
        ],
    )
    def test_shapes_that_all_differ_in_one_way(self, change: Any, cause: str, tmp_path: Path) -> None:
        tree = {name: np.ones(shape) for name, shape in {"a": (4, 3), "b": (5, 2), "c": (6, 4)}.items()}
        text = refused(tmp_path, tree, {name: Abstract(change(x.shape), x.dtype) for name, x in tree.items()})
        assert cause in text.splitlines()[0]

    def test_one_size_of_the_first_dimension_is_named(self, tmp_path: Path) -> None:
        tree = {"a": np.ones((8, 3)), "b": np.ones(8)}
        text = refused(tmp_path, tree, {"a": np.ones((4, 3)), "b": np.ones(4)})
        assert "in the first dimension only (saved 8, the template has 4)." in text


class TestLength:
    @pytest.mark.parametrize("template", ["root", "nothing in common", "shapes", "both"])
    def test_twenty_thousand_mismatches_are_a_short_message(self, template: str, tmp_path: Path) -> None:
        tree = {"params": {f"w{i}": 1 for i in range(20_000)}, "arrays": {f"a{i}": np.ones(2) for i in range(50)}}
        templates: dict[str, Any] = {
            "root": tree["params"],
            "nothing in common": {f"key{i}": 0 for i in range(20_000)},
            "shapes": {"arrays": {f"a{i}": np.ones(3) for i in range(50)}},
            "both": {"arrays": {f"a{i}": np.ones(3) for i in range(50)} | {f"b{i}": np.ones(3) for i in range(50)}},
        }
        text = refused(tmp_path, tree, templates[template])
        assert len(text.splitlines()) <= 20
        assert len(text) < 3000
        assert "more\n" in text
        if template == "both":
            assert "Missing array for key 'arrays/b0'" in text
            assert "Array shape mismatch for key 'arrays/a0'" in text

    def test_long_keys_are_cut(self, tmp_path: Path) -> None:
        text = refused(tmp_path, {"a": 1}, {"k" * 100_000 + str(i): 0 for i in range(20)})
        assert len(text) < 10_000
        assert "Missing value for key 'kkk" in text

    def test_a_program_can_have_all_of_them(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"a": 1})
        with pytest.raises(shardkeep.MissingLeafError, match="more") as told:
            shardkeep.load(tmp_path / "c", template={f"k{i}": 0 for i in range(100)})
        assert len(told.value.problems) == 100
        assert told.value.problems[99] == "Missing value for key 'k99'"

    def test_missing_arrays_are_shown_before_missing_values(self, tmp_path: Path) -> None:
        template = {**{f"v{i}": 0 for i in range(30)}, "w": jnp.ones(3)}
        assert "Missing array for key 'w'" in refused(tmp_path, {"x": 1}, template)

    def test_the_way_out_is_named(self, tmp_path: Path) -> None:
        assert "shardkeep.abstract(path) gives a template that matches" in refused(tmp_path, {"x": 1}, {"y": 1})

    def test_a_summary_says_how_many_lines_it_leaves_out(self) -> None:
        assert summarize(["one"]) == "  one"
        assert summarize([str(i) for i in range(20)]).splitlines()[-1] == "  … and 8 more"


@dataclass
class _Plain:
    x: Any


def test_the_expression_for_a_subtree_names_attributes_and_keys_as_python_does(tmp_path: Path) -> None:
    jax.tree_util.register_dataclass(_Plain, ["x"], [])
    template = {"runs": ({3: _Plain(params())},)}
    text = refused(tmp_path, params(), template)
    assert 'template["runs"][0][3].x.' in text
