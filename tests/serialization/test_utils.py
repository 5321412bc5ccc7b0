"""`shardkeep.serialization.utils`: names, sizes, grouping, gathering."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardkeep.runtime import progress
from shardkeep.serialization import AsyncCheckpointManager, utils
from support import Point, assert_same, mesh_of

P = PartitionSpec
Log = Callable[[], list[str]]


def _sharded(shape: tuple[int, ...] = (8, 2), dtype: Any = jnp.float32) -> jax.Array:
    whole = jnp.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return jax.device_put(whole, NamedSharding(mesh_of(8), P("a")))


def test_gather_functions_apply_to_all_to_none_or_by_key() -> None:
    state = {"a": _sharded(), "b": {"c": jnp.ones(2)}, "n": 3}
    gathered = utils.apply_gather_functions(state, True, False, False)
    assert type(gathered["a"]) is type(gathered["b"]["c"]) is np.ndarray
    assert_same(gathered["a"], np.asarray(state["a"]))
    assert gathered["n"] == 3
    assert utils.apply_gather_functions(state, False, False, False) is state
    for functions in ({"b": {"c": lambda x: x + 1}}, {"b.c": lambda x: x + 1}):
        result = utils.apply_gather_functions(state, functions, True, False)
        assert_same(result["b"]["c"], jnp.full(2, 2.0))
        assert result["a"] is state["a"]


@pytest.mark.parametrize("state", [Point(jnp.ones(2), [1]), {"x.y": jnp.ones(2)}, [jnp.ones(2)], {"d": {}, "n": None}])
def test_gathering_keeps_the_structure(state: Any) -> None:
    gathered = utils.apply_gather_functions(state, True, True, False)
    assert jax.tree.structure(gathered) == jax.tree.structure(state)


def test_a_missing_gather_function_is_allowed_or_a_key_error() -> None:
    state = {"a": jnp.ones(2), "b": jnp.ones(2)}
    assert utils.apply_gather_functions(state, {"a": lambda x: x}, True, False)["b"] is state["b"]
    with pytest.raises(KeyError, match="no gather function for 'b'; gather_fns has a"):
        utils.apply_gather_functions(state, {"a": lambda x: x}, False, False)


def test_verbose_shows_that_gathering_goes_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 0)
    utils.apply_gather_functions({"a": jnp.ones(1 << 18)}, True, True, False)
    assert capfd.readouterr().err == ""
    utils.apply_gather_functions({"a": jnp.ones(1 << 18)}, True, True, True)
    assert "gathering" in capfd.readouterr().err


def test_a_broadcast_lands_on_the_target_or_on_all_devices() -> None:
    tensor = jnp.arange(64.0).reshape(16, 4)
    everywhere = utils.broadcast_tensor(tensor, 1 << 20)
    assert everywhere.sharding.is_fully_replicated
    assert everywhere.sharding.device_set == set(jax.devices())
    assert_same(everywhere, tensor)
    target = NamedSharding(mesh_of(2, 4), P("a", "b"))
    for limit in (1, 16, 100, 1 << 20):
        placed = utils.broadcast_tensor(tensor, limit, target)
        assert placed.sharding == target
        assert_same(placed, tensor)


@pytest.mark.parametrize("value", [jnp.float32(3), jnp.zeros((0, 3)), jnp.arange(3).astype(jnp.int4)])
def test_a_broadcast_takes_any_shape_and_dtype(value: Any) -> None:
    assert_same(utils.broadcast_tensor(value, 8, SingleDeviceSharding(jax.devices()[1])), value)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_broadcast_limit_must_be_positive(limit: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        utils.broadcast_tensor(jnp.ones(2), limit)


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    limit=st.integers(1, 400),
    dtype=st.sampled_from(["float32", "int8", "bfloat16", "int4"]),
)
def test_pieces_along_the_first_axis_stay_below_the_limit(shape: list[int], limit: int, dtype: str) -> None:
    """Unless one row is larger already; put together they are the tensor."""
    tensor = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    pieces = utils.chunk_tensor_by_memory(tensor, limit)
    assert all(piece.nbytes <= limit or len(piece) == 1 for piece in pieces)
    assert_same(np.concatenate(pieces), tensor)


def test_a_piece_limit_must_be_positive_and_a_scalar_is_one_piece() -> None:
    for limit in (0, -5):
        with pytest.raises(ValueError, match="must be positive"):
            utils.chunk_tensor_by_memory(jnp.ones(2), limit)
    (piece,) = utils.chunk_tensor_by_memory(jnp.float32(3), 1)
    assert_same(piece, jnp.float32(3))
    assert [len(p) for p in utils.chunk_tensor_by_memory(_sharded(), 24)] == [3, 3, 2]


def test_files_are_named_as_hugging_face_names_them() -> None:
    assert utils.shard_filename("/x/model", 1, 4) == "/x/model-00001-of-00004.safetensors"
    assert utils.shard_filename("/x/model", 12, 34) == "/x/model-00012-of-00034.safetensors"
    assert utils.index_filename("/x/model") == "/x/model.safetensors.index.json"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00004.safetensors", "model"]
)
def test_the_base_of_a_file_name(name: str) -> None:
    assert utils.derive_base_prefix_from_path(f"/x/{name}") == "/x/model"
    assert utils.derive_base_prefix_from_path(f"gs://b/{name}") == "gs://b/model"
    assert utils.derive_base_prefix_from_path(name) == "model"


def test_a_size_is_estimated_without_touching_data() -> None:
    """Sub-byte types count one byte per element, which is what they take on a host."""
    deleted = jnp.ones((3, 5))
    deleted.delete()
    assert utils.estimate_array_nbytes(deleted) == 60
    assert utils.estimate_array_nbytes(jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.bfloat16)) == 1 << 41
    for dtype in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn"):
        assert utils.estimate_array_nbytes(jnp.zeros(10).astype(dtype)) == 10
    assert utils.estimate_array_nbytes(np.zeros((0, 3))) == 0
    assert utils.estimate_array_nbytes(np.float64(1)) == 8
    assert utils.estimate_array_nbytes(3) == 8
    key = jax.random.key(0)
    assert utils.estimate_array_nbytes(key) == jax.random.key_data(key).nbytes


def test_available_memory_is_within_the_machine_and_its_limits() -> None:
    found = utils.estimate_available_memory()
    assert 0 < found <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = Path(name).read_text().strip() if Path(name).exists() else "max"
        assert limit == "max" or found <= int(limit)


def test_a_state_is_flattened_by_dotted_keys() -> None:
    x = jnp.ones(2)
    assert utils.flatten_for_broadcast({"a": {"b": x}, "l": [1, (2,)], "c.d": 3}) == {
        "a.b": x,
        "l.0": 1,
        "l.1.0": 2,
        "c.d": 3,
    }
    assert utils.flatten_for_broadcast({}) == {}
    assert sorted(utils.flatten_for_broadcast({"a.b": 1, "a": {"b": 2}}).values()) == [1, 2]


def _sized(**sizes: int) -> dict[str, Any]:
    return {name.replace("_", "."): jax.ShapeDtypeStruct((n,), jnp.int8) for name, n in sizes.items()}


def test_groups_keep_order_and_limit() -> None:
    state = _sized(a=4, b=4, c=3, big=100, d=1, e=9)
    assert utils.group_keys_by_shard_size(state, 8) == [["a", "b"], ["c"], ["big"], ["d"], ["e"]]
    assert utils.group_keys_by_shard_size(state, 10) == [["a", "b"], ["c"], ["big"], ["d", "e"]]
    assert utils.group_keys_by_shard_size(state, 1000) == [list(state)]
    assert utils.group_keys_by_shard_size({}, 8) == []


@given(st.dictionaries(st.text("abc.", min_size=1), st.integers(0, 50), max_size=12), st.integers(1, 60))
def test_no_group_is_above_the_limit_unless_one_array_is(sizes: dict[str, int], limit: int) -> None:
    state = {name: jax.ShapeDtypeStruct((n,), jnp.int8) for name, n in sizes.items()}
    groups = utils.group_keys_by_shard_size(state, limit)
    assert [key for group in groups for key in group] == list(state)
    assert all(len(g) == 1 or sum(sizes[k] for k in g) <= limit for g in groups)
    layout = utils.optimize_shard_layout(state, limit)
    assert sorted(key for group in layout for key in group) == sorted(state)
    assert all(len(g) == 1 or sum(sizes[k] for k in g) <= limit for g in layout)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_shard_size_must_be_positive(limit: int) -> None:
    for function in (utils.group_keys_by_shard_size, utils.optimize_shard_layout):
        with pytest.raises(ValueError, match="must be positive"):
            function({}, limit)


def test_a_layout_keeps_families_together_and_the_limit() -> None:
    """Related tensors in one group, in load order: layer 2 before layer 10."""
    state = _sized(l10_w=3, l10_b=1, l2_w=3, l2_b=1, head=4)
    families = [["head"], ["l2.b", "l2.w"], ["l10.b", "l10.w"]]
    assert utils.optimize_shard_layout(state, 4) == families
    assert utils.optimize_shard_layout(state, 8) == [[*families[0], *families[1]], families[2]]
    assert utils.optimize_shard_layout(state, 100) == [[key for family in families for key in family]]
    assert utils.optimize_shard_layout(state, 3) == [["head"], ["l2.b"], ["l2.w"], ["l10.b"], ["l10.w"]]
    assert utils.optimize_shard_layout({}, 8) == []
    nested = {"layers": [{"w": np.ones(1)} for _ in range(11)], "step": 3}
    (only,) = utils.optimize_shard_layout(nested, 1 << 20)
    assert only == [*(f"layers.{i}.w" for i in range(11)), "step"]


class Stands:
    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


def test_gcs_paths_are_recognised_and_taken_apart() -> None:
    for make in (str, Stands):
        assert utils.is_gcs_path(make("gs://bucket/a/b"))
        assert utils.parse_gcs_path(make("gs://bucket/a/b")) == ("bucket", "a/b")
        assert utils.parse_gcs_path(make("gs://bucket")) == utils.parse_gcs_path(make("gs://bucket/")) == ("bucket", "")
        for other in ("/gs://x", "s3://bucket/x", "gcs/x", "", "file:///x"):
            assert not utils.is_gcs_path(make(other))
            with pytest.raises(ValueError, match="not a Google Cloud Storage path"):
                utils.parse_gcs_path(make(other))
    with pytest.raises(ValueError, match="not a Google Cloud Storage path"):
        utils.parse_gcs_path("gs://")
    assert not utils.is_gcs_path(Path("/x"))


@pytest.fixture
def handle(tmp_path: Path) -> Any:
    safetensors.flax.save_file({"w": jnp.arange(8.0), "i": jnp.arange(3)}, tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", framework="flax") as opened:
        yield opened


def test_one_tensor_goes_through_function_callback_and_cast(handle: Any) -> None:
    assert_same(utils.read_process_array("w", None, False, handle), ("w", jnp.arange(8.0), 0))
    seen: list[Any] = []

    def callback(array: Any, key: str) -> Any:
        seen.append((key, array.dtype))
        return array * 2

    key, array, missing = utils.read_process_array("w", {"w": lambda x: x + 1}, False, handle, callback, "bf16")
    assert (key, missing, seen) == ("w", 0, [("w", jnp.float32)])
    assert_same(array, ((jnp.arange(8.0) + 1) * 2).astype(jnp.bfloat16))


def test_a_shard_function_may_be_a_sharding_and_nested(handle: Any) -> None:
    sharding = NamedSharding(mesh_of(8), P("a"))
    for given_ in (sharding, lambda x: jax.device_put(x, sharding), lambda x: sharding):
        assert utils.read_process_array("w", {"w": given_}, False, handle)[1].sharding == sharding


def test_a_missing_shard_function_counts_or_is_a_key_error(handle: Any) -> None:
    _, array, missing = utils.read_process_array("w", {"i": lambda x: x}, True, handle)
    assert missing == 1
    assert_same(array, jnp.arange(8.0))
    with pytest.raises(KeyError, match="no shard function for 'w'; shard_fns has i"):
        utils.read_process_array("w", {"i": lambda x: x}, False, handle)


def test_a_cast_stays_within_its_kind(handle: Any) -> None:
    assert utils.read_process_array("i", None, False, handle, dtype="bf16")[1].dtype == jnp.int32
    assert utils.read_process_array("i", None, False, handle, dtype=jnp.int8)[1].dtype == jnp.int8
    with pytest.raises(ValueError, match="unknown dtype 'no'"):
        utils.read_process_array("i", None, False, handle, dtype="no")


def test_a_tensor_is_read_through_whatever_has_get_tensor() -> None:
    class Zeros:
        def get_tensor(self, key: str) -> Any:
            return jnp.zeros(len(key))

    assert utils.read_process_array("abc", None, False, Zeros())[1].shape == (3,)


@pytest.mark.parametrize("spec", [P(), P("a"), P("b", "a"), P(None, ("a", "b"))])
def test_reshard_really_reshards(spec: Any) -> None:
    target = NamedSharding(mesh_of(2, 4), spec)
    for source in (_sharded((8, 16)), jnp.ones((8, 16)), np.ones((8, 16), np.float32)):
        moved = utils.reshard(source, target)
        assert moved.sharding == target
        assert_same(moved, jnp.asarray(source))


def test_to_host_replicates_on_the_mesh_or_goes_to_the_cpu() -> None:
    for mesh in (mesh_of(8), mesh_of(2, 2)):
        gathered = utils.to_host(_sharded(), None, mesh, False)
        assert gathered.sharding == NamedSharding(mesh, P())
        assert_same(gathered, jnp.asarray(np.asarray(_sharded())))
        offloaded = utils.to_host(_sharded(), None, mesh, True)
        assert isinstance(offloaded, jax.Array)
        assert offloaded.sharding == SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        assert_same(offloaded, gathered)


def test_floats_are_cast_on_the_way_to_the_host() -> None:
    mesh = mesh_of(8)
    for offload in (False, True):
        assert utils.to_host(_sharded(), "bf16", mesh, offload).dtype == jnp.bfloat16
        assert utils.to_host(_sharded(), jnp.float16, mesh, offload).dtype == jnp.float16
        assert utils.to_host(_sharded(), None, mesh, offload).dtype == jnp.float32
        assert utils.to_host(_sharded(dtype=jnp.int32), "bf16", mesh, offload).dtype == jnp.int32
        assert utils.to_host(jnp.ones(2, jnp.complex64), "bf16", mesh, offload).dtype == jnp.complex64
    for wrong in ("no", "int8"):
        with pytest.raises(ValueError, match="dtype"):
            utils.to_host(_sharded(), wrong, mesh, False)


def test_to_host_takes_numpy_arrays_and_leaves_the_rest() -> None:
    mesh = mesh_of(8)
    assert utils.to_host(np.ones(2, np.float32), None, mesh, False).sharding == NamedSharding(mesh, P())
    assert utils.to_host("text", "bf16", mesh, True) == "text"


def test_nothing_is_truncated_to_32_bits(logged: Log) -> None:
    """What JAX would truncate stays NumPy, and a warning says how to have it on devices."""
    mesh = mesh_of(8)
    for wide in (np.arange(2**40, 2**40 + 3), np.array([1e300])):
        kept = utils.to_host(wide, None, mesh, True)
        assert_same(kept, wide)
        assert_same(utils.broadcast_tensor(wide, 8), wide)
        assert_same(utils.reshard(wide, NamedSharding(mesh, P())), wide)
        assert "".join(logged()).count("jax_enable_x64") == 3
    doubled = utils.to_host(jnp.float32([0.1]), "fp64", mesh, False)
    assert_same(doubled, np.float32([0.1]).astype(np.float64))


def test_the_checksum_of_a_gathered_array_is_that_of_its_bytes() -> None:
    array = _sharded()
    expected = hashlib.sha256(np.asarray(array).tobytes()).hexdigest()
    assert AsyncCheckpointManager.compute_checksum(array) == expected
    assert AsyncCheckpointManager.compute_checksum(np.asfortranarray(np.asarray(array))) == expected
