"""Checkpoints that real eFormer wrote: loaded to the last bit, refused where they are broken, adopted by our saves."""

import base64
import datetime
import json
import os
import pickle
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from shardkeep.serialization import AsyncCheckpointManager, tree_deserialize_leaves, tree_serialize_leaves
from shardkeep.serialization.sharding_utils import create_sharding_tree_from_index
from support import Dense, Keyed, Point, Unkeyed, assert_same, bits, mesh_of, run_python

P = PartitionSpec
Log = Callable[[], list[str]]
Copy = Callable[[str], Path]
FIXTURES = Path(__file__).parents[1] / "fixtures" / "eformer"
MESH = mesh_of(8)

PLAIN = ["ts_plain", "ts_dtypes", "ts_validation_checksums", "index_v1_0"]
PREFIXED = ["ts_two_prefixes", "index_v2_0"]
PYTREES = ["pytree_builtins", "pytree_optax", "pytree_sharded_2x4"]
SAFETENSORS = ["safetensors_single", "safetensors_sharded", "safetensors_fp8"]
BROKEN = ["broken_bitflip", "broken_killed_mid_save", "broken_truncated_chunk"]


def expected(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "expected.json").read_text())


def where(name: str) -> Path:
    return FIXTURES / name / expected(name)["path"]


def arrays(name: str) -> dict[str, np.ndarray]:
    """What a fixture must load to, by key."""
    stored = np.load(FIXTURES / name / "expected.npz")
    found = {}
    for key, entry in expected(name)["arrays"].items():
        dtype = np.dtype(getattr(ml_dtypes, entry["dtype"], entry["dtype"]))
        found[key] = stored[entry["npz"]].view(dtype).reshape(entry["shape"])
    return found


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name, child in tree.items() for k, v in flat(child, f"{prefix}.{name}".lstrip(".")).items()}


def assert_arrays(tree: Any, wanted: dict[str, np.ndarray]) -> None:
    found = flat(tree)
    assert set(found) == set(wanted)
    for key, array in wanted.items():
        assert found[key].dtype == array.dtype, key
        assert found[key].shape == array.shape, key
        assert bits(found[key]) == bits(array), key


def of_prefix(name: str, prefix: str) -> dict[str, np.ndarray]:
    return {k.partition("|")[2]: v for k, v in arrays(name).items() if k.partition("|")[0] == prefix}


def test_every_fixture_is_used_here() -> None:
    used = {*PLAIN, *PREFIXED, *PYTREES, *SAFETENSORS, *BROKEN, "checkpointer_runs"}
    assert used == {p.name for p in FIXTURES.iterdir()}


@pytest.mark.parametrize("name", [*PLAIN, *SAFETENSORS])
def test_a_plain_checkpoint_loads_to_the_last_bit(name: str, manager: AsyncCheckpointManager, logged: Log) -> None:
    wanted = arrays(name)
    assert_arrays(manager.load(where(name), None)[0], wanted)
    assert_arrays(manager.load(where(name), MESH)[0], wanted)
    assert_arrays(manager.load_tree_parallel(where(name))[0], wanted)
    assert_arrays(tree_deserialize_leaves(where(name), None), wanted)
    assert_arrays(shardkeep.load(where(name)), wanted)
    assert logged() == []


@pytest.mark.parametrize("name", PREFIXED)
def test_each_prefix_loads_to_the_last_bit(name: str, manager: AsyncCheckpointManager) -> None:
    for prefix in ("model", "optimizer"):
        wanted = of_prefix(name, prefix)
        assert_arrays(manager.load(where(name), None, prefix=prefix)[0], wanted)
        assert_arrays(tree_deserialize_leaves(where(name), MESH, prefix=prefix), wanted)
        assert_arrays(manager.load_pytree(where(name), None, prefix=prefix)[0], wanted)
        assert_arrays(shardkeep.load(where(name), prefix=prefix), wanted)
        tree = create_sharding_tree_from_index(where(name), MESH, prefix)
        assert set(flat(tree)) == set(wanted)
    with pytest.raises(ValueError, match="one of 'model', 'optimizer'"):
        manager.load(where(name), None)


def test_an_index_of_version_1_knows_no_prefixes_so_one_is_a_path(manager: AsyncCheckpointManager) -> None:
    wanted = {"w": arrays("index_v1_0")["enc.w"]}
    assert_arrays(manager.load(where("index_v1_0"), None, prefix="enc")[0], wanted)
    assert_arrays(tree_deserialize_leaves(where("index_v1_0"), MESH, prefix="enc"), wanted)
    with pytest.raises(ValueError, match="no tree with prefix 'dec'"):
        manager.load(where("index_v1_0"), None, prefix="dec")


def test_the_metadata_of_a_save_is_returned(manager: AsyncCheckpointManager) -> None:
    metadata = manager.load(where("ts_plain"), None)[1]
    assert metadata["custom_metadata"] == expected("ts_plain")["metadata_custom"]
    assert metadata["version"] == "0.0.101"
    metadata = manager.load(where("ts_two_prefixes"), None, prefix="optimizer")[1]
    assert metadata["custom_metadata"] == {"for": "optimizer"}


def test_json_in_a_safetensors_header_is_decoded(manager: AsyncCheckpointManager) -> None:
    metadata = manager.load(where("safetensors_single"), None)[1]
    assert metadata["custom_metadata"] == {"epoch": 3}
    assert (metadata["checksum"], metadata["array_metadata"], metadata["framework_version"]) == ({}, {}, None)
    assert metadata["version"] == "0.0.101"


@pytest.mark.parametrize(
    "name", ["", "model", "model.safetensors", "model.safetensors.index.json", "model-00002-of-00002.safetensors"]
)
def test_a_sharded_file_is_found_by_any_of_its_names(name: str, manager: AsyncCheckpointManager) -> None:
    wanted = arrays("safetensors_sharded")
    assert_arrays(manager.load(FIXTURES / "safetensors_sharded" / name, None)[0], wanted)
    assert_arrays(manager.load_tree_parallel(FIXTURES / "safetensors_sharded" / name)[0], wanted)


def test_a_path_to_the_index_names_the_checkpoint(manager: AsyncCheckpointManager) -> None:
    assert manager.is_tensorstore(where("ts_plain") / "tensorstore_index.json")
    assert manager.is_tensorstore(where("pytree_optax"))
    assert not manager.is_tensorstore(where("safetensors_single"))
    assert_arrays(manager.load(where("ts_plain") / "tensorstore_index.json", None)[0], arrays("ts_plain"))


# --- structures


def _marked(tree: Any, wanted: dict[str, np.ndarray]) -> Any:
    """`tree` of expected.json with its marks resolved."""
    if isinstance(tree, str) and tree.startswith("@"):
        return jnp.asarray(wanted[tree[1:]])
    if isinstance(tree, list):
        children = [_marked(child, wanted) for child in tree]
        return tuple(children[1:]) if children[:1] == ["TUPLE"] else children
    if isinstance(tree, dict):
        if "INTKEYS" in tree:
            return {int(k): _marked(v, wanted) for k, v in tree["INTKEYS"].items()}
        return {k: _marked(v, wanted) for k, v in tree.items()}
    return tree


def _same_as_dicts_sorted(tree: Any) -> Any:
    """JAX, and so eFormer's structure, has dict keys in sorted order."""
    if isinstance(tree, dict):
        return {k: _same_as_dicts_sorted(tree[k]) for k in sorted(tree)}
    return type(tree)(_same_as_dicts_sorted(x) for x in tree) if isinstance(tree, list | tuple) else tree


def test_a_structure_of_builtins_comes_back_as_it_was(manager: AsyncCheckpointManager) -> None:
    wanted = _same_as_dicts_sorted(_marked(expected("pytree_builtins")["tree"], arrays("pytree_builtins")))
    tree, extras = manager.load_pytree(where("pytree_builtins"), None, prefix="state")
    assert_same(tree, wanted)
    assert extras == expected("pytree_builtins")["returned_metadata"]
    assert_same(shardkeep.load(where("pytree_builtins")), wanted)


def test_a_structure_loads_as_nested_dicts_too(manager: AsyncCheckpointManager) -> None:
    loaded, metadata = manager.load(where("pytree_builtins"), None)
    found = {k: v for k, v in flat(loaded).items() if hasattr(v, "dtype")}
    wanted = {k.removeprefix("state."): v for k, v in arrays("pytree_builtins").items()}
    assert {k: bits(v) for k, v in found.items()} == {k: bits(v) for k, v in wanted.items()}
    assert loaded["step"] == 100
    assert metadata["custom_metadata"] == {"step": 100, "who": "fixture"}


def test_an_optax_state_comes_back_as_its_own_classes(manager: AsyncCheckpointManager, logged: Log) -> None:
    wanted = arrays("pytree_optax")
    state, _ = manager.load_pytree(where("pytree_optax"), None, prefix="tx")
    adam = optax.ScaleByAdamState(
        count=jnp.asarray(wanted["tx.0.count"]),
        mu={k: jnp.asarray(wanted[f"tx.0.mu.{k}"]) for k in "bw"},
        nu={k: jnp.asarray(wanted[f"tx.0.nu.{k}"]) for k in "bw"},
    )
    assert_same(state, (adam, optax.EmptyState(), optax.EmptyState()))
    parameters = {k: jnp.asarray(wanted[f"model.{k}"]) for k in "bw"}
    assert_same(manager.load_pytree(where("pytree_optax"), MESH, prefix="model")[0], parameters)
    template = optax.adamw(1e-3).init(parameters)
    restored, _ = manager.load_pytree(where("pytree_optax"), None, prefix="tx", template=template)
    assert_same(restored, state)
    assert logged() == []


def test_without_optax_imported_nothing_is_imported_and_names_stay() -> None:
    """Namedtuples of the same shape take the place of its classes."""
    printed = run_python(
        f"import sys; tree = shardkeep.load({str(where('pytree_optax'))!r}, prefix='tx')\n"
        "print('optax' in sys.modules, type(tree[0]).__name__, tree[0].mu['b'].shape, tree[0].count.dtype)"
    )
    assert printed.split() == ["False", "ScaleByAdamState", "(2,)", "int32"]


def test_a_tree_saved_on_eight_devices_loads_on_any_mesh(manager: AsyncCheckpointManager) -> None:
    wanted = arrays("pytree_sharded_2x4")
    tree, _ = manager.load_pytree(where("pytree_sharded_2x4"), None, prefix="model")
    assert_same(tree, {"blk": [jnp.asarray(wanted["model.blk.0"]), jnp.asarray(wanted["model.blk.1"])], "n": 1})
    for mesh, rules in ((mesh_of(2, 4), [(".*", P("a"))]), (mesh_of(4, 2), [("0", P("b", "a")), ("1", P("a"))])):
        tree, _ = manager.load_pytree(where("pytree_sharded_2x4"), mesh, prefix="model", partition_rules=rules)
        for number, array in enumerate(tree["blk"]):
            assert array.sharding == NamedSharding(mesh, rules[min(number, len(rules) - 1)][1])
            assert bits(array) == bits(wanted[f"model.blk.{number}"])


def test_the_directory_of_runs_tells_where_its_checkpoints_are(manager: AsyncCheckpointManager) -> None:
    base = where("checkpointer_runs")
    wanted = arrays("checkpointer_runs")
    for run in ("run-10", "run-20", "run-25"):
        for tree, _ in (manager.load_pytree(base / run, None, prefix="model"), manager.load(base / run, None)):
            assert isinstance(tree.pop("n"), int)
            assert_arrays(tree, {"w": wanted[f"{run}|model.w"]})
    with pytest.raises(FileNotFoundError, match="the newest, .*run-25$"):
        manager.load(base, None)


def _with_structure(path: Path, tree: Any, prefix: str = "state") -> None:
    """Give a checkpoint the structure file that eFormer writes for a tree; arrays are taken from what is there."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    paths = [p for p, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)[0]]
    keys = [".".join([prefix, *(str(k).strip("[].'") for k in p)]) for p in paths]
    arrays_at = [hasattr(leaf, "shape") for leaf in leaves]
    structure = {
        "prefix": prefix,
        "treedef_b64": base64.b64encode(pickle.dumps(treedef)).decode(),
        "leaf_keys_full": keys,
        "arr_mask": arrays_at,
        "array_relpaths": ["state/z"] * sum(arrays_at),
        "nonarray_payload": {
            str(i): base64.b64encode(pickle.dumps(x)).decode() for i, x in enumerate(leaves) if not arrays_at[i]
        },
    }
    (path / f"{prefix}_structure.json").write_text(json.dumps(structure))


STRUCTURES: dict[str, Callable[[Any], Any]] = {
    "ordered dict": lambda x: OrderedDict(b=x, a=[x]),
    "defaultdict": lambda x: {"d": defaultdict(list, {"z": x})},
    "keyed": lambda x: Keyed(x, {"deep": x}, tag=["plain", 1]),
    "unkeyed": lambda x: Unkeyed([x, (x, None)], tag={"n": 1}),
    "dataclass": lambda x: [Dense(x, None), Dense({"k": x}, 3, name="other")],
    "namedtuple": lambda x: Point(x, Point(1, None)),
    "tuple keys": lambda x: {(0, 5): x, (1, 2): x},
    "names with dots": lambda x: {"a.b": x, "c": {"d.e": 1}},
    "scalars": lambda x: {"a": 1, "b": "s", "c": 2.5, "d": b"x", "e": 1 + 2j, "g": True, "n": None, "x": x},
    "bare": lambda x: x,
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("adopted", [True, False])
def test_structures_with_plain_aux_data_come_back_as_themselves(
    name: str, adopted: bool, copy_of: Copy, manager: AsyncCheckpointManager, logged: Log
) -> None:
    """Registered classes of the program included; with and without a template."""
    path = copy_of("pytree_builtins") / "ckpt"
    array = jnp.asarray(arrays("pytree_builtins")["state.z"])
    tree = STRUCTURES[name](array)
    _with_structure(path, tree)
    if adopted:
        manager.save({"w": array}, path, MESH, prefix="more")
    assert_same(manager.load_pytree(path, None, prefix="state")[0], tree)
    assert_same(manager.load_pytree(path, None, prefix="state", template=tree)[0], tree)
    assert logged() == []


@pytest.mark.parametrize("adopted", [True, False])
def test_a_leaf_that_is_no_data_has_a_stand_in(
    adopted: bool, copy_of: Copy, manager: AsyncCheckpointManager, logged: Log
) -> None:
    """An object that eFormer pickled; what it was is told, and nothing of it is run."""
    path = copy_of("pytree_builtins") / "ckpt"
    array = jnp.asarray(arrays("pytree_builtins")["state.z"])
    _with_structure(path, {"a": array, "day": datetime.date(2026, 1, 2), "set": {1, 2}, "z": array})
    if adopted:
        manager.save({"w": array}, path, MESH, prefix="more")
    loaded, _ = manager.load_pytree(path, None, prefix="state")
    assert "datetime:date" in " ".join(logged())
    assert_same({k: loaded[k] for k in "az"}, {"a": array, "z": array})
    assert loaded["day"] == shardkeep.OpaqueNode("datetime:date", {})
    assert isinstance(loaded["set"], shardkeep.OpaqueNode)
    assert_same(manager.load_pytree(path, None, prefix="state", template={"z": array})[0], {"z": array})


def test_a_class_with_other_aux_data_needs_a_template(
    copy_of: Copy, manager: AsyncCheckpointManager, logged: Log
) -> None:
    path = copy_of("pytree_builtins") / "ckpt"
    tree = Unkeyed([jnp.asarray(arrays("pytree_builtins")["state.z"])], tag=int)
    _with_structure(path, tree)
    assert isinstance(manager.load_pytree(path, None, prefix="state")[0], shardkeep.OpaqueNode)
    assert "Pass template=" in " ".join(logged())
    assert_same(manager.load_pytree(path, None, prefix="state", template=tree)[0], tree)


# --- what eFormer left half done


def test_a_save_killed_half_way_is_refused(manager: AsyncCheckpointManager) -> None:
    """eFormer gives zeros for the arrays that are not there."""
    for load in (manager.load, tree_deserialize_leaves):
        with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'l\d\d': its only chunk is missing"):
            load(where("broken_killed_mid_save"), None)
    with pytest.raises(FileNotFoundError, match="never finished, or files were lost"):
        shardkeep.load(where("broken_killed_mid_save"))


def test_a_truncated_chunk_is_refused(manager: AsyncCheckpointManager) -> None:
    with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w': .*w/0.0 is damaged"):
        manager.load(where("broken_truncated_chunk"), None)
    with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w': .*w/0.0 is damaged"):
        shardkeep.load(where("broken_truncated_chunk"))


@pytest.mark.parametrize("name", ["broken_killed_mid_save", "broken_truncated_chunk"])
def test_verify_tells_what_is_broken(name: str) -> None:
    report = shardkeep.verify(where(name))
    assert not report.ok
    assert any(problem.leaf in arrays(name) for problem in report.problems)


def test_a_flipped_bit_is_found_where_a_checksum_was_recorded(manager: AsyncCheckpointManager) -> None:
    for load in (manager.load, AsyncCheckpointManager(enable_validation=True).load):
        validate = True if load == manager.load else None
        with pytest.raises(ValueError, match="leaf 'w' does not match the checksum recorded for it"):
            load(where("broken_bitflip"), None, validate=validate)
    with pytest.raises(shardkeep.IntegrityError, match="leaf 'w'"):
        manager.load_tree_parallel(where("broken_bitflip"), validate=True)


def test_recorded_checksums_are_checked_and_hold(manager: AsyncCheckpointManager, logged: Log) -> None:
    wanted = arrays("ts_validation_checksums")
    tree, metadata = manager.load(where("ts_validation_checksums"), None, validate=True)
    assert_arrays(tree, wanted)
    assert metadata["checksum"] == {k: manager.compute_checksum(v) for k, v in wanted.items()}
    assert logged() == []
    with pytest.raises(ValueError, match="nothing to validate against"):
        manager.load(where("ts_plain"), None, validate=True)


def test_one_record_for_several_prefixes_is_only_warned_about(
    copy_of: Copy, manager: AsyncCheckpointManager, logged: Log
) -> None:
    """eFormer's checksums carry no prefix, so the last writer wins."""
    path = copy_of("ts_two_prefixes") / "ckpt"
    record = json.loads((path / "checkpoint_metadata.json").read_text())
    bias = of_prefix("ts_two_prefixes", "model")["dense.bias"]
    record["checksum"] = {"count": "0" * 64, "dense.bias": manager.compute_checksum(bias)}
    (path / "checkpoint_metadata.json").write_text(json.dumps(record))
    tree, _ = manager.load(path, None, prefix="optimizer", validate=True)
    assert_arrays(tree, of_prefix("ts_two_prefixes", "optimizer"))
    assert "leaf 'count' does not match" in " ".join(logged())
    manager.load(path, None, prefix="model", validate=True)
    assert "no checksum is recorded for dense/kernel" in " ".join(logged())


@pytest.mark.parametrize("name", ["ts_plain", "ts_dtypes", "pytree_sharded_2x4"])
def test_a_chunk_that_was_deleted_is_missed(name: str, copy_of: Copy, manager: AsyncCheckpointManager) -> None:
    path = copy_of(name) / "ckpt"
    chunk = next(p for p in sorted(path.rglob("*")) if p.name in ("0.0", "1.0", "0") and p.is_file())
    chunk.unlink()
    with pytest.raises(FileNotFoundError, match="(chunks?) (is|are) missing"):
        manager.load(path, None)


def test_without_an_index_arrays_are_found_by_looking(
    copy_of: Copy, manager: AsyncCheckpointManager, logged: Log
) -> None:
    path = copy_of("ts_plain") / "ckpt"
    (path / "tensorstore_index.json").unlink()
    for load in (manager.load, tree_deserialize_leaves):
        found = load(path, None)
        assert_arrays(found[0] if isinstance(found, tuple) else found, arrays("ts_plain"))
        (message,) = logged()
        assert "has no tensorstore_index.json; a search found 5 zarr arrays" in message
    path = copy_of("ts_two_prefixes") / "ckpt"
    (path / "tensorstore_index.json").unlink()
    assert_arrays(tree_deserialize_leaves(path, None, prefix="model"), of_prefix("ts_two_prefixes", "model"))
    everything = {k.replace("|", "."): v for k, v in arrays("ts_two_prefixes").items()}
    assert_arrays(tree_deserialize_leaves(path, None), everything)


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ("{", "tensorstore_index.json is damaged"),
        ("[]", "does not contain a JSON object"),
        ('{"format": "other"}', "has the format 'other'; only 'tensorstore'"),
        ('{"arrays": []}', "has the format None"),
        ('{"format": "tensorstore", "arrays": [{}]}', "malformed"),
        ('{"format": "tensorstore", "arrays": 3}', "malformed"),
        ('{"format": "tensorstore", "prefixes": []}', "malformed"),
        ('{"format": "tensorstore", "prefixes": {"a": 3}}', "malformed"),
        ('{"format": "tensorstore", "arrays": [{"path": "absent"}]}', "absent/.zarray is missing"),
    ],
)
def test_a_bad_index_is_refused(document: str, match: str, copy_of: Copy, manager: AsyncCheckpointManager) -> None:
    path = copy_of("ts_plain") / "ckpt"
    (path / "tensorstore_index.json").write_text(document)
    for load in (manager.load, tree_deserialize_leaves):
        with pytest.raises(ValueError, match=match):
            load(path, None)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [4, 4]},
        {"chunks": [1, 3]},
        {"dtype": "<f8"},
        {"shape": [-4, 3]},
        {"chunks": [0, 3]},
        {"dtype": "|O"},
        {"shape": [2**40, 2**40]},
        {"dtype": 3},
        {"zarr_format": 3},
        {"order": "F", "filters": [{"id": "delta"}]},
    ],
)
def test_a_bad_description_of_an_array_is_refused(
    change: dict[str, Any], copy_of: Copy, manager: AsyncCheckpointManager
) -> None:
    path = copy_of("ts_plain") / "ckpt"
    described = json.loads((path / "w" / ".zarray").read_text())
    (path / "w" / ".zarray").write_text(json.dumps({**described, **change}))
    with pytest.raises(ValueError, match="w"):
        manager.load(path, None)


# --- hostile files


PATHS = ["../secret", "/etc", "a/../../secret", "./w", "w//x", "", ".", "..", "a\\..\\b", "\0", 3, None]


@pytest.mark.parametrize("path_in_index", PATHS)
@pytest.mark.parametrize("prefixed", [True, False])
def test_a_path_in_the_index_cannot_leave_the_checkpoint(
    path_in_index: Any, prefixed: bool, copy_of: Copy, manager: AsyncCheckpointManager
) -> None:
    path = copy_of("ts_plain") / "ckpt"
    shutil.copytree(path / "w", path.parent / "secret")
    entries = [{"path": path_in_index, "shape": [4, 3], "dtype": "float32"}]
    index = {"format": "tensorstore", **({"prefixes": {"p": entries}} if prefixed else {"arrays": entries})}
    (path / "tensorstore_index.json").write_text(json.dumps(index))
    for load in (manager.load, tree_deserialize_leaves):
        with pytest.raises(ValueError, match=r"file name|malformed"):
            load(path, None)
    with pytest.raises(ValueError, match=r"file name|malformed"):
        manager.save({"x": jnp.ones(2)}, path, MESH, prefix="more")


@pytest.mark.parametrize("prefix", ["../x", "/x", "a\nb"])
def test_a_prefix_in_the_index_cannot_leave_the_checkpoint(
    prefix: str, copy_of: Copy, manager: AsyncCheckpointManager
) -> None:
    path = copy_of("ts_plain") / "ckpt"
    (path / "tensorstore_index.json").write_text(json.dumps({"format": "tensorstore", "prefixes": {prefix: []}}))
    with pytest.raises(ValueError, match="prefix"):
        manager.load(path, None)


@pytest.mark.parametrize("relpath", ["../secret", "/etc", "state/../../secret", 3])
def test_a_path_in_a_structure_cannot_leave_the_checkpoint(
    relpath: Any, copy_of: Copy, manager: AsyncCheckpointManager
) -> None:
    path = copy_of("pytree_builtins") / "ckpt"
    structure = json.loads((path / "state_structure.json").read_text())
    structure["array_relpaths"][0] = relpath
    (path / "state_structure.json").write_text(json.dumps(structure))
    with pytest.raises(shardkeep.IntegrityError, match=r"file name|malformed"):
        manager.load_pytree(path, None, prefix="state")


class Runs:
    """Unpickled, it runs a command."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _payloads(marker: Path) -> dict[str, bytes]:
    code = f"open({str(marker)!r}, 'w')"
    return {
        "os.system": pickle.dumps(Runs(os.system, f"touch {marker}")),
        "exec": pickle.dumps(Runs(exec, code)),
        "eval": pickle.dumps(Runs(eval, code)),
        "open": pickle.dumps(Runs(open, str(marker), "w")),
        "import": b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.",
        "nested": pickle.dumps([1, {"x": Runs(os.mkdir, str(marker))}]),
        "build": b"cbuiltins\nobject\n)\x81}(S'x'\nS'y'\nu}b.",
        "dotted": pickle.dumps(Runs(Path.touch, marker)),
        "getattr": pickle.dumps(Runs(getattr, marker, "touch")),
        "truncated": pickle.dumps(Runs(os.system, f"touch {marker}"))[:-3],
        "persistent": b"Pabc\n.",
        "extension": b"\x82\x01.",
        "garbage": b"\x00\x01\x02",
        "empty": b"",
    }


@pytest.mark.parametrize("payload", _payloads(Path("x")))
@pytest.mark.parametrize("place", ["treedef", "leaf"])
def test_a_tampered_structure_runs_nothing(
    payload: str, place: str, copy_of: Copy, manager: AsyncCheckpointManager, tmp_path: Path
) -> None:
    path, marker = copy_of("pytree_builtins") / "ckpt", tmp_path / "marker"
    structure = json.loads((path / "state_structure.json").read_text())
    encoded = base64.b64encode(_payloads(marker)[payload]).decode()
    if place == "treedef":
        structure["treedef_b64"] = encoded
    else:
        structure["nonarray_payload"]["13"] = encoded
    (path / "state_structure.json").write_text(json.dumps(structure))
    for load in (lambda: manager.load_pytree(path, None, prefix="state")[0], lambda: manager.load(path, None)[0]):
        try:
            tree = load()
        except shardkeep.IntegrityError:
            continue
        assert place == "leaf"
        assert isinstance(tree.get("step"), shardkeep.OpaqueNode | None)  # nested dicts hold data only
    assert not marker.exists()


def _laughs(levels: int, innermost: Any = "ha") -> Any:
    """A tuple that takes 2**levels steps to look through, and next to nothing to pickle."""
    value = innermost
    for _ in range(levels):
        value = (value, value)
    return value


def _treedef(nodes: list[Any]) -> bytes:
    """A pickled PyTreeDef of these nodes, whether JAX could make one or not."""
    state = pickle.dumps((None, nodes), protocol=2)
    return b"cjaxlib._jax.pytree\nPyTreeDef\n)\x81" + state[2:-1] + b"b."


@pytest.mark.parametrize("place", ["leaf", "key", "depth"])
def test_a_structure_that_never_ends_is_refused_quickly(
    place: str, copy_of: Copy, manager: AsyncCheckpointManager
) -> None:
    path = copy_of("pytree_builtins") / "ckpt"
    structure = json.loads((path / "state_structure.json").read_text())
    if place == "leaf":
        structure["nonarray_payload"]["13"] = base64.b64encode(pickle.dumps(_laughs(200))).decode()
    else:
        structure |= {"leaf_keys_full": ["state.x"], "arr_mask": [True], "array_relpaths": ["state/z"]}
        leaf, unary = (0, 0, None, None, 1, 1), (4, 1, None, None, 1, 2)
        around = [(5, 1, [_laughs(200)], None, 1, 2)] if place == "key" else [unary] * 100_000
        structure["treedef_b64"] = base64.b64encode(_treedef([leaf, *around])).decode()
    (path / "state_structure.json").write_text(json.dumps(structure))
    if place == "leaf":
        assert isinstance(manager.load_pytree(path, None, prefix="state")[0]["step"], shardkeep.OpaqueNode)
    else:
        with pytest.raises(shardkeep.IntegrityError, match="state_structure"):
            manager.load_pytree(path, None, prefix="state")


def test_a_payload_works_against_a_real_unpickler(tmp_path: Path) -> None:
    """So the test above would notice."""
    for name in ("os.system", "exec", "open", "import"):
        marker = tmp_path / name
        pickle.loads(_payloads(marker)[name])
        assert marker.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"treedef_b64": "!"},
        {"treedef_b64": None},
        {"leaf_keys_full": []},
        {"arr_mask": [True]},
        {"array_relpaths": []},
        {"nonarray_payload": {}},
        {"prefix": None, "leaf_keys_full": None},
        {"extras": 3},
    ],
)
def test_a_malformed_structure_is_refused(
    change: dict[str, Any], copy_of: Copy, manager: AsyncCheckpointManager
) -> None:
    path = copy_of("pytree_builtins") / "ckpt"
    structure = json.loads((path / "state_structure.json").read_text())
    (path / "state_structure.json").write_text(json.dumps({**structure, **change}))
    with pytest.raises(shardkeep.IntegrityError, match=r"state_structure.json"):
        manager.load_pytree(path, None, prefix="state")


def _variants(document: Any) -> Iterator[Any]:
    """The document with each of its values, one at a time, replaced by something else."""
    for odd in (None, 3, -1, 1e300, "x", "../x", [], {}, [[]], True):
        if odd != document:
            yield odd
    if isinstance(document, dict):
        for key, value in document.items():
            yield {k: v for k, v in document.items() if k != key}
            for variant in _variants(value):
                yield {**document, key: variant}
    if isinstance(document, list):
        for number, value in enumerate(document[:2]):
            yield document[:number] + document[number + 1 :]
            for variant in _variants(value):
                yield [*document[:number], variant, *document[number + 1 :]]


@pytest.mark.parametrize(
    "document", ["tensorstore_index.json", "state_structure.json", "checkpoint_metadata.json", "state/z/.zarray"]
)
def test_whatever_a_document_says_it_is_loaded_or_refused(
    document: str, copy_of: Copy, manager: AsyncCheckpointManager
) -> None:
    """Never an error that is not ours, whichever value in it is replaced."""
    path = copy_of("pytree_builtins") / "ckpt"
    good = json.loads((path / document).read_text())
    refused = 0
    for variant in _variants(good):
        (path / document).write_text(json.dumps(variant))
        try:
            manager.load_pytree(path, None, prefix="state")
            manager.load(path, None)
        except shardkeep.ShardkeepError:
            refused += 1
    assert refused > 5


# --- saving into one of eFormer's directories


def test_a_save_adopts_the_trees_that_are_there(copy_of: Copy, manager: AsyncCheckpointManager) -> None:
    path = copy_of("ts_two_prefixes") / "ckpt"
    manager.save({"w": jnp.ones(2)}, path, MESH, prefix="ema", metadata={"for": "ema"})
    assert set(shardkeep.inspect(path).prefixes) == {"model", "optimizer", "ema"}
    for prefix in ("model", "optimizer"):
        assert_arrays(manager.load(path, None, prefix=prefix)[0], of_prefix("ts_two_prefixes", prefix))
    tree, metadata = manager.load(path, None, prefix="ema")
    assert_same(tree, {"w": jnp.ones(2)})
    assert metadata["custom_metadata"] == {"for": "ema"}
    index = json.loads((path / "tensorstore_index.json").read_text())
    assert set(index["prefixes"]) == {"model", "optimizer", "ema"}


def test_an_adopted_structure_keeps_its_form_and_extras(copy_of: Copy, manager: AsyncCheckpointManager) -> None:
    path = copy_of("pytree_builtins") / "ckpt"
    before = manager.load_pytree(path, None, prefix="state")
    manager.save_pytree({"w": jnp.ones(2)}, path, MESH, prefix="more")
    after = manager.load_pytree(path, None, prefix="state")
    assert_same(after[0], before[0])
    assert after[1] == before[1]
    path = copy_of("pytree_optax") / "ckpt"
    before = manager.load_pytree(path, None, prefix="tx")
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, prefix="more")
    assert_same(manager.load_pytree(path, None, prefix="tx")[0], before[0])


def test_an_adopted_tree_can_be_replaced(copy_of: Copy, manager: AsyncCheckpointManager) -> None:
    path = copy_of("ts_two_prefixes") / "ckpt"
    manager.save({"w": jnp.ones(2)}, path, MESH, prefix="model")
    assert_same(manager.load(path, None, prefix="model")[0], {"w": jnp.ones(2)})
    assert_arrays(manager.load(path, None, prefix="optimizer")[0], of_prefix("ts_two_prefixes", "optimizer"))
    assert not (path / "model" / "dense").exists()


def test_the_structure_of_a_replaced_tree_goes_with_it(copy_of: Copy, manager: AsyncCheckpointManager) -> None:
    """So that eFormer does not look for arrays by an old structure."""
    path = copy_of("pytree_optax") / "ckpt"
    manager.save_pytree({"w": jnp.ones(2)}, path, MESH, prefix="model")
    assert not (path / "model_structure.json").exists()
    assert (path / "tx_structure.json").exists()


def test_damage_to_an_adopted_tree_is_still_noticed(copy_of: Copy, manager: AsyncCheckpointManager) -> None:
    path = copy_of("ts_two_prefixes") / "ckpt"
    manager.save({"w": jnp.ones(2)}, path, MESH, prefix="ema")
    (path / "model" / "dense" / "bias" / "0").unlink()
    with pytest.raises(FileNotFoundError, match="model/dense/bias"):
        manager.load(path, None, prefix="model")
    assert_arrays(manager.load(path, None, prefix="optimizer")[0], of_prefix("ts_two_prefixes", "optimizer"))


def test_a_tree_without_prefix_is_adopted_too(copy_of: Copy, manager: AsyncCheckpointManager) -> None:
    path = copy_of("ts_plain") / "ckpt"
    manager.save({"w": jnp.ones(2)}, path, MESH, prefix="ema")
    assert_arrays(manager.load(path, None)[0], arrays("ts_plain"))
    assert manager.load(path, None)[1]["custom_metadata"] == expected("ts_plain")["metadata_custom"]
    assert_same(manager.load(path, None, prefix="ema")[0], {"w": jnp.ones(2)})


KILLED = """
import itertools, os, shutil, signal, sys
from signals import die_at_change
tree = {"w": np.arange(1000), "b": {"x": np.ones(3)}}
manager = shardkeep.serialization.AsyncCheckpointManager()
for k in itertools.count(FIRST, 2):
    path = f"PATH{k}"
    shutil.copytree("SOURCE", path)
    if os.fork() == 0:
        die_at_change(k, path)
        manager.save(tree, path, prefix=PREFIX)
        os._exit(0)
    _, status = os.wait()
    if status != signal.SIGKILL:
        print(k, status)
        break
"""


def _killed_saves(path: Path, prefix: str) -> list[Path]:
    """Save into copies of a checkpoint, each killed at a later file operation, until one comes to its end."""
    first = 0 if prefix == "model" else 1
    code = KILLED.replace("PATH", str(path)).replace("SOURCE", str(where("ts_two_prefixes")))
    code = code.replace("PREFIX", repr(prefix)).replace("FIRST", str(first))
    last, status = map(int, run_python("import shardkeep.serialization\n" + code).split())
    assert status == 0
    return [path.with_name(f"{path.name}{k}") for k in range(first, last + 1, 2)]


@pytest.mark.parametrize("prefix", ["ema", "model"])
def test_killed_saves_leave_what_was_there_loadable(
    prefix: str, tmp_path: Path, manager: AsyncCheckpointManager
) -> None:
    """Whenever the save dies: the old trees are there, and the saved one is the old or the new one, whole."""
    paths = _killed_saves(tmp_path / "c", prefix)
    assert len(paths) > 10
    new = {"w": np.arange(1000), "b": {"x": np.ones(3)}}
    outcomes = set()
    for number, path in enumerate(paths):
        if number % 4 == 0:
            manager.save({"after": jnp.ones(1)}, path, MESH, prefix="after")
        for old in {"model", "optimizer"} - {prefix}:
            assert_arrays(manager.load(path, None, prefix=old)[0], of_prefix("ts_two_prefixes", old))
        has_new = prefix in shardkeep.inspect(path).prefixes
        if has_new and "w" in (tree := shardkeep.load(path, prefix=prefix)):
            assert_same(tree, new)
            outcomes.add("new")
        else:
            if prefix == "model":
                assert_arrays(manager.load(path, None, prefix="model")[0], of_prefix("ts_two_prefixes", "model"))
            outcomes.add("old")
    assert outcomes == {"old", "new"}


@pytest.mark.parametrize("name", [*PLAIN, *PREFIXED, *PYTREES, *SAFETENSORS])
def test_looking_at_a_checkpoint_writes_nothing(name: str, copy_of: Copy, manager: AsyncCheckpointManager) -> None:
    path = copy_of(name)
    before = sorted((str(p), p.stat().st_mtime_ns) for p in path.rglob("*"))
    target = path / expected(name)["path"]
    for prefix in shardkeep.inspect(target).prefixes:
        jax.block_until_ready(shardkeep.load(target, prefix=prefix))
    shardkeep.verify(target)
    assert sorted((str(p), p.stat().st_mtime_ns) for p in path.rglob("*")) == before
