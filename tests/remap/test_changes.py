"""What rules do to the leaves of a tree, in which order, and what is recorded of it."""

from typing import Any

import numpy as np
import pytest

from remap.test_regions import saved_tree
from shardkeep import RemapError, remap
from shardkeep.model.leaves import StoredArray, StoredValue
from shardkeep.remap.changes import Remapped, remap_tree
from shardkeep.remap.expressions import DerivedArray, Joined, sources_of
from shardkeep.remap.rules import Rename

TREE = {f"layers/{i}/{name}": np.zeros((4, 2), np.float32) for i in range(2) for name in "wb"} | {"head": np.zeros(3)}


def changed(*rules: Any, tree: Any = TREE, shapes: Any = None) -> Remapped:
    return remap_tree(saved_tree(tree), rules, None if shapes is None else lambda path: shapes.get("/".join(path)))


def keys(found: Remapped) -> list[str]:
    return [leaf.key for leaf in found.tree.leaves]


def test_a_new_leaf_stands_where_the_first_of_those_it_is_made_of_stood() -> None:
    assert keys(changed(remap.stack("layers/{i}/(.)", r"\1"))) == ["w", "b", "head"]
    assert keys(changed(remap.fuse(["head", "tail"], "x"), tree={"tail": np.zeros(3), **TREE}))[-1] == "x"
    assert keys(changed(remap.copy("layers/0/w", "layers/0/v")))[:2] == ["layers/0/w", "layers/0/v"]


def test_leaves_can_take_each_others_names_in_one_rule() -> None:
    tree = {"a/b": np.zeros(1), "b/a": np.zeros(2)}
    found = changed(remap.rename("(.)/(.)", r"\2/\1"), tree=tree)
    assert {leaf.key: leaf.shape for leaf in found.tree.leaves} == {"b/a": (1,), "a/b": (2,)}


def test_a_leaf_that_is_only_renamed_stays_as_it_is_stored() -> None:
    found = changed(remap.rename("head", "top"), remap.rename("top", "end"))
    (leaf,) = (leaf for leaf in found.tree.leaves if leaf.key == "end")
    assert type(leaf) is StoredArray
    assert found.origin_of(("end",)) == ("head",)
    assert found.rules_of(("end",)) == (remap.rename("head", "top"), remap.rename("top", "end"))
    assert found.rules_of(("layers", "0", "w")) == ()


def test_what_several_leaves_are_made_of_is_shared() -> None:
    """It is read once for all of them."""
    found = changed(remap.copy("head", "tied"))
    shared = [leaf for leaf in found.tree.leaves if isinstance(leaf, DerivedArray)]
    assert [leaf.key for leaf in shared] == ["head", "tied"]
    assert sources_of(shared[0].expression) == sources_of(shared[1].expression)


def test_plain_values_move_and_keep_their_value() -> None:
    tree = saved_tree(TREE)
    leaves = (*tree.leaves[:-1], StoredValue(("head",), 7))
    found = remap_tree(type(tree)("id", "safetensors", tree.skeleton, leaves, (), {}, ""), [remap.copy("head", "n")])
    assert [leaf.value for leaf in found.tree.leaves if isinstance(leaf, StoredValue)] == [7, 7]


def test_what_was_done_is_recorded_rule_by_rule_with_the_places() -> None:
    found = changed(remap.within("layers/.", [remap.rename("w", "kernel"), remap.drop("b")]), remap.drop("head"))
    assert [(type(done.rule).__name__, len(done.steps), done.below) for done in found.changes.done] == [
        ("Rename", 2, ("layers/.",)),
        ("Drop", 2, ("layers/.",)),
        ("Drop", 1, ()),
    ]
    assert found.changes.done[0].steps[1].took == ("layers", "1", "w")
    assert found.changes.done[0].steps[1].gave == ("layers", "1", "kernel")
    assert isinstance(found.changes.done[0].rule, Rename)


def test_a_size_of_the_template_is_given_to_the_array_where_it_ends_up() -> None:
    rules = [remap.resize("head", fill=1), remap.rename("head", "top")]
    grown = changed(*rules, shapes={"top": (5,)})
    (leaf,) = (leaf for leaf in grown.tree.leaves if leaf.key == "top")
    assert isinstance(leaf, DerivedArray)
    assert leaf.shape == (5,)
    assert isinstance(leaf.expression, Joined)
    for shapes in ({"top": (3,)}, {"top": (2, 2)}, {}):
        (same,) = (leaf for leaf in changed(*rules, shapes=shapes).tree.leaves if leaf.key == "top")
        assert same.shape == (3,), "a template without such an axis is told by the load"
    with pytest.raises(RemapError, match=r"resize\('head', fill=1\), leaf 'head': no template"):
        changed(rules[0])


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (
            [remap.drop("nothing")],
            "no leaf; patterns match whole keys, which are layers/0/w, layers/0/b, layers/1/w, layers/1/b, head$",
        ),
        (
            [remap.within("layers", remap.drop("z"))],
            "matches no leaf below 'layers'; patterns match whole keys, which are 0/w, 0/b, 1/w, 1/b$",
        ),
        (
            [remap.within("layers/.", remap.drop("x"))],
            "below 'layers/0' and 1 more place; patterns match whole keys, which are w, b$",
        ),
        (
            [remap.within("nowhere", remap.drop("w"))],
            "no key or subtree matches 'nowhere'; patterns match whole keys, which are layers/0/w, .*, head$",
        ),
        ([remap.drop(".*"), remap.drop("w")], "it matches no leaf$"),
    ],
)
def test_a_rule_without_effect_says_what_it_was_matched_against(rules: Any, problem: str) -> None:
    with pytest.raises(RemapError, match=problem):
        changed(*rules)


def test_names_with_slashes_keep_them(tmp_path: Any) -> None:
    """As those of Haiku's modules, which are there and back again."""
    import shardkeep

    tree = {f"mlp/~/linear_{i}": {"w": np.full((2, 3), i), "b": np.zeros(3)} for i in range(2)}
    shardkeep.save(tmp_path / "c", tree)
    renamed = shardkeep.load(tmp_path / "c", remap=remap.rename("(.*)/w", r"\1/kernel"))
    assert set(renamed["mlp/~/linear_0"]) == {"kernel", "b"}
    for rules in (
        [remap.stack("mlp/~/linear_{i}/(.*)", r"mlp/\1"), remap.transpose("mlp/w", (2, 0, 1))],
        [remap.stack(r"mlp\/~\/linear_{i}/(.*)", r"mlp\/~\/linear/\1")],
    ):
        plan = shardkeep.plan_load(tmp_path / "c", remap=rules)
        shardkeep.save(tmp_path / "new", plan.load(), overwrite=True)
        back = shardkeep.load(tmp_path / "new", remap=plan.inverse())
        assert set(back) == set(tree)
        assert all(np.array_equal(back[name][key], tree[name][key]) for name in tree for key in "wb")


def test_a_tree_that_is_a_single_leaf_gets_a_name_and_loses_it(tmp_path: Any) -> None:
    import shardkeep

    shardkeep.save(tmp_path / "c", np.arange(3))
    plan = shardkeep.plan_load(tmp_path / "c", remap=remap.rename("", "params/w"))
    shardkeep.save(tmp_path / "new", plan.load())
    assert np.array_equal(shardkeep.load(tmp_path / "new", remap=plan.inverse()), np.arange(3))
    with pytest.raises(RemapError, match=r"leaf 'w': it would become '\(the tree itself\)', which contains 'b'"):
        changed(remap.rename("w", ""), tree={"w": np.ones(1), "b": np.ones(1)})
