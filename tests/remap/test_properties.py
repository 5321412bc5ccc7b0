"""Any tree, any rules, any sharding: what is loaded is what the same changes make of whole NumPy arrays."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardkeep
from remap.changing import Change, Tree, changes, flat, negate, nested
from shardkeep import remap
from support import bits

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def sharding_for(shape: tuple[int, ...], draw: Any) -> NamedSharding:
    """A sharding that divides an array of this shape."""
    spec: list[Any] = []
    free = {"a": 4, "b": 2}
    for extent in shape:
        fitting = [None, *(axis for axis, size in free.items() if extent and extent % size == 0)]
        axis = draw(st.sampled_from(fitting))
        free.pop(axis, None)
        spec.append(axis)
    return NamedSharding(MESH, PartitionSpec(*spec))


def assert_equal(loaded: Any, expected: Tree) -> None:
    found = flat(loaded)
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert found[key].shape == value.shape, key
        assert bits(found[key]) == bits(value), key


OTHERS = {"others_key": jax.random.key(5), "others_step": 7, "others_kept": np.eye(3, dtype=np.float32)}


@settings(max_examples=200)
@given(changed=changes(), data=st.data())
def test_a_changed_tree_is_what_numpy_makes_of_it_and_the_inverse_restores_every_bit(
    tmp_path: Path, changed: tuple[Tree, Change], data: Any
) -> None:
    tree, change = changed
    draw = data.draw
    saved = {k: jax.device_put(v, sharding_for(v.shape, draw)) if draw(st.booleans()) else v for k, v in tree.items()}
    format = draw(st.sampled_from([{}, {"format": "zarr", "compression": "zstd"}]))
    shardkeep.save(
        tmp_path / "saved", nested({**saved, "key": OTHERS["others_key"], "step": 7}), overwrite=True, **format
    )
    shardings = {key: sharding_for(value.shape, draw) for key, value in change.tree.items() if draw(st.booleans())}
    options = {"shardings": nested(shardings) or None, "mmap": draw(st.booleans())}
    rules = [remap.rename("(key|step)", r"others_\1"), *change.rules]
    if draw(st.booleans()):
        options |= {
            "template": nested({**{k: np.asarray(v) for k, v in change.tree.items()}, **OTHERS}),
            "missing": "keep",
        }
    plan = shardkeep.plan_load(tmp_path / "saved", remap=rules, **options)
    loaded = plan.load()
    others = {key: loaded.pop(key) for key in OTHERS if key in loaded}
    assert_equal(loaded, change.tree)
    assert others["others_step"] == 7
    assert others["others_key"] == OTHERS["others_key"]
    assert {leaf.key for leaf in plan.leaves} == {*change.tree, "others_key", "others_step"}
    if not change.undoable:
        return
    shardkeep.save(tmp_path / "changed", {**loaded, **others}, overwrite=True)
    back = shardkeep.load(tmp_path / "changed", remap=plan.inverse())
    assert back.pop("key") == OTHERS["others_key"]
    assert back.pop("step") == 7
    kept = back.pop("others_kept", OTHERS["others_kept"])
    assert np.array_equal(kept, OTHERS["others_kept"])
    assert_equal(back, tree)


@settings(max_examples=60)
@given(changed=changes())
def test_rules_survive_their_json_form(changed: tuple[Tree, Change]) -> None:
    rules = [rule for rule in changed[1].rules if "apply" not in repr(rule)]
    assert remap.from_json(remap.to_json(rules)) == rules
    assert eval(repr(changed[1].rules), {"remap": remap, "negate": negate}) == changed[1].rules
