"""Containers whose leaves are all as before stay what they are; the others become dicts."""

from typing import Any

import numpy as np

from remap.test_regions import saved_tree
from shardkeep import remap
from shardkeep.model.tree import flatten
from shardkeep.remap.changes import Changes, remap_tree
from shardkeep.remap.skeletons import blanks_of, rebuilt
from support import Point, assert_same


def changed(tree: Any, rules: Any) -> Any:
    skeleton, leaves = flatten(tree)
    flat = saved_tree({leaf.key: np.zeros(leaf.value) for leaf in leaves})
    found = remap_tree(flat, rules)
    blanks = blanks_of(skeleton)
    changes = Changes({leaf.path: leaf for leaf in flat.leaves}, blanks={path: path for path in blanks})
    for rule in rules:
        changes.apply(rule)
    kept = {path: blanks[was] for path, was in changes.blanks.items()}
    made = rebuilt(skeleton, [leaf.path for leaf in leaves], [leaf.path for leaf in found.tree.leaves], kept)
    shapes = {leaf.path: leaf.shape for leaf in found.tree.leaves}
    return made.rebuild([shapes[path][0] for path in made.paths()])


def test_only_what_changes_becomes_a_dict() -> None:
    tree = {"params": {"old": 1, "w": 2}, "opt": [Point(3, (4, None)), {5: 6}], 7: 8}
    found = changed(tree, [remap.rename("params/old", "params/new/v")])
    assert_same(found, {"params": {"new": {"v": 1}, "w": 2}, "opt": [Point(3, (4, None)), {5: 6}], 7: 8})


def test_a_container_that_loses_or_gets_a_leaf_is_a_dict_with_its_names() -> None:
    assert_same(changed([1, Point(2, 3)], [remap.drop("1/x")]), {"0": 1, "1": {"y": 3}})
    assert_same(changed({"a": (1, 2), 3: 4}, [remap.rename("3", "a/2")]), {"a": {"0": 1, "1": 2, "2": 4}})
    assert_same(changed({"a": 1}, [remap.drop("a")]), {})


def test_nothing_changes_without_a_change() -> None:
    skeleton, leaves = flatten([1, None, Point(2, 3)])
    paths = [leaf.path for leaf in leaves]
    assert rebuilt(skeleton, paths, paths, blanks_of(skeleton)) is skeleton


def test_positions_without_a_leaf_stay_and_move_along() -> None:
    tree = {"a": 1, "stats": {}, "rng": None, "m": {"w": 2, "drop": Point(None, None)}}
    found = changed(tree, [remap.rename("a", "b")])
    assert found == ({"b": 1, "stats": {}, "rng": None, "m": tree["m"]})
    found = changed(tree, [remap.rename("m/(.*)", r"n/\1")])
    assert found == ({**{k: tree[k] for k in ("a", "stats", "rng")}, "n": {"w": 2, "drop": {"x": None, "y": None}}})
    found = changed({"l": [{"w": 1, "p": None}, {"w": 1, "p": None}]}, [remap.stack("l/{i}/(.*)", r"l/\1")])
    assert found == {"l": {"w": 2, "p": None}}  # the first size of its shape
    assert changed(tree, [remap.drop("m/.*|rng")]) == {"a": 1, "stats": {}}
    within = remap.within("m", [remap.rename("(.*)", r"n/\1")])
    assert changed(tree, [within])["m"] == {"n": {"w": 2, "drop": {"x": None, "y": None}}}


def test_leaves_take_the_places_of_positions_without_one() -> None:
    assert changed({"a": 1, "b": None}, [remap.rename("a", "b")]) == {"b": 1}
    assert changed({"a": 1, "b": None}, [remap.rename("a", "b/c")]) == {"b": {"c": 1}}
    assert changed({"a": 1, "b": {"c": None}}, [remap.rename("a", "b")]) == {"b": 1}
