"""Containers whose leaves are all as before stay what they are; the others become dicts."""

from typing import Any

import numpy as np

from remap.test_regions import saved_tree
from shardkeep import remap
from shardkeep.model.tree import flatten
from shardkeep.remap.changes import remap_tree
from shardkeep.remap.skeletons import rebuilt
from support import Point, assert_same


def changed(tree: Any, rules: Any) -> Any:
    skeleton, leaves = flatten(tree)
    flat = saved_tree({leaf.key: np.zeros(leaf.value) for leaf in leaves})
    found = remap_tree(flat, rules)
    made = rebuilt(skeleton, [leaf.path for leaf in leaves], [leaf.path for leaf in found.tree.leaves])
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
    assert rebuilt(skeleton, paths, paths) is skeleton
