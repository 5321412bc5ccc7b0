"""What rules did is undone by rules, in few words where that can be; what cannot be undone says so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from remap.changing import negate, nested
from remap.test_regions import saved_tree
from shardkeep import RemapError, remap
from shardkeep.remap.changes import remap_tree
from shardkeep.remap.inverse import inverse_of
from shardkeep.remap.rules import Rule
from support import assert_same

LAYERS = {f"layers/{i}/{name}": np.zeros((4, 6)) for i in range(3) for name in ("q", "k")}


def inverse(rules: list[Rule], tree: Any = LAYERS, loaded: list[str] | None = None) -> list[Rule]:
    found = remap_tree(saved_tree(tree), rules)
    paths = [leaf.path for leaf in found.tree.leaves if loaded is None or leaf.key in loaded]
    return list(inverse_of(found.changes, paths))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([remap.rename("layers/(.*)", r"blocks/\1")], [remap.rename("blocks/(.*)", r"layers/\1")]),
        ([remap.stack("layers/{i}/(.*)", r"x/\1", 1)], [remap.unstack("x/(.*)", r"layers/{i}/\1", 1)]),
        (
            [remap.unstack("layers/0/(.*)", r"z/\1/{i}")],
            [remap.stack("z/(.*)/{i}", r"layers/0/\1")],
        ),
        (
            [remap.split("(.*)/q", [r"\1/a", r"\1/b"], sizes=[2, 4])],
            [remap.fuse(["(.*)/a", "(.*)/b"], r"\1/q")],
        ),
        (
            [remap.fuse(["(.*)/q", "(.*)/k"], r"\1/qk")],
            [remap.split("(.*)/qk", [r"\1/q", r"\1/k"], sizes=[6, 6])],
        ),
        ([remap.transpose(".*/q", (1, 0))], [remap.transpose(".*/q", (1, 0))]),
        ([remap.reshape(".*", (24,))], [remap.reshape(".*", (4, 6))]),
        ([remap.resize(".*/q", -1, size=8)], [remap.resize(".*/q", 1, size=6)]),
        ([remap.copy("layers/0/q", "tied")], [remap.drop("tied")]),
        ([remap.apply(".*", np.sqrt, inverse=np.square)], None),
    ],
)
def test_the_inverse_is_as_short_as_the_rule(rules: list[Rule], expected: list[Rule] | None) -> None:
    found = inverse(rules)
    if expected is not None:
        assert found == expected
    assert len(found) == 1


def test_a_name_with_the_text_of_the_index_is_no_index() -> None:
    found = inverse([remap.rename(r"\{i\}/(.*)", r"x/\1")], {"{i}/a": np.zeros(2), "{i}/b": np.zeros(2)})
    assert found == [remap.rename("x/(.*)", r"\{i}/\1")]


def test_several_rules_are_undone_from_the_last_to_the_first() -> None:
    rules = [
        remap.stack("layers/{i}/(.*)", r"layers/\1"),
        remap.fuse(["(.*)/q", "(.*)/k"], r"\1/qk"),
        remap.transpose(".*/qk", (0, 2, 1)),
    ]
    assert inverse(rules) == [
        remap.transpose(".*/qk", (0, 2, 1)),
        remap.split("(.*)/qk", [r"\1/q", r"\1/k"], sizes=[6, 6]),
        remap.unstack("layers/(.*)", r"layers/{i}/\1"),
    ]


@pytest.mark.parametrize(
    ("rules", "tree"),
    [
        ([remap.rename("(a|b).*", r"\1/w")], {"a1": np.zeros(2), "b1": np.zeros(3)}),
        ([remap.stack("layer_{i}", "x")], {"layer_00": np.zeros(2), "layer_01": np.zeros(2)}),
        ([remap.rename("l/(.)/(.)", r"l/\2/\1")], {"l/0/1": np.zeros(2), "l/1/0": np.zeros(3), "l/0/0": np.zeros(1)}),
        ([remap.reshape(".*", (-1,))], {"a": np.zeros((2, 3)), "b": np.zeros((3, 4))}),
        (
            [remap.within("opt/(mu|nu)", [remap.stack("{i}", "x")])],
            {f"opt/{m}/{i}": np.zeros(2) for m in ("mu", "nu") for i in (0, 1)},
        ),
        ([remap.rename(r"a\.b", r"x\{i}")], {"a.b": np.zeros(2)}),
        ([remap.rename("(.*)/{i}", r"\1/n")], {"a/7": np.zeros(2), "b/8": np.zeros(3)}),
        ([remap.split("(.*)/l{i}", [r"\1/q", r"\1/k"])], {"a/l7": np.zeros(2), "b/l8": np.zeros(4)}),
    ],
)
def test_leaves_are_named_one_by_one_where_the_pattern_cannot_be_turned_around(rules: list[Rule], tree: Any) -> None:
    undone = [*rules, *inverse(rules, tree)]
    found = {leaf.key: leaf.shape for leaf in remap_tree(saved_tree(tree), undone).tree.leaves}
    assert found == {key: value.shape for key, value in tree.items()}


def test_leaves_that_were_not_loaded_are_left_out() -> None:
    rules = [remap.stack("layers/{i}/(.*)", r"x/\1"), remap.transpose("x/k", (2, 0, 1))]
    assert inverse(rules, loaded=["x/q"]) == [remap.unstack("x/(.*)", r"layers/{i}/\1")]
    assert inverse([remap.copy("layers/0/q", "tied")], loaded=["tied"]) == [remap.rename("tied", "layers/0/q")]


@pytest.mark.parametrize(
    ("rules", "loaded", "problem"),
    [
        ([remap.drop(".*/k")], None, r"drop\('\.\*/k'\) cannot be undone: what it drops is lost"),
        ([remap.resize(".*", 0, size=2)], None, r"cannot be undone: it removes 2 of 4 elements"),
        ([remap.apply(".*", np.sqrt)], None, r"apply\('\.\*', sqrt\) cannot be undone: pass inverse="),
        ([remap.split("layers/0/q", ["a", "b"])], ["a"], r"cannot be undone: 'b' is not loaded"),
    ],
)
def test_what_is_lost_cannot_be_undone(rules: list[Rule], loaded: list[str] | None, problem: str) -> None:
    with pytest.raises(RemapError, match=problem):
        inverse(rules, loaded=loaded)


SQUARE = np.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize(
    ("rules", "tree"),
    [
        ([remap.within("mu", [remap.transpose(".*/w", (1, 0))])], {"params/d/w": SQUARE, "mu/d/w": SQUARE}),
        ([remap.within("mu", [remap.within("d", [remap.transpose(".*", (1, 0))])])], {"mu/d/w": SQUARE, "d/w": SQUARE}),
        ([remap.within("ema", [remap.apply(".*", negate, inverse=negate)])], {"w": SQUARE, "ema/w": SQUARE}),
        ([remap.rename("(.*)/(.*)", r"\2/\1")], {"a/b/c": SQUARE, "c/a/b": SQUARE + 1, "b/c/a": SQUARE + 2}),
        ([remap.apply("b", negate, elementwise=True, inverse=negate)], {"a": SQUARE, "b": SQUARE}),
        ([remap.transpose("a", (1, 0)), remap.rename("(.)", r"x/\1")], {"a": SQUARE, "b": SQUARE}),
    ],
)
def test_arrays_of_one_shape_are_told_apart(rules: list[Rule], tree: Any, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "old", nested(tree))
    plan = shardkeep.plan_load(tmp_path / "old", remap=rules)
    undone = eval(repr(plan.inverse()), {"remap": remap, "negate": negate})
    assert undone == plan.inverse()
    shardkeep.save(tmp_path / "new", plan.load())
    assert_same(shardkeep.load(tmp_path / "new", remap=undone), nested(tree))


def test_rules_within_places_are_undone_within_them() -> None:
    rules = [remap.within("opt/(mu|nu)", [remap.stack("{i}/(.*)", r"x/\1"), remap.transpose("x/w", (2, 0, 1))])]
    found = inverse(rules, {f"opt/{at}/{i}/w": np.zeros((2, 2)) for at in ("mu", "nu") for i in range(2)})
    assert found == [
        remap.within("opt/(mu|nu)", remap.transpose("x/w", (1, 2, 0))),
        remap.within("opt/(mu|nu)", remap.unstack("x/(.*)", r"{i}/\1")),
    ]


def test_what_the_template_adds_is_left_alone(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "old", {"d": {"w": SQUARE}})
    template = {"d": {"w": SQUARE}, "new": {"w": SQUARE}}
    rules = [remap.transpose(".*/w", (1, 0))]
    plan = shardkeep.plan_load(tmp_path / "old", remap=rules, template=template, missing="keep")
    shardkeep.save(tmp_path / "new", plan.load())
    assert_same(shardkeep.load(tmp_path / "new", remap=plan.inverse()), template)


def test_an_array_of_the_templates_size_cannot_be_copied_before_that_is_known(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"e": np.zeros((2, 2))})
    template = {"e": np.zeros((1, 2)), "f": np.zeros((3, 2))}
    with pytest.raises(RemapError, match=r"copy\('e', 'f'\), leaf 'e': its size comes from .* or resize it last"):
        shardkeep.plan_load(tmp_path / "c", template=template, remap=[remap.resize("e"), remap.copy("e", "f")])
    rules = [remap.copy("e", "f"), remap.resize("f")]
    plan = shardkeep.plan_load(tmp_path / "c", template={"f": np.zeros((3, 2))}, remap=rules)
    assert plan.inverse() == [remap.resize("f", size=2), remap.rename("f", "e")]
