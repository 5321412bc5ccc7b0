"""What rules did is undone by rules, in few words where that can be; what cannot be undone says so."""

from typing import Any

import numpy as np
import pytest

from remap.test_regions import saved_tree
from shardkeep import RemapError, remap
from shardkeep.remap.changes import remap_tree
from shardkeep.remap.inverse import inverse_of
from shardkeep.remap.rules import Rule

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
        ([remap.resize(".*", 0, size=2)], None, r"cannot be undone: it cuts 2 of 4 elements off"),
        ([remap.apply(".*", np.sqrt)], None, r"apply\('\.\*', sqrt\) cannot be undone: pass inverse="),
        ([remap.split("layers/0/q", ["a", "b"])], ["a"], r"cannot be undone: 'b' is not loaded"),
    ],
)
def test_what_is_lost_cannot_be_undone(rules: list[Rule], loaded: list[str] | None, problem: str) -> None:
    with pytest.raises(RemapError, match=problem):
        inverse(rules, loaded=loaded)
