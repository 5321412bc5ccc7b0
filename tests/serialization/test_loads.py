"""What all loads have in common, and what each of them promises: paths, prefixes, rules, shardings, dtypes, order."""

import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import shardkeep
from shardkeep.serialization import AsyncCheckpointManager, tree_deserialize_leaves
from support import Dense, Keyed, Point, Unkeyed, assert_same, mesh_of

P = PartitionSpec
Log = Callable[[], list[str]]
MESH = mesh_of(8)
GRID = mesh_of(2, 4)
Load = Callable[..., dict[str, Any]]


def by_load(path: Any, mesh: Any = None, **arguments: Any) -> dict[str, Any]:
    return AsyncCheckpointManager().load(path, mesh, **arguments)[0]


def by_leaves(path: Any, mesh: Any = None, **arguments: Any) -> dict[str, Any]:
    return tree_deserialize_leaves(path, mesh, **arguments)


def by_pytree(path: Any, mesh: Any = None, **arguments: Any) -> Any:
    return AsyncCheckpointManager().load_pytree(path, mesh, **{"prefix": "p", **arguments})[0]


def by_parallel(path: Any, mesh: Any = None, **arguments: Any) -> dict[str, Any]:
    assert mesh is None
    return AsyncCheckpointManager().load_tree_parallel(path, **arguments)[0]


on_mesh = pytest.mark.parametrize("load", [by_load, by_leaves, by_pytree])
everywhere = pytest.mark.parametrize("load", [by_load, by_leaves, by_pytree, by_parallel])
with_dtype = pytest.mark.parametrize("load", [by_load, by_pytree, by_parallel])
formats = pytest.mark.parametrize("tensorstore", [True, False])


def save(tree: Any, path: Any, prefix: str | None = "p", **settings: Any) -> Path:
    AsyncCheckpointManager(**settings).save(tree, path, MESH, prefix=prefix)
    return path


# --- where a checkpoint may be


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    shardkeep.save(tmp_path / "hf" / "model.safetensors", {"a": jnp.ones(64), "b": jnp.zeros(64)}, max_shard_size=300)
    return tmp_path / "hf"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model",
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ],
)
@pytest.mark.parametrize("load", [by_load, by_parallel])
def test_a_hugging_face_folder_is_found_by_any_of_its_names(load: Load, name: str, shards: Path) -> None:
    assert len(list(shards.glob("*.safetensors"))) == 2
    assert_same(load(shards / name), {"a": jnp.ones(64), "b": jnp.zeros(64)})


@pytest.mark.parametrize("name", ["", "model", "model.safetensors"])
@pytest.mark.parametrize("load", [by_load, by_parallel])
def test_a_single_file_is_found_with_or_without_its_suffix(load: Load, name: str, tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a.b": np.ones(3, np.float32)}, tmp_path / "model.safetensors", {"who": "me"})
    assert_same(load(tmp_path / name), {"a": {"b": jnp.ones(3)}})


def test_a_foreign_files_own_metadata_is_returned(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "m.safetensors", {"who": "me", "n": "3"})
    assert manager.load(tmp_path / "m", None)[1] == {"who": "me", "n": "3"}


@formats
@everywhere
def test_a_directory_and_its_index_name_a_checkpoint(load: Load, tensorstore: bool, tmp_path: Path) -> None:
    save({"w": jnp.ones(2)}, tmp_path / "c", use_tensorstore=tensorstore)
    assert_same(load(tmp_path / "c"), {"w": jnp.ones(2)})
    if load is not by_leaves:
        assert_same(load(f"{tmp_path}/c/tensorstore_index.json"), {"w": jnp.ones(2)})


@everywhere
def test_nothing_there_is_file_not_found(load: Load, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    for name in ("absent", "absent.safetensors", "text", ""):
        with pytest.raises(FileNotFoundError, match="no checkpoint at"):
            load(tmp_path / name)


@formats
@everywhere
def test_damage_is_an_integrity_error_and_a_lost_file_also_file_not_found(
    load: Load, tensorstore: bool, tmp_path: Path
) -> None:
    save({"w": jnp.arange(1000.0)}, tmp_path / "c", use_tensorstore=tensorstore)
    (data,) = [p for p in (tmp_path / "c" / "p").rglob("*") if p.is_file() and not p.name.startswith(".z")]
    good = data.read_bytes()
    damaged = bytearray(good)
    damaged[-100] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"leaf 'w'.*is damaged") as caught:
        load(tmp_path / "c")
    assert isinstance(caught.value, shardkeep.IntegrityError)
    data.write_bytes(good[:-1])
    with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w'.* is truncated: it has .* bytes"):
        load(tmp_path / "c")
    data.unlink()
    with pytest.raises(FileNotFoundError, match=r"leaf 'w'.*is missing") as lost:
        load(tmp_path / "c")
    assert isinstance(lost.value, shardkeep.IntegrityError)


# --- prefixes


@pytest.mark.parametrize("load", [by_load, by_leaves])
def test_no_prefix_means_the_plain_tree_else_the_only_one(load: Load, tmp_path: Path) -> None:
    save({"w": jnp.ones(1)}, tmp_path, "a")
    assert_same(load(tmp_path), {"w": jnp.ones(1)})
    save({"w": jnp.ones(2)}, tmp_path, "b")
    with pytest.raises(ValueError, match="several trees; pass prefix= one of 'a', 'b'"):
        load(tmp_path)
    save({"w": jnp.ones(3)}, tmp_path, None)
    assert_same(load(tmp_path), {"w": jnp.ones(3)})
    assert_same(load(tmp_path, prefix="a"), {"w": jnp.ones(1)})


@on_mesh
def test_an_unknown_prefix_lists_those_there_are(load: Load, tmp_path: Path) -> None:
    save({"w": jnp.ones(1)}, tmp_path, "a")
    save({"w": jnp.ones(1)}, tmp_path, None)
    with pytest.raises(ValueError, match=r"no tree with prefix 'x'; it has 'a', \(no prefix\)"):
        load(tmp_path, prefix="x")
    with pytest.raises(ValueError, match="prefix"):
        load(tmp_path, prefix="../x")


def test_prefix_filter_of_load_is_deprecated_and_acts_as_prefix(
    tmp_path: Path, manager: AsyncCheckpointManager
) -> None:
    save({"w": jnp.ones(1)}, tmp_path, "a")
    save({"w": jnp.ones(2)}, tmp_path, "b")
    with pytest.warns(DeprecationWarning, match="prefix_filter is deprecated; use prefix"):
        assert_same(manager.load(tmp_path, None, prefix_filter="b")[0], {"w": jnp.ones(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(manager.load(tmp_path, None, prefix="b")[0], {"w": jnp.ones(2)})


@pytest.mark.parametrize("kind", ["directory", "file", "tensorstore"])
def test_prefix_filter_of_the_parallel_load_keeps_keys_under_it(
    kind: str, tmp_path: Path, manager: AsyncCheckpointManager
) -> None:
    tree = {"a": {"b": jnp.ones(1), "bc": jnp.ones(2)}, "ab": jnp.ones(3), "l": [jnp.ones(4), jnp.ones(5)]}
    path = tmp_path / ("c.safetensors" if kind == "file" else "c")
    save(tree, path, None, use_tensorstore=kind == "tensorstore")
    for name, expected in {
        "a": {"a": tree["a"]},
        "a.b": {"a": {"b": tree["a"]["b"]}},
        "a/bc": {"a": {"bc": tree["a"]["bc"]}},
        "l.1": {"l": {"1": tree["l"][1]}},
    }.items():
        assert_same(manager.load_tree_parallel(path, prefix_filter=name)[0], expected)
    with pytest.raises(KeyError, match="matches no leaf"):
        manager.load_tree_parallel(path, prefix_filter="nothing")


def test_prefix_filter_of_the_parallel_load_names_one_of_several_trees(
    tmp_path: Path, manager: AsyncCheckpointManager
) -> None:
    save({"w": jnp.ones(1)}, tmp_path, "a")
    save({"w": jnp.ones(2)}, tmp_path, "b.c")
    assert_same(manager.load_tree_parallel(tmp_path, prefix_filter="a")[0], {"w": jnp.ones(1)})
    assert_same(manager.load_tree_parallel(tmp_path, prefix_filter="b/c")[0], {"w": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"one of 'a', 'b\.c'"):
        manager.load_tree_parallel(tmp_path)


# --- rules


RULES: list[Any] = [(r"layers/\d/w", P("a", "b")), ("w", P("b")), ("b$", P("a"))]


def _model() -> dict[str, Any]:
    return {"layers": [{"w": jnp.ones((8, 4)), "b": jnp.ones(8)}], "w": jnp.ones(8)}


@on_mesh
def test_rules_search_the_joined_key_and_the_first_hit_wins(load: Load, tmp_path: Path, logged: Log) -> None:
    save(_model(), tmp_path)
    loaded = load(tmp_path, GRID, partition_rules=RULES)
    layer = loaded["layers"][0 if load is by_pytree else "0"]
    assert layer["w"].sharding == NamedSharding(GRID, P("a", "b"))
    assert layer["b"].sharding == NamedSharding(GRID, P("a"))
    assert loaded["w"].sharding == NamedSharding(GRID, P("b"))
    assert logged() == []


@on_mesh
def test_rules_go_before_shardings_which_fill_the_gaps(load: Load, tmp_path: Path, logged: Log) -> None:
    save({"x": jnp.ones(8), "y": jnp.ones(8)}, tmp_path)
    loaded = load(tmp_path, GRID, partition_rules=[("x", P("a"))], shardings={"x": P("b"), "y": P("b")})
    assert loaded["x"].sharding.spec == P("a")
    assert loaded["y"].sharding.spec == P("b")


@on_mesh
def test_keys_no_rule_hits_are_replicated_with_one_warning(load: Load, tmp_path: Path, logged: Log) -> None:
    save({"x": jnp.ones(8), "y": jnp.ones(8), "z": jnp.ones(8)}, tmp_path)
    loaded = load(tmp_path, GRID, partition_rules=[("x", P("a"))])
    assert loaded["y"].sharding == loaded["z"].sharding == NamedSharding(GRID, P())
    (message,) = logged()
    assert "'y', 'z'" in message


def test_without_mismatches_allowed_a_key_no_rule_hits_is_an_error(
    tmp_path: Path, manager: AsyncCheckpointManager
) -> None:
    save({"x": jnp.ones(8), "y": jnp.ones(8)}, tmp_path)
    with pytest.raises(ValueError, match="no partition rule and no sharding matches 'y'"):
        manager.load(tmp_path, GRID, partition_rules=[("x", P("a"))], mismatch_allowed=False)
    loaded, _ = manager.load(
        tmp_path, GRID, partition_rules=[("x", P("a"))], shardings={"y": P()}, mismatch_allowed=False
    )
    assert loaded["x"].sharding.spec == P("a")
    with pytest.raises(ValueError, match="matches 'y'"):
        manager.load_tree_parallel(tmp_path, shardings={"x": lambda x: x}, mismatch_allowed=False)
    assert set(manager.load_tree_parallel(tmp_path, shardings={"x": lambda x: x})[0]) == {"x", "y"}


@on_mesh
def test_rules_match_with_or_without_the_prefix(load: Load, tmp_path: Path, logged: Log) -> None:
    """`load` without it, `load_pytree` with it; the other form only if no rule hits any key."""
    save({"w": jnp.ones(8), "m": {"w": jnp.ones(8)}}, tmp_path, "m")
    with_prefix = load is by_pytree
    loaded = load(tmp_path, MESH, prefix="m", partition_rules=[("^m/w$", P("a")), (".*", P())])
    assert loaded["w"].sharding.spec == (P("a") if with_prefix else P())
    assert loaded["m"]["w"].sharding.spec == (P() if with_prefix else P("a"))
    assert load(tmp_path, MESH, prefix="m", partition_rules=[("^w$", P("a"))])["w"].sharding.spec == P("a")
    both = load(tmp_path, MESH, prefix="m", partition_rules=[("^m/m/w$", P("a"))])
    assert both["m"]["w"].sharding.spec == P("a")


@on_mesh
def test_empty_rules_are_no_rules(load: Load, tmp_path: Path, logged: Log) -> None:
    save({"w": jnp.ones(8)}, tmp_path)
    for empty in ((), []):
        assert load(tmp_path, MESH, partition_rules=empty)["w"].sharding == NamedSharding(MESH, P())
    assert logged() == []


@on_mesh
def test_rules_and_specs_need_a_mesh(load: Load, tmp_path: Path) -> None:
    save({"w": jnp.ones(8)}, tmp_path)
    with pytest.raises(ValueError, match="need a mesh"):
        load(tmp_path, None, partition_rules=[("w", P("a"))])
    with pytest.raises(ValueError, match="needs a mesh"):
        load(tmp_path, None, shardings={"w": P("a")})


# --- shardings


SHARDINGS = {
    "flat": {"l.0": P("a"), "l.1": P("b"), "p.x": None, "p.y": P("a")},
    "nested": {"l": {"0": P("a"), "1": P("b")}, "p": {"x": None, "y": P("a")}},
    "tree": {"l": [P("a"), P("b")], "p": Point(None, P("a"))},
}


@pytest.mark.parametrize("form", SHARDINGS)
@on_mesh
def test_shardings_may_have_any_form(load: Load, form: str, tmp_path: Path, logged: Log) -> None:
    x = jnp.ones(8)
    save({"l": [x, x], "p": Point(x, x)}, tmp_path)
    loaded = load(tmp_path, GRID, shardings=SHARDINGS[form])
    assert [a.sharding.spec for a in jax.tree.leaves(loaded)] == [P("a"), P("b"), P(), P("a")]
    assert logged() == []


@everywhere
def test_a_sharding_may_be_a_sharding_a_function_or_none(load: Load, tmp_path: Path, logged: Log) -> None:
    x = jnp.ones(8)
    save({"s": x, "f": x, "g": x, "n": x}, tmp_path)
    named, one = NamedSharding(GRID, P("a")), SingleDeviceSharding(jax.devices()[5])
    loaded = load(tmp_path, shardings={"s": named, "f": lambda x: one, "g": lambda x: x * 2, "n": None})
    assert loaded["s"].sharding == named
    assert loaded["f"].sharding == one
    assert_same(loaded["g"], x * 2)
    assert len(loaded["n"].sharding.device_set) == 1
    assert logged() == []


@on_mesh
def test_a_key_that_matches_no_array_is_a_warning(load: Load, tmp_path: Path, logged: Log) -> None:
    save({"w": jnp.ones(8)}, tmp_path)
    load(tmp_path, MESH, shardings={"w": P("a"), "wrong": P("a")})
    (message,) = logged()
    assert "'wrong' match no array" in message


@on_mesh
@pytest.mark.parametrize("source", ["rules", "specs", "shardings"])
def test_specs_of_any_source_are_cut_to_the_rank(load: Load, source: str, tmp_path: Path) -> None:
    save({"v": jnp.ones(8), "s": jnp.float32(1)}, tmp_path)
    spec = P("a", "b")
    arguments: dict[str, dict[str, Any]] = {
        "rules": {"partition_rules": [(".*", spec)]},
        "specs": {"shardings": {"v": spec, "s": spec}},
        "shardings": {"shardings": dict.fromkeys("vs", NamedSharding(GRID, spec))},
    }
    loaded = load(tmp_path, GRID, **arguments[source])
    assert loaded["v"].sharding == NamedSharding(GRID, P("a"))
    assert loaded["s"].sharding == NamedSharding(GRID, P())


MISFITS = {
    P("z"): r"leaf 'w' of shape \(6,\).*the axis 'z', which is not an axis of the mesh \{'a': 2, 'b': 4\}",
    P("b"): r"leaf 'w' of shape \(6,\).*splits dimension 0 \(6\) into 4 parts.*\{'a': 2, 'b': 4\}",
    P(("a", "b")): r"leaf 'w' of shape \(6,\).*into 8 parts",
}


@on_mesh
@pytest.mark.parametrize("spec", MISFITS, ids=str)
def test_a_spec_that_does_not_fit_is_an_error_with_everything_in_it(load: Load, spec: Any, tmp_path: Path) -> None:
    save({"w": jnp.ones(6)}, tmp_path)
    sources: list[Any] = [{"partition_rules": [("w", spec)]}, {"shardings": {"w": spec}}]
    if spec != P("z"):  # JAX itself makes no sharding of an unknown axis
        sources.append({"shardings": {"w": NamedSharding(GRID, spec)}})
    for arguments in sources:
        with pytest.raises(ValueError, match=MISFITS[spec]):
            load(tmp_path, GRID, **arguments)


def test_a_mesh_of_several_axes_needs_to_be_told_more(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    """`load` and `tree_deserialize_leaves` name both ways out; `load_pytree` replicates; one axis replicates."""
    save({"w": jnp.ones(8)}, tmp_path)
    for load in (by_load, by_leaves):
        with pytest.raises(ValueError, match="partition_rules= or shardings="):
            load(tmp_path, GRID)
        assert load(tmp_path, MESH)["w"].sharding == NamedSharding(MESH, P())
    assert by_pytree(tmp_path, GRID)["w"].sharding == NamedSharding(GRID, P())


# --- dtype


KINDS = {
    "f": jnp.float32([1.5]),
    "b": jnp.bfloat16([1.5]),
    "i": jnp.arange(3),
    "u": jnp.uint8([250]),
    "c": jnp.ones(1, jnp.complex64),
    "m": jnp.array([True]),
    "n": 3,
    "k": jax.random.key(0),
}


def _dtypes(tree: dict[str, Any]) -> dict[str, str]:
    return {k: str(v.dtype) for k, v in tree.items() if hasattr(v, "dtype")}


SAVED = _dtypes(KINDS)


@with_dtype
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8", np.dtype("float16"), jnp.float32, np.float32])
def test_a_float_dtype_casts_floats_only(load: Load, dtype: Any, tmp_path: Path) -> None:
    save(KINDS, tmp_path)
    aliases = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
    name = aliases[dtype] if isinstance(dtype, str) else jnp.dtype(dtype).name
    assert _dtypes(load(tmp_path, dtype=dtype)) == {**SAVED, "f": name, "b": name}
    assert _dtypes(load(tmp_path)) == SAVED


@with_dtype
def test_an_integer_dtype_casts_integers_only_and_refuses_what_does_not_fit(load: Load, tmp_path: Path) -> None:
    save(KINDS, tmp_path)
    assert _dtypes(load(tmp_path, dtype="int16")) == {**SAVED, "i": "int16", "u": "int16"}
    with pytest.raises(ValueError, match=r"leaf 'u' holds 250 to 250, which does not fit int8"):
        load(tmp_path, dtype=jnp.int8)


@with_dtype
@pytest.mark.parametrize("dtype", ["nonsense", 3, object()])
def test_an_unknown_dtype_is_a_value_error(load: Load, dtype: Any, tmp_path: Path) -> None:
    save(KINDS, tmp_path)
    with pytest.raises(ValueError, match="unknown dtype"):
        load(tmp_path, dtype=dtype)


@everywhere
@formats
def test_64_bit_arrays_are_numpy_unchanged_and_never_truncated(
    load: Load, tensorstore: bool, tmp_path: Path, logged: Log
) -> None:
    wide = {"i": np.array([2**40, -1]), "f": np.array([1e300]), "u": np.array([2**64 - 1], np.uint64)}
    save({**wide, "w": jnp.ones(2)}, tmp_path, use_tensorstore=tensorstore)
    loaded = load(tmp_path)
    for key, array in wide.items():
        assert_same(loaded[key], array)
    assert isinstance(loaded["w"], jax.Array)
    (message,) = logged()
    assert "jax_enable_x64" in message


@everywhere
def test_numpy_leaves_come_back_as_jax_arrays(load: Load, tmp_path: Path) -> None:
    save({"n": np.float32([1, 2])}, tmp_path)
    assert_same(load(tmp_path), {"n": jnp.float32([1, 2])})


# --- order


@everywhere
def test_results_and_callbacks_come_in_saved_order_in_the_callers_thread(load: Load, tmp_path: Path) -> None:
    names = ["z", "b", "m", "a", "k"]
    save({name: {"w": jnp.ones(2), "n": 1} for name in names}, tmp_path)
    seen: list[str] = []

    def callback(array: Any, key: str) -> Any:
        assert threading.current_thread() is caller
        assert isinstance(array, jax.Array)
        seen.append(key)
        return array

    caller = threading.current_thread()
    assert list(load(tmp_path, callback=callback)) == names
    assert seen == [f"{name}.w" for name in names]


@with_dtype
def test_first_the_function_then_the_callback_then_the_cast(load: Load, tmp_path: Path) -> None:
    save({"w": jnp.ones(2)}, tmp_path)
    seen: list[Any] = []

    def callback(array: Any, key: str) -> Any:
        seen.append((float(array[0]), array.dtype))
        return array * 3

    loaded = load(tmp_path, shardings={"w": lambda x: x + 1}, callback=callback, dtype="bf16")
    assert seen == [(2.0, jnp.float32)]
    assert_same(loaded["w"], jnp.bfloat16([6, 6]))


@everywhere
def test_a_digest_is_checked_before_anyone_sees_the_array(load: Load, tmp_path: Path) -> None:
    save({"w": jnp.ones(2)}, tmp_path)
    (tmp_path / "p" / "w" / "0").write_bytes(b"\1" * 8)
    seen: list[Any] = []
    with pytest.raises(shardkeep.IntegrityError, match="leaf 'w'"):
        load(tmp_path, shardings={"w": seen.append}, callback=lambda x, k: seen.append(x))
    assert seen == []


def _damage_b(path: Path) -> Callable[[Any, str], Any]:
    """A callback that damages the second array once it gets the first."""

    def callback(array: Any, key: str) -> Any:
        if key == "a":
            (path / "p" / "b" / "0").write_bytes(b"\xff" * 16)
        return array

    return callback


@pytest.mark.parametrize(
    ("load", "arguments", "at_once"),
    [
        (by_load, {}, True),
        (by_load, {"use_async": True}, True),
        (by_load, {"use_async": False}, False),
        (by_load, {"use_async": False, "chunk_size": 8}, False),
        (by_load, {"chunk_size": 1}, False),
        (by_load, {"chunk_size": 2}, True),
        (by_pytree, {}, True),
        (by_pytree, {"chunk_size": 1}, False),
    ],
)
def test_how_many_arrays_are_in_flight(load: Load, arguments: Any, at_once: bool, tmp_path: Path) -> None:
    """One at a time means: the second is not read before the first was handed over."""
    save({"a": jnp.ones(4), "b": jnp.ones(4)}, tmp_path)
    if at_once:
        load(tmp_path, callback=_damage_b(tmp_path), **arguments)
    else:
        with pytest.raises(shardkeep.IntegrityError, match="leaf 'b'"):
            load(tmp_path, callback=_damage_b(tmp_path), **arguments)


@pytest.mark.parametrize("load", [by_load, by_pytree])
def test_a_chunk_size_below_one_is_refused(load: Load, tmp_path: Path) -> None:
    save({"a": jnp.ones(4)}, tmp_path)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, not 0"):
        load(tmp_path, chunk_size=0)


def test_a_parallel_load_reads_shards_at_once(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    """Every file is read before the first callback: what the callback damages no longer matters."""
    save({"a": jnp.ones(4), "b": jnp.ones(4)}, tmp_path)
    assert_same(
        manager.load_tree_parallel(tmp_path, callback=_damage_b(tmp_path))[0], {"a": jnp.ones(4), "b": jnp.ones(4)}
    )


# --- validation


@pytest.mark.parametrize("load", ["load", "load_tree_parallel"])
def test_validate_false_skips_the_digests(load: str, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    save({"w": jnp.ones(2)}, tmp_path, enable_validation=True)
    (tmp_path / "p" / "w" / "0").write_bytes(np.float32([1, 7]).tobytes())
    arguments: Any = (None,) if load == "load" else ()
    for validate in (None, True):
        with pytest.raises(shardkeep.IntegrityError, match="leaf 'w'"):
            getattr(manager, load)(tmp_path, *arguments, validate=validate)
    assert_same(getattr(manager, load)(tmp_path, *arguments, validate=False)[0], {"w": jnp.float32([1, 7])})


@pytest.mark.parametrize("load", ["load", "load_tree_parallel"])
def test_validate_none_is_the_managers_setting_and_true_needs_something_to_check(load: str, tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, tmp_path / "m.safetensors")
    manager = AsyncCheckpointManager()
    arguments: Any = (None,) if load == "load" else ()
    with pytest.raises(ValueError, match="nothing to validate against"):
        getattr(manager, load)(tmp_path, *arguments, validate=True)
    manager.enable_validation = True
    assert_same(getattr(manager, load)(tmp_path, *arguments)[0], {"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="nothing to validate against"):
        getattr(manager, load)(tmp_path, *arguments, validate=True)


@pytest.mark.parametrize("tree", [{}, {"n": 3}, {"w": jnp.zeros((0, 2))}])
def test_a_tree_of_ours_without_arrays_can_be_validated(
    tree: Any, tmp_path: Path, manager: AsyncCheckpointManager
) -> None:
    """Its manifest carries a digest too."""
    save(tree, tmp_path)
    assert_same(manager.load(tmp_path, None, validate=True)[0], tree)


# --- what load gives


def test_load_gives_nested_dicts_of_strings(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    """Sequences keyed by number, names kept, plain values included, None and empty containers gone."""
    x = jnp.ones(2)
    save(
        {
            "list": [x, (x, 3)],
            "point": Point(x, "text"),
            "dense": Dense(x, x),
            "keyed": Keyed(x, 1),
            "unkeyed": Unkeyed([x]),
            5: {None: x, (1, 2): 2.5},
            "none": None,
            "empty": [],
        },
        tmp_path,
    )
    expected = {
        "list": {"0": x, "1": {"0": x, "1": 3}},
        "point": {"x": x, "y": "text"},
        "dense": {"kernel": x, "bias": x},
        "keyed": {"left": x, "right": 1},
        "unkeyed": {"0": x},
        "5": {"None": x, "(1, 2)": 2.5},
    }
    for loaded in (manager.load(tmp_path, None)[0], manager.load_tree_parallel(tmp_path)[0], by_leaves(tmp_path)):
        assert_same(loaded, expected)


def test_dotted_keys_split_unless_that_collides(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    x, y = jnp.ones(1), jnp.zeros(1)
    save({"a.b": x, "c.d.e": y}, tmp_path / "1")
    assert_same(manager.load(tmp_path / "1", None)[0], {"a": {"b": x}, "c": {"d": {"e": y}}})
    save({"a.b": x, "a": {"b": y}}, tmp_path / "2")
    assert_same(manager.load(tmp_path / "2", None)[0], {"a.b": x, "a": {"b": y}})
    save({"a": x, "a.b": y}, tmp_path / "3")
    assert_same(manager.load(tmp_path / "3", None)[0], {"a": x, "a.b": y})


def test_keys_of_any_characters_stay_apart(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    names = ["a/b", "a", "A", "é", "..", ".zarray", "0.0", " "]
    tree = {name: jnp.full(1, i, jnp.int32) for i, name in enumerate(names)}
    save(tree, tmp_path)
    assert_same(manager.load_pytree(tmp_path, None, prefix="p")[0], tree)


# --- templates


def _saved(tmp_path: Path) -> Path:
    tree = {"w": jnp.arange(8.0).reshape(2, 4), "i": jnp.arange(3), "n": 7, "s": "text", "l": [jnp.ones(2), None]}
    return save(tree, tmp_path)


def test_a_templates_structure_float_dtypes_and_shardings_win(tmp_path: Path, logged: Log) -> None:
    """And saved scalars are restored, whatever the template holds."""
    _saved(tmp_path)
    sharding = NamedSharding(GRID, P("a", "b"))
    template = {
        "w": jax.ShapeDtypeStruct((2, 4), jnp.bfloat16, sharding=sharding),
        "i": np.zeros(3, np.int32),
        "n": 0,
        "s": "",
        "l": (jnp.zeros(2, jnp.float16), None),
    }
    loaded = by_pytree(tmp_path, template=template)
    assert loaded["w"].sharding == sharding
    assert_same(loaded["w"], jnp.arange(8.0).reshape(2, 4).astype(jnp.bfloat16))
    assert_same(loaded["l"], (jnp.ones(2, jnp.float16), None))
    assert (loaded["n"], loaded["s"]) == (7, "text")
    assert_same(np.asarray(loaded["i"]), np.arange(3, dtype=np.int32))
    assert logged() == []


@pytest.mark.parametrize("like", [jnp.zeros((2, 4)), jax.ShapeDtypeStruct((2, 4), jnp.float32)])
def test_where_a_template_has_no_sharding_rules_and_mesh_say(like: Any, tmp_path: Path) -> None:
    _saved(tmp_path)
    ruled = by_pytree(tmp_path, GRID, template={"w": like}, partition_rules=[("w", P("a", "b"))])
    assert ruled["w"].sharding == NamedSharding(GRID, P("a", "b"))
    assert by_pytree(tmp_path, GRID, template={"w": like})["w"].sharding == NamedSharding(GRID, P())
    committed = jax.device_put(jnp.zeros((2, 4)), jax.devices()[3])
    stays = by_pytree(tmp_path, GRID, template={"w": committed}, partition_rules=[("w", P("a", "b"))], dtype="bf16")
    assert (stays["w"].sharding, stays["w"].dtype) == (committed.sharding, jnp.float32)


def test_a_template_may_name_part_of_the_tree_and_have_another_form(tmp_path: Path) -> None:
    _saved(tmp_path)
    assert_same(by_pytree(tmp_path, template={"l.0": jnp.zeros(2)}), {"l.0": jnp.ones(2)})
    assert_same(by_pytree(tmp_path, template={"l": {"0": jnp.zeros(2)}}), {"l": {"0": jnp.ones(2)}})


def test_a_custom_node_with_odd_aux_data_is_restored_by_a_template(tmp_path: Path, logged: Log) -> None:
    save(Unkeyed([jnp.ones(2)], tag=object), tmp_path)
    template = Unkeyed([jnp.zeros(2)], tag=object)
    assert_same(by_pytree(tmp_path, template=template), Unkeyed([jnp.ones(2)], tag=object))
    assert isinstance(by_pytree(tmp_path), shardkeep.OpaqueNode)
    assert "Pass template=" in " ".join(logged())


def test_strict_shapes_list_every_mismatch_with_both_sides(tmp_path: Path) -> None:
    _saved(tmp_path)
    template = {"w": jnp.zeros((4, 2)), "i": jnp.zeros(5, jnp.int32)}
    both_sides = r"(?s)key 'w': saved \(2, 4\), the template has \(4, 2\).*key 'i': .*\(3,\).*\(5,\)"
    with pytest.raises(ValueError, match=both_sides):
        by_pytree(tmp_path, template=template)
    with pytest.raises(KeyError, match=r"(?s)Missing array for key 'missing'.*Missing array for key 'other'"):
        by_pytree(tmp_path, template={"missing": jnp.zeros(1), "other": jnp.zeros(1)})


@formats
@pytest.mark.parametrize("leaves", [1, 500])
def test_errors_have_the_words_that_easydel_looks_for(tensorstore: bool, leaves: int, tmp_path: Path) -> None:
    """EasyDeL starts with a new optimizer if the error is a KeyError or ValueError with just these words."""
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore)
    state = {f"mu{i}": jnp.ones(2) for i in range(leaves)} | {"count": 3}
    manager.save_pytree(state, tmp_path, MESH, prefix="tx")
    missing = {f"v{i}": 0 for i in range(leaves)} | {f"nu{i}": jnp.ones(2) for i in range(leaves)}
    with pytest.raises(KeyError, match="Missing array for key 'nu0'"):
        manager.load_pytree(tmp_path, MESH, prefix="tx", template={**state, **missing})
    for like in (jnp.ones(3), jax.ShapeDtypeStruct((3,), jnp.float32)):
        with pytest.raises(ValueError, match="Array shape mismatch for key 'mu0'"):
            manager.load_pytree(tmp_path, MESH, prefix="tx", template={f"mu{i}": like for i in range(leaves)})


def test_without_strict_shapes_arrays_are_reshaped_or_the_template_stays(tmp_path: Path, logged: Log) -> None:
    _saved(tmp_path)
    template = {"w": jnp.zeros((4, 2)), "i": jnp.full(5, 9), "missing": jnp.full(1, 9.0)}
    loaded = by_pytree(tmp_path, template=template, strict_shapes=False)
    assert_same(loaded, {"w": jnp.arange(8.0).reshape(4, 2), "i": jnp.full(5, 9), "missing": jnp.full(1, 9.0)})
    (message,) = logged()
    assert "Array shape mismatch for key 'i': saved (3,)" in message
    assert "Missing array for key 'missing'" in message
    assert "'w'" not in message


def test_without_strict_shapes_an_abstract_template_cannot_stand_in(tmp_path: Path) -> None:
    _saved(tmp_path)
    reshaped = by_pytree(tmp_path, template={"w": jax.ShapeDtypeStruct((8,), jnp.float32)}, strict_shapes=False)
    assert_same(reshaped, {"w": jnp.arange(8.0)})
    with pytest.raises(ValueError, match=r"key 'i': saved \(3,\), the template has \(5,\)"):
        by_pytree(tmp_path, template={"i": jax.ShapeDtypeStruct((5,), jnp.int32)}, strict_shapes=False)


@formats
def test_load_pytree_returns_the_extras(tensorstore: bool, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore)
    manager.save_pytree({"w": jnp.ones(2)}, tmp_path, MESH, prefix="a", extras={"step": 1})
    manager.save_pytree({"w": jnp.ones(2)}, tmp_path, MESH, prefix="b")
    assert manager.load_pytree(tmp_path, None, prefix="a")[1] == {"step": 1}
    assert manager.load_pytree(tmp_path, None, prefix="b")[1] == {}


# --- robustness


def test_a_checkpoint_may_be_moved_and_copied(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    save({"w": jnp.ones(2)}, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "c")
    for name in "bc":
        assert_same(manager.load(tmp_path / name, None)[0], {"w": jnp.ones(2)})


def test_settings_changed_later_count_for_later_loads(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkeep.runtime.progress.DELAY", 0)
    save({"w": jnp.ones(1 << 18)}, tmp_path)
    manager = AsyncCheckpointManager(verbose=True)
    manager.load(tmp_path, None)
    assert "loading" in capfd.readouterr().err
    manager.verbose = False
    manager.load(tmp_path, None)
    assert capfd.readouterr().err == ""
