"""Which leaves a load reads and what each is to become: decided from the manifest, before anything is read."""

import dataclasses
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import shardkeep
from shardkeep.loading.matching import Wanted
from shardkeep.loading.request import LoadRequest, Policy
from shardkeep.loading.select import Choice, choose, choose_places
from shardkeep.model.leaves import PrngKeys
from shardkeep.model.manifest import Tree
from shardkeep.model.values import is_data
from support import mesh_of

P = PartitionSpec
MESH = mesh_of(8)
Abstract = jax.ShapeDtypeStruct
Saved = Callable[..., Tree]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """What the manifest of a saved tree says."""

    def save(tree: Any) -> Tree:
        shardkeep.save(tmp_path / "run", tree, overwrite=True)
        return shardkeep.inspect(tmp_path / "run").tree()

    return save


TREE: dict[str, Any] = {
    "w": np.ones((8, 2), np.float32),
    "j": jnp.ones((8, 2)),
    "n": 3,
    "deep": {"k": jax.random.split(jax.random.key(0), 8), "e": jnp.zeros((0, 3))},
}


def chosen(tree: Tree, **asked: Any) -> Choice:
    request = LoadRequest(**asked)
    choice = choose(tree, request)
    choose_places([w for w in choice.wanted if w is not None], "", request)
    return choice


def by_key(choice: Choice) -> dict[str, Wanted]:
    return {w.stored.key: w for w in choice.wanted if w is not None}


class TestByName:
    def test_everything_is_wanted_in_saved_order_as_it_was(self, saved: Saved) -> None:
        choice = chosen(saved(TREE))
        assert list(by_key(choice)) == ["w", "j", "n", "deep/k", "deep/e"]
        assert {key: w.as_numpy for key, w in by_key(choice).items() if w.as_numpy} == {"w": True}
        assert all(
            (w.like, w.shape, w.dtype, w.place.explicit) == (None, None, None, False) for w in choice.wanted if w
        )
        assert choice.kept == {}
        assert choice.skeleton.rebuild(list("abcde")) == {"w": "a", "j": "b", "n": "c", "deep": {"k": "d", "e": "e"}}

    def test_numpy_arrays_become_jax_arrays_where_all_do(self, saved: Saved) -> None:
        assert not any(w.as_numpy for w in by_key(chosen(saved(TREE), policy=Policy(all_jax=True))).values())

    @pytest.mark.parametrize(
        ("pattern", "keys"),
        [
            ("deep/", ["deep/k", "deep/e"]),
            ("^k", []),
            ("k$", ["deep/k"]),
            ("^(w|n)$", ["w", "n"]),
            ("", ["w", "j", "n", "deep/k", "deep/e"]),
        ],
    )
    def test_include_is_searched_in_the_names_joined_by_slashes(
        self, pattern: str, keys: list[str], saved: Saved
    ) -> None:
        tree = saved(TREE)
        if keys:
            choice = chosen(tree, include=re.compile(pattern))
            assert list(by_key(choice)) == keys
            assert len(choice.skeleton.paths()) == len(keys)
        else:
            with pytest.raises(shardkeep.MissingLeafError, match=r"include='\^k' matches no leaf; the keys are w, j, "):
                chosen(tree, include=re.compile(pattern))

    def test_dots_in_names_are_not_escaped_for_include(self, saved: Saved) -> None:
        choice = chosen(saved({"a.b": {"c\\": 1}, "d": 2}), include=re.compile(r"a\.b/c\\$"))
        assert [w.stored.path for w in choice.wanted if w] == [("a.b", "c\\")]

    def test_of_many_keys_five_are_shown_and_of_none_that_there_are_none(self, saved: Saved) -> None:
        with pytest.raises(KeyError, match=r"the keys are 0, 1, 2, 3, 4, …$"):
            chosen(saved(list(range(9))), include=re.compile("x"))

    def test_in_an_empty_tree_nothing_matches(self, saved: Saved) -> None:
        with pytest.raises(KeyError, match=r"matches no leaf; the tree has none"):
            chosen(saved({}), include=re.compile(".*"))


class TestByTemplate:
    def test_leaves_come_in_the_order_and_structure_of_the_template(self, saved: Saved) -> None:
        template = {"deep": {"e": Abstract((0, 3), "float32")}, "j": Abstract((8, 2), "float32")}
        choice = chosen(saved(TREE), template=template)
        assert list(by_key(choice)) == ["deep/e", "j"]
        assert choice.skeleton.rebuild([1, 2]) == {"deep": {"e": 1}, "j": 2}

    def test_an_include_that_matches_nothing_in_a_template_is_an_error(self, saved: Saved) -> None:
        """Else nothing is loaded, without a word, and a run goes on with new weights."""
        tree = saved({"params": {"w": 1, "b": 2}})
        template = {"params": {"w": 0, "b": 0}}
        for pattern in ("wieghts", r"params\.w"):
            told = "matches no leaf of the template; the keys are params/w, params/b$"
            with pytest.raises(shardkeep.MissingLeafError, match=told):
                chosen(tree, template=template, include=re.compile(pattern))
        with pytest.raises(shardkeep.MissingLeafError, match="of the template; the tree has none"):
            chosen(tree, template={}, include=re.compile("w"))
        assert chosen(tree, template={"params": ...}, include=re.compile("params")).kept == {0: ...}

    def test_what_include_leaves_out_is_kept_by_its_number(self, saved: Saved) -> None:
        template = {"a": "mine", "j": jnp.zeros((8, 2)), "w": None, "z": 5}
        choice = chosen(saved(TREE), template=template, include=re.compile("j"))
        assert [w and w.stored.key for w in choice.wanted] == [None, "j", None]
        assert choice.kept == {0: "mine", 2: 5}

    def test_a_path_goes_before_a_dotted_name(self, saved: Saved) -> None:
        tree = saved({"a": {"b": 1}, "a.b": 2})
        for template, value in (({"a": {"b": 0}}, 1), ({"a.b": 0}, 2)):
            (wanted,) = chosen(tree, template=template).wanted
            assert wanted is not None
            assert wanted.stored.value == value

    @pytest.mark.parametrize("flat", ["deep/e", "deep.e"])
    def test_a_flat_one_may_have_slashes_or_dots(self, flat: str, saved: Saved) -> None:
        (wanted,) = chosen(saved(TREE), template={flat: Abstract((0, 3), "float32")}).wanted
        assert wanted is not None
        assert wanted.stored.key == "deep/e"

    def test_a_dotted_name_that_two_leaves_have_is_not_guessed(self, saved: Saved) -> None:
        tree = saved({"a": {"b.c": 1}, "a.b": {"c": 2}, "x": {"y.z": 3}})
        (wanted,) = chosen(tree, template={"x": {"y": {"z": 0}}}).wanted
        assert wanted is not None
        assert wanted.stored.value == 3
        with pytest.raises(shardkeep.MissingLeafError, match=r"Missing value for key 'a/b/c'"):
            chosen(tree, template={"a": {"b": {"c": 0}}})

    def test_a_bare_template_for_a_tree_is_called_the_tree_itself(self, saved: Saved) -> None:
        with pytest.raises(
            shardkeep.MissingLeafError, match=r"1 leaf .*\n  Missing value for key '\(the tree itself\)'"
        ):
            chosen(saved(TREE), template=3)

    def test_every_leaf_that_does_not_fit_is_told_the_missing_ones_first(self, saved: Saved) -> None:
        template = {"w": jnp.zeros(3), "m": 1, "deep": {"kk": 1}, "n": "text"}
        with pytest.raises(shardkeep.MissingLeafError, match="4 of the template's 5 leaves") as told:
            chosen(saved(TREE), template={**template, "j": Abstract((8, 2), "int32")})
        lines = [
            "Missing value for key 'm'",
            "Missing value for key 'deep/kk'",
            "Array shape mismatch for key 'w': saved (8, 2), the template has (3,)",
            "Type mismatch for key 'j': saved float32, the template has int32",
        ]
        assert told.value.problems == tuple(lines)
        lines[1] += "; the checkpoint has 'deep/k'"
        assert str(told.value).splitlines()[1:-1] == [f"  {line}" for line in lines]

    @pytest.mark.parametrize(
        ("like", "dtype", "as_numpy"),
        [
            (jnp.zeros((8, 2), jnp.bfloat16), "bfloat16", False),
            (np.zeros((8, 2), np.float64), "float64", True),
            (Abstract((8, 2), np.float16), "float16", False),
        ],
    )
    def test_the_templates_dtype_wins_over_the_one_asked_for(
        self, like: Any, dtype: str, as_numpy: bool, saved: Saved
    ) -> None:
        wanted = by_key(chosen(saved(TREE), template={"w": like}, dtype=np.dtype("float32")))["w"]
        assert (wanted.dtype, wanted.as_numpy) == (np.dtype(dtype), as_numpy)

    def test_a_number_and_a_0d_array_stand_for_each_other(self, saved: Saved) -> None:
        tree = saved({"n": 3, "a": jnp.float32(2.5)})
        found = by_key(chosen(tree, template={"n": Abstract((), "int32"), "a": 1.0}))
        assert found["n"].like == Abstract((), "int32")
        assert (found["a"].like, found["a"].as_numpy) == (1.0, True)

    @pytest.mark.parametrize(
        ("like", "found"),
        [
            (Abstract((8,), jax.random.key(0, impl="rbg").dtype), r"key<rbg>\[8\]"),
            (Abstract((8, 2), "uint32"), r"uint32\[8, 2\]"),
            (7, "7"),
        ],
    )
    def test_prng_keys_are_only_ever_themselves(self, like: Any, found: str, saved: Saved) -> None:
        with pytest.raises(
            shardkeep.TemplateMismatchError, match=rf"key 'deep/k': saved PRNG keys \(.*\), .* has {found}"
        ):
            chosen(saved(TREE), template={"deep": {"k": like}})

    def test_prng_keys_of_an_implementation_jax_does_not_know_are_named(self, saved: Saved) -> None:
        tree = saved({"k": jax.random.key(0)})
        unknown = dataclasses.replace(tree.arrays[0], origin=PrngKeys("mine"))
        with pytest.raises(shardkeep.ShardkeepError, match=r"\bk\b.*mine"):
            chosen(dataclasses.replace(tree, leaves=(unknown,)), template={"k": jax.random.key(0)})

    @pytest.mark.parametrize("like", [jnp.zeros(3), jnp.float32(0)], ids=["array", "scalar"])
    def test_a_very_large_integer_that_does_not_fit_is_told_as_such(self, like: Any, saved: Saved) -> None:
        with pytest.raises(shardkeep.TemplateMismatchError, match="key 'n': saved the value"):
            chosen(saved({"n": 10**5000}), template={"n": like})

    def test_nor_does_one_in_the_template_hide_what_is_wrong(self, saved: Saved) -> None:
        with pytest.raises(
            shardkeep.TemplateMismatchError, match=r"key 'n': saved .*, the template has an integer of 16610"
        ):
            chosen(saved({"n": jnp.zeros(3)}), template={"n": 10**5000})

    def test_a_very_large_integer_is_listed(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path, {"n": 10**5000, "m": -7})
        assert re.search(r"n: an integer of 16610 bits\n +m: -7", str(shardkeep.inspect(tmp_path)))


class TestWhatIsNoData:
    """Functions, classes and other objects of a template are kept; data of it must be in the checkpoint."""

    @pytest.mark.parametrize(
        "value",
        [
            jax.nn.relu,
            len,
            np.float32,
            jnp.float32,
            np.dtype("f4"),
            math,
            object(),
            jax.sharding.PartitionSpec("a"),
            {1, 2},
            np.array([math], dtype=object),
            np.str_("text"),
            ...,
        ],
        ids=lambda value: f"{type(value).__name__}",
    )
    def test_it_is_kept_as_it_is(self, value: Any, saved: Saved) -> None:
        choice = chosen(saved(TREE), template={"n": 0, "other": value, "j": value})
        assert [w and w.stored.key for w in choice.wanted] == ["n", None, None]
        assert choice.kept[1] is value
        assert choice.kept[2] is value

    def test_a_partial_is_kept_with_its_function_and_loaded_arguments(self, saved: Saved) -> None:
        tree = saved({"act": jax.tree_util.Partial(jnp.dot, jnp.ones(3)), "n": 1})
        (leaf,) = tree.arrays
        template = {"act": jax.tree_util.Partial(jnp.matmul, Abstract((3,), "float32")), "n": 0}
        choice = chosen(tree, template=template)
        assert list(by_key(choice)) == [leaf.key, "n"]
        assert choice.skeleton.rebuild([1, 2])["act"].func is jnp.matmul

    @pytest.mark.parametrize("value", [jnp.zeros(3), np.zeros(3), Abstract((3,), "f4"), jax.random.key(0)])
    def test_an_array_that_was_never_saved_is_an_error(self, value: Any, saved: Saved) -> None:
        for tree in ({"n": 1}, {"n": 1, "new": None}):
            with pytest.raises(shardkeep.MissingLeafError, match="Missing array for key 'new'"):
                chosen(saved(tree), template={"n": 0, "new": value})

    @pytest.mark.parametrize("value", [0, 0.5, True, "text", b"", np.float32(1)])
    def test_so_is_a_plain_value_but_where_none_was_saved_it_is_kept(
        self, value: Any, saved: Saved, caplog: pytest.LogCaptureFixture
    ) -> None:
        """`eqx.filter(model, eqx.is_array)` has None in place of numbers such as the rate of a dropout."""
        tree = saved({"n": 1, "drop": {"p": None}})
        with caplog.at_level(logging.INFO, "shardkeep"):
            choice = chosen(tree, template={"n": 0, "drop": {"p": value}})
        assert choice.kept == {1: value}
        assert caplog.messages == ["1 plain value was saved as None; the template's value is used: 'drop/p'"]
        with pytest.raises(shardkeep.MissingLeafError, match="Missing value for key 'q'"):
            chosen(tree, template={"n": 0, "q": value})

    def test_save_and_load_mean_the_same_by_data(self, tmp_path: Path) -> None:
        values = [
            1,
            "s",
            np.ones(2),
            jnp.ones(2),
            jax.random.key(0),
            np.float32(1),
            len,
            int,
            object(),
            ...,
            np.str_("a"),
        ]
        for number, value in enumerate(values):
            try:
                shardkeep.save(tmp_path / str(number), [value])
            except shardkeep.UnsupportedLeafError:
                assert not is_data(value), value
            else:
                assert is_data(value), value


class TestNotLoaded:
    """What the template leaves out is told at level INFO, in one line."""

    def test_leaves_that_it_does_not_name(self, saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "shardkeep"):
            chosen(saved(TREE), template={"n": 0})
        (message,) = caplog.messages
        assert caplog.records[0].levelno == logging.INFO
        assert message == (
            "4 leaves of the checkpoint (192 bytes) are not in the template and were not loaded: "
            "'w', 'j', 'deep/k', 'deep/e'"
        )

    @pytest.mark.parametrize(
        "template", [{**TREE, "deep": ...}, TREE, {"w": ..., "j": ..., "n": 0, "deep": {"k": ..., "e": ...}}]
    )
    def test_nothing_is_said_of_what_is_left_out_on_purpose(
        self, template: Any, saved: Saved, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "shardkeep"):
            chosen(saved(TREE), template=template)
            chosen(saved(TREE), template={"n": 0}, include=re.compile("^n$"))
        assert caplog.messages == []

    def test_an_ellipsis_stays_where_it_is(self, saved: Saved) -> None:
        choice = chosen(saved(TREE), template={"deep": ..., "n": 0, "w": ...})
        assert list(by_key(choice)) == ["n"]
        assert choice.kept == {0: ..., 2: ...}
        assert chosen(saved(TREE), template=...).kept == {0: ...}

    def test_many_keys_are_not_all_named(self, saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "shardkeep"):
            chosen(saved({f"k{i}": i for i in range(1000)}), template={"k3": 0})
        assert caplog.messages[0].startswith("999 leaves of the checkpoint (0 bytes) are not in the template")
        assert caplog.messages[0].endswith("'k0', 'k1', 'k2', 'k4', 'k5', …")


class TestLooseShapes:
    """strict_shapes=False: reshaped where the size is the same, else the template's own value."""

    def test_an_array_of_the_same_size_is_to_be_reshaped(self, saved: Saved) -> None:
        template = {
            "w": Abstract((4, 4), "float32"),
            "j": np.zeros(16, np.float32),
            "deep": {"e": Abstract((5, 0), "f4")},
        }
        choice = chosen(saved(TREE), template=template, policy=Policy(strict_shapes=False))
        assert {key: w.shape for key, w in by_key(choice).items()} == {"w": (4, 4), "j": (16,), "deep/e": (5, 0)}
        assert choice.kept == {}

    def test_one_that_fits_is_not_reshaped(self, saved: Saved) -> None:
        choice = chosen(saved(TREE), template={"w": Abstract((8, 2), "f4")}, policy=Policy(strict_shapes=False))
        assert by_key(choice)["w"].shape is None

    def test_what_cannot_be_had_stays_as_the_template_has_it(
        self, saved: Saved, caplog: pytest.LogCaptureFixture
    ) -> None:
        template = {"w": jnp.zeros(3), "new": 1, "j": np.zeros((8, 2), np.int32), "deep": {"k": jax.random.key(0)}}
        with caplog.at_level(logging.WARNING, "shardkeep"):
            choice = chosen(saved(TREE), template=template, policy=Policy(strict_shapes=False))
        assert choice.wanted == [None] * 4
        assert choice.kept == dict(enumerate([template["w"], 1, template["j"], template["deep"]["k"]]))
        (message,) = caplog.messages
        start, *lines = message.splitlines()
        assert start == "4 leaves of the template do not match the checkpoint; the template's value is used:"
        for key, line in zip(("w", "new", "j", "deep/k"), lines, strict=True):
            assert f"for key '{key}'" in line

    def test_prng_keys_are_not_reshaped(self, saved: Saved) -> None:
        like = Abstract((2, 4), jax.random.key(0).dtype)
        with pytest.raises(
            shardkeep.TemplateMismatchError, match=r"mismatch for key 'deep/k': saved \(8,\), the template has \(2, 4\)"
        ):
            chosen(saved(TREE), template={"deep": {"k": like}}, policy=Policy(strict_shapes=False))

    @pytest.mark.parametrize("like", [Abstract((3,), "f4"), Abstract((2**32, 2**32), "f4")], ids=str)
    def test_an_abstract_array_has_no_value_to_stay(self, like: Any, saved: Saved) -> None:
        """Sizes are compared exactly: 2**64 elements are not the none that 64 bits would make of them."""
        tree = saved({"e": jnp.zeros((0, 3)), "w": jnp.zeros(4)})
        for key in "ew":
            with pytest.raises(shardkeep.TemplateMismatchError, match=f"Array shape mismatch for key '{key}': saved"):
                chosen(tree, template={key: like}, policy=Policy(strict_shapes=False))
        with pytest.raises(shardkeep.MissingLeafError, match="Missing array for key 'new'"):
            chosen(tree, template={"new": like}, policy=Policy(strict_shapes=False))


class TestPlaces:
    def test_a_committed_array_in_the_template_fixes_the_place_and_another_does_not(self, saved: Saved) -> None:
        where = NamedSharding(MESH, P("a"))
        tree = saved(TREE)
        for like in (jax.device_put(TREE["j"], where), Abstract((8, 2), "f4", sharding=where)):
            place = by_key(chosen(tree, template={"j": like}, mesh=MESH, shardings={"j": P()}))["j"].place
            assert (place.sharding, place.explicit) == (where, True)
        place = by_key(chosen(tree, template={"j": jnp.zeros((8, 2))}, mesh=MESH, shardings={"j": P(None)}))["j"].place
        assert place.sharding == NamedSharding(MESH, P(None))

    def test_without_mesh_rules_or_shardings_nothing_is_placed(self, saved: Saved) -> None:
        assert all(w.place.sharding is None for w in by_key(chosen(saved(TREE), rules=[])).values())

    def test_prng_keys_and_reshaped_arrays_are_placed_by_the_shape_they_will_have(self, saved: Saved) -> None:
        tree = saved({"k": TREE["deep"]["k"], "w": jnp.zeros((3, 8))})
        choice = chosen(
            tree,
            template={"k": Abstract((8,), jax.random.key(0).dtype), "w": Abstract((8, 3), "f4")},
            policy=Policy(strict_shapes=False),
            mesh=MESH,
            rules=[(".*", P("a"))],
        )
        assert {key: w.place.sharding for key, w in by_key(choice).items()} == dict.fromkeys(
            "kw", NamedSharding(MESH, P("a"))
        )

    @pytest.mark.parametrize(
        ("asked", "as_numpy"),
        [
            ({"mesh": MESH}, True),
            ({"mesh": MESH, "rules": [("j", P("a"))]}, True),
            ({"mesh": MESH, "rules": [("w", P("a"))]}, False),
            ({"shardings": {"w": SingleDeviceSharding(jax.devices()[3])}}, False),
            ({"mesh": MESH, "shardings": {"w": None}}, True),
        ],
    )
    def test_a_numpy_array_is_placed_only_where_it_is_named(
        self, asked: dict[str, Any], as_numpy: bool, saved: Saved
    ) -> None:
        wanted = by_key(chosen(saved({"w": TREE["w"], "j": TREE["j"]}), **asked))["w"]
        assert wanted.as_numpy == as_numpy
        assert (wanted.place.sharding is None) == as_numpy

    def test_a_numpy_array_in_the_template_stays_one_whatever_the_rules_say(self, saved: Saved) -> None:
        wanted = by_key(chosen(saved(TREE), template={"j": np.zeros((8, 2), "f4")}, mesh=MESH, rules=[(".*", P("a"))]))[
            "j"
        ]
        assert wanted.as_numpy
        assert wanted.place.sharding is None

    def test_rules_do_not_apply_to_values(self, saved: Saved) -> None:
        """Nor to a 0-d array that becomes one: strict rules need not name it."""
        tree = saved({"n": 3, "a": jnp.float32(1), "w": jnp.zeros(8)})
        template = {"n": jnp.int32(0), "a": 0.0, "w": Abstract((8,), "f4")}
        choice = chosen(tree, template=template, mesh=MESH, rules=[("w", P("a"))], policy=Policy(strict_rules=True))
        assert [w.place.sharding is None for w in by_key(choice).values()] == [True, True, False]

    def test_a_template_that_does_not_fit_the_mesh_is_named(self, saved: Saved) -> None:
        like = Abstract((8, 2), "f4", sharding=NamedSharding(MESH, P(None, "a")))
        with pytest.raises(shardkeep.ShardingError, match=r"leaf 'j' of shape \(8, 2\)"):
            chosen(saved(TREE), template={"j": like})


def test_the_shape_of_prng_keys_is_that_of_the_keys(saved: Saved) -> None:
    shapes = {leaf.key: leaf.logical_shape for leaf in saved(TREE).arrays}
    assert shapes == {"w": (8, 2), "j": (8, 2), "deep/k": (8,), "deep/e": (0, 3)}
