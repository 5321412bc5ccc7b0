"""Orbax's documents as values: trees, shardings and keys, and malformed ones refused or left out."""

import base64
import json
from typing import Any

import pytest

import shardkeep
from shardkeep.foreign.orbaxtree import entries_of, impls_of, shardings_of, strings_of, tree_of


def entry(*keys: str | int, kind: str = "jax.Array", skipped: bool = False) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys],
        "value_metadata": {"value_type": kind, "skip_deserialize": skipped},
    }


def tree(*listed: dict[str, Any]) -> Any:
    entries = entries_of({"tree_metadata": {str(i): each for i, each in enumerate(listed)}}, "x")

    def name(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: name(child) for key, child in value.items()}
        return [name(child) for child in value] if isinstance(value, list) else getattr(value, "name", value)

    return name(tree_of(entries, "x"))


def test_keys_make_dicts_and_lists() -> None:
    found = tree(entry("a", 0), entry("a", 1, "b"), entry("c", "0"), entry("d", kind="Dict"), entry("e", kind="List"))
    assert found == {"a": ["a.0", {"b": "a.1.b"}], "c": {"0": "c.0"}, "d": {}, "e": []}
    assert tree(entry("n", kind="None", skipped=True), entry("t", kind="NamedTuple", skipped=True)) == {
        "n": None,
        "t": None,
    }
    assert tree(entry(0), entry(1)) == ["0", "1"]
    assert tree(entry("a", 5)) == {"a": {"5": "a.5"}}  # a list of which the rest is not there


def test_leaves_of_one_name_are_ambiguous() -> None:
    listed = {"1": entry("a.b"), "2": entry("a", "b"), "3": entry("c")}
    assert [each.is_ambiguous for each in entries_of({"tree_metadata": listed}, "x")] == [True, True, False]


@pytest.mark.parametrize(
    "listed",
    [
        (entry("a"), entry("a", "b")),
        (entry("a", "b"), entry("a")),
        (entry("a", 0), entry("a", "b")),
        (entry("a"), entry("a")),
        (entry(), entry("a")),
        ({"key_metadata": [], "value_metadata": {"value_type": 1}},),
        ({"key_metadata": 5},),
        (entry(*["a"] * 300),),
    ],
)
def test_a_malformed_tree_is_refused(listed: Any) -> None:
    with pytest.raises(shardkeep.IntegrityError, match="x is malformed"):
        tree(*listed)


def test_named_shardings_are_kept() -> None:
    said = {"sharding_type": "NamedSharding", "shape": [4, 2], "axis_names": ["a", "b"]}
    specs: list[Any] = [["a", None], [["a", "b"]], [], ["c"], [5], "a"]
    document = {
        base64.b64encode(str(i).encode()).decode(): json.dumps({**said, "partition_spec": spec})
        for i, spec in enumerate(specs)
    }
    document |= {"no base64": "{}", base64.b64encode(b"x").decode(): "[]", base64.b64encode(b"y").decode(): "{"}
    found = shardings_of(document)
    assert {name: one.sharding.spec for name, one in found.items() if one.sharding} == {
        "0": ("a", None),
        "1": (("a", "b"),),
        "2": (),
    }
    assert found["0"].sharding is not None
    assert found["0"].sharding.mesh == (("a", 4), ("b", 2))


def test_other_facts() -> None:
    assert strings_of({"a": "x", "b": 5}) == {"a": "x"}
    about = {"array_metadata": {"param_name": "k", "ext_metadata": {"random_key_impl": "rbg"}}}
    assert impls_of([{"array_metadatas": [about, {}, 5]}, {"array_metadatas": None}, {}]) == {"k": "rbg"}
