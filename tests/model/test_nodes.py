"""Containers are rebuilt by their classes; a class that is not there, or does not fit, is replaced by a stand-in."""

import json
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from shardkeep import OpaqueNode
from shardkeep.errors import TreeError
from shardkeep.model.tree import Skeleton, flatten
from support import Keyed, Point


def test_a_class_that_is_not_imported_is_replaced_by_a_stand_in() -> None:
    skeleton, _ = flatten({"layer": Keyed(1, 2, "tag"), "point": Point(3, 4)})
    text = json.dumps(skeleton.to_json()).replace("support:", "nowhere:")
    foreign = Skeleton.from_json(json.loads(text))
    assert sorted(foreign.replaced()) == ["nowhere:Keyed", "nowhere:Point"]
    tree = foreign.rebuild([1, 2, 3, 4])
    assert tree["layer"] == OpaqueNode("nowhere:Keyed", {"left": 1, "right": 2})
    assert tree["point"].x == 3
    assert tree["point"]._fields == ("x", "y")
    assert "nowhere" not in sys.modules


def test_a_stand_in_can_be_saved_again() -> None:
    tree = {"a": OpaqueNode("models:Dense", {"kernel": 1, "bias": [2, None]})}
    skeleton, leaves = flatten(tree)
    assert [leaf.key for leaf in leaves] == ["a/kernel", "a/bias/0"]
    again = Skeleton.from_json(json.loads(json.dumps(skeleton.to_json())))
    assert again.rebuild([1, 2]) == tree
    assert jax.tree.map(lambda x: x + 1, tree)["a"].kernel == 2


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "subprocess:Popen", "shardkeep.model.tree:Skeleton"])
def test_a_file_cannot_choose_a_class_that_is_no_registered_node(name: str) -> None:
    for document in (
        {"custom": name, "children": [["a", 0]], "aux": None},
        {"namedtuple": name, "children": [["a", 0]]},
    ):
        rebuilt = Skeleton.from_json(document).rebuild(["echo"])
        assert isinstance(rebuilt, OpaqueNode | tuple)
        assert rebuilt.a == "echo"


def test_a_namedtuple_whose_fields_changed_is_a_stand_in() -> None:
    rebuilt = Skeleton.from_json({"namedtuple": "support:Point", "children": [["x", 0], ["z", 0]]}).rebuild([1, 2])
    assert type(rebuilt) is not Point
    assert rebuilt.z == 2


def test_a_namedtuple_with_its_own_constructor_is_rebuilt_without_running_it() -> None:
    module = sys.modules["support"]
    base = namedtuple("Strict", ["x"])

    class Strict(base):
        __slots__ = ()

        def __new__(cls, x: Any) -> Any:
            raise AssertionError("ran")

    Strict.__module__, Strict.__qualname__ = "support", "Strict"
    module.Strict = Strict  # type: ignore[attr-defined]
    try:
        rebuilt = Skeleton.from_json({"namedtuple": "support:Strict", "children": [["x", 0]]}).rebuild([5])
        assert type(rebuilt) is Strict
        assert rebuilt.x == 5
    finally:
        del module.Strict  # type: ignore[attr-defined]


def _through_json(tree: Any) -> Any:
    skeleton, leaves = flatten(tree)
    return Skeleton.from_json(json.loads(json.dumps(skeleton.to_json()))).rebuild([leaf.value for leaf in leaves])


@pytest.fixture
def in_support() -> Iterator[Callable[[type], type]]:
    """Classes of a test as if its module had them, so that they can be found by name."""
    module, added = sys.modules["support"], []

    def add(cls: type) -> type:
        cls.__module__, cls.__qualname__ = "support", cls.__name__
        setattr(module, cls.__name__, cls)
        added.append(cls.__name__)
        return cls

    yield add
    for name in added:
        delattr(module, name)


def test_a_dataclass_that_takes_itself_apart_in_its_own_way_is_rebuilt(in_support: Callable[[type], type]) -> None:
    @jax.tree_util.register_pytree_node_class
    @dataclass
    class Doubled:
        a: Any
        b: Any

        def tree_flatten(self) -> Any:
            return (self.a * 2,), self.b

        @classmethod
        def tree_unflatten(cls, aux: Any, children: Any) -> Any:
            return cls(children[0], aux)

    in_support(Doubled)
    again = _through_json(Doubled(1, "tag"))
    assert type(again) is Doubled
    assert (again.a, again.b) == (2, "tag")


def test_a_dataclass_whose_own_code_fails_on_sight_is_a_stand_in(
    in_support: Callable[[type], type], caplog: pytest.LogCaptureFixture
) -> None:
    """Comparing its fields with those that were saved runs the class's code, which may not like what it is given."""

    @jax.tree_util.register_pytree_with_keys_class
    @dataclass
    class Picky:
        a: Any
        b: Any

        def tree_flatten_with_keys(self) -> Any:
            if isinstance(self.a, str):
                raise ValueError("no text, please")
            return ((jax.tree_util.GetAttrKey("a"), self.a),), (self.b,)

        @classmethod
        def tree_unflatten(cls, aux: Any, children: Any) -> Any:
            return cls(children[0], *aux)

    in_support(Picky)
    again = _through_json(Picky(1, 2))
    assert isinstance(again, OpaqueNode)
    assert again.a == 1
    assert "no text, please" in caplog.text


def test_other_aux_data_needs_a_template() -> None:
    skeleton, _ = flatten(Keyed(1, 2, tag=len))
    assert skeleton.rebuild([3, 4]).tag is len
    again = Skeleton.from_json(json.loads(json.dumps(skeleton.to_json())))
    assert list(again.replaced()) == ["support:Keyed"]


def test_aux_data_with_a_numpy_text_needs_a_template_too() -> None:
    skeleton, _ = flatten(Keyed(1, 2, tag=np.str_("a")))
    again = Skeleton.from_json(json.loads(json.dumps(skeleton.to_json())))
    assert list(again.replaced()) == ["support:Keyed"]


def test_a_class_that_refuses_what_was_saved_says_so() -> None:
    skeleton = Skeleton.from_json(
        {"custom": "support:Keyed", "children": [["left", 0], ["right", 0], ["more", 0]], "aux": None}
    )
    with pytest.raises(TreeError, match=r"support:Keyed rejected the saved values.*template="):
        skeleton.rebuild([1, 2, 3])
