"""Rules have a JSON form; what is no rule is refused."""

import json
from typing import Any

import numpy as np
import pytest

from shardkeep import RemapError, remap

RULES = [
    remap.rename("a", "b"),
    remap.copy("a", "b"),
    remap.drop("a"),
    remap.stack("{i}", "x", 1),
    remap.unstack("x", "{i}"),
    remap.split("x", ["a", "b"], 0, [1, 2]),
    remap.fuse(["a", "b"], "x"),
    remap.transpose("x", (1, 0)),
    remap.reshape("x", (2, -1)),
    remap.resize("x", fill="keep"),
    remap.resize("x", 1, 0.5, 7),
    remap.within("opt/(mu|nu)", [remap.rename("a", "b"), remap.within("x", remap.drop("y"))]),
]


def test_rules_are_the_same_after_json_and_after_their_repr() -> None:
    assert remap.from_json(json.loads(json.dumps(remap.to_json(RULES)))) == RULES
    assert eval(repr(RULES), {"remap": remap}) == RULES
    assert remap.to_json(RULES[0]) == [{"rule": "rename", "pattern": "a", "key": "b"}]
    assert hash(RULES[0]) == hash(remap.rename("a", "b"))


def test_a_function_has_no_json_form() -> None:
    with pytest.raises(RemapError, match=r"apply\('x', abs\) has no JSON form"):
        remap.to_json([remap.within("a", [remap.apply("x", abs)])])


@pytest.mark.parametrize(
    "data",
    [
        {},
        "rename",
        [3],
        [{}],
        [{"rule": "apply", "pattern": "x"}],
        [{"rule": ["rename"]}],
        [{"rule": "rename", "pattern": "a"}],
        [{"rule": "rename", "pattern": "a", "key": "b", "more": 1}],
        [{"rule": "rename", "pattern": 1, "key": "b"}],
        [{"rule": "split", "pattern": "a", "keys": 3}],
        [{"rule": "split", "pattern": "a", "keys": [3]}],
        [{"rule": "transpose", "pattern": "a", "axes": ["1"]}],
        [{"rule": "stack", "pattern": "{i}", "key": "x", "axis": 1.5}],
        [{"rule": "within", "pattern": "a", "rules": 3}],
        [{"rule": "within", "rules": []}],
        [{"rule": "within", "pattern": "a"}],
        [{"rule": "within", "pattern": "a", "rules": [], "more": 1}],
        [{"rule": "resize", "pattern": "a", "fill": [1]}],
    ],
)
def test_json_that_is_no_rule_is_refused(data: Any) -> None:
    with pytest.raises(RemapError, match="rule|remap"):
        remap.from_json(data)


def test_rules_inside_rules_without_end_are_refused() -> None:
    data: dict[str, Any] = {"rule": "drop", "pattern": "a"}
    for _ in range(5000):
        data = {"rule": "within", "pattern": "a", "rules": [data]}
    with pytest.raises(RemapError, match="nested too deeply"):
        remap.from_json([data])


def test_numbers_of_numpy_are_taken_as_numbers() -> None:
    rules = [
        remap.stack("{i}", "x", axis=np.int64(1)),
        remap.split("x", ["a", "b"], axis=np.int32(0), sizes=np.array([1, 2])),
        remap.transpose("a", np.argsort([1, 0])),
        remap.reshape("b", (np.int64(2), -1)),
        remap.resize("b", size=np.int64(4), fill=np.float32(0.5)),
    ]
    plain = [
        remap.stack("{i}", "x", axis=1),
        remap.split("x", ["a", "b"], axis=0, sizes=[1, 2]),
        remap.transpose("a", (1, 0)),
        remap.reshape("b", (2, -1)),
        remap.resize("b", size=4, fill=0.5),
    ]
    assert rules == plain
    assert repr(rules) == repr(plain)
    assert remap.from_json(json.loads(json.dumps(remap.to_json(rules)))) == plain
    with pytest.raises(RemapError, match=r"axis must be an integer, not 1.5"):
        remap.stack("{i}", "x", axis=np.float64(1.5))
    with pytest.raises(RemapError, match="expected a list of integers"):
        remap.reshape("x", np.zeros((2, 2), int))


def test_none_among_rules_is_refused() -> None:
    with pytest.raises(RemapError, match="one of them is None"):
        remap.within("x", [remap.drop("y"), None])
