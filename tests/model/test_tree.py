"""A tree is taken apart into leaves and a Skeleton, goes through JSON, and is put together again."""

import json
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardkeep.errors import IntegrityError, TreeError
from shardkeep.model.tree import Skeleton, flatten, join_key, name_children, nest, split_key
from support import Dense, Keyed, Point, Unkeyed, assert_same

any_text = st.text(st.integers(0, 0x10FFFF).map(chr), max_size=8)
names = any_text | st.sampled_from(["", ".", "..", "\\", "\\.", "a.b", "/", "0", "__metadata__"])
paths = st.lists(names, min_size=1, max_size=5).map(tuple)


@given(paths)
@example(("",))
@example(("", ""))
@example(("\\", "."))
@example(("a\\", "b"))
@example((".." * 500,))
def test_a_key_can_be_undone(path: tuple[str, ...]) -> None:
    assert split_key(join_key(path)) == path


@given(paths, paths)
def test_different_paths_have_different_keys(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    assert (join_key(first) == join_key(second)) == (first == second)


def test_the_key_of_an_ordinary_leaf_is_readable() -> None:
    _, leaves = flatten({"layers": [{"w": 1}], "step": 2})
    assert [leaf.key for leaf in leaves] == ["layers/0/w", "step"]


scalar_keys: st.SearchStrategy[Hashable] = (
    any_text
    | st.integers()
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none()
    | st.binary(max_size=4)
    | st.sampled_from(["1", "\\int:1", "True", "None", "1.0", "b'1'"])
)
dict_keys = st.recursive(scalar_keys, lambda inner: st.tuples(inner, inner), max_leaves=3)


@given(st.lists(dict_keys, max_size=8, unique=True))
@example([1, "1", "\\int:1", "\\int:1\\0"])
@example([None, "None", (1,), "(1,)", b"a", "b'a'"])
def test_children_have_distinct_names_the_same_on_every_machine(keys: list[Any]) -> None:
    found = name_children(keys)
    assert len(set(found)) == len(keys)
    assert found == name_children(list(keys))


def test_a_string_key_keeps_its_text_as_name() -> None:
    assert name_children(["a", 1, None]) == ("a", "1", "None")
    assert name_children(["1", 1])[0] == "1"


trees = st.recursive(
    st.none() | st.integers(0, 9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(dict_keys, inner, max_size=3)
        | st.dictionaries(any_text, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(any_text, inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.builds(Point, inner, inner)
        | st.builds(Dense, inner, inner, any_text)
        | st.builds(Keyed, inner, inner, scalar_keys)
        | st.builds(Unkeyed, st.lists(inner, max_size=3), st.none() | dict_keys)
    ),
    max_leaves=12,
)


@given(trees)
@example({"\ud83d\ude00": 1, "😀": 2})
@example({1: 1, "1": 2, 1.5: 3, None: 4, b"1": 5, (1, "1"): 6})
@example(())
@example([[], {}, (), None, {"a": {}}])
def test_a_tree_goes_through_json_and_comes_back(tree: Any) -> None:
    skeleton, leaves = flatten(tree)
    again = Skeleton.from_json(json.loads(json.dumps(skeleton.to_json())))
    assert again.paths() == skeleton.paths() == [leaf.path for leaf in leaves]
    assert_same(again.rebuild([leaf.value for leaf in leaves]), tree)


@given(trees)
def test_leaves_are_those_of_jax(tree: Any) -> None:
    """Mixed keys, which JAX cannot sort, are taken in their own order; the set of leaves is the same."""
    try:
        expected = jax.tree.leaves(tree)
    except (TypeError, ValueError):
        return
    assert sorted(leaf.value for leaf in flatten(tree)[1]) == sorted(expected)


def test_dicts_keep_their_order() -> None:
    skeleton, leaves = flatten({"b": 1, "a": 2})
    assert [leaf.key for leaf in leaves] == ["b", "a"]
    assert list(skeleton.rebuild([1, 2])) == ["b", "a"]


def test_none_is_no_leaf_and_keeps_its_place() -> None:
    skeleton, leaves = flatten([None, 1, {"a": None}])
    assert len(leaves) == 1
    assert skeleton.rebuild([7]) == [None, 7, {"a": None}]


def test_none_can_be_made_a_leaf() -> None:
    _, leaves = flatten([None, 1], is_leaf=lambda x: x is None)
    assert [leaf.value for leaf in leaves] == [None, 1]


@pytest.mark.parametrize("key", [frozenset(), object(), Ellipsis, (1, object()), range(2)])
def test_a_key_that_cannot_be_stored_is_refused(key: Any) -> None:
    with pytest.raises(TreeError, match="dict key"):
        flatten({key: 1})


def test_the_message_about_a_key_is_a_sentence() -> None:
    with pytest.raises(TreeError, match=r"dict key <object.* is an object; keys can be str"):
        flatten({object(): 1})
    with pytest.raises(TreeError, match=r"dict key range\(0, 2\) is a range; keys can be str"):
        flatten({range(2): 1})


@pytest.mark.parametrize("key", [10**5000, (1, 10**5000)], ids=["int", "tuple"])
def test_a_key_python_does_not_write_out_is_refused_in_words(key: Any) -> None:
    with pytest.raises(
        TreeError, match=r"dict key an? (integer of 16610 bits|tuple) is too long for the name of a leaf"
    ):
        flatten({key: 1})


@pytest.mark.parametrize("key", [np.str_("a"), np.bytes_(b"a"), (np.str_("a"), 1)])
def test_a_numpy_text_key_is_refused_by_name_too(key: Any) -> None:
    with pytest.raises(TreeError, match="dict key"):
        flatten({key: 1})


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(TreeError, match=r"nested|deep"):
        flatten(tree)


@pytest.mark.parametrize("container", ["dict", "list", "namedtuple", "custom"])
@pytest.mark.parametrize("depth", [60, 200, 330, 450, 700, 5000])
def test_a_tree_that_can_be_taken_apart_can_be_written_and_read(container: str, depth: int) -> None:
    """Too much depth is refused before anything is written, never found out by whoever loads it."""
    tree: Any = 1
    for _ in range(depth):
        tree = {
            "dict": lambda t: {"a": t},
            "list": lambda t: [t],
            "namedtuple": lambda t: Point(t, None),
            "custom": lambda t: Keyed(t, None),
        }[container](tree)
    try:
        skeleton, leaves = flatten(tree)
    except TreeError:
        if depth <= 60:
            raise
        return
    again = Skeleton.from_json(json.loads(json.dumps(skeleton.to_json())))
    assert again.paths() == [leaf.path for leaf in leaves]
    assert len(flatten(again.rebuild([1]))[1]) == 1


def test_pruning_removes_dict_entries_and_leaves_none_elsewhere() -> None:
    skeleton, _ = flatten({"a": {"x": 1, "y": 2}, "b": [3, {"z": 4}], "c": Point(5, 6), "d": {"e": {"f": 7}}})
    kept = skeleton.prune([False, True, True, False, False, True, False])
    assert kept.rebuild(["y", 3, 6]) == {"a": {"y": "y"}, "b": [3, None], "c": Point(None, 6)}


@given(trees, st.data())
def test_pruning_keeps_exactly_the_leaves_asked_for(tree: Any, data: st.DataObject) -> None:
    skeleton, leaves = flatten(tree)
    keep = data.draw(st.lists(st.booleans(), min_size=len(leaves), max_size=len(leaves)))
    kept = [leaf for leaf, wanted in zip(leaves, keep, strict=True) if wanted]
    pruned = skeleton.prune(keep)
    again = flatten(pruned.rebuild([leaf.value for leaf in kept]))[1]
    assert [leaf.value for leaf in again] == [leaf.value for leaf in kept]


@pytest.mark.parametrize(
    "data",
    [
        1,
        "x",
        [],
        {},
        {"set": []},
        {"dict": [[{"int": "0x1"}, 0], [{"int": "0x1"}, 0]]},
        {"dict": [[["a"], 0]]},
        {"dict": [["a"]]},
        {"list": 3},
        {"list": [3]},
        {"namedtuple": "a:B"},
        {"custom": "a:B", "children": [["x", 0], ["x", 0]]},
        {"custom": "a:B", "children": 3},
        {"custom": "a:B", "children": [], "aux": {"int": 1}},
    ],
)
def test_a_malformed_structure_is_an_integrity_error(data: Any) -> None:
    with pytest.raises(IntegrityError, match="malformed"):
        Skeleton.from_json(data)


def test_a_structure_nested_without_end_is_an_integrity_error() -> None:
    data: Any = 0
    for _ in range(100_000):
        data = {"list": [data]}
    with pytest.raises(IntegrityError, match="malformed"):
        Skeleton.from_json(data)


def _unnest(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for name, child in tree.items() for k, v in _unnest(child, (*path, name)).items()}


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "a.b", "", "0", ".", "a.b.a"]), max_size=3).map(tuple), unique=True)
)
@example([("a",), ("a", "b")])
@example([("a.b",), ("a", "b"), ("a",)])
@example([("a.b", "c"), ("a",), ("a", "b.c")])
def test_nesting_loses_no_leaf(found: list[tuple[str, ...]]) -> None:
    prefix_free = [p for p in found if not any(p != q and q[: len(p)] == p for q in found)]
    nested = nest([(path, number) for number, path in enumerate(prefix_free)])
    assert sorted(_unnest(nested).values()) == list(range(len(prefix_free)))


def test_arrays_are_leaves_whatever_they_hold() -> None:
    array = np.array([{"a": 1}], dtype=object)
    _, leaves = flatten({"x": array})
    assert leaves[0].value is array


def test_a_name_with_very_many_dots_is_one_name() -> None:
    """Levels of it would take memory in proportion to the square of its length."""
    name = ".".join(["a"] * 200_000)
    assert nest([((name,), 1), (("b.c",), 2)]) == {name: 1, "b": {"c": 2}}
