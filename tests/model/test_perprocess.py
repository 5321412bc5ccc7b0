"""PerProcess: a leaf that each process saves for itself. With one process it is just its value."""

import copy
import json
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import shardkeep
from faults.piecetables import rows_of
from shardkeep import PerProcess
from shardkeep.model.arrays import is_partition
from shardkeep.model.digests import digest, seal
from shardkeep.model.perprocess import PerProcessRows, decode_value, encode_value, fold_containers
from shardkeep.model.tree import flatten
from shardkeep.serialization.async_manager import AsyncCheckpointManager
from support import FORMATS, assert_same, mesh_of, save_as

STATE: dict[Any, Any] = {
    "epoch": 3,
    "seed": 2**100,
    "loss": float("nan"),
    "parts": [1.5, None, True, (b"\x00\xff", "é\ud800", 1j)],
    "order": np.arange(5, dtype=">i4"),
    "half": np.ones((2, 3), ml_dtypes.bfloat16),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(7, np.uint8),
    "when": np.array(["2026-11-16"], "M8[ns]"),
    "number": np.float32(0.1),
    "rng": np.random.default_rng(3).bit_generator.state,
    1: {("a", 2): {}, None: [], b"k": ()},
}


def test_a_value_comes_back_exactly_whatever_the_format(tmp_path: Path) -> None:
    for kind in FORMATS:
        path = save_as(kind, tmp_path / kind, {"w": jnp.ones(3), "data": [PerProcess(STATE), PerProcess(7)]})
        loaded = shardkeep.load(path)
        assert_same(loaded["data"], [STATE, 7])
        assert shardkeep.verify(path).ok
        assert loaded["data"][0]["order"].flags.writeable


_PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(max_size=50)
)
_KEYS = st.text(max_size=5) | st.integers() | st.binary(max_size=5) | st.tuples(st.text(max_size=2), st.integers())
_VALUES = st.recursive(
    _PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=4)
        | st.lists(st.integers(-9, 9), max_size=4).map(lambda some: np.array(some, np.int16))
    ),
    max_leaves=20,
)


@given(_VALUES)
def test_any_nested_value_is_encoded_exactly(value: Any) -> None:
    assert_same(decode_value(encode_value(value)), value)


def test_it_is_a_leaf_for_jax_frozen_equal_by_value_and_short_to_read() -> None:
    leaf = PerProcess({"a": np.arange(1000), "b": "x" * 500, "c": jnp.ones((2, 2))})
    assert jax.tree_util.tree_leaves([leaf, None]) == [leaf]
    assert jax.tree_util.tree_map(lambda x: x, {"p": leaf})["p"] is leaf
    assert repr(leaf).startswith("PerProcess({'a': int64[1000], 'b': 'xxx")
    assert "'c': float32[2, 2]" in repr(leaf)
    assert len(repr(PerProcess(list(range(10_000))))) < 100
    with pytest.raises(AttributeError, match="cannot assign to field 'value'"):
        leaf.value = 3  # type: ignore[misc]
    assert leaf == copy.deepcopy(leaf) == pickle.loads(pickle.dumps(leaf))
    different = [{"a": np.arange(1000)}, {**leaf.value, "a": np.zeros(1000)}, {**leaf.value, "a": np.arange(999)}, 3]
    assert all(leaf != PerProcess(value) for value in different)
    assert PerProcess([1]) != PerProcess((1,))
    assert leaf != leaf.value
    assert len({PerProcess(1), PerProcess(1), PerProcess("a")}) == 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (print, r"data: PerProcess value: a builtin_function_or_method cannot be stored; use dicts"),
        ({"a": [{1, 2}]}, r"PerProcess value\['a'\]\[0\]: a set cannot be stored"),
        ({"a": OrderedDict(b=1)}, r"value\['a'\]: a collections.OrderedDict cannot be stored; use dicts"),
        ([np.array([object()])], r"value\[0\]: NumPy dtype object cannot be stored"),
        (np.ma.masked_array([1]), r"a MaskedArray has more than plain data"),
        (jax.random.key(0), r"use their jax\.random\.key_data instead"),
        (PerProcess(1), r"a shardkeep\.\S*PerProcess cannot be stored"),
        ({frozenset(): 1}, r"dict key frozenset\(\) is a frozenset; use str"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(shardkeep.UnsupportedLeafError, match=said):
        shardkeep.save(tmp_path / "x", {"data": PerProcess(value)})
    with pytest.raises(shardkeep.UnsupportedLeafError, match=said):
        shardkeep.save_async(tmp_path / "x", {"data": PerProcess(value)})
    assert not (tmp_path / "x").exists()


def test_a_value_that_contains_itself_is_refused_in_a_few_words(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append([value])
    with pytest.raises(shardkeep.UnsupportedLeafError, match=r"nested too deeply .* or contains itself") as caught:
        shardkeep.save_async(tmp_path / "x", {"data": PerProcess(value)})
    assert len(str(caught.value)) < 300


def test_jax_arrays_of_this_process_come_back_as_numpy(tmp_path: Path) -> None:
    spread = jax.device_put(
        np.arange(8.0, dtype=np.float32), jax.sharding.NamedSharding(mesh_of(8), PartitionSpec("a"))
    )
    shardkeep.save(tmp_path / "x", {"data": PerProcess({"a": jnp.ones(3, jnp.bfloat16), "s": spread})})
    wanted = {"a": np.ones(3, ml_dtypes.bfloat16), "s": np.arange(8, dtype=np.float32)}
    assert_same(shardkeep.load(tmp_path / "x")["data"], wanted)


def test_what_changes_after_save_async_is_not_saved(tmp_path: Path) -> None:
    state = {"buffer": np.arange(1 << 16), "seen": [1, 2], "inner": {"n": 1}}
    before = copy.deepcopy(state)
    pending = shardkeep.save_async(tmp_path / "x", {"data": PerProcess(state)})
    state["buffer"][:] = -1  # type: ignore[index]
    state["seen"].append(3)  # type: ignore[union-attr]
    state["inner"]["n"] = 2  # type: ignore[index]
    pending.wait()
    assert_same(shardkeep.load(tmp_path / "x")["data"], before)


def test_the_bytes_of_a_value_count_against_the_memory_budget() -> None:
    from shardkeep.saving.snapshot import examine, staged_sizes

    leaves = flatten({"data": PerProcess({"a": np.zeros(1000, np.uint8), "b": [b"x" * 50]}), "w": np.zeros(10)})[1]
    assert sum(nbytes for nbytes, _, _ in staged_sizes(examine(leaves))) == 1130


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    shardkeep.save(tmp_path / "saved", {"w": jnp.ones(3), "data": PerProcess({"epoch": 3, "a": np.arange(3)})})
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "place",
    [PerProcess(None), PerProcess({"epoch": 0}), {"epoch": 0, "a": np.zeros(3)}, {"other": [1]}, 0, "x", np.zeros(9)],
)
def test_a_template_may_have_anything_plain_in_its_place(saved: Path, place: Any) -> None:
    loaded = shardkeep.load(saved, template={"w": jnp.zeros(3), "data": place})
    assert_same(loaded, {"w": jnp.ones(3), "data": {"epoch": 3, "a": np.arange(3)}})


def test_a_template_with_a_jax_array_in_its_place_is_refused(saved: Path) -> None:
    for place in (jnp.zeros(3), jax.ShapeDtypeStruct((3,), jnp.float32)):
        with pytest.raises(shardkeep.TemplateMismatchError, match=r"'data': saved a PerProcess value.*float32\[3\]"):
            shardkeep.load(saved, template={"data": place})


def test_a_template_without_it_does_not_read_it(saved: Path) -> None:
    assert list(shardkeep.load(saved, template={"w": jnp.zeros(3)})) == ["w"]
    for nothing in (None, ...):
        assert shardkeep.load(saved, template={"w": jnp.zeros(3), "data": nothing})["data"] is nothing


def test_an_abstract_tree_has_its_place_and_is_a_template(saved: Path) -> None:
    template = shardkeep.abstract(saved, mesh=mesh_of(8), dtype="bfloat16")
    assert template["data"] == PerProcess(None)
    assert_same(shardkeep.load(saved, template=template)["data"], {"epoch": 3, "a": np.arange(3)})


def test_what_include_leaves_out_is_kept_from_the_template(saved: Path) -> None:
    loaded = shardkeep.load(saved, template={"w": jnp.zeros(3), "data": {"other": 1}}, include="^w$")
    assert_same(loaded, {"w": jnp.ones(3), "data": {"other": 1}})


def test_a_perprocess_in_a_template_takes_what_every_process_saved_alike(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "x", {"step": 3, "host": np.arange(3), "w": jnp.ones(3)})
    loaded = shardkeep.load(tmp_path / "x", template={"step": PerProcess(0), "host": PerProcess(None)})
    assert_same(loaded, {"step": 3, "host": np.arange(3)})
    with pytest.raises(shardkeep.TemplateMismatchError, match=r"'w': saved float32\[3\], the template has PerProcess"):
        shardkeep.load(tmp_path / "x", template={"w": PerProcess(None)})
    with pytest.raises(shardkeep.MissingLeafError, match="Missing value for key 'data'"):
        shardkeep.load(tmp_path / "x", template={"data": PerProcess(None)})


def test_shardings_rules_casts_and_callbacks_leave_it_alone(saved: Path) -> None:
    mesh = mesh_of(8)
    everything: dict[str, Any] = {"mesh": mesh, "partition_rules": [(".*", PartitionSpec())], "dtype": "bfloat16"}
    loaded = shardkeep.load(saved, **everything)
    assert loaded["w"].dtype == jnp.bfloat16
    assert_same(loaded["data"], {"epoch": 3, "a": np.arange(3)})
    assert_same(shardkeep.load(saved, dtype="int8")["data"], {"epoch": 3, "a": np.arange(3)})


def test_per_process_all_is_the_list_of_all_values(saved: Path) -> None:
    assert_same(shardkeep.load(saved, per_process="all")["data"], [{"epoch": 3, "a": np.arange(3)}])
    with pytest.raises(ValueError, match='per_process must be "own" or "all", not True'):
        shardkeep.load(saved, per_process=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("validates", [False, True])
def test_the_documented_manager_takes_it(tmp_path: Path, validates: bool) -> None:
    tree = {"w": jnp.ones(3), "data": PerProcess({"epoch": 3, "a": np.arange(3)})}
    mesh = mesh_of(8)
    manager = AsyncCheckpointManager(enable_validation=validates)
    manager.save(tree, str(tmp_path / "a"), mesh, gather_fns=True, float_dtype=jnp.bfloat16)
    loaded, metadata = manager.load(str(tmp_path / "a"), mesh, validate=validates)
    assert_same(loaded["data"], {"epoch": 3, "a": np.arange(3)})
    assert list(metadata["array_metadata"]) == ["w"]
    manager.save_pytree(tree, str(tmp_path / "b"), mesh, prefix="model")
    for template in (None, {"w": jax.ShapeDtypeStruct((3,), jnp.float32), "data": PerProcess(None)}):
        loaded, _ = manager.load_pytree(str(tmp_path / "b"), mesh, prefix="model", template=template)
        assert_same(loaded["data"], {"epoch": 3, "a": np.arange(3)})
    index = json.loads((tmp_path / "b" / "tensorstore_index.json").read_text())
    assert [entry["path"] for entry in index["prefixes"]["model"]] == ["model/w"]


def test_inspect_says_how_many_processes_saved_it(saved: Path) -> None:
    found = shardkeep.inspect(saved)
    assert (found.leaves["data"].kind, found.leaves["data"].processes) == ("per_process", 1)
    assert found.leaves["w"].processes is None
    assert "data: PerProcess of 1 process, 128 bytes" in str(found)


@given(st.lists(st.integers(1, 1 << 25), min_size=1, max_size=12))
def test_rows_fill_the_array_once_and_waste_little(lengths: list[int]) -> None:
    rows = PerProcessRows.of(lengths)
    owned = [rows.region(process) for process in range(len(lengths))]
    assert is_partition(rows.shape, owned)
    assert is_partition(rows.shape, [region for region, _ in rows.shares])
    assert all(region.intersect(owned[writer]) == region for region, writer in rows.shares)
    assert all(region.size >= length for region, length in zip(owned, lengths, strict=True))
    assert rows.width <= 16 << 20
    assert PerProcessRows.stored(list(rows.lengths), rows.spec) == rows


def test_large_values_are_stored_in_rows_of_16_mib(tmp_path: Path) -> None:
    value = np.arange(5 << 20, dtype=np.int64)
    shardkeep.save(tmp_path / "x", {"data": PerProcess(value)}, format="zarr")
    assert shardkeep.inspect(tmp_path / "x").leaves["data"].shape == (3, 16 << 20)
    assert_same(shardkeep.load(tmp_path / "x")["data"], value)


def test_containers_of_a_template_are_folded_only_in_the_places_asked_for() -> None:
    skeleton, leaves = flatten({"a": [1, {"b": 2}], "c": {"d": [3, 4]}, "e": 5})
    folded, left = fold_containers(skeleton, leaves, {("c",), ("e",), ("x",)})
    assert [(leaf.key, leaf.value) for leaf in left] == [
        ("a/0", 1),
        ("a/1/b", 2),
        ("c", PerProcess(None)),
        ("e", 5),
    ]
    assert folded.rebuild([10, 20, 30, 50]) == {"a": [10, {"b": 20}], "c": 30, "e": 50}


def _framed(document: Any, data: bytes = b"") -> np.ndarray[Any, Any]:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return np.frombuffer(struct.pack("<Q", len(text)) + text + data, np.uint8)


@pytest.mark.parametrize(
    "raw",
    [
        np.zeros(3, np.uint8),
        np.full(8, 255, np.uint8),
        _framed(b"\xff"),
        _framed(b"["),
        _framed(b"[" * 100_000),
        _framed(1),
        _framed({}),
        _framed(b'{"int": "1", "int": "2"}'),
        _framed({"unknown": 1}),
        _framed({"int": 5}),
        _framed({"tuple": "ab"}),
        _framed({"dict": [["a", 1]]}),
        _framed({"dict": [["a", None], ["a", None]]}),
        _framed({"dict": [[["a"], None]]}),
        _framed({"data": 5}, b"abcd"),
        _framed({"data": 3}, b"abcd"),
        _framed({"data": -1}),
        _framed({"data": True}, b"a"),
        _framed({"array": ["uint8"]}),
        _framed({"array": ["uint8", [2]]}, b"a"),
        _framed({"array": ["uint8", [1 << 40]]}, b"a"),
        _framed({"array": ["uint8", [1 << 62, 0, 1 << 62]]}),
        _framed({"array": ["uint8", [-1]]}),
        _framed({"array": ["object", [1]]}, b"a" * 8),
        _framed({"array": ["uint8", [1], "="]}, b"a"),
        _framed({"array": ["bfloat16", [1], ">"]}, b"ab"),
        _framed({"array": ["uint8", [1], "<", 0]}, b"a"),
    ],
)
def test_malformed_values_are_integrity_errors(raw: np.ndarray[Any, Any]) -> None:
    with pytest.raises(shardkeep.IntegrityError, match="leaf 'k': the value of process 0 is malformed"):
        PerProcessRows((raw.size,), raw.size).decode(0, raw, "k")


def test_deep_values_are_refused_on_both_sides(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    assert decode_value(encode_value(deep)) == deep
    with pytest.raises(shardkeep.UnsupportedLeafError, match="nested too deeply"):
        shardkeep.save(tmp_path / "x", PerProcess([deep]))
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        decode_value(encode_value([deep]))


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": None},
        {"lengths": []},
        {"lengths": [0]},
        {"lengths": [-1]},
        {"lengths": ["1"]},
        {"lengths": [1, 1]},
        {"lengths": [1 << 80]},
        {"lengths": [True]},
        {"dtype": "int8"},
        {"kind": "other_process"},
    ],
)
def test_manifests_with_impossible_rows_are_integrity_errors(saved: Path, change: dict[str, Any]) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    leaf = next(leaf for leaf in manifest["trees"][""]["leaves"] if leaf["key"] == "data")
    leaf |= change
    manifest["digest"] = "0" * 32
    (saved / "manifest.json").write_bytes(seal(json.dumps(manifest, separators=(",", ":")).encode()))
    with pytest.raises(shardkeep.IntegrityError, match="manifest.json is malformed"):
        shardkeep.load(saved)


def test_a_damaged_value_is_noticed(saved: Path) -> None:
    (file,) = saved.glob("*.safetensors")
    raw = bytearray(file.read_bytes())
    at = raw.index(b'"epoch"')
    raw[at + 1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(shardkeep.IntegrityError, match="leaf 'data'.*does not match its digest"):
        shardkeep.load(saved)
    assert [problem.leaf for problem in shardkeep.verify(saved).problems] == ["data"]


def resave_for(path: Path, count: int) -> None:
    """Write a checkpoint as if `count` processes had saved its leaf `data`."""
    values = [{"process": i, "part": np.full(i, i)} for i in range(count)]
    encoded = [encode_value(value) for value in values]
    rows = PerProcessRows.of([raw.size for raw in encoded])
    filled = np.concatenate([rows.fill(i, raw) for i, raw in enumerate(encoded)])
    shardkeep.save(path, {"data": filled, "w": np.ones(2)}, format="zarr")
    manifest = json.loads((path / "manifest.json").read_text())
    leaf = manifest["trees"][""]["leaves"][0]
    leaf |= {"kind": "per_process", "lengths": list(rows.lengths)}
    assert rows_of(manifest["trees"][""])[0].digests == (digest(filled.tobytes()),)
    manifest["digest"] = "0" * 32
    (path / "manifest.json").write_bytes(seal(json.dumps(manifest, separators=(",", ":")).encode()))


def test_one_process_refuses_the_values_of_others_and_names_the_way_out(tmp_path: Path) -> None:
    resave_for(tmp_path / "x", 3)
    with pytest.raises(
        shardkeep.ProcessError, match=r"leaf data is a PerProcess value of 3 processes, and 1 process "
    ) as e:
        shardkeep.load(tmp_path / "x")
    assert 'per_process="all"' in str(e.value)
    assert "include=" in str(e.value)
    values = shardkeep.load(tmp_path / "x", per_process="all")["data"]
    assert_same(values, [{"process": i, "part": np.full(i, i)} for i in range(3)])
    template = {"data": PerProcess(None)}
    assert_same(shardkeep.load(tmp_path / "x", template=template, per_process="all")["data"], values)


def test_leaving_it_out_works_at_any_number_of_processes(tmp_path: Path) -> None:
    resave_for(tmp_path / "x", 3)
    assert_same(shardkeep.load(tmp_path / "x", include="^w$"), {"w": np.ones(2)})
    assert_same(shardkeep.load(tmp_path / "x", template={"w": np.zeros(2)}), {"w": np.ones(2)})
    template = shardkeep.abstract(tmp_path / "x") | {"data": ...}
    assert shardkeep.load(tmp_path / "x", template=template)["data"] is ...
