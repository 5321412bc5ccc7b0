"""What rules do to keys and forms, and what they refuse: with the rule and the leaf, before anything is read."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from remap.test_regions import saved_tree
from shardkeep import PerProcess, RemapError, remap
from shardkeep.model.leaves import StoredArray, StoredValue
from shardkeep.remap.changes import remap_tree
from shardkeep.remap.rules import Rule, as_rules

TREE = {
    "layers/0/w": np.zeros((4, 6), np.float32),
    "layers/1/w": np.zeros((4, 6), np.float32),
    "layers/1/b": np.zeros(6, np.float32),
    "head": np.zeros((6, 8), np.float16),
    "count": np.zeros((), np.int32),
}


def forms(rules: Any, tree: Any = TREE) -> dict[str, Any]:
    return {leaf.key: leaf.shape for leaf in remap_tree(saved_tree(tree), as_rules(rules)).tree.leaves}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (remap.rename("head", "a/b"), {"a/b": (6, 8)}),
        (remap.copy("head", "lm"), {"head": (6, 8), "lm": (6, 8)}),
        (remap.drop("head"), {}),
        (remap.stack("layers/{i}/w", "w"), {"w": (2, 4, 6)}),
        (remap.stack("layers/{i}/w", "w", axis=-1), {"w": (4, 6, 2)}),
        (remap.unstack("head", "h/{i}", axis=-2), {f"h/{i}": (8,) for i in range(6)}),
        (remap.split("head", ["a", "b"]), {"a": (6, 4), "b": (6, 4)}),
        (remap.split("head", ["a", "b"], 0, [1, 5]), {"a": (1, 8), "b": (5, 8)}),
        (remap.fuse(["layers/0/w", "layers/1/w"], "w", 0), {"w": (8, 6)}),
        (remap.transpose("head", (-1, 0)), {"head": (8, 6)}),
        (remap.reshape("head", (2, -1)), {"head": (2, 24)}),
        (remap.resize("head", 1, size=9), {"head": (6, 9)}),
        (remap.resize("head", 1, size=0), {"head": (6, 0)}),
        (remap.apply("head", abs), {"head": (6, 8)}),
        (remap.apply("head", np.sum, shape=(), dtype="float32"), {"head": ()}),
    ],
)
def test_forms_of_the_results(rule: Rule, expected: dict[str, Any]) -> None:
    found = forms([rule])
    assert {
        key: shape for key, shape in found.items() if TREE.get(key, np.zeros(0)).shape != shape or key == "head"
    } == {
        **({"head": (6, 8)} if "head" in found else {}),
        **expected,
    }


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: remap.rename("nothing/.*", "x"), r"it matches no leaf; patterns match whole keys, which are layers/0/w, "),
    (lambda: remap.rename("layers/./w", "w"), r"leaf 'layers/1/w': it and 'layers/0/w' would both become 'w'"),
    (lambda: remap.rename("head", "count"), r"leaf '(head|count)': it and '(count|head)' would both become 'count'"),
    (lambda: remap.copy("head", "head"), r"leaf 'head': it and 'head' would both become 'head'"),
    (lambda: remap.rename("head", "layers"), r"leaf 'head': it would become 'layers', which contains 'layers/0/w'"),
    (lambda: remap.rename("head", "count/x"), r"would become 'count/x', but 'count' is a leaf, not a subtree"),
    (lambda: remap.rename("head", "a//b"), r"it would become 'a//b', which has an empty name"),
    (lambda: remap.rename("(", "x"), r"is not a valid regular expression"),
    (lambda: remap.rename("head", r"\1"), r"refers to the group 1"),
    (lambda: remap.rename("head", 3), r"patterns and keys are strings, not 3"),  # type: ignore[arg-type]
    (lambda: remap.stack("layers/0/(.*)", r"\1"), r"the pattern needs \{i\}"),
    (lambda: remap.stack("layers/{i}/b", "b"), r"there is no leaf for index 0; the indices are 1"),
    (lambda: remap.stack("layers/{i}/.", "x"), r"'layers/1/w' has the same index"),
    (lambda: [remap.transpose("layers/1/w", (1, 0)), remap.stack("layers/{i}/w", "w")], r"it is float32\[6, 4\], but "),
    (lambda: remap.stack("layers/{i}/w", "w", axis=3), r"axis 3 is out of range for an array of 3 dimensions"),
    (lambda: remap.stack("layers/{i}/w", "w", axis="x"), r"axis must be an integer"),  # type: ignore[arg-type]
    (lambda: remap.unstack("head", "x"), r"the key needs \{i\}"),
    (lambda: remap.unstack("head", "x/{i}", axis=2), r"axis 2 is out of range for an array of 2 dimensions"),
    (
        lambda: [remap.resize("head", size=0), remap.unstack("head", "x/{i}")],
        r"leaf 'head': axis 0 of \[0, 8\] is empty; drop it instead",
    ),
    (lambda: remap.split("head", ["a", "b", "c"]), r"cannot be split into 3 equal parts; pass sizes="),
    (lambda: remap.split("head", ["a", "b"], sizes=[3, 4]), r"the sizes add up to 7, but axis 1 of \[6, 8\] has 8"),
    (lambda: remap.split("head", ["a", "b"], sizes=[8]), r"sizes needs a size for each of the 2 keys"),
    (lambda: remap.split("head", ["a", "b"], sizes=[9, -1]), r"sizes needs a size for each of the 2 keys"),
    (lambda: remap.split("head", "ab"), r"expected a list of strings"),
    (lambda: remap.split("head", []), r"there are no keys"),
    (
        lambda: remap.fuse(["layers/0/w", "layers/./w"], "w"),
        r"both would form one part|several patterns",
    ),
    (lambda: remap.fuse(["head", "head"], "w"), r"leaf 'head': several patterns match it"),
    (lambda: remap.fuse(["layers/0/w", "none"], "w"), r"no corresponding leaf matches 'none'"),
    (lambda: remap.fuse(["layers/0/w", "head"], "w"), r"it is float16\[6, 8\], but 'layers/0/w' is float32\[4, 6\]"),
    (lambda: remap.transpose("head", (0, 2)), r"axis 2 is out of range"),
    (lambda: remap.transpose("head", (0, 0)), r"is not a permutation of the 2 axes of \[6, 8\]"),
    (lambda: remap.transpose("head", "10"), r"expected a list of integers"),
    (lambda: remap.reshape("head", (7, -1)), r"\[6, 8\] cannot be reshaped to \[7, -1\]"),
    (lambda: remap.reshape("head", (-1, -1)), r"cannot be reshaped"),
    (lambda: remap.resize("head", 2, size=3), r"axis 2 is out of range"),
    (lambda: remap.resize("head"), r"no template gives its size; pass size="),
    (lambda: remap.resize("head", size=9, fill="keep"), r'fill="keep" needs a template'),
    (lambda: remap.resize("head", size=-1), r"size must be a number of elements"),
    (lambda: remap.resize("head", fill="ones"), r'fill must be "zeros", "keep" or a number'),
    (lambda: remap.resize("count", size=3), r"axis 0 is out of range"),
    (lambda: remap.resize("layers/1/b", size=1 << 62), r"an array cannot have the shape"),
    (lambda: [remap.resize("head"), remap.transpose("head", (1, 0))], r"pass size= to resize, or resize it last"),
    (lambda: remap.stack("(layers/{i}/b|head)", "x"), r"leaf 'head'.*{i} does not match"),
    (lambda: remap.rename("(layers/{i}|head)(.*)", "x/{i}"), r"leaf 'head'.* does not match"),
    (lambda: remap.stack("layers/{i}/w", "x/{i}"), r"the key cannot contain {i}"),
    (lambda: remap.unstack("layers/{i}/w", "x/{i}"), r"in the key only; write \(\\d\+\) in the pattern"),
    (lambda: remap.unstack("head", r"x/\{i}"), r"the key needs {i}"),
    (
        lambda: [remap.resize("head", size=9, fill="keep"), remap.apply("head", abs)],
        r"apply\('head', abs\), leaf 'head': .* resize with fill=\"keep\"; apply it before that",
    ),
    (lambda: remap.apply("head", 3), r"function must be callable"),  # type: ignore[arg-type]
    (lambda: remap.apply("head", abs, elementwise=True, shape=(1,)), r"remove shape="),
    (lambda: remap.apply("head", abs, dtype="float99"), r"unknown dtype"),
    (lambda: remap.apply("head", lambda a: a - a.max(), elementwise=True), r"fails on an empty array .*; pass dtype="),
    (lambda: remap.within("opt/.*", [remap.drop("w")]), r"no key or subtree matches 'opt/\.\*'"),
    (
        lambda: remap.within("layers", [remap.drop("w")]),
        r"matches no leaf below 'layers'; patterns match whole keys, which are 0/w, 1/w, 1/b; try remap.drop\('.\*/w'",
    ),
    (
        lambda: remap.within("layers", [remap.rename(r"1/(.)", r"0/\1")]),
        r"within\('layers'.* both become 'layers/0/w'",
    ),
    (
        lambda: remap.within("layers/.", [remap.transpose("w", (0, 2))]),
        r"within\('layers/.', .*, below 'layers/0': remap.transpose\('w', \(0, 2\)\), leaf 'w': axis 2",
    ),
    (lambda: "x", r"remap must be a list of rules from shardkeep.remap, not 'x'"),
    (lambda: [None], r"remap must be a list of rules"),
    (lambda: {"a": 1}, r"remap must be a list of rules"),
]


@pytest.mark.parametrize(
    ("dtype", "fill", "stored"),
    [
        ("int4", -8, -8),
        ("int4", 100, None),
        ("uint4", -1, None),
        ("uint4", 1000, None),
        ("int8", 0.5, None),
        ("bool", 2, None),
        ("uint64", 1 << 63, 1 << 63),
        ("float16", 1e6, None),
        ("bfloat16", 1e6, 999424.0),
        ("float8_e4m3fn", 1000, None),
        ("float8_e4m3fn", math.inf, None),
        ("float8_e5m2", math.inf, math.inf),
        ("float8_e8m0fnu", "zeros", None),
        ("float4_e2m1fn", 100, None),
        ("float4_e2m1fn", math.nan, None),
        ("complex64", 1e39, None),
        ("float32", -1e39, None),
    ],
)
def test_a_fill_is_a_value_of_the_dtype(dtype: str, fill: Any, stored: Any, tmp_path: Path) -> None:
    """Integers would wrap around, and floats be cut to their range."""
    shardkeep.save(tmp_path / "c", {"x": np.ones(2).astype(jnp.dtype(dtype))})
    rule = remap.resize("x", size=3, fill=fill)
    if stored is None:
        with pytest.raises(RemapError, match=rf"leaf 'x': {dtype} cannot hold"):
            shardkeep.load(tmp_path / "c", remap=rule)
    else:
        assert np.asarray(shardkeep.load(tmp_path / "c", remap=rule)["x"])[2].item() == stored


@pytest.mark.parametrize(("make", "problem"), BAD)
def test_a_rule_that_cannot_be_applied_is_refused_before_anything_is_read(
    make: Callable[[], Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remap.changing import nested
    from shardkeep.loading import load as loading

    shardkeep.save(tmp_path / "c", nested(TREE))
    monkeypatch.setattr(loading, "read_leaves", lambda *_: pytest.fail("something was read"))
    with pytest.raises(RemapError, match=problem) as told:
        shardkeep.load(tmp_path / "c", remap=make())
    assert "remap" in str(told.value)


def test_plain_values_keys_and_values_of_processes_can_be_renamed(tmp_path: Path) -> None:
    tree = {"step": 7, "key": jax.random.key(3), "data": PerProcess({"position": 5}), "w": np.ones(3)}
    shardkeep.save(tmp_path / "c", tree)
    rules = [
        remap.rename("(step|key|data)", r"state/\1"),
        remap.copy("state/key", "key"),
        remap.copy("state/step", "n"),
    ]
    loaded = shardkeep.load(tmp_path / "c", remap=rules)
    assert loaded["state"]["step"] == loaded["n"] == 7
    assert loaded["state"]["data"] == {"position": 5}
    assert loaded["key"] == loaded["state"]["key"] == jax.random.key(3)
    assert list(shardkeep.load(tmp_path / "c", remap=remap.drop("step|key|data"))) == ["w"]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (remap.transpose("step", (0,)), r"leaf 'step': it is a plain value, but this rule applies to arrays"),
        (remap.reshape("key", (-1,)), r"leaf 'key': it holds key<threefry2x32>"),
        (remap.unstack("data", "d/{i}"), r"leaf 'data': it holds PerProcess"),
        (remap.copy("data", "d"), r"leaf 'data': it is a PerProcess value, which can only be renamed"),
    ],
)
def test_rules_for_arrays_refuse_other_leaves(rule: Rule, problem: str, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"step": 7, "key": jax.random.key(3), "data": PerProcess(5)})
    with pytest.raises(RemapError, match=problem):
        shardkeep.load(tmp_path / "c", remap=rule)


def test_rules_apply_below_every_place_that_matches() -> None:
    tree = {f"{at}/layers/{i}/w": np.zeros((2, 3)) for at in ("params", "opt/0/mu", "opt/0/nu") for i in range(2)}
    rules = [remap.stack("layers/{i}/(.*)", r"layers/\1"), remap.transpose("layers/w", (0, 2, 1))]
    found = forms([remap.within("params|opt/.*/(mu|nu)", rules)], tree)
    assert found == dict.fromkeys(("params/layers/w", "opt/0/mu/layers/w", "opt/0/nu/layers/w"), (2, 3, 2))


def test_of_places_inside_each_other_the_outermost_counts() -> None:
    tree = {"a/a/a/w": np.zeros(2), "b/a/w": np.zeros(2)}
    assert forms([remap.within("(.*/)?a", remap.rename("(.*)w", r"\1v"))], tree) == {"a/a/a/v": (2,), "b/a/v": (2,)}
    assert forms([remap.within("", remap.rename("b/a/w", "w"))], tree) == {"a/a/a/w": (2,), "w": (2,)}


def test_a_rule_changes_all_its_matches_at_once() -> None:
    tree = {"a": np.zeros(1), "b": np.zeros(2)}
    swapped = forms([remap.within("", [remap.rename("a", "c"), remap.rename("b", "a"), remap.rename("c", "b")])], tree)
    assert swapped == {"b": (1,), "a": (2,)}
    shifted = {f"l/{i}": np.zeros(i) for i in range(3)}
    assert forms([remap.rename(r"l/(\d)", r"l/\1/x")], shifted) == {f"l/{i}/x": (i,) for i in range(3)}


def test_functions_are_shown_by_their_names_and_rules_as_they_are_written() -> None:
    assert repr(remap.apply(".*", abs, dtype="bf16")) == "remap.apply('.*', abs, dtype='bfloat16')"
    assert repr(remap.resize("x", size=3, fill=1.5)) == "remap.resize('x', size=3, fill=1.5)"
    assert not re.search("0x", repr(remap.apply(".*", lambda x: x)))


def test_a_leaf_that_is_only_renamed_stays_a_stored_one() -> None:
    """It is read as ever: mapped, in place. Only what several leaves are made of is read for all of them."""
    found = remap_tree(saved_tree(TREE), as_rules([remap.rename("head", "lm"), remap.copy("count", "n")])).tree.leaves
    kinds = {leaf.key: type(leaf).__name__ for leaf in found}
    assert kinds["lm"] == kinds["layers/0/w"] == StoredArray.__name__
    assert kinds["count"] == kinds["n"] == "DerivedArray"
    assert StoredValue.__name__ not in kinds.values()
